//! Plans whose lowering is decided by times on the machine.

use super::common::{assert_says, downloaded, threads, world};
use super::matmul::{Case, Inputs, Memory};
use std::sync::Arc;
use warplink::ErrorKind;
use warplink::device::Priority;
use warplink::overlap::{Decision, Options};
use warplink::program::cost::find::shipped;

/// Every rank decides alike, by times; what the trials write is not the caller's; results are right.
#[test]
fn plans_are_decided_by_trials() {
    threads(world(3), |comm| {
        let executor = comm.executor();
        let stream = comm.create_stream(Priority::Normal).unwrap();
        let case = Case::of::<f32>(comm, true).operands(2).keeping();
        let inputs = Inputs::<f32>::draw(&case, 7);
        let memory = Memory::gather(comm, &case);
        memory.fill(comm, &case, &inputs);
        let buffers = memory.gather_buffers(&case);
        let written = || -> Vec<Vec<u8>> {
            let all = buffers.c.iter().chain(&buffers.gathered);
            all.map(|slice| downloaded(comm, slice)).collect()
        };
        let before = written();

        let mut model = (*shipped("host").unwrap()).clone();
        let options = |model| Options {
            model: Some(Arc::new(model)),
            ..Options::default()
        };
        // Where estimates are taken for exact, they decide.
        model.uncertainty = 1.0;
        let plan = case
            .gather()
            .plan(&executor, &options(model.clone()), &buffers);
        assert_eq!(plan.unwrap().choice().decision, Decision::Model);

        model.uncertainty = 1e9;
        let plan = case.gather().plan(&executor, &options(model), &buffers);
        let plan = plan.unwrap();
        let choice = plan.choice();
        assert_eq!(choice.decision, Decision::Trial);
        let tried: Vec<f64> = choice
            .estimates
            .iter()
            .map(|estimate| estimate.measured.unwrap().seconds())
            .collect();
        assert!(tried.len() >= 3, "{choice}");
        let taken = choice
            .estimates
            .iter()
            .find(|estimate| estimate.name() == choice.name())
            .unwrap();
        let seconds = taken.measured.unwrap().seconds();
        assert!(
            tried.iter().all(|other| seconds * 0.97 <= *other),
            "{choice}"
        );
        assert!(choice.to_string().contains("the fastest when measured"));
        let names = comm.all_gather_bytes(choice.name().as_bytes()).unwrap();
        assert!(names.iter().all(|name| name == choice.name().as_bytes()));
        assert!(written() == before, "a trial wrote to the caller's memory");

        plan.run(&stream).unwrap();
        comm.synchronize(&stream).unwrap();
        memory.check(comm, &case, &inputs, choice.name());
        comm.barrier().unwrap();
    });
}

/// A limit of multiprocessors is one of the plan, the same on all ranks, and results are right with it.
#[test]
fn plans_have_a_limit_of_multiprocessors() {
    threads(2, |comm| {
        let executor = comm.executor();
        let stream = comm.create_stream(Priority::Normal).unwrap();
        let case = Case::of::<f32>(comm, true);
        let inputs = Inputs::<f32>::draw(&case, 7);
        let memory = Memory::gather(comm, &case);
        memory.fill(comm, &case, &inputs);
        let buffers = memory.gather_buffers(&case);
        let plan = |most| {
            let options = Options {
                multiprocessors: Some(most),
                ..Options::default()
            };
            case.gather().plan(&executor, &options, &buffers)
        };
        let error = plan(2 + comm.rank()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Mismatch, "{error}");
        assert_says(&error, &["multiprocessors = 2", "multiprocessors = 3"]);
        plan(2).unwrap().run(&stream).unwrap();
        comm.synchronize(&stream).unwrap();
        memory.check(comm, &case, &inputs, "with a limit");
        comm.barrier().unwrap();
    });
}
