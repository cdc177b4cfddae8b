//! User modules, their kernels, and launches.

use crate::block;
use crate::callback::{self, Callback};
use crate::channel;
use crate::handles::{Comm, Handle, Kernel, Module, Region, Stream};
use crate::job::JobObject;
use crate::memory::same_job;
use crate::pointer;
use crate::status::{Failure, Outcome, Status, entry};
use std::ffi::{c_char, c_void};
use std::sync::Arc;
use warplink::ErrorKind;
use warplink::device::Launch;

/// The body of a kernel for the host device: called once for each block of a launch, concurrently; it uses the
/// `warplink_block_...` calls. It returns `WARPLINK_STATUS_SUCCESS` or the status of a failed call; in the latter case
/// the kernel's stream fails with that call's error. Other calls of Warplink fail with WARPLINK_STATUS_INVALID_USAGE.
/// It must return: one that throws terminates the process. In C++, declare it `noexcept`.
pub type HostKernelBody = Option<unsafe extern "C-unwind" fn(user: *mut c_void) -> i32>;

/// A kernel for the host device.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct HostKernel {
    /// The name of the kernel, the same as in CUDA C++.
    pub name: *const c_char,
    /// The body.
    pub body: HostKernelBody,
    /// Passed to the body; must stay valid as long as the module and its kernels. Blocks use it concurrently.
    pub user: *mut c_void,
}

/// Contents of a module: CUDA C++ or machine code for GPUs, bodies for the host device, or both. Set unused members to
/// zero.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ModuleSource {
    /// Name of the module, for error messages.
    pub name: *const c_char,
    /// CUDA C++, compiled by NVRTC for the present GPU; kernels are extern "C". It may include `<warplink/device.cuh>`,
    /// which is always on the include path.
    pub cuda: *const c_char,
    /// Alternatively, code for the present GPU built by nvcc: the contents of a complete cubin, fat binary or PTX file.
    pub image: *const c_void,
    /// Length of `image` in bytes.
    pub image_bytes: usize,
    /// Options for NVRTC, such as "-DBLOCK=256".
    pub options: *const *const c_char,
    /// Number of options.
    pub option_count: usize,
    /// Kernels for the host device.
    pub host_kernels: *const HostKernel,
    /// Number of host kernels.
    pub host_kernel_count: usize,
}

/// The shape of a launch: a one-dimensional grid of one-dimensional blocks.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Number of blocks. On the host device, the body is called for each.
    pub blocks: u32,
    /// Threads per block.
    pub threads: u32,
    /// Bytes of dynamic shared memory per block.
    pub shared_bytes: u32,
    /// Nonzero for a cooperative launch: all blocks are resident on the device at the same time, so that they may wait
    /// for one another.
    pub together: u32,
}

/// The value of a kernel parameter, created by `warplink_argument_...`. Its members are private to the library.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Argument {
    kind: u32,
    peer: i32,
    handle: u64,
    value: u64,
}

/// Values of `Argument::kind`. 0 is not used, so that a zeroed argument is an error.
const U32: u32 = 1;
const I32: u32 = 2;
const U64: u32 = 3;
const I64: u32 = 4;
const F32: u32 = 5;
const F64: u32 = 6;
const REGION: u32 = 7;
const CHANNEL: u32 = 8;
const CHANNELS: u32 = 9;

/// A module and the rank that it belongs to.
pub(crate) struct ModuleObject {
    pub(crate) job: Arc<JobObject>,
    module: warplink::device::Module,
}

/// A kernel and the rank that it belongs to.
pub(crate) struct KernelObject {
    pub(crate) job: Arc<JobObject>,
    kernel: warplink::device::Kernel,
}

/// The `user` pointer passed to a body.
#[derive(Clone, Copy)]
struct User(*mut c_void);

// SAFETY: the library never dereferences it; the caller guarantees that bodies may use it on any thread.
unsafe impl Send for User {}
// SAFETY: as above.
unsafe impl Sync for User {}

impl User {
    /// A method, so that closures capture the whole struct, which is `Send`, instead of the pointer in it.
    fn pointer(self) -> *mut c_void {
        self.0
    }
}

/// Loads code. On a GPU it compiles the source unless the result is cached, and may block until running kernels finish:
/// load modules, and get their kernels, before running any kernel that waits for a peer. On the host device, only the
/// bodies are used.
///
/// Returns WARPLINK_STATUS_UNSUPPORTED if the source contains no code for the device, WARPLINK_STATUS_INVALID_ARGUMENT
/// on any device if the image is malformed or truncated, WARPLINK_STATUS_DRIVER with the compiler's messages if the
/// text does not compile or the image is for another GPU, and WARPLINK_STATUS_LIBRARY_MISSING if NVRTC is missing.
///
/// The caller must ensure that the kernels access only memory that their arguments refer to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_module_load(
    comm: Comm,
    source: *const ModuleSource,
    module: *mut Module,
) -> Status {
    entry("load a module", || {
        let job = comm.get()?;
        pointer::check(module, "module")?;
        // SAFETY: the caller passes a source.
        let source = unsafe { pointer::load(source, "source") }?;
        let has_image = !source.image.is_null();
        // SAFETY: as above; its members are null or valid as documented.
        let source = unsafe { read_source(&source) }?;
        // SAFETY: the caller ensures that kernels access only memory that their arguments refer to.
        let loaded = unsafe { job.communicator.device().load_module(&source) };
        let loaded = loaded.map_err(|error| match error.kind() {
            ErrorKind::Driver if has_image => error.with_help(
                "build the image for this GPU (nvcc -arch=native), or pass PTX or CUDA C++",
            ),
            _ => error,
        })?;
        let made = Module::new(ModuleObject {
            module: loaded,
            job,
        });
        // SAFETY: the caller passes null or a pointer valid for a write.
        unsafe { pointer::store(module, "module", made) }
    })
}

/// Frees a module. Its kernels stay valid. Does not block.
#[unsafe(no_mangle)]
pub extern "C" fn warplink_module_free(module: Module) -> Status {
    entry("free a module", || module.take().map(drop))
}

/// Gets the kernel `name` of a module, ready to be launched. On a GPU it may block as `warplink_module_load` does.
/// Returns WARPLINK_STATUS_INVALID_ARGUMENT if the module has no kernel of that name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_kernel_get(
    module: Module,
    name: *const c_char,
    kernel: *mut Kernel,
) -> Status {
    entry("get a kernel", || {
        let module = module.get()?;
        pointer::check(kernel, "kernel")?;
        // SAFETY: the caller passes a text.
        let name = unsafe { pointer::text(name, "name") }?;
        let made = Kernel::new(KernelObject {
            kernel: module.module.kernel(name)?,
            job: module.job.clone(),
        });
        // SAFETY: the caller passes null or a pointer valid for a write.
        unsafe { pointer::store(kernel, "kernel", made) }
    })
}

/// Frees a kernel. Running and enqueued launches continue. Does not block.
#[unsafe(no_mangle)]
pub extern "C" fn warplink_kernel_free(kernel: Kernel) -> Status {
    entry("free a kernel", || kernel.take().map(drop))
}

/// Enqueues a kernel on `stream`, with one argument for each of its parameters. Does not block. Regions passed as
/// arguments must not be freed until it has finished; memory behind channels is kept alive automatically. The stream
/// fails if a rank is lost that the kernel's channels connect to.
///
/// Returns WARPLINK_STATUS_INVALID_ARGUMENT for an empty shape, too many blocks (more than 256 on the host device),
/// and, as far as the driver can check, arguments that do not match the parameters; WARPLINK_STATUS_INVALID_USAGE for
/// channels before `warplink_setup`. `warplink_stream_synchronize` returns errors of the kernel itself.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_launch(
    kernel: Kernel,
    stream: Stream,
    shape: Shape,
    arguments: *const Argument,
    count: usize,
) -> Status {
    entry("launch a kernel", || {
        let kernel = kernel.get()?;
        let stream = stream.get()?;
        same_job(&kernel.job, &stream.job, "stream")?;
        // SAFETY: the caller passes `count` arguments.
        let arguments = unsafe { pointer::values(arguments, count, "arguments") }?;
        let arguments: Vec<_> = arguments
            .iter()
            .enumerate()
            .map(|(number, argument)| argument.resolve(number, &kernel.job))
            .collect::<Outcome<_>>()?;
        let mut launch =
            Launch::new(shape.blocks, shape.threads).with_shared_bytes(shape.shared_bytes);
        if shape.together != 0 {
            launch = launch.with_all_blocks_together();
        }
        Ok(kernel.kernel.launch(&stream.stream, &launch, &arguments)?)
    })
}

/// An argument: unsigned int.
#[unsafe(no_mangle)]
pub extern "C" fn warplink_argument_u32(value: u32) -> Argument {
    Argument::value(U32, u64::from(value))
}

/// An argument: int.
#[unsafe(no_mangle)]
pub extern "C" fn warplink_argument_i32(value: i32) -> Argument {
    Argument::value(I32, u64::from(value.cast_unsigned()))
}

/// An argument: unsigned long long.
#[unsafe(no_mangle)]
pub extern "C" fn warplink_argument_u64(value: u64) -> Argument {
    Argument::value(U64, value)
}

/// An argument: long long.
#[unsafe(no_mangle)]
pub extern "C" fn warplink_argument_i64(value: i64) -> Argument {
    Argument::value(I64, value.cast_unsigned())
}

/// An argument: float.
#[unsafe(no_mangle)]
pub extern "C" fn warplink_argument_f32(value: f32) -> Argument {
    Argument::value(F32, u64::from(value.to_bits()))
}

/// An argument: double.
#[unsafe(no_mangle)]
pub extern "C" fn warplink_argument_f64(value: f64) -> Argument {
    Argument::value(F64, value.to_bits())
}

/// An argument: a pointer to the region's byte at `offset`.
#[unsafe(no_mangle)]
pub extern "C" fn warplink_argument_region(region: Region, offset: u64) -> Argument {
    Argument {
        handle: region.id,
        ..Argument::value(REGION, offset)
    }
}

/// An argument: the channel to `peer` with `tag`, a `warplink::Channel` by value.
#[unsafe(no_mangle)]
pub extern "C" fn warplink_argument_channel(comm: Comm, peer: i32, tag: u64) -> Argument {
    Argument {
        handle: comm.id,
        peer,
        ..Argument::value(CHANNEL, tag)
    }
}

/// An argument: the channels of all connections that are set up, in order of declaration, a `const warplink::Channel
/// *`. A host kernel selects one of them by `warplink_block_channel`. The first launch after a setup copies them to the
/// device, which blocks briefly; the copy stays until the communicator is destroyed, because a captured graph may refer
/// to it.
#[unsafe(no_mangle)]
pub extern "C" fn warplink_argument_channels(comm: Comm) -> Argument {
    Argument {
        handle: comm.id,
        ..Argument::value(CHANNELS, 0)
    }
}

impl Argument {
    fn value(kind: u32, value: u64) -> Self {
        Self {
            kind,
            peer: 0,
            handle: 0,
            value,
        }
    }

    /// Converts to the library's type; `number` is the argument's index.
    fn resolve(self, number: usize, job: &Arc<JobObject>) -> Outcome<warplink::device::Argument> {
        let low = self.value as u32;
        Ok(match self.kind {
            U32 => low.into(),
            I32 => low.cast_signed().into(),
            U64 => self.value.into(),
            I64 => self.value.cast_signed().into(),
            F32 => f32::from_bits(low).into(),
            F64 => f64::from_bits(self.value).into(),
            REGION => {
                let region = Region { id: self.handle }.get()?;
                same_job(job, &region.job, "region")?;
                region.rest(self.value)?.into()
            }
            CHANNEL => {
                let comm = Comm { id: self.handle }.get()?;
                same_job(job, &comm, "channel")?;
                comm.setup().find(self.peer, self.value)?.channel()
            }
            CHANNELS => {
                let comm = Comm { id: self.handle }.get()?;
                same_job(job, &comm, "channel")?;
                channel::array(&comm)?.into()
            }
            other => {
                return Err(Failure::invalid(
                    format!(
                        "argument {number} is of unknown kind {other}; expected a warplink_argument"
                    ),
                    "create arguments with warplink_argument_u32 and similar functions",
                ));
            }
        })
    }
}

/// Converts a module source.
///
/// # Safety
/// The members of `source` must be null or valid as documented.
unsafe fn read_source(source: &ModuleSource) -> Outcome<warplink::device::ModuleSource> {
    // SAFETY: guaranteed by the caller for all members, here and below.
    let name = unsafe { pointer::optional_text(source.name, "the name") }?;
    let mut made = warplink::device::ModuleSource::new(name.unwrap_or("module"));
    // SAFETY: as above.
    if let Some(text) = unsafe { pointer::optional_text(source.cuda, "the CUDA C++") }? {
        made = made.with_cuda(text);
    }
    // SAFETY: as above.
    let image =
        unsafe { pointer::values(source.image.cast::<u8>(), source.image_bytes, "the image") }?;
    if !source.image.is_null() {
        if !source.cuda.is_null() {
            return Err(Failure::invalid(
                "the module has both CUDA C++ and machine code; expected one of them",
                "set cuda or image to null",
            ));
        }
        made = made.with_cubin(image);
    }
    // SAFETY: as above.
    let options = unsafe { pointer::values(source.options, source.option_count, "the options") }?;
    for option in options {
        // SAFETY: as above.
        made = made.with_option(unsafe { pointer::text(*option, "an option") }?);
    }
    let kernels =
        // SAFETY: as above.
        unsafe { pointer::values(source.host_kernels, source.host_kernel_count, "the host kernels") }?;
    for kernel in kernels {
        // SAFETY: as above.
        let name = unsafe { pointer::text(kernel.name, "a host kernel's name") }?;
        let Some(body) = kernel.body else {
            return Err(Failure::invalid(
                format!("the body of host kernel '{name}' is null; expected a function"),
                "set the body of each host kernel",
            ));
        };
        let user = User(kernel.user);
        made = made.with_host_kernel(name, move |running| {
            block::run(running, || {
                // Innermost, so that the guard sees only exceptions of the body itself.
                callback::call(Callback::Body, || {
                    // SAFETY: the caller passed the body for this call, with a pointer that stays valid.
                    unsafe { body(user.pointer()) }
                })
            })
        });
    }
    Ok(made)
}
