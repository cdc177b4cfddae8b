//! Every collective on memory of every kind.

use crate::common::{allocate, share_gpus, threads_with, world, worlds};
use crate::direct::{check_soon, direct};
use crate::expected::{Case, Made, Random, kinds};
use crate::scaled::unhurried;
use std::sync::Arc;
use std::time::Instant;
use warplink::collective::CollectiveKind;
use warplink::device::{AllocationKind, DeviceSlice, Priority, Stream};
use warplink::memory::Region;
use warplink::{Collectives, Communicator};

/// Bytes of a long part, of which all ranks together have some MiB.
const LONG: usize = 768 << 10;

/// Memory of one kind, and what holds it.
struct Memory {
    name: &'static str,
    slice: DeviceSlice,
    _region: Option<Region>,
}

/// The device's own, the middle of an allocation, a region, somebody else's that stays lent, and virtual memory where there
/// is any.
fn every_memory(comm: &Communicator, bytes: usize) -> Vec<Memory> {
    let device = comm.device();
    let own = |more: usize| allocate(comm, bytes + more);
    let (region, owner) = (comm.alloc(bytes).unwrap(), own(4096));
    // SAFETY: the owner is held as long as the view, and only collectives access it.
    let lent = unsafe { device.borrow(owner.address() + 256, bytes, Arc::new(owner.clone())) };
    let mut all = vec![
        ("own", own(0)),
        ("middle", own(4096).slice(512..512 + bytes).unwrap()),
        ("lent", lent.unwrap()),
        ("region", region.memory().clone()),
    ];
    all.extend(
        device
            .allocate(bytes, AllocationKind::Virtual)
            .map(|memory| ("virtual", memory)),
    );
    let mut region = Some(region);
    let memory = all.into_iter().map(|(name, slice)| Memory {
        name,
        slice,
        _region: (name == "region").then(|| region.take()).flatten(),
    });
    memory.collect()
}

/// A call with parts of about `bytes` bytes.
fn case(random: &mut Random, kind: CollectiveKind, bytes: usize, world: usize) -> Case {
    Case::new(
        random.call(kind, world, |dtype, _| (bytes / dtype.size()).max(1)),
        random.next(),
    )
}

/// A case of which all memory starts at multiples of 16 bytes, in place too, so that kernels of the peers reach it.
fn aligned(mut case: Case, in_place: bool) -> Case {
    case.in_place = in_place;
    case.shift = 0;
    case.call.count = case.call.count.next_multiple_of(16);
    case.seed &= !3;
    case
}

/// A case of which none does.
fn unaligned(mut case: Case, in_place: bool) -> Case {
    case.in_place = in_place;
    case.shift = (1 + 2 * (case.seed as usize & 1)) * case.call.dtype.size();
    case
}

/// Makes a call once more, and tells how many lanes went directly.
fn call(comm: &Communicator, collectives: &Collectives, made: &Made, stream: &Stream) -> u64 {
    let before = collectives.direct_lanes().unwrap();
    made.again(comm, collectives, stream).unwrap();
    comm.synchronize(stream).unwrap();
    made.check(comm);
    collectives.direct_lanes().unwrap() - before
}

/// Calls until a call goes directly in all lanes, or twice, where the memory is such that it may never.
fn calls(comm: &Communicator, collectives: &Collectives, case: Case, memory: &Memory) {
    let stream = comm.create_stream(Priority::Normal).unwrap();
    let lanes = collectives.choice(&case.call).unwrap().lanes as u64;
    let bytes = case.memory_bytes(comm.world());
    let slice = memory.slice.slice(0..bytes).unwrap();
    let made = case.place(comm, slice).unwrap();
    // What is stored in place would replace what is still to be sent.
    let stays = case.in_place && case.call.kind == CollectiveKind::AllToAll;
    let started = Instant::now();
    for round in 1.. {
        let went = call(comm, collectives, &made, &stream);
        assert!(went == 0 || !stays, "{}: {case:?}", memory.name);
        if went == lanes || round == 2 && (stays || case.shift != 0) {
            return;
        }
        check_soon(comm, started, (&memory.name, &case));
    }
}

/// Short and of some thousands, in place and not, at any start.
#[test]
fn every_collective_is_right_on_memory_of_every_kind() {
    for ranks in worlds([2, 3]) {
        threads_with(ranks, unhurried, |comm| {
            let collectives = direct(comm);
            let mut random = Random::new(51 + ranks as u64);
            for (number, memory) in every_memory(comm, 256 << 10).iter().enumerate() {
                for (place, kind) in kinds().enumerate() {
                    // Compiling takes long where ranks share a processor.
                    if share_gpus() && (number + place) % 4 != 0 {
                        continue;
                    }
                    for in_place in [false, true] {
                        let (short, longer) = (1 + random.below(300), 1 + random.below(20_000));
                        let [one, other] = [short, longer]
                            .map(|bytes| case(&mut random, kind, bytes, comm.world()));
                        calls(comm, &collectives, aligned(one, in_place), memory);
                        calls(comm, &collectives, unaligned(other, in_place), memory);
                        calls(comm, &collectives, aligned(other, in_place), memory);
                    }
                }
            }
        });
    }
}

/// Some MiB, each collective on some kinds of memory. Of reductions it takes long to tell what they have to give.
#[test]
fn long_collectives_are_right_on_memory_of_every_kind() {
    let ranks = world(3);
    threads_with(ranks, unhurried, |comm| {
        let collectives = direct(comm);
        let mut random = Random::new(61);
        let bytes = (2 * ranks + 1) * LONG;
        for (number, memory) in every_memory(comm, bytes).iter().enumerate() {
            for (place, kind) in kinds().enumerate() {
                let kinds_of_memory = if kind.reduces() { 5 } else { 2 };
                if (place + number) % kinds_of_memory != 0 {
                    continue;
                }
                // Odd tails.
                let long = case(&mut random, kind, LONG - 1000 - 2 * number, comm.world());
                calls(comm, &collectives, aligned(long, place % 2 == 0), memory);
                calls(comm, &collectives, unaligned(long, place % 2 == 1), memory);
            }
        }
    });
}

/// Memory that is allocated for a call and freed after it, often where another was before.
#[test]
fn every_collective_is_right_on_new_memory_for_each_call() {
    for ranks in worlds([2, 3]) {
        threads_with(ranks, unhurried, |comm| {
            let collectives = direct(comm);
            let stream = comm.create_stream(Priority::Normal).unwrap();
            let mut random = Random::new(71 + ranks as u64);
            for (place, kind) in kinds().enumerate() {
                if share_gpus() && place % 4 != 0 {
                    continue;
                }
                for round in 0..8 {
                    let bytes = 1 + random.below([300, 30_000][round % 2]);
                    let one = case(&mut random, kind, bytes, comm.world());
                    let in_place = round % 4 < 2;
                    let one = if round < 6 {
                        aligned(one, in_place)
                    } else {
                        unaligned(one, in_place)
                    };
                    let made = one.run(comm, &collectives, &stream);
                    // Sometimes once more, when it may have become known.
                    if round % 3 == 0 {
                        call(comm, &collectives, &made, &stream);
                    }
                }
            }
        });
    }
}
