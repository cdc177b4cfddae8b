//! Random programs in the simulation of their cost: what the verifier accepts finishes, and slower
//! machines take longer.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod program_support;

use program_support::sample::{Allowed, sample};
use warplink::ErrorKind;
use warplink::program::cost::find::all_shipped;
use warplink::program::cost::{HardwareModel, SimulateOptions, Submission, simulate_with};
use warplink::program::{RankProgram, unroll, verify};

/// The sample of a seed for all ranks, if the verifier accepts it.
fn accepted(seed: u64) -> Option<Vec<RankProgram>> {
    let sample = sample(seed, Allowed::default()).ok()?;
    let (world, streams) = (sample.world, sample.streams);
    verify(&sample.program, world, streams, &sample.parameters).ok()?;
    let rank = |rank| unroll(&sample.program, rank, world, streams, &sample.parameters).unwrap();
    Some((0..world).map(rank).collect())
}

/// A machine that is slower at everything by one factor.
fn slower(model: &HardwareModel, factor: f64) -> HardwareModel {
    let mut slower = model.clone();
    let slow = &mut slower;
    for rate in [
        &mut slow.memory.rate,
        &mut slow.memory.sum_rate,
        &mut slow.link.put_ring,
        &mut slow.link.get_ring,
        &mut slow.link.put_rotated,
        &mut slow.link.get_rotated,
        &mut slow.link.stored,
    ] {
        *rate /= factor;
    }
    for seconds in [
        &mut slow.memory.kernel,
        &mut slow.latency.word,
        &mut slow.latency.more_words,
        &mut slow.latency.kernel_word,
        &mut slow.latency.event,
        &mut slow.latency.launch,
        &mut slow.latency.room,
        &mut slow.latency.captured_copy,
        &mut slow.latency.collective,
        &mut slow.host.matmul,
        &mut slow.host.sum,
        &mut slow.host.copy,
        &mut slow.host.transfer,
        &mut slow.host.word,
        &mut slow.host.event,
        &mut slow.host.collective,
        &mut slow.host.graph,
    ] {
        *seconds *= factor;
    }
    let link = &mut slow.link;
    let curves = [
        &mut slow.memory.copy,
        &mut link.kernel_put,
        &mut link.kernel_get,
        &mut link.kernels_put,
        &mut link.kernels_get,
        &mut link.put,
        &mut link.get,
    ];
    let collectives = slow.collectives.0.iter_mut().map(|times| &mut times.times);
    for curve in curves.into_iter().chain(collectives) {
        curve.0.iter_mut().for_each(|point| point.1 *= factor);
    }
    for grid in &mut slow.gemm.grids {
        grid.seconds.iter_mut().for_each(|time| *time *= factor);
    }
    slower
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
        let (world, streams) = (sample.world, sample.streams);
        let rank = |rank| unroll(&sample.program, rank, world, streams, &sample.parameters);
        let Ok(ranks) = (0..world).map(rank).collect::<Result<Vec<_>, _>>() else {
            continue;
        };
        if let Err(error) = simulate_with(&ranks, model, SimulateOptions::default()) {
            assert_eq!(error.kind(), ErrorKind::Verification);
            let verdict = verify(&sample.program, world, streams, &sample.parameters);
            assert!(verdict.is_err(), "seed {seed}\n{}", sample.text);
            stuck += 1;
        }
    }
    assert!(stuck > 10, "few samples are stuck: {stuck}");
}
