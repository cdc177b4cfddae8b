//! Eight ranks move data while one of them is killed every second, the one that serves the store too,
//! until two are left.

use crate::common::{Ranks, Stopwatch, kill_self, ring, values, world};
use std::time::{Duration, Instant};
use warplink::device::Priority;
use warplink::p2p::Protocol;
use warplink::program::{PrepareOptions, Program};
use warplink::{Communicator, ErrorKind, Result};

/// How long the ranks that are left may take from a loss to right data.
const SOON: Duration = Duration::from_secs(5);

/// Between two losses.
const INTERVAL: Duration = Duration::from_secs(1);

/// Every rank gives its neighbours to the left and right what it has.
const PASS: &str = "program pass(n) {
    input A: u8[n]
    output L: u8[n]
    output R: u8[n]
    share {
        to_right = send A to (rank + 1) % world tag 1 via put
        to_left = send A to (rank - 1) % world tag 2 via get
        from_left = receive L from (rank - 1) % world tag 1 via put
        from_right = receive R from (rank + 1) % world tag 2 via get
    }
    post to_right, to_left, from_left, from_right
    wait to_right, to_left, from_left, from_right
}";

const BYTES: usize = 32 << 10;

/// Binds the program to fresh memory, runs it some times, and checks what arrived.
fn pass(comm: &Communicator, attempt: usize) -> Result<()> {
    let (rank, world) = (comm.rank(), comm.world());
    let regions = [comm.alloc(BYTES)?, comm.alloc(BYTES)?, comm.alloc(BYTES)?];
    let [a, l, r] = &regions;
    let program = Program::parse(PASS)?;
    let parameters = [("n", BYTES as i64)].into();
    let options = PrepareOptions::default();
    let prepared = comm.executor().prepare(&program, &parameters, options)?;
    let bindings = [("A", a), ("L", l), ("R", r)];
    let bindings = bindings.map(|(name, region)| (name.to_owned(), region.memory().clone()));
    let plan = prepared.bind(&bindings.into())?;
    let stream = comm.create_stream(Priority::Normal)?;
    for round in 0..5 {
        let round = 5 * attempt + round;
        a.upload(&values(comm.job_ranks()[rank], round, BYTES))?;
        plan.run(&stream)?;
        comm.synchronize(&stream)?;
        for (region, from) in [(l, (rank + world - 1) % world), (r, (rank + 1) % world)] {
            let sent = values(comm.job_ranks()[from], round, BYTES);
            assert!(region.download()? == sent, "wrong data of rank {from}");
        }
    }
    Ok(())
}

/// Transfers and a program.
fn work(comm: &Communicator, attempt: usize) -> Result<()> {
    let protocols = [Protocol::Put, Protocol::Get];
    ring(comm, protocols[attempt % 2], 10, |_| {})?;
    pass(comm, attempt)
}

/// Works again after a loss, at which ranks may have been at different attempts. Gives the next attempt.
fn resume(comm: &Communicator, attempt: usize) -> Result<usize> {
    let all = comm.all_gather_bytes(&attempt.to_le_bytes())?;
    let attempts = all
        .iter()
        .map(|one| usize::from_le_bytes(one[..].try_into().unwrap()));
    let next = attempts.max().unwrap() + 1;
    work(comm, next)?;
    Ok(next + 1)
}

#[test]
fn one_rank_is_killed_every_second_until_two_are_left() {
    let count = world(8);
    if count < 3 {
        return;
    }
    // The last, then from both ends inwards: the rank that serves the store is among them every second time.
    let order: Vec<usize> = (0..count)
        .map(|place| {
            if place % 2 == 0 {
                count - 1 - place / 2
            } else {
                place / 2
            }
        })
        .take(count - 2)
        .collect();
    let ranks = Ranks::of(count);
    ranks.run_losing(&order, |world| {
        world.barrier().unwrap();
        let (begun, watch) = (Instant::now(), Stopwatch::start());
        if let Some(place) = order.iter().position(|&victim| victim == world.rank()) {
            // At a moment that has nothing to do with what it does.
            std::thread::spawn(move || {
                let at = INTERVAL * (place as u32 + 1);
                std::thread::sleep(at.saturating_sub(begun.elapsed()));
                kill_self()
            });
        }
        let mut comm = world.clone();
        drop(world);
        let (mut losses, mut after_last, mut attempt) = (0, 0, 0);
        loop {
            let error = match work(&comm, attempt) {
                Ok(()) if comm.world() > 2 => {
                    attempt += 1;
                    continue;
                }
                // Some rounds more, with nobody left to lose.
                Ok(()) if after_last < 5 => {
                    after_last += 1;
                    attempt += 1;
                    continue;
                }
                Ok(()) => break,
                Err(error) => error,
            };
            let lost = Stopwatch::start();
            assert_eq!(error.kind(), ErrorKind::PeerLost, "{error}");
            let gone = order.contains(&error.job_peer().unwrap());
            assert!(gone, "{error}");
            // Another may be lost meanwhile.
            loop {
                let left = comm.survivors().unwrap();
                losses += comm.world() - left.world();
                comm = left;
                match resume(&comm, attempt) {
                    Ok(next) => {
                        attempt = next;
                        break;
                    }
                    Err(error) => assert_eq!(error.kind(), ErrorKind::PeerLost, "{error}"),
                }
            }
            assert!(lost.elapsed() < SOON, "{:?} after {error}", lost.elapsed());
        }
        let health = comm.bootstrap().health();
        let causes: Vec<_> = (0..count)
            .filter_map(|rank| health.check(&[rank]).err())
            .collect();
        let causes: Vec<_> = causes.iter().map(ToString::to_string).collect();
        let (left, wanted) = ((comm.world(), losses), (2, order.len()));
        assert_eq!(left, wanted, "{}", causes.join("\n"));
        assert!(watch.elapsed() < INTERVAL * (order.len() as u32 + 1) + SOON);
        comm.close().unwrap();
    });
}
