//! Recurring calls of PyTorch's fused operations: a lookup by the operands' sizes, and a launch.
//!
//! The first call with some operands checks them, makes a plan and keeps it here; that takes many operations of Python.
//! A later one runs in [`RecentCalls::call`] alone, if nothing about it is special.

use crate::overlap::OverlapLauncher;
use crate::pair::RecentPair;
use crate::stream::{Stream, Turns};
use crate::watch::Watch;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple, PyWeakrefMethods, PyWeakrefReference};
use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Maximum number of calls that are kept. Beyond it all are dropped: those that recur are kept again.
const MAX_CALLS: usize = 4096;

/// Fused operations that were called before, by group, sizes, layouts and types.
#[pyclass(frozen, module = "warplink")]
#[derive(Debug, Default)]
pub(crate) struct RecentCalls(Mutex<HashMap<Signature, Py<RecentCall>>>);

/// How a call of a fused operation runs again: as the plan with the key `call` of `space`, a
/// `warplink.torch.workspace.Workspace`, on results of `sizes`; or as `pair`, its collective and its matmuls, if there is
/// a decision for that. `prepare(A)` returns the left operand as both read it, if it is not A itself, and
/// `finish(results)` the results of the operation.
#[pyclass(frozen, module = "warplink")]
#[derive(Debug)]
pub(crate) struct RecentCall {
    /// Weak, since nothing removes the calls of a group that is dropped.
    space: Py<PyWeakrefReference>,
    call: Py<PyAny>,
    sizes: Vec<Py<PyTuple>>,
    prepare: Option<Py<PyAny>>,
    finish: Py<PyAny>,
    pair: Py<RecentPair>,
    process: u32,
}

/// Everything that a call's checks, plan and results depend on.
#[derive(Debug, PartialEq, Eq, Hash)]
struct Signature {
    operation: String,
    group: String,
    /// The dimension, and types, devices, sizes and strides of the operands.
    numbers: Vec<i64>,
}

impl Signature {
    fn of(
        operation: &str,
        group: &str,
        dim: i64,
        a: &Bound<'_, PyAny>,
        bs: &Bound<'_, PyList>,
    ) -> PyResult<Self> {
        let mut numbers = Vec::with_capacity(32);
        numbers.push(dim);
        describe(a, &mut numbers)?;
        for b in bs {
            describe(&b, &mut numbers)?;
        }
        Ok(Self {
            operation: operation.to_owned(),
            group: group.to_owned(),
            numbers,
        })
    }
}

/// Appends the type, device, sizes and strides of `tensor`.
fn describe(tensor: &Bound<'_, PyAny>, numbers: &mut Vec<i64>) -> PyResult<()> {
    let py = tensor.py();
    // PyTorch has one object for each type, which lives as long as the process.
    let dtype = tensor.getattr(intern!(py, "dtype"))?.as_ptr() as i64;
    let device = tensor.call_method0(intern!(py, "get_device"))?;
    let shape = tensor.getattr(intern!(py, "shape"))?;
    let strides = tensor.call_method0(intern!(py, "stride"))?;
    let (shape, strides) = (shape.cast::<PyTuple>()?, strides.cast::<PyTuple>()?);
    numbers.extend([dtype, device.extract()?, shape.len() as i64]);
    for extent in shape.iter().chain(strides.iter()) {
        numbers.push(extent.extract()?);
    }
    Ok(())
}

#[pymethods]
impl RecentCalls {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    /// Keeps `recent` for later calls with the same arguments and with operands like `a` and `bs`.
    fn keep(
        &self,
        operation: &str,
        dim: i64,
        group_name: &str,
        a: &Bound<'_, PyAny>,
        bs: &Bound<'_, PyList>,
        recent: Py<RecentCall>,
    ) -> PyResult<()> {
        let signature = Signature::of(operation, group_name, dim, a, bs)?;
        let mut calls = self.lock();
        // Dropped after the lock is released, since this may run Python code.
        let full = (calls.len() >= MAX_CALLS).then(|| std::mem::take(&mut *calls));
        let replaced = calls.insert(signature, recent);
        drop(calls);
        drop((full, replaced));
        Ok(())
    }

    /// Runs a kept call in its turn on the caller's current stream. Returns the results; None, with nothing done, where
    /// there is none, or none that runs now: its plan or its group is gone, a call failed, or the stream records a graph.
    /// Raises the errors of the launch.
    fn call(
        &self,
        py: Python<'_>,
        operation: &str,
        dim: i64,
        group_name: &str,
        a: &Bound<'_, PyAny>,
        bs: &Bound<'_, PyList>,
    ) -> PyResult<Option<Py<PyAny>>> {
        let signature = Signature::of(operation, group_name, dim, a, bs)?;
        let found = self.lock().get(&signature).map(|call| call.clone_ref(py));
        let Some(recent) = found else {
            return Ok(None);
        };
        recent.get().run(py, a, bs)
    }
}

impl RecentCalls {
    fn lock(&self) -> MutexGuard<'_, HashMap<Signature, Py<RecentCall>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl RecentCall {
    #[new]
    #[pyo3(signature = (space, call, sizes, finish, pair, prepare=None))]
    fn new(
        space: &Bound<'_, PyAny>,
        call: Py<PyAny>,
        sizes: Vec<Py<PyTuple>>,
        finish: Py<PyAny>,
        pair: Py<RecentPair>,
        prepare: Option<Py<PyAny>>,
    ) -> PyResult<Self> {
        Ok(Self {
            space: PyWeakrefReference::new(space)?.unbind(),
            call,
            sizes,
            prepare,
            finish,
            pair,
            process: std::process::id(),
        })
    }
}

impl RecentCall {
    fn run(
        &self,
        py: Python<'_>,
        a: &Bound<'_, PyAny>,
        bs: &Bound<'_, PyList>,
    ) -> PyResult<Option<Py<PyAny>>> {
        if self.process != std::process::id() {
            return Ok(None);
        }
        let Some(space) = self.space.bind(py).upgrade() else {
            return Ok(None);
        };
        let Some((of_torch, stream)) = open_streams(&space)? else {
            return Ok(None);
        };
        let fuses = self.fuses(&space)?;
        // A plan that was dropped is made again by all ranks.
        if fuses && !space.getattr(intern!(py, "plans"))?.contains(&self.call)? {
            return Ok(None);
        }
        let left = match &self.prepare {
            Some(prepare) => prepare.bind(py).call1((a,))?,
            None => a.clone(),
        };
        if !fuses {
            let results = self
                .pair
                .get()
                .run(&space, (&of_torch, stream.get()), &left, bs)?;
            if results.is_some() {
                space.call_method1(intern!(py, "note"), (&self.call,))?;
            }
            return Ok(results);
        }
        let results = PyList::empty(py);
        for sizes in &self.sizes {
            results.append(a.call_method1(intern!(py, "new_empty"), (sizes,))?)?;
        }
        let mut addresses = Vec::with_capacity(1 + bs.len() + results.len());
        addresses.push(address(&left)?);
        for tensor in bs.iter().chain(results.iter()) {
            addresses.push(address(&tensor)?);
        }
        if !self.launch(&space, stream.get(), &addresses)? {
            return Ok(None);
        }
        self.finish.call1(py, (results,)).map(Some)
    }

    /// Whether the call is not decided to be faster as a collective and matmuls.
    fn fuses(&self, space: &Bound<'_, PyAny>) -> PyResult<bool> {
        let decisions = space.getattr(intern!(space.py(), "decisions"))?;
        match decisions.cast::<PyDict>()?.get_item(&self.call)? {
            Some(decision) => decision.get_item(0)?.extract(),
            None => Ok(true),
        }
    }

    /// Launches the plan under the workspace's lock. Returns whether there is one.
    fn launch(
        &self,
        space: &Bound<'_, PyAny>,
        stream: &Stream,
        addresses: &[u64],
    ) -> PyResult<bool> {
        let py = space.py();
        let lock = space.getattr(intern!(py, "lock"))?;
        lock.call_method0(intern!(py, "acquire"))?;
        let mut launched = self.launch_locked(space, stream, addresses);
        if let Err(error) = &launched
            && let Err(explained) = space.call_method1(intern!(py, "explain"), (error.value(py),))
        {
            launched = Err(explained);
        }
        lock.call_method0(intern!(py, "release"))?;
        launched
    }

    fn launch_locked(
        &self,
        space: &Bound<'_, PyAny>,
        stream: &Stream,
        addresses: &[u64],
    ) -> PyResult<bool> {
        let py = space.py();
        let plans = space.getattr(intern!(py, "plans"))?;
        let plans = plans.cast::<PyDict>()?;
        let Some(plan) = plans.get_item(&self.call)? else {
            return Ok(false);
        };
        // The most recently used plan is last, on every rank, whichever path its calls take.
        plans.del_item(&self.call)?;
        plans.set_item(&self.call, &plan)?;
        space.call_method1(intern!(py, "note_locked"), (&self.call,))?;
        let launcher = plan.getattr(intern!(py, "launcher"))?;
        let turns = space.getattr(intern!(py, "turns"))?;
        let launcher = launcher.cast::<OverlapLauncher>()?.get();
        launcher.launch_at(py, turns.cast::<Turns>()?.get(), stream, addresses)?;
        stream.settle(py)?;
        Ok(true)
    }
}

/// The caller's current stream of an open workspace, as PyTorch knows it and as Warplink does; None if it is not known
/// yet or records a graph, or if the workspace is closed or has failed.
fn open_streams<'py>(
    space: &Bound<'py, PyAny>,
) -> PyResult<Option<(Bound<'py, PyAny>, Bound<'py, Stream>)>> {
    let py = space.py();
    if space.getattr(intern!(py, "closed"))?.is_truthy()? {
        return Ok(None);
    }
    let watch = space.getattr(intern!(py, "watch"))?;
    if !watch.is_none() && watch.cast::<Watch>()?.get().has_failed() {
        return Ok(None);
    }
    let known = space.call_method0(intern!(py, "known_streams"))?;
    let Ok(known) = known.cast::<PyTuple>() else {
        return Ok(None);
    };
    let stream = known.get_item(1)?.cast_into::<Stream>()?;
    let recording = stream.get().is_capturing()?;
    Ok((!recording).then_some((known.get_item(0)?, stream)))
}

/// The address of a tensor's data.
pub(crate) fn address(tensor: &Bound<'_, PyAny>) -> PyResult<u64> {
    let py = tensor.py();
    tensor.call_method0(intern!(py, "data_ptr"))?.extract()
}
