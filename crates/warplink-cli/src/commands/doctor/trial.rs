//! Device trials: rank processes exchange memory and verify the data.
//!
//! The doctor starts this command again under `launch`, with a hidden subcommand, so that a crash or hang
//! becomes a line of the report. Every rank prints one line of JSON.

use super::steps::{CheckStep, GEMM, RankReport, TrialKind, VIRTUAL};
use super::{Found, Prerequisite};
use crate::names::name_of;
use crate::process::{THIS_EXECUTABLE, end_within, read_all, this_command};
use crate::report::counted;
use anyhow::{Context, Result, ensure};
use std::process::Stdio;
use std::time::Duration;
use warplink::DeviceKind;

/// Hidden subcommand of a trial's rank.
pub(crate) const TRIAL_COMMAND: &str = "__doctor-trial";

/// Time limit for waits of a rank.
const RANK_TIMEOUT: Duration = Duration::from_secs(15);

/// Time limit of a whole trial.
const TRIAL_TIMEOUT: Duration = Duration::from_secs(150);

/// Tries the host device with two ranks.
pub(super) fn on_host() -> Vec<Prerequisite> {
    tried("host device", DeviceKind::Host, 2, TrialKind::Device)
}

/// Tries `ranks` ranks on `count` GPUs.
pub(super) fn on_gpus(ranks: usize, count: usize) -> Vec<Prerequisite> {
    const AREA: &str = "GPUs, tried";
    let mut checks = tried(AREA, DeviceKind::Cuda, ranks, TrialKind::Device);
    // NCCL does not support two ranks on one GPU.
    if count >= ranks {
        checks.extend(tried(AREA, DeviceKind::Cuda, ranks, TrialKind::Collectives));
    }
    checks
}

/// Runs a trial, and converts each of its steps to a check.
fn tried(area: &'static str, kind: DeviceKind, ranks: usize, what: TrialKind) -> Vec<Prerequisite> {
    let reports = match run_ranks(kind, ranks, what) {
        Ok(reports) => reports,
        Err(error) => {
            let name = match what {
                TrialKind::Device => "ranks",
                TrialKind::Collectives => "collectives",
            };
            let help = match kind {
                DeviceKind::Host => {
                    "fix what the error names, and the items listed under machine, above, if there are any"
                }
                DeviceKind::Cuda => {
                    "in a container, share the host's IPC and PID namespaces \
                     (--ipc=host --pid=host); run with -v for details"
                }
            };
            let check = Prerequisite::new(area, name, Found::missing(format!("{error:#}"), help));
            return vec![match what {
                TrialKind::Device => check.needed_by(kind),
                TrialKind::Collectives => check,
            }];
        }
    };
    summarize(area, kind, what, &reports)
}

fn summarize(
    area: &'static str,
    kind: DeviceKind,
    what: TrialKind,
    reports: &[RankReport],
) -> Vec<Prerequisite> {
    let check = |first: &CheckStep| {
        let steps = reports.iter().enumerate().filter_map(|(rank, report)| {
            let mut steps = report.steps.iter();
            Some((rank, report, steps.find(|step| step.name == first.name)?))
        });
        let mut failures = steps.filter_map(|(rank, report, step)| {
            Some((
                rank,
                report,
                step.library_missing,
                step.outcome.as_ref().err()?,
            ))
        });
        // One failure per step: the others are usually consequences or repetitions of it.
        let found = match failures.next() {
            None => {
                let detail = first.outcome.as_deref().unwrap_or("done");
                Found::ok(format!("{detail}, {}", counted(reports.len(), "rank")))
            }
            Some((.., true, error)) => {
                Found::missing(error, "install the library; see libraries below")
            }
            Some((rank, report, false, error)) => {
                let help = match kind {
                    DeviceKind::Host => "report this as a bug",
                    DeviceKind::Cuda => {
                        "fix what is missing above; in a container, share the host's IPC and PID \
                         namespaces (--ipc=host --pid=host)"
                    }
                };
                Found::missing(format!("rank {rank} on {}: {error}", report.device), help)
            }
        };
        let check = Prerequisite::new(area, &first.name, found);
        // Transfers do not need GEMM.
        let optional = first.name == GEMM
            || what == TrialKind::Collectives
            || (kind == DeviceKind::Cuda && first.name.starts_with(VIRTUAL));
        if optional {
            check
        } else {
            check.needed_by(kind)
        }
    };
    let steps = reports.first().map_or(&[][..], |report| &report.steps);
    steps.iter().map(check).collect()
}

/// Starts the ranks and collects their output.
fn run_ranks(kind: DeviceKind, ranks: usize, what: TrialKind) -> Result<Vec<RankReport>> {
    let (device, count) = (kind.to_string(), ranks.to_string());
    let mut child = this_command()
        .args(["launch", "--device", &device, "-n", &count])
        // A hung rank is of no more use once another one has failed.
        .args(["--grace", "1"])
        .args(["--", THIS_EXECUTABLE, TRIAL_COMMAND, &name_of(&what)])
        .env("WARPLINK_TIMEOUT", RANK_TIMEOUT.as_secs().to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context("start ranks")?;
    // Read on threads before the wait: a full pipe would block the ranks, and the trial would time out.
    let (out, err) = (
        read_all(child.stdout.take())?,
        read_all(child.stderr.take())?,
    );
    // If the launcher has to be killed, its guard ends the ranks.
    let status = end_within(&mut child, TRIAL_TIMEOUT);
    let [out, err] = [out, err].map(|output| output.join().unwrap_or_default());
    tracing::info!(%err, "output of the ranks");
    let status =
        status.with_context(|| format!("the ranks did not end within {TRIAL_TIMEOUT:?}"))?;
    ensure!(status.success(), "{}", first_complaint(&err));
    parse(&out, ranks)
}

/// Parses the reports in the ranks' prefixed lines, in rank order.
fn parse(out: &str, ranks: usize) -> Result<Vec<RankReport>> {
    (0..ranks)
        .map(|rank| {
            let prefix = format!("[rank {rank}] ");
            let line = out.lines().find_map(|line| line.strip_prefix(&prefix));
            let line = line.with_context(|| format!("rank {rank} printed no report"))?;
            serde_json::from_str(line).with_context(|| format!("read the report of rank {rank}"))
        })
        .collect()
}

/// The line of the ranks' output with the error.
fn first_complaint(err: &str) -> &str {
    let mut lines = err.lines().filter(|line| !line.trim().is_empty());
    let error = err.lines().find(|line| line.contains("error: "));
    // The first error is the cause; without one, the last line is closest to the end.
    error
        .or_else(|| lines.next_back())
        .unwrap_or("the ranks failed without a message")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::doctor::CheckStatus;
    use crate::commands::doctor::steps::WORDS;

    fn report(outcomes: &[(&str, Result<&str, &str>, bool)]) -> RankReport {
        RankReport {
            device: "cuda:0".into(),
            steps: outcomes
                .iter()
                .map(|(name, outcome, library_missing)| CheckStep {
                    name: (*name).to_owned(),
                    outcome: outcome.map(str::to_owned).map_err(str::to_owned),
                    library_missing: *library_missing,
                })
                .collect(),
        }
    }

    #[test]
    fn one_rank_that_fails_fails_the_step_and_is_named() {
        let reports = [
            report(&[(WORDS, Ok("fine"), false), (GEMM, Err("gone"), true)]),
            report(&[(WORDS, Err("torn"), false), (GEMM, Err("gone"), true)]),
        ];
        let checks = summarize("area", DeviceKind::Cuda, TrialKind::Device, &reports);
        assert_eq!(checks.len(), 2);
        assert!(checks[0].stops(DeviceKind::Cuda));
        assert_eq!(checks[0].found.detail, "rank 1 on cuda:0: torn");
        assert_eq!(checks[1].found.status, CheckStatus::Missing);
        assert!(!checks[1].stops(DeviceKind::Cuda), "transfers need no GEMM");
    }

    #[test]
    fn reports_are_found_among_other_lines() {
        let line = serde_json::to_string(&report(&[(WORDS, Ok("fine"), false)])).unwrap();
        let out = format!("[rank 1] {line}\nnoise\n[rank 0] {line}\n");
        assert_eq!(parse(&out, 2).unwrap().len(), 2);
        assert!(parse(&out, 3).is_err());
        assert!(parse("[rank 0] {", 1).is_err());
    }

    #[test]
    fn a_failure_is_told_by_its_error() {
        let err = "noise\n[rank 1] warplink: error: no GPU\nwarplink: rank 1 exited with code 1\n";
        assert_eq!(first_complaint(err), "[rank 1] warplink: error: no GPU");
        assert_eq!(first_complaint("only this\n"), "only this");
        assert!(!first_complaint("").is_empty());
    }
}
