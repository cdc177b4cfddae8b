//! Random programs: the verifier's word against what happens when their hosts and streams take
//! steps in random orders, twice in a row.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod program_support;

use program_support::interpreter::{End, Submission, play};
use program_support::sample::{Allowed, sample};
use proptest::prelude::*;
use std::collections::BTreeMap;
use warplink::program::{DiagnosticKind, unroll, verify};

#[test]
fn right_samples_pass_and_changed_ones_fail_in_many_ways() {
    let mut verdicts: BTreeMap<String, usize> = BTreeMap::new();
    for seed in 0..4000 {
        let sample = sample(seed, Allowed::default()).unwrap();
        let verdict = verify(
            &sample.program,
            sample.world,
            sample.streams,
            &sample.parameters,
        );
        if let (0, Err(diagnostics)) = (sample.changes, &verdict) {
            panic!(
                "seed {seed} is refused: {}\n{}",
                diagnostics[0], sample.text
            );
        }
        let name = match verdict {
            Ok(_) if sample.changes == 0 => "accepted, unchanged".to_owned(),
            Ok(_) => "accepted, changed".to_owned(),
            Err(diagnostics) => diagnostics[0].kind.to_string(),
        };
        *verdicts.entry(name).or_default() += 1;
    }
    println!("{verdicts:#?}");
    for kind in [
        "accepted, changed",
        "deadlock",
        "race",
        "unposted-wait",
        "unwritten-read",
    ] {
        assert!(
            verdicts.get(kind).copied().unwrap_or(0) > 10,
            "few {kind}: {verdicts:?}"
        );
    }
}

/// What the verifier says of the sample of `seed` must be what happens, whatever the order.
fn agrees(seed: u64, orders: u64) {
    let sample = sample(seed, Allowed::default()).unwrap();
    let verdict = verify(
        &sample.program,
        sample.world,
        sample.streams,
        &sample.parameters,
    );
    let ranks: Result<Vec<_>, _> = (0..sample.world)
        .map(|rank| {
            unroll(
                &sample.program,
                rank,
                sample.world,
                sample.streams,
                &sample.parameters,
            )
        })
        .collect();
    let Ok(ranks) = ranks else {
        assert!(verdict.is_err());
        return;
    };
    match verdict {
        Ok(report) => {
            let first = play(&ranks, Submission::Eager, 0);
            for order in 0..2 * orders {
                let how = match (&report.eager_only, order % 2) {
                    (None, 1) => Submission::Captured,
                    _ => Submission::Eager,
                };
                let end = play(&ranks, how, order);
                let End::Outputs(outputs) = &end else {
                    panic!(
                        "seed {seed} is accepted and hangs, {how:?}:\n{}",
                        sample.text
                    );
                };
                let whole = outputs.iter().flatten().all(|value| value.is_finite());
                assert!(
                    whole,
                    "seed {seed}, order {order}: garbage\n{}",
                    sample.text
                );
                assert_eq!(end, first, "seed {seed}, order {order}\n{}", sample.text);
            }
            if let Some(diagnostic) = &report.eager_only
                && diagnostic.message.starts_with("as a graph")
            {
                for order in 0..orders {
                    let end = play(&ranks, Submission::Captured, order);
                    assert_eq!(
                        end,
                        End::Stuck,
                        "seed {seed}: {diagnostic}\n{}",
                        sample.text
                    );
                }
            }
        }
        Err(diagnostics) if diagnostics[0].kind == DiagnosticKind::Deadlock => {
            for order in 0..orders {
                let end = play(&ranks, Submission::Eager, order);
                assert_eq!(
                    end,
                    End::Stuck,
                    "seed {seed}: {}\n{}",
                    diagnostics[0],
                    sample.text
                );
            }
        }
        Err(_) => {}
    }
}

/// `WARPLINK_SEEDS` asks for more seeds than a test run needs.
#[test]
fn what_happens_is_what_the_verifier_says() {
    let seeds = std::env::var("WARPLINK_SEEDS")
        .ok()
        .and_then(|text| text.parse().ok());
    (0..seeds.unwrap_or(2000)).for_each(|seed| agrees(seed, 4));
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn what_happens_is_what_the_verifier_says_of_any_seed(seed in any::<u64>()) {
        agrees(seed, 3);
    }
}
