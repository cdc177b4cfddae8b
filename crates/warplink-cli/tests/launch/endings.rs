//! How a launch ends: by failures, by signals, and by the launcher's own death.

use crate::common::{
    Running, SOON, Stopwatch, assert_contains, kill, launch, launch_with, sorted_lines, stderr,
    stdout, within,
};
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::time::{Duration, Instant};

/// A directory for files by which ranks, or a rank and the test, tell how far they are.
fn meeting() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

/// A script in which `HERE` stands for a directory, and `AWAIT file;` for a wait until that is there.
fn script(text: &str, here: &Path) -> String {
    let here = here.display().to_string();
    let awaits = text
        .split("AWAIT ")
        .enumerate()
        .map(|(place, part)| match part.split_once(';') {
            Some((file, rest)) if place > 0 => {
                format!("until [ -e {file} ]; do sleep 0.01; done;{rest}")
            }
            _ => part.to_owned(),
        });
    awaits.collect::<String>().replace("HERE", &here)
}

#[test]
fn the_first_rank_that_fails_ends_the_rest() {
    let start = Stopwatch::start();
    let output = launch(4, "[ $RANK != 2 ] || exit 3; sleep 600");
    assert_eq!(output.status.code(), Some(3));
    assert!(
        start.elapsed() < Duration::from_secs(4),
        "took {:?}",
        start.elapsed()
    );
    let text = stderr(&output);
    assert_contains(
        &text,
        &["rank 2 exited with code 3; ending the other ranks"],
    );
    assert!(
        !text.contains("rank 0"),
        "what follows from the first failure is no news: {text}"
    );
}

#[test]
fn a_signal_that_ends_a_rank_is_named() {
    let output = launch(2, "[ $RANK = 0 ] || kill -s SEGV $$; sleep 600");
    assert_eq!(output.status.code(), Some(128 + 11));
    assert_contains(&stderr(&output), &["rank 1 was ended by SIGSEGV (11)"]);
}

#[test]
fn a_rank_that_ignores_sigterm_is_killed_after_the_grace_time() {
    let (here, start, watch) = (meeting(), Instant::now(), Stopwatch::start());
    let text = "[ $RANK = 0 ] || { AWAIT HERE/ready; exit 5; }
        trap '' TERM; touch HERE/ready; while :; do sleep 0.1; done";
    let output = launch_with(&["--grace", "0.5"], 2, &script(text, here.path()));
    assert_eq!(output.status.code(), Some(5));
    assert!(start.elapsed() > Duration::from_millis(500));
    assert!(watch.elapsed() < SOON);
}

#[test]
fn a_rank_may_clean_up_on_sigterm() {
    let here = meeting();
    let text = "[ $RANK = 0 ] || { AWAIT HERE/ready; exit 5; }
        trap 'echo cleaned; exit 0' TERM; touch HERE/ready; while :; do sleep 0.1; done";
    let output = launch_with(&["--grace", "20"], 2, &script(text, here.path()));
    assert_eq!(
        (output.status.code(), stdout(&output).as_str()),
        (Some(5), "[rank 0] cleaned\n")
    );
}

#[test]
fn ranks_that_succeed_do_not_end_the_rest() {
    let output = launch(2, "[ $RANK = 0 ] || sleep 0.5; echo done");
    assert!(output.status.success());
    assert_eq!(sorted_lines(&output), ["[rank 0] done", "[rank 1] done"]);
}

#[test]
fn sigterm_and_sigint_reach_every_rank_and_what_it_started() {
    for (name, number) in [("TERM", 15), ("INT", 2)] {
        // An interactive shell's child ignores SIGINT in the background, so each sleeps in front.
        let mut running = Running::start(2, "(sleep MARK); exit 0", 2);
        running.signal(name);
        let (code, text) = running.finish();
        assert_eq!(code, Some(128 + number), "{text}");
        assert_eq!(running.sleeping(), 0);
        // Not as a rank that failed.
        let said = format!("warplink: interrupted by SIG{name}; ending the ranks\n");
        assert_eq!(text, said);
    }
}

#[test]
fn ranks_that_end_well_on_a_signal_make_a_success() {
    let mut running = Running::start(2, "trap 'kill $!; exit 0' TERM; sleep MARK & wait", 2);
    running.signal("TERM");
    let (code, text) = running.finish();
    assert_eq!(code, Some(0), "{text}");
}

#[test]
fn a_second_signal_kills() {
    // Longer than the test, so that only the second signal can be what kills.
    let script = "trap '' TERM; sleep MARK; sleep MARK";
    let mut running = Running::start_with("600", 2, script, 2);
    running.signal("TERM");
    running.wait_until_signals_are_taken();
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(running.sleeping(), 2, "the first is theirs to ignore");
    running.signal("TERM");
    let (code, text) = running.finish();
    assert_eq!(code, Some(128 + 9), "{text}");
    assert_eq!(running.sleeping(), 0);
}

/// Processes that ranks leave behind, also in sessions of their own, and without the variable that marks them.
#[test]
fn nothing_is_left_of_ranks_that_end_well() {
    for (text, processes) in [
        ("sleep MARK & AWAIT HERE/go; true", 2),
        (
            "setsid sleep MARK & env -i setsid sleep MARK & AWAIT HERE/go; true",
            4,
        ),
    ] {
        let here = meeting();
        let mut running = Running::start(2, &script(text, here.path()), processes);
        std::fs::write(here.path().join("go"), "").unwrap();
        let (code, printed) = running.finish();
        assert_eq!(code, Some(0), "{text}: {printed}");
        assert_eq!(running.sleeping(), 0, "{text}");
    }
}

#[test]
fn nothing_is_left_when_the_launcher_is_killed() {
    for text in ["sleep MARK & sleep MARK", "setsid sleep MARK & sleep MARK"] {
        let mut running = Running::start(2, text, 4);
        running.signal("KILL");
        running.child.wait().unwrap();
        assert!(
            within(SOON, || running.sleeping() == 0),
            "{text}: {} processes are left",
            running.sleeping()
        );
    }
}

/// Of the launcher and its guard, either may be killed, and the other stopped meanwhile.
#[test]
fn nothing_is_left_when_the_launcher_or_its_guard_is_killed() {
    for (stopped, killed) in [(None, 0), (None, 1), (Some(1), 0), (Some(0), 1)] {
        let script = "env -i setsid sleep MARK & setsid sleep MARK & sleep MARK";
        let mut running = Running::start(2, script, 6);
        let guard = running.child.id();
        let children = format!("/proc/{guard}/task/{guard}/children");
        let launcher = std::fs::read_to_string(children).unwrap();
        let pids = [guard, launcher.trim().parse().unwrap()];
        if let Some(stopped) = stopped {
            kill("STOP", pids[stopped]);
        }
        kill("KILL", pids[killed]);
        if stopped == Some(0) {
            kill("CONT", pids[0]);
        }
        running.child.wait().unwrap();
        let none_is_left = within(SOON, || running.sleeping() == 0);
        assert!(
            none_is_left,
            "{stopped:?} {killed}: {} are left",
            running.sleeping()
        );
    }
}

#[test]
fn stopped_ranks_are_killed_after_the_grace_time() {
    // Rank 1 stops before it sleeps.
    let script = "[ $RANK = 0 ] || kill -s STOP $$; sleep MARK";
    let start = Stopwatch::start();
    let mut running = Running::start(2, script, 1);
    running.signal("TERM");
    let (code, text) = running.finish();
    assert_eq!(code, Some(128 + 15), "{text}");
    assert!(start.elapsed() < SOON, "took {:?}", start.elapsed());

    let script = "[ $RANK = 0 ] || kill -s STOP $$; sleep 0.3; exit 5";
    let output = launch_with(&["--grace", "0.5"], 2, script);
    assert_eq!(output.status.code(), Some(5));
}

#[test]
fn nohup_is_honoured() {
    let script = format!(
        "trap '' HUP; exec {} launch -n 2 -- sh -c 'echo started; sleep 1; echo done'",
        env!("CARGO_BIN_EXE_warplink")
    );
    let mut child = std::process::Command::new("sh")
        .args(["-c", &script])
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    // The launcher has long set how it takes signals.
    let mut output = BufReader::new(child.stdout.take().unwrap());
    let mut text = String::new();
    while text.matches("started").count() < 2 {
        assert_ne!(output.read_line(&mut text).unwrap(), 0, "{text}");
    }
    kill("HUP", child.id());
    output.read_to_string(&mut text).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0));
    assert_eq!(text.matches("done").count(), 2, "{text}");
}

#[test]
fn ranks_that_fail_together_all_say_why() {
    // The rank with the cause is not the first to exit: it waits until the other one is gone or a zombie. From there on
    // it starts no process, which takes long on a busy machine.
    let text = "[ $RANK = 0 ] || { AWAIT HERE/ready; echo $$ >HERE/pid; : >HERE/gone; exit 4; }
        touch HERE/ready; until [ -e HERE/gone ]; do :; done
        read pid <HERE/pid
        while read state </proc/$pid/stat && case $state in *') Z '*) false; esac; do :; done
        echo the cause >&2; exit 3";
    for _ in 0..5 {
        let here = meeting();
        let text = stderr(&launch(2, &script(text, here.path())));
        assert!(text.contains("[rank 0] the cause"), "{text}");
    }
}
