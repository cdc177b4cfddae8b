//! An operation with everything resolved, ready to be enqueued.

use crate::device::{CollectiveEngine, DeviceSlice, Event, PreparedLaunch, ReduceOp, Stream};
use crate::dtype::DType;
use crate::error::{Rank, Result};
use crate::p2p::{Batch, Transfer, post_stores};
use crate::program::ir::Collective;
use std::sync::Arc;

#[derive(Debug)]
pub(super) struct Command {
    /// Index of its stream; 0 is the caller's.
    pub(super) stream: usize,
    pub(super) kind: CommandKind,
    /// The operation of the program that it comes from.
    pub(super) operation: usize,
}

#[derive(Debug)]
pub(super) enum CommandKind {
    Copy {
        target: DeviceSlice,
        source: DeviceSlice,
    },
    Matmul(Arc<dyn PreparedLaunch>),
    Sum(Arc<dyn PreparedLaunch>),
    /// One direct transfer, by its index: most posts and waits are of one.
    Post(usize),
    PostGroup(Vec<usize>),
    /// Sends of products, and the products.
    PostMatmul(Vec<usize>, Arc<dyn PreparedLaunch>),
    Wait(usize),
    WaitGroup(Vec<usize>),
    /// Sends and receives of the engine, and the event that marks their end.
    Exchange {
        sends: Vec<(Rank, DeviceSlice)>,
        receives: Vec<(Rank, DeviceSlice)>,
        done: Option<Event>,
    },
    Collective {
        collective: Collective<Rank>,
        dtype: DType,
        target: DeviceSlice,
        source: DeviceSlice,
    },
    Record(Event),
    WaitEvent(Event),
}

impl CommandKind {
    /// A word for what is enqueued.
    pub(super) const fn name(&self) -> &'static str {
        match self {
            Self::Copy { .. } => "copy",
            Self::Matmul(_) => "matmul",
            Self::Sum(_) => "sum",
            Self::Post(_) => "post",
            Self::PostGroup(_) => "post group",
            Self::PostMatmul(..) => "post matmul",
            Self::Wait(_) => "wait",
            Self::WaitGroup(_) => "wait group",
            Self::Exchange { .. } => "exchange",
            Self::Collective { .. } => "collective",
            Self::Record(_) => "record event",
            Self::WaitEvent(_) => "wait event",
        }
    }
}

/// What commands need beside their stream.
pub(super) struct Enqueuer<'a> {
    pub(super) transfers: &'a [Option<Transfer>],
    pub(super) engine: Option<&'a dyn CollectiveEngine>,
}

impl Enqueuer<'_> {
    fn transfer(&self, index: usize) -> Result<&Transfer> {
        self.transfers
            .get(index)
            .and_then(Option::as_ref)
            .ok_or_else(|| internal("a transfer was not exchanged"))
    }

    fn group(&self, indices: &[usize]) -> Result<Vec<&Transfer>> {
        indices.iter().map(|index| self.transfer(*index)).collect()
    }

    /// Enqueues what `command` does on `stream`, which is the command's.
    pub(super) fn enqueue(&self, command: &Command, stream: &Stream) -> Result<()> {
        // Products are on streams of the pool as a rule, so that beside the caller's stream none runs.
        // Where a program has it otherwise, a kernel waits for room until a tile is done.
        let by_kernel = |batch: Batch<'_>| match command.stream {
            0 => batch.in_kernel().enqueue(stream),
            _ => batch.enqueue(stream),
        };
        let engine = || {
            self.engine
                .ok_or_else(|| internal("the engine was not joined"))
        };
        match &command.kind {
            CommandKind::Copy { target, source } => stream.copy(target, source),
            CommandKind::Matmul(launch) | CommandKind::Sum(launch) => launch.enqueue(stream),
            CommandKind::Post(index) => self.transfer(*index)?.post(stream),
            CommandKind::PostGroup(indices) => by_kernel(Batch::new().post(self.group(indices)?)),
            CommandKind::PostMatmul(indices, products) => {
                post_stores(&self.group(indices)?, stream, |_| products.enqueue(stream))
            }
            CommandKind::Wait(index) => self.transfer(*index)?.wait(stream),
            CommandKind::WaitGroup(indices) => by_kernel(Batch::new().wait(self.group(indices)?)),
            CommandKind::Exchange {
                sends,
                receives,
                done,
            } => {
                engine()?.exchange(stream, sends, receives)?;
                done.as_ref().map_or(Ok(()), |event| stream.record(event))
            }
            CommandKind::Collective {
                collective,
                dtype,
                target,
                source,
            } => enqueue_collective(engine()?, stream, collective, *dtype, target, source),
            CommandKind::Record(event) => stream.record(event),
            CommandKind::WaitEvent(event) => stream.wait_event(event),
        }
    }
}

fn enqueue_collective(
    engine: &dyn CollectiveEngine,
    stream: &Stream,
    collective: &Collective<Rank>,
    dtype: DType,
    target: &DeviceSlice,
    source: &DeviceSlice,
) -> Result<()> {
    let op = |op: &ReduceOp| *op;
    match collective {
        Collective::AllGather => engine.all_gather(stream, target, source),
        Collective::AllReduce(reduce) => {
            engine.all_reduce(stream, dtype, op(reduce), target, source)
        }
        Collective::ReduceScatter(reduce) => {
            engine.reduce_scatter(stream, dtype, op(reduce), target, source)
        }
        Collective::Broadcast(root) => engine.broadcast(stream, *root, target, source),
        Collective::Reduce(reduce, root) => {
            engine.reduce(stream, dtype, op(reduce), *root, target, source)
        }
        Collective::AllToAll => engine.all_to_all(stream, target, source),
    }
}

fn internal(what: &'static str) -> crate::error::Error {
    crate::error::Error::new(crate::error::ErrorKind::Internal, what).during("run a program")
}
