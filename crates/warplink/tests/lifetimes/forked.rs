//! Ranks that are forks of a process which was a rank before.

use crate::common::{Ranks, assert_all_ended_well, complete, kind, transfer_from_first};
use rustix::process::{
    Pid, Signal, WaitOptions, getpid, getppid, set_parent_process_death_signal, waitpid,
};
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
        assert_eq!(getppid(), Some(parent), "the test ended before its fork");
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

#[test]
fn forks_of_one_process_do_not_take_memory_of_each_other_for_their_own() {
    if kind() == DeviceKind::Cuda {
        // CUDA cannot be used in a fork of a process that has used it.
        return;
    }
    let ended = Ranks::of(1).start(|comm| {
        drop(comm.alloc(1 << 16).unwrap());
        comm.close().unwrap();
        let id = UniqueId::create(Ipv4Addr::LOCALHOST.into(), 0).unwrap();
        let ranks = [0, 1].map(|rank| forked(|| exchange(&id, rank)));
        let statuses = ranks.map(|rank| waitpid(Some(rank), WaitOptions::empty()));
        for (rank, status) in statuses.into_iter().enumerate() {
            let (_, status) = status.unwrap().unwrap();
            assert_eq!(status.exit_status(), Some(0), "rank {rank}: {status:?}");
        }
    });
    assert_all_ended_well(ended.as_deref());
}
