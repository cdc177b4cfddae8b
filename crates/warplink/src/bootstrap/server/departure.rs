//! Telling the end of a process from a connection that was cut, and who it was that was cut off.
//!
//! A connection that ends without a goodbye says nothing of which end is at fault. Where the process at
//! the other end is gone, its rank is lost. Where it runs, either that rank is cut off, or this one is,
//! which serves the store: then the other connections end too, sooner or later. To call the first of
//! them lost would have those that still listen go on without it, though they reach it. So nobody is
//! called lost before every rank whose connection is left was heard after that end.

use super::{Shared, State, spawn};
use crate::bootstrap::socket;
use crate::error::Rank;
use crate::sync::lock;
use std::io::{Error, ErrorKind};
use std::net::SocketAddr;
use std::sync::{Arc, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// How long a look whether a process still listens may take.
pub(super) const PROBE_TIMEOUT: Duration = Duration::from_millis(100);

/// How many processes are looked at at a time.
const LOOKS: usize = 32;

/// The shortest and the longest time between two looks.
const MIN_INTERVAL: Duration = Duration::from_millis(1);
const MAX_INTERVAL: Duration = Duration::from_millis(20);

impl Shared {
    /// The connection of `rank` has ended without a goodbye, for `reason`: it is lost. Blocks until that
    /// is certain enough to be told, at most for the heartbeat limit.
    pub(super) fn depart(&self, rank: u32, reason: &str) {
        let mut state = lock(&self.state);
        state.members.remove(&rank);
        let since = Instant::now();
        state.departed = Some(since);
        self.changed.notify_all();
        let mut interval = MIN_INTERVAL;
        // One that left in order, or was called lost already, is not there.
        while !state.closing && state.table.present().contains(&rank) {
            let late = since.elapsed() > self.settings.identity.heartbeat_limit;
            if late || self.all_heard(&state) {
                break;
            }
            let address = state.table.standby(rank);
            drop(state);
            let ended = address.is_none_or(has_ended);
            state = lock(&self.state);
            if ended || state.closing {
                break;
            }
            state = self
                .changed
                .wait_timeout(state, interval)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
            interval = (interval * 2).min(MAX_INTERVAL);
        }
        if !state.closing {
            state.table.lose(rank, reason);
        }
        self.deliver(state);
        self.changed.notify_all();
    }

    /// Finds those of the `missing` ranks whose processes have ended, which are lost with that, unless a thread
    /// does so already. It has a thread of its own: no look is answered where a machine is gone, and signs of
    /// life may not wait for that.
    pub(super) fn look_for(self: &Arc<Self>, state: &mut State, missing: Vec<(u32, SocketAddr)>) {
        if missing.is_empty() || state.looking {
            return;
        }
        let (id, shared) = (state.next, self.clone());
        match spawn("warplink-look", move || shared.look(id, &missing)) {
            Ok(thread) => {
                state.next += 1;
                state.looking = true;
                state.threads.insert(id, thread);
            }
            Err(error) => tracing::warn!(%error, "could not look for missing ranks"),
        }
    }

    fn look(&self, id: u64, missing: &[(u32, SocketAddr)]) {
        for some in missing.chunks(LOOKS) {
            let ended = which_have_ended(some);
            let mut state = lock(&self.state);
            if state.closing {
                break;
            }
            let missing = state.table.missing();
            for rank in ended.iter().filter(|rank| missing.contains(rank)) {
                state.table.lose(*rank, "its process has ended");
            }
            self.deliver(state);
        }
        let mut state = lock(&self.state);
        state.looking = false;
        state.finished.push(id);
    }

    /// Whether every other rank that is connected was heard since a connection ended last.
    fn all_heard(&self, state: &State) -> bool {
        let own = |rank: u32| rank as Rank == self.settings.identity.rank;
        state.departed.is_none_or(|since| {
            let mut others = state.members.iter().filter(|(rank, _)| !own(**rank));
            others.all(|(_, member)| member.pulse.is_heard_since(since))
        })
    }
}

/// Those whose processes have ended, looked at at the same time.
fn which_have_ended(ranks: &[(u32, SocketAddr)]) -> Vec<u32> {
    thread::scope(|scope| {
        let look = |&(rank, address): &(u32, SocketAddr)| {
            let ended = move || has_ended(address).then_some(rank);
            // What cannot be looked at is looked at later.
            thread::Builder::new().spawn_scoped(scope, ended).ok()
        };
        let looks: Vec<_> = ranks.iter().filter_map(look).collect();
        let ended = looks.into_iter().filter_map(|look| look.join().ok());
        ended.flatten().collect()
    })
}

/// Whether nobody listens at the address where the process of a rank does as long as it runs.
pub(super) fn has_ended(address: SocketAddr) -> bool {
    let refused = |error: Error| error.kind() == ErrorKind::ConnectionRefused;
    socket::connect(address, PROBE_TIMEOUT).is_err_and(refused)
}
