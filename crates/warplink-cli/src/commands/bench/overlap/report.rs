//! The figures as text.

use super::Report;
use super::measure::{Figures, Submitted};
use crate::gemm::Problem;
use crate::report::table::{Align, Table};

impl Report {
    /// Whether every variant computed what it should.
    pub(super) fn is_right(&self) -> bool {
        self.shapes
            .iter()
            .flat_map(|shape| &shape.variants)
            .all(|row| row.right)
    }

    pub(super) fn text(&self) -> String {
        let mut text = format!("{} ranks on {}", self.ranks, self.device);
        if let Some(nccl) = &self.nccl {
            text += &format!(", beside {nccl}");
        }
        text += &format!("; {} samples, ", self.samples);
        if let Some(streams) = self.streams {
            text += &format!("{streams} streams, ");
        }
        text += &format!("link {} GB/s\n", self.link);
        for shape in &self.shapes {
            text += &shape.text();
        }
        text
    }
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
        for row in &self.variants {
            let mark = if row.chosen { " *" } else { "" };
            let name = format!("{}{mark}", row.variant);
            let mut cells = times(&name, &row.times, row.of_compute);
            cells.push(format!("{:.3}", row.over_link));
            cells.push(
                row.over_collective
                    .map_or_else(String::new, |times| format!("{times:.3}")),
            );
            let verdict = if row.right { "" } else { " WRONG" };
            cells.push(format!("{:.1e}{verdict}", row.error));
            table.row(cells);
        }
        format!("\n{op}, m {m}, k {k}, n {n}, {dtype}\n{table}")
    }
}
