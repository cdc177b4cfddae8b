//! The front door: a group of the ranks of a job, their device, and what they do together.

mod collectives;
mod engines;
mod groups;
mod losses;
mod proxies;
mod services;
mod threads;
mod topology;

use crate::bootstrap::{Bootstrap, Group};
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
use crate::p2p::{
    Batch, Path, PathModel, StreamBarrier, Transfer, TransferExchange, TransferRequest,
};
use crate::program::Executor;
use crate::program::cost::{DeviceDescription, HardwareModel};
use crate::program::execute::{EngineSource, RankContext};
use crate::signal::Signals;
use crate::sync::lock;
use crate::topology::Topology;
use engines::Engines;
use services::JobServices;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

/// An ordered group of the ranks of a [`Job`](crate::Job), seen from one of them. A communicator has
/// ranks, tags, keys and signals of its own: its ranks are numbered from 0 in its order, and nothing
/// that is done in it meets what is done in another. What a process has once (device, connection to
/// the store, threads, registered memory) is the job's, so that a communicator costs little.
///
/// Every method that involves other ranks says whether it blocks; waits on the host end at the
/// configured timeout, and when a rank is lost, with an error that names it. A lost rank ends the
/// communicators that contain it, and no others: streams that wait for their signals fail and stay
/// failed, and so does every later call; the ranks that are left go on in the communicator that
/// [`survivors`](Self::survivors) makes. A stream that waited for such a communicator's signals, and was not
/// synchronized since, cannot be used any more, for other communicators either. What it had still to do for
/// those may never be right: so they fail too, on all of their ranks, with [`ErrorKind::PeerFailed`], and go
/// on by `survivors` as well. Give communicators streams of their own where they are to go on without one
/// another. Clones are the same
/// communicator.
#[derive(Clone, Debug)]
pub struct Communicator {
    job: Arc<JobServices>,
    group: Arc<Group>,
    /// Raised when a rank of it is lost.
    fault: Arc<Fault>,
    /// Whether closing it is leaving the job.
    is_world: bool,
    transfers: Arc<TransferExchange>,
    connections: Arc<ConnectionExchange>,
    engines: Arc<Engines>,
    made: Arc<Mutex<MadeGroups>>,
    topology: Arc<Mutex<Option<Arc<Topology>>>>,
    /// Those with the default options, once they are joined.
    collectives: Arc<Mutex<Option<Collectives>>>,
    /// All that were joined.
    known_collectives: Arc<collective::Known>,
}

/// How many groups were made from a communicator, in which way and of which members.
type MadeGroups = HashMap<(&'static str, Vec<Rank>), u64>;

impl Communicator {
    /// Joins as the environment says; see [`Config::from_env`]. Blocks until all ranks have joined.
    pub fn from_env() -> Result<Self> {
        Self::join(&Config::from_env()?)
    }

    /// Joins the other ranks. Blocks until all have joined.
    ///
    /// # Errors
    /// What [`Bootstrap::join`] and [`device::open`](crate::device::open) say, and
    /// [`ErrorKind::Mismatch`] where ranks
    /// chose different devices.
    pub fn join(config: &Config) -> Result<Self> {
        let job = JobServices::join(config)?;
        let everyone = job.bootstrap.everyone().clone();
        Ok(Self::of(&job, everyone, true))
    }

    /// The communicator of `group`. Does not communicate.
    fn of(job: &Arc<JobServices>, group: Arc<Group>, is_world: bool) -> Self {
        let fault = Arc::<Fault>::default();
        job.losses.add(&group, &fault, job.bootstrap.health());
        let own = (Arc::downgrade(&fault), group.clone());
        let (losses, bootstrap) = (job.losses.clone(), Arc::downgrade(&job.bootstrap));
        fault.tell_with(move |error| {
            let Some(fault) = own.0.upgrade() else { return };
            match bootstrap.upgrade() {
                Some(bootstrap) => {
                    losses::fail(losses.clone(), bootstrap, (fault, own.1.clone()), error);
                }
                // The others know that this rank is gone.
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
        let (described, world) = (job.device.clone(), group.world());
        let (memory, all) = (job.memory.clone(), job.bootstrap.world());
        let paths = PathModel::new(move || {
            let (model, _) = HardwareModel::find(&DeviceDescription::of(&*described), world)?;
            // Ranks of other communicators transfer at the same time.
            let all: Vec<_> = (0..all).collect();
            let sharing = memory.ranks_per_device(&all)?;
            Ok(model.link.transfer_kernels().shared_by(sharing))
        });
        let defaults = (job.protocol, job.path.unwrap_or_default());
        let transfers = TransferExchange::new(&group, &fault, services, defaults, paths);
        let engines = Engines::new(&job.bootstrap, &job.device, (&group, &fault), job.timeout);
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
            known_collectives: Arc::default(),
        }
    }

    /// This rank's number in the communicator.
    pub fn rank(&self) -> Rank {
        self.group.rank()
    }

    /// How many ranks the communicator has.
    pub fn world(&self) -> usize {
        self.group.world()
    }

    /// The ranks in the job of the communicator's ranks, in its order.
    pub fn job_ranks(&self) -> &[Rank] {
        self.group.members()
    }

    /// The device.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.job.device
    }

    /// This process's membership in the job: the store, and collectives of bytes among all ranks of
    /// the job, whose numbers are the job's.
    pub fn bootstrap(&self) -> &Arc<Bootstrap> {
        &self.job.bootstrap
    }

    /// A deadline of the configured timeout from now.
    pub fn deadline(&self) -> Deadline {
        self.job.deadline()
    }

    /// Allocates `bytes` and registers them. The content is undefined. Memory of regions that were
    /// dropped is used again, once no stream and no peer uses it any more; up to
    /// [`Config::max_pooled_bytes`] are kept for that.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`], after all that is kept for later was given back, and peers had two
    /// seconds to unmap what was freed.
    pub fn alloc(&self, bytes: usize) -> Result<Region> {
        self.job.memory.allocate(bytes, AllocationKind::Plain)
    }

    /// Registers memory for peers; it stays allocated as long as the region, or a peer's mapping.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] where the memory cannot be shared.
    pub fn register(&self, slice: &DeviceSlice) -> Result<Region> {
        self.job.memory.register(slice)
    }

    /// A handle of `region`, for `peer` to [`open_handle`](Self::open_handle), by whatever way it
    /// gets there. A handle is good for one opening, and keeps the memory allocated until that is
    /// undone.
    pub fn export_handle(&self, region: &Region, peer: Rank) -> Result<[u8; HANDLE_BYTES]> {
        let peer = self.group.job_rank(peer)?;
        let handle = self.job.memory.export_handle(region, peer);
        handle
            .map(ExportedHandle::sent)
            .map_err(|error| self.group.in_own_ranks(error))
    }

    /// Maps the region that `peer` exported, for one-sided copies in any stream. Nothing orders
    /// them with what the peer does; signals do.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidHandle`] where the handle is truncated, altered, not `peer`'s, or its
    /// region is gone.
    pub fn open_handle(&self, peer: Rank, handle: &[u8]) -> Result<RemoteRegion> {
        let peer = self.group.job_rank(peer)?;
        let opened = self.job.memory.peer_handle(peer, handle).open();
        opened.map_err(|error| self.group.in_own_ranks(error))
    }

    /// Maps the region that every other rank shares by the same call, in the order of ranks; `None` in the place of this
    /// rank. For one-sided accesses, as with [`open_handle`](Self::open_handle). Blocks until all ranks have called it.
    ///
    /// # Errors
    /// On all ranks where one cannot share its region or map those of the others, [`ErrorKind::PeerFailed`] on those that
    /// could. [`ErrorKind::Timeout`] or [`ErrorKind::PeerLost`], with the rank that did not come.
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

    /// Makes a stream.
    pub fn create_stream(&self, priority: Priority) -> Result<Stream> {
        self.job.device.create_stream(priority)
    }

    /// Matches transfers with their other ends; see [`TransferExchange::exchange`]. Blocks until
    /// the peers have exchanged theirs.
    pub fn exchange(&self, requests: &[TransferRequest]) -> Result<Vec<Transfer>> {
        self.exchange_until(requests, self.deadline())
    }

    /// Matches transfers, with a deadline of one's own.
    pub fn exchange_until(
        &self,
        requests: &[TransferRequest],
        deadline: Deadline,
    ) -> Result<Vec<Transfer>> {
        let exchanged = self.transfers.exchange(requests, deadline);
        self.fault.with_outcome(exchanged)
    }

    /// Connects with peers, for channels in kernels; see [`ConnectionExchange::connect`]. Blocks until the
    /// peers have requested their ends.
    pub fn connect(&self, requests: &[ConnectionRequest]) -> Result<Connections> {
        self.connect_until(requests, self.deadline())
    }

    /// As [`connect`](Self::connect), with a deadline of one's own.
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

    /// Allocates `count` signals of this rank, for kernels and streams to wait for and peers to count up; all
    /// zero at first.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for none; those of an allocation.
    pub fn signals(&self, count: usize) -> Result<Signals> {
        Signals::allocate(&self.job.memory, &self.fault, count)
    }

    /// Stops the proxy, which serves the proxied channels of all communicators of this rank: it does what
    /// kernels have asked for, until the deadline, and ends. Blocks until then. Kernels that use these
    /// channels later get the status `aborted`. Connections that are made later have a new proxy. Closing
    /// the communicator stops it, too.
    ///
    /// # Errors
    /// [`ErrorKind::Timeout`], with the number of triggers that were not sent; what the proxy failed with.
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

    /// Does every transfer once, as one group, in whatever order they are given; see
    /// [`send`](Self::send).
    pub fn once(&self, requests: &[TransferRequest], stream: &Stream) -> Result<()> {
        if stream.is_capturing()? {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "a transfer of one use cannot be captured",
            )
            .with_rank(self.rank())
            .with_help("exchange the transfers before the capture, post and wait in it"));
        }
        self.job.in_flight.release_finished();
        let transfers = self.exchange(requests)?;
        Batch::new()
            .post(&transfers)
            .wait(&transfers)
            .enqueue(stream)
    }

    /// Blocks until `stream` is done, and lets go of what was dropped while it used it.
    ///
    /// # Errors
    /// [`ErrorKind::PeerLost`], which names the rank, when one is lost; [`ErrorKind::Timeout`], which
    /// names a peer and a tag that are waited for, or a rank that has not made a collective;
    /// [`ErrorKind::Mismatch`], with the peer and both calls, where ranks call different collectives. Where the
    /// vendor's library does them, the ranks compare their calls here, without waiting for one another: an earlier
    /// call may be found to differ. After a timeout, it takes up to a second longer to ask the others.
    pub fn synchronize(&self, stream: &Stream) -> Result<()> {
        self.synchronize_until(stream, self.deadline())
    }

    /// As [`synchronize`](Self::synchronize), with a deadline of one's own.
    pub fn synchronize_until(&self, stream: &Stream, deadline: Deadline) -> Result<()> {
        let synchronized = self.wait_for(stream, deadline);
        let synchronized = synchronized.map_err(|error| match error.kind() {
            ErrorKind::Timeout | ErrorKind::PeerFailed | ErrorKind::Driver => self.explained(error),
            _ => error,
        });
        let synchronized = self.fault.with_outcome(synchronized);
        synchronized.map_err(|error| error.with_rank(self.rank()))?;
        self.job.in_flight.release_finished();
        // A fault lets waits go, so work that ended because of it must not pass for done.
        self.job.device.fault().check()?;
        self.fault.check()?;
        self.known_collectives
            .check_agreement()
            .map_err(|error| error.with_rank(self.rank()))
    }

    /// Blocks until `stream` is done, and has the other ranks compare their calls with this rank's meanwhile.
    fn wait_for(&self, stream: &Stream, deadline: Deadline) -> Result<()> {
        if let Some(moment) = self.known_collectives.tell()
            && moment < deadline.remaining()
        {
            match stream.synchronize(Deadline::after(moment)) {
                Err(error) if error.kind() == ErrorKind::Timeout => {}
                ended => return ended,
            }
            self.known_collectives.tell();
        }
        stream.synchronize(deadline)
    }

    /// What this rank knows of the end of a wait that timed out, or that another rank's failure ended, or the device's.
    fn explained(&self, error: Error) -> Error {
        // What it found itself says more than what others tell.
        if let Err(found) = self.known_collectives.check_agreement() {
            return found;
        }
        if error.kind() != ErrorKind::Timeout {
            return self.known_collectives.explain_failure().unwrap_or(error);
        }
        let explained = self.transfers.explain_timeout(&error);
        let explained = explained.or_else(|| self.known_collectives.explain_timeout());
        explained.unwrap_or(error)
    }

    /// Blocks until every rank has called it. It orders hosts, not streams.
    ///
    /// # Errors
    /// [`ErrorKind::PeerLost`] or [`ErrorKind::PeerLeft`], naming the rank, when one is gone;
    /// [`ErrorKind::Timeout`], which names a rank that did not call it. The others then count this
    /// call as made.
    pub fn barrier(&self) -> Result<()> {
        let barrier = self.group.barrier(self.deadline());
        let barrier = self.fault.with_outcome(barrier);
        barrier.map_err(|error| self.group.in_own_ranks(error))
    }

    /// A barrier of streams, to be enqueued any number of times. Every rank makes one at the same time. It uses
    /// the communicator's path ([`Config::path`]).
    pub fn stream_barrier(&self) -> Result<StreamBarrier> {
        self.stream_barrier_by(self.job.path.unwrap_or_default())
    }

    /// As [`stream_barrier`](Self::stream_barrier), by `path`, the same on every rank.
    pub fn stream_barrier_by(&self, path: Path) -> Result<StreamBarrier> {
        let place = (self.rank(), self.world());
        let (memory, transfers) = (&self.job.memory, &self.transfers);
        let made = StreamBarrier::new(memory, transfers, place, path, self.deadline());
        self.fault.with_outcome(made)
    }

    /// Every rank's bytes, in rank order. Blocks until every rank has called it.
    ///
    /// # Errors
    /// As [`barrier`](Self::barrier); after a timeout, the others still get what this rank gave.
    pub fn all_gather_bytes(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        let gathered = self.group.all_gather(bytes, self.deadline());
        let gathered = self.fault.with_outcome(gathered);
        gathered.map_err(|error| self.group.in_own_ranks(error))
    }

    /// Matmuls and sums of the device.
    pub fn compute(&self) -> Result<Arc<dyn Compute>> {
        self.job.device.compute()
    }

    /// The vendor's collectives (NCCL on GPUs). The first call joins them, on every rank at the
    /// same time, and blocks until all have.
    ///
    /// # Errors
    /// [`ErrorKind::LibraryMissing`] without the library.
    pub fn collective_engine(&self) -> Result<Arc<dyn CollectiveEngine>> {
        self.engines.of_all()
    }

    /// An executor of host programs, with pools of its own. Keep it for as long as its plans are
    /// made anew.
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
        }
    }

    /// How many allocations are registered here (or still mapped by a peer), and how many of
    /// peers' are mapped here.
    pub fn registrations_and_mappings(&self) -> (usize, usize) {
        self.job.memory.counts()
    }

    /// Unmaps what no transfer uses, and tells its owners. Blocks until they were told.
    pub fn release_idle(&self) -> Result<()> {
        self.job.in_flight.release_finished();
        self.job.networks.collect();
        self.job.memory.release_idle();
        Ok(())
    }

    /// Gives all memory that was freed and is kept for later allocations back to the system, and unmaps
    /// what no transfer uses, here and at the peers that map what was freed. Blocks until that is
    /// done. On a GPU, the driver may meanwhile wait for work of other libraries and hold up whatever
    /// is enqueued.
    ///
    /// # Errors
    /// [`ErrorKind::Timeout`] at `deadline`, with the peer that still maps memory, or where streams of
    /// this process had work until then. What is not given back is kept, as before.
    pub fn trim(&self, deadline: Deadline) -> Result<()> {
        self.job.in_flight.release_finished();
        self.job.memory.trim(deadline)
    }

    /// How many freed allocations are kept registered for later ones, and their bytes.
    pub fn pooled_allocations_and_bytes(&self) -> (usize, u64) {
        self.job.memory.pooled()
    }

    /// Closes the communicator: blocks until every rank of it has.
    ///
    /// Closing the [world](crate::Job::world), or the [survivors](Self::survivors) of it, is leaving the
    /// job in order: it waits for what streams still do with transfers and plans that were dropped,
    /// unmaps peers' memory, and no communicator of the job can be used any more. It is the only orderly
    /// way to leave: for its peers, a rank that drops the last communicator of a job is lost.
    ///
    /// # Errors
    /// [`ErrorKind::Timeout`] where streams still wait for peers at the deadline; this rank then
    /// leaves as by [`abort`](Self::abort). Those of [`barrier`](Self::barrier) when a peer is lost or
    /// does not close; of a job, this rank then leaves as by abort too. The communicator is closed all the same.
    pub fn close(self) -> Result<()> {
        drop(lock(&self.collectives).take());
        if self.is_world {
            return self.job.close(|deadline| self.group.barrier(deadline));
        }
        self.barrier()
    }

    /// Fails with what ended the communicator, or the device's work, if something did. Asks nobody and does not block.
    ///
    /// # Errors
    /// That error; as [`synchronize`](Self::synchronize).
    pub fn check(&self) -> Result<()> {
        self.job.device.fault().check()?;
        self.fault.check()
    }

    /// Ends the communicator on all of its ranks, for `reason`, and stays in the job: waits for its signals end, its
    /// streams and later calls fail, and what hosts do together ([`all_gather_bytes`](Self::all_gather_bytes),
    /// [`subgroup`](Self::subgroup), [`close`](Self::close)) goes on. Does not block.
    pub fn fail(&self, reason: &str) {
        let error = Error::new(
            ErrorKind::PeerFailed,
            format!("a rank ended the communicator: {reason}"),
        );
        self.fault.fail(error.with_rank(self.rank()));
    }

    /// Leaves the job as a failure: every wait of the peers that depends on this rank ends with an error
    /// that names it and `reason`, and so do the waits in this rank's own streams. Later calls fail.
    /// Blocks for about two seconds at most; does nothing after [`close`](Self::close) or an earlier
    /// abort.
    pub fn abort(&self, reason: &str) {
        self.job.end(&format!("it aborted: {reason}"));
    }
}
