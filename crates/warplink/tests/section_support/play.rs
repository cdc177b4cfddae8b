//! An order of the steps of all lanes.
//!
//! It shares nothing with the verifier. Lanes take one small step at a time, and a [`Schedule`] says which
//! is next. What a lane stores is on its way for a while: it lands in any order, but the stores of a lane to
//! one place in theirs, and all of a lane's stores before its next signal. What it loads may be loaded early,
//! down to its last wait, and what a rank's stream did may be seen by others as late as a signal, since packets
//! order nothing else. The elements of a step are moved in any order, a
//! packet as a whole, some of them after later steps of the lane: its threads meet at signals, waits and such only. Between launches, the caller's stream takes the outputs, sets other inputs
//! and spoils the rest.
//!
//! Every cell of memory remembers the order of its writes, and every read the writes before it. Two plays
//! whose [`Outcome::order`] differs are a race, whether or not a value shows it.

mod behind;
mod lane;
mod values;

use super::memory::{Memory, rounded};
use super::stage::{Act, Movement, Operand, Stage};
use crate::program_support::interpreter::{Fault, Outcome, Pick, Random, mix};
use lane::{Lane, Store, Stored};
use rustc_hash::{FxHashMap, FxHashSet};
use warplink::DType;
use warplink::device::ReduceOp;

/// Step to do last: only where nobody else can take one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hold {
    /// A step.
    Step(StepId),
    /// Stores of a step become visible last.
    Stores(StepId),
    /// A rank goes on to its next launch last.
    Launch(usize),
    /// Everything of a rank.
    Rank(usize),
}

/// A step of a lane in a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StepId {
    pub(crate) rank: usize,
    pub(crate) launch: usize,
    pub(crate) lane: usize,
    pub(crate) step: usize,
}

/// When what is stored lands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Landing {
    /// Before any lane goes on.
    Soon,
    /// At any time.
    Any,
    /// When no lane can go on otherwise.
    Late,
}

/// When some threads of a lane go on to its next step while others are behind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lag {
    Never,
    /// Once all packets that the step waits for have come.
    Behind,
    /// Also while threads wait for packets: others have none to wait for.
    Waiting,
}

/// An order of steps.
#[derive(Clone, Debug)]
pub(crate) struct Schedule {
    pub(crate) pick: Pick,
    pub(crate) landing: Landing,
    /// Whether plain memory is loaded as early as it may be.
    pub(crate) early: bool,
    pub(crate) lag: Lag,
    pub(crate) held: Vec<Hold>,
    pub(crate) seed: u64,
}

impl Schedule {
    pub(crate) fn new(seed: u64) -> Self {
        Self {
            pick: [Pick::Uniform, Pick::Priorities][(seed % 2) as usize],
            landing: [Landing::Late, Landing::Any, Landing::Soon][(seed % 3) as usize],
            early: seed % 4 == 3,
            lag: match seed % 5 {
                3 => Lag::Behind,
                4 => Lag::Waiting,
                _ => Lag::Never,
            },
            held: Vec::new(),
            seed,
        }
    }

    /// The same where all threads of a lane wait together, so that it hangs where one of them does.
    pub(crate) fn waiting_together(mut self) -> Self {
        if self.lag == Lag::Waiting {
            self.lag = Lag::Behind;
        }
        self
    }

    pub(crate) fn holding(mut self, held: impl IntoIterator<Item = Hold>) -> Self {
        self.held.extend(held);
        self
    }
}

/// Who may take a step.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Agent {
    Lane(usize, usize),
    Landing(usize, usize),
    Stream(usize),
}

struct Play<'a> {
    stage: &'a Stage<'a>,
    schedule: &'a Schedule,
    random: Random,
    memory: Memory,
    /// For each rank, lane and sender: the runs that sent signals, and how many were waited for.
    words: FxHashMap<(usize, usize, usize), (Vec<usize>, usize)>,
    lanes: Vec<Vec<Lane>>,
    /// The launch that each rank is at; none before its stream has come to the first.
    launch: Vec<Option<usize>>,
    outputs: Vec<Vec<f64>>,
    turns: u64,
}

impl Stage<'_> {
    /// Whether no integer is out of its range, which another one may bound.
    pub(crate) fn fits(&self) -> bool {
        let faults = self.play(&Schedule::new(1)).faults;
        let is_out = |fault: &Fault| matches!(fault, Fault::OutOfRange { .. });
        !faults.iter().any(is_out)
    }

    pub(crate) fn play(&self, schedule: &Schedule) -> Outcome {
        let world = self.ranks.len();
        let mut play = Play {
            stage: self,
            schedule,
            random: Random::new(mix(schedule.seed ^ 0x5ec7)),
            memory: Memory::new(self.ranks, self.kernels, self.choice.beyond.is_some()),
            words: FxHashMap::default(),
            lanes: (0..world).map(|_| Vec::new()).collect(),
            launch: vec![None; world],
            outputs: vec![Vec::new(); self.launches() / self.kernels * world],
            turns: 0,
        };
        while play.turn(false) || play.turn(true) {}
        self.spend(play.turns);
        (0..world).for_each(|rank| play.memory.settle(rank));
        for ((rank, _, _), (came, awaited)) in &play.words {
            if came.len() > *awaited {
                play.memory.faults.insert(Fault::LostSignal { rank: *rank });
            }
        }
        Outcome {
            stuck: play.launch.iter().any(|at| *at != Some(self.launches())),
            stored: self
                .ranks
                .iter()
                .map(|program| play.memory.stored(program))
                .collect(),
            order: play.memory.order(),
            outputs: play.outputs,
            faults: play.memory.faults,
        }
    }
}

impl Play<'_> {
    /// Somebody takes a step; `false` where nobody can.
    fn turn(&mut self, held_too: bool) -> bool {
        self.turns += 1;
        let mut agents = Vec::new();
        for (rank, lanes) in self.lanes.iter().enumerate() {
            if self.launch[rank] != Some(self.stage.launches()) {
                let mut over = !self.fails(rank);
                for (number, lane) in lanes.iter().enumerate() {
                    let left = lane.next < self.acts(rank, number).len();
                    let goes_on = left && !lane.fails || !lane.behind.is_empty();
                    let lands = !lane.stores.is_empty();
                    agents.extend(goes_on.then_some(Agent::Lane(rank, number)));
                    agents.extend(lands.then_some(Agent::Landing(rank, number)));
                    over &= !goes_on && !lands;
                }
                agents.extend(over.then_some(Agent::Stream(rank)));
            }
        }
        match self.schedule.pick {
            Pick::Uniform => self.random.shuffle(&mut agents),
            Pick::Priorities => {
                // For a while the same come first.
                let now = mix(self.schedule.seed ^ (self.turns >> 7));
                agents.sort_by_cached_key(|agent| mix(now ^ agent.number()));
            }
        }
        let lands = |agent: &Agent| matches!(agent, Agent::Landing(..));
        match self.schedule.landing {
            Landing::Soon => agents.sort_by_key(|agent| !lands(agent)),
            Landing::Late => agents.sort_by_key(lands),
            Landing::Any => {}
        }
        agents.into_iter().any(|agent| self.act(agent, held_too))
    }

    fn is_held(&self, hold: Hold, held_too: bool) -> bool {
        !held_too && self.schedule.held.contains(&hold)
    }

    fn act(&mut self, agent: Agent, held_too: bool) -> bool {
        let (Agent::Lane(rank, _) | Agent::Landing(rank, _) | Agent::Stream(rank)) = agent;
        if self.is_held(Hold::Rank(rank), held_too) {
            return false;
        }
        match agent {
            Agent::Stream(_) => {
                let goes_on = !self.is_held(Hold::Launch(rank), held_too);
                if goes_on {
                    self.next_launch(rank);
                }
                goes_on
            }
            Agent::Landing(_, lane) => self.land_some(rank, lane, held_too),
            Agent::Lane(_, lane) => self.step(rank, lane, held_too),
        }
    }

    /// Ends a launch, whose lanes are done, and starts the next one.
    fn next_launch(&mut self, rank: usize) {
        let stage = self.stage;
        let program = &stage.ranks[rank];
        let ended = self.launch[rank];
        if let Some(launch) = ended.filter(|launch| (launch + 1).is_multiple_of(stage.kernels)) {
            let place = launch / stage.kernels * stage.ranks.len() + rank;
            self.outputs[place] = self.memory.take_outputs(program, launch);
        }
        let next = ended.map_or(0, |launch| launch + 1);
        if next.is_multiple_of(stage.kernels) {
            self.memory
                .prepare(program, next / stage.kernels, stage.choice);
        }
        self.memory.touch(program, next);
        if self.schedule.landing != Landing::Late {
            self.memory.settle(rank);
        }
        self.launch[rank] = Some(next);
        let lanes = stage.lanes(next, rank);
        self.lanes[rank] = (0..lanes).map(|_| Lane::default()).collect();
        for lane in 0..lanes {
            self.load_early(rank, next, lane);
        }
    }

    /// Lets some of a lane's stores land.
    fn land_some(&mut self, rank: usize, lane: usize, held_too: bool) -> bool {
        let wanted = 1 + self.random.below(12);
        let mut landed = 0;
        while landed < wanted && self.land_one(rank, lane, held_too) {
            landed += 1;
        }
        landed > 0
    }

    fn land_one(&mut self, rank: usize, lane: usize, held_too: bool) -> bool {
        let count = self.lanes[rank][lane].stores.len();
        let first = self.random.below(count);
        let mut places = (first..count).chain(0..first);
        let Some(place) = places.find(|place| self.may_land(rank, lane, *place, held_too)) else {
            return false;
        };
        self.land(rank, lane, place);
        true
    }

    fn may_land(&self, rank: usize, lane: usize, place: usize, held_too: bool) -> bool {
        let stores = &self.lanes[rank][lane].stores;
        if self.is_held(Hold::Stores(stores[place].step), held_too) {
            return false;
        }
        match &stores[place].what {
            Stored::Signal { .. } => place == 0,
            Stored::Cell {
                place: of, cell, ..
            } => {
                let count = self.lanes[rank][lane].stores_to(of, *cell);
                count == 1 || !stores[..place].iter().any(|other| other.is_at(of, *cell))
            }
        }
    }

    fn land(&mut self, rank: usize, lane: usize, place: usize) {
        let store = self.lanes[rank][lane].take_store(place);
        match store.what {
            Stored::Signal { peer, to } => {
                self.memory.settle(rank);
                let run = store.step.launch / self.stage.kernels;
                let word = self.words.entry((peer, to, rank)).or_default();
                word.0.push(run);
            }
            Stored::Cell {
                by,
                place,
                cell,
                flag,
                values,
            } => {
                let by = (by, rank, store.step.launch);
                self.memory.store(by, &place, cell, (flag, &values));
            }
        }
    }

    /// The next step of a lane, or some of it.
    fn step(&mut self, rank: usize, lane: usize, held_too: bool) -> bool {
        let Some(launch) = self.launch[rank] else {
            return false;
        };
        let id = StepId {
            rank,
            launch,
            lane,
            step: self.lanes[rank][lane].next,
        };
        let steps = self.steps(id);
        let act = steps.acts.get(id.step);
        let Some(act) = act.filter(|_| !self.lanes[rank][lane].fails) else {
            return self.catch_up(rank, lane, held_too);
        };
        if let Some(moved) = self.wait_for_threads(id, act, held_too) {
            return moved;
        }
        if self.is_held(Hold::Step(id), held_too) {
            return self.leave_behind(id, act) || self.catch_up(rank, lane, held_too);
        }
        match act {
            Act::Signal { peer, lane: to } => {
                let what = Stored::Signal {
                    peer: *peer,
                    to: *to,
                };
                self.lanes[rank][lane].push_store(Store { step: id, what });
            }
            Act::Wait(from) => {
                let word = self.words.entry((rank, lane, *from)).or_default();
                let Some(sent) = word.0.get(word.1) else {
                    return false;
                };
                if *sent != launch / self.stage.kernels {
                    self.memory.faults.insert(Fault::OutlivingSignal { rank });
                }
                word.1 += 1;
            }
            Act::Value(read) => {
                if !self.read_value(id, read) {
                    return false;
                }
            }
            Act::Move(it) => {
                let units = self.lanes[rank][lane].units.take();
                let mut units = units.unwrap_or_else(|| {
                    let mut all: Vec<usize> = (0..it.elements.div_ceil(it.unit)).collect();
                    self.random.shuffle(&mut all);
                    all
                });
                let (before, at_once) = (units.len(), 1 + self.random.below(units.len()));
                let mut place = 0;
                while place < units.len() && before - units.len() < at_once {
                    if self.unit(id, it, units[place]) {
                        units.remove(place);
                    } else {
                        place += 1;
                    }
                }
                let (moved, left) = (units.len() < before, !units.is_empty());
                self.lanes[rank][lane].units = Some(units).filter(|_| left);
                if left {
                    let goes_on = self.random.chance(2) && self.leave_behind(id, act);
                    return moved || goes_on || self.catch_up(rank, lane, held_too);
                }
            }
        }
        self.lanes[rank][lane].next += 1;
        if matches!(act, Act::Wait(_)) {
            self.load_early(rank, launch, lane);
        }
        true
    }

    /// Loads what a lane loads before its next wait, but what it stores itself before that.
    fn load_early(&mut self, rank: usize, launch: usize, lane: usize) {
        if !self.schedule.early {
            return;
        }
        let mut stored = FxHashSet::default();
        let first = StepId {
            rank,
            launch,
            lane,
            step: self.lanes[rank][lane].next,
        };
        let steps = self.steps(first);
        for (step, act) in steps.acts.iter().enumerate().skip(first.step) {
            let it = match act {
                Act::Signal { .. } | Act::Value(_) => continue,
                Act::Wait(_) => break,
                Act::Move(it) => it,
            };
            let id = StepId { step, ..first };
            let place = |play: &Self, of: &Operand, element: usize| {
                (of.rank, of.memory, play.memory.cell(of, element).0)
            };
            for (number, source) in it.sources.iter().enumerate() {
                if self.memory.packet(source) > 0 {
                    continue;
                }
                for element in 0..source.elements {
                    let place = place(self, source, element);
                    if stored.contains(&place) {
                        continue;
                    }
                    while let Some(own) = self.own_store(id, source, place.2) {
                        self.land(rank, lane, own);
                    }
                    let by = (id.by(element / it.unit, number), rank, launch);
                    let value = self.memory.load(by, source, element);
                    let early = &mut self.lanes[rank][lane].early;
                    early.insert((step, number, element), value);
                }
            }
            for target in &it.targets {
                stored.extend((0..target.elements).map(|element| place(self, target, element)));
            }
        }
    }

    /// Moves some elements of a step, if all packets with them are there.
    fn unit(&mut self, id: StepId, it: &Movement, unit: usize) -> bool {
        let flag = id.launch as u64 + 1;
        let elements = unit * it.unit..((unit + 1) * it.unit).min(it.elements);
        // Of a row, all at once; single values are operands of it, too.
        let of = |place: &Operand| match it.function {
            Some(_) => 0..place.elements,
            None => elements.clone(),
        };
        for source in &it.sources {
            for element in of(source) {
                let (cell, _) = self.memory.cell(source, element);
                // A lane sees its own stores.
                while let Some(own) = self.own_store(id, source, cell) {
                    self.land(id.rank, id.lane, own);
                }
                if self.memory.packet(source) > 0 && self.memory.flag(source, cell) != flag {
                    return false;
                }
            }
        }
        let mut results = Vec::new();
        if let Some(call) = &it.function {
            let mut sources = it.sources.iter().enumerate();
            let mut arguments = Vec::with_capacity(call.arguments.len());
            for (count, operator) in &call.arguments {
                let rows = sources.by_ref().take(*count).map(|(number, source)| {
                    let row =
                        of(source).map(|element| self.loaded(id, (unit, number), source, element));
                    row.collect::<Vec<f64>>()
                });
                let join = |all: Vec<f64>, row: Vec<f64>| {
                    let both = all.into_iter().zip(row);
                    both.map(|(a, b)| joined(Some(*operator), DType::F32, a, b))
                        .collect()
                };
                arguments.push(rows.reduce(join).unwrap_or_default());
            }
            let given = (call.function)(&arguments);
            results = call
                .results
                .iter()
                .map(|result| given[*result].clone())
                .collect();
        }
        let mut values = Vec::new();
        for element in elements.clone().filter(|_| it.function.is_none()) {
            let mut all = Vec::with_capacity(it.sources.len());
            for (number, source) in it.sources.iter().enumerate() {
                all.push(self.loaded(id, (unit, number), source, element));
            }
            values.push(match (it.words.get(element), all.first()) {
                (Some(word), None) => *word,
                (Some(word), Some(found)) => {
                    if word != found {
                        let rank = id.rank;
                        self.memory.faults.insert(Fault::Disagreement { rank });
                    }
                    *found
                }
                (None, _) => combined(it, &all),
            });
        }
        let mut order: Vec<usize> = (0..it.targets.len()).collect();
        self.random.shuffle(&mut order);
        for number in order {
            let target = it.targets[number];
            let packet = self.memory.packet(&target);
            let values = results.get(number).unwrap_or(&values);
            for (place, some) in values.chunks(packet.max(1)).enumerate() {
                let element = elements.start + place * packet.max(1);
                let (cell, _) = self.memory.cell(&target, element);
                let what = Stored::Cell {
                    by: id.by(unit, 128 + number),
                    place: target,
                    cell,
                    flag: if packet > 0 { flag } else { 0 },
                    values: some.to_vec(),
                };
                self.lanes[id.rank][id.lane].push_store(Store { step: id, what });
            }
        }
        true
    }

    /// An element of a source, which may have been loaded early.
    fn loaded(
        &mut self,
        id: StepId,
        (unit, number): (usize, usize),
        source: &Operand,
        element: usize,
    ) -> f64 {
        let early = &mut self.lanes[id.rank][id.lane].early;
        match early.remove(&(id.step, number, element)) {
            Some(value) => value,
            None => {
                let by = (id.by(unit, number), id.rank, id.launch);
                self.memory.load(by, source, element)
            }
        }
    }

    /// The first store of a lane to a cell that is on its way.
    fn own_store(&self, id: StepId, place: &Operand, cell: usize) -> Option<usize> {
        let lane = &self.lanes[id.rank][id.lane];
        if lane.stores_to(place, cell) == 0 {
            return None;
        }
        lane.stores
            .iter()
            .position(|store| store.is_at(place, cell))
    }
}

impl StepId {
    /// Stands for an operand of a unit of the step.
    fn by(self, unit: usize, operand: usize) -> u64 {
        let place = (self.rank << 40) | (self.launch << 28) | (self.lane << 20) | self.step;
        mix(mix(place as u64) ^ ((unit << 8) | operand) as u64)
    }
}

impl Agent {
    const fn number(self) -> u64 {
        let (kind, rank, lane) = match self {
            Self::Lane(rank, lane) => (0, rank, lane),
            Self::Landing(rank, lane) => (1, rank, lane),
            Self::Stream(rank) => (2, rank, 0),
        };
        (kind << 32 | rank << 16 | lane) as u64
    }
}

/// Sums of 16-bit floats are in single precision and rounded at the end, others as they come.
fn combined(it: &Movement, values: &[f64]) -> f64 {
    let between = match it.dtype {
        DType::BF16 | DType::F16 => DType::F32,
        other => other,
    };
    let join = |a: f64, b: f64| joined(it.operator, between, a, b);
    let all = values.iter().copied().reduce(join);
    rounded(it.dtype, all.unwrap_or(f64::NAN))
}

fn joined(operator: Option<ReduceOp>, dtype: DType, a: f64, b: f64) -> f64 {
    match operator {
        Some(ReduceOp::Max) => a.max(b),
        Some(ReduceOp::Min) => a.min(b),
        _ => rounded(dtype, a + b),
    }
}
