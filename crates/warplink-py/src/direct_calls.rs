//! The fast path of direct calls on CUDA tensors: checks of the tensors, and the launch, without Python code.

use crate::call_state::CurrentStreams;
use crate::collectives::Collectives;
use crate::errors::raise;
use crate::order::Order;
use crate::recent::address;
use crate::stream::{Event, Stream};
use crate::watch::Watch;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use warplink::collective::{Call, CollectiveKind, MAX_MESSAGES};
use warplink::{DType, Rank};

/// Calls of `collectives`, on the caller's current stream, for tensors of the GPU `index` alone.
///
/// `streams` has the streams known so far, by handle, as PyTorch and as Warplink know them, and `current(index)` returns
/// the handle of the current one. `order` is that among kernels of the device, `watch` the one that waits for these calls,
/// `profiler` and `strided` are PyTorch's module and layout.
///
/// Methods return whether they made the call. If not, nothing was done, and the caller takes the path that serves every
/// call: for tensors on other devices, not contiguous, without elements or with mismatched lengths, a root out of range,
/// a stream that was not used before, and a running profiler. They raise the errors of Collectives.call_at and of
/// Watch.check.
#[pyclass(frozen, module = "warplink")]
#[derive(Debug)]
pub(crate) struct DirectCalls {
    collectives: Py<Collectives>,
    order: Py<Order>,
    watch: Option<Py<Watch>>,
    index: i64,
    streams: CurrentStreams,
    profiler: Py<PyAny>,
    strided: Py<PyAny>,
}

#[pymethods]
impl DirectCalls {
    #[new]
    #[expect(clippy::too_many_arguments, reason = "they are Python's arguments")]
    fn new(
        collectives: Py<Collectives>,
        order: Py<Order>,
        watch: Option<Py<Watch>>,
        index: Py<PyAny>,
        streams: Py<PyDict>,
        current: Py<PyAny>,
        profiler: Py<PyAny>,
        strided: Py<PyAny>,
        py: Python<'_>,
    ) -> PyResult<Self> {
        Ok(Self {
            collectives,
            order,
            watch,
            index: index.extract(py)?,
            streams: CurrentStreams::new(streams, Some((current, index))),
            profiler,
            strided,
        })
    }

    /// The collective named `kind` from `input` to `output`. `how` is the operator and the element type of a reduction;
    /// without it, bytes move.
    #[pyo3(signature = (kind, output, input, how=None, root=None))]
    fn collective(
        &self,
        py: Python<'_>,
        kind: &str,
        output: &Bound<'_, PyAny>,
        input: &Bound<'_, PyAny>,
        how: Option<(&str, &str)>,
        root: Option<i64>,
    ) -> PyResult<bool> {
        let kind: CollectiveKind = kind.parse().map_err(raise)?;
        let world = self.collectives.get().world;
        let (input_rows, output_rows) = kind.rows(world);
        let root = root.map(usize::try_from).transpose();
        let Some(root) = root
            .ok()
            .filter(|root| root.is_none_or(|root| root < world))
        else {
            return Ok(false);
        };
        if !self.serves(output, input)? || !has_type_of(output, input)? {
            return Ok(false);
        }
        let (sent, received) = (elements(input)?, elements(output)?);
        let count = received / output_rows;
        if count == 0 || received != count * output_rows || sent != count * input_rows {
            return Ok(false);
        }
        let (op, dtype, count) = match how {
            Some((op, dtype)) => (Some(op.parse()), dtype.parse().map_err(raise)?, count),
            None => {
                let bytes: usize = input.getattr(intern!(py, "itemsize"))?.extract()?;
                (None, DType::U8, count * bytes)
            }
        };
        let call = Call {
            kind,
            op: op.transpose().map_err(raise)?,
            dtype,
            count,
            root,
        };
        let memory = [address(output)?, address(input)?];
        self.enqueue(py, |collectives, stream| {
            collectives.enqueue_at(py, &call, stream, memory)
        })
    }

    /// An all-to-all of the rows of `input` and `output`: as many for each rank as the lists say, or equally many if they
    /// are empty.
    fn all_to_all(
        &self,
        py: Python<'_>,
        output: &Bound<'_, PyAny>,
        input: &Bound<'_, PyAny>,
        output_rows: &Bound<'_, PyAny>,
        input_rows: &Bound<'_, PyAny>,
    ) -> PyResult<bool> {
        if !self.serves(output, input)? {
            return Ok(false);
        }
        let received = self.bytes_of_parts(output, output_rows)?;
        let sent = self.bytes_of_parts(input, input_rows)?;
        let (Some(received), Some(sent)) = (received, sent) else {
            return Ok(false);
        };
        let memory = [address(output)?, address(input)?];
        self.enqueue(py, |collectives, stream| {
            collectives.all_to_all_at(py, stream, memory, [received, sent])
        })
    }

    /// A batch of sends and receives, a peer, whether it sends and a tensor each, on the stream `side`, as PyTorch and as
    /// Warplink know it, behind the work of the current one. Returns the event behind it, or None as the others return
    /// False; also for more messages than fit into one call.
    fn exchange(
        &self,
        py: Python<'_>,
        messages: Vec<(Rank, bool, Bound<'_, PyAny>)>,
        side: (Bound<'_, PyAny>, Bound<'_, Stream>),
    ) -> PyResult<Option<Event>> {
        let world = self.collectives.get().world;
        // The general path (`rounds` in Python) has as many messages of a peer in one call. With no more in total,
        // one call matches those of the peers, whichever path they take.
        let fit = MAX_MESSAGES / (2 * world);
        if messages.is_empty() || messages.len() > fit || self.is_profiled(py)? {
            return Ok(None);
        }
        let mut ends = [Vec::new(), Vec::new()];
        for (peer, sends, tensor) in &messages {
            if !self.is_plain(tensor)? {
                return Ok(None);
            }
            let memory = (address(tensor)?, bytes(tensor)?);
            ends[usize::from(*sends)].push((*peer, memory));
        }
        let Some(current) = self.streams.current(py)? else {
            return Ok(None);
        };
        let (torch_side, side) = (side.0, side.1.get());
        // Sends read tensors that work on the current stream may still write.
        side.follow(py, current.get())?;
        let [receives, sends] = ends;
        self.behind_others(py, side, |collectives| {
            collectives.send_receive_at(py, side, sends, receives)
        })?;
        let event = side.mark(py)?;
        // PyTorch would reuse memory of the current stream before this stream is past it.
        for (_, _, tensor) in &messages {
            tensor.call_method1(intern!(py, "record_stream"), (&torch_side,))?;
        }
        Ok(Some(event))
    }
}

impl DirectCalls {
    fn is_profiled(&self, py: Python<'_>) -> PyResult<bool> {
        let profiler = self.profiler.bind(py);
        profiler
            .getattr(intern!(py, "_is_profiler_enabled"))?
            .is_truthy()
    }

    /// Whether both tensors are contiguous on this GPU, and no profiler is to see the call.
    fn serves(&self, output: &Bound<'_, PyAny>, input: &Bound<'_, PyAny>) -> PyResult<bool> {
        Ok(!self.is_profiled(output.py())?
            && self.is_plain(output)?
            && (input.is(output) || self.is_plain(input)?))
    }

    /// Whether the elements of `tensor` follow one another in this GPU's memory, as they are.
    fn is_plain(&self, tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
        let py = tensor.py();
        let is = |name| tensor.call_method0(name)?.is_truthy();
        let index: i64 = tensor.call_method0(intern!(py, "get_device"))?.extract()?;
        // A sparse tensor raises for is_contiguous, so its layout is checked before.
        Ok(index == self.index
            && tensor.getattr(intern!(py, "layout"))?.is(&self.strided)
            && is(intern!(py, "is_contiguous"))?
            // PyTorch conjugates and negates lazily: the memory of such a tensor does not hold its values.
            && !is(intern!(py, "is_conj"))?
            && !is(intern!(py, "is_neg"))?)
    }

    /// Bytes of each rank's rows of `tensor`; `None` unless `rows` are those of all ranks, or none.
    fn bytes_of_parts(
        &self,
        tensor: &Bound<'_, PyAny>,
        rows: &Bound<'_, PyAny>,
    ) -> PyResult<Option<Vec<usize>>> {
        let py = tensor.py();
        let world = self.collectives.get().world;
        let shape = tensor.getattr(intern!(py, "shape"))?;
        if shape.len()? == 0 {
            return Ok(None);
        }
        let all: usize = shape.get_item(0)?.extract()?;
        let bytes = bytes(tensor)?;
        if !rows.is_truthy()? {
            let divides = all.is_multiple_of(world);
            return Ok(divides.then(|| vec![bytes / world; world]));
        }
        // Negative numbers and other types are reported by the path that serves every call.
        let Ok(mut parts) = rows.extract::<Vec<usize>>() else {
            return Ok(None);
        };
        let sum = parts
            .iter()
            .try_fold(0, |sum: usize, part| sum.checked_add(*part));
        if parts.len() != world || sum != Some(all) {
            return Ok(None);
        }
        // Without rows, every part is empty.
        let each = bytes.checked_div(all).unwrap_or(0);
        for part in &mut parts {
            *part *= each;
        }
        Ok(Some(parts))
    }

    /// Makes a call on the current stream; returns whether that is known.
    fn enqueue(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&Collectives, &Stream) -> PyResult<()>,
    ) -> PyResult<bool> {
        let Some(stream) = self.streams.current(py)? else {
            return Ok(false);
        };
        let stream = stream.get();
        self.behind_others(py, stream, |collectives| call(collectives, stream))?;
        Ok(true)
    }

    /// Makes a call on `stream` behind other kernels of the device. Raises failures of earlier calls, too.
    pub(crate) fn behind_others(
        &self,
        py: Python<'_>,
        stream: &Stream,
        call: impl FnOnce(&Collectives) -> PyResult<()>,
    ) -> PyResult<()> {
        let collectives = self.collectives.bind(py);
        self.order.get().follow(collectives.as_any(), stream)?;
        call(collectives.get())?;
        // As a wait would raise them: this call's data would be wrong.
        self.watch
            .as_ref()
            .map_or(Ok(()), |watch| watch.get().check())
    }
}

fn has_type_of(one: &Bound<'_, PyAny>, other: &Bound<'_, PyAny>) -> PyResult<bool> {
    let dtype = intern!(one.py(), "dtype");
    // PyTorch has one object for each type.
    Ok(one.is(other) || one.getattr(dtype)?.is(other.getattr(dtype)?))
}

fn bytes(tensor: &Bound<'_, PyAny>) -> PyResult<usize> {
    tensor.getattr(intern!(tensor.py(), "nbytes"))?.extract()
}

fn elements(tensor: &Bound<'_, PyAny>) -> PyResult<usize> {
    let numel = intern!(tensor.py(), "numel");
    tensor.call_method0(numel)?.extract()
}
