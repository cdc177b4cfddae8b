//! Times and bandwidths of collectives, with those of another program.

use super::Placement;
use super::template::{Template, name};
use crate::commands::bench::clock::{Submission, Times};
use crate::commands::bench::report::{Row, micros, or_empty};
use crate::names::name_of;
use crate::report::bytes::ByteSize;
use crate::report::{counted, digits};
use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};

/// The figures of one method.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) struct CollectiveTimes {
    pub(super) method: String,
    /// For one call.
    pub(super) seconds: Times,
    /// Until a call returned, if calls are submitted one by one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) host: Option<Times>,
    /// The size over the time, in 10^9 bytes a second.
    pub(super) bandwidth: f64,
    /// With the correction of nccl-tests.
    pub(super) bus_bandwidth: f64,
    /// Number of wrong elements.
    pub(super) wrong: u64,
}

/// One size.
#[derive(Clone, Debug)]
pub(super) struct CollectiveRow {
    /// Of the larger of input and output.
    pub(super) bytes: usize,
    /// Elements of the smaller.
    pub(super) count: usize,
    pub(super) place: Placement,
    pub(super) submission: Submission,
    /// Of the direct path, or `engine`, which has no lanes.
    pub(super) algorithm: String,
    pub(super) lanes: usize,
    pub(super) threads: usize,
    /// Warplink first.
    pub(super) methods: Vec<CollectiveTimes>,
}

/// Figures of another program.
#[derive(Debug, Deserialize)]
pub(super) struct External {
    collective: String,
    dtype: String,
    ranks: usize,
    #[serde(default)]
    pub(super) peers: Vec<String>,
    rows: Vec<ExternalRow>,
}

#[derive(Debug, Deserialize)]
struct ExternalRow {
    bytes: usize,
    place: Placement,
    submission: Submission,
    methods: Vec<CollectiveTimes>,
}

impl External {
    /// Fails if it is of another collective, element type or number of ranks.
    pub(super) fn check(&self, template: Template, world: usize) -> Result<()> {
        let (collective, dtype) = (name(template.kind), template.dtype.to_string());
        ensure!(
            self.collective == collective && self.dtype == dtype && self.ranks == world,
            "the other program's figures are for {} of {} on {}; expected {collective} of {dtype} on {world}",
            self.collective,
            self.dtype,
            counted(self.ranks, "rank"),
        );
        Ok(())
    }

    /// Adds the methods that it has for the same size.
    pub(super) fn add_to(&self, row: &mut CollectiveRow) {
        let key = (row.bytes, row.place, row.submission);
        let same = |other: &&ExternalRow| (other.bytes, other.place, other.submission) == key;
        let others = self.rows.iter().filter(same);
        row.methods
            .extend(others.flat_map(|other| other.methods.iter().cloned()));
    }
}

impl From<CollectiveRow> for Row {
    fn from(of: CollectiveRow) -> Self {
        let (size, submission) = (
            ByteSize(of.bytes as u64).to_string(),
            name_of(&of.submission),
        );
        let group = match of.place {
            Placement::Out => submission.clone(),
            Placement::In => format!("in place, {submission}"),
        };
        let mut row = Self::of(&size)
            .key("bytes", of.bytes)
            .number("size", &size)
            .key("count", of.count)
            .name("place", name_of(&of.place))
            .name("submission", submission)
            .name("algorithm", of.algorithm)
            .count("lanes", of.lanes as u64)
            .key("threads", of.threads)
            .key("methods", &of.methods);
        for measured in &of.methods {
            let method = &measured.method;
            let host = or_empty(measured.host, |host| micros(host.median));
            let (time, bus) = (measured.seconds.median, measured.bus_bandwidth);
            row = row
                .number(format!("{method} us"), micros(time))
                .number(format!("{method} host us"), host)
                .number(format!("{method} GB/s"), digits(measured.bandwidth))
                .number(format!("{method} bus GB/s"), digits(bus))
                .number(format!("{method} wrong"), measured.wrong)
                .right(measured.wrong == 0)
                .point(format!("{group}: time in us"), method, time * 1e6, true)
                .point(
                    format!("{group}: bus bandwidth in GB/s"),
                    method,
                    bus,
                    false,
                );
        }
        let times: Vec<f64> = of.methods.iter().map(|of| of.seconds.median).collect();
        row.speedup(&times)
    }
}
