//! Memory that only a GPU reaches, and what UCX does with it by itself.
//!
//! Where a network card reads and writes the memory, UCX calls the driver on registration alone. Elsewhere it
//! emulates: it copies pieces of a few KiB by a stream of its own and waits for each on the network's thread, at both
//! ends. And where it maps a peer's memory (its transport `cuda_ipc`), it unmaps when it likes, which waits until
//! the GPU is idle: a kernel that waits for a signal which this very thread would bring never ends then. So mapping
//! is switched off, and a key by which no card reaches the memory is told apart.

use super::super::{DeviceAccess, NetworkOptions};
use super::engine;
use super::ffi::{Config, Context, ContextAttributes, MemoryType, Ucp, flag};
use crate::device::attachment::has_rdma_cards;
use crate::device::{Device, DeviceKind};
use crate::error::Result;
use std::ffi::c_uint;
use std::sync::Arc;

/// The first version that hears of virtual memory which is unmapped (`cuMemUnmap`). Those before it keep a card's
/// registration of an address beyond our own, and use it for other memory that comes to lie there.
const FIRST: (c_uint, c_uint) = (1, 18);

/// Names the transports that UCX may use.
const TRANSPORTS_VARIABLE: &str = "UCX_TLS";

/// Transports that reach no other machine's memory by a network card, but are for memory of GPUs: they would make keys of
/// their own.
const MAPPING: [&str; 2] = ["cuda_ipc", "gdr_copy"];

/// Makes the device of the options that of the calling thread, where UCX may reach its memory by itself.
pub(super) fn attach(ucp: &Ucp, options: &NetworkOptions) -> Option<Arc<dyn Device>> {
    let device = options.device.as_ref()?;
    if options.access == DeviceAccess::Staged || device.kind() == DeviceKind::Host {
        return None;
    }
    // UCX is left as it is where nothing is to be had by it.
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

/// Whether a list of transports, as UCX takes it, leaves one that maps memory of GPUs.
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

/// Has UCX do with memory of GPUs what is sound here.
pub(super) fn configure(ucp: &Ucp, config: Config) -> Result<()> {
    if std::env::var_os(TRANSPORTS_VARIABLE).is_none() {
        engine::set(ucp, config, "TLS", &format!("^{}", MAPPING.join(",")))?;
    }
    // Without it, memory is copied as if it was the host's. A version that does not know the setting has no other way.
    if let Err(error) = engine::set(ucp, config, "PROTO_ENABLE", "y") {
        tracing::debug!(%error, "UCX has no choice of protocols");
    }
    Ok(())
}

/// Whether UCX says that it knows memory of GPUs.
pub(super) fn is_reached(ucp: &Ucp, context: Context) -> bool {
    let mut attributes = ContextAttributes {
        field_mask: flag::ATTRIBUTE_MEMORY_TYPES,
        request_size: 0,
        thread_mode: 0,
        memory_types: 0,
        unused: [0; 28],
    };
    // SAFETY: the context lives, and the structure has UCX's layout and is an output parameter.
    let asked = unsafe { (ucp.ucp_context_query)(context, &mut attributes) };
    let MemoryType(number) = MemoryType::CUDA;
    let is_reached = ucp.check(asked, "ask for memory types").is_ok()
        && attributes.memory_types & (1 << number) != 0;
    tracing::debug!(library = ucp.name(), is_reached, "memory of GPUs");
    is_reached
}

/// Whether peers reach memory by the keys of a network card in what UCX packed for it: after a bit for every memory
/// domain and the type of the memory, each domain has its key with the length before it. Those that only copy within
/// the process have empty ones. False for what is not understood.
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

    /// The settings are UCX's, and without a GPU it says that it reaches no memory of one.
    #[test]
    fn without_a_gpu_no_memory_of_one_is_reached() {
        // UCX replaces functions when it is loaded, which the thread sanitizer has replaced already.
        if cfg!(warplink_tsan) || DeviceKind::detect() == DeviceKind::Cuda {
            return;
        }
        let Ok(ucp) = Ucp::get() else { return };
        let context = engine::start(ucp, &NetworkOptions::default(), true).unwrap();
        assert!(!is_reached(ucp, context));
        // SAFETY: the context lives, and nothing was made of it.
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
    fn a_card_reaches_what_it_gave_a_key_of() {
        assert!(is_reached_by_cards(&packed(0b100, &[&[1, 2, 3, 4]])));
        assert!(is_reached_by_cards(&packed(0b101, &[&[], &[1, 2, 3, 4]])));
        // With the number of the device behind them.
        assert!(!is_reached_by_cards(
            &[packed(0b1, &[&[]]), vec![3]].concat()
        ));
        assert!(!is_reached_by_cards(&packed(0, &[])));
        assert!(!is_reached_by_cards(&packed(0b11, &[&[], &[]])));
    }

    #[test]
    fn what_is_not_understood_is_reached_by_no_card() {
        let whole = packed(0b100, &[&[1, 2, 3, 4]]);
        for length in 0..whole.len() {
            assert!(!is_reached_by_cards(&whole[..length]), "{length} bytes");
        }
    }
}
