//! The library's lowerings and the example programs: verified for many worlds, with every alternative,
//! and chosen among by the cost model.

use crate::root;
use crate::stopwatch::time_on_processor;
use warplink::program::cost::find::shipped;
use warplink::program::lower::{
    AllGatherMatmul, AllGatherMatmulLowering, Choice, Decision, Lowered, Lowering,
    MatmulReduceScatter, MatmulReduceScatterLowering, Problem, choose, lower,
};
use warplink::program::{DiagnosticKind, Parameters, Program, verify};
use warplink::{DType, ErrorKind};

fn gather(world: usize, keep: bool, n: &[usize]) -> AllGatherMatmul {
    AllGatherMatmul {
        transposed_b: false,
        m: 16 * world,
        k: 16,
        n: n.to_vec(),
        dtype: DType::BF16,
        bias: n.len() > 1,
        keep,
    }
}

fn scatter(world: usize, bias: bool) -> MatmulReduceScatter {
    MatmulReduceScatter {
        transposed_b: false,
        m: 16 * world,
        k: 8 * world,
        n: 16,
        dtype: DType::F16,
        bias,
    }
}

/// The example programs whose names start with `operation`.
fn examples(operation: &str) -> Vec<Lowering> {
    let folder = root().join("../../examples/programs");
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        if name.starts_with(operation) {
            let text = std::fs::read_to_string(&path).unwrap();
            found.push(Lowering::parse(&name, &text).unwrap());
        }
    }
    assert!(found.len() >= 4, "{operation}");
    found
}

fn gathers() -> Vec<Lowering> {
    let own = AllGatherMatmul::lowerings().unwrap();
    own.into_iter()
        .chain(examples("all_gather_matmul"))
        .collect()
}

fn scatters() -> Vec<Lowering> {
    let own = MatmulReduceScatter::lowerings().unwrap();
    own.into_iter().chain(examples("matmul_")).collect()
}

/// `given` with every combination of what `lowering` leaves open, whether or not it suits the sizes.
fn combinations(lowering: &Lowering, given: &Parameters) -> Vec<Parameters> {
    let open = lowering.combinations(given).unwrap();
    open.iter()
        .map(|chosen| given.clone().and(chosen))
        .collect()
}

/// Verifies `lowering` with every alternative, and gives how many suit the world.
fn accepted(lowering: &Lowering, world: usize, streams: usize, given: &Parameters) -> usize {
    let mut suitable = 0;
    for parameters in combinations(lowering, given) {
        match verify(lowering.program(), world, streams, &parameters) {
            Ok(_) => suitable += 1,
            Err(diagnostics) if diagnostics[0].kind == DiagnosticKind::Requirement => {}
            Err(diagnostics) => {
                println!("{}", lowering.text());
                for diagnostic in &diagnostics {
                    println!("{diagnostic}");
                }
                panic!(
                    "{} is refused for {world} ranks: {parameters}",
                    lowering.name()
                );
            }
        }
    }
    suitable
}

#[test]
fn every_lowering_and_example_passes_for_1_to_16_ranks() {
    for world in 1..=16 {
        for streams in [1, 2, 3] {
            for lowering in gathers() {
                for (keep, n) in [(false, &[24][..]), (true, &[24, 8])] {
                    let mut problem = gather(world, keep, n);
                    problem.transposed_b = keep;
                    let given = problem.parameters(world).unwrap();
                    assert!(accepted(&lowering, world, streams, &given) > 0);
                }
            }
            for lowering in scatters() {
                for bias in [false, true] {
                    let mut problem = scatter(world, bias);
                    problem.transposed_b = bias;
                    let given = problem.parameters(world).unwrap();
                    assert!(accepted(&lowering, world, streams, &given) > 0);
                }
            }
        }
    }
}

#[test]
fn the_smallest_example_passes() {
    let path = root().join("../../examples/programs/ring_pass.wlp");
    let program = Program::parse(&std::fs::read_to_string(path).unwrap()).unwrap();
    for world in 2..=16 {
        verify(&program, world, 1, &[("n", 16)].into()).unwrap();
    }
}

#[test]
fn what_is_printed_is_the_same_program() {
    for lowering in gathers().into_iter().chain(scatters()) {
        let printed = lowering.program().to_string();
        assert_eq!(&Program::parse(&printed).unwrap(), lowering.program());
    }
}

/// Alternatives that suit the sizes are all there, up to as many rings as half of the ranks.
#[test]
fn what_does_not_suit_the_sizes_is_left_out() {
    let suitable =
        |lowering: Lowering, given: &Parameters, world| accepted(&lowering, world, 2, given);
    let push = || AllGatherMatmulLowering::Push.lowering().unwrap();
    let mut problem = gather(2, false, &[8]);
    for (rows, parts) in [(1, 1), (2, 2), (3, 1), (12, 3), (16, 5), (64, 5)] {
        problem.m = 2 * rows;
        let given = problem.parameters(2).unwrap();
        assert_eq!(suitable(push(), &given, 2), parts, "{rows} rows");
    }
    let rings = || MatmulReduceScatterLowering::Rings.lowering().unwrap();
    for (world, strides) in [(1, 1), (2, 1), (3, 1), (4, 2), (8, 4), (16, 4)] {
        let given = scatter(world, true).parameters(world).unwrap();
        assert_eq!(
            suitable(rings(), &given, world),
            4 * strides,
            "{world} ranks"
        );
    }
}

#[test]
fn sizes_that_do_not_divide_are_refused_with_a_way_out() {
    let push = AllGatherMatmulLowering::Push.lowering().unwrap();
    let problem = AllGatherMatmul {
        m: 100,
        ..gather(8, false, &[8])
    };
    let error = lower(&problem, &push, 8, 2).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert!(error.to_string().ends_with("pad it to 104"), "{error}");
    let problem = AllGatherMatmul {
        dtype: DType::I32,
        ..gather(8, false, &[8])
    };
    assert!(lower(&problem, &push, 8, 2).is_err());
    assert!(lower(&gather(8, false, &[]), &push, 8, 2).is_err());
    assert!(lower(&gather(8, false, &[8, 0]), &push, 8, 2).is_err());
}

/// A lowering that was written before operands could be transposed goes on to be chosen for others.
#[test]
fn a_lowering_without_transposed_operands_takes_plain_ones() {
    let text = AllGatherMatmulLowering::Push.text();
    let text = text.replace(", transposed_b = 0 | 1", "");
    let text = text.replace(" column_major if transposed_b == 1", "");
    let old = Lowering::parse("old", &text).unwrap();
    let mut problem = gather(4, false, &[8]);
    lower(&problem, &old, 4, 2).unwrap();
    let model = &shipped("h200-8").unwrap();
    let all = [
        AllGatherMatmulLowering::RingGet.lowering().unwrap(),
        old.clone(),
    ];
    assert_eq!(
        choose(&problem, &all, 4, 2, model).unwrap().estimates.len(),
        2
    );
    problem.transposed_b = true;
    let choice = choose(&problem, &all, 4, 2, model).unwrap();
    assert_eq!(choice.estimates.len(), 1, "{choice}");
    assert!(choice.subject.contains("B transposed"), "{choice}");
    let error = lower(&problem, &old, 4, 2).unwrap_err();
    assert!(error.to_string().contains("'transposed_b'"), "{error}");
}

#[test]
fn the_choice_explains_itself_and_can_be_forced() {
    let model = &shipped("h200-8").unwrap();
    let problem = |m, k, n| AllGatherMatmul {
        m,
        k,
        ..gather(8, false, &[n])
    };
    let choice = |m, k, n| -> Choice {
        let problem = problem(m, k, n);
        let own = AllGatherMatmul::lowerings().unwrap();
        let choice = choose(&problem, &own, 8, 2, model).unwrap();
        println!("{choice}");
        assert_eq!(choice.decision, Decision::Model);
        assert_eq!(choice.estimates.len(), AllGatherMatmulLowering::ALL.len());
        let seconds: Vec<f64> = choice
            .estimates
            .iter()
            .map(|e| e.expected.seconds())
            .collect();
        assert!(seconds.is_sorted(), "{seconds:?}");
        let Lowered {
            lowering,
            parameters,
            streams,
        } = &choice.lowered;
        verify(lowering.program(), 8, *streams, parameters).unwrap();
        choice
    };
    // Bound by matmuls and by the link: overlap pays.
    for (m, k, n) in [
        (32768, 16384, 8192),
        (32768, 16384, 1024),
        (8192, 8192, 3584),
    ] {
        assert!(!choice(m, k, n).needs_engine());
    }
    // So small that forks cost more than they hide.
    let small = choice(64, 64, 64);
    assert!(
        ["in-order", "collective"].contains(&small.name()),
        "{small}"
    );
    let ring = [AllGatherMatmulLowering::RingGet.lowering().unwrap()];
    let forced = choose(&problem(64, 64, 64), &ring, 8, 2, model).unwrap();
    assert!(forced.decision == Decision::Request && forced.name() == "ring-get");
    assert!(forced.to_string().contains("as requested"));
    assert!(choose(&problem(64, 64, 64), &[], 8, 2, model).is_err());
}

/// Every fork, wait, synchronize and post of a lowering is there for a reason.
#[test]
fn nothing_can_be_left_out() {
    let gather = gather(4, true, &[8]).parameters(4).unwrap();
    let scatter = scatter(4, true).parameters(4).unwrap();
    let gathers = gathers().into_iter().map(|lowering| (lowering, &gather));
    let scatters = scatters().into_iter().map(|lowering| (lowering, &scatter));
    for (lowering, given) in gathers.chain(scatters) {
        let lines: Vec<&str> = lowering.text().lines().collect();
        for (number, line) in lines.iter().enumerate() {
            let words = ["wait ", "synchronize ", "post "];
            if !words.iter().any(|word| line.trim_start().starts_with(word)) {
                continue;
            }
            let mut rest = lines.clone();
            rest.remove(number);
            let program = Program::parse(&rest.join("\n")).unwrap();
            // With some alternative, it is missed.
            let missed = combinations(&lowering, given).iter().any(|parameters| {
                match verify(&program, 4, 2, parameters) {
                    Ok(_) => false,
                    Err(diagnostics) => diagnostics[0].kind != DiagnosticKind::Requirement,
                }
            });
            let line = line.trim();
            assert!(
                missed,
                "{} does without line {}: {line}",
                lowering.name(),
                number + 1
            );
        }
    }
}

/// In proportion to the operations of all ranks, which grow as the square of the ranks; and where that is too much, a
/// lowering that is too large is left out at once.
#[test]
fn the_time_to_choose_grows_as_the_programs_do() {
    let model = &shipped("h200-8").unwrap();
    let gathers = AllGatherMatmul::lowerings().unwrap();
    let scatters = MatmulReduceScatter::lowerings().unwrap();
    let choices = |world: usize| {
        let ((a, b), took) = time_on_processor(|| {
            let a = choose(&gather(world, true, &[8]), &gathers, world, 2, model).unwrap();
            let b = choose(&scatter(world, true), &scatters, world, 2, model).unwrap();
            (a, b)
        });
        println!("{world} ranks: {took:?}");
        (a.estimates.len() + b.estimates.len(), took.as_secs_f64())
    };
    let all = gathers.len() + scatters.len();
    let (few, many) = if cfg!(debug_assertions) {
        (8, 32)
    } else {
        (24, 96)
    };
    let least = |world| {
        let tries = (0..3).map(|_| {
            let (count, took) = choices(world);
            assert_eq!(count, all);
            took
        });
        tries.fold(f64::INFINITY, f64::min)
    };
    let (short, long) = (least(few), least(many));
    assert!(
        long < 32.0 * short,
        "{short} s for {few} ranks, {long} s for {many}"
    );
    // Only the collectives have few operations for so many ranks.
    let (count, took) = choices(256);
    let limit = if cfg!(debug_assertions) { 200.0 } else { 30.0 };
    assert!(count < all && took < limit, "{count} in {took} s");
}

#[test]
fn sixty_four_ranks_are_fast() {
    let gather = gather(64, true, &[8]).parameters(64).unwrap();
    let scatter = scatter(64, true).parameters(64).unwrap();
    let gathers = AllGatherMatmul::lowerings().unwrap().into_iter();
    let scatters = MatmulReduceScatter::lowerings().unwrap().into_iter();
    let gathers = gathers.map(|lowering| (lowering, &gather));
    let scatters = scatters.map(|lowering| (lowering, &scatter));
    for (lowering, given) in gathers.chain(scatters) {
        let (verified, took) = time_on_processor(|| verify(lowering.program(), 64, 2, given));
        verified.unwrap();
        println!("{}: {took:?}", lowering.name());
        let limit = if cfg!(debug_assertions) { 30.0 } else { 1.0 };
        assert!(took.as_secs_f64() < limit, "{}: {took:?}", lowering.name());
    }
}
