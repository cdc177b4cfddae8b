//! Purposes of the examples, written down apart from them: their outputs are compared with that, and not with
//! an evaluation of their text.

use crate::common::{decode, encode, kind, threads, world};
use crate::examples::{all, example, parameters};
use crate::play::{Launches, play_with};
use warplink::device::{AllocationKind, Priority, ReduceOp};
use warplink::program::{Bindings, Parameters, PrepareOptions, Program, TensorInstance};
use warplink::{Communicator, DType, DeviceKind};

/// Lengths: one element, a part of one lane, tails, and many packets for each thread.
const LENGTHS: [i64; 4] = [1, 7, 135, 4099];

/// Elements of inputs: exact in every type, and so small that sums over 16 ranks are exact in all but the 8-bit
/// floats.
const VALUES: [u8; 8] = [0, 1, 2, 3, 4, 5, 6, 7];

/// The same for floats with 2 bits of mantissa.
const COARSE: [u8; 8] = [0, 1, 2, 3, 4, 6, 8, 12];

/// An input's element.
fn input(dtype: DType, rank: usize, round: usize, index: usize) -> f64 {
    let values = match dtype {
        DType::F8E5M2 => COARSE,
        _ => VALUES,
    };
    f64::from(values[(7 * index + 5 * rank + 3 * round + index / 16) % 8])
}

fn inputs(rank: usize, round: usize, tensor: &TensorInstance) -> Vec<u8> {
    let dtype = tensor.dtype;
    let count = tensor.bytes / dtype.size();
    let values: Vec<f64> = (0..count)
        .map(|index| input(dtype, rank, round, index))
        .collect();
    spread(dtype, &values)
}

/// Elements of these values; wide integers are multiplied, so that all of their bytes matter.
fn spread(dtype: DType, values: &[f64]) -> Vec<u8> {
    let wide = |scale: u64| {
        let scaled = values.iter().map(move |value| *value as u64 * scale);
        scaled.flat_map(|value| value.to_le_bytes().into_iter().take(dtype.size()))
    };
    match dtype {
        // The sums of 16 ranks are below 128.
        DType::I64 | DType::U64 => wide(0x0100_0001_0000_0001).collect(),
        DType::I32 | DType::U32 => wide(0x0100_0001).collect(),
        _ => encode(dtype, values),
    }
}

/// The element `index` of the output of an example whose inputs have rows of `n` elements of a type.
fn meant(
    name: &str,
    (rank, world): (usize, usize),
    round: usize,
    (dtype, n): (DType, usize),
    op: ReduceOp,
    index: usize,
) -> f64 {
    let input = |peer, index| input(dtype, peer, round, index);
    let combined = |index: usize| {
        let all = (0..world).map(|peer| input(peer, index));
        match op {
            ReduceOp::Sum => all.sum(),
            ReduceOp::Product => all.product(),
            ReduceOp::Average => all.sum::<f64>() / world as f64,
            ReduceOp::Max => all.fold(f64::MIN, f64::max),
            ReduceOp::Min => all.fold(f64::MAX, f64::min),
            ReduceOp::ScaledSum(factor) => all.map(|value| value * factor.value()).sum(),
        }
    };
    let (row, column) = (index / n, index % n);
    match name {
        "all_gather_put" | "all_gather_copy_engine" => input(row, column),
        "all_to_all_get" | "all_to_all_copy_engine" => input(row, rank * n + column),
        "reduce_scatter_packets" => combined(rank * n + column),
        "broadcast_chain" => input(0, column),
        _ if name.starts_with("all_reduce_") => combined(column),
        _ => panic!("nothing says what '{name}' means"),
    }
}

/// The largest relative error of a sum: one that goes from rank to rank is rounded at each. All other values are
/// those of one exact sum, rounded once.
fn allowed(name: &str, world: usize, dtype: DType, op: ReduceOp) -> f64 {
    let roundoff = match dtype {
        DType::F8E4M3 => 2f64.powi(-4),
        DType::F8E5M2 => 2f64.powi(-3),
        _ => 0.0,
    };
    match (name, op) {
        ("all_reduce_ring", ReduceOp::Sum) => (1.0 + roundoff).powi(world as i32 - 1) - 1.0,
        _ => 0.0,
    }
}

fn check(comm: &Communicator, program: &Program, parameters: &Parameters, n: i64, op: ReduceOp) {
    let launches = Launches {
        eager: 2,
        captured: 2,
        verify: false,
        ..Launches::default()
    };
    let place = (comm.rank(), comm.world());
    let checked = play_with(comm, program, parameters, &launches, inputs, |round| {
        Ok(Box::new(move |_, tensor, bytes| {
            let (dtype, size) = (tensor.dtype, tensor.dtype.size());
            let row = (dtype, n as usize);
            let value = |index| meant(&program.name, place, round, row, op, index);
            let values: Vec<f64> = (0..bytes.len() / size).map(value).collect();
            let allowed = allowed(&program.name, place.1, dtype, op);
            let wrong = if allowed > 0.0 {
                let found = decode(dtype, bytes);
                let mut pairs = found.iter().zip(&values);
                pairs.position(|(found, value)| {
                    (found - value)
                        .abs()
                        .partial_cmp(&(allowed * value))
                        .is_none_or(|order| order.is_gt())
                })
            } else {
                let expected = spread(dtype, &values);
                let mut pairs = bytes.chunks(size).zip(expected.chunks(size));
                pairs.position(|(found, expected)| found != expected)
            };
            match wrong {
                None => Ok(()),
                Some(at) => Err(format!("element {at} is not {}", values[at])),
            }
        }))
    });
    checked.unwrap_or_else(|what| panic!("{} ({parameters}): {what}", program.name));
}

/// With every length and operator.
#[test]
fn examples_give_what_they_are_for_in_every_type() {
    on_ranks(world(2), DType::ALL.len(), 3);
}

/// Half of the types on three and four ranks each, and one after another on more.
#[test]
fn examples_give_what_they_are_for_on_2_to_16_ranks() {
    match kind() {
        DeviceKind::Host => {
            (3..=16).for_each(|world| on_ranks(world, if world <= 4 { 6 } else { 1 }, 1));
        }
        DeviceKind::Cuda => {
            on_ranks(world(4), 6, 1);
            on_ranks(world(8), 6, 1);
        }
    }
}

/// Checks all examples for `world` ranks in `types` types, and those that reduce with `ops` operators each.
fn on_ranks(world: usize, types: usize, ops: usize) {
    threads(world, |comm| {
        for (place, (program, only)) in all().iter().enumerate() {
            if only.is_some_and(|only| only != world) {
                continue;
            }
            let reduces = program.parameters.iter().any(|p| p.name == "op");
            let ops = if reduces { ops } else { 1 };
            for (number, again) in (0..types).flat_map(|at| (0..ops).map(move |op| (at, op))) {
                let at = place + 6 * world + number;
                let dtype = DType::ALL[at % DType::ALL.len()];
                let op = (place + world + number + again) % 3;
                let op = [ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min][op];
                let n = LENGTHS[(at + world + again) % LENGTHS.len()];
                let parameters = parameters(program, n, dtype, op);
                check(comm, program, &parameters, n, op);
            }
        }
    });
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
    threads(world(2), |comm| {
        for name in [
            "all_reduce_one_shot",
            "all_reduce_lanes",
            "all_reduce_pushed",
        ] {
            let program = example(name);
            replay(comm, &program, N, rounds, most);
        }
    });
}

/// Replays a program's graph from 1 to `most` times in each of `rounds` rounds.
fn replay(comm: &Communicator, program: &Program, n: usize, rounds: usize, most: usize) {
    let parameters = parameters(program, n as i64, DType::F32, ReduceOp::Sum);
    let options = PrepareOptions {
        streams: 1,
        ..PrepareOptions::default()
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
        let values: Vec<f64> = (0..n)
            .map(|index| input(DType::F32, rank, round, index))
            .collect();
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
            .map(|index| {
                meant(
                    &program.name,
                    place,
                    round,
                    (DType::F32, n),
                    ReduceOp::Sum,
                    index,
                )
            })
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
