//! Views of device memory that others allocated.

use super::{Borrowed, CudaBacking, Source, foreign_identity, next_identity};
use crate::device::DeviceSlice;
use crate::device::cuda::driver::status;
use crate::device::cuda::gpu::Gpu;
use crate::error::{Error, ErrorKind, Result};
use cudarc::driver::sys::{CUpointer_attribute, CUpointer_attribute_enum as Attribute};
use std::any::Any;
use std::sync::Arc;

/// `CU_MEMORYTYPE_DEVICE`.
const DEVICE_MEMORY: u64 = 2;

/// Makes a slice of `bytes` at `address` inside a backing that spans the whole allocation.
///
/// # Safety
/// As [`Device::borrow`](crate::device::Device::borrow).
pub(crate) unsafe fn borrow(
    gpu: &Arc<Gpu>,
    address: u64,
    bytes: usize,
    owner: Arc<dyn Any + Send + Sync>,
) -> Result<DeviceSlice> {
    let _entered = gpu.context.enter()?;
    let _relaxed = gpu.context.relax_capture();
    let foreign = |text: String| {
        Error::invalid(text)
            .with_operation("borrow device memory")
            .with_device(gpu.name())
    };
    if bytes == 0 {
        return Err(foreign(
            "the view has 0 bytes; expected at least 1".to_owned(),
        ));
    }
    if attribute(gpu, Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address) != Some(DEVICE_MEMORY) {
        return Err(foreign(format!(
            "{address:#x} is not device memory; expected memory of this GPU"
        )));
    }
    if let Some(ordinal) = attribute(gpu, Attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address)
        && ordinal as u32 as usize != gpu.context.ordinal
    {
        return Err(foreign(format!(
            "{address:#x} is memory of GPU {}; expected memory of this GPU",
            ordinal as u32
        )));
    }
    let driver = gpu.context.driver;
    let (mut base, mut size) = (0, 0);
    // SAFETY: both are places for one value each; an unknown address is refused.
    let code = unsafe { (driver.cuMemGetAddressRange_v2)(&mut base, &mut size, address) };
    driver.check(code, "find the allocation behind an address")?;
    let end = address.checked_add(bytes as u64).ok_or_else(|| {
        foreign(format!(
            "{bytes} bytes at {address:#x} overflow the address space"
        ))
    })?;
    let allocation_end = base + size as u64;
    let ipc_capable = attribute(
        gpu,
        Attribute::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
        address,
    ) == Some(1);
    if end > allocation_end {
        let goes_on = attribute(
            gpu,
            Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
            allocation_end,
        ) == Some(DEVICE_MEMORY);
        if !ipc_capable && goes_on {
            let text = format!(
                "{bytes} bytes at {address:#x} span several physical allocations; one ends at {allocation_end:#x}"
            );
            return Err(Error::new(ErrorKind::Unsupported, text)
                .with_operation("borrow device memory")
                .with_device(gpu.name())
                .with_help("register parts that lie in one each, allocate from this library, or turn expandable segments off for this tensor"));
        }
        return Err(foreign(format!(
            "{bytes} bytes at {address:#x} pass the end of the allocation; expected an end of at most {allocation_end:#x}"
        )));
    }
    // Without a number of the driver's, nothing tells whether it is the allocation of last time, so
    // it counts as another: nothing stale is used, at the price of being exchanged again.
    let identity = match attribute(gpu, Attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID, address) {
        Some(id) if id != 0 => foreign_identity(id),
        _ => next_identity(),
    };
    let source = Source::Borrowed(Borrowed {
        _owner: owner,
        ipc_capable,
    });
    let whole = CudaBacking::slice(gpu, base, size, identity, source);
    let start = (address - base) as usize;
    whole.slice(start..start + bytes)
}

/// An attribute of an address, or nothing where the driver has none for it.
fn attribute(gpu: &Gpu, which: CUpointer_attribute, address: u64) -> Option<u64> {
    // Attributes are of 1, 4 or 8 bytes: zeros above what the driver writes make them one width on
    // a little-endian machine, which all with this driver are.
    let mut value = 0_u64;
    // SAFETY: `value` has room for the widest attribute that is asked for here.
    let code = unsafe {
        (gpu.context.driver.cuPointerGetAttribute)((&raw mut value).cast(), which, address)
    };
    (code == status::SUCCESS).then_some(value)
}
