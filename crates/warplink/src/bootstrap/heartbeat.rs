//! The thread that sends heartbeats and checks those of others.
//!
//! It is independent of the application: busy threads and long calls do not stop it, only stopping the whole process does.

use super::client::Client;
use super::server::Server;
use crate::error::Result;
use crate::sync::{lock, wait_while};
use crate::threads;
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The longest interval between two heartbeats, also for a long limit: other ranks may have a shorter one.
const MAX_INTERVAL: Duration = Duration::from_millis(500);

/// The running thread, until it is stopped.
pub(crate) struct Heartbeat {
    stopping: Arc<(Mutex<bool>, Condvar)>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Heartbeat {
    /// Starts it. A rank that is silent for `limit` is given up.
    pub(crate) fn start(client: Arc<Client>, server: Arc<Server>, limit: Duration) -> Result<Self> {
        let stopping = Arc::<(Mutex<bool>, Condvar)>::default();
        let signal = stopping.clone();
        let beat = move || run(&signal, &client, &server, limit);
        let thread = threads::spawn("warplink-heart", "start a thread", beat)?;
        Ok(Self {
            stopping,
            thread: Mutex::new(Some(thread)),
        })
    }

    /// Ends the thread and waits for it.
    pub(crate) fn stop(&self) {
        *lock(&self.stopping.0) = true;
        self.stopping.1.notify_all();
        let thread = lock(&self.thread).take();
        if let Some(thread) = thread {
            let _ = thread.join();
        }
    }
}

fn run(stopping: &(Mutex<bool>, Condvar), client: &Client, server: &Server, limit: Duration) {
    // Several heartbeats within the limit, since one of them may be delayed without the rank being stopped.
    let interval = (limit / 8).min(MAX_INTERVAL);
    let mut last = Instant::now();
    let mut awake_since = last;
    loop {
        let stop = wait_while(&stopping.1, lock(&stopping.0), interval, |stop| !*stop);
        if *stop {
            return;
        }
        // Beating may wait for the locks of client and server, and must not keep `stop` waiting for this one.
        drop(stop);
        if last.elapsed() > interval + limit / 4 {
            // This process itself was stopped. Heartbeats that arrived meanwhile have not been read yet, so silence
            // before now proves nothing.
            awake_since = Instant::now();
        }
        last = Instant::now();
        // Both roles: the rank that serves the store beats to its members, and checks theirs.
        client.beat(limit, awake_since);
        server.beat(limit, awake_since);
    }
}
