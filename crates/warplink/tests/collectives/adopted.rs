//! Communicators of the vendor's library that the application has: adopted, refused and not needed.

use crate::common::{assert_says, threads, world};
use crate::data::{by_the_library, calls_of_the_library, library};
use crate::expected::{Case, Random};
use warplink::collective::{CollectiveOptions, CollectivePath};
use warplink::device::{Priority, VendorCommunicator};
use warplink::{Collectives, Communicator, ErrorKind, Result};

/// Runs `body` on three ranks, or on `least` where there are not so many, with collectives by the library, whose
/// communicator is the application's here; on none without a library or with fewer ranks.
fn with_own(least: usize, body: impl Fn(&Communicator, &Collectives) + Send + Sync) {
    let ranks = world(3);
    if ranks < least {
        return;
    }
    threads(ranks, |comm| {
        if let Some(own) = library(comm) {
            body(comm, &own);
        }
    });
}

/// Options that adopt the library's communicator of `own`.
fn adopting(own: &Collectives) -> CollectiveOptions {
    // SAFETY: it is that of `own`, which outlives what is made here.
    let communicator = unsafe { VendorCommunicator::from_raw(own.communicator().unwrap()) };
    by_the_library(Some(communicator))
}

fn adopt(comm: &Communicator, own: &Collectives) -> Result<Collectives> {
    comm.collectives_with(&adopting(own))
}

/// Its calls are those of the library, and it goes on when they are over.
#[test]
fn a_communicator_is_adopted_and_left_as_it_is() {
    with_own(2, |comm, own| {
        for _ in 0..2 {
            let adopted = adopt(comm, own).unwrap();
            assert_eq!(adopted.communicator(), own.communicator());
            calls_of_the_library(comm, &adopted, 10);
            drop(adopted);
            calls_of_the_library(comm, own, 10);
        }
    });
}

#[test]
fn a_communicator_of_other_ranks_is_refused_on_all() {
    with_own(3, |comm, own| {
        // Rank 1 has the same number in both.
        let other = comm.split(0, -(comm.rank() as i64)).unwrap();
        let error = adopt(&other, own).unwrap_err();
        if comm.rank() == 1 {
            assert_eq!(error.kind(), ErrorKind::PeerFailed, "{error}");
        } else {
            assert_eq!(error.kind(), ErrorKind::Mismatch, "{error}");
            let (here, there) = (comm.rank(), other.rank());
            let says = format!("rank {here} of 3; expected rank {there} of 3");
            assert_says(&error, &["adopt a communicator", &says]);
        }
        calls_of_the_library(comm, own, 5);
        other.close().unwrap();
    });
}

/// Also where this rank has the same number in both.
#[test]
fn a_communicator_of_more_ranks_is_refused_on_all() {
    with_own(3, |comm, own| {
        let pair = comm.split(comm.rank() as u64 / 2, 0).unwrap();
        let error = adopt(&pair, own).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Mismatch, "{error}");
        let (here, there, world) = (comm.rank(), pair.rank(), pair.world());
        let says = format!("rank {here} of 3; expected rank {there} of {world}");
        let help = "pass one of the same ranks in the same order";
        assert_says(&error, &["adopt a communicator", &says, help]);
        // It is as it was.
        calls_of_the_library(comm, own, 5);
        pair.close().unwrap();
    });
}

#[test]
fn a_communicator_that_only_some_ranks_have_is_refused_on_all() {
    with_own(2, |comm, own| {
        let error = match comm.rank() {
            1 => comm.collectives_with(&by_the_library(None)),
            _ => adopt(comm, own),
        };
        let error = error.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Mismatch, "{error}");
        let help = "pass the same options on every rank";
        assert_says(&error, &["join the collectives", "other options", help]);
        let again = adopt(comm, own).unwrap();
        calls_of_the_library(comm, &again, 5);
    });
}

/// It is for calls by the library alone.
#[test]
fn a_communicator_is_not_used_where_the_direct_path_serves() {
    with_own(2, |comm, own| {
        let options = CollectiveOptions {
            path: None,
            ..adopting(own)
        };
        let collectives = comm.collectives_with(&options).unwrap();
        assert_eq!(collectives.path(), CollectivePath::Direct);
        assert_eq!(collectives.communicator(), None);
        let stream = comm.create_stream(Priority::Normal).unwrap();
        let case = Case::random(&mut Random::new(89), comm.world(), 3000);
        case.run(comm, &collectives, &stream);
    });
}
