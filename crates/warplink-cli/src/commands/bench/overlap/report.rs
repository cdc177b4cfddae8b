//! The figures as text.

use super::Report;
use super::measure::{Figures, Submitted};
use crate::gemm::Problem;
use crate::report::counted;
use crate::report::table::{Align, Table};

/// The share of the fastest lowering's speed that a good choice reaches.
const CLOSE: f64 = 0.95;

impl Report {
    /// Whether every lowering computed what it should.
    pub(super) fn is_right(&self) -> bool {
        self.shapes
            .iter()
            .flat_map(|shape| &shape.lowerings)
            .all(|row| row.right)
    }

    pub(super) fn text(&self) -> String {
        let mut text = format!("{} on {}", counted(self.ranks, "rank"), self.device);
        if let Some(nccl) = &self.nccl {
            text += &format!(", beside {nccl}");
        }
        text += &format!("; {}, ", counted(self.samples, "sample"));
        if let Some(streams) = self.streams {
            text += &format!("{}, ", counted(streams, "stream"));
        }
        text += &format!("link {:.1} GB/s\n", self.link);
        for shape in &self.shapes {
            text += &shape.text();
        }
        text + &self.choices()
    }

    /// How good the choices were, over all shapes.
    fn choices(&self) -> String {
        let of_best: Vec<f64> = self.shapes.iter().filter_map(Figures::of_best).collect();
        let over: Vec<f64> = self
            .shapes
            .iter()
            .filter_map(|shape| shape.chosen()?.over_collective)
            .collect();
        let modelled: Vec<f64> = self
            .shapes
            .iter()
            .filter_map(Figures::model_of_best)
            .collect();
        let close = modelled.iter().filter(|&&ratio| ratio >= CLOSE).count();
        let mut text = judgement(&of_best, &over);
        if !modelled.is_empty() {
            text += &format!(
                "Without trials, by the cost model alone, it would be within 5 % on {close}.\n"
            );
        }
        text
    }
}

/// How good choices were: the fastest time over the chosen one's, and the collective's over it.
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

impl Figures {
    fn text(&self) -> String {
        let Problem {
            op, m, k, n, dtype, ..
        } = self.problem;
        let mut table = Table::new([
            ("", Align::Left),
            ("eager (us)", Align::Right),
            ("captured (us)", Align::Right),
            ("least", Align::Right),
            ("most", Align::Right),
            ("TFLOP/s", Align::Right),
            ("of GEMM", Align::Right),
            ("over link", Align::Right),
            ("x collective", Align::Right),
            ("error", Align::Right),
            ("expected", Align::Right),
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
            cells.push(
                row.over_collective
                    .map_or_else(String::new, |times| format!("{times:.3}")),
            );
            let verdict = if row.right { "" } else { " WRONG" };
            cells.push(format!("{:.1e}{verdict}", row.error));
            cells.push(micros(row.expected));
            cells.push(row.parameters.clone());
            table.row(cells);
        }
        format!("\n{op}, m {m}, k {k}, n {n}, {dtype}\n{table}")
    }
}
