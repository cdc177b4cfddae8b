//! Layout of scratch in a workspace.
//!
//! A workspace has a separate area for each packing, so that memory never changes its packet type: otherwise old data
//! could be mistaken for a flag. Sections that share a workspace overlay their scratch, from the start of each area.

use super::ir::Packing;
use crate::dtype::DType;
use crate::program::site::Site;
use std::sync::Arc;

/// Row pitch granularity of scratch, in elements: every row starts at a valid start of packets and wide accesses.
const ROW_ELEMENTS: usize = 16;

/// As [`ROW_ELEMENTS`], for packets of 128 bytes: a whole number of 120-byte payloads and a multiple of 16 elements,
/// for every element type.
pub(crate) const ROW_ELEMENTS_OF_LINES: usize = 240;

/// Alignment of areas, in bytes.
const AREA_ALIGNMENT: usize = 256;

/// Index of scratch in a rank program.
pub type ScratchId = usize;

/// Scratch with its extents resolved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScratchInstance {
    /// Its name in the program.
    pub name: Arc<str>,
    /// Whether data of an earlier run may be read.
    pub persistent: bool,
    /// Packing of data and flags.
    pub packing: Packing,
    /// Its element type.
    pub dtype: DType,
    /// Its extents, outermost first.
    pub shape: Vec<usize>,
    /// Stride of each axis, in elements of data; rows are padded.
    pub strides: Vec<usize>,
    /// Offset in the area of its packing, in bytes.
    pub offset_bytes: usize,
    /// Size in that area in bytes, flags included.
    pub bytes: usize,
    /// Its declaration.
    pub site: Site,
}

impl ScratchInstance {
    /// Strides and size of scratch with a shape; `None` if it exceeds the address range.
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

    /// Lays the rows of the first axis of all of `group`, which is plain, next to one another: row 0 of each, then
    /// row 1 of each. So kernels that share a workspace may use the same rows of it with other element types. Returns
    /// their bytes together; `None` if their first axes differ, or rows have no axis of their own.
    pub fn alternate(group: &mut [Self]) -> Option<usize> {
        let rows = *group.first()?.shape.first()?;
        if group
            .iter()
            .any(|one| one.shape.len() < 2 || one.shape[0] != rows)
        {
            return None;
        }
        // A row has a multiple of ROW_ELEMENTS elements, so all rows start at multiples of 16 bytes.
        let row_bytes = |one: &Self| one.strides[0] * one.dtype.size();
        let pitch: usize = group.iter().map(row_bytes).sum();
        let mut offset = group[0].offset_bytes;
        for one in group {
            let row = row_bytes(one);
            one.strides[0] = pitch / one.dtype.size();
            one.offset_bytes = offset;
            one.bytes = (rows - 1) * pitch + row;
            offset += row;
        }
        Some(rows * pitch)
    }

    /// Byte range, in the packing's area, of the packets with `elements` elements from `offset` on; `None` if they do
    /// not start at a packet boundary.
    pub fn packed(&self, offset: usize, elements: usize) -> Option<std::ops::Range<usize>> {
        let size = self.dtype.size();
        let (data, packet) = self.packing.packet();
        let from = offset * size;
        // A packet is written by one store, so that a part cannot start within one.
        if !from.is_multiple_of(data) {
            return None;
        }
        let start = self.offset_bytes + from / data * packet;
        Some(start..start + (elements * size).div_ceil(data) * packet)
    }

    /// The part of [`packed`](Self::packed) that ends with the last of these elements, as if data preceded the flag
    /// in a packet.
    pub(crate) fn filled(&self, offset: usize, elements: usize) -> Option<std::ops::Range<usize>> {
        let whole = self.packed(offset, elements)?;
        let (data, packet) = self.packing.packet();
        let rest = elements * self.dtype.size() % data;
        // The last packet may be partial; bytes beyond the data are not written.
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
    /// Offset in the workspace, in bytes.
    pub offset_bytes: usize,
    /// Length in bytes.
    pub bytes: usize,
}

/// The areas of a workspace, contiguous.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WorkspaceLayout {
    bytes: [usize; 4],
}

impl WorkspaceLayout {
    /// A workspace of this many bytes, without packets.
    pub(crate) fn plain(bytes: usize) -> Self {
        let mut layout = Self::default();
        layout.bytes[Packing::Plain as usize] = bytes;
        layout
    }

    /// A workspace that fits all of `scratch`.
    pub fn of<'s>(scratch: impl IntoIterator<Item = &'s ScratchInstance>) -> Self {
        let mut layout = Self::default();
        for one in scratch {
            let area = &mut layout.bytes[one.packing as usize];
            // The maximum and not the sum: sections of a workspace overlay their scratch.
            *area = (*area).max(one.offset_bytes + one.bytes);
        }
        layout
    }

    /// Reserves an area for this many bytes of data.
    pub(crate) fn reserve(&mut self, packing: Packing, data_bytes: usize) {
        let (data, packet) = packing.packet();
        let area = &mut self.bytes[packing as usize];
        *area = (*area).max(data_bytes.div_ceil(data) * packet);
    }

    /// Next free offset in an area, for scratch declared later.
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

    /// Total length in bytes.
    pub fn bytes(&self) -> usize {
        let last = self.area(Packing::Packets128);
        last.offset_bytes + last.bytes
    }
}
