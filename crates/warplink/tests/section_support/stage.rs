//! The steps of all lanes in all launches, as accesses to cells of memory.

mod acts;

use super::functions::Function;
use super::read::Read;
use crate::program_support::interpreter::Choice;
use acts::act;
use rustc_hash::FxHashMap;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::rc::Rc;
use warplink::DType;
use warplink::device::ReduceOp;
use warplink::program::ir::Role;
use warplink::program::section::{
    LaneStep, LaneStepKind, Part, ReadWord, RowArgument, SectionInstance, SectionMemory,
};
use warplink::program::{Diagnostic, DiagnosticKind, RankProgram, Site};

/// How many combinations of values that break a rule are tried of each lane until others lead on.
const MAX_WRONG: usize = 100;

/// The steps of the lanes, for each launch and rank, with integers that lanes read chosen in one way.
pub(crate) struct Stage<'a> {
    pub(super) ranks: &'a [RankProgram],
    /// How many kernels a run of the program launches.
    pub(super) kernels: usize,
    launches: Rc<Launches>,
    pub(super) choice: Choice,
    /// Whether lanes read integers: then `launches` has their steps up to the first read.
    pub(super) reads_values: bool,
    /// The steps after reads, shared by all choices.
    expanded: Rc<RefCell<Expanded>>,
    /// The last steps that each lane of a launch was seen to have under this choice.
    seen: RefCell<FxHashMap<LaneOf, Rc<Steps>>>,
    spent: Rc<Cell<u64>>,
}

/// A launch, a rank and a lane.
type LaneOf = (usize, usize, usize);

/// For each launch and rank, the steps of its lanes.
type Launches = Vec<Vec<Vec<Rc<Steps>>>>;

/// Steps by the integers that were read before.
type Expanded = FxHashMap<(LaneOf, Vec<i64>), Result<Rc<Steps>, DiagnosticKind>>;

/// The steps of a lane in a launch, and where they stand.
#[derive(Debug)]
pub(super) struct Steps {
    pub(super) acts: Vec<Act>,
    sites: Vec<Site>,
}

/// A step of a lane.
#[derive(Clone, Debug)]
pub(super) enum Act {
    Signal { peer: usize, lane: usize },
    Wait(usize),
    Value(Read),
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
    /// Whether all threads of the lane meet for it: an announcement of tensors, or an agreement on some.
    pub(super) meets: bool,
}

/// What lanes do.
#[derive(Default)]
struct Survey {
    /// Their reads of integers.
    reads: Vec<Read>,
    /// The memory that they copy, target first.
    copies: BTreeSet<(Memory, Memory)>,
    /// The rules that they break.
    rules: Vec<DiagnosticKind>,
}

/// A rank and its tensor, or behind its last tensor, scratch.
type Memory = (usize, usize);

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

impl Operand {
    const fn memory(&self) -> Memory {
        (self.rank, self.memory)
    }
}

impl<'a> Stage<'a> {
    /// The steps of `runs` runs.
    ///
    /// # Errors
    /// The rule that a lane's steps violate.
    pub(crate) fn new(
        ranks: &'a [RankProgram],
        runs: usize,
        choice: Choice,
    ) -> Result<Self, Diagnostic> {
        let kernels = ranks[0].sections().count();
        let reads = |section: &SectionInstance| {
            let text = format!("{:?}", section.section.body);
            text.contains("Value(") || text.contains("Index(Element(")
        };
        let mut stage = Self {
            ranks,
            kernels,
            launches: Rc::default(),
            choice,
            reads_values: ranks[0].sections().any(reads),
            expanded: Rc::default(),
            seen: RefCell::default(),
            spent: Rc::default(),
        };
        let of_launch = |launch: usize| {
            let of_rank = |(rank, program): (usize, &RankProgram)| {
                let lanes = 0..section(program, launch % kernels).lanes;
                let steps = |lane| Ok(Rc::new(stage.resolved((launch, rank, lane), &[])?));
                lanes.map(steps).collect()
            };
            ranks.iter().enumerate().map(of_rank).collect()
        };
        let launches = (0..runs * kernels).map(of_launch);
        stage.launches = Rc::new(launches.collect::<Result<Launches, Diagnostic>>()?);
        Ok(stage)
    }

    /// The same with another choice.
    pub(crate) fn with(&self, choice: Choice) -> Self {
        Self {
            launches: Rc::clone(&self.launches),
            choice,
            expanded: Rc::clone(&self.expanded),
            seen: RefCell::default(),
            spent: Rc::clone(&self.spent),
            ..*self
        }
    }

    /// After how many runs the launches do the same again.
    pub(crate) fn period(ranks: &[RankProgram]) -> usize {
        let sections = ranks.iter().flat_map(RankProgram::sections);
        let periods = sections.map(|section| section.period as usize);
        periods.fold(1, |all, period| least_common_multiple(all, period.max(1)))
    }

    /// What lanes do that find nothing but 0 or nothing but the greatest values with which they can go on.
    fn survey(&self) -> Survey {
        let mut survey = Survey::default();
        for launch in 0..self.launches() {
            for rank in 0..self.ranks.len() {
                let ways = (0..self.lanes(launch, rank)).flat_map(|lane| [(lane, 0), (lane, 1)]);
                for (lane, share) in ways {
                    let (mut values, mut wrong) = (Vec::new(), 0);
                    loop {
                        let steps = match self.steps_after((launch, rank, lane), &values) {
                            Ok(steps) => steps,
                            Err(rule) => {
                                survey.rules.push(rule);
                                wrong += 1;
                                // Lesser values may lead on, of this word or of an earlier one.
                                while values.last() == Some(&0) {
                                    values.pop();
                                }
                                match values.last_mut().filter(|_| wrong < MAX_WRONG) {
                                    Some(last) => *last -= 1,
                                    None => break,
                                }
                                continue;
                            }
                        };
                        survey.copies.extend(steps.acts.iter().flat_map(copies));
                        let next = steps.acts.iter().find_map(|act| match act {
                            Act::Value(next) if next.number == values.len() => Some(*next),
                            _ => None,
                        });
                        let Some(next) = next else {
                            break;
                        };
                        survey.reads.push(next);
                        if next.finds_nothing() {
                            survey.rules.push(DiagnosticKind::OutOfBounds);
                            break;
                        }
                        values.push(next.most * share);
                    }
                }
            }
        }
        survey
    }

    /// Whether lanes break a rule if they get to read 0 everywhere, or the greatest values.
    pub(crate) fn breaks(&self, rule: DiagnosticKind) -> bool {
        self.survey().rules.contains(&rule)
    }

    /// The programs with bounds for inputs that lanes read in copies alone, if there are any: the least of those of the
    /// copies.
    pub(crate) fn bounded(&self) -> Option<Vec<RankProgram>> {
        let Survey { reads, copies, .. } = self.survey();
        let mut bounds: BTreeMap<Memory, i64> = BTreeMap::new();
        // Words among which lanes look for some may be anything.
        for read in reads.into_iter().filter(|read| read.among.is_none()) {
            let most = bounds.entry(read.word.memory()).or_insert(read.most);
            *most = read.most.min(*most);
        }
        spread(&mut bounds, &copies, i64::min);
        let mut ranks = self.ranks.to_vec();
        let mut any = false;
        for ((rank, memory), most) in bounds {
            if let Some(tensor) = ranks[rank].tensors.get_mut(memory)
                && (tensor.role, tensor.value_bound) == (Role::Input, None)
            {
                any = true;
                tensor.value_bound = Some(most);
            }
        }
        any.then_some(ranks)
    }

    /// The programs with the greatest bounds, if those differ: then values that each fit may not fit together.
    pub(crate) fn widened(&self) -> Option<Vec<RankProgram>> {
        let mut ranks = self.ranks.to_vec();
        let mut wider = false;
        let mut bounds: BTreeMap<Memory, i64> = BTreeMap::new();
        let Survey { reads, copies, .. } = self.survey();
        for read in reads.into_iter().filter(|read| read.among.is_none()) {
            let most = bounds.entry(read.word.memory()).or_insert(read.most);
            wider |= read.most != *most;
            *most = read.most.max(*most);
        }
        spread(&mut bounds, &copies, i64::max);
        for ((rank, memory), most) in bounds {
            if let Some(tensor) = ranks[rank].tensors.get_mut(memory) {
                wider |= tensor.value_bound != Some(most);
                tensor.value_bound = Some(most);
            }
        }
        wider.then_some(ranks)
    }

    /// How many turns were taken and steps were resolved so far, under all choices.
    pub(crate) fn spent(&self) -> u64 {
        self.spent.get()
    }

    pub(super) fn spend(&self, turns: u64) {
        self.spent.set(self.spent.get() + turns);
    }

    /// How many launches there are.
    pub(crate) fn launches(&self) -> usize {
        self.launches.len()
    }

    /// How many lanes a rank has in a launch.
    pub(super) fn lanes(&self, launch: usize, rank: usize) -> usize {
        self.launches.get(launch).map_or(0, |all| all[rank].len())
    }

    /// The steps of a lane, as far as they are known before it reads anything.
    pub(super) fn first_steps(&self, (launch, rank, lane): LaneOf) -> &Rc<Steps> {
        &self.launches[launch][rank][lane]
    }

    /// The steps of a lane that has read these integers, as far as they are known; else the rule that they break.
    pub(super) fn steps_after(
        &self,
        of: LaneOf,
        read: &[i64],
    ) -> Result<Rc<Steps>, DiagnosticKind> {
        let key = (of, read.to_vec());
        let known = self.expanded.borrow().get(&key).cloned();
        let steps = known.unwrap_or_else(|| {
            let steps = self.resolved(of, read);
            let steps = steps.map(Rc::new).map_err(|diagnostic| diagnostic.kind);
            self.spend(steps.as_ref().map_or(0, |steps| steps.acts.len() as u64));
            self.expanded.borrow_mut().insert(key, steps.clone());
            steps
        });
        if let Ok(steps) = &steps {
            self.seen.borrow_mut().insert(of, Rc::clone(steps));
        }
        steps
    }

    fn resolved(&self, (launch, rank, lane): LaneOf, read: &[i64]) -> Result<Steps, Diagnostic> {
        let ranks = self.ranks.iter();
        let of_launch = ranks.map(|program| section(program, launch % self.kernels));
        let of_launch: Vec<&SectionInstance> = of_launch.collect();
        let known = |word: &ReadWord| read.get(word.number).copied();
        let steps = of_launch[rank].steps_with(lane, launch as u64, &known)?;
        let resolve = |step: &LaneStep| act(&step.kind, self.ranks, &of_launch);
        Ok(Steps {
            acts: steps.iter().map(resolve).collect(),
            sites: steps.into_iter().map(|step| step.site).collect(),
        })
    }

    /// The steps of a lane, as far as they were seen.
    pub(super) fn steps(&self, of: LaneOf) -> Rc<Steps> {
        let seen = self.seen.borrow().get(&of).cloned();
        seen.unwrap_or_else(|| Rc::clone(self.first_steps(of)))
    }

    /// The steps of all lanes of a launch, as far as they were seen.
    fn steps_of(&self, launch: usize) -> Vec<Vec<Rc<Steps>>> {
        let ranks = 0..self.ranks.len();
        let of_rank = |rank: usize| {
            let lanes = 0..self.lanes(launch, rank);
            lanes.map(|lane| self.steps((launch, rank, lane))).collect()
        };
        ranks.map(of_rank).collect()
    }

    /// The lane and number of the steps that stand at a place of a launch.
    pub(super) fn steps_at(&self, launch: usize, rank: usize, site: &Site) -> Vec<(usize, usize)> {
        let mut found = Vec::new();
        for lane in 0..self.lanes(launch, rank) {
            let here = |other: &Site| {
                (other.line, other.column) == (site.line, site.column)
                    && (self.reads_values || site.indices.starts_with(&other.indices))
            };
            let steps = self.steps((launch, rank, lane));
            let sites = steps.sites.iter().enumerate();
            let steps = sites.filter(|(_, other)| here(other));
            found.extend(steps.map(|(step, _)| (lane, step)));
        }
        found
    }

    /// Whether two steps of a launch, or one step twice, store packets in the same place.
    pub(super) fn stores_packets_twice(&self) -> bool {
        (0..self.launches()).any(|launch| {
            let mut stored = HashSet::new();
            let launch = self.steps_of(launch);
            let moves = launch.iter().flatten().flat_map(|lane| &lane.acts);
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
        let mut launches = (0..self.launches()).flat_map(|launch| self.steps_of(launch));
        launches.any(|lanes| {
            let signals = lanes.iter().enumerate().flat_map(|(from, steps)| {
                let to = steps.acts.iter().filter_map(|act| match act {
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

    /// Whether what a kernel accesses of the program's tensors, as far as it was seen, differs from launch to launch.
    pub(super) fn is_unsteady(&self) -> bool {
        let accesses = |launch: usize| {
            let mut all = Vec::new();
            let lanes = self.steps_of(launch);
            for act in lanes.iter().flatten().flat_map(|lane| &lane.acts) {
                if let Act::Move(it) = act {
                    let operands = it.targets.iter().map(|place| (place, true));
                    let operands = operands.chain(it.sources.iter().map(|place| (place, false)));
                    let own = operands.filter(|(p, _)| p.memory < self.ranks[p.rank].tensors.len());
                    all.extend(own.map(|(place, written)| (*place, place.elements, written)));
                }
            }
            all
        };
        let mut later = self.kernels..self.launches.len();
        later.any(|launch| accesses(launch) != accesses(launch % self.kernels))
    }
}

/// A kernel section of a program.
fn section(program: &RankProgram, number: usize) -> &SectionInstance {
    program.sections().nth(number).unwrap()
}

/// Extends bounds of copies to what they are copied from, which may be copies as well.
fn spread(
    bounds: &mut BTreeMap<Memory, i64>,
    copies: &BTreeSet<(Memory, Memory)>,
    joined: fn(i64, i64) -> i64,
) {
    let mut found = true;
    while found {
        found = false;
        for (target, source) in copies {
            let Some(bound) = bounds.get(target).copied() else {
                continue;
            };
            let before = bounds.get(source).copied();
            let after = before.map_or(bound, |before| joined(before, bound));
            found |= before != Some(after);
            bounds.insert(*source, after);
        }
    }
}

/// The memory that a step copies, target first.
fn copies(act: &Act) -> Vec<(Memory, Memory)> {
    match act {
        Act::Move(it) if it.function.is_none() && it.words.is_empty() => match &it.sources[..] {
            [source] => {
                let targets = it.targets.iter();
                targets
                    .map(|target| (target.memory(), source.memory()))
                    .collect()
            }
            _ => Vec::new(),
        },
        _ => Vec::new(),
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
