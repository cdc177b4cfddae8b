//! Compares the simulation of a few iterations, and of one rank, with the full simulation.

use super::*;
use crate::dtype::DType;
use crate::program::lower::{AllGatherMatmul, MatmulReduceScatter, Problem, lower};
use crate::program::{Parameters, Program, unroll};

fn lowered(world: usize, (m, k, n): (usize, usize, usize)) -> Vec<Vec<RankProgram>> {
    let gather = AllGatherMatmul {
        transposed_b: false,
        m,
        k,
        n: vec![n],
        dtype: DType::BF16,
        bias: false,
        keep: false,
    };
    let scatter = MatmulReduceScatter {
        transposed_b: false,
        m,
        k,
        n,
        dtype: DType::BF16,
        bias: false,
    };
    let mut all = unrolled(&gather, world);
    all.extend(unrolled(&scatter, world));
    all
}

fn unrolled<P: Problem>(problem: &P, world: usize) -> Vec<Vec<RankProgram>> {
    let mut all = Vec::new();
    for lowering in P::lowerings().unwrap() {
        let lowered = lower(problem, &lowering, world, 2).unwrap();
        let rank = |rank| unroll(lowered.program(), rank, world, 2, &lowered.parameters).unwrap();
        all.push((0..world).map(rank).collect());
    }
    all
}

fn seconds(
    simulated: &[RankProgram],
    world: usize,
    partners: &link::Partners,
    model: &HardwareModel,
) -> f64 {
    seconds_of(simulated, world, partners, model, u64::MAX)
}

fn seconds_of(
    simulated: &[RankProgram],
    world: usize,
    partners: &link::Partners,
    model: &HardwareModel,
    iterations: u64,
) -> f64 {
    let options = SimulateOptions::default();
    let schedule =
        schedule::Schedule::new(simulated, world, partners, model, options, iterations).unwrap();
    simulate::run(&schedule, false).unwrap().seconds
}

/// A ring of ranks that push chunks and reduce the previous one, at most two chunks apart.
const PUSHED: &str = "
    program pushed(n, chunks) {
        input X: u8[n]
        output Y: u8[n]
        scratch R: u8[4, 64, part(part(n, 64), chunks)]
        kernel lane in 0..64 threads 512 {
            for c in 0..chunks + 1 {
                if c < chunks {
                    put X[lane of 64][c of chunks] to R[c % 4][lane] on (rank + 1) % world
                    signal (rank + 1) % world
                }
                if c > 0 {
                    let b = c - 1
                    wait (rank - 1) % world
                    Y[lane of 64][b of chunks] = copy(R[b % 4][lane])
                }
            }
        }
    }
";

#[test]
fn a_few_iterations_take_as_long_as_all() {
    let program = Program::parse_text(PUSHED).unwrap();
    for (chunks, bytes) in [(20, 1 << 20), (500, 1 << 20), (500, 1 << 28)] {
        let parameters = Parameters::new().with("n", bytes).with("chunks", chunks);
        let rank = |rank| unroll(&program, rank, 3, 1, &parameters).unwrap();
        let ranks: Vec<RankProgram> = (0..3).map(rank).collect();
        let partners = link::partners(&ranks).unwrap();
        for model in find::all_shipped() {
            let [few, all] = [launch::MAX_ITERATIONS, u64::MAX]
                .map(|most| seconds_of(&ranks[..1], 3, &partners, model, most));
            let told = format!(
                "{few} {all}: {chunks} chunks, {bytes} bytes on {}",
                model.name
            );
            assert!((0.95..1.08).contains(&(few / all)), "{told}");
        }
    }
}

/// Programs of two ranks whose lanes execute `body` in every iteration.
fn turns(body: &str, iterations: i64) -> Vec<RankProgram> {
    let text = format!(
        "program turns(k) {{\n input X: u8[16]\n output Y: u8[16]\n \
         kernel lane in 0..8 threads 512 {{\n for c in 0..k {{\n{body}\n}}\n}}\n}}\n"
    );
    let program = Program::parse_text(&text).unwrap();
    let parameters = Parameters::new().with("k", iterations);
    let rank = |rank| unroll(&program, rank, 2, 1, &parameters).unwrap();
    (0..2).map(rank).collect()
}

/// Seconds with a few iterations, and with all.
fn seconds_by_turns(body: &str, iterations: i64) -> [f64; 2] {
    let ranks = turns(body, iterations);
    let partners = link::partners(&ranks).unwrap();
    let model = find::shipped("h200-2").unwrap();
    [launch::MAX_ITERATIONS, u64::MAX]
        .map(|most| seconds_of(&ranks[..1], 2, &partners, &model, most))
}

#[test]
fn what_is_done_in_some_iterations_only_is_counted_as_often() {
    const TURN: &str = "{ signal (rank + 1) % world\n wait (rank - 1) % world }";
    for (divisor, condition) in [
        (2, "c % 2 == 0"),
        (2, "c % 2 == 1"),
        (3, "c % 3 == 1"),
        (4, "c % 4 == 3"),
        (5, "c % 5 == 0"),
        (6, "c % 2 == 0 and c % 3 == 0"),
        (6, "c / 2 % 3 == 0"),
        (16, "c % 16 == 0"),
    ] {
        let mut before: f64 = 0.0;
        for k in [16, 17, 18, 29, 30, 31, 44, 58, 72, 86, 87, 100, 226, 1000] {
            let [few, all] = seconds_by_turns(&format!("if {condition} {TURN}"), k);
            let told = format!("{few} {all}: {k} iterations of which {condition}");
            assert!((0.9..1.1).contains(&(few / all)), "{told}");
            assert!(few >= 0.95 * before, "{told}, {before} before");
            before = few;
        }
        assert!(before > 1e-6 * (1000 / divisor) as f64);
    }
}

#[test]
fn what_is_done_in_some_iterations_only_is_counted_where_it_follows_on_others() {
    // A signal of one iteration is waited for in a later one.
    let body = "
        let turn = (c + 1) % 3
        if turn == 0 { signal (rank + 1) % world }
        if turn == 1 and c > 0 { wait (rank - 1) % world }
        if turn == 2 { Y = copy(X) }
    ";
    for k in [3 * 7, 3 * 14 + 1, 3 * 100 + 2] {
        let [few, all] = seconds_by_turns(body, k);
        assert!((0.9..1.1).contains(&(few / all)), "{few} {all}: {k}");
    }
    // The condition is not a remainder, so its period is unknown.
    let [few, all] = seconds_by_turns("if c / 2 * 2 == c { signal 1 - rank\n wait 1 - rank }", 30);
    assert!((0.7..1.4).contains(&(few / all)), "{few} {all}");
}

#[test]
fn all_iterations_are_simulated_where_a_few_do_not_end() {
    let model = find::shipped("h200-2").unwrap();
    // The other iterations wait for the ones left out.
    let body = "if (c ^ 1) > c { signal 1 - rank } else { wait 1 - rank }";
    let ranks = turns(body, 100);
    let partners = link::partners(&ranks).unwrap();
    let options = SimulateOptions::default();
    let [few, all] = [launch::MAX_ITERATIONS, u64::MAX].map(|most| {
        let schedule =
            schedule::Schedule::new(&ranks[..1], 2, &partners, &model, options, most).unwrap();
        simulate::run(&schedule, false).map(|outcome| outcome.seconds)
    });
    assert!(few.is_err(), "{few:?}");
    let cost = simulate(&ranks, &model).unwrap();
    assert!((cost.seconds / all.unwrap() - 1.0).abs() < 1e-9, "{cost}");
}

/// Simulating all iterations would exceed the limit, but that is not the error to report.
#[test]
fn a_step_that_cannot_be_resolved_is_an_error_at_once() {
    let model = find::shipped("h200-2").unwrap();
    let body = "if c > 99998 { Y[0..17] = copy(X[0..17]) }";
    let error = simulate(&turns(body, 100_000), &model).unwrap_err();
    assert!(error.to_string().contains("selects 0..17"), "{error}");
}

#[test]
fn one_rank_stands_for_all_that_launch_the_same() {
    let programs = [
        include_str!("../../../../../examples/programs/all_reduce_one_shot.wlp"),
        include_str!("../../../../../examples/programs/all_reduce_read.wlp"),
        include_str!("../../../../../examples/programs/all_reduce_ring.wlp"),
    ];
    for (text, world) in programs.iter().flat_map(|text| [(text, 2), (text, 4)]) {
        let program = Program::parse(text).unwrap();
        for n in [17, 4096, 1 << 22] {
            let parameters = Parameters::new().with("n", n);
            let rank = |rank| unroll(&program, rank, world, 1, &parameters).unwrap();
            let ranks: Vec<RankProgram> = (0..world).map(rank).collect();
            let partners = link::partners(&ranks).unwrap();
            assert!(
                symmetry::is_symmetric(&ranks, &partners),
                "{}",
                program.name
            );
            for model in find::all_shipped() {
                let (one, all) = (
                    seconds(&ranks[..1], world, &partners, model),
                    seconds(&ranks, world, &partners, model),
                );
                // The last ranks have shorter parts; of 17 elements, most ranks have none.
                let near = if n == 17 { 0.3..2.0 } else { 0.99..1.05 };
                assert!(
                    near.contains(&(one / all)),
                    "{one} {all} for {n} by {} on {}",
                    program.name,
                    model.name
                );
            }
        }
    }
}

#[test]
fn one_rank_stands_for_all_that_do_the_same() {
    for model in find::all_shipped() {
        for ranks in lowered(4, (4096, 512, 2048)) {
            let partners = link::partners(&ranks).unwrap();
            if !symmetry::is_symmetric(&ranks, &partners) {
                continue;
            }
            let (one, all) = (
                seconds(&ranks[..1], 4, &partners, model),
                seconds(&ranks, 4, &partners, model),
            );
            assert!(
                (one / all - 1.0).abs() < 1e-6,
                "{one} {all} on {}",
                model.name
            );
        }
    }
}

#[test]
fn every_lowering_is_simulated_on_every_shipped_model() {
    for model in find::all_shipped() {
        for shape in [(8, 8, 1), (32768, 16384, 1024)] {
            for ranks in lowered(8, shape) {
                let cost = simulate(&ranks, model).unwrap();
                assert!(cost.seconds > 0.0 && cost.seconds < 1e3);
                assert!(
                    (cost.critical.seconds() / cost.seconds - 1.0).abs() < 1e-6,
                    "{cost}"
                );
            }
        }
    }
}
