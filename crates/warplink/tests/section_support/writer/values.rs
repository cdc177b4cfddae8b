//! Pieces that read counts and rows from memory.

use super::Writer;
use std::fmt::Display;

/// Each lane has every `lanes`-th row of `rows`, and runs `body` for each of them.
fn own_rows(rows: impl Display, body: &str) -> String {
    format!("for t in 0..{rows} {{\nif t % lanes == lane {{\n{body}\n}}\n}}")
}

impl Writer<'_> {
    /// Every rank puts as many rows to every other as memory says, behind a header.
    pub(super) fn counted_rows(&mut self) {
        let (number, packing) = (self.pieces, self.packing());
        let (slots, slot, barrier) = self.slots(2);
        let rows = 1 + self.random.below(3);
        self.declare(format!(
            "input C{number}: i32[world]
             output G{number}: T[world, {rows}, n]
             scratch H{number}: packets16 i32[{slots}, lanes, world, 1]
             scratch R{number}: {packing} T[{slots}, world, {rows}, n]"
        ));
        let first = own_rows(
            rows,
            &format!("for p in 0..world {{\nG{number}[p][t] = copy(X)\n}}"),
        );
        let put = own_rows("m", &format!("put X to R{number}[{slot}][rank][t] on q"));
        let take = own_rows(
            "m",
            &format!("G{number}[p][t] = copy(R{number}[{slot}][p][t])"),
        );
        self.lines(format!(
            "{first}
             for r in 0..world {{
                 let q = (rank + r) % world
                 put C{number}[q] to H{number}[{slot}][lane][rank][0] on q
                 let m = C{number}[q] at most {rows}
                 {put}
             }}
             for p in 0..world {{
                 let m = H{number}[{slot}][lane][p][0] at most {rows}
                 {take}
             }}"
        ));
        self.barrier_if(barrier);
    }

    /// A rank puts some chunks to the next, with their count in plain scratch and a signal.
    pub(super) fn counted_chunks(&mut self) {
        let number = self.pieces;
        let (slots, slot, _) = self.slots(2);
        let chunks = 1 + self.random.below(3);
        self.declare(format!(
            "input C{number}: i32[2]
             scratch N{number}: i32[{slots}, lanes, 1]
             scratch R{number}: T[{slots}, lanes, {chunks}, part(n, lanes)]"
        ));
        let (source, output) = (self.source(), self.output());
        self.lines(format!(
            "{output} = copy({source})
             put C{number}[1] to N{number}[{slot}][lane][0] on next
             let m{number} = C{number}[1] at most {chunks}
             for c in 0..m{number} {{
                 put X[lane of lanes] to R{number}[{slot}][lane][c] on next
             }}
             signal next
             wait prev
             let k{number} = N{number}[{slot}][lane][0] at most {chunks}
             for c in 0..k{number} {{
                 {output} = copy(R{number}[{slot}][lane][c])
             }}"
        ));
        if !self.random.chance(4) {
            self.lines("signal prev\nwait next");
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
                let body = format!("G{number}[t] = copy(W[I{number}[t]])");
                self.lines(own_rows(rows, &body));
            }
            1 => {
                self.declare(format!("output G{number}: T[{rows}, n]"));
                self.barrier();
                let body = format!("get W[I{number}[t]] on next to G{number}[t]");
                self.lines(own_rows(rows, &body));
                self.barrier();
            }
            _ => {
                self.declare(format!("output G{number}: T[world, n]"));
                self.lines(own_rows("world", &format!("G{number}[t] = copy(X)")));
                let owner = ["i", "i", "i", "j"][self.random.below(4)];
                self.lines(format!(
                    "for j in 0..{rows} {{
                         let i = I{number}[j] at most world - 1
                         if {owner} % lanes == lane {{
                             G{number}[i] = copy(W[j % world])
                         }}
                     }}"
                ));
            }
        }
    }

    /// Some rows behind as many as another word says.
    pub(super) fn rows_behind_others(&mut self) {
        let number = self.pieces;
        let rows = 1 + self.random.below(3);
        self.declare(format!(
            "input D{number}: i32[world]
             input C{number}: i32[world]
             output G{number}: T[{rows}, n]"
        ));
        let first = own_rows(rows, &format!("G{number}[t] = copy(X)"));
        self.lines(format!(
            "{first}
             let d{number} = D{number}[rank] at most {rows}
             let m{number} = C{number}[rank] at most {rows} - d{number}
             for s in 0..m{number} {{
                 let t = d{number} + s
                 if t % lanes == lane {{
                     G{number}[t] = copy(W[(rank + s) % world])
                 }}
             }}"
        ));
    }

    /// Rows that an index names are put to the next rank, which learns the index before.
    pub(super) fn named_rows(&mut self) {
        let (number, packing) = (self.pieces, self.packing());
        let (slots, slot, barrier) = self.slots(2);
        let rows = 1 + self.random.below(3);
        self.declare(format!(
            "input I{number}: i32[{rows}]
             output G{number}: T[{rows}, n]
             scratch H{number}: packets16 i32[{slots}, lanes, 1]
             scratch R{number}: {packing} T[{slots}, lanes, {rows}, n]"
        ));
        let first = own_rows(rows, &format!("G{number}[t] = copy(X)"));
        let most = rows - 1;
        self.lines(format!(
            "{first}
             let i{number} = I{number}[{most}] at most {most}
             put I{number}[{most}] to H{number}[{slot}][lane][0] on next
             put W[i{number} % world] to R{number}[{slot}][lane][i{number}] on next
             let k{number} = H{number}[{slot}][lane][0] at most {most}
             if k{number} % lanes == lane {{
                 G{number}[k{number}] = copy(R{number}[{slot}][lane][k{number}])
             }}"
        ));
        self.barrier_if(barrier);
    }

    /// A lane's piece of `words` words, or rows of them, from `from{number}` to `to{number}`; and how many before it and in it
    /// are in a range.
    fn matched_piece(&mut self, number: usize, words: usize, unit: &str) -> &'static str {
        let range = ["in 0..2", "in 0..1", "in 1..3", "not in 0..2"][self.random.below(4)];
        let before = ["0..from", "0..from", "0..from", "0..to", "from..to"][self.random.below(5)];
        let before = before
            .replace("from", &format!("from{number}"))
            .replace("to", &format!("to{number}"));
        let longer = usize::from(self.random.chance(6));
        self.lines(format!(
            "let share{number} = ({words} + lanes - 1) / lanes
             let from{number} = min(lane * share{number}, {words})
             let to{number} = min(from{number} + share{number} + {longer}, {words})
             let before{number} = count({unit}E{number}[{before}] {range})
             let own{number} = count({unit}E{number}[from{number}..to{number}] {range})"
        ));
        range
    }

    /// Rows of the words in a range, in order, here or at the next rank, and where each is.
    pub(super) fn matched_rows(&mut self) {
        let number = self.pieces;
        let words = 2 + self.random.below(3);
        let (unit, row) = [("", ""), ("rows of ", ", 2")][usize::from(self.random.chance(3))];
        self.declare(format!(
            "input E{number}: i32[{words}{row}]
             output G{number}: T[{words}, n]
             output P{number}: i32[{words}]"
        ));
        let range = self.matched_piece(number, words, unit);
        let far = self.random.chance(2);
        if far {
            self.barrier();
        }
        let (on, row) = if far {
            (
                " on next",
                format!("put W[s % world] to G{number}[before{number} + j] on next"),
            )
        } else {
            (
                "",
                format!("G{number}[before{number} + j] = copy(W[s % world])"),
            )
        };
        let place = ["from{} + s", "from{} + s", "before{} + j", "s"][self.random.below(4)];
        let place = place.replace("{}", &number.to_string());
        self.lines(format!(
            "for j in 0..own{number} {{
                 let s = position(j of {unit}E{number}[from{number}..to{number}] {range})
                 {row}
                 P{number}[{place}]{on} = integer(before{number} + j)
             }}"
        ));
        if far {
            self.barrier();
        }
    }

    /// A message of the rows that words in a range name, behind how many there are.
    pub(super) fn matched_message(&mut self) {
        let (number, packing) = (self.pieces, self.packing());
        let (slots, slot, barrier) = self.slots(2);
        let words = 1 + self.random.below(3);
        self.declare(format!(
            "input E{number}: i32[lanes, {words}]
             output G{number}: T[lanes, {words}, n]
             scratch H{number}: packets16 i32[{slots}, lanes, 1]
             scratch R{number}: {packing} T[{slots}, lanes, {words}, n]"
        ));
        let range = ["in 0..2", "in 1..2", "not in 0..1"][self.random.below(3)];
        let said = ["own{}", "own{}", "own{}", "min(own{} + 1, 1)"][self.random.below(4)];
        let said = said.replace("{}", &number.to_string());
        self.lines(format!(
            "let own{number} = count(E{number}[lane] {range})
             H{number}[{slot}][lane][0] on next = integer({said})
             for j in 0..own{number} {{
                 let s = position(j of E{number}[lane] {range})
                 put W[s % world] to R{number}[{slot}][lane][j] on next
             }}
             let came{number} = H{number}[{slot}][lane][0] at most {words}
             for j in 0..came{number} {{
                 G{number}[lane][j] = copy(R{number}[{slot}][lane][j])
             }}"
        ));
        self.barrier_if(barrier);
    }
}
