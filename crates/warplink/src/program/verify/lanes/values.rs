//! Integers that lanes read from memory: what the verifier takes them for.
//!
//! A word stands for any value from 0 to the bound of its reader. Words are told apart by symbols: that of an input is the
//! same in a run, and a copy hands on the symbol of its source. Sections that read words are simulated under several
//! valuations, which give each symbol a value: the edges of its range in all words, and mixtures of them that differ
//! between ranks, words and launches.

use super::run::{LaneRun, RankMemory};
use crate::error::Rank;
use crate::program::ir::Role;
use crate::program::machine::Actor;
use crate::program::section::{LaneStepKind, Part, ReadWord, SectionInstance, SectionMemory};
use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};

/// Values that a simulation gives to the words that lanes read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in crate::program::verify) enum Valuation {
    /// The same edge of all ranges.
    Edge(usize),
    /// The greatest values on ranks of one parity, 0 on the others.
    Ranks(usize),
    /// The greatest values in tensors with this value of a bit of their number, 0 in the others: the bound of a word may
    /// be what another one leaves.
    Tensors(u32, usize),
    /// The greatest value for the first word of each tensor, 0 for the others.
    First,
    /// The same edge for all words of a launch.
    Launches,
    /// Any edge for any word.
    Mixed(usize),
}

impl Valuation {
    /// Those under which a section that reads words is simulated.
    pub(in crate::program::verify) const ALL: [Self; 18] = [
        Self::Edge(0),
        Self::Edge(3),
        Self::Edge(1),
        Self::Edge(2),
        Self::Ranks(0),
        Self::Ranks(1),
        Self::Tensors(0, 0),
        Self::Tensors(0, 1),
        Self::Tensors(1, 0),
        Self::Tensors(1, 1),
        Self::Tensors(2, 0),
        Self::Tensors(2, 1),
        Self::First,
        Self::Launches,
        Self::Mixed(0),
        Self::Mixed(1),
        Self::Mixed(2),
        Self::Mixed(3),
    ];

    /// Those needed for some sections: a single one if none of them reads words.
    pub(in crate::program::verify) fn of<'a>(
        mut sections: impl Iterator<Item = &'a SectionInstance>,
    ) -> &'static [Self] {
        let reads = sections.any(|section| !section.read_as_values().is_empty());
        if reads { &Self::ALL } else { &Self::ALL[..1] }
    }

    fn value(self, symbol: &Symbol, most: i64) -> i64 {
        let edge = |number: u64| match number % 5 {
            0 => 0,
            1 => 1.min(most),
            2 => (most - 1).max(0),
            3 => most,
            _ => most / 2,
        };
        let last = |is: bool| if is { most } else { 0 };
        match self {
            Self::Edge(number) => edge(number as u64),
            Self::Ranks(parity) => last(symbol.rank % 2 == parity),
            Self::Tensors(bit, value) => last(symbol.number() >> bit & 1 == value),
            Self::First => last(symbol.byte == 0),
            Self::Launches => edge(hash(&symbol.launch)),
            Self::Mixed(_) => edge(hash(&(self, symbol))),
        }
    }
}

/// Identity of the content of a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Symbol {
    launch: u32,
    rank: Rank,
    place: RankMemory,
    byte: usize,
    /// Step of the launch that computed it, if one did.
    step: Option<(u32, u32, u32)>,
}

impl Symbol {
    /// Number of its tensor.
    const fn number(&self) -> usize {
        match self.place {
            RankMemory::Tensor(id) => id,
            RankMemory::Area(_) => 0,
        }
    }
}

/// Lane of a launch: the launch, the rank and the lane.
type LaneOf = (u32, u32, u32);

/// Words that lanes read.
#[derive(Debug)]
pub(super) struct ReadWords {
    valuation: Valuation,
    /// Memory of each rank whose words any section reads.
    read: HashSet<(Rank, SectionMemory)>,
    /// Symbols that steps have stored, and the launch of the last of them.
    stored: HashMap<(Rank, RankMemory, usize), (Symbol, u32)>,
    /// Value of each symbol that was read.
    chosen: RefCell<HashMap<Symbol, i64>>,
    /// Values that lanes have read from memory that may change, by the number of the read.
    known: HashMap<LaneOf, BTreeMap<usize, i64>>,
}

impl ReadWords {
    pub(super) fn new<'a>(
        valuation: Valuation,
        sections: impl Iterator<Item = &'a SectionInstance>,
    ) -> Self {
        let read = sections.flat_map(|section| {
            let tensors = section.read_as_values().into_iter();
            let memory = move |tensor: usize| section.tensors[tensor].memory;
            // A name may mean other tensors on other ranks, which all have sections here.
            tensors.map(move |tensor| (section.rank, memory(tensor)))
        });
        Self {
            valuation,
            read: read.collect(),
            stored: HashMap::new(),
            chosen: RefCell::default(),
            known: HashMap::new(),
        }
    }

    /// Whether any section reads words.
    pub(super) fn are_read(&self) -> bool {
        !self.read.is_empty()
    }
}

impl LaneRun<'_> {
    /// Value of a word that a lane reads, once that is known.
    pub(super) fn value(&self, (launch, rank, lane): LaneOf, word: &ReadWord) -> Option<i64> {
        let known = self.words.known.get(&(launch, rank, lane));
        if let Some(value) = known.and_then(|known| known.get(&word.number)) {
            return Some(*value);
        }
        let section = self.section(launch as usize, rank as Rank);
        let constant = section.is_constant(&word.part);
        constant.then(|| self.valued(launch, &word.part, word.most))
    }

    /// Notes the value of a word at the step that reads it.
    pub(super) fn read_value(&mut self, actor: Actor, number: usize, source: &Part, most: i64) {
        let value = self.valued(actor.launch, source, most);
        let lane = (actor.launch, actor.rank, actor.lane);
        let known = self.words.known.entry(lane).or_default();
        known.insert(number, value);
    }

    fn valued(&self, launch: u32, word: &Part, most: i64) -> i64 {
        let symbol = self.symbol(launch, word);
        let mut chosen = self.words.chosen.borrow_mut();
        let value = || self.words.valuation.value(&symbol, most);
        *chosen.entry(symbol).or_insert_with(value)
    }

    /// Symbol of a word as it is now.
    fn symbol(&self, launch: u32, word: &Part) -> Symbol {
        let (place, bytes) = self.bytes_of(launch as usize, word);
        let byte = bytes.start;
        let mut since = launch;
        if let RankMemory::Tensor(id) = place
            && self.ranks[word.rank].tensors[id].role == Role::Input
        {
            since = self.begun(launch);
        }
        if let Some((symbol, stored)) = self.words.stored.get(&(word.rank, place, byte)) {
            // Between two launches, anything may have changed tensors.
            if *stored == launch || matches!(place, RankMemory::Area(_)) {
                return *symbol;
            }
        }
        Symbol {
            launch: since,
            rank: word.rank,
            place,
            byte,
            step: None,
        }
    }

    /// Notes what a step stores in words that lanes read.
    pub(super) fn store_words(&mut self, actor: Actor, step: &LaneStepKind) {
        let section = |part: &Part| self.section(actor.launch as usize, part.rank);
        let is_read = |part: &&Part| {
            let memory = section(part).tensors[part.tensor].memory;
            self.words.read.contains(&(part.rank, memory))
        };
        let copied = match step {
            LaneStepKind::Move {
                rows: None,
                sources,
                ..
            } if sources.len() == 1 => sources.first(),
            _ => None,
        };
        let mut stored = Vec::new();
        for target in step.targets().iter().filter(is_read) {
            for element in 0..target.elements {
                let word = target.piece(&(element..element + 1));
                let (place, bytes) = self.bytes_of(actor.launch as usize, &word);
                let symbol = match copied {
                    Some(source) => {
                        let source = source.piece(&(element..element + 1));
                        self.symbol(actor.launch, &source)
                    }
                    None => Symbol {
                        launch: actor.launch,
                        rank: word.rank,
                        place,
                        byte: bytes.start,
                        step: Some((actor.rank, actor.lane, actor.step)),
                    },
                };
                stored.push(((word.rank, place, bytes.start), (symbol, actor.launch)));
            }
        }
        self.words.stored.extend(stored);
    }
}

fn hash(of: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    of.hash(&mut hasher);
    hasher.finish()
}
