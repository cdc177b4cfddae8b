//! Per-job services of a rank, shared by its communicators.

use super::kernels;
use super::losses::{self, Losses};
use super::proxies::Proxies;
use crate::bootstrap::{AbortHandle, Bootstrap, aborted};
use crate::config::Config;
use crate::deadline::Deadline;
use crate::device::network::NetworkOptions;
use crate::device::{self, Device, Fault, InFlight};
use crate::error::{Error, ErrorKind, Rank, Result};
use crate::memory::MemoryRegistry;
use crate::p2p::{Path, Protocol, TransferKernels};
use crate::signal::SlotDirectory;
use crate::threads;
use crate::topology::TopologyClass;
use crate::transport::Networks;
use std::sync::Arc;
use std::time::Duration;

/// Store, device, memory service and values in flight. If the last communicator of a job is dropped without
/// closing the job, this rank has failed.
#[derive(Debug)]
pub(super) struct JobServices {
    pub(super) device: Arc<dyn Device>,
    pub(super) bootstrap: Arc<Bootstrap>,
    pub(super) losses: Arc<Losses>,
    pub(super) memory: Arc<MemoryRegistry>,
    pub(super) in_flight: Arc<InFlight>,
    pub(super) slots: Arc<SlotDirectory>,
    pub(super) proxies: Proxies,
    pub(super) networks: Arc<Networks>,
    pub(super) protocol: Protocol,
    pub(super) path: Option<Path>,
    pub(super) timeout: Duration,
    /// Performance of transfers by kernels; equal on all ranks.
    pub(super) kernels: Result<TransferKernels>,
    /// Topology class forced by the environment.
    pub(super) topology: Option<TopologyClass>,
}

/// Notifies the other ranks that this rank failed to join. If a lost rank is the cause, the store has notified them
/// already; the store may be lost with that rank, and the caller must not wait for it.
fn abort_join(bootstrap: &Arc<Bootstrap>, error: &Error) {
    let reason = aborted(&error.to_string());
    if error.kind() == ErrorKind::PeerLost {
        let (bootstrap, reason) = (bootstrap.clone(), reason.clone());
        let abort = move || bootstrap.abort(&reason);
        if threads::spawn("warplink-abort", "start a thread", abort).is_ok() {
            return;
        }
    }
    bootstrap.abort(&reason);
}

impl JobServices {
    /// Joins the other ranks. Blocks until all have joined, or it is aborted.
    pub(super) fn join(config: &Config, abort: &AbortHandle) -> Result<Arc<Self>> {
        let rank = config.join.rank;
        let device = device::open(&config.device).map_err(|error| error.with_rank(rank))?;
        let bootstrap = Bootstrap::join_with(&config.join, abort)?;
        let joined = Arc::downgrade(&bootstrap);
        abort.interrupt_with(move |reason| {
            if let Some(bootstrap) = joined.upgrade() {
                bootstrap.abort(&aborted(reason));
            }
        });
        let deadline = Deadline::after(config.timeout);
        let described = kernels::publish(&*device, &bootstrap)
            .inspect_err(|error| abort_join(&bootstrap, error))?;
        let secret = bootstrap.secret().clone();
        let memory = MemoryRegistry::start(
            rank,
            &device,
            secret.as_bytes(),
            config.idle_mappings,
            config.max_pooled_bytes,
            |info| bootstrap.all_gather(&info, deadline),
        )
        .inspect_err(|error| abort_join(&bootstrap, error))?;
        let memory = Arc::new(memory);
        let kernels = kernels::of_rank_0(described, &bootstrap, &memory, deadline)
            .inspect_err(|error| abort_join(&bootstrap, error))?;
        let losses = Arc::new(Losses::default());
        let (recorder, forgetful) = (losses.clone(), Arc::downgrade(&memory));
        let joined = Arc::downgrade(&bootstrap);
        bootstrap.health().when_lost(move |lost, error| {
            let deadline = Deadline::after(losses::NOTIFY_TIMEOUT);
            // First, so that every later call finds the error; the waits in streams are released last, when others
            // know.
            let announced = recorder.announce(lost, error);
            if let Some(memory) = forgetful.upgrade() {
                memory.forget_peer(lost);
            }
            if let Some(bootstrap) = joined.upgrade() {
                let affected = recorder.spread(&bootstrap, announced, error, deadline);
                losses::wait_until_all_know(&bootstrap, lost, deadline);
                // Before the waits that precede their work in the streams.
                affected
                    .iter()
                    .for_each(|one| one.release(&bootstrap, deadline));
            }
            recorder.release(lost);
        });
        let (recorder, joined) = (losses.clone(), Arc::downgrade(&bootstrap));
        bootstrap.health().when_group_failed(move |name, error| {
            if let Some(bootstrap) = joined.upgrade() {
                losses::end_group(&recorder, bootstrap, name, error);
            }
        });
        let ended = Arc::downgrade(&device);
        bootstrap.health().when_ended(move |error| {
            if let Some(device) = ended.upgrade() {
                // The others go on without this rank and reuse its words, so nothing on the device may wait for
                // them any more.
                device.fault().raise(error.clone());
            }
        });
        let in_flight = Arc::new(InFlight::new(&device));
        let held = Arc::downgrade(&in_flight);
        memory.when_out_of_memory(move || {
            if let Some(held) = held.upgrade() {
                held.release_finished();
            }
        });
        let network = NetworkOptions {
            devices: config.network_devices.clone(),
            patience: config.timeout,
            access: config.staging.access,
            device: Some(device.clone()),
        };
        Ok(Arc::new(Self {
            slots: SlotDirectory::start(&memory),
            proxies: Proxies::new(&device, &bootstrap, config.proxy),
            networks: Networks::new(&device, network, config.staging),
            device,
            bootstrap,
            losses,
            memory,
            in_flight,
            protocol: config.protocol,
            path: config.path,
            timeout: config.timeout,
            kernels,
            topology: config.topology,
        }))
    }

    /// Job rank of this process.
    pub(super) fn rank(&self) -> Rank {
        self.bootstrap.rank()
    }

    /// Deadline: now plus the configured timeout.
    pub(super) fn deadline(&self) -> Deadline {
        Deadline::after(self.timeout)
    }

    /// Leaves in order; see [`Communicator::close`](super::Communicator::close). `barrier` waits for the
    /// remaining ranks.
    pub(super) fn close(&self, barrier: impl FnOnce(Deadline) -> Result<()>) -> Result<()> {
        let deadline = self.deadline();
        if !self.in_flight.wait_until_empty(deadline) && self.device.fault().error().is_none() {
            self.end("it closed its communicator while its streams waited for peers");
            return Err(deadline
                .expired("the end of streams' work")
                .with_operation("close the communicator")
                .with_rank(self.rank())
                .with_help(
                    "check that both ranks post every transfer, or abort the communicator",
                ));
        }
        // Complete kernels' requests before leaving the peers; proceed even if that fails.
        let stopped = self.proxies.close(self.deadline());
        self.memory.release_idle();
        let deadline = self.deadline();
        // Before the barrier: ranks that have passed it close their connections while this one may still be in it.
        self.networks.leave();
        let together = barrier(deadline);
        if let Err(error) = &together {
            // Ranks that did not close may be waiting for this one, in streams or other communicators; end
            // their waits.
            self.end(&match error.kind() {
                ErrorKind::Timeout => {
                    "it closed its communicator, and not all ranks did in time".to_owned()
                }
                _ => format!(
                    "it closed its communicator, which had failed: {}",
                    error.message()
                ),
            });
        }
        // No rank sends any more.
        let networks = self.networks.close(deadline);
        self.memory.stop();
        together
            // Last: a failure while the parts above are closed is still reported through it.
            .and(self.bootstrap.close(deadline))
            .and(stopped)
            .and(networks)
    }

    /// Leaves as failed, for `reason`.
    fn end(&self, reason: &str) {
        self.bootstrap.abort(reason);
        self.raise(self.device.fault(), reason);
    }

    /// Leaves as failed, since the communicator with `fault` was aborted for `reason`. Its work may also be in streams of
    /// another device object of this process, whose waits only its fault ends.
    pub(super) fn abort(&self, fault: &Fault, reason: &str) {
        let reason = aborted(reason);
        self.end(&reason);
        self.raise(fault, &reason);
    }

    /// Ends work that depends on `fault`, after this rank has left for `reason`.
    pub(super) fn raise(&self, fault: &Fault, reason: &str) {
        let message = format!("this rank's communicator ended: {reason}");
        fault.raise(Error::closed(message).with_rank(self.rank()));
    }
}

/// Dropping a job without closing it is a failure: peers are notified and do not wait for this rank.
impl Drop for JobServices {
    fn drop(&mut self) {
        if self.bootstrap.is_closed() {
            return;
        }
        self.end(if std::thread::panicking() {
            "it panicked"
        } else {
            "it dropped its communicator without closing it"
        });
    }
}
