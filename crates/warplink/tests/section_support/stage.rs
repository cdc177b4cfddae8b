//! The steps of all lanes in all launches, as accesses to cells of memory.

use super::functions::{self, Function};
use std::collections::{HashMap, HashSet};
use warplink::DType;
use warplink::device::ReduceOp;
use warplink::program::section::{
    LaneStep, LaneStepKind, Part, ReadWord, RowArgument, SectionInstance, SectionMemory,
};
use warplink::program::{Diagnostic, OperationKind, RankProgram, Site};

/// The steps of the lanes, for each launch and rank.
pub(crate) struct Stage<'a> {
    pub(super) ranks: &'a [RankProgram],
    /// How many kernels a run of the program launches.
    pub(super) kernels: usize,
    pub(super) launches: Vec<Vec<Vec<Vec<Act>>>>,
    /// Where each of these steps stands.
    sites: Vec<Vec<Vec<Vec<Site>>>>,
    /// How inputs that lanes read as integers are chosen.
    pub(super) values: u64,
    /// Whether lanes read any: then what they do is known no further than the first read.
    pub(super) reads_values: bool,
}

/// A step of a lane.
#[derive(Clone, Debug)]
pub(super) enum Act {
    Signal {
        peer: usize,
        lane: usize,
    },
    Wait(usize),
    /// The number of the read in its lane and launch, and the word.
    Value(usize, Operand),
    Move(Movement),
}

#[derive(Clone, Debug)]
pub(super) struct Movement {
    pub(super) operator: Option<ReduceOp>,
    pub(super) dtype: DType,
    pub(super) elements: usize,
    /// A function of rows, how many of the sources are combined to each of its arguments, and which result each target gets.
    pub(super) function: Option<Rows>,
    /// How many elements are moved at a time: whole packets of all operands, or a row.
    pub(super) unit: usize,
    pub(super) targets: Vec<Operand>,
    pub(super) sources: Vec<Operand>,
    /// Stored values if there is no source, else expected values; none where a value is moved.
    pub(super) words: Vec<f64>,
}

/// A call of a function of rows.
#[derive(Clone, Debug)]
pub(super) struct Rows {
    pub(super) function: Function,
    pub(super) arguments: Vec<(usize, ReduceOp)>,
    pub(super) results: Vec<usize>,
}

/// Where an operand starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Operand {
    pub(super) rank: usize,
    /// A tensor, or behind the last tensor, scratch.
    pub(super) memory: usize,
    /// Its first element.
    pub(super) from: usize,
    /// How many elements it has.
    pub(super) elements: usize,
}

impl<'a> Stage<'a> {
    /// The steps of `runs` runs, with integers that lanes read chosen in the way of number `values`.
    ///
    /// # Errors
    /// The rule that a lane's steps violate.
    pub(crate) fn new(
        ranks: &'a [RankProgram],
        runs: usize,
        values: u64,
    ) -> Result<Self, Diagnostic> {
        let all: Vec<Vec<&SectionInstance>> = ranks.iter().map(sections).collect();
        let kernels = all[0].len();
        let text = |section: &&SectionInstance| format!("{:?}", section.section.body);
        let reads = |section: &&SectionInstance| {
            let text = text(section);
            text.contains("Value(") || text.contains("Index(Element(")
        };
        let reads_values = all[0].iter().any(reads);
        let (mut launches, mut sites) = (Vec::new(), Vec::new());
        for launch in 0..runs * kernels {
            let of_launch: Vec<&SectionInstance> =
                all.iter().map(|own| own[launch % kernels]).collect();
            let (mut acts, mut places) = (Vec::new(), Vec::new());
            for section in &of_launch {
                let lanes = (0..section.lanes)
                    .map(|lane| section.steps_with(lane, launch as u64, &|_| None));
                let lanes = lanes.collect::<Result<Vec<Vec<LaneStep>>, _>>()?;
                let resolve = |step: &LaneStep| act(&step.kind, ranks, &of_launch);
                let resolved = |lane: &Vec<LaneStep>| lane.iter().map(resolve).collect();
                acts.push(lanes.iter().map(resolved).collect());
                let site = |lane: Vec<LaneStep>| lane.into_iter().map(|step| step.site).collect();
                places.push(lanes.into_iter().map(site).collect());
            }
            launches.push(acts);
            sites.push(places);
        }
        Ok(Self {
            ranks,
            kernels,
            launches,
            sites,
            values,
            reads_values,
        })
    }

    /// The steps of a lane that has read these integers, as far as they are known; none where one is out of its range.
    pub(super) fn steps_after(
        &self,
        (launch, rank, lane): (usize, usize, usize),
        read: &[i64],
    ) -> Option<Vec<Act>> {
        let all: Vec<Vec<&SectionInstance>> = self.ranks.iter().map(sections).collect();
        let of_launch: Vec<&SectionInstance> =
            all.iter().map(|own| own[launch % self.kernels]).collect();
        let known = |word: &ReadWord| read.get(word.number).copied();
        let steps = of_launch[rank].steps_with(lane, launch as u64, &known);
        let resolve = |step: &LaneStep| act(&step.kind, self.ranks, &of_launch);
        Some(steps.ok()?.iter().map(resolve).collect())
    }

    /// The lane and number of the steps that stand at a place of a launch.
    pub(super) fn steps_at(&self, launch: usize, rank: usize, site: &Site) -> Vec<(usize, usize)> {
        let mut found = Vec::new();
        let lanes = self.sites.get(launch).map_or(&[][..], |all| &all[rank]);
        for (lane, steps) in lanes.iter().enumerate() {
            let here = |other: &Site| {
                (other.line, other.column) == (site.line, site.column)
                    && (self.reads_values || site.indices.starts_with(&other.indices))
            };
            let steps = steps.iter().enumerate().filter(|(_, other)| here(other));
            found.extend(steps.map(|(step, _)| (lane, step)));
        }
        found
    }

    /// Whether two steps of a launch, or one step twice, store packets in the same place.
    pub(super) fn stores_packets_twice(&self) -> bool {
        self.launches.iter().any(|launch| {
            let mut stored = HashSet::new();
            let moves = launch.iter().flatten().flatten();
            let mut targets = moves.flat_map(|act| match act {
                Act::Move(it) => it
                    .targets
                    .iter()
                    .map(|place| (*place, place.elements))
                    .collect(),
                _ => Vec::new(),
            });
            targets.any(|(place, elements)| {
                let tensors = self.ranks[place.rank].tensors.len();
                let Some(scratch) = place.memory.checked_sub(tensors) else {
                    return false;
                };
                let program = &self.ranks[place.rank];
                let packets = program.scratch[scratch].packing.is_packets();
                let length = packet(program, scratch);
                let (first, end) = (
                    place.from / length,
                    (place.from + elements).div_ceil(length),
                );
                let whole = (first..end).filter(|_| packets && elements > 0);
                let mut again = false;
                whole.for_each(|at| again |= !stored.insert((place.rank, scratch, at)));
                again
            })
        })
    }

    /// Whether two lanes of a launch signal the same lane of the same rank.
    pub(super) fn has_crossed_signals(&self) -> bool {
        self.launches.iter().flatten().any(|lanes| {
            let signals = lanes.iter().enumerate().flat_map(|(from, acts)| {
                let to = acts.iter().filter_map(|act| match act {
                    Act::Signal { peer, lane } => Some((*peer, *lane)),
                    _ => None,
                });
                to.map(move |to| (to, from))
            });
            let mut senders = HashMap::new();
            let mut signals = signals.map(|(to, from)| *senders.entry(to).or_insert(from) != from);
            signals.any(|other| other)
        })
    }

    /// Whether what a kernel accesses of the program's tensors differs from launch to launch.
    pub(super) fn is_unsteady(&self) -> bool {
        let accesses = |launch: &Vec<Vec<Vec<Act>>>| {
            let mut all = Vec::new();
            for act in launch.iter().flatten().flatten() {
                if let Act::Move(it) = act {
                    let operands = it.targets.iter().map(|place| (place, true));
                    let operands = operands.chain(it.sources.iter().map(|place| (place, false)));
                    let own = operands.filter(|(p, _)| p.memory < self.ranks[p.rank].tensors.len());
                    all.extend(own.map(|(place, written)| (*place, place.elements, written)));
                }
            }
            all
        };
        let mut later = self.launches.iter().enumerate().skip(self.kernels);
        later.any(|(number, launch)| {
            accesses(launch) != accesses(&self.launches[number % self.kernels])
        })
    }
}

fn sections(program: &RankProgram) -> Vec<&SectionInstance> {
    let operations = program.operations.iter();
    let kernels = operations.filter_map(|operation| match &operation.kind {
        OperationKind::Kernel(section) => Some(&**section),
        _ => None,
    });
    kernels.collect()
}

fn act(kind: &LaneStepKind, ranks: &[RankProgram], sections: &[&SectionInstance]) -> Act {
    let operand = |part: &Part| {
        let tensor = &sections[part.rank].tensors[part.tensor];
        let memory = match tensor.memory {
            SectionMemory::Tensor(id) => id,
            SectionMemory::Scratch(id) => ranks[part.rank].tensors.len() + id,
        };
        Operand {
            rank: part.rank,
            memory,
            from: tensor.offset + part.offset,
            elements: part.elements,
        }
    };
    match kind {
        LaneStepKind::Signal { peer, lane } => Act::Signal {
            peer: *peer,
            lane: *lane,
        },
        LaneStepKind::Wait(peer) => Act::Wait(*peer),
        LaneStepKind::Value { number, source, .. } => Act::Value(*number, operand(source)),
        LaneStepKind::Announce { values, target, .. } => {
            Act::Move(announcement(values, vec![operand(target)], Vec::new()))
        }
        LaneStepKind::Agree { values, source, .. } => {
            Act::Move(announcement(values, Vec::new(), vec![operand(source)]))
        }
        LaneStepKind::Move {
            operator,
            dtype,
            rows,
            elements,
            targets,
            sources,
        } => {
            let packets = targets.iter().chain(sources).map(|part| {
                let tensor = &sections[part.rank].tensors[part.tensor];
                match tensor.memory {
                    SectionMemory::Tensor(_) => 1,
                    SectionMemory::Scratch(id) => packet(&ranks[part.rank], id),
                }
            });
            Act::Move(Movement {
                operator: *operator,
                dtype: *dtype,
                elements: *elements,
                function: rows.as_ref().map(|it| Rows {
                    function: functions::of(&it.function.name),
                    arguments: it.arguments.iter().map(combined).collect(),
                    results: (0..)
                        .zip(&it.results)
                        .flat_map(|(result, count)| vec![result; *count])
                        .collect(),
                }),
                unit: match rows {
                    Some(_) => (*elements).max(1),
                    None => packets.fold(1, least_common_multiple),
                },
                targets: targets.iter().map(operand).collect(),
                sources: sources.iter().map(operand).collect(),
                words: Vec::new(),
            })
        }
    }
}

fn combined(argument: &RowArgument) -> (usize, ReduceOp) {
    match argument {
        RowArgument::Sources(count, operator) => (*count, *operator),
        RowArgument::Number(_) => panic!("samples give functions no numbers"),
    }
}

/// Words that a rank stores at another, or that it expects of one. Two fit in a packet.
fn announcement(values: &[u32], targets: Vec<Operand>, sources: Vec<Operand>) -> Movement {
    Movement {
        operator: None,
        dtype: DType::I32,
        elements: values.len(),
        function: None,
        unit: 2,
        targets,
        sources,
        words: values.iter().map(|word| f64::from(*word as i32)).collect(),
    }
}

/// How many elements a packet of scratch holds; 1 where it is plain.
pub(super) fn packet(program: &RankProgram, scratch: usize) -> usize {
    let scratch = &program.scratch[scratch];
    (scratch.packing.packet().0 / scratch.dtype.size()).max(1)
}

const fn least_common_multiple(a: usize, b: usize) -> usize {
    let (mut x, mut y) = (a, b);
    while y > 0 {
        (x, y) = (y, x % y);
    }
    a / x * b
}
