//! The figures of all shapes, as tables and as bars.

use super::measure::{OverlapRow, ShapeTimes, Submitted};
use crate::commands::bench::plot::{BASELINE, Bar, Bars, CHOSEN, OWN, PEER};
use crate::commands::bench::report::{Row, table};
use crate::gemm::Problem;

/// The share of the fastest lowering's speed that a good choice reaches.
const CLOSE: f64 = 0.95;

/// The tables of all shapes, and the quality of their choices.
pub(super) fn tables(shapes: &[ShapeTimes]) -> String {
    let tables: Vec<String> = shapes.iter().map(ShapeTimes::text).collect();
    let of_best: Vec<f64> = shapes.iter().filter_map(ShapeTimes::of_best).collect();
    let over = shapes
        .iter()
        .filter_map(|shape| shape.chosen()?.over_collective);
    let over: Vec<f64> = over.collect();
    let modelled: Vec<f64> = shapes
        .iter()
        .filter_map(ShapeTimes::model_of_best)
        .collect();
    let close = modelled.iter().filter(|&&ratio| ratio >= CLOSE).count();
    let mut text = tables.join("\n") + &judgement(&of_best, &over);
    if !modelled.is_empty() {
        text += &format!(
            "Without trials, by the cost model alone, it would be within 5 % on {close}.\n"
        );
    }
    text
}

/// The quality of choices: the fastest time over the chosen one's, and the collective's over it.
pub(super) fn judgement(of_best: &[f64], over_collective: &[f64]) -> String {
    let least = |values: &[f64]| values.iter().copied().fold(f64::INFINITY, f64::min);
    let mut text = String::new();
    if !of_best.is_empty() {
        let close = of_best.iter().filter(|&&ratio| ratio >= CLOSE).count();
        text += &format!(
            "\nThe chosen lowering is within 5 % of the fastest on {close} of {} shapes; at worst it \
             reaches {:.3} of it.\n",
            of_best.len(),
            least(of_best)
        );
    }
    if !over_collective.is_empty() {
        let ahead = over_collective
            .iter()
            .filter(|&&ratio| ratio >= 0.97)
            .count();
        text += &format!(
            "It is at least 0.97 as fast as the collective on {ahead} of {} shapes; at worst {:.3}.\n",
            over_collective.len(),
            least(over_collective)
        );
    }
    text
}

impl ShapeTimes {
    fn text(&self) -> String {
        let Problem {
            op, m, k, n, dtype, ..
        } = self.problem;
        let micros = |seconds: f64| format!("{:.1}", seconds * 1e6);
        let times = |name: &str, times: &Submitted, of_gemm: f64| {
            let faster = if times.captured.median <= times.eager.median {
                times.captured
            } else {
                times.eager
            };
            let rate = self.flops / times.best() / 1e12;
            Row::of("")
                .words("", name)
                .number("eager (us)", micros(times.eager.median))
                .number("captured (us)", micros(times.captured.median))
                .number("least (us)", micros(faster.least))
                .number("most (us)", micros(faster.most))
                .number("TFLOP/s", format!("{rate:.1}"))
                .number("of GEMM", format!("{of_gemm:.3}"))
        };
        let (link, chunks) = (self.link_limit, &self.compute_chunks);
        let link = Row::of("")
            .words("", "link alone")
            .number("captured (us)", micros(link));
        let mut rows = vec![
            times("GEMM alone", &self.compute, 1.0),
            times("in chunks", chunks, self.compute.best() / chunks.best()),
            link,
        ];
        rows.extend(self.lowerings.iter().map(|row| {
            let mark = if row.chosen { " *" } else { "" };
            let verdict = if row.right { "" } else { " WRONG" };
            let name = format!("{}{mark}", row.lowering);
            times(&name, &row.times, row.of_compute)
                .number_or_empty("over link", row.over_link, |times| format!("{times:.3}"))
                .number_or_empty("x collective", row.over_collective, |times| {
                    format!("{times:.3}")
                })
                .number("error", format!("{:.1e}{verdict}", row.error))
                .number("estimate (us)", micros(row.expected))
                // Not as the first column, which has no heading either.
                .words(" ", &row.parameters)
        }));
        format!("{op}, m {m}, k {k}, n {n}, {dtype}\n{}", table(&rows))
    }

    /// The rates of the GEMM alone and of the lowerings.
    pub(super) fn bars(&self) -> Bars {
        let Problem {
            op, m, k, n, dtype, ..
        } = self.problem;
        let rate = |seconds: f64| self.flops / seconds / 1e12;
        let alone = [
            ("GEMM alone", &self.compute),
            ("GEMM in chunks", &self.compute_chunks),
        ];
        let alone = alone.map(|(label, times)| Bar {
            label: label.to_owned(),
            value: rate(times.best()),
            colour: BASELINE,
        });
        let collective = self.collective().map(|row| &row.lowering);
        let fastest = self.fastest().map(|row| &row.lowering);
        let lowering = |row: &OverlapRow| {
            let is_fastest = Some(&row.lowering) == fastest;
            let mark = |is: bool, text| if is { text } else { "" };
            let label =
                row.lowering.clone() + mark(is_fastest, ", fastest") + mark(row.chosen, ", chosen");
            Bar {
                label,
                value: rate(row.times.best()),
                colour: match row {
                    // It keeps its colour if it is chosen, which the label shows.
                    _ if Some(&row.lowering) == collective => PEER,
                    row if row.chosen => CHOSEN,
                    _ => OWN,
                },
            }
        };
        let bound = if self.link_limit > self.compute.best() {
            "the link"
        } else {
            "the GEMM"
        };
        Bars {
            title: format!("{op}: m {m}, k {k}, n {n}, {dtype}"),
            unit: "TFLOP/s",
            bars: alone
                .into_iter()
                .chain(self.lowerings.iter().map(lowering))
                .collect(),
            limit: Some((rate(self.limit()), bound)),
        }
    }
}
