//! Costs of verification: time and memory in proportion to the operations, or an early refusal.

use crate::stopwatch::time_on_processor;
use std::fmt::Write as _;
use std::time::Duration;
use warplink::DType;
use warplink::program::lower::{
    AllGatherMatmul, AllGatherMatmulLowering, Lowering, MatmulReduceScatter,
    MatmulReduceScatterLowering, Problem, lower,
};
use warplink::program::{Diagnostic, Parameters, Program, Report, verify};

/// How many times as long a debug build may take.
const DEBUG_FACTOR: u32 = if cfg!(debug_assertions) { 10 } else { 1 };

/// `n`, or less in a debug build.
const fn size(n: i64) -> i64 {
    if cfg!(debug_assertions) {
        n.div_euclid(10)
    } else {
        n
    }
}

/// The most memory that the process had, in MB, where the system says so.
fn peak_mb() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|line| line.starts_with("VmHWM:"))?;
    let kb: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kb / 1024)
}

/// As [`within_after`], of what needs no preparation.
fn within(name: &str, limit: Duration, limit_mb: u64, case: impl FnOnce()) {
    within_after(name, limit, limit_mb, || (), |()| case());
}

/// Runs `case` with what `prepare` makes in a process of its own, and fails where the case takes longer or
/// the process needs more memory than allowed.
fn within_after<T>(
    name: &str,
    limit: Duration,
    limit_mb: u64,
    prepare: impl FnOnce() -> T,
    case: impl FnOnce(T),
) {
    const CASE: &str = "WARPLINK_LIMITS_CASE";
    const TEST: &str = "limits::verification_costs_time_and_memory_in_proportion";
    match std::env::var(CASE) {
        Ok(wanted) if wanted == name => {
            let prepared = prepare();
            let ((), took) = time_on_processor(|| case(prepared));
            let peak = peak_mb().unwrap_or(0);
            println!("{name}: {took:.3?}, {peak} MB");
            assert!(took < limit * DEBUG_FACTOR, "{name} took {took:?}");
            assert!(peak < limit_mb, "{name} needed {peak} MB");
        }
        Ok(_) => {}
        Err(_) => {
            let output = std::process::Command::new(std::env::current_exe().unwrap())
                .args([TEST, "--exact", "--nocapture", "--test-threads=1"])
                .env(CASE, name)
                .output()
                .unwrap();
            let said = String::from_utf8_lossy(&output.stdout);
            let noise = ["running ", "test result", "ok", "failures", "FAILED"];
            let lead = format!("test {TEST} ... ");
            for line in said.lines().map(|line| line.trim_start_matches(&lead)) {
                if !line.is_empty() && !noise.iter().any(|noise| line.starts_with(noise)) {
                    println!("{line}");
                }
            }
            if !output.status.success() {
                println!(
                    "{name} FAILS: {}",
                    String::from_utf8_lossy(&output.stderr)
                        .lines()
                        .nth(2)
                        .unwrap_or_default()
                );
            }
            if !output.status.success() && std::env::var_os("WARPLINK_MEASURE").is_none() {
                panic!("{name}:\n{said}{}", String::from_utf8_lossy(&output.stderr));
            }
        }
    }
}

fn check(
    text: &str,
    world: usize,
    streams: usize,
    parameters: &[(&str, i64)],
) -> Result<Report, Vec<Diagnostic>> {
    let program = match Program::parse(text) {
        Ok(program) => program,
        Err(error) => {
            let error = error.to_string();
            let kind = warplink::program::DiagnosticKind::Malformed;
            return Err(vec![Diagnostic::new(kind, error, Vec::new())]);
        }
    };
    let mut given = Parameters::new();
    for &(name, value) in parameters {
        given.insert(name, value);
    }
    verify(&program, world, streams, &given)
}

const TWO_SECONDS: Duration = Duration::from_secs(2);

fn ordinary(world: usize, streams: usize, limit: Duration, limit_mb: u64) {
    let gather = AllGatherMatmul {
        transposed_b: false,
        m: 8 * world,
        k: 16,
        n: vec![24],
        dtype: DType::BF16,
        bias: false,
        keep: true,
    };
    let scatter = MatmulReduceScatter {
        transposed_b: false,
        m: 4 * world,
        k: 8 * world,
        n: 16,
        dtype: DType::F16,
        bias: true,
    };
    for one in AllGatherMatmulLowering::ALL {
        let lowering = &one.lowering().unwrap();
        verified(
            ("gather", &gather),
            lowering,
            (world, streams),
            limit,
            limit_mb,
        );
    }
    for one in MatmulReduceScatterLowering::ALL {
        let lowering = &one.lowering().unwrap();
        verified(
            ("scatter", &scatter),
            lowering,
            (world, streams),
            limit,
            limit_mb,
        );
    }
}

fn verified<P: Problem>(
    (operation, problem): (&str, &P),
    lowering: &Lowering,
    (world, streams): (usize, usize),
    limit: Duration,
    limit_mb: u64,
) {
    let name = format!("{operation} {} × {world} × {streams}", lowering.name());
    within_after(
        &name,
        limit,
        limit_mb,
        || lower(problem, lowering, world, streams).unwrap(),
        |lowered| match verify(lowered.program(), world, streams, &lowered.parameters) {
            Ok(report) => println!("{} operations", report.operations),
            Err(diagnostics) => panic!("{name}: {}", diagnostics[0]),
        },
    );
}

fn unmatched_transfers() {
    let text = "program unmatched(n) {
        input A: f32[n]
        allocate W: f32[n]
        share {
            for i in 0..n {
                if rank == 0 {
                    s = send A[i] to 1 tag i via put
                } else {
                    r = receive W[i] from 0 tag n + i via put
                }
            }
        }
    }";
    within("unmatched transfers", TWO_SECONDS, 500, || {
        let refused = check(text, 2, 1, &[("n", size(200_000))]).unwrap_err();
        println!("{}", refused[0]);
    });
    let text = text.replace(
        "r = receive W[i] from 0 tag n + i",
        "s = send W[i] to 0 tag i",
    );
    within("transfers without an end", TWO_SECONDS, 500, || {
        let refused = check(&text, 2, 1, &[("n", size(200_000))]).unwrap_err();
        println!("{}", refused[0]);
    });
}

fn reversed_copies() {
    let text = "program reversed(n) {
        input A: f32[n]
        output C: f32[n]
        for i in 0..n {
            C[n - 1 - i] = copy(A[n - 1 - i])
        }
    }";
    within("reversed copies", TWO_SECONDS, 500, || {
        check(text, 1, 1, &[("n", size(300_000))]).unwrap();
    });
    // Rows that are read in one order and written in another, on two streams.
    let text = "program woven(n) {
        input A: f32[2 * n]
        output C: f32[2 * n]
        for i in 0..n {
            set_stream caller
            C[2 * i] = copy(A[2 * n - 1 - 2 * i])
            set_stream pool(0)
            if i == 0 {
                synchronize caller
            }
            C[2 * i + 1] = copy(A[2 * n - 2 - 2 * i])
        }
        set_stream caller
        synchronize pool(0)
    }";
    within("woven copies", TWO_SECONDS, 500, || {
        check(text, 1, 1, &[("n", size(90_000))]).unwrap();
    });
}

/// Copies that each race with all others.
fn racing_copies() {
    let text = "program racing(n) {
        input A: f32[1]
        output C: f32[n]
        for i in 0..n {
            set_stream pool(i % streams)
            C[i] = copy(A[0])
            C[0] = copy(A[0])
        }
    }";
    within("racing copies", TWO_SECONDS, 500, || {
        let refused = check(text, 1, 8, &[("n", size(100_000))]).unwrap_err();
        println!("{}", refused[0]);
    });
    // A range that many streams read, then many write.
    let text = "program readers(n) {
        input A: f32[n]
        output C: f32[streams, n]
        for s in 0..streams {
            set_stream pool(s)
            synchronize caller
            for i in 0..n {
                C[s][i] = copy(A[i])
            }
        }
        set_stream caller
        for s in 0..streams {
            synchronize pool(s)
        }
    }";
    within("many readers", TWO_SECONDS, 500, || {
        check(text, 1, 64, &[("n", size(4000))]).unwrap();
    });
}

fn long_expressions() {
    for (name, part, lead, end) in [
        ("sums", "1+", "let x = ", "1"),
        ("negations", "-", "let x = ", "1"),
        ("parentheses", "(", "let x = ", "1"),
        ("conditions", "1 == 1 and ", "require ", "1 == 1"),
        ("negated conditions", "not ", "require ", "1 == 1"),
    ] {
        let long = part.repeat(500_000 / part.len());
        let text = format!("program long() {{\n    {lead}{long}{end}\n}}\n");
        within(name, TWO_SECONDS, 500, || {
            let said = check(&text, 2, 1, &[]).unwrap_err()[0].to_string();
            assert!(said.len() < 2000, "{name}: {} bytes", said.len());
            println!("{}", said.lines().next().unwrap());
        });
    }
    // 200 kB, evaluated again and again.
    let mut long = "rank".to_owned();
    while long.len() < 100_000 {
        long = format!("({long} + {long})");
    }
    let text = format!(
        "program long() {{\n    for i in 0..100000 {{\n        require {long} >= 0\n    }}\n}}\n"
    );
    within("long expressions", TWO_SECONDS, 500, || {
        let refused = check(&text, 2, 1, &[]).unwrap_err();
        let said = refused[0].to_string();
        assert!(said.len() < 2000, "{} bytes", said.len());
        println!("{said}");
    });
}

/// Loops that do nothing, on many ranks.
fn many_steps() {
    let text = "program idle(n) {
        for i in 0..n {
            for j in 0..n {
                let x = i + j
            }
        }
    }";
    for (name, world, n) in [("idle loops", 4096, 500), ("a long idle loop", 2, 5000)] {
        within(name, TWO_SECONDS, 500, || {
            let refused = check(text, world, 2, &[("n", n)]).unwrap_err();
            assert_eq!(refused.len(), 1);
            println!("{}", refused[0]);
        });
    }
}

/// One transfer that is posted and waited for again and again, or at the end.
fn repeated_posts() {
    let text = "program again(n) {
        input A: f32[8]
        output C: f32[8]
        share {
            s = send A to (rank + 1) % world via get
            r = receive C from (rank - 1) % world via get
        }
        for i in 0..n {
            post s, r
            wait s, r
        }
    }";
    within("repeated posts", TWO_SECONDS, 500, || {
        check(text, 16, 2, &[("n", size(40_000))]).unwrap();
    });
    let text = "program groups(n) {
        input A: f32[n]
        output C: f32[n]
        let peer = 1 - rank
        share {
            for i in 0..n {
                s = send A[i] to peer tag i via put
                r = receive C[i] from peer tag i via put
            }
        }
        post r[i] for i in 0..n
        post s[n - 1 - i] for i in 0..n
        wait s[i] for i in 0..n
        wait r[n - 1 - i] for i in 0..n
    }";
    within("large groups", TWO_SECONDS, 500, || {
        check(text, 2, 2, &[("n", size(100_000))]).unwrap();
    });
    // Posted one by one in the other order than the peer.
    let text = text
        .replace("post r[i] for i in 0..n", "for i in 0..n { post r[i] }")
        .replace(
            "post s[n - 1 - i] for i in 0..n",
            "for i in 0..n { post s[n - 1 - i] }",
        );
    within("posts in the other order", TWO_SECONDS, 500, || {
        check(&text, 2, 2, &[("n", size(60_000))]).unwrap();
    });
}

fn many_parameters() {
    let names: Vec<String> = (0..60_000).map(|i| format!("p{i}")).collect();
    let text = format!("program many({}) {{\n}}\n", names.join(", "));
    let values: Vec<(&str, i64)> = names.iter().map(|name| (name.as_str(), 1)).collect();
    within("many parameters", TWO_SECONDS, 500, || {
        let refused = check(&text, 2, 1, &values).unwrap_err();
        println!("{}", refused[0]);
    });
    // As many as there may be, used all the time.
    let names: Vec<String> = (0..1000).map(|i| format!("p{i}")).collect();
    let mut text = format!(
        "program many({}) {{\n    input A: f32[p0]\n    output C: f32[p0]\n    for i in 0..100000 {{\n",
        names.join(", ")
    );
    for name in ["p0", "p999"] {
        let _ = writeln!(text, "        require {name} == 1");
    }
    text += "    }\n    C = copy(A)\n}\n";
    within("used parameters", TWO_SECONDS, 500, || {
        let verdict = check(&text, 1, 1, &values[..1000]);
        verdict.unwrap_or_else(|e| panic!("{}", e[0]));
    });
}

fn many_transfers() {
    let text = "program ring(n) {
        input A: f32[8]
        output C: f32[8]
        allocate W: f32[8]
        W = copy(A)
        for i in 0..n {
            share {
                s = send W to (rank + 1) % world via get
                r = receive C from (rank - 1) % world via get
            }
            post s, r
            wait s, r
            W = copy(C)
        }
    }";
    let world = 64;
    within("many transfers", TWO_SECONDS, 500, || {
        check(text, world, 2, &[("n", size(2000))]).unwrap();
    });
    within("too many transfers", TWO_SECONDS, 500, || {
        let refused = check(text, world, 2, &[("n", 150_000)]).unwrap_err();
        assert_eq!(refused.len(), 1);
        println!("{}", refused[0]);
    });
    // One exchange of everything, posted from the last to the first.
    let text = "program all(n) {
        input A: f32[n]
        output C: f32[world, n]
        C[rank] = copy(A)
        share {
            for j in 1..world {
                for i in 0..n {
                    s = send A[i] to (rank + j) % world tag i via put
                    r = receive C[(rank - j) % world][i] from (rank - j) % world tag i via put
                }
            }
        }
        post r[j][n - 1 - i] for j in 1..world for i in 0..n
        post s[j][i] for j in 1..world for i in 0..n
        wait s[j][i] for j in 1..world for i in 0..n
        wait r[j][i] for j in 1..world for i in 0..n
    }";
    let text = text
        .replace(
            "post r[j][n - 1 - i] for j in 1..world for i in 0..n",
            "for j in 1..world { post r[j][n - 1 - i] for i in 0..n }",
        )
        .replace(
            "post s[j][i] for j in 1..world for i in 0..n",
            "for j in 1..world { post s[j][i] for i in 0..n }",
        )
        .replace(
            "wait s[j][i] for j in 1..world for i in 0..n",
            "for j in 1..world { wait s[j][i] for i in 0..n }",
        )
        .replace(
            "wait r[j][i] for j in 1..world for i in 0..n",
            "for j in 1..world { wait r[j][i] for i in 0..n }",
        );
    within("all to all", TWO_SECONDS, 500, || {
        check(&text, world, 2, &[("n", size(32))]).unwrap();
    });
}

fn many_collectives() {
    let text = "program collectives(n) {
        input A: f32[world, 8]
        output C: f32[world, 8]
        C = all_reduce(A, sum)
        for i in 0..n {
            C = all_reduce(C, sum)
        }
    }";
    within("many collectives", TWO_SECONDS, 500, || {
        check(text, 256, 8, &[("n", size(500))]).unwrap();
    });
}

/// Collectives among rows, and among all ranks in another order, in a program that is called.
fn many_collectives_among_some() {
    let text = "program some(n, list[]) {
        input A: f32[8]
        output C: f32[8]
        C = copy(A)
        for i in 0..n {
            C = all_reduce(C, sum) among list
        }
    }
    program lists(n) {
        input A: f32[8]
        output C: f32[8]
        output D: f32[8]
        let row = [rank / 16 * 16 + c for c in 0..16]
        let back = [world - 1 - r for r in 0..world]
        some(n = n, list = row, A = A, C = C)
        some(n = n, list = back, A = A, C = D)
    }";
    within("collectives among some", TWO_SECONDS, 500, || {
        check(text, 256, 8, &[("n", size(400))]).unwrap();
    });
    within("calls", TWO_SECONDS, 500, || {
        let text = "program nothing(n) { require n > 0 }
            program calls(n) { for i in 0..n { nothing(n = n) } }";
        let refused = check(text, 64, 2, &[("n", 1_000_000)]).unwrap_err();
        println!("{}", refused[0]);
    });
}

/// Kernels with more lanes, steps or operands than are followed.
fn large_kernels() {
    let text = "program large(n, k) {
        input X: f32[64]
        output Y: f32[64]
        kernel lane in 0..n threads 64 {
            for i in 0..k { barrier }
            if lane == 0 { Y = copy(X) }
        }
    }";
    within("large kernels", TWO_SECONDS * 2, 1500, || {
        for (world, k) in [(256, 2), (2048, 0), (2, 10_000)] {
            let refused = check(text, world, 2, &[("n", 1024), ("k", k)]).unwrap_err();
            println!("{}", refused[0]);
            assert!(refused[0].message.contains("too large to verify"));
        }
    });
}

/// Lanes of all ranks that wait for one another by number: four times as many take four times as long, and not sixteen.
fn growing_kernels() {
    let heads = "input X: f32[n]\n output Y: f32[n]\n scratch P: packets16 f32[2, world, n]";
    for (name, body) in [
        (
            "packets",
            "for r in 1..world { put X[lane of lanes] to P[epoch % 2][rank][lane of lanes] on (rank + r) % world }
            Y[lane of lanes] = reduce(X[lane of lanes] if r == rank else P[epoch % 2][r][lane of lanes] for r in 0..world, sum)",
        ),
        (
            "stores between barriers",
            "barrier
            Y[rank of world][lane of lanes] on r for r in 0..world = reduce(X[rank of world][lane of lanes] on r for r in 0..world, sum)
            barrier",
        ),
    ] {
        let text = format!("program p(n, lanes) {{ {heads}\n kernel lane in 0..lanes threads 64 {{ {body} }} }}");
        let seconds = |lanes: i64| {
            let given = [("n", 1 << 16), ("lanes", lanes)];
            let (report, took) = time_on_processor(|| check(&text, 16, 1, &given));
            report.unwrap_or_else(|found| panic!("{name}: {}", found[0]));
            took.as_secs_f64()
        };
        within(name, TWO_SECONDS * 8, 1500, || {
            let few = if cfg!(debug_assertions) { 16 } else { 128 };
            // Between 4 times and 16 times. What else the machine does can only make either longer, so the shortest of
            // several tries is what verification takes.
            let (mut short, mut long) = (f64::INFINITY, f64::INFINITY);
            for _ in 0..5 {
                (short, long) = (short.min(seconds(few)), long.min(seconds(4 * few)));
                if long < 8.0 * short {
                    break;
                }
            }
            println!("{few} lanes: {short:.3} s, {}: {long:.3} s", 4 * few);
            assert!(long < 8.0 * short, "{name}: {short} s, then {long} s");
            if cfg!(not(debug_assertions)) {
                seconds(1024);
            }
        });
    }
}

/// One test, so that what is measured is one case at a time.
#[test]
fn verification_costs_time_and_memory_in_proportion() {
    ordinary(64, 2, Duration::from_millis(200), 100);
    let large = if cfg!(debug_assertions) { 96 } else { 256 };
    ordinary(large, 8, TWO_SECONDS, 500);
    unmatched_transfers();
    long_expressions();
    many_parameters();
    many_collectives();
    many_collectives_among_some();
    racing_copies();
    reversed_copies();
    many_transfers();
    many_steps();
    repeated_posts();
    large_kernels();
    growing_kernels();
}
