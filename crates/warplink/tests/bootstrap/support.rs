//! Helpers of the bootstrap's tests: jobs of ranks that are threads, and time limits.
#![allow(dead_code, reason = "each test binary uses a part of it")]

#[path = "../common/relay.rs"]
mod relay;
#[path = "../common/stopwatch.rs"]
mod stopwatch;

use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;
use warplink::bootstrap::{Bootstrap, HeldPort, JoinConfig, Rendezvous, UniqueId};
use warplink::{Deadline, Rank, Result};

#[allow(unused_imports, reason = "each test binary uses a part of this")]
pub(crate) use relay::Relay;
#[allow(unused_imports, reason = "each test binary uses a part of this")]
pub(crate) use stopwatch::Stopwatch;

/// A deadline that a passing test never reaches.
pub(crate) fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(20))
}

pub(crate) fn new_id() -> UniqueId {
    UniqueId::create([127, 0, 0, 1].into(), 0).unwrap()
}

/// An address at which nobody listens, and what keeps others from being given it.
pub(crate) fn free_address() -> (SocketAddr, HeldPort) {
    let id = new_id();
    (id.address(), id.release())
}

pub(crate) fn config(id: &UniqueId, rank: Rank, world: usize) -> JoinConfig {
    let mut config = JoinConfig::new(Rendezvous::Id(id.clone()), rank, world);
    config.timeout = Duration::from_secs(20);
    config
}

/// Runs `body` and ends the whole process should it take longer than `seconds`: a test that hangs
/// fails, also under a runner that sets no limit.
pub(crate) fn within<T: Send + 'static>(
    seconds: u64,
    body: impl FnOnce() -> T + Send + 'static,
) -> T {
    let (done, finished) = mpsc::channel::<()>();
    let name = thread::current().name().unwrap_or("a test").to_owned();
    let watchdog = thread::spawn(move || {
        let limit = Duration::from_secs(seconds);
        if finished.recv_timeout(limit) == Err(mpsc::RecvTimeoutError::Timeout) {
            eprintln!("{name} took longer than {limit:?}");
            std::process::abort();
        }
    });
    let result = thread::spawn(body).join();
    drop(done);
    watchdog.join().unwrap();
    result.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// A job of `world` threads, each of which runs `body` and then leaves in order.
pub(crate) fn job<T: Send + 'static>(
    world: usize,
    body: impl Fn(&Arc<Bootstrap>) -> T + Send + Sync + 'static,
) -> Vec<T> {
    let id = new_id();
    let body = Arc::new(body);
    let ranks: Vec<_> = (0..world)
        .map(|rank| {
            let (body, config) = (body.clone(), config(&id, rank, world));
            thread::spawn(move || {
                let bootstrap = Bootstrap::join(&config).unwrap();
                let result = body(&bootstrap);
                bootstrap.close(soon()).unwrap();
                result
            })
        })
        .collect();
    ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
}

/// Joins every rank at once and returns what each got.
pub(crate) fn join_all(configs: Vec<JoinConfig>) -> Vec<Result<Arc<Bootstrap>>> {
    let joins: Vec<_> = configs
        .into_iter()
        .map(|config| thread::spawn(move || Bootstrap::join(&config)))
        .collect();
    joins.into_iter().map(|join| join.join().unwrap()).collect()
}

/// Starts a job of two at `id` of which only rank 0 joins yet.
pub(crate) fn rank_0(id: &UniqueId) -> thread::JoinHandle<Result<Arc<Bootstrap>>> {
    let config = config(id, 0, 2);
    thread::spawn(move || Bootstrap::join(&config))
}

/// A job of `world` ranks that live in this thread.
pub(crate) fn members(world: usize) -> Vec<Arc<Bootstrap>> {
    let id = new_id();
    let joined = join_all((0..world).map(|rank| config(&id, rank, world)).collect());
    joined.into_iter().map(Result::unwrap).collect()
}

/// Leaves with all of them at once, as rank 0 waits for the others.
pub(crate) fn close_all(members: Vec<Arc<Bootstrap>>) {
    let closing: Vec<_> = members
        .into_iter()
        .map(|member| thread::spawn(move || member.close(soon())))
        .collect();
    for closed in closing {
        closed.join().unwrap().unwrap();
    }
}

/// A rank that is a process: a copy of this binary, which runs `test` with this variable.
pub(crate) struct Process {
    pub(crate) child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Process {
    pub(crate) fn start(test: &str, variable: &str, value: String) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", test, "--nocapture"])
            .env(variable, value)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let input = child.stdin.take().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Self {
            child,
            input,
            output,
        }
    }

    pub(crate) fn tell(&mut self, line: &str) {
        writeln!(self.input, "{line}").unwrap();
    }

    /// Remainder of the next line that starts with `word`.
    pub(crate) fn line(&mut self, word: &str) -> String {
        loop {
            let mut line = String::new();
            let count = self.output.read_line(&mut line).unwrap();
            assert_ne!(count, 0, "ended before '{word}'");
            if let Some(rest) = line.strip_prefix(word) {
                return rest.trim().to_owned();
            }
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
