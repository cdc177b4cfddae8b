//! Collectives.

use crate::array::Reader;
use crate::bound_call::BoundCall;
use crate::collective_options::{call, call_on, told};
use crate::element::type_name;
use crate::errors::raise;
use crate::experts::Experts;
use crate::fused::described;
use crate::owner::Detached;
use crate::parts::{Cut, unit};
use crate::place::Place;
use crate::stream::Stream;
use crate::watch::{Limits, Watch, Watched};
use pyo3::prelude::*;
use std::sync::Arc;
use warplink::Rank;
use warplink::collective::{CollectiveKind, CollectivePath, ExpertOptions};
use warplink::device::{AllocationKind, DeviceSlice};

/// Bytes of an allocation of which none are used.
const NOTHING: usize = 16;

/// The collectives of a communicator, on any memory.
///
/// Every rank enqueues the same ones in the same order. Nothing blocks, but for the first call of its kind, which may
/// compile a kernel, and the stream may be recording a graph. Arrays are anything that Communicator.borrow takes, and
/// may be empty; targets are written and must not be read-only, sources are read, and both are kept until the stream is past them. The target may
/// be the source; of all_gather and gather, the source may be this rank's part of the target; of reduce_scatter and
/// scatter, the target its part of the source. `op` is "sum", "product", "max", "min" or "average"; for a sum of
/// floats, `factor` is what they are multiplied by beforehand.
///
/// send_receive and all_to_all_v move elements of any type, also of sizes that only the device knows, and experts makes a
/// layer of experts.
///
/// Calls raise InvalidArgumentError for lengths that do not fit, arrays that are not contiguous, that overlap in part or
/// that are of another device, read-only targets and a root that is out of range; ParseError for an operator, and in
/// reductions an element type, that there is not; TypeError for what is no array; UnsupportedError for a factor of
/// integers, and for what the vendor's library cannot do where that does the call; and what ended the device's work, such as
/// PeerLostError, if something did. That ranks call something else raises MismatchError in Stream.synchronize.
#[pyclass(frozen, module = "warplink")]
#[derive(Debug)]
pub(crate) struct Collectives {
    inner: Detached<warplink::Collectives>,
    pub(crate) place: Place,
    pub(crate) world: usize,
    /// The memory of arrays without elements.
    pub(crate) nothing: DeviceSlice,
    /// Who is told of calls.
    pub(crate) watched: Arc<Watched>,
}

impl Collectives {
    pub(crate) fn new(
        inner: warplink::Collectives,
        place: &Place,
        world: usize,
    ) -> warplink::Result<Self> {
        let nothing = place.device.allocate(NOTHING, AllocationKind::Plain)?;
        Ok(Self {
            inner: Detached::new(inner),
            place: place.clone(),
            world,
            nothing: nothing.slice(0..0)?,
            watched: Arc::default(),
        })
    }

    pub(crate) fn inner(&self) -> PyResult<warplink::Collectives> {
        self.inner.get("collectives")
    }

    /// Has a thread wait for the calls from now on, instead of one that did so far.
    pub(crate) fn watch(
        &self,
        py: Python<'_>,
        communicator: warplink::Communicator,
        limits: Limits,
    ) -> PyResult<Watch> {
        let inner = self.inner()?;
        let precede = move |stream: &_| inner.precede(stream);
        self.watched
            .watch(py, communicator, precede, (&self.place, limits))
    }

    /// Reads the arrays of a call on `stream`.
    pub(crate) fn reader(&self, stream: &Stream) -> Reader<'_> {
        Reader::new(&self.place, Some(stream.raw_handle())).with_empty(&self.nothing)
    }
}

#[pymethods]
impl Collectives {
    /// Path of the calls: "direct", kernels that access the peers' memory, or "engine", the vendor's library.
    #[getter]
    fn path(&self) -> PyResult<&'static str> {
        Ok(self.inner()?.path().name())
    }

    /// Binds the collective named `kind`, such as "all_gather", to memory, for calls that are made again and again on the
    /// same: ranks tell one another where it lies once, so that the copy engine can do large all-gathers and all-to-alls.
    /// Every rank binds the same at the same time; blocks until all have. Targets and sources are those of the method of
    /// that name, and are kept by the BoundCall. `op` and `factor` are for collectives that reduce, `root` for those that
    /// have one.
    ///
    /// Raises MismatchError where ranks bind different calls, what the method of that name raises, and, where another rank
    /// does not bind or has arguments that are refused, TimeoutError or PeerFailedError.
    #[pyo3(signature = (kind, target, source, *, op=None, factor=None, root=None))]
    #[allow(clippy::too_many_arguments, reason = "they are Python's keywords")]
    fn bind(
        &self,
        py: Python<'_>,
        kind: &str,
        target: &Bound<'_, PyAny>,
        source: &Bound<'_, PyAny>,
        op: Option<&str>,
        factor: Option<f64>,
        root: Option<Rank>,
    ) -> PyResult<BoundCall> {
        let (inner, kind) = (self.inner()?, kind.parse().map_err(raise)?);
        let reader = Reader::new(&self.place, None).with_empty(&self.nothing);
        let target = reader.for_targets().read(target, "the target")?;
        let source = reader.read(source, "the source")?;
        let op = op.map(|op| (op, factor));
        let call = call_on(kind, [&target, &source], op, root, self.world)?;
        let bound = py.detach(|| inner.bind(&call, &target.slice, &source.slice));
        Ok(BoundCall::new(bound.map_err(raise)?, &self.watched))
    }

    /// Path of the collective named `kind`, such as "all_reduce", as in `path`; in a hybrid cube mesh, calls differ.
    /// `count` is the elements of a part: what one rank passes to one other or to all. `op` is for collectives that reduce,
    /// `root` for those that have one. Raises ParseError for a kind, a type or an operator that there is not.
    #[pyo3(signature = (kind, count, dtype, op=None, root=None))]
    fn path_of(
        &self,
        kind: &str,
        count: usize,
        #[pyo3(from_py_with = type_name)] dtype: String,
        op: Option<&str>,
        root: Option<Rank>,
    ) -> PyResult<&'static str> {
        let call = call(kind, count, &dtype, op, root)?;
        Ok(self.inner()?.path_of(&call).name())
    }

    /// How a call is done where `path_of` it is "direct": the algorithm, how many lanes (groups of threads of the kernel)
    /// move data, the threads of each, and into how many chunks a lane cuts its data. Arguments are those of path_of.
    ///
    /// Raises UnsupportedError where the algorithm that Communicator.collectives was given does not do the call, and where
    /// the vendor's library does it; InvalidArgumentError for an operator or a root that the collective has not, or lacks;
    /// ParseError as path_of does.
    #[pyo3(signature = (kind, count, dtype, op=None, root=None))]
    fn choice<'py>(
        &self,
        py: Python<'py>,
        kind: &str,
        count: usize,
        #[pyo3(from_py_with = type_name)] dtype: String,
        op: Option<&str>,
        root: Option<Rank>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (inner, call) = (self.inner()?, call(kind, count, &dtype, op, root)?);
        let choice = py.detach(|| inner.choice(&call)).map_err(raise)?;
        told(py, choice)
    }

    /// Path of send_receive and all_to_all_v, as in `path`; None where they do not reach the other ranks.
    #[getter]
    fn path_of_messages(&self) -> PyResult<Option<&'static str>> {
        Ok(self.inner()?.path_of_messages().map(CollectivePath::name))
    }

    /// The address of the vendor library's communicator (`ncclComm_t` on GPUs) that does calls; None where the direct path
    /// does all, and where a rank was lost. It is valid for as long as these collectives are and no rank is lost.
    #[getter]
    fn communicator(&self) -> PyResult<Option<usize>> {
        let communicator = self.inner()?.communicator();
        Ok(communicator
            .filter(|communicator| !communicator.is_null())
            .map(|communicator| communicator as usize))
    }

    /// How many ranks there are.
    #[getter]
    fn size(&self) -> usize {
        self.world
    }

    /// How many messages a send_receive takes at most.
    #[getter]
    fn max_messages(&self) -> usize {
        warplink::collective::MAX_MESSAGES
    }

    /// Whether send_receive and all_to_all_v reach the other ranks. Where they do not, in a hybrid cube mesh on the direct
    /// path alone or without the vendor's library, they raise UnsupportedError or the library's error.
    #[getter]
    fn serves_messages(&self) -> PyResult<bool> {
        Ok(self.inner()?.serves_messages())
    }

    /// `target`, of `size` times the bytes of `source`, becomes every rank's source in rank order.
    fn all_gather(
        &self,
        py: Python<'_>,
        stream: &Stream,
        target: &Bound<'_, PyAny>,
        source: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let kind = CollectiveKind::AllGather;
        self.enqueue(py, stream, kind, [target, source], None, None)
    }

    /// `target` becomes the reduction of every rank's source. Where a factor is given, floats are multiplied by it before
    /// they are summed. Raises InvalidArgumentError for a factor with another operator than "sum", and for arrays without an
    /// element type; so for all reductions.
    #[pyo3(signature = (stream, target, source, op="sum", factor=None))]
    fn all_reduce(
        &self,
        py: Python<'_>,
        stream: &Stream,
        target: &Bound<'_, PyAny>,
        source: &Bound<'_, PyAny>,
        op: &str,
        factor: Option<f64>,
    ) -> PyResult<()> {
        let kind = CollectiveKind::AllReduce;
        self.enqueue(py, stream, kind, [target, source], Some((op, factor)), None)
    }

    /// `target` becomes this rank's part of the reduction of every rank's source, which has `size` times
    /// its bytes.
    #[pyo3(signature = (stream, target, source, op="sum", factor=None))]
    fn reduce_scatter(
        &self,
        py: Python<'_>,
        stream: &Stream,
        target: &Bound<'_, PyAny>,
        source: &Bound<'_, PyAny>,
        op: &str,
        factor: Option<f64>,
    ) -> PyResult<()> {
        let kind = CollectiveKind::ReduceScatter;
        self.enqueue(py, stream, kind, [target, source], Some((op, factor)), None)
    }

    /// Part p of `target` becomes this rank's part of rank p's source.
    fn all_to_all(
        &self,
        py: Python<'_>,
        stream: &Stream,
        target: &Bound<'_, PyAny>,
        source: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let kind = CollectiveKind::AllToAll;
        self.enqueue(py, stream, kind, [target, source], None, None)
    }

    /// `target` becomes the source of rank `root`; those of other ranks are not read.
    fn broadcast(
        &self,
        py: Python<'_>,
        stream: &Stream,
        target: &Bound<'_, PyAny>,
        source: &Bound<'_, PyAny>,
        root: usize,
    ) -> PyResult<()> {
        let kind = CollectiveKind::Broadcast;
        self.enqueue(py, stream, kind, [target, source], None, Some(root))
    }

    /// On rank `root`, `target` becomes the reduction of every rank's source; those of other ranks are left alone.
    #[pyo3(signature = (stream, target, source, root, op="sum", factor=None))]
    #[allow(clippy::too_many_arguments, reason = "they are Python's keywords")]
    fn reduce(
        &self,
        py: Python<'_>,
        stream: &Stream,
        target: &Bound<'_, PyAny>,
        source: &Bound<'_, PyAny>,
        root: usize,
        op: &str,
        factor: Option<f64>,
    ) -> PyResult<()> {
        let kind = CollectiveKind::Reduce;
        self.enqueue(
            py,
            stream,
            kind,
            [target, source],
            Some((op, factor)),
            Some(root),
        )
    }

    /// On rank `root`, `target` becomes every rank's source in rank order; those of other ranks are left alone.
    fn gather(
        &self,
        py: Python<'_>,
        stream: &Stream,
        target: &Bound<'_, PyAny>,
        source: &Bound<'_, PyAny>,
        root: usize,
    ) -> PyResult<()> {
        let kind = CollectiveKind::Gather;
        self.enqueue(py, stream, kind, [target, source], None, Some(root))
    }

    /// `target` becomes this rank's part of the source of rank `root`; those of other ranks are not read.
    fn scatter(
        &self,
        py: Python<'_>,
        stream: &Stream,
        target: &Bound<'_, PyAny>,
        source: &Bound<'_, PyAny>,
        root: usize,
    ) -> PyResult<()> {
        let kind = CollectiveKind::Scatter;
        self.enqueue(py, stream, kind, [target, source], None, Some(root))
    }

    /// The collective named `kind`, such as "all_reduce", between memory of the device at two addresses, as the methods
    /// of these names do between arrays. `count` is the elements that one rank passes to one other or to all: of the
    /// shorter of the two, where one is longer. The caller keeps the memory until the stream is past it. Raises ParseError
    /// as path_of does, and InvalidArgumentError for an operator or a root that the collective has not, or lacks.
    #[pyo3(signature = (kind, stream, target, source, count, dtype, op=None, root=None))]
    #[allow(clippy::too_many_arguments, reason = "they are Python's keywords")]
    fn call_at(
        &self,
        py: Python<'_>,
        kind: &str,
        stream: &Stream,
        target: u64,
        source: u64,
        count: usize,
        #[pyo3(from_py_with = type_name)] dtype: String,
        op: Option<&str>,
        root: Option<Rank>,
    ) -> PyResult<()> {
        let call = call(kind, count, &dtype, op, root)?;
        self.enqueue_at(py, &call, stream, [target, source])
    }

    /// `all_to_all_v` of bytes between memory of the device at two addresses: of rank p come the p-th of `target_nbytes`,
    /// and to it go the p-th of `source_nbytes`, each part behind the one before. The caller keeps the memory until the
    /// stream is past it. Raises what all_to_all_v raises.
    fn all_to_all_v_at(
        &self,
        py: Python<'_>,
        stream: &Stream,
        target: u64,
        source: u64,
        target_nbytes: Vec<usize>,
        source_nbytes: Vec<usize>,
    ) -> PyResult<()> {
        let parts = [target_nbytes, source_nbytes];
        self.all_to_all_at(py, stream, [target, source], parts)
    }

    /// Later work in the stream waits until every rank's stream has come to it. Raises the error that ended
    /// the device's work, such as PeerLostError, if something did.
    fn barrier(&self, py: Python<'_>, stream: &Stream) -> PyResult<()> {
        let (inner, live) = (self.inner()?, stream.live()?);
        py.detach(|| inner.barrier(live)).map_err(raise)?;
        self.watched.made();
        Ok(())
    }

    /// Sends and receives, `(peer, array)` each, all at the same time: none waits for another of the call.
    ///
    /// Arrays have any element type and any length, also 0; what is received overlaps no other array of the call. The
    /// n-th send to a rank is for the n-th receive there from this one, of as many bytes. Only the two ranks of a message
    /// call, and may group their messages differently, as long as some order of them lets all go on; a message of a rank
    /// to itself has both ends in one call. Does not block.
    ///
    /// Raises InvalidArgumentError for a rank out of range, arrays that overlap, more than 64 messages, and messages to
    /// this rank that do not fit. Ends of other lengths raise MismatchError in Stream.synchronize on both ranks, with
    /// the peer, where `path` is "direct".
    #[pyo3(signature = (stream, sends=Vec::new(), receives=Vec::new()))]
    fn send_receive(
        &self,
        py: Python<'_>,
        stream: &Stream,
        sends: Vec<(Rank, Bound<'_, PyAny>)>,
        receives: Vec<(Rank, Bound<'_, PyAny>)>,
    ) -> PyResult<()> {
        let reader = self.reader(stream);
        let sends = reader.ends("sends", &sends)?;
        let receives = reader.for_targets().ends("receives", &receives)?;
        self.messages(py, stream, &sends, &receives)
    }

    /// `send_receive` of bytes between memory of the device: sends and receives are `(peer, (address, nbytes))` each. The
    /// caller keeps the memory until the stream is past it. Raises what send_receive raises.
    fn send_receive_at(
        &self,
        py: Python<'_>,
        stream: &Stream,
        sends: Vec<(Rank, (u64, usize))>,
        receives: Vec<(Rank, (u64, usize))>,
    ) -> PyResult<()> {
        self.messages_at(py, stream, &sends, &receives)
    }

    /// Part p of `target` becomes this rank's part of rank p's `source`, for each rank, of a length of its own.
    ///
    /// `target_counts` and `source_counts` say how many elements the part of each rank has, in rank order, and
    /// `target_displacements` and `source_displacements` from which element on it lies; without these, parts lie one
    /// after the other. Elements are those of the arrays, of any type, the same in both; of memory without a type they
    /// are bytes. What this rank sends to another has as many elements as that one expects. Counts of 0 are allowed,
    /// parts of the source may overlap, those of the target may not. Does not block.
    ///
    /// Raises InvalidArgumentError for counts or displacements that are not one for each rank or reach beyond the
    /// array, with the rank in `peer`. Ranks that expect other lengths raise MismatchError in Stream.synchronize on both
    /// ranks, with the peer, where `path` is "direct".
    #[pyo3(signature = (
        stream,
        target,
        source,
        target_counts,
        source_counts,
        target_displacements=None,
        source_displacements=None,
    ))]
    #[allow(clippy::too_many_arguments, reason = "they are Python's keywords")]
    fn all_to_all_v(
        &self,
        py: Python<'_>,
        stream: &Stream,
        target: &Bound<'_, PyAny>,
        source: &Bound<'_, PyAny>,
        target_counts: Vec<usize>,
        source_counts: Vec<usize>,
        target_displacements: Option<Vec<usize>>,
        source_displacements: Option<Vec<usize>>,
    ) -> PyResult<()> {
        let (inner, live) = (self.inner()?, stream.live()?);
        let reader = self.reader(stream);
        let target = reader.for_targets().read(target, "the target")?;
        let source = reader.read(source, "the source")?;
        let (dtype, each) = unit(&target, &source)?;
        let received = Cut::new(target_counts, target_displacements, each);
        let sent = Cut::new(source_counts, source_displacements, each);
        py.detach(|| {
            let output = (&target.slice, received.parts());
            inner.all_to_all_v(output, (&source.slice, sent.parts()), dtype, live)
        })
        .map_err(raise)?;
        self.watched.made();
        Ok(())
    }

    /// As all_to_all_v, where only memory of the device has the counts.
    ///
    /// `source_counts` says how many elements go to each rank, and `target_counts` becomes how many came from each: both are
    /// of `[size]`, in i64 or u64. `max_count` limits each count and is the same on all ranks; target and source have that
    /// many elements for each rank, `[size, max_count]`, of which the first are used. What is beyond the count is neither
    /// read nor written. Nothing that is written overlaps another array. No host waits for a count, and a graph serves all
    /// counts up to the limit. Does not block.
    ///
    /// Raises InvalidArgumentError for arrays of other lengths or elements and for those that overlap, and UnsupportedError
    /// where `path_of_messages` is not "direct". A count above `max_count` or below 0, and another `max_count` or element
    /// size on another rank, raise MismatchError in Stream.synchronize on both ranks, with the peer.
    #[allow(clippy::too_many_arguments, reason = "they are Python's keywords")]
    fn all_to_all_v_on_device(
        &self,
        py: Python<'_>,
        stream: &Stream,
        target: &Bound<'_, PyAny>,
        source: &Bound<'_, PyAny>,
        target_counts: &Bound<'_, PyAny>,
        source_counts: &Bound<'_, PyAny>,
        max_count: usize,
    ) -> PyResult<()> {
        let arrays = [target, source, target_counts, source_counts];
        self.all_to_all_on_device(py, stream, arrays, max_count)
    }

    /// A collective of rows with what follows it in a model, in one kernel: the sum of every rank's `input`, in single
    /// precision and rank order, then the residual, a norm and a quantisation, of which any results are stored.
    ///
    /// `input` is `[.., width]` of f32, f16 or bf16, as are all but what is quantised and its scales. h is the sum and
    /// `residual`, rounded; n is h normalised by `norm`, "rms" or "layer", with `weight`, to which 1 is added with
    /// `weight_bias`, and `bias`; q is n divided by a scale, as f8e4m3. Stored are, where they are given, the sum alone in `sum`, h in
    /// `residual_out`, n in `output` and q in `quantized`. `quantization` is "static", where `scale` is f32[1] and read;
    /// "per_token", where it is f32[rows] and written; "per_block" or "per_block_power_of_two", where each 128 elements
    /// have one; "mxfp8", where each 32 have one, a u8 that is its exponent plus 127; or "nvfp4", where `quantized` are bytes
    /// of two e2m1 each, the first in the low bits, and each 16 elements have a scale as f8e4m3, their largest magnitude / 6
    /// times `global_scale`, an f32[1] that is read. One of `sum`, `residual_out` and `output` may be the memory of the input
    /// or of the residual.
    ///
    /// `kind` is "all_reduce", "all_reduce_sharded", where a rank has the residual, the sum and residual_out of its rows
    /// alone, "reduce_scatter" or "all_gather". Ranks then own as many rows each, in rank order. With `wire` "fp8" rows travel
    /// as floats of 8 bits with a scale for each 128 elements, for an error that docs/fused.md states. Does not block.
    ///
    /// Raises InvalidArgumentError for memory that does not fit or overlaps, ParseError for names that there are not, and
    /// UnsupportedError where `path` is "engine" or a row is too long for the workspace. Ranks that call something else
    /// raise MismatchError in Stream.synchronize.
    #[pyo3(signature = (
        stream,
        input,
        *,
        kind="all_reduce",
        norm=None,
        eps=1e-6,
        weight=None,
        bias=None,
        weight_bias=false,
        residual=None,
        sum=None,
        residual_out=None,
        output=None,
        quantization=None,
        quantized=None,
        scale=None,
        global_scale=None,
        wire="exact",
    ))]
    #[allow(clippy::too_many_arguments, reason = "they are Python's keywords")]
    fn fused(
        &self,
        py: Python<'_>,
        stream: &Stream,
        input: &Bound<'_, PyAny>,
        kind: &str,
        norm: Option<&str>,
        eps: f32,
        weight: Option<&Bound<'_, PyAny>>,
        bias: Option<&Bound<'_, PyAny>>,
        weight_bias: bool,
        residual: Option<&Bound<'_, PyAny>>,
        sum: Option<&Bound<'_, PyAny>>,
        residual_out: Option<&Bound<'_, PyAny>>,
        output: Option<&Bound<'_, PyAny>>,
        quantization: Option<&str>,
        quantized: Option<&Bound<'_, PyAny>>,
        scale: Option<&Bound<'_, PyAny>>,
        global_scale: Option<&Bound<'_, PyAny>>,
        wire: &str,
    ) -> PyResult<()> {
        let call = described(kind, norm, (eps, weight_bias), quantization, wire)?;
        let sources = [Some(input), residual, weight, bias, global_scale];
        let targets = [sum, residual_out, output, quantized, scale];
        self.enqueue_fused(py, stream, call, (sources, targets))
    }

    /// A layer of experts on these ranks, with memory for its calls.
    ///
    /// `experts` is how many there are, a multiple of the ranks: rank r has those from `r * experts / size` on. A token
    /// goes to `top_k` of them. `max_tokens` is the most tokens of a rank in one call, `elements` the length of a token's
    /// row, and `dtype` its type: "f32", "f16" or "bf16". `max_rows` is the most rows that one rank sends to one other in
    /// a call; None takes the most that there may be. All ranks pass the same. Asks no other rank; blocks while
    /// kernels are compiled, the first time on a machine.
    ///
    /// Raises InvalidArgumentError for options that do not fit together, ParseError for a type that there is not,
    /// UnsupportedError where `path` is "engine" and for rows that are longer than a chunk of the workspace, and
    /// OutOfMemoryError.
    #[pyo3(signature = (*, experts, top_k, max_tokens, elements, dtype, max_rows=None))]
    #[allow(clippy::too_many_arguments, reason = "they are Python's keywords")]
    fn experts(
        &self,
        py: Python<'_>,
        experts: usize,
        top_k: usize,
        max_tokens: usize,
        elements: usize,
        #[pyo3(from_py_with = type_name)] dtype: String,
        max_rows: Option<usize>,
    ) -> PyResult<Experts> {
        let inner = self.inner()?;
        let options = ExpertOptions {
            experts,
            top_k,
            max_tokens,
            max_rows,
            elements,
            dtype: dtype.parse().map_err(raise)?,
        };
        let layer = py.detach(|| inner.experts(&options)).map_err(raise)?;
        Ok(Experts::new(
            layer,
            options,
            &self.place,
            self.world,
            &self.nothing,
        ))
    }

    fn __repr__(&self) -> PyResult<String> {
        let (path, size) = (self.path()?, self.world);
        Ok(format!("Collectives(path='{path}', size={size})"))
    }
}
