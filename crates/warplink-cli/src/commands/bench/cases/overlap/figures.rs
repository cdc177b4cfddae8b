//! The figures of all shapes, as tables and as bars.

use super::measure::{OverlapRow, ShapeTimes, Submitted};
use crate::commands::bench::plot::{BASELINE, Bar, Bars, CHOSEN, OWN, PEER};
use crate::commands::bench::report::or_empty;
use crate::gemm::Problem;
use crate::report::table::{Align, Table};

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
        let mut table = Table::new([
            ("", Align::Left),
            ("eager (us)", Align::Right),
            ("captured (us)", Align::Right),
            ("least (us)", Align::Right),
            ("most (us)", Align::Right),
            ("TFLOP/s", Align::Right),
            ("of GEMM", Align::Right),
            ("over link", Align::Right),
            ("x collective", Align::Right),
            ("error", Align::Right),
            ("estimate (us)", Align::Right),
            ("", Align::Left),
        ]);
        let micros = |seconds: f64| format!("{:.1}", seconds * 1e6);
        let times = |name: &str, times: &Submitted, of_gemm: f64| {
            let faster = if times.captured.median <= times.eager.median {
                times.captured
            } else {
                times.eager
            };
            vec![
                name.to_owned(),
                micros(times.eager.median),
                micros(times.captured.median),
                micros(faster.least),
                micros(faster.most),
                format!("{:.1}", self.flops / times.best() / 1e12),
                format!("{of_gemm:.3}"),
            ]
        };
        let chunks = &self.compute_chunks;
        table.row(times("GEMM alone", &self.compute, 1.0));
        let of_gemm = self.compute.best() / chunks.best();
        table.row(times("in chunks", chunks, of_gemm));
        table.row([
            "link alone".to_owned(),
            String::new(),
            micros(self.link_limit),
        ]);
        for row in &self.lowerings {
            let mark = if row.chosen { " *" } else { "" };
            let name = format!("{}{mark}", row.lowering);
            let mut cells = times(&name, &row.times, row.of_compute);
            cells.push(format!("{:.3}", row.over_link));
            cells.push(or_empty(row.over_collective, |times| format!("{times:.3}")));
            let verdict = if row.right { "" } else { " WRONG" };
            cells.push(format!("{:.1e}{verdict}", row.error));
            cells.push(micros(row.expected));
            cells.push(row.parameters.clone());
            table.row(cells);
        }
        format!("{op}, m {m}, k {k}, n {n}, {dtype}\n{table}")
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
