//! Runs programs with kernels and compares what they leave with what they mean.

use crate::common::values;
use warplink::device::{AllocationKind, Priority};
use warplink::program::evaluate::Evaluator;
use warplink::program::ir::Role;
use warplink::program::{Bindings, Parameters, PrepareOptions, Program, TensorId, TensorInstance};
use warplink::{Communicator, DType, Error};

/// How a program is launched.
#[derive(Clone, Debug)]
pub(crate) struct Launches {
    /// Without a graph, first.
    pub(crate) eager: usize,
    /// As a graph, after that.
    pub(crate) captured: usize,
    /// Whether it is verified before it runs.
    pub(crate) verify: bool,
    /// Announced tensors that are taken for out of reach.
    pub(crate) unreachable: Vec<String>,
}

impl Default for Launches {
    fn default() -> Self {
        Self {
            eager: 3,
            captured: 3,
            verify: true,
            unreachable: Vec::new(),
        }
    }
}

/// Random elements of an input that depend on the rank and the round.
fn elements(rank: usize, round: usize, tensor: &TensorInstance) -> Vec<u8> {
    let count = tensor.bytes / tensor.dtype.size();
    let bytes = values(rank, round, count);
    let numbers: Vec<f64> = bytes
        .iter()
        .map(|byte| match tensor.dtype {
            _ if let Some(most) = tensor.value_bound => f64::from(*byte) % (most as f64 + 1.0),
            DType::U8 => f64::from(*byte),
            DType::I32 => f64::from(*byte) * 8e6 - 1e9,
            _ => f64::from(*byte) / 37.0 - 3.0,
        })
        .collect();
    crate::common::encode(tensor.dtype, &numbers)
}

/// Launches a program several times in a row, each time on other inputs, and compares every output.
///
/// # Errors
/// The failure, or the output that is wrong.
pub(crate) fn play(
    comm: &Communicator,
    program: &Program,
    parameters: &Parameters,
    launches: Launches,
) -> Result<(), String> {
    let said = |error: Error| error.to_string();
    let rank = comm.rank();
    // Whatever is out of reach, it means the same as where all is reached.
    let evaluator = Evaluator::new(program, comm.world(), 2, parameters).map_err(said)?;
    let mut tensors = evaluator.ranks().iter().flat_map(|rank| &rank.tensors);
    let partly = tensors.any(|tensor| tensor.value_bound.is_some());
    play_with(comm, program, parameters, &launches, elements, |round| {
        let expected = evaluator
            .run(|rank, _, tensor| elements(rank, round, tensor))
            .map_err(said)?;
        Ok(Box::new(move |id, tensor, bytes| {
            let float = !matches!(tensor.dtype, DType::I32 | DType::U8);
            let mut left = bytes.chunks_exact(tensor.dtype.size());
            // What depends on values in memory may leave some of it as it is.
            if !partly
                && let Some(at) = left.position(|e| float && e.iter().all(|byte| *byte == 0xff))
            {
                return Err(format!("element {at} was not written"));
            }
            let compared = expected.compare(rank, id, bytes).map_err(said)?;
            if compared.is_right() {
                Ok(())
            } else {
                Err(compared.to_string())
            }
        }))
    })
}

/// Says what is wrong with an output: its number, the tensor, and what it holds.
pub(crate) type Check<'a> =
    Box<dyn Fn(TensorId, &TensorInstance, &[u8]) -> Result<(), String> + 'a>;

/// As [`play`], with the inputs of `inputs`, by rank and launch; `checks` gives what checks the outputs of a
/// launch.
///
/// # Errors
/// The failure, or the output that is wrong.
pub(crate) fn play_with<'a>(
    comm: &Communicator,
    program: &Program,
    parameters: &Parameters,
    launches: &Launches,
    inputs: impl Fn(usize, usize, &TensorInstance) -> Vec<u8>,
    checks: impl Fn(usize) -> Result<Check<'a>, String>,
) -> Result<(), String> {
    let said = |error: Error| error.to_string();
    let rank = comm.rank();
    let options = PrepareOptions {
        streams: 2,
        verify: launches.verify,
        ..PrepareOptions::default()
    };
    let executor = comm.executor();
    let prepared = executor
        .prepare(program, parameters, options)
        .and_then(|prepared| prepared.without_reaching(&launches.unreachable))
        .map_err(said)?;
    let device = comm.device();
    let tensors = prepared.rank_program().tensors.clone();
    let mut bindings = Bindings::new();
    for tensor in tensors.iter().filter(|tensor| tensor.role != Role::Local) {
        let slice = device
            .allocate(tensor.bytes, AllocationKind::Plain)
            .map_err(said)?;
        bindings.insert(tensor.name.to_string(), slice);
    }
    let stream = comm.create_stream(Priority::Normal).map_err(said)?;
    let mut plan = Some(prepared.bind(&bindings).map_err(said)?);
    let mut graph = None;
    for round in 0..launches.eager + launches.captured {
        for tensor in tensors.iter().filter(|tensor| tensor.role != Role::Local) {
            let bytes = match tensor.role {
                Role::Input => inputs(rank, round, tensor),
                _ => vec![0xff; tensor.bytes],
            };
            let slice = &bindings[&*tensor.name];
            device.upload(slice, &bytes).map_err(said)?;
        }
        if round >= launches.eager && graph.is_none() {
            let plan = plan.take().expect("a plan is captured once");
            graph = Some(plan.capture().map_err(said)?);
        }
        match (&graph, &plan) {
            (Some(graph), _) => graph.launch(&stream),
            (None, Some(plan)) => plan.run(&stream),
            (None, None) => unreachable!(),
        }
        .map_err(said)?;
        comm.synchronize(&stream).map_err(said)?;
        let check = checks(round)?;
        for (id, tensor) in tensors.iter().enumerate() {
            if tensor.role != Role::Output {
                continue;
            }
            let mut bytes = vec![0; tensor.bytes];
            device
                .download(&bindings[&*tensor.name], &mut bytes)
                .map_err(said)?;
            check(id, tensor, &bytes).map_err(|what| {
                format!("launch {round}: '{}' of rank {rank}: {what}", tensor.name)
            })?;
        }
    }
    Ok(())
}
