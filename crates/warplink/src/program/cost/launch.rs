//! A launch of a kernel section: which lanes are simulated, their steps, and the counters by which they wait.

use super::class::{self, LaneClass};
use crate::error::{Error, ErrorKind, Rank, Result};
use crate::program::section::{LaneStep, LaneStepKind, Part, ScratchId, SectionInstance};
use std::collections::{HashMap, HashSet};

/// About how many iterations of a loop are simulated at most; they stand for all.
pub(super) const MAX_ITERATIONS: u64 = 16;

/// A launch of a rank: what its lanes do.
#[derive(Debug)]
pub(super) struct Launch {
    pub(super) classes: Vec<Steps>,
    /// The class of each lane.
    pub(super) of_lane: Vec<usize>,
}

/// What the lanes of a class do.
#[derive(Debug)]
pub(super) struct Steps {
    pub(super) class: LaneClass,
    /// Each with how many it stands for.
    pub(super) steps: Vec<(LaneStep, f64)>,
}

/// The counters by which lanes wait for one another.
#[derive(Debug, Default)]
pub(super) struct LaneCounters {
    /// By the rank and lane that wait, and how far away the rank is that signals.
    pub(super) signals: HashMap<(usize, usize, usize), u32>,
    /// Elements that have come as packets, by launch, rank, scratch and class; the first of them, and all of them.
    pub(super) packets: HashMap<(usize, usize, ScratchId, usize), [u32; 2]>,
    /// Scratch of launches of which some lanes read packets that only lanes of other classes put.
    pub(super) crossed: HashSet<(usize, ScratchId)>,
    /// By launch, scratch, rank and class: for what share of the packets that are read those that come are to be waited
    /// for, where what is simulated puts fewer than it reads, as ranks do that have shorter parts than others.
    pub(super) shares: HashMap<(usize, ScratchId, usize, usize), f64>,
}

/// The packets that a lane has read: scratch, and from which element.
pub(super) type Seen = HashSet<(ScratchId, usize)>;

impl Steps {
    /// The elements that a lane of these puts as packets, by scratch and rank, and those that it reads.
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
                && seen.insert((id, part.offset))
            {
                *read.entry(id).or_default() += elements;
            }
        };
        for LaneStep { kind, .. } in self.steps.iter().map(|(step, _)| step) {
            // An announcement is one packet, however many words it has.
            let elements = |part: &Part| match kind {
                LaneStepKind::Move { .. } => part.elements as f64,
                _ => 1.0,
            };
            let (targets, sources) = (kind.targets().iter(), kind.sources().iter());
            targets.for_each(|part| puts(part, elements(part)));
            sources.for_each(|part| reads(part, elements(part)));
        }
        (put, read)
    }
}

/// What the lanes of a launch do, where all ranks reach what they announce; `classes` are those of its lanes.
pub(super) fn launch(
    section: &SectionInstance,
    classes: Vec<usize>,
    iterations: u64,
) -> Result<Launch> {
    let (classes, of_lane) = class::halved(classes);
    let steps = |class: LaneClass| -> Result<Steps> {
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
    Ok(Launch {
        classes: classes.into_iter().map(steps).collect::<Result<_>>()?,
        of_lane,
    })
}
