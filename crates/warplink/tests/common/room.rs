//! How many ranks, streams and cases the devices have room for.

use super::{is_rank, kind, number_from_env};
use warplink::DeviceKind;
use warplink::device;

/// How many ranks share a GPU; above 1 where `WARPLINK_TEST_RANKS_PER_GPU` says so and CUDA's
/// multi-process service runs.
pub(super) fn ranks_per_gpu() -> usize {
    std::env::var("WARPLINK_TEST_RANKS_PER_GPU").map_or(1, |ranks| ranks.parse().unwrap())
}

/// Whether several ranks have the same GPU.
pub fn share_gpus() -> bool {
    kind() == DeviceKind::Cuda && ranks_per_gpu() > 1
}

/// `wanted` ranks, or as many as the GPUs have room for. `WARPLINK_TEST_MAX_RANKS` bounds them on the host device, to
/// see that tests do on few GPUs what they should.
pub fn world(wanted: usize) -> usize {
    match kind() {
        DeviceKind::Host => {
            let most = std::env::var("WARPLINK_TEST_MAX_RANKS");
            most.map_or(wanted, |most| wanted.min(most.parse().unwrap()))
        }
        // A rank may see one GPU alone.
        DeviceKind::Cuda if is_rank() => std::env::var("WARPLINK_WORLD").unwrap().parse().unwrap(),
        DeviceKind::Cuda => wanted.min(gpus() * ranks_per_gpu()),
    }
}

/// So many ranks, if the devices have room for all of them.
pub fn at_least(ranks: usize) -> Option<usize> {
    Some(world(ranks)).filter(|room| *room == ranks)
}

/// The [`world`] of `wanted`, where it has more than one rank.
pub fn several(wanted: usize) -> Option<usize> {
    Some(world(wanted)).filter(|ranks| *ranks > 1)
}

/// The [`world`] of each of `wanted`, but none twice in a row.
pub fn worlds(wanted: impl IntoIterator<Item = usize>) -> Vec<usize> {
    let mut worlds: Vec<usize> = wanted.into_iter().map(world).collect();
    if !is_rank() {
        // A rank that is a process knows its own world alone, and takes part in all groups of its test.
        worlds.dedup();
    }
    worlds
}

/// Whether to run case `number` of a test whose cases all compile kernels of their own: on GPUs, where that takes seconds
/// each, every `few`-th, or as `WARPLINK_TEST_EVERY` says.
pub fn runs_case(number: usize, few: usize) -> bool {
    let every = number_from_env("WARPLINK_TEST_EVERY").map_or(few, |every| every as usize);
    kind() == DeviceKind::Host || number.is_multiple_of(every)
}

pub(super) fn gpus() -> usize {
    device::count(DeviceKind::Cuda).unwrap()
}

/// How many of `wanted` streams may wait at a time, and what they wait for goes on: streams of a GPU share its queues, of
/// which the library needs some as well.
pub fn waiting_streams(wanted: usize) -> usize {
    if kind() == DeviceKind::Host {
        return wanted;
    }
    let queues = std::env::var("CUDA_DEVICE_MAX_CONNECTIONS");
    let queues: usize = queues.map_or(8, |queues| queues.parse().unwrap());
    wanted.min((queues / 2).max(2))
}

/// The number of the device of a rank that is a thread.
pub fn device_of_thread(rank: usize) -> usize {
    match kind() {
        DeviceKind::Host => rank,
        DeviceKind::Cuda => rank % gpus(),
    }
}
