//! Runs on other memory than a plan was bound to.

use super::matmul::Operation;
use super::{Case, Inputs, Memory, gathers, pretending, threads, world};
use half::bf16;
use warplink::device::{AllocationKind, DeviceSlice, Priority};
use warplink::overlap::{Options, OverlapPlan};
use warplink::program::Bindings;
use warplink::{Communicator, ErrorKind};

/// `case` by every lowering: on the plan's memory, then on other memory for what can be replaced, which is
/// different each time, and on the plan's own again.
fn every_lowering(comm: &Communicator, case: &Case) {
    let executor = comm.executor();
    let stream = comm.create_stream(Priority::Normal).unwrap();
    for operation in Operation::ALL {
        let own = Memory::new(comm, case, operation);
        for lowering in operation.lowerings() {
            let options = Options {
                outer: case.repeats(),
                ..Options::only(lowering.clone())
            };
            let plan = own.plan(&executor, case, &options).unwrap();
            let names = plan.replaceable();
            if let Operation::Gather = operation {
                assert!(
                    names.contains(&"B[0]") && names.contains(&"C[1]"),
                    "{names:?}"
                );
            }
            for seed in 0..4 {
                let inputs = Inputs::<bf16>::draw(case, seed);
                let other = Memory::new(comm, case, operation);
                let replaced = if seed < 3 { &names[..] } else { &[] };
                let (memory, bindings) = own.replaced(&other, replaced);
                // What lies in the plan's own memory is not what is multiplied.
                own.fill(comm, case, &Inputs::<bf16>::draw(case, 90));
                memory.fill(comm, case, &inputs);
                plan.run_on(&stream, &bindings).unwrap();
                comm.synchronize(&stream).unwrap();
                memory.check(comm, case, &inputs, lowering.name());
            }
        }
    }
}

#[test]
fn runs_take_other_memory_for_what_no_peer_reaches() {
    threads(world(3), |comm| {
        let case = Case::of::<bf16>(comm, true).operands(2);
        every_lowering(comm, &case);
        every_lowering(comm, &case.clone().transposed());
        every_lowering(comm, &case.outer(2));
    });
}

/// Runs by `plan.launch_on` on memory that recurs: soon on some ranks, later on others.
fn launches(comm: &Communicator, case: &Case) {
    let executor = comm.executor();
    let stream = comm.create_stream(Priority::Normal).unwrap();
    let launch = |plan: &OverlapPlan, bindings: &Bindings| {
        let addresses: Vec<u64> = bindings.values().map(DeviceSlice::address).collect();
        let memory = || Ok(bindings.clone());
        plan.launch_on(&stream, &addresses, memory).unwrap();
        comm.synchronize(&stream).unwrap();
    };
    let sets = if comm.rank() == 0 { 1 } else { 2 };
    for operation in Operation::ALL {
        let own = Memory::new(comm, case, operation);
        let others = [(); 2].map(|()| Memory::new(comm, case, operation));
        for lowering in operation.lowerings() {
            let options = Options::only(lowering.clone());
            let plan = own.plan(&executor, case, &options).unwrap();
            for seed in 0..7 {
                let inputs = Inputs::<bf16>::draw(case, seed);
                let other = &others[seed as usize % sets];
                let (memory, bindings) = own.replaced(other, &plan.replaceable());
                own.fill(comm, case, &Inputs::<bf16>::draw(case, 90));
                memory.fill(comm, case, &inputs);
                launch(&plan, &bindings);
                memory.check(comm, case, &inputs, lowering.name());
            }
        }
    }
}

#[test]
fn runs_that_recur_are_launched_while_other_ranks_enqueue_them() {
    threads(world(3), |comm| {
        let case = Case::of::<bf16>(comm, true).operands(2);
        launches(comm, &case);
    });
}

/// Also where peers do not map the plan's memory, but memory of the host that it is copied to.
#[test]
fn other_memory_is_right_on_any_bus() {
    pretending(world(2), |comm, _| {
        let case = Case::of::<bf16>(comm, true).operands(2);
        every_lowering(comm, &case);
        launches(comm, &case);
    });
}

#[test]
fn a_run_on_memory_that_does_not_fit_is_refused() {
    threads(world(2), |comm| {
        let case = Case::of::<bf16>(comm, false);
        let own = Memory::gather(comm, &case);
        let lowering = gathers().into_iter().find(|one| one.name() == "ring-get");
        let options = Options::only(lowering.unwrap());
        let plan = case
            .gather()
            .plan(&comm.executor(), &options, &own.gather_buffers(&case));
        let plan = plan.unwrap();
        let stream = comm.create_stream(Priority::Normal).unwrap();
        let refused = |name: &str, bytes: usize, says: &str| {
            let slice = comm
                .device()
                .allocate(bytes, AllocationKind::Plain)
                .unwrap();
            let error = plan.run_on(&stream, &Bindings::from([(name.to_owned(), slice)]));
            let error = error.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            assert!(error.to_string().contains(says), "{error}");
        };
        // Peers read A, if there are any.
        if comm.world() > 1 {
            refused(
                "A",
                own.gather_buffers(&case).a.bytes(),
                "'A' cannot be replaced",
            );
        }
        refused("D", 64, "'D' cannot be replaced");
        refused("B[0]", 64, "'B[0]' has 64 bytes; expected the");
    });
}
