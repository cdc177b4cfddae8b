//! Collectives between ranks on the host device, a stand-in for a vendor's library: sends and receives, with
//! an optional reduction.

use super::exchange::{Exchange, HEADER, aborted, outbox_bytes};
use super::operation::{Context, HostOperation};
use super::outbox::{MARK, OwnOutbox, open_all};
use super::{HostDevice, memory, stream};
use crate::deadline::Deadline;
use crate::device::{
    AllGatherBytes, Collective, CollectiveEngine, CollectiveRequest, Delays, DeviceSlice, Fault,
    FaultSet, RankCall, Reduction, Stream, VendorCommunicator, check_adopted,
};
use crate::error::{Error, ErrorKind, Rank, Result};
use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

const _: () = assert!(MARK.start >= size_of::<u64>() && MARK.end <= HEADER / 2);

/// Up to this size, every rank reduces everything itself in one step, which saves a round trip.
const ONE_SHOT_BYTES: usize = 128 << 10;

#[derive(Debug)]
pub(super) struct HostCollectives {
    inner: Arc<Exchange>,
    /// Raised when a peer is lost, or when all work of the device is aborted.
    fault: Arc<Fault>,
    device_fault: Arc<Fault>,
    delays: Option<Delays>,
    /// Whether it borrows another engine's outboxes and must not abort that engine.
    is_adopted: bool,
    ended: AtomicBool,
}

impl HostCollectives {
    /// Maps every rank's outbox. Files are opened through the owners' descriptors, so a dying rank leaves
    /// nothing behind. Fails on all ranks if one fails.
    pub(super) fn join(
        device: &HostDevice,
        (rank, world): (Rank, usize),
        fault: &Arc<Fault>,
        all_gather: AllGatherBytes<'_>,
    ) -> Result<Self> {
        let own = OwnOutbox::new(rank, outbox_bytes(world));
        // A rank that failed reports it, so that nobody waits for it.
        let place = own.as_ref().map(OwnOutbox::place);
        let places = all_gather(place.unwrap_or_default())?;
        let opened = own.as_ref().map_err(Error::clone);
        let opened = opened.and_then(|own| open_all(rank, world, own, &places));
        let failure = opened.as_ref().err().map(Error::to_string);
        // Descriptors must stay open until every peer has opened them.
        let failures = all_gather(failure.unwrap_or_default().into_bytes())?;
        let outboxes = opened?;
        if let Some(peer) = failures.iter().position(|failure| !failure.is_empty()) {
            let failure = String::from_utf8_lossy(&failures[peer]);
            let what = format!("rank {peer} could not join: {failure}");
            return Err(Error::new(ErrorKind::PeerFailed, what).with_peer(peer));
        }
        let exchange = Exchange::new(rank, outboxes, device.threads)?;
        Ok(Self::new(device, Arc::new(exchange), fault, false))
    }

    fn new(
        device: &HostDevice,
        inner: Arc<Exchange>,
        fault: &Arc<Fault>,
        is_adopted: bool,
    ) -> Self {
        Self {
            inner,
            fault: fault.clone(),
            device_fault: device.fault.clone(),
            delays: device.delays,
            is_adopted,
            ended: AtomicBool::new(false),
        }
    }

    /// Adopts the engine `communicator`, as returned by
    /// [`raw_communicator`](CollectiveEngine::raw_communicator).
    pub(super) fn adopt(
        device: &HostDevice,
        communicator: VendorCommunicator,
        place: (Rank, usize),
        fault: &Arc<Fault>,
    ) -> Result<Self> {
        let raw = communicator.as_raw().cast::<Exchange>().cast_const();
        // SAFETY: the caller that made `communicator` promised that it is one of this library and that its engine lives, so
        // that this is the address of a counted value; the count is raised for the reference that is made here.
        let inner = unsafe {
            Arc::increment_strong_count(raw);
            Arc::from_raw(raw)
        };
        check_adopted((inner.rank, inner.world()), place)?;
        Ok(Self::new(device, inner, fault, true))
    }

    fn world(&self) -> usize {
        self.inner.world()
    }

    fn enqueue_task(
        &self,
        stream: &Stream,
        task: impl Fn(&Exchange, &Context) -> Result<()> + Send + Sync + 'static,
    ) -> Result<()> {
        // Acquire: pairs with `abort`. A task that misses it is ended by the exchange.
        if self.ended.load(Ordering::Acquire) {
            return Err(aborted());
        }
        let inner = self.inner.clone();
        let task = move |context: &Context| task(&inner, context);
        let stream = stream::from_dyn(stream)?;
        let _noted = stream.depend_on([&self.fault]);
        stream.enqueue(HostOperation::Task(Arc::new(task)))
    }

    /// Sends `parts[p]` to rank p, and receives from rank p into `targets[p]`.
    fn scatter(
        &self,
        stream: &Stream,
        parts: Vec<DeviceSlice>,
        targets: Vec<DeviceSlice>,
    ) -> Result<()> {
        self.enqueue_task(stream, move |inner, context| {
            memory::copy(&targets[inner.rank], &parts[inner.rank]);
            let (sends, receives) = (inner.of_others(&parts), inner.of_others(&targets));
            inner.advance(context, &sends, &receives)
        })
    }

    /// Reduces the parts for this rank into `target`: rank p gets the reduction of all ranks' `parts[p]`.
    fn reduce_scatter(
        &self,
        stream: &Stream,
        parts: &[DeviceSlice],
        reduction: Reduction,
    ) -> Result<()> {
        let call = self.inner.reduced(parts, reduction);
        self.enqueue_task(stream, move |inner, context| {
            inner.call(context, &call, None).map(drop)
        })
    }

    /// Whether the one-step algorithm applies to `source`.
    fn is_one_shot(&self, source: &DeviceSlice) -> bool {
        self.world() <= 2 || source.bytes() <= ONE_SHOT_BYTES
    }

    /// Reduce-scatter followed by all-gather.
    fn two_shot(&self, stream: &Stream, reduction: &Reduction) -> Result<()> {
        let (world, size) = (self.world(), reduction.dtype.size());
        let elements = reduction.own.bytes() / size;
        let parts = |slice: &DeviceSlice| -> Result<Vec<DeviceSlice>> {
            // Whole elements, as evenly as they go; parts may be empty.
            let start = |part: usize| elements * part / world * size;
            (0..world)
                .map(|part| slice.slice(start(part)..start(part + 1)))
                .collect()
        };
        let (sources, targets) = (parts(&reduction.own)?, parts(&reduction.target)?);
        let own = Reduction {
            own: sources[self.inner.rank].clone(),
            target: targets[self.inner.rank].clone(),
            ..reduction.clone()
        };
        self.reduce_scatter(stream, &sources, own)?;
        self.scatter(
            stream,
            vec![targets[self.inner.rank].clone(); world],
            targets,
        )
    }

    /// Splits the slice into one equal part for each rank.
    fn parts(&self, slice: &DeviceSlice) -> Result<Vec<DeviceSlice>> {
        let each = slice.bytes() / self.world();
        (0..self.world())
            .map(|part| slice.slice(part * each..(part + 1) * each))
            .collect()
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

impl CollectiveEngine for HostCollectives {
    fn name(&self) -> String {
        "a substitute for NCCL over shared memory".to_owned()
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
        let reduction = |op| Reduction {
            op,
            dtype,
            own: source.clone(),
            target: target.clone(),
        };
        let rank = self.inner.rank;
        match collective {
            Collective::AllGather => self.scatter(stream, to_all(), self.parts(target)?),
            Collective::AllToAll => self.scatter(stream, self.parts(source)?, self.parts(target)?),
            Collective::AllReduce(op) if self.is_one_shot(source) => {
                self.reduce_scatter(stream, &to_all(), reduction(op))
            }
            Collective::AllReduce(op) => self.two_shot(stream, &reduction(op)),
            Collective::ReduceScatter(op) => {
                let parts = self.parts(source)?;
                let reduction = Reduction {
                    own: parts[rank].clone(),
                    ..reduction(op)
                };
                self.reduce_scatter(stream, &parts, reduction)
            }
            Collective::Broadcast(root) if rank != root => {
                self.exchange(stream, Vec::new(), vec![(root, target.clone())])
            }
            Collective::Broadcast(_) => {
                let sends = self.inner.of_others(&to_all());
                let (target, source) = (target.clone(), source.clone());
                self.enqueue_task(stream, move |inner, context| {
                    memory::copy(&target, &source);
                    inner.advance(context, &sends, &[])
                })
            }
            Collective::Reduce(_, root) if rank != root => {
                self.exchange(stream, vec![(root, source.clone())], Vec::new())
            }
            Collective::Reduce(op, _) => {
                let call = RankCall {
                    // The root only receives; `reduced` is made for reductions in which every rank does both.
                    sends: Vec::new(),
                    ..self.inner.reduced(&to_all(), reduction(op))
                };
                self.enqueue_task(stream, move |inner, context| {
                    inner.call(context, &call, None).map(drop)
                })
            }
        }
    }

    fn call(&self, call: &RankCall, deadline: Deadline) -> Result<Option<(Rank, Vec<u8>)>> {
        // Acquire: pairs with `abort`. A call that misses it is ended by the exchange.
        if self.ended.load(Ordering::Acquire) {
            return Err(aborted());
        }
        let faults = Arc::<FaultSet>::default();
        let _noted = faults.add([&self.fault]);
        let device_fault = self.device_fault.clone();
        let context = Context::new(device_fault, faults.clone(), self.delays, 0);
        context.check()?;
        self.inner.call(&context, call, Some(deadline))
    }

    fn raw_communicator(&self) -> *mut c_void {
        Arc::as_ptr(&self.inner).cast_mut().cast()
    }

    fn abort(&self) {
        // Before the exchange is aborted, so that no later call enters it.
        self.ended.store(true, Ordering::Release);
        if !self.is_adopted {
            self.inner.abort();
        }
    }
}
