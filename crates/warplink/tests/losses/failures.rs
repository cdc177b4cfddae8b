//! Lost ranks and wrong input: every one ends with an error that says what happened and to whom.

use crate::common::{
    Ranks, Stopwatch, allocate, assert_error, assert_names_peer, assert_says,
    barrier_that_all_have_passed, exit_with_survivors, from_first, kill_self, kind, processes,
    recorded, ring_requests, threads, threads_with, transfer_from_first, transfer_once,
    without_descriptors, world,
};
use std::net::{IpAddr, Ipv4Addr};
use std::time::{Duration, Instant};
use warplink::bootstrap::{JoinConfig, Rendezvous, UniqueId};
use warplink::device::{AllocationKind, Priority};
use warplink::p2p::{Path, Protocol, Transfer, TransferRequest, post_all, wait_all};
use warplink::{Communicator, Config, Deadline, Error, ErrorKind};

/// How soon every other rank must have its error.
const SOON: Duration = Duration::from_secs(5);

/// Runs ranks of which `victim` dies in `until_dead`; every other must get an error from it that
/// names the victim, soon after the death.
fn survive(victim: usize, until_dead: impl Fn(&Communicator, &dyn Fn()) -> Result<(), Error>) {
    Ranks::of(world(3)).run_losing(&[victim], |comm| {
        // The clock starts when all are about to enter what one will not leave.
        barrier_that_all_have_passed(&comm);
        let started = Stopwatch::start();
        let die = || {
            if comm.rank() == victim {
                kill_self();
            }
        };
        let error = until_dead(&comm, &die).unwrap_err();
        let took = started.elapsed();
        assert_names_peer(&error, ErrorKind::PeerLost, victim);
        assert_says(
            &error,
            &[&format!("rank {}", comm.rank()), &format!("{victim}")],
        );
        assert!(took < SOON, "{error} came after {took:?}");
        // What comes later fails as well, and at once.
        let region = comm
            .device()
            .allocate(64, AllocationKind::Plain)
            .and_then(|slice| comm.register(&slice));
        if let Ok(region) = region {
            let peer = (comm.rank() + 1) % comm.world();
            let stream = comm.create_stream(Priority::Normal).unwrap();
            assert!(comm.send(&region, peer, 0, &stream).is_err());
        }
        exit_with_survivors(&comm, victim);
    });
}

/// How rounds of transfers are submitted.
#[derive(Clone, Copy, PartialEq)]
enum Submission {
    Eager,
    Graph,
}
use Submission::{Eager, Graph};

/// Rounds of a ring until rank `victim` dies while a transfer runs.
fn die_in_a_transfer(
    victim: usize,
    submission: Submission,
    (protocol, path): (Protocol, Path),
    bytes: usize,
) {
    survive(victim, |comm, die| {
        let (send, receive) = (comm.alloc(bytes)?, comm.alloc(bytes)?);
        let stream = comm.create_stream(Priority::Normal)?;
        let requests = ring_requests(comm, &send, &receive, 0);
        let chosen = requests.map(|request| request.with_protocol(protocol).with_path(path));
        let transfers = comm.exchange(&chosen)?;
        let group: Vec<&Transfer> = transfers.iter().collect();
        let step = || post_all(&group, &stream).and_then(|()| wait_all(&group, &stream));
        let graph = (submission == Graph).then(|| recorded(&stream, || step().unwrap()));
        for round in 0.. {
            match &graph {
                // Several launches ahead, so that waits lie behind waits when the rank dies.
                Some(graph) => (0..10).try_for_each(|_| graph.launch(&stream))?,
                None => step()?,
            }
            if round == 3 {
                die();
            }
            comm.synchronize(&stream)?;
        }
        Ok(())
    });
}

#[test]
fn a_rank_killed_in_a_get() {
    die_in_a_transfer(1, Eager, (Protocol::Get, Path::CopyEngine), 16 << 20);
}

#[test]
fn a_rank_killed_in_a_put() {
    die_in_a_transfer(1, Eager, (Protocol::Put, Path::CopyEngine), 16 << 20);
}

#[test]
fn rank_0_killed_in_a_transfer() {
    die_in_a_transfer(0, Eager, (Protocol::Put, Path::CopyEngine), 4096);
}

/// Kernels wait for packets, for room for them, and for what tells several blocks that they may copy.
#[test]
fn a_rank_killed_in_transfers_by_packets() {
    die_in_a_transfer(1, Eager, (Protocol::Put, Path::Multiprocessors), 4096);
}

#[test]
fn rank_0_killed_in_transfers_by_several_blocks() {
    die_in_a_transfer(0, Eager, (Protocol::Put, Path::Multiprocessors), 1 << 20);
}

#[test]
fn a_rank_killed_in_a_captured_transfer() {
    let usual = Protocol::default();
    die_in_a_transfer(1, Graph, (usual, Path::CopyEngine), 1 << 20);
}

#[test]
fn a_rank_killed_in_captured_transfers_by_packets() {
    let usual = Protocol::default();
    die_in_a_transfer(1, Graph, (usual, Path::Multiprocessors), 8_000);
}

#[test]
fn a_rank_killed_in_an_exchange() {
    survive(1, |comm, die| {
        let (rank, world) = (comm.rank(), comm.world());
        let region = comm.alloc(4096)?;
        die();
        comm.exchange(&[
            TransferRequest::send(&region, (rank + 1) % world, 0),
            TransferRequest::receive(&region, 1, 7),
        ])?;
        Ok(())
    });
}

#[test]
fn a_rank_killed_in_a_barrier() {
    for victim in [1, 0] {
        survive(victim, |comm, die| {
            die();
            comm.barrier()
        });
    }
}

#[test]
fn lengths_that_differ_are_told_to_both_and_nothing_is_lost() {
    threads(world(2), |comm| {
        let peer = 1 - comm.rank();
        let region = comm.alloc(4096).unwrap();
        let half = region.slice(0..2048).unwrap();
        let request = match comm.rank() {
            0 => TransferRequest::send(&region, peer, 5),
            _ => TransferRequest::receive(&half, peer, 5),
        };
        let error = comm.exchange(&[request]).unwrap_err();
        assert_names_peer(&error, ErrorKind::Mismatch, peer);
        assert_says(
            &error,
            &["4096", "2048", "tag 5", &format!("rank {}", comm.rank())],
        );
        works(comm, 5);
    });
}

/// A transfer with `tag` from rank 0 to rank 1 comes through.
fn works(comm: &Communicator, tag: u64) {
    let region = comm.alloc(512).unwrap();
    let stream = comm.create_stream(Priority::Normal).unwrap();
    region.upload(&[comm.rank() as u8 + 1; 512]).unwrap();
    let request = from_first(comm, &region, tag);
    transfer_once(comm, &[request], &stream);
    assert_eq!(region.download().unwrap(), [1; 512]);
}

#[test]
fn protocols_that_differ_are_told_to_both() {
    threads(world(2), |comm| {
        let peer = 1 - comm.rank();
        let region = comm.alloc(4096).unwrap();
        let request = match comm.rank() {
            0 => TransferRequest::send(&region, peer, 5).with_protocol(Protocol::Get),
            _ => TransferRequest::receive(&region, peer, 5).with_protocol(Protocol::Put),
        };
        let error = comm.exchange(&[request]).unwrap_err();
        let says = ["get", "put", "same protocol"];
        assert_error(&error, ErrorKind::Mismatch, &says);
        works(comm, 5);
    });
}

#[test]
fn a_peer_that_never_exchanges_is_named_and_a_second_try_works() {
    threads(world(2), |comm| {
        works(comm, 7);
        if comm.rank() == 0 {
            let before = comm.registrations_and_mappings();
            let region = comm.alloc(4096).unwrap();
            for protocol in [Protocol::Get, Protocol::Put] {
                let requests = ring_requests(comm, &region, &region, 8);
                let requests = requests.map(|end| end.with_protocol(protocol));
                let deadline = Deadline::after(Duration::from_millis(200));
                let error = comm.exchange_until(&requests, deadline).unwrap_err();
                assert_error(&error, ErrorKind::Timeout, &["rank 0", "exchange", "tag 8"]);
            }
            // No peer can hold what never reached it.
            drop(region);
            assert_eq!(comm.registrations_and_mappings().0, before.0);
        }
        comm.barrier().unwrap();
        works(comm, 8);
    });
}

#[test]
fn wrong_peers_are_refused() {
    threads(world(2), |comm| {
        let region = comm.alloc(64).unwrap();
        let nobody = comm
            .exchange(&[TransferRequest::receive(&region, 99, 0)])
            .unwrap_err();
        assert_says(&nobody, &["there are 2 ranks", "peer 99"]);
        works(comm, 0);
    });
}

#[test]
fn memory_that_is_no_region_is_refused() {
    threads(world(2), |comm| {
        let region = comm.alloc(4096).unwrap();
        // A range that passes the end, and one that would if it did not overflow.
        assert_says(
            &region.slice(4000..5000).unwrap_err(),
            &["4000..5000", "4096"],
        );
        assert!(region.slice(usize::MAX - 1..usize::MAX).is_err());
        assert!(allocate(comm, 64).slice(0..0).is_ok_and(|empty| {
            comm.register(&empty).unwrap_err().kind() == ErrorKind::InvalidArgument
        }));
        // Memory that nobody can share: a plain vector.
        if kind() == warplink::DeviceKind::Host {
            let bytes = std::sync::Arc::new(vec![0u8; 4096]);
            // SAFETY: the vector is held as the owner.
            let slice = unsafe {
                comm.device()
                    .borrow(bytes.as_ptr() as u64, 4096, bytes.clone())
            }
            .unwrap();
            assert_eq!(
                comm.register(&slice).unwrap_err().kind(),
                ErrorKind::Unsupported
            );
        }
        works(comm, 0);
    });
}

#[test]
fn a_region_of_another_rank_is_refused() {
    let foreign = std::sync::Mutex::new(None);
    threads(world(2), |comm| {
        if comm.rank() == 1 {
            *foreign.lock().unwrap() = Some(comm.alloc(4096).unwrap());
        }
        comm.barrier().unwrap();
        if comm.rank() == 0 {
            let region = foreign.lock().unwrap().take().unwrap();
            let error = comm
                .exchange(&[TransferRequest::send(&region, 1, 0).with_protocol(Protocol::Get)])
                .unwrap_err();
            assert_says(&error, &["by another rank"]);
        }
        comm.barrier().unwrap();
        works(comm, 0);
    });
}

#[test]
fn a_region_in_use_by_a_peer_is_not_freed() {
    threads(world(2), |comm| {
        let region = comm.alloc(1 << 16).unwrap();
        // Get: rank 1 maps the region of rank 0.
        let transfer = transfer_from_first(comm, &region, 0, Protocol::Get);
        if comm.rank() == 0 {
            let error = region
                .clone()
                .close(Deadline::after(Duration::from_millis(10)))
                .unwrap_err();
            assert_says(&error, &["in use here"]);
            drop(transfer);
            let error = region
                .close(Deadline::after(Duration::from_millis(100)))
                .unwrap_err();
            assert_names_peer(&error, ErrorKind::Timeout, 1);
            comm.barrier().unwrap();
            comm.barrier().unwrap();
            // The peer let go, and its mapping with it: nothing but signal pages is registered.
            let until = Instant::now() + Duration::from_secs(30);
            while comm.registrations_and_mappings().0 > 1 {
                assert!(Instant::now() < until, "the region was never freed");
                std::thread::sleep(Duration::from_millis(5));
            }
        } else {
            comm.barrier().unwrap();
            drop(transfer);
            comm.release_idle().unwrap();
            comm.barrier().unwrap();
        }
    });
}

/// With a limit below what is open, the system refuses even to wait.
#[test]
fn a_rank_that_was_short_of_descriptors_serves_its_peers_again() {
    if kind() != warplink::DeviceKind::Host {
        return;
    }
    processes(2, |comm| {
        let region = comm.alloc(4096).unwrap();
        let handle = comm.export_handle(&region, 1 - comm.rank()).unwrap();
        let handles = comm.all_gather_bytes(&handle).unwrap();
        if comm.rank() == 1 {
            without_descriptors(|| {
                comm.barrier().unwrap();
                // The peer asks meanwhile.
                std::thread::sleep(Duration::from_millis(300));
            });
        } else {
            comm.barrier().unwrap();
            comm.open_handle(1, &handles[1]).unwrap();
        }
        comm.barrier().unwrap();
    });
}

/// Releases during the shortage are announced once descriptors are available again.
#[test]
fn a_rank_that_was_short_of_descriptors_lets_go_of_its_peers_memory() {
    if kind() != warplink::DeviceKind::Host {
        return;
    }
    processes(2, |comm| {
        let region = comm.alloc(4096).unwrap();
        // Get: rank 1 maps the region of rank 0.
        let transfer = transfer_from_first(comm, &region, 0, Protocol::Get);
        comm.barrier().unwrap();
        if comm.rank() == 1 {
            without_descriptors(|| {
                drop(transfer);
                std::thread::sleep(Duration::from_millis(300));
            });
            comm.release_idle().unwrap();
        } else {
            drop(transfer);
            let soon = Deadline::after(Duration::from_secs(20));
            region.close(soon).unwrap();
        }
        comm.barrier().unwrap();
    });
}

#[test]
fn ranks_on_different_devices_and_worlds_are_refused() {
    let id = UniqueId::create(IpAddr::V4(Ipv4Addr::LOCALHOST), 0).unwrap();
    let join = |rank: usize, world: usize| {
        let join = JoinConfig::new(Rendezvous::Id(id.clone()), rank, world);
        Communicator::join(&Config::new(join, kind()))
    };
    std::thread::scope(|scope| {
        let first = scope.spawn(|| join(0, 2));
        let wrong = scope.spawn(|| join(1, 3));
        let error = wrong.join().unwrap().unwrap_err();
        assert_error(&error, ErrorKind::Mismatch, &["2", "3"]);
        let error = first.join().unwrap().unwrap_err();
        assert_error(&error, ErrorKind::Mismatch, &["2", "3"]);
    });
    assert!(join(2, 2).is_err());
}

/// None of an exchange's ends is there for the peer if the store has room for some of them only.
#[test]
fn a_full_store_takes_no_part_of_an_exchange() {
    const ROOM: usize = 16 << 10;
    let limited = |config: &mut Config| config.join.store_limit = 1 << 20;
    threads_with(world(2), limited, |comm| {
        let region = comm.alloc(64).unwrap();
        let ends = (0..300).map(|tag| from_first(comm, &region, tag));
        let ends: Vec<_> = ends.collect();
        if comm.rank() == 0 {
            let store = comm.bootstrap().store();
            // Afterwards the room is left, and less than as much again.
            store.set("room", [0; ROOM]).unwrap();
            let mut fillers = Vec::new();
            let mut size = 1 << 19;
            while size >= ROOM {
                let filler = format!("filler {}", fillers.len());
                match store.set(&filler, vec![0; size]) {
                    Ok(()) => fillers.push(filler),
                    Err(_) => size /= 2,
                }
            }
            store.delete("room").unwrap();
            let error = comm.exchange(&ends).map(drop).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::OutOfMemory, "{error}");
            for filler in fillers {
                store.delete(&filler).unwrap();
            }
        }
        comm.barrier().unwrap();
        if comm.rank() == 1 {
            let brief = Deadline::after(Duration::from_millis(50));
            let early = comm.exchange_until(&ends[..1], brief);
            let error = early.map(drop).unwrap_err();
            assert_names_peer(&error, ErrorKind::Timeout, 0);
        }
        comm.barrier().unwrap();
        comm.exchange(&ends).unwrap();
    });
}
