//! Values that the verifier assumes for integers that lanes read from memory.
//!
//! A word stands for any value from 0 to the bound of its reader. Words are told apart by symbols: that of an input is the
//! same in a run, and a copy hands on the symbol of its source. Sections that read words are simulated under several
//! valuations, which give each symbol a value: the edges of its range, or a number that the text compares it with, in all
//! words, and mixtures of them that differ between ranks, words and launches.
//!
//! Words that lanes search stand for any value: those at the edges of the ranges, in the same valuations. Their
//! numbers and positions follow from these values, so that they are consistent wherever such a word, or a copy of it, is
//! looked at. An integer that a lane stores has its value.

use super::JointLaunch;
use super::memory::RankMemory;
use crate::error::Rank;
use crate::program::section::{SectionInstance, SectionMemory, Thresholds};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
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
    /// As by ranks or any edges, but for memory with words that ranks compare, values that do not depend on the rank: launches in
    /// which these differ go no further.
    Agreed(usize),
    /// The same value for all words, as far as their bounds allow.
    All(i64),
    /// The same value for words of every other rank, and 0 or the greatest for others, in turns; for words that ranks compare, the
    /// value.
    Alternate(i64),
    /// The greatest values, and for words among which lanes look for some, all the same edge of what they look for.
    Matched(usize),
}

/// Maximum number of edges that are given to all such words.
// Each edge is one more simulation of all launches.
const MAX_EDGES: usize = 16;

/// Maximum number of thresholds that are given to all words whatever a simulation takes.
const MAX_THRESHOLDS: usize = 12;

/// Limit on the simulations with further values, and on the steps and operands in them: kernels of few steps, which are simulated
/// in no time, are with more values.
const MAX_FURTHER: usize = 192;
const MAX_FURTHER_STEPS: usize = 1 << 15;

/// The values below this are among the further ones, whatever the text compares.
const SMALL: i64 = 64;

/// Number of valuations in which words that are compared agree.
const AGREED: usize = 8;

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

    /// Those needed for sections that use words so: a single one if none of them reads any.
    pub(in crate::program::verify) fn of(uses: &WordUse) -> Vec<Self> {
        // Without such words all valuations are the same run.
        if uses.tracked.is_empty() {
            return vec![Self::ALL[0]];
        }
        let edges = 0..uses.edges.len().min(MAX_EDGES);
        let agreed = 0..if uses.compared.is_empty() { 0 } else { AGREED };
        let thresholds = uses.thresholds.iter().take(MAX_THRESHOLDS);
        Self::ALL
            .into_iter()
            .chain(agreed.map(Self::Agreed))
            .chain(edges.map(Self::Matched))
            .chain(thresholds.map(|value| Self::All(*value)))
            .collect()
    }

    /// Further ones, where a simulation takes `taken` steps and the greatest bound of a word is `most`: first those with the numbers
    /// of the text, then those with small values.
    pub(super) fn further(uses: &WordUse, taken: usize, most: i64) -> Vec<Self> {
        if uses.tracked.is_empty() {
            return Vec::new();
        }
        let known = uses.thresholds.iter().chain(&uses.varying).copied();
        let known: Vec<i64> = known.filter(|value| *value <= most).collect();
        let small = (0..SMALL.min(most.saturating_add(1))).filter(|value| !known.contains(value));
        let first = uses.thresholds.iter().take(MAX_THRESHOLDS);
        let first: Vec<Self> = first.map(|value| Self::All(*value)).collect();
        let values = known.iter().copied().chain(small);
        values
            .flat_map(|value| [Self::All(value), Self::Alternate(value)])
            .filter(|it| !first.contains(it))
            .take((MAX_FURTHER_STEPS / taken.max(1)).min(MAX_FURTHER))
            .collect()
    }

    /// The valuation of one word, and the symbol for which it gives the value.
    fn for_word(self, symbol: &Symbol, uses: &WordUse) -> (Self, Symbol) {
        let is_compared = uses.compared.contains(&(symbol.rank, symbol.place));
        let number = match self {
            Self::Agreed(number) => number,
            Self::Alternate(value) if is_compared => return (Self::All(value), *symbol),
            _ => return (self, *symbol),
        };
        // The same word of another rank has the same symbol then.
        let shared = Symbol {
            rank: 0,
            step: None,
            ..*symbol
        };
        let parity = Self::Ranks(number % 2);
        match (number, is_compared) {
            (0 | 1, true) => (Self::Edge(3), shared),
            (2 | 3, true) => (Self::Edge(0), shared),
            (0..4, false) => (parity, *symbol),
            (_, true) => (Self::Mixed(number), shared),
            (_, false) => (Self::Mixed(number), *symbol),
        }
    }

    /// A value of 0 to `most`: one of its edges, its middle, or one of the thresholds.
    pub(super) fn value(self, symbol: &Symbol, most: i64, uses: &WordUse) -> i64 {
        let (valuation, symbol) = self.for_word(symbol, uses);
        let thresholds = &uses.thresholds;
        let threshold = |number: usize| thresholds.get(number).map_or(most, |it| most.min(*it));
        if let Self::All(value) = valuation {
            return most.min(value);
        }
        if let Self::Alternate(value) = valuation {
            let turn = symbol.launch as usize;
            return match (symbol.rank + turn).is_multiple_of(2) {
                true => most.min(value),
                false if (turn / 2).is_multiple_of(2) => 0,
                false => most,
            };
        }
        let choices = match valuation {
            Self::Mixed(_) => 5 + thresholds.len() as u64,
            _ => 5,
        };
        valuation.one_of(&symbol, &|number| match number % choices {
            0 => 0,
            1 => 1.min(most),
            // A bound may be 0, and negative values are out of range.
            2 => (most - 1).max(0),
            3 => most,
            4 => most / 2,
            further => threshold(further as usize - 5),
        })
    }

    /// One of the values at the edges of what lanes look for.
    pub(super) fn among(self, symbol: &Symbol, uses: &WordUse) -> i64 {
        let (valuation, symbol) = self.for_word(symbol, uses);
        let values = &uses.edges;
        let last = values.len().saturating_sub(1);
        let at = |number: u64| match (valuation, number) {
            (Self::Mixed(_), number) => (number % values.len().max(1) as u64) as usize,
            (Self::Matched(edge), _) => edge,
            (_, number) => match number % 5 {
                0 => 0,
                1 => last.min(1),
                2 => last.saturating_sub(1),
                3 => last,
                _ => last / 2,
            },
        };
        valuation.one_of(&symbol, &|number| {
            values.get(at(number)).copied().unwrap_or(0)
        })
    }

    /// The value with a number, which the valuation gives the symbol: 0 is the least, 3 the greatest.
    fn one_of(self, symbol: &Symbol, numbered: &dyn Fn(u64) -> i64) -> i64 {
        let last = |is: bool| numbered(if is { 3 } else { 0 });
        match self {
            Self::Edge(number) => numbered(number as u64),
            Self::Ranks(parity) => last(symbol.rank % 2 == parity),
            Self::Tensors(bit, value) => last(symbol.number() >> bit & 1 == value),
            Self::First => last(symbol.byte == 0),
            Self::Launches => numbered(hash(&symbol.launch)),
            // Pseudo-random, but the same on every run of the verifier: `DefaultHasher::new` has fixed keys.
            Self::Mixed(_) => numbered(hash(&(self, symbol))),
            Self::Matched(_) | Self::All(_) | Self::Alternate(_) | Self::Agreed(_) => last(true),
        }
    }
}

/// Identity of the content of a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Symbol {
    pub(super) launch: u32,
    pub(super) rank: Rank,
    pub(super) place: RankMemory,
    pub(super) byte: usize,
    /// Step of the launch that computed it, if one did.
    pub(super) step: Option<(u32, u32, u32)>,
    /// The integer that the step stored, if it is known.
    pub(super) known: Option<i64>,
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
pub(super) type LaneOf = (u32, u32, u32);

/// What the sections of several kernels do with words: the same under every valuation.
#[derive(Debug, Default)]
pub(in crate::program::verify) struct WordUse {
    /// Memory of each rank whose words lanes read, and memory from which words may be copied there.
    pub(super) tracked: HashSet<(Rank, SectionMemory)>,
    /// Memory of each rank with words that lanes compare between ranks, by what they announce.
    pub(super) compared: HashSet<(Rank, RankMemory)>,
    /// Memory of each rank among whose words lanes look for some, and values at the edges of what they look for.
    pub(super) matched: HashSet<(Rank, RankMemory)>,
    pub(super) edges: Vec<i64>,
    /// Values at which lanes may do something else, and further ones, which follow from lanes or launches.
    pub(super) thresholds: Vec<i64>,
    pub(super) varying: Vec<i64>,
}

impl WordUse {
    pub(super) fn of(kernels: &[JointLaunch<'_>]) -> Self {
        let sections = kernels.iter().flat_map(|kernel| &kernel.sections).copied();
        let memory = |of: fn(&SectionInstance) -> Vec<usize>| {
            let places = sections.clone().flat_map(|section| {
                let tensors = of(section).into_iter();
                // A name may mean other tensors on other ranks, which all have sections here.
                tensors.map(|tensor| (section.rank, section.tensors[tensor].memory))
            });
            with_sources(places.collect(), kernels)
        };
        let tracked = memory(SectionInstance::read_as_values);
        let compared = memory(SectionInstance::compared).into_iter();
        let compared = compared.filter_map(|(rank, memory)| Some((rank, tensor(memory)?)));
        let mut all = Self {
            tracked,
            compared: compared.collect(),
            ..Self::default()
        };
        if all.tracked.is_empty() {
            return all;
        }
        let found: Vec<Thresholds> = sections.clone().map(SectionInstance::thresholds).collect();
        (all.matched, all.edges) = matched(sections.zip(&found));
        let sorted = |of: fn(&Thresholds) -> &BTreeSet<i64>| -> Vec<i64> {
            let values: BTreeSet<i64> = found.iter().flat_map(of).copied().collect();
            values.into_iter().collect()
        };
        all.thresholds = sorted(|it| &it.fixed);
        all.varying = sorted(|it| &it.varying);
        all.varying.retain(|value| !all.thresholds.contains(value));
        all
    }
}

/// Some memory of each rank, and all from which words may come there by copies, through any other.
fn with_sources(
    mut memory: HashSet<(Rank, SectionMemory)>,
    kernels: &[JointLaunch<'_>],
) -> HashSet<(Rank, SectionMemory)> {
    if memory.is_empty() {
        return memory;
    }
    // Places of a target, and those of a source: a name may be of any rank.
    let mut copies = HashSet::new();
    for kernel in kernels {
        let named = |name: &str| -> Vec<(Rank, SectionMemory)> {
            let sections = kernel.sections.iter();
            let found = sections.filter_map(|section| {
                let tensor = &section.tensors[section.tensor(name)?];
                Some((section.rank, tensor.memory))
            });
            found.collect()
        };
        let names = kernel.sections.iter().flat_map(|section| section.copied());
        let names: BTreeSet<(String, String)> = names.collect();
        copies.extend(names.iter().map(|(to, from)| (named(to), named(from))));
    }
    // Until nothing is added: memory may be copied from memory that is copied from other memory.
    loop {
        let before = memory.len();
        for (to, from) in &copies {
            if to.iter().any(|place| memory.contains(place)) {
                memory.extend(from);
            }
        }
        if memory.len() == before {
            return memory;
        }
    }
}

/// Words that lanes read in a simulation.
#[derive(Debug)]
pub(super) struct ReadWords<'a> {
    pub(super) valuation: Valuation,
    pub(super) uses: &'a WordUse,
    /// Symbols that steps have stored, and the launch of the last of them.
    pub(super) stored: HashMap<(Rank, RankMemory, usize), (Symbol, u32)>,
    /// Value of each symbol that was read.
    pub(super) chosen: RefCell<HashMap<Symbol, i64>>,
    /// The greatest bound of a word that was read.
    pub(super) most: Cell<i64>,
    /// Values that lanes have read from memory that may change, by the number of the read.
    pub(super) known: HashMap<LaneOf, BTreeMap<usize, i64>>,
}

impl<'a> ReadWords<'a> {
    pub(super) fn new(valuation: Valuation, uses: &'a WordUse) -> Self {
        Self {
            valuation,
            uses,
            stored: HashMap::new(),
            chosen: RefCell::default(),
            most: Cell::new(0),
            known: HashMap::new(),
        }
    }

    /// Whether any section reads words.
    pub(super) fn are_read(&self) -> bool {
        !self.uses.tracked.is_empty()
    }
}

/// A tensor; what is in scratch was copied or computed.
const fn tensor(memory: SectionMemory) -> Option<RankMemory> {
    match memory {
        SectionMemory::Tensor(id) => Some(RankMemory::Tensor(id)),
        SectionMemory::Scratch(_) => None,
    }
}

/// Memory among whose words lanes look for some, and the values at the edges of what they look for. The greatest one, which is
/// mostly outside, comes first, before the least one.
fn matched<'a>(
    sections: impl Iterator<Item = (&'a SectionInstance, &'a Thresholds)>,
) -> (HashSet<(Rank, RankMemory)>, Vec<i64>) {
    let (mut memory, mut edges) = (HashSet::new(), BTreeSet::new());
    for (section, thresholds) in sections {
        let (tensors, of_section) = section.matched(thresholds);
        edges.extend(of_section);
        memory.extend(tensors.into_iter().filter_map(|index| {
            let place = tensor(section.tensors[index].memory)?;
            Some((section.rank, place))
        }));
    }
    let mut edges: Vec<i64> = edges.into_iter().collect();
    if !edges.is_empty() {
        // Only the first `MAX_EDGES` are tried for all words, and the value outside of all ranges must be among them.
        edges.rotate_right(1);
    }
    (memory, edges)
}

pub(super) fn hash(of: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    of.hash(&mut hasher);
    hasher.finish()
}
