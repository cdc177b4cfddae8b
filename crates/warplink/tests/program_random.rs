//! Random programs against the verifier.

use std::collections::BTreeMap;
use warplink::program::sample::{Allowed, sample};
use warplink::program::verify;

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
        if let (0, Err(findings)) = (sample.changes, &verdict) {
            panic!("seed {seed} is refused: {}\n{}", findings[0], sample.text);
        }
        let name = match verdict {
            Ok(_) if sample.changes == 0 => "accepted, unchanged".to_owned(),
            Ok(_) => "accepted, changed".to_owned(),
            Err(findings) => findings[0].kind.to_string(),
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
