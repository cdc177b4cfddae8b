//! Processes of ranks that are stopped, resumed and killed.

use super::LIMIT;
use rustix::process::{Pid, Signal, getpid, kill_process};
use std::time::{Duration, Instant};
use warplink::Communicator;

/// Stops this process until another [`resume`]s it.
pub fn stop_self() {
    kill_process(getpid(), Signal::STOP).unwrap();
    // Another thread may take the signal, and this one runs on until it does, or a machine that is busy
    // comes to it. From then on no call of the system returns.
    const STOP: u64 = 1 << 18;
    let is_pending = || {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let pending = status.lines().find_map(|line| line.strip_prefix("ShdPnd:"));
        u64::from_str_radix(pending.unwrap().trim(), 16).unwrap() & STOP != 0
    };
    while is_pending() {
        std::thread::yield_now();
    }
}

/// The process of every rank, for [`resume`]. Every rank calls it.
pub fn processes_of(comm: &Communicator) -> Vec<i32> {
    let own = getpid().as_raw_pid().to_le_bytes();
    let all = comm.all_gather_bytes(&own).unwrap();
    let number = |bytes: Vec<u8>| i32::from_le_bytes(bytes.try_into().unwrap());
    all.into_iter().map(number).collect()
}

/// Waits until a process is stopped, all of it.
pub fn wait_until_stopped(process: i32) {
    let is_stopped = |task: std::fs::DirEntry| {
        let stat = std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
        // Behind the name, which is in parentheses and may contain anything.
        stat.rsplit_once(") ")
            .is_some_and(|(_, rest)| rest.starts_with('T'))
    };
    let until = Instant::now() + LIMIT / 2;
    loop {
        let mut tasks = std::fs::read_dir(format!("/proc/{process}/task")).unwrap();
        if tasks.all(|task| task.is_ok_and(is_stopped)) {
            return;
        }
        assert!(Instant::now() < until, "process {process} was not stopped");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Lets a process go on that has stopped itself.
pub fn resume(process: i32) {
    let process = Pid::from_raw(process).unwrap();
    kill_process(process, Signal::CONT).unwrap();
}

/// Kills a process, be it stopped or not.
pub fn kill(process: i32) {
    let process = Pid::from_raw(process).unwrap();
    kill_process(process, Signal::KILL).unwrap();
}
