//! Grids for tensors with accesses to non-contiguous parts: the tensor is cut along each axis so that every access
//! covers whole cells.

use super::area::Area;
use super::section::TensorId;
use super::tensor::TensorInstance;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

/// Cuts of one tensor.
#[derive(Clone, Debug)]
pub(crate) struct Grid {
    /// Element size in bytes.
    element: usize,
    /// Axes with more than one element, in memory order, outermost first.
    axes: Vec<CutAxis>,
}

#[derive(Clone, Debug)]
struct CutAxis {
    extent: usize,
    /// Stride in elements.
    stride: usize,
    /// Cell boundaries, from 0 to the extent.
    cuts: Vec<usize>,
}

/// Index range along each axis, end exclusive.
type Bounds = Vec<(usize, usize)>;

/// Grids for the rank's tensors that have at least one area with gaps.
pub(crate) fn grids(
    tensors: &[TensorInstance],
    areas: impl Iterator<Item = Area> + Clone,
) -> HashMap<TensorId, Arc<Grid>> {
    let mut cuts: HashMap<TensorId, (Grid, Vec<BTreeSet<usize>>)> = HashMap::new();
    for area in areas.clone() {
        // Contiguous accesses alone need no grid: byte ranges describe them exactly.
        if area.has_gaps(tensors[area.span.tensor].dtype) {
            cuts.entry(area.span.tensor).or_insert_with(|| {
                let grid = Grid::new(&tensors[area.span.tensor]);
                let cuts = grid
                    .axes
                    .iter()
                    .map(|axis| BTreeSet::from([0, axis.extent]));
                let cuts = cuts.collect();
                (grid, cuts)
            });
        }
    }
    if cuts.is_empty() {
        return HashMap::new();
    }
    for area in areas {
        if let Some((grid, cuts)) = cuts.get_mut(&area.span.tensor) {
            for bounds in grid.boxes(&area) {
                for (cuts, (from, to)) in cuts.iter_mut().zip(bounds) {
                    // From every access, also contiguous ones: a cell is then inside an area or outside of it.
                    cuts.extend([from, to]);
                }
            }
        }
    }
    let finished = |(tensor, (mut grid, cuts)): (TensorId, (Grid, Vec<BTreeSet<usize>>))| {
        for (axis, cuts) in grid.axes.iter_mut().zip(cuts) {
            axis.cuts = cuts.into_iter().collect();
        }
        (tensor, Arc::new(grid))
    };
    cuts.into_iter().map(finished).collect()
}

impl Grid {
    /// The tensor's axes, uncut.
    fn new(tensor: &TensorInstance) -> Self {
        let mut shape = tensor.shape.clone();
        let axes = shape.len();
        if tensor.column_major && axes >= 2 {
            shape.swap(axes - 2, axes - 1);
        }
        let mut stride = 1;
        let mut axes = Vec::new();
        for extent in shape.into_iter().rev() {
            // Axes of one element have no cuts, and their strides would be ambiguous.
            if extent > 1 {
                axes.push(CutAxis {
                    extent,
                    stride,
                    cuts: vec![0, extent],
                });
            }
            stride *= extent;
        }
        axes.reverse();
        Self {
            element: tensor.dtype.size(),
            axes,
        }
    }

    /// Number of cells.
    pub(crate) fn cells(&self) -> usize {
        let counts = self.axes.iter().map(CutAxis::cells);
        counts.fold(1, usize::saturating_mul)
    }

    /// Number of cells in an area.
    pub(crate) fn cells_of(&self, area: &Area) -> usize {
        let boxes = self.boxes(area).into_iter();
        let counts = boxes.map(|bounds| {
            let axes = self.axes.iter().zip(bounds);
            axes.map(|(axis, bounds)| axis.cells_of(bounds).len())
                .fold(1, usize::saturating_mul)
        });
        counts.fold(0, usize::saturating_add)
    }

    /// Calls `with` for each cell of an area.
    pub(crate) fn each_cell(&self, area: &Area, mut with: impl FnMut(usize)) {
        for bounds in self.boxes(area) {
            let axes = self.axes.iter().zip(bounds);
            let ranges: Vec<_> = axes.map(|(axis, bounds)| axis.cells_of(bounds)).collect();
            let mut index: Vec<usize> = ranges.iter().map(|range| range.start).collect();
            // An odometer: the last axis counts fastest, which visits cells in memory order.
            'cells: loop {
                let places = self.axes.iter().zip(&index);
                with(places.fold(0, |cell, (axis, index)| cell * axis.cells() + index));
                for (index, range) in index.iter_mut().zip(&ranges).rev() {
                    *index += 1;
                    if *index < range.end {
                        continue 'cells;
                    }
                    *index = range.start;
                }
                break;
            }
        }
    }

    /// Byte range of a cell, end exclusive.
    pub(crate) fn span(&self, cell: usize) -> (usize, usize) {
        let (mut rest, mut first, mut last) = (cell, 0, 0);
        for axis in self.axes.iter().rev() {
            let index = rest % axis.cells();
            rest /= axis.cells();
            first += axis.cuts[index] * axis.stride;
            last += (axis.cuts[index + 1] - 1) * axis.stride;
        }
        (first * self.element, (last + 1) * self.element)
    }

    /// Splits an area into boxes: one, or a few if it is contiguous and begins or ends within an axis.
    fn boxes(&self, area: &Area) -> Vec<Bounds> {
        let from = area.span.offset_bytes / self.element;
        let mut boxes = Vec::new();
        let extents = area.axes.iter().map(|axis| axis.extent);
        // A span without gaps may begin and end within rows, and is then up to `2 * axes - 1` boxes.
        if area.is_contiguous() || extents.product::<usize>() * self.element == area.span.bytes {
            let to = area.span.end() / self.element;
            self.split(&mut Vec::new(), from, to, &mut boxes);
            return boxes;
        }
        let mut rest = from;
        let bounds = self.axes.iter().map(|axis| {
            let index = rest / axis.stride;
            rest %= axis.stride;
            let along = |step: &&super::area::Axis| step.extent > 1 && step.stride == axis.stride;
            let extent = area.axes.iter().find(along).map_or(1, |step| step.extent);
            (index, index + extent)
        });
        vec![bounds.collect()]
    }

    /// The elements `from..to` of the part that `before` selects along the first axes.
    fn split(&self, before: &mut Bounds, from: usize, to: usize, boxes: &mut Vec<Bounds>) {
        let Some(axis) = self.axes.get(before.len()) else {
            boxes.push(before.clone());
            return;
        };
        let unit = axis.stride;
        let whole = |first: usize, end: usize, before: &Bounds, boxes: &mut Vec<Bounds>| {
            if first < end {
                let mut bounds = before.clone();
                bounds.push((first, end));
                let inner = self.axes.iter().skip(bounds.len());
                bounds.extend(inner.map(|axis| (0, axis.extent)));
                boxes.push(bounds);
            }
        };
        let mut part = |index: usize, from: usize, to: usize, boxes: &mut Vec<Bounds>| {
            before.push((index, index + 1));
            self.split(before, from, to, boxes);
            before.pop();
        };
        let (mut first, last) = (from / unit, to / unit);
        // A partial slice at the start, whole ones, and a partial one at the end.
        if !from.is_multiple_of(unit) {
            let end = if first == last { to % unit } else { unit };
            part(first, from % unit, end, boxes);
            first += 1;
        }
        // `first > last` where the span ends in the slice that it starts in, which was added above.
        if !to.is_multiple_of(unit) && first <= last {
            part(last, 0, to % unit, boxes);
        }
        whole(first, last, before, boxes);
    }
}

impl CutAxis {
    fn cells(&self) -> usize {
        self.cuts.len() - 1
    }

    /// Cells that an index range touches.
    fn cells_of(&self, (from, to): (usize, usize)) -> std::ops::Range<usize> {
        // There is a cut at 0, so that the subtraction does not underflow.
        let first = self.cuts.partition_point(|cut| *cut <= from) - 1;
        first..self.cuts.partition_point(|cut| *cut < to)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::program::area::Axis;
    use crate::program::tensor::Range;

    /// `[3, 4, 5]` of 2 bytes, cut at 2 along the first axis, at 1 and 3 along the last.
    fn grid() -> Grid {
        let axis = |extent: usize, stride: usize, cuts: &[usize]| CutAxis {
            extent,
            stride,
            cuts: cuts.to_vec(),
        };
        Grid {
            element: 2,
            axes: vec![
                axis(3, 20, &[0, 2, 3]),
                axis(4, 5, &[0, 4]),
                axis(5, 1, &[0, 1, 3, 5]),
            ],
        }
    }

    fn range(from: usize, to: usize) -> Area {
        Area::from(Range::of(0, 2 * from..2 * to))
    }

    fn count(bounds: &Bounds) -> usize {
        bounds.iter().map(|(from, to)| to - from).product()
    }

    #[test]
    fn every_contiguous_range_is_boxes_that_are_apart() {
        let grid = grid();
        for from in 0..60 {
            for to in from + 1..=60 {
                let mut seen = [0; 60];
                let boxes = grid.boxes(&range(from, to));
                assert!(boxes.len() <= 5, "{boxes:?}");
                for bounds in &boxes {
                    assert!(count(bounds) > 0);
                    for i in bounds[0].0..bounds[0].1 {
                        for j in bounds[1].0..bounds[1].1 {
                            for k in bounds[2].0..bounds[2].1 {
                                seen[20 * i + 5 * j + k] += 1;
                            }
                        }
                    }
                }
                let expected: Vec<i32> =
                    (0..60).map(|at| i32::from(at >= from && at < to)).collect();
                assert_eq!(seen.to_vec(), expected, "{from}..{to}: {boxes:?}");
            }
        }
    }

    #[test]
    fn an_area_is_its_cells() {
        let grid = grid();
        assert_eq!(grid.cells(), 6);
        // [0..2, :, 1..3]
        let span = Range::of(0, 2..2 * (1 + 20 + 3 * 5 + 2));
        let axis = |extent, stride| Axis { extent, stride };
        let area = Area {
            span,
            axes: vec![axis(2, 20), axis(4, 5), axis(2, 1)],
        };
        let mut cells = Vec::new();
        grid.each_cell(&area, |cell| cells.push(cell));
        assert_eq!((cells, grid.cells_of(&area)), (vec![1], 1));
        assert_eq!(grid.span(1), (2, 2 + span.bytes));
        let mut all = Vec::new();
        grid.each_cell(&range(0, 60), |cell| all.push(cell));
        assert_eq!(all, [0, 1, 2, 3, 4, 5]);
    }
}
