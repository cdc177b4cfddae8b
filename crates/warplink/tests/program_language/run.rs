//! Runs a program on every rank, eagerly and as a graph, on values that a test chooses.

use crate::common::{delays, kind, threads_with};
use half::{bf16, f16};
use std::collections::BTreeMap;
use std::time::Duration;
use warplink::device::{AllocationKind, Priority};
use warplink::dtype::Element;
use warplink::program::ir::Role;
use warplink::program::{Bindings, Parameters, PrepareOptions, Program, TensorInstance};
use warplink::{Communicator, DType, DeviceKind};

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

impl Run<'_> {
    /// Runs it on `world` ranks under random delays, and has `check` look at each rank's outputs.
    pub(crate) fn check(&self, world: usize, check: impl Fn(usize, &Outputs) + Sync) {
        let delayed = |config: &mut warplink::Config| {
            if kind() == DeviceKind::Host {
                delays(config, Duration::from_micros(100));
            }
        };
        threads_with(world, delayed, |comm| self.on_rank(comm, &check));
    }

    /// As [`check`](Self::check), on the ranks of a communicator that is there.
    pub(crate) fn on_rank(&self, comm: &Communicator, check: &dyn Fn(usize, &Outputs)) {
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
                let slice = comm
                    .device()
                    .allocate(tensor.bytes, AllocationKind::Plain)
                    .unwrap();
                let bytes = match tensor.role {
                    Role::Input => {
                        let count = tensor.bytes / tensor.dtype.size();
                        let of = |index| (self.input)(comm.rank(), &tensor.name, index);
                        encode(tensor.dtype, (0..count).map(of))
                    }
                    _ => vec![0xff; tensor.bytes],
                };
                comm.device().upload(&slice, &bytes).unwrap();
                bindings.insert(tensor.name.to_string(), slice);
            }
            let plan = prepared.bind(&bindings).unwrap();
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

fn encode(dtype: DType, values: impl Iterator<Item = f64>) -> Vec<u8> {
    fn of<T: Element>(values: impl Iterator<Item = f64>) -> Vec<u8> {
        values
            .map(T::from_f64)
            .flat_map(|value| value.as_bytes().to_vec())
            .collect()
    }
    match dtype {
        DType::F16 => of::<f16>(values),
        DType::BF16 => of::<bf16>(values),
        DType::F32 => of::<f32>(values),
        DType::F64 => of::<f64>(values),
        DType::I32 => of::<i32>(values),
        DType::U8 => of::<u8>(values),
        other => panic!("a program with elements of {other}"),
    }
}

fn decode(dtype: DType, bytes: &[u8]) -> Vec<f64> {
    fn of<T: Element>(bytes: &[u8]) -> Vec<f64> {
        bytes
            .chunks_exact(size_of::<T>())
            .map(|bytes| T::read_from_bytes(bytes).unwrap().to_f64())
            .collect()
    }
    match dtype {
        DType::F16 => of::<f16>(bytes),
        DType::BF16 => of::<bf16>(bytes),
        DType::F32 => of::<f32>(bytes),
        DType::F64 => of::<f64>(bytes),
        DType::I32 => of::<i32>(bytes),
        DType::U8 => of::<u8>(bytes),
        other => panic!("a program with elements of {other}"),
    }
}
