//! `warplink tune` and `warplink program cost`, as processes.

use crate::common::{
    assert_contains, assert_refused, example, json, object, run, run_with, succeeded, written,
};

/// Every rank multiplies, passes the result on and multiplies again.
const PROGRAM: &str = "
program pipeline(n) {
    input  A: f32[n, n]
    input  B: f32[n, n]
    allocate C: f32[n, n]
    allocate D: f32[n, n]
    allocate E: f32[n, n]
    output F: f32[n, n]

    share {
        give = send D to (rank + 1) % world via put
        take = receive E from (rank - 1) % world via put
    }
    C = matmul(A, B)
    D = matmul(C, B)
    post give, take
    wait give, take
    F = matmul(E, B)
}
";

#[test]
fn a_cost_has_a_bound_and_a_timeline() {
    let example = example("ring_pass");
    let args = format!("program cost {example} -n 4 --param n=67108864 --model h200-8");
    let text = succeeded(&run(&args));
    let parts = ["bound by link", "post give(A to 1 tag 0 via get)"];
    assert_contains(&text, &parts);

    let eager = json(&format!("{args} --json"));
    assert_eq!(eager["ranks"], 4);
    assert_eq!(eager["bound"], "link");
    assert_eq!(eager["timeline"].as_array().unwrap().len(), 2);
    let seconds = |value: &serde_json::Value| value["seconds"].as_f64().unwrap();
    // 256 MiB at 388 GB/s.
    assert!((600e-6..800e-6).contains(&seconds(&eager)), "{eager}");
    let captured = json(&format!("{args} --json --captured"));
    assert!(seconds(&captured) > 600e-6);
}

#[test]
fn a_kernel_is_told_with_what_bounds_it() {
    let read = example("ring_pass").replace("ring_pass", "all_reduce_read");
    let estimate = |n: &str, lanes: &str, more: &str| {
        let args = format!("program cost {read} -n 2 --param {n} --param {lanes}");
        succeeded(&run(&format!("{args} --model h200-2 --captured {more}")))
    };
    for (n, lanes, bound) in [
        ("n=1024", "lanes=64", "latency"),
        ("n=33554432", "lanes=16", "lanes"),
        ("n=33554432", "lanes=64", "link"),
    ] {
        let text = estimate(n, lanes, "");
        let line = text
            .lines()
            .find(|line| line.contains("kernel of "))
            .unwrap();
        let (_, told) = line.split_once("threads: X, Y  ").unwrap();
        assert!(told.starts_with(bound) && told.contains(" us, "), "{text}");
        let json: serde_json::Value = serde_json::from_str(&estimate(n, lanes, "--json")).unwrap();
        let launch = &json["timeline"][0];
        assert_eq!(launch["bound"], bound, "{json}");
        let parts = launch["parts"].as_object().unwrap().values();
        let sum: f64 = parts.map(|seconds| seconds.as_f64().unwrap()).sum();
        let took = launch["end"].as_f64().unwrap() - launch["start"].as_f64().unwrap();
        assert!((sum / took - 1.0).abs() < 1e-6, "{json}");
    }
}

#[test]
fn wrong_models_and_programs_are_refused() {
    let example = example("ring_pass");
    let part = format!("error: {example} is not a hardware model: ");
    for (args, part) in [
        ("--param n=64 --model no-such-model", "no-such-model"),
        (&format!("--param n=64 --model {example}"), &part),
        ("--param n=-1 --model host", "is -1"),
    ] {
        assert_refused(&run(&format!("program cost {example} {args}")), part);
    }
}

#[test]
fn what_tune_measures_predicts_programs_within_a_factor_of_two() {
    let (folder, program) = written("pipeline.wlp", PROGRAM);
    let model = folder.path().join("model.json").display().to_string();
    let host = "--device host -n 2 --json";
    let mut ratios = Vec::new();
    // The machine may be busy with other tests while one is measured and not the other.
    for _ in 0..4 {
        let tune = format!(
            "tune --output {model} --dtypes f32 --largest-shape 64 --largest-transfer 64KiB --samples 3"
        );
        let measured = json(&format!("{tune} {host}"));
        assert_eq!(measured["device"]["ranks"], 2);
        let lanes = measured["lanes"].as_object().unwrap();
        assert!(lanes["launch"].as_f64().unwrap() > 0.0, "{measured}");
        let of = |what: &str, more: &str| {
            let args = format!("program {what} {program} --param n=64");
            json(&format!("{args} {more} {host}"))
        };
        let predicted = of("cost", &format!("--model {model}"));
        let predicted = predicted["seconds"].as_f64().unwrap();
        let run = of("run", "--samples 9");
        let took = run["eager"]["median"].as_f64().unwrap();
        let ratio = predicted / took;
        if (0.5..=2.0).contains(&ratio) {
            return;
        }
        ratios.push(ratio);
    }
    unreachable!("predicted over measured: {ratios:?}");
}

/// A model's measurements of the library's algorithms decide which one is selected.
#[test]
fn measured_algorithms_are_those_that_are_chosen() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.json");
    let path = path.to_str().unwrap();
    let host = "--device host -n 2 --json";
    let tune = format!(
        "tune --output {path} --algorithms --no-nccl --dtypes f32 --largest-shape 16 --largest-transfer 4KiB --samples 1"
    );
    let mut model = json(&format!("{tune} {host}"));
    let measured = model["algorithms"].as_array_mut().unwrap();
    // Five collectives move bytes, and three reduce elements of four sizes.
    assert_eq!(measured.len(), 5 + 3 * 4, "{measured:?}");
    let all_reduce = measured
        .iter_mut()
        .find(|one| one["collective"] == "all_reduce" && one["element_bytes"] == 8);
    let limits = &mut all_reduce.unwrap()["limits"];
    assert_eq!(
        limits.as_array().unwrap().last().unwrap()[0],
        4096,
        "{limits}"
    );
    for (dtype, algorithm) in [("bf16", "direct"), ("f32", "two-shot"), ("f64", "one-shot")] {
        let of = |bytes: usize, algorithm| {
            serde_json::json!({
                "collective": "all_reduce", "world": 2, "element_bytes": bytes, "limits": [[4096, algorithm]]
            })
        };
        let mut all = [of(2, "direct"), of(4, "two-shot"), of(8, "one-shot")];
        // As files were that did not say it.
        all[0].as_object_mut().unwrap().remove("element_bytes");
        model["algorithms"] = all.to_vec().into();
        std::fs::write(path, model.to_string()).unwrap();
        let bench = format!(
            "bench collective all-reduce --from 1KiB --to 4KiB --samples 1 --calls 1 --peers none --dtype {dtype}"
        );
        let report = object(&run_with(
            &[("WARPLINK_MODEL", path)],
            &format!("{bench} {host}"),
        ));
        for row in report["rows"].as_array().unwrap() {
            assert_eq!(row["algorithm"], algorithm, "{row}");
        }
    }
}
