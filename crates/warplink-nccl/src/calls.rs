//! Collectives, sends and receives, from the caller's pointers to what is enqueued.

use crate::abi::{CallConfig, CallWishes, Handle, RawStream, element_type};
use crate::communicator::{Comm, Joined, RealHandle, Served, find};
use crate::operators::Operator;
use crate::status::{Failure, Outcome};
use crate::table::real;
use crate::{group, report, streams};
use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::time::Instant;
use warplink::DType;
use warplink::collective::{self, CollectiveKind, MAX_MESSAGES, Message};
use warplink::device::{DeviceSlice, Stream};
use warplink::p2p::Direction;

/// Memory and streams are kept as numbers, so that calls can wait for the end of a group.
#[derive(Clone, Debug)]
pub(crate) enum Call {
    Collective(Collective),
    Message(Sent),
}

#[derive(Clone, Debug)]
pub(crate) struct Collective {
    name: &'static str,
    by_real: ByReal,
    wishes: CallWishes,
    kind: CollectiveKind,
    datatype: c_int,
    dtype: DType,
    op: Option<Operator>,
    count: usize,
    root: Option<usize>,
    input: u64,
    output: u64,
    stream: u64,
}

/// Makes a collective by the real library, of which `Handle` is a communicator.
type ByReal = unsafe fn(&Collective, Handle) -> Outcome<c_int>;

/// A send or a receive.
#[derive(Clone, Debug)]
pub(crate) struct Sent {
    direction: Direction,
    peer: usize,
    memory: u64,
    datatype: c_int,
    dtype: DType,
    count: usize,
    stream: u64,
}

/// What a caller passes of a collective.
struct Arguments {
    input: *const c_void,
    output: *mut c_void,
    count: usize,
    datatype: c_int,
    op: Option<c_int>,
    root: Option<c_int>,
    comm: Handle,
    stream: RawStream,
    wishes: CallWishes,
}

/// Makes a collective, or notes that the group has failed.
fn collective(
    name: &'static str,
    kind: CollectiveKind,
    by_real: ByReal,
    given: Outcome<Arguments>,
) -> Outcome {
    let made = || {
        let given = given?;
        let comm = find(given.comm)?;
        comm.usable()?;
        let dtype = element_type(given.datatype)?;
        let root = given.root.map(|root| comm.rank_of(root, "root"));
        let root = root.transpose()?;
        let op = given.op.map(|op| Operator::find(&comm, op, dtype));
        let call = Collective {
            name,
            by_real,
            wishes: given.wishes,
            kind,
            datatype: given.datatype,
            dtype,
            op: op.transpose()?,
            count: given.count,
            root,
            input: given.input as u64,
            output: given.output as u64,
            stream: given.stream as u64,
        };
        let bytes = given.count.checked_mul(dtype.size());
        let bytes = bytes.and_then(|bytes| bytes.checked_mul(comm.ranks()));
        if bytes.is_none_or(|bytes| bytes > isize::MAX as usize) {
            return Err(Failure::argument(
                format!("{} elements are more than memory can hold", given.count),
                "pass a smaller count",
            ));
        }
        // All ranks pass the same count, so none waits for one that makes the call.
        if given.count == 0 {
            return Ok(());
        }
        call.check_memory(comm.rank())?;
        group::submit(comm, Call::Collective(call))
    };
    made().inspect_err(group::note)
}

macro_rules! collectives {
    ($($function:ident $configured:ident: $name:ident $with_config:ident $kind:ident ($($op:ident)?; $($root:ident)?);)*) => {$(
        /// # Safety
        /// The memory must be the device's, and stay allocated until the stream is done.
        #[allow(clippy::too_many_arguments, reason = "they are NCCL's")]
        pub(crate) unsafe fn $function(
            input: *const c_void,
            output: *mut c_void,
            count: usize,
            datatype: c_int,
            $($op: c_int,)?
            $($root: c_int,)?
            comm: Handle,
            stream: RawStream,
        ) -> Outcome {
            let none = std::ptr::null();
            // SAFETY: the caller's arguments are passed on.
            unsafe { $configured(input, output, count, datatype, $($op,)? $($root,)? comm, stream, none) }
        }

        /// # Safety
        /// The same, and `config` must be null or point to as many bytes as it states.
        #[allow(clippy::too_many_arguments, reason = "they are NCCL's")]
        pub(crate) unsafe fn $configured(
            input: *const c_void,
            output: *mut c_void,
            count: usize,
            datatype: c_int,
            $($op: c_int,)?
            $($root: c_int,)?
            comm: Handle,
            stream: RawStream,
            config: *const CallConfig,
        ) -> Outcome {
            // SAFETY: the caller passes a configuration.
            let wishes = unsafe { CallWishes::read(config) };
            let given = wishes.map(|wishes| Arguments {
                input,
                output,
                count,
                datatype,
                op: collectives!(@given $($op)?),
                root: collectives!(@given $($root)?),
                comm,
                stream,
                wishes,
            });
            unsafe fn by_real(call: &Collective, comm: Handle) -> Outcome<c_int> {
                let (input, output) = (call.input as *const c_void, call.output as *mut c_void);
                let (count, datatype, stream) = (call.count, call.datatype, call.stream as RawStream);
                $(let $op = call.op.map_or(0, Operator::number);)?
                $(let $root = call.root.unwrap_or(0) as c_int;)?
                // SAFETY: the arguments are the caller's.
                unsafe {
                    match call.wishes.config() {
                        None => real::$name(input, output, count, datatype, $($op,)? $($root,)? comm, stream),
                        Some(config) => real::$with_config(
                            input, output, count, datatype, $($op,)? $($root,)? comm, stream, config,
                        ),
                    }
                }
            }
            collective(stringify!($name), CollectiveKind::$kind, by_real, given)
        }
    )*};
    (@given $name:ident) => { Some($name) };
    (@given) => { None };
}

collectives! {
    all_reduce all_reduce_with: AllReduce AllReduceConfig AllReduce (op;);
    reduce_scatter reduce_scatter_with: ReduceScatter ReduceScatterConfig ReduceScatter (op;);
    reduce reduce_with: Reduce ReduceConfig Reduce (op; root);
    broadcast broadcast_with: Broadcast BroadcastConfig Broadcast (; root);
    gather gather_with: Gather GatherConfig Gather (; root);
    scatter scatter_with: Scatter ScatterConfig Scatter (; root);
    all_gather all_gather_with: AllGather AllGatherConfig AllGather (;);
    all_to_all all_to_all_with: AlltoAll AlltoAllConfig AllToAll (;);
}

/// # Safety
/// As [`broadcast`].
pub(crate) unsafe fn bcast(
    memory: *mut c_void,
    count: usize,
    datatype: c_int,
    root: c_int,
    comm: Handle,
    stream: RawStream,
) -> Outcome {
    // SAFETY: the caller's pointers are passed on.
    unsafe { broadcast(memory, memory, count, datatype, root, comm, stream) }
}

/// # Safety
/// As [`broadcast`].
pub(crate) unsafe fn send(
    memory: *const c_void,
    count: usize,
    datatype: c_int,
    peer: c_int,
    comm: Handle,
    stream: RawStream,
) -> Outcome {
    message(
        Direction::Send,
        (memory as u64, count, datatype),
        peer,
        comm,
        stream,
    )
}

/// # Safety
/// As [`broadcast`].
pub(crate) unsafe fn receive(
    memory: *mut c_void,
    count: usize,
    datatype: c_int,
    peer: c_int,
    comm: Handle,
    stream: RawStream,
) -> Outcome {
    message(
        Direction::Receive,
        (memory as u64, count, datatype),
        peer,
        comm,
        stream,
    )
}

fn message(
    direction: Direction,
    (memory, count, datatype): (u64, usize, c_int),
    peer: c_int,
    comm: Handle,
    stream: RawStream,
) -> Outcome {
    let made = || {
        let comm = find(comm)?;
        comm.usable()?;
        let peer = comm.rank_of(peer, "peer")?;
        let dtype = element_type(datatype)?;
        let bytes = count.checked_mul(dtype.size());
        if bytes.is_none_or(|bytes| bytes > isize::MAX as usize) {
            return Err(Failure::argument(
                format!("{count} elements are more than memory can hold"),
                "pass a smaller count",
            ));
        }
        if count > 0 && memory == 0 {
            return Err(null("the memory"));
        }
        let call = Sent {
            direction,
            peer,
            memory,
            datatype,
            dtype,
            count,
            stream: stream as u64,
        };
        group::submit(comm, Call::Message(call))
    };
    made().inspect_err(group::note)
}

fn null(name: &str) -> Failure {
    Failure::argument(
        format!("{name} is null"),
        format!("pass an address for {name}"),
    )
}

/// Enqueues the calls of a group. Does not wait for other ranks, but for kernels that are compiled.
pub(crate) fn make(all: &[(Arc<Comm>, Call)]) -> Outcome {
    let mut comms: Vec<&Arc<Comm>> = Vec::new();
    for (comm, _) in all {
        if !comms.iter().any(|known| Arc::ptr_eq(known, comm)) {
            comms.push(comm);
        }
    }
    let mut parts = Vec::with_capacity(comms.len());
    for comm in comms {
        let calls = all.iter().filter(|(other, _)| Arc::ptr_eq(other, comm));
        parts.push(Part::new(comm, calls.map(|(_, call)| call).collect())?);
    }
    if parts.len() > 1 {
        // Kernels of one device may wait for those of another, so all are loaded before.
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
            None => by_real_library(&part.joined, &part.calls),
        };
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
struct Part<'c> {
    joined: Arc<Joined>,
    rank: usize,
    calls: Vec<&'c Call>,
    /// The collectives that Warplink does, each with its output and its input.
    placed: Vec<(&'c Collective, Memory)>,
}

/// An output and an input; where the rank uses only one of them, that stands for both.
type Memory = (DeviceSlice, DeviceSlice);

impl<'c> Part<'c> {
    fn new(comm: &Comm, calls: Vec<&'c Call>) -> Outcome<Self> {
        let (joined, rank) = (comm.usable()?, comm.rank());
        let mut placed = Vec::new();
        if let Some(served) = joined.served() {
            for call in &calls {
                if let Call::Collective(call) = call {
                    placed.push((call, call.memory(&joined, served, rank)?));
                }
            }
        }
        Ok(Self {
            joined,
            rank,
            calls,
            placed,
        })
    }

    /// Has kernels compiled and loaded.
    fn prepare(&self) -> Outcome {
        let Some(served) = self.joined.served() else {
            return Ok(());
        };
        for (call, (output, input)) in &self.placed {
            let of = call.call();
            match call.op.and_then(Operator::scalar) {
                // The input is multiplied into memory that is not there yet.
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
            let started = Instant::now();
            call.enqueue((joined, served, self.rank), memory, &stream(call.stream)?)?;
            report::note("warplink", call.name, call.bytes(), started);
        }
        let messages: Vec<&Sent> = self
            .calls
            .iter()
            .filter_map(|call| match call {
                Call::Message(sent) => Some(sent),
                Call::Collective(_) => None,
            })
            .collect();
        if !messages.is_empty() {
            let mut used: Vec<Stream> = Vec::new();
            for message in &messages {
                let stream = stream(message.stream)?;
                if !used.iter().any(|known| known.raw() == stream.raw()) {
                    used.push(stream);
                }
            }
            let started = Instant::now();
            streams::together(joined, &used, |stream| {
                exchange(joined, served, &messages, stream)
            })?;
            for message in &messages {
                report::note("warplink", message.name(), message.bytes(), started);
            }
        }
        served.watch.made();
        Ok(())
    }
}

/// Enqueues sends and receives. Where one launch does not do so many, the n-th ones to and from all ranks go together,
/// so that both ends of each are in the launch of the same number.
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

fn by_real_library(joined: &Joined, calls: &[&Call]) -> Outcome {
    let RealHandle(comm) = joined.real()?;
    for call in calls {
        let started = Instant::now();
        // SAFETY: the arguments are the caller's, with the real library's communicator in place of ours.
        let code = unsafe { call.by_real_library(comm) }?;
        Failure::check_real(code, call.name())?;
        report::note("nccl", call.name(), call.bytes(), started);
    }
    Ok(())
}

impl Call {
    fn name(&self) -> &'static str {
        match self {
            Self::Collective(call) => call.name,
            Self::Message(message) => message.name(),
        }
    }

    fn bytes(&self) -> usize {
        match self {
            Self::Collective(call) => call.bytes(),
            Self::Message(message) => message.bytes(),
        }
    }

    /// # Safety
    /// `comm` must be the real library's communicator that stands for the caller's.
    unsafe fn by_real_library(&self, comm: Handle) -> Outcome<c_int> {
        match self {
            Self::Message(sent) => {
                let (memory, stream) = (sent.memory as *mut c_void, sent.stream as RawStream);
                let (count, datatype, peer) = (sent.count, sent.datatype, sent.peer as c_int);
                // SAFETY: the arguments are the caller's.
                unsafe {
                    match sent.direction {
                        Direction::Send => real::Send(memory, count, datatype, peer, comm, stream),
                        Direction::Receive => {
                            real::Recv(memory, count, datatype, peer, comm, stream)
                        }
                    }
                }
            }
            // SAFETY: the communicator is the real library's.
            Self::Collective(call) => unsafe { (call.by_real)(call, comm) },
        }
    }
}

impl Sent {
    const fn name(&self) -> &'static str {
        match self.direction {
            Direction::Send => "Send",
            Direction::Receive => "Recv",
        }
    }

    const fn bytes(&self) -> usize {
        self.count * self.dtype.size()
    }
}

impl Collective {
    const fn bytes(&self) -> usize {
        self.count * self.dtype.size()
    }

    /// The library's call.
    fn call(&self) -> collective::Call {
        collective::Call {
            kind: self.kind,
            op: self.op.map(Operator::reduction),
            dtype: self.dtype,
            count: self.count,
            root: self.root,
        }
    }

    /// Whether a rank reads the input and writes the output.
    fn uses(&self, rank: usize) -> (bool, bool) {
        let at_root = self.root.is_none_or(|root| root == rank);
        let to_root = matches!(self.kind, CollectiveKind::Reduce | CollectiveKind::Gather);
        (at_root || to_root, at_root || !to_root)
    }

    /// Fails for null where the rank uses the memory.
    fn check_memory(&self, rank: usize) -> Outcome {
        let (reads, writes) = self.uses(rank);
        if reads && self.input == 0 {
            return Err(null("sendbuff"));
        }
        if writes && self.output == 0 {
            return Err(null("recvbuff"));
        }
        Ok(())
    }

    fn memory(&self, joined: &Joined, served: &Served, rank: usize) -> Outcome<Memory> {
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
        (output, input): &Memory,
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
            // Where nothing is written, the same stands for both.
            _ if !writes => input,
            _ => output,
        };
        served.collectives.enqueue(&call, output, input, stream)?;
        if let Some(region) = multiplied.and_then(|multiplied| multiplied.region)
            && stream.is_capturing()?
        {
            served.keep(region);
        }
        Ok(())
    }
}

impl Joined {
    /// `bytes` bytes at an address of the device.
    fn memory(&self, served: &Served, address: u64, bytes: usize) -> Outcome<DeviceSlice> {
        if bytes == 0 {
            return Ok(served.nothing.clone());
        }
        // SAFETY: the caller keeps the memory of a call until its stream is done.
        Ok(unsafe { self.device().borrow(address, bytes, Arc::new(())) }?)
    }
}
