//! Results of a simulation.

use super::bound::{Bound, Path};
use super::model::HardwareModel;
use super::schedule::Schedule;
use super::simulate::Outcome;
use super::step::{Class, EGRESS, INGRESS, MEMORY};
use crate::error::Rank;
use crate::named::comma;
use serde::Serialize;
use std::fmt;

/// Busy time of a rank's resources, in seconds of full use.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Busy {
    /// Rank of the resources.
    pub rank: Rank,
    /// Matrix multiplications, one at a time.
    pub matmul: f64,
    /// Outgoing link.
    pub egress: f64,
    /// Incoming link.
    pub ingress: f64,
    /// Memory.
    pub memory: f64,
    /// Enqueueing by the host.
    pub host: f64,
}

/// Start and end of an operation, in seconds from the start of the program.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Span {
    /// Rank that runs it.
    pub rank: Rank,
    /// The operation, an index into [`RankProgram::operations`](crate::program::RankProgram::operations).
    pub operation: usize,
    /// Time at which its stream reached it.
    pub start: f64,
    /// Time at which its stream continued.
    pub end: f64,
    /// Bound with the largest share of its time.
    pub bound: Bound,
    /// Time per bound; for a kernel, along the critical path of the lane that ended last.
    pub parts: Path,
}

/// Estimated cost of a program. Its `Display` output explains it.
#[derive(Clone, Debug, PartialEq)]
pub struct Cost {
    /// From the first enqueued operation to the end of the last one on any rank.
    pub seconds: f64,
    /// Bound with the largest share of the critical path.
    pub bound: Bound,
    /// Time per bound along the critical path.
    pub critical: Path,
    /// Resource use of each simulated rank.
    pub busy: Vec<Busy>,
    /// Whether one rank was simulated for all, because all do the same in rotation.
    pub symmetric: bool,
    /// Every operation, if requested by [`SimulateOptions::timeline`](super::SimulateOptions::timeline); rank by
    /// rank, in the order of the host.
    pub timeline: Vec<Span>,
    /// Name of the model.
    pub model: String,
}

impl Cost {
    /// The simulated rank whose resources are busy for longest.
    pub fn busiest(&self) -> Option<&Busy> {
        // Without the host's time, which overlaps with all of these.
        let sum = |busy: &Busy| busy.matmul + busy.egress + busy.ingress + busy.memory;
        self.busy.iter().max_by(|a, b| sum(a).total_cmp(&sum(b)))
    }
}

impl fmt::Display for Cost {
    /// The time and its bound, the critical path, and the busiest rank.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let micros = |seconds: f64| seconds * 1e6;
        let share = |seconds: f64| 100.0 * seconds / self.seconds.max(f64::MIN_POSITIVE);
        writeln!(
            f,
            "{:.1} us on {}, bound by {}",
            micros(self.seconds),
            self.model,
            self.bound
        )?;
        let parts = self.critical.parts();
        let parts = parts.iter();
        let parts = parts.map(|(bound, seconds)| format!("{bound} {:.1} us", micros(*seconds)));
        writeln!(f, "  critical path: {}", comma(parts))?;
        if let Some(busy) = self.busiest() {
            let whose = if self.symmetric {
                "busy on each rank".to_owned()
            } else {
                format!("busy on rank {}", busy.rank)
            };
            let parts = [
                ("matmul", busy.matmul),
                ("link out", busy.egress),
                ("link in", busy.ingress),
                ("memory", busy.memory),
                ("host", busy.host),
            ];
            let parts = parts.map(|(name, seconds)| {
                format!("{name} {:.1} us ({:.0} %)", micros(seconds), share(seconds))
            });
            writeln!(f, "  {whose}: {}", comma(parts))?;
        }
        Ok(())
    }
}

/// Converts the outcome of a schedule to a report.
pub(super) fn cost(schedule: &Schedule<'_>, outcome: Outcome, model: &HardwareModel) -> Cost {
    let mut matmul = vec![0.0; schedule.programs.len()];
    for work in schedule
        .works
        .iter()
        .filter(|work| work.class == Class::Matmul)
    {
        matmul[work.ranks[0] as usize] += work.seconds;
    }
    let busy = (0..schedule.programs.len())
        .map(|rank| {
            let of = |resource| outcome.busy[schedule.resource(rank, resource) as usize];
            Busy {
                rank,
                matmul: matmul[rank],
                egress: of(EGRESS),
                ingress: of(INGRESS),
                memory: of(MEMORY),
                host: schedule.host[rank],
            }
        })
        .collect();
    let timeline = outcome
        .spans
        .iter()
        .zip(&schedule.operations)
        .map(|(between, id)| {
            let ((start, before), (end, after)) = (between.start, between.end);
            let parts = after.since(&before, end - start);
            Span {
                rank: id.rank,
                operation: id.operation,
                start,
                end,
                bound: parts.most(),
                parts,
            }
        })
        .collect();
    Cost {
        seconds: outcome.seconds,
        bound: outcome.critical.most(),
        critical: outcome.critical,
        busy,
        symmetric: schedule.copies > 1.0,
        timeline,
        model: model.name.clone(),
    }
}
