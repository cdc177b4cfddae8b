//! Closed pipes, full disks, absurd sizes and other wrong input: errors, not panics.

use crate::common::{
    Stopwatch, assert_contains, command, example, run, run_on_host, run_with, stderr, stdout,
    succeeded, warplink,
};
use serde_json::Value;
use std::fs::File;
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Output};
use std::time::Duration;
use warplink::overlap::{AllGatherMatmulLowering, MatmulReduceScatterLowering};

const HOST: &str = "--device host";
const SMALL: &str = "--m 48 --k 32 --n 24 --samples 2";

/// Fails unless the command failed with an error that says `part`.
fn assert_error(output: &Output, part: &str) {
    let text = stderr(output);
    let code = output.status.code();
    assert!(matches!(code, Some(1 | 2)), "{code:?}: {text}");
    assert!(text.contains(part), "'{part}' is not in:\n{text}");
    assert!(!text.contains("panicked"), "{text}");
}

#[test]
fn a_closed_pipe_is_an_error() {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let output = command(&format!("demo {HOST} {SMALL}"))
        .stdout(writer)
        .output()
        .unwrap();
    let text = stderr(&output);
    assert_contains(&text, &["write the result to standard output: Broken pipe"]);
    assert!(!text.contains("panicked"), "{text}");
}

#[test]
fn a_full_disk_is_an_error() {
    let program = example("ring_pass");
    let commands = [
        &format!("demo {HOST} {SMALL}"),
        &format!("demo --json {HOST} {SMALL}"),
        &format!("program show {program}"),
        &format!("program show {program} -n 2 -p n=8"),
        &format!("program verify {program} -n 2 -p n=8"),
        "bench p2p --to 4KiB --samples 1 --device host",
        "bench program --samples 1 --device host",
        "launch --json -n 1 -- true",
    ];
    let script = ["launch", "-n", "2", "--", "sh", "-c", "echo text; sleep 60"];
    for mut command in commands.map(command).into_iter().chain([warplink(&script)]) {
        let output = command
            .stdout(File::options().write(true).open("/dev/full").unwrap())
            .output()
            .unwrap();
        assert_error(&output, "No space left on device");
    }
}

/// Ranks, or their launcher, without descriptors or threads name the resource, its limit and the remedy, and soon.
#[test]
fn a_shortage_is_named_within_seconds() {
    let section = example("all_reduce_one_shot");
    let run = format!("program run {section} -p n=64 -p T=f32");
    let bench = "bench collective all-reduce --to 1KiB";
    // Where every user may run it, and write.
    let folder = tempfile::tempdir_in("/tmp").unwrap();
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
    let binary = folder.path().join("warplink");
    std::fs::copy(env!("CARGO_BIN_EXE_warplink"), &binary).unwrap();
    let descriptors = ["file descriptors", "limit is", "ulimit -n"];
    let threads = [
        "no more threads and processes can be started",
        "limit is",
        "ulimit -u",
    ];
    // Of threads, all processes of the user count: root can be one that has none.
    let is_root = rustix::process::geteuid().is_root();
    for (limit, ranks, command, words) in [
        ("-n 64", "16", "demo", descriptors),
        ("-n 48", "16", bench, descriptors),
        ("-n 40", "12", &run, descriptors),
        ("-n 64", "40", "demo", descriptors),
        ("-n 16", "4", bench, descriptors),
        ("-u 60", "8", "demo", threads),
        ("-u 30", "4", bench, threads),
        ("-u 15", "2", bench, threads),
        ("-u 5", "2", "demo", threads),
    ] {
        let mut shell = if limit.starts_with("-u") {
            if !is_root {
                println!("ulimit {limit} is left out: only root can become another user");
                continue;
            }
            let mut shell = Command::new("setpriv");
            shell.args(["--reuid=54321", "--regid=54321", "--clear-groups", "bash"]);
            shell
        } else {
            Command::new("bash")
        };
        let script = format!("ulimit {limit} && exec \"$@\"");
        let begun = Stopwatch::start();
        let output = shell
            .args(["-c", &script, "bash"])
            .arg(&binary)
            .args(command.split(' '))
            .args(["--device", "host", "-n", ranks])
            .env("WARPLINK_CACHE_DIR", folder.path())
            .current_dir(folder.path())
            .output()
            .unwrap();
        let took = begun.elapsed();
        let text = stderr(&output);
        let what = format!("ulimit {limit}, {ranks} ranks of {command:?}, {took:?}: {text}");
        assert_eq!(output.status.code(), Some(1), "{what}");
        for word in words {
            assert!(text.contains(word), "no '{word}': {what}");
        }
        assert!(took < Duration::from_secs(5), "{what}");
        assert!(text.lines().count() < 100, "{what}");
    }
}

#[test]
fn absurd_sizes_are_errors() {
    let program = example("ring_pass");
    let run = format!("program run {program} -p n=1000000000000");
    for (args, part) in [
        ("demo --k 1000000000000", "GiB of memory"),
        (
            "demo --m 1000000000000 --n 1000000000000",
            "expected smaller",
        ),
        ("demo --n 18446744073709551615", "expected"),
        (
            "bench overlap --shape 1000000000000,1000000000000,2",
            "expected smaller",
        ),
        ("bench p2p --to 1000TiB --from 1TiB", "GiB of memory"),
        (&*run, "GiB of memory"),
        ("tune --largest-shape 1000000000000", "expected 1 to"),
        ("tune --largest-transfer 1000TiB", "GiB of memory"),
        (
            "tune --largest-transfer 1",
            "--largest-transfer is 1 B; expected at least 4 KiB on 2 ranks",
        ),
        (
            "tune --largest-transfer 4KiB -n 8",
            "expected at least 8 KiB on 8 ranks",
        ),
        (
            "tune --largest-shape 0",
            "--largest-shape is 0; expected 1 to",
        ),
        (
            "bench overlap --shape 0,1,1",
            "expected three sizes above 0",
        ),
        (
            "bench p2p --step 1",
            "expected a whole number of at least 2",
        ),
        ("launch --grace 1e19 -- true", "from 0 to 86400"),
        ("launch --grace inf -- true", "from 0 to 86400"),
    ] {
        assert_error(&run_on_host(args), part);
    }
}

#[test]
fn the_variable_for_the_device_holds_for_every_command() {
    let with = |device, args: &str| run_with(&[("WARPLINK_DEVICE", device)], args);
    let output = with("host", "doctor --json");
    let report: Value = serde_json::from_str(&stdout(&output)).unwrap();
    assert_eq!(report["device"], "host");
    let output = warplink(&["launch", "--", "sh", "-c", "echo $WARPLINK_DEVICE"])
        .env("WARPLINK_DEVICE", "host")
        .output()
        .unwrap();
    // Two ranks are the default of the host device.
    assert_eq!(stdout(&output).matches("host\n").count(), 2);
    let program = example("ring_pass");
    let show = format!("program show {program}");
    for args in ["demo", "doctor", "bench p2p", "launch -- true", &show] {
        assert_error(&with("tpu", args), "tpu");
    }
}

#[test]
fn output_files_are_opened_first() {
    let run = format!("program run {} -p n=8", example("ring_pass"));
    for (command, option, path) in [
        ("bench overlap", "--output", "/no/such/folder/o.json"),
        ("bench overlap", "--plot", "/no/such/folder/o.svg"),
        ("bench overlap", "--traces", "/proc/no/such/folder"),
        (&run, "--trace", "/no/t.json"),
    ] {
        // Ranks would fail as well, but by another error.
        let wrong = [("WARPLINK_PROTOCOL", "push")];
        let line = format!("{command} --device host {option} {path}");
        assert_error(&run_with(&wrong, &line), path);
    }
}

/// By the first process, and not by every rank.
#[test]
fn wrong_variables_are_reported_once() {
    for (name, value, said) in [
        (
            "WARPLINK_TIMEOUT",
            "soon",
            "WARPLINK_TIMEOUT=soon is not a time limit",
        ),
        (
            "WARPLINK_PROTOCOL",
            "push",
            "WARPLINK_PROTOCOL is 'push'; expected get or put",
        ),
        (
            "WARPLINK_NETWORK_MEMORY",
            "foo",
            "WARPLINK_NETWORK_MEMORY is 'foo'; expected staged, auto or direct",
        ),
        (
            "WARPLINK_TOPOLOGY",
            "foo",
            "WARPLINK_TOPOLOGY is 'foo'; expected fully-connected",
        ),
    ] {
        let output = run_with(&[(name, value)], &format!("demo {HOST} {SMALL}"));
        assert_error(&output, said);
        let text = stderr(&output);
        assert_eq!(text.matches(said).count(), 1, "{text}");
        assert!(!text.contains("rank 0"), "{text}");
    }
}

#[test]
fn sharing_gpus_needs_gpus() {
    let output = run_on_host(&format!("demo --ranks-per-gpu 2 {SMALL}"));
    assert_error(
        &output,
        "--ranks-per-gpu needs GPUs, and the device is host",
    );
}

#[test]
fn a_wrong_log_filter_is_reported_once() {
    let filter = [("WARPLINK_LOG", "warplink=loud")];
    let output = run_with(&filter, &format!("demo {HOST} {SMALL}"));
    assert!(output.status.success());
    let text = stderr(&output);
    let said = "WARPLINK_LOG is 'warplink=loud', which is not a log filter";
    assert_eq!(text.matches(said).count(), 1, "{text}");
}

#[test]
fn help_lists_every_lowering() {
    for command in ["demo", "bench overlap", "bench program"] {
        let text = succeeded(&run(&format!("{command} --help")));
        let gathers = AllGatherMatmulLowering::ALL.iter().map(|one| one.name());
        let scatters = MatmulReduceScatterLowering::ALL
            .iter()
            .map(|one| one.name());
        // The demo is an all-gather.
        let scatters = scatters.filter(|_| command != "demo");
        for name in gathers.chain(scatters) {
            assert!(text.contains(name), "{name} is not in:\n{text}");
        }
    }
}

#[test]
fn a_demo_that_succeeds_warns_of_nothing() {
    for _ in 0..5 {
        let output = run(&format!("demo -n 3 {HOST} {SMALL}"));
        assert!(output.status.success());
        assert_eq!(stderr(&output), "");
    }
}

#[test]
fn the_cause_of_a_failure_is_printed_first() {
    for _ in 0..5 {
        let output = run("bench overlap --device host --shape 7,7,7");
        let text = stderr(&output);
        let first = text.lines().next().unwrap();
        assert!(first.contains("is not divisible by 2 ranks"), "{text}");
    }
}
