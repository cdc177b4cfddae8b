//! How long the store takes. Run with `--ignored --nocapture`; it measures and checks nothing.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

mod bootstrap_support;

use bootstrap_support::{job, soon};
use std::time::Instant;
use warplink::bootstrap::Wait;

#[test]
#[ignore = "a measurement"]
fn latency() {
    const ROUNDS: u32 = 2000;
    job(2, |member| {
        let (store, wait) = (member.store(), Wait::any(soon()));
        if member.rank() == 1 {
            let begun = Instant::now();
            (0..ROUNDS).for_each(|_| store.set("k", b"v").unwrap());
            println!("set {:?}", begun.elapsed() / ROUNDS);
            let begun = Instant::now();
            (0..ROUNDS).for_each(|_| drop(store.get("k", &wait).unwrap()));
            println!("get {:?}", begun.elapsed() / ROUNDS);
        }
        member.barrier(soon()).unwrap();
    });
    for world in [2, 8] {
        job(world, move |member| {
            member.barrier(soon()).unwrap();
            let begun = Instant::now();
            (0..ROUNDS).for_each(|_| member.barrier(soon()).unwrap());
            if member.rank() == 0 {
                println!("barrier of {world} {:?}", begun.elapsed() / ROUNDS);
            }
        });
    }
}
