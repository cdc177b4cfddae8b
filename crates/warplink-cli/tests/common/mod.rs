//! Runs the built command, and looks for what it leaves behind.

#![allow(
    clippy::unwrap_used,
    reason = "a test that fails here should stop here"
)]

use serde_json::Value;
use std::io;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

#[path = "../../../warplink/tests/common/stopwatch.rs"]
mod stopwatch;

#[allow(unused_imports, reason = "each test binary uses a part of this")]
pub(crate) use stopwatch::Stopwatch;

/// Longer than anything here takes on a busy machine, shorter than the sleeps of the ranks.
pub(crate) const SOON: Duration = Duration::from_secs(20);

/// The built command with these arguments. It takes signals as from a shell in the foreground: what the tests' own caller
/// ignores, as shells have it for what runs in the background, would stay ignored.
pub(crate) fn warplink(args: &[&str]) -> Command {
    let mut command = Command::new("env");
    command.args([
        "--default-signal=HUP,INT,QUIT,TERM",
        env!("CARGO_BIN_EXE_warplink"),
    ]);
    for name in [
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "MASTER_ADDR",
        "MASTER_PORT",
        "WARPLINK_DEVICE",
    ] {
        command.env_remove(name);
    }
    command.args(args).stdin(Stdio::null());
    command
}

/// The built command with the words of `line` as its arguments.
pub(crate) fn command(line: &str) -> Command {
    warplink(&line.split_whitespace().collect::<Vec<_>>())
}

/// Runs the command with the words of `line` to its end.
pub(crate) fn run(line: &str) -> Output {
    command(line).output().unwrap()
}

/// The same, with these variables.
pub(crate) fn run_with(variables: &[(&str, &str)], line: &str) -> Output {
    let variables = variables.iter().copied();
    command(line).envs(variables).output().unwrap()
}

/// The same, on the host device by its variable, which every command accepts.
pub(crate) fn run_on_host(line: &str) -> Output {
    run_with(&[("WARPLINK_DEVICE", "host")], line)
}

/// A file with this text, and the folder that has only it, which is removed when it is dropped.
pub(crate) fn written(name: &str, text: &str) -> (TempDir, String) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join(name);
    std::fs::write(&file, text).unwrap();
    (folder, file.display().to_string())
}

/// Sends a process a signal.
pub(crate) fn kill(signal: &str, pid: u32) {
    let pid = pid.to_string();
    let sent = Command::new("kill").args(["-s", signal, &pid]).status();
    assert!(sent.unwrap().success());
}

/// Number of processes that sleep for `time`, as an argument.
pub(crate) fn sleeping(time: &str) -> usize {
    let expected = format!("sleep\0{time}\0");
    let entries = std::fs::read_dir("/proc").unwrap().flatten();
    let sleeps = entries.filter(|entry| {
        let cmdline = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        cmdline == expected.as_bytes()
    });
    sleeps.count()
}

/// The lines of standard output, sorted: ranks print in any order.
pub(crate) fn sorted_lines(output: &Output) -> Vec<String> {
    let mut lines: Vec<String> = stdout(output).lines().map(str::to_owned).collect();
    lines.sort_unstable();
    lines
}

/// Standard output of a command, which must have succeeded.
#[track_caller]
pub(crate) fn succeeded(output: &Output) -> String {
    assert!(output.status.success(), "{}", stderr(output));
    stdout(output)
}

/// The object that a command printed, which must have succeeded.
#[track_caller]
pub(crate) fn object(output: &Output) -> Value {
    serde_json::from_str(&succeeded(output)).unwrap()
}

/// The object that the command with the words of `line` prints.
#[track_caller]
pub(crate) fn json(line: &str) -> Value {
    object(&run(line))
}

/// Checks that a command failed, and that its standard error contains `part` once.
#[track_caller]
pub(crate) fn assert_refused(output: &Output, part: &str) {
    let text = stderr(output);
    assert!(!output.status.success(), "{text}");
    assert_eq!(
        text.matches(part).count(),
        1,
        "'{part}' is not once in: {text}"
    );
}

/// The path of an example program.
pub(crate) fn example(name: &str) -> String {
    let root = env!("CARGO_MANIFEST_DIR");
    format!("{root}/../../examples/programs/{name}.wlp")
}

/// Runs `ranks` ranks of a shell script to their end.
pub(crate) fn launch(ranks: usize, script: &str) -> Output {
    launch_with(&[], ranks, script)
}

/// The same, with more options of `launch`.
pub(crate) fn launch_with(options: &[&str], ranks: usize, script: &str) -> Output {
    let ranks = ranks.to_string();
    let args = [
        &["launch", "-n", &ranks],
        options,
        &["--", "sh", "-c", script],
    ]
    .concat();
    warplink(&args).output().unwrap()
}

/// Standard output.
pub(crate) fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// Standard error.
pub(crate) fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// A running launch whose processes all carry a mark in their arguments.
pub(crate) struct Running {
    pub(crate) child: Child,
    mark: String,
}

impl Running {
    /// Starts ranks of `script`, in which `MARK` stands for a number to sleep for that no other
    /// process of this machine sleeps for, and waits until `processes` sleep.
    pub(crate) fn start(ranks: usize, script: &str, processes: usize) -> Self {
        Self::start_with("1", ranks, script, processes)
    }

    /// The same, with the grace time in seconds.
    pub(crate) fn start_with(grace: &str, ranks: usize, script: &str, processes: usize) -> Self {
        // Seconds enough that only a signal ends the sleep, and a fraction that is ours.
        let mark = format!("86400.{}{}", std::process::id(), unique());
        let ranks = ranks.to_string();
        let script = script.replace("MARK", &mark);
        let child = warplink(&[
            "launch", "-n", &ranks, "--grace", grace, "--", "sh", "-c", &script,
        ])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
        let running = Self { child, mark };
        assert!(
            within(SOON, || running.sleeping() == processes),
            "the ranks did not start"
        );
        running
    }

    /// How many processes sleep for the marked time.
    pub(crate) fn sleeping(&self) -> usize {
        sleeping(&self.mark)
    }

    /// Waits until the launcher has taken the signals that it was sent: a second of a kind that is sent before
    /// is none.
    pub(crate) fn wait_until_signals_are_taken(&self) {
        let status = format!("/proc/{}/status", self.child.id());
        let none_is_pending = || {
            let status = std::fs::read_to_string(&status).unwrap();
            let pending = status.lines().find_map(|line| line.strip_prefix("ShdPnd:"));
            u64::from_str_radix(pending.unwrap().trim(), 16) == Ok(0)
        };
        assert!(within(SOON, none_is_pending), "a signal is not taken");
    }

    /// Sends the launcher itself a signal.
    pub(crate) fn signal(&self, name: &str) {
        kill(name, self.child.id());
    }

    /// Waits for the launcher, and returns its exit code (none after a signal) and its output.
    pub(crate) fn finish(&mut self) -> (Option<i32>, String) {
        let out = io::read_to_string(self.child.stdout.take().unwrap()).unwrap();
        let err = io::read_to_string(self.child.stderr.take().unwrap()).unwrap();
        (self.child.wait().unwrap().code(), out + &err)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Whether `condition` holds at some time within `limit`.
pub(crate) fn within(limit: Duration, mut condition: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + limit;
    while Instant::now() < end {
        if condition() {
            return true;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    condition()
}

fn unique() -> usize {
    use std::sync::atomic::{AtomicUsize, Ordering};
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Fails with the whole text where it lacks a part.
pub(crate) fn assert_contains(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "no '{part}' in {text}");
    }
}
