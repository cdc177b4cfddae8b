//! Mixture-of-experts layers.

use crate::array::{Array, Reader};
use crate::errors::{invalid, raise};
use crate::memory::View;
use crate::owner::Detached;
use crate::place::Place;
use crate::stream::Stream;
use pyo3::prelude::*;
use warplink::collective::{self, ExpertOptions};
use warplink::device::{AllocationKind, DeviceSlice};

/// The three arrays of a `Dispatched`.
type Arrays<'py> = (Bound<'py, PyAny>, Bound<'py, PyAny>, Bound<'py, PyAny>);

/// A layer of experts: sends rows of tokens to the ranks of their experts, and returns weighted sums.
///
/// Created by Collectives.experts. The routing is known only in device memory, and no host waits for it. Calls of one
/// layer execute one after another; for concurrent calls, create several layers. Arrays are anything that
/// Communicator.borrow accepts, and are kept alive until the stream has
/// passed the call. Memory without an element type must have the same number of bytes.
///
/// Calls raise InvalidArgumentError for arrays of another shape or element type, that are not contiguous, that overlap
/// where they are written or that belong to another device, and for read-only targets; TypeError for objects that are
/// no arrays; and the error that ended the device's work, such as PeerLostError, if there is one.
///
/// Both calls may be captured into a graph, which is valid for every routing.
#[pyclass(frozen, module = "warplink")]
#[derive(Debug)]
pub(crate) struct Experts {
    inner: Detached<collective::Experts>,
    options: ExpertOptions,
    place: Place,
    world: usize,
    /// The memory of arrays without elements.
    nothing: DeviceSlice,
}

/// Memory of dispatched rows, read from the caller's arrays.
struct Rows {
    rows: Array,
    experts: Array,
    counts: Array,
}

impl Rows {
    fn dispatched(&self) -> collective::Dispatched<'_> {
        collective::Dispatched {
            rows: &self.rows.slice,
            experts: &self.experts.slice,
            counts: &self.counts.slice,
        }
    }
}

impl Experts {
    pub(crate) fn new(
        inner: collective::Experts,
        options: ExpertOptions,
        place: &Place,
        world: usize,
        nothing: &DeviceSlice,
    ) -> Self {
        Self {
            inner: Detached::new(inner),
            options,
            place: place.clone(),
            world,
            nothing: nothing.clone(),
        }
    }

    fn inner(&self) -> PyResult<collective::Experts> {
        self.inner.get("layer of experts")
    }

    fn reader(&self, stream: &Stream) -> Reader<'_> {
        Reader::new(&self.place, Some(stream.raw_handle())).with_empty(&self.nothing)
    }

    /// The shapes of rows, experts and counts.
    fn shapes(&self) -> [Vec<usize>; 3] {
        let (world, rows) = (self.world, self.max_rows());
        [
            vec![world, rows, self.options.elements],
            vec![world, rows],
            vec![world],
        ]
    }

    fn rows(&self, reader: &Reader<'_>, name: &str, arrays: &Arrays<'_>) -> PyResult<Rows> {
        let [rows, experts, counts] = self.shapes();
        let read = |array, part: &str, dtype, shape: &[usize]| {
            typed(reader, array, &format!("{name}.{part}"), dtype, shape)
        };
        let dtype = self.options.dtype.name();
        Ok(Rows {
            rows: read(&arrays.0, "rows", dtype, &rows)?,
            experts: read(&arrays.1, "experts", "i32", &experts)?,
            counts: read(&arrays.2, "counts", "i32", &counts)?,
        })
    }
}

#[pymethods]
impl Experts {
    /// The most rows that one rank sends to one other rank in a call.
    #[getter]
    fn max_rows(&self) -> usize {
        self.options.rows_per_peer(self.world)
    }

    /// Allocates device memory for the result of `dispatch`: a Dispatched with `rows`, of the layer's type and shape
    /// `[size, max_rows, elements]`; `experts`, i32 of `[size, max_rows]`; `counts`, i32 of `[size]`. The content is
    /// undefined. Raises OutOfMemoryError.
    fn allocate<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let device = &self.place.device;
        let dtype = self.options.dtype.name();
        let view = |shape: Vec<usize>, dtype: &str| {
            let bytes = View::bytes_of(&shape, dtype)?;
            let slice = py.detach(|| device.allocate(bytes, AllocationKind::Plain));
            View::new(&slice.map_err(raise)?, &self.place, shape, dtype)
        };
        let [rows, experts, counts] = self.shapes();
        let views = (
            view(rows, dtype)?,
            view(experts, "i32")?,
            view(counts, "i32")?,
        );
        py.import("warplink.experts")?
            .getattr("Dispatched")?
            .call1(views)
    }

    /// Sends each row of `tokens` to the ranks of its experts, once per expert.
    ///
    /// `tokens` is of the layer's type and `[n, elements]`, `experts` is i32 of `[n, top_k]`; n is at most
    /// `max_tokens`, may be 0, and may differ between ranks. A number that is no expert, such as -1, marks an unused
    /// slot. `target` is a Dispatched, or a tuple of its three arrays. The first `counts[p]` rows of `rows[p]` are set
    /// to the rows from rank p, in the order of its tokens, and `experts[p]` to the index of the expert of each among
    /// this rank's experts, from 0. Collective. Does not block.
    ///
    /// Raises InvalidArgumentError for more tokens than `max_tokens`. If a rank gets more rows than `max_rows`, or
    /// options differ, Stream.synchronize raises MismatchError on both ranks, and none of these rows is delivered.
    fn dispatch(
        &self,
        py: Python<'_>,
        stream: &Stream,
        target: Arrays<'_>,
        tokens: &Bound<'_, PyAny>,
        experts: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let (inner, live) = (self.inner()?, stream.live()?);
        let (reader, options) = (self.reader(stream), &self.options);
        let target = self.rows(&reader.for_targets(), "target", &target)?;
        let tokens = read_tokens(&reader, tokens, "tokens", options)?;
        let shape = [tokens.slice.bytes() / options.row_bytes(), options.top_k];
        let experts = typed(&reader, experts, "experts", "i32", &shape)?;
        let (tokens, experts) = (&tokens.slice, &experts.slice);
        py.detach(|| inner.dispatch(tokens, experts, &target.dispatched(), live))
            .map_err(raise)
    }

    /// Sets `target`, for each token of the last dispatch, to the sum of its rows, each multiplied by its weight.
    ///
    /// `target` is of the layer's type and `[n, elements]`, for the n tokens of that dispatch, and `weights` is f32 of
    /// `[n, top_k]`. `source` is the target of `dispatch`, with its rows replaced by the experts' results. Sums are
    /// computed in f32, in slot order, and rounded once: they are identical from run to run. A token without an expert
    /// gets zeros. Collective. Does not block.
    ///
    /// Raises InvalidArgumentError if there was no dispatch, or its number of tokens differs.
    fn combine(
        &self,
        py: Python<'_>,
        stream: &Stream,
        target: &Bound<'_, PyAny>,
        source: Arrays<'_>,
        weights: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let (inner, live) = (self.inner()?, stream.live()?);
        let (reader, options) = (self.reader(stream), &self.options);
        let target = read_tokens(&reader.for_targets(), target, "target", options)?;
        let shape = [target.slice.bytes() / options.row_bytes(), options.top_k];
        let source = self.rows(&reader, "source", &source)?;
        let weights = typed(&reader, weights, "weights", "f32", &shape)?;
        let (target, weights) = (&target.slice, &weights.slice);
        py.detach(|| inner.combine(target, &source.dispatched(), weights, live))
            .map_err(raise)
    }

    fn __repr__(&self) -> String {
        let it = &self.options;
        format!(
            "Experts(experts={}, top_k={}, max_tokens={}, max_rows={}, elements={}, dtype='{}')",
            it.experts,
            it.top_k,
            it.max_tokens,
            self.max_rows(),
            it.elements,
            it.dtype
        )
    }
}

/// Reads rows of the layer's tokens, as many as the array has.
fn read_tokens(
    reader: &Reader<'_>,
    object: &Bound<'_, PyAny>,
    name: &str,
    options: &ExpertOptions,
) -> PyResult<Array> {
    let array = reader.read(object, name)?;
    let count = match array.element {
        Some(_) => array.shape.first().copied().unwrap_or(0),
        // Without an element type, the library checks the number of bytes.
        None => return Ok(array),
    };
    check(
        &array,
        name,
        options.dtype.name(),
        &[count, options.elements],
    )?;
    Ok(array)
}

/// An array of `shape` and `dtype`.
fn typed(
    reader: &Reader<'_>,
    object: &Bound<'_, PyAny>,
    name: &str,
    dtype: &str,
    shape: &[usize],
) -> PyResult<Array> {
    let array = reader.read(object, name)?;
    check(&array, name, dtype, shape)?;
    Ok(array)
}

/// Fails if an array has an element type and its type or shape differs.
fn check(array: &Array, name: &str, dtype: &str, shape: &[usize]) -> PyResult<()> {
    let Some(element) = array.element else {
        return Ok(());
    };
    if element.name == dtype && array.shape == shape {
        return Ok(());
    }
    Err(invalid(format!(
        "{name} is {} of shape {:?}; expected {dtype} of shape {shape:?}",
        element.name, array.shape
    )))
}
