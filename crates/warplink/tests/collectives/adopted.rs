//! Communicators of the vendor's library that the application has, where they are refused or not needed.

use crate::common::{assert_says, threads_with, world};
use crate::data::{by_the_library, calls_of_the_library, library};
use crate::expected::{Case, Random};
use warplink::collective::{CollectiveOptions, CollectivePath};
use warplink::device::{Priority, VendorCommunicator};
use warplink::{Collectives, Communicator, ErrorKind, Result};

/// Asks for collectives by the library's communicator of `own`.
fn adopt(comm: &Communicator, own: &Collectives) -> Result<Collectives> {
    // SAFETY: it is that of `own`, which outlives what is made here.
    let communicator = unsafe { VendorCommunicator::from_raw(own.communicator().unwrap()) };
    comm.collectives_with(&by_the_library(Some(communicator)))
}

/// Also where this rank has the same number in both.
#[test]
fn a_communicator_of_more_ranks_is_refused_on_all() {
    let ranks = world(3);
    if ranks < 3 {
        return;
    }
    threads_with(
        ranks,
        |_| {},
        |comm| {
            let Some(own) = library(comm) else {
                return;
            };
            let pair = comm.split(comm.rank() as u64 / 2, 0).unwrap();
            let error = adopt(&pair, &own).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Mismatch, "{error}");
            let (here, there, world) = (comm.rank(), pair.rank(), pair.world());
            let says = format!("rank {here} of 3; expected rank {there} of {world}");
            let help = "pass one of the same ranks in the same order";
            assert_says(&error, &["adopt a communicator", &says, help]);
            // It is as it was.
            calls_of_the_library(comm, &own, 5);
            pair.close().unwrap();
        },
    );
}

#[test]
fn a_communicator_that_only_some_ranks_have_is_refused_on_all() {
    let ranks = world(3);
    if ranks < 2 {
        return;
    }
    threads_with(
        ranks,
        |_| {},
        |comm| {
            let Some(own) = library(comm) else {
                return;
            };
            let error = match comm.rank() {
                1 => comm.collectives_with(&by_the_library(None)),
                _ => adopt(comm, &own),
            };
            let error = error.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Mismatch, "{error}");
            let help = "pass the same options on every rank";
            assert_says(&error, &["join the collectives", "other options", help]);
            let again = adopt(comm, &own).unwrap();
            calls_of_the_library(comm, &again, 5);
        },
    );
}

/// It is for calls by the library alone.
#[test]
fn a_communicator_is_not_used_where_the_direct_path_serves() {
    threads_with(
        world(3),
        |_| {},
        |comm| {
            let Some(own) = library(comm) else {
                return;
            };
            // SAFETY: it is that of `own`, which outlives what is made here.
            let communicator = unsafe { VendorCommunicator::from_raw(own.communicator().unwrap()) };
            let options = CollectiveOptions {
                path: None,
                ..by_the_library(Some(communicator))
            };
            let collectives = comm.collectives_with(&options).unwrap();
            assert_eq!(collectives.path(), CollectivePath::Direct);
            assert_eq!(collectives.communicator(), None);
            let stream = comm.create_stream(Priority::Normal).unwrap();
            let case = Case::random(&mut Random::new(89), comm.world(), 3000);
            let made = case.make(comm, &collectives, &stream).unwrap();
            comm.synchronize(&stream).unwrap();
            made.check(comm);
        },
    );
}
