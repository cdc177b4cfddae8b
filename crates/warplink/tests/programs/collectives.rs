//! Collectives in programs, by the communicator's own kernels or by the engine.

use crate::common::{threads_with, world, worlds};
use crate::{RANKS, delayed, has_engine};
use warplink::Communicator;
use warplink::device::{AllocationKind, DeviceSlice, Priority, Stream};
use warplink::program::{Bindings, Executor, Parameters, Plan, PrepareOptions, Program};

/// Every collective of all ranks, on two streams. What a rank other than the root of a reduction gets is undefined.
const ALL: &str = "program all(n) {
    input A: f32[world, n]
    output B: f32[world, world, n]
    output C: f32[n]
    output D: f32[world, n]
    output E: f32[world, n]
    output F: f32[world, n]
    output G: f32[world, n]
    allocate R: f32[world, n]
    fork pool(0), pool(1) {
        set_stream pool(0)
        B = all_gather(A)
        C = reduce_scatter(A, sum)
        set_stream pool(1)
        D = all_reduce(A, max)
        R = reduce(A, sum to 0)
        set_stream pool(0)
        E = all_to_all(A)
    }
    F = broadcast(A from world - 1)
    if rank == 0 { G = copy(R) } else { G = copy(A) }
}";

/// Elements of a part: a few packets, and enough for kernels that access memory of peers.
const COUNTS: [usize; 2] = [60, 30_000];

/// Integers, whose sums are exact in every order.
fn element(rank: usize, row: usize, index: usize, round: usize) -> f32 {
    ((7 * rank + 3 * row + 5 * index + 11 * round) % 64) as f32
}

struct Memory {
    tensors: Bindings,
}

impl Memory {
    fn new(comm: &Communicator, n: usize) -> Self {
        let world = comm.world();
        let rows = [("A", world), ("B", world * world), ("C", 1)];
        let others = ["D", "E", "F", "G"].map(|name| (name, world));
        let allocated = rows.into_iter().chain(others).map(|(name, rows)| {
            let memory = comm.device().allocate(4 * rows * n, AllocationKind::Plain);
            (name.to_owned(), memory.unwrap())
        });
        Self {
            tensors: allocated.collect(),
        }
    }

    fn fill(&self, comm: &Communicator, n: usize, round: usize) {
        let (rank, world) = (comm.rank(), comm.world());
        let elements = (0..world * n).map(|at| element(rank, at / n, at % n, round));
        let bytes: Vec<u8> = elements.flat_map(f32::to_le_bytes).collect();
        comm.device().upload(&self.tensors["A"], &bytes).unwrap();
    }

    fn check(&self, comm: &Communicator, n: usize, round: usize) {
        let (own, world) = (comm.rank(), comm.world());
        let of = |rank: usize, row: usize, index: usize| element(rank, row, index, round);
        let sum = |row, index| (0..world).map(|rank| of(rank, row, index)).sum::<f32>();
        let most = |row, index| {
            (0..world)
                .map(|rank| of(rank, row, index))
                .fold(0.0, f32::max)
        };
        self.holds(comm, "B", n, &|row, index| {
            of(row / world, row % world, index)
        });
        self.holds(comm, "C", n, &|_, index| sum(own, index));
        self.holds(comm, "D", n, &most);
        self.holds(comm, "E", n, &|row, index| of(row, own, index));
        self.holds(comm, "F", n, &|row, index| of(world - 1, row, index));
        self.holds(comm, "G", n, &|row, index| match own {
            0 => sum(row, index),
            _ => of(own, row, index),
        });
    }

    fn holds(
        &self,
        comm: &Communicator,
        name: &str,
        n: usize,
        expected: &dyn Fn(usize, usize) -> f32,
    ) {
        let memory = &self.tensors[name];
        let mut bytes = vec![0; memory.bytes()];
        comm.device().download(memory, &mut bytes).unwrap();
        let found = bytes
            .as_chunks::<4>()
            .0
            .iter()
            .map(|it| f32::from_le_bytes(*it));
        for (at, value) in found.enumerate() {
            assert_eq!(
                value,
                expected(at / n, at % n),
                "{name}[{at}], {n} elements"
            );
        }
    }
}

fn plan(executor: &Executor, n: usize, options: PrepareOptions, memory: &Memory) -> Plan {
    let program = Program::parse(ALL).unwrap();
    let parameters: Parameters = [("n", n as i64)].into_iter().collect();
    let prepared = executor.prepare(&program, &parameters, options).unwrap();
    prepared.bind(&memory.tensors).unwrap()
}

fn launch(plan: &Plan, stream: &Stream, memory: &Memory) {
    let addresses: Vec<u64> = memory.tensors.values().map(DeviceSlice::address).collect();
    let bindings = || Ok(memory.tensors.clone());
    plan.launch_on(stream, &addresses, bindings).unwrap();
}

#[test]
fn collectives_of_programs_are_right_in_any_way_they_run() {
    for world in worlds(RANKS) {
        threads_with(world, delayed(150), |comm| {
            let executor = comm.executor();
            let streams = [(); 2].map(|()| comm.create_stream(Priority::Normal).unwrap());
            for n in COUNTS {
                let memory = [(); 2].map(|()| Memory::new(comm, n));
                let by = |options| plan(&executor, n, options, &memory[0]);
                let direct = by(PrepareOptions::default());
                let captured = by(PrepareOptions::default()).capture().unwrap();
                let bounded = PrepareOptions {
                    multiprocessors: Some(8),
                    ..PrepareOptions::default()
                };
                let library = PrepareOptions {
                    library: true,
                    ..PrepareOptions::default()
                };
                let engine = has_engine(comm).then(|| [bounded, library].map(by));
                for round in 0..12 {
                    // Runs that recur, on either memory; a graph; runs; and the engine.
                    let (way, stream) = (round % 6, &streams[round % 2]);
                    let memory = &memory[usize::from(way == 1)];
                    memory.fill(comm, n, round);
                    match way {
                        0 | 1 => (0..4).for_each(|_| launch(&direct, stream, memory)),
                        2 => captured.launch(stream).unwrap(),
                        3 => direct.run(stream).unwrap(),
                        _ => engine
                            .as_ref()
                            .map_or(&direct, |plans| &plans[way - 4])
                            .run(stream)
                            .unwrap(),
                    }
                    comm.synchronize(stream).unwrap();
                    memory.check(comm, n, round);
                }
            }
        });
    }
}

/// Nothing but the collectives orders the streams.
#[test]
fn collectives_of_plans_on_several_streams_follow_one_another() {
    threads_with(world(2), delayed(150), |comm| {
        let executor = comm.executor();
        let streams = [(); 2].map(|()| comm.create_stream(Priority::Normal).unwrap());
        let n = COUNTS[1];
        let memory = [(); 2].map(|()| Memory::new(comm, n));
        let [graph, eager] =
            [0, 1].map(|at: usize| plan(&executor, n, PrepareOptions::default(), &memory[at]));
        let graph = graph.capture().unwrap();
        for round in 0..6 {
            memory.iter().for_each(|memory| memory.fill(comm, n, round));
            for _ in 0..3 {
                graph.launch(&streams[0]).unwrap();
                eager.run(&streams[1]).unwrap();
            }
            for (stream, memory) in streams.iter().zip(&memory) {
                comm.synchronize(stream).unwrap();
                memory.check(comm, n, round);
            }
        }
    });
}
