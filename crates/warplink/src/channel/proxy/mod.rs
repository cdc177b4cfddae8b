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
//!    triggers it did not.
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
use crate::device::{Device, Fifo, FifoReader};
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

/// Called once with the error when the proxy fails.
pub(crate) type OnFailure = Box<dyn Fn(&Error) + Send + Sync>;

/// A rank's proxy: its FIFO, its routes, and the thread.
pub(crate) struct Proxy {
    shared: Arc<Shared>,
    fifo: Arc<Fifo>,
    thread: Thread,
    ended: Mutex<Option<Receiver<Drained>>>,
}

/// What the thread shares with the rest.
struct Shared {
    state: Mutex<State>,
    failure: OnceLock<Error>,
    on_failure: OnFailure,
    /// Whether it was woken since it last looked.
    woken: AtomicBool,
}

#[derive(Default)]
struct State {
    /// By the number of the connection.
    routes: Vec<Option<Arc<Route>>>,
    /// Connections that nobody uses any more, whose last triggers may still be in the ring, with what
    /// they need.
    retiring: Vec<(u32, Box<dyn Any + Send>)>,
    /// What streams ask for, until the thread takes it.
    copies: Vec<Requested>,
    /// Until when to do what is in the ring, once it is to stop.
    stopping: Option<Deadline>,
    /// Whether the thread does nothing any more.
    ended: bool,
}

/// What was left when the thread ended.
struct Drained {
    /// Triggers, and copies of streams.
    unsent: u64,
    uncopied: usize,
    /// That what was sent did not end in time.
    unfinished: Option<Error>,
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
        let shared = Arc::new(Shared {
            state: Mutex::default(),
            failure: OnceLock::new(),
            on_failure,
            woken: AtomicBool::new(false),
        });
        let (told, ended) = mpsc::channel();
        let fault = device.fault().clone();
        let worker = Worker::new(shared.clone(), fault, fifo.clone(), reader, config);
        let cpus = device.local_cpus();
        let thread = std::thread::Builder::new()
            .name("warplink-proxy".to_owned())
            .spawn(move || {
                pin::pin(&cpus);
                // Nobody listens where the proxy was dropped.
                let _ = told.send(worker.run());
            })
            .map_err(|error| Error::io("start the proxy", &error))?;
        Ok(Arc::new(Self {
            shared,
            fifo,
            thread: thread.thread().clone(),
            ended: Mutex::new(Some(ended)),
        }))
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
            // Not under the lock: what is let go of may lead back here.
            drop(state);
            return drop(held);
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
        self.thread.unpark();
    }

    /// Fails with what it failed with.
    pub(crate) fn check(&self) -> Result<()> {
        self.shared
            .failure
            .get()
            .map_or(Ok(()), |error| Err(error.clone()))
    }

    /// Whether it is stopped, or about to be.
    pub(crate) fn is_stopping(&self) -> bool {
        lock(&self.shared.state).stopping.is_some()
    }

    /// Has it do what is in the ring, until `deadline`, and end. Blocks until then. Kernels that wait for
    /// it after that are let go. Does nothing when it was stopped before.
    ///
    /// # Errors
    /// [`ErrorKind::Timeout`], with the number of triggers that were not sent, or where what was sent did
    /// not end; what it failed with.
    pub(crate) fn stop(&self, deadline: Deadline) -> Result<()> {
        lock(&self.shared.state).stopping.get_or_insert(deadline);
        self.wake();
        let Some(ended) = lock(&self.ended).take() else {
            return self.check();
        };
        let drained = ended.recv_timeout(deadline.remaining() + GRACE);
        self.check()?;
        let failed = |error: Error| Err(error.with_operation("stop the proxy"));
        match drained {
            Ok(Drained {
                unsent: 0,
                uncopied: 0,
                unfinished,
            }) => unfinished.map_or(Ok(()), failed),
            Ok(Drained {
                unsent, uncopied, ..
            }) => {
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

impl Drop for Proxy {
    /// The thread ends by itself, without doing what is left.
    fn drop(&mut self) {
        let now = Deadline::after(Duration::ZERO);
        lock(&self.shared.state).stopping.get_or_insert(now);
        self.wake();
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
