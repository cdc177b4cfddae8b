//! NVML: the links of a GPU. GPUs are identified by PCI address, since NVML and the driver number them
//! differently.

mod ffi;

use self::ffi::{Nvml, NvmlHandle, PciInfo, code, p2p, remote};
use crate::device::{DeviceLink, DeviceLinks, LinkEnd, PciAddress};
use crate::error::Result;
use std::ffi::{CStr, c_int, c_uint};

/// Upper bound of links, more than any GPU has, in case the library never reports an end.
const MAX_LINKS: c_uint = 64;

/// A GPU as known to NVML.
pub(super) struct NvmlGpu {
    nvml: &'static Nvml,
    handle: NvmlHandle,
}

impl NvmlGpu {
    /// The GPU at `address`.
    ///
    /// # Errors
    /// [`ErrorKind::LibraryMissing`](crate::ErrorKind::LibraryMissing) without NVML,
    /// [`ErrorKind::Driver`](crate::ErrorKind::Driver) if it fails to initialize or does not show the GPU.
    pub(super) fn open(address: PciAddress) -> Result<Self> {
        let nvml = Nvml::get()?;
        let (handle, status) = nvml.find(address)?;
        nvml.check(status, "find the GPU in NVML")
            .map_err(|error| error.with_device(address.to_string()))?;
        Ok(Self { nvml, handle })
    }

    /// The active links.
    pub(super) fn links(&self) -> Result<DeviceLinks> {
        let mut links = Vec::new();
        for number in 0..MAX_LINKS {
            let mut active = 0;
            // SAFETY: the handle is NVML's, and `active` points to a writable integer.
            let status =
                unsafe { (self.nvml.nvmlDeviceGetNvLinkState)(self.handle, number, &mut active) };
            match status {
                code::SUCCESS if active != 0 => links.push(DeviceLink {
                    number,
                    version: self.version(number),
                    end: self.end(number)?,
                }),
                // The link is down or absent, or the GPU has no links.
                code::SUCCESS | code::NOT_SUPPORTED => {}
                // Past the last link of this kind of GPU.
                code::INVALID_ARGUMENT => break,
                _ => self.nvml.check(status, "ask for the state of a link")?,
            }
        }
        Ok(DeviceLinks { links })
    }

    /// Release of the driver, such as `580.95.05`; `None` if NVML does not report it.
    pub(super) fn driver_release(&self) -> Option<String> {
        /// `NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE`.
        const LENGTH: usize = 80;
        let mut text = [0_u8; LENGTH];
        let ask = self.nvml.nvmlSystemGetDriverVersion?;
        // SAFETY: `text` has as many writable bytes as the call is told.
        let status = unsafe { ask(text.as_mut_ptr().cast(), LENGTH as c_uint) };
        let text = CStr::from_bytes_until_nul(&text).ok()?.to_str().ok()?;
        (status == code::SUCCESS && !text.is_empty()).then(|| text.to_owned())
    }

    /// PCIe bandwidth in bytes per second in one direction; `None` if NVML does not report it.
    pub(super) fn bus_rate(&self) -> Option<f64> {
        let ask = |function: Option<unsafe extern "C" fn(NvmlHandle, *mut c_uint) -> c_int>| {
            let mut answer = 0;
            // SAFETY: the handle is NVML's, and `answer` points to a writable integer.
            let status = unsafe { function?(self.handle, &mut answer) };
            (status == code::SUCCESS).then_some(answer)
        };
        let generation = ask(self.nvml.nvmlDeviceGetMaxPcieLinkGeneration)?;
        let width = ask(self.nvml.nvmlDeviceGetMaxPcieLinkWidth)?;
        Some(lane_rate(generation) * f64::from(width))
    }

    /// Whether this GPU can access the memory of the one at `peer` directly. False if that GPU is not visible
    /// to this process.
    pub(super) fn reaches(&self, peer: PciAddress) -> Result<bool> {
        let (handle, status) = self.nvml.find(peer)?;
        match status {
            code::NOT_FOUND | code::INVALID_ARGUMENT | code::NO_PERMISSION => return Ok(false),
            _ => self.nvml.check(status, "find a peer's GPU in NVML")?,
        }
        for access in [p2p::READ, p2p::WRITE] {
            let mut answer = p2p::OK;
            // SAFETY: both handles are NVML's, and `answer` points to a writable integer.
            let status = unsafe {
                (self.nvml.nvmlDeviceGetP2PStatus)(self.handle, handle, access, &mut answer)
            };
            if status == code::NOT_SUPPORTED {
                return Ok(false);
            }
            self.nvml.check(status, "ask for peer access")?;
            if answer != p2p::OK {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Version of a link, if NVML reports a known one.
    fn version(&self, number: c_uint) -> Option<(u8, u8)> {
        let mut version = 0;
        // SAFETY: the handle is NVML's, and `version` points to a writable integer.
        let status =
            unsafe { (self.nvml.nvmlDeviceGetNvLinkVersion)(self.handle, number, &mut version) };
        (status == code::SUCCESS).then(|| version_of(version))?
    }

    /// The other end of an active link.
    fn end(&self, number: c_uint) -> Result<LinkEnd> {
        let mut kind = remote::UNKNOWN;
        // SAFETY: the handle is NVML's, and `kind` points to a writable integer.
        let status = unsafe {
            (self.nvml.nvmlDeviceGetNvLinkRemoteDeviceType)(self.handle, number, &mut kind)
        };
        if !matches!(status, code::SUCCESS | code::NOT_SUPPORTED) {
            self.nvml.check(status, "ask for the other end of a link")?;
        }
        match kind {
            remote::SWITCH => Ok(LinkEnd::Switch),
            remote::PROCESSOR => Ok(LinkEnd::Other),
            remote::GPU => {
                let mut info = PciInfo::default();
                // SAFETY: the handle is NVML's, and `info` an output parameter of the layout that
                // this version of the function fills.
                let status = unsafe {
                    (self.nvml.nvmlDeviceGetNvLinkRemotePciInfo_v2)(self.handle, number, &mut info)
                };
                self.nvml
                    .check(status, "ask for the GPU at the other end of a link")?;
                Ok(info.address().map_or(LinkEnd::Other, LinkEnd::Device))
            }
            // In a virtual machine the switches belong to the host, and the guest sees no remote device.
            _ => Ok(LinkEnd::Switch),
        }
    }
}

/// Major and minor version of NVML's version code.
fn version_of(number: c_uint) -> Option<(u8, u8)> {
    match number {
        1 => Some((1, 0)),
        2 => Some((2, 0)),
        3 => Some((2, 2)),
        4 => Some((3, 0)),
        5 => Some((3, 1)),
        6 => Some((4, 0)),
        7 => Some((5, 0)),
        _ => None,
    }
}

/// Bytes per second of a PCIe lane by generation, starting from 2.5 GT/s. Encoding is 8b/10b up to generation
/// 2 and 128b/130b from 3. Each unknown later generation doubles the rate.
fn lane_rate(generation: c_uint) -> f64 {
    match generation {
        0 | 1 => 0.25e9,
        2 => 0.5e9,
        3.. => 0.985e9 * f64::from(1 << (generation - 3).min(8)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn missing_nvml_error_names_the_package() {
        let Err(error) = NvmlGpu::open("0000:00:00.0".parse().unwrap()) else {
            return;
        };
        assert!(
            matches!(error.kind(), ErrorKind::LibraryMissing | ErrorKind::Driver),
            "{error}"
        );
        if error.kind() == ErrorKind::LibraryMissing {
            assert!(
                error.to_string().contains("install the NVIDIA driver"),
                "{error}"
            );
        }
    }

    #[test]
    fn rates_of_the_bus_follow_its_generation() {
        for (generation, rate) in [(1, 0.25e9), (3, 0.985e9), (5, 3.94e9), (6, 7.88e9)] {
            assert_eq!(lane_rate(generation), rate);
        }
    }

    #[test]
    fn versions_that_are_not_known_are_left_out() {
        assert_eq!(version_of(6), Some((4, 0)));
        assert_eq!((version_of(0), version_of(99)), (None, None));
    }
}
