//! Code of the user's for a device: modules, the kernels in them, and launching these.

use super::image;
use super::launch::{Argument, Launch};
use super::serial::SerialBackend;
use super::stream::Stream;
use crate::error::{Error, Result};
use std::collections::BTreeMap;
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;

/// What a module is made of: CUDA C++ or machine code for GPUs, closures for the host device, or both,
/// so that one program runs on either.
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
    /// Blocks that run all at the same time, and may wait for one another in any way.
    Blocks(Arc<BlockBody>),
    /// Lanes of one of so many ranks, which share the machine.
    Lanes {
        ranks: usize,
        body: Arc<dyn HostLanes>,
    },
}

/// What one block of a launch does.
pub(crate) type BlockBody = dyn Fn(&super::Block<'_>) -> Result<()> + Send + Sync;

/// Lanes on a device that takes closures for kernels: blocks that wait by futures alone, so that one thread runs several.
/// Argument 1 of a launch is the signals of the rank, whose doorbell each store rings that a lane may wait for.
pub(crate) trait HostLanes: Send + Sync {
    /// What the lane of `block` does.
    fn run<'a>(&'a self, block: &'a super::Block<'a>) -> LaneFuture<'a>;
}

/// A lane under way.
pub(crate) type LaneFuture<'a> = Pin<Box<dyn Future<Output = Result<()>> + 'a>>;

/// Code for a GPU.
#[derive(Clone)]
pub(crate) enum CudaCode {
    /// CUDA C++.
    Text(String),
    /// What a compiler made of it: a cubin, a fat binary or PTX that ends with a zero.
    Image(Arc<[u8]>),
    /// CUDA C++ that is written when it is asked for, and whose module is kept for the next time.
    Written(Arc<WriteText>),
}

/// Writes CUDA C++.
pub(crate) type WriteText = dyn Fn() -> Result<String> + Send + Sync;

impl ModuleSource {
    /// Nothing yet; `name` is for messages.
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            ..Self::default()
        }
    }

    /// With CUDA C++, which is compiled for the GPU at hand when the module is loaded for the first time.
    /// It may include `<warplink/device.cuh>`. Kernels are `extern "C"`, so that they are found by name.
    pub fn with_cuda(mut self, text: impl Into<String>) -> Self {
        self.code = Some(CudaCode::Text(text.into()));
        self
    }

    /// With CUDA C++ that `write` gives when the module is loaded. What was loaded is kept, so that the same
    /// text is neither compiled nor loaded again.
    pub(crate) fn with_written_cuda(
        mut self,
        write: impl Fn() -> Result<String> + Send + Sync + 'static,
    ) -> Self {
        self.code = Some(CudaCode::Written(Arc::new(write)));
        self
    }

    /// With machine code for the GPU at hand (a cubin or a fat binary), or PTX.
    pub fn with_cubin(mut self, image: impl Into<Vec<u8>>) -> Self {
        let mut image = image.into();
        // PTX is text, whose end the driver finds by a zero; other images ignore one.
        image.push(0);
        self.code = Some(CudaCode::Image(image.into()));
        self
    }

    /// With an option of the compiler's, such as `-DBLOCK=256`.
    pub fn with_option(mut self, option: impl Into<String>) -> Self {
        self.options.push(option.into());
        self
    }

    /// With the kernel `name` of the host device: `body` runs once for each block, all at the same time.
    pub fn with_host_kernel(
        mut self,
        name: impl Into<String>,
        body: impl Fn(&super::Block<'_>) -> Result<()> + Send + Sync + 'static,
    ) -> Self {
        let body = HostKernel::Blocks(Arc::new(body));
        self.host.insert(name.into(), body);
        self
    }

    /// With the kernel `name` of the host device, whose blocks are lanes of one of `ranks` ranks.
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

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Fails for machine code that is not whole.
    pub(super) fn check_image(&self) -> Result<()> {
        let Some(CudaCode::Image(image)) = &self.code else {
            return Ok(());
        };
        // Without the zero that was added.
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

impl fmt::Debug for ModuleSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ModuleSource")
            .field("name", &self.name)
            .field("cuda", &self.code.is_some())
            .field("host", &self.host.keys())
            .finish_non_exhaustive()
    }
}

/// Code that was loaded into a device; see [`Device::load_module`](super::Device::load_module). A clone
/// is another handle of the same module.
#[derive(Clone)]
pub struct Module(Arc<dyn ModuleBackend>);

impl Module {
    /// The handle of what a device loaded.
    pub(crate) fn new(backend: Arc<dyn ModuleBackend>) -> Self {
        Self(backend)
    }

    /// The kernel `name`, ready to launch.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) where the module has no such
    /// kernel.
    pub fn kernel(&self, name: &str) -> Result<Kernel> {
        self.0.kernel(name).map(Kernel)
    }
}

impl fmt::Debug for Module {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A kernel of a module, which it keeps loaded. A clone is another handle of the same kernel.
#[derive(Clone)]
pub struct Kernel(pub(super) Arc<dyn KernelBackend>);

impl Kernel {
    /// Enqueues the kernel on `stream`, of the module's device. Does not block. Where the stream records a
    /// graph, the launch is recorded with the values of its arguments.
    ///
    /// Memory that arguments name must stay allocated until the kernel is done; channels see to that
    /// themselves, except in graphs. If the kernel waits for signals of a communicator, by channels among
    /// its arguments, the stream fails when the communicator does.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) where number, sizes or kinds of the
    /// arguments are not those of the kernel's parameters (as far as the driver tells), for a grid that is
    /// empty or too large, and for a stream of another device;
    /// [`ErrorKind::Driver`](crate::ErrorKind::Driver) where the launch fails.
    pub fn launch(&self, stream: &Stream, launch: &Launch, arguments: &[Argument]) -> Result<()> {
        if launch.blocks == 0 || launch.threads == 0 {
            return Err(Error::invalid(format!(
                "a launch of {} blocks of {} threads; expected at least one of each",
                launch.blocks, launch.threads
            ))
            .with_operation("launch a kernel")
            .with_help("leave out launches that have nothing to do"));
        }
        arguments.iter().try_for_each(Argument::check)?;
        self.0.launch(stream, launch, arguments)?;
        arguments.iter().for_each(|argument| argument.note(stream));
        Ok(())
    }
}

impl Kernel {
    /// Fails where the device has no room for all blocks of such a launch at the same time, from each of `ranks`
    /// ranks that share it.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument), with how many fit.
    pub(crate) fn check_together(&self, launch: &Launch, ranks: usize) -> Result<()> {
        self.0.check_together(launch, ranks)
    }

    /// The launch, starting early where the device can, and has room for eight such launches of each of `ranks` ranks that
    /// share it: one that waits for its turn keeps that room from kernels of other streams, which peers may wait for. So
    /// four streams find room for two each. The kernel awaits what precedes it.
    pub(crate) fn early(&self, launch: Launch, ranks: usize) -> Launch {
        launch.with_early_start(self.0.starts_early(&launch, ranks))
    }

    /// What a launch takes of the device; `None` where it does not tell.
    ///
    /// # Errors
    /// [`ErrorKind::Driver`](crate::ErrorKind::Driver) where it fails to tell.
    pub fn resources(&self, launch: &Launch) -> Result<Option<KernelResources>> {
        self.0.resources(launch)
    }
}

/// What a kernel takes of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelResources {
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes of shared memory of a block, without what a launch asks for.
    pub shared_bytes: u32,
    /// Bytes of local memory of a thread; what is above 0 costs time.
    pub local_bytes: u32,
    /// How many blocks fit on a multiprocessor at a time.
    pub blocks_per_multiprocessor: u32,
    /// How many multiprocessors there are.
    pub multiprocessors: u32,
}

impl fmt::Debug for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A module as a device loads it; the methods are those of [`Module`].
pub(crate) trait ModuleBackend: Send + Sync + fmt::Debug {
    /// See [`Module::kernel`].
    fn kernel(&self, name: &str) -> Result<Arc<dyn KernelBackend>>;
}

/// A kernel as a device has it; the methods are those of [`Kernel`].
pub(crate) trait KernelBackend: Send + Sync + fmt::Debug {
    /// See [`Kernel::check_together`]. A launch finds out where this does not tell.
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

    /// A number that kernels of the same code share, and no others while one is held; `None` where the device gains
    /// nothing by readying launches.
    fn identity(&self) -> Option<usize> {
        None
    }

    /// Whether its code was loaded with it, and not found loaded.
    fn loaded_its_code(&self) -> bool {
        true
    }

    /// Readies launches like `launch`; see [`SerialKernels`](super::serial::SerialKernels).
    fn serial(self: Arc<Self>, _launch: &Launch) -> Result<Option<Arc<dyn SerialBackend>>> {
        Ok(None)
    }
}

/// That the module has no kernel `name`, but `known`.
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
