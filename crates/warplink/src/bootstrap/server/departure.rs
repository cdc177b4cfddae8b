//! Distinguishing the end of a process from a network failure, and which side of the failure is cut off.
//!
//! A connection that ends although its rank has not left does not show which end is at fault. If the process at the other end
//! has exited, its rank is lost. If it still runs, either that rank is cut off or this one, which serves the store; in the
//! latter case the other connections end too, sooner or later. Declaring the first of them lost would make the ranks whose
//! connections still work go on without it, although they reach it. So no rank is declared lost before something has arrived
//! on every remaining connection after that end.

use super::{ServerShared, ServerState};
use crate::bootstrap::socket;
use crate::error::Rank;
use crate::sync::{lock, wait_for};
use crate::threads;
use std::io::{Error, ErrorKind};
use std::net::SocketAddr;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// The timeout of a probe whether a process still listens.
pub(super) const PROBE_TIMEOUT: Duration = Duration::from_millis(100);

/// How many processes are probed concurrently.
const PROBES: usize = 32;

/// The shortest and the longest interval between two probes, which double: most processes have exited by the first, and
/// those that have not are probed less and less often.
const MIN_INTERVAL: Duration = Duration::from_millis(1);
const MAX_INTERVAL: Duration = Duration::from_millis(20);

impl ServerShared {
    /// The connection of `rank` has ended, for `reason`. Unless it has left, it is lost. Blocks until that is certain, at
    /// most for the heartbeat limit.
    pub(super) fn depart(&self, rank: u32, reason: &str) {
        let mut state = lock(&self.state);
        state.members.remove(&rank);
        // From now on, so that what arrived on other connections before does not count as evidence.
        let since = Instant::now();
        state.departed = Some(since);
        self.changed.notify_all();
        let mut interval = MIN_INTERVAL;
        // A rank that left in order, or was declared lost already, is not present.
        while !state.closing && state.table.present().contains(&rank) {
            let late = since.elapsed() > self.settings.identity.heartbeat_limit;
            // Heard from all others since: the failure is not on this side. Beyond the limit, silence is decided by
            // the heartbeat.
            if late || self.all_heard(&state) {
                break;
            }
            let address = state.table.standby(rank);
            // A probe may take until its timeout, and other connections must not wait for it.
            drop(state);
            let ended = address.is_none_or(has_ended);
            state = lock(&self.state);
            if ended || state.closing {
                break;
            }
            state = wait_for(&self.changed, state, interval);
            interval = (interval * 2).min(MAX_INTERVAL);
        }
        if !state.closing {
            state.table.lose(rank, reason);
        }
        self.deliver(state);
        self.changed.notify_all();
    }

    /// Declares those of the `missing` ranks lost whose processes have exited, unless that is in progress already. On a
    /// separate thread, since probes of a machine that vanished time out, and heartbeats must not wait for that.
    pub(super) fn probe_missing(
        self: &Arc<Self>,
        state: &mut ServerState,
        missing: Vec<(u32, SocketAddr)>,
    ) {
        let is_probing = |thread: &JoinHandle<()>| !thread.is_finished();
        if missing.is_empty() || state.probing.as_ref().is_some_and(is_probing) {
            return;
        }
        let shared = self.clone();
        let probe = move || shared.probe(&missing);
        match threads::spawn("warplink-probe", "start a thread", probe) {
            Ok(thread) => state.probing = Some(thread),
            Err(error) => tracing::warn!(%error, "could not probe missing ranks"),
        }
    }

    fn probe(&self, missing: &[(u32, SocketAddr)]) {
        for some in missing.chunks(PROBES) {
            let ended = which_have_ended(some);
            let mut state = lock(&self.state);
            if state.closing {
                return;
            }
            // Asked again under the lock: ranks may have resumed or been lost during the probes.
            let missing = state.table.missing();
            for rank in ended.iter().filter(|rank| missing.contains(rank)) {
                state.table.lose(*rank, "its process has ended");
            }
            self.deliver(state);
        }
    }

    /// Whether something arrived from every other connected rank after a connection last ended.
    fn all_heard(&self, state: &ServerState) -> bool {
        let own = |rank: u32| rank as Rank == self.settings.identity.rank;
        state.departed.is_none_or(|since| {
            let mut others = state.members.iter().filter(|(rank, _)| !own(**rank));
            others.all(|(_, member)| member.pulse.is_heard_since(since))
        })
    }
}

/// Those of `ranks` whose processes have exited, probed concurrently.
fn which_have_ended(ranks: &[(u32, SocketAddr)]) -> Vec<u32> {
    thread::scope(|scope| {
        let probe = |&(rank, address): &(u32, SocketAddr)| {
            let ended = move || has_ended(address).then_some(rank);
            // A rank for which no thread can be started is probed again later.
            thread::Builder::new().spawn_scoped(scope, ended).ok()
        };
        let probes: Vec<_> = ranks.iter().filter_map(probe).collect();
        let ended = probes.into_iter().filter_map(|probe| probe.join().ok());
        ended.flatten().collect()
    })
}

/// Whether the process that listens at `address` for as long as it runs has exited: nobody listens there.
pub(super) fn has_ended(address: SocketAddr) -> bool {
    let refused = |error: Error| error.kind() == ErrorKind::ConnectionRefused;
    socket::connect(address, PROBE_TIMEOUT).is_err_and(refused)
}
