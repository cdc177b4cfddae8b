//! Memory as numbers, each with the order of its accesses.

use super::choice::{SOME_VALUES, input_of};
use super::outcome::Fault;
use super::schedule::mix;
use std::collections::BTreeSet;
use warplink::program::ir::Role;
use warplink::program::{RankProgram, TensorId};

/// Who accesses: a number for each chain of each operation of each run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Actor(u64);

/// An element of a tensor.
pub(super) type Cell = (usize, TensorId, usize);

pub(super) struct Memory {
    tensors: Vec<Vec<Vec<Content>>>,
    inputs: Vec<Vec<bool>>,
    /// The sum of what stands for each read.
    reads: u64,
    pub(super) faults: BTreeSet<Fault>,
}

#[derive(Clone, Copy)]
struct Content {
    value: f64,
    /// Stands for all writes so far, in their order.
    history: u64,
    written: bool,
    deallocated: bool,
}

impl Actor {
    pub(super) fn new(rank: usize, run: usize, index: usize, chain: usize) -> Self {
        let place = ((rank as u64) << 48) | ((run as u64) << 40) | ((index as u64) << 12);
        Self(mix(place | (chain as u64 + 1)))
    }

    fn caller(rank: usize, run: usize) -> Self {
        Self(mix(!(((rank as u64) << 8) | run as u64)))
    }
}

impl Memory {
    pub(super) fn new(ranks: &[RankProgram]) -> Self {
        let fresh = Content {
            value: f64::NAN,
            history: 0,
            written: false,
            deallocated: false,
        };
        Self {
            tensors: ranks
                .iter()
                .map(|r| {
                    r.tensors
                        .iter()
                        .map(|t| vec![fresh; t.bytes / t.dtype.size()])
                })
                .map(Iterator::collect)
                .collect(),
            inputs: ranks
                .iter()
                .map(|r| r.tensors.iter().map(|t| t.role == Role::Input).collect())
                .collect(),
            reads: 0,
            faults: BTreeSet::new(),
        }
    }

    /// Stands for the order of all accesses to the same cells.
    pub(super) fn order(&self) -> u64 {
        let cells = self.tensors.iter().flatten().enumerate();
        let cells = cells.flat_map(|(tensor, cells)| {
            let numbered = cells.iter().enumerate();
            numbered.map(move |(index, c)| mix(c.history ^ mix((tensor << 20 | index) as u64)))
        });
        cells.fold(self.reads, u64::wrapping_add)
    }

    pub(super) fn load(&mut self, by: Actor, (rank, tensor, index): Cell) -> f64 {
        let content = self.tensors[rank][tensor][index];
        if content.deallocated {
            self.faults.insert(Fault::Deallocated {
                rank,
                memory: tensor,
            });
        } else if !content.written {
            self.faults.insert(Fault::UnwrittenRead {
                rank,
                memory: tensor,
            });
        }
        let cell = ((rank << 40) | (tensor << 20) | index) as u64;
        let read = mix(by.0 ^ mix(cell ^ mix(content.history)));
        self.reads = self.reads.wrapping_add(read);
        content.value
    }

    pub(super) fn store(&mut self, by: Actor, (rank, tensor, index): Cell, value: f64) {
        if self.inputs[rank][tensor] {
            self.faults.insert(Fault::InputWritten {
                rank,
                memory: tensor,
            });
        }
        let content = &mut self.tensors[rank][tensor][index];
        if content.deallocated {
            self.faults.insert(Fault::Deallocated {
                rank,
                memory: tensor,
            });
        }
        content.value = value;
        content.written = true;
        content.history = mix(content.history ^ by.0);
    }

    /// How many elements a tensor has.
    pub(super) fn elements(&self, rank: usize, tensor: TensorId) -> usize {
        self.tensors[rank][tensor].len()
    }

    pub(super) fn deallocate(&mut self, by: Actor, rank: usize, tensor: TensorId) {
        for content in &mut self.tensors[rank][tensor] {
            content.deallocated = true;
            content.history = mix(content.history ^ by.0);
        }
    }

    /// The outputs of a run, whose end this is.
    pub(super) fn take_outputs(&mut self, program: &RankProgram, run: usize) -> Vec<f64> {
        let rank = program.rank;
        let mut outputs = Vec::new();
        for (tensor, instance) in program.tensors.iter().enumerate() {
            if instance.role != Role::Output {
                continue;
            }
            for index in 0..self.tensors[rank][tensor].len() {
                if !self.tensors[rank][tensor][index].written {
                    self.faults.insert(Fault::UnwrittenOutput {
                        rank,
                        memory: tensor,
                    });
                    outputs.push(f64::NAN);
                } else {
                    outputs.push(self.load(Actor::caller(rank, run), (rank, tensor, index)));
                }
            }
        }
        outputs
    }

    /// Sets the inputs of a run and spoils all else.
    pub(super) fn prepare(&mut self, program: &RankProgram, run: usize) {
        let rank = program.rank;
        let by = Actor::caller(rank, run);
        for (tensor, instance) in program.tensors.iter().enumerate() {
            let is_input = instance.role == Role::Input;
            for (index, content) in self.tensors[rank][tensor].iter_mut().enumerate() {
                content.value = if is_input {
                    input_of(instance, SOME_VALUES, (run, rank), tensor, index)
                } else {
                    f64::NAN
                };
                content.written = is_input;
                content.deallocated = false;
                content.history = mix(content.history ^ by.0);
            }
        }
    }
}
