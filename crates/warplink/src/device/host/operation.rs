//! Operations that a stream's thread executes in order.

use super::mark::EventState;
use super::memory;
use super::words::{self, AwaitedWord, MappedWord};
use crate::device::{Delays, DeviceSlice, Fault, FaultSet, Word};
use crate::error::{Error, Result};
use std::fmt;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

/// Host code as an operation; graphs run it repeatedly.
pub(super) type Task = Arc<dyn Fn(&Context) -> Result<()> + Send + Sync>;

/// An enqueued operation. Holds the memory that it uses.
#[derive(Clone)]
pub(super) enum HostOperation {
    Copy {
        target: DeviceSlice,
        source: DeviceSlice,
    },
    Fill {
        target: DeviceSlice,
        byte: u8,
    },
    Write {
        word: Word,
        value: u64,
    },
    Wait {
        word: AwaitedWord,
        at_least: u64,
    },
    Record {
        event: Arc<EventState>,
        mark: u64,
    },
    WaitEvent {
        event: Arc<EventState>,
        mark: u64,
    },
    /// Event record and wait between branches of one graph, by event index.
    RecordInGraph(usize),
    WaitInGraph(usize),
    Task(Task),
}

impl fmt::Debug for HostOperation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Copy { target, source } => write!(f, "copy {source:?} to {target:?}"),
            Self::Fill { target, byte } => write!(f, "fill {target:?} with {byte}"),
            Self::Write { word, value } => write!(f, "write {value} to {:#x}", word.address()),
            Self::Wait { word, at_least } => {
                write!(f, "wait for {at_least} at {:#x}", word.address())
            }
            Self::Record { mark, .. } => write!(f, "record mark {mark}"),
            Self::WaitEvent { mark, .. } => write!(f, "wait for mark {mark}"),
            Self::RecordInGraph(mark) => write!(f, "record mark {mark} of the graph"),
            Self::WaitInGraph(mark) => write!(f, "wait for mark {mark} of the graph"),
            Self::Task(_) => f.write_str("task"),
        }
    }
}

/// State of the executing thread that operations need.
#[derive(Debug)]
pub(super) struct Context {
    pub(super) fault: Arc<Fault>,
    /// Faults that abort the stream's work, besides the device's.
    pub(super) faults: Arc<FaultSet>,
    pub(super) delays: Option<Delays>,
    pub(super) random: std::cell::Cell<u64>,
    /// Events of the graph being launched, if any.
    pub(super) marks: Option<Arc<[EventState]>>,
}

impl Context {
    pub(super) fn new(
        fault: Arc<Fault>,
        faults: Arc<FaultSet>,
        delays: Option<Delays>,
        number: u64,
    ) -> Self {
        let seed =
            // The golden ratio's bits spread consecutive stream numbers over the whole range of seeds.
            delays.map_or(1, |delays| delays.seed) ^ number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        Self {
            fault,
            faults,
            delays,
            random: std::cell::Cell::new(seed | 1),
            marks: None,
        }
    }

    /// Fails if a relevant fault was raised.
    pub(super) fn check(&self) -> Result<()> {
        self.fault.check()?;
        self.faults.check()
    }

    /// Yields to other lanes of the thread; fails once waits are aborted.
    pub(super) async fn turn(&self) -> Result<()> {
        self.check()?;
        let mut given = false;
        std::future::poll_fn(|_| {
            if std::mem::replace(&mut given, true) {
                Poll::Ready(())
            } else {
                Poll::Pending
            }
        })
        .await;
        Ok(())
    }

    /// Context for one launch of a graph by a stream with `faults`, with its own delays.
    pub(super) fn within_graph(&self, marks: Arc<[EventState]>, faults: Arc<FaultSet>) -> Self {
        Self {
            faults,
            marks: Some(marks),
            ..self.for_block()
        }
    }

    /// Context of the same stream for a helper thread.
    pub(super) fn for_block(&self) -> Self {
        let seed = self.draw();
        Self {
            fault: self.fault.clone(),
            faults: self.faults.clone(),
            delays: self.delays,
            random: std::cell::Cell::new(seed | 1),
            marks: None,
        }
    }

    /// Next pseudo-random number of the thread.
    pub(super) fn draw(&self) -> u64 {
        let mut x = self.random.get();
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        self.random.set(x);
        x
    }

    /// Sleeps at random, if tests ask for it.
    pub(super) fn delay(&self) {
        let Some(delays) = self.delays else { return };
        let x = self.draw();
        // Delay only half of the operations: orders vary more than if all were late.
        if x & (1 << 40) == 0 {
            let max = delays.max.as_nanos() as u64;
            std::thread::sleep(Duration::from_nanos(x % max.max(1)));
        }
    }

    /// Executes `operation`. After a fault only events are recorded, so that waiting threads end.
    pub(super) fn perform(&self, operation: &HostOperation) -> Result<()> {
        match operation {
            HostOperation::Record { event, mark } => {
                self.delay();
                event.reach(*mark);
                return Ok(());
            }
            HostOperation::RecordInGraph(mark) => {
                self.delay();
                self.mark(*mark)?.reach(1);
                return Ok(());
            }
            _ => self.check()?,
        }
        self.delay();
        match operation {
            HostOperation::Copy { target, source } => self.copy(target, source)?,
            HostOperation::Fill { target, byte } => memory::fill(target, *byte),
            HostOperation::Write { word, value } => words::store(word, *value),
            HostOperation::Wait { word, at_least } => self.wait(word, *at_least)?,
            HostOperation::WaitEvent { event, mark } => event.wait(*mark, &self.fault)?,
            HostOperation::WaitInGraph(mark) => self.mark(*mark)?.wait(1, &self.fault)?,
            HostOperation::Task(task) => task(self)?,
            HostOperation::Record { .. } | HostOperation::RecordInGraph(_) => {}
        }
        Ok(())
    }

    fn mark(&self, mark: usize) -> Result<&EventState> {
        let marks = self.marks.as_ref().and_then(|marks| marks.get(mark));
        marks.ok_or_else(|| Error::internal("an operation of a graph ran outside of its launch"))
    }

    /// In two halves with a delay between, so that a reader that does not wait sees only half.
    pub(super) fn copy(&self, target: &DeviceSlice, source: &DeviceSlice) -> Result<()> {
        if self.delays.is_none() || target.bytes() < 2 {
            memory::copy(target, source);
            return Ok(());
        }
        let half = target.bytes() / 2;
        memory::copy(
            // The second half first, so that a reader that polls the end of the data is caught too.
            &target.slice(half..target.bytes())?,
            &source.slice(half..source.bytes())?,
        );
        self.delay();
        memory::copy(&target.slice(0..half)?, &source.slice(0..half)?);
        Ok(())
    }

    /// Spins briefly, then sleeps; ends when the fault is raised.
    pub(super) fn wait(&self, word: &AwaitedWord, at_least: u64) -> Result<()> {
        const SPINS: usize = 200;
        // Interval for checking the fault, which does not wake sleepers.
        const NAP: Duration = Duration::from_millis(10);
        for round in 0.. {
            let seen = words::load(word);
            // Signed difference, as the GPU compares.
            if seen.wrapping_sub(at_least) as i64 >= 0 {
                return Ok(());
            }
            if round < SPINS {
                std::hint::spin_loop();
            } else {
                self.check()?;
                if !word.can_be_set() {
                    return Err(Error::closed(format!(
                        "the word at {:#x} was freed",
                        word.address()
                    ))
                    .with_operation("wait for a word")
                    .with_help("keep the word until the streams that wait for it are done"));
                }
                words::sleep_while(word, seen, NAP);
            }
        }
        Ok(())
    }
}
