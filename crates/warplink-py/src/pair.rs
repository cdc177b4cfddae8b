//! Fused operations of PyTorch as a direct collective and matmuls, for calls that recur.

use crate::call_state::CallState;
use crate::collective_call;
use crate::direct_calls::DirectCalls;
use crate::recent::{Layout, address, finished};
use crate::stream::Stream;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple, PyWeakrefMethods, PyWeakrefReference};
use std::sync::OnceLock;
use warplink::collective::{Call, CollectiveKind};

/// Calls of an operation with operands of given sizes, as the collective `kind` of `group`, a `ProcessGroupWarplink`,
/// before or after matmuls.
///
/// The left operand is viewed with the sizes `matrix` unless it has two dimensions. The collective's target has the
/// sizes `target`, and the shorter of its operands `count` elements; it reduces by `how`, its operator and element
/// type, or moves bytes. `finish(results)` returns the results of the operation: of the products, and of the gathered
/// operand if it is one of them (`keeps`); or of the scattered product. Without it, they are these.
#[pyclass(frozen, module = "warplink")]
#[derive(Debug)]
pub(crate) struct RecentPair {
    /// Weak, since nothing removes the calls of a group that is dropped.
    group: Py<PyWeakrefReference>,
    call: Call,
    matrix: Option<Py<PyTuple>>,
    target: Layout,
    keeps: bool,
    finish: Option<Py<PyAny>>,
    /// The group's collectives, once they were found on the device of its calls. Weak, as the group.
    direct: OnceLock<Py<PyWeakrefReference>>,
}

#[pymethods]
impl RecentPair {
    #[new]
    #[pyo3(signature = (group, kind, count, how, matrix, target, keeps, finish=None))]
    #[allow(clippy::too_many_arguments, reason = "they are Python's arguments")]
    fn new(
        group: &Bound<'_, PyAny>,
        kind: &str,
        count: usize,
        how: Option<(String, String)>,
        matrix: Option<Py<PyTuple>>,
        target: &Bound<'_, PyTuple>,
        keeps: bool,
        finish: Option<Py<PyAny>>,
    ) -> PyResult<Self> {
        let (op, element) = match &how {
            Some((op, element)) => (Some(&**op), &**element),
            None => (None, "u8"),
        };
        Ok(Self {
            group: PyWeakrefReference::new(group)?.unbind(),
            call: collective_call::call(kind, count, element, op, None)?,
            matrix,
            target: Layout::of(target)?,
            keeps,
            finish,
            direct: OnceLock::new(),
        })
    }
}

impl RecentPair {
    /// Whether the operation gathers its left operand, rather than scatters its product.
    pub(crate) fn gathers(&self) -> bool {
        self.call.kind == CollectiveKind::AllGather
    }

    /// Whether the gathered operand is one of the results.
    pub(crate) fn keeps(&self) -> bool {
        self.keeps
    }

    /// Runs on the caller's current stream with the contiguous left operand `left`. Returns None, if there are no
    /// collectives on the device of `state`, or none with a fast path.
    pub(crate) fn run(
        &self,
        state: &CallState,
        stream: &Bound<'_, Stream>,
        left: &Bound<'_, PyAny>,
        bs: &Bound<'_, PyList>,
    ) -> PyResult<Option<Py<PyAny>>> {
        let py = stream.py();
        // Every `None` before the first enqueue sends the call to Python's path, which does the same or raises.
        let Some(direct) = self.direct(state, py)? else {
            return Ok(None);
        };
        // Python's path blocks where waits do, and records what the flight recorder sees.
        let quick = direct.getattr(intern!(py, "_quick"))?;
        let Ok(quick) = quick.cast::<DirectCalls>() else {
            return Ok(None);
        };
        let collective = |target: &Bound<'_, PyAny>, source: &Bound<'_, PyAny>| {
            let memory = [address(target)?, address(source)?];
            self.collective(&direct, quick.get(), stream.get(), memory)
        };
        let left = match &self.matrix {
            Some(sizes) => &left.call_method1(intern!(py, "view"), (sizes,))?,
            None => left,
        };
        let results = PyList::empty(py);
        if self.gathers() {
            // Allocated by PyTorch on the current stream, which the collective runs in: its allocator orders any
            // reuse.
            let whole = self.target.new_like(left)?;
            collective(&whole, left)?;
            for b in bs {
                results.append(product(&whole, &b)?)?;
            }
            if self.keeps {
                results.append(whole)?;
            }
        } else {
            let whole = product(left, &bs.get_item(0)?)?;
            let part = self.target.new_like(&whole)?;
            collective(&part, &whole)?;
            results.append(part)?;
        }
        finished(&results, self, self.finish.as_ref()).map(Some)
    }

    /// The group's collectives on the device of `state`, if there are any.
    fn direct<'py>(
        &self,
        state: &CallState,
        py: Python<'py>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        if let Some(known) = self.direct.get() {
            return Ok(known.bind(py).upgrade());
        }
        let Some(group) = self.group.bind(py).upgrade() else {
            return Ok(None);
        };
        let direct = group.call_method0(intern!(py, "_joined_collectives"))?;
        // Another device's collectives would access memory by addresses of the wrong GPU.
        if direct.is_none() || !direct.getattr("_device")?.eq(state.device(py))? {
            return Ok(None);
        }
        // Another thread has found the same.
        let _ = self.direct.set(PyWeakrefReference::new(&direct)?.unbind());
        Ok(Some(direct))
    }

    /// Enqueues the collective between memory at two addresses, which PyTorch keeps until the stream is past it. Raises
    /// what went wrong so far.
    fn collective(
        &self,
        direct: &Bound<'_, PyAny>,
        quick: &DirectCalls,
        stream: &Stream,
        memory: [u64; 2],
    ) -> PyResult<()> {
        let py = direct.py();
        let enqueued = quick.behind_others(py, stream, |collectives| {
            collectives.enqueue_at(py, &self.call, stream, memory)
        });
        if let Err(error) = enqueued {
            // Raises the first failure, if that is why.
            direct.call_method0(intern!(py, "_check"))?;
            return Err(error);
        }
        // PyTorch's CPU tensors have no streams: the caller reads the result as soon as this returns.
        stream.settle(py)
    }
}

/// `left @ right`, without a gradient, like all results of the operations.
fn product<'py>(
    left: &Bound<'py, PyAny>,
    right: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = left.py();
    let product = left.call_method1(intern!(py, "mm"), (right,))?;
    if !product.getattr(intern!(py, "requires_grad"))?.is_truthy()? {
        return Ok(product);
    }
    // The fused operators have no gradients; a result of `mm` that records one would keep operands alive.
    product.call_method0(intern!(py, "detach"))
}
