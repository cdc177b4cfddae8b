//! The verifier on examples, on faulty programs and on lowered ones.

use warplink::program::{Parameters, Program, verify};

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
        for world in [1, 2, 3, 4, 5, 8, 16] {
            let sizes = program
                .parameters
                .iter()
                .map(|name| (name.as_str(), 240 * 16))
                .collect::<Vec<_>>();
            for streams in [1, 2, 3] {
                match verify(&program, world, streams, &parameters(&sizes)) {
                    Ok(report) => assert_eq!(report.world, world),
                    Err(findings) => {
                        for finding in &findings {
                            println!("{finding}");
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
        AllGatherMatmul, Lowered, MatmulReduceScatter, Variant, lower_all_gather_matmul,
        lower_matmul_reduce_scatter,
    };

    fn accepted(lowered: &Lowered, world: usize) {
        if let Err(findings) = verify(
            &lowered.program,
            world,
            lowered.streams,
            &lowered.parameters,
        ) {
            println!("{}", lowered.text);
            for finding in &findings {
                println!("{finding}");
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
    use warplink::program::FindingKind;

    /// The words after `# key:` in a program's comments.
    fn header<'a>(text: &'a str, key: &str) -> Vec<&'a str> {
        let lead = format!("# {key}:");
        let line = text.lines().find_map(|line| line.strip_prefix(&lead));
        line.unwrap_or_else(|| panic!("no line '{lead}'"))
            .split_whitespace()
            .collect()
    }

    #[test]
    fn each_is_refused_for_its_fault() {
        let folder = format!("{}/tests/faulty-programs", env!("CARGO_MANIFEST_DIR"));
        let (mut count, mut wrong) = (0, Vec::new());
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_stem().unwrap().to_string_lossy().into_owned();
            let text = std::fs::read_to_string(&path).unwrap();
            let program = Program::parse(&text).unwrap_or_else(|e| panic!("{name}:\n{e}"));
            assert_eq!(Program::parse(&program.to_string()).unwrap(), program);
            let kind: FindingKind = header(&text, "fault")[0].parse().unwrap();
            let marked = text.lines().position(|line| line.ends_with("# <- here"));
            let marked = marked.unwrap_or_else(|| panic!("{name} marks no line")) + 1;
            for world in header(&text, "world") {
                let world: usize = world.parse().unwrap();
                let findings = match verify(&program, world, 2, &parameters(&[("n", 8)])) {
                    Ok(_) => {
                        wrong.push(format!("{name} passes for {world} ranks"));
                        continue;
                    }
                    Err(findings) => findings,
                };
                for finding in &findings {
                    println!("{name} × {world}: {finding}");
                    assert!(finding.ranks().iter().all(|rank| *rank < world));
                }
                let first = &findings[0];
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
