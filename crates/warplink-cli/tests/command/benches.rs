//! Options and results that all benchmarks have, on the host device.

use crate::common::{assert_refused, json, run, succeeded};
use serde_json::Value;

/// Each benchmark with arguments that make it quick, `--sizes` among them if it has some, and a text of its drawing.
const BENCHES: [(&str, &str); 9] = [
    ("p2p --sizes 4KiB --methods put", "eager: latency in us"),
    (
        "channel --sizes 4KiB --rows packets",
        "packets, direct, 4 KiB",
    ),
    (
        "collective all-reduce --sizes 1KiB,4KiB --calls 1",
        "captured: bus bandwidth in GB/s",
    ),
    (
        "expert-parallel --sizes 1,8 --elements 48 --calls 1",
        "eager: dispatch and combine in us",
    ),
    ("fused --sizes 1,2 --width 48 --calls 1", "eager: us"),
    (
        "fused --sizes 3 --width 48 --calls 1 --wire fp8",
        "eager: us",
    ),
    (
        "overlap --shape 16,16,16 --lowerings push --multiprocessors 4",
        "GEMM in chunks",
    ),
    ("program --lowerings push", "time of the host"),
    (
        concat!(
            "section ",
            env!("CARGO_MANIFEST_DIR"),
            "/../../examples/programs/all_reduce_one_shot.wlp --param T=f32 --sizes 1KiB --runs 1"
        ),
        "all_reduce_one_shot",
    ),
];

/// The name of a benchmark with arguments.
fn name(bench: &str) -> &str {
    bench.split(' ').next().unwrap()
}

#[test]
fn every_benchmark_writes_its_result_and_draws_it() {
    let folder = tempfile::tempdir().unwrap();
    for (bench, drawn) in BENCHES {
        let path = |end: &str| folder.path().join(format!("{}.{end}", name(bench)));
        let (file, plot) = (path("json"), path("svg"));
        let [output, drawing] = [&file, &plot].map(|path| path.to_str().unwrap());
        let all = "--device host -n 2 --samples 1 --json";
        let files = format!("--output {output} --plot {drawing}");
        let printed = json(&format!("bench {bench} {all} {files}"));
        let written: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        assert_eq!(printed, written, "{bench:?}");
        assert_eq!(printed["benchmark"], name(bench));
        assert_eq!(printed["ranks"], 2, "{printed}");
        assert!(printed["device"].is_string(), "{printed}");
        let text = std::fs::read_to_string(&plot).unwrap();
        assert!(
            text.starts_with("<svg") && text.contains(drawn),
            "no '{drawn}' in {text}"
        );
    }
}

#[test]
fn help_has_the_options_of_all_benchmarks() {
    for (bench, _) in BENCHES {
        let text = succeeded(&run(&format!("bench {} --help", name(bench))));
        for option in ["--samples <N>", "--output <FILE.json>", "--plot <FILE.svg>"] {
            assert_eq!(text.matches(option).count(), 1, "{option} in {text}");
        }
        let has_sizes = bench.contains(" --sizes ");
        for option in ["--from <", "--to <", "--step <N>", "--sizes <"] {
            assert_eq!(text.contains(option), has_sizes, "{option} in {text}");
        }
        // A default is in the text of its option.
        assert!(text.contains("Samples per figure [default: "), "{text}");
    }
}

#[test]
fn sizes_and_submissions_are_selected_alike() {
    let sizes = "--sizes 4KiB,1KiB --submission captured";
    let all = "--device host -n 2 --samples 1 --json";
    for bench in ["p2p --methods raw", "collective all-gather --peers none"] {
        let report = json(&format!("bench {bench} {sizes} {all}"));
        let rows = report["rows"].as_array().unwrap();
        let rows = rows.iter().map(|row| (&row["bytes"], &row["submission"]));
        let (captured, sizes) = ("captured".into(), [4096.into(), 1024.into()]);
        let expected: [(&Value, &Value); 2] = [(&sizes[0], &captured), (&sizes[1], &captured)];
        assert_eq!(rows.collect::<Vec<_>>(), expected, "{bench:?}");
    }
    for (more, said) in [
        (
            "--sizes 4",
            "the smallest of --sizes is 4 B; expected at least 8",
        ),
        ("--sizes 8 --to 16", "cannot be used with"),
        ("--sizes 0", "--sizes has 0"),
        ("--from 0", "--from is 0 B; expected at least 1"),
        (
            "--from 4KiB --to 1KiB",
            "--from is 4 KiB and --to is 1 KiB; expected --from to be at most --to",
        ),
        ("--submission later", "expected eager, captured or both"),
    ] {
        assert_refused(&run(&format!("bench p2p {more} {all}")), said);
    }
}
