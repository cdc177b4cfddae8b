//! GPU checks, based on the driver's information.

use super::{Found, Prerequisite};
use crate::report::Object;
use std::collections::BTreeSet;
use warplink::DeviceKind;
use warplink::device::cuda::{self, Capabilities};
use warplink::variables;

const AREA: &str = "GPUs";

/// Minimum CUDA version of the driver: that of driver 570.
const CUDA_VERSION: (u32, u32) = (12, 8);

/// A GPU as JSON.
pub(super) fn object(gpu: &Capabilities) -> Object {
    let (major, minor) = gpu.compute_capability;
    let reached = gpu.peers.iter().filter(|(_, reached)| *reached);
    let peers: Vec<usize> = reached.map(|(other, _)| *other).collect();
    Object::default()
        .key("ordinal", gpu.ordinal)
        .key("name", &gpu.name)
        .key("uuid", uuid(gpu.identity.0))
        .key("compute_capability", format!("{major}.{minor}"))
        .key("architecture", gpu.architecture())
        .key("multiprocessors", gpu.multiprocessors)
        .key("memory", gpu.memory)
        .key("peers", peers)
}

/// Formats a UUID like `nvidia-smi -L`.
fn uuid(bytes: [u8; 16]) -> String {
    let mut text = String::from("GPU-");
    for (index, byte) in bytes.iter().enumerate() {
        // The form that nvidia-smi prints and CUDA_VISIBLE_DEVICES accepts.
        if matches!(index, 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text += &format!("{byte:02x}");
    }
    text
}

/// Checks of the driver and every visible GPU; `count` is the driver's number of GPUs.
pub(super) fn checks(count: &warplink::Result<usize>) -> (Vec<Capabilities>, Vec<Prerequisite>) {
    let needed =
        |name: &str, found| Prerequisite::new(AREA, name, found).needed_by(DeviceKind::Cuda);
    let count = match count {
        Err(error) => {
            let found = Found::missing(
                error.message(),
                "install the NVIDIA driver, version 570 or newer; in a container, start it with \
                 --gpus all; or use --device host",
            );
            return (Vec::new(), vec![needed("driver", found)]);
        }
        Ok(0) => {
            let found = Found::missing(
                "the driver shows this process no GPU",
                "unset CUDA_VISIBLE_DEVICES; in a container, start it with --gpus all; or use \
                 --device host",
            );
            return (Vec::new(), vec![needed("GPU", found)]);
        }
        Ok(count) => *count,
    };
    let (mut all, mut checks) = (Vec::new(), Vec::new());
    for ordinal in 0..count {
        match cuda::capabilities(ordinal) {
            Ok(capabilities) => all.push(capabilities),
            Err(error) => checks.push(needed(
                &format!("GPU {ordinal}"),
                Found::missing(error.to_string(), "check this GPU with nvidia-smi"),
            )),
        }
    }
    if let Some(first) = all.first() {
        // The driver is one for all GPUs, but only a device that opens reports its version.
        checks.insert(0, needed("driver", driver(first.driver_version)));
    }
    for gpu in &all {
        let (major, minor) = gpu.compute_capability;
        let detail = format!(
            "{}, compute capability {major}.{minor}, {} SMs, {:.1} GiB, {}",
            gpu.name,
            gpu.multiprocessors,
            gpu.memory as f64 / f64::from(1 << 30),
            uuid(gpu.identity.0),
        );
        checks.push(Prerequisite::new(
            AREA,
            format!("GPU {}", gpu.ordinal),
            Found::ok(detail),
        ));
    }
    if all.len() > 1 {
        checks.push(needed("peer access", peer_access(&all)));
    }
    let every = |has: fn(&Capabilities) -> bool, help: &str| {
        let without: Vec<String> = (all.iter().filter(|gpu| !has(gpu)))
            .map(|gpu| gpu.ordinal.to_string())
            .collect();
        if without.is_empty() {
            Found::ok("supported by every GPU")
        } else {
            Found::missing(format!("not supported by GPU {}", without.join(", ")), help)
        }
    };
    checks.push(needed(
        "64-bit stream memory operations",
        every(
            |gpu| gpu.stream_memory_operations,
            "use a GPU of compute capability 7.0 or newer with driver 570 or newer",
        ),
    ));
    checks.push(needed(
        "CUDA IPC",
        every(|gpu| gpu.ipc, "use Linux, and no virtual GPU"),
    ));
    // Required only for memory of PyTorch's expandable segments and the like.
    checks.push(Prerequisite::new(
        AREA,
        "virtual memory shared by descriptor",
        every(
            |gpu| gpu.virtual_memory && gpu.descriptors,
            "turn off expandable segments in PyTorch",
        ),
    ));
    (all, checks)
}

fn driver((major, minor): (u32, u32)) -> Found {
    // Version of the driver package, which the driver API does not report.
    let package = std::fs::read_to_string("/sys/module/nvidia/version").unwrap_or_default();
    let package = match package.trim() {
        "" => String::new(),
        version => format!("version {version}, "),
    };
    let detail = format!("{package}for CUDA up to {major}.{minor}");
    if (major, minor) >= CUDA_VERSION {
        Found::ok(detail)
    } else {
        Found::warning(detail, "install driver 570 or newer")
    }
}

/// Whether every GPU can map every other's memory.
fn peer_access(gpus: &[Capabilities]) -> Found {
    let apart: Vec<String> = gpus
        .iter()
        .flat_map(|gpu| {
            let apart = gpu.peers.iter().filter(|(_, reached)| !reached);
            apart.map(|(other, _)| format!("{} to {other}", gpu.ordinal))
        })
        .collect();
    if apart.is_empty() {
        Found::ok("between every pair")
    } else {
        Found::warning(
            format!(
                "not from {}; data between these passes through host memory",
                apart.join(", ")
            ),
            "for speed, choose GPUs with access to one another by CUDA_VISIBLE_DEVICES (see `nvidia-smi topo \
             -p2p r`), and turn off IOMMU and PCI ACS",
        )
    }
}

/// Compiles every kernel for the GPUs present, or for all supported ones if there is none.
pub(super) fn compile(gpus: &[Capabilities]) -> Found {
    let present: BTreeSet<String> = gpus.iter().map(Capabilities::architecture).collect();
    let architectures: Vec<&str> = if present.is_empty() {
        // Without a GPU the kernels can still be compiled, as in a build container.
        cuda::ARCHITECTURES.to_vec()
    } else {
        present.iter().map(String::as_str).collect()
    };
    match cuda::compile_all(&architectures, &[]) {
        Ok(kernels) => Found::ok(format!(
            "{} kernel files for {}",
            kernels.len() / architectures.len(),
            architectures.join(", ")
        )),
        Err(error) => Found::missing(
            error.to_string(),
            "install an NVRTC that supports this GPU: `pip install nvidia-cuda-nvrtc`",
        ),
    }
}

/// The environment variable that affects GPUs.
pub(super) fn environment() -> Prerequisite {
    const NAME: &str = "CUDA_DEVICE_MAX_CONNECTIONS";
    let value = variables::read(NAME).unwrap_or_default();
    Prerequisite::new(AREA, NAME, connections(value.as_deref()))
}

fn connections(value: Option<&str>) -> Found {
    let help = "export CUDA_DEVICE_MAX_CONNECTIONS=32, or use `warplink launch`";
    match value.map(|value| (value, value.parse::<u32>())) {
        None => Found::warning(
            "not set; `warplink launch` sets it to 32, other launchers do not",
            help,
        ),
        // Fewer queues than streams let a waiting stream block another one that would end its wait.
        Some((value, Ok(8..))) => Found::ok(value),
        Some((value, _)) => Found::warning(
            format!("{value}; streams that share a queue block one another while one waits"),
            help,
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::doctor::CheckStatus;
    use warplink::{Error, ErrorKind};

    #[test]
    fn without_a_driver_the_driver_is_missing_and_cuda_does_not_work() {
        let error = Error::new(ErrorKind::LibraryMissing, "the CUDA driver was not found");
        let (gpus, checks) = super::checks(&Err(error));
        assert!(gpus.is_empty());
        assert!(checks.iter().any(|check| check.stops(DeviceKind::Cuda)));
        assert!(!checks.iter().any(|check| check.stops(DeviceKind::Host)));
    }

    #[test]
    fn a_uuid_reads_as_the_vendor_writes_it() {
        let mut bytes = [0; 16];
        (0..16).for_each(|index| bytes[index] = index as u8);
        assert_eq!(uuid(bytes), "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f");
    }

    #[test]
    fn variables_are_judged() {
        assert_eq!(connections(Some("32")).status, CheckStatus::Ok);
        for value in [None, Some("1"), Some("many")] {
            assert_eq!(connections(value).status, CheckStatus::Warning);
        }
    }
}
