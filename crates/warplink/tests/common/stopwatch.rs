//! Time without what the machine spent on other work, so that a limit holds on a loaded machine too.

// Each test binary uses a part of this.
#![allow(dead_code, unreachable_pub)]

use std::time::{Duration, Instant};

/// Where the kernel counts how long tasks were ready and had no processor.
const PRESSURE: &str = "/proc/pressure/cpu";

/// Measures time, less the time in which some task of the machine waited for a processor: what was late then
/// may have been late for that.
#[derive(Clone, Copy, Debug)]
pub struct Stopwatch {
    started: Instant,
    /// Stall time counted by the kernel, if it counts that.
    stalled: Option<Duration>,
}

impl Stopwatch {
    pub fn start() -> Self {
        Self {
            stalled: stalled(),
            started: Instant::now(),
        }
    }

    /// A quarter of the time, where the kernel does not count.
    pub fn elapsed(&self) -> Duration {
        let all = self.started.elapsed();
        match (self.stalled, stalled()) {
            (Some(before), Some(now)) => all.saturating_sub(now.saturating_sub(before)),
            _ => all / 4,
        }
    }
}

/// Runs `what` on this thread, and tells how long that had a processor, where the system says so: what others on
/// the machine do does not count.
pub fn time_on_processor<T>(what: impl FnOnce() -> T) -> (T, Duration) {
    let (watch, before) = (Stopwatch::start(), on_processor());
    let done = what();
    let took = match (before, on_processor()) {
        (Some(before), Some(now)) => now - before,
        _ => watch.elapsed(),
    };
    (done, took)
}

/// How long this thread has run.
fn on_processor() -> Option<Duration> {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
    Some(Duration::from_nanos(
        text.split_whitespace().next()?.parse().ok()?,
    ))
}

/// How long some task has waited for a processor since the machine started.
fn stalled() -> Option<Duration> {
    let text = std::fs::read_to_string(PRESSURE).ok()?;
    let line = text.lines().find(|line| line.starts_with("some "))?;
    let (_, total) = line.split_once("total=")?;
    Some(Duration::from_micros(total.trim().parse().ok()?))
}
