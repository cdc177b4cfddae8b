//! Shared-memory files mapped into this process, singly or several contiguously.

use crate::device::Piece;
use crate::error::{Error, Result};
use crate::sync::lock;
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};

/// A mapping of one shared-memory file or of several contiguous ones; unmapped on drop.
#[derive(Debug)]
pub(super) struct Mapping {
    pub(super) base: u64,
    pub(super) bytes: usize,
    mapped: usize,
    pub(super) identity: u64,
    pub(super) pieces: Vec<Piece>,
    /// For a piece of a segment, the reservation that contains it.
    inside: Option<Arc<Reservation>>,
    /// Number of weak holders, which do not count as users of the mapping.
    pub(super) last_holders: AtomicUsize,
    /// Whether it represents host memory, which every device can map.
    pub(super) host: bool,
    /// Whether it belongs to a peer and this device simulates missing atomics on it.
    without_atomics: AtomicBool,
}

impl Mapping {
    /// Disables atomic operations on it.
    pub(super) fn deny_atomics(&self) {
        // Relaxed: published by the release store of the global flag.
        self.without_atomics.store(true, Ordering::Relaxed);
        SOME_WITHOUT_ATOMICS.store(true, Ordering::Release);
    }

    /// Whether anyone but weak holders holds it.
    pub(super) fn is_held(self: &Arc<Self>) -> bool {
        // Relaxed: advisory, as the strong count is; a weak holder counts itself after it holds the mapping.
        Arc::strong_count(self) > self.last_holders.load(Ordering::Relaxed)
    }

    /// Whether it is a piece of a segment, whose addresses stay reserved when it is unmapped.
    pub(super) fn is_piece(&self) -> bool {
        self.inside.is_some()
    }
}

/// A reserved address range, released on drop.
#[derive(Debug)]
pub(super) struct Reservation {
    base: u64,
    bytes: usize,
}

static IDENTITIES: AtomicU64 = AtomicU64::new(1);

// Whether any mapping of this process has atomics disabled, so that the common case needs no lookup.
static SOME_WITHOUT_ATOMICS: AtomicBool = AtomicBool::new(false);

// Mappings of this process by base address, so that a raw address can be borrowed.
static MAPPINGS: Mutex<BTreeMap<u64, Weak<Mapping>>> = Mutex::new(BTreeMap::new());

pub(super) fn next_identity() -> u64 {
    // Relaxed: identities only have to be unique.
    IDENTITIES.fetch_add(1, Ordering::Relaxed)
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // Before unmapping: from then on the address may belong to a new mapping, whose entry must stay.
        lock(&MAPPINGS).remove(&self.base);
        // No references exist: every access goes through a slice that holds this mapping, and this is its
        // last holder.
        let unmapped = match &self.inside {
            // The addresses stay reserved for the segment.
            Some(_) => reserve_at(Some(self.base), self.mapped).map(|_| ()),
            // SAFETY: the range was mapped for this mapping, and nothing refers to it.
            None => unsafe { rustix::mm::munmap(self.base as *mut c_void, self.mapped) },
        };
        if let Err(errno) = unmapped {
            tracing::error!(base = self.base, bytes = self.mapped, %errno, "unmapping shared memory failed");
        }
    }
}

impl Reservation {
    /// Reserves an address range of at least `bytes`, in whole pages.
    pub(super) fn new(bytes: usize) -> Result<Self> {
        let bytes = whole_pages(bytes)?;
        let base = reserve_at(None, bytes)
            .map_err(|errno| Error::io(format!("reserve {bytes} bytes"), &errno.into()))?;
        Ok(Self { base, bytes })
    }

    pub(super) fn base(&self) -> u64 {
        self.base
    }

    /// Maps `pieces` contiguously at `offset`.
    fn map(&self, offset: usize, pieces: &[Piece]) -> Result<()> {
        let mut start = offset;
        for piece in pieces {
            let end = start.checked_add(piece.bytes);
            if end.is_none_or(|end| end > self.bytes) {
                return Err(Error::invalid(format!(
                    "{} bytes at offset {start} pass the end of {} reserved; expected less",
                    piece.bytes, self.bytes
                ))
                .with_operation("map shared memory"));
            }
            let at = (self.base as usize + start) as *mut c_void;
            // SAFETY: the range is inside of what was reserved, where nothing else is mapped.
            unsafe { map_file(&piece.descriptor, piece.bytes, at, MapFlags::FIXED)? };
            start += piece.bytes;
        }
        Ok(())
    }

    /// Releases ownership of the addresses to the caller.
    fn into_base(self) -> u64 {
        let base = self.base;
        // The mapping unmaps the whole range itself from now on.
        std::mem::forget(self);
        base
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        // SAFETY: reserved once; who maps something in it holds it or gives it up.
        if let Err(errno) = unsafe { rustix::mm::munmap(self.base as *mut c_void, self.bytes) } {
            tracing::error!(base = self.base, bytes = self.bytes, %errno, "releasing an address range failed");
        }
    }
}

/// Reserves `bytes` of addresses without memory: anywhere, or over the mapping at `base`.
fn reserve_at(base: Option<u64>, bytes: usize) -> rustix::io::Result<u64> {
    let (at, fixed) = match base {
        Some(base) => (base as *mut c_void, MapFlags::FIXED),
        None => (ptr::null_mut(), MapFlags::empty()),
    };
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | fixed;
    // SAFETY: at an address of the kernel's choice it touches no memory in use; at `base`, it replaces
    // what the caller has mapped there and nobody refers to.
    let base = unsafe { rustix::mm::mmap_anonymous(at, bytes, ProtFlags::empty(), flags)? };
    Ok(base as u64)
}

fn whole_pages(bytes: usize) -> Result<usize> {
    let pages = bytes.checked_next_multiple_of(rustix::param::page_size());
    pages.ok_or_else(|| {
        Error::invalid(format!("{bytes} bytes overflow the address space"))
            .with_operation("map shared memory")
    })
}

/// Maps a new piece of `bytes`, in whole pages, at `offset` of a segment.
pub(super) fn add_piece(
    segment: &Arc<Reservation>,
    offset: usize,
    bytes: usize,
) -> Result<Arc<Mapping>> {
    let pieces = vec![new_file(whole_pages(bytes)?)?];
    segment.map(offset, &pieces)?;
    let base = segment.base + offset as u64;
    Ok(mapping_at(base, pieces, false, Some(segment.clone())))
}

/// Required seals of a file: its length cannot change, so accesses to the mapping cannot raise SIGBUS.
pub(super) const FIXED_LENGTH: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

/// Creates a zeroed file of `bytes` with sealed length.
pub(super) fn new_file(bytes: usize) -> Result<Piece> {
    let fail = |errno: rustix::io::Errno| {
        Error::io(
            format!("allocate {bytes} bytes of shared memory"),
            &errno.into(),
        )
    };
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let descriptor = rustix::fs::memfd_create("warplink", flags).map_err(fail)?;
    rustix::fs::ftruncate(&descriptor, bytes as u64).map_err(fail)?;
    // Sealed before anybody gets the descriptor, and against further seals: one on writing would make peers'
    // mappings fail.
    rustix::fs::fcntl_add_seals(&descriptor, FIXED_LENGTH | SealFlags::SEAL).map_err(fail)?;
    Ok(Piece { descriptor, bytes })
}

/// Maps files contiguously.
pub(super) fn map_pieces(pieces: Vec<Piece>, host: bool) -> Result<Arc<Mapping>> {
    let base = if let [piece] = &pieces[..] {
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory in use.
        unsafe {
            map_file(
                &piece.descriptor,
                piece.bytes,
                ptr::null_mut(),
                MapFlags::empty(),
            )?
        }
    } else {
        let reservation = Reservation::new(pieces.iter().map(|piece| piece.bytes).sum())?;
        reservation.map(0, &pieces)?;
        reservation.into_base()
    };
    Ok(mapping_at(base, pieces, host, None))
}

/// Maps a file of `bytes`.
///
/// # Safety
/// With [`MapFlags::FIXED`], nothing may refer to the existing mapping of the pages at `at`.
unsafe fn map_file(
    descriptor: &OwnedFd,
    bytes: usize,
    at: *mut c_void,
    flags: MapFlags,
) -> Result<u64> {
    // SAFETY: the caller guarantees that the range may be replaced.
    let base = unsafe {
        rustix::mm::mmap(
            at,
            whole_pages(bytes)?,
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::SHARED | flags,
            descriptor.as_fd(),
            0,
        )
    };
    base.map(|base| base as u64)
        .map_err(|errno| Error::io(format!("map {bytes} bytes of shared memory"), &errno.into()))
}

/// Registers a mapping at `base`.
fn mapping_at(
    base: u64,
    pieces: Vec<Piece>,
    host: bool,
    inside: Option<Arc<Reservation>>,
) -> Arc<Mapping> {
    let bytes: usize = pieces.iter().map(|piece| piece.bytes).sum();
    let mapping = Arc::new(Mapping {
        base,
        bytes,
        mapped: bytes.next_multiple_of(rustix::param::page_size()),
        identity: next_identity(),
        pieces,
        inside,
        last_holders: AtomicUsize::new(0),
        host,
        without_atomics: AtomicBool::new(false),
    });
    lock(&MAPPINGS).insert(base, Arc::downgrade(&mapping));
    mapping
}

/// Whether atomic operations are available on the word at `address`.
pub(super) fn has_atomics(address: u64) -> bool {
    // Acquire: pairs with the release store in `deny_atomics`, which publishes the mapping's flag.
    if !SOME_WITHOUT_ATOMICS.load(Ordering::Acquire) {
        return true;
    }
    let inside = mappings_of(address, address + 1);
    // Relaxed: the acquire above has made the flags visible.
    let mut denied = inside
        .iter()
        .map(|it| it.without_atomics.load(Ordering::Relaxed));
    !denied.any(|denied| denied)
}

/// The mapping that contains `address`, and following ones of its segment up to `end`.
pub(super) fn mappings_of(address: u64, end: u64) -> Vec<Arc<Mapping>> {
    // Dropped after the lock is released, since the last holder of a mapping takes it.
    let mut found: Vec<Arc<Mapping>> = Vec::new();
    let known = lock(&MAPPINGS);
    let mut next = address;
    while next < end
        && let Some(mapping) = known
            .range(..=next)
            .next_back()
            .and_then(|(_, weak)| weak.upgrade())
    {
        let at = mapping.base + mapping.bytes as u64;
        found.push(mapping);
        if at <= next {
            break;
        }
        next = at;
    }
    drop(known);
    let follows = |index: usize| -> bool {
        let mapping = &found[index];
        if index == 0 {
            return address < mapping.base + mapping.bytes as u64;
        }
        let before = &found[index - 1];
        let same_segment = match (&before.inside, &mapping.inside) {
            (Some(a), Some(b)) => Arc::ptr_eq(a, b),
            _ => false,
        };
        same_segment && before.base + before.bytes as u64 == mapping.base
    };
    let count = (0..found.len()).take_while(|index| follows(*index)).count();
    found.truncate(count);
    found
}
