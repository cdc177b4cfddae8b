//! Keeps values alive until streams have completed the work that uses them.

use super::{Device, Event, Stream};
use crate::deadline::Deadline;
use crate::debug::debug_fields;
use crate::sync::lock;
use crate::threads;
use std::any::Any;
use std::ops::Deref;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Polling interval, initial and maximum (exponential backoff).
const POLL_INTERVALS: [Duration; 2] = [Duration::from_millis(1), Duration::from_millis(50)];

/// How long streams may take to drain after the device's fault, which aborts their waits.
const MAX_AFTER_FAULT: Duration = Duration::from_secs(2);

/// Above this number of streams, idle ones are removed before another is added.
const MAX_STREAMS_UNCHECKED: usize = 4;

/// The list of values in flight, each with events in the streams that may still use it. A value whose events
/// cannot be queried counts as in use. A thread polls while the list is not empty.
pub(crate) struct InFlight {
    device: Arc<dyn Device>,
    state: Mutex<Items>,
}

/// A value that streams use. Dropping it keeps the value alive until they have completed.
#[derive(Debug)]
pub(crate) struct InUse<T: Send + Sync + 'static> {
    value: Arc<T>,
    streams: Mutex<Vec<Stream>>,
    in_flight: Arc<InFlight>,
}

#[derive(Default)]
struct Items {
    held: Vec<Held>,
    /// Number of threads that are dropping values removed from the list.
    releasing: usize,
    /// Whether the polling thread is running.
    polled: bool,
}

struct Held {
    marks: Vec<FlightMark>,
    _item: Box<dyn Any + Send>,
}

/// A position in a stream that must be reached.
enum FlightMark {
    Recorded(Event),
    /// The event could not be recorded yet; retried at the next poll.
    Unrecorded(Stream),
}

impl InFlight {
    pub(crate) fn new(device: &Arc<dyn Device>) -> Self {
        Self {
            device: device.clone(),
            state: Mutex::default(),
        }
    }

    /// Keeps `item` alive until `streams` have completed their work so far. Does not block.
    pub(crate) fn hold(self: &Arc<Self>, streams: &[Stream], item: impl Any + Send) {
        // Idle streams have completed, so they need no event.
        let busy = streams.iter().filter(|stream| is_busy(stream));
        let marks: Vec<FlightMark> = busy.map(mark).collect();
        if marks.is_empty() {
            return drop(item);
        }
        self.hold_behind(marks, Box::new(item));
    }

    /// Drops values that no stream uses any more. Does not block.
    pub(crate) fn release_finished(&self) {
        let mut marked = Vec::new();
        let mut state = lock(&self.state);
        let finished: Vec<Held> = state
            .held
            .extract_if(.., |held| held.is_finished(&mut marked))
            .collect();
        if marked.is_empty() && finished.is_empty() {
            return;
        }
        // Counted so that `wait_until_empty` does not return while destructors run.
        state.releasing += 1;
        drop(state);
        // Outside the lock: destructors of items and streams may call back into this.
        drop(marked);
        drop(finished);
        lock(&self.state).releasing -= 1;
    }

    /// Blocks until the list is empty, up to `deadline`, or up to two seconds after the device's fault, which
    /// aborts the streams' waits. Returns whether it is empty.
    pub(crate) fn wait_until_empty(&self, deadline: Deadline) -> bool {
        let [mut interval, max_interval] = POLL_INTERVALS;
        let mut after_fault = None;
        loop {
            self.release_finished();
            let state = lock(&self.state);
            if state.held.is_empty() && state.releasing == 0 {
                return true;
            }
            drop(state);
            // The fault aborts the streams' waits, so they drain soon.
            if self.device.fault().error().is_some() {
                after_fault.get_or_insert_with(|| Deadline::after(MAX_AFTER_FAULT));
            }
            if deadline.passed() || after_fault.is_some_and(|deadline| deadline.passed()) {
                return false;
            }
            std::thread::sleep(interval.min(deadline.remaining()));
            interval = max_interval.min(2 * interval);
        }
    }

    fn hold_behind(self: &Arc<Self>, marks: Vec<FlightMark>, item: Box<dyn Any + Send>) {
        let mut state = lock(&self.state);
        state.held.push(Held { marks, _item: item });
        // The polling thread is running already.
        if std::mem::replace(&mut state.polled, true) {
            return;
        }
        drop(state);
        let own = self.clone();
        let poll = move || own.poll();
        if let Err(error) = threads::spawn("warplink-in-flight", "start a thread", poll) {
            // Later calls try again, and poll themselves.
            lock(&self.state).polled = false;
            tracing::warn!(%error, "resources in flight are kept longer, since the polling thread failed to start");
        }
    }

    /// Polls until the list is empty.
    fn poll(&self) {
        let [mut interval, max_interval] = POLL_INTERVALS;
        loop {
            std::thread::sleep(interval);
            interval = max_interval.min(2 * interval);
            self.release_finished();
            let mut state = lock(&self.state);
            // Checked under the lock, so that no value is added in between without a thread.
            if state.held.is_empty() {
                state.polled = false;
                return;
            }
        }
    }
}

impl Held {
    /// Whether all events are reached. Handles of streams that could be marked now are moved to `marked`.
    fn is_finished(&mut self, marked: &mut Vec<FlightMark>) -> bool {
        for mark in &mut self.marks {
            if let FlightMark::Unrecorded(stream) = mark
                && let Ok(event) = stream.record_end()
            {
                marked.push(std::mem::replace(mark, FlightMark::Recorded(event)));
            }
        }
        self.marks.retain(|mark| match mark {
            // A query error counts as not reached: memory is never released too early.
            FlightMark::Recorded(event) => !event.is_reached().unwrap_or(false),
            FlightMark::Unrecorded(_) => true,
        });
        self.marks.is_empty()
    }
}

/// Whether the stream has work or is capturing; true if it cannot be queried.
fn is_busy(stream: &Stream) -> bool {
    stream.is_capturing().unwrap_or(true) || !stream.is_idle().unwrap_or(false)
}

fn mark(stream: &Stream) -> FlightMark {
    match stream.record_end() {
        Ok(event) => FlightMark::Recorded(event),
        Err(error) => {
            tracing::debug!(%error, "a stream cannot be marked yet");
            FlightMark::Unrecorded(stream.clone())
        }
    }
}

impl<T: Send + Sync> InUse<T> {
    pub(crate) fn new(value: T, in_flight: &Arc<InFlight>) -> Self {
        Self {
            value: Arc::new(value),
            streams: Mutex::default(),
            in_flight: in_flight.clone(),
        }
    }

    /// Calls `enqueue`, which enqueues work on `stream` that uses the value.
    pub(crate) fn used_by<R>(&self, stream: &Stream, enqueue: impl FnOnce() -> R) -> R {
        self.note(stream);
        let enqueued = enqueue();
        // Another thread may have found the stream idle before, and removed it.
        self.note(stream);
        enqueued
    }

    /// Records that `stream` has work that uses the value.
    pub(crate) fn note(&self, stream: &Stream) {
        let mut streams = lock(&self.streams);
        if streams.iter().any(|noted| noted.raw() == stream.raw()) {
            return;
        }
        let mut idle = Vec::new();
        if streams.len() >= MAX_STREAMS_UNCHECKED {
            idle.extend(streams.extract_if(.., |stream| !is_busy(stream)));
        }
        streams.push(stream.clone());
        // Outside the lock: dropping a borrowed stream may run arbitrary code.
        drop(streams);
        drop(idle);
    }
}

impl<T: Send + Sync> Deref for InUse<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T: Send + Sync + 'static> Drop for InUse<T> {
    fn drop(&mut self) {
        let streams = std::mem::take(&mut *lock(&self.streams));
        if !streams.is_empty() {
            // The streams were noted, not marked, on each use: events cost driver calls, and are recorded here,
            // once, at the end.
            self.in_flight.hold(&streams, self.value.clone());
        }
    }
}

debug_fields!(InFlight, |it| items: lock(&it.state).held.len());

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{
        AllocationKind, DeviceConfig, DeviceKind, EventBackend, MemoryOp, Priority, open,
    };
    use crate::error::{Error, ErrorKind, Result};
    use std::sync::atomic::{AtomicBool, Ordering};

    /// An event that cannot be queried until allowed.
    #[derive(Debug, Default)]
    struct Silent(AtomicBool);

    impl EventBackend for Silent {
        fn elapsed_since(&self, _: &Event) -> Result<f32> {
            Ok(0.0)
        }

        fn is_reached(&self) -> Result<bool> {
            if self.0.load(Ordering::Relaxed) {
                return Ok(true);
            }
            Err(Error::new(ErrorKind::Driver, "cannot be asked now"))
        }
    }

    fn host() -> Arc<dyn Device> {
        open(&DeviceConfig::new(DeviceKind::Host, 0)).unwrap()
    }

    fn soon() -> Deadline {
        Deadline::after(Duration::from_millis(20))
    }

    fn late() -> Deadline {
        Deadline::after(Duration::from_secs(10))
    }

    #[test]
    fn values_with_failing_queries_are_kept() {
        let in_flight = Arc::new(InFlight::new(&host()));
        let (silent, item, other) = (Arc::new(Silent::default()), Arc::new(()), Arc::new(()));
        for item in [&item, &other] {
            let marks = vec![FlightMark::Recorded(Event::new(silent.clone()))];
            in_flight.hold_behind(marks, Box::new(item.clone()));
        }
        in_flight.release_finished();
        assert_eq!(Arc::strong_count(&item), 2, "dropped while in use");
        assert_eq!(Arc::strong_count(&other), 2, "dropped while in use");
        silent.0.store(true, Ordering::Relaxed);
        assert!(in_flight.wait_until_empty(late()));
        assert_eq!(
            (Arc::strong_count(&item), Arc::strong_count(&other)),
            (1, 1)
        );
    }

    /// Sets `word` to 1 in a stream, which ends a wait.
    fn set(device: &Arc<dyn Device>, word: &crate::device::Word) {
        let stream = device.create_stream(Priority::Normal).unwrap();
        let write = MemoryOp::write(word, 1);
        stream.memory_ops(&[write]).unwrap();
    }

    #[test]
    fn items_are_kept_until_every_stream_is_past_them_and_then_let_go_by_themselves() {
        let device = host();
        let in_flight = Arc::new(InFlight::new(&device));
        let signals = device.allocate_signals(64).unwrap();
        let word = signals.word(0).unwrap();
        let streams = [(); 2].map(|()| device.create_stream(Priority::Normal).unwrap());
        let wait = MemoryOp::wait(&word, 1);
        streams[1].memory_ops(&[wait]).unwrap();
        let item = InUse::new((), &in_flight);
        streams.iter().for_each(|stream| item.note(stream));
        let left = Arc::downgrade(&item.value);
        drop(item);
        assert!(!in_flight.wait_until_empty(soon()));
        assert_eq!(left.strong_count(), 1);
        set(&device, &word);
        let limit = late();
        while left.strong_count() > 0 {
            assert!(!limit.passed(), "never dropped");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn fault_ends_waits_and_releases_their_values() {
        let device = host();
        let in_flight = Arc::new(InFlight::new(&device));
        let signals = device.allocate_signals(64).unwrap();
        let word = signals.word(0).unwrap();
        let stream = device.create_stream(Priority::Normal).unwrap();
        let wait = MemoryOp::wait(&word, 1);
        stream.memory_ops(&[wait]).unwrap();
        let items = [(); 2].map(|()| Arc::new(()));
        in_flight.hold(std::slice::from_ref(&stream), items[0].clone());
        device
            .fault()
            .raise(Error::new(ErrorKind::PeerLost, "a peer is gone"));
        // Also values that are dropped only now.
        in_flight.hold(std::slice::from_ref(&stream), items[1].clone());
        assert!(in_flight.wait_until_empty(late()));
        assert!(items.iter().all(|item| Arc::strong_count(item) == 1));
    }

    #[test]
    fn a_stream_that_records_a_graph_is_marked_later_and_not_in_the_graph() {
        let device = host();
        let in_flight = Arc::new(InFlight::new(&device));
        let signals = device.allocate_signals(64).unwrap();
        let word = signals.word(0).unwrap();
        let stream = device.create_stream(Priority::Normal).unwrap();
        let memory = device.allocate(64, AllocationKind::Plain).unwrap();
        let wait = MemoryOp::wait(&word, 1);
        stream.memory_ops(&[wait]).unwrap();
        stream.begin_capture().unwrap();
        stream.fill(&memory, 1).unwrap();
        let item = Arc::new(());
        in_flight.hold(std::slice::from_ref(&stream), item.clone());
        let graph = stream.end_capture().unwrap();
        assert_eq!(
            graph.operations(),
            1,
            "the mark was recorded into the graph"
        );
        assert!(!in_flight.wait_until_empty(soon()));
        set(&device, &word);
        assert!(in_flight.wait_until_empty(late()));
        assert_eq!(Arc::strong_count(&item), 1);
    }
}
