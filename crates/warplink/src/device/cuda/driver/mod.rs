//! The driver API, each function resolved once by its versioned name.
//!
//! The names carry their version suffix, as no header renames them here: `cuStreamWaitValue64` without a
//! suffix, for example, is an older function that current drivers refuse. Status codes are integers: a newer
//! driver may return one that no enumeration knows.

pub(super) mod capture;
pub(super) mod context;
pub(super) mod memory_ops;
pub(super) mod poll;
pub(super) mod raw;

use crate::debug::debug_fields;
use crate::device::PciAddress;
use crate::device::library::{self, DRIVER, Loaded, function_table};
use crate::error::{Error, ErrorKind, Result};
use cudarc::driver::sys::*;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::sync::OnceLock;

/// A code that the driver returned; zero is success.
pub(super) type Status = c_int;

/// The codes that callers distinguish.
pub(super) mod status {
    use super::Status;
    use crate::error::Error;
    use std::fmt::Display;

    pub(crate) const SUCCESS: Status = 0;
    pub(crate) const OUT_OF_MEMORY: Status = 2;
    pub(crate) const INVALID_VALUE: Status = 1;
    pub(crate) const NO_DEVICE: Status = 100;
    pub(crate) const INVALID_CONTEXT: Status = 201;
    pub(crate) const ALREADY_MAPPED: Status = 208;
    pub(crate) const NOT_READY: Status = 600;
    pub(crate) const PEER_ACCESS_ALREADY_ENABLED: Status = 704;
    pub(crate) const NOT_SUPPORTED: Status = 801;
    const DEINITIALIZED: Status = 4;

    /// Whether a resource is released: also if the process is exiting and the driver has already released
    /// everything.
    pub(crate) fn is_gone(code: Status) -> bool {
        matches!(code, SUCCESS | DEINITIALIZED)
    }

    /// Logs `failure`, for destructors, unless the resource [is released](is_gone).
    pub(crate) fn warn_unless_gone(code: Status, failure: impl Display) {
        if !is_gone(code) {
            tracing::warn!(code, "{failure}");
        }
    }

    /// Whether the driver has shut down because the process is exiting.
    pub(crate) fn is_over(error: &Error) -> bool {
        error.code() == Some(DEINITIALIZED.into())
    }
}

function_table! {
    /// The driver's functions.
    Driver {
        cuInit(c_uint) -> Status;
        cuDriverGetVersion(*mut c_int) -> Status;
        cuGetErrorName(Status, *mut *const c_char) -> Status;
        cuGetErrorString(Status, *mut *const c_char) -> Status;
        cuDeviceGetCount(*mut c_int) -> Status;
        cuDeviceGet(*mut CUdevice, c_int) -> Status;
        cuDeviceGetName(*mut c_char, c_int, CUdevice) -> Status;
        cuDeviceGetPCIBusId(*mut c_char, c_int, CUdevice) -> Status;
        cuDeviceGetAttribute(*mut c_int, CUdevice_attribute, CUdevice) -> Status;
        cuDeviceTotalMem_v2(*mut usize, CUdevice) -> Status;
        cuDeviceCanAccessPeer(*mut c_int, CUdevice, CUdevice) -> Status;
        cuDeviceGetByPCIBusId(*mut CUdevice, *const c_char) -> Status;
        cuDeviceGetP2PAttribute(*mut c_int, CUdevice_P2PAttribute, CUdevice, CUdevice) -> Status;
        cuDevicePrimaryCtxRetain(*mut CUcontext, CUdevice) -> Status;
        cuDevicePrimaryCtxRelease_v2(CUdevice) -> Status;
        cuCtxSetCurrent(CUcontext) -> Status;
        cuCtxGetCurrent(*mut CUcontext) -> Status;
        cuCtxGetStreamPriorityRange(*mut c_int, *mut c_int) -> Status;
        cuCtxEnablePeerAccess(CUcontext, c_uint) -> Status;
        cuThreadExchangeStreamCaptureMode(*mut c_int) -> Status;
        cuMemAlloc_v2(*mut CUdeviceptr, usize) -> Status;
        cuMemFree_v2(CUdeviceptr) -> Status;
        cuMemGetInfo_v2(*mut usize, *mut usize) -> Status;
        cuMemHostAlloc(*mut *mut c_void, usize, c_uint) -> Status;
        cuMemFreeHost(*mut c_void) -> Status;
        cuMemHostRegister_v2(*mut c_void, usize, c_uint) -> Status;
        cuMemHostUnregister(*mut c_void) -> Status;
        cuMemHostGetDevicePointer_v2(*mut CUdeviceptr, *mut c_void, c_uint) -> Status;
        cuMemGetAddressRange_v2(*mut CUdeviceptr, *mut usize, CUdeviceptr) -> Status;
        cuPointerGetAttributes(c_uint, *mut CUpointer_attribute, *mut *mut c_void, CUdeviceptr) -> Status;
        cuMemAddressReserve(*mut CUdeviceptr, usize, usize, CUdeviceptr, c_ulonglong) -> Status;
        cuMemAddressFree(CUdeviceptr, usize) -> Status;
        cuMemCreate(*mut CUmemGenericAllocationHandle, usize, *const CUmemAllocationProp, c_ulonglong) -> Status;
        cuMemRelease(CUmemGenericAllocationHandle) -> Status;
        cuMemMap(CUdeviceptr, usize, usize, CUmemGenericAllocationHandle, c_ulonglong) -> Status;
        cuMemUnmap(CUdeviceptr, usize) -> Status;
        cuMemSetAccess(CUdeviceptr, usize, *const CUmemAccessDesc, usize) -> Status;
        cuMemGetAllocationGranularity(*mut usize, *const CUmemAllocationProp, CUmemAllocationGranularity_flags) -> Status;
        cuMemExportToShareableHandle(*mut c_void, CUmemGenericAllocationHandle, CUmemAllocationHandleType, c_ulonglong) -> Status;
        cuMemImportFromShareableHandle(*mut CUmemGenericAllocationHandle, *mut c_void, CUmemAllocationHandleType) -> Status;
        cuMemRetainAllocationHandle(*mut CUmemGenericAllocationHandle, *mut c_void) -> Status;
        cuIpcGetMemHandle(*mut CUipcMemHandle, CUdeviceptr) -> Status;
        cuIpcOpenMemHandle_v2(*mut CUdeviceptr, CUipcMemHandle, c_uint) -> Status;
        cuIpcCloseMemHandle(CUdeviceptr) -> Status;
        cuStreamCreateWithPriority(*mut CUstream, c_uint, c_int) -> Status;
        cuStreamDestroy_v2(CUstream) -> Status;
        cuStreamQuery(CUstream) -> Status;
        cuStreamGetCtx(CUstream, *mut CUcontext) -> Status;
        cuStreamWaitEvent(CUstream, CUevent, c_uint) -> Status;
        cuStreamBeginCapture_v2(CUstream, CUstreamCaptureMode) -> Status;
        cuStreamEndCapture(CUstream, *mut CUgraph) -> Status;
        cuStreamIsCapturing(CUstream, *mut c_int) -> Status;
        cuStreamWriteValue64_v2(CUstream, CUdeviceptr, u64, c_uint) -> Status;
        cuStreamWaitValue64_v2(CUstream, CUdeviceptr, u64, c_uint) -> Status;
        cuStreamBatchMemOp_v2(CUstream, c_uint, *mut CUstreamBatchMemOpParams, c_uint) -> Status;
        cuMemcpyDtoDAsync_v2(CUdeviceptr, CUdeviceptr, usize, CUstream) -> Status;
        cuMemcpyHtoDAsync_v2(CUdeviceptr, *const c_void, usize, CUstream) -> Status;
        cuMemcpyDtoHAsync_v2(*mut c_void, CUdeviceptr, usize, CUstream) -> Status;
        cuMemsetD8Async(CUdeviceptr, u8, usize, CUstream) -> Status;
        cuEventCreate(*mut CUevent, c_uint) -> Status;
        cuEventRecord(CUevent, CUstream) -> Status;
        cuEventQuery(CUevent) -> Status;
        cuEventDestroy_v2(CUevent) -> Status;
        cuEventElapsedTime(*mut f32, CUevent, CUevent) -> Status;
        cuGraphGetNodes(CUgraph, *mut CUgraphNode, *mut usize) -> Status;
        cuGraphInstantiateWithFlags(*mut CUgraphExec, CUgraph, c_ulonglong) -> Status;
        cuGraphUpload(CUgraphExec, CUstream) -> Status;
        cuGraphLaunch(CUgraphExec, CUstream) -> Status;
        cuGraphExecDestroy(CUgraphExec) -> Status;
        cuGraphDestroy(CUgraph) -> Status;
        cuModuleLoadData(*mut CUmodule, *const c_void) -> Status;
        cuModuleUnload(CUmodule) -> Status;
        cuModuleGetFunction(*mut CUfunction, CUmodule, *const c_char) -> Status;
        cuFuncGetAttribute(*mut c_int, CUfunction_attribute, CUfunction) -> Status;
        cuLaunchKernel(
            CUfunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, CUstream, *mut *mut c_void, *mut *mut c_void,
        ) -> Status;
        cuLaunchCooperativeKernel(
            CUfunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, CUstream, *mut *mut c_void,
        ) -> Status;
        cuFuncSetAttribute(CUfunction, CUfunction_attribute, c_int) -> Status;
        cuOccupancyMaxActiveBlocksPerMultiprocessor(*mut c_int, CUfunction, c_int, usize) -> Status;
    }
    optional {
        cuDeviceGetUuid_v2(*mut CUuuid, CUdevice) -> Status;
        cuDeviceGetUuid(*mut CUuuid, CUdevice) -> Status;
        cuEventElapsedTime_v2(*mut f32, CUevent, CUevent) -> Status;
        cuFuncLoad(CUfunction) -> Status;
        cuLaunchKernelEx(*const CUlaunchConfig, CUfunction, *mut *mut c_void, *mut *mut c_void) -> Status;
        cuFuncGetParamInfo(CUfunction, usize, *mut usize, *mut usize) -> Status;
        cuCtxCreate_v2(*mut CUcontext, c_uint, CUdevice) -> Status;
        cuFlushGPUDirectRDMAWrites(c_int, c_int) -> Status;
        cuCtxDestroy_v2(CUcontext) -> Status;
        cuStreamGetCaptureInfo_v2(
            CUstream, *mut c_int, *mut u64, *mut CUgraph, *mut *const CUgraphNode, *mut usize,
        ) -> Status;
        cuStreamGetPriority(CUstream, *mut c_int) -> Status;
        cuGraphCreate(*mut CUgraph, c_uint) -> Status;
        cuGraphAddKernelNode_v2(
            *mut CUgraphNode, CUgraph, *const CUgraphNode, usize, *const CUDA_KERNEL_NODE_PARAMS_v2,
        ) -> Status;
        cuGraphExecKernelNodeSetParams_v2(CUgraphExec, CUgraphNode, *const CUDA_KERNEL_NODE_PARAMS_v2) -> Status;
        cuUserObjectCreate(*mut CUuserObject, *mut c_void, CUhostFn, c_uint, c_uint) -> Status;
        cuUserObjectRelease(CUuserObject, c_uint) -> Status;
        cuGraphRetainUserObject(CUgraph, CUuserObject, c_uint, c_uint) -> Status;
        cuStreamUpdateCaptureDependencies(CUstream, *mut CUgraphNode, usize, c_uint) -> Status;
        cuGraphAddBatchMemOpNode(
            *mut CUgraphNode, CUgraph, *const CUgraphNode, usize, *const CUDA_BATCH_MEM_OP_NODE_PARAMS,
        ) -> Status;
    }
}

debug_fields!(Driver);

impl Driver {
    /// The driver, loaded and initialized.
    ///
    /// # Errors
    /// [`ErrorKind::LibraryMissing`] if it is not installed, [`ErrorKind::Driver`] if it fails to initialize.
    /// Failures are not cached: the next call tries again.
    pub(super) fn get() -> Result<&'static Self> {
        static DRIVER_TABLE: OnceLock<Driver> = OnceLock::new();
        if let Some(driver) = DRIVER_TABLE.get() {
            return Ok(driver);
        }
        let library: Loaded = library::load(&DRIVER)?;
        let driver = Self::resolve(&library)?;
        // SAFETY: the only valid argument is 0; starting twice, also from two threads, is allowed.
        let code = unsafe { (driver.cuInit)(0) };
        driver.check(code, "start the driver")?;
        Ok(DRIVER_TABLE.get_or_init(|| driver))
    }

    /// Turns a code into a result.
    #[inline]
    pub(super) fn check(&self, code: Status, operation: &'static str) -> Result<()> {
        if code == status::SUCCESS {
            Ok(())
        } else {
            Err(self.error(code, operation))
        }
    }

    /// The error for a code other than success.
    #[cold]
    pub(super) fn error(&self, code: Status, operation: &'static str) -> Error {
        let kind = match code {
            status::OUT_OF_MEMORY => ErrorKind::OutOfMemory,
            status::NOT_SUPPORTED => ErrorKind::Unsupported,
            _ => ErrorKind::Driver,
        };
        let name = self
            .text(self.cuGetErrorName, code)
            .unwrap_or_else(|| "an unknown error".to_owned());
        let message = match self.text(self.cuGetErrorString, code) {
            Some(text) => format!("{name}: {text}"),
            None => name,
        };
        let error = Error::new(kind, message)
            .with_operation(operation)
            .with_code(code.into());
        match code {
            status::NO_DEVICE => error.with_help(
                "check that the machine has a GPU and that CUDA_VISIBLE_DEVICES names it",
            ),
            _ => error,
        }
    }

    fn text(
        &self,
        ask: unsafe extern "C" fn(Status, *mut *const c_char) -> Status,
        code: Status,
    ) -> Option<String> {
        let mut text = std::ptr::null();
        // SAFETY: `text` is an output parameter for one pointer. An unknown code is refused with an
        // error.
        let answer = unsafe { ask(code, &mut text) };
        if answer != status::SUCCESS || text.is_null() {
            return None;
        }
        // SAFETY: on success the driver gives a string of its own that lives as long as it.
        let text = unsafe { CStr::from_ptr(text) };
        Some(text.to_string_lossy().into_owned())
    }

    /// The driver's version, as 1000 × major + 10 × minor.
    pub(super) fn version(&self) -> Result<i32> {
        let mut version = 0;
        // SAFETY: `version` points to a writable integer.
        let code = unsafe { (self.cuDriverGetVersion)(&mut version) };
        self.check(code, "ask for the driver's version")?;
        Ok(version)
    }

    /// Number of GPUs visible to this process.
    pub(super) fn device_count(&self) -> Result<usize> {
        let mut count = 0;
        // SAFETY: `count` points to a writable integer.
        let code = unsafe { (self.cuDeviceGetCount)(&mut count) };
        self.check(code, "count the GPUs")?;
        Ok(usize::try_from(count).unwrap_or(0))
    }

    /// The GPU with index `ordinal`.
    pub(super) fn device(&self, ordinal: usize) -> Result<CUdevice> {
        let count = self.device_count()?;
        let number = c_int::try_from(ordinal)
            .ok()
            .filter(|_| ordinal < count)
            .ok_or_else(|| {
                Error::invalid(format!(
                    "unknown GPU {ordinal}; expected an ordinal below {count}, the number of GPUs that this process sees"
                ))
                .with_help("check that CUDA_VISIBLE_DEVICES names it")
            })?;
        let mut device = 0;
        // SAFETY: `device` is an output parameter for one device.
        let code = unsafe { (self.cuDeviceGet)(&mut device, number) };
        self.check(code, "open the GPU")?;
        Ok(device)
    }

    /// PCI address of a GPU.
    pub(super) fn pci_address(&self, device: CUdevice) -> Result<PciAddress> {
        let mut text = [0 as c_char; 32];
        // SAFETY: the length passed is that of `text`; the driver terminates the string with a zero.
        let code =
            unsafe { (self.cuDeviceGetPCIBusId)(text.as_mut_ptr(), text.len() as c_int, device) };
        self.check(code, "ask for the GPU's PCI address")?;
        text_in(text).parse()
    }

    /// An attribute of a GPU; 0 if the driver does not know the attribute.
    pub(super) fn attribute(&self, device: CUdevice, attribute: CUdevice_attribute) -> i32 {
        let mut value = 0;
        // SAFETY: `value` points to a writable integer; an unknown attribute is refused.
        let answer = unsafe { (self.cuDeviceGetAttribute)(&mut value, attribute, device) };
        // An attribute that an older driver does not know counts as a feature that is missing.
        if answer == status::SUCCESS { value } else { 0 }
    }

    /// Whether the first GPU can map the second's memory.
    pub(super) fn can_access_peer(&self, device: CUdevice, peer: CUdevice) -> Result<bool> {
        let mut can = 0;
        // SAFETY: `can` points to a writable integer.
        let code = unsafe { (self.cuDeviceCanAccessPeer)(&mut can, device, peer) };
        self.check(code, "ask for peer access")?;
        Ok(can != 0)
    }

    /// The GPU at `address`; `None` if it is not visible to this process.
    pub(super) fn device_at(&self, address: PciAddress) -> Option<CUdevice> {
        let text = CString::new(address.to_string()).ok()?;
        let mut device = 0;
        // SAFETY: `device` is an output parameter for one handle, and the text ends with a zero.
        let code = unsafe { (self.cuDeviceGetByPCIBusId)(&mut device, text.as_ptr()) };
        (code == status::SUCCESS).then_some(device)
    }

    /// Whether the first GPU, which can map the second's memory, supports atomic operations on it.
    pub(super) fn has_peer_atomics(&self, device: CUdevice, peer: CUdevice) -> Result<bool> {
        let mut has = 0;
        let attribute = CUdevice_P2PAttribute::CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED;
        // SAFETY: `has` points to a writable integer.
        let code = unsafe { (self.cuDeviceGetP2PAttribute)(&mut has, attribute, device, peer) };
        self.check(code, "ask for atomic operations on a peer's memory")?;
        Ok(has != 0)
    }
}

/// The text that the driver has written to a buffer, up to its terminating zero.
pub(super) fn text_in<const N: usize>(buffer: [c_char; N]) -> String {
    let bytes = buffer.map(|byte| byte as u8);
    CStr::from_bytes_until_nul(&bytes)
        .map(|text| text.to_string_lossy().into_owned())
        .unwrap_or_default()
}
