//! Elements of a tensor that an operation accesses.

use super::tensor::Range;
use crate::dtype::DType;

/// Elements of a tensor, which need not be contiguous.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Area {
    /// From the first to the last of them.
    pub span: Range,
    /// How they lie in it, in the order of the operation's indices and outermost first; none where they
    /// are all of it, in this order.
    pub axes: Vec<Axis>,
}

/// Elements at even steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Axis {
    /// How many.
    pub extent: usize,
    /// Elements from one to the next.
    pub stride: usize,
}

impl Area {
    /// Whether it is all of its span, in order.
    pub const fn is_contiguous(&self) -> bool {
        self.axes.is_empty()
    }

    /// Whether there is anything between its elements.
    pub fn has_gaps(&self, dtype: DType) -> bool {
        self.bytes(dtype) != self.span.bytes
    }

    /// How many bytes its elements have.
    pub fn bytes(&self, dtype: DType) -> usize {
        if self.is_contiguous() {
            return self.span.bytes;
        }
        let extents = self.axes.iter().map(|axis| axis.extent);
        extents.product::<usize>() * dtype.size()
    }
}

/// The axes that areas of the same extents need at least: the extent of each, and for each area the
/// elements from one index to the next. None for areas that are contiguous, or one element.
pub(super) fn simplified(areas: &[Area]) -> (Vec<usize>, Vec<Vec<usize>>) {
    let axes = areas.first().map_or(0, |area| area.axes.len());
    let mut order: Vec<usize> = (0..axes).collect();
    // In the order of the first one's memory.
    order.sort_by_key(|axis| std::cmp::Reverse(areas[0].axes[*axis].stride));
    let mut extents: Vec<usize> = Vec::new();
    let mut strides: Vec<Vec<usize>> = vec![Vec::new(); areas.len()];
    for axis in order {
        let extent = areas[0].axes[axis].extent;
        let steps = areas.iter().map(|area| area.axes[axis].stride);
        let mut before = strides.iter().zip(steps.clone());
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
