//! The benchmark of dispatch and combine, on the host device.

use crate::common::{assert_refused, object, run, stdout};

const QUICK: &str =
    "--device host --to 8 --elements 48 --experts 12 --top-k 3 --samples 1 --calls 2";

fn bench(more: &str) -> std::process::Output {
    run(&format!("bench expert-parallel {more} {QUICK}"))
}

#[test]
fn dispatch_and_combine_are_right_and_measured_beside_their_peer() {
    for (ranks, routing, dtype, layout) in [
        ("2", "random", "bf16", "by_source"),
        ("3", "one-rank", "f32", "by_expert"),
        ("2", "random", "f16", "once_per_rank"),
        (
            "2",
            "random",
            "bf16",
            "once_per_rank --quantization per_block",
        ),
        ("2", "random", "f32", "by_expert --quantization per_token"),
    ] {
        let arguments = format!("-n {ranks} --routing {routing} --dtype {dtype} --layout {layout}");
        let report = object(&bench(&format!("{arguments} --json")));
        assert!(layout.starts_with(report["layout"].as_str().unwrap()));
        assert_eq!(report["benchmark"], "expert-parallel");
        assert_eq!(report["top_k"], 3);
        let rows = report["rows"].as_array().unwrap();
        // 1 and 8 tokens, call by call and as a graph.
        assert_eq!(rows.len(), 4, "{report}");
        for row in rows {
            assert_eq!(row["wrong"], 0, "{row}");
            let methods = row["methods"].as_array().unwrap();
            // The peer's host waits, so it is not captured.
            let expected = if row["submission"] == "eager" { 2 } else { 1 };
            assert_eq!(methods.len(), expected, "{row}");
            for method in methods {
                for step in ["dispatch", "combine"] {
                    assert!(method[step]["median"].as_f64().unwrap() > 0.0, "{row}");
                }
            }
            if routing == "one-rank" {
                let all = 3 * 3 * row["tokens"].as_u64().unwrap();
                assert_eq!(row["rows"].as_u64().unwrap(), all, "{row}");
            }
        }
        let table = bench(&arguments);
        assert!(stdout(&table).contains("top 3 of 12 experts"));
    }
}

#[test]
fn layers_that_cannot_be_measured_are_refused_at_once() {
    for (arguments, says) in [
        (
            "-n 5",
            "--experts is 12; expected a multiple of the 5 ranks",
        ),
        (
            "-n 6 --routing one-rank",
            "--top-k is 3; expected at most the 2 experts that tokens go to",
        ),
        (
            "-n 2 --quantization mxfp8",
            "expected per_token, per_block or per_block_power_of_two",
        ),
        ("-n 2 --dtype i32", "expected f16, bf16 or f32"),
        ("-n 2 --from 9", "--from is 9 and --to is 8"),
    ] {
        assert_refused(&bench(arguments), says);
    }
}
