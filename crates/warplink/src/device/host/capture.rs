//! Recording operations instead of doing them.

use super::operation::Operation;
use crate::error::{Error, Result};
use crate::sync::lock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// A mark recorded in a stream that is being captured.
#[derive(Clone, Debug)]
pub(super) struct CapturedMark {
    pub(super) session: Arc<Session>,
    pub(super) mark: usize,
}

/// A capture under way, shared by the streams that take part.
#[derive(Debug)]
pub(super) struct Session {
    number: u64,
    recording: Mutex<Recording>,
    ended: AtomicBool,
}

/// What was recorded: the operations of each branch.
#[derive(Debug, Default)]
pub(super) struct Recording {
    pub(super) branches: Vec<Vec<Operation>>,
    /// For each mark, its branch and how many operations preceded it there.
    pub(super) marks: Vec<(usize, usize)>,
}

impl Session {
    pub(super) fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self {
            number: NEXT.fetch_add(1, Ordering::Relaxed),
            recording: Mutex::default(),
            ended: AtomicBool::new(false),
        }
    }

    /// Tells captures apart.
    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// Adds a branch and gives its number.
    pub(super) fn join(&self) -> usize {
        let mut recording = lock(&self.recording);
        recording.branches.push(Vec::new());
        recording.branches.len() - 1
    }

    pub(super) fn push(&self, branch: usize, operation: Operation) {
        lock(&self.recording).branches[branch].push(operation);
    }

    pub(super) fn mark(&self, branch: usize) -> usize {
        let recording = &mut *lock(&self.recording);
        let mark = recording.marks.len();
        recording
            .marks
            .push((branch, recording.branches[branch].len()));
        recording.branches[branch].push(Operation::RecordInGraph(mark));
        mark
    }

    /// Whether the capture is over, for the streams that took part.
    pub(super) fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// Ends the capture and gives what was recorded. Fails where a branch has work that the first
    /// branch does not wait for.
    pub(super) fn finish(&self) -> Result<Recording> {
        self.ended.store(true, Ordering::Release);
        let recording = std::mem::take(&mut *lock(&self.recording));
        let mut joined = vec![0; recording.branches.len()];
        let mut open = vec![(0, 0..recording.branches.first().map_or(0, Vec::len))];
        while let Some((branch, range)) = open.pop() {
            joined[branch] = joined[branch].max(range.end);
            for operation in &recording.branches[branch][range] {
                if let Operation::WaitInGraph(mark) = operation {
                    let (from, position) = recording.marks[*mark];
                    if joined[from] < position {
                        open.push((from, joined[from]..position));
                    }
                }
            }
        }
        for (branch, operations) in recording.branches.iter().enumerate() {
            if operations[joined[branch]..]
                .iter()
                .any(|operation| !matches!(operation, Operation::RecordInGraph(_)))
            {
                return Err(Error::invalid(
                    "a stream that took part in the capture was not joined back",
                )
                .with_operation("end a capture")
                .with_help("record an event in it and let the first stream wait for the event"));
            }
        }
        Ok(recording)
    }
}
