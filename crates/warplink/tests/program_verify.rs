//! The verifier on examples, on faulty programs and on lowered ones.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use warplink::program::{DiagnosticKind, Parameters, Program, verify};

fn parameters(list: &[(&str, i64)]) -> Parameters {
    list.iter()
        .map(|&(name, value)| (name.to_owned(), value))
        .collect()
}

#[test]
fn the_examples_pass() {
    let folder = format!("{}/../../examples/programs", env!("CARGO_MANIFEST_DIR"));
    let mut count = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let text = std::fs::read_to_string(&path).unwrap();
        let program = Program::parse(&text).unwrap_or_else(|e| panic!("{}:\n{e}", path.display()));
        assert_eq!(Program::parse(&program.to_string()).unwrap(), program);
        // In how many ranks an example may refuse to run.
        let least = if text.contains("require world > 2") {
            2
        } else {
            1
        };
        for world in [1, 2, 3, 4, 5, 8, 16] {
            let sizes = program
                .parameters
                .iter()
                .map(|parameter| (parameter.name.as_str(), 240 * 16))
                .collect::<Vec<_>>();
            for streams in [1, 2, 3] {
                match verify(&program, world, streams, &parameters(&sizes)) {
                    Ok(report) => assert_eq!(report.world, world),
                    Err(diagnostics)
                        if world <= least && diagnostics[0].kind == DiagnosticKind::Requirement => {
                    }
                    Err(diagnostics) => {
                        for diagnostic in &diagnostics {
                            println!("{diagnostic}");
                        }
                        panic!("{} for {world} ranks, {streams} streams", path.display());
                    }
                }
            }
        }
        count += 1;
    }
    assert!(count >= 1);
}

mod lowered {
    use super::*;
    use warplink::DType;
    use warplink::program::lower::{
        AllGatherMatmul, Lowered, Machine, MatmulReduceScatter, Variant, choose_all_gather_matmul,
        choose_matmul_reduce_scatter, lower_all_gather_matmul, lower_matmul_reduce_scatter,
    };

    fn accepted(lowered: &Lowered, world: usize) {
        if let Err(diagnostics) = verify(
            &lowered.program,
            world,
            lowered.streams,
            &lowered.parameters,
        ) {
            println!("{}", lowered.text);
            for diagnostic in &diagnostics {
                println!("{diagnostic}");
            }
            panic!("{} is refused for {world} ranks", lowered.program.name);
        }
        assert_eq!(
            Program::parse(&lowered.program.to_string()).unwrap(),
            lowered.program
        );
    }

    fn gather(world: usize, variant: Variant, streams: usize, keep: bool, n: &[usize]) -> Lowered {
        let spec = AllGatherMatmul {
            m: 8 * world,
            k: 16,
            n: n.to_vec(),
            dtype: DType::BF16,
            bias: n.len() > 1,
            keep,
        };
        lower_all_gather_matmul(&spec, world, variant, streams).unwrap()
    }

    fn scatter(world: usize, variant: Variant, streams: usize, bias: bool) -> Lowered {
        let (m, k, n, dtype) = (4 * world, 8 * world, 16, DType::F16);
        let spec = MatmulReduceScatter {
            m,
            k,
            n,
            dtype,
            bias,
        };
        lower_matmul_reduce_scatter(&spec, world, variant, streams).unwrap()
    }

    #[test]
    fn every_variant_passes_for_1_to_16_ranks() {
        for world in 1..=16 {
            for variant in Variant::ALL {
                for streams in [1, 2, 3] {
                    accepted(&gather(world, variant, streams, false, &[24]), world);
                    accepted(&gather(world, variant, streams, true, &[24, 8]), world);
                    accepted(&scatter(world, variant, streams, false), world);
                    accepted(&scatter(world, variant, streams, true), world);
                }
            }
        }
    }

    /// Where shards and blocks are long enough, they travel in parts.
    #[test]
    fn parts_pass_for_1_to_16_ranks() {
        for (world, rows) in (1..=16).flat_map(|world| [(world, 514), (world, 4096)]) {
            let (m, k, dtype, bias) = (rows * world, 16 * world, DType::BF16, true);
            let keep = world % 2 == 0;
            // So many columns that parts fill a device.
            let gather = AllGatherMatmul {
                m,
                k,
                n: Vec::new(),
                dtype,
                bias,
                keep,
            };
            let scatter = |n| MatmulReduceScatter {
                m,
                k,
                n,
                dtype,
                bias,
            };
            let large = rows == 4096;
            for streams in [1, 2, 3] {
                for (variant, n, parts) in [
                    (
                        Variant::RingFine,
                        vec![6144, 2048],
                        if large { 4 } else { 2 },
                    ),
                    (Variant::PushFine, vec![1000, 24], if large { 4 } else { 1 }),
                ] {
                    let gather = AllGatherMatmul {
                        n,
                        ..gather.clone()
                    };
                    let lowered =
                        lower_all_gather_matmul(&gather, world, variant, streams).unwrap();
                    assert!(lowered.text.contains(&format!("let parts = {parts}\n")));
                    accepted(&lowered, world);
                }
                let parts = if large { 2 } else { 1 };
                for variant in [Variant::RingFine, Variant::RingCoarse] {
                    let spec = scatter(8192);
                    let lowered =
                        lower_matmul_reduce_scatter(&spec, world, variant, streams).unwrap();
                    assert!(lowered.text.contains(&format!("let parts = {parts}\n")));
                    accepted(&lowered, world);
                }
            }
        }
    }

    /// The shorter a product beside its copy, the more rings there are, up to one for two ranks.
    #[test]
    fn every_stride_passes_for_1_to_16_ranks() {
        for world in 1..=16 {
            let mut strides = Vec::new();
            for (rows, k, n) in [
                (4096, 4096, 8192),
                (4096, 2048, 8192),
                (4096, 2048, 1024),
                (1024, 1024, 3584),
            ] {
                let spec = MatmulReduceScatter {
                    m: rows * world,
                    k: k * world,
                    n,
                    dtype: DType::BF16,
                    bias: world % 2 == 0,
                };
                let lowered =
                    lower_matmul_reduce_scatter(&spec, world, Variant::RingFine, 2).unwrap();
                accepted(&lowered, world);
                let stride = (1..=world)
                    .find(|stride| lowered.text.contains(&format!("let stride = {stride}\n")));
                strides.push(stride.unwrap());
            }
            let most = (world / 2).max(1);
            assert_eq!(strides, [1, 2, 4, 8].map(|stride| stride.min(most)));
        }
    }

    #[test]
    fn sizes_that_do_not_divide_are_refused_with_a_way_out() {
        let spec = AllGatherMatmul {
            m: 100,
            k: 16,
            n: vec![8],
            dtype: DType::F32,
            bias: false,
            keep: false,
        };
        let error = lower_all_gather_matmul(&spec, 8, Variant::RingPut, 2).unwrap_err();
        assert_eq!(error.kind(), warplink::ErrorKind::InvalidArgument);
        assert!(error.to_string().ends_with("pad it to 104"), "{error}");
        let spec = AllGatherMatmul {
            dtype: DType::I32,
            m: 8,
            ..spec
        };
        assert!(lower_all_gather_matmul(&spec, 8, Variant::RingPut, 2).is_err());
    }

    #[test]
    fn the_choice_explains_itself_and_can_be_forced() {
        let machine = Machine::h200();
        let spec = |m, k, n| AllGatherMatmul {
            m,
            k,
            n: vec![n],
            dtype: DType::BF16,
            bias: false,
            keep: false,
        };
        // Bound by products, by the link, and by the latency of their steps.
        let mut chosen = Vec::new();
        for (m, k, n) in [
            (32768, 16384, 8192),
            (32768, 16384, 1024),
            (16384, 8192, 1024),
            (8192, 8192, 3584),
        ] {
            let choice = choose_all_gather_matmul(&spec(m, k, n), 8, &machine, None).unwrap();
            println!("{choice}");
            assert!(!choice.forced);
            assert_eq!(choice.variant, choice.estimates[0].variant);
            let lowered =
                lower_all_gather_matmul(&spec(m, k, n), 8, choice.variant, choice.streams);
            accepted(&lowered.unwrap(), 8);
            let scatter = MatmulReduceScatter {
                m,
                k,
                n,
                dtype: DType::BF16,
                bias: false,
            };
            let scattered = choose_matmul_reduce_scatter(&scatter, 8, &machine, None).unwrap();
            println!("{scattered}");
            chosen.push((choice.variant, scattered.variant));
        }
        assert_eq!(
            chosen,
            [
                (Variant::RingCoarse, Variant::RingFine),
                (Variant::PushFine, Variant::PushRotated),
                (Variant::PushFine, Variant::PushFine),
                (Variant::PairwiseGet, Variant::PushFine),
            ]
        );
        // So small that steps cost more than they hide.
        let choice = choose_all_gather_matmul(&spec(64, 64, 64), 8, &machine, None).unwrap();
        println!("{choice}");
        assert_eq!(choice.variant, Variant::Collective);
        // In f32 a product takes so long that copies hide behind it, and a sum has time to arrive.
        let single = MatmulReduceScatter {
            m: 32768,
            k: 16384,
            n: 8192,
            dtype: DType::F32,
            bias: false,
        };
        let choice = choose_matmul_reduce_scatter(&single, 8, &machine, None).unwrap();
        println!("{choice}");
        assert!(
            choice
                .estimates
                .iter()
                .all(|each| each.link < each.compute / 4.0)
        );
        let lowered = lower_matmul_reduce_scatter(&single, 8, Variant::RingFine, 2);
        assert!(lowered.unwrap().text.contains("let stride = 1\n"));
        let force = Some(Variant::PairwiseGet);
        let choice = choose_all_gather_matmul(&spec(64, 64, 64), 8, &machine, force).unwrap();
        assert!(choice.forced && choice.variant == Variant::PairwiseGet);
        assert!(choice.to_string().contains("as asked"));
    }

    /// Every wait, synchronize and post of a lowered program is there for a reason.
    #[test]
    fn nothing_can_be_left_out() {
        for variant in Variant::ALL {
            for lowered in [
                gather(4, variant, 2, true, &[8]),
                scatter(4, variant, 2, true),
            ] {
                let lines: Vec<&str> = lowered.text.lines().collect();
                for (number, line) in lines.iter().enumerate() {
                    let words = ["wait ", "synchronize ", "post "];
                    if !words.iter().any(|word| line.trim_start().starts_with(word)) {
                        continue;
                    }
                    let mut rest = lines.clone();
                    rest.remove(number);
                    let program = Program::parse(&rest.join("\n")).unwrap();
                    let verdict = verify(&program, 4, lowered.streams, &lowered.parameters);
                    // A stream that others' waits order already need not be forked or joined too,
                    // but then a reader has to work that out, and a graph has to be joined anyway.
                    let line = line.trim();
                    let added_up_apart = lowered.program.name.ends_with("scatter_ring_coarse");
                    let spare = ["synchronize high(0)", "synchronize main"].contains(&line)
                        || added_up_apart
                            && ["synchronize high(i)", "synchronize pool(i)"].contains(&line);
                    assert!(
                        spare || verdict.is_err(),
                        "{} does without line {}: {line}",
                        lowered.program.name,
                        number + 1
                    );
                }
            }
        }
    }

    #[test]
    fn sixty_four_ranks_are_fast() {
        for variant in Variant::ALL {
            for lowered in [
                gather(64, variant, 2, true, &[8]),
                scatter(64, variant, 2, true),
            ] {
                let start = std::time::Instant::now();
                accepted(&lowered, 64);
                let took = start.elapsed();
                println!("{}: {took:?}", lowered.program.name);
                let limit = if cfg!(debug_assertions) { 30.0 } else { 1.0 };
                assert!(
                    took.as_secs_f64() < limit,
                    "{} took {took:?}",
                    lowered.program.name
                );
            }
        }
    }
}

mod faulty {
    use super::*;

    /// The words after `# key:` in a program's comments.
    fn header<'a>(text: &'a str, key: &str) -> Vec<&'a str> {
        let lead = format!("# {key}:");
        let line = text.lines().find_map(|line| line.strip_prefix(&lead));
        line.unwrap_or_else(|| panic!("no line '{lead}'"))
            .split_whitespace()
            .collect()
    }

    #[test]
    fn each_is_refused_for_its_violation() {
        let folder = format!("{}/tests/faulty-programs", env!("CARGO_MANIFEST_DIR"));
        let (mut count, mut wrong) = (0, Vec::new());
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_stem().unwrap().to_string_lossy().into_owned();
            let text = std::fs::read_to_string(&path).unwrap();
            let program = Program::parse(&text).unwrap_or_else(|e| panic!("{name}:\n{e}"));
            assert_eq!(Program::parse(&program.to_string()).unwrap(), program);
            let kind: DiagnosticKind = header(&text, "violation")[0].parse().unwrap();
            let marked = text.lines().position(|line| line.ends_with("# <- here"));
            let marked = marked.unwrap_or_else(|| panic!("{name} marks no line")) + 1;
            for world in header(&text, "world") {
                let world: usize = world.parse().unwrap();
                let diagnostics = match verify(&program, world, 2, &parameters(&[("n", 8)])) {
                    Ok(_) => {
                        wrong.push(format!("{name} passes for {world} ranks"));
                        continue;
                    }
                    Err(diagnostics) => diagnostics,
                };
                for diagnostic in &diagnostics {
                    println!("{name} × {world}: {diagnostic}");
                    assert!(diagnostic.ranks().iter().all(|rank| *rank < world));
                }
                let first = &diagnostics[0];
                if first.kind != kind || !first.lines().contains(&(marked as u32)) {
                    wrong.push(format!(
                        "{name} × {world}: expected {kind} in line {marked}: {first}"
                    ));
                }
            }
            count += 1;
        }
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
        assert!(count >= 25, "only {count} programs");
    }
}
