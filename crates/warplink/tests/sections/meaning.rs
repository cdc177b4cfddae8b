//! What the examples are for, written down apart from them: their outputs are compared with that, and not with
//! an evaluation of their text.

use crate::common::{encode, kind, threads_with, world};
use crate::examples::{all, example, parameters};
use crate::play::{Launches, play_with};
use warplink::device::{AllocationKind, Priority, ReduceOp};
use warplink::program::{Bindings, Parameters, PrepareOptions, Program, TensorInstance};
use warplink::{Communicator, DType, DeviceKind};

/// Lengths: one element, a part of one lane, tails, and many packets for each thread.
const LENGTHS: [i64; 4] = [1, 7, 135, 4099];

/// An input's element: small, so that sums over 16 ranks are exact in every type.
fn input(rank: usize, round: usize, index: usize) -> f64 {
    ((7 * index + 5 * rank + 3 * round + index / 16) % 8) as f64
}

fn inputs(rank: usize, round: usize, tensor: &TensorInstance) -> Vec<u8> {
    let count = tensor.bytes / tensor.dtype.size();
    let values: Vec<f64> = (0..count).map(|index| input(rank, round, index)).collect();
    encode(tensor.dtype, &values)
}

/// The element `index` of the output of an example whose inputs have rows of `n` elements.
fn meant(
    name: &str,
    (rank, world): (usize, usize),
    round: usize,
    n: usize,
    op: ReduceOp,
    index: usize,
) -> f64 {
    let combined = |index: usize| {
        let all = (0..world).map(|peer| input(peer, round, index));
        match op {
            ReduceOp::Sum => all.sum(),
            ReduceOp::Product => all.product(),
            ReduceOp::Average => all.sum::<f64>() / world as f64,
            ReduceOp::Max => all.fold(f64::MIN, f64::max),
            ReduceOp::Min => all.fold(f64::MAX, f64::min),
        }
    };
    let (row, column) = (index / n, index % n);
    match name {
        "all_gather_put" => input(row, round, column),
        "all_to_all_get" => input(row, round, rank * n + column),
        "reduce_scatter_packets" => combined(rank * n + column),
        "broadcast_chain" => input(0, round, column),
        _ if name.starts_with("all_reduce_") => combined(column),
        _ => panic!("nothing says what '{name}' means"),
    }
}

fn check(comm: &Communicator, program: &Program, parameters: &Parameters, n: i64, op: ReduceOp) {
    let launches = Launches {
        eager: 2,
        captured: 2,
        verify: false,
    };
    let place = (comm.rank(), comm.world());
    let checked = play_with(comm, program, parameters, launches, inputs, |round| {
        Ok(Box::new(move |_, tensor, bytes| {
            let size = tensor.dtype.size();
            let value = |index| meant(&program.name, place, round, n as usize, op, index);
            let values: Vec<f64> = (0..bytes.len() / size).map(value).collect();
            let expected = encode(tensor.dtype, &values);
            let mut pairs = bytes.chunks(size).zip(expected.chunks(size));
            match pairs.position(|(found, expected)| found != expected) {
                None => Ok(()),
                Some(at) => Err(format!("element {at} is not {}", values[at])),
            }
        }))
    });
    checked.unwrap_or_else(|what| panic!("{} ({parameters}): {what}", program.name));
}

/// Every type on few ranks, and one after another on more.
#[test]
fn examples_give_what_they_are_for_on_2_to_16_ranks() {
    let worlds = match kind() {
        DeviceKind::Host => (2..=16).collect(),
        DeviceKind::Cuda => vec![world(2), world(4), world(8)],
    };
    for world in worlds {
        threads_with(
            world,
            |_| {},
            |comm| {
                for (place, (program, only)) in all().iter().enumerate() {
                    if only.is_some_and(|only| only != world) {
                        continue;
                    }
                    let types = if world <= 4 {
                        DType::ELEMENTWISE.len()
                    } else {
                        1
                    };
                    for number in 0..types {
                        let at = place + 2 * world + number;
                        let dtype = DType::ELEMENTWISE[at % DType::ELEMENTWISE.len()];
                        let op = [ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min][at / 2 % 3];
                        let n = LENGTHS[(at + world) % LENGTHS.len()];
                        let parameters = parameters(program, n, dtype, op);
                        check(comm, program, &parameters, n, op);
                    }
                }
            },
        );
    }
}

/// Ranks run ahead of one another as far as the kernels let them: launches are enqueued without waiting for
/// those before. Now and then the outputs are compared, and the inputs change. On GPUs, each graph is replayed
/// more than 10,000 times.
#[test]
fn replays_stay_right_however_many() {
    const N: usize = 1000;
    let (rounds, most) = match kind() {
        DeviceKind::Host => (20, 40),
        DeviceKind::Cuda => (100, 200),
    };
    threads_with(
        world(2),
        |_| {},
        |comm| {
            for name in [
                "all_reduce_one_shot",
                "all_reduce_lanes",
                "all_reduce_pushed",
            ] {
                let program = example(name);
                replay(comm, &program, N, rounds, most);
            }
        },
    );
}

/// Replays a program's graph from 1 to `most` times in each of `rounds` rounds.
fn replay(comm: &Communicator, program: &Program, n: usize, rounds: usize, most: usize) {
    let parameters = parameters(program, n as i64, DType::F32, ReduceOp::Sum);
    let options = PrepareOptions {
        streams: 1,
        verify: true,
    };
    let (rank, device) = (comm.rank(), comm.device());
    let prepared = comm
        .executor()
        .prepare(program, &parameters, options)
        .unwrap();
    let [x, y] = [(); 2].map(|()| device.allocate(4 * n, AllocationKind::Plain).unwrap());
    let mut bindings = Bindings::new();
    bindings.insert("X".to_owned(), x.clone());
    bindings.insert("Y".to_owned(), y.clone());
    let stream = comm.create_stream(Priority::Normal).unwrap();
    let graph = prepared.bind(&bindings).unwrap().capture().unwrap();
    let mut launched = 0;
    for round in 0..rounds {
        let values: Vec<f64> = (0..n).map(|index| input(rank, round, index)).collect();
        device.upload(&x, &encode(DType::F32, &values)).unwrap();
        // Half of them all in a row, the others few or many.
        let times = if round % 2 == 0 {
            most
        } else {
            1 + 37 * round % most
        };
        for _ in 0..times {
            graph.launch(&stream).unwrap();
        }
        stream.fill(&x, 0xff).unwrap();
        comm.synchronize(&stream).unwrap();
        launched += times;
        let mut found = vec![0; 4 * n];
        device.download(&y, &mut found).unwrap();
        let place = (rank, comm.world());
        let expected: Vec<f64> = (0..n)
            .map(|index| meant(&program.name, place, round, n, ReduceOp::Sum, index))
            .collect();
        assert!(
            found == encode(DType::F32, &expected),
            "{}: wrong after {launched} replays",
            program.name
        );
        device.upload(&y, &vec![0xff; 4 * n]).unwrap();
    }
    println!("{}: {launched} replays", program.name);
}
