//! Views of device memory: an address, a length, and what keeps both valid.

use super::config::DeviceKind;
use super::fault::Fault;
use crate::error::{Error, Result};
use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// What a slice lies in: an allocation, a mapping of a peer's, or memory borrowed from somebody.
/// Only devices make one. Dropping it frees, unmaps or gives back.
pub trait Backing: Any + Send + Sync + fmt::Debug {
    /// Address of the first byte of the whole allocation.
    fn base(&self) -> u64;
    /// Bytes of the whole allocation.
    fn bytes(&self) -> usize;
    /// Number of the allocation, unique in this process and never used again, so that memory freed
    /// and allocated anew at the same address is told apart.
    fn identity(&self) -> u64;
    /// Which device's memory it is.
    fn kind(&self) -> DeviceKind;
    /// Whether it is somebody else's memory, whose owner is held: then several may lie in one
    /// allocation, and dropping one may run its owner's code.
    fn is_borrowed(&self) -> bool {
        false
    }
    /// The same borrowed memory without its owner, who may free it at any time: [`is_there`](Self::is_there) tells, and
    /// until it has, nothing may access it but what is known to have it. Nothing where it is not borrowed, or where nothing
    /// would tell.
    fn without_owner(&self) -> Option<Arc<dyn Backing>> {
        None
    }
    /// Whether it still is the allocation that it was when this was made. Only what has no owner may not be.
    fn is_there(&self) -> bool {
        true
    }
    /// Whether it is memory of the host, which processors and networks reach at its address.
    fn is_host_memory(&self) -> bool {
        false
    }
    /// Has the memory given back to the system when it is freed, and not used for something else: a
    /// rank that was lost may still write to it.
    fn forbid_reuse(&self) {}
    /// What ends waits for words in it, where it holds signals.
    fn fault(&self) -> Option<&Arc<Fault>> {
        None
    }
    /// Itself, for the device that made it.
    fn as_any(&self) -> &dyn Any;
}

/// A range of device memory, checked against its allocation, which it keeps allocated. It hands
/// out no Rust reference: a GPU or a peer may write to it at any time.
#[derive(Clone)]
pub struct DeviceSlice {
    backing: Arc<dyn Backing>,
    offset: usize,
    bytes: usize,
}

impl DeviceSlice {
    /// The whole of `backing`.
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

    /// Offset in bytes from the start of the allocation.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// The allocation that it lies in.
    pub fn backing(&self) -> &Arc<dyn Backing> {
        &self.backing
    }

    /// Which device's memory it is.
    pub fn kind(&self) -> DeviceKind {
        self.backing.kind()
    }

    /// The bytes `range` of this slice.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) where the range is
    /// reversed or passes the end.
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

    /// The whole allocation that this slice lies in.
    pub fn allocation(&self) -> Self {
        Self::whole(self.backing.clone())
    }

    /// The 8-byte word at `offset`.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) where it passes the end or
    /// is not aligned to 8 bytes.
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

    /// Whether all of `other` lies in it.
    pub(crate) fn contains(&self, other: &Self) -> bool {
        self.backing.identity() == other.backing.identity()
            && self.address() <= other.address()
            && other.address() + other.bytes as u64 <= self.address() + self.bytes as u64
    }

    /// Whether two slices share a byte.
    pub fn overlaps(&self, other: &Self) -> bool {
        let (a, b) = (self.address(), other.address());
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
    /// Its address.
    pub fn address(&self) -> u64 {
        self.0.address()
    }

    /// What ends waits for it, where it is a signal of this process.
    pub(crate) fn fault(&self) -> Option<&Arc<Fault>> {
        self.0.backing.fault()
    }

    /// Its bytes.
    pub fn as_slice(&self) -> &DeviceSlice {
        &self.0
    }
}
