//! What the cost model takes a device for.

use crate::device::DeviceKind;
use crate::program::lower::Machine;

/// Measurements of a machine with devices of `kind`. They need not be right: what counts for the
/// choice is how the rates compare.
pub fn machine_of(kind: DeviceKind) -> Machine {
    match kind {
        DeviceKind::Cuda => Machine::h200(),
        // Two processors and their memory, which copies and products share.
        DeviceKind::Host => Machine {
            name: "processors".to_owned(),
            flops: 60e9,
            flops_f32: 60e9,
            multiprocessors: 1,
            tile: (16, 16),
            memory: 10e9,
            ring_put: 5e9,
            ring_get: 5e9,
            rotated_put: 5e9,
            rotated_get: 5e9,
            stored: 5e9,
            collective: 2.5e9,
            signal: 20e-6,
            collective_latency: 100e-6,
            launch: 5e-6,
        },
    }
}
