//! Shared-memory files mapped into this process: one alone, or several one behind the other.

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

/// A mapping of one shared-memory file, or of several one behind the other; unmapped on drop.
#[derive(Debug)]
pub(super) struct Mapping {
    pub(super) base: u64,
    pub(super) bytes: usize,
    mapped: usize,
    pub(super) identity: u64,
    pub(super) pieces: Vec<Piece>,
    /// Of a piece of a segment: the addresses that it lies in.
    inside: Option<Arc<Reservation>>,
    /// How many hold it only until nobody else does; they count themselves.
    pub(super) last_holders: AtomicUsize,
    /// Whether it stands for memory of the host, which every device maps.
    pub(super) host: bool,
    /// Whether it is a peer's, and this device pretends to have no atomic operations on it.
    without_atomics: AtomicBool,
}

impl Mapping {
    /// From now on there are no atomic operations on it.
    pub(super) fn deny_atomics(&self) {
        self.without_atomics.store(true, Ordering::Relaxed);
        SOME_WITHOUT_ATOMICS.store(true, Ordering::Release);
    }

    /// Whether anybody holds it who is not one of the last holders.
    pub(super) fn is_held(self: &Arc<Self>) -> bool {
        Arc::strong_count(self) > self.last_holders.load(Ordering::Relaxed)
    }

    /// Whether it is a piece of a segment, whose addresses are mapped again as soon as it is unmapped.
    pub(super) fn is_piece(&self) -> bool {
        self.inside.is_some()
    }
}

/// Addresses kept for one purpose, given back on drop.
#[derive(Debug)]
pub(super) struct Reservation {
    base: u64,
    bytes: usize,
}

static IDENTITIES: AtomicU64 = AtomicU64::new(1);

// Whether any mapping of this process is without atomic operations.
static SOME_WITHOUT_ATOMICS: AtomicBool = AtomicBool::new(false);

// The mappings of this process by base address, so that a bare address can be borrowed.
static MAPPINGS: Mutex<BTreeMap<u64, Weak<Mapping>>> = Mutex::new(BTreeMap::new());

pub(super) fn next_identity() -> u64 {
    IDENTITIES.fetch_add(1, Ordering::Relaxed)
}

impl Drop for Mapping {
    fn drop(&mut self) {
        lock(&MAPPINGS).remove(&self.base);
        // Nothing refers to the range: every access goes through a slice that holds this mapping, and
        // this is its last holder.
        let unmapped = match &self.inside {
            // The addresses stay the segment's.
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
    /// Reserves addresses for `bytes`, in whole pages.
    pub(super) fn new(bytes: usize) -> Result<Self> {
        let bytes = whole_pages(bytes)?;
        let base = reserve_at(None, bytes)
            .map_err(|errno| Error::io(format!("reserve {bytes} bytes"), &errno.into()))?;
        Ok(Self { base, bytes })
    }

    pub(super) fn base(&self) -> u64 {
        self.base
    }

    /// Maps `pieces` at `offset`, one behind the other.
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

    /// Hands the addresses to somebody who gives them back.
    fn into_base(self) -> u64 {
        let base = self.base;
        std::mem::forget(self);
        base
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        // SAFETY: reserved once; who maps something in it holds it or gives it up.
        if let Err(errno) = unsafe { rustix::mm::munmap(self.base as *mut c_void, self.bytes) } {
            tracing::error!(base = self.base, bytes = self.bytes, %errno, "giving back addresses failed");
        }
    }
}

/// Reserves `bytes` without memory behind them: anywhere, or over what is mapped at `base`.
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

/// What a file has to promise, so that no access to its mapping can raise SIGBUS: its length stays.
pub(super) const FIXED_LENGTH: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

/// A new file of `bytes` of zeros, whose length nobody can change any more.
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
    rustix::fs::fcntl_add_seals(&descriptor, FIXED_LENGTH | SealFlags::SEAL).map_err(fail)?;
    Ok(Piece { descriptor, bytes })
}

/// Maps files one behind the other.
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
/// With [`MapFlags::FIXED`], nobody may refer to what is mapped at `at`, in whole pages.
unsafe fn map_file(
    descriptor: &OwnedFd,
    bytes: usize,
    at: *mut c_void,
    flags: MapFlags,
) -> Result<u64> {
    // SAFETY: the caller vouches for what is replaced.
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

/// Notes what was mapped at `base`.
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

/// Whether there are atomic operations on the word at `address`.
pub(super) fn has_atomics(address: u64) -> bool {
    if !SOME_WITHOUT_ATOMICS.load(Ordering::Acquire) {
        return true;
    }
    let inside = mappings_of(address, address + 1);
    let mut denied = inside
        .iter()
        .map(|it| it.without_atomics.load(Ordering::Relaxed));
    !denied.any(|denied| denied)
}

/// The mapping that `address` lies in, and those that follow it in its segment up to `end`.
pub(super) fn mappings_of(address: u64, end: u64) -> Vec<Arc<Mapping>> {
    // Dropped behind the lock, which the last holder of a mapping takes.
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
