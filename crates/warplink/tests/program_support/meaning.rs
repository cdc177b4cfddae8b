//! Expected values of programs, by the library's own evaluator.

use super::elements::encode;
use super::interpreter::{Choice, input_of};
use warplink::program::evaluate::{Evaluator, Values};
use warplink::program::ir::Role;
use warplink::program::{RankProgram, TensorId, TensorInstance};

/// Values of all tensors, with bounds for rounding, by run.
#[derive(Debug)]
pub(crate) struct Meaning {
    runs: Vec<Values>,
}

impl Meaning {
    /// Evaluates the first runs of a program, whose `ranks` were played with a choice of integers, and whose outputs are by run and
    /// rank; none where nothing is written.
    ///
    /// # Errors
    /// How the outputs are others.
    pub(crate) fn of(
        (evaluator, ranks): (&Evaluator, &[RankProgram]),
        runs: usize,
        (choice, outputs): (Choice, &[Vec<f64>]),
    ) -> Result<Self, String> {
        let evaluated = |run: usize| {
            let bytes = |rank: usize, id: TensorId, tensor: &TensorInstance| -> Vec<u8> {
                let count = tensor.bytes / tensor.dtype.size();
                let values: Vec<f64> = (0..count)
                    .map(|at| input_of(&ranks[rank].tensors[id], choice, (run, rank), id, at))
                    .collect();
                encode(tensor.dtype, &values)
            };
            evaluator.run(bytes).map_err(|error| error.to_string())
        };
        let meaning = Self {
            runs: (0..runs).map(evaluated).collect::<Result<_, _>>()?,
        };
        let world = evaluator.ranks().len();
        for (place, found) in outputs.iter().enumerate().take(runs * world) {
            let (run, rank) = (place / world, place % world);
            if let Some(how) = meaning.differs(&evaluator.ranks()[rank], run, found) {
                return Err(format!(
                    "evaluated to other values: run {run}, rank {rank}: {how}"
                ));
            }
        }
        Ok(meaning)
    }

    /// How outputs of a rank are not what the program means.
    pub(crate) fn differs(
        &self,
        program: &RankProgram,
        run: usize,
        found: &[f64],
    ) -> Option<String> {
        let mut rest = found;
        for (id, tensor) in program.tensors.iter().enumerate() {
            if tensor.role == Role::Output {
                let (own, others) = rest.split_at(tensor.bytes / tensor.dtype.size());
                rest = others;
                let bytes = encode(tensor.dtype, own);
                match self.runs[run].compare(program.rank, id, &bytes) {
                    Ok(compared) if compared.is_right() => {}
                    Ok(compared) => return Some(format!("'{}': {compared}", tensor.name)),
                    Err(error) => return Some(error.to_string()),
                }
            }
        }
        None
    }
}
