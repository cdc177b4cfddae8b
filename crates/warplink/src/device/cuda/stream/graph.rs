//! Graphs: work recorded once and launched many times.

use super::CudaStream;
use crate::debug::debug_text;
use crate::device::cuda::driver::status;
use crate::device::cuda::gpu::Gpu;
use crate::device::{FaultSet, GraphBackend, Stream};
use crate::error::{Error, ErrorKind, Result};
use crate::sync::lock;
use cudarc::driver::sys::{CUgraph, CUgraphExec, CUstream};
use std::sync::{Arc, Mutex};

/// An executable graph.
pub(crate) struct CudaGraph {
    gpu: Arc<Gpu>,
    /// Locked, since the driver allows one call on a graph at a time.
    exec: Mutex<Exec>,
    operations: usize,
    /// Faults of the stream that recorded it.
    faults: FaultSet,
}

/// Driver handle of an executable graph.
struct Exec(CUgraphExec);

// SAFETY: the pointer is a handle that the driver accepts on every thread, one at a time.
unsafe impl Send for Exec {}

impl CudaGraph {
    /// Instantiates `graph` and destroys it; only the executable is kept.
    ///
    /// # Safety
    /// `graph` must be null or a graph of this GPU that nobody else uses, and `stream` a valid
    /// stream of its context, not recording.
    pub(crate) unsafe fn instantiate(
        gpu: &Arc<Gpu>,
        graph: CUgraph,
        stream: CUstream,
    ) -> Result<Self> {
        let mut made = Self {
            gpu: gpu.clone(),
            exec: Mutex::new(Exec(std::ptr::null_mut())),
            operations: 0,
            faults: FaultSet::default(),
        };
        if graph.is_null() {
            return Err(Error::new(
                ErrorKind::Driver,
                "the capture is invalid, and the driver gave no graph",
            )
            .with_operation("end a capture")
            .with_help("record again without calls that cannot be recorded"));
        }
        let driver = gpu.context.driver;
        let _relaxed = gpu.context.relax_capture();
        let exec = made
            .exec
            .get_mut()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        // SAFETY: with a null list of nodes the driver only returns their number; the caller guarantees that the graph is live.
        let counted =
            unsafe { (driver.cuGraphGetNodes)(graph, std::ptr::null_mut(), &mut made.operations) };
        // SAFETY: `exec.0` is an output parameter for one graph; no flags.
        let code = unsafe { (driver.cuGraphInstantiateWithFlags)(&mut exec.0, graph, 0) };
        // SAFETY: nobody else uses the graph, and what was made from it keeps what it needs.
        let destroyed = unsafe { (driver.cuGraphDestroy)(graph) };
        if destroyed != status::SUCCESS {
            tracing::warn!(code = destroyed, "a recorded graph was not destroyed");
        }
        driver.check(counted, "count a graph's operations")?;
        driver.check(code, "instantiate a graph")?;
        // Upload now, so that the first launch does not pay for it.
        // SAFETY: the graph was created above; the caller guarantees a valid stream.
        let code = unsafe { (driver.cuGraphUpload)(exec.0, stream) };
        driver.check(code, "upload a graph")?;
        Ok(made)
    }

    /// Streams that launch it fail when one of `faults` is raised.
    pub(crate) fn depend_on(&self, faults: &FaultSet) {
        self.faults.replace(faults);
    }
}

impl GraphBackend for CudaGraph {
    fn launch(&self, stream: &Stream) -> Result<()> {
        let stream = CudaStream::of(stream, &self.gpu)?;
        let _noted = stream.faults().repeat(&self.faults);
        let (driver, _entered) = stream.enter()?;
        let _enqueuing = stream.enqueue([]);
        let exec = lock(&self.exec);
        // SAFETY: the graph is live, used by one thread at a time, and of the stream's context.
        let code = unsafe { (driver.cuGraphLaunch)(exec.0, stream.raw_stream()) };
        driver.check(code, "launch a graph")
    }

    fn operations(&self) -> usize {
        self.operations
    }
}

impl Drop for CudaGraph {
    fn drop(&mut self) {
        let exec = self
            .exec
            .get_mut()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
            .0;
        if !exec.is_null() {
            let _entered = self.gpu.context.enter();
            // Outside relaxed mode, destroying a graph would invalidate a capture in progress on this thread.
            let _relaxed = self.gpu.context.relax_capture();
            // SAFETY: made once and destroyed once; a launch in progress completes first.
            let code = unsafe { (self.gpu.context.driver.cuGraphExecDestroy)(exec) };
            status::warn_unless_gone(code, "a graph was not destroyed");
        }
    }
}

debug_text!(
    CudaGraph,
    |it| "CudaGraph({:?}, {} operations)",
    it.gpu,
    it.operations
);
