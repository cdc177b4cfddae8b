//! Takeover: finding the rank that serves the store next, when the one that does is lost.
//!
//! 1. Each rank selects the remaining rank with the lowest number, from the losses it knows. If that one does not
//!    answer, it probes those after it concurrently (`candidates.rs`). There is no designated
//!    backup, since it could be lost together with the server, as all ranks of a machine are.
//! 2. It connects there with the handshake of joining, and reports the ranks it knows to be gone and its part of the
//!    store's content (`journal.rs`).
//! 3. When all remaining ranks have done so, or were lost, the store accepts requests again (`restore.rs`, `table.rs`),
//!    and unanswered ones are retried.
//!
//! If the next rank is lost meanwhile, the one after it takes over in the same way. A rank that still hears from the old
//! store lets connections wait until it has decided (`Server::wait_until_serving`). A rank that the others gave up learns
//! that there.

use super::client::{Client, Phase};
use super::connection::{self, StoreLink};
use super::message::{self, StoreEntry};
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Rank, Result};
use crate::sync::lock;
use std::net::{SocketAddr, TcpStream};

impl Client {
    /// The connection to the store was lost for `reason`. Returns one to the rank that serves it next, or `None` if there is
    /// none.
    pub(super) fn next_store(&self, reason: &str) -> Option<StoreLink> {
        let (serving, session, standby) = {
            let mut state = lock(&self.state);
            state.link = None;
            state.open = false;
            if state.over.is_some() || state.phase != Phase::Ready {
                return None;
            }
            (state.serving, state.session, state.standby.clone())
        };
        // No effect if it has reported why it aborts, or has left.
        self.health.lose(serving, reason);
        loop {
            if lock(&self.state).over.is_some() {
                return None;
            }
            // Chosen anew in each round, since `pass_over` may have recorded more losses.
            let next = self.find_candidate(&standby)?;
            match self.connect_to(next, session, &standby) {
                Ok(link) => {
                    let mut state = lock(&self.state);
                    if state.over.is_some() {
                        // `close` ran between the handshake and here, and saw neither this link nor a handshake to
                        // end.
                        link.connection.outbox.shut_down();
                        return None;
                    }
                    state.serving = next;
                    state.pulse = link.connection.pulse.clone();
                    state.link = Some(link.connection.outbox.clone());
                    // Only this: requests are retried once the store has all journals and is ready (`open`).
                    for request in state.journal.restoring() {
                        // If this fails, the reader notices that the connection is closed.
                        if let Ok(body) = message::encode(&request) {
                            let _ = link.connection.outbox.push(0, &body);
                        }
                    }
                    return Some(link);
                }
                Err(error) if error.kind() == ErrorKind::GivenUp => {
                    self.give_up_membership(error.message());
                    return None;
                }
                // This rank left meanwhile.
                Err(_) if lock(&self.state).over.is_some() => return None,
                Err(error) if next == self.identity.rank => {
                    let message = format!("this rank cannot serve the store: {}", error.message());
                    lock(&self.state).over = Some(Error::new(error.kind(), message));
                    return None;
                }
                Err(error) => self.pass_over(next, &error),
            }
        }
    }

    /// Connects to the rank `next` as the one that serves the store. If that is this rank, it takes over first.
    fn connect_to(
        &self,
        next: Rank,
        session: [u8; 32],
        standby: &[Option<SocketAddr>],
    ) -> Result<StoreLink> {
        let address = address_of(standby, next)?;
        // Before the connection, which this rank's own server would keep waiting otherwise.
        if next == self.identity.rank {
            self.server.take_over(session, standby.to_vec());
        }
        let limit = self.identity.heartbeat_limit;
        // The new server knows only what it has seen itself; together the reports say for whom not to wait.
        let (lost, left) = self.health.gone();
        let entry = StoreEntry::Resume {
            session,
            lost,
            left,
        };
        let begin = |stream: &TcpStream| {
            let failed = |error| Error::io("connect", &error);
            let mut state = lock(&self.state);
            if let Some(error) = &state.over {
                return Err(error.clone());
            }
            // So that closing can end the handshake.
            state.connecting = Some(stream.try_clone().map_err(failed)?);
            Ok(entry.clone())
        };
        let link = connection::connect(
            address,
            &self.identity,
            limit / 2,
            // A rank that runs authenticates at once, but it may notice the loss later than this rank does, and admit it
            // only then.
            [Deadline::after(limit / 2), Deadline::after(limit * 2)],
            &begin,
        );
        lock(&self.state).connecting = None;
        link
    }

    /// A rank cannot serve the store, so it is recorded as lost.
    pub(super) fn pass_over(&self, rank: Rank, error: &Error) {
        let reason = match error.kind() {
            ErrorKind::Timeout => "it did not answer as the next to serve the store",
            _ => "its process has ended",
        };
        tracing::debug!(rank, %error, "a rank cannot serve the store");
        self.health.lose(rank, reason);
    }
}

/// The address at which `rank` would serve the store.
pub(super) fn address_of(standby: &[Option<SocketAddr>], rank: Rank) -> Result<SocketAddr> {
    let unknown = || Error::new(ErrorKind::Io, "the rank has announced no address for this");
    standby.get(rank).copied().flatten().ok_or_else(unknown)
}
