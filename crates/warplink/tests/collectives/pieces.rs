//! Calls on more memory than one launch takes.

use crate::common::{allocate, assert_error, downloaded, threads, world};
use crate::expected::{Random, kinds};
use warplink::collective::{Call, CollectiveOptions, CollectivePath};
use warplink::device::{DeviceSlice, Priority, ReduceOp, Stream};
use warplink::{Collectives, Communicator, DType, ErrorKind};

/// Elements of a part, and bytes that a launch takes: a few pieces, of which the last is shorter.
const COUNT: usize = 10_007;
const LAUNCH_BYTES: usize = 12 << 10;

fn joined(comm: &Communicator, launch_bytes: Option<usize>) -> Collectives {
    let default = CollectiveOptions::default();
    comm.collectives_with(&CollectiveOptions {
        path: Some(CollectivePath::Direct),
        launch_bytes: launch_bytes.unwrap_or(default.launch_bytes),
        ..default
    })
    .unwrap()
}

/// Memory of `rows` parts, with numbers whose sums depend on the order in which they are added.
fn memory(comm: &Communicator, seed: u64, rows: usize) -> DeviceSlice {
    let mut random = Random::new(seed);
    let values = (0..rows * COUNT).map(|_| (random.next() as i32 as f32) * 1e-3);
    let bytes: Vec<u8> = values.flat_map(f32::to_le_bytes).collect();
    let memory = allocate(comm, bytes.len().max(4));
    comm.device().upload(&memory, &bytes).unwrap();
    memory
}

/// Output of a call, in place or not.
fn result(
    comm: &Communicator,
    collectives: &Collectives,
    (call, in_place): (&Call, bool),
    stream: &Stream,
) -> Vec<u8> {
    let (rank, ranks) = (comm.rank(), comm.world());
    let (input_rows, output_rows) = call.kind.rows(ranks);
    let part = |memory: &DeviceSlice| memory.slice(rank * 4 * COUNT..(rank + 1) * 4 * COUNT);
    let rows = input_rows.max(output_rows);
    let whole = memory(comm, 1 + rank as u64, rows);
    let (output, input) = if !in_place {
        (
            memory(comm, 99, output_rows),
            memory(comm, 1 + rank as u64, input_rows),
        )
    } else if input_rows < output_rows {
        (whole.clone(), part(&whole).unwrap())
    } else if output_rows < input_rows {
        (part(&whole).unwrap(), whole.clone())
    } else {
        (whole.clone(), whole.clone())
    };
    collectives.enqueue(call, &output, &input, stream).unwrap();
    comm.synchronize(stream).unwrap();
    downloaded(comm, &output)
}

#[test]
fn long_calls_give_what_one_launch_gives_bit_for_bit() {
    threads(world(3), |comm| {
        let stream = comm.create_stream(Priority::Normal).unwrap();
        let (whole, cut) = (joined(comm, None), joined(comm, Some(LAUNCH_BYTES)));
        for kind in kinds() {
            let call = Call::new(kind, ReduceOp::Sum, DType::F32, COUNT, 1);
            cut.prepare(&call).unwrap();
            for in_place in [false, true] {
                let [expected, found] = [&whole, &cut]
                    .map(|collectives| result(comm, collectives, (&call, in_place), &stream));
                assert!(expected == found, "{kind}, in place: {in_place}");
            }
        }
    });
}

#[test]
fn a_long_all_to_all_in_place_is_refused_in_a_graph() {
    threads(world(2), |comm| {
        let stream = comm.create_stream(Priority::Normal).unwrap();
        let cut = joined(comm, Some(LAUNCH_BYTES));
        let memory = memory(comm, 1, comm.world());
        stream.begin_capture().unwrap();
        let error = cut.all_to_all(&memory, &memory, &stream).unwrap_err();
        let _ = stream.end_capture();
        assert_error(&error, ErrorKind::Unsupported, &["separate output"]);
        comm.synchronize(&stream).unwrap();
    });
}
