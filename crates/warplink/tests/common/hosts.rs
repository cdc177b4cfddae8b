//! Two network namespaces, which are as two hosts are, and the roles of a test on them. They need root.

use super::name_of_test;
use super::network::leave_out;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use warplink::Deadline;

/// Longer than anything here takes on a busy machine.
pub const SOON: Duration = Duration::from_secs(60);

pub fn soon() -> Deadline {
    Deadline::after(SOON)
}

/// Two network namespaces with a link between them, taken down at the end.
pub struct Hosts {
    names: [String; 2],
}

impl Hosts {
    /// None, with a notice, where this process may not make them; see [`leave_out`].
    pub fn create() -> Option<Self> {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        // In the names, which are short: the last digits of the process tell tests apart.
        let id = std::process::id() as usize % 100_000 * 10 + NEXT.fetch_add(1, Ordering::Relaxed);
        let names = [format!("warplink-{id}-a"), format!("warplink-{id}-b")];
        let hosts = Self { names };
        let [a, b] = &hosts.names;
        let pair = [format!("wl{id}a"), format!("wl{id}b")];
        if !ip(&["netns", "add", a]) || !ip(&["netns", "add", b]) {
            leave_out("network namespaces cannot be made");
            return None;
        }
        let [first, second] = &pair;
        let kind = ["type", "veth", "peer", "name", second, "netns", b];
        assert!(ip(
            &[&["link", "add", first, "netns", a][..], &kind].concat()
        ));
        for (index, (name, end)) in hosts.names.iter().zip(&pair).enumerate() {
            let address = format!("10.117.0.{}/24", index + 1);
            for command in [
                vec!["link", "set", end, "name", "link0"],
                vec!["addr", "add", &address, "dev", "link0"],
                vec!["link", "set", "link0", "up"],
                vec!["link", "set", "lo", "up"],
            ] {
                assert!(ip(&[&["-n", name][..], &command].concat()), "{command:?}");
            }
        }
        // A link comes up some time after it was set up.
        let deadline = soon();
        for name in &hosts.names {
            while !is_up(name) {
                assert!(!deadline.passed(), "the link of {name} does not come up");
                std::thread::sleep(Duration::from_millis(10));
            }
        }
        Some(hosts)
    }

    /// Runs a role of the test that calls this on one of the two.
    pub fn run(&self, host: usize, directory: &Path) -> Child {
        Command::new("ip")
            .args(["netns", "exec", &self.names[host]])
            .arg(std::env::current_exe().unwrap())
            .args([
                &*name_of_test(),
                "--exact",
                "--nocapture",
                "--test-threads=1",
            ])
            .env(DIRECTORY, directory)
            .env(ROLE, host.to_string())
            // Both are on one machine, where UCX would use shared memory.
            .env("UCX_TLS", "tcp,self")
            .stdin(Stdio::null())
            .spawn()
            .unwrap()
    }

    pub fn cut(&self) {
        assert!(ip(&["-n", &self.names[0], "link", "set", "link0", "down"]));
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for name in &self.names {
            ip(&["netns", "del", name]);
        }
    }
}

fn is_up(name: &str) -> bool {
    let shown = Command::new("ip")
        .args(["-n", name, "link", "show", "link0"])
        .output();
    String::from_utf8_lossy(&shown.unwrap().stdout).contains("state UP")
}

fn ip(arguments: &[&str]) -> bool {
    let status = Command::new("ip")
        .args(arguments)
        .stderr(Stdio::null())
        .status();
    status.is_ok_and(|status| status.success())
}

const DIRECTORY: &str = "WARPLINK_TEST_DIRECTORY";
const ROLE: &str = "WARPLINK_TEST_ROLE";

/// The directory of a role, and which it is; none in the test's own process.
pub fn role() -> Option<(PathBuf, usize)> {
    let directory = std::env::var_os(DIRECTORY)?;
    let role = std::env::var(ROLE).unwrap().parse().unwrap();
    Some((directory.into(), role))
}

/// Runs both roles of the test that calls this on two hosts, and `meanwhile` with the directory that they share; they must end well. Does
/// nothing where there can be no hosts.
pub fn run_roles(meanwhile: impl FnOnce(&Hosts, &Path)) {
    let Some(hosts) = Hosts::create() else {
        return;
    };
    let directory = tempfile::tempdir().unwrap();
    let roles = [0, 1].map(|host| hosts.run(host, directory.path()));
    meanwhile(&hosts, directory.path());
    for (host, role) in roles.into_iter().enumerate() {
        assert!(ended_well(role), "host {host} failed");
    }
}

/// Leaves a file for the other role, whole at once.
pub fn leave(directory: &Path, name: &str, bytes: &[u8]) {
    let written = directory.join(format!("{name}.part"));
    std::fs::write(&written, bytes).unwrap();
    std::fs::rename(written, directory.join(name)).unwrap();
}

/// Waits for a file.
pub fn take(directory: &Path, name: &str) -> Vec<u8> {
    let deadline = soon();
    loop {
        if let Ok(bytes) = std::fs::read(directory.join(name)) {
            return bytes;
        }
        assert!(!deadline.passed(), "{name} is missing");
        std::thread::sleep(Duration::from_millis(5));
    }
}

pub fn ended_well(mut child: Child) -> bool {
    let deadline = soon();
    while !deadline.passed() {
        if let Some(status) = child.try_wait().unwrap() {
            return status.success();
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    false
}
