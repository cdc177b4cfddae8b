//! Random programs: the verifier's word against what happens when their hosts and streams take
//! steps in random orders, twice in a row. `examples/random_programs.rs` does the same for as long as one
//! asks, and runs what is accepted.

use crate::program_support::evidence::{check, check_classes};
use crate::program_support::sample::{Allowed, sample, signals};
use proptest::prelude::*;
use std::collections::BTreeMap;

/// Evidence for the verdict on the sample of `seed`.
fn shown(seed: u64) -> String {
    let Ok(sample) = sample(seed, Allowed::default()) else {
        return "no program".to_owned();
    };
    match check(&sample) {
        Ok(shown) if sample.changes == 0 => format!("unchanged, {}", shown.class),
        Ok(shown) => shown.class,
        Err(how) => panic!(
            "seed {seed}, {} ranks, {} streams: {how}\n{}",
            sample.world, sample.streams, sample.text
        ),
    }
}

/// `WARPLINK_SEEDS` asks for more seeds than a test run needs.
#[test]
fn what_happens_is_what_the_verifier_says() {
    let seeds = std::env::var("WARPLINK_SEEDS")
        .ok()
        .and_then(|text| text.parse().ok());
    let mut classes: BTreeMap<String, usize> = BTreeMap::new();
    for seed in 0..seeds.unwrap_or(2000) {
        *classes.entry(shown(seed)).or_default() += 1;
    }
    let wanted = [
        "unchanged, accepted",
        "accepted",
        "accepted, eagerly only",
        "refused, deadlock",
        "refused, race: wrong values",
        "refused, unwritten-read",
        "refused, rule: unposted-wait of one rank",
        "refused, rule: mismatch",
        "refused, rule: asymmetric-exchange",
    ];
    check_classes(&classes, 5, &wanted);
}

/// Of programs that post and wait without a plan, too.
#[test]
fn what_happens_is_what_the_verifier_says_of_any_posts_and_waits() {
    let mut classes: BTreeMap<String, usize> = BTreeMap::new();
    for seed in 0..2000 {
        let sample = signals(seed).unwrap();
        let shown = check(&sample).unwrap_or_else(|how| {
            let (world, streams) = (sample.world, sample.streams);
            panic!(
                "seed {seed}, {world} ranks, {streams} streams: {how}\n{}",
                sample.text
            )
        });
        *classes.entry(shown.class).or_default() += 1;
    }
    let wanted = [
        "accepted",
        "accepted, eagerly only",
        "refused, lost-signal",
        "refused, deadlock",
    ];
    check_classes(&classes, 5, &wanted);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn what_happens_is_what_the_verifier_says_of_any_seed(seed in any::<u64>()) {
        shown(seed);
    }
}
