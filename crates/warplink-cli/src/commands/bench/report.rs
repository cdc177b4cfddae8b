//! Figures of a benchmark. Table, drawing and JSON come from the same rows.

use super::plot::{Bar, Bars, Drawing, OWN, Point};
use crate::report::table::{Align, Table, line};
use crate::report::{Object, counted, print_text};
use anyhow::Result;
use serde::Serialize;
use warplink::Communicator;

/// The result of a benchmark.
pub(crate) struct Figures {
    /// First line of the text.
    pub(crate) title: String,
    /// Keys of the JSON after `benchmark`, `device` and `ranks`.
    pub(crate) object: Object,
    pub(crate) tables: String,
    pub(crate) drawing: Drawing,
    /// Whether all results are right; otherwise the exit status is 1.
    pub(crate) is_right: bool,
}

impl Figures {
    /// Figures of `rows`, which become the key `rows` after those of `object`.
    pub(crate) fn of_rows(title: String, object: Object, rows: Vec<Row>) -> Self {
        let is_right = rows.iter().all(|row| row.is_right);
        let tables = table(&rows).to_string();
        let (mut points, mut panels, mut objects) = (Vec::new(), Vec::<Bars>::new(), Vec::new());
        for row in rows {
            points.extend(row.points);
            for (title, unit, bar) in row.bars {
                // Panels stay in the order of their first bars; rows of one panel need not be adjacent.
                match panels.iter_mut().find(|panel| panel.title == title) {
                    Some(panel) => panel.bars.push(bar),
                    None => panels.push(Bars {
                        title,
                        unit,
                        bars: vec![bar],
                        limit: None,
                    }),
                }
            }
            objects.push(row.object);
        }
        Self {
            title,
            object: object.objects("rows", objects),
            tables,
            drawing: if panels.is_empty() {
                Drawing::Lines(points)
            } else {
                Drawing::Bars(panels)
            },
            is_right,
        }
    }
}

struct RowCell {
    /// Its heading, which identifies the column in all rows.
    column: String,
    align: Align,
    text: String,
}

/// Figures of one size, method or the like.
#[derive(Default)]
pub(crate) struct Row {
    object: Object,
    cells: Vec<RowCell>,
    /// Position of its points on the horizontal axis.
    size: String,
    points: Vec<Point>,
    /// Bars with the title and unit of their panel.
    bars: Vec<(String, &'static str, Bar)>,
    is_right: bool,
}

impl Row {
    /// A row of figures for a size.
    pub(crate) fn of(size: impl Into<String>) -> Self {
        Self {
            size: size.into(),
            is_right: true,
            ..Self::default()
        }
    }

    /// A key of the JSON.
    pub(crate) fn key(mut self, key: &'static str, value: impl Serialize) -> Self {
        self.object = self.object.key(key, value);
        self
    }

    /// A key of the JSON with a list of objects.
    pub(crate) fn objects(
        mut self,
        key: &'static str,
        objects: impl IntoIterator<Item = Object>,
    ) -> Self {
        self.object = self.object.objects(key, objects);
        self
    }

    /// A key of the JSON that is absent without a value.
    pub(crate) fn optional(mut self, key: &'static str, value: Option<impl Serialize>) -> Self {
        self.object = self.object.optional(key, value);
        self
    }

    fn cell(mut self, column: String, align: Align, text: String) -> Self {
        self.cells.push(RowCell {
            column,
            align,
            text,
        });
        self
    }

    /// A cell of text.
    pub(crate) fn words(self, heading: impl Into<String>, text: impl Into<String>) -> Self {
        self.cell(heading.into(), Align::Left, text.into())
    }

    /// A cell with a number.
    pub(crate) fn number(self, heading: impl Into<String>, text: impl ToString) -> Self {
        self.cell(heading.into(), Align::Right, text.to_string())
    }

    /// A cell with a number, empty without a value.
    pub(crate) fn number_or_empty<T>(
        self,
        heading: impl Into<String>,
        value: Option<T>,
        text: impl FnOnce(T) -> String,
    ) -> Self {
        self.number(heading, or_empty(value, text))
    }

    /// A key with a name, and a cell with the same.
    pub(crate) fn name(self, key: &'static str, name: impl Into<String>) -> Self {
        let name = name.into();
        self.key(key, &name).words(key, name)
    }

    /// A key with a count, and a cell with the same.
    pub(crate) fn count(self, key: &'static str, count: u64) -> Self {
        self.key(key, count).number(key, count)
    }

    /// The number of wrong elements.
    pub(crate) fn wrong(self, wrong: u64) -> Self {
        self.right(wrong == 0).count("wrong", wrong)
    }

    /// The fastest peer's time divided by Warplink's, which is the first of `times`; no cell without a peer.
    pub(crate) fn speedup(self, times: &[f64]) -> Self {
        let Some((own, peers)) = times.split_first() else {
            return self;
        };
        match peers.iter().copied().reduce(f64::min) {
            Some(fastest) => self.number("speedup", format!("{:.2}", fastest / own)),
            None => self,
        }
    }

    /// Whether the results of this row are right.
    pub(crate) fn right(mut self, is_right: bool) -> Self {
        // Once wrong, a row stays wrong, whichever of its methods is added last.
        self.is_right &= is_right;
        self
    }

    /// A point of a line in a panel of the drawing.
    pub(crate) fn point(
        mut self,
        panel: impl Into<String>,
        line: impl Into<String>,
        value: f64,
        logarithmic: bool,
    ) -> Self {
        self.points.push(Point {
            panel: panel.into(),
            line: line.into(),
            size: self.size.clone(),
            value,
            logarithmic,
        });
        self
    }

    /// A bar in a panel of the drawing.
    pub(crate) fn bar(
        mut self,
        panel: impl Into<String>,
        unit: &'static str,
        label: impl Into<String>,
        value: f64,
    ) -> Self {
        let bar = Bar {
            label: label.into(),
            value,
            colour: OWN,
        };
        self.bars.push((panel.into(), unit, bar));
        self
    }
}

/// The table of rows, which need not all have the same cells.
pub(crate) fn table(rows: &[Row]) -> Table {
    let mut columns: Vec<&RowCell> = Vec::new();
    for row in rows {
        // A column that earlier rows lack is inserted after its predecessor in this row.
        let mut next = 0;
        for cell in &row.cells {
            match columns.iter().position(|known| known.column == cell.column) {
                Some(found) => next = found + 1,
                None => {
                    columns.insert(next, cell);
                    next += 1;
                }
            }
        }
    }
    let headings = columns.iter();
    let mut table = Table::new(headings.map(|cell| (cell.column.as_str(), cell.align)));
    for row in rows {
        table.row(columns.iter().map(|column| {
            let mut cells = row.cells.iter();
            let cell = cells.find(|cell| cell.column == column.column);
            cell.map_or("", |cell| &cell.text)
        }));
    }
    table
}

/// `2 ranks on host`, for titles.
pub(crate) fn job(comm: &Communicator) -> String {
    format!(
        "{} on {}",
        counted(comm.world(), "rank"),
        comm.device().name()
    )
}

/// Seconds as microseconds with two digits.
pub(crate) fn micros(seconds: f64) -> String {
    format!("{:.2}", seconds * 1e6)
}

/// The text of a value, empty without one.
pub(crate) fn or_empty<T>(value: Option<T>, text: impl FnOnce(T) -> String) -> String {
    value.map_or_else(String::new, text)
}

/// `, compared with A and B`; empty without peers.
pub(crate) fn compared(peers: &[String]) -> String {
    match peers {
        [] => String::new(),
        peers => format!(", compared with {}", peers.join(" and ")),
    }
}

/// Rows printed by rank 0 as soon as they are measured, in columns of given widths: on standard output, or on
/// standard error if the result is JSON.
pub(crate) struct Live {
    widths: &'static [usize],
    is_shown: bool,
    json: bool,
    pub(crate) rows: Vec<Row>,
}

impl Live {
    /// Prints the headings, which are those of `row`.
    pub(crate) fn new(
        comm: &Communicator,
        widths: &'static [usize],
        row: &Row,
        json: bool,
    ) -> Result<Self> {
        let live = Self {
            widths,
            is_shown: comm.rank() == 0,
            json,
            rows: Vec::new(),
        };
        let heading = cells_in(widths, row, |cell| &cell.column);
        live.print(&format!("{}\n\n{heading}\n", comm.device().name()))?;
        Ok(live)
    }

    pub(crate) fn add(&mut self, row: Row) -> Result<()> {
        let cells = cells_in(self.widths, &row, |cell| &cell.text);
        self.print(&format!("{cells}\n"))?;
        self.rows.push(row);
        Ok(())
    }

    fn print(&self, text: &str) -> Result<()> {
        match (self.is_shown, self.json) {
            (false, _) => {}
            // Standard output is for the one JSON object.
            (true, true) => eprint!("{text}"),
            (true, false) => print_text(text)?,
        }
        Ok(())
    }
}

/// A part of every cell, in columns of these widths.
fn cells_in(widths: &[usize], row: &Row, part: impl Fn(&RowCell) -> &String) -> String {
    let cells = row.cells.iter().zip(widths);
    line(cells.map(|(cell, width)| (part(cell), cell.align, *width)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_need_not_have_the_same_cells() {
        let rows = [
            Row::of("").number("bytes", 1).number("wrong", 0),
            Row::of("")
                .number("bytes", 64)
                .words("peer", "a")
                .number("wrong", 7)
                .number("peer wrong", 8),
        ];
        let lines = [
            "bytes  peer  wrong  peer wrong",
            "    1            0",
            "   64  a         7           8",
        ];
        assert_eq!(
            table(&rows).to_string(),
            lines.map(|line| format!("{line}\n")).concat()
        );
    }

    #[test]
    fn cells_are_below_their_headings() {
        let row = Row::of("").words("what", "puts").number("us", "1.500");
        let widths = [8, 6];
        assert_eq!(
            cells_in(&widths, &row, |cell| &cell.column),
            "what          us"
        );
        assert_eq!(
            cells_in(&widths, &row, |cell| &cell.text),
            "puts       1.500"
        );
    }
}
