//! Views of device memory: address, length and the owner that keeps them valid.

use super::config::DeviceKind;
use super::fault::Fault;
use crate::error::{Error, Result};
use std::any::Any;
use std::borrow::Cow;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// Backing store of slices: an allocation, a mapping of a peer's memory, or borrowed memory. Only devices
/// create it. Dropping it frees, unmaps or returns the memory.
pub trait Backing: Any + Send + Sync + fmt::Debug {
    /// Address of the whole allocation.
    fn base(&self) -> u64;
    /// Length of the whole allocation.
    fn bytes(&self) -> usize;
    /// Identity of the allocation, unique in this process and never reused, to distinguish successive
    /// allocations at the same address.
    fn identity(&self) -> u64;
    /// Kind of device that owns the memory.
    fn kind(&self) -> DeviceKind;
    /// Whether it is borrowed from an owner that it keeps alive: then several backings may share one
    /// allocation, and dropping one may run the owner's code.
    fn is_borrowed(&self) -> bool {
        false
    }
    /// The same borrowed memory without holding its owner, who may free it at any time; see
    /// [`is_there`](Self::is_there). Access is allowed only while the memory is otherwise known to exist.
    /// `None` if it is not borrowed, or its disappearance cannot be detected.
    fn without_owner(&self) -> Option<Arc<dyn Backing>> {
        None
    }
    /// Whether the memory is still the same allocation as at creation. Always true unless it is held without
    /// its owner.
    fn is_there(&self) -> bool {
        true
    }
    /// The same range of the present allocation at its addresses, if it is held without its owner and that memory has
    /// been allocated anew. To be called only for an operand of a call that is being enqueued.
    fn renewed(&self, _offset: usize, _bytes: usize) -> Option<DeviceSlice> {
        None
    }
    /// Whether it is host memory, accessible to processors and networks at its address.
    fn is_host_memory(&self) -> bool {
        false
    }
    /// Returns the memory to the system when freed instead of reusing it: a lost rank may still write to it.
    fn forbid_reuse(&self) {}
    /// Fault that aborts waits for words in it, if it holds signals.
    fn fault(&self) -> Option<&Arc<Fault>> {
        None
    }
    /// For downcasts by the device that created it.
    fn as_any(&self) -> &dyn Any;
}

/// A bounds-checked range of device memory, which it keeps allocated. It never exposes a Rust reference: a
/// GPU or peer may write at any time.
#[derive(Clone)]
pub struct DeviceSlice {
    backing: Arc<dyn Backing>,
    offset: usize,
    bytes: usize,
}

impl DeviceSlice {
    /// All of `backing`.
    pub(crate) fn whole(backing: Arc<dyn Backing>) -> Self {
        let bytes = backing.bytes();
        Self {
            backing,
            offset: 0,
            bytes,
        }
    }

    /// Address of the first byte, valid in this process on this slice's device.
    pub fn address(&self) -> u64 {
        self.backing.base() + self.offset as u64
    }

    /// Length in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Fails unless `source`, which is copied here, has the same length.
    #[inline]
    pub(super) fn check_source(&self, source: &Self) -> Result<()> {
        if self.bytes == source.bytes {
            return Ok(());
        }
        Err(Error::invalid(format!(
            "the source has {} bytes and the target {}; expected the same length",
            source.bytes, self.bytes
        ))
        .with_operation("copy")
        .with_help("pass slices of the same length"))
    }

    /// Fails unless a buffer of the host's that is copied to or from the slice has its length.
    pub(super) fn check_buffer(&self, operation: &'static str, bytes: usize) -> Result<()> {
        if bytes == self.bytes {
            return Ok(());
        }
        Err(Error::invalid(format!(
            "the slice has {} bytes and the host buffer {bytes}; expected the same length",
            self.bytes
        ))
        .with_operation(operation)
        .with_help("pass a buffer as long as the slice"))
    }

    /// Offset in bytes from the start of the allocation.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// The allocation that contains it.
    pub fn backing(&self) -> &Arc<dyn Backing> {
        &self.backing
    }

    /// Kind of device that owns the memory.
    pub fn kind(&self) -> DeviceKind {
        self.backing.kind()
    }

    /// For an operand of a call that is being enqueued, the present allocation at its addresses if that is another one
    /// than at creation, and otherwise the slice itself; `None` if there is none.
    pub(crate) fn renewed(&self) -> Option<Cow<'_, Self>> {
        if self.backing.is_there() {
            return Some(Cow::Borrowed(self));
        }
        let renewed = self.backing.renewed(self.offset, self.bytes);
        renewed.map(Cow::Owned)
    }

    /// Sub-slice `range`.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) if the range is reversed or out of
    /// bounds.
    pub fn slice(&self, range: Range<usize>) -> Result<Self> {
        if range.start > range.end || range.end > self.bytes {
            return Err(Error::invalid(format!(
                "range {}..{} is out of bounds; expected an ordered range within {} bytes",
                range.start, range.end, self.bytes
            ))
            .with_help("slice within the bounds"));
        }
        Ok(Self {
            backing: self.backing.clone(),
            offset: self.offset + range.start,
            bytes: range.len(),
        })
    }

    /// The whole allocation that contains this slice.
    pub fn allocation(&self) -> Self {
        Self::whole(self.backing.clone())
    }

    /// The 8-byte word at `offset`.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) if it is out of bounds or not
    /// aligned to 8 bytes.
    pub fn word(&self, offset: usize) -> Result<Word> {
        let end = offset
            .checked_add(8)
            .ok_or_else(|| Error::invalid("the offset of the word overflows the address space"))?;
        let slice = self.slice(offset..end)?;
        if !slice.address().is_multiple_of(8) {
            return Err(Error::invalid(format!(
                "the word is at {:#x}; expected an address aligned to 8 bytes",
                slice.address()
            ))
            .with_help("use an offset that is a multiple of 8"));
        }
        Ok(Word(slice))
    }

    /// Whether it contains all of `other`.
    pub(crate) fn contains(&self, other: &Self) -> bool {
        // The identity too: an address may have been freed and be another allocation's now.
        self.backing.identity() == other.backing.identity()
            && self.address() <= other.address()
            && other.address() + other.bytes as u64 <= self.address() + self.bytes as u64
    }

    /// Whether two slices share a byte.
    pub fn overlaps(&self, other: &Self) -> bool {
        let (a, b) = (self.address(), other.address());
        // Addresses of two kinds of devices are in different address spaces, and may be equal by chance.
        self.kind() == other.kind() && a < b + other.bytes as u64 && b < a + self.bytes as u64
    }
}

impl AsRef<Self> for DeviceSlice {
    fn as_ref(&self) -> &Self {
        self
    }
}

impl fmt::Debug for DeviceSlice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}[{:#x}; {}]", self.kind(), self.address(), self.bytes)
    }
}

/// An aligned 64-bit word of device memory, for signals.
#[derive(Clone, Debug)]
pub struct Word(DeviceSlice);

impl Word {
    /// Address.
    pub fn address(&self) -> u64 {
        self.0.address()
    }

    /// Fault that aborts waits for it, if it is a signal of this process.
    pub(crate) fn fault(&self) -> Option<&Arc<Fault>> {
        self.0.backing.fault()
    }

    /// As a slice.
    pub fn as_slice(&self) -> &DeviceSlice {
        &self.0
    }
}
