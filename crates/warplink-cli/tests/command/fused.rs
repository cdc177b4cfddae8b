//! The benchmark of fused collectives, on the host device.

use crate::common::{assert_contains, assert_refused, object, run, succeeded};
use serde_json::Value;

const QUICK: &str = "bench fused --device host --to 4 --width 300 --samples 1 --calls 2 -n";

fn bench(ranks: &str, more: &str) -> std::process::Output {
    run(&format!("{QUICK} {ranks} {more}"))
}

#[test]
fn fused_calls_are_right_and_measured_beside_two_steps() {
    for (ranks, more) in [
        ("2", "--dtype bf16"),
        ("2", "--quantization per_block"),
        ("2", "--quantization nvfp4"),
        ("3", "--dtype f32 --quantization static"),
    ] {
        let report = object(&bench(ranks, &format!("{more} --json")));
        assert_eq!(
            (&report["benchmark"], &report["width"]),
            (&"fused".into(), &300.into())
        );
        let rows = report["rows"].as_array().unwrap();
        // 1 and 4 tokens, call by call and as a graph.
        assert_eq!(rows.len(), 4, "{report}");
        for row in rows {
            assert_eq!(row["wrong"], 0, "{row}");
            let methods = row["methods"].as_array().unwrap();
            let names: Vec<&Value> = methods.iter().map(|method| &method["method"]).collect();
            assert_eq!(names, ["warplink", "pair", "nccl"], "{row}");
            for method in methods {
                assert!(method["median"].as_f64().unwrap() > 0.0, "{row}");
            }
        }
    }
    let table = succeeded(&bench("2", "--peers pair"));
    assert_contains(&table, &["rows of 300 bf16", "pair us", "speedup"]);
    let table = succeeded(&bench("1", "--peers none --quantization nvfp4"));
    assert_contains(&table, &["rows of 300 bf16, quantised nvfp4, 1 rank"]);
    assert_refused(&bench("2", "--quantization other"), "expected static");
    // Each algorithm once, though some are several programs.
    assert_refused(
        &bench("1", "--algorithm cube"),
        "expected one-shot, chunks, direct or two-shot;",
    );
}
