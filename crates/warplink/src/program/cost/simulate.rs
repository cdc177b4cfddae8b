//! Discrete-event simulation: streams execute their steps in order, and time advances from event to event.

use super::bound::{Bound, Path};
use super::resources::{AT_ONCE, Resources};
use super::schedule::Schedule;
use super::step::Step;
use crate::error::{Error, ErrorKind, Result};
use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

/// Relative tolerance for counter values, whose amounts are rounded.
const ROUNDING: f64 = 1e-9;

/// Outcome of a simulation.
pub(super) struct Outcome {
    /// Completion time of the last stream.
    pub(super) seconds: f64,
    /// Time per bound along the critical path.
    pub(super) critical: Path,
    /// Seconds of full use of each resource.
    pub(super) busy: Vec<f64>,
    /// Start and end of each operation, if requested.
    pub(super) spans: Vec<Between>,
}

/// Start and end of an operation, each with the time per bound up to then.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Between {
    pub(super) start: (f64, Path),
    pub(super) end: (f64, Path),
}

/// Error of a program whose streams deadlock.
pub(super) fn endless() -> Error {
    Error::new(
        ErrorKind::Verification,
        "streams wait for one another and never finish",
    )
    .with_operation("simulate a program")
    .with_help("verify the program")
}

/// State of a stream.
#[derive(Clone, Debug, Default)]
struct StreamState {
    /// Next step.
    next: usize,
    /// Time per bound up to now.
    path: Path,
}

/// A counter that streams add to and wait for.
#[derive(Clone, Debug, Default)]
struct Counter {
    value: f64,
    /// Waiting streams, with the values that they wait for.
    waiting: Vec<(u32, f64)>,
}

/// A timed event.
#[derive(Clone, Copy, Debug)]
enum TimedEvent {
    /// A stream continues.
    Resume(u32),
    /// A counter increases by an amount.
    Add(u32, f64, Path),
}

struct Timer {
    time: f64,
    /// Sequence number: simultaneous timers fire in the order in which they were set.
    number: u64,
    event: TimedEvent,
}

impl PartialEq for Timer {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Timer {}

impl PartialOrd for Timer {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Timer {
    fn cmp(&self, other: &Self) -> Ordering {
        // Total, although times are never NaN: a heap needs a total order.
        let time = self.time.total_cmp(&other.time);
        time.then(self.number.cmp(&other.number))
    }
}

struct Simulation<'a> {
    schedule: &'a Schedule<'a>,
    resources: Resources<'a>,
    streams: Vec<StreamState>,
    counters: Vec<Counter>,
    timers: BinaryHeap<Reverse<Timer>>,
    timers_set: u64,
    /// Streams that can continue.
    ready: Vec<u32>,
    now: f64,
    /// Completion time of the last completed stream. Its signals may still be in flight.
    done: f64,
    spans: Vec<Between>,
}

/// Whether a counter with `value` satisfies a wait. Amounts of representatives are rounded.
fn reached(value: f64, wanted: f64) -> bool {
    value >= wanted * (1.0 - ROUNDING)
}

/// Runs the schedule to its end.
///
/// # Errors
/// [`ErrorKind::Verification`] if streams deadlock.
pub(super) fn run(schedule: &Schedule<'_>, timeline: bool) -> Result<Outcome> {
    let spans = if timeline {
        schedule.operations.len()
    } else {
        0
    };
    let streams = schedule.streams.len();
    let mut simulation = Simulation {
        schedule,
        resources: Resources::new(schedule),
        streams: vec![StreamState::default(); streams],
        counters: vec![Counter::default(); schedule.counters as usize],
        timers: BinaryHeap::new(),
        timers_set: 0,
        // Popped from the end; reversed, so that the first stream runs first.
        ready: (0..streams as u32).rev().collect(),
        now: 0.0,
        done: 0.0,
        spans: vec![Between::default(); spans],
    };
    simulation.go();
    simulation.outcome()
}

impl Simulation<'_> {
    fn go(&mut self) {
        let mut done = Vec::new();
        loop {
            // All streams that can go on, before time advances: work that starts together shares resources from its
            // start.
            while let Some(stream) = self.ready.pop() {
                self.step(stream);
            }
            let work = self.resources.next();
            let timer = self.timers.peek();
            let timer = timer.map(|Reverse(timer)| (timer.time - self.now).max(0.0));
            // Rates change only when work starts or ends, so that nothing happens before the earlier of the two.
            let Some(seconds) = [work, timer].into_iter().flatten().reduce(f64::min) else {
                return;
            };
            // Decrement the remaining time instead of comparing absolute times, whose difference may round to 0 if
            // they are large.
            self.resources.advance(seconds);
            self.now += seconds;
            self.resources.take_done(&mut done);
            for active in done.drain(..) {
                let work = &self.schedule.works[active.work as usize];
                self.streams[active.stream as usize]
                    .path
                    .add(work.bound, self.now - active.started);
                self.ready.push(active.stream);
            }
            while let Some(Reverse(timer)) = self.timers.peek()
                && timer.time <= self.now + AT_ONCE
                && let Some(Reverse(timer)) = self.timers.pop()
            {
                match timer.event {
                    TimedEvent::Resume(stream) => self.ready.push(stream),
                    TimedEvent::Add(counter, amount, path) => self.add(counter, amount, &path),
                }
            }
        }
    }

    /// Executes steps of a stream until it blocks.
    fn step(&mut self, number: u32) {
        let steps = &self.schedule.streams[number as usize];
        loop {
            let stream = &mut self.streams[number as usize];
            let Some(&step) = steps.get(stream.next) else {
                // Not the time of the last event: a signal may still be in flight that nobody waits for.
                self.done = self.done.max(self.now);
                return;
            };
            stream.next += 1;
            match step {
                Step::NotBefore(time) if time > self.now => {
                    // The stream waited for the host, so the host's time so far is its critical path.
                    stream.path = Path::of(Bound::Host, time);
                    return self.set(time, TimedEvent::Resume(number));
                }
                // The host was ahead; the stream's own path stays critical.
                Step::NotBefore(_) => {}
                Step::Begin(operation) => {
                    if let Some(span) = self.spans.get_mut(operation as usize) {
                        span.start = (self.now, stream.path);
                    }
                }
                Step::End(operation) => {
                    if let Some(span) = self.spans.get_mut(operation as usize) {
                        span.end = (self.now, stream.path);
                    }
                }
                Step::Await(counter, value) => {
                    let counter = &mut self.counters[counter as usize];
                    if !reached(counter.value, value) {
                        return counter.waiting.push((number, value));
                    }
                }
                Step::Add(counter, amount, seconds) => {
                    let mut path = stream.path;
                    if seconds > 0.0 {
                        path.add(Bound::Latency, seconds);
                        self.set(self.now + seconds, TimedEvent::Add(counter, amount, path));
                    } else {
                        self.add(counter, amount, &path);
                    }
                }
                Step::Delay(seconds) if seconds > 0.0 => {
                    stream.path.add(Bound::Latency, seconds);
                    return self.set(self.now + seconds, TimedEvent::Resume(number));
                }
                Step::Delay(_) => {}
                Step::Work(work) => return self.resources.start(work, number, self.now),
            }
        }
    }

    fn set(&mut self, time: f64, event: TimedEvent) {
        self.timers_set += 1;
        self.timers.push(Reverse(Timer {
            time,
            number: self.timers_set,
            event,
        }));
    }

    /// Adds to a counter. Streams that waited for it continue, with this path as their critical path.
    fn add(&mut self, counter: u32, amount: f64, path: &Path) {
        let counter = &mut self.counters[counter as usize];
        counter.value += amount;
        let value = counter.value;
        let (streams, ready) = (&mut self.streams, &mut self.ready);
        counter.waiting.retain(|&(stream, wanted)| {
            let goes_on = reached(value, wanted);
            if goes_on {
                // The stream has waited: the path that ends the wait is the longer one, by definition.
                streams[stream as usize].path = *path;
                ready.push(stream);
            }
            !goes_on
        });
    }

    fn outcome(self) -> Result<Outcome> {
        let unfinished = |(number, stream): (usize, &StreamState)| {
            (stream.next < self.schedule.streams[number].len()).then_some(number)
        };
        // A blocked stream has passed its step already, but remains registered with the counter.
        let waiting = self
            .counters
            .iter()
            .any(|counter| !counter.waiting.is_empty());
        if waiting
            || self
                .streams
                .iter()
                .enumerate()
                .any(|stream| unfinished(stream).is_some())
        {
            return Err(endless());
        }
        let last = self
            .streams
            .iter()
            .max_by(|a, b| a.path.seconds().total_cmp(&b.path.seconds()));
        Ok(Outcome {
            seconds: self.done,
            critical: last.map(|stream| stream.path).unwrap_or_default(),
            busy: self.resources.into_busy(),
            spans: self.spans,
        })
    }
}
