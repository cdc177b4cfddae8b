//! The examples do what they say.

use super::common::{processes, threads, world};

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
