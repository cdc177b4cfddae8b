//! Launches whose ranks share GPUs, with a stand-in for the command of CUDA's multi-process service.

use crate::common::{SOON, kill, sleeping, sorted_lines, stderr, stdout, warplink, within};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use tempfile::TempDir;

/// Behaves as `nvidia-cuda-mps-control` does: `-d` leaves a daemon that answers until it is told to quit.
/// Records its actions in `events`.
const CONTROL: &str = r#"#!/bin/sh
here=HERE
pipe=$CUDA_MPS_PIPE_DIRECTORY
if [ "$1" = -d ]; then
    echo "start [$CUDA_VISIBLE_DEVICES] $pipe $CUDA_MPS_LOG_DIRECTORY $(stat -c %a "$pipe")" >> $here/events
    [ ! -e $here/fails ] || { echo "no GPU here" > "$CUDA_MPS_LOG_DIRECTORY/control.log"; exit 1; }
    [ -e $here/mute ] || setsid sh -c "sleep 0.2; echo \$\$ > $here/daemon; touch $pipe/control; exec sleep MARK" &
    exit 0
fi
read word
echo "$word" >> $here/events
[ -e "$pipe/control" ] || exit 1
if [ "$word" = quit ] && [ ! -e $here/stubborn ]; then
    rm "$pipe/control"
    kill $(cat $here/daemon)
fi
exit 0
"#;

struct Machine {
    folder: TempDir,
}

impl Machine {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("bin")).unwrap();
        std::fs::create_dir(folder.path().join("tmp")).unwrap();
        let machine = Self { folder };
        let control = machine.path("bin/nvidia-cuda-mps-control");
        let text = CONTROL
            .replace("HERE", &machine.folder.path().display().to_string())
            .replace("MARK", &machine.mark());
        std::fs::write(&control, text).unwrap();
        std::fs::set_permissions(&control, PermissionsExt::from_mode(0o755)).unwrap();
        machine
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A time to sleep for that no other process sleeps for.
    fn mark(&self) -> String {
        let name = self.folder.path().to_string_lossy();
        let number = name
            .bytes()
            .fold(0u64, |hash, byte| hash.wrapping_mul(31) + u64::from(byte));
        format!("86400.{number}")
    }

    fn launch(&self, args: &[&str], script: &str) -> Command {
        let mut command = warplink(
            &[
                &["launch", "--grace", "1"],
                args,
                &["--", "sh", "-c", script],
            ]
            .concat(),
        );
        let search = std::env::var("PATH").unwrap();
        command
            .env("PATH", format!("{}:{search}", self.path("bin").display()))
            .env("WARPLINK_DEVICE", "cuda")
            .env("TMPDIR", self.path("tmp"))
            .env_remove("CUDA_VISIBLE_DEVICES");
        command
    }

    fn start(&self, args: &[&str], script: &str) -> Child {
        let mut command = self.launch(args, script);
        command.stdout(Stdio::null()).stderr(Stdio::null());
        command.spawn().unwrap()
    }

    fn events(&self) -> String {
        std::fs::read_to_string(self.path("events")).unwrap_or_default()
    }

    /// Whether no daemon and no directory is left.
    fn is_clean(&self) -> bool {
        let left = std::fs::read_dir(self.path("tmp")).unwrap().count();
        left == 0 && sleeping(&self.mark()) == 0
    }

    fn check_clean(&self) {
        assert!(self.is_clean(), "something is left: {}", self.events());
    }
}

fn code(output: &Output) -> Option<i32> {
    output.status.code()
}

#[test]
fn ranks_find_the_service_and_their_gpus() {
    let machine = Machine::new();
    let script = "echo $CUDA_VISIBLE_DEVICES $CUDA_DEVICE_MAX_CONNECTIONS $CUDA_MPS_PIPE_DIRECTORY";
    let output = machine
        .launch(&["-n", "4", "--ranks-per-gpu", "2"], script)
        .output()
        .unwrap();
    assert_eq!(code(&output), Some(0), "{}", stderr(&output));
    let events = machine.events();
    let started: Vec<&str> = events
        .lines()
        .filter(|line| line.starts_with("start"))
        .collect();
    let [started] = started[..] else {
        panic!("{events}")
    };
    let [_, visible, pipe, log, mode] = started.split(' ').collect::<Vec<_>>()[..] else {
        panic!("{started}")
    };
    // The service sees all GPUs, in private directories of its own.
    assert_eq!((visible, mode), ("[]", "700"));
    assert_ne!(pipe, log);
    assert!(
        pipe.starts_with(&*machine.path("tmp").to_string_lossy()),
        "{pipe}"
    );
    let expected = (0..4).map(|rank| format!("[rank {rank}] {} 32 {pipe}", rank / 2));
    assert_eq!(sorted_lines(&output), expected.collect::<Vec<_>>());
    // It had answered before a rank was started.
    assert!(events.contains("get_server_list"), "{events}");
    assert_eq!(events.matches("quit").count(), 1, "{events}");
    machine.check_clean();
}

#[test]
fn the_gpus_that_are_visible_are_shared() {
    let machine = Machine::new();
    let mut command = machine.launch(
        &["-n", "8", "--ranks-per-gpu", "4"],
        "echo $CUDA_VISIBLE_DEVICES $CUDA_DEVICE_MAX_CONNECTIONS",
    );
    let output = command
        .env("CUDA_VISIBLE_DEVICES", "GPU-b,GPU-a")
        .output()
        .unwrap();
    let text = stdout(&output);
    assert_eq!(text.matches("GPU-b 16").count(), 4, "{text}");
    assert_eq!(text.matches("GPU-a 16").count(), 4, "{text}");
    assert!(
        machine.events().starts_with("start [] "),
        "{}",
        machine.events()
    );
    machine.check_clean();
}

#[test]
fn a_failure_of_a_rank_ends_the_service() {
    let machine = Machine::new();
    let output = machine.launch(
        &["-n", "2", "--ranks-per-gpu", "2"],
        "[ $RANK = 0 ] || exit 3; sleep 600",
    );
    let output = { output }.output().unwrap();
    assert_eq!(code(&output), Some(3), "{}", stderr(&output));
    assert!(machine.events().contains("quit"));
    machine.check_clean();
}

#[test]
fn a_service_that_does_not_quit_is_killed() {
    let machine = Machine::new();
    std::fs::write(machine.path("stubborn"), "").unwrap();
    let output = machine
        .launch(&["-n", "2", "--ranks-per-gpu", "2"], "true")
        .output()
        .unwrap();
    assert_eq!(code(&output), Some(0), "{}", stderr(&output));
    machine.check_clean();
}

#[test]
fn signals_to_the_launcher_end_the_service() {
    for (name, number) in [("INT", 2), ("TERM", 15)] {
        let machine = Machine::new();
        let ready = machine.path("ready");
        let script = format!("touch {}; (sleep 600); exit 0", ready.display());
        let mut child = machine.start(&["-n", "2", "--ranks-per-gpu", "2"], &script);
        assert!(within(SOON, || ready.exists()));
        kill(name, child.id());
        let status = child.wait().unwrap();
        assert_eq!(status.code(), Some(128 + number));
        machine.check_clean();
    }
}

#[test]
fn the_death_of_the_launcher_ends_the_service() {
    let machine = Machine::new();
    let ready = machine.path("ready");
    let script = format!("touch {}; sleep 600", ready.display());
    let mut child = machine.start(&["-n", "2", "--ranks-per-gpu", "2"], &script);
    assert!(within(SOON, || ready.exists()));
    assert!(!machine.is_clean(), "the stand-in runs until it is ended");
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(within(SOON, || machine.is_clean()), "something is left");
}

#[test]
fn a_service_that_cannot_be_started_is_an_error() {
    let machine = Machine::new();
    let arguments = ["-n", "2", "--ranks-per-gpu", "2"];
    std::fs::write(machine.path("fails"), "").unwrap();
    let output = machine.launch(&arguments, "echo ran").output().unwrap();
    assert_eq!((code(&output), stdout(&output).as_str()), (Some(1), ""));
    let text = stderr(&output);
    assert!(
        text.contains("no GPU here") && text.contains("nvidia-smi"),
        "{text}"
    );
    machine.check_clean();

    let output = machine
        .launch(&["--device", "host", "--ranks-per-gpu", "2"], "true")
        .output();
    let text = stderr(&output.unwrap());
    assert!(text.contains("--device cuda"), "{text}");
}
