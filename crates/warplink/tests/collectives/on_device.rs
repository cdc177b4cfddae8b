//! All-to-all with a size for each pair of ranks that only device memory has.

use crate::common::{
    Stopwatch, TimedBarrier, allocate, assert_error, assert_names_peer, assert_says, at_least,
    delayed, processes, several, threads_that_end, threads_with, unchanged, with_timeout, world,
    worlds,
};
use crate::data::{by, calling, library};
use crate::expected::Random;
use std::time::Duration;
use warplink::device::{DeviceSlice, Priority, Stream};
use warplink::{Collectives, Communicator, DType, Error, ErrorKind};

/// How soon every rank that is concerned must have its error.
const SOON: Duration = Duration::from_secs(5);

/// Content of an output where nothing was received.
const UNTOUCHED: u8 = 0x5a;

/// How many elements each rank sends to each.
type Matrix = Vec<Vec<u64>>;

fn bytes_of(counts: &[u64]) -> Vec<u8> {
    counts
        .iter()
        .flat_map(|count| count.to_le_bytes())
        .collect()
}

/// The bytes of a part, of which some are sent.
fn part(seed: u64, from: usize, to: usize, bytes: usize) -> Vec<u8> {
    let mut random = Random::new(seed * 1000 + (from * 10 + to) as u64);
    (0..bytes).map(|_| random.next() as u8).collect()
}

/// Memory of a call with parts of at most `max` elements.
struct Buffers<'a> {
    comm: &'a Communicator,
    dtype: DType,
    max: usize,
    input: DeviceSlice,
    sent: DeviceSlice,
    output: DeviceSlice,
    received: DeviceSlice,
}

impl<'a> Buffers<'a> {
    /// Of which the data begin `shift` bytes behind where accesses are fastest.
    fn new(comm: &'a Communicator, dtype: DType, max: usize, shift: usize) -> Self {
        let memory = |bytes: usize, shift: usize| {
            let all = shift + bytes + 16;
            let whole = allocate(comm, all);
            whole.slice(shift..shift + bytes).unwrap()
        };
        let (data, counts) = (comm.world() * max * dtype.size(), 8 * comm.world());
        Self {
            comm,
            dtype,
            max,
            input: memory(data, shift),
            sent: memory(counts, 0),
            output: memory(data, 2 * shift),
            received: memory(counts, 0),
        }
    }

    fn part_bytes(&self) -> usize {
        self.max * self.dtype.size()
    }

    /// Uploads what is sent and how much of it, and clears the rest.
    fn fill(&self, matrix: &Matrix, seed: u64) {
        let (rank, world) = (self.comm.rank(), self.comm.world());
        let parts = (0..world).flat_map(|to| part(seed, rank, to, self.part_bytes()));
        let data: Vec<u8> = parts.collect();
        let upload = |memory: &DeviceSlice, bytes: &[u8]| {
            if !bytes.is_empty() {
                self.comm.device().upload(memory, bytes).unwrap();
            }
        };
        upload(&self.input, &data);
        upload(&self.sent, &bytes_of(&matrix[rank]));
        upload(&self.output, &vec![UNTOUCHED; data.len()]);
        upload(&self.received, &vec![UNTOUCHED; 8 * world]);
    }

    fn enqueue(&self, collectives: &Collectives, stream: &Stream) -> Result<(), Error> {
        collectives.all_to_all_v_on_device(
            (&self.output, &self.received),
            (&self.input, &self.sent),
            self.dtype,
            self.max,
            stream,
        )
    }

    fn download(&self, memory: &DeviceSlice) -> Vec<u8> {
        let mut bytes = vec![0; memory.bytes()];
        if !bytes.is_empty() {
            self.comm.device().download(memory, &mut bytes).unwrap();
        }
        bytes
    }

    /// Whether what came from `from` is what it sent, and the rest is as it was.
    fn check_part(&self, matrix: &Matrix, seed: u64, from: usize) {
        let (rank, each) = (self.comm.rank(), self.part_bytes());
        let count = matrix[from][rank];
        let mut expected = part(seed, from, rank, each);
        expected[count as usize * self.dtype.size()..].fill(UNTOUCHED);
        let output = self.download(&self.output);
        let what = format!("{count} of at most {} from {from} to {rank}", self.max);
        assert!(output[from * each..(from + 1) * each] == expected, "{what}");
        let received = self.download(&self.received);
        assert_eq!(
            received[8 * from..8 * from + 8],
            count.to_le_bytes(),
            "{what}"
        );
    }

    fn check(&self, matrix: &Matrix, seed: u64) {
        (0..self.comm.world()).for_each(|from| self.check_part(matrix, seed, from));
    }
}

/// None at all, the most, all to one rank, and at random.
fn matrix(random: &mut Random, ranks: usize, kind: usize, max: usize) -> Matrix {
    let one = random.below(ranks);
    let mut count = |to: usize| match kind % 4 {
        0 => 0,
        1 => max,
        2 if to != one => 0,
        _ => [0, max.min(1), random.below(max + 1), max][random.below(4)],
    };
    (0..ranks)
        .map(|_| (0..ranks).map(|to| count(to) as u64).collect())
        .collect()
}

/// Calls of which several are under way at a time.
pub(crate) fn rounds(comm: &Communicator, collectives: &Collectives, seed: u64) {
    let stream = comm.create_stream(Priority::Normal).unwrap();
    let mut random = Random::new(seed);
    for (number, (dtype, max, shift)) in [
        (DType::U8, 1, 1),
        (DType::BF16, 333, 2),
        (DType::F32, 0, 0),
        (DType::F64, 5000, 0),
        (DType::U8, 70_001, 3),
        (DType::BF16, 65_536, 0),
    ]
    .into_iter()
    .enumerate()
    {
        let made: Vec<_> = (0..3)
            .map(|round| {
                let matrix = matrix(&mut random, comm.world(), number + round, max);
                let (buffers, seed) = (Buffers::new(comm, dtype, max, shift), random.next() % 1000);
                buffers.fill(&matrix, seed);
                buffers.enqueue(collectives, &stream).unwrap();
                (buffers, matrix, seed)
            })
            .collect();
        comm.synchronize(&stream).unwrap();
        for (buffers, matrix, seed) in &made {
            buffers.check(matrix, *seed);
        }
    }
}

#[test]
fn parts_of_sizes_in_device_memory_come_to_their_ranks() {
    for ranks in worlds(1..=4) {
        threads_with(ranks, delayed(30), |comm| {
            rounds(comm, &comm.collectives().unwrap(), ranks as u64);
        });
    }
}

/// In a workspace through which a long part goes in many chunks.
#[test]
fn processes_exchange_parts_of_sizes_in_device_memory() {
    processes(world(3), |comm| {
        rounds(comm, &by(comm, None, 512 << 10), 17);
    });
}

/// The counts change from launch to launch, and nobody tells the host.
#[test]
fn a_graph_serves_all_counts() {
    for ranks in worlds([2, 4]) {
        calling(ranks, |comm, collectives, stream| {
            let mut random = Random::new(5 + ranks as u64);
            let each = [(DType::F32, 900), (DType::U8, 40_000)];
            let each = each.map(|(dtype, max)| Buffers::new(comm, dtype, max, 0));
            stream.begin_capture().unwrap();
            for buffers in &each {
                buffers.enqueue(collectives, stream).unwrap();
            }
            let graph = stream.end_capture().unwrap();
            for launch in 0..12 {
                let matrices = each
                    .each_ref()
                    .map(|buffers| matrix(&mut random, ranks, launch, buffers.max));
                for (buffers, matrix) in each.iter().zip(&matrices) {
                    buffers.fill(matrix, launch as u64);
                }
                graph.launch(stream).unwrap();
                comm.synchronize(stream).unwrap();
                for (buffers, matrix) in each.iter().zip(&matrices) {
                    buffers.check(matrix, launch as u64);
                }
            }
        });
    }
}

/// Rank 0 sends more to the last rank than there may be: these two are told, and nothing of it arrives.
#[test]
fn a_count_above_the_limit_is_told_on_both_ranks() {
    for (ranks, count, says) in [
        (
            2,
            101,
            "404 bytes by the count in device memory; expected at most 400",
        ),
        (
            3,
            1 << 40,
            "4398046511104 bytes by the count in device memory",
        ),
        (
            2,
            1 << 62,
            "bytes by the count in device memory; expected at most 400",
        ),
        (
            2,
            u64::MAX,
            "bytes by the count in device memory; expected at most 400",
        ),
    ] {
        let Some(ranks) = several(ranks) else { return };
        let last = ranks - 1;
        let all = TimedBarrier::new(ranks);
        // The rank that is not concerned waits for the others until then.
        threads_that_end(ranks, with_timeout(Duration::from_secs(10)), |comm| {
            let collectives = comm.collectives().unwrap();
            let stream = comm.create_stream(Priority::Normal).unwrap();
            let mut counts = vec![vec![7; ranks]; ranks];
            counts[0][last] = count;
            let buffers = Buffers::new(&comm, DType::F32, 100, 0);
            buffers.fill(&counts, 1);
            let started = Stopwatch::start();
            buffers.enqueue(&collectives, &stream).unwrap();
            let result = comm.synchronize(&stream);
            let took = started.elapsed();
            all.wait();
            let peer = match comm.rank() {
                0 => Some(last),
                rank if rank == last => Some(0),
                _ => None,
            };
            let part = buffers.download(&buffers.output.slice(0..400).unwrap());
            let untouched = part.iter().all(|byte| *byte == UNTOUCHED);
            comm.abort("the test is over");
            let Some(peer) = peer else { return };
            let error = result.unwrap_err();
            assert_names_peer(&error, ErrorKind::Mismatch, peer);
            assert_says(&error, &[says, "raise the limit on all ranks"]);
            assert!(took < SOON, "{error}");
            assert!(comm.rank() != last || untouched, "something came");
        });
    }
}

#[test]
fn another_limit_is_told_on_both_ranks() {
    let Some(ranks) = at_least(2) else { return };
    let all = TimedBarrier::new(ranks);
    threads_that_end(ranks, unchanged, |comm| {
        let collectives = comm.collectives().unwrap();
        let stream = comm.create_stream(Priority::Normal).unwrap();
        let max = 10 + comm.rank();
        let buffers = Buffers::new(&comm, DType::U8, max, 0);
        buffers.fill(&vec![vec![3; ranks]; ranks], 1);
        buffers.enqueue(&collectives, &stream).unwrap();
        let error = comm.synchronize(&stream).unwrap_err();
        all.wait();
        let peer = 1 - comm.rank();
        comm.abort("the test is over");
        assert_names_peer(&error, ErrorKind::Mismatch, peer);
        assert_says(&error, &[&format!("{} bytes; expected {max}", 10 + peer)]);
    });
}

#[test]
fn memory_that_does_not_fit_is_refused() {
    calling(world(2), |comm, collectives, stream| {
        let ranks = comm.world();
        let good = Buffers::new(comm, DType::F32, 8, 0);
        let refused = |change: &dyn Fn(&mut Buffers<'_>), says: &str| {
            let mut buffers = Buffers::new(comm, DType::F32, 8, 0);
            change(&mut buffers);
            let error = buffers.enqueue(collectives, stream).unwrap_err();
            let says = ["all_to_all_v_on_device", says];
            assert_error(&error, ErrorKind::InvalidArgument, &says);
        };
        refused(&|it| it.max = 9, "expected 9 elements of f32 for each of");
        refused(&|it| it.max = usize::MAX, "the output has");
        refused(
            &|it| it.input = it.input.slice(0..4).unwrap(),
            "the input has 4 bytes",
        );
        refused(
            &|it| it.sent = it.sent.slice(0..4).unwrap(),
            "the counts of the input have 4 bytes",
        );
        refused(
            &|it| it.received = it.output.slice(0..8 * ranks).unwrap(),
            "the output overlap the received counts",
        );
        refused(
            &|it| it.input = it.output.clone(),
            "the output overlap the input",
        );
        let odd = allocate(comm, 64);
        refused(
            &|it| it.sent = odd.slice(4..4 + 8 * ranks).unwrap(),
            "expected a multiple of 8",
        );
        // Nothing was enqueued that the other rank would wait for.
        let counts = vec![vec![8; ranks]; ranks];
        good.fill(&counts, 2);
        good.enqueue(collectives, stream).unwrap();
        comm.synchronize(stream).unwrap();
        good.check(&counts, 2);
        if let Some(by_library) = library(comm) {
            let error = good.enqueue(&by_library, stream).unwrap_err();
            let says = ["cannot read counts from device memory", "all_to_all"];
            assert_error(&error, ErrorKind::Unsupported, &says);
        }
    });
}
