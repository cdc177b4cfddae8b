//! Estimated time of algorithms: from a measured table, else from the cost model.

use super::algorithm::Algorithm;
use super::call::{Call, CollectiveKind};
use crate::device::ReduceOp;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::program::RankProgram;
use crate::program::cost::lanes::Lanes;
use crate::program::cost::{HardwareModel, SimulateOptions, Submission, simulate_with};
use crate::sync::lock;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, Mutex};

/// Estimates, with a cache of results. Clones share it.
#[derive(Clone)]
pub(super) struct Estimates {
    model: Arc<HardwareModel>,
    found: Arc<Mutex<BTreeMap<EstimateKey, Algorithm>>>,
}

/// Cache key: collective, element size, part size, and applicable algorithms.
type EstimateKey = (CollectiveKind, usize, usize, Vec<Algorithm>);

impl fmt::Debug for Estimates {
    /// Everything that estimates depend on, so that ranks can compare it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.model.fmt(f)
    }
}

impl Estimates {
    /// # Errors
    /// [`ErrorKind::Parse`] if the model has an unknown collective, algorithm or element size, or a duplicate
    /// table.
    pub(super) fn new(model: &HardwareModel) -> Result<Self> {
        let mut measured = BTreeSet::new();
        for of in &model.algorithms {
            let name = of.collective.as_str();
            let mut kinds = CollectiveKind::ALL.into_iter();
            let Some(kind) = kinds.find(|kind| kind.name() == name) else {
                return Err(wrong(format!("unknown collective '{name}'")));
            };
            let element = of.element_bytes.unwrap_or(default_element(kind));
            if !DType::ALL.iter().any(|dtype| dtype.size() == element) {
                let sizes = format!("algorithms of {name} for elements of {element} bytes");
                return Err(wrong(sizes));
            }
            for (_, algorithm) in &of.limits {
                algorithm.parse::<Algorithm>()?;
            }
            if !measured.insert((name, of.world, element)) {
                let twice = format!(
                    "the algorithms of {name} of {} ranks for elements of {element} bytes are listed twice",
                    of.world
                );
                return Err(wrong(twice));
            }
        }
        Ok(Self {
            model: Arc::new(model.of_kernels()),
            found: Arc::default(),
        })
    }

    /// Fastest of the algorithms that apply to a call of `world` ranks; ties go to the first. `seconds`
    /// estimates one. Lengths are rounded, so that similar calls choose alike.
    pub(super) fn fastest(
        &self,
        world: usize,
        call: &Call,
        of: &[Algorithm],
        seconds: impl Fn(Algorithm, &Call) -> Result<f64>,
    ) -> Algorithm {
        let [first, _, ..] = of else {
            return of.first().copied().unwrap_or(Algorithm::Chunks);
        };
        let size = call.dtype.size();
        let elements = (size, default_element(call.kind));
        let measured = self
            .model
            .algorithm(call.kind.name(), world, elements, call.bytes());
        let measured = measured.and_then(|name| name.parse().ok());
        // A table may name an algorithm that does not fit here, for example in a smaller workspace.
        if let Some(measured) = measured.filter(|measured| of.contains(measured)) {
            return measured;
        }
        let bytes = rounded(call.bytes()).next_multiple_of(size);
        // Complete: everything else that estimates depend on is fixed when joining. Types and operators of one size
        // take the same time, and so does any root.
        let key = (call.kind, size, bytes, of.to_vec());
        if let Some(known) = lock(&self.found).get(&key) {
            return *known;
        }
        let like = Call {
            count: bytes / size,
            op: call.op.map(|_| ReduceOp::Sum),
            root: call.root.map(|_| 0),
            ..*call
        };
        // Not under the lock: an estimate simulates all ranks, and two threads that find the same one do no harm.
        let mut best = (f64::INFINITY, *first);
        for &algorithm in of {
            match seconds(algorithm, &like) {
                Ok(seconds) if seconds < best.0 => best = (seconds, algorithm),
                Ok(_) => {}
                // Passed over: any other algorithm is right as well, only perhaps slower.
                Err(error) => tracing::warn!(%error, %algorithm, call = %like, "no estimate"),
            }
        }
        lock(&self.found).insert(key, best.1);
        best.1
    }

    /// The model's figures of lanes.
    pub(super) fn lanes(&self) -> Lanes {
        self.model.lanes()
    }

    /// Estimated seconds of a program's launch.
    pub(super) fn seconds(&self, ranks: &[RankProgram]) -> Result<f64> {
        let options = SimulateOptions {
            // A collective is one kernel, launched as a prepared graph.
            submission: Submission::Captured,
            timeline: false,
        };
        Ok(simulate_with(ranks, &self.model, options)?.seconds)
    }
}

/// Element size of tables from before the field existed.
const fn default_element(kind: CollectiveKind) -> usize {
    if kind.reduces() {
        DType::BF16.size()
    } else {
        DType::U8.size()
    }
}

/// Error for a model with an invalid algorithm table.
fn wrong(what: String) -> Error {
    Error::parse(format!("{what} in the hardware model"))
        .with_help("fix the model's file, or measure again with `warplink tune --algorithms`")
}

/// Rounds up to the next power of two or one and a half times one.
pub(super) fn rounded(bytes: usize) -> usize {
    let power = bytes.checked_next_power_of_two().unwrap_or(bytes);
    let less = power / 4 * 3;
    if bytes <= less { less } else { power }
}
