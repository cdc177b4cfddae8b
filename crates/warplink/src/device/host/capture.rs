//! Captures: recording operations instead of executing them.

use super::operation::HostOperation;
use crate::error::{Error, Result};
use crate::sync::lock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// An event recorded in a stream under capture.
#[derive(Clone, Debug)]
pub(super) struct CapturedMark {
    pub(super) session: Arc<Session>,
    pub(super) mark: usize,
}

/// A capture in progress, shared by the participating streams.
#[derive(Debug)]
pub(super) struct Session {
    number: u64,
    recording: Mutex<HostRecording>,
    ended: AtomicBool,
}

/// Recorded operations of each branch.
#[derive(Debug, Default)]
pub(super) struct HostRecording {
    pub(super) branches: Vec<Vec<HostOperation>>,
    /// For each event, its branch and the number of operations before it.
    pub(super) marks: Vec<(usize, usize)>,
}

impl Session {
    pub(super) fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self {
            // Relaxed: only uniqueness matters.
            number: NEXT.fetch_add(1, Ordering::Relaxed),
            recording: Mutex::default(),
            ended: AtomicBool::new(false),
        }
    }

    /// Unique number of the capture.
    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// Adds a branch and returns its index.
    pub(super) fn join(&self) -> usize {
        let mut recording = lock(&self.recording);
        recording.branches.push(Vec::new());
        recording.branches.len() - 1
    }

    pub(super) fn push(&self, branch: usize, operation: HostOperation) {
        lock(&self.recording).branches[branch].push(operation);
    }

    pub(super) fn mark(&self, branch: usize) -> usize {
        let recording = &mut *lock(&self.recording);
        let mark = recording.marks.len();
        recording
            .marks
            .push((branch, recording.branches[branch].len()));
        recording.branches[branch].push(HostOperation::RecordInGraph(mark));
        mark
    }

    /// Whether the capture has ended.
    pub(super) fn has_ended(&self) -> bool {
        // Acquire: pairs with `finish`, after which nothing may be recorded.
        self.ended.load(Ordering::Acquire)
    }

    /// Ends the capture and returns the recording. Fails if a branch has work that was not joined into the
    /// first branch.
    pub(super) fn finish(&self) -> Result<HostRecording> {
        // Before the recording is taken, so that no stream adds to an ended capture.
        self.ended.store(true, Ordering::Release);
        let recording = std::mem::take(&mut *lock(&self.recording));
        let mut joined = vec![0; recording.branches.len()];
        let mut open = vec![(0, 0..recording.branches.first().map_or(0, Vec::len))];
        while let Some((branch, range)) = open.pop() {
            joined[branch] = joined[branch].max(range.end);
            for operation in &recording.branches[branch][range] {
                if let HostOperation::WaitInGraph(mark) = operation {
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
                .any(|operation| !matches!(operation, HostOperation::RecordInGraph(_)))
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
