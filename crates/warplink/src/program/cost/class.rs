//! Equivalence classes of lanes and ranks: one representative is simulated for each class.

use super::outline::{Outline, varying};
use crate::program::section::SectionInstance;
use std::collections::HashMap;

/// Lanes with equivalent steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LaneClass {
    /// First lane of the class, its representative.
    pub(super) lane: usize,
    /// Number of lanes.
    pub(super) count: usize,
    /// Half of the equivalent lanes that this class contains: 0 for the first.
    pub(super) half: u32,
}

/// Class number of each lane; classes are numbered in the order of their first lanes.
pub(super) fn classes(section: &SectionInstance) -> Vec<usize> {
    let varying = varying(section);
    numbers((0..section.lanes).map(|lane| Outline::of(section, lane, Some(&varying))))
}

/// Common refinement of the classes in `all`, which have equal length. With it, ranks that differ share their
/// classes, so that the sender of a signal knows the representative of the lane it signals.
pub(super) fn common(all: &[&Vec<usize>]) -> Vec<usize> {
    let lanes = all.first().map_or(0, |first| first.len());
    let of = |lane: usize| -> Vec<usize> { all.iter().map(|classes| classes[lane]).collect() };
    numbers((0..lanes).map(of))
}

/// Numbers equal items alike, in order of appearance.
fn numbers<T: Eq + std::hash::Hash>(all: impl Iterator<Item = T>) -> Vec<usize> {
    let mut known = HashMap::new();
    let number = |one| {
        let next = known.len();
        *known.entry(one).or_insert(next)
    };
    all.map(number).collect()
}

/// Classes of the numbering `of_lane`.
pub(super) fn members(of_lane: &[usize]) -> Vec<LaneClass> {
    let mut classes: Vec<LaneClass> = Vec::new();
    for (lane, class) in of_lane.iter().enumerate() {
        match classes.get_mut(*class) {
            Some(class) => class.count += 1,
            None => classes.push(LaneClass {
                lane,
                count: 1,
                half: 0,
            }),
        }
    }
    classes
}

/// Classes of the numbering `of_lane`, split in halves: real lanes drift apart, so that some move data while others
/// wait.
pub(super) fn halved(mut of_lane: Vec<usize>) -> (Vec<LaneClass>, Vec<usize>) {
    let whole = members(&of_lane);
    let mut halves = Vec::with_capacity(2 * whole.len());
    // For each class: index of its first half, size of that half, and lanes seen so far.
    let mut places = Vec::with_capacity(whole.len());
    for class in &whole {
        let second = class.count / 2;
        places.push((halves.len(), class.count - second, 0));
        halves.push(LaneClass {
            count: class.count - second,
            ..*class
        });
        if second > 0 {
            halves.push(LaneClass {
                lane: 0,
                count: second,
                half: 1,
            });
        }
    }
    for (lane, class) in of_lane.iter_mut().enumerate() {
        let (first, most, seen) = &mut places[*class];
        *class = *first + usize::from(*seen >= *most);
        // The first lane of the second half represents it.
        if *seen == *most {
            halves[*class].lane = lane;
        }
        *seen += 1;
    }
    (halves, of_lane)
}

/// Whether the lanes of two ranks are equivalent, with peers at equal distance; `of_a` are the classes of `a`.
pub(super) fn same(a: &SectionInstance, of_a: &[usize], b: &SectionInstance) -> bool {
    let shapes = |section: &SectionInstance| -> Vec<Vec<usize>> {
        let tensors = section.tensors.iter();
        tensors.map(|tensor| tensor.shape.clone()).collect()
    };
    if (a.lanes, a.threads, &a.integers) != (b.lanes, b.threads, &b.integers)
        || a.section != b.section
        || shapes(a) != shapes(b)
        || classes(b) != of_a
    {
        return false;
    }
    // The lanes of a class are equivalent on both ranks, so comparing the complete outlines of the representatives
    // suffices.
    let all = |section, lane| Outline::of(section, lane, None);
    members(of_a)
        .iter()
        .all(|class| all(a, class.lane) == all(b, class.lane))
}

#[cfg(test)]
#[path = "class_tests.rs"]
mod tests;
