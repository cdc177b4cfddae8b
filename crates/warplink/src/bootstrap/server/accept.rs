//! Accepting connections, with limits on unauthenticated ones, so that strangers never exhaust threads or descriptors that
//! members need.

use super::{ServerShared, ServerState};
use crate::error::Error;
use crate::shortage::Throttle;
use crate::sync::{lock, wait_for};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, MutexGuard};
use std::thread::{self, Scope};
use std::time::{Duration, Instant};

/// How long a connection in its handshake cannot be dropped for a new one. A member needs a few milliseconds.
const MIN_PATIENCE: Duration = Duration::from_millis(100);
/// The most connections in a handshake at a time, even if the process may have many descriptors.
const MAX_UNAUTHENTICATED: usize = 64;
/// How long the server pauses when the process is out of descriptors.
const DESCRIPTOR_PAUSE: Duration = Duration::from_millis(20);
/// How long missing ranks may fail to get a descriptor or thread here. Then the job fails with that reason, before
/// they time out without one.
const MAX_SHORTAGE: Duration = Duration::from_secs(1);

static CANNOT_SERVE: Throttle = Throttle::new();

impl ServerShared {
    /// Accepts connections until the server closes, and waits for the threads that serve them.
    pub(super) fn accept_all(&self) {
        thread::scope(|scope| self.accept_in(scope));
    }

    fn accept_in<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>) {
        loop {
            // Before accepting: connections beyond the limit stay in the backlog, where they cost no descriptor
            // here.
            self.wait_for_handshakes();
            let accepted = self.listener.accept();
            if lock(&self.state).closing {
                return;
            }
            let error = match accepted {
                Ok((stream, _)) => {
                    self.admit(scope, stream);
                    continue;
                }
                Err(error) => error,
            };
            let errno = error.raw_os_error().map(Errno::from_raw_os_error);
            let error = Error::io("accept a connection", &error);
            let mut state = lock(&self.state);
            if errno == Some(Errno::MFILE) || errno == Some(Errno::NFILE) {
                // At the limit of descriptors even young handshakes go: members need descriptors more than
                // strangers do, and a joiner that is dropped retries.
                self.drop_unauthenticated(&mut state, usize::MAX, Duration::ZERO);
            }
            self.cannot_serve(state, &error);
            // The shortage may be temporary. Avoids a busy loop.
            thread::sleep(DESCRIPTOR_PAUSE);
        }
    }

    /// Blocks until another connection may begin its handshake. Drops the oldest one that has exceeded [`MIN_PATIENCE`].
    fn wait_for_handshakes(&self) {
        let mut state = lock(&self.state);
        while !state.closing && state.handshakes >= self.max_unauthenticated {
            self.drop_unauthenticated(&mut state, 1, MIN_PATIENCE);
            state = wait_for(&self.changed, state, DESCRIPTOR_PAUSE);
        }
    }

    /// Drops up to `count` connections whose handshakes are at least as old as `age`.
    fn drop_unauthenticated(&self, state: &mut ServerState, count: usize, age: Duration) {
        for _ in 0..count {
            match state.unauthenticated.first_key_value() {
                Some((&id, since)) if since.elapsed() >= age => {
                    state.unauthenticated.remove(&id);
                    if let Some(stream) = state.streams.get(&id) {
                        // Its thread notices that the connection is closed, and ends.
                        let _ = stream.shutdown(Shutdown::Both);
                    }
                }
                _ => return,
            }
        }
    }

    /// A connection was not accepted or given a thread. Once that has gone on for long while ranks are missing, this
    /// rank is given up for it.
    fn cannot_serve(&self, mut state: MutexGuard<'_, ServerState>, error: &Error) {
        if let Some(omitted) = CANNOT_SERVE.due() {
            tracing::warn!(%error, omitted, "a connection to the store could not be served; it may try again");
        }
        let now = Instant::now();
        // Failures less than `MAX_SHORTAGE` apart count as one shortage, so a single failure now and then never
        // adds up.
        let begun = match state.short {
            Some((begun, last)) if now - last < MAX_SHORTAGE => begun,
            _ => now,
        };
        state.short = Some((begun, now));
        if now - begun >= MAX_SHORTAGE && !state.table.missing().is_empty() {
            let own = u32::try_from(self.settings.identity.rank).unwrap_or(u32::MAX);
            let reason = format!("it cannot let ranks join: {error}");
            state.table.give_up(own, &reason);
            self.deliver(state);
        }
    }

    /// Starts a thread for a new connection.
    fn admit<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>, stream: TcpStream) {
        let stream = Arc::new(stream);
        let mut state = lock(&self.state);
        if state.closing {
            return;
        }
        let id = state.next;
        let served = stream.clone();
        let thread = thread::Builder::new().name("warplink-store".into());
        // The lock is held over the start, so the thread finds its own entries when it looks for them.
        match thread.spawn_scoped(scope, move || self.serve(id, served)) {
            Ok(_) => {
                state.short = None;
                state.next += 1;
                state.handshakes += 1;
                state.unauthenticated.insert(id, Instant::now());
                state.streams.insert(id, stream);
            }
            Err(error) => self.cannot_serve(state, &Error::thread("serve a connection", &error)),
        }
    }
}

/// The limit on connections in a handshake: an eighth of the descriptors that this process may have.
pub(super) fn max_unauthenticated() -> usize {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    usize::try_from(limit / 8)
        .unwrap_or(usize::MAX)
        .clamp(4, MAX_UNAUTHENTICATED)
}
