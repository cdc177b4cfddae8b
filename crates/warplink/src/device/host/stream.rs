//! A stream: a queue and a thread that works it off in order.

use super::event::{self, HostEvent, Recorded};
use super::graph::{CapturedMark, HostGraph, Session};
use super::memory::AwaitedWord;
use super::operation::{Context, Operation};
use super::{check_kind, event::EventState};
use crate::deadline::Deadline;
use crate::device::{
    Delays, DeviceSlice, Event, Fault, Graph, MemoryOp, Stream, StreamBackend, StreamOp,
    sequence_apart,
};
use crate::error::{Error, ErrorKind, Result};
use crate::sync::lock;
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

#[derive(Debug)]
pub(crate) struct HostStream {
    number: u64,
    delays: Option<Delays>,
    shared: Arc<Shared>,
    capture: Mutex<Option<Capture>>,
}

#[derive(Debug)]
struct Capture {
    session: Arc<Session>,
    branch: usize,
}

#[derive(Debug)]
struct Shared {
    fault: Arc<Fault>,
    queue: Mutex<Queue>,
    work: Condvar,
    done: Condvar,
    // The first failure of an operation; what follows it is not done.
    failure: OnceLock<Error>,
}

#[derive(Debug, Default)]
struct Queue {
    waiting: VecDeque<Operation>,
    enqueued: u64,
    completed: u64,
    closed: bool,
}

impl HostStream {
    pub(super) fn start(
        number: u64,
        fault: Arc<Fault>,
        delays: Option<Delays>,
    ) -> Result<Arc<Self>> {
        let shared = Arc::new(Shared {
            fault: fault.clone(),
            queue: Mutex::default(),
            work: Condvar::new(),
            done: Condvar::new(),
            failure: OnceLock::new(),
        });
        let worker = shared.clone();
        std::thread::Builder::new()
            .name(format!("warplink-stream-{number}"))
            .spawn(move || work(&worker, &Context::new(fault, delays, number)))
            .map_err(|error| Error::io("start a stream's thread", &error))?;
        Ok(Arc::new(Self {
            number,
            delays,
            shared,
            capture: Mutex::new(None),
        }))
    }

    /// Enqueues `operation`, or records it while a capture is under way.
    pub(super) fn enqueue(&self, operation: Operation) -> Result<()> {
        self.check()?;
        if let Some(capture) = &*self.capture() {
            capture.session.push(capture.branch, operation);
            return Ok(());
        }
        let mut queue = lock(&self.shared.queue);
        queue.waiting.push_back(operation);
        queue.enqueued += 1;
        drop(queue);
        self.shared.work.notify_one();
        Ok(())
    }

    /// The capture that this stream takes part in, unless it has ended.
    fn capture(&self) -> MutexGuard<'_, Option<Capture>> {
        let mut capture = lock(&self.capture);
        if capture
            .as_ref()
            .is_some_and(|capture| capture.session.has_ended())
        {
            *capture = None;
        }
        capture
    }

    /// The fault, or the first failure of an operation.
    pub(super) fn check(&self) -> Result<()> {
        self.shared.fault.check()?;
        self.shared
            .failure
            .get()
            .map_or(Ok(()), |error| Err(error.clone()))
    }
}

/// Works the queue off until the stream is dropped and the queue is empty.
fn work(shared: &Shared, context: &Context) {
    let mut queue = lock(&shared.queue);
    loop {
        let Some(operation) = queue.waiting.pop_front() else {
            if queue.closed {
                return;
            }
            queue = shared
                .work
                .wait(queue)
                .unwrap_or_else(PoisonError::into_inner);
            continue;
        };
        drop(queue);
        let mark = matches!(operation, Operation::Record { .. });
        if (mark || shared.failure.get().is_none())
            && let Err(error) = context.perform(&operation)
        {
            tracing::debug!(?operation, %error, "an operation in a stream failed");
            // A second failure cannot be set, and only the first matters.
            let _ = shared.failure.set(error);
        }
        // What the operation holds is released before it counts as done.
        drop(operation);
        queue = lock(&shared.queue);
        queue.completed += 1;
        shared.done.notify_all();
    }
}

impl Drop for HostStream {
    /// What is enqueued is still done, as on a GPU; nothing is waited for.
    fn drop(&mut self) {
        lock(&self.shared.queue).closed = true;
        self.shared.work.notify_one();
    }
}

impl StreamBackend for HostStream {
    fn copy(&self, target: &DeviceSlice, source: &DeviceSlice) -> Result<()> {
        check_kind(target)?;
        check_kind(source)?;
        if target.bytes() != source.bytes() {
            return Err(Error::invalid(format!(
                "the source has {} bytes and the target {}; expected the same length",
                source.bytes(),
                target.bytes()
            ))
            .during("copy")
            .help("pass slices of the same length"));
        }
        self.enqueue(Operation::Copy {
            target: target.clone(),
            source: source.clone(),
        })
    }

    fn fill(&self, target: &DeviceSlice, byte: u8) -> Result<()> {
        check_kind(target)?;
        self.enqueue(Operation::Fill {
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
            self.enqueue(match *op {
                MemoryOp::Reset { word } => Operation::Write {
                    word: word.clone(),
                    value: 0,
                },
                MemoryOp::Write { word, value } => Operation::Write {
                    word: word.clone(),
                    value,
                },
                MemoryOp::Wait { word, value } => Operation::Wait {
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

    fn record(&self, event: &Event) -> Result<()> {
        let event: &HostEvent = event::from_dyn(event)?;
        if let Some(capture) = &*self.capture() {
            let mark = capture.session.mark(capture.branch);
            *lock(&event.recorded) = Recorded::InGraph(CapturedMark {
                session: capture.session.clone(),
                mark,
            });
            return Ok(());
        }
        let mark = event.next_mark();
        self.enqueue(Operation::Record {
            event: event.state.clone(),
            mark,
        })
    }

    fn wait_event(&self, event: &Event) -> Result<()> {
        let event: &HostEvent = event::from_dyn(event)?;
        let recorded = lock(&event.recorded).clone();
        let mut capture = self.capture();
        match (recorded, &*capture) {
            (Recorded::Never, _) => Ok(()),
            (Recorded::InStream(mark), None) => {
                drop(capture);
                let state: Arc<EventState> = event.state.clone();
                self.enqueue(Operation::WaitEvent { event: state, mark })
            }
            (Recorded::InStream(_), Some(_)) => Err(Error::invalid(
                "the event was recorded outside of the capture",
            )
            .during("wait for an event")
            .help("record it in a stream of the capture")),
            (Recorded::InGraph(captured), None) => {
                let branch = captured.session.join();
                captured
                    .session
                    .push(branch, Operation::WaitInGraph(captured.mark));
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
                    .push(own.branch, Operation::WaitInGraph(captured.mark));
                Ok(())
            }
            (Recorded::InGraph(_), Some(_)) => {
                Err(Error::invalid("the event was recorded in another capture")
                    .during("wait for an event")
                    .help("record it in a stream of the same capture"))
            }
        }
    }

    fn synchronize(&self, deadline: Deadline) -> Result<()> {
        if self.is_capturing()? {
            return Err(Error::invalid("the stream is recording a graph")
                .during("synchronize")
                .help("end the capture first"));
        }
        let mut queue = lock(&self.shared.queue);
        let end = queue.enqueued;
        while queue.completed < end {
            self.check()?;
            if deadline.passed() {
                let left = end - queue.completed;
                return Err(deadline.expired("the end of a stream's work").during("synchronize").help(format!(
                    "check that both ranks post every transfer: {left} operations are left, the first of them under way"
                )));
            }
            let nap = deadline.remaining().min(Duration::from_millis(10));
            queue = self
                .shared
                .done
                .wait_timeout(queue, nap)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        drop(queue);
        self.check()
    }

    fn is_idle(&self) -> Result<bool> {
        self.check()?;
        let queue = lock(&self.shared.queue);
        Ok(queue.completed == queue.enqueued)
    }

    fn begin_capture(&self) -> Result<()> {
        let mut capture = self.capture();
        if capture.is_some() {
            return Err(Error::invalid("the stream is already recording a graph")
                .during("begin a capture")
                .help("end that capture first"));
        }
        let session = Arc::new(Session::new(self.delays));
        let branch = session.join();
        *capture = Some(Capture { session, branch });
        Ok(())
    }

    fn end_capture(&self) -> Result<Graph> {
        let mut own = self.capture();
        match &*own {
            Some(capture) if capture.branch == 0 => {}
            _ => {
                return Err(Error::invalid("the stream did not begin a capture")
                    .during("end a capture")
                    .help("end it on the stream that began it"));
            }
        }
        let capture = own
            .take()
            .ok_or_else(|| Error::new(ErrorKind::Internal, "the capture vanished"))?;
        let graph = capture.session.finish(&self.shared.fault)?;
        Ok(Graph::new(Arc::new(HostGraph(graph))))
    }

    fn capture_id(&self) -> Result<Option<u64>> {
        Ok(self.capture().as_ref().map(|own| own.session.number()))
    }

    fn raw(&self) -> u64 {
        self.number
    }
}

pub(super) fn from_dyn(stream: &Stream) -> Result<&HostStream> {
    stream.backend().ok_or_else(|| {
        Error::new(
            ErrorKind::InvalidArgument,
            "the stream belongs to another device; expected one of the host device",
        )
        .help("use a stream of the same device")
    })
}
