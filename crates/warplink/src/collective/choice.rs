//! Which algorithm does a call, with how many lanes: the only place that decides.

use super::algorithm::{Algorithm, Room, copies_in_place};
use super::call::{Call, CollectiveKind};
use super::estimate::Estimates;
use super::launches::Overlap;
use crate::error::{Error, ErrorKind, Rank, Result};
use crate::p2p::TransferKernels;
use crate::program::expr::PART_UNIT;
use crate::program::{Parameters, RankProgram, unroll};
use crate::topology::CUBE_RANKS;

/// The most data lanes of a launch.
const MAX_LANES: usize = 128;

/// The least and the most threads of a lane.
const THREADS: [usize; 2] = [128, 1024];

/// Bytes that a lane moves before another one is added, and bytes of each lane from which on it has the most threads.
const LANE_BYTES: usize = 16 << 10;
const BYTES_OF_MANY_THREADS: usize = 256 << 10;

/// Of 64 parts of the data, how many lanes move while the copy engine starts, and the most lanes that do: what was fastest
/// from 16 MiB on (docs/performance.md).
const EARLY_PARTS: i64 = 8;
const EARLY_LANES: usize = 32;

/// Elements that chunks have multiples of.
const CHUNK_UNIT: usize = 16;

/// More than what a part is padded by.
const PADDING: usize = 4096;

/// Bytes of data in a packet.
const PACKET_BYTES: usize = 8;

/// How a call is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Choice {
    /// The algorithm.
    pub algorithm: Algorithm,
    /// Lanes that move data; another one meets the other ranks.
    pub lanes: usize,
    /// Threads of each.
    pub threads: usize,
    /// Into how many chunks a lane cuts its data; 1 where packets go at once.
    pub chunks: usize,
}

/// What a choice depends on beside the call; the same on every rank, which they check when they join by comparing how
/// it is printed.
#[derive(Clone, Debug)]
pub(super) struct Machine {
    pub(super) world: usize,
    /// What kernels are good for, of the machine's model.
    pub(super) kernels: TransferKernels,
    /// Bytes of data that half of a workspace has room for, as packets and as it is.
    pub(super) packet_bytes: usize,
    pub(super) plain_bytes: usize,
    /// The most lanes that move data. Where ranks share a device, it has to have room for those of all.
    pub(super) most_lanes: usize,
    /// The only algorithm that is allowed.
    pub(super) forced: Option<Algorithm>,
    /// The ranks at the positions of a hybrid cube mesh, if the links form one. [`Algorithm::Cube`] alone keeps to them.
    pub(super) cube: Option<[Rank; CUBE_RANKS]>,
    /// How long algorithms take.
    pub(super) estimates: Estimates,
}

impl Machine {
    /// The most lanes for data of each of `ranks_per_device` ranks on a device of so many multiprocessors, each of
    /// which has room for a lane. One lane more meets the other ranks.
    pub(super) fn most_lanes(multiprocessors: usize, ranks_per_device: usize) -> usize {
        (multiprocessors / ranks_per_device.max(1))
            .saturating_sub(1)
            .clamp(1, MAX_LANES)
    }

    /// How `call` is done.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] where the algorithm that was asked for does not do this.
    pub(super) fn choose(&self, call: &Call) -> Result<Choice> {
        if !self.does(call) {
            return Err(self.not_linked(call));
        }
        if call.program() == CollectiveKind::Barrier {
            return Ok(Choice {
                algorithm: Algorithm::OneShot,
                lanes: 0,
                threads: THREADS[0],
                chunks: 1,
            });
        }
        let algorithm = match self.forced {
            Some(forced) if self.fits(forced, call) => forced,
            Some(forced) => return Err(self.not_forced(forced, call)),
            None => self.fastest(call),
        };
        Ok(self.shape(algorithm, call))
    }

    /// How `call` is done on memory that it was bound to; `overlap` as of any rank where input and output overlap.
    ///
    /// # Errors
    /// As [`choose`](Self::choose).
    pub(super) fn choose_bound(&self, call: &Call, overlap: Overlap) -> Result<Choice> {
        let copied = Algorithm::CopyEngine;
        if !self.copies(call, overlap) || self.forced.is_some_and(|forced| forced != copied) {
            return self.choose(call);
        }
        let copied = self.shape(copied, call);
        if self.forced.is_some() {
            return Ok(copied);
        }
        let by_kernels = self.choose(call)?;
        let seconds = |choice: &Choice| self.seconds(choice.algorithm, call);
        Ok(if seconds(&copied)? < seconds(&by_kernels)? {
            copied
        } else {
            by_kernels
        })
    }

    /// Whether the copy engine does a call on memory that it was bound to.
    fn copies(&self, call: &Call, overlap: Overlap) -> bool {
        let program = match overlap {
            Overlap::Apart => Algorithm::CopyEngine.program(call.kind),
            Overlap::Shared => copies_in_place(call.kind),
        };
        program.is_some() && self.cube.is_none() && self.world > 1 && call.count > 0
    }

    /// The parameters of the program of a choice.
    pub(super) fn parameters(&self, call: &Call, choice: &Choice) -> Parameters {
        if choice.algorithm == Algorithm::CopyEngine {
            return Parameters::new()
                .with("n", call.count as i64)
                .with("T", call.dtype)
                .with("early", EARLY_PARTS)
                .with("lanes", choice.lanes as i64)
                .with("threads", choice.threads as i64);
        }
        let words = call.words(choice.algorithm as u8);
        let mut parameters = Parameters::new();
        // As the program's integers of 32 bits.
        let [what, length, upper, factor] = words.map(|word| i64::from(word as i32));
        for (name, word) in [("what", what), ("length", length), ("upper", upper)] {
            parameters.insert(name, word);
        }
        if call.program() == CollectiveKind::Barrier {
            return parameters;
        }
        let size = call.dtype.size();
        let room = match choice.algorithm.room() {
            Room::Packets => self.packet_bytes / size,
            Room::Plain | Room::Nothing => self.plain_bytes / size,
        };
        parameters.insert("n", call.count as i64);
        parameters.insert("room", room as i64);
        parameters.insert("lanes", choice.lanes as i64 + 1);
        parameters.insert("threads", choice.threads as i64);
        if choice.algorithm.room() == Room::Plain {
            let direct = choice.algorithm == Algorithm::Direct;
            parameters.insert("chunks", choice.chunks as i64);
            parameters.insert("direct", i64::from(direct));
        }
        if let (Algorithm::Cube, Some(positions)) = (choice.algorithm, &self.cube) {
            let (order, places) = packed(positions);
            parameters.insert("order", order);
            parameters.insert("places", places);
        }
        if let Some(op) = call.op {
            parameters.insert("op", op);
            parameters.insert("factor", factor);
            parameters.insert("T", call.dtype);
        }
        if let Some(root) = call.root {
            parameters.insert("root", root as i64);
        }
        parameters
    }

    /// Whether the direct path does a call; in a hybrid cube mesh, some only.
    pub(super) fn does(&self, call: &Call) -> bool {
        self.cube.is_none() || call.count > 0 && self.fits(Algorithm::Cube, call)
    }

    /// Whether an algorithm does a call on any memory.
    fn fits(&self, algorithm: Algorithm, call: &Call) -> bool {
        if algorithm.program(call.kind).is_none() {
            return false;
        }
        if (algorithm == Algorithm::Cube) != self.cube.is_some() {
            return false;
        }
        let rows = algorithm.rows(call.kind, self.world, 1);
        match algorithm {
            Algorithm::OneShot | Algorithm::Cube => {
                self.packet_room(call, rows) >= part(call.count, 1)
            }
            Algorithm::TwoShot => self.packet_room(call, rows) >= part(call.count, self.world),
            Algorithm::Chunks | Algorithm::Direct => true,
            Algorithm::CopyEngine => false,
        }
    }

    /// The elements of a row, where `rows` rows share the packets.
    fn packet_room(&self, call: &Call, rows: usize) -> usize {
        self.packet_bytes / call.dtype.size() / rows
    }

    /// The algorithm that is fastest by the model, of those that do the call.
    fn fastest(&self, call: &Call) -> Algorithm {
        // What is done directly is faster than by several chunks, whose steps the estimates take for shorter than they are.
        let quick = |one: Algorithm| one != Algorithm::Chunks || self.shape(one, call).chunks == 1;
        let fitting = Algorithm::CHOICES
            .into_iter()
            .filter(|one| self.fits(*one, call) && quick(*one));
        let fitting: Vec<Algorithm> = fitting.collect();
        self.estimates
            .fastest(self.world, call, &fitting, |algorithm, like| {
                self.seconds(algorithm, like)
            })
    }

    /// Seconds of a call by an algorithm, by the model, where memory is reached.
    pub(super) fn seconds(&self, algorithm: Algorithm, call: &Call) -> Result<f64> {
        let choice = self.shape(algorithm, call);
        // One that stands for shorter calls may have no room itself.
        let rows = algorithm.rows(call.kind, self.world, 1);
        let machine = Self {
            packet_bytes: self.packet_bytes.max(2 * rows * (call.bytes() + PADDING)),
            ..self.clone()
        };
        let programs = (0..self.world).map(|rank| machine.rank_program(rank, call, &choice));
        let programs: Vec<RankProgram> = programs.collect::<Result<_>>()?;
        self.estimates.seconds(&programs)
    }

    /// The program of a choice, as a rank runs it.
    pub(super) fn rank_program(
        &self,
        rank: Rank,
        call: &Call,
        choice: &Choice,
    ) -> Result<RankProgram> {
        let program = choice.algorithm.program(call.program()).ok_or_else(|| {
            Error::new(ErrorKind::Internal, "the chosen algorithm does not exist")
        })??;
        let parameters = self.parameters(call, choice);
        unroll(program, rank, self.world, 1, &parameters)
    }

    /// The lanes, threads and chunks of a call that an algorithm does.
    pub(super) fn shape(&self, algorithm: Algorithm, call: &Call) -> Choice {
        match algorithm.room() {
            Room::Packets => self.packets(algorithm, call),
            Room::Plain => self.chunks(algorithm, call),
            Room::Nothing => Choice {
                algorithm,
                lanes: round_down(self.most_lanes.clamp(1, EARLY_LANES)),
                threads: THREADS[1],
                chunks: 1,
            },
        }
    }

    fn packets(&self, algorithm: Algorithm, call: &Call) -> Choice {
        let bytes = match algorithm {
            Algorithm::TwoShot => call.bytes() / self.world,
            _ => call.bytes(),
        };
        let most = (self.kernels.packet_blocks as usize).clamp(1, self.most_lanes);
        let least = (self.kernels.packet_threads as usize).clamp(THREADS[0], THREADS[1]);
        let lanes = bytes.div_ceil(least * PACKET_BYTES);
        let lanes = lanes.next_power_of_two().clamp(1, round_down(most));
        let threads = bytes.div_ceil(lanes * PACKET_BYTES).next_power_of_two();
        Choice {
            algorithm,
            lanes,
            threads: threads.clamp(least.next_power_of_two(), THREADS[1]),
            chunks: 1,
        }
    }

    pub(super) fn chunks(&self, algorithm: Algorithm, call: &Call) -> Choice {
        let bytes = call.bytes();
        let most = self.kernels.store_blocks.iter();
        let most = most.map(|(_, blocks)| *blocks as usize).max();
        let most = most.unwrap_or(1).clamp(1, self.most_lanes);
        let lanes = bytes.div_ceil(LANE_BYTES).next_power_of_two();
        let mut lanes = lanes.clamp(1, round_down(most));
        let room = |lanes: usize, chunks: usize| {
            let rows = lanes * algorithm.rows(call.kind, self.world, chunks);
            self.plain_bytes / call.dtype.size() / rows / CHUNK_UNIT * CHUNK_UNIT
        };
        // A small workspace has no room for chunks of many lanes.
        while lanes > 1 && room(lanes, usize::MAX) == 0 {
            lanes /= 2;
        }
        let parts = match call.kind {
            CollectiveKind::AllReduce => part(call.count, self.world),
            _ => call.count,
        };
        let piece = part(parts, lanes);
        // The elements of a chunk, where there are so many.
        let room = |chunks: usize| room(lanes, chunks).max(CHUNK_UNIT);
        let chunks = if piece <= room(1) {
            1
        } else {
            piece.div_ceil(room(usize::MAX)).max(2)
        };
        let many = bytes >= lanes * BYTES_OF_MANY_THREADS;
        Choice {
            algorithm,
            lanes,
            threads: if many { THREADS[1] } else { THREADS[1] / 2 },
            chunks,
        }
    }

    /// The error of what the direct path does not do in a hybrid cube mesh.
    fn not_linked(&self, call: &Call) -> Error {
        let rows = Algorithm::Cube.rows(CollectiveKind::AllReduce, self.world, 1);
        Error::new(
            ErrorKind::Unsupported,
            format!(
                "the direct path does not do {call} in a hybrid cube mesh; expected an all_reduce of 1 to {} bytes",
                self.packet_room(call, rows) / PART_UNIT as usize * PART_UNIT as usize * call.dtype.size()
            ),
        )
        .with_operation(call.kind.name())
        .with_help("leave the path open, or give the workspace more bytes")
    }

    fn not_forced(&self, forced: Algorithm, call: &Call) -> Error {
        Error::new(
            ErrorKind::Unsupported,
            format!(
                "the algorithm {forced} does not do {call} on {} ranks",
                self.world
            ),
        )
        .with_operation(call.kind.name())
        .with_help(match forced {
            Algorithm::CopyEngine => {
                "leave the algorithm open, or bind an all-gather or all-to-all to its memory (Collectives::bind)"
            }
            _ => "leave the algorithm open, or give the workspace more bytes",
        })
    }
}

/// The rank at each position of a hybrid cube mesh, and the position of each rank, as its program takes them.
fn packed(positions: &[Rank; CUBE_RANKS]) -> (i64, i64) {
    let all = positions.iter().enumerate();
    all.fold((0, 0), |(order, places), (position, rank)| {
        (
            order | (*rank as i64) << (3 * position),
            places | (position as i64) << (3 * rank),
        )
    })
}

/// Elements of a part, as programs cut tensors.
fn part(elements: usize, parts: usize) -> usize {
    let unit = PART_UNIT as usize;
    elements.div_ceil(unit * parts).saturating_mul(unit)
}

/// The largest power of two that is no larger.
fn round_down(value: usize) -> usize {
    1 << value.max(1).ilog2()
}

#[cfg(test)]
#[path = "choice_tests.rs"]
mod tests;
