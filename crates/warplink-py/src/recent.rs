//! Recurring calls of PyTorch's fused operations: a lookup by the operands' sizes, and a launch.
//!
//! The first call with some operands checks them, makes a plan and keeps it here; that takes many operations of Python.
//! A later one runs in [`RecentCalls::run`] alone, if nothing about it is special.

use crate::call_state::CallState;
use crate::overlap::OverlapLauncher;
use crate::pair::RecentPair;
use crate::stream::Stream;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple, PyWeakrefMethods, PyWeakrefReference};
use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Maximum number of calls that are kept. Beyond it all are dropped: those that recur are kept again.
const MAX_CALLS: usize = 4096;

/// Fused operations that were called before, by everything that their checks, plans and results depend on.
///
/// `profiler` is PyTorch's module: calls that a profiler sees have spans, which native code has not.
#[pyclass(frozen, module = "warplink")]
#[derive(Debug)]
pub(crate) struct RecentCalls {
    calls: Mutex<HashMap<Vec<i64>, Py<RecentCall>>>,
    profiler: Py<PyAny>,
}

/// How a call of a fused operation runs again: as the plan with the key `call` of the workspace with the state `state`, on
/// results of `sizes`; or as `pair`, its collective and its matmuls, if there is a decision for that. `prepare(A)` returns
/// the left operand as both read it, if it is not A itself, and `finish(results)` the results of the operation, if they are
/// not those of the plan.
#[pyclass(frozen, module = "warplink")]
#[derive(Debug)]
pub(crate) struct RecentCall {
    /// Weak, since nothing removes the calls of a group that is dropped.
    state: Py<PyWeakrefReference>,
    call: Py<PyAny>,
    results: Vec<Layout>,
    prepare: Option<Py<PyAny>>,
    finish: Option<Py<PyAny>>,
    pair: Py<RecentPair>,
    process: u32,
}

/// Sizes of a contiguous tensor.
#[derive(Debug)]
pub(crate) struct Layout {
    sizes: Py<PyTuple>,
    strides: Py<PyTuple>,
}

impl Layout {
    pub(crate) fn of(sizes: &Bound<'_, PyTuple>) -> PyResult<Self> {
        let extents: Vec<i64> = sizes.extract()?;
        let mut strides = vec![1; extents.len()];
        for dim in (1..extents.len()).rev() {
            strides[dim - 1] = strides[dim] * extents[dim].max(1);
        }
        Ok(Self {
            strides: PyTuple::new(sizes.py(), strides)?.unbind(),
            sizes: sizes.clone().unbind(),
        })
    }

    /// A new tensor with these sizes, the type and the device of `tensor`.
    pub(crate) fn new_like<'py>(&self, tensor: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        // Two thirds of the time of `new_empty`, which PyTorch dispatches twice.
        let name = intern!(tensor.py(), "new_empty_strided");
        tensor.call_method1(name, (&self.sizes, &self.strides))
    }
}

/// Cache key of a call: the operation and the group, the dimension, and types, devices, sizes and strides of the operands.
fn key(
    operation: &str,
    group: &str,
    dim: i64,
    a: &Bound<'_, PyAny>,
    bs: &Bound<'_, PyList>,
) -> PyResult<Vec<i64>> {
    // Enough for an operation, a group's name and two matrices without a reallocation.
    let mut key = Vec::with_capacity(48);
    for name in [operation, group] {
        // Lengths make the key a prefix code: no other names, or shapes of other ranks, give the same numbers.
        key.push(name.len() as i64);
        key.extend(name.bytes().map(i64::from));
    }
    key.push(dim);
    describe(a, &mut key)?;
    for b in bs {
        describe(&b, &mut key)?;
    }
    Ok(key)
}

/// Appends the type, device, sizes and strides of `tensor`.
fn describe(tensor: &Bound<'_, PyAny>, key: &mut Vec<i64>) -> PyResult<()> {
    let py = tensor.py();
    // PyTorch has one object for each type, which lives as long as the process.
    let dtype = tensor.getattr(intern!(py, "dtype"))?.as_ptr() as i64;
    let device = tensor.call_method0(intern!(py, "get_device"))?;
    let shape = tensor.getattr(intern!(py, "shape"))?;
    let strides = tensor.call_method0(intern!(py, "stride"))?;
    let (shape, strides) = (shape.cast::<PyTuple>()?, strides.cast::<PyTuple>()?);
    key.extend([dtype, device.extract()?, shape.len() as i64]);
    for extent in shape.iter().chain(strides.iter()) {
        key.push(extent.extract()?);
    }
    Ok(())
}

#[pymethods]
impl RecentCalls {
    #[new]
    fn new(profiler: Py<PyAny>) -> Self {
        Self {
            calls: Mutex::default(),
            profiler,
        }
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
        let key = key(operation, group_name, dim, a, bs)?;
        let mut calls = self.lock();
        // Dropped after the lock is released, since this may run Python code.
        let full = (calls.len() >= MAX_CALLS).then(|| std::mem::take(&mut *calls));
        let replaced = calls.insert(key, recent);
        drop(calls);
        drop((full, replaced));
        Ok(())
    }

    /// Runs a kept call in its turn on the caller's current stream. Returns the results; None, with nothing done, where
    /// there is none, or none that runs now: its plan or its group is gone, a call failed, the stream records a graph, or a
    /// profile is taken. Raises the errors of the launch.
    pub(crate) fn call(
        &self,
        py: Python<'_>,
        operation: &str,
        dim: i64,
        group_name: &str,
        a: &Bound<'_, PyAny>,
        bs: &Bound<'_, PyList>,
    ) -> PyResult<Option<Py<PyAny>>> {
        let key = key(operation, group_name, dim, a, bs)?;
        // Cloned, so that the lock is not held over calls into PyTorch, which may release the interpreter's lock.
        let found = self.lock().get(&key).map(|call| call.clone_ref(py));
        let Some(recent) = found else {
            return Ok(None);
        };
        let profiler = self.profiler.bind(py);
        let profiles = profiler.getattr(intern!(py, "_is_profiler_enabled"))?;
        // Python's path records the ranges that the profiler shows.
        if profiles.is_truthy()? {
            return Ok(None);
        }
        recent.get().run(py, a, bs)
    }
}

impl RecentCalls {
    fn lock(&self) -> MutexGuard<'_, HashMap<Vec<i64>, Py<RecentCall>>> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl RecentCall {
    #[new]
    #[pyo3(signature = (state, call, sizes, pair, prepare=None, finish=None))]
    fn new(
        state: &Bound<'_, CallState>,
        call: Py<PyAny>,
        sizes: Vec<Bound<'_, PyTuple>>,
        pair: Py<RecentPair>,
        prepare: Option<Py<PyAny>>,
        finish: Option<Py<PyAny>>,
    ) -> PyResult<Self> {
        Ok(Self {
            state: PyWeakrefReference::new(state)?.unbind(),
            call,
            results: sizes.iter().map(Layout::of).collect::<PyResult<_>>()?,
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
        // A forked process has the entry but none of the device's threads; Python's path raises the error for it.
        if self.process != std::process::id() {
            return Ok(None);
        }
        let Some(state) = self.state.bind(py).upgrade_as::<CallState>()? else {
            return Ok(None);
        };
        let state = state.get();
        let Some(stream) = state.current_stream(py)? else {
            return Ok(None);
        };
        let left = match &self.prepare {
            Some(prepare) => prepare.bind(py).call1((a,))?,
            None => a.clone(),
        };
        let pair = self.pair.get();
        // The decision was made alike on all ranks, so that all take the same branch and their calls match.
        if !state.fuses(self.call.bind(py))? {
            let results = pair.run(state, &stream, &left, bs)?;
            if results.is_some() {
                state.note(self.call.clone_ref(py));
            }
            return Ok(results);
        }
        let results = PyList::empty(py);
        let mut addresses = Vec::with_capacity(1 + bs.len() + self.results.len());
        // In the order in which the launcher's tensors are declared: operands, then results.
        addresses.push(address(&left)?);
        for b in bs {
            addresses.push(address(&b)?);
        }
        for layout in &self.results {
            let result = layout.new_like(a)?;
            addresses.push(address(&result)?);
            results.append(result)?;
        }
        let launch = || self.launch(state, &stream, addresses);
        if !state.locked(py, launch)? {
            return Ok(None);
        }
        finished(&results, pair, self.finish.as_ref()).map(Some)
    }

    /// Launches the plan under the workspace's lock. Returns whether there is one: a plan that was dropped is made again by
    /// all ranks.
    fn launch(
        &self,
        state: &CallState,
        stream: &Bound<'_, Stream>,
        addresses: Vec<u64>,
    ) -> PyResult<bool> {
        let py = stream.py();
        let Some(plan) = state.use_plan(self.call.bind(py))? else {
            return Ok(false);
        };
        // Noted before the launch, since a mismatch that the launch reports is explained by the list of calls.
        state.note(self.call.clone_ref(py));
        // Kernels that wait for other ranks must start in the same order on every GPU, or two of them may each hold
        // the multiprocessors that the other's peer needs.
        if plan.getattr(intern!(py, "has_collectives"))?.is_truthy()? {
            state.follow_others(stream)?;
        }
        let launcher = plan.getattr(intern!(py, "launcher"))?;
        let launcher = launcher.cast::<OverlapLauncher>()?.get();
        launcher.launch(py, state.turns(), stream.get(), addresses)?;
        stream.get().settle(py)?;
        Ok(true)
    }
}

/// The results of the operation, which `finish` makes of `results` if there is one: those of the products, and the gathered
/// operand behind them if it is kept; or the scattered product.
pub(crate) fn finished(
    results: &Bound<'_, PyList>,
    pair: &RecentPair,
    finish: Option<&Py<PyAny>>,
) -> PyResult<Py<PyAny>> {
    let py = results.py();
    if let Some(finish) = finish {
        return finish.call1(py, (results,));
    }
    if !pair.gathers() {
        return Ok(results.get_item(0)?.unbind());
    }
    let gathered = if pair.keeps() {
        let last = results.get_item(results.len() - 1)?;
        // PyTorch's operator returns the gathered operand first, apart from the list of products.
        results.del_item(results.len() - 1)?;
        last.unbind()
    } else {
        py.None()
    };
    Ok((gathered, results).into_pyobject(py)?.into_any().unbind())
}

/// The address of a tensor's data.
pub(crate) fn address(tensor: &Bound<'_, PyAny>) -> PyResult<u64> {
    let py = tensor.py();
    tensor.call_method0(intern!(py, "data_ptr"))?.extract()
}
