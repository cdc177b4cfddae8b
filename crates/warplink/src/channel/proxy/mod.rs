//! The proxy: a host thread that serves requests (triggers) of kernels.
//!
//! # Guarantees
//! 1. Requests of one channel are served in FIFO order; requests of different channels are unordered. A connection
//!    whose peer accepts nothing, because it was stopped for example, does not block others until kernels have queued
//!    `MAX_PARKED` of its triggers.
//! 2. A flush is answered when every earlier request of its channel is complete, and waits for nothing else.
//! 3. The proxy reads each trigger exactly once, even after sleeping: it polls the ring itself and does not depend on
//!    notifications.
//! 4. A stop serves the triggers in the ring, until the deadline, and reports how many were not served. If none was
//!    lost, the proxy can be launched again, with the same connections.
//! 5. Streams may request network copies too, and wait for them ([`StreamCopy`]). Copies that were not performed when
//!    the proxy stops fail the streams of the communicator.
//! 6. When the proxy fails, waiting kernels are released, and the job ends with its error.

mod pin;
mod route;
mod stream_copy;
mod worker;

use route::Requested;
pub(crate) use route::Route;
pub(crate) use stream_copy::StreamCopy;

use crate::deadline::Deadline;
use crate::device::channel::ProxyEnd;
use crate::device::channel::trigger::MAX_CONNECTIONS;
use crate::device::{Device, Fault, Fifo, FifoReader};
use crate::error::{Error, Result};
use crate::sync::lock;
use crate::threads;
use std::any::Any;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::Thread;
use std::time::Duration;
use worker::Worker;

/// Extra time after the deadline of a stop for the thread to end.
const GRACE: Duration = Duration::from_secs(1);

/// Configuration of a rank's proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProxyConfig {
    /// Capacity of the FIFO in triggers; a power of two. Kernels wait when it is full.
    pub slots: usize,
    /// How long the proxy polls without a pause, after the last trigger or wake-up, before it sleeps. A launch of a
    /// kernel with a proxied channel wakes it, the launch of a graph does not.
    pub idle: Duration,
    /// Sleep between two polls from then on, until there is a trigger or a wake-up. It bounds the latency of the next
    /// trigger.
    pub nap: Duration,
}

impl Default for ProxyConfig {
    /// 512 slots, 10 ms, 1 ms.
    fn default() -> Self {
        Self {
            slots: 512,
            idle: Duration::from_millis(10),
            nap: Duration::from_millis(1),
        }
    }
}

/// Connections that share a proxy: all that use the device's copy engine, and all of one network, so that a slow
/// network delays neither copies nor another network.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum ProxyKey {
    Copies,
    /// Over these network devices, or those that the network library chooses.
    Network(Option<String>),
}

/// Called once with the error when the proxy fails.
pub(crate) type OnFailure = Box<dyn Fn(&Error) + Send + Sync>;

/// A proxy of a rank: its FIFO, its routes, and the thread.
pub(crate) struct Proxy {
    shared: Arc<ProxyShared>,
    fifo: Arc<Fifo>,
    config: ProxyConfig,
    /// CPUs near the device, and the device's fault.
    cpus: Vec<usize>,
    fault: Arc<Fault>,
    /// Held during a stop or a launch.
    run: Mutex<ProxyThread>,
    thread: Mutex<Option<Thread>>,
}

/// State of the thread.
enum ProxyThread {
    /// The thread sends its leftover work when it ends.
    Running(Receiver<Drained>),
    /// The reader is kept if no work was left over, so that the thread can be started again.
    Stopped(Option<FifoReader>),
}

/// State shared by the thread and its users.
struct ProxyShared {
    state: Mutex<ProxyState>,
    failure: OnceLock<Error>,
    on_failure: OnFailure,
    /// Whether it was woken since its last poll.
    woken: AtomicBool,
}

#[derive(Default)]
struct ProxyState {
    /// Indexed by connection number.
    routes: Vec<Option<Arc<Route>>>,
    /// Unused connections whose last triggers may still be in the ring, with the resources that these need.
    retiring: Vec<(u32, Box<dyn Any + Send>)>,
    /// Copies requested by streams that the thread has not taken yet.
    copies: Vec<Requested>,
    /// Deadline for serving the rest of the ring, once a stop is requested.
    stopping: Option<Deadline>,
    /// Whether no thread runs.
    ended: bool,
}

/// Work left over when the thread ended.
struct Drained {
    /// Triggers, and how many of these were for lost peers.
    unsent: u64,
    for_lost_peers: u64,
    /// Copies for streams.
    uncopied: usize,
    /// Error if operations already sent did not complete in time.
    unfinished: Option<Error>,
    reader: FifoReader,
}

impl Proxy {
    /// Starts the thread, on the CPUs near the device.
    pub(crate) fn start(
        device: &Arc<dyn Device>,
        config: ProxyConfig,
        on_failure: OnFailure,
    ) -> Result<Arc<Self>> {
        let fifo = device.create_fifo(config.slots)?;
        Self::start_on(device, fifo, config, on_failure)
    }

    /// Like [`start`](Self::start), with a given FIFO.
    fn start_on(
        device: &Arc<dyn Device>,
        (fifo, reader): (Arc<Fifo>, FifoReader),
        config: ProxyConfig,
        on_failure: OnFailure,
    ) -> Result<Arc<Self>> {
        let shared = Arc::new(ProxyShared {
            state: Mutex::default(),
            failure: OnceLock::new(),
            on_failure,
            woken: AtomicBool::new(false),
        });
        let proxy = Self {
            shared,
            fifo,
            config,
            cpus: device.local_cpus(),
            fault: device.fault().clone(),
            run: Mutex::new(ProxyThread::Stopped(None)),
            thread: Mutex::default(),
        };
        let running = proxy.spawn(reader)?;
        *lock(&proxy.run) = running;
        Ok(Arc::new(proxy))
    }

    fn spawn(&self, reader: FifoReader) -> Result<ProxyThread> {
        let (shared, fault, fifo) = (self.shared.clone(), self.fault.clone(), self.fifo.clone());
        let worker = Worker::new(shared, fault, fifo, reader, self.config);
        let (sender, ended) = mpsc::channel();
        let cpus = self.cpus.clone();
        let thread = threads::spawn("warplink-proxy", "start the proxy", move || {
            pin::pin(&cpus);
            // Fails if the proxy was dropped; then nobody waits for the result.
            let _ = sender.send(worker.run());
        })?;
        *lock(&self.thread) = Some(thread.thread().clone());
        Ok(ProxyThread::Running(ended))
    }

    /// Starts the thread again after a stop without leftover work, with the existing connections. Their kernels must
    /// not store triggers meanwhile. Blocks while a stop is in progress. No-op if it runs.
    ///
    /// # Errors
    /// [`ErrorKind::Closed`] if requests were lost when it stopped, since peers then wait for signals that were never
    /// sent; [`ErrorKind::Timeout`] if a kernel does not finish storing a trigger; the proxy's failure.
    pub(crate) fn launch(&self) -> Result<()> {
        self.check()?;
        let mut run = lock(&self.run);
        let ProxyThread::Stopped(reader) = &mut *run else {
            return Ok(());
        };
        let mut reader = reader.take().ok_or_else(|| {
            let text = "the proxy was stopped before it had sent everything";
            Error::closed(text)
                .with_operation("launch the proxy")
                .with_help("connect again with other tags, which starts another proxy")
        })?;
        // Kernels that were released by the stop may have claimed positions, whose triggers are not for the new
        // run.
        let resumed = reader.discard(Deadline::after(GRACE));
        if let Err(error) = resumed.and_then(|()| self.fifo.resume()) {
            *run = ProxyThread::Stopped(Some(reader));
            return Err(error.with_operation("launch the proxy"));
        }
        let set = |stopping, ended| {
            let mut state = lock(&self.shared.state);
            (state.stopping, state.ended) = (stopping, ended);
        };
        // Before the thread starts, which would otherwise see the old stop and end at once.
        set(None, false);
        *run = self.spawn(reader).inspect_err(|_| {
            // Nobody reads the ring, so kernels must not wait for it. If this fails, the device's fault releases
            // them.
            let _ = self.fifo.stop();
            set(Some(Deadline::after(Duration::ZERO)), true);
        })?;
        Ok(())
    }

    /// Adds a connection and returns the proxy's part of its channel.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] if the proxy has the maximum number of connections; [`ErrorKind::Closed`] if it
    /// was stopped.
    pub(crate) fn register(&self, route: Route) -> Result<ProxyEnd> {
        self.check()?;
        let mut state = lock(&self.shared.state);
        if state.stopping.is_some() {
            return Err(crate::device::channel::fifo::stopped());
        }
        // Reused, since a trigger has only 10 bits for the number.
        let free = state.routes.iter().position(Option::is_none);
        let number = free.unwrap_or(state.routes.len());
        if number >= MAX_CONNECTIONS {
            return Err(Error::invalid(format!(
                "the proxy has {number} connections; expected at most {MAX_CONNECTIONS}"
            ))
            .with_operation("connect")
            .with_help("drop connections, or use direct ones"));
        }
        if number == state.routes.len() {
            state.routes.push(None);
        }
        state.routes[number] = Some(Arc::new(route));
        Ok(ProxyEnd {
            fifo: self.fifo.clone(),
            connection: number as u32,
        })
    }

    /// Drops a connection that no kernel uses any more, and `held`, once its requests are served.
    pub(crate) fn retire(&self, connection: u32, held: Box<dyn Any + Send>) {
        let mut state = lock(&self.shared.state);
        if state.ended {
            let route = state.routes.get_mut(connection as usize);
            let route = route.and_then(Option::take);
            // Dropped outside the lock: destructors may call into the proxy.
            drop(state);
            return drop((route, held));
        }
        state.retiring.push((connection, held));
        drop(state);
        self.wake();
    }

    /// Copies for a connection once the stream reaches the copy's mark, then sets the word that the stream waits for.
    ///
    /// # Errors
    /// [`ErrorKind::Closed`] if it was stopped.
    pub(crate) fn copy(&self, connection: u32, copy: StreamCopy) -> Result<()> {
        self.check()?;
        let mut state = lock(&self.shared.state);
        let route = state.routes.get(connection as usize).cloned().flatten();
        let route = route.filter(|_| state.stopping.is_none());
        let route = route.ok_or_else(crate::device::channel::fifo::stopped)?;
        state.copies.push(Requested { route, copy });
        drop(state);
        self.wake();
        Ok(())
    }

    /// Makes it poll for triggers now.
    pub(crate) fn wake(&self) {
        // Release, and before unpark: the woken thread sees the flag.
        self.shared.woken.store(true, Ordering::Release);
        if let Some(thread) = &*lock(&self.thread) {
            thread.unpark();
        }
    }

    /// Returns the proxy's failure, if it has failed.
    pub(crate) fn check(&self) -> Result<()> {
        self.shared
            .failure
            .get()
            .map_or(Ok(()), |error| Err(error.clone()))
    }

    /// Requests a stop once the ring is served, or at `deadline`. Does not block.
    fn begin_stop(&self, deadline: Deadline) {
        // The first deadline counts, so that a later request cannot cut a stop in progress short.
        lock(&self.shared.state).stopping.get_or_insert(deadline);
        self.wake();
    }

    /// Drops the resources of a stopped proxy's connections. It cannot be launched again.
    pub(crate) fn release(&self) {
        if let ProxyThread::Stopped(reader) = &mut *lock(&self.run) {
            *reader = None;
        }
        let mut state = lock(&self.shared.state);
        if !state.ended {
            // A thread that did not end in time drops them itself.
            return;
        }
        let routes = std::mem::take(&mut state.routes);
        // Dropped outside the lock: destructors may call into the proxy.
        drop(state);
        drop(routes);
    }

    /// Serves the ring until `deadline`, then stops the thread. Blocks until then. Kernels that wait for the proxy
    /// later are released. No-op if it was stopped before.
    ///
    /// # Errors
    /// [`ErrorKind::Timeout`], with the number of triggers that were not sent, or if operations already sent did not
    /// complete; the proxy's failure.
    pub(crate) fn stop(&self, deadline: Deadline) -> Result<()> {
        // Held throughout, so that no launch comes in between.
        let mut run = lock(&self.run);
        let ProxyThread::Running(ended) = &*run else {
            return self.check();
        };
        self.begin_stop(deadline);
        let drained = ended.recv_timeout(deadline.remaining() + GRACE);
        // Also where the result is an error: a thread that did not end keeps its reader, so no other may be
        // started.
        *run = ProxyThread::Stopped(None);
        self.check()?;
        let failed = |error: Error| Err(error.with_operation("stop the proxy"));
        match drained.map(|drained| drained.keep_reader(&mut run)) {
            Ok((0, 0, unfinished)) => unfinished.map_or(Ok(()), failed),
            Ok((unsent, uncopied, _)) => {
                let copies = match uncopied {
                    0 => String::new(),
                    _ => format!(", and {uncopied} copies of streams were not done"),
                };
                let what = format!("the proxy: {unsent} triggers were not sent{copies}");
                failed(
                    deadline
                        .expired(&what)
                        .with_help("stop the proxy when no kernel uses its channels any more"),
                )
            }
            Err(RecvTimeoutError::Timeout) => {
                failed(deadline.expired("the end of the proxy's thread"))
            }
            Err(RecvTimeoutError::Disconnected) => {
                failed(Error::internal("the proxy's thread panicked"))
            }
        }
    }
}

impl Drained {
    /// Whether all requests were served except those for lost peers, whose connections have failed.
    fn is_complete(&self) -> bool {
        self.unsent == self.for_lost_peers && self.uncopied == 0 && self.unfinished.is_none()
    }

    /// Keeps the reader if a launch is possible, and returns the rest.
    fn keep_reader(self, run: &mut ProxyThread) -> (u64, usize, Option<Error>) {
        let (is_complete, rest) = (
            self.is_complete(),
            (self.unsent, self.uncopied, self.unfinished),
        );
        *run = ProxyThread::Stopped(Some(self.reader).filter(|_| is_complete));
        rest
    }
}

impl Drop for Proxy {
    /// The thread ends by itself, without serving the rest.
    fn drop(&mut self) {
        self.begin_stop(Deadline::after(Duration::ZERO));
    }
}

impl fmt::Debug for Proxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = lock(&self.shared.state);
        f.debug_struct("Proxy")
            .field("connections", &state.routes.iter().flatten().count())
            .field("stopping", &state.stopping.is_some())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod flush_tests;
#[cfg(test)]
#[cfg(not(loom))]
mod idle_tests;
#[cfg(test)]
#[cfg(not(loom))]
mod tests;
