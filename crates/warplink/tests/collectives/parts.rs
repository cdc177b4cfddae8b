//! All-to-all with a size for each pair of ranks, given on the host.

use crate::common::{
    TimedBarrier, allocate, assert_error, assert_names_peer, assert_says, downloaded, several,
    threads, threads_that_end, with_timeout, world, worlds,
};
use crate::data::{calling, library};
use crate::expected::Random;
use std::time::Duration;
use warplink::collective::Parts;
use warplink::device::{AllocationKind, DeviceSlice, Priority, Stream};
use warplink::{Collectives, Communicator, DType, ErrorKind};

/// Content of memory between parts.
const GAP: u16 = 0xdead;

/// How many elements each rank sends to each.
type Matrix = Vec<Vec<usize>>;

/// Displacements of parts with gaps between them, not in the order of ranks, and how long all of it is.
fn displacements(counts: &[usize], random: &mut Random) -> (Vec<usize>, usize) {
    let mut end = random.below(5);
    let mut starts = vec![0; counts.len()];
    let first = random.below(counts.len());
    for step in 0..counts.len() {
        let peer = (first + step) % counts.len();
        starts[peer] = end;
        end += counts[peer] + random.below(9);
    }
    (starts, end)
}

/// Element `index` of what `from` sends to `to` in a round.
fn element(round: usize, from: usize, to: usize, index: usize) -> u16 {
    (round * 31 + from * 1009 + to * 5003 + index * 7) as u16 & 0x7fff
}

struct Made {
    round: usize,
    output: DeviceSlice,
    counts: Vec<usize>,
    displacements: Vec<usize>,
}

impl Made {
    fn new(
        comm: &Communicator,
        collectives: &Collectives,
        matrix: &Matrix,
        round: usize,
        stream: &Stream,
    ) -> Self {
        let rank = comm.rank();
        let mut random = Random::new((round * 10 + rank) as u64);
        let memory = |values: &[u16]| {
            let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
            // It starts at any element.
            let device = comm.device();
            let all = device
                .allocate(bytes.len() + 16, AllocationKind::Plain)
                .unwrap();
            let start = 2 * (round % 5);
            let slice = all.slice(start..start + bytes.len()).unwrap();
            device.upload(&slice, &bytes).unwrap();
            slice
        };
        let sent = matrix[rank].clone();
        let (sent_from, length) = displacements(&sent, &mut random);
        let mut values = vec![GAP; length];
        for (to, (count, from)) in sent.iter().zip(&sent_from).enumerate() {
            for index in 0..*count {
                values[from + index] = element(round, rank, to, index);
            }
        }
        let input = memory(&values);
        let counts: Vec<usize> = matrix.iter().map(|row| row[rank]).collect();
        let (displacements, length) = displacements(&counts, &mut random);
        let output = memory(&vec![GAP; length]);
        collectives
            .all_to_all_v(
                (
                    &output,
                    Parts {
                        counts: &counts,
                        displacements: &displacements,
                    },
                ),
                (
                    &input,
                    Parts {
                        counts: &sent,
                        displacements: &sent_from,
                    },
                ),
                DType::BF16,
                stream,
            )
            .unwrap();
        Self {
            round,
            output,
            counts,
            displacements,
        }
    }

    fn check(&self, comm: &Communicator) {
        let bytes = downloaded(comm, &self.output);
        let got: Vec<u16> = bytes
            .chunks_exact(2)
            .map(|two| u16::from_le_bytes([two[0], two[1]]))
            .collect();
        let mut expected = vec![GAP; got.len()];
        let parts = self.counts.iter().zip(&self.displacements);
        for (from, (count, start)) in parts.enumerate() {
            for index in 0..*count {
                expected[start + index] = element(self.round, from, comm.rank(), index);
            }
        }
        assert!(got == expected, "round {} is wrong", self.round);
    }
}

/// Counts at random, none at all, all to one rank, and all from one.
fn matrix(random: &mut Random, ranks: usize, kind: usize, most: usize) -> Matrix {
    let one = random.below(ranks);
    let mut count = |from: usize, to: usize| match kind {
        0 => 0,
        1 if to != one => 0,
        2 if from != one => 0,
        _ => [0, 1, random.below(most)][random.below(3)],
    };
    (0..ranks)
        .map(|from| (0..ranks).map(|to| count(from, to)).collect())
        .collect()
}

pub(crate) fn rounds(comm: &Communicator, collectives: &Collectives, count: usize) {
    let stream = comm.create_stream(Priority::Normal).unwrap();
    let ranks = comm.world();
    let mut random = Random::new(ranks as u64);
    let made: Vec<Made> = (0..count)
        .map(|round| {
            let most = [30, 2000, 40_000][round % 3];
            let matrix = matrix(&mut random, ranks, round % 5, most);
            Made::new(comm, collectives, &matrix, round, &stream)
        })
        .collect();
    comm.synchronize(&stream).unwrap();
    made.iter().for_each(|made| made.check(comm));
}

#[test]
fn parts_of_any_sizes_come_to_their_ranks() {
    for ranks in worlds(1..=8) {
        threads(ranks, |comm| rounds(comm, &comm.collectives().unwrap(), 15));
    }
}

#[test]
fn parts_by_the_vendors_library_are_the_same() {
    threads(world(3), |comm| {
        if let Some(collectives) = library(comm) {
            rounds(comm, &collectives, 15);
        }
    });
}

/// One rank expects another size from one other; nobody gets wrong data, and these two name each other.
#[test]
fn a_rank_that_states_another_size_is_named() {
    let Some(ranks) = several(3) else { return };
    // Who expects less than its peer sends.
    let (receiver, sender) = (ranks - 1, ranks - 2);
    let all = TimedBarrier::new(ranks);
    // The rank that is not concerned waits for the others until then.
    threads_that_end(ranks, with_timeout(Duration::from_secs(10)), |comm| {
        let collectives = comm.collectives().unwrap();
        let stream = comm.create_stream(Priority::Normal).unwrap();
        let memory = allocate(&comm, ranks * 64);
        let output = allocate(&comm, ranks * 64);
        let counts = vec![16; ranks];
        let mut expected = counts.clone();
        if comm.rank() == receiver {
            expected[sender] = 15;
        }
        let displacements: Vec<usize> = (0..ranks).map(|rank| 16 * rank).collect();
        let parts = |counts| Parts {
            counts,
            displacements: &displacements,
        };
        collectives
            .all_to_all_v(
                (&output, parts(&expected[..])),
                (&memory, parts(&counts[..])),
                DType::F32,
                &stream,
            )
            .unwrap();
        let result = comm.synchronize(&stream);
        all.wait();
        let concerned = match comm.rank() {
            rank if rank == receiver => Some((sender, "the peer sends 64 bytes; expected 60")),
            rank if rank == sender => Some((receiver, "the peer receives 60")),
            _ => None,
        };
        comm.abort("the test is over");
        if let Some((peer, says)) = concerned {
            let error = result.unwrap_err();
            assert_names_peer(&error, ErrorKind::Mismatch, peer);
            assert_says(&error, &[says]);
        }
    });
}

#[test]
fn parts_that_do_not_fit_the_memory_are_refused() {
    calling(world(2), |comm, collectives, stream| {
        let memory = allocate(comm, 64);
        let (output, input) = (memory.slice(0..32).unwrap(), memory.slice(32..64).unwrap());
        let good = Parts {
            counts: &[4, 4],
            displacements: &[0, 4],
        };
        let refused = |output_parts: Parts<'_>, input_parts: Parts<'_>, says: &str| {
            let error = collectives
                .all_to_all_v(
                    (&output, output_parts),
                    (&input, input_parts),
                    DType::F32,
                    stream,
                )
                .unwrap_err();
            assert_error(&error, ErrorKind::InvalidArgument, &["all_to_all_v", says]);
        };
        let parts = |counts, displacements| Parts {
            counts,
            displacements,
        };
        refused(
            good,
            parts(&[4], &[0]),
            "1 counts and 1 displacements of the input",
        );
        refused(
            parts(&[4, 5], &[0, 4]),
            good,
            "5 elements from 4 on in the output; expected a part of its 8",
        );
        refused(good, parts(&[1, usize::MAX], &[0, 1]), "of its 8");
        refused(parts(&[4, 4], &[0, 3]), good, "overlaps");
        collectives
            .all_to_all_v((&output, good), (&input, good), DType::F32, stream)
            .unwrap();
        comm.synchronize(stream).unwrap();
    });
}
