//! `WARPLINK_NCCL_REPORT=1`: the calls by route, printed at the exit of the process.

use crate::communicator::lock;
use crate::leave;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::{Mutex, Once, OnceLock};
use std::time::{Duration, Instant};
use warplink::variables;

/// Variable that requests the report.
const VARIABLE: &str = "WARPLINK_NCCL_REPORT";

/// Entries by route and function.
static CALLS: Mutex<BTreeMap<(&str, &str), ReportEntry>> = Mutex::new(BTreeMap::new());

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct ReportEntry {
    calls: u64,
    bytes: u64,
    /// Host time spent in the calls.
    time: Duration,
}

/// Whether the report was requested.
fn is_wanted() -> bool {
    static WANTED: OnceLock<bool> = OnceLock::new();
    *WANTED.get_or_init(|| {
        let value = variables::read(VARIABLE).ok().flatten();
        value.is_some_and(|value| !value.is_empty() && value != "0")
    })
}

/// Registers the report to be printed at exit, if requested.
pub(crate) fn start() {
    if is_wanted() {
        leave::at_exit();
    }
}

/// The time, if the report was requested.
pub(crate) fn now() -> Option<Instant> {
    is_wanted().then(Instant::now)
}

/// Records a call of `bytes` bytes that began at `started`, which is the time of [`now`], and has just been enqueued.
pub(crate) fn note(
    route: &'static str,
    name: &'static str,
    bytes: usize,
    started: Option<Instant>,
) {
    note_all(route, [(name, bytes)].into_iter(), started);
}

/// As [`note`], of several calls with their bytes that were enqueued as one: each gets its share of the time.
pub(crate) fn note_all(
    route: &'static str,
    of: impl ExactSizeIterator<Item = (&'static str, usize)>,
    started: Option<Instant>,
) {
    let Some(started) = started else { return };
    let time = started.elapsed() / u32::try_from(of.len()).unwrap_or(u32::MAX).max(1);
    let mut calls = lock(&CALLS);
    for (name, bytes) in of {
        let entry = calls.entry((route, name)).or_default();
        entry.calls += 1;
        entry.bytes += bytes as u64;
        entry.time += time;
    }
}

/// Prints the report, if requested, once.
pub(crate) fn print() {
    static PRINTED: Once = Once::new();
    if is_wanted() {
        // The handler at the exit may be registered twice (`leave::at_exit_of_real`).
        PRINTED.call_once(|| eprint!("{}", table(&lock(&CALLS))));
    }
}

fn table(calls: &BTreeMap<(&str, &str), ReportEntry>) -> String {
    let process = std::process::id();
    let mut text = format!(
        "warplink-nccl, process {process}: calls by route\n{:<10} {:<14} {:>10} {:>18} {:>12}\n",
        "route", "function", "calls", "bytes", "host us each"
    );
    for ((route, name), entry) in calls {
        let each = entry.time.as_secs_f64() * 1e6 / entry.calls.max(1) as f64;
        // Writing to a string does not fail.
        let _ = writeln!(
            text,
            "{route:<10} {name:<14} {:>10} {:>18} {each:>12.1}",
            entry.calls, entry.bytes
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_that_were_enqueued_together_share_the_time() {
        let started = Instant::now().checked_sub(Duration::from_secs(8));
        let calls = [("Send", 3), ("Recv", 4), ("Send", 5), ("Recv", 6)];
        note_all("shared", calls.into_iter(), started);
        let noted = |name| lock(&CALLS)[&("shared", name)];
        let (sent, received) = (noted("Send"), noted("Recv"));
        assert_eq!((sent.calls, sent.bytes, received.bytes), (2, 8, 10));
        let time = sent.time + received.time;
        assert!((8..12).contains(&time.as_secs()), "{time:?}");
    }

    #[test]
    fn a_line_has_route_function_calls_bytes_and_time() {
        let entry = ReportEntry {
            calls: 4,
            bytes: 4096,
            time: Duration::from_micros(10),
        };
        let calls = BTreeMap::from([(("warplink", "AllReduce"), entry)]);
        let text = table(&calls);
        let line: Vec<&str> = text.lines().last().unwrap().split_whitespace().collect();
        assert_eq!(line, ["warplink", "AllReduce", "4", "4096", "2.5"]);
    }
}
