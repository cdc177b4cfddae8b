//! Figures of a benchmark as a table and as JSON.

use super::plot::Drawing;
use crate::report::counted;
use crate::report::print_text;
use crate::report::table::{Align, Table, line};
use anyhow::Result;
use serde::Serialize;
use warplink::Communicator;

/// The figures of one benchmark. Its fields are keys of the JSON.
pub(crate) trait Figures: Serialize {
    /// The first line of the table: what was measured on `job`, the ranks and their device.
    fn title(&self, job: &str) -> String;

    /// The tables below it.
    fn tables(&self) -> String;

    /// The figures as a drawing.
    fn drawing(&self) -> Drawing;

    /// Whether all results were right; the exit status is 1 otherwise.
    fn is_right(&self) -> bool {
        true
    }
}

#[derive(Debug, Serialize)]
pub(crate) struct BenchReport<F> {
    benchmark: &'static str,
    device: String,
    ranks: usize,
    #[serde(flatten)]
    pub(crate) figures: F,
}

impl<F: Figures> BenchReport<F> {
    pub(crate) fn new(benchmark: &'static str, comm: &Communicator, figures: F) -> Self {
        Self {
            benchmark,
            device: comm.device().name(),
            ranks: comm.world(),
            figures,
        }
    }

    pub(crate) fn title(&self) -> String {
        let ranks = counted(self.ranks, "rank");
        self.figures.title(&format!("{ranks} on {}", self.device))
    }

    pub(crate) fn text(&self) -> String {
        format!("{}\n\n{}", self.title(), self.figures.tables())
    }
}

/// The columns of a table of rows `R`.
pub(crate) struct Columns<'a, R>(Vec<Column<'a, R>>);

struct Column<'a, R> {
    heading: String,
    align: Align,
    cell: Box<dyn Fn(&R) -> String + 'a>,
}

impl<'a, R> Columns<'a, R> {
    pub(crate) const fn new() -> Self {
        Self(Vec::new())
    }

    /// Adds a column of words.
    pub(crate) fn words(
        self,
        heading: impl Into<String>,
        cell: impl Fn(&R) -> String + 'a,
    ) -> Self {
        self.column(heading.into(), Align::Left, Box::new(cell))
    }

    /// Adds a column of numbers.
    pub(crate) fn number(
        self,
        heading: impl Into<String>,
        cell: impl Fn(&R) -> String + 'a,
    ) -> Self {
        self.column(heading.into(), Align::Right, Box::new(cell))
    }

    fn column(
        mut self,
        heading: String,
        align: Align,
        cell: Box<dyn Fn(&R) -> String + 'a>,
    ) -> Self {
        self.0.push(Column {
            heading,
            align,
            cell,
        });
        self
    }

    /// The table of `rows`.
    pub(crate) fn table<'r>(&self, rows: impl IntoIterator<Item = &'r R>) -> String
    where
        R: 'r,
    {
        let headings = self.0.iter();
        let headings = headings.map(|column| (column.heading.as_str(), column.align));
        let mut table = Table::new(headings);
        for row in rows {
            table.row(self.0.iter().map(|column| (column.cell)(row)));
        }
        table.to_string()
    }
}

/// Seconds as microseconds with two digits.
pub(crate) fn micros(seconds: f64) -> String {
    format!("{:.2}", seconds * 1e6)
}

/// The cell of a value that a row may lack.
pub(crate) fn or_empty<T>(value: Option<T>, cell: impl FnOnce(T) -> String) -> String {
    value.map_or_else(String::new, cell)
}

/// `, compared with A and B`; empty without peers.
pub(crate) fn compared(peers: &[String]) -> String {
    match peers {
        [] => String::new(),
        peers => format!(", compared with {}", peers.join(" and ")),
    }
}

/// Rows that are printed as soon as they are measured, in columns of given widths.
pub(crate) struct Live<R: 'static> {
    columns: Columns<'static, R>,
    widths: &'static [usize],
    sink: Sink,
    pub(crate) rows: Vec<R>,
}

/// The destination of live rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sink {
    /// On standard output, as the table.
    Table,
    /// On standard error, as progress: the result is one object for machines.
    Progress,
    /// Nowhere: another rank prints.
    Nowhere,
}

impl<R> Live<R> {
    /// No rows yet. Rank 0 prints the title and the headings.
    pub(crate) fn new(
        columns: Columns<'static, R>,
        widths: &'static [usize],
        title: &str,
        rank: usize,
        json: bool,
    ) -> Result<Self> {
        let sink = match (rank, json) {
            (0, false) => Sink::Table,
            (0, true) => Sink::Progress,
            _ => Sink::Nowhere,
        };
        let live = Self {
            columns,
            widths,
            sink,
            rows: Vec::new(),
        };
        live.print(&format!("{title}\n\n{}", live.heading()))?;
        Ok(live)
    }

    pub(crate) fn add(&mut self, row: R) -> Result<()> {
        self.print(&self.line(&row))?;
        self.rows.push(row);
        Ok(())
    }

    pub(crate) fn heading(&self) -> String {
        self.cells(|column| column.heading.clone())
    }

    pub(crate) fn line(&self, row: &R) -> String {
        self.cells(|column| (column.cell)(row))
    }

    fn cells(&self, cell: impl Fn(&Column<'static, R>) -> String) -> String {
        let columns = self.columns.0.iter().zip(self.widths);
        line(columns.map(|(column, width)| (cell(column), column.align, *width)))
    }

    fn print(&self, text: &str) -> Result<()> {
        match self.sink {
            Sink::Table => print_text(&format!("{text}\n")),
            Sink::Progress => {
                eprintln!("{text}");
                Ok(())
            }
            Sink::Nowhere => Ok(()),
        }
    }
}
