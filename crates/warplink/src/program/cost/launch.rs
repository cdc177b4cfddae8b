//! Launches of kernel sections: simulated lanes, their steps, and the counters for their synchronization.

use super::class::{self, LaneClass};
use crate::error::{Error, ErrorKind, Rank, Result};
use crate::program::section::{LaneStep, LaneStepKind, Part, ScratchId, SectionInstance};
use std::collections::{HashMap, HashSet};

/// Approximate limit on the simulated iterations of a loop, which represent all of them; bounds the time.
pub(super) const MAX_ITERATIONS: u64 = 16;

/// A launch of a rank, with the steps of its lanes.
#[derive(Debug)]
pub(super) struct RankLaunch {
    pub(super) classes: Vec<Steps>,
    /// Class of each lane.
    pub(super) of_lane: Vec<usize>,
}

/// Steps of the lanes of a class.
#[derive(Debug)]
pub(super) struct Steps {
    pub(super) class: LaneClass,
    /// Each step with the number of steps that it represents.
    pub(super) steps: Vec<(LaneStep, f64)>,
}

/// Counters for the synchronization of lanes.
#[derive(Debug, Default)]
pub(super) struct LaneCounters {
    /// By waiting rank and lane, and the distance of the signalling rank.
    pub(super) signals: HashMap<(usize, usize, usize), u32>,
    /// Elements that have arrived as packets, by launch, rank, scratch and class: one counter for the first element,
    /// one for all.
    pub(super) packets: HashMap<(usize, usize, ScratchId, usize), [u32; 2]>,
    /// Scratch of launches in which lanes read packets that only lanes of other classes store.
    pub(super) crossed: HashSet<(usize, ScratchId)>,
    /// By launch, scratch, rank and class: ratio of simulated arrivals to reads, if fewer packets are stored than read,
    /// for example because some ranks have shorter parts. Waits are scaled by it.
    pub(super) shares: HashMap<(usize, ScratchId, usize, usize), f64>,
}

/// Packets that a lane has read: scratch and first element.
pub(super) type Seen = HashSet<(ScratchId, usize)>;

impl Steps {
    /// Elements that a lane of this class stores as packets, by scratch and rank, and those that it reads.
    pub(super) fn packets(
        &self,
        section: &SectionInstance,
    ) -> (HashMap<(ScratchId, Rank), f64>, HashMap<ScratchId, f64>) {
        let (mut put, mut read, mut seen) = (HashMap::new(), HashMap::new(), Seen::new());
        let mut puts = |part: &Part, elements: f64| {
            if let Some(id) = section.packets_of(part) {
                *put.entry((id, part.rank)).or_default() += elements;
            }
        };
        let mut reads = |part: &Part, elements: f64| {
            if let Some(id) = section.packets_of(part)
                // A packet that is read again has arrived already.
                && seen.insert((id, part.offset))
            {
                *read.entry(id).or_default() += elements;
            }
        };
        for LaneStep { kind, .. } in self.steps.iter().map(|(step, _)| step) {
            // An announcement is one packet, whatever its number of words.
            let elements = |part: &Part| match kind {
                LaneStepKind::Move(_) => part.elements as f64,
                _ => 1.0,
            };
            let (targets, sources) = (kind.targets().iter(), kind.sources().iter());
            targets.for_each(|part| puts(part, elements(part)));
            sources.for_each(|part| reads(part, elements(part)));
        }
        (put, read)
    }
}

/// Steps of a launch's lanes if all ranks reach the announced tensors; `classes` are the class numbers of its lanes.
pub(super) fn launch(
    section: &SectionInstance,
    classes: Vec<usize>,
    iterations: u64,
) -> Result<RankLaunch> {
    let (classes, of_lane) = class::halved(classes);
    let steps = |class: LaneClass| -> Result<Steps> {
        // Launch 0 stands for all: slots change with the epoch, but not the time.
        let sampled = section.sampled_steps(class.lane, 0, iterations);
        let (steps, weights) = sampled.map_err(|diagnostic| {
            Error::new(ErrorKind::Verification, diagnostic.message)
                .with_operation("simulate a program")
                .with_help("verify the program")
        })?;
        Ok(Steps {
            class,
            steps: steps.into_iter().zip(weights).collect(),
        })
    };
    Ok(RankLaunch {
        classes: classes.into_iter().map(steps).collect::<Result<_>>()?,
        of_lane,
    })
}
