//! Programs of fused calls: a shipped text for each strategy, with names in braces replaced according to the
//! description.

use super::memory::Tensor;
use super::quantized::quantize;
use super::way::{FOLLOWERS, Way};
use super::{Described, FusedKind, Norm, Quantization, Wire};
use crate::collective::text::{filled, parsed};
use crate::error::Result;
use crate::program::Program;

/// Maximum tensors in one announcement, and maximum that a lane announces in total: it then has two rows for them.
// A row of scratch has eight words, two for each tensor, and at least two for the description.
const ANNOUNCED_AT_ONCE: usize = 3;
const MAX_ANNOUNCED: usize = 4;

/// Location of a row of a call.
#[derive(Clone, Copy)]
pub(super) enum At {
    /// Any row, of tensors with all rows.
    Row,
    /// A row that this rank computes for all.
    Everywhere,
    /// A row that this rank owns.
    Owned,
    /// A row that rank k owns.
    OwnedBy,
}

/// Starting point of a function's computation.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum From {
    /// The sum, `x`, before the residual is added.
    Sum,
    /// The sum with the residual, `h`.
    Added,
    /// The sum only.
    SumAlone,
}

/// Beginning of a function.
pub(super) struct Start {
    /// The rows that it takes as parameters, and the lines that compute `x` or `h` from them.
    pub(super) parameters: Vec<String>,
    pub(super) lines: Vec<String>,
    /// Result of these lines.
    pub(super) gives: From,
    /// The starting point that determines the function's other tensor parameters.
    pub(super) taken: From,
}

impl Start {
    /// For one row.
    pub(super) fn of(from: From) -> Self {
        let row = if from == From::Added { "h" } else { "x" };
        Self {
            parameters: vec![row.to_owned()],
            lines: Vec::new(),
            gives: from,
            taken: from,
        }
    }
}

/// Results of a function for other ranks, which follow the stored ones.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Sends {
    Nothing,
    /// The sum and the residual.
    Added,
    /// A row as 8-bit floats, and their scales.
    Quantized(&'static str),
}

impl Described {
    /// The program text of this call on so many lanes.
    pub(super) fn text(&self, way: Way, world: usize, lanes: usize) -> String {
        let by_owner = self.call.kind != FusedKind::AllReduce;
        let text = way.text(by_owner);
        let everywhere = if by_owner { At::Owned } else { At::Everywhere };
        let outputs: Vec<Tensor> = self.outputs().collect();
        let quantized = way == Way::Quantized;
        let (functions, expected) = if quantized {
            (
                self.quantized_functions(world),
                self.quantized_expected(world),
            )
        } else {
            (self.exact_functions(way, &outputs), self.expected())
        };
        let everywhere = match way {
            Way::Gathered => self.spread(&outputs),
            _ => self.targets(&outputs, everywhere),
        };
        let [_, follows] = self.carried_and_following();
        let (packets, unit, put) = way.packets();
        // A loop with known bounds is written out, without a test for further rows.
        let rounds = if self.call.tokens <= lanes {
            "1"
        } else {
            "most"
        };
        let put_in = [
            ("packets", packets.to_owned()),
            ("unit", unit.to_string()),
            ("put", put.to_owned()),
            ("rounds", rounds.to_owned()),
            ("tensors", self.declarations()),
            ("functions", functions.join("\n\n")),
            ("targets", self.targets(&outputs, At::Row)),
            ("everywhere", everywhere),
            (
                "followers",
                if way == Way::Gathered { FOLLOWERS } else { "" }.to_owned(),
            ),
            ("follows", self.targets(&follows, At::Row)),
            ("further", self.arguments(From::Added, "", "")),
            ("source", self.source("").to_owned()),
            (
                "arguments",
                self.arguments(From::Sum, if by_owner { "g" } else { "t" }, ""),
            ),
            ("announcements", self.announcements(way)),
            ("reachable", self.reachable(way)),
            ("staged", self.staged()),
            ("inout", self.in_place()),
            ("sent", self.sent()),
            ("reduced", self.reduced(world)),
            ("finished", self.finished()),
            ("expected", expected),
        ];
        filled(text, &put_in)
    }

    /// The functions of texts whose rows travel unquantised.
    fn exact_functions(&self, way: Way, outputs: &[Tensor]) -> Vec<String> {
        let of = |name: &str, from: From, outputs: &[Tensor], sends: Sends| {
            self.function(name, &Start::of(from), outputs, sends)
        };
        let mut functions = vec![of("epilogue", From::Sum, outputs, Sends::Nothing)];
        if way == Way::Gathered {
            let [_, follows] = self.carried_and_following();
            functions.push(of("finished", From::Added, &follows, Sends::Nothing));
        }
        if way == Way::OneShot && self.call.kind == FusedKind::AllReduce {
            // The text applies a function before it sends, which for exact rows is the identity.
            functions.push("function sent(x) {\n    return x\n}".to_owned());
        }
        if self.gathers() {
            let [local, all] = self.local_and_gathered();
            functions.push(of("added", From::Sum, &local, Sends::Added));
            functions.push(of("finished", From::Added, &all, Sends::Nothing));
            if !local.is_empty() {
                functions.push(of("stored", From::Sum, &local, Sends::Nothing));
            }
            functions.push(of("gathered", From::Sum, &all, Sends::Nothing));
        }
        functions
    }

    pub(super) fn program(&self, way: Way, world: usize, lanes: usize) -> Result<Program> {
        let text = self.text(way, world, lanes);
        parsed(&text, "write the program of a fused call")
    }

    /// The strategies that have programs.
    pub(super) fn ways(&self) -> Vec<Way> {
        if self.call.wire == Wire::Fp8 {
            return vec![Way::Quantized];
        }
        if self.call.kind != FusedKind::AllReduce {
            return vec![Way::Direct];
        }
        let mut ways = vec![Way::OneShot, Way::Lined, Way::Pushed];
        // More tensors do not fit into the two rows of scratch that a lane announces in.
        if self.announced(Way::Direct).count() <= MAX_ANNOUNCED {
            ways.push(Way::Direct);
        }
        let [_, follows] = self.carried_and_following();
        if self.form.has(Tensor::ResidualOut) && !follows.is_empty() {
            ways.push(Way::Gathered);
        }
        ways
    }

    /// Number of lanes whose announcements fit.
    pub(super) fn most_lanes(&self, way: Way) -> usize {
        if self.announced(way).count() > ANNOUNCED_AT_ONCE {
            // Each lane then takes two of the 128 rows.
            64
        } else {
            128
        }
    }

    /// Rows of scratch of a lane if ranks cannot access one another's tensors.
    pub(super) const fn staged_rows(&self, world: usize) -> usize {
        match self.call.kind {
            FusedKind::AllReduce => world,
            _ => 2 * world,
        }
    }

    /// Whether ranks get results of rows that others own.
    const fn gathers(&self) -> bool {
        matches!(
            self.call.kind,
            FusedKind::AllReduceSharded | FusedKind::AllGather
        )
    }

    pub(super) fn outputs(&self) -> impl Iterator<Item = Tensor> + Clone {
        let tensors = self.form.tensors();
        tensors.filter(|tensor| tensor.is_output())
    }

    /// The outputs of owned rows, and the others.
    pub(super) fn local_and_gathered(&self) -> [Vec<Tensor>; 2] {
        let (local, all) = self
            .outputs()
            .partition(|output| output.is_owned(self.call.kind));
        [local, all]
    }

    /// The outputs that [`Way::Gathered`] stores at all ranks, and those that each rank computes from h.
    fn carried_and_following(&self) -> [Vec<Tensor>; 2] {
        let (carried, follows) = self.outputs().partition(|output| output.is_carried());
        [carried, follows]
    }

    /// Destinations of the outputs of a row that this rank computes; outputs derived from h only at this rank.
    fn spread(&self, outputs: &[Tensor]) -> String {
        let one = |output: &Tensor| {
            let at = if output.is_carried() {
                At::Everywhere
            } else {
                At::Row
            };
            self.targets(&[*output], at)
        };
        let all: Vec<String> = outputs.iter().map(one).collect();
        all.join("; ")
    }

    /// Tensors that lanes announce.
    pub(super) fn announced(&self, way: Way) -> impl Iterator<Item = Tensor> + Clone {
        let kind = self.call.kind;
        let reads = kind != FusedKind::AllGather;
        let tensors = self.form.tensors();
        tensors.filter(move |tensor| match tensor {
            Tensor::Input => reads,
            output if way == Way::Gathered => output.is_carried(),
            output => output.is_output() && !output.is_owned(kind),
        })
    }

    fn declarations(&self) -> String {
        let one = |tensor: Tensor| {
            let role = if tensor.is_output() {
                "output"
            } else {
                "input"
            };
            let dtype = match tensor {
                Tensor::Quantized | Tensor::Scale | Tensor::GivenScale | Tensor::GlobalScale => {
                    tensor.dtype(&self.call).name()
                }
                _ => "T",
            };
            let rows = if tensor.is_owned(self.call.kind) {
                "own"
            } else {
                "tokens"
            };
            let quantization = self.call.epilogue.quantization;
            let block = quantization.and_then(Quantization::block);
            let shape = match (tensor, block) {
                (Tensor::Weight | Tensor::Bias, _) => "n".to_owned(),
                (Tensor::GivenScale | Tensor::GlobalScale, _) => "1".to_owned(),
                (Tensor::Quantized, _) if quantization == Some(Quantization::Nvfp4) => {
                    format!("{rows}, (n + 1) / 2")
                }
                (Tensor::Scale, None) => rows.to_owned(),
                (Tensor::Scale, Some(block)) => format!("{rows}, (n + {}) / {block}", block - 1),
                _ => format!("{rows}, n"),
            };
            format!("{role} {}: {dtype}[{shape}]", tensor.name())
        };
        let all: Vec<String> = self.form.tensors().map(one).collect();
        all.join("\n")
    }

    /// A function that returns the values of `outputs`, and the values that it `sends`.
    pub(super) fn function(
        &self,
        name: &str,
        start: &Start,
        outputs: &[Tensor],
        sends: Sends,
    ) -> String {
        let epilogue = &self.call.epilogue;
        let follows = outputs
            .iter()
            .any(|it| matches!(it, Tensor::Output | Tensor::Quantized | Tensor::Scale));
        let mut lines = start.lines.clone();
        let adds = matches!(sends, Sends::Added | Sends::Quantized("h"));
        let adds = adds || follows || outputs.contains(&Tensor::ResidualOut);
        if start.gives == From::Sum && adds {
            let sum = if self.form.has(Tensor::Residual) {
                "x + r"
            } else {
                "x"
            };
            // Rounded to the type before the norm, as separate operations would: the result equals that of the
            // unfused calls.
            lines.push(format!("let h = round({sum}, T)"));
        }
        let quantization = epilogue.quantization.filter(|_| follows);
        let mut largest = None;
        let centred = match epilogue.norm.filter(|_| follows) {
            None => None,
            Some(Norm::Rms) => Some("h"),
            Some(Norm::Layer) => {
                // In two passes: E[h^2] - E[h]^2 would cancel for rows whose mean is large.
                lines.push("let centred = h - row_sum(h) / width".to_owned());
                Some("centred")
            }
        };
        if let Some(row) = centred {
            let weight = if epilogue.weight_bias { "(w + 1)" } else { "w" };
            let bias = if self.form.has(Tensor::Bias) {
                " + v"
            } else {
                ""
            };
            let factor = format!("rsqrt(row_sum({row} * {row}) / width + eps)");
            if quantization == Some(Quantization::PerToken) && bias.is_empty() {
                // The factor is applied to the largest magnitude, not to the elements that it is taken of: so both
                // reductions along the row are made in one exchange.
                lines.push(format!("let factor = {factor}"));
                lines.push(format!("let normal = {row} * factor * {weight}"));
                largest = Some(format!("row_max(abs({row} * {weight})) * factor"));
            } else {
                lines.push(format!("let normal = {row} * {factor} * {weight}{bias}"));
            }
        }
        let normal = if epilogue.norm.is_some() {
            "normal"
        } else {
            "h"
        };
        let largest = largest.unwrap_or_else(|| format!("row_max(abs({normal}))"));
        let scaled = quantization.map(|it| it.scaled(normal, &largest));
        let scaled = scaled.unwrap_or_default();
        lines.extend(scaled.lines);
        let [quantized, scale] = scaled.stored;
        let result = |output: &Tensor| match output {
            Tensor::Sum => "x".to_owned(),
            Tensor::ResidualOut => "h".to_owned(),
            Tensor::Quantized => quantized.clone(),
            Tensor::Scale => scale.clone(),
            _ => normal.to_owned(),
        };
        let mut results: Vec<String> = outputs.iter().map(result).collect();
        match sends {
            Sends::Nothing => {}
            Sends::Added => results.push("h".to_owned()),
            Sends::Quantized(row) => {
                lines.extend(quantize(row, ""));
                results.extend(["q".to_owned(), "e".to_owned()]);
            }
        }
        let parameters = self.parameters_of(start);
        let body = lines
            .iter()
            .map(|line| format!("    {line}\n"))
            .collect::<String>();
        format!(
            "function {name}({parameters}) {{\n{body}    return {}\n}}",
            results.join(", ")
        )
    }

    /// Parameters of a function after the rows that it starts from.
    fn taken(&self, from: From) -> impl Iterator<Item = Tensor> {
        let tensors = self.form.tensors();
        tensors.filter(move |tensor| match tensor {
            // Already added otherwise.
            Tensor::Residual => from == From::Sum,
            Tensor::Weight | Tensor::Bias | Tensor::GivenScale | Tensor::GlobalScale => {
                from != From::SumAlone
            }
            _ => false,
        })
    }

    fn parameters_of(&self, start: &Start) -> String {
        let mut all: Vec<&str> = start.parameters.iter().map(String::as_str).collect();
        for tensor in self.taken(start.taken) {
            match tensor {
                Tensor::Residual => all.push("r"),
                Tensor::Weight => all.extend(["w", "eps"]),
                Tensor::Bias => all.push("v"),
                _ => all.push("s"),
            }
        }
        all.join(", ")
    }

    /// Arguments of a function after the rows that it starts from; the residual's is `row`, of rank `on`.
    pub(super) fn arguments(&self, from: From, row: &str, on: &str) -> String {
        let eps = self.call.epilogue.eps;
        let one = |tensor: Tensor| match tensor {
            Tensor::Residual => format!(", R[{row}]{on}"),
            // In the text as a literal: a program has no float parameters.
            Tensor::Weight => format!(", W, {eps:e}"),
            Tensor::Bias => ", V".to_owned(),
            scale => format!(", {}[0]", scale.name()),
        };
        self.taken(from).map(one).collect()
    }

    /// The rows that the epilogue starts from, of rank `on` if they are gathered.
    fn source(&self, on: &'static str) -> &'static str {
        match (self.call.kind, on) {
            (FusedKind::AllGather, "") => "X[g]",
            // `on` only in expectations: the steps of a lane read their own part.
            (FusedKind::AllGather, _) => "X[g] on k",
            _ => "reduce(X[t] on r for r in 0..world, sum)",
        }
    }

    /// Destinations of `outputs`, one for each result.
    pub(super) fn targets(&self, outputs: &[Tensor], at: At) -> String {
        let one = |output: &Tensor| {
            let name = output.name();
            let owned = output.is_owned(self.call.kind);
            match at {
                At::Row => format!("{name}[t]"),
                At::Owned if owned => format!("{name}[g]"),
                At::OwnedBy => format!("{name}[k * own + g]"),
                At::Everywhere | At::Owned => {
                    // From the own rank on, so that ranks do not all store to rank 0 first.
                    format!("{name}[t] on (rank + r) % world for r in 0..world")
                }
            }
        };
        let all: Vec<String> = outputs.iter().map(one).collect();
        all.join("; ")
    }

    fn announcements(&self, way: Way) -> String {
        let names: Vec<&str> = self.announced(way).map(Tensor::name).collect();
        let rows: &[&str] = if names.len() > ANNOUNCED_AT_ONCE {
            &["2 * i", "2 * i + 1"]
        } else {
            &["i"]
        };
        let mut lines = Vec::new();
        for (names, row) in names.chunks(ANNOUNCED_AT_ONCE).zip(rows) {
            // The row is full. With fewer tensors, announcements have space for more of the call's description.
            let listed = match names.len() {
                1 => "what, length, upper, factor, 0, 0",
                2 => "what, length, upper, factor",
                _ => "form, length",
            };
            for verb in ["announce", "agree"] {
                lines.push(format!(
                    "{verb} {listed} with {} in A[slot][{row}]",
                    names.join(", ")
                ));
            }
        }
        lines.join("\n")
    }

    fn reachable(&self, way: Way) -> String {
        let all: Vec<String> = self
            .announced(way)
            .map(|tensor| format!("reachable({})", tensor.name()))
            .collect();
        all.join(" and ")
    }

    /// The steps for a row of each rank, through scratch.
    fn staged(&self) -> String {
        let place = |of: &str| format!("B[slot][({of}) * row..({of}) * row + n]");
        let mut lines = Vec::new();
        let arguments = self.arguments(From::Sum, "g", "");
        let source = if self.call.kind == FusedKind::AllGather {
            "X[g]".to_owned()
        } else {
            lines.push(format!(
                "for r in 1..world {{ put X[(rank + r) % world * own + g] to {} on (rank + r) % world }}",
                place("inputs + rank")
            ));
            // Puts of all ranks must have arrived before anyone reads its rows of scratch.
            lines.push("barrier".to_owned());
            format!(
                "reduce(X[t] if r == rank else {} for r in 0..world, sum)",
                place("inputs + r")
            )
        };
        if !self.gathers() {
            let outputs: Vec<Tensor> = self.outputs().collect();
            let targets = self.targets(&outputs, At::Owned);
            lines.push(format!("{targets} =\n    epilogue({source}{arguments})"));
            return lines.join("\n");
        }
        let [local, all] = self.local_and_gathered();
        let mut targets = self.targets(&local, At::Owned);
        if !local.is_empty() {
            targets += "; ";
        }
        let added = place("sums + rank");
        lines.push(format!(
            "{targets}{added} on (rank + r) % world for r in 0..world =\n    added({source}{arguments})"
        ));
        lines.push("barrier".to_owned());
        lines.push(format!(
            "for k in 0..world {{\n    {} =\n        finished({}{})\n}}",
            self.targets(&all, At::OwnedBy),
            place("sums + k"),
            self.arguments(From::Added, "", "")
        ));
        lines.join("\n")
    }

    fn in_place(&self) -> String {
        let sources = [Tensor::Input, Tensor::Residual];
        let pairs = sources.into_iter().zip(self.form.in_place);
        let line = |(source, target): (Tensor, Option<Tensor>)| {
            Some(format!("inout {} = {}", source.name(), target?.name()))
        };
        let lines: Vec<String> = pairs.filter_map(line).collect();
        lines.join("\n")
    }

    /// `expect` statements of the outputs if ranks own rows.
    fn expected(&self) -> String {
        let [local, all] = self.local_and_gathered();
        if !self.gathers() {
            return self.expected_own("epilogue", &local, self.source(""));
        }
        let mut lines = Vec::new();
        if !local.is_empty() {
            lines.push(self.expected_own("stored", &local, self.source("")));
        }
        lines.push(self.expected_gathered("gathered", &all, self.source("on k")));
        lines.join("\n")
    }

    /// `expect` statements of the outputs of rows that a rank owns: row g of its own, t of all.
    pub(super) fn expected_own(&self, function: &str, outputs: &[Tensor], source: &str) -> String {
        format!(
            "for g in 0..own {{ let t = rank * own + g; expect {} = {function}({source}{}) }}",
            self.targets(outputs, At::OwnedBy)
                .replace("k * own + g", "g"),
            self.arguments(From::Sum, "g", "")
        )
    }

    /// The same of the rows of every rank k.
    pub(super) fn expected_gathered(
        &self,
        function: &str,
        outputs: &[Tensor],
        source: &str,
    ) -> String {
        format!(
            "for k in 0..world {{ for g in 0..own {{ let t = k * own + g; expect {} = {function}({source}{}) }} }}",
            self.targets(outputs, At::Row),
            self.arguments(From::Sum, "g", " on k")
        )
    }
}
