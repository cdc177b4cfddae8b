//! Backings of GPU memory slices: plain memory, signal pages, virtual memory, borrowed memory, and mapped
//! peer memory.

pub(super) mod borrowed;
pub(super) mod fifo;
pub(super) mod host_memory;
pub(super) mod ipc;
pub(super) mod operands;
pub(super) mod sharing;
pub(super) mod virtual_memory;

use self::host_memory::HostMemory;
use self::ipc::IpcMapping;
use self::virtual_memory::VirtualMemory;
use crate::device::cuda::driver::raw::Pinned;
use crate::device::cuda::driver::status;
use crate::device::cuda::gpu::Gpu;
use crate::device::cuda::gpu::block_pool::Block;
use crate::device::cuda::gpu::live::{PendingUse, Uses};
use crate::device::{Backing, DeviceKind, DeviceSlice, Fault};
use crate::error::{Error, Result};
use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Plain allocations are multiples of this. The driver carves smaller ones out of a block of this size, and
/// an IPC handle would expose the whole block, including unrelated data, to the peer.
const BLOCK: usize = 2 << 20;

/// How long an allocation that fails waits for pending frees.
const FREEING: Duration = Duration::from_secs(1);

/// Flag in identities derived from the driver's buffer ids, for memory allocated elsewhere.
const FOREIGN: u64 = 1 << 63;

/// A new identity for an allocation of ours.
pub(super) fn next_identity() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    // Relaxed: only uniqueness matters.
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Identity of an allocation made elsewhere, from the driver's buffer id.
pub(super) fn foreign_identity(buffer: u64) -> u64 {
    FOREIGN | buffer
}

/// Any backing of the `cuda` device.
pub(super) struct CudaBacking {
    pub(super) gpu: Arc<Gpu>,
    base: u64,
    bytes: usize,
    identity: u64,
    /// Streams that have used it.
    uses: Arc<Uses>,
    /// Whether memory held without its owner was found to be another allocation.
    gone: AtomicBool,
    pub(super) source: Source,
}

/// Origin of the memory. Dropping it frees, unmaps or returns it.
pub(super) enum Source {
    Plain {
        held: PlainMemory,
    },
    Virtual(VirtualMemory),
    /// Host memory.
    Pinned(PinnedMemory),
    /// Host memory that peers map too; ours or a peer's.
    Host(HostMemory),
    Borrowed(Borrowed),
    /// A peer's, opened by IPC handle; several backings may share the mapping.
    Ipc {
        _held: Arc<IpcMapping>,
    },
    /// A peer's, opened by descriptor.
    Descriptor {
        _held: VirtualMemory,
    },
}

/// Borrowed memory, kept alive by its owner.
#[derive(Clone)]
pub(super) struct Borrowed {
    /// Dropped when we no longer use the memory. If `None`, the memory may be freed at any time.
    pub(super) owner: Option<Arc<dyn Any + Send + Sync>>,
    /// Whether its identity comes from the driver's buffer ids and can be queried again.
    pub(super) is_numbered: bool,
    /// Whether the driver can export it as an IPC handle.
    pub(super) ipc_capable: bool,
    /// Lengths of its physical pieces, in order.
    pub(super) pieces: Vec<usize>,
}

impl CudaBacking {
    pub(super) fn slice(
        gpu: &Arc<Gpu>,
        base: u64,
        bytes: usize,
        identity: u64,
        source: Source,
    ) -> DeviceSlice {
        let uses = match &source {
            Source::Plain { held } => held.uses.clone(),
            Source::Pinned(held) => held.uses.clone(),
            Source::Host(held) => held.uses.clone(),
            _ => Arc::default(),
        };
        DeviceSlice::whole(Arc::new(Self {
            gpu: gpu.clone(),
            base,
            bytes,
            identity,
            uses,
            gone: AtomicBool::new(false),
            source,
        }))
    }

    /// Streams that have used it.
    #[inline]
    pub(super) fn uses(&self) -> &Uses {
        &self.uses
    }

    /// Whether it is a peer's memory.
    pub(in crate::device::cuda) fn is_of_a_peer(&self) -> bool {
        match &self.source {
            Source::Ipc { .. } | Source::Descriptor { .. } => true,
            Source::Host(memory) => memory.is_of_a_peer,
            _ => false,
        }
    }

    /// The backing of a slice of this device.
    pub(in crate::device::cuda) fn of(slice: &DeviceSlice) -> Result<&Self> {
        slice.backing().as_any().downcast_ref().ok_or_else(|| {
            Error::invalid(format!(
                "the slice belongs to device {}; expected a GPU's",
                slice.kind()
            ))
        })
    }
}

impl Backing for CudaBacking {
    fn base(&self) -> u64 {
        self.base
    }

    fn bytes(&self) -> usize {
        self.bytes
    }

    fn identity(&self) -> u64 {
        self.identity
    }

    fn kind(&self) -> DeviceKind {
        DeviceKind::Cuda
    }

    fn is_host_memory(&self) -> bool {
        matches!(self.source, Source::Pinned(_))
    }

    fn is_borrowed(&self) -> bool {
        matches!(self.source, Source::Borrowed(_))
    }

    fn without_owner(&self) -> Option<Arc<dyn Backing>> {
        let Source::Borrowed(borrowed) = &self.source else {
            return None;
        };
        if !borrowed.is_numbered {
            return None;
        }
        let source = Source::Borrowed(Borrowed {
            owner: None,
            ..borrowed.clone()
        });
        let all = Self::slice(&self.gpu, self.base, self.bytes, self.identity, source);
        Some(all.backing().clone())
    }

    fn is_there(&self) -> bool {
        match &self.source {
            Source::Borrowed(borrowed) if borrowed.owner.is_none() => {
                let now =
                    borrowed::identity(&self.gpu, self.base, self.bytes, borrowed.ipc_capable);
                let is_there = now == Some(self.identity);
                if !is_there {
                    // Relaxed: a hint to borrow it again. Callers that need this allocation call this function.
                    self.gone.store(true, Ordering::Relaxed);
                }
                is_there
            }
            _ => true,
        }
    }

    fn renewed(&self, offset: usize, bytes: usize) -> Option<DeviceSlice> {
        let address = self.base + offset as u64;
        // SAFETY: memory that a caller passes to a call is allocated until the stream has completed the call.
        let renewed = unsafe { borrowed::borrow(&self.gpu, address, bytes, Arc::new(())) };
        renewed.ok()
    }

    fn forbid_reuse(&self) {
        if let Source::Plain { held } = &self.source {
            held.forbid_reuse();
        }
    }

    fn fault(&self) -> Option<&Arc<Fault>> {
        match &self.source {
            Source::Plain { held } => held.fault.as_ref(),
            Source::Host(held) => held.fault.as_ref(),
            _ => None,
        }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl fmt::Debug for CudaBacking {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let source = match self.source {
            Source::Plain { .. } => "plain",
            Source::Virtual(_) => "virtual",
            Source::Pinned(_) => "pinned",
            Source::Host(_) => "shared host",
            Source::Borrowed(_) => "borrowed",
            Source::Ipc { .. } => "peer's by IPC",
            Source::Descriptor { .. } => "peer's by descriptor",
        };
        write!(
            f,
            "{source} memory of {:?}: {} bytes at {:#x}",
            self.gpu.context, self.bytes, self.base
        )
    }
}

/// Pinned host memory, reached by the GPU at the same address. Freed once streams have completed their use.
pub(super) struct PinnedMemory {
    gpu: Arc<Gpu>,
    /// `None` only while being dropped.
    pinned: Option<Pinned>,
    uses: Arc<Uses>,
}

// SAFETY: a shared reference gives its address alone; who uses that answers for it.
unsafe impl Sync for PinnedMemory {}

impl PinnedMemory {
    /// Allocates `bytes` of zeroed memory.
    pub(super) fn allocate(gpu: &Arc<Gpu>, bytes: usize) -> Result<Self> {
        let mut pinned = Pinned::allocate(&gpu.context, bytes)?;
        // SAFETY: the memory is not shared yet.
        unsafe { pinned.write(0, &vec![0; bytes]) };
        Ok(Self {
            gpu: gpu.clone(),
            pinned: Some(pinned),
            uses: Arc::default(),
        })
    }

    /// Wraps it in a slice.
    pub(super) fn into_slice(self, bytes: usize) -> DeviceSlice {
        let gpu = self.gpu.clone();
        let address = self
            .pinned
            .as_ref()
            .map_or(0, |pinned| pinned.at(0).expose_provenance() as u64);
        CudaBacking::slice(&gpu, address, bytes, next_identity(), Source::Pinned(self))
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        // The driver may wait for the GPU, so free this on the reaper's thread, as device memory.
        let (pinned, reaper) = (self.pinned.take(), self.gpu.reaper.clone());
        let free = move || reaper.run(move |_| drop(pinned));
        release(&self.gpu, &self.uses, None, free);
    }
}

/// Plain driver memory. When it is dropped and streams have completed their use, it goes to the pool.
pub(super) struct PlainMemory {
    gpu: Arc<Gpu>,
    pub(super) address: u64,
    whole: usize,
    uses: Arc<Uses>,
    reusable: AtomicBool,
    /// Fault that aborts waits for signals in this memory.
    fault: Option<Arc<Fault>>,
}

impl PlainMemory {
    /// Allocates at least `bytes`.
    pub(super) fn allocate(gpu: &Arc<Gpu>, bytes: usize) -> Result<Self> {
        if bytes == 0 {
            return Err(
                Error::invalid("the allocation has 0 bytes; expected at least 1")
                    .with_operation("allocate device memory")
                    .with_help("leave out empty allocations"),
            );
        }
        let whole = bytes.checked_next_multiple_of(BLOCK).ok_or_else(|| {
            Error::invalid(format!("{bytes} bytes overflow the address space"))
                .with_operation("allocate device memory")
        })?;
        let block = match gpu.blocks.take(whole) {
            Some(block) => block,
            None => Self::allocate_block(gpu, whole)?,
        };
        Ok(Self {
            gpu: gpu.clone(),
            address: block.address,
            whole: block.bytes,
            uses: Arc::default(),
            reusable: AtomicBool::new(true),
            fault: None,
        })
    }

    /// Returns the block to the driver rather than the pool when dropped.
    pub(super) fn forbid_reuse(&self) {
        // Pairs with the acquire load in `drop`, which may run on another thread.
        self.reusable.store(false, Ordering::Release);
    }

    /// Allocates a new block from the driver.
    fn allocate_block(gpu: &Arc<Gpu>, bytes: usize) -> Result<Block> {
        // Only on a miss: a pool that serves every allocation is as large as the program needs it.
        gpu.free_blocks(gpu.blocks.take_surplus());
        let _entered = gpu.context.enter_relaxed()?;
        let driver = gpu.context.driver;
        let mut address = 0;
        // SAFETY: `address` points to a writable address, and the context is current.
        let mut code = unsafe { (driver.cuMemAlloc_v2)(&mut address, bytes) };
        if code == status::OUT_OF_MEMORY {
            // Pooled blocks may be of sizes that do not fit; returned to the driver, they are merged.
            gpu.give_back(Instant::now() + FREEING);
            // SAFETY: as above.
            code = unsafe { (driver.cuMemAlloc_v2)(&mut address, bytes) };
        }
        driver
            .check(code, "allocate device memory")
            .map_err(|error| {
                error
                    .with_device(gpu.name())
                    .with_help(format!("{bytes} bytes were asked for"))
            })?;
        Ok(Block { address, bytes })
    }

    /// Allocates zeroed signal words; `fault` and the device's fault abort waits for them.
    pub(super) fn allocate_signals(
        gpu: &Arc<Gpu>,
        bytes: usize,
        fault: &Arc<Fault>,
    ) -> Result<Self> {
        check_words(bytes)?;
        let mut memory = Self::allocate(gpu, bytes)?;
        // SAFETY: just allocated, of at least as many bytes.
        unsafe { gpu.staging.zero(memory.address, bytes)? };
        memory.fault = Some(fault.clone());
        // After zeroing, which would erase the value that a fault writes from here on.
        gpu.signals.add(memory.address, bytes, fault);
        Ok(memory)
    }

    /// Wraps it in a slice.
    pub(super) fn into_slice(self, bytes: usize) -> DeviceSlice {
        let (gpu, address) = (self.gpu.clone(), self.address);
        CudaBacking::slice(
            &gpu,
            address,
            bytes,
            next_identity(),
            Source::Plain { held: self },
        )
    }
}

impl Drop for PlainMemory {
    fn drop(&mut self) {
        let block = Block {
            address: self.address,
            bytes: self.whole,
        };
        // Acquire: pairs with `forbid_reuse`, which another thread may have called.
        let reusable = self.reusable.load(Ordering::Acquire);
        let (reaper, blocks) = (self.gpu.reaper.clone(), self.gpu.blocks.clone());
        let keep = move || {
            if reusable {
                blocks.put(block)
            } else {
                Some(block)
            }
        };
        let free = move || {
            if let Some(block) = keep() {
                reaper.free(block);
            }
        };
        let signals = self.fault.as_ref().map(|_| block.address);
        release(&self.gpu, &self.uses, signals, free);
    }
}

/// Runs `free` once streams have completed `uses`. If the memory holds signals (at address `signals`), waits
/// for them are aborted first, since those streams would never complete.
fn release(
    gpu: &Gpu,
    uses: &Arc<Uses>,
    signals: Option<u64>,
    free: impl FnOnce() + Send + 'static,
) {
    let reaper = gpu.reaper.clone();
    let Some(address) = signals else {
        let pending: Vec<PendingUse> = uses.pending();
        if pending.is_empty() {
            return free();
        }
        return reaper.when_past(pending, free);
    };
    // Driver queries belong on the reaper's thread.
    let (signals, uses) = (gpu.signals.clone(), uses.clone());
    let (again, last) = (reaper.clone(), reaper.clone());
    let free = move || last.when_past(uses.pending(), free);
    reaper.when_past(Vec::new(), move || {
        signals.retire(address, move || again.when_past(Vec::new(), free));
    });
}

/// Fails unless `bytes` is a whole number of words.
fn check_words(bytes: usize) -> Result<()> {
    if bytes.is_multiple_of(size_of::<u64>()) {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "signals have {bytes} bytes; expected a multiple of 8"
    ))
    .with_operation("allocate device memory")
    .with_help("allocate whole words"))
}

/// The error for exporting mapped peer memory or an unsuitable kind.
pub(super) fn not_ours() -> Error {
    Error::unsupported(
        "the slice is a mapping of a peer's memory; expected memory allocated or borrowed here",
    )
    .with_operation("export device memory")
    .with_help("export it on the rank that allocated it")
}
