//! Every kernel compiles for every architecture that is served. Needs NVRTC but no GPU.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::path::Path;
use warplink::collective::{
    ExpertOptions, Overflow, Quantization, RowLayout, dispatch_program, expert_programs,
    fused_programs, message_kernels,
};
use warplink::device::{ReduceOp, cuda};
use warplink::program::section::SectionInstance;
use warplink::program::{Parameters, Program, unroll};
use warplink::{DType, ErrorKind};

/// How far a kernel is optimized. That takes most of the time and finds few errors, so texts that are compiled for several
/// architectures are optimized for one of them.
#[derive(Clone, Copy, PartialEq)]
enum Optimized {
    Fully,
    Least,
}
use Optimized::{Fully, Least};

impl Optimized {
    fn fully_if(condition: bool) -> Self {
        if condition { Fully } else { Least }
    }

    fn options(self) -> Vec<String> {
        match self {
            Fully => Vec::new(),
            Least => vec!["--Ofast-compile=max".to_owned()],
        }
    }
}

/// Compiles `text` for every architecture, fully optimized for the one of that number. Returns false if there is no NVRTC.
fn compiles_everywhere(name: &str, text: &str, number: usize) -> bool {
    let all = cuda::ARCHITECTURES;
    all.iter().all(|architecture| {
        let optimized = Optimized::fully_if(*architecture == all[number % all.len()]);
        compiles(name, text, architecture, optimized)
    })
}

/// Panics if `text` does not compile. Returns false if there is no NVRTC.
fn compiles(name: &str, text: &str, architecture: &str, optimized: Optimized) -> bool {
    match cuda::compile(name, text, architecture, &optimized.options()) {
        Ok(code) => assert!(!code.is_empty()),
        Err(error) if error.kind() == ErrorKind::LibraryMissing => return false,
        Err(error) => panic!("{name}, {architecture}: {error}\n{text}"),
    }
    true
}

#[test]
fn every_kernel_compiles_for_every_architecture() {
    for architecture in cuda::ARCHITECTURES {
        let optimized = Optimized::fully_if(architecture == "sm_90");
        match cuda::compile_all(&[architecture], &optimized.options()) {
            Ok(compiled) => {
                assert!(!compiled.is_empty());
                for kernel in compiled {
                    println!("{} for {architecture}: {} bytes", kernel.name, kernel.bytes);
                    assert!(kernel.bytes > 0);
                }
            }
            Err(error) if error.kind() == ErrorKind::LibraryMissing => {
                let required =
                    std::env::var("WARPLINK_REQUIRE_NVRTC").is_ok_and(|value| value == "1");
                assert!(!required, "NVRTC is required here: {error}");
                println!("skipped: {error}");
            }
            Err(error) => panic!("{error}"),
        }
    }
}

/// Kernels as users write them: the tests', the example's and the benchmark's.
#[test]
fn kernels_that_include_the_header_compile_for_every_architecture() {
    let files = [
        ("channels/kernels.cu", include_str!("channels/kernels.cu")),
        ("channels/groups.cu", include_str!("channels/groups.cu")),
        ("ping_pong.cu", include_str!("../examples/ping_pong.cu")),
        (
            "halo_exchange.cu",
            include_str!("../examples/halo_exchange.cu"),
        ),
        (
            "bench channel",
            include_str!("../../warplink-cli/src/commands/bench/cases/channel/kernels.cu"),
        ),
    ];
    for (number, (name, text)) in files.into_iter().enumerate() {
        if !compiles_everywhere(name, text, number) {
            return;
        }
    }
}

#[test]
fn kernels_of_messages_compile_for_every_architecture() {
    for (number, text) in message_kernels().unwrap().iter().enumerate() {
        if !compiles_everywhere("messages", text, number) {
            return;
        }
    }
}

/// The sections of the example programs and of collectives for a world, as rank 0 launches them.
fn sections(world: usize) -> Vec<(String, SectionInstance)> {
    let folders = ["../../examples/programs", "src/collective/programs"];
    let mut files: Vec<_> = folders
        .iter()
        .map(|folder| Path::new(env!("CARGO_MANIFEST_DIR")).join(folder))
        .flat_map(|folder| std::fs::read_dir(folder).expect("programs"))
        .map(|entry| entry.expect("a program").path())
        .filter(|path| path.extension().is_some_and(|it| it == "wlp"))
        .collect();
    files.sort();
    let mut all = Vec::new();
    for file in files {
        let text = std::fs::read_to_string(&file).expect("an example");
        if !text.contains("kernel ") {
            continue;
        }
        let program = Program::parse(&text).unwrap_or_else(|error| panic!("{file:?}: {error}"));
        let mut parameters = Parameters::new();
        for parameter in &program.parameters {
            if parameter.kind.alternatives().is_empty() {
                let value = match parameter.name.as_str() {
                    "root" => 1,
                    // Ranks of a hybrid cube mesh, in their order.
                    "order" | "places" => 0o7654_3210,
                    _ => 1000,
                };
                parameters.insert(&parameter.name, value);
            }
        }
        // Some are for two ranks only.
        let Ok(rank_program) = unroll(&program, 0, world, 2, &parameters) else {
            continue;
        };
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        for section in rank_program.sections() {
            all.push((name.to_string(), section.clone()));
            // Where tensors are announced, as it finds them by tables, too.
            if text.contains(" with ") {
                let published = SectionInstance {
                    published: true,
                    ..section.clone()
                };
                all.push((format!("{name}, published"), published));
            }
        }
    }
    all
}

// In two tests, which processors share: in one, it would take as long as all others together.
#[test]
fn every_section_of_an_even_number_compiles_for_every_architecture() {
    compile_sections(0);
}

#[test]
fn every_section_of_an_odd_number_compiles_for_every_architecture() {
    compile_sections(1);
}

/// Compiles every other section, from the one of number `first`.
fn compile_sections(first: usize) {
    let cases = [(2, true), (8, false)];
    let mut compiled = 0;
    for (world, aligned) in cases {
        let numbered = sections(world).into_iter().enumerate();
        for (number, (name, section)) in numbered.skip(first).step_by(2) {
            let text = section
                .kernel(aligned)
                .unwrap_or_else(|error| panic!("{name}: {error}"));
            let traced = section
                .traced_kernel(aligned)
                .unwrap_or_else(|error| panic!("{name}: {error}"));
            // What is not traced pays for nothing.
            assert!(!text.contains("times") && traced.contains("times.step("));
            if world == 2 && !compiles(&name, &traced, "sm_90", Least) {
                return;
            }
            let all = &cuda::ARCHITECTURES[..];
            let architectures = if world == 2 { all } else { &all[1..2] };
            for architecture in architectures {
                let optimized = Optimized::fully_if(*architecture == all[number % all.len()]);
                if !compiles(&name, &text, architecture, optimized) {
                    return;
                }
                compiled += 1;
            }
        }
    }
    assert!(compiled > 0, "no example has a section");
}

/// Fused calls with every epilogue, a third of the programs, each for one of the architectures: together they have all.
#[test]
fn every_fused_call_compiles() {
    let worlds = [2, 3, 8];
    let programs = worlds.map(|world| fused_programs(world).expect("programs of fused calls"));
    for number in 0..programs[0].len().div_ceil(3) {
        let named = &programs[number % 3][3 * number];
        if !program_compiles(named, worlds[number % 3], number) {
            return;
        }
    }
    let count = programs[0].len();
    assert!(count > 80, "{count} programs");
}

/// The combine of experts for tokens of few and many experts, each for another architecture.
#[test]
fn every_combine_of_experts_compiles() {
    let programs = expert_programs().expect("programs of layers of experts");
    for (number, (named, world)) in programs.iter().zip([1, 2, 8]).enumerate() {
        if !program_compiles(named, world, number) {
            return;
        }
    }
}

/// The dispatch of experts for any number of ranks, each for another architecture.
#[test]
fn every_dispatch_of_experts_compiles() {
    let (drop, block) = (Overflow::Drop, Some(Quantization::PerBlock));
    for (number, (world, layout, overflow, quantization, quantized_tokens)) in [
        (1, RowLayout::BySource, Overflow::Fail, None, false),
        (2, RowLayout::ByExpert, drop, None, false),
        (8, RowLayout::OncePerRank, drop, block, false),
        (8, RowLayout::ByExpert, Overflow::Fail, block, true),
        (8, RowLayout::BySource, Overflow::Fail, None, false),
    ]
    .into_iter()
    .enumerate()
    {
        let options = ExpertOptions {
            top_k: 8,
            layout,
            overflow,
            quantization,
            quantized_tokens,
            ..ExpertOptions::default()
        };
        let program = dispatch_program(&options, world).expect("a program of layers of experts");
        if !program_compiles(&program, world, number) {
            return;
        }
    }
}

/// Compiles the kernel of a shipped program for one of the architectures. Returns false if there is no NVRTC.
fn program_compiles((name, program): &(String, Program), world: usize, number: usize) -> bool {
    let mut parameters = Parameters::new();
    for parameter in &program.parameters {
        if parameter.kind.alternatives().is_empty() {
            let value = match parameter.name.as_str() {
                "room" => 1 << 20,
                // As many rows of each rank.
                "tokens" => 1008,
                "deep" => 2,
                // Of blocks of 128 elements.
                "scales" => 8,
                _ => 1000,
            };
            parameters.insert(&parameter.name, value);
        }
    }
    let rank_program = unroll(program, 0, world, 1, &parameters).expect("a rank's program");
    let section = rank_program.sections().next().expect("a kernel");
    let architecture = cuda::ARCHITECTURES[number % cuda::ARCHITECTURES.len()];
    let few = ["OneShot", "Lined"].iter().any(|way| name.contains(way));
    let clusters = few && architecture != "sm_80";
    let section = SectionInstance {
        published: program.to_string().contains(" with "),
        blocks: if clusters { 4 } else { 1 },
        ..section.clone()
    };
    let text = section.kernel(number.is_multiple_of(2)).expect("a kernel");
    // For each architecture, as there are four.
    compiles(
        name,
        &text,
        architecture,
        Optimized::fully_if(number.is_multiple_of(3)),
    )
}

/// Names of integers and tensors in a section mean nothing else in the kernel.
#[test]
fn sections_compile_whatever_they_name() {
    let text = "program test(times, room, Announced, Index, int) {
        input X: f32[64]
        input self: f32[64]
        output View: f32[64]
        output Times: f32[64]
        scratch located: packets16 i32[2, world, 2]
        kernel inbound in 0..2 threads 64 {
            let size_ = times + room
            let at = View[0..int]
            announce Announced, int in located[epoch % 2]
            agree Announced, int in located[epoch % 2]
            for own in 0..Index { if own == size_ { barrier } }
            at = copy(self[0..int])
            Times = reduce(X, self, sum)
        }
    }";
    let program = Program::parse(text).expect("a program");
    let names = ["times", "room", "Announced", "Index", "int"];
    let parameters = Parameters::from(names.map(|name| (name, 8)));
    let rank_program = unroll(&program, 0, 2, 1, &parameters).expect("a rank's program");
    let section = rank_program.sections().next().expect("a kernel");
    for kernel in [section.kernel(true), section.traced_kernel(true)] {
        compiles("names", &kernel.expect("a kernel"), "sm_90", Least);
    }
}

/// Every type, each with one of the operators, where floats of 8 bits have instructions and where not.
#[test]
fn reductions_of_every_type_compile() {
    let text = include_str!("../src/collective/programs/all_reduce_one_shot.wlp");
    let program = Program::parse(text).expect("a program");
    for (number, dtype) in DType::ALL.into_iter().enumerate() {
        let plain = ReduceOp::ALL[number % ReduceOp::ALL.len()];
        let scaled = dtype.is_float().then_some(ReduceOp::scaled_sum(0.5));
        for op in [plain].into_iter().chain(scaled) {
            reduction_compiles(&program, dtype, op, number.is_multiple_of(2));
        }
    }
}

fn reduction_compiles(program: &Program, dtype: DType, op: ReduceOp, aligned: bool) {
    let mut parameters = Parameters::new().with("T", dtype).with("op", op);
    for name in ["n", "room", "what", "length", "upper", "factor"] {
        parameters.insert(name, 1000);
    }
    let rank_program = unroll(program, 0, 2, 1, &parameters).expect("a rank's program");
    for section in rank_program.sections() {
        let kernel = section.kernel(aligned).expect("a kernel");
        // One without instructions for floats of 8 bits, and one with them.
        for architecture in &cuda::ARCHITECTURES[..2] {
            compiles(
                &format!("all_reduce of {dtype} with {op}"),
                &kernel,
                architecture,
                Optimized::fully_if((*architecture == "sm_80") == aligned),
            );
        }
    }
}

#[test]
fn what_does_not_compile_is_an_error_with_the_compilers_words() {
    let text = "#include <warplink/device.cuh>\n__device__ int broken() { return missing; }";
    match cuda::compile("broken.cu", text, "sm_90", &[]) {
        Ok(_) => panic!("compiled"),
        Err(error) if error.kind() == ErrorKind::LibraryMissing => {}
        Err(error) => {
            let text = error.to_string();
            assert!(
                text.contains("broken.cu") && text.contains("missing"),
                "{text}"
            );
        }
    }
}

#[test]
fn an_architecture_that_does_not_exist_is_an_error() {
    match cuda::compile_all(&["sm_1"], &[]) {
        Ok(compiled) => panic!("compiled for sm_1: {compiled:?}"),
        Err(error) => assert!(
            matches!(error.kind(), ErrorKind::Driver | ErrorKind::LibraryMissing),
            "{error}"
        ),
    }
}

/// Functions of rows with every operation and kind of operand, of every type that they take.
#[test]
fn functions_of_rows_compile_for_every_architecture() {
    let text = "program test(n, P = f32 | bf16 | f16 | f8e4m3 | f8e5m2, threads = 1024 | 128, op = sum | average) {
        input X: P[4, n]
        input R: P[4, n]
        input W: f32[n]
        input S: f16[4]
        output H: P[4, n]
        output Q: f8e4m3[4, n]
        output M: f32[4]
        output D: P[4, n]
        output G: f32[4, n / 128]
        output E: u8[4, (n + 1) / 2]
        scratch A: packets16 P[2, world, n]
        scratch B: packets8 P[2, world, n]
        function all(x, r, w, s, y, eps) {
            let h = round(x + r, P)
            let centred = h - row_sum(h) / width
            let scale = max(row_max(abs(centred)) / 448, 1e-12)
            let n = centred * rsqrt(row_sum(centred * centred) / width + eps)
            return h, round(n * (w + 1) / scale, f8e4m3), scale * s, select(exp(-y) < 2, sqrt(y), min(y, w))
        }
        function blocks(x) {
            let scale = power_of_two(block_max(abs(x), 128) / 448)
            return x / scale, scale, row_sum(scale) + row_max(block_max(x / scale, 8)), pairs(e2m1(x / scale))
        }
        function plain(x) { return -x * 2 }
        kernel lane in 0..2 threads threads {
            let slot = epoch % 2
            for r in 1..world {
                put X[lane] to A[slot][rank] on (rank + r) % world
                put R[lane] to B[slot][rank] on (rank + r) % world
            }
            H[lane]; Q[lane]; M[lane]; D[lane], D[lane + 2] on r for r in 0..world =
                all(reduce(X[lane] if r == rank else A[slot][r] for r in 0..world, op), R[lane], W, S[lane],
                    reduce(R[lane] if r == rank else B[slot][r] for r in 0..world, max), 1e-5)
            A[slot][rank] on rank = plain(X[lane])
            H[lane + 2] = plain(A[slot][rank])
            Q[lane]; G[lane]; M[lane]; E[lane], E[lane] on (rank + 1) % world = blocks(A[slot][rank])
            Q[lane + 2]; M[lane + 2] = plain_two(X[lane + 2], M[lane])
            barrier
        }
    }";
    let text = text.replace(
        "function plain(x)",
        "function plain_two(x, y) { return x * y, y * y }\n        function plain(x)",
    );
    let program = Program::parse(&text).unwrap();
    for (dtype, world, threads, aligned, architecture, optimized) in [
        (DType::F32, 2, 1024, true, "sm_80", Fully),
        (DType::BF16, 2, 1024, true, "sm_90", Fully),
        (DType::BF16, 8, 1024, true, "sm_90", Least),
        (DType::F16, 8, 128, false, "sm_100", Least),
        (DType::F8E4M3, 3, 128, true, "sm_80", Least),
        (DType::F8E5M2, 2, 1024, false, "sm_120", Fully),
    ] {
        let parameters = Parameters::new()
            .with("n", 4096)
            .with("P", dtype)
            .with("threads", threads)
            .with("op", ReduceOp::Average);
        let ranks = unroll(&program, 0, world, 2, &parameters).unwrap();
        let section = ranks.sections().next().unwrap();
        let text = section.kernel(aligned).unwrap();
        let name = format!("rows of {dtype} for {world} ranks");
        if !compiles(&name, &text, architecture, optimized) {
            return;
        }
    }
}
