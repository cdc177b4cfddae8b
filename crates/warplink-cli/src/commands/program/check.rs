//! Whether a run gave what the program means.

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use std::fmt;
use warplink::Communicator;
use warplink::program::evaluate::{Comparison, Effort, Evaluator, Values};
use warplink::program::ir::Role;
use warplink::program::{Plan, TensorId, TensorInstance};

use super::inputs::Inputs;
use super::{Source, Text};

/// The values that a run is compared with.
pub(super) struct Check {
    rank: usize,
    values: Values,
    /// This rank's outputs.
    outputs: Vec<(TensorId, TensorInstance)>,
}

/// How a tensor of a rank compares.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Compared {
    tensor: String,
    rank: usize,
    /// Absent if it is no number.
    largest_error: Option<f64>,
    allowed_error: f64,
    /// Elements that are further off than roundings allow.
    wrong: usize,
    /// In words.
    #[serde(skip_serializing_if = "Option::is_none")]
    what: Option<String>,
}

impl Check {
    /// Evaluates the program.
    ///
    /// # Errors
    /// Why the values cannot be checked, in words.
    pub(super) fn new(
        comm: &Communicator,
        source: &Source,
        text: &Text,
        inputs: Inputs,
    ) -> Result<Self, String> {
        let streams = source.streams.into();
        let evaluator = Evaluator::new(&text.program, comm.world(), streams, &text.parameters)
            .map_err(|_| "the program does not pass the verifier".to_owned())?;
        let (effort, limit) = (evaluator.effort(), Effort::LIMIT);
        if !effort.is_within(&limit) {
            return Err(format!(
                "{} elements and {} steps are too many to evaluate; expected at most {} and {}",
                effort.elements, effort.steps, limit.elements, limit.steps
            ));
        }
        let values = evaluator
            .run(|rank, id, tensor| inputs.of(rank, id, tensor))
            .map_err(|error| error.to_string())?;
        let tensors = &evaluator.ranks()[comm.rank()].tensors;
        let outputs = tensors.iter().enumerate();
        let outputs = outputs.filter(|(_, tensor)| tensor.role == Role::Output);
        Ok(Self {
            rank: comm.rank(),
            values,
            outputs: outputs.map(|(id, t)| (id, t.clone())).collect(),
        })
    }

    /// Fills the outputs with what no run leaves there.
    pub(super) fn clear(&self, comm: &Communicator, plan: &Plan) -> Result<()> {
        for (_, tensor) in &self.outputs {
            if let Some(slice) = plan.tensor(&tensor.name) {
                comm.device().upload(slice, &vec![0xff; tensor.bytes])?;
            }
        }
        Ok(())
    }

    /// Compares the outputs of the last run.
    pub(super) fn compare(
        &self,
        comm: &Communicator,
        plan: &Plan,
        how: &str,
    ) -> Result<Vec<Compared>> {
        let mut all = Vec::new();
        for (id, tensor) in &self.outputs {
            let slice = plan
                .tensor(&tensor.name)
                .context("an output has no memory")?;
            let mut bytes = vec![0; tensor.bytes];
            comm.device().download(slice, &mut bytes)?;
            let comparison = self.values.compare(self.rank, *id, &bytes)?;
            all.push(Compared::new(tensor, self.rank, &comparison, how));
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
            largest_error: Some(comparison.largest).filter(|error| error.is_finite()),
            allowed_error: comparison.allowed,
            wrong: comparison.wrong,
            what: (!right).then(|| format!("{how}: {comparison}")),
        }
    }

    pub(super) const fn is_right(&self) -> bool {
        self.wrong == 0
    }
}

impl fmt::Display for Compared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.what {
            Some(what) => write!(f, "'{}' of rank {} is wrong {what}", self.tensor, self.rank),
            None if self.largest_error == Some(0.0) && self.allowed_error == 0.0 => {
                write!(f, "'{}' is right: exact", self.tensor)
            }
            None => write!(
                f,
                "'{}' is right: largest error {:.3e} where {:.3e} is allowed",
                self.tensor,
                self.largest_error.unwrap_or_default(),
                self.allowed_error
            ),
        }
    }
}

/// What all ranks found, for each tensor the rank and run with the largest error. Every rank calls this at
/// the same time.
pub(super) fn gather(comm: &Communicator, own: &[Compared]) -> Result<Vec<Compared>> {
    let mut worst: Vec<Compared> = Vec::new();
    for bytes in comm.all_gather_bytes(&serde_json::to_vec(own)?)? {
        let theirs: Vec<Compared> = serde_json::from_slice(&bytes)?;
        for next in theirs {
            // No number is worse than any.
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
