//! Parts of tensors in a section, clipped at the tensor's end.

use super::instance::SectionTensor;
use crate::program::expr::Operator;
use std::fmt;

/// A part of a tensor.
///
/// The leading axis has two lengths: `extent` determines its division into parts, as if the tensor continued;
/// `length` is the part that exists. So parts of a tensor and of scratch with equal extents cover the same positions,
/// even if the tensor ends inside them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct View {
    /// Index of the section's tensor.
    pub(super) tensor: usize,
    /// Offset in elements, without the tensor's own offset.
    pub(super) offset: usize,
    /// Extents of the selection, outermost first.
    extents: Vec<usize>,
    strides: Vec<usize>,
    /// Existing length of the leading axis.
    length: usize,
}

/// Reason why a selection is invalid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Wrong {
    /// No axis is left.
    NoAxis,
    /// Expected an index below this.
    Index(usize),
    /// Expected a range within this many.
    Range(usize),
    /// The number of parts is not positive, or the part index is out of range.
    Part,
}

impl fmt::Display for Wrong {
    /// The expected selection.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoAxis => f.write_str("fewer selections"),
            Self::Index(0) => f.write_str("no index, since nothing is left"),
            Self::Index(length) => write!(f, "0 to {}", length - 1),
            Self::Range(extent) => write!(f, "a part of 0..{extent}"),
            Self::Part => f.write_str("one of at least one part"),
        }
    }
}

impl View {
    pub(super) fn of(tensor: usize, whole: &SectionTensor) -> Self {
        Self {
            tensor,
            offset: 0,
            extents: whole.shape.clone(),
            strides: whole.strides.clone(),
            length: whole.shape.first().copied().unwrap_or(1),
        }
    }

    /// Number of existing slices of the leading axis.
    pub(super) const fn rows(&self) -> usize {
        self.length
    }

    /// Elements of each slice of the leading axis; `None` if that has single elements, or there is no axis.
    pub(super) fn row(&self) -> Option<usize> {
        let inner = self.extents.get(1..).filter(|inner| !inner.is_empty());
        inner.map(|inner| inner.iter().product())
    }

    /// Whether it is a single element, with no axis left.
    pub(super) fn is_single(&self) -> bool {
        self.extents.is_empty()
    }

    /// `[index]`.
    pub(super) fn index(&mut self, index: i64) -> Result<(), Wrong> {
        let stride = *self.strides.first().ok_or(Wrong::NoAxis)?;
        // By the clipped length: elements beyond the tensor's end do not exist, even if the part extends there.
        let index = usize::try_from(index).ok().filter(|i| *i < self.length);
        let index = index.ok_or(Wrong::Index(self.length))?;
        self.offset += index * stride;
        self.extents.remove(0);
        self.strides.remove(0);
        self.length = self.extents.first().copied().unwrap_or(1);
        Ok(())
    }

    /// `[from..to]`; may be empty.
    pub(super) fn range(&mut self, from: i64, to: i64) -> Result<(), Wrong> {
        let stride = *self.strides.first().ok_or(Wrong::NoAxis)?;
        let extent = self.extents[0];
        let (Ok(from), Ok(to)) = (usize::try_from(from), usize::try_from(to)) else {
            return Err(Wrong::Range(extent));
        };
        // By the extent, which is the size in the text; only the last part may be shorter.
        if from > to || to > extent {
            return Err(Wrong::Range(extent));
        }
        self.offset += from.min(self.length) * stride;
        self.extents[0] = to - from;
        self.length = self.length.min(to).saturating_sub(from);
        Ok(())
    }

    /// `[index of parts]`.
    pub(super) fn part(&mut self, index: i64, parts: i64) -> Result<(), Wrong> {
        let extent = self.extents.first().copied().ok_or(Wrong::NoAxis)? as i64;
        if parts < 1 || !(0..parts).contains(&index) {
            return Err(Wrong::Part);
        }
        // Rounded up to whole vectors, so that the last parts may be clipped or empty.
        let part = Operator::Part.apply(extent, parts);
        let part = part.map_err(|_| Wrong::Part)?;
        let from = index.saturating_mul(part).min(extent);
        self.offset += (from as usize).min(self.length) * self.strides[0];
        self.length = self.length.saturating_sub(from as usize).min(part as usize);
        self.extents[0] = part as usize;
        Ok(())
    }

    /// Unclipped number of elements, and number that exist; `None` if they are not contiguous.
    pub(super) fn elements(&self) -> Option<(usize, usize)> {
        let mut expected = 1;
        for (axis, (&extent, &stride)) in self.extents.iter().zip(&self.strides).enumerate().rev() {
            // A single row may have any stride, since no second row follows it.
            if extent > 1 && stride != expected && !(axis == 0 && self.length < 2) {
                return None;
            }
            expected *= extent;
        }
        let inner: usize = self.extents.iter().skip(1).product();
        let extent = self.extents.first().copied().unwrap_or(1);
        Some((extent * inner, self.length * inner))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::program::section::SectionMemory;

    fn tensor(shape: &[usize], strides: &[usize]) -> View {
        let whole = SectionTensor {
            name: "X".to_owned(),
            memory: SectionMemory::Tensor(0),
            dtype: DType::F32,
            read_only: false,
            constant: false,
            offset: 0,
            shape: shape.to_vec(),
            strides: strides.to_vec(),
        };
        View::of(0, &whole)
    }

    #[test]
    fn parts_cover_everything_once_and_agree_with_scratch_of_their_extent() {
        for n in [1, 15, 16, 17, 100, 1000] {
            for (ranks, lanes) in [(1, 1), (2, 3), (8, 4), (16, 8)] {
                let row = Wrong::Part;
                let part = (n + 16 * ranks - 1) / (16 * ranks) * 16;
                let mut next = 0;
                for p in 0..ranks {
                    for lane in 0..lanes {
                        let mut x = tensor(&[n as usize], &[1]);
                        let mut a = tensor(&[part as usize], &[1]);
                        assert!(
                            x.part(p, ranks).is_ok() && x.part(lane, lanes).is_ok(),
                            "{row:?}"
                        );
                        a.part(lane, lanes).unwrap();
                        let (extent, length) = x.elements().unwrap();
                        assert_eq!(extent, a.elements().unwrap().0);
                        assert!(a.elements().unwrap().1 >= length);
                        if length > 0 {
                            assert_eq!(x.offset, next);
                            assert_eq!(x.offset, a.offset + (p * part) as usize);
                        }
                        next += length;
                    }
                }
                assert_eq!(next, n as usize);
            }
        }
    }

    #[test]
    fn the_largest_number_of_parts_has_parts_too() {
        for parts in [i64::MAX / 16 - 1, i64::MAX / 16] {
            let mut first = tensor(&[32], &[1]);
            first.part(0, parts).unwrap();
            assert_eq!((first.elements(), first.offset), (Some((16, 16)), 0));
            let mut last = tensor(&[32], &[1]);
            last.part(parts - 1, parts).unwrap();
            assert_eq!((last.elements(), last.offset), (Some((16, 0)), 32));
        }
        let mut more = tensor(&[32], &[1]);
        assert_eq!(more.part(0, i64::MAX / 16 + 1), Err(Wrong::Part));
    }

    #[test]
    fn rows_with_padding_are_no_range() {
        let mut padded = tensor(&[2, 5], &[16, 1]);
        assert_eq!(padded.elements(), None);
        padded.index(1).unwrap();
        assert_eq!((padded.elements(), padded.offset), (Some((5, 5)), 16));
        assert_eq!(padded.index(5), Err(Wrong::Index(5)));
        assert_eq!(padded.range(3, 6), Err(Wrong::Range(5)));
        padded.range(3, 5).unwrap();
        assert_eq!(padded.elements(), Some((2, 2)));
    }
}
