//! NVML's functions, status codes and structures.

use crate::device::PciAddress;
use crate::device::library;
use crate::device::library::function_table;
use crate::error::{Error, ErrorKind, Result};
use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

/// `nvmlDevice_t`: valid as long as the library is initialized, which it stays.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(super) struct NvmlHandle(*mut c_void);

/// The codes that callers distinguish.
pub(super) mod code {
    use std::ffi::c_int;
    pub(crate) const SUCCESS: c_int = 0;
    pub(crate) const INVALID_ARGUMENT: c_int = 2;
    pub(crate) const NOT_SUPPORTED: c_int = 3;
    pub(crate) const NO_PERMISSION: c_int = 4;
    pub(crate) const NOT_FOUND: c_int = 6;
    pub(crate) const LIBRARY_VERSION_MISMATCH: c_int = 18;
}

/// Kind of device at the other end of a link (`nvmlIntNvLinkDeviceType_t`).
pub(super) mod remote {
    use std::ffi::c_int;
    pub(crate) const GPU: c_int = 0;
    pub(crate) const PROCESSOR: c_int = 1;
    pub(crate) const SWITCH: c_int = 2;
    pub(crate) const UNKNOWN: c_int = 0xff;
}

/// Peer capabilities (`nvmlGpuP2PCapsIndex_t`), and the value for a supported one.
pub(super) mod p2p {
    use std::ffi::c_int;
    pub(crate) const READ: c_int = 0;
    pub(crate) const WRITE: c_int = 1;
    pub(crate) const OK: c_int = 0;
}

/// `nvmlPciInfo_t`, as version 2 of the link function fills it.
#[repr(C)]
#[derive(Default)]
pub(super) struct PciInfo {
    bus_id_legacy: [c_char; 16],
    domain: c_uint,
    bus: c_uint,
    device: c_uint,
    pci_device_id: c_uint,
    pci_subsystem_id: c_uint,
    bus_id: [c_char; 32],
}

impl PciInfo {
    /// PCI address of function 0, the only one with links.
    pub(super) fn address(&self) -> Option<PciAddress> {
        Some(PciAddress {
            domain: self.domain,
            bus: self.bus.try_into().ok()?,
            device: self.device.try_into().ok()?,
            function: 0,
        })
    }
}

function_table! {
    /// NVML's functions.
    Nvml {
        nvmlInit_v2() -> c_int;
        nvmlErrorString(c_int) -> *const c_char;
        nvmlDeviceGetHandleByPciBusId_v2(*const c_char, *mut NvmlHandle) -> c_int;
        nvmlDeviceGetNvLinkState(NvmlHandle, c_uint, *mut c_int) -> c_int;
        nvmlDeviceGetNvLinkVersion(NvmlHandle, c_uint, *mut c_uint) -> c_int;
        nvmlDeviceGetNvLinkRemoteDeviceType(NvmlHandle, c_uint, *mut c_int) -> c_int;
        nvmlDeviceGetNvLinkRemotePciInfo_v2(NvmlHandle, c_uint, *mut PciInfo) -> c_int;
        nvmlDeviceGetP2PStatus(NvmlHandle, NvmlHandle, c_int, *mut c_int) -> c_int;
    }
    optional {
        nvmlDeviceGetMaxPcieLinkGeneration(NvmlHandle, *mut c_uint) -> c_int;
        nvmlDeviceGetMaxPcieLinkWidth(NvmlHandle, *mut c_uint) -> c_int;
        nvmlSystemGetDriverVersion(*mut c_char, c_uint) -> c_int;
    }
}

impl Nvml {
    /// NVML, loaded and initialized.
    pub(super) fn get() -> Result<&'static Self> {
        static LIBRARY: OnceLock<Nvml> = OnceLock::new();
        library::once(&LIBRARY, &library::NVML, |loaded| {
            let library = Self::resolve(loaded)?;
            // SAFETY: it has no arguments; the library counts its starts, and is never shut down here.
            let status = unsafe { (library.nvmlInit_v2)() };
            library.check(status, "start NVML")?;
            Ok(library)
        })
    }

    /// Handle of the GPU at `address`, or null and the status of the failure.
    pub(super) fn find(&self, address: PciAddress) -> Result<(NvmlHandle, c_int)> {
        let text = CString::new(address.to_string())
            .map_err(|error| Error::internal(error.to_string()))?;
        let mut handle = NvmlHandle(std::ptr::null_mut());
        // SAFETY: `text` ends with a zero, and `handle` is an output parameter for one handle.
        let status = unsafe { (self.nvmlDeviceGetHandleByPciBusId_v2)(text.as_ptr(), &mut handle) };
        Ok((handle, status))
    }

    /// Turns a code into a result.
    pub(super) fn check(&self, status: c_int, operation: &'static str) -> Result<()> {
        if status == code::SUCCESS {
            return Ok(());
        }
        // SAFETY: for every code NVML gives a string of its own that is never freed.
        let text = unsafe { library::message((self.nvmlErrorString)(status)) };
        let error = Error::new(ErrorKind::Driver, format!("NVML: {text}"))
            .with_operation(operation)
            .with_code(status.into());
        Err(match status {
            code::LIBRARY_VERSION_MISMATCH => error.with_help(
                "restart the machine, or reload the driver: NVML and the driver are of different versions",
            ),
            _ => error,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_structure_has_nvmls_layout() {
        assert_eq!(size_of::<PciInfo>(), 68);
        assert_eq!(std::mem::offset_of!(PciInfo, domain), 16);
        assert_eq!(std::mem::offset_of!(PciInfo, device), 24);
        assert_eq!(std::mem::offset_of!(PciInfo, bus_id), 36);
    }

    #[test]
    fn the_library_has_every_function_where_it_is_found() {
        if let Ok(loaded) = library::load(&library::NVML) {
            assert!(Nvml::resolve(&loaded).is_ok());
        }
    }
}
