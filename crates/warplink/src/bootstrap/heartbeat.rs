//! The thread that shows the others that this process runs, and looks whether they do.
//!
//! It depends on nothing that the application does: threads that are busy and calls that take long do
//! not stop it. Only what stops the whole process does.

use super::client::Client;
use super::server::Server;
use crate::error::{Error, Result};
use crate::sync::lock;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The longest between two signs of life. Independent of the limit, which may differ between ranks.
const MAX_INTERVAL: Duration = Duration::from_millis(500);

/// The running thread, until it is stopped.
pub(crate) struct Heartbeat {
    stopping: Arc<(Mutex<bool>, Condvar)>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Heartbeat {
    /// Starts it. A rank that is not heard for `limit` is given up.
    pub(crate) fn start(client: Arc<Client>, server: Arc<Server>, limit: Duration) -> Result<Self> {
        let stopping = Arc::<(Mutex<bool>, Condvar)>::default();
        let told = stopping.clone();
        let thread = std::thread::Builder::new()
            .name("warplink-heart".into())
            .spawn(move || run(&told, &client, &server, limit))
            .map_err(|error| Error::thread("start a thread", &error))?;
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
    let interval = (limit / 8).min(MAX_INTERVAL);
    let mut last = Instant::now();
    let mut awake_since = last;
    loop {
        let stop = lock(&stopping.0);
        let (stop, _) = stopping
            .1
            .wait_timeout_while(stop, interval, |stop| !*stop)
            .unwrap_or_else(PoisonError::into_inner);
        if *stop {
            return;
        }
        drop(stop);
        if last.elapsed() > interval + limit / 4 {
            // This process was stopped itself. What the others sent meanwhile has not been read yet, so
            // that their silence says nothing.
            awake_since = Instant::now();
        }
        last = Instant::now();
        client.beat(limit, awake_since);
        server.beat(limit, awake_since);
    }
}
