//! Rounds of alloc, exchange, send and drop: what a process holds is flat from the hundredth on.

use super::common::{Ranks, assert_all_ended_well, world};
use super::held::Held;
use super::{MIB, exchange_fresh};
use std::time::{Duration, Instant};
use warplink::device::{Priority, Stream};
use warplink::{Communicator, Config};

/// From this round on, nothing may grow.
const SETTLED: usize = 100;

/// How many rounds, of how many bytes.
#[derive(Clone, Copy, Debug)]
struct Rounds {
    count: usize,
    bytes: usize,
}

impl Rounds {
    /// As given, or what `WARPLINK_TEST_ROUNDS` and `WARPLINK_TEST_MIB` say.
    fn or_from_env(count: usize, mib: usize) -> Self {
        let number = |name: &str| std::env::var(name).map(|text| text.parse::<usize>().unwrap());
        Self {
            count: number("WARPLINK_TEST_ROUNDS").unwrap_or(count),
            bytes: number("WARPLINK_TEST_MIB").unwrap_or(mib) * MIB,
        }
    }

    /// Runs them on two ranks, and prints what these hold every thousand rounds.
    fn run(self, config: Option<fn(&mut Config)>, limit: Option<Duration>) {
        let ranks = Ranks {
            config,
            limit,
            ..Ranks::of(world(2))
        };
        let Some(ended) = ranks.start(|comm| {
            self.of_rank(&comm);
            comm.close().unwrap();
        }) else {
            return;
        };
        assert_all_ended_well(Some(&ended));
        for (rank, end) in ended.iter().enumerate() {
            let lines = end.output.lines().filter(|line| line.contains("rounds:"));
            lines.for_each(|line| println!("rank {rank}, {line}"));
        }
    }

    fn of_rank(self, comm: &Communicator) {
        let stream = comm.create_stream(Priority::Normal).unwrap();
        let begun = Instant::now();
        let mut settled = None;
        for round in 1..=self.count {
            send_fresh(comm, &stream, round, self.bytes);
            if round == SETTLED {
                settled = Some(Held::now(comm));
            }
            if round % 1000 == 0 || round == self.count {
                let (held, seconds) = (Held::now(comm), begun.elapsed().as_secs_f64());
                println!("{round} rounds: {seconds:.1} s, {held:?}");
                if let Some(before) = &settled {
                    before.assert_flat(comm);
                }
            }
        }
        comm.barrier().unwrap();
    }
}

/// Rank 0 sends a fresh buffer to a fresh buffer of rank 1, and both drop theirs.
fn send_fresh(comm: &Communicator, stream: &Stream, round: usize, bytes: usize) {
    let region = comm.alloc(bytes).unwrap();
    let mark = (round as u64).to_le_bytes();
    // Its two ends say which round it is of.
    let ends = [0..mark.len(), bytes - mark.len()..bytes].map(|end| region.slice(end).unwrap());
    if comm.rank() == 0 {
        ends.iter().for_each(|end| end.upload(&mark).unwrap());
        comm.send(&region, 1, 7, stream).unwrap();
    } else {
        comm.receive(&region, 0, 7, stream).unwrap();
    }
    comm.synchronize(stream).unwrap();
    for end in &ends {
        assert_eq!(end.download().unwrap(), mark, "in round {round}");
    }
}

#[test]
fn rounds_of_fresh_memory_run_in_constant_memory() {
    Rounds::or_from_env(1000, 1).run(None, None);
}

#[test]
fn rounds_without_a_pool_run_in_constant_memory() {
    let no_pool: fn(&mut Config) = |config| config.max_pooled_bytes = 0;
    Rounds::or_from_env(300, 1).run(Some(no_pool), None);
}

/// The number that is promised. Most of its time is that of copying.
#[test]
#[ignore = "takes many minutes on the host device"]
fn ten_thousand_rounds_of_256_mib_run_in_constant_memory() {
    let limit = Duration::from_secs(3600);
    Rounds::or_from_env(10_000, 256).run(None, Some(limit));
}

/// Both ranks send at once, in sizes that seldom fit what was freed before, and more than is kept.
#[test]
fn rounds_of_changing_sizes_run_in_constant_memory() {
    const KEPT: u64 = 32 * MIB as u64;
    let ranks = Ranks {
        config: Some(|config| config.max_pooled_bytes = KEPT),
        ..Ranks::of(world(2))
    };
    ranks.run(|comm| {
        let stream = comm.create_stream(Priority::Normal).unwrap();
        let round = |round: usize| {
            exchange_fresh(comm, &stream, MIB + round % 17 * (MIB / 2));
            let (_, kept) = comm.pooled_allocations_and_bytes();
            assert!(kept <= KEPT, "{kept} bytes are kept");
        };
        (0..SETTLED).for_each(round);
        comm.barrier().unwrap();
        let before = Held::now(comm);
        (SETTLED..300).for_each(round);
        comm.barrier().unwrap();
        before.assert_flat(comm);
        comm.barrier().unwrap();
    });
}
