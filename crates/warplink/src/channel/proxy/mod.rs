//! The thread that does what kernels ask for by triggers.
//!
//! # What holds
//! 1. What one channel asks for happens in the order of the FIFO, that of two channels in no order.
//!    A connection whose peer takes nothing, as one that was stopped, holds up no other, as long as kernels
//!    have not asked for very much of it.
//! 2. A flush is answered when everything that its channel asked for before it is done, and nothing else
//!    is waited for.
//! 3. The proxy reads each trigger once, also when it slept: it looks at the ring itself, again and again.
//! 4. It stops when it is asked to: it does what is in the ring, until the deadline, and says how many
//!    triggers it did not. If that is none, it can be launched again, with the connections that it had.
//! 5. A stream may have it copy as well, over a network, and waits for that ([`StreamCopy`]). What was not copied
//!    when it stops fails the streams of the communicator.
//! 6. When it fails, kernels that wait are let go, and the job ends with its error.

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
use crate::error::{Error, ErrorKind, Result};
use crate::sync::lock;
use std::any::Any;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::Thread;
use std::time::Duration;
use worker::Worker;

/// How long after its deadline a proxy that stops may take to end.
const GRACE: Duration = Duration::from_secs(1);

/// How a rank's proxy works.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProxyConfig {
    /// Triggers that the FIFO holds; a power of two. Kernels wait when it is full.
    pub slots: usize,
    /// How long the proxy looks for triggers without a pause, after the last one or after it was woken, before it
    /// sleeps. A launch of a kernel with a proxied channel wakes it, the launch of a graph does not.
    pub idle: Duration,
    /// How long it sleeps between two looks from then on, until there is a trigger or it is woken. A trigger that
    /// comes then waits for as long at most.
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

/// The connections that share a proxy: those by the device's copy engine, and those over each network, so that a slow
/// network holds up neither copies nor another network.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum ProxyKey {
    Copies,
    /// Over the network by these devices, or by those that its library chooses.
    Network(Option<String>),
}

/// Called once with the error when the proxy fails.
pub(crate) type OnFailure = Box<dyn Fn(&Error) + Send + Sync>;

/// A proxy of a rank: its FIFO, its routes, and the thread.
pub(crate) struct Proxy {
    shared: Arc<ProxyShared>,
    fifo: Arc<Fifo>,
    config: ProxyConfig,
    /// The CPUs near the device, and the device's fault.
    cpus: Vec<usize>,
    fault: Arc<Fault>,
    /// Held while it is stopped or launched.
    run: Mutex<Run>,
    thread: Mutex<Option<Thread>>,
}

/// Whether the thread runs.
enum Run {
    /// It sends what was left when it ends.
    Running(Receiver<Drained>),
    /// The reader is there where nothing was left undone, so that the thread can be started again.
    Stopped(Option<FifoReader>),
}

/// State that the thread shares with its users.
struct ProxyShared {
    state: Mutex<ProxyState>,
    failure: OnceLock<Error>,
    on_failure: OnFailure,
    /// Whether it was woken since it last looked.
    woken: AtomicBool,
}

#[derive(Default)]
struct ProxyState {
    /// By the number of the connection.
    routes: Vec<Option<Arc<Route>>>,
    /// Connections that nobody uses any more, whose last triggers may still be in the ring, with what
    /// they need.
    retiring: Vec<(u32, Box<dyn Any + Send>)>,
    /// Copies requested by streams, until the thread takes them.
    copies: Vec<Requested>,
    /// Until when to do what is in the ring, once it is to stop.
    stopping: Option<Deadline>,
    /// Whether no thread runs.
    ended: bool,
}

/// Work left over when the thread ended.
struct Drained {
    /// Triggers, and how many of these were for lost peers.
    unsent: u64,
    for_lost_peers: u64,
    /// Copies of streams.
    uncopied: usize,
    /// That what was sent did not end in time.
    unfinished: Option<Error>,
    reader: FifoReader,
}

impl Proxy {
    /// Starts the thread, near the device.
    pub(crate) fn start(
        device: &Arc<dyn Device>,
        config: ProxyConfig,
        on_failure: OnFailure,
    ) -> Result<Arc<Self>> {
        let fifo = device.create_fifo(config.slots)?;
        Self::start_on(device, fifo, config, on_failure)
    }

    /// As [`start`](Self::start), with a FIFO.
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
            run: Mutex::new(Run::Stopped(None)),
            thread: Mutex::default(),
        };
        let running = proxy.spawn(reader)?;
        *lock(&proxy.run) = running;
        Ok(Arc::new(proxy))
    }

    fn spawn(&self, reader: FifoReader) -> Result<Run> {
        let (shared, fault, fifo) = (self.shared.clone(), self.fault.clone(), self.fifo.clone());
        let worker = Worker::new(shared, fault, fifo, reader, self.config);
        let (sender, ended) = mpsc::channel();
        let cpus = self.cpus.clone();
        let thread = std::thread::Builder::new()
            .name("warplink-proxy".to_owned())
            .spawn(move || {
                pin::pin(&cpus);
                // Fails if the proxy was dropped, which nobody waits for.
                let _ = sender.send(worker.run());
            })
            .map_err(|error| Error::io("start the proxy", &error))?;
        *lock(&self.thread) = Some(thread.thread().clone());
        Ok(Run::Running(ended))
    }

    /// Starts the thread again after a stop that left nothing undone, with the connections that there are. Their
    /// kernels must not call it meanwhile. Blocks while it is being stopped. Does nothing if it runs.
    ///
    /// # Errors
    /// [`ErrorKind::Closed`] if requests were lost when it stopped, since peers then wait for signals that were never
    /// sent; [`ErrorKind::Timeout`] if a kernel does not store a trigger that it began; its failure.
    pub(crate) fn launch(&self) -> Result<()> {
        self.check()?;
        let mut run = lock(&self.run);
        let Run::Stopped(reader) = &mut *run else {
            return Ok(());
        };
        let mut reader = reader.take().ok_or_else(|| {
            let text = "the proxy was stopped before it had sent everything";
            Error::new(ErrorKind::Closed, text)
                .with_operation("launch the proxy")
                .with_help("connect again with other tags, which starts another proxy")
        })?;
        let resumed = reader.discard(Deadline::after(GRACE));
        if let Err(error) = resumed.and_then(|()| self.fifo.resume()) {
            *run = Run::Stopped(Some(reader));
            return Err(error.with_operation("launch the proxy"));
        }
        let set = |stopping, ended| {
            let mut state = lock(&self.shared.state);
            (state.stopping, state.ended) = (stopping, ended);
        };
        set(None, false);
        *run = self.spawn(reader).inspect_err(|_| {
            // Nobody reads the ring, so kernels must not wait for that. A failure leaves them to the device's fault.
            let _ = self.fifo.stop();
            set(Some(Deadline::after(Duration::ZERO)), true);
        })?;
        Ok(())
    }

    /// Takes on a connection. What its channel is to have.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] where it has as many as it can have;
    /// [`ErrorKind::Closed`] when it was stopped.
    pub(crate) fn register(&self, route: Route) -> Result<ProxyEnd> {
        self.check()?;
        let mut state = lock(&self.shared.state);
        if state.stopping.is_some() {
            return Err(crate::device::channel::fifo::stopped());
        }
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

    /// Lets go of a connection that no kernel uses any more, and of `held`, when what it asked for is done.
    pub(crate) fn retire(&self, connection: u32, held: Box<dyn Any + Send>) {
        let mut state = lock(&self.shared.state);
        if state.ended {
            let route = state.routes.get_mut(connection as usize);
            let route = route.and_then(Option::take);
            // Not under the lock: what is let go of may lead back here.
            drop(state);
            return drop((route, held));
        }
        state.retiring.push((connection, held));
        drop(state);
        self.wake();
    }

    /// Has it copy for a connection when the stream is there, and set the word that the stream waits for.
    ///
    /// # Errors
    /// [`ErrorKind::Closed`] when it was stopped.
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

    /// Has it look for triggers now.
    pub(crate) fn wake(&self) {
        // Before the thread goes on, so that it finds this.
        self.shared.woken.store(true, Ordering::Release);
        if let Some(thread) = &*lock(&self.thread) {
            thread.unpark();
        }
    }

    /// Fails with what it failed with.
    pub(crate) fn check(&self) -> Result<()> {
        self.shared
            .failure
            .get()
            .map_or(Ok(()), |error| Err(error.clone()))
    }

    /// Has it end when it has done what is in the ring, or at `deadline`. Does not block.
    fn begin_stop(&self, deadline: Deadline) {
        lock(&self.shared.state).stopping.get_or_insert(deadline);
        self.wake();
    }

    /// Drops what connections of a stopped proxy hold. It cannot be launched again.
    pub(crate) fn release(&self) {
        if let Run::Stopped(reader) = &mut *lock(&self.run) {
            *reader = None;
        }
        let mut state = lock(&self.shared.state);
        if !state.ended {
            // A thread that did not end in time drops them itself.
            return;
        }
        let routes = std::mem::take(&mut state.routes);
        // Not under the lock: what is let go of may lead back here.
        drop(state);
        drop(routes);
    }

    /// Has it do what is in the ring, until `deadline`, and end. Blocks until then. Kernels that wait for
    /// it after that are let go. Does nothing when it was stopped before.
    ///
    /// # Errors
    /// [`ErrorKind::Timeout`], with the number of triggers that were not sent, or where what was sent did
    /// not end; what it failed with.
    pub(crate) fn stop(&self, deadline: Deadline) -> Result<()> {
        // The others wait, so that no launch comes between.
        let mut run = lock(&self.run);
        let Run::Running(ended) = &*run else {
            return self.check();
        };
        self.begin_stop(deadline);
        let drained = ended.recv_timeout(deadline.remaining() + GRACE);
        *run = Run::Stopped(None);
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
            Err(RecvTimeoutError::Disconnected) => failed(Error::new(
                ErrorKind::Internal,
                "the proxy's thread panicked",
            )),
        }
    }
}

impl Drained {
    /// Whether all requests were done but those for lost peers, whose connections have failed.
    fn is_complete(&self) -> bool {
        self.unsent == self.for_lost_peers && self.uncopied == 0 && self.unfinished.is_none()
    }

    /// Keeps the reader for a launch if there can be one, and gives the rest.
    fn keep_reader(self, run: &mut Run) -> (u64, usize, Option<Error>) {
        let (is_complete, rest) = (
            self.is_complete(),
            (self.unsent, self.uncopied, self.unfinished),
        );
        *run = Run::Stopped(Some(self.reader).filter(|_| is_complete));
        rest
    }
}

impl Drop for Proxy {
    /// The thread ends by itself, without doing what is left.
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
