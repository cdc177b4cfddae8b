//! Lanes of a launch, and their stores in flight.

use super::super::stage::{Operand, Steps};
use super::StepId;
use rustc_hash::FxHashMap;
use std::rc::Rc;

/// A store in flight.
pub(super) struct Store {
    pub(super) step: StepId,
    pub(super) what: Stored,
}

pub(super) enum Stored {
    Cell {
        by: u64,
        place: Operand,
        cell: usize,
        flag: u64,
        values: Vec<f64>,
    },
    Signal {
        peer: usize,
        to: usize,
    },
}

#[derive(Default)]
pub(super) struct Lane {
    pub(super) next: usize,
    /// Its steps, where they depend on what it has read.
    pub(super) steps: Option<Rc<Steps>>,
    pub(super) read: Vec<i64>,
    /// Whether it has read a value with which it cannot go on.
    pub(super) fails: bool,
    /// The units of the step at hand that are not moved; none before it begins.
    pub(super) units: Option<Vec<usize>>,
    /// Earlier steps of which some threads have not moved these units, while others are at a later step.
    pub(super) behind: Vec<(StepId, Vec<usize>)>,
    pub(super) stores: Vec<Store>,
    /// How many of `stores` are to each cell, so that most cells need no search.
    pub(super) cells: FxHashMap<(usize, usize, usize), usize>,
    /// Values loaded early, by step, source and element.
    pub(super) early: FxHashMap<(usize, usize, usize), f64>,
}

impl Lane {
    pub(super) fn stores_to(&self, place: &Operand, cell: usize) -> usize {
        let at = (place.rank, place.memory, cell);
        self.cells.get(&at).copied().unwrap_or(0)
    }

    pub(super) fn push_store(&mut self, store: Store) {
        if let Stored::Cell { place, cell, .. } = &store.what {
            *self
                .cells
                .entry((place.rank, place.memory, *cell))
                .or_default() += 1;
        }
        self.stores.push(store);
    }

    pub(super) fn take_store(&mut self, place: usize) -> Store {
        let store = self.stores.remove(place);
        if let Stored::Cell { place, cell, .. } = &store.what
            && let Some(count) = self.cells.get_mut(&(place.rank, place.memory, *cell))
        {
            *count -= 1;
        }
        store
    }
}

impl Store {
    pub(super) fn is_at(&self, of: &Operand, at: usize) -> bool {
        match &self.what {
            Stored::Cell { place, cell, .. } => {
                (place.rank, place.memory, *cell) == (of.rank, of.memory, at)
            }
            Stored::Signal { .. } => false,
        }
    }
}
