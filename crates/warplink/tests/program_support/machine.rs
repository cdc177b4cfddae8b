//! Made-up machines.

use warplink::program::cost::HardwareModel;

/// A machine that is slower at everything by one factor.
pub(crate) fn slower(model: &HardwareModel, factor: f64) -> HardwareModel {
    let mut slower = model.clone();
    let slow = &mut slower;
    for rate in [
        &mut slow.memory.rate,
        &mut slow.memory.sum_rate,
        &mut slow.link.put_ring,
        &mut slow.link.get_ring,
        &mut slow.link.put_rotated,
        &mut slow.link.get_rotated,
        &mut slow.link.stored,
    ] {
        *rate /= factor;
    }
    for seconds in [
        &mut slow.memory.kernel,
        &mut slow.latency.word,
        &mut slow.latency.more_words,
        &mut slow.latency.kernel_word,
        &mut slow.latency.event,
        &mut slow.latency.launch,
        &mut slow.latency.room,
        &mut slow.latency.captured_copy,
        &mut slow.latency.collective,
        &mut slow.host.matmul,
        &mut slow.host.sum,
        &mut slow.host.copy,
        &mut slow.host.transfer,
        &mut slow.host.word,
        &mut slow.host.event,
        &mut slow.host.collective,
        &mut slow.host.graph,
    ] {
        *seconds *= factor;
    }
    let link = &mut slow.link;
    let curves = [
        &mut slow.memory.copy,
        &mut link.kernel_put,
        &mut link.kernel_get,
        &mut link.kernels_put,
        &mut link.kernels_get,
        &mut link.put,
        &mut link.get,
    ];
    let collectives = slow.collectives.0.iter_mut().map(|times| &mut times.times);
    for curve in curves.into_iter().chain(collectives) {
        curve.0.iter_mut().for_each(|point| point.1 *= factor);
    }
    for grid in &mut slow.gemm.grids {
        grid.seconds.iter_mut().for_each(|time| *time *= factor);
    }
    let mut lanes = model.lanes();
    for rate in [
        &mut lanes.block_own,
        &mut lanes.block_stored,
        &mut lanes.block_loaded,
        &mut lanes.stored,
        &mut lanes.loaded,
    ] {
        *rate /= factor;
    }
    for seconds in [
        &mut lanes.launch,
        &mut lanes.signal,
        &mut lanes.fence,
        &mut lanes.packet,
        &mut lanes.packet_round,
        &mut lanes.load,
        &mut lanes.peer_load,
    ] {
        *seconds *= factor;
    }
    slower.lanes = Some(lanes);
    slower
}
