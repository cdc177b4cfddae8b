//! Programs with kernel sections through the command: printed as CUDA C++, run, traced and timed, on the host
//! device.

use crate::common::{
    assert_contains, assert_refused, example, object, run, stderr, stdout, succeeded, written,
};
use serde_json::Value;
use std::process::Output;

const RACE: &str = "program race(n) {
    input X: f32[n]
    output Y: f32[n]
    scratch P: packets16 f32[world, n]

    kernel lane in 0..1 threads 32 {
        put X to P[rank] on 1 - rank
        Y = reduce(X if r == rank else P[r] for r in 0..world, sum)
    }
}
";

const OTHER: &str = "program other(n) {
    input X: f32[n]
    output Y: f32[n]

    kernel lane in 0..1 threads 32 {
        Y = reduce(X for r in 0..world, sum)
    }
}
";

fn of(command: &str, program: &str, rest: &str) -> Output {
    run(&format!("{command} {program} {rest}"))
}

fn show(program: &str, rest: &str) -> Output {
    of("program show", program, rest)
}

fn bench(program: &str, rest: &str) -> Output {
    let quick = "--device host --samples 2 --runs 3";
    of("bench section", program, &format!("{rest} {quick}"))
}

#[test]
fn kernels_are_shown_as_what_the_compiler_gets() {
    let one_shot = example("all_reduce_one_shot");
    let sizes = "--ranks 2 --rank 1 -p n=1000 -p T=bf16";
    let output = show(&one_shot, &format!("{sizes} --kernel"));
    let text = succeeded(&output);
    assert_contains(
        &text,
        &[
            "#include <warplink/sections.cuh>",
            "constexpr Index rank = 1, world = 2, lanes = 4, threads = 128;",
            "__global__ void __launch_bounds__(threads) section(",
            "reduce<Bf16, Add",
        ],
    );
    let kernels = object(&show(&one_shot, &format!("{sizes} --kernel --json")));
    let kernels = kernels["kernels"].as_array().unwrap();
    assert_eq!(kernels.len(), 1);
    assert_eq!(kernels[0]["text"].as_str().unwrap().trim(), text.trim());
    let source = std::fs::read_to_string(&one_shot).unwrap();
    let line = source
        .lines()
        .position(|line| line.trim().starts_with("kernel "));
    assert_eq!(
        kernels[0]["line"].as_u64().unwrap() as usize,
        line.unwrap() + 1
    );
}

#[test]
fn what_has_no_kernel_shows_none() {
    let ring = example("ring_pass");
    let output = show(&ring, "--ranks 2 -p n=64 --kernel");
    assert_refused(&output, "no kernel section");
    // A kernel is of a rank.
    let output = show(&example("all_reduce_one_shot"), "--kernel");
    assert_eq!(output.status.code(), Some(2));
    assert_contains(&stderr(&output), &["--ranks"]);
}

#[test]
fn kernels_run_right_and_are_in_the_trace() {
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("trace.json").display().to_string();
    let rest = format!("-n 2 -p n=1000 -p T=f32 --device host --samples 2 --trace {trace}");
    let output = of("program run", &example("all_reduce_lanes"), &rest);
    let text = succeeded(&output);
    assert!(text.contains("'Y' is right"), "{text}");
    let events: Value = serde_json::from_str(&std::fs::read_to_string(&trace).unwrap()).unwrap();
    let events = events
        .as_array()
        .or_else(|| events["traceEvents"].as_array());
    let kernels = events
        .unwrap()
        .iter()
        .filter(|event| event["name"] == "kernel");
    let mut ranks: Vec<u64> = kernels
        .map(|event| event["pid"].as_u64().unwrap())
        .collect();
    ranks.sort_unstable();
    ranks.dedup();
    assert_eq!(ranks, [0, 1]);
    // Each lane has a row of its own.
    let rows = events.unwrap().iter().filter_map(|event| {
        let name = event["args"]["name"].as_str()?;
        (event["name"] == "thread_name").then(|| name.to_owned())
    });
    let rows: Vec<String> = rows.collect();
    let lanes = rows.iter().filter(|row| row.starts_with("caller, lane "));
    assert_eq!(lanes.count(), 2 * 16, "{rows:?}");
    for step in ["put", "signal", "wait", "reduce"] {
        assert!(events.unwrap().iter().any(|event| event["name"] == step));
    }
}

#[test]
fn a_bench_of_kernels_compares_values_with_the_collectives() {
    let sizes = "-n 2 -p T=f32 --sizes 1024,4096";
    let one_shot = example("all_reduce_one_shot");
    let report = object(&bench(&one_shot, &format!("{sizes} --json")));
    assert_eq!(report["program"], "all_reduce_one_shot");
    let rows = report["rows"].as_array().unwrap();
    let bytes: Vec<u64> = rows
        .iter()
        .map(|row| row["bytes"].as_u64().unwrap())
        .collect();
    assert_eq!(bytes, [1024, 4096]);
    for row in rows {
        assert_eq!(row["different"], 0, "{row}");
        assert!(row["collective"].is_object(), "{row}");
        let kernel = &row["kernels"][0];
        assert_eq!(
            (&kernel["lanes"], &kernel["threads"]),
            (&4.into(), &128.into())
        );
    }
    let some = "--try lanes=4,5 --against nothing";
    let output = bench(&one_shot, &format!("{sizes} {some}"));
    succeeded(&output);
    let text = stderr(&output);
    assert_eq!(
        text.matches("warplink: lanes=5 skipped: ").count(),
        1,
        "{text}"
    );
    let tried = "--try lanes=4,8 --all --against nothing --json";
    let report = object(&bench(&one_shot, &format!("{sizes} {tried}")));
    let rows = report["rows"].as_array().unwrap();
    let lanes: Vec<u64> = rows
        .iter()
        .map(|row| row["kernels"][0]["lanes"].as_u64().unwrap())
        .collect();
    assert_eq!(lanes, [4, 8, 4, 8]);
    assert!(rows.iter().all(|row| row.get("collective").is_none()));
}

/// Another collective than what the program computes, with the same shapes.
#[test]
fn a_bench_fails_where_the_output_is_not_the_collectives() {
    let (_folder, other) = written("other.wlp", OTHER);
    let output = bench(&other, "-n 2 --sizes 1KiB");
    let table = stdout(&output);
    assert_eq!(output.status.code(), Some(1), "{table}{}", stderr(&output));
    assert!(
        table.contains("differ") && table.contains("speedup"),
        "{table}"
    );
    succeeded(&bench(&other, "-n 2 --sizes 1KiB --against nothing"));
}

#[test]
fn a_bench_refuses_what_it_cannot_time() {
    let sizes = "-n 2 --sizes 1024";
    for (program, more, said) in [
        (
            "all_reduce_one_shot",
            "--against sum",
            "invalid value 'sum' for '--against <COLLECTIVE>'",
        ),
        (
            "all_reduce_one_shot",
            "--length count",
            "--length is 'count', which is no parameter of 'all_reduce_one_shot'",
        ),
        ("ring_pass", "", "program 'ring_pass' has no kernel section"),
        ("all_reduce_one_shot", "-p n=5", "--param gives 'n' a value"),
        (
            "all_reduce_one_shot",
            "--try n=5,6",
            "--try gives 'n' values",
        ),
        (
            "all_reduce_one_shot",
            "--try lanes=4,8 -p lanes=16",
            "--param and --try both give 'lanes' values",
        ),
        (
            "all_reduce_one_shot",
            "-p foo=4",
            "unknown parameter 'foo' of 'all_reduce_one_shot'",
        ),
    ] {
        let output = bench(&example(program), &format!("{sizes} {more}"));
        assert!(stdout(&output).is_empty(), "{}", stdout(&output));
        assert_refused(&output, said);
    }
    let (_folder, race) = written("race.wlp", RACE);
    let output = bench(&race, &format!("{sizes} --against nothing"));
    let said = stderr(&output);
    assert!(!stdout(&output).contains("1024"), "{}", stdout(&output));
    assert!(said.contains("race"), "{said}");
}
