//! The figures of `bench channel`, each of which is printed as soon as it is measured.

use super::super::timing::Times;
use crate::report;
use crate::report::bytes::Bytes;
use anyhow::Result;
use serde::{Serialize, Serializer};
use warplink::channel::Transport;

/// Columns: heading, width, and whether it is of words.
const COLUMNS: [(&str, usize, bool); 7] = [
    ("what", 16, true),
    ("transport", 9, true),
    ("bytes", 8, false),
    ("blocks", 6, false),
    ("us", 10, false),
    ("GB/s or M/s", 11, false),
    ("ratio", 6, false),
];

/// One figure.
#[derive(Debug, Serialize)]
pub(super) struct Row {
    pub(super) what: &'static str,
    #[serde(serialize_with = "as_text")]
    pub(super) transport: Option<Transport>,
    pub(super) bytes: u64,
    pub(super) blocks: u32,
    /// One way, of one put, or of one trigger, in seconds.
    pub(super) time: Times,
    /// Bytes in 10^9, or triggers in 10^6, a second.
    pub(super) rate: Option<f64>,
    /// To what it is compared with.
    pub(super) ratio: Option<f64>,
}

/// As in the table.
fn as_text<S: Serializer>(transport: &Option<Transport>, to: S) -> Result<S::Ok, S::Error> {
    transport
        .map(|transport| transport.to_string())
        .serialize(to)
}

/// All figures so far, and where they are printed.
#[derive(Debug)]
pub(super) struct Rows {
    pub(super) all: Vec<Row>,
    sink: Sink,
}

/// Where rows are printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sink {
    /// To standard output, under a heading.
    Table,
    /// To standard error, as progress; the result is one object for machines.
    Progress,
    /// Nowhere: another rank prints.
    Nowhere,
}

impl Rows {
    /// No rows, under the heading of a table with `title`.
    pub(super) fn new(title: &str, sink: Sink) -> Result<Self> {
        let rows = Self {
            all: Vec::new(),
            sink,
        };
        let heading = line(COLUMNS.map(|(heading, ..)| heading.to_owned()));
        rows.print(&format!("{title}\n\n{heading}"))?;
        Ok(rows)
    }

    /// Adds a row and prints it.
    pub(super) fn add(&mut self, row: Row) -> Result<()> {
        self.print(&row.line())?;
        self.all.push(row);
        Ok(())
    }

    fn print(&self, text: &str) -> Result<()> {
        match self.sink {
            Sink::Table => report::print_text(&format!("{text}\n")),
            Sink::Progress => {
                eprintln!("{text}");
                Ok(())
            }
            Sink::Nowhere => Ok(()),
        }
    }
}

impl Row {
    fn line(&self) -> String {
        let number = |value: Option<f64>| value.map(|value| format!("{value:.3}"));
        line([
            self.what.to_owned(),
            self.transport
                .map(|transport| transport.to_string())
                .unwrap_or_default(),
            Bytes(self.bytes).to_string(),
            self.blocks.to_string(),
            format!("{:.3}", self.time.median * 1e6),
            number(self.rate).unwrap_or_default(),
            number(self.ratio).unwrap_or_default(),
        ])
    }
}

fn line(cells: [String; 7]) -> String {
    let padded = cells.iter().zip(COLUMNS);
    let padded = padded.map(|(cell, (_, width, words))| {
        if words {
            format!("{cell:<width$}")
        } else {
            format!("{cell:>width$}")
        }
    });
    let line = padded.collect::<Vec<_>>().join("  ");
    line.trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_stand_under_their_headings() {
        let row = Row {
            what: "put_and_flush",
            transport: Some(Transport::Proxied),
            bytes: 64 << 20,
            blocks: 132,
            time: Times {
                median: 1.5e-3,
                least: 1e-3,
                most: 2e-3,
            },
            rate: Some(44.5),
            ratio: Some(0.98),
        };
        let heading = line(COLUMNS.map(|(heading, ..)| heading.to_owned()));
        assert_eq!(
            heading,
            "what              transport     bytes  blocks          us  GB/s or M/s   ratio"
        );
        assert_eq!(
            row.line(),
            "put_and_flush     proxied      64 MiB     132    1500.000       44.500   0.980"
        );
    }
}
