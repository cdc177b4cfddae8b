//! A part of the table of faults; `just faults` runs all of it.

use crate::common::{SOON, assert_refused, command, kill, run, stderr, stdout, within};
use std::io::{BufRead, BufReader};
use std::process::Stdio;
use std::time::Duration;

fn faults(more: &str) -> std::process::Output {
    run(&format!("faults --device host {more}"))
}

#[test]
fn the_others_get_an_error_or_are_unaffected() {
    let output = faults(
        "-n 2 --fault kill,error,cut,disk-full --phase join,exchange,graph,collective,bind,close --json",
    );
    let text = stdout(&output);
    assert_eq!(output.status.code(), Some(0), "{text}\n{}", stderr(&output));
    let report: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(report["wrong"], 0);
    let cells = report["cells"].as_array().unwrap();
    assert_eq!(cells.len(), 4 * 6);
    for cell in cells {
        let survivor = &cell["survivors"][0];
        let resources = cell["fault"] == "disk-full";
        if resources && ["graph", "collective", "close"].contains(&cell["phase"].as_str().unwrap())
        {
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
    let output = faults("-n 3 --fault stop --phase transfer,split");
    let text = stdout(&output);
    assert_eq!(output.status.code(), Some(0), "{text}\n{}", stderr(&output));
    assert!(text.contains("every cell is right"), "{text}");
    assert_eq!(text.matches("lost").count(), 2, "{text}");
}

/// Ctrl-C ends the command, which prints what it has by then.
#[test]
fn an_interrupted_table_has_the_cells_that_ran() {
    let mut child = command("faults --device host -n 2 --jobs 1 --fault kill,error")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let first = lines.find(|line| line.as_ref().unwrap().contains("[1/"));
    assert!(first.is_some());
    kill("INT", child.id());
    let rest: Vec<String> = lines.map(Result::unwrap).collect();
    let output = child.wait_with_output().unwrap();
    let table = stdout(&output);
    assert_eq!(output.status.code(), Some(130), "{table}\n{rest:?}");
    assert!(table.contains("were not run"), "{table}");
    let rows = |fault: &str| table.lines().filter(|line| line.starts_with(fault)).count();
    assert_eq!((rows("kill "), rows("error ")), (1, 0), "{table}");
}

/// Whenever a signal comes, there is one object: the cells that ran, or why there are none. Ranks that start at that moment
/// do not get it, and are ended nevertheless.
#[test]
fn each_signal_gives_one_object_at_any_time() {
    let arguments = "faults --device host -n 2 --json --fault stop,kill --phase join";
    for (signal, code) in [("INT", 130), ("TERM", 143), ("HUP", 129), ("QUIT", 131)] {
        for delay in [20, 40, 80, 160, 1000].map(Duration::from_millis) {
            let mut command = command(arguments);
            command.stdout(Stdio::piped()).stderr(Stdio::piped());
            let mut child = command.spawn().unwrap();
            // The guard takes signals once it has a child, the launcher.
            let pid = child.id();
            let children = format!("/proc/{pid}/task/{pid}/children");
            while std::fs::read_to_string(&children).is_ok_and(|all| all.is_empty()) {
                std::thread::sleep(Duration::from_millis(1));
            }
            std::thread::sleep(delay);
            kill(signal, pid);
            if !within(SOON, || child.try_wait().unwrap().is_some()) {
                child.kill().unwrap();
                panic!("{signal} after {delay:?} does not end it");
            }
            let output = child.wait_with_output().unwrap();
            let (text, said) = (stdout(&output), stderr(&output));
            let what = format!("{signal} after {delay:?}: {text}\n{said}");
            assert_eq!(output.status.code(), Some(code), "{what}");
            let object: serde_json::Value = serde_json::from_str(&text).expect(&what);
            let interrupted = object["error"]["kind"] == "interrupted";
            assert!(
                interrupted || object["not_run"].as_u64() > Some(0),
                "{what}"
            );
        }
    }
}

#[test]
fn arguments_that_make_no_sense_are_refused() {
    for (arguments, says) in [
        ("-n 1", "at least 2 ranks"),
        ("-n 2 --victim 2", "--victim is 2; expected a rank below 2"),
        ("--fault flood", "flood"),
    ] {
        assert_refused(&faults(arguments), says);
    }
}
