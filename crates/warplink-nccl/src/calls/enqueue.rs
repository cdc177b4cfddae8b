//! Enqueues the calls of a group.

use super::{Call, Collective, Sent};
use crate::abi::RawStream;
use crate::communicator::{Comm, Joined, RealHandle, Served};
use crate::operators::Operator;
use crate::signals::Signaled;
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
    let any_real = parts.iter().any(|part| !part.by_real.is_empty());
    if any_real {
        // SAFETY: the function has no arguments.
        let code = unsafe { real::GroupStart() }?;
        Failure::check_real(code, "ncclGroupStart")?;
    }
    // The rest is enqueued even after a failure, here and below: other ranks have made these calls, and would wait for
    // them.
    let mut first = Ok(());
    for part in &parts {
        if let Some(served) = part.joined.served() {
            first = first.and(part.by_warplink(served));
        }
        if !part.by_real.is_empty() {
            first = first.and(part.by_real_library());
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
    /// Those that the real library executes.
    by_real: Vec<&'c Call>,
    /// The others: collectives, each with its output and input; messages, each with its memory; signals.
    collectives: Vec<(&'c Collective, CallMemory)>,
    messages: Vec<(&'c Sent, DeviceSlice)>,
    signals: Vec<&'c Signaled>,
    /// The streams of the others, each once.
    streams: Vec<Stream>,
}

/// An output and an input; if the rank uses only one of them, both are that one.
type CallMemory = (DeviceSlice, DeviceSlice);

impl<'c> CallPart<'c> {
    fn new(comm: &'c Arc<Comm>, all: &'c [(Arc<Comm>, Call)]) -> Outcome<Self> {
        let joined = comm.usable()?;
        let mut part = Self {
            comm,
            joined: joined.clone(),
            by_real: Vec::new(),
            collectives: Vec::new(),
            messages: Vec::new(),
            signals: Vec::new(),
            streams: Vec::new(),
        };
        let mut before = None;
        for (other, call) in all {
            if !Arc::ptr_eq(other, comm) {
                continue;
            }
            let served = joined.served().filter(|_| !call.is_by_real());
            let Some(served) = served else {
                part.by_real.push(call);
                continue;
            };
            match call {
                Call::Collective(one) => {
                    let memory = one.memory(&joined, served, comm.rank())?;
                    part.collectives.push((one, memory));
                }
                Call::Message(one) => {
                    let memory = joined.memory(served, one.memory, one.bytes())?;
                    part.messages.push((one, memory));
                }
                Call::Signal(one) => part.signals.push(one),
            }
            // Mostly, all are of one stream.
            if before.replace(call.stream()) != Some(call.stream()) {
                let raw = call.stream() as RawStream;
                let stream = served.streams.find(joined.device(), raw)?;
                if !part.streams.iter().any(|known| known.raw() == stream.raw()) {
                    part.streams.push(stream);
                }
            }
        }
        part.check_own_messages()?;
        Ok(part)
    }

    /// Fails unless the rank's messages to itself are sent and received, as NCCL does.
    fn check_own_messages(&self) -> Outcome {
        let of = |direction| {
            let own = self.messages.iter().map(|(message, _)| message);
            let own = own.filter(|message| message.peer == self.comm.rank());
            own.filter(|message| message.direction == direction).count()
        };
        let (sends, receives) = (of(Direction::Send), of(Direction::Receive));
        if sends == receives {
            return Ok(());
        }
        Err(Failure::usage(
            format!(
                "{sends} sends of this rank to itself in a group; expected {receives}, as it receives"
            ),
            "give each message of a rank to itself a send and a receive in one group",
        ))
    }

    /// Compiles and loads the kernels.
    fn prepare(&self) -> Outcome {
        let Some(served) = self.joined.served() else {
            return Ok(());
        };
        for (call, (output, input)) in &self.collectives {
            let of = call.call();
            match call.op.and_then(Operator::scalar) {
                Some(_) => {
                    served.load_multiplying(&self.joined)?;
                    // The memory for the multiplied input is not allocated yet.
                    served.collectives.prepare(&of)?;
                }
                None => served.collectives.prepare_for(&of, output, input)?,
            }
        }
        Ok(())
    }

    fn by_warplink(&self, served: &Served) -> Outcome {
        // As in NCCL, a group of several streams begins when all of them have come to it, and they go on when it is done.
        let made = streams::together(&self.joined, &self.streams, |stream| {
            let mut first = Ok(());
            for (call, memory) in &self.collectives {
                let started = report::now();
                let on = (&*self.joined, served, self.comm.rank());
                first = first.and(call.enqueue(on, memory, stream));
                report::note("warplink", call.name, call.bytes(), started);
            }
            // After all collectives, wherever they are in the group: every rank then has the same order between the two.
            if !self.messages.is_empty() {
                let started = report::now();
                first = first.and(exchange(&self.joined, served, &self.messages, stream));
                let messages = self
                    .messages
                    .iter()
                    .map(|(one, _)| (one.name(), one.bytes()));
                report::note_all("warplink", messages, started);
            }
            // Waits last: this rank's signals may be what others wait for before they send theirs.
            for waits in [false, true] {
                for call in self.signals.iter().filter(|call| call.waits() == waits) {
                    let started = report::now();
                    first = first.and(call.enqueue(&self.joined, served, stream));
                    report::note("warplink", call.name(), call.bytes(), started);
                }
            }
            first
        });
        // Once for the group, when everything is enqueued: one wait of the watch covers all of it.
        served.watch.made();
        made
    }

    fn by_real_library(&self) -> Outcome {
        let RealHandle(comm) = self.joined.real()?;
        let made = self.by_real.iter().map(|call| {
            let started = report::now();
            // SAFETY: the arguments are the caller's, with the real library's communicator in place of ours.
            let code = unsafe { call.by_real_library(comm) }?;
            Failure::check_real(code, call.name())?;
            report::note("nccl", call.name(), call.bytes(), started);
            Ok(())
        });
        made.fold(Ok(()), Outcome::and)
    }
}

/// Enqueues sends and receives. If they exceed the limit of one launch, the n-th messages to and from all ranks are
/// grouped, so that both ends of each message are in the launch of the same number.
fn exchange(
    joined: &Joined,
    served: &Served,
    messages: &[(&Sent, DeviceSlice)],
    stream: &Stream,
) -> Outcome {
    let ranks = joined.communicator.world();
    let mut counts = vec![0; 2 * ranks];
    let numbered = messages.iter().map(|(message, memory)| {
        let receives = usize::from(message.direction == Direction::Receive);
        let count: &mut usize = &mut counts[2 * message.peer + receives];
        *count += 1;
        (*count - 1, message, memory)
    });
    let numbered: Vec<_> = numbered.collect();
    // A launch has `rounds` messages to each rank and as many from it, thus `2 * ranks * rounds` at most.
    let rounds = (MAX_MESSAGES / (2 * ranks)).max(1);
    let all = counts.iter().max().copied().unwrap_or(0);
    let mut made = Ok(());
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
        made = made.and(served.collectives.send_receive_overlapping(&some, stream));
    }
    Ok(made?)
}

impl Collective {
    fn memory(&self, joined: &Joined, served: &Served, rank: usize) -> Outcome<CallMemory> {
        let (reads, writes) = self.call().uses(rank);
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
        let call = self.call();
        let (_, writes) = call.uses(rank);
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
