//! Commands of a run, with every name resolved.

use super::context::DirectCollectives;
use super::kernel::KernelLaunch;
use super::matmuls::Matmuls;
use super::replaced::Replaced;
use crate::device::{
    CollectiveEngine, CollectiveRequest, Compute, DeviceSlice, Elementwise, Event, PreparedLaunch,
    Stream,
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
    /// Enqueues the command on `stream`, which must be the command's stream, as a part of `launch` if there is one.
    pub(super) fn enqueue(&self, stream: &Stream, launch: Option<u64>) -> Result<()> {
        match &self.kind {
            CommandKind::Copy { target, source } => stream.copy(target, source),
            CommandKind::Zero(target) => stream.fill(target, 0),
            CommandKind::Matmul(_, prepared) | CommandKind::Elementwise(_, prepared) => {
                prepared.enqueue(stream)
            }
            CommandKind::Post(group) => {
                let batch = self.batch(group).in_launch(launch);
                batch.post(each(group)).enqueue(stream)
            }
            CommandKind::PostMatmul(group, _, matmuls) => {
                let group: Vec<&Transfer> = each(group).collect();
                post_stores_in_launch(launch, &group, stream, |_| matmuls.enqueue(stream))
            }
            CommandKind::Wait(group) => {
                let batch = self.batch(group).in_launch(launch);
                batch.wait(each(group)).enqueue(stream)
            }
            CommandKind::Collective(engine, request) => engine.enqueue(stream, request),
            CommandKind::Direct(collectives, request) => collectives.enqueue(stream, request),
            CommandKind::Kernel(kernel) => kernel.enqueue(stream),
            CommandKind::Record(event) => stream.record(event),
            CommandKind::WaitEvent(event) => stream.wait_event(event),
        }
    }

    /// Like [`enqueue`](Self::enqueue), with the memory in `replaced` substituted for the operands it covers.
    pub(super) fn enqueue_on(
        &self,
        stream: &Stream,
        launch: Option<u64>,
        (replaced, compute): (&Replaced<'_>, Option<&Arc<dyn Compute>>),
    ) -> Result<()> {
        match (&self.kind, compute) {
            (CommandKind::Copy { target, source }, _) => {
                stream.copy(&replaced.of(target)?, &replaced.of(source)?)
            }
            (CommandKind::Zero(target), _) => stream.fill(&replaced.of(target)?, 0),
            (CommandKind::Matmul(matmuls, _), Some(compute)) if matmuls.name_any(replaced) => {
                matmuls.enqueue(stream, replaced, compute)
            }
            (CommandKind::PostMatmul(group, matmuls, _), Some(compute))
                if matmuls.name_any(replaced) =>
            {
                let group: Vec<&Transfer> = each(group).collect();
                post_stores_in_launch(launch, &group, stream, |_| {
                    matmuls.enqueue(stream, replaced, compute)
                })
            }
            (CommandKind::Elementwise(request, _), Some(compute)) => {
                let mut operands = std::iter::once(&request.target).chain(&request.sources);
                if !operands.any(|operand| replaced.has(&operand.slice)) {
                    return self.enqueue(stream, launch);
                }
                let mut request = request.clone();
                for operand in std::iter::once(&mut request.target).chain(&mut request.sources) {
                    operand.slice = replaced.of(&operand.slice)?;
                }
                compute.elementwise(stream, &request)
            }
            (CommandKind::Post(group), _) => {
                let sources = each(group).map(|transfer| replaced.of_send(transfer));
                let sources = sources.collect::<Result<Vec<_>>>()?;
                let sources = sources.iter().map(Option::as_ref);
                let batch = self.batch(group).in_launch(launch);
                batch.post_from(each(group).zip(sources)).enqueue(stream)
            }
            (CommandKind::Collective(engine, request), _) => {
                engine.enqueue(stream, &replaced.of_request(request)?)
            }
            (CommandKind::Direct(collectives, request), _) => {
                collectives.enqueue(stream, &replaced.of_request(request)?)
            }
            _ => self.enqueue(stream, launch),
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
