//! `bench overlap --replay`: the cost model's choices today for shapes that were measured before, to judge
//! a change of the model or the simulation without the machine.

use super::figures::judgement;
use super::measure::Submitted;
use crate::gemm::{COLLECTIVE, Problem};
use crate::report::Object;
use anyhow::{Context, Result};
use serde::Deserialize;
use std::path::Path;
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

/// Chooses anew for every shape in `file`. Returns the choices as JSON; and as text those that are not among the best,
/// with the quality of all.
pub(super) fn replay(file: &Path, model: &HardwareModel) -> Result<(Object, String)> {
    let text = read_text(file, MAX_REPORT_BYTES)?;
    let measured: Measured = serde_json::from_str(&text)
        .with_context(|| format!("{} is not a report of bench overlap", file.display()))?;
    let (mut shapes, mut text) = (Vec::new(), String::new());
    let (mut all_of_best, mut all_over) = (Vec::new(), Vec::new());
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
            let chosen = estimate.map_or_else(String::new, |estimate| estimate.chosen.to_string());
            // Some lowerings have no parameters.
            let parameters = if row.parameters.is_empty() && chosen.is_empty() {
                String::new()
            } else {
                format!("  measured {}, expected {chosen}", row.parameters)
            };
            text += &format!(
                "  {:12} {:9.1} us eager {:9.1} us captured, expected {:9.1} and {:9.1} us{mark}{parameters}\n",
                row.lowering,
                row.times.eager.median * 1e6,
                row.times.captured.median * 1e6,
                estimate.map_or(f64::NAN, |estimate| estimate.expected.eager * 1e6),
                estimate.map_or(f64::NAN, |estimate| estimate.expected.captured * 1e6),
            );
        }
        all_of_best.push(of_best);
        all_over.extend(over_collective);
        let object = problem
            .add_to(Object::default())
            .key("choice", choice.name())
            .key("of_best", of_best)
            .optional("over_collective", over_collective);
        shapes.push(object);
    }
    let object = Object::default()
        .key("benchmark", "overlap")
        .key("replay", file)
        .key("model", &model.name)
        .key("ranks", measured.ranks)
        .objects("shapes", shapes);
    Ok((object, text + &judgement(&all_of_best, &all_over)))
}
