//! The examples do what they say.

// Both examples have what joins their ranks as a module.
#![allow(clippy::duplicate_mod)]

use super::common::{processes, root, threads, world};

#[path = "../../examples/halo_exchange.rs"]
#[allow(dead_code)]
mod halo_exchange;
#[path = "../../examples/ping_pong.rs"]
#[allow(dead_code)]
mod ping_pong;

#[test]
fn the_ping_pong_example_runs() {
    threads(world(2), |comm| ping_pong::rank(comm).unwrap());
}

#[test]
fn the_ping_pong_example_leaves_further_ranks_alone() {
    processes(world(3), |comm| ping_pong::rank(comm).unwrap());
}

#[test]
fn the_halo_exchange_example_is_right() {
    threads(world(4), |comm| {
        let moments = halo_exchange::rank(comm).unwrap();
        // The picture is of four ranks.
        if (comm.rank(), comm.world()) == (0, 4) {
            let plate = halo_exchange::plate(4);
            let drawn = halo_exchange::picture::draw(&plate, &moments);
            let file = root().join("../../docs/halo-exchange.svg");
            let shown = std::fs::read_to_string(file).unwrap();
            assert!(drawn == shown, "draw docs/halo-exchange.svg anew");
        }
    });
}
