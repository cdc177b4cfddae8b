//! Output with `--json`: one object, also for errors.

use crate::common::{
    SOON, command, example, kill, run, stderr, stdout, succeeded, within, written,
};
use serde_json::Value;
use std::process::Stdio;

/// The only object that a command prints, which fails unless `succeeds`.
fn object(args: &str, succeeds: bool) -> Value {
    let output = run(&format!("--json {args}"));
    let text = stdout(&output);
    assert_eq!(output.status.success(), succeeds, "{args:?}: {text}");
    assert_eq!(text.lines().count(), 1, "{args:?}: {text}");
    let object: Value = serde_json::from_str(&text).unwrap();
    assert!(object.is_object(), "{args:?}: {text}");
    object
}

/// The error that a command prints, whose form is that of all.
fn error(args: &str) -> Value {
    let error = object(args, false)["error"].take();
    for (key, value) in error.as_object().expect("an error") {
        let known = [
            "kind",
            "message",
            "help",
            "rank",
            "peer",
            "code",
            "diagnostics",
        ];
        assert!(known.contains(&key.as_str()), "{args:?}: {error}");
        assert!(!value.is_null(), "{args:?}: {error}");
    }
    let message = error["message"].as_str().unwrap();
    assert!(!message.contains("help:"), "{args:?}: {error}");
    error
}

#[test]
fn errors_of_every_origin_have_one_form() {
    for (args, kind, message) in [
        // Of the command itself.
        (
            "demo --device host --m 7",
            "invalid-argument",
            "m = 7 is not divisible by 2 ranks; expected a multiple of 2",
        ),
        // Of the library.
        ("topo --mesh /nonexistent.json", "io", "/nonexistent.json"),
        // Of the arguments' grammar.
        (
            "demo --dtype f64",
            "invalid-argument",
            "invalid value 'f64' for '--dtype <TYPE>': unknown element type 'f64'; expected f16, bf16 or f32",
        ),
        (
            "launch -- no-such-program",
            "invalid-argument",
            "'no-such-program' was not found; expected a path, or a name in PATH",
        ),
        (
            "program verify no-such-file.wlp",
            "io",
            "read no-such-file.wlp",
        ),
        ("bench", "invalid-argument", "arguments are missing"),
    ] {
        let error = error(args);
        assert_eq!(error["kind"], kind, "{args:?}: {error}");
        let text = error["message"].as_str().unwrap();
        assert!(text.contains(message), "{args:?}: {error}");
    }
    let alone = error("bench p2p --device host -n 1");
    assert_eq!(alone["help"], "use --ranks 2");
    let missing = error("program verify no-such-file.wlp");
    assert_eq!(missing["code"], 2, "{missing}");
}

/// The hidden ones are for the command's own use.
#[test]
fn a_missing_subcommand_lists_those_for_people() {
    let output = run("--json");
    let text = stdout(&output) + &stderr(&output);
    assert!(text.contains("bench, demo, doctor"), "{text}");
    assert!(!text.contains("__"), "{text}");
}

#[test]
fn a_refused_program_has_one_error_in_every_command() {
    let ring = example("ring_pass");
    for command in ["show", "verify", "cost", "run"] {
        let error = error(&format!("program {command} {ring} -n 2"));
        assert_eq!(error["kind"], "invalid-argument", "{error}");
        assert_eq!(error["help"], "give a value with --param n=N", "{error}");
        let diagnostics = error["diagnostics"].as_array().unwrap();
        assert_eq!(diagnostics.len(), 1, "{error}");
        assert_eq!(diagnostics[0]["kind"], "requirement", "{error}");
    }
    let text = object(&format!("program verify {ring}"), false);
    assert_eq!(text["passed"], false, "{text}");
    assert_eq!(text["diagnostics"], text["error"]["diagnostics"]);
}

#[test]
fn a_mistake_in_a_program_has_one_error_in_every_command() {
    let (_folder, path) = written("wrong.wlp", "program p() {\n    post = 1\n}\n");
    for command in [
        "program show",
        "program verify",
        "program cost",
        "program run",
        "bench section",
    ] {
        let error = error(&format!("{command} {path}"));
        assert_eq!(error["kind"], "parse", "{error}");
        let diagnostic = &error["diagnostics"][0];
        assert_eq!(
            (
                &diagnostic["kind"],
                &diagnostic["line"],
                &diagnostic["column"]
            ),
            (&"parse".into(), &2.into(), &10.into())
        );
        let message = diagnostic["message"].as_str().unwrap();
        assert!(message.contains("found '='"), "{message}");
        assert!(diagnostic["excerpt"].is_string(), "{error}");
    }
}

/// A benchmark that goes on for long.
const LONG: &str = "bench p2p --device host --samples 60000 --json";

/// Output of a job that `end` ends: it gets the process ids of the first process and of rank 0.
fn ended_by(end: impl FnOnce(u32, u32)) -> Value {
    let mark = format!(
        "WARPLINK_TEST_MARK={}.{:?}",
        std::process::id(),
        std::thread::current().id()
    );
    let (name, value) = mark.split_once('=').unwrap();
    let child = command(LONG)
        .env(name, value)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let rank_0 = || {
        let of_rank = |pid: &u32| {
            let read =
                |file: &str| std::fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default();
            let environment = read("environ");
            let has = |text: &str| {
                environment
                    .split(|byte| *byte == 0)
                    .any(|one| one == text.as_bytes())
            };
            // It is a rank when it has become the program.
            let arguments = read("cmdline");
            has(&mark) && has("WARPLINK_RANK=0") && !arguments.windows(2).any(|two| two == b"__")
        };
        let entries = std::fs::read_dir("/proc").unwrap().flatten();
        let mut pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        pids.find(of_rank)
    };
    assert!(within(SOON, || rank_0().is_some()), "no rank has started");
    end(child.id(), rank_0().unwrap());
    let output = child.wait_with_output().unwrap();
    assert!(!output.status.success());
    let text = stdout(&output);
    assert_eq!(text.lines().count(), 1, "{text}{}", stderr(&output));
    serde_json::from_str(&text).unwrap()
}

#[test]
fn a_job_that_is_ended_has_an_error_in_place_of_its_result() {
    let interrupted = ended_by(|first, _| kill("INT", first));
    assert_eq!(interrupted["error"]["kind"], "interrupted", "{interrupted}");
    assert_eq!(interrupted["error"]["message"], "interrupted by SIGINT");
    let killed = ended_by(|_, rank_0| kill("KILL", rank_0));
    assert_eq!(killed["error"]["kind"], "rank-failed", "{killed}");
    assert_eq!(killed["error"]["rank"], 0, "{killed}");
    assert_eq!(
        killed["error"]["message"],
        "rank 0 was ended by SIGKILL (9)"
    );
}

#[test]
fn operations_and_kernels_are_shown_in_an_object() {
    let ring = example("ring_pass");
    let shown = object(&format!("program show {ring} -n 4 --rank 2 -p n=8"), true);
    assert_eq!(
        (&shown["program"], &shown["ranks"], &shown["rank"]),
        (&"ring_pass".into(), &4.into(), &2.into())
    );
    assert!(!shown["operations"].as_array().unwrap().is_empty());
}

#[test]
fn a_replay_is_an_object() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("report.json");
    let file = file.to_str().unwrap();
    let shape = "--device host --shape 32,32,16 --samples 1";
    succeeded(&run(&format!("bench overlap --output {file} {shape}")));
    let replay = format!("bench overlap --replay {file} --model host");
    let shown = object(&replay, true);
    assert_eq!(
        (&shown["benchmark"], &shown["ranks"]),
        (&"overlap".into(), &2.into())
    );
    let shape = &shown["shapes"][0];
    assert_eq!(shape["m"], 32, "{shown}");
    assert!(shape["of_best"].as_f64().unwrap() > 0.0, "{shown}");
    let text = stdout(&run(&replay));
    assert!(text.contains("The chosen lowering is within 5 %"), "{text}");
    // Where the choice was bad, all lowerings are listed, some of which have no parameters.
    let mut report: Value = serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
    for row in report["shapes"][0]["lowerings"].as_array_mut().unwrap() {
        let seconds = if row["lowering"] == "push" { 1e-6 } else { 1.0 };
        for submission in ["eager", "captured"] {
            row["times"][submission]["median"] = seconds.into();
        }
    }
    std::fs::write(file, report.to_string()).unwrap();
    let text = stdout(&run(&replay));
    assert!(text.contains(" of the fastest"), "{text}");
    assert!(text.contains("us captured, expected "), "{text}");
    assert!(!text.contains("measured ,"), "{text}");
}
