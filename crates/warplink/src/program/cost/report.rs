//! What a simulation says.

use super::bound::{Bound, Path};
use super::model::HardwareModel;
use super::schedule::Schedule;
use super::simulate::Outcome;
use super::step::{Class, EGRESS, INGRESS, MEMORY};
use crate::error::Rank;
use serde::Serialize;
use std::fmt;

/// How long a rank's resources were in use, in seconds of full use.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Busy {
    /// The rank.
    pub rank: Rank,
    /// Matrix multiplications, one at a time.
    pub matmul: f64,
    /// The link to other ranks.
    pub egress: f64,
    /// The link from other ranks.
    pub ingress: f64,
    /// Memory.
    pub memory: f64,
    /// The host, which enqueues.
    pub host: f64,
}

/// When an operation started and ended, in seconds from the start of the program.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Span {
    /// The rank.
    pub rank: Rank,
    /// The operation, an index into [`RankProgram::operations`](crate::program::RankProgram::operations).
    pub operation: usize,
    /// When its stream came to it.
    pub start: f64,
    /// When its stream went on.
    pub end: f64,
    /// What most of the time between went to.
    pub bound: Bound,
    /// What all of it went to: of a kernel, along the steps of the lane that ended last, and those that it waited for.
    pub parts: Path,
}

/// What a program costs. Printed, it explains itself.
#[derive(Clone, Debug, PartialEq)]
pub struct Cost {
    /// From the first operation that a host enqueues to the end of the last on any rank.
    pub seconds: f64,
    /// What most of the time goes to, along the chain of operations that ends last.
    pub bound: Bound,
    /// What all of it goes to, along that chain.
    pub critical: Path,
    /// Resources in use, for each rank that was simulated.
    pub busy: Vec<Busy>,
    /// Whether one rank was simulated for all, because all do the same in rotation.
    pub symmetric: bool,
    /// Every operation, where [`SimulateOptions::timeline`](super::SimulateOptions::timeline) asked
    /// for it; rank after rank, in the order in which the host enqueues.
    pub timeline: Vec<Span>,
    /// The name of the model.
    pub model: String,
}

impl Cost {
    /// The rank, of those simulated, whose resources are in use for longest.
    pub fn busiest(&self) -> Option<&Busy> {
        let sum = |busy: &Busy| busy.matmul + busy.egress + busy.ingress + busy.memory;
        self.busy.iter().max_by(|a, b| sum(a).total_cmp(&sum(b)))
    }
}

impl fmt::Display for Cost {
    /// The time and its bound, the chain that ends last, and the busiest rank.
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
        write!(f, "  longest chain: ")?;
        for (position, (bound, seconds)) in self.critical.parts().iter().enumerate() {
            let lead = if position == 0 { "" } else { ", " };
            write!(f, "{lead}{bound} {:.1} us", micros(*seconds))?;
        }
        writeln!(f)?;
        if let Some(busy) = self.busiest() {
            let whose = if self.symmetric {
                "every rank".to_owned()
            } else {
                format!("rank {}", busy.rank)
            };
            write!(f, "  {whose} is busy: ")?;
            let parts = [
                ("matmul", busy.matmul),
                ("link out", busy.egress),
                ("link in", busy.ingress),
                ("memory", busy.memory),
                ("host", busy.host),
            ];
            for (position, (name, seconds)) in parts.into_iter().enumerate() {
                let lead = if position == 0 { "" } else { ", " };
                write!(
                    f,
                    "{lead}{name} {:.1} us ({:.0} %)",
                    micros(seconds),
                    share(seconds)
                )?;
            }
            writeln!(f)?;
        }
        Ok(())
    }
}

/// Puts the outcome of a schedule in words.
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
