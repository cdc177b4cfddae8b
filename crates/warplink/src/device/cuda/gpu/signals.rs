//! Aborts waits in the device's streams when a fault is raised: all waits for the device's fault, waits for a
//! communicator's signals for that communicator's fault.
//!
//! A stream waits for a word until the word changes, and the peer that would change it is gone. So a thread
//! writes a value that satisfies every wait to all words of the affected signal pages, repeatedly, since a
//! released stream may reset words or wait again. Thread, stream and buffer are created with the device:
//! creating them after a failure could block.

use super::reaper::Reaper;
use super::second_context::SecondContext;
use crate::device::Fault;
use crate::device::cuda::driver::context::Context;
use crate::device::cuda::driver::raw::{Pinned, RawStream};
use crate::device::cuda::driver::status;
use crate::error::Result;
use crate::sync::{lock, wait_for};
use crate::threads;
use cudarc::driver::sys::CUstream;
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Condvar, Mutex, Weak};
use std::time::{Duration, Instant};

/// Satisfies every wait as long as epochs stay below it. Waits compare the signed difference, so it must also
/// be less than 2^63 away from every epoch.
const POISON: u64 = 1 << 62;

/// Size of the buffer that the poison is copied from.
const BUFFER: usize = 64 << 10;

/// Interval between rounds of writes: short against the 5 seconds in which a loss must be reported.
const PERIOD: Duration = Duration::from_millis(20);

/// Log a warning if a page is still not retired after this time.
const RETIREMENT: Duration = Duration::from_secs(1);

/// Rounds that the stream may be blocked before the second context is used.
const HELD_UP_ROUNDS: u32 = 10;

#[derive(Default)]
struct SignalPages {
    /// Live pages by address.
    pages: HashMap<u64, Page>,
    /// Pages about to be freed, whose outstanding waits must be aborted first.
    retiring: HashMap<u64, Retiring>,
    /// Faults that wake the thread when raised.
    faults: Vec<Weak<Fault>>,
    raised: bool,
    stopped: bool,
}

#[derive(Debug)]
struct Page {
    bytes: usize,
    /// Fault that aborts waits for its words.
    fault: Arc<Fault>,
}

struct Retiring {
    bytes: usize,
    since: Instant,
    /// Whether a write to it has been enqueued since.
    written: bool,
    overdue: bool,
    then: Then,
}

/// Callback for when no write to a page is in flight.
type Then = Box<dyn FnOnce() + Send>;

/// Pages written by the last round of each path, while that is in flight.
type UnderWay = [HashSet<u64>; 2];

/// Indices of the two paths: the primary context's stream, and the second context's.
const OWN: usize = 0;
const OTHER: usize = 1;

impl SignalPages {
    /// Adds a fault; returns whether it is new.
    fn note(&mut self, fault: &Arc<Fault>) -> bool {
        self.faults.retain(|known| known.strong_count() > 0);
        let is_known = |known: &Weak<Fault>| std::ptr::eq(known.as_ptr(), Arc::as_ptr(fault));
        if self.faults.iter().any(is_known) {
            return false;
        }
        self.faults.push(Arc::downgrade(fault));
        true
    }

    /// Whether no wait is left to abort.
    fn is_over(&self) -> bool {
        self.stopped && self.pages.is_empty() && self.retiring.is_empty()
    }

    /// Pages whose waits must be aborted, with their lengths.
    fn wanted(&self) -> HashMap<u64, usize> {
        let released = self.pages.iter();
        let released = released
            .filter(|(_, page)| self.raised || page.fault.is_released())
            .map(|(&address, page)| (address, page.bytes));
        let retiring = self.retiring.iter();
        released
            .chain(retiring.map(|(&address, page)| (address, page.bytes)))
            .collect()
    }

    /// Records that a write of all retiring pages was enqueued.
    fn note_round(&mut self) {
        for page in self.retiring.values_mut() {
            page.written = true;
        }
    }

    /// Removes retiring pages without writes in flight. If the stream is `broken`, pages do not need another
    /// write.
    fn take_finished(&mut self, under_way: &UnderWay, broken: bool) -> Vec<Then> {
        let finished = self.retiring.extract_if(|address, page| {
            (page.written || broken) && !under_way.iter().any(|round| round.contains(address))
        });
        let finished = finished.map(|(_, page)| page.then).collect();
        for page in self.retiring.values_mut() {
            if page.since.elapsed() > RETIREMENT && !std::mem::replace(&mut page.overdue, true) {
                tracing::warn!("a signal page is leaked, since its waits may not have ended");
            }
        }
        finished
    }
}

/// Live signal pages of a device, and the thread that aborts waits for them.
#[derive(Default)]
pub(crate) struct Signals {
    state: Mutex<SignalPages>,
    changed: Condvar,
}

impl Signals {
    /// Starts the thread. It ends after [`stop`](Self::stop) once no page is left. `reaper` frees its
    /// resources.
    pub(crate) fn start(context: &Arc<Context>, reaper: &Reaper) -> Result<Arc<Self>> {
        let signals = Arc::new(Self::default());
        // High priority, and created in advance: creating a stream after a failure could block.
        let stream = RawStream::create(context, true)?;
        let mut buffer = Pinned::allocate(context, BUFFER)?;
        let words = POISON.to_ne_bytes().repeat(BUFFER / size_of::<u64>());
        // SAFETY: nothing has been enqueued with this buffer yet.
        unsafe { buffer.write(0, &words) };
        let poisoner = Poisoner {
            context: context.clone(),
            signals: signals.clone(),
            stream,
            buffer,
            other: None,
            held_up: 0,
            under_way: UnderWay::default(),
            reaper: reaper.clone(),
        };
        let name = format!("warplink-fault-{}", context.ordinal);
        let run = move || poisoner.run();
        threads::spawn(name, "start the thread that ends waits", run)?;
        Ok(signals)
    }

    /// Adds a zeroed page, whose waits are aborted when `fault` is raised.
    pub(crate) fn add(self: &Arc<Self>, address: u64, bytes: usize, fault: &Arc<Fault>) {
        let page = Page {
            bytes,
            fault: fault.clone(),
        };
        let mut state = lock(&self.state);
        state.pages.insert(address, page);
        let is_new = state.note(fault);
        drop(state);
        if is_new {
            // Only once for each fault, however many pages it has.
            fault.when_raised(self, |signals| {
                if let Some(signals) = signals.upgrade() {
                    signals.wake();
                }
            });
        } else if fault.is_released() {
            self.wake();
        }
    }

    /// Wakes the thread.
    fn wake(&self) {
        // Taking the lock ensures that the thread is not between its check and its wait, so it cannot miss
        // the notification.
        drop(lock(&self.state));
        self.changed.notify_all();
    }

    /// Removes a page before it is freed and aborts waits for it: the driver would delay the free until
    /// waiting streams are done, possibly forever. `then` runs on the thread once no write to the page is in
    /// flight, so that the next allocation at this address is not overwritten. It must not block.
    pub(crate) fn retire(&self, address: u64, then: impl FnOnce() + Send + 'static) {
        let mut state = lock(&self.state);
        let Some(Page { bytes, .. }) = state.pages.remove(&address) else {
            drop(state);
            // Unknown page: nothing can wait for it.
            return then();
        };
        let page = Retiring {
            bytes,
            since: Instant::now(),
            written: false,
            overdue: false,
            then: Box::new(then),
        };
        state.retiring.insert(address, page);
        drop(state);
        self.changed.notify_all();
    }

    /// Aborts all waits from now on.
    pub(crate) fn raise(&self) {
        lock(&self.state).raised = true;
        self.changed.notify_all();
    }

    /// Ends the thread once the last page is retired: waits must not outlive the device.
    pub(crate) fn stop(&self) {
        lock(&self.state).stopped = true;
        self.changed.notify_all();
    }
}

struct Poisoner {
    context: Arc<Context>,
    signals: Arc<Signals>,
    stream: RawStream,
    buffer: Pinned,
    other: Option<SecondContext>,
    held_up: u32,
    under_way: UnderWay,
    reaper: Reaper,
}

impl Poisoner {
    fn run(mut self) {
        let signals = self.signals.clone();
        let mut state = lock(&signals.state);
        let mut warned = false;
        while !state.is_over() {
            let mut finished = Vec::new();
            // Held while enqueuing, so that no page is freed with a write in flight.
            let result = self.serve(&mut state, &mut finished);
            if let Err(error) = result
                && !status::is_over(&error)
                && !std::mem::replace(&mut warned, true)
            {
                tracing::warn!(%error, "waits in streams may not end");
            }
            if !finished.is_empty() {
                // Callbacks may retire further pages, which takes the lock.
                drop(state);
                finished.into_iter().for_each(|then| then());
                state = lock(&signals.state);
                continue;
            }
            // While waits must be aborted, repeat the writes: released streams may wait again.
            state = if !state.wanted().is_empty() {
                wait_for(&signals.changed, state, PERIOD)
            } else {
                signals
                    .changed
                    .wait(state)
                    .unwrap_or_else(std::sync::PoisonError::into_inner)
            };
        }
        drop(state);
        let Self { buffer, reaper, .. } = self;
        // The driver may wait for all streams before it frees pinned memory.
        reaper.run(move |_| drop(buffer));
    }

    /// Enqueues the requested writes, and returns the callbacks of pages whose last write is complete.
    fn serve(&mut self, state: &mut SignalPages, finished: &mut Vec<Then>) -> Result<()> {
        let looked = self.look();
        *finished = state.take_finished(&self.under_way, looked.is_err());
        let is_idle = looked?;
        let pages = state.wanted();
        if pages.is_empty() || !self.round(&pages, is_idle)? {
            return Ok(());
        }
        state.note_round();
        let until = Instant::now() + PERIOD;
        // A page to be freed is urgent, so poll for its write for a while.
        while !state.retiring.is_empty() && Instant::now() < until {
            let looked = self.look();
            finished.extend(state.take_finished(&self.under_way, looked.is_err()));
            looked?;
            std::thread::yield_now();
        }
        Ok(())
    }

    /// Updates which rounds are complete; returns whether the stream's is. A stream that cannot be queried
    /// counts as complete: it executes nothing any more.
    fn look(&mut self) -> Result<bool> {
        let _relaxed = self.context.relax_capture();
        if let Some(other) = &self.other
            && other.with(|_| Ok(())).unwrap_or(true)
        {
            self.under_way[OTHER].clear();
        }
        let is_idle = self.stream.is_idle();
        if *is_idle.as_ref().unwrap_or(&true) {
            self.under_way[OWN].clear();
        }
        is_idle
    }

    /// Enqueues one write of every word unless the previous round is in flight; returns whether it did.
    /// `is_idle` is the result of [`look`](Self::look).
    fn round(&mut self, pages: &HashMap<u64, usize>, is_idle: bool) -> Result<bool> {
        let entered = self.context.enter()?;
        let _relaxed = self.context.relax_capture();
        if is_idle {
            self.held_up = 0;
            // Recorded even if some copies fail to enqueue.
            self.under_way[OWN] = pages.keys().copied().collect();
            return self.write(pages, self.stream.raw).map(|()| true);
        }
        drop(entered);
        // The hardware has fewer queues than there are streams, and a waiting stream blocks others on its
        // queue. Another context has queues of its own.
        self.held_up += 1;
        if self.held_up < HELD_UP_ROUNDS {
            return Ok(false);
        }
        if self.other.is_none() {
            self.other = SecondContext::create(&self.context)?;
        }
        let Some(other) = &self.other else {
            return Ok(false);
        };
        let mut round = None;
        let written = other.with(|stream| {
            // Recorded only if the second stream was idle, i.e. the write was attempted.
            round = Some(pages.keys().copied().collect());
            self.write(pages, stream)
        });
        if let Some(round) = round {
            self.under_way[OTHER] = round;
        }
        written
    }

    fn write(&self, pages: &HashMap<u64, usize>, stream: CUstream) -> Result<()> {
        for (&address, &bytes) in pages {
            let mut done = 0;
            while done < bytes {
                let part = BUFFER.min(bytes - done);
                // SAFETY: the page is live: it is given back only when the rounds that write to it,
                // which are noted under the lock that is held here, are done. The buffer never
                // changes, and the stream is of the current context.
                unsafe {
                    self.buffer
                        .copy_to(0, address + done as u64, part, stream)?
                };
                done += part;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::{Error, ErrorKind};
    use std::collections::BTreeSet;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn a_fault_of_many_pages_is_listened_to_once() {
        let mut state = SignalPages::default();
        let [first, second] = [(); 2].map(|()| Arc::new(Fault::default()));
        let noted = [&first, &first, &second, &first].map(|fault| state.note(fault));
        assert_eq!(noted, [true, false, true, false]);
        drop(first);
        assert!(state.note(&Arc::new(Fault::default())) && !state.note(&second));
        assert_eq!(state.faults.len(), 1);
    }

    #[test]
    fn a_page_is_given_back_when_no_round_writes_to_it_though_others_are_released() {
        let (signals, given) = (Signals::default(), Arc::new(AtomicUsize::new(0)));
        let signals = Arc::new(signals);
        let [lost, living] = [(); 2].map(|()| Arc::new(Fault::default()));
        lost.raise(Error::new(ErrorKind::PeerLost, "lost"));
        for (page, fault) in [(8, &lost), (16, &living)] {
            signals.add(page, 64, fault);
        }
        let counter = given.clone();
        signals.retire(16, move || {
            counter.fetch_add(1, Ordering::Relaxed);
        });
        let run = |finished: Vec<Then>| finished.into_iter().for_each(|then| then());
        let mut state = lock(&signals.state);
        let wanted: BTreeSet<u64> = state.wanted().into_keys().collect();
        assert_eq!(Vec::from_iter(wanted), [8, 16], "not in one round");
        let [none, both] = [HashSet::new(), HashSet::from([8, 16])];
        run(state.take_finished(&[none.clone(), none.clone()], false));
        assert_eq!(given.load(Ordering::Relaxed), 0, "its waits were not ended");
        state.note_round();
        // A round on the second path is complete while an earlier one is still blocked on the first.
        run(state.take_finished(&[both, none.clone()], false));
        assert_eq!(given.load(Ordering::Relaxed), 0, "it will be written to");
        run(state.take_finished(&[HashSet::from([8]), none], false));
        assert_eq!(given.load(Ordering::Relaxed), 1);
        assert!(state.retiring.is_empty() && state.wanted().len() == 1);
    }
}
