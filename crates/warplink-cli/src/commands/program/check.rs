//! Comparison of a program's outputs with values computed on the host.

use crate::commands::bench::peers::download;
use crate::report::counted;
use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use std::cell::RefCell;
use std::fmt;
use warplink::Communicator;
use warplink::device::DeviceSlice;
use warplink::program::evaluate::{Comparison, Effort, Evaluator, Values};
use warplink::program::ir::Role;
use warplink::program::{Plan, TensorId, TensorInstance};

use super::inputs::Inputs;
use super::{ProgramSource, Text};

/// Number of consecutive compared runs, each with new inputs: enough to detect stale data of earlier runs in as many
/// slots as programs commonly have.
const RUNS: u64 = 4;

/// The evaluator that runs are compared with.
pub(super) struct Check {
    rank: usize,
    evaluator: Evaluator,
    inputs: Inputs,
    /// Warnings about outputs whose sums depend on the rank.
    reordered: RefCell<Vec<String>>,
}

/// The comparison of one tensor of a rank.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Compared {
    tensor: String,
    rank: usize,
    /// Absent if it is not finite.
    largest_error: Option<f64>,
    allowed_error: f64,
    /// Elements with a larger error than rounding allows.
    wrong: usize,
    /// Description of the error, or of the elements that were not compared.
    #[serde(skip_serializing_if = "Option::is_none")]
    what: Option<String>,
}

impl Check {
    /// Prepares to evaluate the program.
    ///
    /// # Errors
    /// Why the values cannot be checked.
    pub(super) fn new(
        comm: &Communicator,
        source: &ProgramSource,
        text: &Text,
        inputs: Inputs,
        unreachable: &[String],
    ) -> Result<Self, String> {
        let streams = source.streams.into();
        let evaluator = Evaluator::new(&text.program, comm.world(), streams, &text.parameters)
            .map_err(|_| "the program does not pass the verifier".to_owned())?
            .without_reaching(unreachable)
            .map_err(|error| error.to_string())?;
        // By the same numbers on every rank, so that all check or none.
        computable(&evaluator, 1)?;
        Ok(Self {
            rank: comm.rank(),
            evaluator,
            inputs,
            reordered: RefCell::default(),
        })
    }

    /// Compares the outputs of some runs by `launch`, each with new inputs: those of run `first` and further ones.
    pub(super) fn runs(
        &self,
        comm: &Communicator,
        plan: &Plan,
        (first, how): (u64, &str),
        launch: impl Fn() -> Result<()>,
    ) -> Result<Vec<Compared>> {
        let mut all = Vec::new();
        self.reordered.borrow_mut().clear();
        for run in first..first + RUNS {
            let inputs = self.inputs.of_run(run);
            for (id, tensor, slice) in self.tensors(plan)? {
                let bytes = match tensor.role {
                    Role::Input => inputs.of(self.rank, id, tensor),
                    // NaN in every float type, so that elements that a run does not write are found.
                    _ => vec![0xff; tensor.bytes],
                };
                comm.device().upload(slice, &bytes)?;
            }
            launch()?;
            // All ranks on each of them: outputs depend on the inputs of the others, which every rank can draw.
            let values = self
                .evaluator
                .run(|rank, id, tensor| inputs.of(rank, id, tensor))?;
            // The order of additions depends on the program and not on the inputs.
            if run == first {
                let reordered = self.evaluator.reordered(&values).into_iter();
                let warnings = reordered.map(|(name, rank)| {
                    format!(
                        "'{name}' is added up in another order on rank {rank} than on rank 0, so that their sums may \
                         differ; help: take sources in the same order on every rank"
                    )
                });
                self.reordered.borrow_mut().extend(warnings);
            }
            all.extend(self.compare(comm, plan, &values, how)?);
        }
        Ok(all)
    }

    /// Warnings about results of the last runs that are not wrong.
    pub(super) fn warnings(&self) -> Vec<String> {
        self.reordered.borrow().clone()
    }

    /// This rank's inputs and outputs.
    fn tensors<'a>(
        &'a self,
        plan: &'a Plan,
    ) -> Result<Vec<(TensorId, &'a TensorInstance, &'a DeviceSlice)>> {
        let all = self.evaluator.ranks().get(self.rank);
        let all = all
            .into_iter()
            .flat_map(|own| own.tensors.iter().enumerate());
        let bound = all.filter(|(_, tensor)| tensor.role != Role::Local);
        bound
            .map(|(id, tensor)| {
                let slice = plan.tensor(&tensor.name);
                let slice = slice.with_context(|| format!("'{}' has no memory", tensor.name))?;
                Ok((id, tensor, slice))
            })
            .collect()
    }

    /// Compares the outputs of the last run.
    fn compare(
        &self,
        comm: &Communicator,
        plan: &Plan,
        values: &Values,
        how: &str,
    ) -> Result<Vec<Compared>> {
        let mut all = Vec::new();
        for (id, tensor, slice) in self.tensors(plan)? {
            if tensor.role == Role::Output {
                let bytes = download(comm, slice)?;
                let comparison = values.compare(self.rank, id, &bytes)?;
                all.push(Compared::new(tensor, self.rank, &comparison, how));
            }
        }
        Ok(all)
    }
}

impl Compared {
    fn new(tensor: &TensorInstance, rank: usize, comparison: &Comparison, how: &str) -> Self {
        let right = comparison.is_right();
        Self {
            tensor: tensor.name.to_string(),
            rank,
            // JSON has no NaN and no infinity.
            largest_error: Some(comparison.largest).filter(|error| error.is_finite()),
            allowed_error: comparison.allowed,
            wrong: comparison.wrong,
            what: match comparison.unknown {
                _ if !right => Some(format!("{how}: {comparison}")),
                0 => None,
                unknown => Some(format!(
                    "{} not compared, since nothing is known about them",
                    counted(unknown, "element")
                )),
            },
        }
    }

    pub(super) const fn is_right(&self) -> bool {
        self.wrong == 0
    }
}

impl fmt::Display for Compared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = self.what.as_deref();
        if !self.is_right() {
            let what = what.unwrap_or_default();
            return write!(f, "'{}' of rank {} is wrong {what}", self.tensor, self.rank);
        }
        match (
            self.largest_error == Some(0.0) && self.allowed_error == 0.0,
            what,
        ) {
            (true, None) => write!(f, "'{}' is right: exact", self.tensor),
            (true, Some(what)) => write!(f, "'{}' of rank {}: {what}", self.tensor, self.rank),
            (false, _) => write!(
                f,
                "'{}' is right: largest error {:.3e} where {:.3e} is allowed{}",
                self.tensor,
                self.largest_error.unwrap_or_default(),
                self.allowed_error,
                what.map_or_else(String::new, |what| format!("; {what}"))
            ),
        }
    }
}

/// # Errors
/// Why `runs` runs of a program cannot be evaluated.
pub(super) fn computable(evaluator: &Evaluator, runs: usize) -> Result<(), String> {
    if evaluator.keeps() {
        return Err("they depend on what earlier runs left in scratch that persists".to_owned());
    }
    let (mut effort, limit) = (evaluator.effort(), Effort::LIMIT);
    effort.steps = effort.steps.saturating_mul(runs as u128);
    if !effort.is_within(&limit) {
        return Err(format!(
            "{} elements and {} steps are too many to evaluate; expected at most {} and {}",
            effort.elements, effort.steps, limit.elements, limit.steps
        ));
    }
    Ok(())
}

/// For each tensor the rank and run with the largest error. Collective.
pub(super) fn gather(comm: &Communicator, own: &[Compared]) -> Result<Vec<Compared>> {
    let mut worst: Vec<Compared> = Vec::new();
    for bytes in comm.all_gather_bytes(&serde_json::to_vec(own)?)? {
        let theirs: Vec<Compared> = serde_json::from_slice(&bytes)?;
        for next in theirs {
            // A missing number counts as the largest error.
            let error = |c: &Compared| c.largest_error.unwrap_or(f64::INFINITY);
            match worst.iter_mut().find(|before| before.tensor == next.tensor) {
                Some(before) if (before.wrong, error(before)) < (next.wrong, error(&next)) => {
                    *before = next;
                }
                Some(_) => {}
                None => worst.push(next),
            }
        }
    }
    Ok(worst)
}
