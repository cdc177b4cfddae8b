//! Nothing leaks. Alone in its binary, since it counts the open resources of the process.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

#[path = "bootstrap/support.rs"]
mod support;

use std::time::{Duration, Instant};
use support::{close_all, config, job, join_all, members, new_id, soon, within};
use warplink::bootstrap::Wait;

fn count(what: &str) -> usize {
    std::fs::read_dir(format!("/proc/self/{what}"))
        .unwrap()
        .count()
}

/// A thread that was joined may still be listed for a moment.
fn settles(what: &str, at_most: usize) {
    let begun = Instant::now();
    while count(what) > at_most {
        assert!(
            begun.elapsed() < Duration::from_secs(30),
            "{} of {at_most} {what}",
            count(what)
        );
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_thousand_exchanges_and_many_jobs_leave_nothing_behind() {
    within(120, || {
        let (descriptors, threads) = (count("fd"), count("task"));
        job(2, |member| {
            let (rank, peer) = (member.rank(), 1 - member.rank());
            let wait = Wait::on([peer], soon());
            let open = (count("fd"), count("task"));
            for round in 0..1000 {
                member
                    .store()
                    .set(format!("{rank}/{round}"), [rank as u8; 64])
                    .unwrap();
                let got = member
                    .store()
                    .take(&format!("{peer}/{round}"), &wait)
                    .unwrap();
                assert_eq!(got, [peer as u8; 64]);
            }
            member.barrier(soon()).unwrap();
            assert!(count("fd") <= open.0 + 2, "descriptors grew");
            assert!(count("task") <= open.1 + 2, "threads grew");
            // A message that does not fit into the socket's buffer takes a thread for a while.
            if rank == 0 {
                member.store().set("large", vec![1; 30 << 20]).unwrap();
            }
            member.store().get("large", &Wait::any(soon())).unwrap();
            member.barrier(soon()).unwrap();
        });
        for round in 0..20 {
            let all = members(3);
            all[1].health().when_lost(|_, _| {});
            match round % 2 {
                0 => close_all(all),
                _ => all.into_iter().rev().for_each(drop),
            }
        }
        // Joins that fail.
        let id = new_id();
        let mut alone = config(&id, 0, 2);
        alone.timeout = Duration::from_millis(50);
        assert!(join_all(vec![alone]).pop().unwrap().is_err());
        settles("fd", descriptors);
        settles("task", threads);
        // The addresses are free again.
        std::net::TcpListener::bind(id.address()).unwrap();
    });
}
