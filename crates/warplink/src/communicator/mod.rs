//! The front door: the ranks of a job, their device, and what they do together.

mod services;
mod threads;

use crate::bootstrap::Bootstrap;
use crate::config::Config;
use crate::deadline::Deadline;
use crate::device::{
    AllocationKind, CollectiveEngine, Compute, Device, DeviceSlice, Priority, Stream,
};
use crate::error::{Error, ErrorKind, Rank, Result};
use crate::memory::{HANDLE_BYTES, Region, RemoteRegion};
use crate::p2p::{Batch, Transfer, TransferExchange, TransferRequest};
use crate::program::Executor;
use crate::program::execute::{EngineSource, RankContext};
use services::JobServices;
use std::sync::{Arc, OnceLock};

/// One rank's membership in a job. Every method that involves other ranks says whether it blocks;
/// waits on the host end at the configured timeout, and when a rank is lost, with an error that
/// names it. A lost rank ends the communicator: streams that wait for signals are let go, and every
/// later call fails. Clones are the same membership.
#[derive(Clone, Debug)]
pub struct Communicator {
    job: Arc<JobServices>,
    transfers: Arc<TransferExchange>,
    engine: Arc<OnceLock<Arc<dyn CollectiveEngine>>>,
}

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
        let transfers = Arc::new(TransferExchange::new(
            &job.bootstrap,
            &job.memory,
            &job.device,
            job.protocol,
        ));
        Ok(Self {
            job,
            transfers,
            engine: Arc::default(),
        })
    }

    /// This rank.
    pub fn rank(&self) -> Rank {
        self.job.bootstrap.rank()
    }

    /// How many ranks there are.
    pub fn world(&self) -> usize {
        self.job.bootstrap.world()
    }

    /// The device.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.job.device
    }

    /// The store, and collectives of bytes.
    pub fn bootstrap(&self) -> &Arc<Bootstrap> {
        &self.job.bootstrap
    }

    /// A deadline of the configured timeout from now.
    pub fn deadline(&self) -> Deadline {
        self.job.deadline()
    }

    /// Allocates `bytes` and registers them. The content is undefined.
    pub fn alloc(&self, bytes: usize) -> Result<Region> {
        self.register(&self.job.device.allocate(bytes, AllocationKind::Plain)?)
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
        self.job.memory.export_handle(region, peer)
    }

    /// Maps the region that `peer` exported, for one-sided copies in any stream. Nothing orders
    /// them with what the peer does; signals do.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidHandle`] where the handle is truncated, altered, not `peer`'s, or its
    /// region is gone.
    pub fn open_handle(&self, peer: Rank, handle: &[u8]) -> Result<RemoteRegion> {
        self.job.memory.open_handle(peer, handle)
    }

    /// Makes a stream.
    pub fn create_stream(&self, priority: Priority) -> Result<Stream> {
        self.job.device.create_stream(priority)
    }

    /// Matches transfers with their other ends; see [`TransferExchange::exchange`]. Blocks until
    /// the peers have exchanged theirs.
    pub fn exchange(&self, requests: &[TransferRequest]) -> Result<Vec<Transfer>> {
        self.transfers.exchange(requests, self.deadline())
    }

    /// Matches transfers, with a deadline of one's own.
    pub fn exchange_until(
        &self,
        requests: &[TransferRequest],
        deadline: Deadline,
    ) -> Result<Vec<Transfer>> {
        self.transfers.exchange(requests, deadline)
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
            .on_rank(self.rank())
            .help("exchange the transfers before the capture, post and wait in it"));
        }
        self.job.in_flight.release_finished();
        let transfers = self.exchange(requests)?;
        let enqueued = Batch::new()
            .post(&transfers)
            .wait(&transfers)
            .enqueue(stream);
        // Also where that failed: some of it may have been enqueued.
        self.job.in_flight.hold(&[stream], transfers);
        enqueued
    }

    /// Blocks until `stream` is done.
    ///
    /// # Errors
    /// [`ErrorKind::PeerLost`], which names the rank, when one is lost; [`ErrorKind::Timeout`], which
    /// names a peer and a tag that are waited for.
    pub fn synchronize(&self, stream: &Stream) -> Result<()> {
        stream
            .synchronize(self.deadline())
            .map_err(|error| match error.kind() {
                ErrorKind::Timeout => self.transfers.explain_timeout(error),
                _ => error,
            })
            .map_err(|error| error.on_rank(self.rank()))?;
        // A fault lets waits go, so work that ended because of it must not pass for done.
        self.job.device.fault().check()
    }

    /// Blocks until every rank has called it. It orders hosts, not streams.
    pub fn barrier(&self) -> Result<()> {
        self.job.bootstrap.barrier(self.deadline())
    }

    /// Every rank's bytes, in rank order. Blocks until every rank has called it.
    pub fn all_gather_bytes(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.job.bootstrap.all_gather(bytes, self.deadline())
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
        (self.engine_source())()
    }

    /// Joins the engine once, whoever asks first.
    fn engine_source(&self) -> EngineSource {
        let (joined, device, bootstrap) = (
            self.engine.clone(),
            self.job.device.clone(),
            self.job.bootstrap.clone(),
        );
        let timeout = self.job.timeout;
        Arc::new(move || {
            if let Some(engine) = joined.get() {
                return Ok(engine.clone());
            }
            let deadline = Deadline::after(timeout);
            let mut exchange = |bytes: Vec<u8>| bootstrap.all_gather(&bytes, deadline);
            let engine =
                device.collective_engine(bootstrap.rank(), bootstrap.world(), &mut exchange)?;
            let aborted = Arc::downgrade(&engine);
            device.fault().when_raised(move || {
                if let Some(engine) = aborted.upgrade() {
                    engine.abort();
                }
            });
            Ok(joined.get_or_init(|| engine).clone())
        })
    }

    /// An executor of host programs, with pools of its own. Keep it for as long as its plans are
    /// made anew.
    pub fn executor(&self) -> Executor {
        Executor::new(RankContext {
            device: self.job.device.clone(),
            bootstrap: self.job.bootstrap.clone(),
            memory: self.job.memory.clone(),
            transfers: self.transfers.clone(),
            in_flight: self.job.in_flight.clone(),
            engine: self.engine_source(),
            timeout: self.job.timeout,
        })
    }

    /// How many allocations are registered here (or still mapped by a peer), and how many of
    /// peers' are mapped here.
    pub fn registrations_and_mappings(&self) -> (usize, usize) {
        self.job.memory.counts()
    }

    /// Unmaps what no transfer uses, and tells its owners. Blocks until they were told.
    pub fn release_idle(&self) -> Result<()> {
        self.job.in_flight.release_finished();
        self.job.memory.release_idle();
        Ok(())
    }

    /// Leaves in order: unmaps peers' memory, and returns when every rank has. Blocks; transfers
    /// and streams that use them must be done and dropped. It is the only orderly way to leave: for
    /// its peers, a rank that drops its communicator is lost.
    ///
    /// # Errors
    /// Those of [`barrier`](Self::barrier) when a peer is lost or does not close. This rank has left
    /// all the same.
    pub fn close(self) -> Result<()> {
        self.job
            .close(|deadline| self.job.bootstrap.barrier(deadline))
    }

    /// Leaves as a failure: every wait of the peers that depends on this rank ends with an error
    /// that names it and `reason`, and so do the waits in this rank's own streams. Later calls fail.
    /// Blocks for about two seconds at most; does nothing after [`close`](Self::close) or an earlier
    /// abort.
    pub fn abort(&self, reason: &str) {
        self.job.end(&format!("it aborted: {reason}"));
    }
}
