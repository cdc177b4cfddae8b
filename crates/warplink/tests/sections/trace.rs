//! Traces of kernels: every step of every lane.

use crate::common::{encode, threads, world};
use crate::examples::{example, parameters};
use warplink::device::{AllocationKind, Priority, ReduceOp};
use warplink::program::{Bindings, PrepareOptions, TraceSpan};
use warplink::{Communicator, DType};

const N: usize = 1000;

/// Runs an example, traces it and runs it again, each time with the right sum; the trace on rank 0.
fn traced(comm: &Communicator, name: &str) -> Option<Vec<TraceSpan>> {
    let program = example(name);
    let parameters = parameters(&program, N as i64, DType::F32, ReduceOp::Sum);
    let options = PrepareOptions {
        streams: 1,
        ..PrepareOptions::default()
    };
    let executor = comm.executor();
    let prepared = executor.prepare(&program, &parameters, options).unwrap();
    let device = comm.device();
    let [x, y] = [(); 2].map(|()| device.allocate(4 * N, AllocationKind::Plain).unwrap());
    let mut bindings = Bindings::new();
    bindings.insert("X".to_owned(), x.clone());
    bindings.insert("Y".to_owned(), y.clone());
    let stream = comm.create_stream(Priority::Normal).unwrap();
    let operations = prepared.rank_program().operations.clone();
    let plan = prepared.bind(&bindings).unwrap();
    let mut trace = None;
    for round in 0..4 {
        let value = |rank: usize| (10 * round + rank) as f64;
        let own = vec![value(comm.rank()); N];
        device.upload(&x, &encode(DType::F32, &own)).unwrap();
        device.upload(&y, &vec![0xff; 4 * N]).unwrap();
        if round == 2 {
            trace = plan.trace(&stream).unwrap();
        } else {
            plan.run(&stream).unwrap();
        }
        comm.synchronize(&stream).unwrap();
        let mut found = vec![0; 4 * N];
        device.download(&y, &mut found).unwrap();
        let sum: f64 = (0..comm.world()).map(value).sum();
        assert!(
            found == encode(DType::F32, &vec![sum; N]),
            "{name}, run {round}"
        );
    }
    // Only rank 0 has it, but what it should hold of itself it can tell.
    let trace = trace?;
    let section = operations.iter().find_map(|it| it.kind.section()).unwrap();
    for lane in 0..section.lanes {
        let mut expected: Vec<String> = Vec::new();
        // Two launches came before.
        for step in section.steps(lane, 2).unwrap() {
            let site = step.site.to_string();
            if expected.last() != Some(&site) {
                expected.push(site);
            }
        }
        let found: Vec<&str> = of_lane(&trace.spans, 0, lane, section.lanes)
            .iter()
            .map(|span| &*span.site)
            .collect();
        assert_eq!(found, expected, "{name}, lane {lane}");
    }
    Some(trace.spans)
}

/// The steps of a lane, as they stand in the trace.
fn of_lane(spans: &[TraceSpan], rank: usize, lane: usize, lanes: usize) -> Vec<&TraceSpan> {
    let width = (lanes - 1).to_string().len();
    let row = format!("caller, lane {lane:0width$}");
    let own = spans.iter();
    own.filter(|span| span.rank == rank && span.stream == row)
        .collect()
}

#[test]
fn a_trace_has_every_step_of_every_lane_within_its_kernel() {
    for name in ["all_reduce_one_shot", "all_reduce_lanes", "all_reduce_ring"] {
        threads(world(2), |comm| {
            let Some(spans) = traced(comm, name) else {
                assert_ne!(comm.rank(), 0);
                return;
            };
            for rank in 0..comm.world() {
                let mut kernels = spans
                    .iter()
                    .filter(|span| span.rank == rank && span.operation == "kernel");
                let kernel = kernels.next().unwrap();
                assert!(kernels.next().is_none());
                let mut rows: Vec<&str> = spans
                    .iter()
                    .filter(|span| span.rank == rank && span.stream.contains("lane"))
                    .map(|span| &*span.stream)
                    .collect();
                rows.dedup();
                let lanes = rows.len();
                assert!(lanes >= 4, "{name}: {rows:?}");
                for lane in 0..lanes {
                    in_order(of_lane(&spans, rank, lane, lanes), kernel);
                }
            }
        });
    }
}

/// Steps follow one another, and lie within the kernel.
fn in_order(steps: Vec<&TraceSpan>, kernel: &TraceSpan) {
    assert!(!steps.is_empty());
    // Microseconds; times are rounded.
    let slack = 1e-3;
    let mut at = kernel.start;
    for step in steps {
        assert!(step.start >= at - slack && step.duration >= 0.0, "{step:?}");
        assert_ne!(step.operation, "step");
        at = step.start + step.duration;
    }
    assert!(at <= kernel.start + kernel.duration + slack, "{kernel:?}");
}
