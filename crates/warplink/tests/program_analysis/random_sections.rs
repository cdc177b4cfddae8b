//! Random kernel sections: the verifier's word against what happens when their lanes take steps in random
//! orders. `examples/random_programs.rs --sections` does the same for as long as one asks, and runs what is
//! accepted.

use crate::program_support::device::Runner;
use crate::program_support::evidence::check_classes;
use crate::program_support::machine::slower;
use crate::section_support::device;
use crate::section_support::evidence::{Shown, check};
use crate::section_support::sample::{Pieces, Sample, sample};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::time::Duration;
use warplink::program::cost::find::all_shipped;
use warplink::program::cost::{SimulateOptions, simulate_with};
use warplink::program::{
    Operation, OperationKind, Parameters, Program, RankProgram, unroll, verify,
};

/// How many programs run on the host device, where each takes a while.
const RUN: usize = 60;

/// A sample that is accepted, and its outputs by run and rank.
type Accepted = (Sample, Vec<Vec<f64>>);

/// A disagreement, with everything needed to reproduce it.
fn said(seed: u64, sample: &Sample, how: &str) -> String {
    let Sample {
        world,
        parameters,
        text,
        ..
    } = sample;
    format!("seed {seed}, {world} ranks, {parameters}: {how}\n{text}")
}

/// Evidence for the verdict on the sample of `seed`, and its results if it is accepted.
fn shown(seed: u64) -> Result<(String, Option<Accepted>), String> {
    let Ok(sample) = sample(seed, Pieces::Any, 2) else {
        return Ok(("no program".to_owned(), None));
    };
    let Shown { class, outputs, .. } = check(&sample).map_err(|how| said(seed, &sample, &how))?;
    let class = if sample.changes == 0 {
        format!("unchanged, {class}")
    } else {
        class
    };
    Ok((class, outputs.map(|outputs| (sample, outputs))))
}

/// `WARPLINK_SEEDS` asks for more seeds than a test run needs.
#[test]
fn what_happens_is_what_the_verifier_says_of_kernels() {
    let seeds = std::env::var("WARPLINK_SEEDS")
        .ok()
        .and_then(|text| text.parse().ok());
    let mut classes: BTreeMap<String, usize> = BTreeMap::new();
    let (mut wrong, mut ran, mut rows, mut blocks) = (Vec::new(), 0, 0, 0);
    let mut runner = Runner::new(1, Duration::from_secs(60));
    for seed in 0..seeds.unwrap_or(480) {
        let (class, accepted) = match shown(seed) {
            Ok(shown) => shown,
            Err(how) => {
                wrong.push(how);
                continue;
            }
        };
        *classes.entry(class).or_default() += 1;
        // Few samples have functions of rows: the first ones run whatever others have.
        let accepted = accepted.filter(|(sample, _)| {
            let calls = |function: &str| usize::from(sample.text.contains(function));
            let (shifted, blocked) = (calls("= shifted("), calls("= blocked("));
            let wanted = ran < RUN || (shifted > 0 && rows <= 2) || (blocked > 0 && blocks <= 2);
            if wanted {
                ran += 1;
                rows += shifted;
                blocks += blocked;
            }
            wanted
        });
        if let Some((sample, outputs)) = accepted
            && let Err(how) = device::run(&mut runner, &sample, &outputs, None)
        {
            wrong.push(said(seed, &sample, &how));
        }
    }
    let all = wrong.join("\n");
    assert!(wrong.is_empty(), "{} disagree:\n{all}", wrong.len());
    assert!(
        seeds.is_some() || (rows > 2 && blocks > 0),
        "only {rows} with functions of rows ran, and {blocks} of blocks"
    );
    let wanted = [
        "unchanged, accepted",
        "accepted",
        "refused, deadlock",
        "refused, lost-signal",
        "refused, mismatch",
        "refused, race: wrong values",
        "refused, race: another order of accesses",
        "refused, unwritten-output",
        "refused, rule: out-of-bounds",
    ];
    check_classes(&classes, 2, &wanted);
}

/// Lanes may read integers in copies alone, and find anything in a word that nothing wrote.
#[test]
fn integers_are_chosen_wherever_lanes_read_them() {
    let copied = "
        put C[0] to H[epoch % 2][0] on next
        let m = H[epoch % 2][0] at most 2
        for t in 0..m { Y = copy(R[epoch % 2]) }
        barrier";
    let before_its_signal = "
        announce rank, n in A[epoch % 2]
        put C[0] to N[epoch % 2][0] on next
        let m = C[0] at most 1
        for t in 0..m { put X to R[epoch % 2] on next }
        let k = N[epoch % 2][0] at most 1
        for t in 0..k { Y = copy(R[epoch % 2]) }
        barrier
        agree rank, n in A[epoch % 2]";
    // The words of a position have their edges although the text behind it is wrong.
    let before_an_error = "
        let s = position(0 of C not in 0..1)
        H[epoch % 2][0] on next = integer(0)
        Y = copy(R[k])
        let k = H[epoch % 2][0] at most 1";
    for (lines, expected) in [
        (copied, "refused, deadlock"),
        (before_its_signal, "refused, race: "),
        (before_an_error, "refused, rule: "),
    ] {
        let text = format!(
            "program sample(n) {{
                input X: f32[n]
                input C: i32[1]
                output Y: f32[n]
                scratch A: packets16 i32[2, world, 2]
                scratch H: packets16 i32[2, 1]
                scratch N: i32[2, 1]
                scratch R: packets16 f32[2, n]
                kernel lane in 0..1 threads 32 {{
                    let next = (rank + 1) % world
                    Y = copy(X)
                    {lines}
                }}
            }}"
        );
        let sample = Sample {
            seed: 1,
            program: Program::parse(&text).unwrap(),
            text,
            world: 3,
            parameters: Parameters::new().with("n", 8),
            changes: 1,
            reads_values: true,
        };
        let class = check(&sample).unwrap().class;
        assert!(class.starts_with(expected), "{class}: {}", sample.text);
    }
}

/// Accepted sections finish in the simulation of their cost, too, on every shipped model, in proportion to
/// the machine, and takes longer than its launches alone.
#[test]
fn what_the_verifier_accepts_has_a_cost() {
    const FACTOR: f64 = 3.0;
    let options = SimulateOptions {
        timeline: true,
        ..SimulateOptions::default()
    };
    let mut accepted = 0;
    for seed in 0..400 {
        let Ok(sample) = sample(seed, Pieces::Any, 2) else {
            continue;
        };
        let (program, world) = (&sample.program, sample.world);
        let parameters = &sample.parameters;
        if verify(program, world, 1, parameters).is_err() {
            continue;
        }
        accepted += 1;
        let rank = |rank| unroll(program, rank, world, 1, parameters).unwrap();
        let ranks: Vec<RankProgram> = (0..world).map(rank).collect();
        let kernel = |operation: &Operation| matches!(operation.kind, OperationKind::Kernel(_));
        let launches = ranks[0]
            .operations
            .iter()
            .filter(|operation| kernel(operation));
        let launches = launches.count() as f64;
        for model in all_shipped() {
            let cost = simulate_with(&ranks, model, options)
                .unwrap_or_else(|error| panic!("{}", said(seed, &sample, &error.to_string())));
            assert!(
                cost.seconds >= launches * model.lanes().launch,
                "{}",
                said(seed, &sample, &cost.to_string())
            );
            let whole = cost.critical.seconds() / cost.seconds;
            let parts = cost.timeline.iter().all(|span| {
                let took = span.end - span.start;
                took >= 0.0 && (span.parts.seconds() - took).abs() <= 1e-6 * cost.seconds
            });
            let slow = simulate_with(&ranks, &slower(model, FACTOR), options).unwrap();
            let ratio = slow.seconds / cost.seconds / FACTOR;
            assert!(
                parts && (whole - 1.0).abs() < 1e-6 && (ratio - 1.0).abs() < 1e-3,
                "{whole} {ratio}: {}",
                said(seed, &sample, &cost.to_string())
            );
        }
    }
    assert!(accepted > 100, "only {accepted} are accepted");
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(64) })]
    #[test]
    fn what_happens_is_what_the_verifier_says_of_kernels_of_any_seed(seed in any::<u64>()) {
        let shown = shown(seed);
        prop_assert!(shown.is_ok(), "{}", shown.unwrap_err());
    }
}
