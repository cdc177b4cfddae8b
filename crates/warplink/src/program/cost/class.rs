//! Which lanes of a section do the same, so that one of them stands for all, and whether all ranks do.

use super::outline::{Outline, varying};
use crate::program::section::SectionInstance;

/// Lanes that do the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Class {
    /// The first of them, which stands for all.
    pub(super) lane: usize,
    /// How many they are.
    pub(super) count: usize,
    /// Which half of the lanes that do the same: 0 for the first.
    pub(super) half: u32,
}

/// The classes of the lanes, halved: lanes do not stay in step, so that some move data while others wait.
pub(super) fn halved(section: &SectionInstance) -> (Vec<Class>, Vec<usize>) {
    let (whole, mut of_lane) = classes(section);
    let mut halves = Vec::with_capacity(2 * whole.len());
    // Where the halves of each class are.
    let mut places = Vec::with_capacity(whole.len());
    for class in &whole {
        let second = class.count / 2;
        places.push((halves.len(), class.count - second, 0));
        halves.push(Class {
            count: class.count - second,
            ..*class
        });
        if second > 0 {
            halves.push(Class {
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

/// The classes of the lanes, in the order of their first lanes, and the class of each lane.
pub(super) fn classes(section: &SectionInstance) -> (Vec<Class>, Vec<usize>) {
    let varying = varying(section);
    let mut outlines: Vec<(Vec<i64>, Class)> = Vec::new();
    let mut of_lane = Vec::with_capacity(section.lanes);
    for lane in 0..section.lanes {
        let outline = Outline::of(section, lane, Some(&varying));
        let found = outlines.iter().position(|(known, _)| *known == outline);
        let class = found.unwrap_or(outlines.len());
        match outlines.get_mut(class) {
            Some((_, class)) => class.count += 1,
            None => outlines.push((
                outline,
                Class {
                    lane,
                    count: 1,
                    half: 0,
                },
            )),
        }
        of_lane.push(class);
    }
    (
        outlines.into_iter().map(|(_, class)| class).collect(),
        of_lane,
    )
}

/// Whether the lanes of two ranks do the same, with peers at the same distance; `of_a` are the classes of the one's.
pub(super) fn same(a: &SectionInstance, of_a: &[Class], b: &SectionInstance) -> bool {
    let shapes = |section: &SectionInstance| -> Vec<Vec<usize>> {
        let tensors = section.tensors.iter();
        tensors.map(|tensor| tensor.shape.clone()).collect()
    };
    if (a.lanes, a.threads, &a.integers) != (b.lanes, b.threads, &b.integers)
        || a.section != b.section
        || shapes(a) != shapes(b)
    {
        return false;
    }
    // Where all that is evaluated is the same for the lanes that stand for others, it is for these.
    let all = |section, class: &Class| Outline::of(section, class.lane, None);
    of_a.iter().all(|class| all(a, class) == all(b, class))
}

#[cfg(test)]
#[path = "class_tests.rs"]
mod tests;
