//! Matmuls overlapped with communication.

use crate::array::{self, Array};
use crate::errors::{captured, closed, detached, invalid};
use crate::owner::Detached;
use crate::place::Place;
use crate::stream::{Stream, Turns};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::sync::Arc;
use warplink::Error;
use warplink::device::DeviceSlice;
use warplink::overlap;

/// An overlapped matmul on given memory, for any number of runs. Every rank creates the same plans in the same order.
/// Drop it when the streams that it ran on are done.
#[pyclass(frozen, module = "warplink")]
#[derive(Debug)]
pub(crate) struct OverlapPlan {
    plan: Detached<Arc<overlap::OverlapPlan>>,
    place: Place,
    lowering: String,
    explanation: String,
    text: String,
}

/// A captured overlapped matmul: one graph, launched instead of runs of the plan.
#[pyclass(frozen, module = "warplink")]
#[derive(Debug)]
pub(crate) struct CapturedOverlap(Detached<Arc<overlap::CapturedOverlap>>);

/// Runs of a plan on tensors allocated by others: a call gets their addresses, takes a turn, and copies tensors that
/// peers access into and out of the plan's memory.
#[pyclass(frozen, module = "warplink")]
#[derive(Debug)]
pub(crate) struct OverlapLauncher {
    plan: Detached<Arc<overlap::OverlapPlan>>,
    place: Place,
    /// In the order of the addresses.
    tensors: Vec<Launched>,
    /// Indices into `tensors` of the tensors passed to the plan, in the plan's order.
    order: Vec<usize>,
}

/// A tensor of a launcher.
#[derive(Debug)]
struct Launched {
    name: String,
    bytes: usize,
    /// The plan's memory, for a tensor that peers access.
    own: Option<DeviceSlice>,
    written: bool,
}

impl OverlapPlan {
    pub(crate) fn new(plan: overlap::OverlapPlan, place: &Place) -> Self {
        Self {
            place: place.clone(),
            lowering: plan.choice().name().to_owned(),
            explanation: plan.choice().to_string(),
            text: plan.text().to_owned(),
            plan: Detached::new(Arc::new(plan), captured),
        }
    }
}

#[pymethods]
impl OverlapPlan {
    /// Name of the lowering that runs.
    #[getter]
    fn lowering(&self) -> &str {
        &self.lowering
    }

    /// The reason for the lowering: a line for the decision and one for each candidate.
    #[getter]
    fn explanation(&self) -> &str {
        &self.explanation
    }

    /// The text of the host program that runs.
    #[getter]
    fn text(&self) -> &str {
        &self.text
    }

    /// Whether it runs collectives, whose kernels wait for those of other ranks.
    #[getter]
    fn has_collectives(&self) -> PyResult<bool> {
        Ok(self.plan.get()?.choice().needs_engine())
    }

    /// Names of the tensors ("A", "B[0]", "C[0]", … as in the text of the program) whose memory `run` can replace:
    /// those that no peer accesses. The list may differ between ranks.
    #[getter]
    fn replaceable(&self) -> PyResult<Vec<String>> {
        let plan = self.plan.get()?;
        Ok(plan.replaceable().into_iter().map(str::to_owned).collect())
    }

    /// Enqueues one run, starting from and joining back into `stream`. Does not block.
    ///
    /// `memory` replaces the memory of some of the `replaceable` tensors, for this run only: `{name: array}`, each with
    /// the length, element type and layout that it had when the plan was created. The caller keeps it allocated until
    /// `stream` has passed the run. Peers are not notified, so ranks may differ. Raises InvalidArgumentError for
    /// another name or length, and the error that ended the device's work, such as PeerLostError, if there is one.
    #[pyo3(signature = (stream, memory=None))]
    fn run(
        &self,
        py: Python<'_>,
        stream: &Stream,
        memory: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<()> {
        let (plan, raw, stream) = (self.plan.get()?, stream.raw(), stream.live()?);
        let is_output = |name: &str| plan.is_output(name);
        let memory = array::bindings(memory, &self.place, Some(raw), is_output)?;
        detached(py, || plan.run_on(stream, &memory.bindings))
    }

    /// Launcher of the plan on the tensors `names`, with lengths `nbytes`; `own` has the plan's memory of tensors that
    /// peers access. All others are `replaceable`. Every rank uses it, or none.
    fn launcher(
        &self,
        names: Vec<String>,
        nbytes: Vec<usize>,
        own: &Bound<'_, PyDict>,
    ) -> PyResult<OverlapLauncher> {
        let plan = self.plan.get()?;
        if names.len() != nbytes.len() {
            return Err(invalid(format!(
                "there are {} names and {} lengths; expected as many",
                names.len(),
                nbytes.len()
            )));
        }
        let tensors = names.into_iter().zip(nbytes).map(|(name, bytes)| {
            let own = match own.get_item(&name)? {
                Some(array) => Some(Array::resolve_target(&array, &self.place, None)?.slice),
                None => None,
            };
            let written = plan.is_output(&name);
            Ok(Launched {
                name,
                bytes,
                own,
                written,
            })
        });
        let tensors = tensors.collect::<PyResult<Vec<_>>>()?;
        let mut order: Vec<usize> = (0..tensors.len()).collect();
        // Tensors that peers access stay in the plan's registered memory, and are copied on each launch instead of
        // replaced.
        order.retain(|at| tensors[*at].own.is_none());
        // The order in which the plan compares addresses with those of its last launch.
        order.sort_by(|a, b| tensors[*a].name.cmp(&tensors[*b].name));
        Ok(OverlapLauncher {
            plan: Detached::new(plan, captured),
            place: self.place.clone(),
            tensors,
            order,
        })
    }

    /// Captures the plan into one graph, which replaces it. Blocks while the graph is prepared.
    fn capture(&self, py: Python<'_>) -> PyResult<CapturedOverlap> {
        // Fails while a launcher shares the plan: its launches and the graph's would use the same memory and signals.
        let plan = self.plan.take_unused()?;
        let captured = detached(py, || plan.capture())?;
        Ok(CapturedOverlap(Detached::new(Arc::new(captured), || {
            closed("captured plan")
        })))
    }

    fn __repr__(&self) -> String {
        format!("OverlapPlan(lowering='{}')", self.lowering)
    }
}

#[pymethods]
impl OverlapLauncher {
    /// Enqueues one run on `stream`, in its turn among `turns`, on tensors at `addresses`: contiguous, in the order of
    /// the launcher's names. The caller keeps them allocated until `stream` has passed the run. Does not block, but
    /// captures a graph at the second run on the same addresses. Raises InvalidArgumentError for another number of
    /// addresses, and the error that ended the device's work, such as PeerLostError, if there is one.
    pub(crate) fn launch(
        &self,
        py: Python<'_>,
        turns: &Turns,
        stream: &Stream,
        addresses: Vec<u64>,
    ) -> PyResult<()> {
        if addresses.len() != self.tensors.len() {
            return Err(invalid(format!(
                "there are {} addresses; expected {}",
                addresses.len(),
                self.tensors.len()
            )));
        }
        let (plan, stream) = (self.plan.get()?, stream.live()?);
        turns.take(py, stream, || self.enqueue(&plan, stream, &addresses))
    }
}

impl OverlapLauncher {
    fn enqueue(
        &self,
        plan: &overlap::OverlapPlan,
        stream: &warplink::device::Stream,
        addresses: &[u64],
    ) -> Result<(), Error> {
        let given = |at: usize| {
            let tensor = &self.tensors[at];
            self.place.borrow_given(addresses[at], tensor.bytes)
        };
        for (at, tensor) in self.tensors.iter().enumerate() {
            // On the caller's stream, so that the program's streams, which start from it, see the copies.
            if let (Some(own), false) = (&tensor.own, tensor.written) {
                stream.copy(own, &given(at)?)?;
            }
        }
        let replaced: Vec<u64> = self.order.iter().map(|at| addresses[*at]).collect();
        // The closure runs only if addresses have changed: building the map of names would dominate a recurring
        // launch.
        plan.launch_on(stream, &replaced, || {
            let each = |at: &usize| Ok((self.tensors[*at].name.clone(), given(*at)?));
            self.order.iter().map(each).collect()
        })?;
        for (at, tensor) in self.tensors.iter().enumerate() {
            // After the run, which joins back into this stream.
            if let (Some(own), true) = (&tensor.own, tensor.written) {
                stream.copy(&given(at)?, own)?;
            }
        }
        Ok(())
    }
}

#[pymethods]
impl CapturedOverlap {
    /// Enqueues the graph on `stream`. Does not block. Raises the error that ended the device's work, such as
    /// PeerLostError, if there is one.
    fn launch(&self, py: Python<'_>, stream: &Stream) -> PyResult<()> {
        let (captured, stream) = (self.0.get()?, stream.live()?);
        detached(py, || captured.launch(stream))
    }
}
