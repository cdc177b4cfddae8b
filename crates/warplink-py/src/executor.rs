//! Execution of programs.

use crate::array::{self, Array, Reader};
use crate::errors::{captured, closed, detached, invalid, raise};
use crate::memory::Memory;
use crate::overlap::OverlapPlan;
use crate::owner::Detached;
use crate::place::Place;
use crate::program::{Program, read_parameters};
use crate::stream::Stream;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::collections::BTreeSet;
use std::sync::Arc;
use warplink::device::DeviceSlice;
use warplink::overlap::{
    AllGatherMatmul, AllGatherMatmulBuffers, AllGatherMatmulLowering, Leading, Lowering,
    MatmulReduceScatter, MatmulReduceScatterBuffers, MatmulReduceScatterLowering, Options,
};
use warplink::program::PrepareOptions;
use warplink::{DType, Error};

/// Runs programs on one rank. Every rank prepares and binds the same programs in the same order.
#[pyclass(frozen, module = "warplink")]
#[derive(Debug)]
pub(crate) struct Executor {
    inner: Detached<warplink::program::Executor>,
    place: Place,
}

/// A program prepared for this rank, to be bound to memory.
#[pyclass(frozen, module = "warplink")]
#[derive(Debug)]
pub(crate) struct Prepared {
    inner: Detached<Arc<warplink::program::Prepared>>,
    place: Place,
}

/// A program bound to memory, for any number of runs. It may be dropped at any time: resources that streams still use
/// are kept.
#[pyclass(frozen, module = "warplink")]
#[derive(Debug)]
pub(crate) struct Plan {
    inner: Detached<Arc<warplink::program::Plan>>,
    /// The names of read-only bound memory.
    read_only: BTreeSet<String>,
    place: Place,
}

/// A captured plan: one graph, launched instead of runs of the plan.
#[pyclass(frozen, module = "warplink")]
#[derive(Debug)]
pub(crate) struct CapturedPlan(Detached<Arc<warplink::program::CapturedPlan>>);

impl Executor {
    pub(crate) fn new(inner: warplink::program::Executor, place: &Place) -> Self {
        Self {
            inner: Detached::new(inner, || closed("executor")),
            place: place.clone(),
        }
    }
}

#[pymethods]
impl Executor {
    /// Verifies `program` for this world and unrolls it for this rank. `parameters`, `given` and `streams` are those of
    /// `Program.verify`. Kernels that wait for other ranks occupy at most `multiprocessors` at a time, the same on all
    /// ranks; without a limit by default. Does not communicate. Raises VerificationError, and InvalidArgumentError if
    /// the parameters are not those that the program requires or its kernels have more lanes than multiprocessors.
    #[pyo3(signature = (program, parameters=None, *, given=Vec::new(), streams=2, verify=true, multiprocessors=None))]
    #[expect(clippy::too_many_arguments, reason = "they are keywords in Python")]
    fn prepare(
        &self,
        py: Python<'_>,
        program: &Program,
        parameters: Option<&Bound<'_, PyDict>>,
        given: Vec<String>,
        streams: usize,
        verify: bool,
        multiprocessors: Option<usize>,
    ) -> PyResult<Prepared> {
        let (executor, parameters) = (self.inner.get()?, read_parameters(parameters, given)?);
        let options = PrepareOptions {
            streams,
            verify,
            multiprocessors,
            library: false,
        };
        let prepared = detached(py, || executor.prepare(&program.0, &parameters, options))?;
        Ok(Prepared {
            inner: Detached::new(Arc::new(prepared), || closed("prepared program")),
            place: self.place.clone(),
        })
    }

    /// Plans `c[i] = all_gather(a) @ b[i] + bias[i]`, overlapped.
    ///
    /// `a` is this rank's part, `[.., m / size, .., k]`, divided along dimension `dim` (any but the last); each `b[i]`
    /// is `[k, n]` (`[n, k]` if `transposed_b`), whole on every rank; each `c[i]` is `[.., m, .., n]`; `bias`, if
    /// given, has a vector of `n` for each; `gathered`, if given, is set to all of A. Element types are bf16, f16 or
    /// f32, the same for all; all are contiguous. On the host device, `a`, `c` and `gathered` must be views of regions
    /// for peers to access them in place.
    ///
    /// Collective: every rank calls this with the same sizes. Blocks until the peers have exchanged handles. `lowering`
    /// is the only one allowed, by name; with `trials`, lowerings of similar predicted cost are timed on the machine.
    /// Kernels that wait for other ranks occupy at most `multiprocessors` at a time, the same on all ranks; without a limit
    /// by default. With one, the vendor's library executes collectives, which it does not bind.
    /// Raises InvalidArgumentError if sizes do not match.
    #[pyo3(signature = (a, b, c, *, bias=None, gathered=None, dim=0, transposed_b=false, lowering=None, streams=2, trials=true, multiprocessors=None))]
    #[expect(clippy::too_many_arguments, reason = "they are keywords in Python")]
    fn all_gather_matmul(
        &self,
        py: Python<'_>,
        a: &Bound<'_, PyAny>,
        b: Vec<Bound<'_, PyAny>>,
        c: Vec<Bound<'_, PyAny>>,
        bias: Option<Vec<Bound<'_, PyAny>>>,
        gathered: Option<Bound<'_, PyAny>>,
        dim: usize,
        transposed_b: bool,
        lowering: Option<&str>,
        streams: usize,
        trials: bool,
        multiprocessors: Option<usize>,
    ) -> PyResult<OverlapPlan> {
        let (executor, sources) = (self.inner.get()?, Reader::new(&self.place, None));
        let targets = sources.for_targets();
        let source = |array: &Bound<'_, PyAny>| sources.read(array, "an array");
        let target = |array: &Bound<'_, PyAny>| targets.read(array, "the target");
        let (a, b) = (
            source(a)?,
            b.iter().map(source).collect::<PyResult<Vec<_>>>()?,
        );
        let c = c.iter().map(target).collect::<PyResult<Vec<_>>>()?;
        let bias = bias.unwrap_or_default();
        let bias = bias.iter().map(source).collect::<PyResult<Vec<_>>>()?;
        let gathered = gathered.as_ref().map(target).transpose()?;
        let operands = [&a].into_iter().chain(&b).chain(&c).chain(&bias);
        let dtype = common_type(operands.chain(&gathered))?;
        let mut whole = a.shape.clone();
        if let Some(extent) = whole.get_mut(dim) {
            // An overflow becomes a shape that no operand has, and is rejected below.
            *extent = extent.saturating_mul(executor.world());
        }
        let leading = Leading::of(&whole, dim).map_err(raise)?;
        let n = b
            .iter()
            .map(|b| columns_of("b", b, leading.columns, transposed_b));
        let n = n.collect::<PyResult<Vec<usize>>>()?;
        for (c, n) in c.iter().zip(&n) {
            has_shape("c", c, &with_last(&whole, *n))?;
        }
        if let Some(gathered) = &gathered {
            has_shape("gathered", gathered, &whole)?;
        }
        let problem = AllGatherMatmul {
            m: leading.rows,
            k: leading.columns,
            n,
            dtype,
            transposed_b,
            bias: !bias.is_empty(),
            keep: gathered.is_some(),
        };
        let lowering = lowering.map(|name| name.parse::<AllGatherMatmulLowering>()?.lowering());
        let options = plan_options(lowering, leading.outer, streams, trials, multiprocessors)?;
        let buffers = AllGatherMatmulBuffers {
            a: a.slice,
            b: slices(b),
            bias: slices(bias),
            c: slices(c),
            gathered: gathered.map(|gathered| gathered.slice),
        };
        let plan = detached(py, || problem.plan(&executor, &options, &buffers))?;
        Ok(OverlapPlan::new(plan, &self.place))
    }

    /// Plans `c = reduce_scatter(a @ b) + bias`, overlapped.
    ///
    /// `a` is `[.., m, .., k / size]`, `b` is `[k / size, n]` (`[n, k / size]` if `transposed_b`), and `c`, this rank's
    /// part of the sum over the ranks, is `[.., m / size, .., n]`, divided along dimension `dim` (any but the last).
    /// `bias`, a vector of `n`, is the same on every rank and added once. Otherwise as `all_gather_matmul`.
    #[pyo3(signature = (a, b, c, *, bias=None, dim=0, transposed_b=false, lowering=None, streams=2, trials=true, multiprocessors=None))]
    #[expect(clippy::too_many_arguments, reason = "they are keywords in Python")]
    fn matmul_reduce_scatter(
        &self,
        py: Python<'_>,
        a: &Bound<'_, PyAny>,
        b: &Bound<'_, PyAny>,
        c: &Bound<'_, PyAny>,
        bias: Option<Bound<'_, PyAny>>,
        dim: usize,
        transposed_b: bool,
        lowering: Option<&str>,
        streams: usize,
        trials: bool,
        multiprocessors: Option<usize>,
    ) -> PyResult<OverlapPlan> {
        let (executor, sources) = (self.inner.get()?, Reader::new(&self.place, None));
        let (a, b) = (sources.read(a, "an array")?, sources.read(b, "an array")?);
        let c = sources.for_targets().read(c, "the target")?;
        let bias = bias.map(|array| sources.read(&array, "an array"));
        let bias = bias.transpose()?;
        let dtype = common_type([&a, &b, &c].into_iter().chain(&bias))?;
        let world = executor.world();
        let leading = Leading::of(&a.shape, dim).map_err(raise)?;
        let n = columns_of("b", &b, leading.columns, transposed_b)?;
        let mut part = with_last(&a.shape, n);
        if let Some(extent) = part.get_mut(dim) {
            if !extent.is_multiple_of(world) {
                return Err(invalid(format!(
                    "dimension {dim} of a has {extent} rows; expected a multiple of the {world} ranks"
                )));
            }
            *extent /= world;
        }
        has_shape("c", &c, &part)?;
        let problem = MatmulReduceScatter {
            m: leading.rows,
            // The problem is stated for the whole operands; each rank passes its part of the summed dimension.
            k: leading.columns * world,
            n,
            dtype,
            transposed_b,
            bias: bias.is_some(),
        };
        let lowering = lowering.map(|name| name.parse::<MatmulReduceScatterLowering>()?.lowering());
        let options = plan_options(lowering, leading.outer, streams, trials, multiprocessors)?;
        let buffers = MatmulReduceScatterBuffers {
            a: a.slice,
            b: b.slice,
            bias: bias.map(|bias| bias.slice),
            c: c.slice,
        };
        let plan = detached(py, || problem.plan(&executor, &options, &buffers))?;
        Ok(OverlapPlan::new(plan, &self.place))
    }
}

#[pymethods]
impl Prepared {
    /// Binds inputs and outputs (`{name: array}`) to memory and exchanges handles, so that runs only enqueue. Outputs
    /// that are not bound are allocated. Collective: blocks until the peers have bound theirs. Raises
    /// InvalidArgumentError for a missing input, memory of another length or a read-only output, and PeerFailedError if
    /// this happens on a peer.
    #[pyo3(signature = (bindings=None))]
    fn bind(&self, py: Python<'_>, bindings: Option<&Bound<'_, PyDict>>) -> PyResult<Plan> {
        let prepared = self.inner.get()?;
        // Only outputs need writable memory; inputs may be read-only arrays.
        let is_output = |name: &str| prepared.rank_program().is_output(name);
        let bound = array::bindings(bindings, &self.place, None, is_output)?;
        let plan = detached(py, || prepared.bind(&bound.bindings))?;
        Ok(Plan {
            inner: Detached::new(Arc::new(plan), captured),
            read_only: bound.read_only,
            place: self.place.clone(),
        })
    }
}

#[pymethods]
impl Plan {
    /// Name of the program.
    #[getter]
    fn name(&self) -> PyResult<String> {
        Ok(self.inner.get()?.name().to_owned())
    }

    /// The number of operations enqueued by one run.
    #[getter]
    fn operations(&self) -> PyResult<usize> {
        Ok(self.inner.get()?.operations())
    }

    /// Why the program cannot run as a graph, or None.
    #[getter]
    fn eager_only(&self) -> PyResult<Option<String>> {
        Ok(self.inner.get()?.eager_only().map(ToString::to_string))
    }

    /// The memory of the tensor `name`, bound or allocated; None if this rank does not access it.
    fn tensor(&self, name: &str) -> PyResult<Option<Memory>> {
        let plan = self.inner.get()?;
        Ok(plan.tensor(name).map(|slice| Memory {
            slice: slice.clone(),
            place: self.place.clone(),
            read_only: self.read_only.contains(name),
        }))
    }

    /// Names of the inputs and outputs whose memory `run` can replace: those that no peer accesses and no kernel of the
    /// program uses. The list may differ between ranks.
    #[getter]
    fn replaceable(&self) -> PyResult<Vec<String>> {
        let plan = self.inner.get()?;
        Ok(plan.replaceable().into_iter().map(str::to_owned).collect())
    }

    /// Enqueues the program, starting from and joining back into `stream`. Does not block. `memory` replaces the memory
    /// of some of the `replaceable` tensors, as for `OverlapPlan.run`. Raises InvalidArgumentError for another name or
    /// length, and the error that ended the device's work, such as PeerLostError, if there is one.
    #[pyo3(signature = (stream, memory=None))]
    fn run(
        &self,
        py: Python<'_>,
        stream: &Stream,
        memory: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<()> {
        let (plan, raw, stream) = (self.inner.get()?, stream.raw(), stream.live()?);
        let is_output = |name: &str| plan.is_output(name);
        let memory = array::bindings(memory, &self.place, Some(raw), is_output)?;
        detached(py, || plan.run_on(stream, &memory.bindings))
    }

    /// Captures the plan into one graph, which replaces it. Blocks while the graph is prepared. Raises
    /// InvalidArgumentError if the program can only run eagerly.
    fn capture(&self, py: Python<'_>) -> PyResult<CapturedPlan> {
        // Taken out rather than shared: an eager run and the graph would use the same buffers and signals unordered.
        let plan = self.inner.take_unused()?;
        let captured = detached(py, || plan.capture())?;
        Ok(CapturedPlan(Detached::new(Arc::new(captured), || {
            closed("captured plan")
        })))
    }

    /// Runs once with a timestamp before and after every operation. On rank 0 the result contains the timings of all
    /// ranks, as JSON text for Perfetto and Chrome's trace viewer; None on other ranks. Collective: blocks until the
    /// run is complete on all ranks.
    fn trace(&self, py: Python<'_>, stream: &Stream) -> PyResult<Option<String>> {
        let (plan, stream) = (self.inner.get()?, stream.live()?);
        let trace = detached(py, || plan.trace(stream))?;
        let text = trace.map(|trace| serde_json::to_string(&trace.to_perfetto()));
        text.transpose()
            .map_err(|error| raise(Error::internal(format!("write the trace: {error}"))))
    }
}

#[pymethods]
impl CapturedPlan {
    /// Enqueues the graph on `stream`. Does not block. Raises the error that ended the device's work, such as
    /// PeerLostError, if there is one.
    fn launch(&self, py: Python<'_>, stream: &Stream) -> PyResult<()> {
        let (captured, stream) = (self.0.get()?, stream.live()?);
        detached(py, || captured.launch(stream))
    }
}

fn plan_options(
    lowering: Option<warplink::Result<Lowering>>,
    outer: usize,
    streams: usize,
    trials: bool,
    multiprocessors: Option<usize>,
) -> PyResult<Options> {
    Ok(Options {
        lowering: lowering.transpose().map_err(raise)?,
        streams,
        outer,
        trials,
        multiprocessors,
        ..Options::default()
    })
}

fn slices(arrays: Vec<Array>) -> Vec<DeviceSlice> {
    arrays.into_iter().map(|array| array.slice).collect()
}

/// The common element type of `arrays`.
fn common_type<'a>(arrays: impl IntoIterator<Item = &'a Array>) -> PyResult<DType> {
    let mut common = None;
    for array in arrays {
        let dtype = array.element("an operand")?.dtype()?;
        if *common.get_or_insert(dtype) != dtype {
            return Err(raise(Error::invalid(format!(
                "an operand is {dtype}; expected the same element type for all"
            ))));
        }
    }
    common.ok_or_else(|| invalid("there is no operand"))
}

/// The number of columns of a right operand with `rows` rows, which may be transposed in memory.
fn columns_of(name: &str, array: &Array, rows: usize, transposed: bool) -> PyResult<usize> {
    match (&array.shape[..], transposed) {
        (&[own, columns], false) | (&[columns, own], true) if own == rows => Ok(columns),
        _ => {
            let expected = if transposed {
                format!("[n, {rows}]")
            } else {
                format!("[{rows}, n]")
            };
            Err(invalid(format!(
                "{name} has shape {:?}; expected {expected}",
                array.shape
            )))
        }
    }
}

fn with_last(shape: &[usize], last: usize) -> Vec<usize> {
    let mut shape = shape.to_vec();
    if let Some(extent) = shape.last_mut() {
        *extent = last;
    }
    shape
}

fn has_shape(name: &str, array: &Array, expected: &[usize]) -> PyResult<()> {
    if array.shape == expected {
        return Ok(());
    }
    Err(invalid(format!(
        "{name} has shape {:?}; expected {expected:?}",
        array.shape
    )))
}
