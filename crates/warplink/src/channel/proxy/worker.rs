//! The proxy's thread.

use super::{Drained, ProxyConfig, ProxyShared, ProxyState, Requested, Route};
use crate::deadline::Deadline;
use crate::device::channel::fifo::stopped;
use crate::device::channel::trigger::Trigger;
use crate::device::{Fault, Fifo, FifoReader};
use crate::error::{Error, Result};
use crate::sync::lock;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Polls of the ring before the thread yields to others.
const SPINS: u32 = 1000;

/// Number of triggers between two checks for a stop. Words are also written at least this often, if the carrier has
/// space.
const TRIGGERS_PER_LOOK: u64 = 64;

/// Maximum sleep between two checks whether a stream has reached a copy that it requested.
const COPY_NAP: Duration = Duration::from_micros(50);

/// Maximum parked triggers of one connection. Beyond that, the connection blocks the others, whose triggers share the
/// ring.
pub(super) const MAX_PARKED: usize = 16 << 10;

/// Triggers of a connection that were read but not served yet, because its carrier has no space for the first.
struct Parked {
    route: Arc<Route>,
    /// With their positions, in ring order.
    triggers: VecDeque<(u64, Trigger)>,
}

/// Reads the FIFO and serves its triggers.
pub(super) struct Worker {
    shared: Arc<ProxyShared>,
    /// The device's fault.
    fault: Arc<Fault>,
    fifo: Arc<Fifo>,
    reader: FifoReader,
    config: ProxyConfig,
    /// Triggers that were read and not served, because the peer was lost or the deadline passed.
    skipped: u64,
    /// How many of them were for lost peers.
    for_lost_peers: u64,
    /// Routes with pending words.
    unset: Vec<Arc<Route>>,
    /// Connections that wait for space, each with at least one trigger.
    parked: Vec<Parked>,
    /// Copies requested by streams that have not reached them yet, or whose carriers have no space.
    copies: Vec<Requested>,
    /// Whether there was no space for one of `copies`.
    is_full: bool,
}

impl Worker {
    pub(super) fn new(
        shared: Arc<ProxyShared>,
        fault: Arc<Fault>,
        fifo: Arc<Fifo>,
        reader: FifoReader,
        config: ProxyConfig,
    ) -> Self {
        Self {
            shared,
            fault,
            fifo,
            reader,
            config,
            skipped: 0,
            for_lost_peers: 0,
            unset: Vec::new(),
            parked: Vec::new(),
            copies: Vec::new(),
            is_full: false,
        }
    }

    /// Runs until it is stopped or fails.
    pub(super) fn run(mut self) -> Drained {
        let result = self.serve_all();
        if let Err(error) = &result {
            tracing::error!(%error, "the proxy failed");
            // A second error cannot be stored, and only the first matters.
            let _ = self.shared.failure.set(error.clone());
        }
        let shared = self.shared.clone();
        let drained = self.end(result.unwrap_or(Deadline::after(Duration::ZERO)));
        if let Some(error) = shared.failure.get() {
            (shared.on_failure)(error);
        }
        drained
    }

    /// Serves triggers until a stop is requested and the ring is empty, or until the deadline of the stop, which it
    /// returns.
    fn serve_all(&mut self) -> Result<Deadline> {
        let (mut idle_since, mut looks) = (None, 0);
        loop {
            self.serve_parked()?;
            if let Some((position, halves)) = self.reader.pop() {
                self.serve(position, halves)?;
                (idle_since, looks) = (None, 0);
                if position % TRIGGERS_PER_LOOK == 0 {
                    self.set_words()?;
                    self.serve_copies()?;
                    if let Some(deadline) = self.stopping()
                        && deadline.passed()
                    {
                        return Ok(deadline);
                    }
                }
                continue;
            }
            self.set_words()?;
            if self.serve_copies()? {
                (idle_since, looks) = (None, 0);
            }
            self.let_go()?;
            if let Some(deadline) = self.stopping()
                && self.reader.is_empty()
            {
                // A producer may have claimed a position and not stored its trigger yet.
                let is_done =
                    self.parked.is_empty() && self.has_no_copies() && self.reader.unread()? == 0;
                if deadline.passed() || is_done {
                    return Ok(deadline);
                }
            }
            // Acquire: pairs with the release store of the waker.
            if self.shared.woken.swap(false, Ordering::Acquire) {
                // A wake-up announces triggers: poll without sleeping again.
                idle_since = None;
            }
            if looks < SPINS {
                looks += 1;
                std::hint::spin_loop();
            // Never asleep with work at hand: nothing wakes the thread when a carrier has room again.
            } else if self.waits_for_room() {
                std::thread::yield_now();
            } else if idle_since.get_or_insert_with(Instant::now).elapsed() < self.config.idle {
                // Kernels cannot wake a host thread; only if host threads push can it sleep without adding latency.
                if !self.reader.listen(self.config.nap) {
                    std::thread::yield_now();
                }
            } else {
                std::thread::park_timeout(self.nap());
            }
        }
    }

    fn serve(&mut self, position: u64, halves: [u64; 2]) -> Result<()> {
        let trigger = Trigger::decode(halves)?;
        let route = lock(&self.shared.state)
            .routes
            .get(trigger.connection as usize)
            .cloned()
            .flatten();
        let Some(route) = route else {
            let text = format!(
                "a trigger names the unknown connection {}",
                trigger.connection
            );
            return Err(Error::protocol(text)
                .with_operation("serve a trigger")
                .with_help("use channels only while their connection is there"));
        };
        self.await_place(&route)?;
        if let Some(parked) = self.parked_of(&route) {
            // Parked after earlier triggers, to keep the order.
            parked.triggers.push_back((position, trigger));
        } else if !self.try_serve(&route, position, &trigger)? {
            let triggers = VecDeque::from([(position, trigger)]);
            self.parked.push(Parked { route, triggers });
        }
        Ok(())
    }

    /// Serves a trigger if its carrier has space; returns whether it was handled, as is one whose peer was lost.
    fn try_serve(&mut self, route: &Arc<Route>, position: u64, trigger: &Trigger) -> Result<bool> {
        let served = if self.is_faulted(route) {
            Ok(None)
        // Triggers without data need no room: their words are noted in the route and written together later.
        } else if trigger.movement.is_some() && !self.has_room(route)? {
            return Ok(false);
        } else {
            route.serve(position, trigger).map(Some)
        };
        if self.judge(route, served)?.flatten().is_none() {
            self.skip_for_lost_peer(1);
        }
        if route.has_words() && !self.unset.iter().any(|unset| Arc::ptr_eq(unset, route)) {
            self.unset.push(route.clone());
        }
        Ok(true)
    }

    /// Serves parked triggers as far as there is space now.
    fn serve_parked(&mut self) -> Result<()> {
        if self.parked.is_empty() {
            return Ok(());
        }
        for mut parked in std::mem::take(&mut self.parked) {
            // In portions, so that other connections are served in between.
            for _ in 0..TRIGGERS_PER_LOOK {
                let Some((position, trigger)) = parked.triggers.front() else {
                    break;
                };
                if !self.try_serve(&parked.route, *position, trigger)? {
                    break;
                }
                parked.triggers.pop_front();
            }
            if !parked.triggers.is_empty() {
                self.parked.push(parked);
            }
        }
        Ok(())
    }

    /// Waits until a connection has fewer than [`MAX_PARKED`] parked triggers, or the deadline passes.
    fn await_place(&mut self, route: &Arc<Route>) -> Result<()> {
        let mut looks = 0;
        while let Some(parked) = self.parked_of(route)
            && parked.triggers.len() >= MAX_PARKED
        {
            self.set_words()?;
            self.serve_parked()?;
            if looks < SPINS {
                looks += 1;
                std::hint::spin_loop();
            } else if self.stopping().is_some_and(|deadline| deadline.passed()) {
                break;
            } else {
                std::thread::yield_now();
            }
        }
        Ok(())
    }

    fn parked_of(&mut self, route: &Arc<Route>) -> Option<&mut Parked> {
        let mut parked = self.parked.iter_mut();
        parked.find(|parked| Arc::ptr_eq(&parked.route, route))
    }

    /// Whether the carrier of a route has space. True after the loss of the peer, so that the triggers are handled.
    fn has_room(&self, route: &Route) -> Result<bool> {
        Ok(self.judge(route, route.carrier.has_room())?.unwrap_or(true))
    }

    /// Whether there is work to do as soon as a carrier has space.
    fn waits_for_room(&self) -> bool {
        !self.unset.is_empty() || !self.parked.is_empty() || self.is_full
    }

    /// Sleep between two polls after a long idle time.
    fn nap(&self) -> Duration {
        // Streams do not notify the thread when they reach a copy, so it has to poll.
        if self.copies.is_empty() {
            self.config.nap
        } else {
            self.config.nap.min(COPY_NAP)
        }
    }

    /// Starts the copies that streams have reached; returns whether there was one.
    fn serve_copies(&mut self) -> Result<bool> {
        self.take_copies();
        let mut started = false;
        self.is_full = false;
        for requested in std::mem::take(&mut self.copies) {
            let Requested { route, copy } = &requested;
            if self.is_faulted(route) {
                continue;
            }
            match copy.is_due() {
                Ok(true) => {}
                Ok(false) => {
                    self.copies.push(requested);
                    continue;
                }
                // Its stream failed, so nobody waits for it.
                Err(error) => {
                    tracing::debug!(%error, "a copy is left out");
                    continue;
                }
            }
            // Not before earlier requests of the connection.
            let waits = self
                .parked
                .iter()
                .any(|parked| Arc::ptr_eq(&parked.route, route));
            if waits || !self.has_room(route)? {
                self.is_full = true;
                self.copies.push(requested);
                continue;
            }
            started = true;
            self.judge(route, route.copy(copy))?;
        }
        Ok(started)
    }

    fn take_copies(&mut self) {
        self.copies.append(&mut lock(&self.shared.state).copies);
    }

    fn has_no_copies(&self) -> bool {
        self.copies.is_empty() && lock(&self.shared.state).copies.is_empty()
    }

    /// Drops the remaining copies and fails their streams, which would wait forever; returns their number.
    fn forget_copies(&mut self) -> usize {
        self.take_copies();
        let copies = std::mem::take(&mut self.copies);
        for Requested { route, .. } in &copies {
            let error = match self.shared.failure.get() {
                Some(error) => error.clone(),
                None => stopped().with_peer(route.peer),
            };
            // Streams released by the abort may signal peers.
            route.fault.fail(error);
        }
        copies.len()
    }

    /// Writes pending words of routes whose carriers have space.
    fn set_words(&mut self) -> Result<()> {
        for route in std::mem::take(&mut self.unset) {
            let set = if self.is_faulted(&route) {
                Ok(false)
            } else {
                route.carrier.has_room().and_then(|room| {
                    if room {
                        route.set_words()?;
                    } else {
                        self.unset.push(route.clone());
                    }
                    Ok(true)
                })
            };
            if !self.judge(&route, set)?.unwrap_or(false) {
                self.skip_for_lost_peer(route.forget_words());
            }
        }
        Ok(())
    }

    /// Returns the result of an operation for a route; `None` if it failed because the peer was lost, which the fault
    /// reports.
    fn judge<T>(&self, route: &Route, result: Result<T>) -> Result<Option<T>> {
        match result {
            Ok(value) => Ok(Some(value)),
            Err(_) if self.is_faulted(route) => Ok(None),
            Err(error) => Err(error
                .with_operation("serve a trigger")
                .with_peer(route.peer)),
        }
    }

    fn skip_for_lost_peer(&mut self, triggers: u64) {
        self.skipped += triggers;
        self.for_lost_peers += triggers;
    }

    /// Whether operations of a connection are pointless: its peer was lost, or this rank has failed.
    fn is_faulted(&self, route: &Route) -> bool {
        route.fault.error().is_some() || self.fault.error().is_some()
    }

    fn stopping(&self) -> Option<Deadline> {
        lock(&self.shared.state).stopping
    }

    /// Drops unused connections once the ring was found empty and their copies are done.
    fn let_go(&self) -> Result<()> {
        let mut gone = Vec::new();
        let mut state = lock(&self.shared.state);
        if state.retiring.is_empty() || !self.reader.is_empty() {
            return Ok(());
        }
        let ProxyState {
            routes, retiring, ..
        } = &mut *state;
        for (connection, held) in std::mem::take(retiring) {
            let is_parked = |route: &Arc<Route>| {
                let mut parked = self.parked.iter();
                parked.any(|parked| Arc::ptr_eq(&parked.route, route))
            };
            let done = |route: &Arc<Route>| {
                !is_parked(route) && !route.has_words() && route.carrier.is_idle().unwrap_or(true)
            };
            match routes.get_mut(connection as usize) {
                Some(place) if place.as_ref().is_none_or(done) => gone.push((place.take(), held)),
                Some(_) => retiring.push((connection, held)),
                None => gone.push((None, held)),
            }
        }
        // Dropped outside the lock: destructors may call into the proxy.
        drop(state);
        drop(gone);
        Ok(())
    }

    /// Waits for operations already sent, and releases waiting kernels.
    fn end(mut self, deadline: Deadline) -> Drained {
        while self.set_words().is_ok() && !self.unset.is_empty() && !deadline.passed() {
            std::thread::yield_now();
        }
        // Their carriers had no room until the deadline, so they are reported as unsent rather than started now.
        let parked = std::mem::take(&mut self.parked);
        let parked = parked.iter().map(|parked| parked.triggers.len() as u64);
        self.skipped += parked.sum::<u64>();
        let unset = std::mem::take(&mut self.unset);
        self.skipped += unset.iter().map(|route| route.forget_words()).sum::<u64>();
        let uncopied = self.forget_copies();
        let routes: Vec<_> = {
            let state = lock(&self.shared.state);
            state.routes.iter().flatten().cloned().collect()
        };
        // A lost peer acknowledges nothing, so draining its carrier would only use up the deadline.
        let alive = routes.iter().filter(|route| !self.is_faulted(route));
        let unfinished = alive
            .map(|route| route.carrier.drain(deadline))
            .find_map(Result::err);
        if let Err(error) = self.fifo.stop() {
            // The device's fault releases its kernels.
            tracing::warn!(%error, "failed to notify kernels that the proxy has stopped");
        }
        // After the stop flag is set: a producer that claims later sees the flag and does not count on being read.
        let unread = self.reader.unread().unwrap_or(0);
        let drained = Drained {
            unsent: unread + self.skipped,
            for_lost_peers: self.for_lost_peers,
            uncopied,
            unfinished,
            reader: self.reader,
        };
        let mut state = lock(&self.shared.state);
        state.ended = true;
        let retiring = std::mem::take(&mut state.retiring);
        let gone: Vec<_> = if drained.is_complete() && self.shared.failure.get().is_none() {
            // The others are served again if the proxy is launched again.
            let retired = retiring.iter();
            retired
                .filter_map(|(connection, _)| state.routes.get_mut(*connection as usize)?.take())
                .collect()
        } else {
            std::mem::take(&mut state.routes)
                .into_iter()
                .flatten()
                .collect()
        };
        // Dropped outside the lock: destructors may call into the proxy.
        drop(state);
        drop((gone, retiring));
        drained
    }
}
