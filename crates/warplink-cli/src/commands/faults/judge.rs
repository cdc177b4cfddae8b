//! Checks the observations of a cell.

use super::cell::{Cell, Fault, RankReport, kind_name};
use super::job::{JobOutcome, JobSettings, RankOutcome};
use serde::Serialize;
use warplink::ErrorKind;

/// Maximum delay of an error after the fault, in seconds.
const MAX_DELAY: f64 = 5.0;

/// Maximum time of the survivors from their error to right data, in seconds.
const MAX_RECOVERY: f64 = 5.0;

/// Result of a cell, with its problems.
#[derive(Debug, Serialize)]
pub(super) struct Judged {
    #[serde(flatten)]
    pub(super) cell: Cell,
    /// Kinds of errors.
    pub(super) summary: String,
    /// The longest time from the fault to a survivor's error.
    pub(super) seconds: Option<f64>,
    pub(super) survivors: Vec<Survivor>,
    pub(super) problems: Vec<String>,
    /// Findings of a first run that was repeated, because the multi-process service of the GPUs had failed.
    pub(super) spoiled: Vec<String>,
}

/// Result of one rank.
#[derive(Debug, Serialize)]
pub(super) struct Survivor {
    rank: usize,
    /// The kind of its error; none if it was not affected.
    error: Option<String>,
    /// The rank that the error names.
    names: Option<usize>,
    /// From the fault to the error.
    seconds: Option<f64>,
    /// From the fault to right data without the victim.
    went_on: Option<f64>,
    message: Option<String>,
}

/// Checks the observations of `cell`.
pub(super) fn judge(cell: Cell, settings: &JobSettings, outcome: JobOutcome) -> Judged {
    let JobOutcome {
        fault_at,
        ranks,
        mut problems,
    } = outcome;
    let mut survivors = Vec::new();
    if let Some(fault_at) = fault_at {
        // A rank without a report has crashed or hung.
        let has_error = |rank: &RankOutcome| rank.report.is_none() || rank.error().is_some();
        let failed: Vec<usize> = (0..ranks.len())
            .filter(|&rank| has_error(&ranks[rank]))
            .collect();
        for (rank, result) in ranks.iter().enumerate() {
            let is_victim = rank == settings.victim;
            let mut found = check_rank(result);
            if is_victim {
                found.extend(check_victim(cell, result));
            } else if let Some(report) = &result.report {
                let survivor = Survivor::new(rank, report, fault_at);
                found.extend(check_survivor(cell, settings.victim, &failed, &survivor));
                survivors.push(survivor);
            // A hung rank is reported by `check_rank` already.
            } else if !result.hung {
                found.push(describe(result));
            }
            problems.extend(
                found
                    .into_iter()
                    .map(|problem| format!("rank {rank} {problem}")),
            );
        }
    } else {
        problems.push("the victim did not reach its fault".to_owned());
        let ranks = ranks.iter().enumerate();
        problems.extend(ranks.map(|(rank, result)| format!("rank {rank} {}", describe(result))));
    }
    let times = survivors.iter().filter_map(|survivor| survivor.seconds);
    Judged {
        cell,
        summary: match fault_at {
            Some(_) => summarize(&survivors),
            None => "not run".to_owned(),
        },
        seconds: times.reduce(f64::max),
        survivors,
        problems,
        spoiled: Vec::new(),
    }
}

impl Survivor {
    fn new(rank: usize, report: &RankReport, fault_at: f64) -> Self {
        let error = report.error.as_ref();
        Self {
            rank,
            error: error.map(|error| error.kind.clone()),
            names: error.and_then(|error| error.peer),
            seconds: report.error_at.map(|at| at - fault_at),
            went_on: report.went_on_at.map(|at| at - fault_at),
            message: error.map(|error| error.message.clone()),
        }
    }
}

/// Problems that no rank may have.
fn check_rank(result: &RankOutcome) -> Vec<String> {
    let mut problems = Vec::new();
    if result.hung {
        problems.push("did not end".to_owned());
    }
    if let Some(report) = &result.report {
        problems.extend(report.wrong.iter().map(|wrong| format!("has {wrong}")));
        problems.extend(report.left.iter().map(|left| format!("leaked {left}")));
    }
    problems
}

/// `failed` are the ranks with an error or without a report.
fn check_survivor(cell: Cell, victim: usize, failed: &[usize], survivor: &Survivor) -> Vec<String> {
    let of_resources = cell.fault.is_of_resources();
    let (Some(kind), Some(message)) = (&survivor.error, &survivor.message) else {
        // A rank short of resources may get along without them; then nobody has an error.
        let is_allowed = of_resources && failed.is_empty();
        return (!is_allowed)
            .then(|| "got no error".to_owned())
            .into_iter()
            .collect();
    };
    if cell.is_unaffected() {
        return vec![format!("was affected: {message}")];
    }
    let mut problems = Vec::new();
    let seconds = survivor.seconds.unwrap_or(f64::INFINITY);
    if seconds > MAX_DELAY {
        problems.push(format!("got its error after {seconds:.2} s: {message}"));
    }
    // If the victim continues, its failing operations may look like a failure of its neighbour.
    let is_named = match survivor.names {
        Some(peer) if of_resources => peer == victim || failed.contains(&peer),
        peer => peer == Some(victim),
    };
    if !is_named {
        problems.push(format!("got an error that names another rank: {message}"));
    }
    if !of_resources && *kind != kind_name(ErrorKind::PeerLost) {
        problems.push(format!(
            "got an error that does not report a loss: {message}"
        ));
    }
    if cell.can_go_on() {
        match survivor.went_on {
            // From the rank's own error on: detection has a limit of its own.
            Some(at) if at - seconds <= MAX_RECOVERY => {}
            Some(at) => problems.push(format!("continued only after {at:.2} s")),
            None => problems.push("did not continue".to_owned()),
        }
    }
    problems
}

fn check_victim(cell: Cell, result: &RankOutcome) -> Option<String> {
    let error = result.error();
    match cell.fault {
        Fault::Kill if result.code.is_some() => Some("survived SIGKILL".to_owned()),
        Fault::Exit if result.code != Some(0) => Some(format!("exited with {:?}", result.code)),
        // The exit status of a Rust program that panics.
        Fault::Panic if result.code != Some(101) => Some(format!("exited with {:?}", result.code)),
        fault if fault.leaves_victim() && error.is_none() && !result.hung => Some(format!(
            "got no error that it was declared lost: {}",
            result.output
        )),
        _ if cell.is_unaffected() => error.map(|error| format!("was affected: {}", error.message)),
        _ => None,
    }
}

/// Description of a rank that wrote no report.
fn describe(result: &RankOutcome) -> String {
    let text = result
        .error()
        .map_or(result.output.trim(), |error| error.message.trim());
    format!("ended with {:?}: {text}", result.code)
}

fn summarize(survivors: &[Survivor]) -> String {
    let mut kinds: Vec<&str> = survivors
        .iter()
        .map(|survivor| match survivor.error.as_deref() {
            None => "unaffected",
            Some("PeerLost") => "lost",
            Some("PeerFailed") => "failed",
            Some(other) => other,
        })
        .collect();
    kinds.sort_unstable();
    kinds.dedup();
    kinds.join(", ")
}

#[cfg(test)]
mod tests {
    use super::super::cell::{Phase, ReportedError};
    use super::*;
    use crate::launch::GpuAssignment;
    use warplink::DeviceKind;

    fn problems(fault: Fault, phase: Phase, change: impl FnOnce(&mut JobOutcome)) -> String {
        let settings = JobSettings {
            ranks: 2,
            victim: 1,
            device: DeviceKind::Host,
            gpus: GpuAssignment::default(),
            jobs: 1,
            folder: "folder".into(),
            cache: "cache".into(),
            ending: std::sync::Arc::default(),
        };
        let lost = RankReport {
            error: Some(ReportedError {
                kind: "PeerLost".into(),
                peer: Some(1),
                message: "rank 1 was lost".into(),
            }),
            error_at: Some(10.5),
            went_on_at: Some(11.0),
            ..RankReport::default()
        };
        let survivor = RankOutcome {
            report: Some(lost),
            code: Some(0),
            ..RankOutcome::default()
        };
        let mut outcome = JobOutcome {
            fault_at: Some(10.0),
            ranks: vec![survivor, RankOutcome::default()],
            problems: Vec::new(),
        };
        change(&mut outcome);
        let cell = Cell { fault, phase };
        judge(cell, &settings, outcome).problems.join("; ")
    }

    fn report(outcome: &mut JobOutcome, change: impl FnOnce(&mut RankReport)) {
        change(outcome.ranks[0].report.as_mut().unwrap());
    }

    #[test]
    fn what_must_not_be_is_a_problem() {
        type Change = fn(&mut JobOutcome);
        assert_eq!(problems(Fault::Kill, Phase::Exchange, |_| {}), "");
        let cases: [(Change, &str); 10] = [
            (|all| report(all, |one| one.error = None), "got no error"),
            (
                |all| report(all, |one| one.error_at = Some(15.1)),
                "after 5.10 s",
            ),
            (
                |all| report(all, |one| one.went_on_at = None),
                "did not continue",
            ),
            (
                |all| report(all, |one| one.went_on_at = Some(16.0)),
                "only after",
            ),
            (
                |all| report(all, |one| one.wrong.push("wrong data".into())),
                "has wrong data",
            ),
            (
                |all| report(all, |one| one.left.push("1 × thread".into())),
                "leaked 1 × thread",
            ),
            (
                |all| report(all, |one| one.error.as_mut().unwrap().peer = Some(0)),
                "names another rank",
            ),
            (
                |all| {
                    report(all, |one| {
                        one.error.as_mut().unwrap().kind = "Timeout".into()
                    })
                },
                "does not report a loss",
            ),
            (|all| all.ranks[0].hung = true, "rank 0 did not end"),
            (|all| all.ranks[1].code = Some(0), "survived SIGKILL"),
        ];
        for (change, expected) in cases {
            let found = problems(Fault::Kill, Phase::Exchange, change);
            assert!(
                found.contains(expected),
                "'{found}' does not contain '{expected}'"
            );
        }
        let found = problems(Fault::Kill, Phase::Exchange, |all| all.fault_at = None);
        assert!(found.contains("did not reach its fault"), "{found}");
    }

    #[test]
    fn what_cannot_touch_a_phase_must_not_affect_it() {
        let found = problems(Fault::DiskFull, Phase::Graph, |_| {});
        assert!(found.contains("was affected"), "{found}");
        let unaffected = |all: &mut JobOutcome| {
            report(all, |one| one.error = None);
            all.ranks[1].report = Some(RankReport::default());
        };
        assert_eq!(problems(Fault::DiskFull, Phase::Graph, unaffected), "");
        // A victim that is declared lost must get an error.
        let found = problems(Fault::Stop, Phase::Graph, |_| {});
        assert!(
            found.contains("got no error that it was declared lost"),
            "{found}"
        );
    }
}
