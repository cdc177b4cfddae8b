//! Writes kernels from pieces of algorithms: most are right, and some have too few slots or a word too little.

mod values;

use super::sample::Pieces;
use crate::program_support::interpreter::Random;

/// A sample before it is mutated.
pub(super) struct Text {
    pub(super) declarations: Vec<String>,
    /// The lines of each kernel.
    pub(super) kernels: Vec<Vec<String>>,
}

impl Text {
    /// Whether it calls functions of rows.
    pub(super) fn has_rows(&self) -> bool {
        let mut lines = self.kernels.iter().flatten();
        let functions = ["shifted(", "joined(", "blocked("];
        lines.any(|line| functions.iter().any(|function| line.contains(function)))
    }

    /// Whether lanes read integers from memory, or rows by index.
    pub(super) fn reads_values(&self) -> bool {
        let mut lines = self.kernels.iter().flatten();
        lines.any(|line| line.contains(" at most ") || line.contains("[I"))
    }
}

/// Writes a sample for ranks with `lanes` lanes.
pub(super) fn write(random: &mut Random, lanes: usize, drawn: Pieces) -> Text {
    let count = 1 + usize::from(random.chance(4));
    let mut writer = Writer {
        random,
        lanes,
        text: Text {
            declarations: vec![
                "input X: T[n]".to_owned(),
                "input W: T[world, n]".to_owned(),
            ],
            kernels: vec![Vec::new(); count],
        },
        kernel: 0,
        pieces: 0,
        sources: Vec::new(),
    };
    let by_values = drawn == Pieces::Values;
    // Among others, they are by themselves.
    let alone = !by_values && writer.random.chance(16);
    for kernel in 0..if alone { 1 } else { count } {
        writer.kernel = kernel;
        // What another lane may have written is no source.
        writer.sources = vec!["X[lane of lanes]".to_owned()];
        writer.lines("let next = (rank + 1) % world\nlet prev = (rank - 1) % world");
        if alone {
            writer.piece_by_values(3);
            break;
        }
        let meets = writer
            .random
            .chance(if by_values { 8 } else { 3 })
            .then(|| writer.announces());
        for number in 0..1 + writer.random.below(if count > 1 { 1 } else { 2 }) {
            if by_values && (kernel + number == 0 || writer.random.chance(3)) {
                writer.piece_by_values(7);
            } else {
                writer.piece();
            }
        }
        if let Some(agrees) = meets {
            writer.lines(agrees);
        }
    }
    writer.text.kernels.retain(|lines| !lines.is_empty());
    writer.text
}

struct Writer<'a> {
    random: &'a mut Random,
    lanes: usize,
    text: Text,
    kernel: usize,
    pieces: usize,
    /// Parts of a lane's own, of n elements over all lanes.
    sources: Vec<String>,
}

/// The lines of a text that are not blank, without their indentation.
fn lines_of(text: &str) -> impl Iterator<Item = String> {
    let lines = text.lines().map(str::trim_start);
    lines.filter(|line| !line.is_empty()).map(str::to_owned)
}

impl Writer<'_> {
    fn lines(&mut self, text: impl AsRef<str>) {
        self.text.kernels[self.kernel].extend(lines_of(text.as_ref()));
    }

    fn declare(&mut self, text: impl AsRef<str>) {
        self.text.declarations.extend(lines_of(text.as_ref()));
    }

    fn barrier_if(&mut self, needed: bool) {
        if needed {
            self.lines("barrier");
        }
    }

    /// An output of n elements that this lane writes its part of.
    fn output(&mut self) -> String {
        let number = self.pieces;
        self.declare(format!("output Y{number}: T[n]"));
        let part = format!("Y{number}[lane of lanes]");
        self.sources.push(part.clone());
        part
    }

    fn source(&mut self) -> String {
        let which = self.random.below(self.sources.len());
        self.sources[which].clone()
    }

    fn operator(&mut self) -> &'static str {
        ["sum", "max", "min", "op"][self.random.below(4)]
    }

    fn packing(&mut self) -> &'static str {
        ["packets8", "packets16", "packets16", "packets128"][self.random.below(4)]
    }

    /// A piece whose counts or rows are read from memory, one of the first `kinds`.
    fn piece_by_values(&mut self, kinds: usize) {
        self.pieces += 1;
        match self.random.below(kinds) {
            0 => self.counted_rows(),
            1 => self.counted_chunks(),
            2 => self.rows_by_index(),
            3 => self.rows_behind_others(),
            4 => self.named_rows(),
            5 => self.matched_rows(),
            _ => self.matched_message(),
        }
    }

    fn piece(&mut self) {
        self.pieces += 1;
        match self.random.below(13) {
            12 => self.rows(),
            0 | 1 => self.one_shot(),
            2 => self.two_shots(),
            3 => self.gather_by_stores(),
            4 => self.gather_by_reading(),
            5 => self.reduce_by_reading(),
            6 | 7 => self.chunks(),
            8 => self.chain(),
            9 => self.ring(),
            10 => self.separate_lanes(),
            _ => self.between_lanes(),
        }
    }

    /// How many slots a piece has, and how it names the present one; with one slot alone, often a barrier.
    fn slots(&mut self, needed: usize) -> (usize, String, bool) {
        let slots = match self.random.below(8) {
            0 => 1,
            1 => needed + 1,
            _ => needed,
        };
        let barrier = slots < needed && !self.random.chance(3);
        (slots, format!("epoch % {slots}"), barrier)
    }

    /// Scratch for a part of each lane, and how it is selected behind its slot and rank.
    fn lane_scratch(&mut self, packing: &str, leading: &str) -> &'static str {
        let number = self.pieces;
        // Parts of a row are no whole packets of 128 bytes.
        if packing == "packets128" || self.random.chance(4) {
            self.declare(format!(
                "scratch P{number}: {packing} T[{leading}, lanes, part(n, lanes)]"
            ));
            "[lane]"
        } else {
            self.declare(format!("scratch P{number}: {packing} T[{leading}, n]"));
            "[lane of lanes]"
        }
    }

    /// A lane announces some words to all other ranks; gives the lines in which it waits for theirs. Now and
    /// then ranks announce different words.
    fn announces(&mut self) -> String {
        let number = self.kernel;
        let (slots, slot, barrier) = self.slots(2);
        let mut words = vec!["n", "lanes", "world * 3 - 7", "epoch % 2"];
        words.truncate(1 + self.random.below(4));
        if self.random.chance(4) {
            words.push(["rank", "rank % 2", "next / 2"][self.random.below(3)]);
        }
        let count = words.len();
        self.declare(format!(
            "scratch C{number}: packets16 i32[{slots}, world, {count}]"
        ));
        let words = words.join(", ");
        let lane = self.random.below(self.lanes);
        let told = ["", " to (rank + r) % world for r in 1..world"][self.random.below(2)];
        self.lines(format!(
            "if lane == {lane} {{
                 announce {words} in C{number}[{slot}]{told}
             }}"
        ));
        let barrier = if barrier { "barrier" } else { "" };
        format!(
            "if lane == {lane} {{
                 agree {words} in C{number}[{slot}]
             }}
             {barrier}"
        )
    }

    /// Every rank puts to every other, as packets.
    fn one_shot(&mut self) {
        let (number, packing) = (self.pieces, self.packing());
        let (slots, slot, barrier) = self.slots(2);
        let part = self.lane_scratch(packing, &format!("{slots}, world"));
        let (source, operator) = (self.source(), self.operator());
        self.lines(format!(
            "for r in 1..world {{
                 put {source} to P{number}[{slot}][rank]{part} on (rank + r) % world
             }}"
        ));
        if self.random.chance(3) {
            self.declare(format!("output G{number}: T[world, n]"));
            self.lines(format!(
                "G{number}[rank][lane of lanes] = copy({source})
                 for r in 1..world {{
                     let p = (rank + r) % world
                     G{number}[p][lane of lanes] = copy(P{number}[{slot}][p]{part})
                 }}"
            ));
        } else {
            let output = self.output();
            self.lines(format!(
                "{output} = reduce({source} if r == rank else P{number}[{slot}][r]{part} for r in 0..world, {operator})"
            ));
        }
        self.barrier_if(barrier);
    }

    /// Every rank reduces a part and puts the result to every other.
    fn two_shots(&mut self) {
        let (number, operator) = (self.pieces, self.operator());
        let (slots, slot, barrier) = self.slots(2);
        self.declare(format!(
            "scratch A{number}: packets16 T[{slots}, world, part(n, world)]
             scratch B{number}: packets16 T[{slots}, world, part(n, world)]
             output Y{number}: T[n]"
        ));
        self.lines(format!(
            "for r in 1..world {{
                 let p = (rank + r) % world
                 put X[p of world][lane of lanes] to A{number}[{slot}][rank][lane of lanes] on p
             }}
             Y{number}[rank of world][lane of lanes], B{number}[{slot}][rank][lane of lanes] on (rank + r) % world for r in 1..world = \
             reduce(X[rank of world][lane of lanes] if r == rank else A{number}[{slot}][r][lane of lanes] for r in 0..world, {operator})
             for r in 1..world {{
                 let p = (rank + r) % world
                 Y{number}[p of world][lane of lanes] = copy(B{number}[{slot}][p][lane of lanes])
             }}"
        ));
        self.barrier_if(barrier);
    }

    /// Writes a barrier, or steps equivalent to one.
    fn barrier(&mut self) {
        if self.random.chance(4) {
            self.lines(
                "signal (rank + r) % world for r in 1..world
                 wait (rank + r) % world for r in 1..world",
            );
        } else {
            self.lines("barrier");
        }
    }

    fn gather_by_stores(&mut self) {
        let (number, source) = (self.pieces, self.source());
        self.declare(format!("output G{number}: T[world, n]"));
        self.barrier();
        self.lines(format!(
            "G{number}[rank][lane of lanes] = copy({source})
             for r in 1..world {{
                 put {source} to G{number}[rank][lane of lanes] on (rank + r) % world
             }}"
        ));
        self.barrier();
    }

    fn gather_by_reading(&mut self) {
        let (number, source) = (self.pieces, self.source());
        self.declare(format!("output G{number}: T[world, n]"));
        self.barrier();
        let from = if self.random.chance(2) {
            source
        } else {
            "W[rank][lane of lanes]".to_owned()
        };
        self.lines(format!(
            "G{number}[rank][lane of lanes] = copy(W[rank][lane of lanes])
             for r in 1..world {{
                 let p = (rank + r) % world
                 get {from} on p to G{number}[p][lane of lanes]
             }}"
        ));
        self.barrier();
    }

    fn reduce_by_reading(&mut self) {
        let (number, operator) = (self.pieces, self.operator());
        self.declare(format!("output Y{number}: T[n]"));
        self.barrier();
        self.lines(format!(
            "Y{number}[rank of world][lane of lanes] on (rank + r) % world for r in 0..world = \
             reduce(X[rank of world][lane of lanes] on r for r in 0..world, {operator})"
        ));
        self.barrier();
    }

    /// A rank puts chunks to the next, with a signal each or as packets.
    fn chunks(&mut self) {
        let number = self.pieces;
        let (chunks, slots) = (1 + self.random.below(3), 1 + self.random.below(4));
        let packets = self.random.chance(3);
        let answers = slots < 2 || !self.random.chance(3);
        let (operator, source) = (self.operator(), self.source());
        let packing = if packets { "packets128 " } else { "" };
        let persistent = if !packets && self.random.chance(4) {
            "persistent "
        } else {
            ""
        };
        self.declare(format!(
            "scratch {persistent}R{number}: {packing}T[{slots}, lanes, part(part(n, lanes), {chunks})]"
        ));
        let output = self.output();
        let slot = format!("(epoch * {chunks} + c) % {slots}");
        let taken = if self.random.chance(2) {
            format!("copy(R{number}[{slot}][lane])")
        } else {
            format!("reduce(R{number}[{slot}][lane], X[lane of lanes][c of {chunks}], {operator})")
        };
        let arrival = if packets {
            ""
        } else {
            "signal next\nwait prev"
        };
        let answer = if answers {
            "signal prev\nwait next"
        } else {
            ""
        };
        self.lines(format!(
            "for c in 0..{chunks} {{
                 put {source}[c of {chunks}] to R{number}[{slot}][lane] on next
                 {arrival}
                 {output}[c of {chunks}] = {taken}
                 {answer}
             }}"
        ));
    }

    /// Passes the data of a root from rank to rank.
    fn chain(&mut self) {
        let (number, packing) = (self.pieces, self.packing());
        let (slots, slot, _) = self.slots(2);
        let part = self.lane_scratch(packing, &slots.to_string());
        let source = self.source();
        let output = self.output();
        self.lines(format!(
            "let place{number} = (rank - 1) % world
             if place{number} == 0 {{
                 {output} = copy({source})
                 if world > 1 {{
                     put {source} to P{number}[{slot}]{part} on next
                 }}
             }} else {{
                 {output} = copy(P{number}[{slot}]{part})
                 if place{number} < world - 1 {{
                     put {output} to P{number}[{slot}]{part} on next
                 }}
             }}"
        ));
        if !self.random.chance(4) {
            self.lines("signal prev\nwait next");
        }
    }

    /// Sums go around a ring, one row for each step.
    fn ring(&mut self) {
        let (number, operator) = (self.pieces, self.operator());
        let (slots, slot, barrier) = self.slots(2);
        self.declare(format!(
            "scratch P{number}: packets16 T[{slots}, world, part(n, world)]
             output S{number}: T[part(n, world)]
             output Y{number}: T[n]"
        ));
        // Y is what has come around all the way.
        self.lines(format!(
            "put X[rank of world][lane of lanes] to P{number}[{slot}][0][lane of lanes] on next
             for s in 1..world {{
                 let b = (rank - s) % world
                 P{number}[{slot}][s][lane of lanes] on next = \
                 reduce(P{number}[{slot}][s - 1][lane of lanes], X[b of world][lane of lanes], {operator})
             }}
             S{number}[lane of lanes] = copy(X[0..part(n, world)][lane of lanes])
             Y{number}[rank of world][lane of lanes] = copy(P{number}[{slot}][world - 1][lane of lanes])
             for r in 1..world {{
                 let q = (rank + r) % world
                 Y{number}[q of world][lane of lanes] = copy(X[q of world][lane of lanes])
             }}"
        ));
        let barrier = barrier || !self.random.chance(4);
        self.barrier_if(barrier);
    }

    /// A lane puts chunks, and another takes them; where there is one lane alone, it does both.
    fn separate_lanes(&mut self) {
        let number = self.pieces;
        let (slots, slot, barrier) = self.slots(2);
        let (chunks, to) = (1 + self.random.below(3), self.lanes - 1);
        let target = ["next", "rank"][self.random.below(2)];
        let source = if target == "next" { "prev" } else { "rank" };
        let operator = self.operator();
        self.declare(format!(
            "scratch R{number}: T[{slots}, n]
             output Y{number}: T[n]"
        ));
        self.lines(format!(
            "for c in 0..{chunks} {{
                 if lane == 0 {{
                     put X[c of {chunks}] to R{number}[{slot}][c of {chunks}] on {target}
                     signal {target} at {to}
                 }}
                 if lane == {to} {{
                     wait {source}
                     Y{number}[c of {chunks}] = reduce(R{number}[{slot}][c of {chunks}], X[c of {chunks}], {operator})
                 }}
             }}"
        ));
        let barrier = barrier || !self.random.chance(3);
        self.barrier_if(barrier);
    }

    /// Every rank puts rows to every other, as packets; a function of the sums goes to some ranks.
    fn rows(&mut self) {
        let number = self.pieces;
        let packing = ["packets8", "packets16"][self.random.below(2)];
        let (slots, slot, barrier) = self.slots(2);
        let rows = 1 + self.random.below(3);
        self.declare(format!(
            "input A{number}: f32[{rows}, n]
             input B{number}: f32[{rows}, n]
             input S{number}: f32[{rows}]
             scratch P{number}: {packing} f32[{slots}, world, {rows}, n]
             output H{number}: f32[{rows}, n]"
        ));
        let sum = format!(
            "reduce(A{number}[t] if r == rank else P{number}[{slot}][r][t] for r in 0..world, sum)"
        );
        let result = if self.random.chance(3) {
            format!("H{number}[t] = joined({sum})")
        } else if self.random.chance(2) {
            self.declare(format!(
                "input K{number}: f32[{rows}, (n + 7) / 8]
                 output L{number}: f32[{rows}, (n + 7) / 8]"
            ));
            format!("H{number}[t]; L{number}[t] = blocked({sum}, K{number}[t])")
        } else {
            self.declare(format!("output L{number}: f32[{rows}]"));
            let residual = ["A", "B"][self.random.below(2)];
            format!(
                "H{number}[t]; L{number}[t] = shifted({sum}, {residual}{number}[t], S{number}[t])"
            )
        };
        self.lines(format!(
            "for j in 0..({rows} - lane + lanes - 1) / lanes {{
                 let t = lane + j * lanes
                 for r in 1..world {{
                     put A{number}[t] to P{number}[{slot}][rank][t] on (rank + r) % world
                 }}
                 {result}
             }}"
        ));
        self.barrier_if(barrier);
    }

    /// A lane takes what another one has put as packets, here or at the next rank.
    fn between_lanes(&mut self) {
        let (number, packing) = (self.pieces, self.packing());
        let (slots, slot, barrier) = self.slots(2);
        let lanes = self.lanes;
        self.declare(format!(
            "scratch Q{number}: {packing} T[{slots}, lanes, part(n, lanes)]
             output Y{number}: T[n]"
        ));
        let on = if self.random.chance(2) {
            " on next"
        } else {
            ""
        };
        self.lines(format!(
            "put X[lane of lanes] to Q{number}[{slot}][lane]{on}
             let other{number} = (lane + 1) % {lanes}
             Y{number}[other{number} of lanes] = copy(Q{number}[{slot}][other{number}])"
        ));
        let barrier = barrier || !self.random.chance(3);
        self.barrier_if(barrier);
    }
}
