//! Collectives.

use crate::array::Reader;
use crate::bound_call::BoundCall;
use crate::collective_call::{call, call_on, choice_to_python};
use crate::element::type_name;
use crate::errors::{detached, invalid, raise};
use crate::experts::Experts;
use crate::owner::Detached;
use crate::parts::{Cut, check_counts, unit};
use crate::place::Place;
use crate::stream::Stream;
use crate::watch::Watched;
use pyo3::prelude::*;
use std::sync::Arc;
use warplink::Rank;
use warplink::collective::{CollectiveKind, CollectivePath, Epilogue, ExpertOptions};
use warplink::device::DeviceSlice;

/// The collectives of a communicator, on any memory.
///
/// Every rank enqueues the same calls in the same order. Calls do not block, except the first of its kind, which may
/// compile a kernel, and may be captured into a graph. Arrays are anything that Communicator.borrow accepts, and may be
/// empty; targets are written and must not be read-only, sources are read, and both are kept alive until the stream has
/// passed the call. The target may be the source; for all_gather and gather, the source may be this rank's part of the
/// target; for reduce_scatter and scatter, the target may be its part of the source. `op` is "sum", "product", "max",
/// "min" or "average"; for a sum of floats, inputs are multiplied by `factor` first.
///
/// send_receive and all_to_all_v move elements of any type, also with sizes known only on the device, and experts
/// creates a layer of experts.
///
/// Calls raise InvalidArgumentError for mismatched lengths, arrays that are not contiguous, overlap partially or belong
/// to another device, read-only targets and a root out of range; ParseError for an unknown operator and, in reductions,
/// an unknown element type; TypeError for objects that are no arrays; UnsupportedError for a factor with integers, and
/// for calls that the vendor's library cannot execute if they are routed to it; and the error that ended the device's
/// work, such as PeerLostError, if there is one. If ranks make different calls, Stream.synchronize raises
/// MismatchError.
#[pyclass(frozen, module = "warplink")]
#[derive(Debug)]
pub(crate) struct Collectives {
    pub(crate) inner: Detached<warplink::Collectives>,
    pub(crate) place: Place,
    pub(crate) rank: Rank,
    pub(crate) world: usize,
    /// The memory of arrays without elements.
    pub(crate) nothing: DeviceSlice,
    /// Notified of each call.
    pub(crate) watched: Arc<Watched>,
}

#[pymethods]
impl Collectives {
    /// Path of the calls: "direct", kernels that access the peers' memory, or "engine", the vendor's library.
    #[getter]
    fn path(&self) -> PyResult<&'static str> {
        Ok(self.inner.get()?.path().name())
    }

    /// Binds the collective named `kind`, such as "all_gather", to memory, for calls repeated on the same buffers:
    /// ranks exchange addresses once, so that the copy engine can perform large all-gathers and all-to-alls. All ranks
    /// bind the same call collectively; blocks until all have. Targets and sources are those of the method of that
    /// name, and are kept alive by the BoundCall. `op` and `factor` are for collectives that reduce, `root` for those
    /// with a root.
    ///
    /// Raises MismatchError if ranks bind different calls, any error of the method of that name, and TimeoutError or
    /// PeerFailedError if another rank does not bind or its arguments are rejected.
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
        let (inner, kind) = (self.inner.get()?, kind.parse().map_err(raise)?);
        let reader = Reader::new(&self.place, None).with_empty(&self.nothing);
        let target = reader.for_targets().read(target, "the target")?;
        let source = reader.read(source, "the source")?;
        let op = op.map(|op| (op, factor));
        let call = call_on(kind, [&target, &source], op, root, self.world)?;
        let bound = detached(py, || inner.bind(&call, &target.slice, &source.slice))?;
        Ok(BoundCall::new(bound, &self.watched))
    }

    /// Path of the collective named `kind`, such as "all_reduce", as in `path`; in a hybrid cube mesh, the path differs
    /// between calls. `count` is the number of elements of a part: the data that one rank passes to one other or to
    /// all. `op` is for collectives that reduce, `root` for those with a root. Raises ParseError for an unknown kind,
    /// type or operator.
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
        Ok(self.inner.get()?.path_of(&call).name())
    }

    /// How a call whose `path_of` is "direct" is performed: the algorithm, the number of lanes (groups of threads of
    /// the kernel) that move data, the threads of each lane, and the number of chunks into which a lane splits its
    /// data. Arguments are those of path_of.
    ///
    /// Raises UnsupportedError if the algorithm passed to Communicator.collectives does not implement the call, or the
    /// vendor's library executes it; InvalidArgumentError if an operator or a root is missing or not supported by the
    /// collective; ParseError as path_of does.
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
        let (inner, call) = (self.inner.get()?, call(kind, count, &dtype, op, root)?);
        let choice = detached(py, || inner.choice(&call))?;
        choice_to_python(py, choice)
    }

    /// Path of send_receive and all_to_all_v, as in `path`; None if they cannot reach the other ranks.
    #[getter]
    fn path_of_messages(&self) -> PyResult<Option<&'static str>> {
        Ok(self
            .inner
            .get()?
            .path_of_messages()
            .map(CollectivePath::name))
    }

    /// The address of the vendor library's communicator (`ncclComm_t` on GPUs) that executes calls; None if the direct
    /// path executes all, or a rank was lost. It is valid as long as these collectives exist and no rank is lost.
    #[getter]
    fn communicator(&self) -> PyResult<Option<usize>> {
        let communicator = self.inner.get()?.communicator();
        Ok(communicator
            .filter(|communicator| !communicator.is_null())
            .map(|communicator| communicator as usize))
    }

    /// The number of ranks.
    #[getter]
    fn size(&self) -> usize {
        self.world
    }

    /// The most messages of one send_receive.
    #[getter]
    fn max_messages(&self) -> usize {
        warplink::collective::MAX_MESSAGES
    }

    /// Whether send_receive and all_to_all_v reach the other ranks. If not, in a hybrid cube mesh restricted to the
    /// direct path or without the vendor's library, they raise UnsupportedError or the library's error.
    #[getter]
    fn serves_messages(&self) -> PyResult<bool> {
        Ok(self.inner.get()?.serves_messages())
    }

    /// Sets `target`, of `size` times the bytes of `source`, to every rank's source in rank order.
    fn all_gather(
        &self,
        stream: &Stream,
        target: &Bound<'_, PyAny>,
        source: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let kind = CollectiveKind::AllGather;
        self.enqueue(stream, kind, [target, source], None, None)
    }

    /// Sets `target` to the reduction of every rank's source. With a factor, floats are multiplied by it before they
    /// are summed. Raises InvalidArgumentError for a factor with an operator other than "sum", and for arrays without
    /// an element type, as do all reductions.
    #[pyo3(signature = (stream, target, source, op="sum", factor=None))]
    fn all_reduce(
        &self,
        stream: &Stream,
        target: &Bound<'_, PyAny>,
        source: &Bound<'_, PyAny>,
        op: &str,
        factor: Option<f64>,
    ) -> PyResult<()> {
        let kind = CollectiveKind::AllReduce;
        self.enqueue(stream, kind, [target, source], Some((op, factor)), None)
    }

    /// Sets `target` to this rank's part of the reduction of every rank's source, which has `size` times its bytes.
    #[pyo3(signature = (stream, target, source, op="sum", factor=None))]
    fn reduce_scatter(
        &self,
        stream: &Stream,
        target: &Bound<'_, PyAny>,
        source: &Bound<'_, PyAny>,
        op: &str,
        factor: Option<f64>,
    ) -> PyResult<()> {
        let kind = CollectiveKind::ReduceScatter;
        self.enqueue(stream, kind, [target, source], Some((op, factor)), None)
    }

    /// Sets part p of `target` to this rank's part of rank p's source.
    fn all_to_all(
        &self,
        stream: &Stream,
        target: &Bound<'_, PyAny>,
        source: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let kind = CollectiveKind::AllToAll;
        self.enqueue(stream, kind, [target, source], None, None)
    }

    /// Sets `target` to the source of rank `root`; the sources of other ranks are not read.
    fn broadcast(
        &self,
        stream: &Stream,
        target: &Bound<'_, PyAny>,
        source: &Bound<'_, PyAny>,
        root: usize,
    ) -> PyResult<()> {
        let kind = CollectiveKind::Broadcast;
        self.enqueue(stream, kind, [target, source], None, Some(root))
    }

    /// On rank `root`, sets `target` to the reduction of every rank's source; the targets of other ranks are unchanged.
    #[pyo3(signature = (stream, target, source, root, op="sum", factor=None))]
    #[allow(clippy::too_many_arguments, reason = "they are Python's keywords")]
    fn reduce(
        &self,
        stream: &Stream,
        target: &Bound<'_, PyAny>,
        source: &Bound<'_, PyAny>,
        root: usize,
        op: &str,
        factor: Option<f64>,
    ) -> PyResult<()> {
        let kind = CollectiveKind::Reduce;
        self.enqueue(
            stream,
            kind,
            [target, source],
            Some((op, factor)),
            Some(root),
        )
    }

    /// On rank `root`, sets `target` to every rank's source in rank order; the targets of other ranks are unchanged.
    fn gather(
        &self,
        stream: &Stream,
        target: &Bound<'_, PyAny>,
        source: &Bound<'_, PyAny>,
        root: usize,
    ) -> PyResult<()> {
        let kind = CollectiveKind::Gather;
        self.enqueue(stream, kind, [target, source], None, Some(root))
    }

    /// Sets `target` to this rank's part of the source of rank `root`; the sources of other ranks are not read.
    fn scatter(
        &self,
        stream: &Stream,
        target: &Bound<'_, PyAny>,
        source: &Bound<'_, PyAny>,
        root: usize,
    ) -> PyResult<()> {
        let kind = CollectiveKind::Scatter;
        self.enqueue(stream, kind, [target, source], None, Some(root))
    }

    /// The collective named `kind`, such as "all_reduce", between device memory at two addresses, corresponding to the
    /// method of that name. `count` is the number of elements that one rank passes to one other or to all: the length
    /// of the shorter operand, if they differ. The caller keeps the memory allocated until the stream has passed the
    /// call. Raises ParseError as path_of does, and InvalidArgumentError if an operator or a root is missing or not
    /// supported by the collective.
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

    /// `all_to_all_v` of bytes between device memory at two addresses: receives the p-th of `target_nbytes` bytes from
    /// rank p and sends it the p-th of `source_nbytes` bytes, with contiguous parts. The caller keeps the memory
    /// allocated until the stream has passed the call. Raises the errors of all_to_all_v.
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

    /// Later work in the stream waits until every rank's stream has reached the barrier. Raises the error that ended
    /// the device's work, such as PeerLostError, if there is one.
    fn barrier(&self, py: Python<'_>, stream: &Stream) -> PyResult<()> {
        let (inner, live) = (self.inner.get()?, stream.live()?);
        self.make(py, || inner.barrier(live))
    }

    /// Sends and receives, `(peer, array)` each, all concurrent: no message waits for another of the call.
    ///
    /// Arrays have any element type and any length, including 0; received data overlaps no other array of the call. The
    /// n-th send to a rank matches the n-th receive there from this one, of the same number of bytes. Only the two
    /// ranks of a message take part, and may group their messages differently, as long as some order lets all of them
    /// progress; both ends of a message from a rank to itself belong in one call. Does not block.
    ///
    /// Raises InvalidArgumentError for a rank out of range, arrays that overlap, more than 64 messages, and mismatched
    /// messages to this rank itself. If the lengths of both ends differ, Stream.synchronize raises MismatchError, with
    /// the peer, on both ranks if `path` is "direct".
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

    /// `send_receive` of bytes between device memory: sends and receives are `(peer, (address, nbytes))` each. The
    /// caller keeps the memory allocated until the stream has passed the call. Raises the errors of send_receive.
    pub(crate) fn send_receive_at(
        &self,
        py: Python<'_>,
        stream: &Stream,
        sends: Vec<(Rank, (u64, usize))>,
        receives: Vec<(Rank, (u64, usize))>,
    ) -> PyResult<()> {
        let memory = |(peer, (address, bytes))| match bytes {
            // Such a message still takes part in matching, and its tensor may have a null address.
            0 => Ok((peer, self.nothing.clone())),
            _ => Ok((peer, self.place.borrow_operand(address, bytes)?)),
        };
        let memory = |ends: Vec<_>| ends.into_iter().map(memory).collect::<PyResult<Vec<_>>>();
        self.messages(py, stream, &memory(sends)?, &memory(receives)?)
    }

    /// Sets part p of `target` to this rank's part of rank p's `source`, for each rank p, with a length for each pair
    /// of ranks.
    ///
    /// `target_counts` and `source_counts` are the numbers of elements of each rank's part, in rank order, and
    /// `target_displacements` and `source_displacements` the offsets of the parts in elements; without displacements,
    /// parts are contiguous. Elements are those of the arrays, of any type, the same in both; for memory without a type
    /// they are bytes. The count sent to a rank equals the count that it expects. Counts of 0 are allowed; parts of the
    /// source may overlap, those of the target may not. Does not block.
    ///
    /// Raises InvalidArgumentError if counts or displacements are not one per rank or reach beyond the array, with the
    /// rank in `peer`. If ranks expect other lengths, Stream.synchronize raises MismatchError, with the peer, on both
    /// ranks if `path` is "direct".
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
        let (inner, live) = (self.inner.get()?, stream.live()?);
        let reader = self.reader(stream);
        let target = reader.for_targets().read(target, "the target")?;
        let source = reader.read(source, "the source")?;
        let (dtype, each) = unit(&target, &source)?;
        let received = Cut::new(target_counts, target_displacements, each);
        let sent = Cut::new(source_counts, source_displacements, each);
        self.make(py, || {
            let output = (&target.slice, received.parts());
            inner.all_to_all_v(output, (&source.slice, sent.parts()), dtype, live)
        })
    }

    /// As all_to_all_v, with counts in device memory.
    ///
    /// `source_counts` holds the number of elements for each rank, and `target_counts` is set to the number received
    /// from each: both have shape `[size]`, in i64 or u64. `max_count` limits each count and is the same on all ranks;
    /// target and source have space for that many elements per rank, `[size, max_count]`, the first of which are used.
    /// Elements beyond the count are neither read nor written. Memory that is written overlaps no other array. No host
    /// waits for a count, and a captured graph is valid for all counts up to the limit. Does not block.
    ///
    /// Raises InvalidArgumentError for arrays of other lengths or elements and for those that overlap, and
    /// UnsupportedError if `path_of_messages` is not "direct". If a count is above `max_count` or below 0, or
    /// `max_count` or the element size differ on another rank, Stream.synchronize raises MismatchError, with the peer,
    /// on both ranks.
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
        let (inner, live) = (self.inner.get()?, stream.live()?);
        let reader = self.reader(stream);
        let target = reader.for_targets().read(target, "the target")?;
        let source = reader.read(source, "the source")?;
        let received = reader
            .for_targets()
            .read(target_counts, "the target's counts")?;
        let sent = reader.read(source_counts, "the source's counts")?;
        let (dtype, each) = unit(&target, &source)?;
        check_counts(&received, "the target's")?;
        check_counts(&sent, "the source's")?;
        // Counts in device memory are in units of the type and cannot be scaled from here, as counts on the host are.
        if each != 1 {
            return Err(invalid(format!(
                "elements of {} bytes; expected 1, 2, 4 or 8",
                each * dtype.size()
            )));
        }
        self.make(py, || {
            let output = (&target.slice, &received.slice);
            let input = (&source.slice, &sent.slice);
            inner.all_to_all_v_on_device(output, input, dtype, max_count, live)
        })
    }

    /// A collective of rows fused with the operations that follow it in a model, in one kernel: the sum of every rank's
    /// `input`, in single precision and rank order, then the residual, a norm and a quantisation; any of the results
    /// can be stored.
    ///
    /// `input` is `[.., width]` of f32, f16 or bf16, as are all arrays but the quantised output and its scales. h is
    /// the sum and `residual`, rounded; n is h normalised by `norm`, "rms" or "layer", with `weight`, to which 1 is
    /// added with `weight_bias`, and `bias`; q is n divided by a scale, as f8e4m3. The arrays that are passed are
    /// stored: the sum alone in `sum`, h in `residual_out`, n in `output` and q in `quantized`. `quantization` is
    /// "static", where `scale` is f32[1] and read; "per_token", where it is f32[rows] and written; "per_block" or
    /// "per_block_power_of_two", with one per 128 elements; "mxfp8", with one per 32 elements, a u8 that is its
    /// exponent plus 127; or "nvfp4", where `quantized` are bytes of two e2m1 each, the first in the low bits, and each
    /// 16 elements have a scale as f8e4m3, their largest magnitude / 6 times `global_scale`, an f32[1] that is read.
    /// One of `sum`, `residual_out` and `output` may be the memory of the input or of the residual.
    ///
    /// `kind` is "all_reduce", "all_reduce_sharded", where a rank has the residual, the sum and residual_out of only
    /// its own rows, "reduce_scatter" or "all_gather". Ranks then own the same number of rows each, in rank order. With
    /// `wire` "fp8" rows travel as floats of 8 bits with a scale for each 128 elements; docs/fused.md documents the
    /// error. Does not block.
    ///
    /// Raises InvalidArgumentError for memory of the wrong size or that overlaps, ParseError for unknown names, and
    /// UnsupportedError if `path` is "engine" or a row is too long for the workspace. If ranks make different calls,
    /// Stream.synchronize raises MismatchError.
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
        let epilogue = Epilogue {
            norm: norm.map(str::parse).transpose().map_err(raise)?,
            eps,
            weight_bias,
            quantization: quantization.map(str::parse).transpose().map_err(raise)?,
        };
        let kind = kind.parse().map_err(raise)?;
        let call = (kind, epilogue, wire.parse().map_err(raise)?);
        let sources = [Some(input), residual, weight, bias, global_scale];
        let targets = [sum, residual_out, output, quantized, scale];
        self.enqueue_fused(py, stream, call, (sources, targets))
    }

    /// A layer of experts on these ranks, with memory for its calls. `experts` is the number of experts, a multiple of the number of ranks: rank r owns `experts / size` of them,
    /// starting at `r * experts / size`. A token goes to `top_k` of them. `max_tokens` is the most tokens per rank in
    /// one call, `elements` the length of a token's row, and `dtype` its type: "f32", "f16" or "bf16". Experts describes
    /// the other options, which all ranks pass alike. Does not communicate; blocks while kernels are compiled, the first
    /// time on a machine.
    ///
    /// Raises InvalidArgumentError for inconsistent options, ParseError for an unknown type or name, UnsupportedError if
    /// `path` is "engine" or rows are longer than a chunk of the workspace, and OutOfMemoryError.
    #[pyo3(signature = (*, experts, top_k, max_tokens, elements, dtype, max_rows=None, layout="by_source",
                        overflow="drop", quantization=None, quantized_tokens=false))]
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
        layout: &str,
        overflow: &str,
        quantization: Option<&str>,
        quantized_tokens: bool,
    ) -> PyResult<Experts> {
        let options = ExpertOptions {
            experts,
            top_k,
            max_tokens,
            max_rows,
            elements,
            dtype: dtype.parse().map_err(raise)?,
            layout: layout.parse().map_err(raise)?,
            overflow: overflow.parse().map_err(raise)?,
            quantization: quantization.map(str::parse).transpose().map_err(raise)?,
            quantized_tokens,
        };
        let of = (&self.place, self.world, &self.nothing);
        Experts::new(py, &self.inner.get()?, options, of)
    }

    fn __repr__(&self) -> PyResult<String> {
        let (path, size) = (self.path()?, self.world);
        Ok(format!("Collectives(path='{path}', size={size})"))
    }
}
