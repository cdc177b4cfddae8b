//! Operations recorded once and launched many times.
//!
//! A graph has a branch for every stream that took part. Branches run beside one another, as the
//! streams would have, and are ordered only by the marks recorded in them.

use super::event::EventState;
use super::operation::{Context, Operation};
use super::stream::{self, HostStream};
use crate::device::{Delays, Fault, GraphBackend, Stream, StreamBackend};
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
    /// Of the device, for the branches' own threads.
    delays: Option<Delays>,
    recording: Mutex<Recording>,
    ended: AtomicBool,
}

#[derive(Debug, Default)]
struct Recording {
    branches: Vec<Vec<Operation>>,
    // For each mark, its branch and how many operations preceded it there.
    marks: Vec<(usize, usize)>,
}

impl Session {
    pub(super) fn new(delays: Option<Delays>) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self {
            number: NEXT.fetch_add(1, Ordering::Relaxed),
            delays,
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

    /// Ends the capture. Fails where a branch has work that the first branch does not wait for.
    pub(super) fn finish(&self, fault: &Arc<Fault>) -> Result<Arc<GraphInner>> {
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
                .during("end a capture")
                .help("record an event in it and let the first stream wait for the event"));
            }
        }
        let branches = recording.branches.into_iter().enumerate();
        let branches = branches.map(|(branch, operations)| {
            // The first branch runs on the thread that launches.
            let stream = (branch > 0)
                .then(|| {
                    let number = self.number << 16 | branch as u64;
                    HostStream::start(number, fault.clone(), self.delays)
                })
                .transpose()?;
            Ok(Branch {
                operations: operations.into(),
                stream,
            })
        });
        let branches = branches.collect::<Result<_>>()?;
        Ok(Arc::new(GraphInner {
            branches,
            marks: recording.marks.len(),
            launching: Mutex::new(()),
        }))
    }
}

#[derive(Debug)]
struct Branch {
    operations: Arc<[Operation]>,
    stream: Option<Arc<HostStream>>,
}

#[derive(Debug)]
pub(super) struct GraphInner {
    branches: Vec<Branch>,
    marks: usize,
    launching: Mutex<()>,
}

impl GraphInner {
    /// Runs every branch once, on the thread of the stream that launched and on the branches' own.
    pub(super) fn run(&self, context: &Context) -> Result<()> {
        let _one_at_a_time = lock(&self.launching);
        let marks: Arc<[EventState]> = (0..self.marks).map(|_| EventState::default()).collect();
        let ends: Vec<_> = self
            .branches
            .iter()
            .skip(1)
            .map(|_| Arc::new(EventState::default()))
            .collect();
        for (branch, end) in self.branches.iter().skip(1).zip(&ends) {
            let (operations, marks) = (branch.operations.clone(), marks.clone());
            let run = Operation::Task(Arc::new(move |own: &Context| {
                run_branch(&own.within_graph(marks.clone()), &operations)
            }));
            if let Some(stream) = &branch.stream {
                stream.enqueue(run)?;
                stream.enqueue(Operation::Record {
                    event: end.clone(),
                    mark: 1,
                })?;
            }
        }
        let mut result = match self.branches.first() {
            Some(first) => run_branch(&context.within_graph(marks), &first.operations),
            None => Ok(()),
        };
        for (branch, end) in self.branches.iter().skip(1).zip(&ends) {
            result = result.and(end.wait(1, &context.fault));
            if let Some(stream) = &branch.stream {
                result = result.and(stream.check());
            }
        }
        result
    }
}

/// A branch that fails still makes its marks, so that the others end.
fn run_branch(context: &Context, operations: &[Operation]) -> Result<()> {
    let mut result = Ok(());
    for operation in operations {
        if result.is_ok() || matches!(operation, Operation::RecordInGraph(_)) {
            result = result.and(context.perform(operation));
        }
    }
    result
}

#[derive(Debug)]
pub(super) struct HostGraph(pub(super) Arc<GraphInner>);

impl GraphBackend for HostGraph {
    fn launch(&self, stream: &Stream) -> Result<()> {
        let stream = stream::from_dyn(stream)?;
        if stream.is_capturing()? {
            return Err(Error::new(
                crate::ErrorKind::Unsupported,
                "a graph cannot be launched into a capture",
            )
            .help("end the capture first"));
        }
        stream.enqueue(Operation::Launch(self.0.clone()))
    }

    fn operations(&self) -> usize {
        self.0
            .branches
            .iter()
            .map(|branch| branch.operations.len())
            .sum()
    }
}
