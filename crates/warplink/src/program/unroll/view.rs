//! Parts of tensors.

use crate::dtype::DType;
use crate::program::area::{Area, Axis};
use crate::program::rank_program::{Range, TensorId};

/// A part of a tensor, with its shape.
#[derive(Clone, Debug)]
pub(super) struct View {
    pub(super) tensor: TensorId,
    pub(super) dtype: DType,
    /// In elements.
    pub(super) offset: usize,
    pub(super) shape: Vec<usize>,
    /// For each axis, the elements from one index to the next.
    pub(super) strides: Vec<usize>,
    /// Whether it is an input of a program that was called.
    pub(super) read_only: bool,
}

impl View {
    /// Contiguous elements from `offset` on, the last axis varying fastest.
    pub(super) fn row_major(
        tensor: TensorId,
        dtype: DType,
        offset: usize,
        shape: Vec<usize>,
    ) -> Self {
        let mut strides = vec![1; shape.len()];
        for axis in (1..shape.len()).rev() {
            strides[axis - 1] = strides[axis] * shape[axis];
        }
        Self {
            tensor,
            dtype,
            offset,
            shape,
            strides,
            read_only: false,
        }
    }

    pub(super) fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Elements of each slice of the leading axis; `None` if that has single elements, or there is no axis.
    pub(super) fn row(&self) -> Option<usize> {
        let inner = self.shape.get(1..).filter(|inner| !inner.is_empty());
        inner.map(|inner| inner.iter().product())
    }

    /// Exchanges the last two axes, if there are two.
    pub(super) fn transpose(&mut self) -> bool {
        let axes = self.shape.len();
        if axes < 2 {
            return false;
        }
        self.shape.swap(axes - 2, axes - 1);
        self.strides.swap(axes - 2, axes - 1);
        true
    }

    /// All elements as one range, where they are contiguous and in order.
    pub(super) fn range(&self) -> Option<Range> {
        let mut expected = 1;
        for (&extent, &stride) in self.shape.iter().zip(&self.strides).rev() {
            // An axis of one element may have any stride.
            if extent > 1 && stride != expected {
                return None;
            }
            expected *= extent;
        }
        Some(self.cover())
    }

    /// The elements with the axes that have more than one of them.
    pub(super) fn strided(&self) -> Area {
        let axes: Vec<Axis> = self
            .shape
            .iter()
            .zip(&self.strides)
            .filter(|(extent, _)| **extent > 1)
            .map(|(&extent, &stride)| Axis { extent, stride })
            .collect();
        let last: usize = axes
            .iter()
            .map(|axis| (axis.extent - 1) * axis.stride)
            .sum();
        let mut span = self.cover();
        // To the end of the last element, gaps included: an upper bound of the accessed bytes.
        span.bytes = (last + 1) * self.dtype.size();
        Area { span, axes }
    }

    /// The view as a matrix, its leading axes flattened into rows: its elements in the order of memory,
    /// whether that is the order of the transpose, and, where rows of memory are not contiguous, the elements
    /// from one to the next. `None` where it has one axis, or elements that are not at even steps.
    pub(super) fn matrix(&self) -> Option<(Area, bool, Option<usize>)> {
        let (&columns, rows) = self.shape.split_last()?;
        let (&along, before) = self.strides.split_last()?;
        if rows.is_empty() {
            return None;
        }
        if let Some(range) = self.range() {
            return Some((range.into(), false, None));
        }
        // One step for all rows.
        let (mut count, mut step) = (1, 0);
        for (&extent, &stride) in rows.iter().zip(before).rev() {
            // Leading axes merge into one row axis only if rows continue at the same step.
            if extent > 1 && count > 1 && stride != step * count {
                return None;
            }
            if extent > 1 && count == 1 {
                step = stride;
            }
            count *= extent;
        }
        let (lengths, steps) = ([count, columns], [step, along]);
        let in_rows = |row: usize, column: usize| {
            // BLAS needs one unit stride, and rows that do not overlap.
            let close = lengths[column] == 1 || steps[column] == 1;
            let apart = lengths[row] == 1 || steps[row] >= lengths[column];
            let leading = match lengths[row] {
                1 => lengths[column],
                _ => steps[row],
            };
            (close && apart).then_some(leading)
        };
        let (transposed, leading) = match (in_rows(0, 1), in_rows(1, 0)) {
            (Some(leading), _) => (false, leading),
            (None, Some(leading)) => (true, leading),
            (None, None) => return None,
        };
        let length = lengths[usize::from(!transposed)];
        if leading == length {
            return Some((self.cover().into(), transposed, None));
        }
        let mut area = self.strided();
        if transposed && columns > 1 {
            // The area lists axes from outer to inner in memory, which a transposed matrix has the other way.
            area.axes.rotate_right(1);
        }
        Some((area, transposed, Some(leading)))
    }

    /// As many elements as there are, from the first on.
    fn cover(&self) -> Range {
        Range {
            tensor: self.tensor,
            offset_bytes: self.offset * self.dtype.size(),
            bytes: self.elements() * self.dtype.size(),
        }
    }

    /// The shape without extents of one, which make no difference to an elementwise operation.
    pub(super) fn squeezed(&self) -> Vec<usize> {
        self.shape.iter().copied().filter(|&e| e != 1).collect()
    }
}
