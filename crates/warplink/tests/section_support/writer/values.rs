//! Pieces that read counts and rows from memory.

use super::Writer;

impl Writer<'_> {
    /// Each lane has every `lanes`-th row of `rows`.
    fn own_rows(&mut self, rows: &str, lines: &[String]) {
        self.line(format!("for t in 0..{rows} {{"));
        self.line("if t % lanes == lane {");
        lines.iter().for_each(|line| self.line(line.as_str()));
        self.line("}");
        self.line("}");
    }

    /// Every rank puts as many rows to every other as memory says, behind a header.
    pub(super) fn counted_rows(&mut self) {
        let (number, packing) = (self.pieces, self.packing());
        let (slots, slot, barrier) = self.slots(2);
        let rows = 1 + self.random.below(3);
        for line in [
            format!("input C{number}: i32[world]"),
            format!("output G{number}: T[world, {rows}, n]"),
            format!("scratch H{number}: packets16 i32[{slots}, lanes, world, 1]"),
            format!("scratch R{number}: {packing} T[{slots}, world, {rows}, n]"),
        ] {
            self.declare(line);
        }
        let first = [
            "for p in 0..world {".to_owned(),
            format!("G{number}[p][t] = copy(X)"),
            "}".to_owned(),
        ];
        self.own_rows(&rows.to_string(), &first);
        self.line("for r in 0..world {");
        self.line("let q = (rank + r) % world");
        self.line(format!(
            "put C{number}[q] to H{number}[{slot}][lane][rank][0] on q"
        ));
        self.line(format!("let m = C{number}[q] at most {rows}"));
        self.own_rows("m", &[format!("put X to R{number}[{slot}][rank][t] on q")]);
        self.line("}");
        self.line("for p in 0..world {");
        self.line(format!(
            "let m = H{number}[{slot}][lane][p][0] at most {rows}"
        ));
        self.own_rows(
            "m",
            &[format!("G{number}[p][t] = copy(R{number}[{slot}][p][t])")],
        );
        self.line("}");
        if barrier {
            self.line("barrier");
        }
    }

    /// A rank puts some chunks to the next, with their count in plain scratch and a signal.
    pub(super) fn counted_chunks(&mut self) {
        let number = self.pieces;
        let (slots, slot, _) = self.slots(2);
        let chunks = 1 + self.random.below(3);
        for line in [
            format!("input C{number}: i32[2]"),
            format!("scratch N{number}: i32[{slots}, lanes, 1]"),
            format!("scratch R{number}: T[{slots}, lanes, {chunks}, part(n, lanes)]"),
        ] {
            self.declare(line);
        }
        let (source, output) = (self.source(), self.output());
        self.line(format!("{output} = copy({source})"));
        self.line(format!(
            "put C{number}[1] to N{number}[{slot}][lane][0] on next"
        ));
        self.line(format!("let m{number} = C{number}[1] at most {chunks}"));
        self.line(format!("for c in 0..m{number} {{"));
        self.line(format!(
            "put X[lane of lanes] to R{number}[{slot}][lane][c] on next"
        ));
        self.line("}");
        self.line("signal next");
        self.line("wait prev");
        self.line(format!(
            "let k{number} = N{number}[{slot}][lane][0] at most {chunks}"
        ));
        self.line(format!("for c in 0..k{number} {{"));
        self.line(format!("{output} = copy(R{number}[{slot}][lane][c])"));
        self.line("}");
        if !self.random.chance(4) {
            self.line("signal prev");
            self.line("wait next");
        }
    }

    /// Rows by index: of an input here, of one at the next rank, or those that a lane owns of an output.
    pub(super) fn rows_by_index(&mut self) {
        let number = self.pieces;
        let rows = 1 + self.random.below(3);
        self.declare(format!("input I{number}: i32[{rows}]"));
        match self.random.below(3) {
            0 => {
                self.declare(format!("output G{number}: T[{rows}, n]"));
                let line = format!("G{number}[t] = copy(W[I{number}[t]])");
                self.own_rows(&rows.to_string(), &[line]);
            }
            1 => {
                self.declare(format!("output G{number}: T[{rows}, n]"));
                self.barrier();
                let line = format!("get W[I{number}[t]] on next to G{number}[t]");
                self.own_rows(&rows.to_string(), &[line]);
                self.barrier();
            }
            _ => {
                self.declare(format!("output G{number}: T[world, n]"));
                self.own_rows("world", &[format!("G{number}[t] = copy(X)")]);
                self.line(format!("for j in 0..{rows} {{"));
                self.line(format!("let i = I{number}[j] at most world - 1"));
                let owner = ["i", "i", "i", "j"][self.random.below(4)];
                self.line(format!("if {owner} % lanes == lane {{"));
                self.line(format!("G{number}[i] = copy(W[j % world])"));
                self.line("}");
                self.line("}");
            }
        }
    }

    /// Some rows behind as many as another word says.
    pub(super) fn rows_behind_others(&mut self) {
        let number = self.pieces;
        let rows = 1 + self.random.below(3);
        for line in [
            format!("input D{number}: i32[world]"),
            format!("input C{number}: i32[world]"),
            format!("output G{number}: T[{rows}, n]"),
        ] {
            self.declare(line);
        }
        self.own_rows(&rows.to_string(), &[format!("G{number}[t] = copy(X)")]);
        self.line(format!("let d{number} = D{number}[rank] at most {rows}"));
        self.line(format!(
            "let m{number} = C{number}[rank] at most {rows} - d{number}"
        ));
        self.line(format!("for s in 0..m{number} {{"));
        self.line(format!("let t = d{number} + s"));
        self.line("if t % lanes == lane {");
        self.line(format!("G{number}[t] = copy(W[(rank + s) % world])"));
        self.line("}");
        self.line("}");
    }

    /// Rows that an index names are put to the next rank, which learns the index before.
    pub(super) fn named_rows(&mut self) {
        let (number, packing) = (self.pieces, self.packing());
        let (slots, slot, barrier) = self.slots(2);
        let rows = 1 + self.random.below(3);
        for line in [
            format!("input I{number}: i32[{rows}]"),
            format!("output G{number}: T[{rows}, n]"),
            format!("scratch H{number}: packets16 i32[{slots}, lanes, 1]"),
            format!("scratch R{number}: {packing} T[{slots}, lanes, {rows}, n]"),
        ] {
            self.declare(line);
        }
        self.own_rows(&rows.to_string(), &[format!("G{number}[t] = copy(X)")]);
        let most = rows - 1;
        self.line(format!("let i{number} = I{number}[{most}] at most {most}"));
        self.line(format!(
            "put I{number}[{most}] to H{number}[{slot}][lane][0] on next"
        ));
        self.line(format!(
            "put W[i{number} % world] to R{number}[{slot}][lane][i{number}] on next"
        ));
        self.line(format!(
            "let k{number} = H{number}[{slot}][lane][0] at most {most}"
        ));
        self.line(format!("if k{number} % lanes == lane {{"));
        self.line(format!(
            "G{number}[k{number}] = copy(R{number}[{slot}][lane][k{number}])"
        ));
        self.line("}");
        if barrier {
            self.line("barrier");
        }
    }

    /// A lane's piece of `words` words, or rows of them, from `from{number}` to `to{number}`; and how many before it and in it
    /// are in a range.
    fn matched_piece(&mut self, number: usize, words: usize, unit: &str) -> &'static str {
        let range = ["in 0..2", "in 0..1", "in 1..3", "not in 0..2"][self.random.below(4)];
        let before = ["0..from", "0..from", "0..from", "0..to", "from..to"][self.random.below(5)];
        let longer = usize::from(self.random.chance(6));
        for line in [
            format!("let share{number} = ({words} + lanes - 1) / lanes"),
            format!("let from{number} = min(lane * share{number}, {words})"),
            format!("let to{number} = min(from{number} + share{number} + {longer}, {words})"),
            format!(
                "let before{number} = count({unit}E{number}[{}] {range})",
                before
                    .replace("from", &format!("from{number}"))
                    .replace("to", &format!("to{number}"))
            ),
            format!("let own{number} = count({unit}E{number}[from{number}..to{number}] {range})"),
        ] {
            self.line(line);
        }
        range
    }

    /// Rows of the words in a range, in order, here or at the next rank, and where each is.
    pub(super) fn matched_rows(&mut self) {
        let number = self.pieces;
        let words = 2 + self.random.below(3);
        let (unit, row) = [("", ""), ("rows of ", ", 2")][usize::from(self.random.chance(3))];
        for line in [
            format!("input E{number}: i32[{words}{row}]"),
            format!("output G{number}: T[{words}, n]"),
            format!("output P{number}: i32[{words}]"),
        ] {
            self.declare(line);
        }
        let range = self.matched_piece(number, words, unit);
        let far = self.random.chance(2);
        if far {
            self.barrier();
        }
        self.line(format!("for j in 0..own{number} {{"));
        self.line(format!(
            "let s = position(j of {unit}E{number}[from{number}..to{number}] {range})"
        ));
        let on = if far { " on next" } else { "" };
        self.line(if far {
            format!("put W[s % world] to G{number}[before{number} + j] on next")
        } else {
            format!("G{number}[before{number} + j] = copy(W[s % world])")
        });
        let place = ["from{} + s", "from{} + s", "before{} + j", "s"][self.random.below(4)];
        let place = place.replace("{}", &number.to_string());
        self.line(format!(
            "P{number}[{place}]{on} = integer(before{number} + j)"
        ));
        self.line("}");
        if far {
            self.barrier();
        }
    }

    /// A message of the rows that words in a range name, behind how many there are.
    pub(super) fn matched_message(&mut self) {
        let (number, packing) = (self.pieces, self.packing());
        let (slots, slot, barrier) = self.slots(2);
        let words = 1 + self.random.below(3);
        for line in [
            format!("input E{number}: i32[lanes, {words}]"),
            format!("output G{number}: T[lanes, {words}, n]"),
            format!("scratch H{number}: packets16 i32[{slots}, lanes, 1]"),
            format!("scratch R{number}: {packing} T[{slots}, lanes, {words}, n]"),
        ] {
            self.declare(line);
        }
        let range = ["in 0..2", "in 1..2", "not in 0..1"][self.random.below(3)];
        self.line(format!("let own{number} = count(E{number}[lane] {range})"));
        let said = ["own{}", "own{}", "own{}", "min(own{} + 1, 1)"][self.random.below(4)];
        let said = said.replace("{}", &number.to_string());
        self.line(format!(
            "H{number}[{slot}][lane][0] on next = integer({said})"
        ));
        self.line(format!("for j in 0..own{number} {{"));
        self.line(format!("let s = position(j of E{number}[lane] {range})"));
        self.line(format!(
            "put W[s % world] to R{number}[{slot}][lane][j] on next"
        ));
        self.line("}");
        self.line(format!(
            "let came{number} = H{number}[{slot}][lane][0] at most {words}"
        ));
        self.line(format!("for j in 0..came{number} {{"));
        self.line(format!(
            "G{number}[lane][j] = copy(R{number}[{slot}][lane][j])"
        ));
        self.line("}");
        if barrier {
            self.line("barrier");
        }
    }
}
