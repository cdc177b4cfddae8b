//! Parts of program texts whose rows travel as 8-bit floats with scales.

use super::memory::Tensor;
use super::program::{At, From, Sends, Start};
use super::{Described, FusedKind, QUANTIZED_BLOCK};
use crate::collective::choice::Machine;
use std::fmt::Write as _;

/// The maximum elements of a row of scratch, and the bytes of scales, are derived from these in the text.
const ROW_UNIT: usize = 64;
const SCALE_BYTES: usize = 4;

/// The largest finite `f32`.
pub(super) const LARGEST: &str = "3.4028235e38";

/// The smallest scale: a normal number, so that elements can be divided by it.
pub(super) const LEAST_SCALE: &str = "1.1754944e-38";

/// Lines that quantise `value`: results named `q` and `e`, with the suffix `of`.
pub(super) fn quantize(value: &str, of: &str) -> [String; 3] {
    [
        format!("let finite{of} = select(abs({value}) <= {LARGEST}, abs({value}), 0)"),
        format!("let e{of} = max(block_max(finite{of}, {QUANTIZED_BLOCK}) / 448, {LEAST_SCALE})"),
        // An infinity becomes NaN, and does not affect the scale.
        format!(
            "let q{of} = select(abs({value}) <= {LARGEST}, {value} / e{of}, {value} - {value})"
        ),
    ]
}

/// Lines that compute, as `name`, the value of `value` after its transport.
fn arrived(name: &str, value: &str, of: &str) -> Vec<String> {
    let mut lines = quantize(value, of).to_vec();
    lines.push(format!("let {name} = round(q{of}, f8e4m3) * e{of}"));
    lines
}

/// The sum of `term`, for each of `world` ranks.
fn added(name: &str, world: usize, term: fn(usize) -> String) -> String {
    let terms: Vec<String> = (0..world).map(term).collect();
    format!("let {name} = {}", terms.join(" + "))
}

impl Start {
    /// Rows of all ranks, with their scales.
    fn parts(world: usize) -> Self {
        let parameters = (0..world).map(|k| format!("q{k}, e{k} by {QUANTIZED_BLOCK}"));
        Self {
            parameters: parameters.collect(),
            lines: vec![added("x", world, |k| format!("q{k} * e{k}"))],
            ..Self::of(From::Sum)
        }
    }

    /// Inputs of all ranks, whose sum is `name`, each rounded as by its transport.
    fn inputs(world: usize, name: &str) -> Self {
        let one = |k: usize| arrived(&format!("y{k}"), &format!("x{k}"), &k.to_string());
        let mut lines: Vec<String> = (0..world).flat_map(one).collect();
        lines.push(added(name, world, |k| format!("y{k}")));
        Self {
            parameters: (0..world).map(|k| format!("x{k}")).collect(),
            lines,
            ..Self::of(From::Sum)
        }
    }

    /// A function of a row with its scales, whose result `line` computes.
    fn arrived(from: From, line: &str) -> Self {
        Self {
            // Values travel without their scale, which is one per block and multiplied on arrival.
            parameters: vec!["q".to_owned(), format!("e by {QUANTIZED_BLOCK}")],
            lines: vec![line.to_owned()],
            ..Self::of(from)
        }
    }
}

impl Described {
    /// Rows of scratch that fit into half of the workspace.
    pub(in crate::collective) fn quantized_rows(&self, machine: &Machine) -> usize {
        let width = self.call.width;
        let row = width.next_multiple_of(ROW_UNIT);
        machine.plain_bytes / (row + SCALE_BYTES * width.div_ceil(QUANTIZED_BLOCK))
    }

    /// The functions of a call of `world` ranks: for sent rows, owned rows and all rows, and the expected outputs.
    pub(super) fn quantized_functions(&self, world: usize) -> Vec<String> {
        let outputs: Vec<Tensor> = self.outputs().collect();
        let [local, all] = self.local_and_gathered();
        let of = |name: &str, start: &Start, outputs: &[Tensor], sends: Sends| {
            self.function(name, start, outputs, sends)
        };
        let (parts, inputs) = if self.reduces() {
            (Start::parts(world), Start::inputs(world, "x"))
        } else {
            (Start::of(From::Sum), Start::of(From::Sum))
        };
        let mut functions = Vec::new();
        if self.reduces() {
            let alone = Start::of(From::SumAlone);
            functions.push(of("sent", &alone, &[], Sends::Quantized("x")));
        }
        match self.call.kind {
            FusedKind::ReduceScatter => {
                functions.push(of("reduced", &parts, &outputs, Sends::Nothing));
                functions.push(of("meant", &inputs, &outputs, Sends::Nothing));
            }
            FusedKind::AllReduce => {
                let alone = Start {
                    gives: From::SumAlone,
                    taken: From::SumAlone,
                    ..parts
                };
                functions.push(of("reduced", &alone, &[], Sends::Quantized("x")));
                // Also on the rank that has the exact sum: all ranks compute from what was sent, so that results are
                // bit-identical.
                let finished = Start::arrived(From::Sum, "let x = q * e");
                functions.push(of("finished", &finished, &all, Sends::Nothing));
                let mut meant = Start::inputs(world, "y");
                meant.lines.extend(arrived("x", "y", ""));
                functions.push(of("meant", &meant, &all, Sends::Nothing));
            }
            FusedKind::AllReduceSharded | FusedKind::AllGather => {
                functions.push(of("reduced", &parts, &local, Sends::Quantized("h")));
                let finished = Start::arrived(From::Added, "let h = round(q * e, T)");
                functions.push(of("finished", &finished, &all, Sends::Nothing));
                if !local.is_empty() {
                    functions.push(of("stored", &inputs, &local, Sends::Nothing));
                }
                let mut meant = inputs;
                let sum = if self.form.has(Tensor::Residual) {
                    "x + r"
                } else {
                    "x"
                };
                meant.lines.push(format!("let y = round({sum}, T)"));
                meant.lines.extend(arrived("z", "y", ""));
                meant.lines.push("let h = round(z, T)".to_owned());
                meant.gives = From::Added;
                functions.push(of("meant", &meant, &all, Sends::Nothing));
            }
        }
        functions
    }

    /// Whether inputs are summed.
    const fn reduces(&self) -> bool {
        !matches!(self.call.kind, FusedKind::AllGather)
    }

    /// A row's location in scratch, followed by its scales; `on` a rank.
    fn cells(place: &str, on: &str, with: &str) -> String {
        format!(
            "B[slot][({place}) * row..({place}) * row + n]{on}{with}E[slot][({place}) * blocks..({place}) * blocks + blocks]{on}"
        )
    }

    /// The steps that send inputs to the owners of their rows.
    pub(super) fn sent(&self) -> String {
        if !self.reduces() {
            return "# Rows stay where they are until they are computed.".to_owned();
        }
        let targets = Self::cells("inputs + d * world + rank", " on q", "; ");
        format!(
            "for d in 0..deep {{\n    let g = i + (c * deep + d) * each\n    for r in 0..world {{\n        \
             let q = (rank + r) % world\n        let t = q * own + g\n        if g < own and t < tokens {{\n            \
             {targets} =\n                sent(X[t])\n        }}\n    }}\n}}"
        )
    }

    /// The step for an owned row.
    pub(super) fn reduced(&self, world: usize) -> String {
        let source = if self.reduces() {
            let parts = (0..world)
                .map(|rank| Self::cells(&format!("inputs + d * world + {rank}"), "", ", "));
            parts.collect::<Vec<_>>().join(", ")
        } else {
            "X[g]".to_owned()
        };
        let mut targets = Vec::new();
        if self.call.kind == FusedKind::ReduceScatter {
            targets.push(self.targets(&self.outputs().collect::<Vec<_>>(), At::Owned));
        } else {
            let [local, _] = self.local_and_gathered();
            if !local.is_empty() {
                targets.push(self.targets(&local, At::Owned));
            }
            let everywhere = " on (rank + r) % world for r in 0..world";
            targets.push(Self::cells("sums + d * world + rank", everywhere, "; "));
        }
        let arguments = self.arguments(self.others()[0], "g", "");
        format!("{} =\n    reduced({source}{arguments})", targets.join("; "))
    }

    /// Starting points that determine the functions' other tensor parameters: for an owned row, and for a received
    /// one.
    const fn others(&self) -> [From; 2] {
        match self.call.kind {
            FusedKind::AllReduce => [From::SumAlone, From::Sum],
            _ => [From::Sum, From::Added],
        }
    }

    /// The steps for all rows, from the received sums.
    pub(super) fn finished(&self) -> String {
        if self.call.kind == FusedKind::ReduceScatter {
            return "# What is computed of a row stays with its owner.".to_owned();
        }
        let [_, all] = self.local_and_gathered();
        let mut text = String::from(
            "for d in 0..deep {\n    let g = i + (c * deep + d) * each\n    for k in 0..world {\n        \
             let t = k * own + g\n        if g < own and t < tokens {\n            ",
        );
        let _ = write!(
            text,
            "{} =\n                finished({}{})\n        }}\n    }}\n}}",
            self.targets(&all, At::Row),
            Self::cells("sums + d * world + k", "", ", "),
            self.arguments(self.others()[1], "t", "")
        );
        text
    }

    /// `expect` statements of the outputs.
    pub(super) fn quantized_expected(&self, world: usize) -> String {
        let inputs: Vec<String> = (0..world).map(|k| format!("X[t] on {k}")).collect();
        let inputs = inputs.join(", ");
        let [own, gathered] = if self.reduces() {
            [&*inputs; 2]
        } else {
            ["X[g]", "X[g] on k"]
        };
        let [local, all] = self.local_and_gathered();
        let mut lines = match self.call.kind {
            FusedKind::ReduceScatter => return self.expected_own("meant", &local, own),
            FusedKind::AllReduce => vec![format!(
                "for t in 0..tokens {{ expect {} = meant({inputs}{}) }}",
                self.targets(&all, At::Row),
                self.arguments(From::Sum, "t", "")
            )],
            FusedKind::AllReduceSharded | FusedKind::AllGather => {
                vec![self.expected_gathered("meant", &all, gathered)]
            }
        };
        if !local.is_empty() {
            lines.push(self.expected_own("stored", &local, own));
        }
        lines.join("\n")
    }
}
