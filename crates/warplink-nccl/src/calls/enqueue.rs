//! Enqueues the calls of a group.

use super::{Call, Collective, Sent};
use crate::abi::RawStream;
use crate::communicator::{Comm, Joined, RealHandle, Served};
use crate::operators::Operator;
use crate::status::{Failure, Outcome};
use crate::table::real;
use crate::{report, streams};
use std::sync::Arc;
use warplink::collective::{MAX_MESSAGES, Message};
use warplink::device::{DeviceSlice, Stream};
use warplink::p2p::Direction;

/// Enqueues the calls of a group. Does not wait for other ranks, but may wait for the compilation of kernels.
pub(crate) fn make(all: &[(Arc<Comm>, Call)]) -> Outcome {
    let mut parts: Vec<CallPart<'_>> = Vec::new();
    for (comm, _) in all {
        if !parts.iter().any(|known| Arc::ptr_eq(known.comm, comm)) {
            // Operands are looked up before anything is enqueued, so that an invalid one leaves nothing half done.
            parts.push(CallPart::new(comm, all)?);
        }
    }
    if parts.len() > 1 {
        // Loading a module may wait for running kernels, and kernels of one device may wait for those of another: load
        // all modules first.
        for part in &parts {
            part.prepare()?;
        }
    }
    let any_real = parts.iter().any(|part| part.joined.served().is_none());
    if any_real {
        // SAFETY: the function has no arguments.
        let code = unsafe { real::GroupStart() }?;
        Failure::check_real(code, "ncclGroupStart")?;
    }
    let mut first = Ok(());
    for part in &parts {
        let made = match part.joined.served() {
            Some(served) => part.by_warplink(served),
            None => part.by_real_library(),
        };
        // The rest is enqueued even after a failure: other ranks have made these calls, and would wait for them.
        if first.is_ok() {
            first = made;
        }
    }
    if any_real {
        // SAFETY: the function has no arguments.
        let code = unsafe { real::GroupEnd() }?;
        first = first.and(Failure::check_real(code, "ncclGroupEnd"));
    }
    first
}

/// The calls of a group on one communicator.
struct CallPart<'c> {
    comm: &'c Arc<Comm>,
    joined: Arc<Joined>,
    /// The calls of the whole group.
    all: &'c [(Arc<Comm>, Call)],
    /// The collectives that Warplink executes, each with its output and input.
    placed: Vec<(&'c Collective, CallMemory)>,
}

/// An output and an input; if the rank uses only one of them, both are that one.
type CallMemory = (DeviceSlice, DeviceSlice);

impl<'c> CallPart<'c> {
    fn new(comm: &'c Arc<Comm>, all: &'c [(Arc<Comm>, Call)]) -> Outcome<Self> {
        let mut part = Self {
            comm,
            joined: comm.usable()?,
            all,
            placed: Vec::new(),
        };
        if let Some(served) = part.joined.served() {
            let (joined, rank) = (&*part.joined, comm.rank());
            let placed = part.calls().filter_map(|call| match call {
                Call::Collective(call) => Some((call, call.memory(joined, served, rank))),
                Call::Message(_) => None,
            });
            let placed = placed.map(|(call, memory)| Ok((call, memory?)));
            part.placed = placed.collect::<Outcome<_>>()?;
        }
        Ok(part)
    }

    /// The calls on this communicator.
    fn calls(&self) -> impl Iterator<Item = &'c Call> + use<'c> {
        let comm = self.comm;
        let own = self
            .all
            .iter()
            .filter(|(other, _)| Arc::ptr_eq(other, comm));
        own.map(|(_, call)| call)
    }

    /// Compiles and loads the kernels.
    fn prepare(&self) -> Outcome {
        let Some(served) = self.joined.served() else {
            return Ok(());
        };
        for (call, (output, input)) in &self.placed {
            let of = call.call();
            match call.op.and_then(Operator::scalar) {
                // The memory for the multiplied input is not allocated yet.
                Some(_) => served.collectives.prepare(&of)?,
                None => served.collectives.prepare_for(&of, output, input)?,
            }
        }
        Ok(())
    }

    fn by_warplink(&self, served: &Served) -> Outcome {
        let joined = &*self.joined;
        let stream = |raw: u64| served.streams.find(joined.device(), raw as RawStream);
        for (call, memory) in &self.placed {
            let started = report::now();
            let rank = self.comm.rank();
            call.enqueue((joined, served, rank), memory, &stream(call.stream)?)?;
            report::note("warplink", call.name, call.bytes(), started);
        }
        // After all collectives, wherever they are in the group: every rank then has the same order between the two.
        let messages = self.calls().filter_map(|call| match call {
            Call::Message(sent) => Some(sent),
            Call::Collective(_) => None,
        });
        let messages: Vec<&Sent> = messages.collect();
        if !messages.is_empty() {
            let mut used: Vec<Stream> = Vec::new();
            let mut before = None;
            for message in &messages {
                // Mostly, all are of one stream.
                if before.replace(message.stream) == Some(message.stream) {
                    continue;
                }
                let stream = stream(message.stream)?;
                if !used.iter().any(|known| known.raw() == stream.raw()) {
                    used.push(stream);
                }
            }
            let started = report::now();
            streams::together(joined, &used, |stream| {
                exchange(joined, served, &messages, stream)
            })?;
            for message in &messages {
                report::note("warplink", message.name(), message.bytes(), started);
            }
        }
        // Once for the group, when everything is enqueued: one wait of the watch covers all of it.
        served.watch.made();
        Ok(())
    }

    fn by_real_library(&self) -> Outcome {
        let RealHandle(comm) = self.joined.real()?;
        for call in self.calls() {
            let started = report::now();
            // SAFETY: the arguments are the caller's, with the real library's communicator in place of ours.
            let code = unsafe { call.by_real_library(comm) }?;
            Failure::check_real(code, call.name())?;
            report::note("nccl", call.name(), call.bytes(), started);
        }
        Ok(())
    }
}

/// Enqueues sends and receives. If they exceed the limit of one launch, the n-th messages to and from all ranks are
/// grouped, so that both ends of each message are in the launch of the same number.
fn exchange(joined: &Joined, served: &Served, messages: &[&Sent], stream: &Stream) -> Outcome {
    let ranks = joined.communicator.world();
    let mut counts = vec![0; 2 * ranks];
    let mut numbered = Vec::with_capacity(messages.len());
    for message in messages {
        let memory = joined.memory(served, message.memory, message.bytes())?;
        let receives = usize::from(message.direction == Direction::Receive);
        let count: &mut usize = &mut counts[2 * message.peer + receives];
        numbered.push((*count, *message, memory));
        *count += 1;
    }
    // A launch has `rounds` messages to each rank and as many from it, thus `2 * ranks * rounds` at most.
    let rounds = (MAX_MESSAGES / (2 * ranks)).max(1);
    let all = counts.iter().max().copied().unwrap_or(0);
    for first in (0..all).step_by(rounds) {
        let some: Vec<Message<'_>> = numbered
            .iter()
            .filter(|(number, ..)| (first..first + rounds).contains(number))
            .map(|(_, message, memory)| Message {
                peer: message.peer,
                direction: message.direction,
                memory,
            })
            .collect();
        served.collectives.send_receive_overlapping(&some, stream)?;
    }
    Ok(())
}

impl Collective {
    fn memory(&self, joined: &Joined, served: &Served, rank: usize) -> Outcome<CallMemory> {
        let (reads, writes) = self.uses(rank);
        let (input_rows, output_rows) = self.kind.rows(joined.communicator.world());
        let place = |used: bool, address: u64, rows: usize| {
            used.then(|| joined.memory(served, address, rows * self.bytes()))
                .transpose()
        };
        let input = place(reads, self.input, input_rows)?;
        let output = place(writes, self.output, output_rows)?;
        Ok(match (output, input) {
            (Some(output), Some(input)) => (output, input),
            (Some(used), None) | (None, Some(used)) => (used.clone(), used),
            (None, None) => (served.nothing.clone(), served.nothing.clone()),
        })
    }

    fn enqueue(
        &self,
        (joined, served, rank): (&Joined, &Served, usize),
        (output, input): &CallMemory,
        stream: &Stream,
    ) -> Outcome {
        self.wishes.check_served()?;
        let (_, writes) = self.uses(rank);
        let call = self.call();
        let multiplied = match self.op.and_then(Operator::scalar) {
            None => None,
            Some(scalar) => {
                let target = writes.then_some(output);
                Some(scalar.multiply((joined, served), self.dtype, input, target, stream)?)
            }
        };
        let input = multiplied
            .as_ref()
            .map_or(input, |multiplied| &multiplied.memory);
        let output = match self.kind {
            // For an unused output, the input is the placeholder.
            _ if !writes => input,
            _ => output,
        };
        served.collectives.enqueue(&call, output, input, stream)?;
        if let Some(region) = multiplied.and_then(|multiplied| multiplied.region)
            // A replayed graph uses the memory again; otherwise the pool reuses it once the stream is past the
            // call.
            && stream.is_capturing()?
        {
            served.keep(region);
        }
        Ok(())
    }
}

impl Joined {
    /// Borrows `bytes` bytes at a device address.
    pub(crate) fn memory(
        &self,
        served: &Served,
        address: u64,
        bytes: usize,
    ) -> Outcome<DeviceSlice> {
        if bytes == 0 {
            return Ok(served.nothing.clone());
        }
        // SAFETY: the caller keeps the memory of a call allocated until its stream has finished with it.
        Ok(unsafe { self.device().borrow_operand(address, bytes) }?)
    }
}
