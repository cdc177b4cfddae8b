//! The vendor's library where nobody asks for it.

use crate::common::{assert_error, assert_says, threads_with, world};
use crate::data::{calls_of_the_library, is_without_library};
use crate::expected::{Case, Random};
use crate::parts;
use crate::scaled::unhurried;
use warplink::collective::{CollectiveOptions, CollectivePath, MAX_DIRECT_RANKS};
use warplink::device::Priority;
use warplink::{Collectives, Communicator, ErrorKind};

/// Collectives with the path left open; none where ranks that the direct path does not serve have no library either.
fn open(comm: &Communicator) -> Option<Collectives> {
    match comm.collectives() {
        Ok(collectives) => Some(collectives),
        Err(error) => {
            assert!(is_without_library(&error), "{error}");
            if error.kind() == ErrorKind::LibraryMissing {
                let says = format!("join the collectives of {} ranks", comm.world());
                assert_says(&error, &[&says, "NCCL was not found", "install NCCL"]);
            }
            None
        }
    }
}

/// Calls of any kind on the direct path.
fn calls(comm: &Communicator, collectives: &Collectives, calls: usize) {
    let stream = comm.create_stream(Priority::Normal).unwrap();
    let mut random = Random::new(83);
    for _ in 0..calls {
        let case = Case::random(&mut random, comm.world(), 3000);
        case.run(comm, collectives, &stream);
    }
}

/// Ten ranks, nine of them, and halves: each goes by what serves so many ranks.
#[test]
fn more_ranks_than_the_direct_path_serves_go_by_the_library() {
    let ranks = MAX_DIRECT_RANKS + 2;
    if world(ranks) < ranks {
        return;
    }
    threads_with(ranks, unhurried, |comm| {
        let Some(collectives) = open(comm) else {
            return;
        };
        assert_eq!(collectives.path(), CollectivePath::Engine);
        assert!(collectives.communicator().is_some());
        assert!(collectives.serves_messages());
        assert_eq!(collectives.path_of_messages(), Some(CollectivePath::Engine));
        assert!(collectives.peer_buffer(comm.rank()).is_none());
        assert_eq!(collectives.direct_lanes().unwrap(), 0);
        let case = Case::random(&mut Random::new(3), ranks, 20);
        assert_eq!(collectives.path_of(&case.call), CollectivePath::Engine);
        let error = collectives.choice(&case.call).unwrap_err();
        let says = ["the vendor's library does ", "ask path_of"];
        assert_error(&error, ErrorKind::Unsupported, &says);
        calls_of_the_library(comm, &collectives, 30);
        parts::rounds(comm, &collectives, 5);

        let is_last = comm.rank() == ranks - 1;
        let most = comm.split(u64::from(is_last), 0).unwrap();
        let of_most = most.collectives().unwrap();
        if is_last {
            assert_eq!(of_most.path(), CollectivePath::Direct);
        } else {
            assert_eq!(most.world(), MAX_DIRECT_RANKS + 1);
            assert_eq!(of_most.path(), CollectivePath::Engine);
            assert_ne!(of_most.communicator(), collectives.communicator());
            calls_of_the_library(&most, &of_most, 20);
        }
        // Ranks in another order, by turns with the calls of all.
        let half = comm
            .split(comm.rank() as u64 % 2, -(comm.rank() as i64))
            .unwrap();
        let of_half = half.collectives().unwrap();
        assert_eq!(of_half.path(), CollectivePath::Direct);
        for _ in 0..3 {
            calls(&half, &of_half, 10);
            calls_of_the_library(comm, &collectives, 5);
        }
        drop((of_most, of_half));
        most.close().unwrap();
        half.close().unwrap();
    });
}

#[test]
fn the_direct_path_refuses_more_ranks_than_it_serves() {
    let ranks = MAX_DIRECT_RANKS + 1;
    if world(ranks) < ranks {
        return;
    }
    threads_with(ranks, unhurried, |comm| {
        let options = CollectiveOptions::on(CollectivePath::Direct);
        let error = comm.collectives_with(&options).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        let says = "9 ranks on the direct path; expected at most 8";
        assert_says(
            &error,
            &["join the collectives", says, "leave the path open"],
        );
        if let Some(collectives) = open(comm) {
            calls_of_the_library(comm, &collectives, 5);
        }
    });
}
