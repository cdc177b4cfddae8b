//! Where scratch lies in a workspace.
//!
//! A workspace has an area for each packing, so that what was a packet of one kind is never anything else:
//! no data can pass for a flag. Sections that share a workspace lay out their scratch one over the other,
//! from the start of each area.

use super::ir::Packing;
use crate::dtype::DType;
use crate::program::site::Site;
use std::sync::Arc;

/// Rows of scratch are multiples of this number of elements, so that each starts where packets and wide accesses
/// may start.
const ROW_ELEMENTS: usize = 16;

/// As [`ROW_ELEMENTS`], for packets of 128 bytes: whole lines of 120 bytes and multiples of 16, for
/// every element type.
const ROW_ELEMENTS_OF_LINES: usize = 240;

/// Areas start at multiples of this.
const AREA_ALIGNMENT: usize = 256;

/// Index of scratch in a rank program.
pub type ScratchId = usize;

/// Scratch with its extents resolved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScratchInstance {
    /// Its name in the program.
    pub name: Arc<str>,
    /// Whether what an earlier run wrote may be read.
    pub persistent: bool,
    /// How it holds data.
    pub packing: Packing,
    /// Its element type.
    pub dtype: DType,
    /// Its extents, outermost first.
    pub shape: Vec<usize>,
    /// For each axis, the elements of data from one index to the next: rows are padded.
    pub strides: Vec<usize>,
    /// Where it starts in the area of its packing, in bytes.
    pub offset_bytes: usize,
    /// How many bytes it takes there, flags included.
    pub bytes: usize,
    /// Its declaration.
    pub site: Site,
}

impl ScratchInstance {
    /// Strides and bytes of scratch of a shape; `None` where it takes more than an address holds.
    pub fn measure(packing: Packing, dtype: DType, shape: &[usize]) -> Option<(Vec<usize>, usize)> {
        let unit = match packing {
            Packing::Packets128 => ROW_ELEMENTS_OF_LINES,
            _ => ROW_ELEMENTS,
        };
        let mut strides = vec![1; shape.len()];
        let mut elements = 1_usize;
        for (axis, &extent) in shape.iter().enumerate().rev() {
            strides[axis] = elements;
            elements = if axis + 1 == shape.len() {
                extent.checked_next_multiple_of(unit)?
            } else {
                elements.checked_mul(extent)?
            };
        }
        let bytes = packed_end(packing, elements.checked_mul(dtype.size())?)?;
        Some((strides, bytes))
    }

    /// The bytes in its area that hold `elements` elements from `offset` on, in whole packets; `None` where
    /// these do not start with a packet.
    pub fn packed(&self, offset: usize, elements: usize) -> Option<std::ops::Range<usize>> {
        let size = self.dtype.size();
        let (data, packet) = self.packing.packet();
        let from = offset * size;
        if !from.is_multiple_of(data) {
            return None;
        }
        let start = self.offset_bytes + from / data * packet;
        Some(start..start + (elements * size).div_ceil(data) * packet)
    }

    /// Of [`packed`](Self::packed), what holds these elements: it ends with the last of them, as if data came first
    /// in a packet.
    pub(crate) fn filled(&self, offset: usize, elements: usize) -> Option<std::ops::Range<usize>> {
        let whole = self.packed(offset, elements)?;
        let (data, packet) = self.packing.packet();
        let rest = elements * self.dtype.size() % data;
        let cut = if rest == 0 { 0 } else { packet - rest };
        Some(whole.start..whole.end - cut)
    }
}

fn packed_end(packing: Packing, data_bytes: usize) -> Option<usize> {
    let (data, packet) = packing.packet();
    data_bytes.div_ceil(data).checked_mul(packet)
}

/// An area of a workspace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Area {
    /// Where it starts in the workspace, in bytes.
    pub offset_bytes: usize,
    /// How long it is.
    pub bytes: usize,
}

/// The areas of a workspace, one behind the other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WorkspaceLayout {
    bytes: [usize; 4],
}

impl WorkspaceLayout {
    /// A workspace of so many bytes without packets.
    pub(crate) fn plain(bytes: usize) -> Self {
        let mut layout = Self::default();
        layout.bytes[Packing::Plain as usize] = bytes;
        layout
    }

    /// A workspace for all of `scratch`.
    pub fn of<'s>(scratch: impl IntoIterator<Item = &'s ScratchInstance>) -> Self {
        let mut layout = Self::default();
        for one in scratch {
            let area = &mut layout.bytes[one.packing as usize];
            *area = (*area).max(one.offset_bytes + one.bytes);
        }
        layout
    }

    /// The next free place of an area, for scratch that is declared after others.
    pub fn next(&self, packing: Packing) -> usize {
        self.bytes[packing as usize].next_multiple_of(AREA_ALIGNMENT)
    }

    /// The area of a packing.
    pub fn area(&self, packing: Packing) -> Area {
        let before = &self.bytes[..packing as usize];
        let starts = before.iter().map(|b| b.next_multiple_of(AREA_ALIGNMENT));
        Area {
            offset_bytes: starts.sum(),
            bytes: self.bytes[packing as usize],
        }
    }

    /// How long the workspace is.
    pub fn bytes(&self) -> usize {
        let last = self.area(Packing::Packets128);
        last.offset_bytes + last.bytes
    }
}
