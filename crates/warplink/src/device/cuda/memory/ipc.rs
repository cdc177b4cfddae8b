//! Peer memory opened by CUDA IPC handle.
//!
//! Driver versions differ when a process opens one handle twice (error, same address, or reference count), so
//! that never happens here: a process-wide table returns the existing mapping, even one that was dropped but
//! not yet closed. An opening waits only while the driver closes an earlier mapping.

use crate::device::cuda::driver::context::Context;
use crate::device::cuda::driver::status;
use crate::device::cuda::gpu::Gpu;
use crate::error::{Error, ErrorKind, Result};
use crate::sync::{lock, wait_for};
use cudarc::driver::sys::CUipcMemHandle;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::c_char;
use std::sync::{Arc, Condvar, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};

/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`.
const LAZY_PEER_ACCESS: u32 = 1;

/// Maximum wait for an earlier mapping of the same handle to be closed.
const CLOSING: Duration = Duration::from_secs(10);

/// Context and handle.
type IpcKey = (usize, [u8; 64]);

enum MappingState {
    Open(Weak<IpcMapping>),
    /// Dropped, and closed when no stream has work, unless it is opened again first.
    Unused(Extent),
    /// The driver is opening or closing it.
    Busy,
}

/// Address range of a mapping.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Extent {
    address: u64,
    bytes: usize,
    /// Distinguishes it from earlier mappings at the same address.
    identity: u64,
}

#[derive(Default)]
struct IpcTable {
    states: Mutex<HashMap<IpcKey, MappingState>>,
    changed: Condvar,
}

fn table() -> &'static IpcTable {
    static TABLE: OnceLock<IpcTable> = OnceLock::new();
    TABLE.get_or_init(IpcTable::default)
}

/// Removes an entry and wakes threads that wait for that.
fn clear(key: &IpcKey) {
    lock(&table().states).remove(key);
    table().changed.notify_all();
}

/// Mapping of a peer's allocation, closed when the last reference is dropped.
pub(crate) struct IpcMapping {
    gpu: Arc<Gpu>,
    key: IpcKey,
    pub(crate) address: u64,
    /// Bytes from `address` to the end of the peer's allocation.
    pub(crate) bytes: usize,
    pub(crate) identity: u64,
}

impl IpcMapping {
    /// Opens `handle`, or shares the existing mapping.
    pub(crate) fn open(gpu: &Arc<Gpu>, handle: &[u8; 64]) -> Result<Arc<Self>> {
        let key = (gpu.context.raw as usize, *handle);
        let table = table();
        let give_up = Instant::now() + CLOSING;
        let mut states = lock(&table.states);
        loop {
            match states.entry(key) {
                Entry::Vacant(vacant) => {
                    // Reserves the key before the lock is released, so that the handle is opened once.
                    vacant.insert(MappingState::Busy);
                    break;
                }
                Entry::Occupied(mut state) => match state.get() {
                    MappingState::Open(mapping) => {
                        if let Some(mapping) = mapping.upgrade() {
                            return Ok(mapping);
                        }
                        // Being dropped; its destructor will mark it unused.
                    }
                    MappingState::Unused(extent) => {
                        // Reuse: cancels the pending close, which checks the entry first.
                        let mapping = Arc::new(Self::at(gpu, key, extent.address, extent.bytes));
                        state.insert(MappingState::Open(Arc::downgrade(&mapping)));
                        return Ok(mapping);
                    }
                    MappingState::Busy => {}
                },
            }
            let left = give_up.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Error::new(ErrorKind::Timeout, format!("an earlier mapping of the allocation was not closed within {CLOSING:?}"))
                    .with_operation("open a peer's memory by IPC handle")
                    .with_help("synchronize streams that still wait: the driver closes a mapping only when the GPU is idle"));
            }
            states = wait_for(&table.changed, states, left);
        }
        drop(states);
        match Self::open_alone(gpu, key) {
            Ok(mapping) => {
                lock(&table.states).insert(key, MappingState::Open(Arc::downgrade(&mapping)));
                table.changed.notify_all();
                Ok(mapping)
            }
            Err(error) => {
                clear(&key);
                Err(error)
            }
        }
    }

    /// Opens a handle whose table entry is marked busy by the caller.
    fn open_alone(gpu: &Arc<Gpu>, key: IpcKey) -> Result<Arc<Self>> {
        let _entered = gpu.context.enter_relaxed()?;
        let driver = gpu.context.driver;
        let handle = CUipcMemHandle {
            reserved: key.1.map(|byte| byte as c_char),
        };
        let mut address = 0;
        // SAFETY: `address` points to a writable address, and the context is current. A
        // handle that is not one of the driver's is refused.
        let code =
            unsafe { (driver.cuIpcOpenMemHandle_v2)(&mut address, handle, LAZY_PEER_ACCESS) };
        driver.check(code, "open a peer's memory by IPC handle").map_err(|error| match code {
            status::INVALID_CONTEXT => error.with_help("a process cannot open a handle of its own; hand over the slice itself"),
            status::ALREADY_MAPPED => error.with_help("close the other mapping of this allocation in this process"),
            status::INVALID_VALUE => error.with_help("has the owner freed the memory?"),
            _ => error.with_help("both processes must see their GPUs in one container, with peer access between them"),
        })?;
        let (mut base, mut size) = (0, 0);
        // SAFETY: both point to writable values; the address was mapped above.
        let code = unsafe { (driver.cuMemGetAddressRange_v2)(&mut base, &mut size, address) };
        if let Err(error) = driver.check(code, "ask for the extent of a peer's memory") {
            close(&gpu.context, address);
            return Err(error);
        }
        let bytes = (base + size as u64).saturating_sub(address) as usize;
        Ok(Arc::new(Self::at(gpu, key, address, bytes)))
    }

    fn at(gpu: &Arc<Gpu>, key: IpcKey, address: u64, bytes: usize) -> Self {
        Self {
            gpu: gpu.clone(),
            key,
            address,
            bytes,
            identity: super::next_identity(),
        }
    }
}

impl Drop for IpcMapping {
    fn drop(&mut self) {
        let (key, extent) = (
            self.key,
            Extent {
                address: self.address,
                bytes: self.bytes,
                identity: self.identity,
            },
        );
        lock(&table().states).insert(key, MappingState::Unused(extent));
        table().changed.notify_all();
        self.gpu.reaper.run(move |context| {
            let mut states = lock(&table().states);
            // Reopened meanwhile, possibly at the same address: then this close is obsolete.
            if !matches!(states.get(&key), Some(MappingState::Unused(unused)) if *unused == extent)
            {
                return;
            }
            states.insert(key, MappingState::Busy);
            // Do not hold the table's lock during a slow driver call.
            drop(states);
            close(context, extent.address);
            clear(&key);
        });
    }
}

fn close(context: &Context, address: u64) {
    // SAFETY: opened once, closed once; nothing names the mapping any more.
    let code = unsafe { (context.driver.cuIpcCloseMemHandle)(address) };
    let failure = format_args!("a peer's memory at {address:#x} was not unmapped");
    status::warn_unless_gone(code, failure);
}
