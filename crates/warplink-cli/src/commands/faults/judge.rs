//! Checks the observations of a cell.

use super::cell::{Cell, Fault, RankReport, ReportedError};
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
    let mut problems = outcome.problems.clone();
    let Some(fault_at) = outcome.fault_at else {
        problems.push("the victim did not reach its fault".to_owned());
        problems.extend(outcome.ranks.iter().enumerate().map(describe));
        return Judged {
            cell,
            summary: "not run".to_owned(),
            seconds: None,
            survivors: Vec::new(),
            problems,
            spoiled: Vec::new(),
        };
    };
    let failed: Vec<usize> = (0..outcome.ranks.len())
        .filter(|&rank| report_of(&outcome, rank).is_none_or(|report| report.error.is_some()))
        .collect();
    let mut survivors = Vec::new();
    for (rank, result) in outcome.ranks.iter().enumerate() {
        let of_rank = |problem: String| format!("rank {rank} {problem}");
        if result.hung {
            problems.push(of_rank("did not end".to_owned()));
        }
        if let Some(report) = &result.report {
            let wrong = report.wrong.iter().map(|wrong| format!("has {wrong}"));
            let left = report.left.iter().map(|left| format!("leaked {left}"));
            problems.extend(wrong.chain(left).map(of_rank));
        }
        if rank == settings.victim {
            problems.extend(check_victim(cell, result).map(of_rank));
            continue;
        }
        let Some(report) = &result.report else {
            if !result.hung {
                problems.push(describe((rank, result)));
            }
            continue;
        };
        let survivor = Survivor::new(rank, report, fault_at);
        let check = Check {
            cell,
            settings,
            failed: &failed,
        };
        problems.extend(check.survivor(&survivor, report).map(of_rank));
        survivors.push(survivor);
    }
    let times = survivors.iter().filter_map(|survivor| survivor.seconds);
    Judged {
        cell,
        summary: summarize(&survivors),
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

struct Check<'a> {
    cell: Cell,
    settings: &'a JobSettings,
    failed: &'a [usize],
}

impl Check<'_> {
    fn survivor(&self, survivor: &Survivor, report: &RankReport) -> impl Iterator<Item = String> {
        let mut problems = Vec::new();
        match &report.error {
            Some(error) => self.error(error, survivor, &mut problems),
            None if self.cell.fault.is_of_resources() && self.failed.is_empty() => {}
            None => problems.push("got no error".to_owned()),
        }
        problems.into_iter()
    }

    fn error(&self, error: &ReportedError, survivor: &Survivor, problems: &mut Vec<String>) {
        let Cell { fault, .. } = self.cell;
        if self.cell.is_unaffected() {
            problems.push(format!("was affected: {}", error.message));
            return;
        }
        let victim = self.settings.victim;
        let seconds = survivor.seconds.unwrap_or(f64::INFINITY);
        if seconds > MAX_DELAY {
            problems.push(format!(
                "got its error after {seconds:.2} s: {}",
                error.message
            ));
        }
        // If the victim continues, its failing operations may look like a failure of its neighbour.
        let named = match error.peer {
            Some(peer) if fault.is_of_resources() => peer == victim || self.failed.contains(&peer),
            peer => peer == Some(victim),
        };
        if !named {
            problems.push(format!(
                "got an error that names another rank: {}",
                error.message
            ));
        }
        if !fault.is_of_resources() && !error.is(ErrorKind::PeerLost) {
            problems.push(format!(
                "got an error that does not report a loss: {}",
                error.message
            ));
        }
        if self.cell.can_go_on() {
            match survivor.went_on {
                Some(at) if at - seconds <= MAX_RECOVERY => {}
                Some(at) => problems.push(format!("continued only after {at:.2} s")),
                None => problems.push("did not continue".to_owned()),
            }
        }
    }
}

fn check_victim(cell: Cell, result: &RankOutcome) -> Option<String> {
    let error = result
        .report
        .as_ref()
        .and_then(|report| report.error.as_ref());
    match cell.fault {
        Fault::Kill if result.code.is_some() => Some("survived SIGKILL".to_owned()),
        Fault::Exit if result.code != Some(0) => Some(format!("exited with {:?}", result.code)),
        Fault::Panic if result.code != Some(101) => Some(format!("exited with {:?}", result.code)),
        fault if fault.leaves_victim() && error.is_none() && !result.hung => Some(format!(
            "got no error that it was declared lost: {}",
            result.output
        )),
        _ if cell.is_unaffected() => error.map(|error| format!("was affected: {}", error.message)),
        _ => None,
    }
}

fn report_of(outcome: &JobOutcome, rank: usize) -> Option<&RankReport> {
    outcome.ranks.get(rank)?.report.as_ref()
}

/// Description of a rank that wrote no report.
fn describe((rank, result): (usize, &RankOutcome)) -> String {
    let error = result
        .report
        .as_ref()
        .and_then(|report| report.error.as_ref());
    let text = error.map_or(result.output.trim(), |error| error.message.trim());
    format!("rank {rank} ended with {:?}: {text}", result.code)
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
    use super::super::cell::Phase;
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
