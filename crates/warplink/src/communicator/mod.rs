//! Communicators: the main entry point.

mod collectives;
mod engines;
mod groups;
mod kernels;
mod losses;
mod proxies;
mod services;
mod threads;
mod topology;
mod waiting;

use crate::bootstrap::{AbortHandle, Bootstrap, Group};
use crate::channel::{Connection, ConnectionExchange, ConnectionRequest, Connections};
use crate::collective::{self, Collectives};
use crate::config::Config;
use crate::deadline::Deadline;
use crate::device::{
    AllocationKind, CollectiveEngine, Compute, Device, DeviceSlice, Fault, Priority, Stream,
};
use crate::error::{Error, ErrorKind, Rank, Result};
use crate::exchange::{ExchangeServices, GroupExchange};
use crate::memory::{ExportedHandle, HANDLE_BYTES, Region, RemoteRegion};
use crate::p2p::{Batch, Path, StreamBarrier, Transfer, TransferExchange, TransferRequest};
use crate::program::Executor;
use crate::program::execute::{EngineSource, KernelNotes, RankContext};
use crate::signal::Signals;
use crate::sync::lock;
use crate::topology::Topology;
use engines::Engines;
use services::JobServices;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

/// An ordered group of the ranks of a [`Job`](crate::Job), as seen from one of them. Each communicator
/// numbers its ranks from 0 and has its own tags, keys and signals, so operations in different communicators
/// never interfere. Per-process resources (device, connection to the store, threads, registered memory)
/// belong to the job, so a communicator is cheap.
///
/// Methods that involve other ranks document whether they block; host waits end at the configured timeout,
/// and when a rank is lost, with an error that names it. A lost rank fails the communicators that contain it,
/// and no others: streams waiting for their signals fail permanently, and so does every later call. Survivors
/// continue in the communicator that [`survivors`](Self::survivors) creates. A stream that waited for signals
/// of a failed communicator, and was not synchronized since, is unusable for other communicators too. Work
/// still queued on it for those may be incomplete, so they fail too, on every rank, with
/// [`ErrorKind::PeerFailed`], and continue with `survivors` as well. Use separate streams for communicators
/// that should fail independently. Clones share the communicator.
#[derive(Clone, Debug)]
pub struct Communicator {
    job: Arc<JobServices>,
    group: Arc<Group>,
    /// Raised when one of its ranks is lost.
    fault: Arc<Fault>,
    /// Whether closing it leaves the job.
    is_world: bool,
    transfers: Arc<TransferExchange>,
    connections: Arc<ConnectionExchange>,
    engines: Arc<Engines>,
    made: Arc<Mutex<MadeGroups>>,
    topology: Arc<Mutex<Option<Arc<Topology>>>>,
    /// Those with default options, once joined.
    collectives: Arc<Mutex<Option<Collectives>>>,
    /// Notes of its plans' kernels.
    kernel_notes: Arc<KernelNotes>,
    /// Registry of all joined collectives.
    joined_collectives: Arc<collective::JoinedCollectives>,
}

/// Number of groups created from a communicator, by method and members.
type MadeGroups = HashMap<(&'static str, Vec<Rank>), u64>;

impl Communicator {
    /// Joins with the configuration in the environment; see [`Config::from_env`]. Blocks until all ranks have
    /// joined.
    pub fn from_env() -> Result<Self> {
        Self::join(&Config::from_env()?)
    }

    /// Joins the other ranks. Blocks until all have joined.
    ///
    /// Those of [`Bootstrap::join`] and [`device::open`](crate::device::open), and [`ErrorKind::Mismatch`] if
    /// ranks use different kinds of devices.
    pub fn join(config: &Config) -> Result<Self> {
        Self::join_with(config, &AbortHandle::default())
    }

    /// As [`join`](Self::join), until another thread aborts it by `abort`, which can then also abort the job.
    ///
    /// # Errors
    /// Those of [`join`](Self::join); [`ErrorKind::Closed`] once it was aborted.
    pub fn join_with(config: &Config, abort: &AbortHandle) -> Result<Self> {
        let joined = JobServices::join(config, abort);
        let job = joined.map_err(|error| match abort.check() {
            Err(aborted) => aborted.with_rank(config.join.rank).with_operation("join"),
            Ok(()) => error,
        })?;
        let everyone = job.bootstrap.everyone().clone();
        let world = Self::of(&job, everyone, true);
        // Weak: a handle for aborts may outlive the job, and must not keep it from ending.
        let own = (Arc::downgrade(&job), Arc::downgrade(&world.fault));
        abort.interrupt_with(move |reason| {
            if let (Some(job), Some(fault)) = (own.0.upgrade(), own.1.upgrade()) {
                job.abort(&fault, reason);
            }
        });
        Ok(world)
    }

    /// Creates the communicator of `group`. Does not communicate.
    fn of(job: &Arc<JobServices>, group: Arc<Group>, is_world: bool) -> Self {
        let fault = Arc::<Fault>::default();
        job.losses.add(&group, &fault, job.bootstrap.health());
        // Weak, since the fault owns this callback.
        let own = (Arc::downgrade(&fault), group.clone());
        let (losses, bootstrap) = (job.losses.clone(), Arc::downgrade(&job.bootstrap));
        fault.notify_with(move |error| {
            let Some(fault) = own.0.upgrade() else { return };
            match bootstrap.upgrade() {
                Some(bootstrap) => {
                    losses::fail(losses.clone(), bootstrap, (fault, own.1.clone()), error);
                }
                // The other ranks already know that this rank is gone.
                None => fault.release(),
            }
        });
        let services = ExchangeServices {
            bootstrap: job.bootstrap.clone(),
            memory: job.memory.clone(),
            device: job.device.clone(),
            slots: job.slots.clone(),
            in_flight: job.in_flight.clone(),
        };
        let connections = ConnectionExchange::new(
            &group,
            &fault,
            services.clone(),
            job.proxies.source(),
            &job.networks,
        );
        let defaults = (job.protocol, job.path.unwrap_or_default());
        let transfers =
            TransferExchange::new(&group, &fault, services, defaults, job.kernels.clone());
        let joined_collectives = Arc::default();
        let engines = Engines::new(
            &job.bootstrap,
            &job.device,
            (&group, &fault),
            job.timeout,
            (job.topology, &joined_collectives),
        );
        Self {
            job: job.clone(),
            group,
            fault,
            is_world,
            transfers: Arc::new(transfers),
            connections: Arc::new(connections),
            engines: Arc::new(engines),
            made: Arc::default(),
            topology: Arc::default(),
            collectives: Arc::default(),
            kernel_notes: Arc::default(),
            joined_collectives,
        }
    }

    /// This rank's number in the communicator.
    pub fn rank(&self) -> Rank {
        self.group.rank()
    }

    /// Number of ranks.
    pub fn world(&self) -> usize {
        self.group.world()
    }

    /// Job ranks of the communicator's ranks, in its order.
    pub fn job_ranks(&self) -> &[Rank] {
        self.group.members()
    }

    /// The device.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.job.device
    }

    /// This process's membership in the job: the store, and byte collectives among all ranks of the job, in
    /// job numbering.
    pub fn bootstrap(&self) -> &Arc<Bootstrap> {
        &self.job.bootstrap
    }

    /// Deadline: now plus the configured timeout.
    pub fn deadline(&self) -> Deadline {
        self.job.deadline()
    }

    /// Allocates and registers `bytes`. Contents are undefined. Memory of dropped regions is pooled, up to
    /// [`Config::max_pooled_bytes`], and reused once no stream and no peer uses it.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`], after all pooled memory was returned and peers had two seconds to unmap
    /// freed memory.
    pub fn alloc(&self, bytes: usize) -> Result<Region> {
        self.job.memory.allocate(bytes, AllocationKind::Plain)
    }

    /// Registers memory for peers; it stays allocated as long as the region or a peer's mapping exists.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if the memory cannot be shared.
    pub fn register(&self, slice: &DeviceSlice) -> Result<Region> {
        self.job.memory.register(slice)
    }

    /// Issues a handle of `region` with which `peer` can [`open_handle`](Self::open_handle); how it is
    /// delivered is up to the caller. A handle can be opened once, and keeps the memory allocated until that
    /// mapping is closed.
    pub fn export_handle(&self, region: &Region, peer: Rank) -> Result<[u8; HANDLE_BYTES]> {
        let peer = self.group.job_rank(peer)?;
        let handle = self.job.memory.export_handle(region, peer);
        handle
            .map(ExportedHandle::sent)
            .map_err(|error| self.group.in_own_ranks(error))
    }

    /// Maps the region that `peer` exported, for one-sided copies in any stream. They are not ordered with
    /// the peer's work, except by signals.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidHandle`] if the handle is truncated, altered, not `peer`'s, or its region is gone.
    pub fn open_handle(&self, peer: Rank, handle: &[u8]) -> Result<RemoteRegion> {
        let peer = self.group.job_rank(peer)?;
        let opened = self.job.memory.peer_handle(peer, handle).open();
        opened.map_err(|error| self.group.in_own_ranks(error))
    }

    /// Maps the regions that all other ranks share by the same call, in rank order; `None` for this rank. For
    /// one-sided accesses, as with [`open_handle`](Self::open_handle). Collective: blocks until all ranks
    /// have called it.
    ///
    /// # Errors
    /// If one rank cannot share its region or map another's, all fail: with [`ErrorKind::PeerFailed`] on the
    /// ranks that could. [`ErrorKind::Timeout`] or [`ErrorKind::PeerLost`], with the missing rank.
    pub fn share(&self, region: &Region) -> Result<Vec<Option<RemoteRegion>>> {
        let exchange = GroupExchange {
            group: &self.group,
            deadline: self.deadline(),
            operation: "share memory",
        };
        let shared = exchange.share(&self.job.memory, &[region], |_| true);
        let shared = self.fault.with_outcome(exchange.agree_on(shared));
        let shared = shared.map_err(|error| self.group.with_job_ranks(error))?;
        Ok(shared
            .into_iter()
            .map(|mut regions| regions.pop())
            .collect())
    }

    /// Creates a stream.
    pub fn create_stream(&self, priority: Priority) -> Result<Stream> {
        self.job.device.create_stream(priority)
    }

    /// Matches transfers with their other ends; see [`TransferExchange::exchange`]. Blocks until
    /// the peers have exchanged theirs.
    pub fn exchange(&self, requests: &[TransferRequest]) -> Result<Vec<Transfer>> {
        self.exchange_until(requests, self.deadline())
    }

    /// As [`exchange`](Self::exchange), with an explicit deadline.
    pub fn exchange_until(
        &self,
        requests: &[TransferRequest],
        deadline: Deadline,
    ) -> Result<Vec<Transfer>> {
        let exchanged = self.transfers.exchange(requests, deadline);
        self.fault.with_outcome(exchanged)
    }

    /// Connects to peers, for channels in kernels; see [`ConnectionExchange::connect`]. Blocks until the
    /// peers have connected too.
    pub fn connect(&self, requests: &[ConnectionRequest]) -> Result<Connections> {
        self.connect_until(requests, self.deadline())
    }

    /// As [`connect`](Self::connect), with an explicit deadline.
    pub fn connect_until(
        &self,
        requests: &[ConnectionRequest],
        deadline: Deadline,
    ) -> Result<Connections> {
        let connected = self.connections.connect(requests, deadline);
        self.fault.with_outcome(connected)
    }

    /// Adds regions to connections; see [`ConnectionExchange::add_regions`]. Blocks until the peers have
    /// added theirs.
    pub fn add_regions(&self, added: &[(&Connection, &Region)]) -> Result<Vec<u32>> {
        let numbered = self.connections.add_regions(added, self.deadline());
        self.fault.with_outcome(numbered)
    }

    /// Allocates `count` zeroed signals of this rank, for its kernels and streams to wait for and for peers
    /// to increment.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for 0; those of an allocation.
    pub fn signals(&self, count: usize) -> Result<Signals> {
        Signals::allocate(&self.job.memory, &self.fault, count)
    }

    /// Launches the proxies again after [`stop_proxy`](Self::stop_proxy), so that kernels can use the existing
    /// channels. No kernel may use them during the call: a request that it was refused might be sent. Blocks while a
    /// kernel finishes storing a trigger, for at most a second for each proxy. No-op if they run, or if no
    /// connection needs one.
    ///
    /// # Errors
    /// [`ErrorKind::Closed`] if the stop left requests undone: peers would wait for their signals forever;
    /// [`ErrorKind::Timeout`] if a kernel does not finish storing a trigger; a proxy's error.
    pub fn launch_proxy(&self) -> Result<()> {
        self.job
            .proxies
            .launch()
            .map_err(|error| error.with_rank(self.rank()))
    }

    /// Stops the proxies, which serve the channels of all communicators of this rank by copy engine and network: they
    /// complete pending requests, until the deadline, and end. Blocks until then. Kernels that use these channels
    /// afterwards get the status `aborted`, until [`launch_proxy`](Self::launch_proxy) or a later connection of
    /// the same kind launches the proxy again. Closing the communicator stops them too.
    ///
    /// # Errors
    /// [`ErrorKind::Timeout`], with the number of unsent triggers; a proxy's error.
    pub fn stop_proxy(&self, deadline: Deadline) -> Result<()> {
        self.job
            .proxies
            .stop(deadline)
            .map_err(|error| error.with_rank(self.rank()))
    }

    /// Sends `region` once: exchanges, posts and waits on `stream`. Blocks the caller until the
    /// peer has called [`receive`](Self::receive) (or exchanged the other end), not until the bytes
    /// have moved. For transfers that repeat, [`exchange`](Self::exchange) once instead.
    pub fn send(&self, region: &Region, peer: Rank, tag: u64, stream: &Stream) -> Result<()> {
        self.once(&[TransferRequest::send(region, peer, tag)], stream)
    }

    /// Receives into `region` once; see [`send`](Self::send).
    pub fn receive(&self, region: &Region, peer: Rank, tag: u64, stream: &Stream) -> Result<()> {
        self.once(&[TransferRequest::receive(region, peer, tag)], stream)
    }

    /// Executes every transfer once, as one group, in any order; see [`send`](Self::send).
    pub fn once(&self, requests: &[TransferRequest], stream: &Stream) -> Result<()> {
        if stream.is_capturing()? {
            return Err(
                Error::unsupported("a transfer of one use cannot be captured")
                    .with_rank(self.rank())
                    .with_help("exchange the transfers before the capture, post and wait in it"),
            );
        }
        self.job.in_flight.release_finished();
        // A loop of such calls would otherwise keep every transfer until the next synchronization.
        let transfers = self.exchange(requests)?;
        Batch::new()
            .post(&transfers)
            .wait(&transfers)
            .enqueue(stream)
    }

    /// Blocks until `stream` is done, and releases resources that its work kept alive.
    ///
    /// # Errors
    /// [`ErrorKind::PeerLost`], naming the rank, if one is lost; [`ErrorKind::Timeout`], naming a peer and
    /// tag, or a rank that has not called a collective; [`ErrorKind::Mismatch`], with the peer and both
    /// calls, if ranks call different collectives. Calls on the engine path are compared here,
    /// asynchronously, so an earlier call may be reported. [`ErrorKind::InvalidArgument`], with its place, if a
    /// kernel read an integer that is out of range; the communicator then fails on all of its ranks. After a
    /// timeout, querying the other ranks takes up to a second.
    pub fn synchronize(&self, stream: &Stream) -> Result<()> {
        self.synchronize_until(stream, self.deadline())
    }

    /// As [`synchronize`](Self::synchronize), with an explicit deadline.
    pub fn synchronize_until(&self, stream: &Stream, deadline: Deadline) -> Result<()> {
        let synchronized = self.wait_for(stream, deadline);
        let synchronized = synchronized.map_err(|error| match error.kind() {
            ErrorKind::Timeout | ErrorKind::PeerFailed | ErrorKind::Driver => self.explained(error),
            _ => error,
        });
        let synchronized = self.fault.with_outcome(synchronized);
        synchronized.map_err(|error| error.with_rank(self.rank()))?;
        self.job.in_flight.release_finished();
        self.job.device.fault().check()?;
        // What this rank found itself is more specific than what another reports, perhaps because of the same calls.
        self.joined_collectives
            .check_agreement()
            .map_err(|error| error.with_rank(self.rank()))?;
        // A fault aborts waits, so work that ended because of it must not count as done.
        self.fault.check()?;
        self.kernel_notes.check(&**self.device(), &self.fault)
    }

    /// Blocks until every rank has called it. Orders hosts, not streams.
    ///
    /// # Errors
    /// [`ErrorKind::PeerLost`] or [`ErrorKind::PeerLeft`], naming the rank, if one is gone;
    /// [`ErrorKind::Timeout`], naming a rank that did not call it. For the others this call then counts as
    /// made.
    pub fn barrier(&self) -> Result<()> {
        let barrier = self.group.barrier(self.deadline());
        let barrier = self.fault.with_outcome(barrier);
        barrier.map_err(|error| self.group.in_own_ranks(error))
    }

    /// Creates a reusable barrier between the ranks' streams. Collective. Uses the communicator's path
    /// ([`Config::path`]).
    pub fn stream_barrier(&self) -> Result<StreamBarrier> {
        self.stream_barrier_by(self.job.path.unwrap_or_default())
    }

    /// As [`stream_barrier`](Self::stream_barrier), with an explicit `path`, equal on every rank.
    pub fn stream_barrier_by(&self, path: Path) -> Result<StreamBarrier> {
        let place = (self.rank(), self.world());
        let (memory, transfers) = (&self.job.memory, &self.transfers);
        let made = StreamBarrier::new(memory, transfers, place, path, self.deadline());
        self.fault.with_outcome(made)
    }

    /// Gathers every rank's bytes, in rank order. Blocks until every rank has called it.
    ///
    /// # Errors
    /// As [`barrier`](Self::barrier); after a timeout, the others still receive this rank's bytes.
    pub fn all_gather_bytes(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        let gathered = self.group.all_gather(bytes, self.deadline());
        let gathered = self.fault.with_outcome(gathered);
        gathered.map_err(|error| self.group.in_own_ranks(error))
    }

    /// Matmuls and element-wise operations of the device.
    pub fn compute(&self) -> Result<Arc<dyn Compute>> {
        self.job.device.compute()
    }

    /// The vendor's collectives (NCCL on GPUs). The first call joins them: collective, blocks until all have
    /// joined.
    ///
    /// # Errors
    /// [`ErrorKind::LibraryMissing`] without the library.
    pub fn collective_engine(&self) -> Result<Arc<dyn CollectiveEngine>> {
        self.engines.of_all()
    }

    /// Creates an executor of host programs, with its own memory pools. Keep it while plans are repeatedly
    /// created.
    pub fn executor(&self) -> Executor {
        Executor::new(self.rank_context())
    }

    fn rank_context(&self) -> RankContext {
        RankContext {
            device: self.job.device.clone(),
            group: self.group.clone(),
            memory: self.job.memory.clone(),
            transfers: self.transfers.clone(),
            in_flight: self.job.in_flight.clone(),
            engines: self.engines.clone(),
            fault: self.fault.clone(),
            timeout: self.job.timeout,
            path: self.job.path,
            kernel_notes: self.kernel_notes.clone(),
        }
    }

    /// Number of allocations registered here (or still mapped by a peer), and of peers' allocations mapped
    /// here.
    pub fn registrations_and_mappings(&self) -> (usize, usize) {
        self.job.memory.counts()
    }

    /// Closes idle mappings and notifies their owners. Blocks until they are notified.
    pub fn release_idle(&self) -> Result<()> {
        self.job.in_flight.release_finished();
        self.job.networks.collect();
        self.job.memory.release_idle();
        Ok(())
    }

    /// Returns all pooled memory to the system, and closes idle mappings, here and at peers that map freed
    /// memory. Blocks until done. On a GPU, the driver may wait for work of other libraries meanwhile and
    /// delay enqueue calls.
    ///
    /// # Errors
    /// [`ErrorKind::Timeout`] at `deadline`, with the peer that still maps memory, or if streams of this
    /// process were busy. Memory that was not returned stays pooled.
    pub fn trim(&self, deadline: Deadline) -> Result<()> {
        self.job.in_flight.release_finished();
        self.job.memory.trim(deadline)
    }

    /// Number of pooled allocations, and their bytes.
    pub fn pooled_allocations_and_bytes(&self) -> (usize, u64) {
        self.job.memory.pooled()
    }

    /// Closes the communicator: blocks until every rank of it has.
    ///
    /// Closing the [world](crate::Job::world), or its [survivors](Self::survivors), leaves the job in order:
    /// it waits for streams that still use dropped transfers and plans, unmaps peers' memory, and makes all
    /// communicators of the job unusable. It is the only orderly way to leave: a rank that drops the last
    /// communicator of a job counts as lost.
    ///
    /// # Errors
    /// [`ErrorKind::Timeout`] if streams still wait for peers at the deadline; this rank then leaves as by
    /// [`abort`](Self::abort). Those of [`barrier`](Self::barrier) if a peer is lost or does not close; for a
    /// job, this rank then leaves as by abort too. The communicator is closed in any case.
    pub fn close(self) -> Result<()> {
        // Before the barrier: their memory and their mappings of peers are released while every rank is still
        // there.
        drop(lock(&self.collectives).take());
        if self.is_world {
            let closed = self.job.close(|deadline| self.group.barrier(deadline));
            let reason = |error: &Error| format!("it was closed: {error}");
            return closed.inspect_err(|error| self.job.raise(&self.fault, &reason(error)));
        }
        self.barrier()
    }

    /// Fails with the error that ended the communicator or the device's work, if any. Local; does not block.
    ///
    /// # Errors
    /// As [`synchronize`](Self::synchronize).
    pub fn check(&self) -> Result<()> {
        self.job.device.fault().check()?;
        self.fault.check()
    }

    /// Fails the communicator on all of its ranks, for `reason`, without leaving the job: waits for its
    /// signals are aborted, its streams and later calls fail, while host operations
    /// ([`all_gather_bytes`](Self::all_gather_bytes), [`subgroup`](Self::subgroup), [`close`](Self::close))
    /// keep working. Does not block.
    pub fn fail(&self, reason: &str) {
        let error = Error::new(
            ErrorKind::PeerFailed,
            format!("a rank ended the communicator: {reason}"),
        );
        self.fault.fail(error.with_rank(self.rank()));
    }

    /// Leaves the job as failed: every wait of peers that depends on this rank ends with an error that names
    /// it and `reason`, and so do waits in this rank's own streams. Later calls fail. Blocks for about two
    /// seconds at most. Ends a [`close`](Self::close) in progress; no effect after one or an earlier abort.
    pub fn abort(&self, reason: &str) {
        self.job.abort(&self.fault, reason);
    }
}
