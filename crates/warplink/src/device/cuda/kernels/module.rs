//! Modules of machine code, and kernel launches.

use super::nvrtc::{self, KernelSource};
use crate::debug::debug_text;
use crate::device::Launch;
use crate::device::cuda::capabilities::Capabilities;
use crate::device::cuda::driver::context::Context;
use crate::device::cuda::driver::{Status, status};
use crate::device::cuda::gpu::reaper::Reaper;
use crate::error::Result;
use crate::sync::lock;
use cudarc::driver::sys::{
    CUfunction, CUfunction_attribute_enum, CUlaunchAttribute, CUlaunchAttributeID,
    CUlaunchAttributeValue, CUlaunchConfig, CUmodule, CUstream,
};
use std::collections::HashMap;
use std::ffi::{CStr, c_int, c_void};
use std::sync::{Arc, Mutex};

/// Loaded machine code. It is unloaded when no stream has work: the driver may wait for running kernels,
/// which may wait for a peer.
pub(crate) struct Module {
    context: Arc<Context>,
    raw: RawModule,
    reaper: Reaper,
    /// Held while shared-memory limits are compared and raised: handles of one kernel share its limit.
    limits: Mutex<()>,
}

/// The driver's handle of a module.
#[derive(Clone, Copy)]
struct RawModule(CUmodule);

// SAFETY: the pointer is a handle that the driver accepts on every thread.
unsafe impl Send for RawModule {}
// SAFETY: as above; the driver synchronizes its own state.
unsafe impl Sync for RawModule {}

impl RawModule {
    /// Unloads the module.
    ///
    /// # Safety
    /// It must have been loaded in `context`, which is current, and not unloaded before; no kernel of it runs
    /// or is launched later.
    unsafe fn unload(self, context: &Context) {
        // SAFETY: guaranteed by the caller.
        let code = unsafe { (context.driver.cuModuleUnload)(self.0) };
        status::warn_unless_gone(code, "a kernel was not unloaded");
    }
}

impl Module {
    /// Compiles `source` for the GPU, unless cached, and loads it. `reaper` unloads it.
    pub(crate) fn load(
        context: &Arc<Context>,
        reaper: &Reaper,
        capabilities: &Capabilities,
        source: &KernelSource,
    ) -> Result<Arc<Self>> {
        let code = nvrtc::machine_code(source, &capabilities.architecture())?;
        // SAFETY: a whole image, made by NVRTC for this GPU and checked when it came from disk.
        unsafe { Self::load_image(context, reaper, capabilities, source.name, &code) }
    }

    /// Loads machine code; `reaper` unloads it.
    ///
    /// # Safety
    /// `code` must be a whole image of a format that the driver takes, which need not be for this GPU.
    pub(crate) unsafe fn load_image(
        context: &Arc<Context>,
        reaper: &Reaper,
        capabilities: &Capabilities,
        name: &str,
        code: &[u8],
    ) -> Result<Arc<Self>> {
        let _entered = context.enter_relaxed()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: `raw` is an output parameter for one module; the caller vouches for the image.
        let answer = unsafe { (context.driver.cuModuleLoadData)(&mut raw, code.as_ptr().cast()) };
        context
            .driver
            .check(answer, "load a kernel")
            .map_err(|error| error.with_key(name).with_device(capabilities.device_name()))?;
        Ok(Arc::new(Self {
            context: context.clone(),
            raw: RawModule(raw),
            reaper: reaper.clone(),
            limits: Mutex::default(),
        }))
    }

    /// The kernel `name`, loaded eagerly: lazy loading at the first launch would wait for a kernel that
    /// spins.
    pub(crate) fn function(self: &Arc<Self>, name: &CStr) -> Result<Function> {
        let driver = self.context.driver;
        let _entered = self.context.enter_relaxed()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: `raw` is an output parameter for one function; the name ends with a zero.
        let code: Status =
            unsafe { (driver.cuModuleGetFunction)(&mut raw, self.raw.0, name.as_ptr()) };
        driver
            .check(code, "find a kernel")
            .map_err(|error| error.with_key(name.to_string_lossy()))?;
        let code = match driver.cuFuncLoad {
            // SAFETY: the function was found above.
            Some(load) => unsafe { load(raw) },
            None => {
                let mut registers = 0;
                let which = CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_NUM_REGS;
                // SAFETY: as above, and `registers` points to a writable integer. Asking
                // loads it.
                unsafe { (driver.cuFuncGetAttribute)(&mut registers, which, raw) }
            }
        };
        driver
            .check(code, "load a kernel")
            .map_err(|error| error.with_key(name.to_string_lossy()))?;
        Ok(Function {
            module: self.clone(),
            raw,
        })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        let raw = self.raw;
        // SAFETY: loaded once, unloaded once; the context is current where this is called, no stream has
        // work there, and every function of it held it, so that none is launched any more.
        self.reaper
            .run(move |context| unsafe { raw.unload(context) });
    }
}

debug_text!(Module, |it| "Module({:p})", it.raw.0);

/// A launch may start early only if the GPU has space for this many of its kind; see
/// [`Kernel::early`](crate::device::Kernel).
pub(crate) const EARLY_LAUNCHES: u64 = 8;

/// A launchable kernel.
#[derive(Debug)]
pub(crate) struct Function {
    module: Arc<Module>,
    raw: CUfunction,
}

// SAFETY: the pointer is a handle that the driver accepts on every thread, valid with its module.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

impl Function {
    /// Driver handle, valid as long as `self`.
    pub(crate) fn handle(&self) -> CUfunction {
        self.raw
    }

    /// Enqueues a launch on `stream`, of the current context.
    ///
    /// # Safety
    /// `parameters` must point to values of the kernel's parameter types, in order, and what the
    /// kernel does with them must be sound.
    pub(crate) unsafe fn launch(
        &self,
        stream: CUstream,
        launch: &Launch,
        parameters: &mut [*mut c_void],
    ) -> Result<()> {
        let driver = self.module.context.driver;
        let (grid, block, shared) = (launch.blocks, launch.threads, launch.shared_bytes);
        if launch.together {
            // SAFETY: the caller vouches for the parameters, which the driver copies.
            let code = unsafe {
                (driver.cuLaunchCooperativeKernel)(
                    self.raw,
                    grid,
                    1,
                    1,
                    block,
                    1,
                    1,
                    shared,
                    stream,
                    parameters.as_mut_ptr(),
                )
            };
            return driver.check(code, "launch a kernel with all blocks together");
        }
        let none = std::ptr::null_mut();
        if let (true, Some(launch_with)) = (launch.early, driver.cuLaunchKernelEx) {
            let mut attribute = CUlaunchAttribute {
                id: CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
                pad: [0; 4],
                value: CUlaunchAttributeValue {
                    programmaticStreamSerializationAllowed: 1,
                },
            };
            let config = CUlaunchConfig {
                gridDimX: grid,
                gridDimY: 1,
                gridDimZ: 1,
                blockDimX: block,
                blockDimY: 1,
                blockDimZ: 1,
                sharedMemBytes: shared,
                hStream: stream,
                attrs: &raw mut attribute,
                numAttrs: 1,
            };
            // SAFETY: as below; the driver reads the configuration and its attribute before it returns.
            let code = unsafe { launch_with(&config, self.raw, parameters.as_mut_ptr(), none) };
            return driver.check(code, "launch a kernel");
        }
        // SAFETY: the caller vouches for the parameters, which the driver copies; no extra options.
        let code = unsafe {
            (driver.cuLaunchKernel)(
                self.raw,
                grid,
                1,
                1,
                block,
                1,
                1,
                shared,
                stream,
                parameters.as_mut_ptr(),
                none,
            )
        };
        driver.check(code, "launch a kernel")
    }

    /// Allows launches with up to `bytes` of dynamic shared memory; beyond 48 KiB the driver requires an
    /// opt-in. Never lowers the limit.
    pub(crate) fn allow_shared(&self, bytes: u32) -> Result<()> {
        let driver = self.module.context.driver;
        let _entered = self.module.context.enter()?;
        let which = CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        let bytes = c_int::try_from(bytes).unwrap_or(c_int::MAX);
        let _one_at_a_time = lock(&self.module.limits);
        let mut allowed = 0;
        // SAFETY: `allowed` points to a writable integer; the function lives as long as `self`.
        let code = unsafe { (driver.cuFuncGetAttribute)(&mut allowed, which, self.raw) };
        driver.check(code, "ask for the dynamic shared memory of a kernel")?;
        if allowed >= bytes {
            return Ok(());
        }
        // SAFETY: the function lives as long as `self`; the driver refuses what the GPU does not have.
        let code = unsafe { (driver.cuFuncSetAttribute)(self.raw, which, bytes) };
        driver.check(code, "allow dynamic shared memory")
    }

    /// Number of blocks of `threads` threads and `shared` bytes of dynamic shared memory that fit on a
    /// multiprocessor.
    pub(crate) fn blocks_per_multiprocessor(&self, threads: u32, shared: u32) -> Result<u32> {
        let driver = self.module.context.driver;
        let _entered = self.module.context.enter()?;
        let mut blocks = 0;
        let threads = c_int::try_from(threads).unwrap_or(c_int::MAX);
        // SAFETY: `blocks` points to a writable integer; the function lives as long as `self`.
        let code = unsafe {
            (driver.cuOccupancyMaxActiveBlocksPerMultiprocessor)(
                &mut blocks,
                self.raw,
                threads,
                shared as usize,
            )
        };
        driver.check(code, "ask how many blocks fit")?;
        Ok(u32::try_from(blocks).unwrap_or(0))
    }

    /// Registers of a thread, shared memory of a block and local memory of a thread, in bytes.
    pub(crate) fn resources(&self) -> Result<[u32; 3]> {
        let driver = self.module.context.driver;
        let _entered = self.module.context.enter()?;
        let mut values = [0; 3];
        let attributes = [
            CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_NUM_REGS,
            CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES,
            CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES,
        ];
        for (value, which) in values.iter_mut().zip(attributes) {
            let mut answer = 0;
            // SAFETY: `answer` points to a writable integer; the function lives as long as `self`.
            let code = unsafe { (driver.cuFuncGetAttribute)(&mut answer, which, self.raw) };
            driver.check(code, "query a kernel's resources")?;
            *value = u32::try_from(answer).unwrap_or(0);
        }
        Ok(values)
    }

    /// Size of each parameter in bytes, if the driver reports them.
    pub(crate) fn parameter_bytes(&self) -> Option<Vec<usize>> {
        let ask = self.module.context.driver.cuFuncGetParamInfo?;
        let _entered = self.module.context.enter().ok()?;
        let mut all = Vec::new();
        loop {
            let (mut offset, mut bytes) = (0, 0);
            // SAFETY: both are output parameters for one size; a number past the last is refused.
            let code = unsafe { ask(self.raw, all.len(), &mut offset, &mut bytes) };
            match code {
                status::SUCCESS => all.push(bytes),
                status::INVALID_VALUE => return Some(all),
                _ => return None,
            }
        }
    }
}

/// Cache of modules of generated text. Modules are kept, since unloading one may wait for the GPU.
#[derive(Default)]
pub(crate) struct WrittenModules(Mutex<HashMap<String, Arc<Module>>>);

impl WrittenModules {
    /// The module of `text`, created by `load` on a miss.
    pub(crate) fn get(
        &self,
        text: &str,
        load: impl FnOnce() -> Result<Arc<Module>>,
    ) -> Result<Arc<Module>> {
        if let Some(module) = lock(&self.0).get(text) {
            return Ok(module.clone());
        }
        // Unlocked, since compiling is slow.
        let module = load()?;
        Ok(lock(&self.0)
            .entry(text.to_owned())
            .or_insert(module)
            .clone())
    }

    /// Removes all entries.
    pub(crate) fn take_all(&self) -> Vec<Arc<Module>> {
        lock(&self.0).drain().map(|(_, module)| module).collect()
    }
}
