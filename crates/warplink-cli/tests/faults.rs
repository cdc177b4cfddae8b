//! A part of the table of faults; `just faults` runs all of it.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[allow(dead_code, reason = "shared with the tests of output")]
mod common;

use common::{stderr, stdout, warplink};

fn faults(more: &[&str]) -> std::process::Output {
    let arguments = [&["faults", "--device", "host"], more].concat();
    warplink(&arguments).output().unwrap()
}

#[test]
fn the_others_get_an_error_or_are_unaffected() {
    let output = faults(&[
        "-n",
        "2",
        "--fault",
        "kill,error,cut,disk-full",
        "--phase",
        "join,exchange,graph,bind,close",
        "--json",
    ]);
    let text = stdout(&output);
    assert_eq!(output.status.code(), Some(0), "{text}\n{}", stderr(&output));
    let report: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(report["wrong"], 0);
    let cells = report["cells"].as_array().unwrap();
    assert_eq!(cells.len(), 4 * 5);
    for cell in cells {
        let survivor = &cell["survivors"][0];
        let resources = cell["fault"] == "disk-full";
        if resources && ["graph", "close"].contains(&cell["phase"].as_str().unwrap()) {
            assert_eq!(cell["summary"], "unaffected", "{cell}");
        } else if !resources {
            assert_eq!(survivor["error"], "PeerLost", "{cell}");
            assert_eq!(survivor["names"], 1, "{cell}");
            assert!(survivor["seconds"].as_f64().unwrap() < 5.0, "{cell}");
        }
    }
}

/// A stopped rank is given up after the limit of its heartbeats.
#[test]
fn a_stopped_rank_is_given_up_and_learns_it() {
    let output = faults(&["-n", "3", "--fault", "stop", "--phase", "transfer,split"]);
    let text = stdout(&output);
    assert_eq!(output.status.code(), Some(0), "{text}\n{}", stderr(&output));
    assert!(text.contains("every cell is right"), "{text}");
    assert_eq!(text.matches("lost").count(), 2, "{text}");
}

#[test]
fn arguments_that_make_no_sense_are_refused() {
    for (arguments, says) in [
        (&["-n", "1"][..], "at least 2 ranks"),
        (
            &["-n", "2", "--victim", "2"],
            "--victim is 2; expected a rank below 2",
        ),
        (&["--fault", "flood"], "flood"),
    ] {
        let output = faults(arguments);
        assert!(!output.status.success());
        assert!(stderr(&output).contains(says), "{}", stderr(&output));
    }
}
