//! Text of the program that dispatches: the shipped one with names in braces replaced according to the options.

use super::dispatch_steps as steps;
use super::{ExpertOptions, Overflow, RowLayout};
use crate::collective::fused::Quantization;
use crate::collective::text::filled;

const TEXT: &str = include_str!("dispatch.wlp");

/// Words of an announcement of up to four tensors, behind as many integers.
const LONG_ANNOUNCEMENT: usize = 12;

/// Packets of an announcement are a cell, with a row of this many words for each of up to eight ranks.
pub(super) const CELL_ROWS: usize = 8;
pub(super) const CELL_WORDS: usize = 16;

/// Integers in a row of a cell, each of which has a packet, of two words.
const CELL_INTEGERS: usize = CELL_WORDS / 2;

/// Where a row and what belongs to it is stored; `local` is for the expert of slot k.
struct Stored {
    row: String,
    scales: String,
    /// The only scale, if a row has one.
    scale: String,
    weights: String,
    local: String,
}

impl Stored {
    /// In the outputs, at these indices.
    fn at(indices: &str, options: &ExpertOptions) -> Self {
        let slot = if Variant::of(options).is_once {
            "[k]"
        } else {
            ""
        };
        Self {
            row: format!("Y{indices}"),
            scales: format!("Z{indices}"),
            scale: format!("Z{indices}[0]"),
            weights: format!("V{indices}"),
            local: format!("L{indices}{slot}"),
        }
    }
}

/// The options that change the text.
#[derive(Clone, Copy)]
struct Variant {
    drops: bool,
    is_once: bool,
    by_expert: bool,
    quantization: Option<Quantization>,
    /// Whether rows are quantised on their way.
    quantizes: bool,
}

impl Variant {
    fn of(options: &ExpertOptions) -> Self {
        Self {
            drops: options.overflow == Overflow::Drop,
            is_once: options.layout == RowLayout::OncePerRank,
            by_expert: options.layout == RowLayout::ByExpert,
            quantization: options.quantization,
            quantizes: options.quantization.is_some() && !options.quantized_tokens,
        }
    }

    const fn is_scaled(self) -> bool {
        self.quantization.is_some()
    }

    /// Whether a row has one scale, a single value of the function that quantises.
    fn has_one_scale(self) -> bool {
        self.quantization.is_some_and(|it| it.block().is_none())
    }

    /// Outputs that other ranks store to.
    fn outputs(self) -> Vec<&'static str> {
        let all = [
            ("L", true),
            ("Y", true),
            ("Z", self.is_scaled()),
            ("V", self.is_once),
        ];
        let given = all.iter().filter(|(_, is_given)| *is_given);
        given.map(|(name, _)| *name).collect()
    }

    /// Steps that store a row of token t at rank q.
    fn stored(self, to: &Stored) -> String {
        let Stored {
            row,
            scales,
            scale,
            weights,
            local,
        } = to;
        let scaled = if self.has_one_scale() { scale } else { scales };
        let mut lines = Vec::new();
        if self.quantizes {
            lines.push(format!("{row} on q; {scaled} on q = quantized(X[t])"));
        } else {
            lines.push(format!("put X[t] to {row} on q"));
            if self.is_scaled() {
                lines.push(format!("put G[t] to {scales} on q"));
            }
        }
        if self.is_once {
            lines.push(format!("put W[t] to {weights} on q"));
            lines.push(steps::LOCALS.replace("{local}", local));
        } else {
            lines.push(format!("{local} on q = integer(x - q * per)"));
        }
        lines.join("\n")
    }

    /// The expected row at these indices, if it is that of a token of a rank.
    fn expect(self, at: &str, token: &str, rank: &str) -> String {
        let mut lines = vec![if self.quantizes {
            let scale = if self.has_one_scale() { "[0]" } else { "" };
            format!("expect Y{at}; Z{at}{scale} = quantized(X[{token}] on {rank})")
        } else {
            format!("expect Y{at} = copy(X[{token}] on {rank})")
        }];
        if self.is_scaled() && !self.quantizes {
            lines.push(format!("expect Z{at} = copy(G[{token}] on {rank})"));
        }
        if self.is_once {
            lines.push(format!("expect V{at} = copy(W[{token}] on {rank})"));
        }
        lines.join("\n")
    }
}

/// Lines that are there under a condition.
fn lines(all: &[(bool, &str)]) -> String {
    let given = all.iter().filter(|(is_given, _)| *is_given);
    let given: Vec<&str> = given.map(|(_, line)| *line).collect();
    given.join("\n")
}

fn either(condition: bool, one: &str, other: &str) -> String {
    if condition { one } else { other }.to_owned()
}

/// The program text for this many ranks.
pub(super) fn text(options: &ExpertOptions, world: usize) -> String {
    let it = Variant::of(options);
    let (is_long, outputs) = (it.outputs().len() > 2, it.outputs());
    let integers = if is_long {
        ", 0".repeat(LONG_ANNOUNCEMENT - 2 * outputs.len())
    } else {
        String::new()
    };
    let announced = format!(
        "kind, size, limit, factor{integers} with {} in {}[slot][i]",
        outputs.join(", "),
        if is_long { "M" } else { "A" }
    );
    let reachable: Vec<String> = outputs
        .iter()
        .map(|output| format!("reachable({output})"))
        .collect();
    let counts = either(it.by_expert, "", steps::COUNTS_BY_SOURCE);
    let lines_of = [
        (
            "inputs",
            lines(&[
                (
                    it.is_scaled() && !it.quantizes,
                    "input G: f32[tokens, scales]",
                ),
                (it.is_once, "input W: f32[tokens, slots]"),
            ]),
        ),
        (
            "outputs",
            lines(&[
                (it.is_scaled(), "output Z: f32[world, rows, scales]"),
                (it.is_once, "output V: f32[world, rows, slots]"),
                (it.drops, "output D: i32[experts]"),
            ]),
        ),
        (
            "messages",
            lines(&[
                (
                    is_long || it.by_expert,
                    "# Announcements of many tensors, a cell for each lane, and integers behind them.",
                ),
                (
                    is_long || it.by_expert,
                    format!("scratch M: packets16 i32[2, cells, {CELL_ROWS}, {CELL_WORDS}]")
                        .as_str(),
                ),
            ]),
        ),
        (
            "function",
            it.quantization
                .filter(|_| it.quantizes)
                .map_or_else(String::new, function),
        ),
        ("totals", totals(it, world)),
        ("counts", counts),
        ("counted", counted(it, world)),
        (
            "nobody",
            either(it.is_once, steps::NOBODY_OF_RANKS, steps::NOBODY_OF_SLOTS),
        ),
        ("direct", direct(it, options)),
        ("placed", placed(it)),
        ("put", it.stored(&staged(it))),
        ("taken", taken(it)),
        ("expected", expected(it, world)),
        ("announced", announced),
        ("reachable", reachable.join(" and ")),
    ];
    let words = [
        ("of rank", steps::OF_RANK.to_owned()),
        ("of", either(it.is_once, "rows of ", "")),
        ("row", either(it.quantizes, "f8e4m3", "T")),
        ("each expert", either(it.is_once, ", slots", "")),
        ("groups", either(it.by_expert, "per", "world")),
        ("span", either(it.by_expert, "world * rows", "rows")),
        ("unit", either(it.is_once, "1", "slots")),
        (
            "choices",
            either(it.is_once, "tokens, slots", "tokens * slots"),
        ),
        (
            "positions",
            either(it.is_once, "tokens, world", "tokens * slots"),
        ),
        (
            "token",
            either(it.is_once, "start + s", "(start + s) / slots"),
        ),
        ("position", either(it.is_once, "t][q", "start + s")),
        ("wide", either(it.is_once, "(1 + slots)", "2")),
        ("floats", either(is_long, "F: f32[2, floats], ", "")),
        (
            "expert",
            "let x = E[start + s] at most experts - 1".to_owned(),
        ),
        ("base", integer(BASE)),
    ];
    // Lines first: they contain words in braces themselves.
    filled(&filled(TEXT, &lines_of), &words)
}

/// An integer that packets carry, behind the announcements.
fn integer(number: &str) -> String {
    let cell = CELL_ROWS * CELL_INTEGERS;
    format!(
        "M[slot][each + ({number}) / {cell}][({number}) / {CELL_INTEGERS} % {CELL_ROWS}][({number}) % {CELL_INTEGERS} * 2]"
    )
}

/// The number of such an integer that rank `from` states: its rows for the first experts of rank q, `further` more than those before x.
fn stated(from: &str, further: &str) -> String {
    integer(&format!(
        "({from} * world + q) * (per + 1) + x - q * per + {further}"
    ))
}

/// The number of the integer with the place of this rank's first row for expert x, behind the stated ones.
const BASE: &str = "world * (experts + world) + x";

/// Cells of packets that a launch with so many lanes for data needs.
pub(super) fn cells(options: &ExpertOptions, world: usize, lanes: usize) -> usize {
    let it = Variant::of(options);
    let integers = world * (options.experts + world) + options.experts;
    match (it.by_expert, it.outputs().len() > 2) {
        (false, false) => 0,
        (false, true) => lanes,
        (true, _) => lanes + integers.div_ceil(CELL_ROWS * CELL_INTEGERS),
    }
}

/// Scales and weights of a row in scratch.
pub(super) fn floats(options: &ExpertOptions) -> usize {
    let it = Variant::of(options);
    options.scales() + if it.is_once { options.top_k } else { 0 }
}

/// Whether rows are quantised on their way.
pub(super) fn quantizes(options: &ExpertOptions) -> bool {
    Variant::of(options).quantizes
}

/// Parts of a token that lanes divide among themselves: slots, where each has a row of its own.
pub(super) fn divided(options: &ExpertOptions) -> usize {
    if Variant::of(options).is_once {
        1
    } else {
        options.top_k
    }
}

/// Words of a row in scratch: its position, and its experts.
pub(super) fn words(options: &ExpertOptions) -> usize {
    1 + options.experts_per_row()
}

fn function(quantization: Quantization) -> String {
    let scaled = quantization.scaled("x", "row_max(abs(x))");
    let lines: String = scaled
        .lines
        .iter()
        .map(|line| format!("    {line}\n"))
        .collect();
    let [row, scale] = scaled.stored;
    format!("function quantized(x) {{\n{lines}    return {row}, {scale}\n}}")
}

/// The conditions that ranks agree on: none has more rows for a rank than there is memory for, unless such rows are dropped.
fn totals(it: Variant, world: usize) -> String {
    if it.drops {
        return "let kind = what\nlet size = length\nlet limit = upper".to_owned();
    }
    let mut all = Vec::new();
    for rank in 0..world {
        let range = format!("in {rank} * per..{} * per", rank + 1);
        all.push(format!("let rows{rank} = count({{of}}E[0..whole] {range})"));
        // The number of rows and the rank in one integer, since the language has a maximum but no position of it.
        let own = format!("rows{rank} * world + {rank}");
        let worst = match rank.checked_sub(1) {
            Some(before) => format!("max(worst{before}, {own})"),
            None => own,
        };
        // The last maximum is over all ranks, and has the name that the following lines use.
        let number = if rank + 1 == world {
            String::new()
        } else {
            rank.to_string()
        };
        all.push(format!("let worst{number} = {worst}"));
    }
    // 1 if a rank gets too many rows, else 0: the announcement then states the excess, and all ranks fail alike.
    all.push("let above = min(max(worst / world - rows, 0), 1)".to_owned());
    all.push("let kind = what - above".to_owned());
    all.push("let size = length + above * (worst / world - length)".to_owned());
    // Sender and receiver in one word, 16 bits each, as `describe_dispatch` reads them.
    all.push("let limit = upper + above * (rank * 65536 + worst % world - upper)".to_owned());
    all.join("\n")
}

/// Rows by expert, where they are needed.
fn counted(it: Variant, world: usize) -> String {
    if !it.by_expert && !it.drops {
        return String::new();
    }
    let states = |end: &str| {
        let values = [
            ("end", end.to_owned()),
            ("up", stated("rank", "1")),
            ("none", stated("rank", "0")),
        ];
        either(it.by_expert, &filled(steps::STATED, &values), "")
    };
    let dropped = "let lost = count(E[cut..whole] in x..x + 1)\nD[x] = integer(lost)";
    let values = [
        ("dropped", either(it.drops, dropped, "")),
        ("none dropped", either(it.drops, "D[x] = integer(0)", "")),
        ("stated", states("cut")),
        ("all stated", states("whole")),
    ];
    let counted = filled(steps::COUNTED, &values);
    if it.by_expert {
        return format!("{}\n{}", counted.trim_end(), bases(world));
    }
    let body = counted.trim_end().replace('\n', "\n    ");
    format!("if first == 0 {{\n    {body}\n}}")
}

/// Where this rank's rows for experts begin, from what all ranks have stated.
fn bases(world: usize) -> String {
    let all = |text: &dyn Fn(usize) -> String, by: &str| -> String {
        let texts: Vec<String> = (0..world).map(text).collect();
        texts.join(by)
    };
    let read = |name: &str, from: usize, further: &str| {
        let number = stated(&from.to_string(), further);
        format!("let {name}{from} = {number} at most rows")
    };
    // Up to x of earlier ranks, and before x of others; then the other of the two.
    let earlier = |from: usize| {
        let up = read("up", from, &format!("below{from}"));
        // 1 for earlier ranks and 0 for others, as arithmetic: names bound in an `if` would end with it.
        format!("let below{from} = min(max(rank - {from}, 0), 1)\n{up}")
    };
    let ends = |from: usize| read("end", from, &format!("1 - below{from}"));
    let values = [
        ("earlier", all(&earlier, "\n")),
        ("sum", all(&|from| format!("up{from}"), " + ")),
        ("ends", all(&ends, "\n")),
        (
            "difference",
            all(
                &|from| format!("(1 - 2 * below{from}) * (end{from} - up{from})"),
                " + ",
            ),
        ),
    ];
    filled(steps::BASES, &values).trim_end().to_owned()
}

/// Steps that store rows of rank q straight in its outputs.
fn direct(it: Variant, options: &ExpertOptions) -> String {
    let (stored, at) = if it.by_expert {
        (steps::STORED_BY_EXPERT, "[place / rows][place % rows]")
    } else {
        (steps::STORED_BY_SOURCE, "[rank][before + j]")
    };
    let values = [
        ("stored", it.stored(&Stored::at(at, options))),
        ("expert", either(it.is_once, "", "{expert}")),
    ];
    filled(stored, &values).trim_end().to_owned()
}

/// The place of a row that goes through scratch.
fn placed(it: Variant) -> String {
    if it.by_expert {
        return steps::PLACE_BY_EXPERT.to_owned();
    }
    lines(&[
        (!it.is_once, "{expert}"),
        (true, "let place = rank * rows + before + j"),
    ])
}

/// A row in scratch, and what belongs to it.
fn staged(it: Variant) -> Stored {
    let each = match (it.is_scaled(), it.is_once) {
        (true, true) => "(scales + slots)",
        (true, false) => "scales",
        _ => "slots",
    };
    let weights = if it.is_scaled() { " + scales" } else { "" };
    Stored {
        row: "B[slot][at * row..at * row + n]".to_owned(),
        scales: format!("F[slot][at * {each}..at * {each} + scales]"),
        scale: format!("F[slot][at * {each}]"),
        weights: format!("F[slot][at * {each}{weights}..at * {each}{weights} + slots]"),
        local: either(
            it.is_once,
            "R[slot][heads + at * {wide} + 1 + k]",
            "R[slot][heads + at * {wide} + 1]",
        ),
    }
}

/// Steps that copy a row out of scratch.
fn taken(it: Variant) -> String {
    let Stored {
        row,
        scales,
        weights,
        local,
        ..
    } = staged(it);
    let all = "R[slot][heads + at * {wide} + 1..heads + at * {wide} + 1 + slots]";
    let locals = if it.is_once { all } else { local.as_str() };
    let copy =
        |output: &str, from: &str| format!("{output}[place / rows][place % rows] = copy({from})");
    lines(&[
        (true, copy("Y", &row).as_str()),
        (it.is_scaled(), copy("Z", &scales).as_str()),
        (it.is_once, copy("V", &weights).as_str()),
        (true, copy("L", locals).as_str()),
    ])
}

/// Statements of the expected outputs.
fn expected(it: Variant, world: usize) -> String {
    if !it.by_expert {
        return filled(
            steps::EXPECTED_BY_SOURCE,
            &[("expect", it.expect("[r][j]", "t", "r"))],
        )
        .trim_end()
        .to_owned();
    }
    let ranks = || 0..world;
    let join = |all: Vec<String>, by: &str| all.join(by);
    let known = ranks().map(|p| {
        format!(
            "let all{p} = N[0] on {p} at most tokens\n\
             let wanted{p} = count(E[0..max(all{p} * slots, 1)] on {p} in rank * per..(rank + 1) * per)"
        )
    });
    let counted = ranks().map(|p| {
        format!(
            "let before{p} = count(E[0..max(all{p} * slots, 1)] on {p} in rank * per..x)\n\
             let of{p} = count(E[0..max(all{p} * slots, 1)] on {p} in x..x + 1)"
        )
    });
    let each = ranks().map(|p| {
        let head = match p.checked_sub(1) {
            None => join(
                ranks()
                    .map(|p| format!("before{p} * min(all{p}, 1)"))
                    .collect(),
                " + ",
            ),
            Some(last) => format!("head{last} + of{last} * min(all{last}, 1)"),
        };
        let at = "[place / rows % world][place % rows]";
        let values = [
            ("head", head),
            ("expect", it.expect(at, "s / slots", &p.to_string())),
            ("p", p.to_string()),
        ];
        filled(steps::EXPECTED_BY_EXPERT, &values)
            .trim_end()
            .to_owned()
    });
    let fits = join(
        ranks().map(|p| format!("wanted{p} <= rows")).collect(),
        " and ",
    );
    let body = counted.chain(each).collect::<Vec<_>>().join("\n");
    format!(
        "{}\nif {fits} {{\n    for x in rank * per..(rank + 1) * per {{\n        {}\n    }}\n}}",
        join(known.collect(), "\n"),
        body.replace('\n', "\n        ")
    )
}
