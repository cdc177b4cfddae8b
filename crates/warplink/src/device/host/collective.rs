//! Collectives of host ranks, in the place of a vendor's.
//!
//! Every rank has an outbox: for each peer a chunk of shared memory, a count of chunks posted and
//! a count of chunks the peer has taken. A collective is a set of sends and receives that advance
//! together, chunk by chunk, and a reduction where there is one.

use super::operation::{Context, Operation};
use super::outbox::{MARK, OwnOutbox, open_all};
use super::{elementwise, memory, stream, words};
use crate::device::{
    AllGatherBytes, Collective, CollectiveEngine, CollectiveRequest, DeviceSlice, Fault, ReduceOp,
    Stream, VendorCommunicator, Word, check_adopted,
};
use crate::dtype::DType;
use crate::error::{Error, ErrorKind, Rank, Result};
use std::ffi::c_void;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const CHUNK: usize = 64 << 10;
// Posted and taken counts lie on cache lines of their own.
const HEADER: usize = 128;
pub(super) const BOX: usize = HEADER + CHUNK;
const _: () = assert!(MARK.start >= size_of::<u64>() && MARK.end <= 64);

// How often a transfer that waits looks again before it sleeps.
const SPINS: u32 = 200;
// The longest sleep until a loss or an abort is noticed, and with others to look after.
const LONG_NAP: Duration = Duration::from_millis(2);
const NAP: Duration = Duration::from_micros(100);

#[derive(Debug)]
pub(super) struct HostCollectives {
    inner: Arc<Inner>,
    /// Raised when a rank is lost to those that use this.
    fault: Arc<Fault>,
    /// Whether others use what this does, and it ends by itself.
    is_adopted: bool,
    ended: AtomicBool,
}

#[derive(Debug)]
struct Inner {
    rank: Rank,
    outboxes: Vec<DeviceSlice>,
    aborted: AtomicBool,
}

/// A send or a receive under way.
struct Move {
    chunk: DeviceSlice,
    posted: Word,
    taken: Word,
    data: DeviceSlice,
    position: usize,
    sends: bool,
}

impl HostCollectives {
    /// Maps every rank's outbox. The files are opened through the owners' descriptors, so nothing
    /// is left behind by a rank that dies. Where one rank fails, all do.
    pub(super) fn join(
        rank: Rank,
        world: usize,
        fault: &Arc<Fault>,
        all_gather: AllGatherBytes<'_>,
    ) -> Result<Self> {
        let own = OwnOutbox::new(rank, BOX * world);
        // Nobody waits for a rank that failed: it says so.
        let place = own.as_ref().map(OwnOutbox::place);
        let places = all_gather(place.unwrap_or_default())?;
        let opened = own.as_ref().map_err(Error::clone);
        let opened = opened.and_then(|own| open_all(rank, world, own, &places));
        let failure = opened.as_ref().err().map(Error::to_string);
        // The descriptor must stay open until every peer has opened it.
        let failures = all_gather(failure.unwrap_or_default().into_bytes())?;
        let outboxes = opened?;
        if let Some(peer) = failures.iter().position(|failure| !failure.is_empty()) {
            let failure = String::from_utf8_lossy(&failures[peer]);
            let what = format!("rank {peer} could not join: {failure}");
            return Err(Error::new(ErrorKind::PeerFailed, what).with_peer(peer));
        }
        Ok(Self {
            inner: Arc::new(Inner {
                rank,
                outboxes,
                aborted: AtomicBool::new(false),
            }),
            fault: fault.clone(),
            is_adopted: false,
            ended: AtomicBool::new(false),
        })
    }

    /// Those of `communicator`, as [`raw_communicator`](CollectiveEngine::raw_communicator) gave it.
    pub(super) fn adopt(
        communicator: VendorCommunicator,
        place: (Rank, usize),
        fault: &Arc<Fault>,
    ) -> Result<Self> {
        let raw = communicator.as_raw().cast::<Inner>().cast_const();
        // SAFETY: the caller that made `communicator` promised that it is one of this library and that its engine lives, so
        // that this is the address of a counted value; the count is raised for the reference that is made here.
        let inner = unsafe {
            Arc::increment_strong_count(raw);
            Arc::from_raw(raw)
        };
        check_adopted((inner.rank, inner.outboxes.len()), place)?;
        Ok(Self {
            inner,
            fault: fault.clone(),
            is_adopted: true,
            ended: AtomicBool::new(false),
        })
    }

    fn world(&self) -> usize {
        self.inner.outboxes.len()
    }

    fn enqueue_task(
        &self,
        stream: &Stream,
        task: impl Fn(&Inner, &Context) -> Result<()> + Send + Sync + 'static,
    ) -> Result<()> {
        if self.ended.load(Ordering::Acquire) {
            return Err(aborted());
        }
        let inner = self.inner.clone();
        let task = move |context: &Context| task(&inner, context);
        let stream = stream::from_dyn(stream)?;
        let _noted = stream.depend_on([&self.fault]);
        stream.enqueue(Operation::Task(Arc::new(task)))
    }

    /// Every rank's `parts[p]` goes to rank p; what arrives from rank p goes to `targets[p]`.
    fn scatter(
        &self,
        stream: &Stream,
        parts: Vec<DeviceSlice>,
        targets: Vec<DeviceSlice>,
    ) -> Result<()> {
        self.enqueue_task(stream, move |inner, context| {
            memory::copy(&targets[inner.rank], &parts[inner.rank]);
            let others = |slices: &[DeviceSlice]| -> Vec<(Rank, DeviceSlice)> {
                slices
                    .iter()
                    .cloned()
                    .enumerate()
                    .filter(|(peer, _)| *peer != inner.rank)
                    .collect()
            };
            inner.advance(context, &others(&parts), &others(&targets))
        })
    }

    /// The slice in as many equal parts as there are ranks.
    fn parts(&self, slice: &DeviceSlice) -> Result<Vec<DeviceSlice>> {
        let each = slice.bytes() / self.world();
        (0..self.world())
            .map(|part| slice.slice(part * each..(part + 1) * each))
            .collect()
    }

    /// Memory of `each` bytes for every rank.
    fn scratch(&self, each: usize) -> Result<Vec<DeviceSlice>> {
        self.parts(&memory::allocate(each * self.world())?)
    }

    fn reduce_into(
        &self,
        stream: &Stream,
        dtype: DType,
        op: ReduceOp,
        target: &DeviceSlice,
        sources: Vec<DeviceSlice>,
    ) -> Result<()> {
        let target = target.clone();
        self.enqueue_task(stream, move |_, _| {
            elementwise::reduce(op, dtype, &target, &sources)
        })
    }

    fn broadcast(
        &self,
        stream: &Stream,
        root: Rank,
        target: &DeviceSlice,
        source: &DeviceSlice,
    ) -> Result<()> {
        let (target, source) = (target.clone(), source.clone());
        self.enqueue_task(stream, move |inner, context| {
            if inner.rank != root {
                return inner.advance(context, &[], &[(root, target.clone())]);
            }
            memory::copy(&target, &source);
            let others = (0..inner.outboxes.len()).filter(|peer| *peer != root);
            let sends: Vec<_> = others.map(|peer| (peer, source.clone())).collect();
            inner.advance(context, &sends, &[])
        })
    }

    fn exchange(
        &self,
        stream: &Stream,
        sends: Vec<(Rank, DeviceSlice)>,
        receives: Vec<(Rank, DeviceSlice)>,
    ) -> Result<()> {
        self.enqueue_task(stream, move |inner, context| {
            inner.advance(context, &sends, &receives)
        })
    }
}

impl Inner {
    fn side(&self, from: Rank, to: Rank, data: &DeviceSlice, sends: bool) -> Result<Move> {
        let outbox = self.outboxes.get(from).filter(|_| to < self.outboxes.len());
        let outbox = outbox.ok_or_else(|| {
            Error::invalid(format!("rank {} is out of range", from.max(to))).with_peer(from.max(to))
        })?;
        let start = to * BOX;
        Ok(Move {
            chunk: outbox.slice(start + HEADER..start + BOX)?,
            posted: outbox.word(start)?,
            taken: outbox.word(start + 64)?,
            data: data.clone(),
            position: 0,
            sends,
        })
    }

    /// Moves everything, a chunk at a time, in whatever order the peers allow.
    fn advance(
        &self,
        context: &Context,
        sends: &[(Rank, DeviceSlice)],
        receives: &[(Rank, DeviceSlice)],
    ) -> Result<()> {
        let sends = sends
            .iter()
            .map(|(peer, data)| self.side(self.rank, *peer, data, true));
        let receives = receives
            .iter()
            .map(|(peer, data)| self.side(*peer, self.rank, data, false));
        let mut moves = sends.chain(receives).collect::<Result<Vec<_>>>()?;
        let mut idle = 0u32;
        while !moves.is_empty() {
            let mut moved = false;
            // Two transfers of one pair and direction share an outbox: only the first may advance.
            let mut busy: Vec<(u64, bool)> = Vec::new();
            for side in &mut moves {
                let lane = (side.posted.address(), side.sends);
                if !busy.contains(&lane) {
                    busy.push(lane);
                    moved |= side.step(context)?;
                }
            }
            moves.retain(|side| side.position < side.data.bytes());
            if moved {
                idle = 0;
                continue;
            }
            context.check()?;
            if self.aborted.load(Ordering::Acquire) {
                return Err(aborted());
            }
            idle += 1;
            if idle < SPINS {
                std::hint::spin_loop();
            } else if let [only] = &moves[..] {
                only.sleep(LONG_NAP);
            } else if let Some(first) = moves.first() {
                // The others are looked at when it is woken, or a little later.
                first.sleep(NAP);
            }
        }
        Ok(())
    }
}

fn aborted() -> Error {
    Error::new(ErrorKind::Closed, "the collectives were aborted")
        .with_help("join again with the ranks that are left")
}

impl Move {
    /// How many chunks were posted, and how many were taken.
    fn counts(&self) -> (u64, u64) {
        (words::load(&self.posted), words::load(&self.taken))
    }

    /// Whether the other side has done its part for the next chunk.
    fn is_ready(&self, posted: u64, taken: u64) -> bool {
        if self.sends {
            posted == taken
        } else {
            posted > taken
        }
    }

    /// Sleeps until the other side has done its part, or `limit` has passed.
    fn sleep(&self, limit: Duration) {
        let (posted, taken) = self.counts();
        if self.is_ready(posted, taken) {
            return;
        }
        if self.sends {
            words::sleep_while(&self.taken, taken, limit);
        } else {
            words::sleep_while(&self.posted, posted, limit);
        }
    }

    /// Moves one chunk if the other side is ready for it.
    fn step(&mut self, context: &Context) -> Result<bool> {
        let (posted, taken) = self.counts();
        if !self.is_ready(posted, taken) {
            return Ok(false);
        }
        context.delay();
        let range: Range<usize> = self.position..(self.position + CHUNK).min(self.data.bytes());
        let (here, there) = (
            self.data.slice(range.clone())?,
            self.chunk.slice(0..range.len())?,
        );
        if self.sends {
            memory::copy(&there, &here);
            words::store(&self.posted, posted + 1);
        } else {
            memory::copy(&here, &there);
            words::store(&self.taken, taken + 1);
        }
        self.position = range.end;
        Ok(true)
    }
}

impl CollectiveEngine for HostCollectives {
    fn name(&self) -> String {
        "host collectives".to_owned()
    }

    fn enqueue(&self, stream: &Stream, request: &CollectiveRequest) -> Result<()> {
        request.check(self.world())?;
        let (collective, dtype, target, source) = match request {
            CollectiveRequest::Exchange { sends, receives } => {
                return self.exchange(stream, sends.clone(), receives.clone());
            }
            CollectiveRequest::Collective {
                collective,
                dtype,
                target,
                source,
            } => (*collective, *dtype, target, source),
        };
        let to_all = || vec![source.clone(); self.world()];
        match collective {
            Collective::AllGather => self.scatter(stream, to_all(), self.parts(target)?),
            Collective::AllToAll => self.scatter(stream, self.parts(source)?, self.parts(target)?),
            Collective::AllReduce(op) => {
                let scratch = self.scratch(source.bytes())?;
                self.scatter(stream, to_all(), scratch.clone())?;
                self.reduce_into(stream, dtype, op, target, scratch)
            }
            Collective::ReduceScatter(op) => {
                let scratch = self.scratch(target.bytes())?;
                self.scatter(stream, self.parts(source)?, scratch.clone())?;
                self.reduce_into(stream, dtype, op, target, scratch)
            }
            Collective::Broadcast(root) => self.broadcast(stream, root, target, source),
            Collective::Reduce(_, root) if self.inner.rank != root => {
                self.exchange(stream, vec![(root, source.clone())], Vec::new())
            }
            Collective::Reduce(op, root) => {
                let mut sources = self.scratch(source.bytes())?;
                let others = sources.iter().cloned().enumerate();
                let others = others.filter(|(peer, _)| *peer != root).collect();
                self.exchange(stream, Vec::new(), others)?;
                sources[root] = source.clone();
                self.reduce_into(stream, dtype, op, target, sources)
            }
        }
    }

    fn raw_communicator(&self) -> *mut c_void {
        Arc::as_ptr(&self.inner).cast_mut().cast()
    }

    fn abort(&self) {
        self.ended.store(true, Ordering::Release);
        if !self.is_adopted {
            self.inner.aborted.store(true, Ordering::Release);
        }
    }
}
