//! `warplink program run` compares what a program gave with what it means.

use crate::common::{
    assert_contains, assert_refused, example, object, run, stderr, stdout, succeeded, written,
};
use std::process::Output;

const SLOW: &str = "program slow(n) {
    input A: f32[n, n]
    input B: f32[n, n]
    output C: f32[n, n]
    allocate W: f32[n, n]
    allocate V: f32[n, n]
    allocate X: f32[n, n]

    W = copy(A)
    set_stream pool(0)
    synchronize caller
    set_stream caller
    for i in 0..60 { V = matmul(A, B) }
    W = matmul(A, B)
    for i in 0..200 { X = copy(B) }
    set_stream pool(0)
    C = copy(W)
    set_stream caller
    synchronize pool(0)
}
";

fn run_program(program: &str, rest: &str) -> Output {
    run(&format!(
        "program run {program} --device host --samples 2 {rest}"
    ))
}

#[test]
fn right_values_are_said_to_be_right() {
    let text = succeeded(&run_program(&example("ring_pass"), "-n 3 -p n=64"));
    assert!(text.contains("'B' is right: exact"), "{text}");
    let json = object(&run_program(
        &example("matmul_reduce_scatter_ring_put"),
        "-n 3 -p m=48 -p k=48 -p n=16 --json",
    ));
    let value = &json["values"][0];
    assert_eq!(
        (value["tensor"].as_str(), value["wrong"].as_u64()),
        (Some("C"), Some(0))
    );
    let error = value["largest_error"].as_f64().unwrap();
    assert!(0.0 < error && error <= value["allowed_error"].as_f64().unwrap());
}

/// Of an output that is never written, nothing can be said.
#[test]
fn unknown_values_are_not_said_to_be_right() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("forgets.wlp");
    let text =
        "program forgets(n) { input A: f32[n]; output B: f32[n]; output C: f32[n]; C = copy(A) }";
    std::fs::write(&file, text).unwrap();
    let file = file.display().to_string();
    let text = succeeded(&run_program(&file, "-n 1 -p n=4 --unverified"));
    assert_contains(
        &text,
        &[
            "'B' of rank 0: 4 elements not compared, since nothing is known about them",
            "'C' is right: exact",
        ],
    );
}

#[test]
fn a_result_is_printed_where_its_trace_cannot_be_written() {
    let output = run_program(&example("ring_pass"), "-n 2 -p n=64 --trace /dev/full");
    // Its peers name the cause as well.
    assert_refused(&output, "warplink: error: write /dev/full");
    assert!(
        stdout(&output).contains("'B' is right: exact"),
        "{}",
        stdout(&output)
    );
}

/// The copy of W is not ordered behind the product that the host enqueues long before it: the verifier says
/// so, and what it gives depends on the time that products take.
#[test]
fn a_wrong_value_fails_the_command() {
    let (_folder, file) = written("slow.wlp", SLOW);
    let sizes = "-n 1 -p n=64";
    let refused = run_program(&file, sizes);
    assert!(stderr(&refused).contains("race"), "{}", stderr(&refused));
    let output = run_program(&file, &format!("{sizes} --unverified"));
    assert!(!output.status.success());
    let text = stdout(&output);
    assert!(text.contains("'C' of rank 0 is wrong in "), "{text}");
    assert_contains(&text, &["elements are wrong, the first is 0"]);
    let text = succeeded(&run_program(
        &file,
        &format!("{sizes} --unverified --no-check"),
    ));
    assert!(text.contains("values are not checked"), "{text}");
}

/// The verifier follows no values: what a program is not for shows when it runs, in whatever it reaches.
#[test]
fn an_output_that_is_not_what_is_expected_fails_the_command() {
    let folder = tempfile::tempdir().unwrap();
    let gather = |from: &str, rest: &str| {
        let file = folder.path().join("gather.wlp").display().to_string();
        let text = format!(
            "program gather(n) {{
    input X: f32[n]
    output Y: f32[world, n]
    scratch C: packets16 i32[2, world, 4]
    scratch P: packets16 f32[2, world, n]

    kernel lane in 0..1 threads 32 {{
        let slot = epoch % 2
        announce n with Y in C[slot]
        agree n with Y in C[slot]
        if reachable(Y) {{
            Y[rank] on r for r in 0..world = reduce(X, sum)
            barrier
        }} else {{
            P[slot][rank] on r for r in 0..world = reduce(X, sum)
            for r in 0..world {{ Y[r] = copy(P[slot][{from}]) }}
        }}
    }}

    for r in 0..world {{ expect Y[r] = copy(X on r) }}
}}
"
        );
        std::fs::write(&file, text).unwrap();
        run_program(&file, &format!("-n 3 -p n=40 {rest}"))
    };
    let verify = |rest: &str| {
        let file = folder.path().join("gather.wlp").display().to_string();
        run(&format!("program verify {file} -n 3 {rest}"))
    };
    for from in ["r", "(r + 1) % world"] {
        let output = gather(from, "");
        assert!(output.status.success(), "{}", stderr(&output));
        let output = gather(from, "--unreachable Y");
        let said = stderr(&output);
        assert_eq!(output.status.success(), from == "r", "{said}");
        assert!(
            from == "r" || said.contains("expectation: rank 0, line 20"),
            "{said}"
        );
        // Both branches, without a device.
        let output = verify("-p n=40");
        let text = stdout(&output);
        assert_eq!(output.status.success(), from == "r", "{text}");
        let found = if from == "r" {
            "outputs are as expected: 9 statements in 2 evaluations"
        } else {
            "'Y' is not what is expected of it: element 0 is"
        };
        assert!(text.contains(found), "{text}");
    }
    let output = verify("-p n=4000000 --json");
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let why = json["expectations"]["not_evaluated"].as_str().unwrap();
    assert!(
        output.status.success() && why.contains("too many to evaluate"),
        "{json}"
    );
    let output = gather("r", "--unreachable Z");
    let said = stderr(&output);
    assert!(
        !output.status.success() && said.contains("'Z' is not announced by any kernel; expected Y"),
        "{said}"
    );
    let output = run_program(&example("ring_pass"), "-n 2 -p n=8 --unreachable A");
    let said = stderr(&output);
    assert!(
        !output.status.success() && said.contains("expected none, since no kernel announces"),
        "{said}"
    );
}

#[test]
fn large_programs_are_not_compared() {
    let text = succeeded(&run_program(&example("ring_pass"), "-n 2 -p n=2000000"));
    assert!(
        text.contains("values are not checked: 8000000 elements")
            && text.contains("expected at most"),
        "{text}"
    );
}
