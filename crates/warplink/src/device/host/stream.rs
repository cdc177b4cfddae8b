//! Streams, executed in order by a worker thread, and their graphs.

use super::capture::{CapturedMark, Session};
use super::check_kind;
use super::event::{self, HostEvent, Recorded};
use super::graph::RecordedGraph;
use super::mark::EventState;
use super::operation::{Context, HostOperation};
use super::words::AwaitedWord;
use super::worker::Worker;
use crate::deadline::Deadline;
use crate::device::{
    Delays, DeviceSlice, Event, Fault, FaultSet, Graph, GraphBackend, KernelCopy, MemoryOp, Noted,
    PacketPart, Stream, StreamBackend, StreamOp, sequence_apart,
};
use crate::error::{Error, Result};
use crate::sync::lock;
use std::sync::{Arc, Mutex, MutexGuard};

#[derive(Debug)]
pub(crate) struct HostStream {
    number: u64,
    fault: Arc<Fault>,
    delays: Option<Delays>,
    worker: Worker,
    capture: Mutex<Option<Capture>>,
}

#[derive(Debug)]
struct Capture {
    session: Arc<Session>,
    branch: usize,
}

impl HostStream {
    pub(super) fn start(
        number: u64,
        fault: Arc<Fault>,
        delays: Option<Delays>,
    ) -> Result<Arc<Self>> {
        let worker = Worker::start(number, fault.clone(), delays)?;
        Ok(Arc::new(Self {
            number,
            fault,
            delays,
            worker,
            capture: Mutex::new(None),
        }))
    }

    /// Enqueues `operation`, or records it during a capture.
    pub(super) fn enqueue(&self, operation: HostOperation) -> Result<()> {
        self.check()?;
        if let Some(capture) = &*self.capture() {
            capture.session.push(capture.branch, operation);
            return Ok(());
        }
        self.worker.enqueue(operation)
    }

    /// The capture that this stream takes part in, unless it has ended.
    fn capture(&self) -> MutexGuard<'_, Option<Capture>> {
        // Look lazily, since another stream may end the capture in which this one takes part.
        let mut capture = lock(&self.capture);
        if capture
            .as_ref()
            .is_some_and(|capture| capture.session.has_ended())
        {
            *capture = None;
        }
        capture
    }

    /// Makes the stream fail when one of `faults` is raised. Hold the guard until the waits are enqueued.
    pub(super) fn depend_on<'a>(
        &self,
        faults: impl IntoIterator<Item = &'a Arc<Fault>>,
    ) -> Noted<'_> {
        self.worker.faults().add(faults)
    }

    fn check(&self) -> Result<()> {
        self.worker.check()
    }
}

impl StreamBackend for HostStream {
    fn copy(&self, target: &DeviceSlice, source: &DeviceSlice) -> Result<()> {
        check_kind(target)?;
        check_kind(source)?;
        target.check_source(source)?;
        self.enqueue(HostOperation::Copy {
            target: target.clone(),
            source: source.clone(),
        })
    }

    fn fill(&self, target: &DeviceSlice, byte: u8) -> Result<()> {
        check_kind(target)?;
        self.enqueue(HostOperation::Fill {
            target: target.clone(),
            byte,
        })
    }

    fn memory_ops(&self, ops: &[MemoryOp<'_>]) -> Result<()> {
        for op in ops {
            let (MemoryOp::Write { word, .. }
            | MemoryOp::Reset { word }
            | MemoryOp::Wait { word, .. }) = op;
            check_kind(word.as_slice())?;
            // Only waits can hang because of a fault; writes need not depend on it.
            let waits = matches!(op, MemoryOp::Wait { .. });
            let _noted = self.depend_on(word.fault().filter(|_| waits));
            self.enqueue(match *op {
                MemoryOp::Reset { word } => HostOperation::Write {
                    word: word.clone(),
                    value: 0,
                },
                MemoryOp::Write { word, value } => HostOperation::Write {
                    word: word.clone(),
                    value,
                },
                MemoryOp::Wait { word, value } => HostOperation::Wait {
                    word: AwaitedWord::new(word),
                    at_least: value,
                },
            })?;
        }
        Ok(())
    }

    fn sequence(&self, ops: &[StreamOp<'_>]) -> Result<()> {
        sequence_apart(self, ops)
    }

    fn kernel_copy(&self, copy: &KernelCopy<'_>) -> Result<()> {
        self.enqueue_kernel_copy(copy)
    }

    fn packets(&self, part: &PacketPart<'_>) -> Result<()> {
        self.enqueue_packets(part)
    }

    fn note_work(&self, fault: &Arc<Fault>) {
        self.worker.faults().add_work(fault);
    }

    fn record(&self, event: &Event) -> Result<()> {
        let event: &HostEvent = event::from_dyn(event)?;
        // Streams that wait for the event inherit these faults.
        event.faults.replace(self.worker.faults());
        if let Some(capture) = &*self.capture() {
            let mark = capture.session.mark(capture.branch);
            *lock(&event.recorded) = Recorded::InGraph(CapturedMark {
                session: capture.session.clone(),
                mark,
            });
            return Ok(());
        }
        let mark = event.next_mark();
        self.worker.enqueue_mark(HostOperation::Record {
            event: event.state.clone(),
            mark,
        })
    }

    fn record_end(&self) -> Result<Event> {
        if self.capture().is_some() {
            return Err(recording());
        }
        let event = HostEvent::new(false);
        let mark = event.next_mark();
        // Events are recorded even after a failure.
        self.worker.push(HostOperation::Record {
            event: event.state.clone(),
            mark,
        });
        Ok(Event::new(Arc::new(event)))
    }

    fn wait_event(&self, event: &Event) -> Result<()> {
        let event: &HostEvent = event::from_dyn(event)?;
        // Held until the wait is enqueued, so that a fault raised in between is not missed.
        let _noted = self.worker.faults().follow(&event.faults);
        let recorded = lock(&event.recorded).clone();
        let mut capture = self.capture();
        match (recorded, &*capture) {
            (Recorded::Never, _) => Ok(()),
            (Recorded::InStream(mark), None) => {
                // Release the lock, which `enqueue` takes.
                drop(capture);
                let state: Arc<EventState> = event.state.clone();
                self.enqueue(HostOperation::WaitEvent { event: state, mark })
            }
            (Recorded::InStream(_), Some(_)) => Err(Error::invalid(
                "the event was recorded outside of the capture",
            )
            .with_operation("wait for an event")
            .with_help("record it in a stream of the capture")),
            (Recorded::InGraph(captured), None) => {
                // As on a GPU: waiting for an event of a capture makes this stream join it.
                let branch = captured.session.join();
                captured
                    .session
                    .push(branch, HostOperation::WaitInGraph(captured.mark));
                *capture = Some(Capture {
                    session: captured.session,
                    branch,
                });
                Ok(())
            }
            (Recorded::InGraph(captured), Some(own))
                if Arc::ptr_eq(&captured.session, &own.session) =>
            {
                own.session
                    .push(own.branch, HostOperation::WaitInGraph(captured.mark));
                Ok(())
            }
            (Recorded::InGraph(_), Some(_)) => {
                Err(Error::invalid("the event was recorded in another capture")
                    .with_operation("wait for an event")
                    .with_help("record it in a stream of the same capture"))
            }
        }
    }

    fn synchronize(&self, deadline: Deadline) -> Result<()> {
        if self.is_capturing()? {
            return Err(Error::invalid("the stream is recording a graph")
                .with_operation("synchronize")
                .with_help("end the capture first"));
        }
        self.worker.wait(deadline)
    }

    fn check(&self) -> Result<()> {
        self.worker.check()
    }

    fn is_idle(&self) -> Result<bool> {
        self.worker.is_idle()
    }

    fn begin_capture(&self) -> Result<()> {
        let mut capture = self.capture();
        if capture.is_some() {
            return Err(Error::invalid("the stream is already recording a graph")
                .with_operation("begin a capture")
                .with_help("end that capture first"));
        }
        let session = Arc::new(Session::new());
        let branch = session.join();
        *capture = Some(Capture { session, branch });
        Ok(())
    }

    fn end_capture(&self) -> Result<Graph> {
        let mut own = self.capture();
        match &*own {
            // Branch 0 is the stream that began it.
            Some(capture) if capture.branch == 0 => {}
            _ => {
                return Err(Error::invalid("the stream did not begin a capture")
                    .with_operation("end a capture")
                    .with_help("end it on the stream that began it"));
            }
        }
        let capture = own
            .take()
            .ok_or_else(|| Error::internal("the capture vanished"))?;
        let recording = capture.session.finish()?;
        let number = capture.session.number();
        let graph = RecordedGraph::new(recording, number, &self.fault, self.delays)?;
        // A copy, since the stream's faults change after the capture, while the graph keeps these
        // dependencies.
        let faults = FaultSet::default();
        faults.replace(self.worker.faults());
        Ok(Graph::new(Arc::new(HostGraph {
            graph: Arc::new(graph),
            faults,
        })))
    }

    fn capture_id(&self) -> Result<Option<u64>> {
        Ok(self.capture().as_ref().map(|own| own.session.number()))
    }

    fn raw(&self) -> u64 {
        self.number
    }
}

/// An executable graph.
#[derive(Debug)]
struct HostGraph {
    graph: Arc<RecordedGraph>,
    /// Faults of the stream that recorded it.
    faults: FaultSet,
}

impl GraphBackend for HostGraph {
    fn launch(&self, stream: &Stream) -> Result<()> {
        let stream = from_dyn(stream)?;
        if stream.is_capturing()? {
            return Err(
                Error::unsupported("a graph cannot be launched into a capture")
                    .with_help("end the capture first"),
            );
        }
        let _noted = stream.worker.faults().repeat(&self.faults);
        let graph = self.graph.clone();
        stream.enqueue(HostOperation::Task(Arc::new(move |context: &Context| {
            graph.run(context)
        })))
    }

    fn operations(&self) -> usize {
        self.graph.operations()
    }
}

pub(super) fn from_dyn(stream: &Stream) -> Result<&HostStream> {
    stream.backend().ok_or_else(|| {
        Error::invalid("the stream belongs to another device; expected one of the host device")
            .with_help("use a stream of the same device")
    })
}

fn recording() -> Error {
    Error::invalid("the stream is recording a graph")
        .with_operation("mark the end of a stream's work")
        .with_help("end the capture first")
}
