//! Memory of all ranks as numbers, each with the order of its accesses.

use super::stage::{Operand, packet};
use crate::program_support::interpreter::{Choice, Fault, input_of, mix};
use rustc_hash::FxHashMap;
use std::collections::BTreeSet;
use warplink::DType;
use warplink::program::RankProgram;
use warplink::program::ir::Role;

pub(super) struct Memory {
    /// For each rank, its tensors and then its scratch.
    all: Vec<Vec<Content>>,
    /// How many launches a run has.
    kernels: usize,
    inputs: Vec<Vec<bool>>,
    /// The sum of what stands for each read.
    reads: u64,
    /// All that was ever stored in plain memory, by rank, memory and element, where that is asked for.
    stored: Option<FxHashMap<(usize, usize, usize), Vec<f64>>>,
    pub(super) faults: BTreeSet<Fault>,
}

struct Content {
    /// Elements in a packet; 0 of plain memory.
    packet: usize,
    /// Whether stores of earlier runs are gone for every reader: another rank may be in the next run before this one is.
    spoilt: bool,
    /// Elements in a cell.
    length: usize,
    cells: Vec<Cell>,
    /// The elements of all cells.
    values: Vec<f64>,
}

/// An element, or a packet.
#[derive(Clone, Copy, Default)]
struct Cell {
    /// The launch that stored the packet, counted from 1.
    flag: u64,
    /// Stands for all writes so far, in their order.
    history: u64,
    written: bool,
    /// How many elements the store of a packet had; the rest of it was never put.
    filled: usize,
    /// The run whose launch wrote it last.
    run: usize,
    /// Id of a use by its rank's stream that other ranks need not see yet; 0 for none.
    touched: u64,
}

impl Memory {
    pub(super) fn new(ranks: &[RankProgram], kernels: usize, keeps_stored: bool) -> Self {
        let contents = |program: &RankProgram| {
            let tensors = program.tensors.iter().map(|tensor| {
                let elements = tensor.bytes / tensor.dtype.size();
                Content {
                    packet: 0,
                    spoilt: false,
                    length: 1,
                    cells: vec![Cell::default(); elements],
                    values: vec![f64::NAN; elements],
                }
            });
            let scratch = program.scratch.iter().enumerate().map(|(id, scratch)| {
                let elements = scratch.shape[0] * scratch.strides[0];
                let packets = scratch.packing.is_packets();
                let length = if packets { packet(program, id) } else { 1 };
                let cells = elements.div_ceil(length);
                Content {
                    packet: if packets { length } else { 0 },
                    spoilt: !scratch.persistent,
                    length,
                    cells: vec![Cell::default(); cells],
                    values: vec![0.0; cells * length],
                }
            });
            tensors.chain(scratch).collect()
        };
        let inputs = |program: &RankProgram| {
            let tensors = program.tensors.iter().map(|t| t.role == Role::Input);
            tensors
                .chain(program.scratch.iter().map(|_| false))
                .collect()
        };
        Self {
            all: ranks.iter().map(contents).collect(),
            inputs: ranks.iter().map(inputs).collect(),
            kernels,
            reads: 0,
            stored: keeps_stored.then(FxHashMap::default),
            faults: BTreeSet::new(),
        }
    }

    /// The cell that holds an element, and its place in it.
    pub(super) fn cell(&self, of: &Operand, element: usize) -> (usize, usize) {
        let length = self.all[of.rank][of.memory].length;
        let index = of.from + element;
        (index / length, index % length)
    }

    /// How many elements a packet there holds; 0 where memory is plain.
    pub(super) fn packet(&self, of: &Operand) -> usize {
        self.all[of.rank][of.memory].packet
    }

    /// The flag of a packet.
    pub(super) fn flag(&self, of: &Operand, cell: usize) -> u64 {
        self.all[of.rank][of.memory].cells[cell].flag
    }

    /// The value of an element, for `by` in a launch, which is of rank `from`; no number where nothing is written.
    pub(super) fn load(
        &mut self,
        (by, from, launch): (u64, usize, usize),
        of: &Operand,
        element: usize,
    ) -> f64 {
        let (cell, within) = self.cell(of, element);
        let run = launch / self.kernels;
        let content = &self.all[of.rank][of.memory];
        let value = content.values[cell * content.length + within];
        let (spoilt, cells) = (content.spoilt, &content.cells);
        let found = &cells[cell];
        let stale = spoilt && found.run < run;
        // What a rank sees of its stream, others need not see.
        let mut seen = *found;
        seen.settle_for(from == of.rank);
        let (written, history) = (seen.written, seen.history);
        let is_left_empty = content.packet > 0 && within >= found.filled;
        let nothing = !written || stale || is_left_empty;
        if nothing {
            let (rank, memory) = (of.rank, of.memory);
            self.faults.insert(Fault::UnwrittenRead { rank, memory });
        }
        let place = mix(((of.rank << 40) | (of.memory << 20) | cell) as u64);
        let read = mix(by ^ place ^ mix(history));
        self.reads = self.reads.wrapping_add(read);
        if nothing { f64::NAN } else { value }
    }

    /// Stores into a cell, for `by` in a launch, which is of rank `from`: an element, or a packet with its flag.
    pub(super) fn store(
        &mut self,
        (by, from, launch): (u64, usize, usize),
        of: &Operand,
        cell: usize,
        (flag, values): (u64, &[f64]),
    ) {
        if self.inputs[of.rank][of.memory] {
            let (rank, memory) = (of.rank, of.memory);
            self.faults.insert(Fault::InputWritten { rank, memory });
        }
        if let (Some(stored), [value]) = (&mut self.stored, values) {
            let place = (of.rank, of.memory, cell);
            stored.entry(place).or_default().push(*value);
        }
        let content = &mut self.all[of.rank][of.memory];
        let stored = &mut content.values[cell * content.length..][..content.length];
        stored[..values.len()].copy_from_slice(values);
        stored[values.len()..].fill(0.0);
        let cell = &mut content.cells[cell];
        cell.settle_for(from == of.rank);
        (cell.flag, cell.written) = (flag, true);
        cell.filled = values.len();
        cell.run = launch / self.kernels;
        cell.history = mix(cell.history ^ by);
    }

    /// Stands for the order of all accesses to the same cells.
    pub(super) fn order(&self) -> u64 {
        let mut order = self.reads;
        for (place, content) in self.all.iter().flatten().enumerate() {
            for (number, cell) in content.cells.iter().enumerate() {
                let place = mix(((place << 20) | number) as u64);
                order = order.wrapping_add(mix(cell.history ^ place));
            }
        }
        order
    }

    /// Before and after each launch, the stream may use all tensors. Other ranks see that it did when the rank
    /// signals, and not before.
    pub(super) fn touch(&mut self, program: &RankProgram, launch: usize) {
        let by = caller(program.rank, launch);
        for content in &mut self.all[program.rank][..program.tensors.len()] {
            for cell in &mut content.cells {
                cell.settle_for(true);
                cell.touched = by;
            }
        }
    }

    /// All ranks see what a rank's stream did.
    pub(super) fn settle(&mut self, rank: usize) {
        let contents = self.all[rank].iter_mut();
        contents.for_each(|content| content.cells.iter_mut().for_each(|c| c.settle_for(true)));
    }

    /// The outputs of a run, whose end this is.
    pub(super) fn take_outputs(&mut self, program: &RankProgram, launch: usize) -> Vec<f64> {
        let (rank, by) = (program.rank, caller(program.rank, launch));
        let mut outputs = Vec::new();
        for (memory, tensor) in program.tensors.iter().enumerate() {
            if tensor.role != Role::Output {
                continue;
            }
            let whole = Operand {
                rank,
                memory,
                from: 0,
                elements: 0,
            };
            for element in 0..self.all[rank][memory].cells.len() {
                if self.all[rank][memory].cells[element].written {
                    outputs.push(self.load((by, rank, launch), &whole, element));
                } else {
                    self.faults.insert(Fault::UnwrittenOutput { rank, memory });
                    outputs.push(f64::NAN);
                }
            }
        }
        outputs
    }

    /// All that was stored in each element of a rank's outputs, in order, where that is kept.
    pub(super) fn stored(&self, program: &RankProgram) -> Vec<Vec<f64>> {
        let tensors = program.tensors.iter().enumerate();
        let outputs = tensors.filter(|(_, tensor)| tensor.role == Role::Output);
        let elements = outputs.flat_map(|(memory, tensor)| {
            let elements = 0..tensor.bytes / tensor.dtype.size();
            elements.map(move |element| (program.rank, memory, element))
        });
        let stored = self.stored.iter().flat_map(|stored| {
            let of = |place| stored.get(&place).cloned().unwrap_or_default();
            elements.clone().map(of)
        });
        stored.collect()
    }

    /// Sets the inputs of a run and spoils all other tensors.
    pub(super) fn prepare(&mut self, program: &RankProgram, run: usize, choice: Choice) {
        let rank = program.rank;
        for (memory, tensor) in program.tensors.iter().enumerate() {
            let is_input = tensor.role == Role::Input;
            let content = &mut self.all[rank][memory];
            for (element, value) in content.values.iter_mut().enumerate() {
                *value = if is_input {
                    input_of(tensor, choice, (run, rank), memory, element)
                } else {
                    f64::NAN
                };
            }
            content
                .cells
                .iter_mut()
                .for_each(|cell| cell.written = is_input);
        }
    }
}

impl Cell {
    fn settle_for(&mut self, sees: bool) {
        if sees && self.touched != 0 {
            self.history = mix(self.history ^ self.touched);
            self.touched = 0;
        }
    }
}

fn caller(rank: usize, launch: usize) -> u64 {
    mix(!(((rank as u64) << 16) | launch as u64))
}

/// A value as an element of a type holds it.
pub(super) fn rounded(dtype: DType, value: f64) -> f64 {
    match dtype {
        DType::BF16 => half::bf16::from_f32(value as f32).to_f64(),
        DType::F16 => half::f16::from_f32(value as f32).to_f64(),
        DType::F32 => f64::from(value as f32),
        DType::I32 => f64::from(value as i64 as i32),
        DType::U8 => f64::from(value as i64 as u8),
        _ => value,
    }
}
