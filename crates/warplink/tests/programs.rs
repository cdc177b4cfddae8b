//! Programs that run: overlapped matmuls of every lowering, graphs, bindings, traces, and what the
//! verifier says against what happens. Ranks are threads.

// A test fails by panicking.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "programs/agreement.rs"]
mod agreement;
#[path = "programs/binding.rs"]
mod binding;
#[path = "programs/collectives.rs"]
mod collectives;
mod common;
#[path = "programs/device_limits.rs"]
mod device_limits;
#[path = "programs/evaluate.rs"]
mod evaluate;
#[path = "programs/graphs.rs"]
mod graphs;
#[path = "programs/language/mod.rs"]
mod language;
#[path = "programs/matmul.rs"]
mod matmul;
mod program_support;
#[path = "programs/replaced.rs"]
mod replaced;
#[path = "programs/run.rs"]
mod run;
#[path = "programs/subgroups.rs"]
mod subgroups;
#[path = "programs/trials.rs"]
mod trials;

use common::{
    assert_error, assert_says, delayed, pretending, threads, threads_with, world, worlds,
};
use half::{bf16, f16};
use matmul::{Case, Inputs, Memory, Operation};
use warplink::device::Priority;
use warplink::overlap::{
    AllGatherMatmul, AllGatherMatmulLowering, Leading, Lowering, MatmulReduceScatter,
    MatmulReduceScatterLowering, Options, all_gather_matmul, matmul_reduce_scatter,
};
use warplink::program::lower::{Decision, Problem};
use warplink::program::{Bindings, PrepareOptions, Program};
use warplink::{Communicator, DType, ErrorKind};

/// The library's lowerings and the examples of an operation.
fn lowerings<P: Problem>(operation: &str) -> Vec<Lowering> {
    let mut all = P::lowerings().unwrap();
    for file in std::fs::read_dir(common::root().join("../../examples/programs")).unwrap() {
        let path = file.unwrap().path();
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        if name.starts_with(operation) {
            let text = std::fs::read_to_string(&path).unwrap();
            all.push(Lowering::parse(&name, &text).unwrap());
        }
    }
    all.sort_by(|a, b| a.name().cmp(b.name()));
    all
}

fn gathers() -> Vec<Lowering> {
    lowerings::<AllGatherMatmul>("all_gather_matmul")
}

fn scatters() -> Vec<Lowering> {
    lowerings::<MatmulReduceScatter>("matmul_reduce_scatter")
}

/// Whether this machine has the vendor's library for collectives.
fn has_engine(comm: &Communicator) -> bool {
    match comm.collective_engine() {
        Ok(_) => true,
        Err(error)
            if matches!(
                error.kind(),
                ErrorKind::LibraryMissing | ErrorKind::Unsupported
            ) =>
        {
            false
        }
        Err(error) => panic!("{error}"),
    }
}

/// Numbers of ranks, or as many as there are GPUs.
const RANKS: [usize; 4] = [1, 2, 3, 4];

/// Every lowering of both operations, a few times each with other inputs.
fn every_lowering<T: warplink::dtype::Element>(comm: &Communicator, streams: usize) {
    let executor = comm.executor();
    let stream = comm.create_stream(Priority::Normal).unwrap();
    let cases = [false, true].map(|bias| Case::of::<T>(comm, bias));
    // The same results of right operands that lie in memory the other way.
    let transposed = Case::of::<T>(comm, true).transposed();
    for (number, case) in cases.into_iter().chain([transposed]).enumerate() {
        let seeds = (0..3).map(|seed| 10 * seed + number as u64);
        for operation in Operation::ALL {
            let memory = Memory::new(comm, &case, operation);
            for lowering in operation.lowerings() {
                let options = Options {
                    streams,
                    ..Options::only(lowering.clone())
                };
                let plan = memory.plan(&executor, &case, &options).unwrap();
                assert_eq!(plan.choice().name(), lowering.name());
                for seed in seeds.clone() {
                    let inputs = Inputs::<T>::draw(&case, seed);
                    memory.fill(comm, &case, &inputs);
                    plan.run(&stream).unwrap();
                    comm.synchronize(&stream).unwrap();
                    memory.check(comm, &case, &inputs, lowering.name());
                }
            }
        }
    }
}

#[test]
fn every_lowering_is_right_under_delays_in_f32() {
    for world in worlds(RANKS) {
        threads_with(world, delayed(150), |comm| every_lowering::<f32>(comm, 2));
    }
}

#[test]
fn every_lowering_is_right_under_delays_in_bf16() {
    for world in worlds(RANKS) {
        threads_with(world, delayed(150), |comm| every_lowering::<bf16>(comm, 1));
    }
}

#[test]
fn every_lowering_is_right_under_delays_in_f16() {
    for world in worlds(RANKS) {
        threads_with(world, delayed(150), |comm| every_lowering::<f16>(comm, 3));
    }
}

/// Devices without atomic operations on each other's memory, and without access to it.
#[test]
fn every_lowering_is_right_on_any_bus() {
    pretending(world(2), |comm, _| every_lowering::<f32>(comm, 2));
}

#[test]
fn a_graph_is_right_a_thousand_times() {
    threads(world(2), |comm| {
        let executor = comm.executor();
        let stream = comm.create_stream(Priority::Normal).unwrap();
        let case = Case::of::<f32>(comm, true);
        for operation in Operation::ALL {
            let memory = Memory::new(comm, &case, operation);
            for lowering in operation.lowerings() {
                let options = Options::only(lowering.clone());
                let plan = memory.plan(&executor, &case, &options).unwrap();
                let graph = plan.capture().unwrap();
                for round in 0..20 {
                    let inputs = Inputs::<f32>::draw(&case, round);
                    memory.fill(comm, &case, &inputs);
                    (0..50).for_each(|_| graph.launch(&stream).unwrap());
                    comm.synchronize(&stream).unwrap();
                    memory.check(comm, &case, &inputs, lowering.name());
                }
            }
        }
    });
}

#[test]
fn the_functions_and_several_operands() {
    threads_with(world(2), delayed(150), |comm| {
        let executor = comm.executor();
        let stream = comm.create_stream(Priority::Normal).unwrap();
        let case = Case::of::<f32>(comm, true).operands(3).keeping();
        for seed in 0..4 {
            let inputs = Inputs::<f32>::draw(&case, seed);
            // Memory of this round alone: what a function ran with is kept until it is done.
            let (gather, scatter) = (Memory::gather(comm, &case), Memory::scatter(comm, &case));
            gather.fill(comm, &case, &inputs);
            scatter.fill(comm, &case, &inputs);
            let options = Options::default();
            let buffers = gather.gather_buffers(&case);
            let choice =
                all_gather_matmul(&executor, &stream, &case.gather(), &options, &buffers).unwrap();
            assert_eq!(choice.decision, Decision::Model);
            assert!(choice.to_string().contains(choice.name()));
            let buffers = scatter.scatter_buffers(&case);
            matmul_reduce_scatter(&executor, &stream, &case.scatter(), &options, &buffers).unwrap();
            comm.synchronize(&stream).unwrap();
            gather.check(comm, &case, &inputs, "the function");
            scatter.check(comm, &case, &inputs, "the function");
        }
    });
}

#[test]
fn leading_dimensions_before_the_shared_one() {
    threads(world(2), |comm| {
        // A is [3, m, k], shared along m.
        let base = Case::of::<f32>(comm, false);
        let leading = Leading::of(&[3, base.m, base.k], 1).unwrap();
        assert_eq!((leading.outer, leading.rows), (3, base.m));
        let executor = comm.executor();
        let stream = comm.create_stream(Priority::Normal).unwrap();
        let case = base.outer(leading.outer);
        let inputs = Inputs::<f32>::draw(&case, 5);
        let (gather, scatter) = (Memory::gather(comm, &case), Memory::scatter(comm, &case));
        gather.fill(comm, &case, &inputs);
        scatter.fill(comm, &case, &inputs);
        let options = Options {
            outer: leading.outer,
            ..Options::default()
        };
        let plan = gather.plan(&executor, &case, &options).unwrap();
        plan.run(&stream).unwrap();
        comm.synchronize(&stream).unwrap();
        let plan = scatter.plan(&executor, &case, &options).unwrap();
        let graph = plan.capture().unwrap();
        graph.launch(&stream).unwrap();
        comm.synchronize(&stream).unwrap();
        gather.check(comm, &case, &inputs, "outer");
        scatter.check(comm, &case, &inputs, "outer");
    });
}

#[test]
fn what_does_not_fit_is_refused() {
    threads(world(2), |comm| {
        let executor = comm.executor();
        let case = Case::of::<f32>(comm, false);
        let memory = Memory::gather(comm, &case);
        let good = memory.gather_buffers(&case);
        let options = Options::default();
        let refused = |problem: AllGatherMatmul, buffers, parts: &[&str]| {
            let error = problem
                .plan(&executor, &options, &buffers)
                .expect_err("it should be refused");
            assert_error(&error, ErrorKind::InvalidArgument, parts);
        };
        if comm.world() > 1 {
            let mut odd = case.gather();
            odd.m += 1;
            refused(odd, good.clone(), &["expected a multiple of", "pad it"]);
        }
        let mut short = good.clone();
        short.c[0] = short.c[0].slice(0..8).unwrap();
        refused(case.gather(), short, &["'C[0]'", "8"]);
        let mut fewer = good.clone();
        fewer.b.clear();
        refused(case.gather(), fewer, &["0 slices", "B"]);
        let mut biased = good.clone();
        biased.bias.push(biased.a.clone());
        refused(case.gather(), biased, &["bias"]);
        let mut kept = good.clone();
        kept.gathered = Some(kept.a.clone());
        refused(case.gather(), kept, &["does not keep it"]);
        let mut wide = case.gather();
        wide.dtype = DType::F64;
        refused(wide, good.clone(), &["f64"]);
        let mut empty = case.gather();
        empty.k = 0;
        refused(empty, good, &["k is 0"]);

        // Names that the program does not have, and inputs that are not bound.
        let text = "program p() {\n input A: f32[4]\n output C: f32[4]\n C = copy(A)\n}";
        let program = Program::parse(text).unwrap();
        let prepared = executor
            .prepare(&program, &Default::default(), PrepareOptions::default())
            .unwrap();
        let error = prepared.bind(&Bindings::new()).expect_err("A is missing");
        assert_says(&error, &["'A' is not bound"]);
        let slice = comm.alloc(16).unwrap().memory().clone();
        let bindings = Bindings::from([("A".into(), slice.clone()), ("X".into(), slice)]);
        let error = prepared.bind(&bindings).expect_err("there is no X");
        assert_says(&error, &["no input or output 'X'", "A, C"]);
        // A program that fails does not run.
        let text =
            "program p() {\n input A: f32[4]\n output C: f32[4]\n C[0..2] = copy(A[0..2])\n}";
        let program = Program::parse(text).unwrap();
        let error = executor
            .prepare(&program, &Default::default(), PrepareOptions::default())
            .expect_err("C is not written in full");
        assert_eq!(error.kind(), ErrorKind::Verification);
    });
}

#[test]
fn a_buffer_replaced_on_one_rank() {
    threads_with(world(3), delayed(150), |comm| {
        let executor = comm.executor();
        let stream = comm.create_stream(Priority::Normal).unwrap();
        for lowering in gathers() {
            let case = Case::of::<f32>(comm, false);
            let options = Options::only(lowering.clone());
            let mut memory = Memory::gather(comm, &case);
            for round in 0..4 {
                if round > 0 && comm.rank() == round % comm.world() {
                    memory = Memory::gather(comm, &case);
                }
                let inputs = Inputs::<f32>::draw(&case, round as u64);
                memory.fill(comm, &case, &inputs);
                let plan = memory.plan(&executor, &case, &options).unwrap();
                plan.run(&stream).unwrap();
                comm.synchronize(&stream).unwrap();
                memory.check(comm, &case, &inputs, lowering.name());
            }
        }
    });
}

#[test]
fn a_trace_has_spans_of_every_rank() {
    threads(world(3), |comm| {
        let executor = comm.executor();
        let stream = comm.create_stream(Priority::Normal).unwrap();
        let case = Case::of::<f32>(comm, false);
        let memory = Memory::gather(comm, &case);
        let inputs = Inputs::<f32>::draw(&case, 1);
        memory.fill(comm, &case, &inputs);
        let options = Options::only(AllGatherMatmulLowering::Push.lowering().unwrap());
        let plan = memory.plan(&executor, &case, &options).unwrap();
        let trace = plan.plans()[0].trace(&stream).unwrap();
        memory.check(comm, &case, &inputs, "traced");
        let Some(trace) = trace else {
            assert_ne!(comm.rank(), 0);
            return;
        };
        assert_eq!(comm.rank(), 0);
        for rank in 0..comm.world() {
            let own: Vec<_> = trace
                .spans
                .iter()
                .filter(|span| span.rank == rank)
                .collect();
            let products = own.iter().filter(|span| span.operation == "matmul").count();
            assert_eq!(products, comm.world());
            assert!(own.iter().any(|span| span.stream == "pool(0)"));
            assert!(
                own.iter()
                    .all(|span| span.start >= 0.0 && span.duration >= 0.0)
            );
        }
        assert!(trace.to_perfetto().len() > trace.spans.len());
    });
}

/// Products stored at their owners, in one launch where the device can, again and
/// again, eagerly and as a graph.
fn stored<T: warplink::dtype::Element>(comm: &Communicator) {
    let executor = comm.executor();
    let stream = comm.create_stream(Priority::Normal).unwrap();
    let case = Case::of::<T>(comm, true);
    let memory = [(); 2].map(|()| Memory::scatter(comm, &case));
    let lowering = MatmulReduceScatterLowering::Store.lowering().unwrap();
    let options = Options::only(lowering);
    let plan = |memory: &Memory| memory.plan(&executor, &case, &options).unwrap();
    let [eager, captured] = memory.each_ref().map(plan);
    let captured = captured.capture().unwrap();
    for seed in 0..6 {
        let inputs = Inputs::<T>::draw(&case, seed);
        for memory in &memory {
            memory.fill(comm, &case, &inputs);
        }
        // Several in a row: one that ran ahead would spoil what its peers still add up.
        for _ in 0..3 {
            eager.run(&stream).unwrap();
            captured.launch(&stream).unwrap();
        }
        comm.synchronize(&stream).unwrap();
        for (memory, how) in memory.iter().zip(["eager", "captured"]) {
            memory.check(comm, &case, &inputs, how);
        }
    }
}

#[test]
fn products_are_stored_at_their_owners() {
    threads_with(world(3), delayed(150), |comm| {
        stored::<bf16>(comm);
        stored::<f16>(comm);
    });
}

/// Every combination of what a lowering leaves open, on sizes that suit them all.
#[test]
fn every_alternative_is_right() {
    // Three ranks do not divide the sizes.
    let ranks = match world(4) {
        3 => 2,
        ranks => ranks,
    };
    threads_with(ranks, delayed(150), |comm| {
        let executor = comm.executor();
        let stream = comm.create_stream(Priority::Normal).unwrap();
        let (n, dtype, bias, keep) = (32, DType::BF16, false, false);
        let gather = AllGatherMatmul {
            transposed_b: false,
            m: 64,
            k: 32,
            n: vec![n],
            dtype,
            bias,
            keep,
        };
        let scatter = MatmulReduceScatter {
            transposed_b: false,
            m: 64,
            k: 32,
            n,
            dtype,
            bias,
        };
        let gather = gather.parameters(comm.world()).unwrap();
        let scatter = scatter.parameters(comm.world()).unwrap();
        let gathers = gathers().into_iter().map(|lowering| (lowering, &gather));
        let scatters = scatters().into_iter().map(|lowering| (lowering, &scatter));
        let mut count = 0;
        for ((lowering, given), streams) in
            gathers.chain(scatters).zip([1, 2, 3].into_iter().cycle())
        {
            for chosen in lowering.combinations(given).unwrap() {
                let parameters = given.clone().and(&chosen);
                let options = PrepareOptions {
                    streams,
                    ..PrepareOptions::default()
                };
                match executor.prepare(lowering.program(), &parameters, options) {
                    Ok(prepared) => {
                        count += 1;
                        matmul::run_example(comm, &stream, &lowering.program().name, &prepared);
                    }
                    Err(error) if error.kind() == ErrorKind::InvalidArgument => {}
                    Err(error) => panic!("{} with {parameters}: {error}", lowering.name()),
                }
            }
        }
        assert!(count >= 16, "{count}");
    });
}

#[test]
fn the_smallest_example_runs() {
    threads_with(world(4), delayed(150), |comm| {
        let executor = comm.executor();
        let stream = comm.create_stream(Priority::Normal).unwrap();
        let text = include_str!("../../../examples/programs/ring_pass.wlp");
        let program = Program::parse(text).unwrap();
        let prepared = executor.prepare(&program, &[("n", 32)].into(), PrepareOptions::default());
        matmul::run_example(comm, &stream, &program.name, &prepared.unwrap());
    });
}
