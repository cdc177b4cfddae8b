//! What a run enqueues, with everything resolved.

use crate::device::{CollectiveEngine, DeviceSlice, Event, PreparedLaunch, Stream};
use crate::dtype::DType;
use crate::error::{Rank, Result};
use crate::p2p::{Batch, Transfer, post_stores};
use crate::program::ir::Collective;
use std::sync::Arc;

/// Index of the caller's stream.
pub(super) const CALLER: usize = 0;

/// One command to a stream.
#[derive(Debug)]
pub(super) struct Command {
    /// Index of its stream.
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
    /// Direct transfers, as one group.
    Post(Vec<Arc<Transfer>>),
    /// Sends of matmul results, and the matmuls.
    PostMatmul(Vec<Arc<Transfer>>, Arc<dyn PreparedLaunch>),
    /// A wait for direct transfers.
    Wait(Vec<Arc<Transfer>>),
    /// Sends and receives of the engine.
    Exchange {
        engine: Arc<dyn CollectiveEngine>,
        sends: Vec<(Rank, DeviceSlice)>,
        receives: Vec<(Rank, DeviceSlice)>,
    },
    Collective {
        engine: Arc<dyn CollectiveEngine>,
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
            Self::PostMatmul(..) => "post matmul",
            Self::Wait(_) => "wait",
            Self::Exchange { .. } => "exchange",
            Self::Collective { .. } => "collective",
            Self::Record(_) => "record event",
            Self::WaitEvent(_) => "wait event",
        }
    }

    /// Whether it only orders streams.
    pub(super) const fn is_event(&self) -> bool {
        matches!(self, Self::Record(_) | Self::WaitEvent(_))
    }
}

impl Command {
    /// Enqueues the command on `stream`, which is the command's.
    pub(super) fn enqueue(&self, stream: &Stream) -> Result<()> {
        match &self.kind {
            CommandKind::Copy { target, source } => stream.copy(target, source),
            CommandKind::Matmul(launch) | CommandKind::Sum(launch) => launch.enqueue(stream),
            CommandKind::Post(group) => self.batch(group).post(each(group)).enqueue(stream),
            CommandKind::PostMatmul(group, matmuls) => {
                let group: Vec<&Transfer> = each(group).collect();
                post_stores(&group, stream, |_| matmuls.enqueue(stream))
            }
            CommandKind::Wait(group) => self.batch(group).wait(each(group)).enqueue(stream),
            CommandKind::Exchange {
                engine,
                sends,
                receives,
            } => engine.exchange(stream, sends, receives),
            CommandKind::Collective {
                engine,
                collective,
                dtype,
                target,
                source,
            } => enqueue_collective(&**engine, stream, collective, *dtype, target, source),
            CommandKind::Record(event) => stream.record(event),
            CommandKind::WaitEvent(event) => stream.wait_event(event),
        }
    }

    /// An empty batch for `group`. Matmuls are on streams of the pool as a rule, so that beside the
    /// caller's stream none runs, and signals may be set in a kernel. Where a program has it otherwise,
    /// the kernel waits for room until a tile is done.
    fn batch<'a>(&self, group: &[Arc<Transfer>]) -> Batch<'a> {
        match self.stream == CALLER && group.len() > 1 {
            true => Batch::new().in_kernel(),
            false => Batch::new(),
        }
    }
}

fn each(group: &[Arc<Transfer>]) -> impl Iterator<Item = &Transfer> {
    group.iter().map(|transfer| &**transfer)
}

fn enqueue_collective(
    engine: &dyn CollectiveEngine,
    stream: &Stream,
    collective: &Collective<Rank>,
    dtype: DType,
    target: &DeviceSlice,
    source: &DeviceSlice,
) -> Result<()> {
    match collective {
        Collective::AllGather => engine.all_gather(stream, target, source),
        Collective::AllReduce(op) => engine.all_reduce(stream, dtype, *op, target, source),
        Collective::ReduceScatter(op) => engine.reduce_scatter(stream, dtype, *op, target, source),
        Collective::Broadcast(root) => engine.broadcast(stream, *root, target, source),
        Collective::Reduce(op, root) => engine.reduce(stream, dtype, *op, *root, target, source),
        Collective::AllToAll => engine.all_to_all(stream, target, source),
    }
}
