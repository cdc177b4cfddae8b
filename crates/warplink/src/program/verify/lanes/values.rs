//! What lanes read and store as integers, in a simulation.

use super::memory::RankMemory;
use super::state::LaneRun;
use super::words::{LaneOf, Symbol};
use crate::dtype::DType;
use crate::error::Rank;
use crate::program::ir::Role;
use crate::program::machine::Actor;
use crate::program::section::{LaneStepKind, Matching, Part, ReadWord};

impl LaneRun<'_> {
    /// Value of a word that a lane reads, once that is known.
    pub(super) fn value(&self, (launch, rank, lane): LaneOf, word: &ReadWord) -> Option<i64> {
        let known = self.words.known.get(&(launch, rank, lane));
        if let Some(value) = known.and_then(|known| known.get(&word.number)) {
            return Some(*value);
        }
        let section = self.section(launch as usize, rank as Rank);
        // A word that no kernel writes has its value from the start of the launch, so the steps behind it can be
        // listed without waiting for the read.
        let constant = section.is_constant(&word.part);
        constant.then(|| self.valued(launch, &word.part, word.matching, word.most))
    }

    /// Notes the value of a word at the step that reads it.
    pub(super) fn read_value(
        &mut self,
        actor: Actor,
        number: usize,
        (source, matching, most): (&Part, Option<Matching>, i64),
    ) {
        let value = self.valued(actor.launch, source, matching, most);
        let lane = (actor.launch, actor.rank, actor.lane);
        let known = self.words.known.entry(lane).or_default();
        known.insert(number, value);
    }

    /// Whether lanes read the same values in two launches of a kernel, as far as they read the same words.
    pub(super) fn read_alike(&self, one: usize, other: usize) -> bool {
        let known = |launch: usize, (rank, lane): (Rank, usize)| {
            let lane = (launch as u32, rank as u32, lane as u32);
            self.words.known.get(&lane)
        };
        // A word that a lane reads in one of the launches alone does not tell why they differ.
        let alike = |lane| match (known(one, lane), known(other, lane)) {
            (Some(before), Some(now)) => before
                .iter()
                .all(|(number, value)| now.get(number).is_none_or(|it| it == value)),
            _ => true,
        };
        (0..self.ranks.len())
            .all(|rank| (0..self.section(one, rank).lanes).all(|lane| alike((rank, lane))))
    }

    fn valued(&self, launch: u32, source: &Part, matching: Option<Matching>, most: i64) -> i64 {
        let Some(matching) = matching else {
            return self.value_of(launch, source, Some(most));
        };
        let words = (0..source.elements).map(|element| source.piece(&(element..element + 1)));
        let words: Vec<i64> = words
            .map(|word| self.value_of(launch, &word, None))
            .collect();
        matching.of(&words)
    }

    /// Value of a word, at most `most` if nothing looks for words in its memory.
    fn value_of(&self, launch: u32, word: &Part, most: Option<i64>) -> i64 {
        let symbol = self.symbol(launch, word);
        if let Some(known) = symbol.known {
            return known;
        }
        let words = &self.words;
        let value = || match most {
            Some(most) if !words.uses.matched.contains(&(symbol.rank, symbol.place)) => {
                words.most.set(most.max(words.most.get()));
                words.valuation.value(&symbol, most, words.uses)
            }
            _ => {
                let section = self.section(launch as usize, word.rank);
                let edge = words.valuation.among(&symbol, words.uses);
                match section.tensors[word.tensor].dtype {
                    // A word of u32 cannot hold an edge below 0.
                    DType::U32 => edge.max(0),
                    _ => edge,
                }
            }
        };
        *words
            .chosen
            .borrow_mut()
            .entry(symbol)
            .or_insert_with(value)
    }

    /// Symbol of a word as it is now.
    fn symbol(&self, launch: u32, word: &Part) -> Symbol {
        let (place, bytes) = self.bytes_of(launch as usize, word);
        let byte = bytes.start;
        let mut since = launch;
        if let RankMemory::Tensor(id) = place
            && self.ranks[word.rank].tensors[id].role == Role::Input
        {
            // The caller changes inputs between runs only, so all launches of a run read the same value.
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
            known: None,
        }
    }

    /// Notes what a step stores in words that lanes read, or copy to such words.
    pub(super) fn store_words(&mut self, actor: Actor, step: &LaneStepKind) {
        let section = |part: &Part| self.section(actor.launch as usize, part.rank);
        let is_read = |part: &&Part| {
            let memory = section(part).tensors[part.tensor].memory;
            self.words.uses.tracked.contains(&(part.rank, memory))
        };
        let copied = match step {
            LaneStepKind::Move(it) => it.only_source(),
            _ => None,
        };
        let known = match step {
            LaneStepKind::Store { value, .. } => Some(*value),
            _ => None,
        };
        // Collected first: a step that copies a word onto another reads all symbols as they were before it.
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
                        known,
                    },
                };
                stored.push(((word.rank, place, bytes.start), (symbol, actor.launch)));
            }
        }
        self.words.stored.extend(stored);
    }
}
