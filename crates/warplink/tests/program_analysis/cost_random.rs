//! Random programs in the simulation of their cost: what the verifier accepts finishes, and slower
//! machines take longer.

use crate::program_support::machine::slower;
use crate::program_support::sample::{Allowed, sample};
use warplink::ErrorKind;
use warplink::program::RankProgram;
use warplink::program::cost::find::all_shipped;
use warplink::program::cost::{SimulateOptions, Submission, simulate_with};

/// The sample of a seed for all ranks, if the verifier accepts it.
fn accepted(seed: u64) -> Option<Vec<RankProgram>> {
    let sample = sample(seed, Allowed::default()).ok()?;
    sample.verdict().ok()?;
    let ranks = (0..sample.world).map(|rank| sample.of_rank(rank).unwrap());
    Some(ranks.collect())
}

#[test]
fn what_the_verifier_accepts_finishes_in_proportion_to_the_machine() {
    const FACTOR: f64 = 3.0;
    let mut count = 0;
    for seed in 0..800 {
        let Some(ranks) = accepted(seed) else {
            continue;
        };
        count += 1;
        for model in all_shipped() {
            for submission in [Submission::Eager, Submission::Captured] {
                let options = SimulateOptions {
                    submission,
                    timeline: true,
                };
                let cost = simulate_with(&ranks, model, options)
                    .unwrap_or_else(|error| panic!("seed {seed}: {error}"));
                let whole = cost.critical.seconds() / cost.seconds;
                assert!(
                    cost.seconds == 0.0 || (whole - 1.0).abs() < 1e-6,
                    "seed {seed}: {cost}"
                );
                for span in &cost.timeline {
                    assert!(span.start <= span.end && span.end <= cost.seconds * (1.0 + 1e-9));
                }
                let slow = simulate_with(&ranks, &slower(model, FACTOR), options).unwrap();
                let ratio = slow.seconds / cost.seconds;
                assert!(
                    cost.seconds == 0.0 || (ratio / FACTOR - 1.0).abs() < 1e-3,
                    "seed {seed}: {ratio} times as long"
                );
            }
        }
    }
    assert!(count > 100, "few samples are accepted: {count}");
}

#[test]
fn what_is_stuck_in_the_simulation_is_refused_by_the_verifier() {
    let model = &all_shipped()[0];
    let mut stuck = 0;
    for seed in 0..2000 {
        let Ok(sample) = sample(seed, Allowed::default()) else {
            continue;
        };
        let ranks = (0..sample.world).map(|rank| sample.of_rank(rank));
        let Ok(ranks) = ranks.collect::<Result<Vec<_>, _>>() else {
            continue;
        };
        if let Err(error) = simulate_with(&ranks, model, SimulateOptions::default()) {
            assert_eq!(error.kind(), ErrorKind::Verification);
            assert!(sample.verdict().is_err(), "seed {seed}\n{}", sample.text);
            stuck += 1;
        }
    }
    assert!(stuck > 10, "few samples are stuck: {stuck}");
}
