//! Output and exit status of `warplink doctor`, on any kind of machine.

use crate::common::{run, run_with, stderr, stdout, succeeded};
use serde_json::Value;
use std::process::Output;

fn has_gpu() -> bool {
    warplink::DeviceKind::detect() == warplink::DeviceKind::Cuda
}

/// The one object that `--json` prints.
fn object(output: &Output) -> Value {
    let text = stdout(output);
    assert_eq!(text.lines().count(), 1, "{text}\n{}", stderr(output));
    serde_json::from_str(&text).unwrap()
}

/// The status of every check of `area` whose name contains `name`.
fn statuses(report: &Value, area: &str, name: &str) -> Vec<String> {
    let checks = report["checks"].as_array().unwrap();
    checks
        .iter()
        .filter(|check| check["area"] == area && check["name"].as_str().unwrap().contains(name))
        .map(|check| check["status"].as_str().unwrap().to_owned())
        .collect()
}

#[test]
fn the_host_device_works_and_is_really_tried() {
    let output = run("doctor --device host --json");
    succeeded(&output);
    let report = object(&output);
    assert_eq!(report["device"], "host");
    assert_eq!(report["works"], true);
    // Get and put, in plain and in virtual memory.
    assert_eq!(statuses(&report, "host device", "memory, "), ["ok"; 4]);
    assert_eq!(statuses(&report, "host device", "words"), ["ok"]);
    assert_eq!(statuses(&report, "host device", "GEMM"), ["ok"]);
    for name in ["memfd", "descriptors", "futex", "loopback"] {
        assert_eq!(statuses(&report, "machine", name), ["ok"], "{name}");
    }
    for check in report["checks"].as_array().unwrap() {
        assert_eq!(
            check["status"] == "ok",
            check["help"].is_null(),
            "what is not ok says what to do: {check}"
        );
    }
}

#[test]
fn people_read_a_verdict_and_what_to_do() {
    let text = succeeded(&run("doctor --device host"));
    assert!(text.ends_with("The host device works.\n"), "{text}");
    if !has_gpu() {
        assert!(text.contains("install the NVIDIA driver"), "{text}");
    }
}

#[test]
fn without_a_gpu_cuda_does_not_work() {
    if has_gpu() {
        return;
    }
    let output = run("doctor --device cuda --json");
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    let report = object(&output);
    assert_eq!(report["works"], false);
    assert!(!statuses(&report, "GPUs", "").contains(&"ok".to_owned()));
    // What can be tried is still tried.
    assert_eq!(statuses(&report, "host device", "words"), ["ok"]);
}

#[test]
fn a_setting_that_keeps_ranks_from_starting_is_reported() {
    let setting = [("WARPLINK_PROTOCOL", "push")];
    let output = run_with(&setting, "doctor --device host --json");
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    let report = object(&output);
    let failed = report["checks"]
        .as_array()
        .unwrap()
        .iter()
        .find(|check| check["area"] == "host device")
        .unwrap();
    assert!(
        failed["detail"]
            .as_str()
            .unwrap()
            .contains("WARPLINK_PROTOCOL is 'push'; expected get or put"),
        "{failed}"
    );
    // Nothing is listed under machine.
    let help = failed["help"].as_str().unwrap();
    assert!(help.contains("fix what the error names"), "{help}");
}
