//! The benchmark of send and receive, on the host device.

use crate::common::{
    assert_contains, assert_refused, json, object, run, run_with, stderr, stdout, succeeded,
};
use serde_json::Value;

const METHODS: [&str; 9] = [
    "raw",
    "raw-get",
    "put",
    "get",
    "put-fastest",
    "put-one-block",
    "put-multiprocessors",
    "get-multiprocessors",
    "nccl",
];

/// Output of `bench p2p` for one size.
fn bench(more: &str) -> String {
    let size = "--from 4KiB --to 4KiB --samples 2 --device host";
    succeeded(&run(&format!("bench p2p {size} {more}")))
}

/// Looks for every method, compared with its floor, and for a latency of these methods only.
fn check(more: &str, with_latency: &[&str]) {
    let report: Value = serde_json::from_str(&bench(&format!("{more} --json"))).unwrap();
    let rows = report["rows"].as_array().unwrap();
    let methods: Vec<&str> = rows
        .iter()
        .map(|row| row["method"].as_str().unwrap())
        .collect();
    assert_eq!(methods, METHODS.map(|method| [method; 2]).concat());
    for row in rows {
        let method = row["method"].as_str().unwrap();
        let floor = match method {
            "get" | "raw-get" | "get-multiprocessors" => "raw-get",
            _ => "raw",
        };
        let floor = rows
            .iter()
            .find(|other| other["method"] == floor && other["submission"] == row["submission"])
            .unwrap();
        let bandwidth = |row: &Value| row["bandwidth"].as_f64().unwrap();
        let ratio = row["of_raw"].as_f64().unwrap();
        assert!(
            (ratio - bandwidth(row) / bandwidth(floor)).abs() < 1e-9,
            "{row}"
        );
        assert_eq!(
            row["latency"].is_object(),
            with_latency.contains(&method),
            "{row}"
        );
    }
}

#[test]
fn a_pair_has_latency_but_for_raw_gets() {
    // The third rank takes no part.
    let with_latency = METHODS.map(|method| if method == "raw-get" { "" } else { method });
    check("-n 3", &with_latency);
}

/// The default of --to is not below --from.
#[test]
fn a_bench_starts_above_its_default_end() {
    let report = json("bench p2p --from 8MiB --samples 1 --no-nccl --json --device host -n 2");
    let rows = report["rows"].as_array().unwrap();
    assert!(
        !rows.is_empty() && rows.iter().all(|row| row["bytes"] == 8 << 20),
        "{report}"
    );
}

#[test]
fn a_ring_has_no_latency() {
    check("-n 3 --ring", &[]);
}

#[test]
fn the_table_names_ways_as_json_does() {
    let text = bench("-n 2");
    let rows: Vec<Vec<&str>> = text
        .lines()
        .skip(3)
        .map(|line| line.split_whitespace().collect())
        .collect();
    let methods: Vec<&str> = rows.iter().map(|row| row[row.len().min(3) - 1]).collect();
    assert_eq!(
        methods,
        METHODS.map(|method| [method; 2]).concat(),
        "{text}"
    );
    for row in rows.iter().filter(|row| row[2].starts_with("raw")) {
        assert_eq!(row.last(), Some(&"1.000"), "{text}");
        // Of a raw get the cell of the latency is empty.
        assert_eq!(row.len(), if row[2] == "raw" { 8 } else { 7 }, "{text}");
    }
}

#[test]
fn methods_can_be_chosen_and_come_with_what_they_are_compared_with() {
    let text = bench("-n 2 --json --methods put-fastest,nccl");
    let report: Value = serde_json::from_str(&text).unwrap();
    let rows = report["rows"].as_array().unwrap();
    let methods = rows.iter().map(|row| row["method"].as_str().unwrap());
    let expected = ["raw", "put-fastest", "nccl"].map(|method| [method; 2]);
    assert_eq!(methods.collect::<Vec<_>>(), expected.concat());
    let refused = run("bench p2p --device host -n 2 --methods nccl --no-nccl");
    assert_refused(&refused, "--no-nccl leaves it out");
}

/// A row that does not end costs its own figure and those after it.
#[test]
fn bench_channel_ends_at_the_limit_of_a_row() {
    let slow = [("WARPLINK_HOST_DELAY_US", "100000")];
    let output = run_with(&slow, "bench channel --device host --limit 1");
    assert!(!output.status.success());
    assert!(stdout(&output).contains("what"), "{}", stdout(&output));
    let error = stderr(&output);
    assert!(
        error.contains("measure 'words' and 'signals'")
            && error.contains("the end of a stream's work"),
        "{error}"
    );
}

#[test]
fn bench_channel_measures_every_kind() {
    let output = run("bench channel --samples 1 --to 4KiB --device host --json");
    let report = object(&output);
    let rows = report["rows"].as_array().unwrap();
    for (what, transport) in [
        ("words", "direct"),
        ("signals", "direct"),
        ("signals", "proxied"),
        ("puts", "direct"),
        ("puts", "proxied"),
        ("packets", "direct"),
        ("put_once", "direct"),
        ("put_and_flush", "proxied"),
        ("triggers", "proxied"),
    ] {
        let of_kind = |row: &&Value| row["what"] == what && row["transport"] == transport;
        let row = rows.iter().find(of_kind);
        let row = row.unwrap_or_else(|| panic!("no {what}, {transport}: {report}"));
        assert!(row["time"]["median"].as_f64().unwrap() > 0.0, "{row}");
    }
    // Rows are printed as they are measured, also where the result is one object.
    assert_contains(&stderr(&output), &["triggers          proxied"]);
    let some = run("bench channel --samples 1 --to 4KiB --device host --rows packets");
    let text = succeeded(&some);
    let rows: Vec<_> = text.lines().skip(3).collect();
    assert!(
        rows.len() == 3 && rows.iter().all(|row| row.starts_with("packets")),
        "{text}"
    );
    let alone = run("bench channel --device host --ranks 1");
    assert_refused(&alone, "no peer");
}
