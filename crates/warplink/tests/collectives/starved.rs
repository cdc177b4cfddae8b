//! Calls while other kernels keep most multiprocessors: a user's that waits for these calls, and the vendor library's, which
//! another rank enqueues in another order.

use crate::common::{WaitingKernel, share_gpus, threads, world};
use crate::data::library;
use crate::launches::{download, integers, memory, sum, upload};
use crate::layer::{Choices, Layer, inputs};
use crate::planned::{Planned, enqueue, held};
use std::rc::Rc;
use std::time::Duration;
use warplink::collective::{Collectives, ExpertOptions};
use warplink::device::{AllocationKind, Priority, ReduceOp, Stream};
use warplink::{Communicator, DType};

/// Multiprocessors that a user's kernel leaves.
const LEFT: usize = 32;

/// Dynamic shared memory of a block that leaves none on a multiprocessor of sm_90 for another.
const ALL_SHARED: u32 = 227 << 10;

/// The word when the calls are over: a byte, four times.
const OVER: u8 = 1;

/// A call of every rank, on fresh data, and what compares its result.
struct Step<'a> {
    what: String,
    enqueue: Box<dyn Fn(&Stream) + 'a>,
    check: Box<dyn Fn() + 'a>,
}

/// Sums, messages, and the two steps of experts, short and long.
fn steps<'a>(comm: &'a Communicator, collectives: &'a Collectives, round: usize) -> Vec<Step<'a>> {
    let (rank, ranks) = (comm.rank(), comm.world());
    let mut steps = Vec::new();
    for count in [256, 1 << 18, 1 << 21] {
        let buffer = memory(comm, count);
        upload(comm, &buffer, &integers(rank, round, count));
        let result = buffer.clone();
        steps.push(Step {
            what: format!("all-reduce of {count}"),
            enqueue: Box::new(move |stream| {
                collectives
                    .all_reduce(&buffer, &buffer, DType::I32, ReduceOp::Sum, stream)
                    .unwrap();
            }),
            check: Box::new(move || {
                assert!(download(comm, &result) == sum(ranks, round, count));
            }),
        });
    }
    for bytes in [1000, 4 << 20] {
        let message = |pair| Planned {
            from: pair / ranks,
            to: pair % ranks,
            bytes,
            seed: (1000 * round + pair) as u64,
        };
        let plan: Vec<_> = (0..ranks * ranks).map(message).collect();
        let mut ends = held(comm, &plan, 3);
        // All ranks name what they send first, so that lanes in this order would fill the space with sends alone.
        ends.sort_by_key(|end| !end.sends);
        let ends = Rc::new(ends);
        let received = ends.clone();
        steps.push(Step {
            what: format!("messages of {bytes} bytes"),
            enqueue: Box::new(move |stream| enqueue(collectives, &ends, stream).unwrap()),
            check: Box::new(move || received.iter().for_each(|end| end.check(comm))),
        });
    }
    let options = ExpertOptions {
        experts: 4 * ranks,
        top_k: 2,
        max_tokens: 200,
        max_rows: None,
        elements: 512,
        dtype: DType::BF16,
        ..ExpertOptions::default()
    };
    let experts = collectives.experts(&options).unwrap();
    let layer = Rc::new(Layer::new(comm, experts, options));
    let all = Rc::new(inputs(&options, Choices::Random, ranks, round));
    layer.clear();
    layer.fill(&all[rank]);
    let tokens = layer.tokens_of(&all[rank]);
    for combines in [false, true] {
        let (own, result, expected) = (layer.clone(), layer.clone(), all.clone());
        steps.push(Step {
            what: format!("experts, combine: {combines}"),
            enqueue: Box::new(move |stream| {
                if combines {
                    own.combine(tokens, stream).unwrap();
                } else {
                    own.dispatch(tokens, stream).unwrap();
                }
            }),
            check: Box::new(move || {
                if combines {
                    result.check(&expected[rank]);
                } else {
                    result.work(&expected);
                }
            }),
        });
    }
    steps
}

/// Makes every call once: loading its code would wait for kernels that run.
fn prepare(comm: &Communicator, collectives: &Collectives, stream: &Stream) {
    for step in steps(comm, collectives, 0) {
        (step.enqueue)(stream);
        comm.synchronize(stream).unwrap();
        (step.check)();
    }
}

/// A user's kernel that holds all but 32 multiprocessors until the calls behind it are over.
#[test]
fn calls_get_through_beside_a_kernel_that_waits_for_them() {
    threads(world(2), |comm| {
        let collectives = comm.collectives().unwrap();
        let device = comm.device();
        let [kept, calls] = [(); 2].map(|()| comm.create_stream(Priority::Normal).unwrap());
        let blocks = device.properties().multiprocessors.saturating_sub(LEFT);
        let waiting = WaitingKernel::new(device, blocks as u32, 1024, ALL_SHARED);
        let word = device.allocate(4, AllocationKind::Plain).unwrap();
        // Two such kernels of a GPU would leave nothing.
        let holds = !share_gpus() || comm.rank() == 0;
        prepare(comm, &collectives, &calls);
        for step in steps(comm, &collectives, 1) {
            device.upload(&word, &[0; 4]).unwrap();
            if holds {
                waiting.start(&kept, &word, u32::from_le_bytes([OVER; 4]));
            }
            // The kernels of all ranks hold their multiprocessors before anything is enqueued.
            std::thread::sleep(Duration::from_millis(50));
            comm.barrier().unwrap();
            (step.enqueue)(&calls);
            calls.fill(&word, OVER).unwrap();
            comm.synchronize(&calls).unwrap();
            comm.synchronize(&kept).unwrap();
            if holds {
                waiting.assert_ended(&step.what);
            }
            (step.check)();
        }
    });
}

/// Every other rank enqueues the vendor library's call first, on another stream and for another communicator.
#[test]
fn calls_and_those_of_the_vendors_library_start_in_any_order() {
    threads(world(2), |comm| {
        let other = comm.split(0, 0).unwrap();
        let Some(library) = library(&other) else {
            return;
        };
        let collectives = comm.collectives().unwrap();
        let [ours, theirs] = [(); 2].map(|()| comm.create_stream(Priority::Normal).unwrap());
        let (count, ranks) = (1 << 18, comm.world());
        let buffer = memory(comm, count);
        let sums = || {
            library
                .all_reduce(&buffer, &buffer, DType::I32, ReduceOp::Sum, &theirs)
                .unwrap();
        };
        sums();
        comm.synchronize(&theirs).unwrap();
        prepare(comm, &collectives, &ours);
        for round in 1..3 {
            for step in steps(comm, &collectives, round) {
                upload(comm, &buffer, &integers(comm.rank(), round, count));
                comm.barrier().unwrap();
                if comm.rank().is_multiple_of(2) {
                    (step.enqueue)(&ours);
                    sums();
                } else {
                    sums();
                    // Long enough for the library's kernel to wait for the other rank's.
                    std::thread::sleep(Duration::from_millis(5));
                    (step.enqueue)(&ours);
                }
                comm.synchronize(&ours).unwrap();
                comm.synchronize(&theirs).unwrap();
                (step.check)();
                assert!(
                    download(comm, &buffer) == sum(ranks, round, count),
                    "{}",
                    step.what
                );
            }
        }
        other.close().unwrap();
    });
}
