//! Rows and columns of the table, and messages of the ranks.

use crate::names::name_of;
use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};
use std::fmt;
use warplink::{Error, ErrorKind};

/// How the victim fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Fault {
    /// SIGKILL.
    Kill,
    /// SIGSTOP, then SIGCONT once the others have declared it lost.
    Stop,
    /// It exits without closing its communicator.
    Exit,
    /// It panics.
    Panic,
    /// It returns an error, which drops its communicator.
    Error,
    /// It calls `abort`.
    Abort,
    /// Its connection to the store is cut.
    Cut,
    /// Files cannot grow.
    DiskFull,
    /// It has no descriptors left.
    Descriptors,
}

/// Activity of all ranks when the fault occurs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Phase {
    /// The others join.
    Join,
    /// They exchange transfers.
    Exchange,
    /// They have posted transfers.
    Transfer,
    /// They run graphs.
    Graph,
    /// They have called collectives.
    Collective,
    /// They bind a program.
    Bind,
    /// They split the communicator.
    Split,
    /// They close it.
    Close,
}

/// One fault in one phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Args, Serialize)]
pub(super) struct Cell {
    #[arg(long)]
    pub(super) fault: Fault,
    #[arg(long)]
    pub(super) phase: Phase,
}

impl Fault {
    /// Whether the victim may continue unaffected.
    pub(super) fn is_of_resources(self) -> bool {
        matches!(self, Self::DiskFull | Self::Descriptors)
    }

    /// Whether the victim keeps running, and must get an error that it was declared lost.
    pub(super) fn leaves_victim(self) -> bool {
        matches!(self, Self::Stop | Self::Abort | Self::Cut)
    }
}

impl Cell {
    /// Whether the phase does not need the resource that the fault takes away.
    pub(super) fn is_unaffected(self) -> bool {
        let enqueued = [
            Phase::Transfer,
            Phase::Graph,
            Phase::Collective,
            Phase::Split,
            Phase::Close,
        ];
        self.fault.is_of_resources() && enqueued.contains(&self.phase)
    }

    /// Whether the others have a communicator to continue with.
    pub(super) fn can_go_on(self) -> bool {
        !self.fault.is_of_resources() && !matches!(self.phase, Phase::Join | Phase::Close)
    }
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} in {}", name_of(&self.fault), name_of(&self.phase))
    }
}

/// A line printed by a rank.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum RankMessage {
    /// The victim is about to fail, at this time.
    Fault(f64),
    /// The rank's observations, before it exits.
    Report(RankReport),
}

/// Observations of a rank. Times are of the machine's monotonic clock, in seconds.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct RankReport {
    /// Its error, and the time of it.
    pub(super) error: Option<ReportedError>,
    pub(super) error_at: Option<f64>,
    /// Time at which it had moved right data without the victim.
    pub(super) went_on_at: Option<f64>,
    /// Wrong data, and other violations.
    pub(super) wrong: Vec<String>,
    /// Leaked threads, descriptors and mappings.
    pub(super) left: Vec<String>,
}

/// An error of the library.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct ReportedError {
    pub(super) kind: String,
    /// The lost rank, as a rank of the job.
    pub(super) peer: Option<usize>,
    pub(super) message: String,
}

impl ReportedError {
    pub(super) fn of(error: &Error) -> Self {
        Self {
            kind: kind_name(error.kind()),
            peer: error.job_peer(),
            message: error.to_string(),
        }
    }
}

/// The name of a kind of error, as in the library's documentation.
pub(super) fn kind_name(kind: ErrorKind) -> String {
    format!("{kind:?}")
}

/// The machine's monotonic clock, the same for all processes.
pub(super) fn now() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}
