//! Elements of a tensor that an operation accesses.

use super::tensor::Range;
use crate::dtype::DType;

/// Elements of a tensor, which need not be contiguous.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Area {
    /// Byte range from the first element to the last.
    pub span: Range,
    /// Extents and strides, in the order of the operation's indices, outermost first; empty if the area is the whole
    /// span in order.
    pub axes: Vec<Axis>,
}

/// One axis: elements at a constant stride.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Axis {
    /// Number of elements along the axis.
    pub extent: usize,
    /// Distance between neighbours, in elements.
    pub stride: usize,
}

impl Area {
    /// Whether the area is its whole span, in order.
    pub const fn is_contiguous(&self) -> bool {
        self.axes.is_empty()
    }

    /// Whether the span contains bytes that are not part of the area.
    pub fn has_gaps(&self, dtype: DType) -> bool {
        self.bytes(dtype) != self.span.bytes
    }

    /// Number of bytes in the area's elements.
    pub fn bytes(&self, dtype: DType) -> usize {
        if self.is_contiguous() {
            return self.span.bytes;
        }
        let extents = self.axes.iter().map(|axis| axis.extent);
        extents.product::<usize>() * dtype.size()
    }
}

/// Merges adjacent axes of areas with equal extents. Returns the extents, and per area the strides in elements.
/// Contiguous areas and single elements have no axes.
pub(super) fn simplified(areas: &[Area]) -> (Vec<usize>, Vec<Vec<usize>>) {
    let axes = areas.first().map_or(0, |area| area.axes.len());
    let mut order: Vec<usize> = (0..axes).collect();
    // Sort axes by the strides of the first area.
    order.sort_by_key(|axis| std::cmp::Reverse(areas[0].axes[*axis].stride));
    let mut extents: Vec<usize> = Vec::new();
    let mut strides: Vec<Vec<usize>> = vec![Vec::new(); areas.len()];
    for axis in order {
        let extent = areas[0].axes[axis].extent;
        let steps = areas.iter().map(|area| area.axes[axis].stride);
        let mut before = strides.iter().zip(steps.clone());
        // An axis merges into the one outside it only if it is dense in every operand: the loop is shared.
        let follows = before.all(|(all, step)| all.last() == Some(&(extent * step)));
        match extents.last_mut() {
            Some(outer) if follows => {
                *outer *= extent;
                for (all, step) in strides.iter_mut().zip(steps) {
                    all.pop();
                    all.push(step);
                }
            }
            _ => {
                extents.push(extent);
                strides
                    .iter_mut()
                    .zip(steps)
                    .for_each(|(all, step)| all.push(step));
            }
        }
    }
    (extents, strides)
}

impl From<Range> for Area {
    fn from(span: Range) -> Self {
        Self {
            span,
            axes: Vec::new(),
        }
    }
}
