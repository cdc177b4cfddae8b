//! Resolves the operations of a rank program and its memory to commands.

use super::command::{Command, CommandKind};
use super::context::DirectCollectives;
use super::kernel::BoundKernels;
use super::matmuls::Matmuls;
use super::memory::PlanMemory;
use crate::device::{
    Collective, CollectiveEngine, CollectiveRequest, Compute, Device, DeviceSlice, Elementwise,
    Event, MAX_ELEMENTWISE_SOURCES, MatmulSpec, Operand,
};
use crate::error::{Error, Rank, Result};
use crate::p2p::{Direction, Transfer};
use crate::program::area::{Area, simplified};
use crate::program::rank_program::{
    Operation, OperationKind, Range, RankProgram, TransferId, TransferInstance, place_among,
};
use std::collections::HashMap;
use std::sync::Arc;

/// A point on a stream: its index, and the event recorded there.
type Mark = (usize, Event);

/// Collectives and engines that the rank has joined.
#[derive(Default)]
pub(super) struct Engines {
    /// Collectives of all ranks, if the engine does not execute them.
    pub(super) direct: Option<Arc<dyn DirectCollectives>>,
    /// Engines by members; `None` for the engine of all ranks.
    pub(super) joined: HashMap<Option<Arc<[Rank]>>, Arc<dyn CollectiveEngine>>,
}

/// Resolves operations to commands.
pub(super) struct Resolver<'a> {
    program: &'a RankProgram,
    memory: &'a PlanMemory,
    transfers: &'a [Option<Arc<Transfer>>],
    device: &'a dyn Device,
    compute: Option<Arc<dyn Compute>>,
    engines: &'a Engines,
    kernels: Option<&'a BoundKernels>,
    // Whether the engines' operations are on several streams. If so, events order them as enqueued by the host, which
    // an engine may rely on: peers that ran them in two orders would deadlock, within one engine or across two.
    orders_engine: bool,
    engine_last: Option<Mark>,
    // Last post of each engine transfer.
    engine_posts: HashMap<TransferId, Mark>,
    commands: Vec<Command>,
}

impl<'a> Resolver<'a> {
    pub(super) fn new(
        program: &'a RankProgram,
        memory: &'a PlanMemory,
        transfers: &'a [Option<Arc<Transfer>>],
        device: &'a dyn Device,
        compute: Option<Arc<dyn Compute>>,
        engines: &'a Engines,
        kernels: Option<&'a BoundKernels>,
    ) -> Self {
        Self {
            program,
            memory,
            transfers,
            device,
            compute,
            engines,
            kernels,
            orders_engine: program.orders_engine(),
            engine_last: None,
            engine_posts: HashMap::new(),
            commands: Vec::with_capacity(program.operations.len()),
        }
    }

    /// Commands of the whole program.
    pub(super) fn commands(mut self) -> Result<Vec<Command>> {
        let program = self.program;
        for (index, operation) in program.operations.iter().enumerate() {
            let first = self.commands.len();
            self.resolve(operation)?;
            for command in &mut self.commands[first..] {
                command.operation = index;
            }
        }
        Ok(self.commands)
    }

    fn resolve(&mut self, operation: &Operation) -> Result<()> {
        let stream = operation.stream;
        let kind = match &operation.kind {
            // Memory and handles exist from binding to the end of the plan, so these need no command.
            OperationKind::Allocate(_) | OperationKind::Deallocate(_) | OperationKind::Share(_) => {
                return Ok(());
            }
            OperationKind::Synchronize(other) => {
                let event = self.record(*other)?;
                CommandKind::WaitEvent(event)
            }
            OperationKind::Kernel(section) => {
                let missing = || internal("a kernel was not bound");
                let kernels = self.kernels.ok_or_else(missing)?;
                CommandKind::Kernel(kernels.launch(self.device, section)?)
            }
            OperationKind::Post(group) => return self.post(group, stream),
            OperationKind::Wait(group) => return self.wait(group, stream),
            OperationKind::Collective(it) => {
                let place = |rank: Rank| {
                    let place = place_among(it.members.as_deref(), rank);
                    place.ok_or_else(|| internal("the root does not take part"))
                };
                let collective = match it.collective {
                    Collective::Broadcast(root) => Collective::Broadcast(place(root)?),
                    Collective::Reduce(op, root) => Collective::Reduce(op, place(root)?),
                    other => other,
                };
                let request = CollectiveRequest::Collective {
                    collective,
                    dtype: it.dtype,
                    target: self.memory.slice(&it.target)?,
                    source: self.memory.slice(&it.source)?,
                };
                let kind = match &self.engines.direct {
                    Some(direct) => {
                        // Compiled now, as a run must not block.
                        direct.prepare(&request)?;
                        CommandKind::Direct(direct.clone(), request)
                    }
                    None => CommandKind::Collective(self.engine(&it.members)?, request),
                };
                return self.push_engine(stream, kind, &[]);
            }
            OperationKind::Zero(range) => CommandKind::Zero(self.memory.slice(range)?),
            OperationKind::Copy { target, source } => CommandKind::Copy {
                target: self.memory.slice(target)?,
                source: self.memory.slice(source)?,
            },
            OperationKind::Elementwise(it) => {
                let areas = std::iter::once(&it.target).chain(&it.sources);
                let areas: Vec<Area> = areas.cloned().collect();
                // Fewer axes mean less index arithmetic in the kernel; contiguous operands become one axis.
                let (mut shape, mut strides) = simplified(&areas);
                if shape.is_empty() {
                    shape.push(it.target.span.bytes / it.dtype.size());
                    strides.iter_mut().for_each(|strides| strides.push(1));
                }
                let operands = areas.iter().zip(strides).map(|(area, strides)| {
                    let slice = self.memory.slice(&area.span)?;
                    Ok(Operand { slice, strides })
                });
                let mut operands = operands.collect::<Result<Vec<_>>>()?;
                let request = Elementwise {
                    op: it.op,
                    dtype: it.dtype,
                    source_dtype: it.source_dtype,
                    shape,
                    target: operands.remove(0),
                    sources: operands,
                };
                return self.elementwise(stream, request);
            }
            OperationKind::Matmul(it) => {
                let (a, c) = (&it.a.span, &it.c.span);
                let pairs = vec![(self.memory.slice(a)?, self.memory.slice(c)?)];
                let matmuls = self.matmuls(it.spec, pairs, &it.b.span, it.bias.as_ref())?;
                let launch = matmuls.prepare(self.compute()?)?;
                CommandKind::Matmul(matmuls, launch)
            }
            OperationKind::PostMatmul(it) => {
                let transfers = self.transfers(&it.group)?;
                let pairs =
                    it.a.iter()
                        .zip(&transfers)
                        .map(|(a, send)| Ok((self.memory.slice(a)?, send.target()?.clone())))
                        .collect::<Result<Vec<_>>>()?;
                let matmuls = self.matmuls(it.spec, pairs, &it.b, it.bias.as_ref())?;
                let launch = matmuls.prepare(self.compute()?)?;
                CommandKind::PostMatmul(transfers, matmuls, launch)
            }
        };
        self.push(stream, kind);
        Ok(())
    }

    fn push(&mut self, stream: usize, kind: CommandKind) {
        self.commands.push(Command {
            stream,
            kind,
            operation: 0,
        });
    }

    /// Records an event on `stream`.
    fn record(&mut self, stream: usize) -> Result<Event> {
        let event = self.device.create_event(false)?;
        self.push(stream, CommandKind::Record(event.clone()));
        Ok(event)
    }

    fn wait_for(&mut self, stream: usize, mark: Option<Mark>) {
        if let Some((other, event)) = mark
            // Program order covers marks of the same stream.
            && other != stream
        {
            self.push(stream, CommandKind::WaitEvent(event));
        }
    }

    /// Adds engine work that posts `group`.
    fn push_engine(
        &mut self,
        stream: usize,
        kind: CommandKind,
        group: &[TransferId],
    ) -> Result<()> {
        self.wait_for(stream, self.engine_last.clone());
        self.push(stream, kind);
        if self.orders_engine || !group.is_empty() {
            let mark = (stream, self.record(stream)?);
            self.engine_posts
                .extend(group.iter().map(|id| (*id, mark.clone())));
            self.engine_last = Some(mark);
        }
        Ok(())
    }

    fn post(&mut self, group: &[TransferId], stream: usize) -> Result<()> {
        let (direct, engine) = self.split(group);
        if !direct.is_empty() {
            let transfers = self.transfers(&direct)?;
            self.push(stream, CommandKind::Post(transfers));
        }
        if engine.is_empty() {
            return Ok(());
        }
        let of = |direction: Direction| {
            engine
                .iter()
                .map(|id| &self.program.transfers[*id])
                .filter(|transfer| transfer.direction == direction)
                .map(|transfer| Ok((transfer.peer, self.memory.slice(&transfer.range)?)))
                .collect::<Result<Vec<_>>>()
        };
        let request = CollectiveRequest::Exchange {
            sends: of(Direction::Send)?,
            receives: of(Direction::Receive)?,
        };
        let kind = CommandKind::Collective(self.engine(&None)?, request);
        self.push_engine(stream, kind, &engine)
    }

    fn wait(&mut self, group: &[TransferId], stream: usize) -> Result<()> {
        let (direct, engine) = self.split(group);
        if !direct.is_empty() {
            let transfers = self.transfers(&direct)?;
            self.push(stream, CommandKind::Wait(transfers));
        }
        for id in engine {
            self.wait_for(stream, self.engine_posts.get(&id).cloned());
        }
        Ok(())
    }

    /// Partitions a group into direct transfers and engine transfers.
    fn split(&self, group: &[TransferId]) -> (Vec<TransferId>, Vec<TransferId>) {
        group
            .iter()
            .partition(|id| !TransferInstance::is_engine(&self.program.transfers[**id]))
    }

    fn transfers(&self, group: &[TransferId]) -> Result<Vec<Arc<Transfer>>> {
        let exchanged = |id: &TransferId| {
            let transfer = self.transfers.get(*id).cloned().flatten();
            transfer.ok_or_else(|| internal("a transfer was not exchanged"))
        };
        group.iter().map(exchanged).collect()
    }

    /// Adds an element-wise operation; splits it into several, each accumulating on the previous result, if it has
    /// more sources than a device takes at once.
    fn elementwise(&mut self, stream: usize, request: Elementwise) -> Result<()> {
        let (target, mut sources) = (request.target.clone(), request.sources.clone());
        // A source that is also the target must be read before it is overwritten.
        let is_target = |source: &Operand| {
            let same = source.slice.address() == target.slice.address();
            same && source.strides == target.strides
        };
        if sources.len() > MAX_ELEMENTWISE_SOURCES {
            // Stable, so that all others keep their order.
            sources.sort_by_key(|source| !is_target(source));
            if sources.iter().filter(|source| is_target(source)).count() > MAX_ELEMENTWISE_SOURCES {
                let message = format!(
                    "an operation reads its target more than {MAX_ELEMENTWISE_SOURCES} times; expected at most as often"
                );
                let help = "copy the target, or use several statements";
                return Err(Error::unsupported(message).with_help(help));
            }
        }
        let first = sources.len().min(MAX_ELEMENTWISE_SOURCES);
        let rest = sources.split_off(first);
        let mut parts = vec![sources];
        for more in rest.chunks(MAX_ELEMENTWISE_SOURCES - 1) {
            let before = std::iter::once(&target);
            parts.push(before.chain(more).cloned().collect());
        }
        for sources in parts {
            let part = Elementwise {
                sources,
                ..request.clone()
            };
            let launch = self.compute()?.prepare_elementwise(&part)?;
            self.push(stream, CommandKind::Elementwise(part, launch));
        }
        Ok(())
    }

    fn compute(&self) -> Result<Arc<dyn Compute>> {
        let missing = || internal("compute was not prepared");
        self.compute.clone().ok_or_else(missing)
    }

    fn engine(&self, members: &Option<Arc<[Rank]>>) -> Result<Arc<dyn CollectiveEngine>> {
        let missing = || internal("the engine was not joined");
        self.engines
            .joined
            .get(members)
            .cloned()
            .ok_or_else(missing)
    }

    fn matmuls(
        &self,
        spec: MatmulSpec,
        pairs: Vec<(DeviceSlice, DeviceSlice)>,
        b: &Range,
        bias: Option<&Range>,
    ) -> Result<Matmuls> {
        Ok(Matmuls {
            spec,
            pairs,
            b: self.memory.slice(b)?,
            bias: bias.map(|bias| self.memory.slice(bias)).transpose()?,
        })
    }
}

fn internal(what: &'static str) -> Error {
    Error::internal(what).with_operation("resolve a program")
}
