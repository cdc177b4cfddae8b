//! User kernels: modules of CUDA C++ or machine code, and launches with checked arguments.

mod serial;

use self::serial::SerialKernel;
use crate::debug::debug_text;
use crate::device::cuda::gpu::Gpu;
use crate::device::cuda::kernels::module::{EARLY_LAUNCHES, Function, Module};
use crate::device::cuda::kernels::nvrtc;
use crate::device::cuda::stream::CudaStream;
use crate::device::module::{CudaCode, KernelBackend, KernelResources, ModuleBackend};
use crate::device::{
    Argument, DeviceKind, DeviceSlice, Launch, ModuleSource, SerialArguments, SerialBackend, Stream,
};
use crate::error::{Error, Result};
use std::ffi::{CString, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// Dynamic shared memory that needs no opt-in.
const SHARED_WITHOUT_ASKING: u32 = 48 << 10;

const POINTER_BYTES: usize = size_of::<u64>();

/// A user's module.
pub(crate) struct UserModule {
    gpu: Arc<Gpu>,
    name: String,
    module: Arc<Module>,
    /// Whether this load was new rather than a hit in the module cache.
    is_new: bool,
}

impl UserModule {
    /// Compiles if needed, and loads.
    ///
    /// # Safety
    /// As for [`Device::load_module`](crate::device::Device::load_module); an image must be complete.
    pub(crate) unsafe fn load(gpu: &Arc<Gpu>, source: &ModuleSource) -> Result<Self> {
        let mut is_new = true;
        let module = match source.code() {
            // SAFETY: the caller vouches for it.
            Some(CudaCode::Image(image)) => unsafe { Self::load_image(gpu, source, image)? },
            // SAFETY: guaranteed by the caller.
            Some(CudaCode::Text(text)) => unsafe { Self::compile(gpu, source, text)? },
            Some(CudaCode::Written(write)) => {
                let text = write()?;
                is_new = false;
                gpu.written.get(&text, || {
                    is_new = true;
                    // SAFETY: guaranteed by the caller.
                    unsafe { Self::compile(gpu, source, &text) }
                })?
            }
            None => {
                return Err(
                    Error::unsupported("the module has no code for a GPU")
                        .with_operation("load a module")
                        .with_key(source.name())
                        .with_device(gpu.name())
                        .with_help("give the module its code for GPUs, by ModuleSource::with_cuda or with_cubin, or by `cuda` or `image` in Python and C"),
                );
            }
        };
        Ok(Self {
            gpu: gpu.clone(),
            name: source.name().to_owned(),
            module,
            is_new,
        })
    }

    /// Compiles `text` if needed, and loads it.
    ///
    /// # Safety
    /// As for [`Device::load_module`](crate::device::Device::load_module).
    unsafe fn compile(gpu: &Arc<Gpu>, source: &ModuleSource, text: &str) -> Result<Arc<Module>> {
        let architecture = gpu.capabilities.architecture();
        let code = nvrtc::machine_code_of(source.name(), text, source.options(), &architecture)?;
        // SAFETY: compiled for this GPU; the caller guarantees that the kernels are sound.
        unsafe { Self::load_image(gpu, source, &code) }
    }

    /// Loads machine code.
    ///
    /// # Safety
    /// As for [`load`](Self::load).
    unsafe fn load_image(
        gpu: &Arc<Gpu>,
        source: &ModuleSource,
        image: &[u8],
    ) -> Result<Arc<Module>> {
        let (context, reaper, name) = (&gpu.context, &gpu.reaper, source.name());
        // SAFETY: guaranteed by the caller.
        unsafe { Module::load_image(context, reaper, &gpu.capabilities, name, image) }
    }
}

impl ModuleBackend for UserModule {
    fn kernel(&self, name: &str) -> Result<Arc<dyn KernelBackend>> {
        let unknown = || crate::device::module::unknown_kernel(&self.name, name, [].iter());
        let c_name = CString::new(name).map_err(|_| unknown())?;
        let function = self.module.function(&c_name).map_err(|error| {
            tracing::debug!(%error, name, "a module has no such kernel");
            unknown().with_device(self.gpu.name())
        })?;
        Ok(Arc::new(UserKernel {
            gpu: self.gpu.clone(),
            name: name.to_owned(),
            parameters: function.parameter_bytes(),
            shared: AtomicU32::new(SHARED_WITHOUT_ASKING),
            loaded_its_code: self.is_new,
            function,
        }))
    }
}

debug_text!(UserModule, |it| "UserModule({} on {:?})", it.name, it.gpu);

/// A user's kernel.
pub(super) struct UserKernel {
    pub(super) gpu: Arc<Gpu>,
    name: String,
    /// Size of each parameter in bytes, if the driver reports them.
    parameters: Option<Vec<usize>>,
    /// Dynamic shared memory that was already allowed.
    shared: AtomicU32,
    loaded_its_code: bool,
    pub(super) function: Function,
}

impl UserKernel {
    /// Fails if the arguments do not match the parameters.
    fn check(&self, arguments: &[Argument]) -> Result<()> {
        let failed = |text: String, help: &'static str| {
            Err(Error::invalid(text)
                .with_operation("launch a kernel")
                .with_key(&*self.name)
                .with_device(self.gpu.name())
                .with_help(help))
        };
        let other = |argument: &&Argument| !argument.is_of(DeviceKind::Cuda);
        if let Some(argument) = arguments.iter().find(other) {
            return failed(
                format!("{argument:?} is not a GPU's; expected memory of one"),
                "use memory of the stream's device",
            );
        }
        let Some(parameters) = &self.parameters else {
            return Ok(());
        };
        let arguments = arguments.iter().filter(|one| one.is_parameter());
        let count = arguments.clone().count();
        if parameters.len() != count {
            return failed(
                format!(
                    "the launch has {count} arguments; expected {}",
                    parameters.len()
                ),
                "give one argument for each of the kernel's parameters",
            );
        }
        for (number, (argument, &bytes)) in arguments.zip(parameters).enumerate() {
            let (_, given) = argument.words();
            if given != bytes {
                return failed(
                    format!(
                        "argument {number}, {}, has {given} bytes; expected the {bytes} of the parameter",
                        argument.type_name()
                    ),
                    "give each parameter an argument of its type",
                );
            }
        }
        Ok(())
    }
}

/// Support for serial launches.
impl UserKernel {
    /// Length of the first parameter in words, if there is a second and last one that is a pointer; `None`
    /// otherwise, or if the driver does not report sizes.
    pub(super) fn parameter_words(&self) -> Option<usize> {
        match self.parameters.as_deref()? {
            [bytes, POINTER_BYTES] if bytes.is_multiple_of(size_of::<u64>()) => {
                Some(bytes / size_of::<u64>())
            }
            _ => None,
        }
    }

    /// Fails if the arguments do not match the parameters.
    pub(super) fn check_serial(&self, arguments: &SerialArguments<'_>) -> Result<()> {
        let is_of_gpu = |slice: &DeviceSlice| slice.kind() == DeviceKind::Cuda;
        let fits = self.parameter_words() == Some(arguments.words.len());
        if fits && arguments.slices().all(is_of_gpu) {
            return Ok(());
        }
        self.check(&arguments.to_arguments())
    }

    /// Allows the dynamic shared memory of a launch.
    pub(super) fn allow_shared(&self, launch: &Launch) -> Result<()> {
        // Relaxed: only a cache of the driver's limit. A stale value costs one redundant call.
        if launch.shared_bytes > self.shared.load(Ordering::Relaxed) {
            self.function.allow_shared(launch.shared_bytes)?;
            self.shared
                .fetch_max(launch.shared_bytes, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Adds the kernel's name to an error.
    pub(super) fn explain(&self, launched: Result<()>) -> Result<()> {
        launched.map_err(|error| error.with_key(&*self.name).with_device(self.gpu.name()))
    }
}

impl KernelBackend for UserKernel {
    fn check_together(&self, launch: &Launch, ranks: usize) -> Result<()> {
        let fit = self
            .function
            .blocks_per_multiprocessor(launch.threads, launch.shared_bytes)?;
        let multiprocessors = self.gpu.capabilities.multiprocessors;
        let all = launch.blocks as usize * ranks;
        if all <= fit as usize * multiprocessors as usize {
            return Ok(());
        }
        let shared = match ranks {
            1 => String::new(),
            _ => format!(", of each of {ranks} ranks on this GPU"),
        };
        Err(Error::invalid(format!(
            "{} blocks of {} threads{shared} that have to run at the same time; expected at most {fit} on each of \
             {multiprocessors} multiprocessors",
            launch.blocks, launch.threads
        ))
        .with_operation("launch a kernel")
        .with_key(&*self.name)
        .with_device(self.gpu.name())
        .with_help("use fewer blocks, or fewer threads"))
    }

    fn starts_early(&self, launch: &Launch, ranks: usize) -> bool {
        let fit = self
            .function
            .blocks_per_multiprocessor(launch.threads, launch.shared_bytes);
        let fit = u64::from(fit.unwrap_or(0)) * u64::from(self.gpu.capabilities.multiprocessors);
        let wanted = EARLY_LAUNCHES * u64::from(launch.blocks) * ranks.max(1) as u64;
        self.gpu.capabilities.starts_kernels_early() && wanted <= fit
    }

    fn resources(&self, launch: &Launch) -> Result<Option<KernelResources>> {
        let [registers, shared_bytes, local_bytes] = self.function.resources()?;
        let blocks_per_multiprocessor = self
            .function
            .blocks_per_multiprocessor(launch.threads, launch.shared_bytes)?;
        Ok(Some(KernelResources {
            registers,
            shared_bytes,
            local_bytes,
            blocks_per_multiprocessor,
            multiprocessors: self.gpu.capabilities.multiprocessors,
        }))
    }

    fn launch(&self, stream: &Stream, launch: &Launch, arguments: &[Argument]) -> Result<()> {
        self.check(arguments)?;
        let stream = CudaStream::of(stream, &self.gpu)?;
        let faults = arguments.iter().flat_map(Argument::faults);
        let _noted = stream.faults().add(faults);
        self.allow_shared(launch)?;
        let parameters = arguments.iter().filter(|one| one.is_parameter());
        let mut values: Vec<Vec<u64>> = parameters.map(|one| one.words().0).collect();
        let mut pointers: Vec<*mut c_void> = values
            .iter_mut()
            .map(|words| words.as_mut_ptr().cast())
            .collect();
        let (_, _entered) = stream.enter()?;
        let slices = arguments.iter().flat_map(|argument| match argument {
            Argument::Slice(slice) => std::slice::from_ref(slice),
            Argument::Channels(channels) => std::slice::from_ref(channels.table()),
            Argument::Memory(slices) => slices,
            _ => &[],
        });
        let _enqueuing = stream.enqueue(slices);
        // SAFETY: the lengths of the arguments are those of the parameters, which were checked if the driver reports
        // them; the caller who loaded the kernel guaranteed that it is sound.
        let launched = unsafe {
            self.function
                .launch(stream.raw_stream(), launch, &mut pointers)
        };
        self.explain(launched)
    }

    fn identity(&self) -> Option<usize> {
        Some(self.function.handle() as usize)
    }

    fn loaded_its_code(&self) -> bool {
        self.loaded_its_code
    }

    fn serial(self: Arc<Self>, launch: &Launch) -> Result<Option<Arc<dyn SerialBackend>>> {
        let ready = SerialKernel::ready(&self, launch)?;
        Ok(ready.map(|ready| Arc::new(ready) as Arc<dyn SerialBackend>))
    }
}

debug_text!(UserKernel, |it| "Kernel({} on {:?})", it.name, it.gpu);
