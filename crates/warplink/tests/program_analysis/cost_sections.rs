//! Costs of kernel sections: against times that were recorded on GPUs, and against times worked out by hand.

use super::cost::{machine, takes};
use crate::stopwatch::time_on_processor;
use std::time::Duration;
use warplink::program::cost::find::{all_shipped, shipped};
use warplink::program::cost::lanes::Lanes;
use warplink::program::cost::{
    Bound, Cost, HardwareModel, SimulateOptions, Submission, simulate_with,
};
use warplink::program::{Parameters, Program, RankProgram, unroll, verify};

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

const ONE_SHOT: &str = include_str!("../../../../examples/programs/all_reduce_one_shot.wlp");
const READ: &str = include_str!("../../../../examples/programs/all_reduce_read.wlp");
const PUSHED: &str = include_str!("../../../../examples/programs/all_reduce_pushed.wlp");
const TWO_SHOT: &str = include_str!("../../src/collective/programs/all_reduce_two_shot.wlp");
const CHUNKS: &str = include_str!("../../src/collective/programs/all_reduce_chunks.wlp");

/// Times of an all-reduce of bf16 on two GPUs, of a run in a graph of many.
struct Recorded {
    text: &'static str,
    /// The shapes that were tried, of which the fastest was recorded.
    lanes: &'static [i64],
    threads: &'static [i64],
    chunks: &'static [i64],
    /// Bytes, microseconds, and how far the estimate may be off, in percent.
    times: &'static [(usize, f64, f64)],
}

/// docs/performance.md, "Kernel sections: all-reduce".
const BY_PROGRAMS: [Recorded; 4] = [
    Recorded {
        text: ONE_SHOT,
        lanes: &[4],
        threads: &[512],
        chunks: &[1],
        times: &[
            (KIB, 2.27, 5.0),
            (4 * KIB, 2.41, 5.0),
            (16 * KIB, 2.64, 5.0),
            (64 * KIB, 3.66, 5.0),
            (256 * KIB, 10.07, 5.0),
        ],
    },
    Recorded {
        text: TWO_SHOT,
        lanes: &[8],
        threads: &[512],
        chunks: &[1],
        times: &[
            (16 * KIB, 3.50, 20.0),
            (256 * KIB, 5.31, 12.0),
            (MIB, 16.7, 12.0),
        ],
    },
    Recorded {
        text: READ,
        lanes: &[16],
        threads: &[512],
        chunks: &[1],
        times: &[
            (MIB, 9.72, 10.0),
            (4 * MIB, 19.6, 10.0),
            (16 * MIB, 60.7, 10.0),
            (64 * MIB, 236.0, 10.0),
        ],
    },
    Recorded {
        text: PUSHED,
        lanes: &[128],
        threads: &[1024],
        chunks: &[4],
        // What 131,072 threads at a time cost beside their bytes is not in the model.
        times: &[
            (MIB, 18.7, 45.0),
            (4 * MIB, 27.5, 45.0),
            (64 * MIB, 209.0, 10.0),
            (256 * MIB, 772.0, 10.0),
        ],
    },
];

const LANES: &[i64] = &[16, 64, 128];
const THREADS: &[i64] = &[128, 512];

/// docs/lab-notes.md, "Kernel sections: hand-made kernels of the step functions": the best shape of a sweep.
const BY_HAND: [Recorded; 3] = [
    Recorded {
        text: ONE_SHOT,
        lanes: LANES,
        threads: THREADS,
        chunks: &[1],
        times: &[
            (KIB, 2.11, 10.0),
            (16 * KIB, 2.42, 10.0),
            (64 * KIB, 2.68, 10.0),
            (256 * KIB, 3.77, 10.0),
            (MIB, 8.20, 10.0),
            (4 * MIB, 25.9, 10.0),
        ],
    },
    Recorded {
        text: PUSHED,
        lanes: LANES,
        threads: THREADS,
        chunks: &[1, 2, 8, 16],
        times: &[
            (64 * KIB, 4.20, 15.0),
            (256 * KIB, 4.83, 15.0),
            (MIB, 7.38, 15.0),
            (4 * MIB, 17.7, 15.0),
            (16 * MIB, 57.3, 15.0),
            (64 * MIB, 200.0, 15.0),
            (256 * MIB, 759.0, 15.0),
        ],
    },
    Recorded {
        text: READ,
        lanes: LANES,
        threads: THREADS,
        chunks: &[1],
        times: &[
            (64 * KIB, 5.81, 10.0),
            (256 * KIB, 6.26, 10.0),
            (MIB, 8.49, 10.0),
            (4 * MIB, 17.4, 10.0),
            (16 * MIB, 54.6, 10.0),
            (64 * MIB, 200.0, 10.0),
            (256 * MIB, 785.0, 10.0),
        ],
    },
];

/// A program with any number of lanes, threads and chunks, whatever its text allows, for sums of bf16.
fn any_shape(text: &str) -> Program {
    let line = text
        .lines()
        .find(|line| line.starts_with("program "))
        .unwrap();
    let (_, given) = line.split_once('(').unwrap();
    let names = given.split([',', ')']).map(|parameter| {
        let name = parameter.split('=').next().unwrap();
        name.trim()
    });
    let names: Vec<&str> = names
        .filter(|name| !["", "{", "T", "op", "lanes", "threads", "chunks"].contains(name))
        .collect();
    let open = format!(
        "program any({}, lanes, threads, chunks, T = bf16, op = sum) {{",
        names.join(", ")
    );
    Program::parse_text(&text.replace(line, &open)).unwrap()
}

fn unrolled(program: &Program, world: usize, parameters: &Parameters) -> Vec<RankProgram> {
    let rank = |rank| unroll(program, rank, world, 1, parameters).unwrap();
    (0..world).map(rank).collect()
}

fn shaped(
    program: &Program,
    world: usize,
    n: usize,
    (lanes, threads, chunks): (i64, i64, i64),
) -> Vec<RankProgram> {
    let mut parameters = Parameters::new();
    for parameter in &program.parameters {
        let value = match parameter.name.as_str() {
            "n" => n as i64,
            "lanes" => lanes,
            "threads" => threads,
            "chunks" => chunks,
            "room" => 1 << 28,
            "direct" => 0,
            "T" | "op" => continue,
            // What ranks tell one another.
            _ => 1,
        };
        parameters.insert(parameter.name.as_str(), value);
    }
    unrolled(program, world, &parameters)
}

fn captured(ranks: &[RankProgram], model: &HardwareModel) -> Cost {
    let options = SimulateOptions {
        submission: Submission::Captured,
        timeline: true,
    };
    simulate_with(ranks, model, options).unwrap()
}

#[test]
fn recorded_times_are_met() {
    let model = shipped("h200-2").unwrap();
    let mut wrong = Vec::new();
    for recorded in BY_PROGRAMS.iter().chain(&BY_HAND) {
        let program = any_shape(recorded.text);
        // The lane that meets the other ranks came later.
        let more = i64::from(recorded.text.contains("announce"));
        for &(bytes, micros, percent) in recorded.times {
            let mut least = f64::INFINITY;
            for &lanes in recorded.lanes {
                for &threads in recorded.threads {
                    for &chunks in recorded.chunks {
                        let shape = (lanes + more, threads, chunks);
                        let ranks = shaped(&program, 2, bytes / 2, shape);
                        let cost = captured(&ranks, &model);
                        assert!(cost.symmetric);
                        // A graph of many runs was launched once.
                        least = least.min(1e6 * (cost.seconds - model.host.graph));
                    }
                }
            }
            let off = 100.0 * (least / micros - 1.0);
            let line = recorded.text.lines().next().unwrap();
            let told = format!("{least:.2} for {micros} us ({off:+.0} %): {bytes} bytes, {line}");
            println!("{told}");
            if off.abs() > percent {
                wrong.push(told);
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// A machine on which every figure of lanes can be told from the others in a sum.
fn made_up() -> HardwareModel {
    HardwareModel {
        lanes: Some(Lanes {
            launch: 10_000e-9,
            signal: 1000e-9,
            fence: 200e-9,
            packet: 700e-9,
            packet_round: 20e-9,
            load: 3e-9,
            peer_load: 50e-9,
            block_threads: 64,
            block_own: 8e9,
            block_stored: 4e9,
            block_loaded: 2e9,
            stored: 1e9,
            loaded: 0.5e9,
        }),
        ..machine()
    }
}

fn of_lanes(world: usize, tensors: &str, lanes: usize, threads: usize, body: &str) -> Cost {
    let text = format!(
        "program test() {{\n{tensors}\nkernel lane in 0..{lanes} threads {threads} {{\n{body}\n}}\n}}\n"
    );
    let program = Program::parse_text(&text).unwrap();
    verify(&program, world, 1, &Parameters::new()).unwrap();
    captured(&unrolled(&program, world, &Parameters::new()), &made_up())
}

const TENSORS: &str = "
    input X: u8[6400]
    output Y: u8[6400]
    scratch R: u8[2, 6400]
    scratch P: packets16 u8[2, world, 6400]
";

#[test]
fn a_block_alone_moves_what_it_can() {
    let copy = "Y = copy(X)";
    // Both ways through its own memory, behind one load.
    let cost = of_lanes(1, TENSORS, 1, 64, copy);
    takes(cost.seconds, 10_000.0 + 3.0 + 1600.0);
    assert_eq!(
        (cost.bound, cost.timeline[0].bound),
        (Bound::Latency, Bound::Latency)
    );
    takes(cost.critical.of_bound(Bound::Lanes), 1600.0);
    // Half of the threads take twice as long; more of them, or halves of it on two lanes, do not, or do.
    takes(of_lanes(1, TENSORS, 1, 32, copy).seconds, 10_003.0 + 3200.0);
    takes(
        of_lanes(1, TENSORS, 1, 128, copy).seconds,
        10_003.0 + 1600.0,
    );
    let halves = "Y[lane of 2] = copy(X[lane of 2])";
    takes(
        of_lanes(1, TENSORS, 2, 64, halves).seconds,
        10_003.0 + 800.0,
    );
}

const PUT: &str = "
    put X[lane of 4] to R[epoch % 2][lane of 4] on (rank + 1) % world
    signal (rank + 1) % world
    wait (rank - 1) % world
    Y[lane of 4] = copy(R[epoch % 2][lane of 4])
    barrier
";

#[test]
fn a_put_is_bound_by_the_link_and_its_signal_by_what_was_stored() {
    let cost = of_lanes(3, TENSORS, 4, 64, PUT);
    assert!(cost.symmetric);
    // The second half of the lanes has its turn on the link; then they copy, and wait for one another.
    let put = 3.0 + 6400.0 + 200.0 + 1000.0;
    takes(cost.seconds, 10_000.0 + put + 3.0 + 400.0 + 1000.0);
    takes(cost.critical.of_bound(Bound::Link), 6400.0);
    takes(cost.busy[0].egress, 6400.0);
}

#[test]
fn packets_are_read_while_others_are_on_their_way() {
    let packets = "
        put X to P[epoch % 2][rank] on 1 - rank
        Y = copy(P[epoch % 2][1 - rank])
    ";
    let cost = of_lanes(2, TENSORS, 1, 64, packets);
    // 12,800 bytes on the link; the last one is read when it has come, all others before. A block reads them
    // in 2400, which is more than the 250 of the rounds of its threads.
    takes(cost.seconds, 10_000.0 + 12_800.0 + 2400.0);
    let short = packets.replace(
        "X to P[epoch % 2][rank]",
        "X[0..64] to P[epoch % 2][rank][0..64]",
    );
    let short = short.replace(
        "Y = copy(P[epoch % 2][1 - rank])",
        "Y[0..64] = copy(P[epoch % 2][1 - rank][0..64])\n Y[64..6400] = copy(X[64..6400])",
    );
    let cost = of_lanes(2, TENSORS, 1, 64, &short);
    // 8 packets take an eighth of a round; the last one comes that much later than it would alone.
    let last = 128.0 + 680.0 + 20.0 / 8.0;
    takes(cost.seconds, 10_000.0 + last + 3.0 + 6336.0 / 4.0);
}

#[test]
fn lanes_that_do_different_things_wait_for_one_another() {
    // The root's even lanes put to all others, whose odd ones copy what has come.
    let body = "
        if lane % 2 == 0 {
            if rank == 0 {
                for r in 1..world {
                    put X[lane / 2 of 2] to R[epoch % 2][lane / 2 of 2] on r
                    signal r at lane + 1
                }
            }
            wait (rank + 1) % world
        } else {
            if rank > 0 {
                wait 0
                Y[(lane - 1) / 2 of 2] = copy(R[epoch % 2][(lane - 1) / 2 of 2])
            } else {
                Y[(lane - 1) / 2 of 2] = copy(X[(lane - 1) / 2 of 2])
            }
            signal (rank - 1) % world at lane - 1
        }
    ";
    let cost = of_lanes(3, TENSORS, 4, 64, body);
    assert!(!cost.symmetric);
    // Lane 0 puts to rank 1 while lane 2 waits for the link; with the two signals of each, the link is never idle.
    let puts = 4.0 * 3200.0;
    let last = 3.0 + puts + 200.0 + 1000.0 + 3.0 + 800.0 + 1000.0;
    let got = cost.seconds * 1e9 - 10_000.0;
    assert!(
        (last - 1.0..last + 10.0).contains(&got),
        "{got}, not {last}"
    );
    takes(cost.busy[0].egress, puts);
    takes(cost.busy[1].ingress, 6400.0);
}

/// One lane of rank 1 copies for long, and all wait for it. By what rank 0 does, its lanes are alike.
#[test]
fn a_rank_does_not_stand_for_another_whose_lanes_differ() {
    let copies = "if lane >= 8 - rank { for c in 0..100 { R = copy(X) } }";
    let tensors = "input X: u8[64]\n scratch R: u8[64]";
    let all = 10_000.0 + 100.0 * (3.0 + 64.0 / 4.0);
    let cost = of_lanes(2, tensors, 8, 64, copies);
    assert!(!cost.symmetric);
    takes(cost.seconds, all);
    let cost = of_lanes(2, tensors, 8, 64, &format!("{copies}\n barrier"));
    takes(cost.seconds, all + 1000.0);
}

/// Long loops take as many times longer as they have iterations.
#[test]
fn a_few_iterations_stand_for_all() {
    let program = any_shape(CHUNKS);
    let seconds = |chunks: i64| {
        let elements = 64 * 4 * 1024 * chunks as usize;
        let ranks = shaped(&program, 4, elements, (65, 512, chunks));
        let model = shipped("h200-2").unwrap();
        captured(&ranks, &model).seconds - model.host.graph - model.lanes().launch
    };
    for (fewer, more) in [(8, 16), (16, 160), (16, 1000)] {
        let ratio = seconds(more) / seconds(fewer) / (more as f64 / fewer as f64);
        assert!(
            (0.95..1.05).contains(&ratio),
            "{fewer} and {more} chunks: {ratio}"
        );
    }
}

/// So that a choice can be made at a call: 8 ranks of 128 lanes with a thousand chunks each.
#[test]
fn a_large_launch_is_simulated_quickly() {
    let program = any_shape(CHUNKS);
    let model = shipped("h200-8").unwrap();
    let ranks = shaped(&program, 8, 1 << 30, (129, 512, 1000));
    let mut least = Duration::MAX;
    for _ in 0..5 {
        let (cost, took) = time_on_processor(|| captured(&ranks, &model));
        least = least.min(took);
        assert!(cost.symmetric && cost.seconds > 1e-3, "{cost}");
    }
    // Ten times what it takes without other work, in tests that are not optimized.
    assert!(least < Duration::from_millis(300), "{least:?}");
}

#[test]
fn models_without_figures_of_lanes_have_guesses() {
    for model in all_shipped() {
        let mut older = (**model).clone();
        older.lanes = None;
        let read = HardwareModel::from_json(&older.to_json().unwrap()).unwrap();
        let told = HardwareModel {
            lanes: Some(read.lanes()),
            ..older.clone()
        };
        assert!(
            HardwareModel::from_json(&told.to_json().unwrap()).is_ok(),
            "{told:?}"
        );
        let program = any_shape(ONE_SHOT);
        let seconds = |n| captured(&shaped(&program, 2, n, (64, 512, 1)), &older).seconds;
        assert!(seconds(64) > 0.0 && seconds(64) <= seconds(1 << 16));
        assert!(seconds(1 << 16) < seconds(1 << 22));
        for (name, change) in CHANGES {
            let mut wrong = told.clone();
            change(wrong.lanes.as_mut().unwrap());
            let error = HardwareModel::from_json(&wrong.to_json().unwrap()).unwrap_err();
            assert!(error.to_string().contains(name), "{error}");
        }
    }
}

/// Invalid figures of lanes in a model.
type Change = (&'static str, fn(&mut Lanes));

const CHANGES: [Change; 3] = [
    ("lanes.packet", |lanes| lanes.packet = -1.0),
    ("lanes.stored", |lanes| lanes.stored = 0.0),
    ("lanes.block_threads", |lanes| lanes.block_threads = 0),
];
