//! From the operations of a rank program and its memory to commands.

use super::RankContext;
use super::bind::Tensor;
use super::command::{Command, CommandKind};
use crate::device::{Compute, DeviceSlice, Event, MatmulSpec, PreparedLaunch, Stream};
use crate::error::{Error, ErrorKind, Result};
use crate::p2p::{Direction, Transfer};
use crate::program::ir::Backend;
use crate::program::rank_program::{OperationKind, Range, RankProgram, TransferId};
use std::collections::HashMap;
use std::sync::Arc;

/// Turns operations into commands.
pub(super) struct Resolver<'a> {
    pub(super) rank_program: &'a RankProgram,
    pub(super) memory: &'a [Tensor],
    pub(super) transfers: &'a [Option<Transfer>],
    pub(super) context: &'a RankContext,
    pub(super) streams: &'a [Option<Stream>],
    pub(super) compute: Option<Arc<dyn Compute>>,
}

impl Resolver<'_> {
    fn slice(&self, range: &Range) -> Result<DeviceSlice> {
        let tensor = self.memory[range.tensor].slice().ok_or_else(|| {
            Error::new(ErrorKind::Internal, "a tensor without memory is accessed")
        })?;
        tensor.slice(range.offset_bytes..range.end())
    }

    fn compute(&self) -> Result<Arc<dyn Compute>> {
        let missing = || Error::new(ErrorKind::Internal, "products were not prepared");
        self.compute.clone().ok_or_else(missing)
    }

    fn products(
        &self,
        spec: &MatmulSpec,
        products: &[(DeviceSlice, DeviceSlice)],
        b: &Range,
        bias: Option<&Range>,
    ) -> Result<Arc<dyn PreparedLaunch>> {
        let bias = bias.map(|bias| self.slice(bias)).transpose()?;
        let b = self.slice(b)?;
        self.compute()?
            .prepare_products(spec, products, &b, bias.as_ref())
    }

    /// Where the send `id` goes.
    fn target(&self, id: TransferId) -> Result<DeviceSlice> {
        match self.transfers.get(id) {
            Some(Some(transfer)) => transfer.target().cloned(),
            _ => Err(Error::new(
                ErrorKind::Internal,
                "a transfer was not exchanged",
            )),
        }
    }

    pub(super) fn commands(&self) -> Result<Vec<Command>> {
        let mut commands = Vec::with_capacity(self.rank_program.operations.len());
        // For transfers of the engine: the stream of the last post, and the event behind it.
        let mut carried: HashMap<TransferId, (usize, Event)> = HashMap::new();
        // The stream of the engine's last operation, and the event behind it.
        let mut engine_last: Option<(usize, Event)> = None;
        let engine_hops = self.engine_hops();
        for (operation, next) in self.rank_program.operations.iter().enumerate() {
            let stream = next.stream;
            let mut push = |stream: usize, kind: CommandKind| {
                commands.push(Command {
                    stream,
                    kind,
                    operation,
                })
            };
            match &next.kind {
                // Memory is there from the binding to the end of the plan, and so are handles.
                OperationKind::Allocate(_)
                | OperationKind::Deallocate(_)
                | OperationKind::Share(_) => {}
                OperationKind::Copy { target, source } => {
                    push(
                        stream,
                        CommandKind::Copy {
                            target: self.slice(target)?,
                            source: self.slice(source)?,
                        },
                    );
                }
                OperationKind::Matmul {
                    a,
                    b,
                    c,
                    bias,
                    dtype,
                    m,
                    n,
                    k,
                    accumulate,
                } => {
                    let mut spec = MatmulSpec::new(*m, *n, *k, *dtype);
                    spec.bias = bias.is_some();
                    spec.accumulate = *accumulate;
                    let products = [(self.slice(a)?, self.slice(c)?)];
                    let launch = self.products(&spec, &products, b, bias.as_ref())?;
                    push(stream, CommandKind::Matmul(launch));
                }
                OperationKind::Sum {
                    dtype,
                    target,
                    sources,
                } => {
                    let sources = sources
                        .iter()
                        .map(|source| self.slice(source))
                        .collect::<Result<Vec<_>>>()?;
                    let compute = self.compute()?;
                    let launch = compute.prepare_sum(*dtype, &self.slice(target)?, &sources)?;
                    push(stream, CommandKind::Sum(launch));
                }
                OperationKind::Post(group) => {
                    let (direct, engine) = self.split(group);
                    match direct[..] {
                        [] => {}
                        [only] => push(stream, CommandKind::Post(only)),
                        _ => push(stream, CommandKind::PostGroup(direct)),
                    }
                    if !engine.is_empty() {
                        if let Some((last, done)) = &engine_last
                            && *last != stream
                        {
                            push(stream, CommandKind::WaitEvent(done.clone()));
                        }
                        let done = self.context.device.create_event(false)?;
                        push(stream, self.engine_exchange(&engine, Some(done.clone()))?);
                        engine_last = Some((stream, done.clone()));
                        carried.extend(engine.into_iter().map(|id| (id, (stream, done.clone()))));
                    }
                }
                OperationKind::PostMatmul {
                    group,
                    a,
                    b,
                    bias,
                    dtype,
                    m,
                    n,
                    k,
                } => {
                    let mut spec = MatmulSpec::new(*m, *n, *k, *dtype);
                    spec.bias = bias.is_some();
                    let products = group
                        .iter()
                        .zip(a)
                        .map(|(id, a)| Ok((self.slice(a)?, self.target(*id)?)))
                        .collect::<Result<Vec<_>>>()?;
                    let launch = self.products(&spec, &products, b, bias.as_ref())?;
                    push(stream, CommandKind::PostMatmul(group.clone(), launch));
                }
                OperationKind::Wait(group) => {
                    let (direct, engine) = self.split(group);
                    match direct[..] {
                        [] => {}
                        [only] => push(stream, CommandKind::Wait(only)),
                        _ => push(stream, CommandKind::WaitGroup(direct)),
                    }
                    for id in engine {
                        if let Some((posted_on, done)) = carried.get(&id)
                            && *posted_on != stream
                        {
                            push(stream, CommandKind::WaitEvent(done.clone()));
                        }
                    }
                }
                OperationKind::Collective {
                    collective,
                    dtype,
                    target,
                    source,
                } => {
                    let kind = CommandKind::Collective {
                        collective: *collective,
                        dtype: *dtype,
                        target: self.slice(target)?,
                        source: self.slice(source)?,
                    };
                    if let Some((last, done)) = &engine_last
                        && *last != stream
                    {
                        push(stream, CommandKind::WaitEvent(done.clone()));
                    }
                    push(stream, kind);
                    if engine_hops {
                        let done = self.context.device.create_event(false)?;
                        push(stream, CommandKind::Record(done.clone()));
                        engine_last = Some((stream, done));
                    }
                }
                OperationKind::Synchronize(other) => {
                    if *other >= self.streams.len() {
                        return Err(Error::new(
                            ErrorKind::Internal,
                            "a stream that does not exist",
                        ));
                    }
                    let event = self.context.device.create_event(false)?;
                    push(*other, CommandKind::Record(event.clone()));
                    push(stream, CommandKind::WaitEvent(event));
                }
            }
        }
        Ok(commands)
    }

    /// Whether the engine's operations are on several streams. Then events put them in the order in
    /// which the host gives them, which an engine may rely on: peers that find them in two orders
    /// would wait for one another.
    fn engine_hops(&self) -> bool {
        let mut streams = self.rank_program.operations.iter().filter_map(|operation| {
            let engine = match &operation.kind {
                OperationKind::Collective { .. } => true,
                kind => !self.split(kind.posted()).1.is_empty(),
            };
            engine.then_some(operation.stream)
        });
        let first = streams.next();
        streams.any(|stream| Some(stream) != first)
    }

    fn split(&self, group: &[TransferId]) -> (Vec<TransferId>, Vec<TransferId>) {
        group.iter().partition(|id| {
            matches!(
                self.rank_program.transfers[**id].backend,
                Backend::Direct(_)
            )
        })
    }

    fn engine_exchange(&self, group: &[TransferId], done: Option<Event>) -> Result<CommandKind> {
        let (mut sends, mut receives) = (Vec::new(), Vec::new());
        for id in group {
            let transfer = &self.rank_program.transfers[*id];
            let side = (transfer.peer, self.slice(&transfer.range)?);
            match transfer.direction {
                Direction::Send => sends.push(side),
                Direction::Receive => receives.push(side),
            }
        }
        Ok(CommandKind::Exchange {
            sends,
            receives,
            done,
        })
    }
}
