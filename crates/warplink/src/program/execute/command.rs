//! Commands of a run, with every name resolved.

use super::context::DirectCollectives;
use super::kernel::KernelLaunch;
use super::matmuls::Matmuls;
use super::replaced::Replaced;
use crate::device::{
    CollectiveEngine, CollectiveRequest, DeviceSlice, Elementwise, Event, PreparedLaunch, Stream,
};
use crate::error::Result;
use crate::p2p::{Batch, Transfer, post_stores_in_launch};
use std::sync::Arc;

/// Stream index of the caller's stream.
pub(super) const CALLER: usize = 0;

/// A command to a stream.
#[derive(Debug)]
pub(super) struct Command {
    /// Index of its stream.
    pub(super) stream: usize,
    pub(super) kind: CommandKind,
    /// Operation of the program that it was resolved from.
    pub(super) operation: usize,
}

#[derive(Debug)]
pub(super) enum CommandKind {
    Copy {
        target: DeviceSlice,
        source: DeviceSlice,
    },
    Zero(DeviceSlice),
    Matmul(Matmuls, Arc<dyn PreparedLaunch>),
    Elementwise(Elementwise, Arc<dyn PreparedLaunch>),
    /// Direct transfers, posted as one group.
    Post(Vec<Arc<Transfer>>),
    /// Sends of matmul results, and the matmuls.
    PostMatmul(Vec<Arc<Transfer>>, Matmuls, Arc<dyn PreparedLaunch>),
    /// A wait for direct transfers.
    Wait(Vec<Arc<Transfer>>),
    /// A collective of the engine, or its sends and receives.
    Collective(Arc<dyn CollectiveEngine>, CollectiveRequest),
    /// A collective of all ranks by kernels of the communicator.
    Direct(Arc<dyn DirectCollectives>, CollectiveRequest),
    Kernel(KernelLaunch),
    Record(Event),
    WaitEvent(Event),
}

impl CommandKind {
    /// Name of the command, for reports.
    pub(super) const fn name(&self) -> &'static str {
        match self {
            Self::Copy { .. } => "copy",
            Self::Zero(_) => "zero",
            Self::Matmul(..) => "matmul",
            Self::Elementwise(request, _) => request.op.name(),
            Self::Post(_) => "post",
            Self::PostMatmul(..) => "post matmul",
            Self::Wait(_) => "wait",
            Self::Collective(_, CollectiveRequest::Exchange { .. }) => "exchange",
            Self::Collective(_, CollectiveRequest::Collective { .. }) | Self::Direct(..) => {
                "collective"
            }
            Self::Kernel(_) => "kernel",
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
    /// Enqueues the command on `stream`, which must be the command's stream, as a part of `launch` if there is one. Memory
    /// in `replaced` is substituted for the operands that it covers.
    pub(super) fn enqueue(
        &self,
        stream: &Stream,
        launch: Option<u64>,
        replaced: &Replaced<'_>,
    ) -> Result<()> {
        // A prepared launch holds the addresses that it was prepared with, so substitutes cannot use it.
        let matmuls = |matmuls: &Matmuls, prepared: &Arc<dyn PreparedLaunch>| match replaced.compute
        {
            Some(compute) if matmuls.name_any(replaced) => {
                matmuls.enqueue(stream, replaced, compute)
            }
            _ => prepared.enqueue(stream),
        };
        match &self.kind {
            CommandKind::Copy { target, source } => {
                stream.copy(replaced.of(target)?, replaced.of(source)?)
            }
            CommandKind::Zero(target) => stream.fill(replaced.of(target)?, 0),
            CommandKind::Matmul(all, prepared) => matmuls(all, prepared),
            CommandKind::Elementwise(request, prepared) => {
                let mut operands = std::iter::once(&request.target).chain(&request.sources);
                match replaced.compute {
                    Some(compute) if operands.any(|operand| replaced.has(&operand.slice)) => {
                        compute.elementwise(stream, &replaced.of_elementwise(request)?)
                    }
                    _ => prepared.enqueue(stream),
                }
            }
            CommandKind::Post(group) => {
                let sources = each(group).map(|transfer| replaced.of_send(transfer));
                let sources = sources.collect::<Result<Vec<_>>>()?;
                let sources = sources.iter().map(Option::as_ref);
                let batch = self.batch(group).in_launch(launch);
                batch.post_from(each(group).zip(sources)).enqueue(stream)
            }
            CommandKind::PostMatmul(group, all, prepared) => {
                let group: Vec<&Transfer> = each(group).collect();
                post_stores_in_launch(launch, &group, stream, |_| matmuls(all, prepared))
            }
            CommandKind::Wait(group) => {
                let batch = self.batch(group).in_launch(launch);
                batch.wait(each(group)).enqueue(stream)
            }
            CommandKind::Collective(engine, request) => {
                engine.enqueue(stream, &*replaced.of_request(request)?)
            }
            CommandKind::Direct(collectives, request) => {
                collectives.enqueue(stream, &*replaced.of_request(request)?)
            }
            CommandKind::Kernel(kernel) => kernel.enqueue(stream),
            CommandKind::Record(event) => stream.record(event),
            CommandKind::WaitEvent(event) => stream.wait_event(event),
        }
    }

    /// An empty batch for `group`. Matmuls usually run on streams of the pool, so the caller's stream has no
    /// concurrent matmul and a kernel may set the signals. If a program does otherwise, that kernel waits for a free
    /// multiprocessor until a tile completes.
    fn batch<'a>(&self, group: &[Arc<Transfer>]) -> Batch<'a> {
        if self.stream == CALLER && group.len() > 1 {
            Batch::new().in_kernel()
        } else {
            Batch::new()
        }
    }
}

fn each(group: &[Arc<Transfer>]) -> impl Iterator<Item = &Transfer> + Clone {
    group.iter().map(|transfer| &**transfer)
}
