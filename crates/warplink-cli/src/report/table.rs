//! Tables with aligned columns.

use std::fmt;

/// The alignment of a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Align {
    /// For words.
    Left,
    /// For numbers.
    Right,
}

/// Rows under a heading, displayed with aligned columns.
#[derive(Clone, Debug)]
pub(crate) struct Table {
    align: Vec<Align>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// An empty table with these columns.
    pub(crate) fn new<'a>(columns: impl IntoIterator<Item = (&'a str, Align)>) -> Self {
        let (heading, align) = columns
            .into_iter()
            .map(|(name, align)| (name.to_owned(), align))
            .unzip();
        Self {
            align,
            rows: vec![heading],
        }
    }

    /// Adds a row. Missing cells are empty; extra cells are dropped.
    pub(crate) fn row(&mut self, cells: impl IntoIterator<Item = impl fmt::Display>) {
        let mut row: Vec<_> = cells.into_iter().map(|cell| cell.to_string()).collect();
        // Short rows are filled up, or columns would shift.
        row.resize(self.align.len(), String::new());
        self.rows.push(row);
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(column));
            // Characters and not bytes: names may have others than ASCII.
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<_> = (0..self.align.len()).map(width).collect();
        for row in &self.rows {
            let cells = row.iter().zip(&self.align).zip(&widths);
            writeln!(
                f,
                "{}",
                line(cells.map(|((cell, align), width)| (cell, *align, *width)))
            )?;
        }
        Ok(())
    }
}

/// Formats cells in columns of these widths, two spaces apart.
pub(crate) fn line(cells: impl IntoIterator<Item = (impl fmt::Display, Align, usize)>) -> String {
    let padded = cells.into_iter().map(|(cell, align, width)| {
        let cell = cell.to_string();
        match align {
            Align::Left => format!("{cell:<width$}"),
            Align::Right => format!("{cell:>width$}"),
        }
    });
    let line = padded.collect::<Vec<_>>().join("  ");
    // Trailing blanks of a last left-aligned cell would wrap on narrow terminals.
    line.trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_stand_under_their_heading() {
        let mut table = Table::new([
            ("size", Align::Right),
            ("protocol", Align::Left),
            ("µs", Align::Right),
        ]);
        table.row(["4 KiB", "get", "7.5"]);
        table.row(["1 GiB", "put", "2800.25"]);
        table.row(["2 GiB"]);
        let lines = [
            " size  protocol       µs",
            "4 KiB  get           7.5",
            "1 GiB  put       2800.25",
            "2 GiB",
        ];
        assert_eq!(
            table.to_string(),
            lines.map(|line| format!("{line}\n")).concat()
        );
    }
}
