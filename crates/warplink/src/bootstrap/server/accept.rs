//! Accepting connections, so that strangers never use up what members need.

use super::{Shared, State, spawn};
use crate::sync::lock;
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// How long a connection in its handshake is safe from being dropped for a new one; a member needs a
/// few milliseconds.
const MIN_PATIENCE: Duration = Duration::from_millis(100);
/// The most connections that may be in a handshake at a time, where the process may have many
/// descriptors.
const MAX_UNAUTHENTICATED: usize = 64;
/// How long the server rests when the process is out of descriptors.
const DESCRIPTOR_PAUSE: Duration = Duration::from_millis(20);

impl Shared {
    pub(super) fn accept_all(self: Arc<Self>) {
        let mut warned: Option<Instant> = None;
        loop {
            self.make_room();
            let accepted = self.listener.accept();
            if lock(&self.state).closing {
                return;
            }
            let error = match accepted {
                Ok((stream, _)) => {
                    self.clone().admit(stream);
                    continue;
                }
                Err(error) => error,
            };
            let errno = error.raw_os_error().map(Errno::from_raw_os_error);
            if errno == Some(Errno::MFILE) || errno == Some(Errno::NFILE) {
                // Once in a while: this may happen as often as anybody connects.
                if warned.is_none_or(|at| at.elapsed() > Duration::from_secs(10)) {
                    warned = Some(Instant::now());
                    tracing::warn!(
                        limit = getrlimit(Resource::Nofile).current,
                        "the process has no file descriptor left to let a rank join; \
                         raise the limit with ulimit -n, or close files"
                    );
                }
                self.drop_unauthenticated(&mut lock(&self.state), usize::MAX, Duration::ZERO);
            } else {
                tracing::warn!(%error, "could not accept a connection");
            }
            // It may pass, and must not turn into a busy loop.
            thread::sleep(DESCRIPTOR_PAUSE);
        }
    }

    /// Blocks until another connection may begin its handshake; drops the oldest that takes too
    /// long over its own.
    fn make_room(&self) {
        let mut state = lock(&self.state);
        while !state.closing && state.handshakes >= self.max_unauthenticated {
            self.drop_unauthenticated(&mut state, 1, MIN_PATIENCE);
            state = self
                .changed
                .wait_timeout(state, DESCRIPTOR_PAUSE)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// Drops up to `count` connections whose handshakes are at least as old as `age`.
    fn drop_unauthenticated(&self, state: &mut State, count: usize, age: Duration) {
        for _ in 0..count {
            match state.unauthenticated.first_key_value() {
                Some((&id, since)) if since.elapsed() >= age => {
                    state.unauthenticated.remove(&id);
                    if let Some(stream) = state.streams.get(&id) {
                        // Its thread finds the connection closed, and ends.
                        let _ = stream.shutdown(Shutdown::Both);
                    }
                }
                _ => return,
            }
        }
    }

    /// Gives a new connection a thread.
    fn admit(self: Arc<Self>, stream: TcpStream) {
        let stream = Arc::new(stream);
        let mut state = lock(&self.state);
        for id in std::mem::take(&mut state.finished) {
            if let Some(thread) = state.threads.remove(&id) {
                // It has nothing left to do but to end.
                let _ = thread.join();
            }
        }
        if state.closing {
            return;
        }
        let id = state.next;
        let (shared, own) = (self.clone(), stream.clone());
        match spawn("warplink-store", move || shared.serve(id, own)) {
            Ok(thread) => {
                state.next += 1;
                state.handshakes += 1;
                state.unauthenticated.insert(id, Instant::now());
                state.streams.insert(id, stream);
                state.threads.insert(id, thread);
            }
            Err(error) => tracing::warn!(%error, "could not serve a connection"),
        }
    }
}

/// Strangers get an eighth of the descriptors that this process may have.
pub(super) fn max_unauthenticated() -> usize {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    usize::try_from(limit / 8)
        .unwrap_or(usize::MAX)
        .clamp(4, MAX_UNAUTHENTICATED)
}
