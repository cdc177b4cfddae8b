//! Ranks that are forks of a process which was a rank before.

use crate::common::{Ranks, assert_all_ended_well, complete, kind, tell, transfer_from_first};
use rustix::process::{
    Pid, Signal, WaitOptions, getpid, getppid, set_parent_process_death_signal, waitpid,
};
use rustix::thread::{UnshareFlags, unshare_unsafe};
use std::net::Ipv4Addr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use warplink::bootstrap::{JoinConfig, Rendezvous, UniqueId};
use warplink::device::Priority;
use warplink::p2p::Protocol;
use warplink::{Communicator, Config, DeviceKind, Rank};

unsafe extern "C" {
    fn fork() -> i32;
    fn _exit(status: i32) -> !;
}

/// Runs `body` in a fork of this process.
fn forked(body: impl FnOnce()) -> Pid {
    let parent = getpid();
    // SAFETY: the rank has closed its communicator, so that no other thread of this process holds a lock that `body` takes.
    let child = unsafe { fork() };
    assert!(child >= 0, "no fork");
    if let Some(child) = Pid::from_raw(child) {
        return child;
    }
    let ended = catch_unwind(AssertUnwindSafe(|| {
        set_parent_process_death_signal(Some(Signal::KILL)).unwrap();
        // In a PID namespace of its own it does not see the parent.
        let is_there = getppid().is_none_or(|seen| seen == parent);
        assert!(is_there, "the test ended before its fork");
        body();
    }));
    // SAFETY: ends the process, of which nothing else is needed; handlers of the end belong to the parent.
    unsafe { _exit(ended.is_err().into()) }
}

fn exchange(id: &UniqueId, rank: Rank) {
    let join = JoinConfig::new(Rendezvous::Id(id.clone()), rank, 2);
    let comm = Communicator::join(&Config::new(join, DeviceKind::Host));
    let comm = comm.unwrap();
    let stream = comm.create_stream(Priority::High).unwrap();
    for (tag, protocol) in [Protocol::Get, Protocol::Put].into_iter().enumerate() {
        let region = comm.alloc(1 << 16).unwrap();
        let sent = 7 + tag as u8;
        let own = if rank == 0 { sent } else { 1 };
        stream.fill(&region, own).unwrap();
        let transfer = transfer_from_first(&comm, &region, tag as u64, protocol);
        complete(&comm, &[transfer], &stream).unwrap();
        let bytes = region.download().unwrap();
        assert!(
            bytes.iter().all(|byte| *byte == sent),
            "rank {rank}, {protocol}"
        );
    }
    comm.close().unwrap();
}

/// Has later forks of this thread see no processes but one another.
fn hide_processes() {
    // SAFETY: no table of descriptors is unshared.
    unsafe { unshare_unsafe(UnshareFlags::NEWPID) }.unwrap();
}

/// Exit code of a fork.
fn ended(fork: Pid) -> Option<i32> {
    let status = waitpid(Some(fork), WaitOptions::empty()).unwrap();
    status.unwrap().1.exit_status()
}

/// Runs two ranks as forks of a process that was a rank before. With `hidden`, rank 1 does not see the process of rank 0.
fn exchange_between_forks(hidden: bool) {
    if kind() == DeviceKind::Cuda {
        // CUDA cannot be used in a fork of a process that has used it.
        return;
    }
    let process = Ranks::of(1).start(|comm| {
        drop(comm.alloc(1 << 16).unwrap());
        comm.close().unwrap();
        if hidden && ended(forked(hide_processes)) != Some(0) {
            return tell("left out: this process may make no PID namespace");
        }
        let id = UniqueId::create(Ipv4Addr::LOCALHOST.into(), 0).unwrap();
        let first = forked(|| exchange(&id, 0));
        if hidden {
            hide_processes();
        }
        let second = forked(|| exchange(&id, 1));
        assert_eq!([first, second].map(ended), [Some(0); 2]);
    });
    assert_all_ended_well(process.as_deref());
}

#[test]
fn forks_of_one_process_do_not_take_memory_of_each_other_for_their_own() {
    exchange_between_forks(false);
}

#[test]
fn a_rank_that_does_not_see_the_process_of_its_peer_maps_its_memory() {
    exchange_between_forks(true);
}
