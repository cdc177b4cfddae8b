//! Runs a program on every rank, eagerly and as a graph, on values that a test chooses.

use crate::common::{allocate, assert_error, decode, delays, encode, kind, threads_with};
use std::collections::BTreeMap;
use std::time::Duration;
use warplink::device::Priority;
use warplink::program::ir::Role;
use warplink::program::{Bindings, Parameters, PrepareOptions, Program, TensorInstance};
use warplink::{Communicator, DeviceKind, ErrorKind};

/// How often a program runs in a row, each way.
const RUNS: usize = 3;

/// The values of a rank's outputs, by name.
pub(crate) type Outputs = BTreeMap<String, Vec<f64>>;

/// A program and what it is run with.
pub(crate) struct Run<'a> {
    pub(crate) text: &'a str,
    pub(crate) parameters: Parameters,
    /// Streams in the pool.
    pub(crate) streams: usize,
    /// An element of an input: rank, name, index.
    pub(crate) input: &'a (dyn Fn(usize, &str, usize) -> f64 + Sync),
}

impl<'a> Run<'a> {
    /// A run with one stream in the pool.
    pub(crate) fn of(
        text: &'a str,
        parameters: impl Into<Parameters>,
        input: &'a (dyn Fn(usize, &str, usize) -> f64 + Sync),
    ) -> Self {
        Self {
            text,
            parameters: parameters.into(),
            streams: 1,
            input,
        }
    }

    /// Runs it on `world` ranks under random delays, and has `check` look at each rank's outputs.
    pub(crate) fn check(&self, world: usize, check: impl Fn(usize, &Outputs) + Sync) {
        self.check_unless_refused(world, None, check);
    }

    /// As [`check`](Self::check), but if capture is to be refused with a text, the program runs eagerly only.
    pub(crate) fn check_unless_refused(
        &self,
        world: usize,
        refusal: Option<&str>,
        check: impl Fn(usize, &Outputs) + Sync,
    ) {
        let delayed = |config: &mut warplink::Config| {
            if kind() == DeviceKind::Host {
                delays(config, Duration::from_micros(100));
            }
        };
        threads_with(world, delayed, |comm| self.run(comm, refusal, &check));
    }

    fn run(&self, comm: &Communicator, refusal: Option<&str>, check: &dyn Fn(usize, &Outputs)) {
        let program = Program::parse(self.text).unwrap();
        let again = Program::parse(&program.to_string());
        assert_eq!(again.unwrap(), program, "what is printed differs");
        let options = PrepareOptions {
            streams: self.streams,
            ..PrepareOptions::default()
        };
        let prepared = comm
            .executor()
            .prepare(&program, &self.parameters, options)
            .unwrap();
        let outer: Vec<TensorInstance> = prepared
            .rank_program()
            .tensors
            .iter()
            .filter(|tensor| tensor.role != Role::Local)
            .cloned()
            .collect();
        let stream = comm.create_stream(Priority::Normal).unwrap();
        for captured in [false, true] {
            let mut bindings = Bindings::new();
            for tensor in &outer {
                let slice = allocate(comm, tensor.bytes);
                let bytes = match tensor.role {
                    Role::Input => {
                        let count = tensor.bytes / tensor.dtype.size();
                        let of = |index| (self.input)(comm.rank(), &tensor.name, index);
                        encode(tensor.dtype, &(0..count).map(of).collect::<Vec<_>>())
                    }
                    _ => vec![0xff; tensor.bytes],
                };
                comm.device().upload(&slice, &bytes).unwrap();
                bindings.insert(tensor.name.to_string(), slice);
            }
            let plan = prepared.bind(&bindings).unwrap();
            if let (true, Some(part)) = (captured, refusal) {
                let error = plan.capture().unwrap_err();
                assert_error(&error, ErrorKind::InvalidArgument, &[part]);
                return;
            }
            if captured {
                let graph = plan.capture().unwrap();
                (0..RUNS).for_each(|_| graph.launch(&stream).unwrap());
                comm.synchronize(&stream).unwrap();
            } else {
                (0..RUNS).for_each(|_| plan.run(&stream).unwrap());
                comm.synchronize(&stream).unwrap();
            }
            let mut outputs = Outputs::new();
            for tensor in outer.iter().filter(|tensor| tensor.role == Role::Output) {
                let mut bytes = vec![0; tensor.bytes];
                let slice = &bindings[&*tensor.name];
                comm.device().download(slice, &mut bytes).unwrap();
                outputs.insert(tensor.name.to_string(), decode(tensor.dtype, &bytes));
            }
            check(comm.rank(), &outputs);
        }
    }
}
