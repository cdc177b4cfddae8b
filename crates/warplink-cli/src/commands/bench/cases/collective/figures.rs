//! Times and bandwidths of collectives, with those of another program.

use super::Placement;
use super::template::{Template, name};
use crate::commands::bench::clock::{Submission, Times};
use crate::commands::bench::report::{Row, micros, or_empty};
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

    /// The methods that it has for the size of the larger of input and output.
    pub(super) fn methods(
        &self,
        bytes: usize,
        place: Placement,
        submission: Submission,
    ) -> impl Iterator<Item = CollectiveTimes> {
        let key = (bytes, place, submission);
        let rows = self.rows.iter();
        let same = rows.filter(move |row| (row.bytes, row.place, row.submission) == key);
        same.flat_map(|row| row.methods.iter().cloned())
    }
}

/// Adds the methods of a row, of which Warplink's is the first. Its points are in panels of `group`.
pub(super) fn with_methods(row: Row, group: &str, methods: &[CollectiveTimes]) -> Row {
    let mut row = row.key("methods", methods);
    for measured in methods {
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
    let times: Vec<f64> = methods.iter().map(|of| of.seconds.median).collect();
    row.speedup(&times)
}
