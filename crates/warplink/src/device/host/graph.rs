//! Operations recorded once and launched many times.
//!
//! A graph has a lane for every stream that took part. Lanes run beside one another, as the
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
    /// Of the device, for the lanes' own threads.
    delays: Option<Delays>,
    recording: Mutex<Recording>,
    ended: AtomicBool,
}

#[derive(Debug, Default)]
struct Recording {
    lanes: Vec<Vec<Operation>>,
    // For each mark, its lane and how many operations preceded it there.
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

    /// Adds a lane and gives its number.
    pub(super) fn join(&self) -> usize {
        let mut recording = lock(&self.recording);
        recording.lanes.push(Vec::new());
        recording.lanes.len() - 1
    }

    pub(super) fn push(&self, lane: usize, operation: Operation) {
        lock(&self.recording).lanes[lane].push(operation);
    }

    pub(super) fn mark(&self, lane: usize) -> usize {
        let recording = &mut *lock(&self.recording);
        let mark = recording.marks.len();
        recording.marks.push((lane, recording.lanes[lane].len()));
        recording.lanes[lane].push(Operation::RecordInGraph(mark));
        mark
    }

    /// Whether the capture is over, for the streams that took part.
    pub(super) fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// Ends the capture. Fails where a lane has work that the first lane does not wait for.
    pub(super) fn finish(&self, fault: &Arc<Fault>) -> Result<Arc<GraphInner>> {
        self.ended.store(true, Ordering::Release);
        let recording = std::mem::take(&mut *lock(&self.recording));
        let mut joined = vec![0; recording.lanes.len()];
        let mut open = vec![(0, 0..recording.lanes.first().map_or(0, Vec::len))];
        while let Some((lane, range)) = open.pop() {
            joined[lane] = joined[lane].max(range.end);
            for operation in &recording.lanes[lane][range] {
                if let Operation::WaitInGraph(mark) = operation {
                    let (from, position) = recording.marks[*mark];
                    if joined[from] < position {
                        open.push((from, joined[from]..position));
                    }
                }
            }
        }
        for (lane, operations) in recording.lanes.iter().enumerate() {
            if operations[joined[lane]..]
                .iter()
                .any(|operation| !matches!(operation, Operation::RecordInGraph(_)))
            {
                return Err(
                    Error::invalid("a stream that took part was not joined back")
                        .during("end a capture")
                        .help("record an event in it and let the first stream wait for that"),
                );
            }
        }
        let lanes = recording.lanes.into_iter().enumerate();
        let lanes = lanes.map(|(lane, operations)| {
            // The first lane runs on the thread that launches.
            let stream = (lane > 0)
                .then(|| {
                    let number = self.number << 16 | lane as u64;
                    HostStream::start(number, fault.clone(), self.delays)
                })
                .transpose()?;
            Ok(Lane {
                operations: operations.into(),
                stream,
            })
        });
        let lanes = lanes.collect::<Result<_>>()?;
        Ok(Arc::new(GraphInner {
            lanes,
            marks: recording.marks.len(),
            launching: Mutex::new(()),
        }))
    }
}

#[derive(Debug)]
struct Lane {
    operations: Arc<[Operation]>,
    stream: Option<Arc<HostStream>>,
}

#[derive(Debug)]
pub(super) struct GraphInner {
    lanes: Vec<Lane>,
    marks: usize,
    launching: Mutex<()>,
}

impl GraphInner {
    /// Runs every lane once, on the thread of the stream that launched and on the lanes' own.
    pub(super) fn run(&self, context: &Context) -> Result<()> {
        let _one_at_a_time = lock(&self.launching);
        let marks: Arc<[EventState]> = (0..self.marks).map(|_| EventState::default()).collect();
        let ends: Vec<_> = self
            .lanes
            .iter()
            .skip(1)
            .map(|_| Arc::new(EventState::default()))
            .collect();
        for (lane, end) in self.lanes.iter().skip(1).zip(&ends) {
            let (operations, marks) = (lane.operations.clone(), marks.clone());
            let run = Operation::Task(Arc::new(move |own: &Context| {
                run_lane(&own.within_graph(marks.clone()), &operations)
            }));
            if let Some(stream) = &lane.stream {
                stream.enqueue(run)?;
                stream.enqueue(Operation::Record {
                    event: end.clone(),
                    mark: 1,
                })?;
            }
        }
        let mut result = match self.lanes.first() {
            Some(first) => run_lane(&context.within_graph(marks), &first.operations),
            None => Ok(()),
        };
        for (lane, end) in self.lanes.iter().skip(1).zip(&ends) {
            result = result.and(end.wait(1, &context.fault));
            if let Some(stream) = &lane.stream {
                result = result.and(stream.check());
            }
        }
        result
    }
}

/// A lane that fails still makes its marks, so that the others end.
fn run_lane(context: &Context, operations: &[Operation]) -> Result<()> {
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
            ));
        }
        stream.enqueue(Operation::Launch(self.0.clone()))
    }

    fn operations(&self) -> usize {
        self.0.lanes.iter().map(|lane| lane.operations.len()).sum()
    }
}
