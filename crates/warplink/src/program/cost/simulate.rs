//! The simulation: streams do their steps in order, and time jumps from one event to the next.

use super::bound::{Bound, Path};
use super::resources::{AT_ONCE, Resources};
use super::schedule::Schedule;
use super::step::Step;
use crate::error::{Error, ErrorKind, Result};
use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

/// Counts that differ by less than this, in proportion, are the same.
const ROUNDING: f64 = 1e-9;

/// What came of it.
pub(super) struct Outcome {
    /// When the last stream was done.
    pub(super) seconds: f64,
    /// What the time went to, along the chain of operations that ended last.
    pub(super) critical: Path,
    /// Seconds of full use of each resource.
    pub(super) busy: Vec<f64>,
    /// Start and end of each operation, where they are asked for.
    pub(super) spans: Vec<Between>,
}

/// From when to when an operation was done, and what the time up to then went to.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Between {
    pub(super) start: (f64, Path),
    pub(super) end: (f64, Path),
}

/// The error of a program whose streams wait for one another.
pub(super) fn endless() -> Error {
    Error::new(
        ErrorKind::Verification,
        "streams wait for one another and never finish",
    )
    .with_operation("simulate a program")
    .with_help("verify the program")
}

/// A stream.
#[derive(Clone, Debug, Default)]
struct Stream {
    /// The next step.
    next: usize,
    /// What the time up to now went to.
    path: Path,
}

/// A count that streams add to and wait for.
#[derive(Clone, Debug, Default)]
struct Counter {
    value: f64,
    /// Streams, and what they wait for.
    waiting: Vec<(u32, f64)>,
}

/// What happens at a point in time.
#[derive(Clone, Copy, Debug)]
enum Event {
    /// A stream goes on.
    Resume(u32),
    /// A counter gets so much more.
    Add(u32, f64, Path),
}

struct Timer {
    time: f64,
    /// Timers of one time go off in the order in which they were set.
    number: u64,
    event: Event,
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
        let time = self.time.total_cmp(&other.time);
        time.then(self.number.cmp(&other.number))
    }
}

struct Simulation<'a> {
    schedule: &'a Schedule<'a>,
    resources: Resources<'a>,
    streams: Vec<Stream>,
    counters: Vec<Counter>,
    timers: BinaryHeap<Reverse<Timer>>,
    timers_set: u64,
    /// Streams that can go on.
    ready: Vec<u32>,
    now: f64,
    /// When the last stream that is done was done. What it has told may still be on the way.
    done: f64,
    spans: Vec<Between>,
}

/// Whether a counter that stands at `value` has what is waited for. Amounts that stand for several are rounded.
fn reached(value: f64, wanted: f64) -> bool {
    value >= wanted * (1.0 - ROUNDING)
}

/// Runs the schedule to its end.
///
/// # Errors
/// [`ErrorKind::Verification`] where streams wait for one another for ever.
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
        streams: vec![Stream::default(); streams],
        counters: vec![Counter::default(); schedule.counters as usize],
        timers: BinaryHeap::new(),
        timers_set: 0,
        // The first stream is the last to be taken off.
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
            while let Some(stream) = self.ready.pop() {
                self.step(stream);
            }
            let work = self.resources.next();
            let timer = self.timers.peek();
            let timer = timer.map(|Reverse(timer)| (timer.time - self.now).max(0.0));
            let Some(seconds) = [work, timer].into_iter().flatten().reduce(f64::min) else {
                return;
            };
            // By what is left and not by the difference of two times, which may be 0 where they are large.
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
                    Event::Resume(stream) => self.ready.push(stream),
                    Event::Add(counter, amount, path) => self.add(counter, amount, &path),
                }
            }
        }
    }

    /// Lets a stream go on as far as it can.
    fn step(&mut self, number: u32) {
        let steps = &self.schedule.streams[number as usize];
        loop {
            let stream = &mut self.streams[number as usize];
            let Some(&step) = steps.get(stream.next) else {
                self.done = self.done.max(self.now);
                return;
            };
            stream.next += 1;
            match step {
                Step::NotBefore(time) if time > self.now => {
                    stream.path = Path::of(Bound::Host, time);
                    return self.set(time, Event::Resume(number));
                }
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
                        self.set(self.now + seconds, Event::Add(counter, amount, path));
                    } else {
                        self.add(counter, amount, &path);
                    }
                }
                Step::Delay(seconds) if seconds > 0.0 => {
                    stream.path.add(Bound::Latency, seconds);
                    return self.set(self.now + seconds, Event::Resume(number));
                }
                Step::Delay(_) => {}
                Step::Work(work) => return self.resources.start(work, number, self.now),
            }
        }
    }

    fn set(&mut self, time: f64, event: Event) {
        self.timers_set += 1;
        self.timers.push(Reverse(Timer {
            time,
            number: self.timers_set,
            event,
        }));
    }

    /// Adds to a counter. Who waited for it goes on, and owes its time to what came here.
    fn add(&mut self, counter: u32, amount: f64, path: &Path) {
        let counter = &mut self.counters[counter as usize];
        counter.value += amount;
        let value = counter.value;
        let (streams, ready) = (&mut self.streams, &mut self.ready);
        counter.waiting.retain(|&(stream, wanted)| {
            let goes_on = reached(value, wanted);
            if goes_on {
                streams[stream as usize].path = *path;
                ready.push(stream);
            }
            !goes_on
        });
    }

    fn outcome(self) -> Result<Outcome> {
        let unfinished = |(number, stream): (usize, &Stream)| {
            (stream.next < self.schedule.streams[number].len()).then_some(number)
        };
        // A stream that waits has passed the step, but nothing takes its number off a counter.
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
