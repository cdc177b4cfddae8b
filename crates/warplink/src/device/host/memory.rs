//! Shared-memory slices, and copies of their bytes.

use super::mapping::{FIXED_LENGTH, Mapping, map_pieces, mappings_of, new_file, next_identity};
use super::unmapping::LateUnmapping;
use crate::device::{
    AllocationKind, Backing, DeviceKind, DeviceSlice, Fault, Piece, combined_identity,
};
use crate::error::{Error, Result};
use rustix::mm::{MsyncFlags, msync};
use std::any::Any;
use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Backing of slices of a mapping.
#[derive(Debug)]
pub(super) struct Allocation {
    pub(super) mapping: Arc<Mapping>,
    late: Option<LateUnmapping>,
    /// Fault that aborts waits for signals in this memory.
    fault: Option<Arc<Fault>>,
}

/// Memory owned by other code, inside one of this process's mappings or not.
#[derive(Debug)]
struct Borrowed {
    base: u64,
    bytes: usize,
    identity: u64,
    // Mappings that contain it; only these can be shared with peers.
    inside: Vec<Arc<Mapping>>,
    // If `None`, this is a weak holder of the mappings.
    owner: Option<Arc<dyn Any + Send + Sync>>,
}

impl Backing for Allocation {
    fn base(&self) -> u64 {
        self.mapping.base
    }
    fn bytes(&self) -> usize {
        self.mapping.bytes
    }
    fn identity(&self) -> u64 {
        self.mapping.identity
    }
    fn kind(&self) -> DeviceKind {
        DeviceKind::Host
    }
    fn is_host_memory(&self) -> bool {
        true
    }
    fn fault(&self) -> Option<&Arc<Fault>> {
        self.fault.as_ref()
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Backing for Borrowed {
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
        DeviceKind::Host
    }
    fn is_host_memory(&self) -> bool {
        true
    }
    fn is_borrowed(&self) -> bool {
        true
    }
    fn without_owner(&self) -> Option<Arc<dyn Backing>> {
        // Memory without a mapping of ours gives no sign when it is freed; a segment's pieces live as long as the
        // segment.
        if self.inside.is_empty() || self.inside.iter().any(|mapping| mapping.is_piece()) {
            return None;
        }
        let left = Self {
            base: self.base,
            bytes: self.bytes,
            identity: self.identity,
            inside: self.inside.clone(),
            owner: None,
        };
        // After they are held, so that they are never seen as unused meanwhile.
        for mapping in &left.inside {
            // Relaxed: the count is advisory for `is_held`, and atomic with itself.
            mapping.last_holders.fetch_add(1, Ordering::Relaxed);
        }
        Some(Arc::new(left))
    }
    fn is_there(&self) -> bool {
        self.owner.is_some() || self.inside.iter().all(Mapping::is_held)
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for Borrowed {
    fn drop(&mut self) {
        if self.owner.is_none() {
            for mapping in &self.inside {
                // Relaxed, as for the increment.
                mapping.last_holders.fetch_sub(1, Ordering::Relaxed);
            }
        }
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        if let Some(late) = &self.late {
            // The clone keeps it mapped until the thread drops it, as a driver does that unmaps behind the caller's
            // back.
            late.unmap(self.mapping.clone());
        }
    }
}

/// Allocates `bytes` of zeroed memory that other processes can map.
pub(in crate::device) fn allocate(bytes: usize, kind: AllocationKind) -> Result<DeviceSlice> {
    allocate_for(bytes, kind, None)
}

/// As [`allocate`], for signals whose waits `fault` aborts.
pub(super) fn allocate_for(
    bytes: usize,
    kind: AllocationKind,
    fault: Option<Arc<Fault>>,
) -> Result<DeviceSlice> {
    if bytes == 0 {
        return Err(
            Error::invalid("the allocation has 0 bytes; expected at least 1")
                .with_operation("allocate memory")
                .with_help("leave out empty allocations"),
        );
    }
    let mapping = map_pieces(vec![new_file(bytes)?], kind == AllocationKind::Host)?;
    Ok(slice_of(mapping, None, fault))
}

/// Maps a peer's files contiguously. They must hold at least `bytes` and have sealed lengths.
pub(in crate::device) fn map(
    pieces: Vec<Piece>,
    bytes: usize,
    late: Option<LateUnmapping>,
) -> Result<DeviceSlice> {
    let invalid = |what: String| Error::invalid_handle(what).with_operation("map a peer's memory");
    let mut whole = 0_usize;
    for piece in &pieces {
        // Touching pages past the end of a file raises SIGBUS, so verify the length, and first the seal that
        // prevents the peer from truncating it afterwards.
        let seals = rustix::fs::fcntl_get_seals(&piece.descriptor);
        if !seals.is_ok_and(|seals| seals.contains(FIXED_LENGTH)) {
            return Err(invalid(
                "the descriptor's length can change; expected sealed shared memory".to_owned(),
            ));
        }
        let status = rustix::fs::fstat(&piece.descriptor)
            .map_err(|errno| Error::io("inspect a received descriptor", &errno.into()))?;
        if piece.bytes == 0 || (status.st_size as u64) < piece.bytes as u64 {
            return Err(invalid(format!(
                "the descriptor holds {} bytes; expected the {} of the piece",
                status.st_size, piece.bytes
            )));
        }
        if !whole.is_multiple_of(rustix::param::page_size()) {
            return Err(invalid(
                "a piece in the middle does not end with a page; expected whole pages".to_owned(),
            ));
        }
        whole = whole.saturating_add(piece.bytes);
    }
    if bytes == 0 || whole < bytes {
        return Err(invalid(format!(
            "the pieces hold {whole} bytes; expected the {bytes} of the handle"
        )));
    }
    Ok(slice_of(map_pieces(pieces, false)?, late, None))
}

fn slice_of(
    mapping: Arc<Mapping>,
    late: Option<LateUnmapping>,
    fault: Option<Arc<Fault>>,
) -> DeviceSlice {
    DeviceSlice::whole(Arc::new(Allocation {
        mapping,
        late,
        fault,
    }))
}

/// Disables atomic operations on a peer's memory mapped as `slice`.
pub(super) fn deny_atomics(slice: &DeviceSlice) {
    let backing = slice.backing().as_any();
    if let Some(Allocation { mapping, .. }) = backing.downcast_ref() {
        mapping.deny_atomics();
    }
}

/// A view of memory that `owner` keeps alive.
pub(super) fn borrow(
    address: u64,
    bytes: usize,
    owner: Arc<dyn Any + Send + Sync>,
) -> Result<DeviceSlice> {
    if address == 0 || bytes == 0 || address.checked_add(bytes as u64).is_none() {
        return Err(Error::invalid(format!(
            "{bytes} bytes at {address:#x} are not a range of memory"
        ))
        .with_operation("borrow memory"));
    }
    let inside = mappings_of(address, address + bytes as u64);
    let Some(first) = inside.first() else {
        check_mapped(address, bytes)?;
        let borrowed = Borrowed {
            base: address,
            bytes,
            identity: next_identity(),
            inside,
            owner: Some(owner),
        };
        return Ok(DeviceSlice::whole(Arc::new(borrowed)));
    };
    let (base, offset) = (first.base, (address - first.base) as usize);
    let identities: Vec<u64> = inside.iter().map(|mapping| mapping.identity).collect();
    let borrowed = Borrowed {
        base,
        bytes: inside.iter().map(|mapping| mapping.bytes).sum(),
        // The same for every view of these mappings, so that views of one allocation count as one.
        identity: combined_identity(&identities),
        inside,
        owner: Some(owner),
    };
    let end = offset.checked_add(bytes).ok_or_else(|| {
        Error::invalid("the borrowed range overflows the address space")
            .with_operation("borrow memory")
    })?;
    DeviceSlice::whole(Arc::new(borrowed)).slice(offset..end)
}

/// Fails for memory that the process does not have, such as freed memory, as a GPU's driver does.
fn check_mapped(address: u64, bytes: usize) -> Result<()> {
    let page = rustix::param::page_size() as u64;
    let start = address / page * page;
    let length = bytes + (address - start) as usize;
    // SAFETY: without flags that write or invalidate, the call only checks that all pages are mapped.
    let mapped = unsafe { msync(start as usize as *mut c_void, length, MsyncFlags::ASYNC) };
    mapped.map_err(|error| {
        let text = format!("{bytes} bytes at {address:#x} are not memory of this process");
        Error::invalid(text)
            .with_operation("borrow memory")
            .with_code(error.raw_os_error().into())
            .with_help("pass memory that is allocated, and free it after its last use")
    })
}

/// File pieces behind `slice`, for a peer to map, and whether they are a single piece of host memory.
pub(in crate::device) fn pieces(slice: &DeviceSlice) -> Result<(Vec<Piece>, bool)> {
    let any = slice.backing().as_any();
    let mappings = match any.downcast_ref::<Borrowed>() {
        Some(borrowed) => &borrowed.inside[..],
        None => any
            .downcast_ref()
            .map_or(&[][..], |Allocation { mapping, .. }| {
                std::slice::from_ref(mapping)
            }),
    };
    if mappings.is_empty() {
        return Err(Error::unsupported(format!(
            "{slice:?} is borrowed memory without a file; expected memory that the device allocated"
        ))
        .with_operation("export memory")
        .with_help("allocate it with the device"));
    }
    let host = matches!(mappings, [mapping] if mapping.host);
    let pieces = mappings.iter().flat_map(|mapping| &mapping.pieces);
    let pieces = pieces.map(Piece::try_clone).collect::<Result<_>>()?;
    Ok((pieces, host))
}

/// Copies `source` to `target`; lengths must match.
pub(super) fn copy(target: &DeviceSlice, source: &DeviceSlice) {
    debug_assert_eq!(target.bytes(), source.bytes());
    // SAFETY: both ranges are mapped, since the slices hold their backing, and as long as the
    // slices say. `copy` allows overlap. The memory is shared with other processes, never seen
    // through a Rust reference; a race is the protocol error that this device is meant to show.
    unsafe {
        ptr::copy(
            source.address() as *const u8,
            target.address() as *mut u8,
            target.bytes(),
        )
    }
}

/// Fills `target` with `byte`.
pub(super) fn fill(target: &DeviceSlice, byte: u8) {
    // SAFETY: as for `copy`.
    unsafe { ptr::write_bytes(target.address() as *mut u8, byte, target.bytes()) }
}

/// Copies `bytes` to `target`; lengths must match.
pub(super) fn write_bytes(target: &DeviceSlice, bytes: &[u8]) -> Result<()> {
    target.check_buffer("upload", bytes.len())?;
    // SAFETY: the target is mapped and as long as `bytes`; device memory and a Rust slice never
    // overlap.
    unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), target.address() as *mut u8, bytes.len()) }
    Ok(())
}

/// Copies `source` to `bytes`; lengths must match.
pub(super) fn read_bytes(source: &DeviceSlice, bytes: &mut [u8]) -> Result<()> {
    source.check_buffer("download", bytes.len())?;
    // SAFETY: as for `write_bytes`.
    unsafe {
        ptr::copy_nonoverlapping(
            source.address() as *const u8,
            bytes.as_mut_ptr(),
            bytes.len(),
        )
    }
    Ok(())
}

/// As [`write_bytes`], at offset `from` of a longer target.
pub(super) fn write_to(target: &DeviceSlice, from: usize, bytes: &[u8]) -> Result<()> {
    check_inside(target, from, bytes.len())?;
    let start = target.address() as usize + from;
    // SAFETY: as for `write_bytes`.
    unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), start as *mut u8, bytes.len()) }
    Ok(())
}

/// As [`read_bytes`], from offset `from` of a longer source.
pub(super) fn read_from(source: &DeviceSlice, from: usize, bytes: &mut [u8]) -> Result<()> {
    check_inside(source, from, bytes.len())?;
    let start = source.address() as usize + from;
    // SAFETY: as for `write_bytes`.
    unsafe { ptr::copy_nonoverlapping(start as *const u8, bytes.as_mut_ptr(), bytes.len()) }
    Ok(())
}

fn check_inside(slice: &DeviceSlice, from: usize, bytes: usize) -> Result<()> {
    let end = from.checked_add(bytes);
    if end.is_some_and(|end| end <= slice.bytes()) {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "{bytes} bytes from {from} on pass the end of the slice's {}",
        slice.bytes()
    ))
    .with_operation("copy between host and device"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ErrorKind;

    #[test]
    fn borrowed_address_is_shared_as_its_allocation() {
        let whole = allocate(10_000, AllocationKind::Plain).unwrap();
        let borrowed = borrow(whole.address() + 100, 50, Arc::new(())).unwrap();
        assert_eq!((borrowed.offset(), borrowed.bytes()), (100, 50));
        assert_eq!(borrowed.backing().identity(), whole.backing().identity());
        let mapped = map(pieces(&borrowed).unwrap().0, 10_000, None).unwrap();
        write_bytes(&borrowed, &[7; 50]).unwrap();
        let mut seen = [0; 50];
        read_bytes(&mapped.slice(100..150).unwrap(), &mut seen).unwrap();
        assert_eq!(seen, [7; 50]);
        assert!(borrow(whole.address() + 9_990, 50, Arc::new(())).is_err());
    }

    #[test]
    fn memory_of_no_file_cannot_be_shared() {
        let bytes = [0u8; 64];
        let borrowed = borrow(bytes.as_ptr() as u64, 64, Arc::new(())).unwrap();
        assert_eq!(
            pieces(&borrowed).unwrap_err().kind(),
            ErrorKind::Unsupported
        );
    }

    #[test]
    fn memory_that_is_not_mapped_is_refused() {
        let freed = allocate(100, AllocationKind::Plain).unwrap().address();
        for address in [0x1238, freed] {
            let error = borrow(address, 64, Arc::new(())).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{address:#x}");
        }
    }

    #[test]
    fn a_short_file_is_refused() {
        let whole = allocate(100, AllocationKind::Plain).unwrap();
        let error = map(pieces(&whole).unwrap().0, 200, None).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidHandle);
        let mut longer = pieces(&whole).unwrap().0;
        longer[0].bytes = 200;
        let error = map(longer, 200, None).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidHandle);
        assert!(allocate(0, AllocationKind::Plain).is_err());
    }

    #[test]
    fn a_file_that_could_be_truncated_is_refused_and_ours_cannot_be() {
        use rustix::fs::{MemfdFlags, fcntl_add_seals, ftruncate, memfd_create};
        let own = pieces(&allocate(100, AllocationKind::Plain).unwrap())
            .unwrap()
            .0;
        assert!(ftruncate(&own[0].descriptor, 0).is_err());
        assert!(ftruncate(&own[0].descriptor, 200).is_err());
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let descriptor = memfd_create("test", flags).unwrap();
        ftruncate(&descriptor, 100).unwrap();
        let peers = Piece {
            descriptor,
            bytes: 100,
        };
        let [early, late] = [(); 2].map(|()| vec![peers.try_clone().unwrap()]);
        let error = map(early, 100, None).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidHandle);
        fcntl_add_seals(&peers.descriptor, FIXED_LENGTH).unwrap();
        assert!(map(late, 100, None).is_ok());
        let descriptor = std::fs::File::open("/proc/self/exe").unwrap().into();
        let error = map(
            vec![Piece {
                descriptor,
                bytes: 1,
            }],
            1,
            None,
        );
        assert_eq!(error.unwrap_err().kind(), ErrorKind::InvalidHandle);
    }
}
