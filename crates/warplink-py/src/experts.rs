//! Mixture-of-experts layers.

use crate::array::{Array, Reader};
use crate::errors::{closed, detached, invalid, raise};
use crate::memory::View;
use crate::owner::Detached;
use crate::place::Place;
use crate::stream::Stream;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use std::sync::{Arc, Mutex};
use warplink::DType;
use warplink::collective::{self, ExpertOptions, Overflow, RowLayout};
use warplink::device::{AllocationKind, DeviceSlice};

/// The three arrays of a `Dispatched`.
type Arrays<'py> = (Bound<'py, PyAny>, Bound<'py, PyAny>, Bound<'py, PyAny>);

/// A layer of experts: sends rows of tokens to the ranks of their experts, and returns weighted sums.
///
/// Created by Collectives.experts. `max_rows` is the most rows that one rank sends to one other in a call; None selects the
/// upper bound that follows from the other options, which every routing fits. `layout` orders the received rows. "by_source": by source rank, a row for each expert of a
/// token. "by_expert": the same rows by local expert, contiguous, as a grouped matmul reads them. "once_per_rank": by source
/// rank, a row for each token, however many of this rank's experts it has. With the `overflow` "drop", rows beyond `max_rows`
/// are dropped, and counted by expert if the target has an array for that; with "fail" they end the communicator. `quantization` ("per_token", "per_block" of 128 elements,
/// "per_block_power_of_two") sends rows as f8e4m3, in arrays of u8, with f32 scales; with `quantized_tokens`, tokens arrive so.
///
/// The routing is known only in device memory, and no host waits for it. Calls of one
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
    /// The routing of the last dispatch.
    last: Mutex<Option<Arc<collective::Routing>>>,
}

/// What a dispatch leaves for its combine: the handle of other libraries.
///
/// Returned by Experts.dispatch and taken by Experts.combine, in any order if there are several. A dispatch after this object
/// is dropped uses its memory again, so keep it as long as a graph of either call may be launched.
#[pyclass(frozen, module = "warplink")]
#[derive(Debug)]
pub(crate) struct Routing {
    inner: Detached<Arc<collective::Routing>>,
    tokens: usize,
}

#[pymethods]
impl Routing {
    /// The number of tokens of the dispatch.
    #[getter]
    fn tokens(&self) -> usize {
        self.tokens
    }

    fn __repr__(&self) -> String {
        format!("Routing(tokens={})", self.tokens)
    }
}

/// An array of a dispatch: its name, element type and shape.
struct Part {
    name: &'static str,
    dtype: DType,
    shape: Vec<usize>,
}

/// The element type of arrays of `dtype`: floats of 8 bits have none, and are bytes.
fn array_type(dtype: DType) -> DType {
    match dtype {
        DType::F8E4M3 => DType::U8,
        _ => dtype,
    }
}

/// Memory of dispatched rows, read from the caller's arrays.
struct Rows {
    rows: Array,
    experts: Array,
    counts: Array,
    scales: Option<Array>,
    weights: Option<Array>,
    dropped: Option<Array>,
}

impl Rows {
    fn dispatched(&self) -> collective::Dispatched<'_> {
        collective::Dispatched {
            scales: self.scales.as_ref().map(|array| &array.slice),
            weights: self.weights.as_ref().map(|array| &array.slice),
            dropped: self.dropped.as_ref().map(|array| &array.slice),
            ..collective::Dispatched::new(&self.rows.slice, &self.experts.slice, &self.counts.slice)
        }
    }
}

impl Experts {
    pub(crate) fn new(
        py: Python<'_>,
        collectives: &collective::Collectives,
        options: ExpertOptions,
        (place, world, nothing): (&Place, usize, &DeviceSlice),
    ) -> PyResult<Self> {
        let made = detached(py, || collectives.experts(&options))?;
        Ok(Self {
            inner: Detached::new(made, || closed("layer of experts")),
            options,
            place: place.clone(),
            world,
            nothing: nothing.clone(),
            last: Mutex::default(),
        })
    }

    fn reader(&self, stream: &Stream) -> Reader<'_> {
        Reader::new(&self.place, Some(stream.raw())).with_empty(&self.nothing)
    }

    /// Rows, experts and counts; and scales, weights and counts of dropped rows, if the layer has them.
    fn parts(&self) -> ([Part; 3], [Option<Part>; 3]) {
        let (world, options) = (self.world, &self.options);
        let of_rows = match options.layout {
            RowLayout::ByExpert => vec![world * self.max_rows()],
            _ => vec![world, self.max_rows()],
        };
        let wide = |columns: usize| [&of_rows[..], &[columns]].concat();
        let once = options.layout == RowLayout::OncePerRank;
        let slots = if once {
            wide(options.top_k)
        } else {
            of_rows.clone()
        };
        let (quantizes, drops) = (
            options.quantization.is_some(),
            options.overflow == Overflow::Drop,
        );
        let part = |name, dtype, shape| Part { name, dtype, shape };
        let all = [
            part(
                "rows",
                array_type(options.dispatched_dtype()),
                wide(options.elements),
            ),
            part("experts", DType::I32, slots.clone()),
            part("counts", DType::I32, vec![options.counts(world)]),
        ];
        let further = [
            quantizes.then(|| part("scales", DType::F32, wide(options.scales()))),
            once.then(|| part("weights", DType::F32, slots)),
            drops.then(|| part("dropped", DType::I32, vec![options.experts])),
        ];
        (all, further)
    }

    fn rows(&self, reader: &Reader<'_>, target: &Bound<'_, PyAny>) -> PyResult<Rows> {
        let arrays: Arrays<'_> = target.extract()?;
        let read = |array: &Bound<'_, PyAny>, part: Part| {
            let name = format!("target.{}", part.name);
            typed(reader, array, &name, part.dtype, &part.shape)
        };
        // A tuple of three has no further arrays.
        let further = |part: Option<Part>| {
            let given = part.and_then(|part| Some((target.getattr_opt(part.name).ok()??, part)));
            let given = given.filter(|(array, _)| !array.is_none());
            given.map(|(array, part)| read(&array, part)).transpose()
        };
        let ([rows, experts, counts], [scales, weights, dropped]) = self.parts();
        Ok(Rows {
            rows: read(&arrays.0, rows)?,
            experts: read(&arrays.1, experts)?,
            counts: read(&arrays.2, counts)?,
            scales: further(scales)?,
            weights: further(weights)?,
            dropped: further(dropped)?,
        })
    }

    fn view(&self, py: Python<'_>, shape: Vec<usize>, dtype: DType) -> PyResult<View> {
        let device = &self.place.device;
        let bytes = View::bytes_of(&shape, dtype.name())?;
        let slice = match bytes {
            // Devices do not allocate empty memory.
            0 => Ok(self.nothing.clone()),
            _ => py.detach(|| device.allocate(bytes, AllocationKind::Plain)),
        };
        View::new(&slice.map_err(raise)?, &self.place, shape, dtype.name())
    }
}

#[pymethods]
impl Experts {
    /// The most rows that one rank sends to one other rank in a call.
    #[getter]
    fn max_rows(&self) -> usize {
        self.options.rows_per_peer()
    }

    /// Allocates device memory for the result of `dispatch`: a Dispatched, whose documentation has the shapes. The content
    /// is undefined. Raises OutOfMemoryError.
    fn allocate<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let view = |part: Part| self.view(py, part.shape, part.dtype);
        let (parts, further) = self.parts();
        let [rows, experts, counts] = parts.map(view);
        let [scales, weights, dropped] = further.map(|part| part.map(view).transpose());
        let views = (rows?, experts?, counts?, scales?, weights?, dropped?);
        py.import("warplink.experts")?
            .getattr("Dispatched")?
            .call1(views)
    }

    /// Allocates device memory for the sums of `tokens` tokens: of the layer's type and `[tokens, elements]`. The content is
    /// undefined. Raises OutOfMemoryError.
    fn allocate_output(&self, py: Python<'_>, tokens: usize) -> PyResult<View> {
        self.view(py, vec![tokens, self.options.elements], self.options.dtype)
    }

    /// Sends each row of `tokens` to the ranks of its experts, and returns the Routing, which `combine` takes.
    ///
    /// `tokens` is of the layer's type and `[n, elements]`, `experts` is i32 of `[n, top_k]`; n is at most
    /// `max_tokens`, may be 0, and may differ between ranks. A number that is no expert, such as -1, marks an unused
    /// slot. If tokens arrive quantised, `scales` is f32 of `[n, scales]`; with the layout "once_per_rank", `weights` is f32
    /// of `[n, top_k]`, and arrives with the rows. `target` is a Dispatched, or a tuple of its first three arrays. Collective.
    /// Does not block.
    ///
    /// Raises InvalidArgumentError for more tokens than `max_tokens`. If a rank gets more rows than `max_rows`, unless they
    /// are dropped, or options differ, Stream.synchronize raises MismatchError on both ranks, and none of these rows is
    /// delivered.
    #[pyo3(signature = (stream, target, tokens, experts, *, scales=None, weights=None))]
    #[allow(clippy::too_many_arguments, reason = "they are Python's keywords")]
    fn dispatch(
        &self,
        py: Python<'_>,
        stream: &Stream,
        target: &Bound<'_, PyAny>,
        tokens: &Bound<'_, PyAny>,
        experts: &Bound<'_, PyAny>,
        scales: Option<&Bound<'_, PyAny>>,
        weights: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Routing> {
        let (inner, live) = (self.inner.get()?, stream.live()?);
        let (reader, options) = (self.reader(stream), &self.options);
        let target = self.rows(&reader.for_targets(), target)?;
        let tokens = read_tokens(
            &reader,
            tokens,
            "tokens",
            options,
            array_type(options.token_dtype()),
        )?;
        // From bytes instead of the shape: a Memory has no shape in rows.
        let row = options.elements * options.token_dtype().size();
        let count = tokens.slice.bytes() / row;
        let slots = [count, options.top_k];
        let experts = typed(&reader, experts, "experts", DType::I32, &slots)?;
        let scales = floats(&reader, scales, "scales", &[count, options.scales()])?;
        let weights = floats(&reader, weights, "weights", &slots)?;
        let sent = collective::Tokens {
            scales: scales.as_ref().map(|it| &it.slice),
            weights: weights.as_ref().map(|it| &it.slice),
            ..collective::Tokens::new(&tokens.slice, &experts.slice)
        };
        let routing = detached(py, || {
            // Unless somebody else has it, the memory of the last routing is used again.
            let last = self.last.lock().map(|mut last| last.take());
            drop(last);
            let routing = Arc::new(inner.dispatch(&sent, &target.dispatched(), live)?);
            if let Ok(mut last) = self.last.lock() {
                *last = Some(routing.clone());
            }
            Ok(routing)
        })?;
        Ok(Routing {
            tokens: routing.tokens(),
            inner: Detached::new(routing, || closed("routing")),
        })
    }

    /// Sets `target`, for each token of a dispatch, to the sum of its rows, each multiplied by its weight.
    ///
    /// `target` is of the layer's type and `[n, elements]`, for the n tokens of that dispatch. `source` are the experts'
    /// results in place of the dispatched rows, of the layer's type, or the target of `dispatch` itself with its rows replaced.
    /// `weights` is f32 of `[n, top_k]`, or of `[n, size]` with the layout "once_per_rank"; None adds rows up as they are.
    /// `routing` is the result of `dispatch`; None is that of the last one. Sums are computed in f32, in slot order, and
    /// rounded once: they are identical from run to run. Dropped rows are left out, and other weights stay as they are. A token
    /// without a row gets zeros. Collective. Does not block.
    ///
    /// Raises InvalidArgumentError if there was no dispatch, or its number of tokens differs.
    #[pyo3(signature = (stream, target, source, weights=None, *, routing=None))]
    fn combine(
        &self,
        py: Python<'_>,
        stream: &Stream,
        target: &Bound<'_, PyAny>,
        source: &Bound<'_, PyAny>,
        weights: Option<&Bound<'_, PyAny>>,
        routing: Option<&Routing>,
    ) -> PyResult<()> {
        let (inner, live) = (self.inner.get()?, stream.live()?);
        let (reader, options) = (self.reader(stream), &self.options);
        let target = read_tokens(
            &reader.for_targets(),
            target,
            "target",
            options,
            options.dtype,
        )?;
        let count = target.slice.bytes() / options.row_bytes();
        let ([rows, ..], _) = self.parts();
        let (source, name) = match source.cast::<PyTuple>() {
            // A Dispatched, which is a tuple in Python; only its rows are read.
            Ok(all) => (&all.get_item(0)?, "source.rows"),
            Err(_) => (source, "source"),
        };
        let results = typed(&reader, source, name, options.dtype, &rows.shape)?;
        let columns = options.rows_per_token(self.world);
        let weights = floats(&reader, weights, "weights", &[count, columns])?;
        let routing = match routing {
            Some(routing) => routing.inner.get()?,
            None => {
                let last = self.last.lock().ok().and_then(|last| last.clone());
                let missing = || {
                    invalid(
                        "combine: no routing is given, and nothing was dispatched; expected a dispatch before it",
                    )
                };
                last.ok_or_else(missing)?
            }
        };
        let (target, results) = (&target.slice, &results.slice);
        let weights = weights.as_ref().map(|it| &it.slice);
        detached(py, || {
            inner.combine(target, results, &routing, weights, live)
        })
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
    dtype: DType,
) -> PyResult<Array> {
    let array = reader.read(object, name)?;
    let count = array.shape.first().copied().unwrap_or(0);
    check(&array, name, dtype, &[count, options.elements])?;
    Ok(array)
}

/// An array of `shape` and `dtype`.
fn typed(
    reader: &Reader<'_>,
    object: &Bound<'_, PyAny>,
    name: &str,
    dtype: DType,
    shape: &[usize],
) -> PyResult<Array> {
    let array = reader.read(object, name)?;
    check(&array, name, dtype, shape)?;
    Ok(array)
}

/// An array of floats of `shape`, if there is one.
fn floats(
    reader: &Reader<'_>,
    object: Option<&Bound<'_, PyAny>>,
    name: &str,
    shape: &[usize],
) -> PyResult<Option<Array>> {
    let read = |object| typed(reader, object, name, DType::F32, shape);
    object.map(read).transpose()
}

/// Fails if an array has an element type and its type or shape differs; without one, the library checks the number of
/// bytes.
fn check(array: &Array, name: &str, dtype: DType, shape: &[usize]) -> PyResult<()> {
    let Some(element) = array.element else {
        return Ok(());
    };
    if element.name == dtype.name() && array.shape == shape {
        return Ok(());
    }
    Err(invalid(format!(
        "{name} is {} of shape {:?}; expected {dtype} of shape {shape:?}",
        element.name, array.shape
    )))
}
