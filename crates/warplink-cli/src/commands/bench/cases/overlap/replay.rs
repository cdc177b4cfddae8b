//! `bench overlap --replay`: the cost model's choices today for shapes that were measured before, to judge
//! a change of the model or the simulation without the machine.

use super::measure::{COLLECTIVE, Submitted};
use crate::gemm::Problem;
use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use warplink::file::read_text;
use warplink::overlap::DEFAULT_STREAMS;
use warplink::program::cost::HardwareModel;

/// The longest report that is read; one of 1,000 shapes has 10 MiB.
const MAX_REPORT_BYTES: usize = 256 << 20;

/// A report that `bench overlap --output` wrote.
#[derive(Deserialize)]
struct Measured {
    ranks: usize,
    shapes: Vec<ReplayShape>,
}

/// The keys of a shape that are used here; others may have no value.
#[derive(Deserialize)]
struct ReplayShape {
    #[serde(flatten)]
    problem: Problem,
    lowerings: Vec<ReplayRow>,
}

#[derive(Deserialize)]
struct ReplayRow {
    lowering: String,
    parameters: String,
    times: Submitted,
}

/// Today's choices.
#[derive(Serialize)]
pub(super) struct Replay {
    benchmark: &'static str,
    /// The report whose shapes these are.
    replay: PathBuf,
    model: String,
    ranks: usize,
    shapes: Vec<Replayed>,
}

/// A shape whose chosen lowering was measured.
#[derive(Serialize)]
struct Replayed {
    #[serde(flatten)]
    problem: Problem,
    choice: String,
    /// The fastest time over the chosen lowering's.
    of_best: f64,
    /// The collective's time over the chosen lowering's.
    #[serde(skip_serializing_if = "Option::is_none")]
    over_collective: Option<f64>,
    /// For people, where the choice is not among the best.
    #[serde(skip)]
    text: String,
}

impl Replay {
    /// The shapes whose choice is not among the best, and the quality of all choices.
    pub(super) fn text(&self) -> String {
        let shapes = || self.shapes.iter();
        let text: String = shapes().map(|shape| shape.text.as_str()).collect();
        let of_best: Vec<f64> = shapes().map(|shape| shape.of_best).collect();
        let over: Vec<f64> = shapes().filter_map(|shape| shape.over_collective).collect();
        text + &super::figures::judgement(&of_best, &over)
    }
}

/// Chooses anew for every shape in `file`.
pub(super) fn replay(file: &Path, model: &HardwareModel) -> Result<Replay> {
    let text = read_text(file, MAX_REPORT_BYTES)?;
    let measured: Measured = serde_json::from_str(&text)
        .with_context(|| format!("{} is not a report of bench overlap", file.display()))?;
    let mut shapes = Vec::new();
    for shape in &measured.shapes {
        let problem = shape.problem;
        let choice = problem.choose(measured.ranks, DEFAULT_STREAMS, model)?;
        let row = |name: &str| shape.lowerings.iter().find(|row| row.lowering == name);
        // A lowering that was not measured cannot be judged.
        let Some(chosen) = row(choice.name()) else {
            continue;
        };
        let best = shape.lowerings.iter().map(|row| row.times.best());
        let of_best = best.fold(f64::INFINITY, f64::min) / chosen.times.best();
        let over_collective = row(COLLECTIVE).map(|row| row.times.best() / chosen.times.best());
        let is_good = of_best >= 0.95 && over_collective.is_none_or(|ratio| ratio >= 0.97);
        let mut text = String::new();
        if !is_good {
            text += &format!("\n{}: {of_best:.3} of the fastest\n", choice.subject);
        }
        for row in shape.lowerings.iter().filter(|_| !is_good) {
            let estimate = choice
                .estimates
                .iter()
                .find(|estimate| estimate.name() == row.lowering);
            let mark = if row.lowering == choice.name() {
                " *"
            } else {
                ""
            };
            text += &format!(
                "  {:12} {:9.1} eager {:9.1} captured, expected {:9.1} and {:9.1}{mark}  measured {}, expected {}\n",
                row.lowering,
                row.times.eager.median * 1e6,
                row.times.captured.median * 1e6,
                estimate.map_or(f64::NAN, |estimate| estimate.expected.eager * 1e6),
                estimate.map_or(f64::NAN, |estimate| estimate.expected.captured * 1e6),
                row.parameters,
                estimate.map_or_else(String::new, |estimate| estimate.chosen.to_string())
            );
        }
        shapes.push(Replayed {
            problem,
            choice: choice.name().to_owned(),
            of_best,
            over_collective,
            text,
        });
    }
    Ok(Replay {
        benchmark: "overlap",
        replay: file.to_owned(),
        model: model.name.clone(),
        ranks: measured.ranks,
        shapes,
    })
}
