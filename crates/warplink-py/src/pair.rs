//! Fused operations of PyTorch as a direct collective and matmuls, for calls that recur.

use crate::collective_options;
use crate::collectives::Collectives;
use crate::recent::address;
use crate::stream::Stream;
use crate::watch::Watch;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple, PyWeakrefMethods, PyWeakrefReference};
use warplink::collective::{Call, CollectiveKind};

/// Calls of an operation with operands of given sizes, as the collective `kind` of `group`, a `ProcessGroupWarplink`,
/// before or after matmuls.
///
/// The left operand is viewed with the sizes `matrix` unless it has two dimensions. The collective's target has the
/// sizes `target`, and the shorter of its operands `count` elements; it reduces by `how`, its operator and element
/// type, or moves bytes. `finish(results)` returns the results of the operation: of the products, and of the gathered
/// operand if it is one of them (`keeps`); or of the scattered product.
#[pyclass(frozen, module = "warplink")]
#[derive(Debug)]
pub(crate) struct RecentPair {
    /// Weak, since nothing removes the calls of a group that is dropped.
    group: Py<PyWeakrefReference>,
    call: Call,
    matrix: Option<Py<PyTuple>>,
    target: Py<PyTuple>,
    keeps: bool,
    finish: Py<PyAny>,
}

#[pymethods]
impl RecentPair {
    #[new]
    #[allow(clippy::too_many_arguments, reason = "they are Python's arguments")]
    fn new(
        group: &Bound<'_, PyAny>,
        kind: &str,
        count: usize,
        how: Option<(String, String)>,
        matrix: Option<Py<PyTuple>>,
        target: Py<PyTuple>,
        keeps: bool,
        finish: Py<PyAny>,
    ) -> PyResult<Self> {
        let (op, element) = match &how {
            Some((op, element)) => (Some(&**op), &**element),
            None => (None, "u8"),
        };
        Ok(Self {
            group: PyWeakrefReference::new(group)?.unbind(),
            call: collective_options::call(kind, count, element, op, None)?,
            matrix,
            target,
            keeps,
            finish,
        })
    }
}

impl RecentPair {
    /// Runs on the caller's current stream, known to PyTorch and to Warplink as `streams`, with the contiguous left
    /// operand `left`. Returns None, if there are no collectives on the device of `space`.
    pub(crate) fn run(
        &self,
        space: &Bound<'_, PyAny>,
        streams: (&Bound<'_, PyAny>, &Stream),
        left: &Bound<'_, PyAny>,
        bs: &Bound<'_, PyList>,
    ) -> PyResult<Option<Py<PyAny>>> {
        let py = space.py();
        let Some(group) = self.group.bind(py).upgrade() else {
            return Ok(None);
        };
        let direct = group.call_method0(intern!(py, "_joined_collectives"))?;
        if direct.is_none() {
            return Ok(None);
        }
        let device = direct.getattr(intern!(py, "_device"))?;
        if !device.eq(space.getattr(intern!(py, "device"))?)? {
            return Ok(None);
        }
        let left = match &self.matrix {
            Some(sizes) => &left.call_method1(intern!(py, "view"), (sizes,))?,
            None => left,
        };
        let target_like = |tensor: &Bound<'_, PyAny>| {
            tensor
                .call_method1(intern!(py, "new_empty"), (&self.target,))
                .map(Bound::unbind)
        };
        let results = PyList::empty(py);
        if self.call.kind == CollectiveKind::AllGather {
            let whole = target_like(left)?.into_bound(py);
            if !self.collective(&direct, streams, [&whole, left])? {
                return Ok(None);
            }
            for b in bs {
                results.append(product(&whole, &b)?)?;
            }
            if self.keeps {
                results.append(whole)?;
            }
        } else {
            let whole = product(left, &bs.get_item(0)?)?;
            let part = target_like(&whole)?.into_bound(py);
            if !self.collective(&direct, streams, [&part, &whole])? {
                return Ok(None);
            }
            results.append(part)?;
        }
        self.finish.call1(py, (results,)).map(Some)
    }

    /// Enqueues the collective between a target and a source. Raises what went wrong so far. Returns false, with nothing
    /// done, where calls block.
    fn collective(
        &self,
        direct: &Bound<'_, PyAny>,
        (of_torch, stream): (&Bound<'_, PyAny>, &Stream),
        [target, source]: [&Bound<'_, PyAny>; 2],
    ) -> PyResult<bool> {
        let py = direct.py();
        if direct.getattr(intern!(py, "_waits_block"))?.is_truthy()? {
            return Ok(false);
        }
        let collectives = direct.getattr(intern!(py, "_collectives"))?;
        let watch = direct.getattr(intern!(py, "_watch"))?;
        let (collectives, watch) = (collectives.cast::<Collectives>()?, watch.cast::<Watch>()?);
        // PyTorch keeps their memory until the stream is past it.
        let memory = [address(target)?, address(source)?];
        let several = direct.getattr(intern!(py, "_groups"))?.len()? > 1
            && direct
                .call_method1(intern!(py, "_begin"), (of_torch,))?
                .is_truthy()?;
        let enqueued = collectives.get().enqueue_at(py, &self.call, stream, memory);
        if let Err(error) = enqueued {
            // Raises the first failure, if that is why.
            direct.call_method0(intern!(py, "_check"))?;
            return Err(error);
        }
        if several {
            direct.call_method1(intern!(py, "_end"), (of_torch, true))?;
        } else {
            // Groups that are made later follow it.
            direct.setattr(intern!(py, "_stream"), of_torch)?;
        }
        if watch.get().has_failed() {
            direct.call_method0(intern!(py, "_check"))?;
        }
        stream.settle(py)?;
        Ok(true)
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
    product.call_method0(intern!(py, "detach"))
}
