//! GPU memory in UCX.
//!
//! If a network card can access the memory, UCX calls the driver only for registration. Otherwise UCX
//! emulates: it copies pieces of a few KiB on its own stream and waits for each on the network's thread, at
//! both ends. And where it maps a peer's memory (transport `cuda_ipc`), it may unmap at any time, which waits
//! until the GPU is idle: a kernel that waits for a signal from this very thread would deadlock. So mapping
//! is disabled, and keys by which no card reaches the memory are detected.

use super::super::{DeviceAccess, NetworkOptions};
use super::engine;
use super::ffi::{Config, Context, ContextAttributes, MemoryType, Ucp, flag};
use crate::device::attachment::has_rdma_cards;
use crate::device::{Device, DeviceKind};
use crate::error::Result;
use std::ffi::c_uint;
use std::sync::Arc;

/// First version that intercepts unmapping of virtual memory (`cuMemUnmap`). Earlier ones keep the card's
/// registration of an address after we unmap it, and would use it for other memory mapped there later.
const FIRST: (c_uint, c_uint) = (1, 18);

/// Selects the transports that UCX may use.
const TRANSPORTS_VARIABLE: &str = "UCX_TLS";

/// Transports for GPU memory that involve no network card: they would produce keys of their own.
const MAPPING: [&str; 2] = ["cuda_ipc", "gdr_copy"];

/// Makes the device of `options` current on the calling thread, if UCX may access its memory directly.
pub(super) fn attach(ucp: &Ucp, options: &NetworkOptions) -> Option<Arc<dyn Device>> {
    let device = options.device.as_ref()?;
    if options.access == DeviceAccess::Staged || device.kind() == DeviceKind::Host {
        return None;
    }
    // Leave UCX unconfigured if direct access is impossible.
    if options.access == DeviceAccess::Automatic && !has_rdma_cards() {
        tracing::debug!("no network card reaches the device's memory: there is none for RDMA");
        return None;
    }
    if options.access == DeviceAccess::Automatic
        && let Ok(list) = std::env::var(TRANSPORTS_VARIABLE)
        && may_map(&list)
    {
        tracing::debug!(
            list,
            "UCX may map memory of GPUs, and would not be known from a network card; leave out cuda_ipc and gdr_copy"
        );
        return None;
    }
    let (major, minor, _) = ucp.version();
    if (major, minor) < FIRST {
        tracing::debug!(
            library = ucp.name(),
            "too old a version to reach the device's memory by itself"
        );
        return None;
    }
    match device.attach_thread() {
        Ok(()) => Some(device.clone()),
        Err(error) => {
            tracing::debug!(%error, "the network does not reach the device's memory by itself");
            None
        }
    }
}

/// Whether a UCX transport list permits a transport that maps GPU memory.
fn may_map(list: &str) -> bool {
    let (is_negated, names) = match list.strip_prefix('^') {
        Some(names) => (true, names),
        None => (false, list),
    };
    let names: Vec<&str> = names.split(',').map(str::trim).collect();
    let named = |name| names.contains(&name);
    let mut mapping = MAPPING.into_iter();
    if is_negated {
        !named("cuda") && !mapping.all(named)
    } else {
        named("all") || named("cuda") || mapping.any(named)
    }
}

/// Configures UCX's treatment of GPU memory.
pub(super) fn configure(ucp: &Ucp, config: Config) -> Result<()> {
    if std::env::var_os(TRANSPORTS_VARIABLE).is_none() {
        engine::set(ucp, config, "TLS", &format!("^{}", MAPPING.join(",")))?;
    }
    // Without it, GPU memory is copied as if it were host memory. Versions without the setting always use
    // these protocols.
    if let Err(error) = engine::set(ucp, config, "PROTO_ENABLE", "y") {
        tracing::debug!(%error, "UCX has no choice of protocols");
    }
    Ok(())
}

/// Whether UCX reports support for GPU memory.
pub(super) fn is_reached(ucp: &Ucp, context: Context) -> bool {
    let mut attributes = ContextAttributes {
        field_mask: flag::ATTRIBUTE_MEMORY_TYPES,
        request_size: 0,
        thread_mode: 0,
        memory_types: 0,
        unused: [0; 28],
    };
    // SAFETY: the context is live, and the structure has UCX's layout and is an output parameter.
    let asked = unsafe { (ucp.ucp_context_query)(context, &mut attributes) };
    let MemoryType(number) = MemoryType::CUDA;
    let is_reached = ucp.check(asked, "ask for memory types").is_ok()
        && attributes.memory_types & (1 << number) != 0;
    tracing::debug!(library = ucp.name(), is_reached, "memory of GPUs");
    is_reached
}

/// Whether a packed UCX key contains a network card's key for GPU memory. The layout is a bitmap of memory
/// domains, the memory type, and for each domain a length-prefixed key. Domains that only copy within the
/// process have empty keys. False if the key cannot be parsed.
pub(super) fn is_reached_by_cards(packed: &[u8]) -> bool {
    let Some((domains, rest)) = packed.split_first_chunk::<8>() else {
        return false;
    };
    let Some((_type, mut keys)) = rest.split_first() else {
        return false;
    };
    for _ in 0..u64::from_ne_bytes(*domains).count_ones() {
        let Some((&length, rest)) = keys.split_first() else {
            return false;
        };
        let Some(rest) = rest.get(usize::from(length)..) else {
            return false;
        };
        if length > 0 {
            return true;
        }
        keys = rest;
    }
    false
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;
    use crate::device::DeviceConfig;

    /// UCX accepts the settings, and without a GPU reports no support for GPU memory.
    #[test]
    fn without_a_gpu_no_memory_of_one_is_reached() {
        // UCX hooks functions at load time that the thread sanitizer has already intercepted.
        if cfg!(warplink_tsan) || DeviceKind::detect() == DeviceKind::Cuda {
            return;
        }
        let Ok(ucp) = Ucp::get() else { return };
        let context = engine::start(ucp, &NetworkOptions::default(), true).unwrap();
        assert!(!is_reached(ucp, context));
        // SAFETY: the context is live, and nothing was made of it.
        unsafe { (ucp.ucp_cleanup)(context) };
    }

    #[test]
    fn the_memory_of_the_host_device_needs_no_thread_of_its_own() {
        if cfg!(warplink_tsan) {
            return;
        }
        let Ok(ucp) = Ucp::get() else { return };
        let device = crate::device::open(&DeviceConfig::new(DeviceKind::Host, 0)).unwrap();
        for access in [DeviceAccess::Staged, DeviceAccess::Direct] {
            let options = NetworkOptions {
                access,
                device: Some(device.clone()),
                ..NetworkOptions::default()
            };
            assert!(attach(ucp, &options).is_none());
        }
    }

    #[test]
    fn lists_that_leave_a_mapping_transport_are_known() {
        for list in [
            "all",
            "cuda",
            "rc,cuda_ipc",
            "rc, gdr_copy",
            "^tcp",
            "^cuda_ipc",
            "^gdr_copy,tcp",
        ] {
            assert!(may_map(list), "{list}");
        }
        for list in [
            "rc,cuda_copy",
            "tcp",
            "^cuda_ipc,gdr_copy",
            "^cuda",
            "^sm,cuda_ipc, gdr_copy",
        ] {
            assert!(!may_map(list), "{list}");
        }
    }

    fn packed(domains: u64, keys: &[&[u8]]) -> Vec<u8> {
        let mut packed = domains.to_ne_bytes().to_vec();
        packed.push(MemoryType::CUDA.0 as u8);
        for key in keys {
            packed.push(key.len() as u8);
            packed.extend_from_slice(key);
        }
        packed
    }

    #[test]
    fn card_reaches_memory_with_its_key() {
        assert!(is_reached_by_cards(&packed(0b100, &[&[1, 2, 3, 4]])));
        assert!(is_reached_by_cards(&packed(0b101, &[&[], &[1, 2, 3, 4]])));
        // Followed by the device's number.
        assert!(!is_reached_by_cards(
            &[packed(0b1, &[&[]]), vec![3]].concat()
        ));
        assert!(!is_reached_by_cards(&packed(0, &[])));
        assert!(!is_reached_by_cards(&packed(0b11, &[&[], &[]])));
    }

    #[test]
    fn malformed_key_is_reached_by_no_card() {
        let whole = packed(0b100, &[&[1, 2, 3, 4]]);
        for length in 0..whole.len() {
            assert!(!is_reached_by_cards(&whole[..length]), "{length} bytes");
        }
    }
}
