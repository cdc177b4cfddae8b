//! Collectives of devices without atomic operations on each other's memory, and without access to it.

use crate::common::{pretending, world};
use crate::expected::{Case, Random};
use warplink::Communicator;
use warplink::collective::{CollectiveOptions, CollectivePath};
use warplink::device::Priority;

/// Calls on memory of all kinds, long ones among them, so that data goes through the workspace and from memory to memory.
fn calls(comm: &Communicator, path: Option<CollectivePath>) {
    let options = CollectiveOptions {
        path,
        ..CollectiveOptions::default()
    };
    let collectives = comm.collectives_with(&options).unwrap();
    if let Some(path) = path {
        assert_eq!(collectives.path(), path);
    }
    let stream = comm.create_stream(Priority::Normal).unwrap();
    let mut random = Random::new(29);
    for round in 0..24 {
        let longest = if round % 4 == 0 { 60_000 } else { 3_000 };
        let case = Case::random(&mut random, comm.world(), longest);
        let made = case.run(comm, &collectives, &stream);
        made.run_again(comm, &collectives, &stream);
    }
}

#[test]
fn the_direct_path_is_right_on_any_bus() {
    for ranks in [2, 4] {
        pretending(world(ranks), |comm, _| {
            calls(comm, Some(CollectivePath::Direct));
        });
    }
}

#[test]
fn the_path_that_is_chosen_is_right_on_any_bus() {
    pretending(world(2), |comm, _| calls(comm, None));
}
