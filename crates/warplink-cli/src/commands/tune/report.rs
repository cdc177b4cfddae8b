//! Summary of the measurements.

use crate::report::bytes::ByteSize;
use crate::report::table::{Align, Table};
use warplink::program::cost::HardwareModel;

/// Key figures of `model`. Those equal to `assumed`, the previous model, were not measured.
pub(super) fn text(model: &HardwareModel, assumed: &HardwareModel) -> String {
    let columns = [
        ("", Align::Left),
        ("figure", Align::Right),
        ("", Align::Left),
    ];
    let mut table = Table::new(columns);
    for ((name, value), (_, before)) in scalars(model).into_iter().zip(scalars(assumed)) {
        let note = if value == before { "assumed" } else { "" };
        table.row([name.to_owned(), value, note.to_owned()]);
    }
    for (name, value) in series(model) {
        table.row([name, value, String::new()]);
    }
    format!("{}\n\n{table}", model.name)
}

/// Figures of every model, by name.
fn scalars(model: &HardwareModel) -> Vec<(&'static str, String)> {
    let rate = |rate: f64| format!("{:.1} GB/s", rate / 1e9);
    let micros = |seconds: f64| format!("{:.2} us", seconds * 1e6);
    let (link, latency, host) = (&model.link, &model.latency, &model.host);
    let percent = |share: f64| format!("{:.1} %", 100.0 * share);
    let beside = &model.interference;
    let lanes = model.lanes();
    vec![
        ("memory, sum", rate(model.memory.rate)),
        ("put, one pair", rate(link.put.peak())),
        ("get, one pair", rate(link.get.peak())),
        ("put, all at once", rate(link.put_ring)),
        ("get, all at once", rate(link.get_ring)),
        ("put, all to all in turn", rate(link.put_rotated)),
        ("get, all to all in turn", rate(link.get_rotated)),
        ("results stored at peers", rate(link.stored)),
        ("signal", micros(2.0 * latency.word)),
        ("signal between kernels", micros(2.0 * latency.kernel_word)),
        ("event", micros(latency.event)),
        ("kernel that does nothing", micros(model.memory.kernel)),
        ("kernel behind a word", micros(latency.launch)),
        ("more for a copy in a graph", micros(latency.captured_copy)),
        ("more for a single collective", micros(latency.collective)),
        ("host, a matmul", micros(host.matmul)),
        ("host, a transfer", micros(host.transfer)),
        ("host, a wait", micros(host.word)),
        ("host, a collective", micros(host.collective)),
        ("matmul beside a put", percent(beside.matmul_beside_put)),
        ("matmul beside a get", percent(beside.matmul_beside_get)),
        ("copy beside a matmul", percent(beside.copy_beside_matmul)),
        ("kernel section that does nothing", micros(lanes.launch)),
        ("signal of a lane", micros(lanes.signal)),
        ("more for what was stored before", micros(lanes.fence)),
        ("packet", micros(lanes.packet)),
        ("round of packets", micros(lanes.packet_round)),
        ("load of a lane", micros(lanes.load)),
        ("load from a peer", micros(lanes.peer_load)),
        ("lane, own memory", rate(lanes.block_own)),
        ("lane, stored at peers", rate(lanes.block_stored)),
        ("lane, loaded from peers", rate(lanes.block_loaded)),
        ("lanes, stored at peers", rate(lanes.stored)),
        ("lanes, loaded from peers", rate(lanes.loaded)),
    ]
}

/// Measured algorithms, matmuls and vendor collectives, by name.
fn series(model: &HardwareModel) -> Vec<(String, String)> {
    let micros = |seconds: f64| format!("{:.2} us", seconds * 1e6);
    let mut rows = Vec::new();
    for measured in &model.algorithms {
        let limits = measured.limits.iter();
        let limits: Vec<String> = limits
            .map(|(bytes, name)| format!("{name} to {}", ByteSize(*bytes)))
            .collect();
        let elements = match measured.element_bytes {
            None | Some(1) => String::new(),
            Some(bytes) => format!(", elements of {}", ByteSize(bytes as u64)),
        };
        let name = format!("{}{elements}", measured.collective);
        rows.push((name, limits.join(", ")));
    }
    for grid in &model.gemm.grids {
        let last = |sizes: &[usize]| sizes.last().copied().unwrap_or(1);
        let (m, k, n) = (last(&grid.m), last(&grid.k), last(&grid.n));
        let seconds = grid.seconds.last().copied().unwrap_or(f64::NAN);
        let flops = 2.0 * m as f64 * k as f64 * n as f64 / seconds / 1e12;
        let name = format!("{}, {m} x {k} x {n}", grid.dtype);
        rows.push((name, format!("{flops:.2} TFLOP/s")));
    }
    for times in model
        .collectives
        .0
        .iter()
        .filter(|times| times.world == model.device.ranks)
    {
        for (bytes, seconds) in [times.times.0.first(), times.times.0.last()]
            .into_iter()
            .flatten()
        {
            let name = format!("{} of {}", times.name, ByteSize(*bytes));
            rows.push((name, micros(*seconds)));
        }
    }
    rows
}
