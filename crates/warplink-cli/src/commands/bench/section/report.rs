//! What was measured, as a table and as JSON.

use crate::commands::bench::timing::Times;
use crate::report::counted;
use crate::report::table::{Align, Table};
use serde::Serialize;
use warplink::device::KernelResources;
use warplink::program::KernelReport;

#[derive(Clone, Debug, Serialize)]
pub(super) struct Row {
    pub(super) bytes: usize,
    pub(super) values: Vec<(String, i64)>,
    pub(super) seconds: Times,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) collective: Option<Times>,
    /// Elements of all ranks' outputs that differ.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) different: Option<u64>,
    pub(super) kernels: Vec<Kernel>,
}

#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Kernel {
    line: u32,
    lanes: usize,
    threads: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    registers: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    shared_bytes: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    local_bytes: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    blocks_per_multiprocessor: Option<u32>,
}

#[derive(Debug, Serialize)]
pub(super) struct Report {
    pub(super) benchmark: &'static str,
    pub(super) program: String,
    pub(super) device: String,
    pub(super) ranks: usize,
    pub(super) against: &'static str,
    pub(super) rows: Vec<Row>,
}

impl From<KernelReport> for Kernel {
    fn from(report: KernelReport) -> Self {
        let of = |value: fn(&KernelResources) -> u32| report.resources.as_ref().map(value);
        Self {
            line: report.line,
            lanes: report.lanes,
            threads: report.threads,
            registers: of(|r| r.registers),
            shared_bytes: of(|r| r.shared_bytes),
            local_bytes: of(|r| r.local_bytes),
            blocks_per_multiprocessor: of(|r| r.blocks_per_multiprocessor),
        }
    }
}

impl Report {
    /// Whether every output is the collective's.
    pub(super) fn is_right(&self) -> bool {
        self.rows
            .iter()
            .all(|row| row.different.is_none_or(|count| count == 0))
    }

    pub(super) fn text(&self) -> String {
        let columns = [
            ("bytes", Align::Right),
            ("us", Align::Right),
            ("GB/s", Align::Right),
            (self.against, Align::Right),
            ("speedup", Align::Right),
            ("differ", Align::Right),
            ("lanes x threads", Align::Right),
            ("registers", Align::Right),
            ("blocks fit", Align::Right),
            ("values", Align::Left),
        ];
        let mut table = Table::new(columns);
        for row in &self.rows {
            let time = row.seconds.median;
            let collective = row.collective.map(|times| times.median);
            let or_empty = |text: Option<String>| text.unwrap_or_default();
            let each = |of: &dyn Fn(&Kernel) -> String| {
                let all: Vec<String> = row.kernels.iter().map(of).collect();
                all.join(", ")
            };
            let values = row
                .values
                .iter()
                .map(|(name, value)| format!("{name}={value}"));
            table.row([
                row.bytes.to_string(),
                format!("{:.2}", time * 1e6),
                format!("{:.1}", row.bytes as f64 / time / 1e9),
                or_empty(collective.map(|time| format!("{:.2}", time * 1e6))),
                or_empty(collective.map(|collective| format!("{:.2}", collective / time))),
                or_empty(row.different.map(|count| count.to_string())),
                each(&|kernel| format!("{} x {}", kernel.lanes, kernel.threads)),
                each(&|kernel| kernel.registers.map_or_else(String::new, |r| r.to_string())),
                each(&|kernel| {
                    let blocks = kernel.blocks_per_multiprocessor;
                    blocks.map_or_else(String::new, |blocks| blocks.to_string())
                }),
                values.collect::<Vec<_>>().join(" "),
            ]);
        }
        format!(
            "{} on {}, {}; runs in graphs\n\n{table}",
            self.program,
            counted(self.ranks, "rank"),
            self.device
        )
    }
}
