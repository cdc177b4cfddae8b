//! A kernel launched repeatedly as a graph of one node.
//!
//! If only parameter values change between launches, such a graph takes half the host time of a kernel
//! launch. The driver serializes launches of one graph, even across streams, so a graph serves one user,
//! whose launches are ordered anyway.

use super::UserKernel;
use crate::debug::debug_text;
use crate::device::cuda::driver::context::Context;
use crate::device::cuda::driver::raw::RawStream;
use crate::device::cuda::driver::{Driver, status};
use crate::device::cuda::stream::CudaStream;
use crate::device::{Launch, SerialArguments, SerialBackend, Stream};
use crate::error::Result;
use crate::sync::lock;
use cudarc::driver::sys::{
    CUDA_KERNEL_NODE_PARAMS_v2, CUfunction, CUgraph, CUgraphExec, CUgraphNode, CUstream,
};
use std::ffi::c_void;
use std::sync::{Arc, Mutex};

/// A kernel whose launches are serialized.
pub(crate) struct SerialKernel {
    /// Locked, since parameters are set before a launch. Dropped before the kernel that it references.
    graph: Mutex<KernelGraph>,
    kernel: Arc<UserKernel>,
}

/// An instantiated graph of one kernel.
struct KernelGraph {
    context: Arc<Context>,
    function: CUfunction,
    /// Kept alive, since setting parameters refers to its node.
    graph: CUgraph,
    node: CUgraphNode,
    exec: CUgraphExec,
    /// Launch configuration last set successfully.
    launch: Option<Launch>,
    words: Vec<u64>,
    signals: u64,
}

// SAFETY: the pointers are handles that the driver accepts on every thread, one at a time.
unsafe impl Send for KernelGraph {}

impl SerialKernel {
    /// Prepares launches of `kernel`, the first of which resembles `launch`. `None` if the driver lacks such
    /// graphs. May wait for the GPU, as loading code does.
    pub(super) fn ready(kernel: &Arc<UserKernel>, launch: &Launch) -> Result<Option<Self>> {
        let Some(parameters) = kernel.parameter_words() else {
            return Ok(None);
        };
        let (context, function) = (&kernel.gpu.context, kernel.function.handle());
        let graph = KernelGraph::make(context, function, launch, parameters)?;
        Ok(graph.map(|graph| Self {
            graph: Mutex::new(graph),
            kernel: kernel.clone(),
        }))
    }
}

impl SerialBackend for SerialKernel {
    fn launch(
        &self,
        (stream, is_recorded): (&Stream, bool),
        launch: &Launch,
        arguments: &SerialArguments<'_>,
    ) -> Result<()> {
        let kernel = &*self.kernel;
        kernel.check_serial(arguments)?;
        let stream = CudaStream::of(stream, &kernel.gpu)?;
        let _noted = stream.faults().add(arguments.signals.backing().fault());
        kernel.allow_shared(launch)?;
        let (driver, _entered) = stream.enter()?;
        let _enqueuing = stream.enqueue(arguments.slices());
        let raw = stream.raw_stream();
        if stream.has_default_priority() && !launch.together && !is_recorded {
            // SAFETY: the arguments were checked, the stream is of the kernel's context, which is current; what the
            // kernel does with them was promised when it was loaded.
            let launched = unsafe { lock(&self.graph).launch(driver, raw, launch, arguments) };
            return kernel.explain(launched);
        }
        let mut signals = arguments.signals.address();
        let mut parameters = pointers(arguments.words, &mut signals);
        // SAFETY: as above.
        let launched = unsafe { kernel.function.launch(raw, launch, &mut parameters) };
        kernel.explain(launched)
    }
}

/// Pointers to parameter values, as the driver expects them; it only reads them.
fn pointers(words: &[u64], signals: &mut u64) -> [*mut c_void; 2] {
    [
        words.as_ptr().cast_mut().cast(),
        std::ptr::from_mut(signals).cast(),
    ]
}

impl KernelGraph {
    fn make(
        context: &Arc<Context>,
        function: CUfunction,
        launch: &Launch,
        words: usize,
    ) -> Result<Option<Self>> {
        let driver = context.driver;
        let (Some(create), Some(add)) = (driver.cuGraphCreate, driver.cuGraphAddKernelNode_v2)
        else {
            return Ok(None);
        };
        if driver.cuGraphExecKernelNodeSetParams_v2.is_none() {
            return Ok(None);
        }
        let _entered = context.enter_relaxed()?;
        let mut made = Self {
            context: context.clone(),
            function,
            graph: std::ptr::null_mut(),
            node: std::ptr::null_mut(),
            exec: std::ptr::null_mut(),
            launch: None,
            words: vec![0; words],
            signals: 0,
        };
        // SAFETY: `made.graph` is an output parameter for one graph; no flags.
        let code = unsafe { create(&mut made.graph, 0) };
        driver.check(code, "create a graph")?;
        // Placeholder; the first launch sets the real values.
        let mut signals = made.signals;
        let mut pointers = pointers(&made.words, &mut signals);
        let params = made.params(launch, &mut pointers);
        // SAFETY: `made.node` is an output parameter for one node without dependencies; the driver copies the
        // kernel's parameters, whose number and lengths `params` describes.
        let code = unsafe { add(&mut made.node, made.graph, std::ptr::null(), 0, &params) };
        driver.check(code, "add a kernel to a graph")?;
        // SAFETY: `made.exec` is an output parameter for one graph; no flags.
        let code = unsafe { (driver.cuGraphInstantiateWithFlags)(&mut made.exec, made.graph, 0) };
        driver.check(code, "instantiate a graph")?;
        // Upload now, so that the first launch does not pay for it.
        let stream = RawStream::create(context, false)?;
        // SAFETY: the graph was created above, and the stream is of its context.
        let code = unsafe { (driver.cuGraphUpload)(made.exec, stream.raw) };
        driver.check(code, "upload a graph")?;
        Ok(Some(made))
    }

    fn params(
        &self,
        launch: &Launch,
        parameters: &mut [*mut c_void; 2],
    ) -> CUDA_KERNEL_NODE_PARAMS_v2 {
        CUDA_KERNEL_NODE_PARAMS_v2 {
            func: self.function,
            gridDimX: launch.blocks,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: launch.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: launch.shared_bytes,
            kernelParams: parameters.as_mut_ptr(),
            extra: std::ptr::null_mut(),
            kern: std::ptr::null_mut(),
            ctx: std::ptr::null_mut(),
        }
    }

    /// Sets the parameters and launches.
    ///
    /// # Safety
    /// `stream` must be valid and of the context, which must be current; the arguments must have the lengths of the
    /// kernel's parameters, and what it does with them must be sound.
    unsafe fn launch(
        &mut self,
        driver: &Driver,
        stream: CUstream,
        launch: &Launch,
        arguments: &SerialArguments<'_>,
    ) -> Result<()> {
        let (words, mut signals) = (arguments.words, arguments.signals.address());
        let is_set = self.launch == Some(*launch) && self.signals == signals;
        if !is_set || self.words != words {
            let mut pointers = pointers(words, &mut signals);
            let params = self.params(launch, &mut pointers);
            self.launch = None;
            if let Some(set) = driver.cuGraphExecKernelNodeSetParams_v2 {
                // SAFETY: graph and node are live, and used by one thread at a time; the caller vouches for the
                // arguments, which the driver copies. Launches in progress keep theirs.
                let code = unsafe { set(self.exec, self.node, &params) };
                driver.check(code, "set the arguments of a kernel")?;
            }
            self.launch = Some(*launch);
            self.words.clear();
            self.words.extend_from_slice(words);
            self.signals = signals;
        }
        // SAFETY: the graph is live and used by one thread at a time; the caller guarantees a valid stream.
        let code = unsafe { (driver.cuGraphLaunch)(self.exec, stream) };
        driver.check(code, "launch a kernel")
    }
}

impl Drop for KernelGraph {
    fn drop(&mut self) {
        let driver = self.context.driver;
        let _entered = self.context.enter();
        // This thread may be capturing.
        let _relaxed = self.context.relax_capture();
        for code in [
            // SAFETY: made once and destroyed once; a launch in progress completes first.
            (!self.exec.is_null()).then(|| unsafe { (driver.cuGraphExecDestroy)(self.exec) }),
            // SAFETY: as above; nothing else was made of it.
            (!self.graph.is_null()).then(|| unsafe { (driver.cuGraphDestroy)(self.graph) }),
        ] {
            if code.is_some_and(|code| !status::is_gone(code)) {
                tracing::warn!(code, "the graph of a kernel was not destroyed");
            }
        }
    }
}

debug_text!(SerialKernel, |it| "SerialKernel({:?})", it.kernel);
