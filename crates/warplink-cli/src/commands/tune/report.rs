//! Summary of the measurements.

use crate::report::bytes::ByteSize;
use crate::report::table::{Align, Table};
use warplink::program::cost::HardwareModel;

/// Key figures of `model`. Those equal to `assumed`, the previous model, were not measured.
pub(super) fn text(model: &HardwareModel, assumed: &HardwareModel) -> String {
    let columns = [
        ("measurement", Align::Left),
        ("value", Align::Right),
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
        ("memory bandwidth of a sum", rate(model.memory.rate)),
        ("put, one pair of ranks", rate(link.put.peak())),
        ("get, one pair of ranks", rate(link.get.peak())),
        ("put, all ranks to a neighbour", rate(link.put_ring)),
        ("get, all ranks from a neighbour", rate(link.get_ring)),
        (
            "put, all ranks to each other in turn",
            rate(link.put_rotated),
        ),
        (
            "get, all ranks from each other in turn",
            rate(link.get_rotated),
        ),
        ("matmul results stored to peers", rate(link.stored)),
        // A signal is a write and a wait of a word.
        ("signal between streams", micros(2.0 * latency.word)),
        ("signal between kernels", micros(2.0 * latency.kernel_word)),
        ("event between streams of a rank", micros(latency.event)),
        ("empty kernel", micros(model.memory.kernel)),
        (
            "start of a kernel after a copy, word or event",
            micros(latency.launch),
        ),
        ("extra for a copy in a graph", micros(latency.captured_copy)),
        ("extra for a single collective", micros(latency.collective)),
        ("host, to enqueue a matmul", micros(host.matmul)),
        ("host, to enqueue a transfer", micros(host.transfer)),
        ("host, to enqueue a wait", micros(host.word)),
        ("host, to enqueue a collective", micros(host.collective)),
        (
            "speed of a matmul during a put",
            percent(beside.matmul_beside_put),
        ),
        (
            "speed of a matmul during a get",
            percent(beside.matmul_beside_get),
        ),
        (
            "speed of a copy during a matmul",
            percent(beside.copy_beside_matmul),
        ),
        ("empty kernel section", micros(lanes.launch)),
        ("lane, signal to a peer", micros(lanes.signal)),
        (
            "lane, extra if it stored to the peer before",
            micros(lanes.fence),
        ),
        ("lane, packet to a peer", micros(lanes.packet)),
        ("lane, round of packets", micros(lanes.packet_round)),
        ("lane, load from own memory", micros(lanes.load)),
        ("lane, load from a peer", micros(lanes.peer_load)),
        ("one lane, own memory", rate(lanes.block_own)),
        ("one lane, stores to peers", rate(lanes.block_stored)),
        ("one lane, loads from peers", rate(lanes.block_loaded)),
        ("all lanes, stores to peers", rate(lanes.stored)),
        ("all lanes, loads from peers", rate(lanes.loaded)),
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
        let name = format!("fastest algorithm of {}{elements}", measured.collective);
        rows.push((name, limits.join(", ")));
    }
    for grid in &model.gemm.grids {
        let last = |sizes: &[usize]| sizes.last().copied().unwrap_or(1);
        let (m, k, n) = (last(&grid.m), last(&grid.k), last(&grid.n));
        let seconds = grid.seconds.last().copied().unwrap_or(f64::NAN);
        let flops = 2.0 * m as f64 * k as f64 * n as f64 / seconds / 1e12;
        let name = format!("matmul of {}, {m} x {k} x {n}", grid.dtype);
        rows.push((name, format!("{flops:.2} TFLOP/s")));
    }
    for times in model
        .collectives
        .0
        .iter()
        // An assumed model may have those of other numbers of ranks as well.
        .filter(|times| times.world == model.device.ranks)
    {
        for (bytes, seconds) in [times.times.0.first(), times.times.0.last()]
            .into_iter()
            .flatten()
        {
            let name = format!("vendor's {} of {}", times.name, ByteSize(*bytes));
            rows.push((name, micros(*seconds)));
        }
    }
    rows
}
