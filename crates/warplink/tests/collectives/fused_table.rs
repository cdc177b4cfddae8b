//! Every kind of fused call with every norm and quantisation, by every wire format: right within a bound of `f64`, for random
//! and awkward numbers, the same on all ranks, of rows of an odd number of elements, in graphs that are replayed with other
//! inputs each time.

use crate::common::{runs_case, threads_with, worlds};
use crate::data::by;
use crate::fused::play;
use crate::fused_rows::{Made, Wanted, fused};
use crate::scaled::unhurried;
use warplink::DType;
use warplink::collective::{Fused, FusedKind, Norm, Quantization, Wire};

const NORMS: [Option<Norm>; 3] = [None, Some(Norm::Rms), Some(Norm::Layer)];

fn quantizations() -> impl Iterator<Item = Option<Quantization>> {
    std::iter::once(None).chain(Quantization::ALL.map(Some))
}

/// Calls, each of another type than the one before, and with every norm and quantisation of each type.
fn table(ranks: usize) -> Vec<(Fused, Wanted)> {
    let mut all = Vec::new();
    for (kind, wire) in FusedKind::ALL
        .into_iter()
        .flat_map(|kind| Wire::ALL.map(|wire| (kind, wire)))
    {
        for (norm, quantization) in NORMS
            .into_iter()
            .flat_map(|norm| quantizations().map(move |quantization| (norm, quantization)))
        {
            let number = all.len();
            // The rest changes with periods that have no factor in common with one another, with norms and quantisations,
            // and with the cases that run.
            let wanted = Wanted {
                norm,
                bias: norm.is_some() && (number / 16).is_multiple_of(2),
                quantization,
                residual: true,
                sum: number % 11 < 4,
                residual_out: true,
                output: quantization.is_none() || number % 13 < 7,
            };
            let tokens = match kind {
                FusedKind::AllReduce => 3,
                _ => ranks * (1 + number % 17 % 2),
            };
            let call = Fused {
                dtype: DType::MATMUL[(number + number / 21) % 3],
                wire,
                ..fused(kind, tokens, 137, wanted)
            };
            all.push((call, wanted));
        }
    }
    all
}

#[test]
fn every_fused_call_is_right_however_often_it_is_replayed() {
    for ranks in worlds([1, 2, 3, 8]) {
        threads_with(ranks, unhurried, |comm| {
            let collectives = by(comm, None, 2 << 20);
            for (number, of) in table(ranks).into_iter().enumerate() {
                // Many ranks keep a small machine busy.
                if ranks != 2 && number % 5 != ranks % 5 {
                    continue;
                }
                // Not 7, which would leave out all calls with a quantisation.
                if !runs_case(number, 8) {
                    continue;
                }
                let made = Made::new(comm, of, number % 19 < 10);
                let replays = if ranks == 2 && number % 9 == 0 { 40 } else { 4 };
                play(comm, &collectives, &made, replays);
            }
        });
    }
}
