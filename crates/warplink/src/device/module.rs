//! User code for a device: modules, kernels and launches.

use super::image;
use super::launch::{Argument, Launch};
use super::serial::SerialBackend;
use super::stream::Stream;
use crate::debug::debug_fields;
use crate::error::{Error, Result};
use std::collections::BTreeMap;
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;

/// Source of a module: CUDA C++ or machine code for GPUs, closures for the host device, or both, so that a
/// program runs on either.
#[derive(Clone, Default)]
pub struct ModuleSource {
    name: String,
    code: Option<CudaCode>,
    options: Vec<String>,
    host: BTreeMap<String, HostKernel>,
}

/// A kernel of the host device.
#[derive(Clone)]
pub(crate) enum HostKernel {
    /// Blocks that run concurrently and may wait for one another in any way.
    Blocks(Arc<BlockBody>),
    /// Lanes of one of `ranks` ranks that share the machine.
    Lanes {
        ranks: usize,
        body: Arc<dyn HostLanes>,
    },
}

/// Body of one block.
pub(crate) type BlockBody = dyn Fn(&super::Block<'_>) -> Result<()> + Send + Sync;

/// Lanes on the host device: blocks that wait only by futures, so that one thread can run several. Argument 1
/// of a launch is the rank's signals; every store that a lane may wait for rings the doorbell in them.
pub(crate) trait HostLanes: Send + Sync {
    /// Body of the lane of `block`.
    fn run<'a>(&'a self, block: &'a super::Block<'a>) -> LaneFuture<'a>;
}

/// A running lane.
pub(crate) type LaneFuture<'a> = Pin<Box<dyn Future<Output = Result<()>> + 'a>>;

/// Code for a GPU.
#[derive(Clone)]
pub(crate) enum CudaCode {
    /// CUDA C++.
    Text(String),
    /// Compiled code: a cubin, a fat binary or PTX terminated by a zero.
    Image(Arc<[u8]>),
    /// CUDA C++ generated on demand; the module is cached by its text.
    Written(Arc<WriteText>),
}

/// Generates CUDA C++.
pub(crate) type WriteText = dyn Fn() -> Result<String> + Send + Sync;

impl ModuleSource {
    /// An empty source; `name` is for messages.
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            ..Self::default()
        }
    }

    /// Adds CUDA C++, compiled for the GPU when the module is first loaded. It may include
    /// `<warplink/device.cuh>`. Kernels must be `extern "C"`, so that they can be found by name.
    pub fn with_cuda(mut self, text: impl Into<String>) -> Self {
        self.code = Some(CudaCode::Text(text.into()));
        self
    }

    /// Adds CUDA C++ that `write` generates when the module is loaded. Loaded modules are cached by text.
    pub(crate) fn with_written_cuda(
        mut self,
        write: impl Fn() -> Result<String> + Send + Sync + 'static,
    ) -> Self {
        self.code = Some(CudaCode::Written(Arc::new(write)));
        self
    }

    /// Adds machine code for the GPU (a cubin or a fat binary), or PTX.
    pub fn with_cubin(mut self, image: impl Into<Vec<u8>>) -> Self {
        let mut image = image.into();
        // The driver expects PTX to be zero-terminated; other images ignore the zero.
        image.push(0);
        self.code = Some(CudaCode::Image(image.into()));
        self
    }

    /// Adds a compiler option, such as `-DBLOCK=256`.
    pub fn with_option(mut self, option: impl Into<String>) -> Self {
        self.options.push(option.into());
        self
    }

    /// Adds host-device kernel `name`: `body` runs once for each block, concurrently.
    pub fn with_host_kernel(
        mut self,
        name: impl Into<String>,
        body: impl Fn(&super::Block<'_>) -> Result<()> + Send + Sync + 'static,
    ) -> Self {
        let body = HostKernel::Blocks(Arc::new(body));
        self.host.insert(name.into(), body);
        self
    }

    /// Adds host-device kernel `name`, whose blocks are lanes of one of `ranks` ranks.
    pub(crate) fn with_host_lanes(
        mut self,
        name: impl Into<String>,
        ranks: usize,
        lanes: impl HostLanes + 'static,
    ) -> Self {
        let body = Arc::new(lanes);
        self.host
            .insert(name.into(), HostKernel::Lanes { ranks, body });
        self
    }

    /// Name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Fails for incomplete machine code.
    pub(super) fn check_image(&self) -> Result<()> {
        let Some(CudaCode::Image(image)) = &self.code else {
            return Ok(());
        };
        // Without the zero that was appended.
        let given = image.split_last().map_or(&[][..], |(_, given)| given);
        image::check(given).map_err(|error| error.with_operation(format!("load '{}'", self.name)))
    }

    pub(crate) fn code(&self) -> Option<&CudaCode> {
        self.code.as_ref()
    }

    pub(crate) fn options(&self) -> &[String] {
        &self.options
    }

    pub(crate) fn host_kernels(&self) -> &BTreeMap<String, HostKernel> {
        &self.host
    }
}

debug_fields!(ModuleSource, |it| name: it.name, cuda: it.code.is_some(), host: it.host.keys());

/// Code loaded on a device; see [`Device::load_module`](super::Device::load_module). Clones share the module.
#[derive(Clone)]
pub struct Module(Arc<dyn ModuleBackend>);

impl Module {
    /// Wraps a device's module.
    pub(crate) fn new(backend: Arc<dyn ModuleBackend>) -> Self {
        Self(backend)
    }

    /// The kernel `name`, ready to launch.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) if the module has no such kernel.
    pub fn kernel(&self, name: &str) -> Result<Kernel> {
        self.0.kernel(name).map(Kernel)
    }
}

impl fmt::Debug for Module {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A kernel of a module, which it keeps loaded. Clones share the kernel.
#[derive(Clone)]
pub struct Kernel(pub(super) Arc<dyn KernelBackend>);

impl Kernel {
    /// Enqueues the kernel on `stream`, of the module's device. Does not block. During a capture, the launch
    /// is recorded with the current argument values.
    ///
    /// Memory referenced by arguments must stay allocated until the kernel is done; channels ensure that
    /// themselves, except in graphs. If the kernel waits for signals of a communicator, through channels
    /// among its arguments, the stream fails when the communicator does.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) if number, sizes or kinds of the
    /// arguments do not match the kernel's parameters (as far as the driver reports them), for an empty or
    /// too large grid, and for a stream of another device; [`ErrorKind::Driver`](crate::ErrorKind::Driver) if
    /// the launch fails.
    pub fn launch(&self, stream: &Stream, launch: &Launch, arguments: &[Argument]) -> Result<()> {
        if launch.blocks == 0 || launch.threads == 0 {
            return Err(Error::invalid(format!(
                "a launch of {} blocks of {} threads; expected at least one of each",
                launch.blocks, launch.threads
            ))
            .with_operation("launch a kernel")
            .with_help("leave out launches that have nothing to do"));
        }
        // Before the launch, since a kernel whose proxy has failed would wait for it.
        arguments.iter().try_for_each(Argument::check)?;
        self.0.launch(stream, launch, arguments)?;
        // After the launch: the proxy is woken when there is something to poll for, and the mark follows the
        // kernel.
        arguments.iter().for_each(|argument| argument.note(stream));
        Ok(())
    }
}

impl Kernel {
    /// Fails unless all blocks of such a launch can be resident at the same time, from each of `ranks` ranks
    /// that share the device.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument), with the number of blocks that fit.
    pub(crate) fn check_together(&self, launch: &Launch, ranks: usize) -> Result<()> {
        self.0.check_together(launch, ranks)
    }

    /// Makes the launch start early if the device supports it and has space for eight such launches of each
    /// of `ranks` ranks that share it. A launch that waits for its predecessor occupies space that kernels of
    /// other streams need, which peers may be waiting for; the limit leaves four streams space for two each.
    /// The kernel must await its predecessor.
    pub(crate) fn early(&self, launch: Launch, ranks: usize) -> Launch {
        launch.with_early_start(self.0.starts_early(&launch, ranks))
    }

    /// Resource use of a launch; `None` if the device does not report it.
    ///
    /// # Errors
    /// [`ErrorKind::Driver`](crate::ErrorKind::Driver) if the query fails.
    pub fn resources(&self, launch: &Launch) -> Result<Option<KernelResources>> {
        self.0.resources(launch)
    }
}

/// Resources that a kernel uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelResources {
    /// Registers of a thread.
    pub registers: u32,
    /// Static shared memory of a block in bytes.
    pub shared_bytes: u32,
    /// Local memory of a thread in bytes; more than 0 costs time.
    pub local_bytes: u32,
    /// Blocks that fit on a multiprocessor.
    pub blocks_per_multiprocessor: u32,
    /// Number of multiprocessors.
    pub multiprocessors: u32,
}

impl fmt::Debug for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Device side of [`Module`].
pub(crate) trait ModuleBackend: Send + Sync + fmt::Debug {
    /// See [`Module::kernel`].
    fn kernel(&self, name: &str) -> Result<Arc<dyn KernelBackend>>;
}

/// Device side of [`Kernel`].
pub(crate) trait KernelBackend: Send + Sync + fmt::Debug {
    /// See [`Kernel::check_together`]. If the default does not check, the launch itself fails.
    fn check_together(&self, _launch: &Launch, _ranks: usize) -> Result<()> {
        Ok(())
    }

    /// See [`Kernel::early`].
    fn starts_early(&self, _launch: &Launch, _ranks: usize) -> bool {
        false
    }

    /// See [`Kernel::resources`].
    fn resources(&self, _launch: &Launch) -> Result<Option<KernelResources>> {
        Ok(None)
    }

    /// See [`Kernel::launch`].
    fn launch(&self, stream: &Stream, launch: &Launch, arguments: &[Argument]) -> Result<()>;

    /// Cache key shared by kernels of the same code, unique while one is held; `None` if preparing launches
    /// gains nothing on this device.
    fn identity(&self) -> Option<usize> {
        None
    }

    /// Whether loading this kernel loaded its code, as opposed to a module-cache hit.
    fn loaded_its_code(&self) -> bool {
        true
    }

    /// Prepares launches like `launch`; see [`SerialKernels`](super::serial::SerialKernels).
    fn serial(self: Arc<Self>, _launch: &Launch) -> Result<Option<Arc<dyn SerialBackend>>> {
        Ok(None)
    }
}

/// Error for an unknown kernel `name`, listing the `known` ones.
pub(crate) fn unknown_kernel<'a>(
    module: &str,
    name: &str,
    known: impl Iterator<Item = &'a String>,
) -> Error {
    let known: Vec<&str> = known.map(String::as_str).collect();
    let expected = match known.len() {
        0 => "an extern \"C\" kernel of the module".to_owned(),
        _ => known.join(", "),
    };
    Error::invalid(format!("unknown kernel '{name}'; expected {expected}"))
        .with_operation("find a kernel")
        .with_key(module.to_owned())
        .with_help("name a kernel of the module, which is extern \"C\" in CUDA C++")
}
