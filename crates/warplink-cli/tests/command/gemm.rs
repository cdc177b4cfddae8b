//! The demo, the benchmarks of GEMMs and programs, and `warplink program`, on the host device.

use crate::common::{
    assert_contains, assert_refused, example, json, run, run_on_host, stderr, stdout, succeeded,
    written,
};
use serde_json::Value;
use warplink::overlap::{AllGatherMatmulLowering, MatmulReduceScatterLowering};

const LOWERINGS: usize =
    AllGatherMatmulLowering::ALL.len() + MatmulReduceScatterLowering::ALL.len();

fn faulty(name: &str) -> String {
    format!(
        "{}/../warplink/tests/faulty-programs/{name}.wlp",
        env!("CARGO_MANIFEST_DIR")
    )
}

const SMALL: &str = "--m 48 --k 32 --n 24 --samples 2";

#[test]
fn the_demo_is_right_in_every_type() {
    for dtype in ["bf16", "f16", "f32"] {
        let args = format!("demo --device host -n 3 --json --dtype {dtype} {SMALL}");
        let result = json(&args);
        assert_eq!(result["right"], true, "{result}");
        assert_eq!(result["ranks"], 3);
        assert_eq!(result["checked_rows"], 48);
        let error = result["overlapped"]["error"].as_f64().unwrap();
        assert!(error > 0.0 && error < 1e-2, "{error}");
        assert!(result["ratio"].as_f64().unwrap() > 0.0);
    }
}

/// The default of --m is not a multiple of 3.
#[test]
fn the_demo_rounds_its_rows_to_the_ranks() {
    let result = json("demo --device host -n 3 --k 32 --n 24 --samples 1 --json");
    assert_eq!(
        (&result["m"], &result["right"]),
        (&513.into(), &true.into())
    );
}

#[test]
fn the_demo_and_the_benchmark_take_transposed_weights() {
    let result = json(&format!("demo --device host --transposed-b --json {SMALL}"));
    assert_eq!(result["right"], true, "{result}");
    assert_eq!(result["transposed_b"], true);
    assert!(result["reason"].as_str().unwrap().contains("B transposed"));
    let result =
        json("bench overlap --device host --shape 32,32,16 --samples 1 --transposed-b --json");
    let rows = result["shapes"].as_array().unwrap().iter();
    let rows = rows.flat_map(|shape| shape["lowerings"].as_array().unwrap());
    assert_eq!(rows.clone().count(), LOWERINGS);
    for row in rows {
        assert_eq!(row["right"], true, "{row}");
    }
}

#[test]
fn the_demo_takes_a_lowering_and_a_seed() {
    let args = format!("demo --device host --seed 5 --lowering ring-get {SMALL}");
    let text = succeeded(&run(&args));
    assert_contains(
        &text,
        &[
            "with overlap",
            "without",
            "The result is correct",
            "seed 5",
            "ring-get, as requested",
        ],
    );
}

#[test]
fn the_demo_refuses_what_cannot_be_shared() {
    for (args, part) in [
        ("--m 7", "m = 7 is not divisible by 2 ranks"),
        ("--dtype f64", "expected f16, bf16 or f32"),
        ("--lowering circle", "one of collective, in-order, push"),
        ("--lowering rings", "one of collective, in-order, push"),
        ("--k 0", "--k is 0; expected at least 1"),
        ("--m 1000000000", "GiB of memory"),
    ] {
        assert_refused(&run(&format!("demo --device host {args}")), part);
    }
    let output = run("demo --lowering circle");
    let text = stderr(&output);
    assert!(text.starts_with("warplink: error: invalid value"), "{text}");
    assert!(!text.contains("rings"), "{text}");
}

/// Instead of being passed over, or found by each rank.
#[test]
fn lowerings_of_another_operation_are_refused() {
    let ring = example("ring_pass");
    let gather = "--operation all-gather-matmul";
    for (lowerings, more, part) in [
        (
            "rings",
            gather,
            "'rings' is not a lowering of all-gather + matmul; expected one of collective",
        ),
        (
            ring.as_str(),
            gather,
            "expected a program whose name starts with all_gather_matmul",
        ),
        (
            ring.as_str(),
            "",
            "starts with all_gather_matmul or matmul_reduce_scatter",
        ),
        ("nofile.wlp", "", "read nofile.wlp"),
    ] {
        let all = format!("push,{lowerings}");
        let args = format!("bench overlap --device host --lowerings {all} {more}");
        assert_refused(&run(&args), part);
    }
}

#[test]
fn options_that_a_command_ignores_are_refused() {
    let ring = example("ring_pass");
    for (command, option, value) in [
        ("show", "--device", "host"),
        ("verify", "--device", "host"),
        ("verify", "--ranks-per-gpu", "2"),
        ("cost", "--ranks-per-gpu", "2"),
    ] {
        let output = run(&format!("program {command} {option} {value} {ring}"));
        let said = format!("{option} is given, which this subcommand does not use");
        assert_refused(&output, &said);
        let help = succeeded(&run(&format!("program {command} --help")));
        assert!(!help.contains(&format!("{option} <")), "{help}");
        assert!(help.contains("Global options:"), "{help}");
    }
    // The variable is for every command.
    let output = run_on_host(&format!("program verify {ring} -p n=8"));
    assert!(stdout(&output).contains("verified for 2 ranks"));
}

#[test]
fn bench_overlap_rounds_its_own_shapes_only() {
    let quick = "--samples 1 --lowerings collective --device host -n 3";
    let report = json(&format!("bench overlap --json {quick}"));
    for shape in report["shapes"].as_array().unwrap() {
        let multiple = |name: &str| shape[name].as_u64().unwrap().is_multiple_of(3);
        assert!(multiple("m") && multiple("k"), "{shape}");
    }
    let output = run(&format!("bench overlap --shape 8,9,8 {quick}"));
    assert_eq!(output.status.code(), Some(1));
    assert_refused(&output, "m = 8 is not divisible by 3 ranks");
}

#[test]
fn bench_overlap_measures_every_lowering() {
    let folder = tempfile::tempdir().unwrap();
    let traces = folder.path().join("traces").display().to_string();
    let result = json(&format!(
        "bench overlap --device host --shape 32,32,16 --samples 2 --json --traces {traces}"
    ));
    let shapes = result["shapes"].as_array().unwrap();
    assert_eq!(shapes.len(), 2);
    for shape in shapes {
        let lowerings = shape["lowerings"].as_array().unwrap();
        assert_eq!(lowerings.len(), LOWERINGS / 2);
        let chosen = lowerings.iter().filter(|row| row["chosen"] == true);
        assert_eq!(chosen.count(), 1);
        for row in lowerings {
            assert_eq!(row["right"], true, "{row}");
            let captured = row["times"]["captured"]["median"].as_f64().unwrap();
            assert!(captured > 0.0);
        }
    }
    assert_eq!(std::fs::read_dir(&traces).unwrap().count(), LOWERINGS);
}

#[test]
fn bench_overlap_takes_some_lowerings() {
    let coarse = example("all_gather_matmul_coarse");
    let text = succeeded(&run(&format!(
        "bench overlap --device host --shape 16,16,16 --operation all-gather-matmul \
         --lowerings ring-put,collective,{coarse} --samples 1"
    )));
    assert!(
        ["ring-put", "collective", "all_gather_matmul_coarse",]
            .iter()
            .all(|part| text.contains(part)),
        "{text}"
    );
    assert!(
        !text.contains("in-order ") && !text.contains("reduce-scatter"),
        "{text}"
    );
    // A single rank receives nothing, so that there is no time of the link to divide by.
    let text = succeeded(&run(
        "bench overlap --device host -n 1 --shape 16,16,16 --lowerings collective --samples 1",
    ));
    assert!(!text.contains("inf"), "{text}");
}

#[test]
fn bench_overlap_draws_the_same_random_shapes_for_a_seed() {
    let shapes = || {
        let result = json(
            "bench overlap --device host --random 4 --seed 11 --operation all-gather-matmul \
             --lowerings in-order --samples 1 --json",
        );
        let shapes = result["shapes"].as_array().unwrap().clone();
        shapes
            .iter()
            .map(|shape| [&shape["m"], &shape["k"], &shape["n"]].map(|size| size.as_u64().unwrap()))
            .collect::<Vec<_>>()
    };
    let first = shapes();
    assert_eq!((first.len(), &first), (4, &shapes()));
    assert!(
        first.iter().all(|[m, k, _]| m % 2 == 0 && k % 2 == 0),
        "{first:?}"
    );
}

#[test]
fn bench_program_counts_operations() {
    let result = json("bench program --device host --samples 8 --json");
    let rows = result["rows"].as_array().unwrap();
    // Both operations.
    assert_eq!(rows.len(), LOWERINGS);
    for row in rows {
        assert!(row["operation"].as_f64().unwrap() > 0.0);
        let kinds = row["kinds"].as_object().unwrap().values();
        let total: u64 = kinds.map(|kind| kind["count"].as_u64().unwrap()).sum();
        assert_eq!(Some(total), row["operations"].as_u64());
    }
}

#[test]
fn a_program_is_shown() {
    let file = example("ring_pass");
    let output = run(&format!("program show {file}"));
    assert!(stdout(&output).starts_with("program ring_pass(n) {"));
    let text = succeeded(&run(&format!("program show {file} -n 4 --rank 2 -p n=8")));
    assert_contains(
        &text,
        &["give(A to 3 tag 0 via get), take(B from 1 tag 0 via get)"],
    );
    for (args, part) in [
        ("-n 2 --rank 2 -p n=8", "rank 2 is not one of 2"),
        (
            "-n 2",
            "the parameter 'n' of 'ring_pass' has no value; expected an integer; help: give a value with --param n=N",
        ),
        ("--rank 1", "Usage: warplink program show --ranks <N>"),
    ] {
        assert_refused(&run(&format!("program show {file} {args}")), part);
    }
}

/// All of them at once, and how to give them.
#[test]
fn parameters_without_values_are_named_with_their_options() {
    let file = example("all_gather_matmul_coarse");
    let missing = "the parameters 'm' (an integer), 'n' (a list of integers) of 'all_gather_matmul_coarse' have no values";
    let help = "help: give values with --param m=N --param n=N,…";
    for name in ["verify", "run", "cost"] {
        let output = run_on_host(&format!("program {name} {file} -p k=16 -n 2"));
        assert_eq!(output.status.code(), Some(1));
        let text = stdout(&output) + &stderr(&output);
        assert_eq!(text.matches(missing).count(), 1, "{text}");
        assert_eq!(text.matches(help).count(), 1, "{text}");
    }
}

#[test]
fn a_program_is_verified() {
    let file = example("all_gather_matmul_coarse");
    let text = succeeded(&run(&format!(
        "program verify {file} -n 3 -p m=48 -p k=16 -p n=16"
    )));
    assert!(text.contains("verified for 3 ranks"), "{text}");

    let file = faulty("deadlock-put-ring-step");
    let args = format!("program verify {file} -n 3 -p n=16");
    let output = run(&args);
    assert_eq!(output.status.code(), Some(1));
    let text = stdout(&output);
    assert_contains(
        &text,
        &[
            "deadlock: ",
            "--> ",
            "^^^",
            "rank 0",
            "did not pass verification for 3 ranks",
        ],
    );
    let output = run(&format!("{args} --json"));
    let verdict: Value = serde_json::from_str(&stdout(&output)).unwrap();
    assert_eq!(verdict["passed"], false);
    assert_eq!(verdict["diagnostics"][0]["kind"], "deadlock");
}

#[test]
fn a_mistake_in_the_text_is_pointed_at() {
    let (_folder, file) = written("p.wlp", "program p() {\n    input A: f32[\n}\n");
    for what in ["show", "verify", "run"] {
        let output = run(&format!("program {what} {file}"));
        assert_eq!(output.status.code(), Some(1));
        let text = stderr(&output);
        assert!(
            text.contains("p.wlp, line ") && text.contains('^'),
            "{text}"
        );
    }
}

#[test]
fn what_is_given_twice_is_an_error() {
    let ring = example("ring_pass");
    for (args, part) in [
        (
            "--param n=1 --param n=1",
            "parameter 'n' is given twice; expected once",
        ),
        (
            "--with K --with K",
            "optional tensor 'K' is given twice; expected once",
        ),
    ] {
        for name in ["show", "verify", "cost", "run"] {
            let args = format!("program {name} {ring} {args}");
            assert_refused(&run_on_host(&args), part);
        }
    }
}

#[test]
fn one_statement_of_a_line_is_pointed_at() {
    let text = "program p() {
    input A: u8[4]; output B: u8[4]; allocate X: u8[4]
    fork pool(0) { set_stream pool(0); X = copy(A); set_stream caller; B = copy(X) }
}
";
    let (_folder, path) = written("race.wlp", text);
    let output = run(&format!("program verify {path} -n 1"));
    let text = stdout(&output);
    assert_contains(
        &text,
        &[
            "race.wlp:3:40\n",
            "  |                                        ^^^^^^^^^^^ rank 0\n",
            "race.wlp:3:72\n",
            "  |                                                                        ^^^^^^^^^^^ rank 0\n",
        ],
    );
    let output = run(&format!("program verify {path} -n 1 --json"));
    let result: Value = serde_json::from_str(&stdout(&output)).unwrap();
    assert_eq!(result["diagnostics"][0]["places"][1]["column"], 72);
}

#[test]
fn a_program_runs_and_leaves_a_trace() {
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("trace.json").display().to_string();
    let program = example("matmul_reduce_scatter_early_sums");
    let result = json(&format!(
        "program run {program} --device host -n 3 -p m=48 -p k=48 -p n=16 --samples 2 --json --trace {trace}"
    ));
    assert_eq!(result["ranks"], 3);
    assert!(result["operations"].as_u64().unwrap() > 0);
    let events: Value = serde_json::from_slice(&std::fs::read(&trace).unwrap()).unwrap();
    for rank in 0..3 {
        let events = events.as_array().unwrap().iter();
        assert!(events.filter(|event| event["pid"] == rank).count() > 3);
    }
}

#[test]
fn a_faulty_program_does_not_run() {
    let file = faulty("deadlock-put-ring-step");
    let output = run(&format!("program run {file} --device host -n 3 -p n=16"));
    assert_refused(&output, "is refused");
}
