//! Which lanes of a section do the same, so that one of them stands for all, and whether all ranks do.

use super::outline::{Outline, varying};
use crate::program::section::SectionInstance;
use std::collections::HashMap;

/// Lanes that do the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LaneClass {
    /// The first of them, which stands for all.
    pub(super) lane: usize,
    /// How many they are.
    pub(super) count: usize,
    /// Which half of the lanes that do the same: 0 for the first.
    pub(super) half: u32,
}

/// For each lane the number of its class, in the order of the first lanes.
pub(super) fn classes(section: &SectionInstance) -> Vec<usize> {
    let varying = varying(section);
    numbers((0..section.lanes).map(|lane| Outline::of(section, lane, Some(&varying))))
}

/// The classes of lanes that are in one class by each of `all`, which are as long as one another. Ranks that differ
/// have these in common: who signals a lane knows which one stands for it.
pub(super) fn common(all: &[&Vec<usize>]) -> Vec<usize> {
    let lanes = all.first().map_or(0, |first| first.len());
    let of = |lane: usize| -> Vec<usize> { all.iter().map(|classes| classes[lane]).collect() };
    numbers((0..lanes).map(of))
}

/// Numbers what is equal alike, in order of appearance.
fn numbers<T: Eq + std::hash::Hash>(all: impl Iterator<Item = T>) -> Vec<usize> {
    let mut known = HashMap::new();
    let number = |one| {
        let next = known.len();
        *known.entry(one).or_insert(next)
    };
    all.map(number).collect()
}

/// The classes that `of_lane` numbers.
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

/// The classes that `of_lane` numbers, halved: lanes do not stay in step, so that some move data while others wait.
pub(super) fn halved(mut of_lane: Vec<usize>) -> (Vec<LaneClass>, Vec<usize>) {
    let whole = members(&of_lane);
    let mut halves = Vec::with_capacity(2 * whole.len());
    // Where the halves of each class are.
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
        if *seen == *most {
            halves[*class].lane = lane;
        }
        *seen += 1;
    }
    (halves, of_lane)
}

/// Whether the lanes of two ranks do the same, with peers at the same distance; `of_a` are the classes of the one's.
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
    // On both ranks, the lanes of a class do the same. So those that stand for them are compared, in all that is
    // evaluated.
    let all = |section, lane| Outline::of(section, lane, None);
    members(of_a)
        .iter()
        .all(|class| all(a, class.lane) == all(b, class.lane))
}

#[cfg(test)]
#[path = "class_tests.rs"]
mod tests;
