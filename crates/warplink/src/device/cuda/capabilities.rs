//! Capabilities of a GPU and its driver.

use super::driver::context::Context;
use super::driver::{Driver, status, text_in};
use crate::device::DeviceIdentity;
use crate::error::Result;
use cudarc::driver::sys::{
    CUGPUDirectRDMAWritesOrdering, CUdevice, CUdevice_attribute, CUdevice_attribute_enum,
    CUflushGPUDirectRDMAWritesOptions, CUuuid,
};
use std::ffi::{c_char, c_int};

/// Capabilities of a GPU and its driver.
#[derive(Clone, Debug)]
pub struct Capabilities {
    /// Index among the GPUs visible to this process.
    pub ordinal: usize,
    /// The model.
    pub name: String,
    /// The GPU's UUID.
    pub identity: DeviceIdentity,
    /// Newest CUDA version that the driver supports: major and minor.
    pub driver_version: (u32, u32),
    /// Compute capability: major and minor.
    pub compute_capability: (u32, u32),
    /// Number of streaming multiprocessors.
    pub multiprocessors: u32,
    /// Bytes of device memory.
    pub memory: usize,
    /// Whether streams can write and wait for 64-bit words.
    pub stream_memory_operations: bool,
    /// Whether plain allocations can be shared by CUDA IPC.
    pub ipc: bool,
    /// Whether the virtual memory API is available.
    pub virtual_memory: bool,
    /// Whether virtual memory can be shared by file descriptor.
    pub descriptors: bool,
    /// Whether network cards can reach virtual memory (GPUDirect RDMA).
    pub virtual_memory_rdma: bool,
    /// Whether running kernels observe writes of network cards in order.
    pub network_writes_ordered: bool,
    /// Whether writes of network cards can be flushed by a driver call.
    pub network_writes_flush: bool,
    /// Whether the multi-process service shares contexts on it between processes.
    pub multi_process_service: bool,
    /// For every other visible GPU, its ordinal and whether this GPU can map its memory.
    pub peers: Vec<(usize, bool)>,
}

impl Capabilities {
    /// Name in messages.
    pub(super) fn device_name(&self) -> String {
        format!("cuda:{} {}", self.ordinal, self.name)
    }

    /// Queries the driver. Creates no context.
    pub(super) fn of(driver: &Driver, device: CUdevice, ordinal: usize) -> Result<Self> {
        use CUdevice_attribute_enum as Attribute;
        let attribute =
            |which: CUdevice_attribute| u32::try_from(driver.attribute(device, which)).unwrap_or(0);
        let version = u32::try_from(driver.version()?).unwrap_or(0);
        let mut memory = 0;
        // SAFETY: `memory` is an output parameter for one size.
        let code = unsafe { (driver.cuDeviceTotalMem_v2)(&mut memory, device) };
        driver.check(code, "ask for the GPU's memory")?;
        let mut peers = Vec::new();
        for other in (0..driver.device_count()?).filter(|other| *other != ordinal) {
            peers.push((
                other,
                driver.can_access_peer(device, driver.device(other)?)?,
            ));
        }
        Ok(Self {
            ordinal,
            name: name(driver, device)?,
            identity: identity(driver, device)?,
            driver_version: (version / 1000, version % 1000 / 10),
            compute_capability: (
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
            ),
            multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
            memory,
            stream_memory_operations: attribute(
                Attribute::CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS,
            ) != 0,
            ipc: attribute(Attribute::CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING) != 0
                && attribute(Attribute::CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED) != 0,
            virtual_memory: attribute(
                Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
            ) != 0,
            descriptors: attribute(
                Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
            ) != 0,
            virtual_memory_rdma: attribute(
                Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED,
            ) != 0,
            network_writes_ordered: attribute(
                Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING,
            )
                >= CUGPUDirectRDMAWritesOrdering::CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER as u32,
            network_writes_flush: attribute(
                Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS,
            )
                & CUflushGPUDirectRDMAWritesOptions::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST
                    as u32
                != 0
                && driver.cuFlushGPUDirectRDMAWrites.is_some(),
            multi_process_service: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MPS_ENABLED) != 0,
            peers,
        })
    }

    /// Whether kernels can start before the preceding kernel in the stream ends (programmatic dependent
    /// launch). Requires driver 12.3, since earlier ones do not capture it into graphs.
    pub(crate) fn starts_kernels_early(&self) -> bool {
        self.compute_capability.0 >= 9 && self.driver_version >= (12, 3)
    }

    /// Architecture name for compilers, such as `sm_90`.
    pub fn architecture(&self) -> String {
        format!(
            "sm_{}{}",
            self.compute_capability.0, self.compute_capability.1
        )
    }
}

/// Capabilities of the GPU with index `ordinal`.
///
/// # Errors
/// As [`open`](super::open).
pub fn capabilities(ordinal: usize) -> Result<Capabilities> {
    let driver = Driver::get()?;
    Capabilities::of(driver, driver.device(ordinal)?, ordinal)
}

/// The capabilities of a context's GPU.
pub(super) fn of_context(context: &Context) -> Result<Capabilities> {
    Capabilities::of(context.driver, context.device, context.ordinal)
}

fn name(driver: &Driver, device: CUdevice) -> Result<String> {
    let mut name = [0 as c_char; 256];
    // SAFETY: the length passed is that of `name`; the driver terminates the string with a zero.
    let code = unsafe { (driver.cuDeviceGetName)(name.as_mut_ptr(), name.len() as c_int, device) };
    driver.check(code, "ask for the GPU's name")?;
    Ok(text_in(name))
}

fn identity(driver: &Driver, device: CUdevice) -> Result<DeviceIdentity> {
    let mut uuid = CUuuid { bytes: [0; 16] };
    let mut code = status::NOT_SUPPORTED;
    // The first version returned the same UUID for every MIG partition of a GPU.
    for ask in [driver.cuDeviceGetUuid_v2, driver.cuDeviceGetUuid]
        .into_iter()
        .flatten()
    {
        // SAFETY: `uuid` is an output parameter for one UUID.
        code = unsafe { ask(&mut uuid, device) };
        if code == status::SUCCESS {
            break;
        }
    }
    driver.check(code, "ask for the GPU's UUID")?;
    Ok(DeviceIdentity(uuid.bytes.map(|byte| byte as u8)))
}
