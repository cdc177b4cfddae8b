//! Collectives, sends and receives.

mod enqueue;

pub(crate) use enqueue::make;

use crate::abi::{CallConfig, CallWishes, Handle, RawStream, element_type};
use crate::communicator::find;
use crate::group;
use crate::operators::Operator;
use crate::signals::Signaled;
use crate::status::{Failure, Outcome};
use crate::table::real;
use std::ffi::{c_int, c_void};
use warplink::DType;
use warplink::collective::{self, CollectiveKind};
use warplink::p2p::Direction;

/// Memory and streams are stored as integers, so that calls can be deferred until the end of a group.
pub(crate) enum Call {
    Collective(Collective),
    Message(Sent),
    Signal(Signaled),
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

/// Performs a collective with the real library, on its communicator `Handle`.
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

/// Arguments of a collective.
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

/// Submits a collective.
fn collective(
    name: &'static str,
    kind: CollectiveKind,
    by_real: ByReal,
    given: Outcome<Arguments>,
) -> Outcome {
    let given = given?;
    let comm = find(given.comm)?;
    if comm.usable()?.served().is_some() {
        // Now, so that nothing of the group is made.
        given.wishes.check_served()?;
    }
    let dtype = element_type(given.datatype)?;
    let root = given.root.map(|root| comm.rank_of(root, "root"));
    let root = root.transpose()?;
    // Resolved now: a user-defined operator may be destroyed right after the call, before the group ends.
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
    // The longer operand of a gather or scatter has as many elements for each rank.
    check_length(given.count, dtype, comm.ranks())?;
    // All ranks pass the same count, so none of them waits for a peer.
    if given.count == 0 {
        return Ok(());
    }
    call.check_memory(comm.rank())?;
    group::submit(comm, Call::Collective(call))
}

macro_rules! collectives {
    ($($function:ident $configured:ident: $name:ident $with_config:ident $kind:ident ($($op:ident)?; $($root:ident)?);)*) => {$(
        /// # Safety
        /// The memory must be device memory, and stay allocated until the stream has finished with it.
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
        /// As above; in addition, `config` must be null or point to as many bytes as it states.
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
    // An older form of the broadcast, in place on every rank.
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
    let comm = find(comm)?;
    comm.usable()?;
    let peer = comm.rank_of(peer, "peer")?;
    let dtype = element_type(datatype)?;
    check_length(count, dtype, 1)?;
    // Empty messages are not dropped: they take part in the matching of sends and receives of the group.
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
}

/// Fails unless memory can hold `count` elements for each of `ranks`.
fn check_length(count: usize, dtype: DType, ranks: usize) -> Outcome {
    let bytes = count.checked_mul(dtype.size());
    let bytes = bytes.and_then(|bytes| bytes.checked_mul(ranks));
    if bytes.is_none_or(|bytes| bytes > isize::MAX as usize) {
        return Err(Failure::argument(
            format!("{count} elements are more than memory can hold"),
            "pass a smaller count",
        ));
    }
    Ok(())
}

fn null(name: &str) -> Failure {
    Failure::argument(
        format!("{name} is null"),
        format!("pass an address for {name}"),
    )
}

impl Call {
    fn name(&self) -> &'static str {
        match self {
            Self::Collective(call) => call.name,
            Self::Message(message) => message.name(),
            Self::Signal(signal) => signal.name(),
        }
    }

    fn bytes(&self) -> usize {
        match self {
            Self::Collective(call) => call.bytes(),
            Self::Message(message) => message.bytes(),
            Self::Signal(signal) => signal.bytes(),
        }
    }

    fn stream(&self) -> u64 {
        match self {
            Self::Collective(call) => call.stream,
            Self::Message(message) => message.stream,
            Self::Signal(signal) => signal.stream(),
        }
    }

    /// Whether the real library executes it, though Warplink may execute others of its communicator.
    fn is_by_real(&self) -> bool {
        matches!(self, Self::Signal(signal) if signal.by_real().is_some())
    }

    /// # Safety
    /// `comm` must be the real library's communicator that corresponds to the caller's.
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
            Self::Signal(signal) => match signal.by_real() {
                Some(call) => call(comm),
                None => Err(Failure::usage(
                    "a signal of Warplink's in a communicator of NCCL's",
                    "report this error",
                )),
            },
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

    /// Converts to the library's call.
    fn call(&self) -> collective::Call {
        collective::Call {
            kind: self.kind,
            op: self.op.map(Operator::reduction),
            dtype: self.dtype,
            count: self.count,
            root: self.root,
        }
    }

    /// Fails if memory that the rank uses is null.
    fn check_memory(&self, rank: usize) -> Outcome {
        let (reads, writes) = self.call().uses(rank);
        if reads && self.input == 0 {
            return Err(null("sendbuff"));
        }
        if writes && self.output == 0 {
            return Err(null("recvbuff"));
        }
        Ok(())
    }
}
