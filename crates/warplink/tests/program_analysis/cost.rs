//! Costs of simple programs on made-up machines, against times worked out by hand.

use warplink::program::cost::collective::{CollectiveTimes, Collectives};
use warplink::program::cost::curve::Curve;
use warplink::program::cost::gemm::{Gemm, Grid};
use warplink::program::cost::model::{
    DeviceMatch, FORMAT, Host, Interference, Latency, Link, Memory, Provenance,
};
use warplink::program::cost::{
    Bound, Cost, HardwareModel, SimulateOptions, Submission, simulate, simulate_with,
};
use warplink::program::{Parameters, Program, RankProgram, unroll, verify};
use warplink::{DType, ErrorKind};

/// A machine on which everything takes a nanosecond for each byte or each multiplication, and
/// nothing else takes any time. Ten multiprocessors compute an element of a result each.
pub(crate) fn machine() -> HardwareModel {
    let byte = Curve(vec![(1, 1e-9)]);
    let grid = Grid {
        dtype: DType::F16,
        aligned: true,
        m: vec![1],
        k: vec![1],
        n: vec![1],
        seconds: vec![1e-9],
    };
    let times = |name: &str| CollectiveTimes {
        name: name.to_owned(),
        world: 2,
        times: byte.clone(),
    };
    HardwareModel {
        format: FORMAT,
        name: "made up".to_owned(),
        device: DeviceMatch {
            kind: "none".to_owned(),
            model: String::new(),
            ranks: 2,
            topology: String::new(),
            multiprocessors: 10,
            link_rate: 0.0,
            shared: false,
        },
        source: Provenance::default(),
        uncertainty: 1.0,
        memory: Memory {
            rate: 1e12,
            sum_rate: 1e12,
            kernel: 0.0,
            copy: byte.clone(),
            copy_occupancy: 0.0,
            sum_occupancy: 0.0,
        },
        gemm: Gemm {
            tile: (1, 1),
            smallest_tile: (1, 1),
            tail_filled: 1.0,
            tile_sharers: 1.0,
            grids: vec![grid],
        },
        link: Link {
            kernel_limit: 0,
            kernel_put: byte.clone(),
            kernel_get: byte.clone(),
            put: byte.clone(),
            get: byte.clone(),
            put_ring: 1e9,
            get_ring: 1e9,
            put_rotated: 1e9,
            get_rotated: 1e9,
            stored: 1e9,
            stored_exposed: 0.5,
            ..Link::default()
        },
        latency: Latency::default(),
        host: Host::default(),
        interference: Interference::default(),
        collectives: Collectives(vec![times("all_gather"), times("exchange")]),
        lanes: None,
        algorithms: Vec::new(),
    }
}

fn ranks(body: &str, world: usize) -> Vec<RankProgram> {
    let text = format!("program test() {{\n{body}\n}}\n");
    let program = Program::parse_text(&text).unwrap();
    verify(&program, world, 2, &Parameters::new()).unwrap();
    unrolled(&program, world)
}

fn unrolled(program: &Program, world: usize) -> Vec<RankProgram> {
    let rank = |rank| unroll(program, rank, world, 2, &Parameters::new()).unwrap();
    (0..world).map(rank).collect()
}

fn cost(body: &str, world: usize, model: &HardwareModel) -> Cost {
    simulate(&ranks(body, world), model).unwrap()
}

/// Fails unless `seconds` are `nanoseconds` nanoseconds.
#[track_caller]
pub(crate) fn takes(seconds: f64, nanoseconds: f64) {
    let got = seconds * 1e9;
    assert!(
        (got - nanoseconds).abs() < 1e-3,
        "{got} ns, not {nanoseconds}"
    );
}

const OPERANDS: &str = "
    input X: f16[5, 100]
    input Y: f16[100, 2]
    output P: f16[5, 2]
    output Q: f16[5, 2]
    input D: u8[3000]
    allocate E: u8[3000]
";

#[test]
fn operations_of_one_stream_follow_one_another() {
    let body = format!("{OPERANDS} P = matmul(X, Y)\n E = copy(D)\n Q = matmul(X, Y)");
    let cost = cost(&body, 1, &machine());
    takes(cost.seconds, 1000.0 + 3000.0 + 1000.0);
    takes(cost.critical.of_bound(Bound::Matmul), 2000.0);
    takes(cost.critical.seconds(), 5000.0);
    assert_eq!(cost.bound, Bound::Memory);
    takes(cost.busy[0].matmul, 2000.0);
}

const FORK: &str = "
    get_stream main
    set_stream pool(0)
    synchronize main
    set_stream pool(1)
    synchronize main
";

const JOIN: &str = "
    set_stream main
    synchronize pool(0)
    synchronize pool(1)
";

fn on_two_streams(first: &str, second: &str) -> String {
    format!(
        "{OPERANDS} {FORK} set_stream pool(0)\n {first}\n set_stream pool(1)\n {second}\n {JOIN}"
    )
}

#[test]
fn two_streams_overlap() {
    let body = on_two_streams("P = matmul(X, Y)", "E = copy(D)\n Q = matmul(X, Y)");
    let mut model = machine();
    takes(cost(&body, 1, &model).seconds, 3000.0 + 1000.0);
    // One event before and one or two behind.
    model.latency.event = 100e-9;
    takes(cost(&body, 1, &model).seconds, 3000.0 + 1000.0 + 200.0);
}

#[test]
fn matmuls_share_the_multiprocessors() {
    // Ten elements fill all ten: the second waits.
    let full = on_two_streams("P = matmul(X, Y)", "Q = matmul(X, Y)");
    takes(cost(&full, 1, &machine()).seconds, 2000.0);
    // Ten of twenty: they run side by side.
    let mut model = machine();
    model.device.multiprocessors = 20;
    takes(cost(&full, 1, &model).seconds, 1000.0);
    // Ten of fifteen leave half of what the second needs until the first is done.
    model.device.multiprocessors = 15;
    takes(cost(&full, 1, &model).seconds, 1000.0 + 500.0);
}

const RING: &str = "
    input A: u8[1000]
    output B: u8[1000]
    share {
        give = send A to (rank + 1) % world via put
        take = receive B from (rank - 1) % world via put
    }
    post give, take
    wait give, take
";

#[test]
fn a_ring_is_bound_by_the_link() {
    let mut model = machine();
    let cost_of = |model: &HardwareModel| cost(RING, 4, model);
    let ring = cost_of(&model);
    takes(ring.seconds, 1000.0);
    assert!(ring.symmetric);
    assert_eq!(ring.bound, Bound::Link);
    takes(ring.busy[0].egress, 1000.0);
    // Out and in at once are slower than either alone.
    model.link.put_ring = 0.8e9;
    takes(cost_of(&model).seconds, 1250.0);
}

#[test]
fn two_puts_into_one_rank_share_its_link() {
    let body = "
        input A: u8[1000]
        output B: u8[2, 1000]
        share {
            if rank == 0 {
                one = receive B[0] from 1 via put
                two = receive B[1] from 2 via put
            } else {
                give = send A to 0 via put
            }
        }
        if rank == 0 {
            post one, two
            wait one, two
        } else {
            post give
            wait give
            B[0] = copy(A)
            B[1] = copy(A)
        }
    ";
    let cost = cost(body, 3, &machine());
    assert!(!cost.symmetric);
    // Both puts take twice as long; then two copies.
    takes(cost.seconds, 2000.0 + 2000.0);
    takes(cost.busy[0].ingress, 2000.0);
    takes(cost.busy[1].egress, 1000.0);
}

/// Rank 1 multiplies and sends; rank 0 waits for it and multiplies.
const HANDOVER: &str = "
    input X: f16[5, 100]
    input Y: f16[100, 2]
    allocate S: f16[5, 2]
    allocate R: f16[5, 2]
    output P: f16[5, 2]
    share {
        if rank == 0 {
            take = receive R from 1 via put
        } else {
            give = send S to 0 via put
        }
    }
    if rank == 0 {
        post take
        wait take
        P = copy(R)
    } else {
        S = matmul(X, Y)
        post give
        wait give
        P = copy(S)
    }
";

#[test]
fn a_wait_ends_when_the_peer_has_put() {
    let mut model = machine();
    takes(cost(HANDOVER, 2, &model).seconds, 1000.0 + 20.0 + 20.0);
    // The sender waits for the word of the receiver and writes one; the receiver waits for that.
    model.latency.word = 100e-9;
    let cost = cost(HANDOVER, 2, &model);
    takes(cost.seconds, 1000.0 + 100.0 + 20.0 + 100.0 + 100.0 + 20.0);
    takes(cost.critical.of_bound(Bound::Latency), 300.0);
}

#[test]
fn a_small_transfer_is_one_kernel() {
    let mut model = machine();
    model.link.kernel_limit = 4096;
    model.link.kernel_put = Curve(vec![(4096, 2e-6)]);
    model.latency.word = 400e-9;
    model.latency.kernel_word = 100e-9;
    model.latency.launch = 50e-9;
    // The kernel finds the receiver's word, copies, and writes; the receiver's stream waits. The
    // first kernel of the sender follows its matmul at once.
    takes(
        cost(HANDOVER, 2, &model).seconds,
        1000.0 + 100.0 + 2000.0 + 100.0 + 400.0 + 20.0,
    );
}

/// Where nothing multiplies, kernels at both ends do what the model says that they do faster.
#[test]
fn a_transfer_has_kernels_at_both_ends_where_nothing_multiplies() {
    let mut model = machine();
    model.link.kernels.limit = 20;
    model.link.kernels_put = Curve(vec![(20, 2e-6)]);
    model.latency.word = 400e-9;
    model.latency.launch = 50e-9;
    let copied = HANDOVER.replace("S = matmul(X, Y)", "S = copy(Z)");
    let copied = copied.replace(
        "input Y: f16[100, 2]",
        "input Y: f16[100, 2]\n input Z: f16[5, 2]",
    );
    for packet_limit in [0, 20] {
        model.link.kernels.packet_limit = packet_limit;
        // The kernel starts behind a copy; no words are waited for in a stream.
        let transfer = 20.0 + 50.0 + 2000.0;
        takes(cost(&copied, 2, &model).seconds, transfer + 20.0);
    }
    // Longer ones go by the copy engine behind a word of the receiver, between two words, and are waited
    // for; and all do beside matmuls.
    model.link.kernels.limit = 19;
    let engine = 400.0 + 400.0 + 20.0 + 400.0 + 400.0;
    takes(cost(&copied, 2, &model).seconds, engine + 20.0);
    let multiplied = cost(HANDOVER, 2, &model).seconds;
    model.link.kernels.limit = 20;
    takes(cost(HANDOVER, 2, &model).seconds, multiplied * 1e9);
}

#[test]
fn a_collective_waits_for_the_last_and_takes_the_time_of_the_table() {
    let body = "
        input X: f16[5, 100]
        input Y: f16[100, 2]
        allocate S: f16[5, 2]
        output G: f16[10, 2]
        S = matmul(X, Y)
        if rank == 1 {
            S = matmul(X, Y)
        }
        G = all_gather(S)
    ";
    let cost = cost(body, 2, &machine());
    takes(cost.seconds, 2000.0 + 40.0);
    takes(cost.critical.of_bound(Bound::Collective), 40.0);
}

#[test]
fn the_host_holds_small_operations_up_unless_they_are_captured() {
    let body = format!("{OPERANDS} P = matmul(X, Y)\n Q = matmul(X, Y)\n E = copy(D)");
    let mut model = machine();
    model.host.matmul = 5e-6;
    model.host.copy = 1e-6;
    model.host.graph = 2e-6;
    let ranks = ranks(&body, 1);
    let eager = simulate(&ranks, &model).unwrap();
    takes(eager.seconds, 11_000.0 + 3000.0);
    assert_eq!(eager.bound, Bound::Host);
    takes(eager.busy[0].host, 11_000.0);
    let options = SimulateOptions {
        submission: Submission::Captured,
        timeline: true,
    };
    let captured = simulate_with(&ranks, &model, options).unwrap();
    takes(captured.seconds, 2000.0 + 5000.0);
    let spans: Vec<(usize, f64, f64)> = captured
        .timeline
        .iter()
        .map(|span| (span.operation, span.start, span.end))
        .collect();
    assert_eq!(spans.len(), 3);
    takes(spans[2].1, 4000.0);
    takes(spans[2].2, 7000.0);
}

#[test]
fn work_beside_other_work_is_slower_as_the_model_says() {
    let body = "
        input A: u8[1000]
        output B: u8[1000]
        input X: f16[5, 100]
        input Y: f16[100, 2]
        output P: f16[5, 2]
        share {
            give = send A to (rank + 1) % world via put
            take = receive B from (rank - 1) % world via put
        }
        get_stream main
        set_stream pool(0)
        synchronize main
        post give, take
        set_stream main
        P = matmul(X, Y)
        synchronize pool(0)
        wait give, take
    ";
    let mut model = machine();
    takes(cost(body, 2, &model).seconds, 1000.0);
    model.interference.matmul_beside_put = 0.5;
    // Half done when the put is; then at full speed.
    takes(cost(body, 2, &model).seconds, 1500.0);
}

#[test]
fn results_stored_at_peers_take_the_time_of_the_link_and_a_share_of_their_own() {
    let body = "
        input X: f16[5, 100]
        input Y: f16[100, 2]
        allocate S: f16[5, 2]
        output R: f16[5, 2]
        share {
            give = send S to (rank + 1) % world via put
            take = receive R from (rank - 1) % world via put
        }
        post take
        post give = matmul(X, Y)
        wait give, take
    ";
    let mut model = machine();
    model.link.stored = 0.02e9;
    takes(cost(body, 2, &model).seconds, 20.0 / 0.02 + 500.0);
}

#[test]
fn programs_that_do_not_finish_are_refused() {
    let program = |body: &str| {
        let text = format!("program test() {{\n{body}\n}}\n");
        unrolled(&Program::parse_text(&text).unwrap(), 2)
    };
    let alone = program(
        "input A: u8[8]\n output B: u8[8]\n share {\n give = send A to (rank + 1) % world via put\n }\n post give\n wait give\n B = copy(A)",
    );
    let error = simulate(&alone, &machine()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Verification);
    let circle = program(
        "input A: u8[8]\n output B: u8[8]\n share {\n give = send A to (rank + 1) % world via put\n take = receive B from (rank - 1) % world via put\n }\n post give\n post take\n wait give, take",
    );
    let error = simulate(&circle, &machine()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Verification);
    assert!(error.to_string().contains("never finish"), "{error}");
}

#[test]
fn a_cost_explains_itself() {
    let text = cost(RING, 4, &machine()).to_string();
    assert!(
        text.starts_with("1.0 us on made up, bound by link\n"),
        "{text}"
    );
    assert!(text.contains("busy on each rank: "), "{text}");
}

/// Pairs of four ranks take as long as two ranks alone, one list after the other.
#[test]
fn a_collective_among_some_takes_the_time_of_so_many() {
    let body = |list: &str, times: usize| {
        format!(
            "input A: u8[1000]\n output G: u8[2, 1000]\n let pair = [{list}]\n {}",
            "G = all_gather(A) among pair\n ".repeat(times)
        )
    };
    let two = |times| cost(&body("0, 1", times), 2, &machine()).seconds * 1e9;
    let four = |times| {
        let row = body("rank / 2 * 2, rank / 2 * 2 + 1", times);
        cost(&row, 4, &machine()).seconds
    };
    takes(four(1), two(1));
    takes(four(3), two(3));
    // On all four ranks, three quarters of what is gathered cross the link, and not half.
    let all = "input A: u8[500]\n output G: u8[4, 500]\n G = all_gather(A)";
    assert!(cost(all, 4, &machine()).seconds > four(1));
}
