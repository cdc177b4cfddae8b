//! Puts with signals, signals, and waits for signals.
//!
//! Where windows are served here (`windows`), signals are words that count up. These calls are part of their group: what is
//! sent goes out before this rank waits.

use crate::abi::{Handle, RawStream, WaitSignal, Window, check, element_type};
use crate::calls::Call;
use crate::communicator::{Comm, Joined, Served, find, lock};
use crate::group;
use crate::status::{Failure, Outcome};
use crate::table::real as functions;
use crate::windows::{are_real, no_window, outside, own_window};
use std::ffi::{c_int, c_uint, c_void};
use std::sync::{Arc, Mutex};
use warplink::Result;
use warplink::device::{DeviceSlice, MemoryOp, Stream, Turns, Word};
use warplink::signal::{RemoteSignals, Signals};

/// Signals that a rank has for each rank, by context.
const CONTEXTS: usize = 8;

/// Signals between the ranks of a communicator, from the first window on.
#[derive(Debug, Default)]
pub(crate) struct SignalPairs(Mutex<Option<JoinedSignals>>);

#[derive(Debug)]
struct JoinedSignals {
    own: Signals,
    /// By rank; `None` for this rank.
    peers: Vec<Option<RemoteSignals>>,
    /// How many signals were sent to a rank and awaited from it, by rank and context.
    sent: Vec<u64>,
    awaited: Vec<u64>,
    /// Orders the signals sent on several streams, whose words would otherwise count down.
    turns: Turns,
}

/// A call of this module.
pub(crate) struct Signaled {
    name: &'static str,
    bytes: usize,
    stream: u64,
    work: SignalWork,
}

enum SignalWork {
    /// Of the real library, on its communicator.
    Real(Box<dyn Fn(Handle) -> Outcome<c_int>>),
    /// A signal after a copy from the second memory to the first.
    Send(Place, Option<(DeviceSlice, DeviceSlice)>),
    /// For as many signals of each.
    Wait(Vec<(Place, u64)>),
}

impl Signaled {
    pub(crate) fn name(&self) -> &'static str {
        self.name
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(crate) fn stream(&self) -> u64 {
        self.stream
    }

    pub(crate) fn waits(&self) -> bool {
        matches!(self.work, SignalWork::Wait(_))
    }

    /// The call of the real library, if that executes it.
    pub(crate) fn by_real(&self) -> Option<&dyn Fn(Handle) -> Outcome<c_int>> {
        match &self.work {
            SignalWork::Real(call) => Some(call),
            _ => None,
        }
    }

    /// Enqueues a call that is served here.
    pub(crate) fn enqueue(&self, joined: &Joined, served: &Served, stream: &Stream) -> Outcome {
        // Values of signals count up from call to call.
        if stream.is_capturing()? {
            return Err(Failure::usage(
                "signals cannot be captured into a graph without the real NCCL",
                "make these calls outside of captures, or install NCCL 2.29 or later",
            ));
        }
        match &self.work {
            SignalWork::Real(_) => Ok(()),
            SignalWork::Send(to, copied) => served.signals.send(joined, *to, stream, || {
                let Some((target, source)) = copied else {
                    return Ok(());
                };
                stream.copy(target, source)
            }),
            SignalWork::Wait(places) => served.signals.wait(places, stream),
        }
    }
}

/// Submits a call of the real library. Its communicator is created now, or first in the group: that is collective, and one
/// thread may have several ranks.
fn by_real(
    (owner, joined): (Arc<Comm>, Arc<Joined>),
    (name, bytes, stream): (&'static str, usize, RawStream),
    call: impl Fn(Handle) -> Outcome<c_int> + 'static,
) -> Outcome {
    if joined.made_real().is_none() {
        let work = move || joined.real().map(drop);
        group::run(group::Task::new(&owner, work, || ()).blocking(true))?;
    }
    submit(
        owner,
        (name, bytes, stream),
        SignalWork::Real(Box::new(call)),
    )
}

fn submit(
    owner: Arc<Comm>,
    (name, bytes, stream): (&'static str, usize, RawStream),
    work: SignalWork,
) -> Outcome {
    let call = Signaled {
        name,
        bytes,
        stream: stream as u64,
        work,
    };
    group::submit(owner, Call::Signal(call))
}

/// # Safety
/// Pointers must be valid as NCCL's documentation requires.
#[allow(clippy::too_many_arguments, reason = "they are NCCL's")]
pub(crate) unsafe fn put_signal(
    memory: *const c_void,
    count: usize,
    datatype: c_int,
    peer: c_int,
    window: Window,
    offset: usize,
    signal: c_int,
    context: c_int,
    flags: c_uint,
    comm: Handle,
    stream: RawStream,
) -> Outcome {
    let owner = find(comm)?;
    let joined = owner.usable()?;
    let bytes = count.checked_mul(element_type(datatype)?.size());
    let here = !are_real(&joined)?;
    let Some(served) = joined.served().filter(|_| here) else {
        let of = ("PutSignal", bytes.unwrap_or(0), stream);
        // SAFETY: the caller's arguments are passed on, with the real library's communicator in place of ours.
        return by_real((owner, joined), of, move |real| unsafe {
            functions::PutSignal(
                memory, count, datatype, peer, window, offset, signal, context, flags, real, stream,
            )
        });
    };
    let to = Place::new(&owner, peer, signal, context)?;
    let own = own_window(window, comm).ok_or_else(|| no_window(window))?;
    let end = bytes.and_then(|bytes| offset.checked_add(bytes));
    let target = match own.peer(to.peer, owner.rank())? {
        Some(remote) => remote.memory().clone(),
        None => joined.memory(served, own.address as u64, own.bytes)?,
    };
    let end = end.filter(|end| *end <= target.bytes());
    let end = end.ok_or_else(|| outside(offset, count, target.bytes()))?;
    // A put of nothing still signals, and needs no source.
    let copied = if end > offset {
        check(memory, "localbuff")?;
        let source = joined.memory(served, memory as u64, end - offset)?;
        Some((target.slice(offset..end)?, source))
    } else {
        None
    };
    let of = ("PutSignal", end - offset, stream);
    submit(owner, of, SignalWork::Send(to, copied))
}

/// # Safety
/// No requirements; all functions of the table have the same signature.
pub(crate) unsafe fn signal(
    peer: c_int,
    signal: c_int,
    context: c_int,
    flags: c_uint,
    comm: Handle,
    stream: RawStream,
) -> Outcome {
    let owner = find(comm)?;
    let joined = owner.usable()?;
    let of = ("Signal", 0, stream);
    if are_real(&joined)? {
        // SAFETY: the caller's arguments are passed on, with the real library's communicator in place of ours.
        return by_real((owner, joined), of, move |real| unsafe {
            functions::Signal(peer, signal, context, flags, real, stream)
        });
    }
    let to = Place::new(&owner, peer, signal, context)?;
    submit(owner, of, SignalWork::Send(to, None))
}

/// # Safety
/// As [`put_signal`].
pub(crate) unsafe fn wait_signal(
    count: c_int,
    awaited: *mut WaitSignal,
    comm: Handle,
    stream: RawStream,
) -> Outcome {
    let owner = find(comm)?;
    let joined = owner.usable()?;
    check(awaited, "signalDescs")?;
    let count = usize::try_from(count).ok().filter(|count| *count > 0);
    let count = count.ok_or_else(|| {
        Failure::argument("no signals to wait for", "pass one description or more")
    })?;
    let given = (0..count).map(|at| {
        // SAFETY: the caller passes as many descriptions.
        unsafe { awaited.add(at).read_unaligned() }
    });
    let given: Vec<WaitSignal> = given.collect();
    let of = ("WaitSignal", 0, stream);
    if are_real(&joined)? {
        return by_real((owner, joined), of, move |real| {
            let mut given = given.clone();
            // SAFETY: as many descriptions are passed on, with the real library's communicator in place of ours.
            unsafe { functions::WaitSignal(given.len() as c_int, given.as_mut_ptr(), real, stream) }
        });
    }
    let places = given.iter().map(|one| {
        let place = Place::new(&owner, one.peer, one.signal, one.context)?;
        let times = u64::try_from(one.operations).map_err(|_| {
            let given = one.operations;
            let message = format!("opCnt is {given}; expected a number of signals");
            Failure::argument(message, "pass how many signals to wait for")
        })?;
        Ok((place, times))
    });
    let places = places.collect::<Outcome<_>>()?;
    submit(owner, of, SignalWork::Wait(places))
}

/// Peer and context of a signal.
#[derive(Clone, Copy, Debug)]
struct Place {
    peer: usize,
    context: usize,
}

impl Place {
    /// Checks the arguments of a call. As in NCCL, there is one signal in each context.
    fn new(comm: &Comm, peer: c_int, signal: c_int, context: c_int) -> Outcome<Self> {
        let peer = comm.rank_of(peer, "peer")?;
        let known = usize::try_from(context).ok().filter(|at| *at < CONTEXTS);
        match (signal, known) {
            (0, Some(context)) => Ok(Self { peer, context }),
            _ => Err(Failure::argument(
                format!(
                    "signal {signal} of context {context}; expected 0, of a context below {CONTEXTS}"
                ),
                "pass 0 for both",
            )),
        }
    }

    /// Number of a rank's signal for `rank`, or of its count of them.
    fn number(self, rank: usize) -> usize {
        rank * CONTEXTS + self.context
    }
}

impl SignalPairs {
    /// Connects the signals of all ranks, once. Collective.
    pub(crate) fn connect(&self, joined: &Joined) -> Outcome {
        let mut signals = lock(&self.0);
        if signals.is_some() {
            return Ok(());
        }
        let communicator = &joined.communicator;
        let count = communicator.world() * CONTEXTS;
        let own = communicator.signals(count)?;
        let peers = communicator.share(own.region())?;
        let peers = peers
            .into_iter()
            .map(|peer| peer.map(RemoteSignals::new).transpose());
        *signals = Some(JoinedSignals {
            peers: peers.collect::<Result<_>>()?,
            own,
            sent: vec![0; count],
            awaited: vec![0; count],
            turns: Turns::new(joined.device()),
        });
        Ok(())
    }

    /// Enqueues `before` and a signal to a peer.
    fn send(
        &self,
        joined: &Joined,
        to: Place,
        stream: &Stream,
        before: impl FnOnce() -> Result<()>,
    ) -> Outcome {
        let mut signals = lock(&self.0);
        let signals = signals.as_mut().ok_or_else(none_connected)?;
        let at = to.number(to.peer);
        let value = signals.sent[at] + 1;
        let own = joined.communicator.rank();
        let word = match &signals.peers[to.peer] {
            Some(peer) => peer.word(to.number(own))?,
            None => signals.own.word(to.number(own))?,
        };
        // Under the lock, which makes the order of values that of the turns: words count up in the order of the
        // calls.
        signals.turns.take(stream, || {
            before()?;
            stream.memory_ops(&[MemoryOp::write(&word, value)])
        })?;
        // Only once it is enqueued: a value that is counted but never written would make the peer wait forever.
        signals.sent[at] = value;
        Ok(())
    }

    /// Makes a stream wait for signals.
    fn wait(&self, places: &[(Place, u64)], stream: &Stream) -> Outcome {
        let mut signals = lock(&self.0);
        let signals = signals.as_mut().ok_or_else(none_connected)?;
        let mut awaited = signals.awaited.clone();
        let words = places.iter().map(|(place, times)| {
            let at = place.number(place.peer);
            awaited[at] += times;
            Ok((signals.own.word(at)?, awaited[at]))
        });
        let words: Vec<(Word, u64)> = words.collect::<Result<_>>()?;
        let waits = words
            .iter()
            .map(|(word, value)| MemoryOp::wait(word, *value));
        stream.memory_ops(&waits.collect::<Vec<_>>())?;
        // Only once the waits are enqueued, so that a call that failed can be repeated.
        signals.awaited = awaited;
        Ok(())
    }
}

fn none_connected() -> Failure {
    Failure::usage(
        "the ranks have no window, with which their signals are connected",
        "register a window of memory of ncclMemAlloc on every rank before",
    )
}
