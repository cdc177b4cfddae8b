//! State of a workspace of fused operations, which recurring calls use without running Python code.

use crate::order::Order;
use crate::stream::{Stream, Turns};
use crate::watch::Watch;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple, PyWeakrefMethods, PyWeakrefReference};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Maximum number of remembered calls.
const MAX_NOTED: usize = 64;

/// State of `space`, a `warplink.torch.workspace.Workspace` on `device`, in its own objects: its plans and decisions by
/// call, its lock, the turns of its streams, and the watch that waits for them, if there is one. `streams` has the
/// streams that it has used, by handle, as PyTorch and as Warplink know them; `current(index)` returns the handle of the
/// caller's current stream of the GPU `index`, and is None on the host device, whose stream has the handle 0. `order` is
/// that among kernels of the device.
#[pyclass(frozen, weakref, module = "warplink")]
#[derive(Debug)]
pub(crate) struct CallState {
    /// Weak, since it holds this.
    space: Py<PyWeakrefReference>,
    device: Py<PyAny>,
    lock: Py<PyAny>,
    plans: Py<PyDict>,
    decisions: Py<PyDict>,
    streams: CurrentStreams,
    turns: Py<Turns>,
    order: Py<Order>,
    watch: Option<Py<Watch>>,
    closed: AtomicBool,
    noted: Mutex<Noted>,
}

/// Streams by handle, as PyTorch and as Warplink know them.
#[derive(Debug)]
pub(crate) struct CurrentStreams {
    known: Py<PyDict>,
    /// Returns the handle of the current stream of the GPU passed with it.
    current: Option<(Py<PyAny>, Py<PyAny>)>,
}

impl CurrentStreams {
    /// The streams `known`, which grows. Without `current`, the handle is 0.
    pub(crate) fn new(known: Py<PyDict>, current: Option<(Py<PyAny>, Py<PyAny>)>) -> Self {
        Self { known, current }
    }

    /// The caller's current stream; `None` if it is not among the known ones.
    pub(crate) fn current<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, Stream>>> {
        let known = self.known.bind(py);
        let known = match &self.current {
            Some((current, index)) => known.get_item(current.bind(py).call1((index,))?)?,
            None => known.get_item(0)?,
        };
        let Some(known) = known else {
            return Ok(None);
        };
        let stream = known.cast::<PyTuple>()?.get_item(1)?;
        Ok(Some(stream.cast_into::<Stream>()?))
    }
}

/// The calls of a workspace, in order.
#[derive(Debug, Default)]
struct Noted {
    count: u64,
    /// The last ones.
    calls: VecDeque<Py<PyAny>>,
}

#[pymethods]
impl CallState {
    #[new]
    #[pyo3(signature = (space, device, lock, plans, decisions, streams, turns, order, watch, current=None))]
    #[expect(
        clippy::too_many_arguments,
        reason = "they are the parts of a workspace"
    )]
    fn new(
        space: &Bound<'_, PyAny>,
        device: &Bound<'_, PyAny>,
        lock: Py<PyAny>,
        plans: Py<PyDict>,
        decisions: Py<PyDict>,
        streams: Py<PyDict>,
        turns: Py<Turns>,
        order: Py<Order>,
        watch: Option<Py<Watch>>,
        current: Option<Py<PyAny>>,
    ) -> PyResult<Self> {
        let index = device.getattr("index")?.unbind();
        let current = current.map(|current| (current, index));
        Ok(Self {
            space: PyWeakrefReference::new(space)?.unbind(),
            device: device.clone().unbind(),
            lock,
            plans,
            decisions,
            streams: CurrentStreams::new(streams, current),
            turns,
            order,
            watch,
            closed: AtomicBool::new(false),
            noted: Mutex::default(),
        })
    }

    /// Notes that `call` is the next one.
    pub(crate) fn note(&self, call: Py<PyAny>) {
        let mut noted = self.lock_noted();
        noted.count += 1;
        let oldest = (noted.calls.len() == MAX_NOTED).then(|| noted.calls.pop_front());
        noted.calls.push_back(call);
        drop(noted);
        // Outside the lock, since this may run Python code.
        drop(oldest);
    }

    /// The number of calls so far, and the last ones.
    fn noted(&self, py: Python<'_>) -> (u64, Vec<Py<PyAny>>) {
        let noted = self.lock_noted();
        let calls = noted.calls.iter().map(|call| call.clone_ref(py));
        (noted.count, calls.collect())
    }

    /// No call recurs any more.
    fn close(&self) {
        // Release: pairs with the load in `current_stream`.
        self.closed.store(true, Ordering::Release);
    }
}

impl CallState {
    pub(crate) fn turns(&self) -> &Turns {
        self.turns.get()
    }

    /// Makes `stream` wait for work of others on the device.
    pub(crate) fn follow_others(&self, stream: &Bound<'_, Stream>) -> PyResult<()> {
        let turns = self.turns.bind(stream.py());
        self.order.get().follow(turns.as_any(), stream.get())
    }

    pub(crate) fn device<'py>(&self, py: Python<'py>) -> &Bound<'py, PyAny> {
        self.device.bind(py)
    }

    fn lock_noted(&self) -> MutexGuard<'_, Noted> {
        self.noted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The caller's current stream of an open workspace; None if it was not used before or records a graph, or if the
    /// workspace is closed or has failed.
    pub(crate) fn current_stream<'py>(
        &self,
        py: Python<'py>,
    ) -> PyResult<Option<Bound<'py, Stream>>> {
        // Acquire: pairs with the store in `close`.
        // These checks decide between this path and Python's, which handles each of the cases and raises the right
        // exception.
        if self.closed.load(Ordering::Acquire) {
            return Ok(None);
        }
        if self
            .watch
            .as_ref()
            .is_some_and(|watch| watch.get().has_failed())
        {
            return Ok(None);
        }
        let Some(stream) = self.streams.current(py)? else {
            return Ok(None);
        };
        // Python's path marks plans that a graph has recorded, which must be kept as long as the graph may be
        // launched.
        let recording = stream.get().is_capturing()?;
        Ok((!recording).then_some(stream))
    }

    /// Whether `call` is not decided to be faster as a collective and matmuls.
    pub(crate) fn fuses(&self, call: &Bound<'_, PyAny>) -> PyResult<bool> {
        match self.decisions.bind(call.py()).get_item(call)? {
            Some(decision) => decision.get_item(0)?.extract(),
            None => Ok(true),
        }
    }

    /// The plan of `call`, if there is one, which becomes the most recently used one. Under the lock.
    pub(crate) fn use_plan<'py>(
        &self,
        call: &Bound<'py, PyAny>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let plans = self.plans.bind(call.py());
        let Some(plan) = plans.get_item(call)? else {
            return Ok(None);
        };
        // The last one, on every rank, whichever path its calls take.
        plans.del_item(call)?;
        plans.set_item(call, &plan)?;
        Ok(Some(plan))
    }

    /// Calls `launch` under the workspace's lock. Raises MismatchError in place of an error that comes of ranks that called
    /// other things.
    pub(crate) fn locked<T>(
        &self,
        py: Python<'_>,
        launch: impl FnOnce() -> PyResult<T>,
    ) -> PyResult<T> {
        let lock = self.lock.bind(py);
        // No early return until the release below: the lock is Python's and has no guard here.
        lock.call_method0(intern!(py, "acquire"))?;
        let mut launched = launch();
        if let Err(error) = &launched
            // A workspace that is gone cannot explain anything; the plain error is raised then.
            && let Some(space) = self.space.bind(py).upgrade()
            && let Err(explained) = space.call_method1(intern!(py, "explain"), (error.value(py),))
        {
            launched = Err(explained);
        }
        lock.call_method0(intern!(py, "release"))?;
        launched
    }
}
