//! Peak rates of a GPU, as reported by the driver and NVML.

use super::capabilities::Capabilities;
use super::nvml::NvmlGpu;
use crate::device::{DeviceLink, DeviceProperties, PciAddress};
use cudarc::driver::sys::CUdevice_attribute_enum as Attribute;

/// Properties of a GPU whose driver attributes `attribute` returns.
pub(super) fn of(
    capabilities: &Capabilities,
    address: Option<PciAddress>,
    attribute: &dyn Fn(Attribute) -> i32,
) -> DeviceProperties {
    let positive = |which| f64::from(attribute(which).max(0));
    let clock = 1e3 * positive(Attribute::CU_DEVICE_ATTRIBUTE_CLOCK_RATE);
    // Double data rate: one bit on both clock edges.
    let memory_rate = 2e3
        * positive(Attribute::CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE)
        * positive(Attribute::CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH)
        / 8.0;
    let all = clock * f64::from(capabilities.multiprocessors);
    let products = operations(capabilities.compute_capability).map(|each| each * all);
    let nvml = address.and_then(|address| NvmlGpu::open(address).ok());
    let (link_rate, linked) = link_rate(nvml.as_ref());
    let (major, minor) = capabilities.driver_version;
    // Releases with the same version of CUDA differ in speed.
    let release = nvml.as_ref().and_then(NvmlGpu::driver_release);
    let release = release.map_or_else(String::new, |release| format!(", driver {release}"));
    DeviceProperties {
        model: capabilities.name.clone(),
        version: format!("CUDA {major}.{minor}{release}"),
        multiprocessors: capabilities.multiprocessors as usize,
        cluster_blocks: cluster_blocks(capabilities.compute_capability),
        clock,
        products,
        memory_rate,
        link_rate,
        linked,
        shared: false,
        kernel_copies: false,
    }
}

/// Portable cluster size by compute capability (programming guide, thread block clusters).
const fn cluster_blocks((major, _): (u32, u32)) -> usize {
    if major >= 9 { 8 } else { 1 }
}

/// Operations of a multiprocessor per cycle for 16-bit and 32-bit matrix products, by compute capability
/// (programming guide, arithmetic throughput table; whitepapers). Unknown architectures use the newest known
/// one.
const fn operations((major, minor): (u32, u32)) -> [f64; 2] {
    match (major, minor) {
        (..=7, _) => [1024.0, 128.0],
        (8, 0) => [2048.0, 128.0],
        (8, _) | (12, _) => [1024.0, 256.0],
        (9, _) => [4096.0, 256.0],
        _ => [8192.0, 256.0],
    }
}

/// Bandwidth to all peers in one direction in bytes per second, and whether it comes from links.
fn link_rate(nvml: Option<&NvmlGpu>) -> (f64, bool) {
    let Some(nvml) = nvml else {
        return (0.0, false);
    };
    let links = nvml.links().map(|links| links.links).unwrap_or_default();
    let rate: f64 = links.iter().map(rate_of).sum();
    if rate > 0.0 {
        return (rate, true);
    }
    (nvml.bus_rate().unwrap_or(0.0), false)
}

/// Bytes per second of a link in one direction, by NVLink version. Unknown versions use the newest known one.
fn rate_of(link: &DeviceLink) -> f64 {
    match link.version {
        Some((1, _)) => 20e9,
        Some((2..=4, _)) => 25e9,
        _ => 50e9,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::LinkEnd;

    #[test]
    fn links_are_as_fast_as_their_version() {
        for (version, rate) in [
            (Some((1, 0)), 20e9),
            (Some((2, 2)), 25e9),
            (Some((4, 0)), 25e9),
            (Some((5, 0)), 50e9),
            (None, 50e9),
        ] {
            let link = DeviceLink {
                number: 0,
                version,
                end: LinkEnd::Switch,
            };
            assert_eq!(rate_of(&link), rate, "{version:?}");
        }
    }
}
