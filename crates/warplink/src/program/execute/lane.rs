//! A lane of a kernel section, run by a device that takes closures for kernels.

use super::lane_times::LaneClock;
use super::reach::Reach;
use crate::device::{Block, DeviceSlice, ReduceOp, combine};
use crate::dtype::DType;
use crate::error::{Error, ErrorKind, Rank, Result};
use crate::program::section::{
    LaneStep, LaneStepKind, Packing, Part, SectionInstance, SectionMemory,
};
use std::ops::Range;

/// Where an operand lies.
struct Operand {
    memory: DeviceSlice,
    packing: Packing,
}

/// Tells how the announcement of a rank, the second, differs from that of this rank, the first.
pub(crate) type TellDifference = dyn Fn(&[u32], &[u32]) -> String + Send + Sync;

/// What a lane is run on.
#[derive(Clone, Copy)]
pub(super) struct LaneInput<'a> {
    pub(super) section: &'a SectionInstance,
    pub(super) reach: &'a Reach,
    /// The own tensors of this launch, by number; those that are not here are in the reach.
    pub(super) tensors: &'a [DeviceSlice],
    pub(super) tell: &'a TellDifference,
    /// Where it stores when its steps start, for a trace.
    pub(super) times: Option<&'a LaneClock>,
}

/// Runs the lane that `block` is.
pub(super) fn run_lane(block: &Block<'_>, input: LaneInput<'_>) -> Result<()> {
    let LaneInput { section, reach, .. } = input;
    let (epoch_word, ended_word) = (reach.state.word(0)?, reach.state.word(8)?);
    let epoch = block.value(&epoch_word);
    let lane = block.index() as usize;
    let run = Lane {
        block,
        input,
        section,
        reach,
        lane,
        epoch,
    };
    let mut times = input.times.map(|clock| clock.start(lane, epoch));
    for step in section.steps(lane, epoch)? {
        if let Some(times) = &mut times {
            times.step(&step.site);
        }
        block.pause()?;
        run.perform(&step).map_err(|error| {
            error.with_operation(format!("kernel of rank {}, {}", section.rank, step.site))
        })?;
    }
    if let Some(times) = times {
        let (memory, bytes) = times.finish()?;
        block.write(&memory, &bytes)?;
    }
    // The last lane to end advances the epoch, when all have read it.
    if block.increment(&ended_word) + 1 == section.lanes as u64 {
        block.set(&ended_word, 0);
        block.increment(&epoch_word);
    }
    Ok(())
}

struct Lane<'a> {
    block: &'a Block<'a>,
    input: LaneInput<'a>,
    section: &'a SectionInstance,
    reach: &'a Reach,
    lane: usize,
    epoch: u64,
}

impl Lane<'_> {
    fn perform(&self, step: &LaneStep) -> Result<()> {
        let (rank, world) = (self.section.rank, self.section.world);
        let (operator, dtype, elements, targets, sources) = match &step.kind {
            LaneStepKind::Signal { peer, lane } => {
                let signals = self.block.signals_at(&self.reach.signals[*peer]);
                return signals.add(lane * world + rank);
            }
            LaneStepKind::Wait(peer) => {
                let signals = self.block.signals_at(&self.reach.signals[rank]);
                return signals.wait(self.lane * world + peer);
            }
            LaneStepKind::Announce { values, target } => {
                let Operand { memory, packing } = self.operand(target, &(0..values.len()))?;
                let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
                let flag = self.flag(packing);
                return self.block.store_packets(&memory, &bytes, flag, false);
            }
            LaneStepKind::Agree {
                values,
                peer,
                source,
            } => return self.agree(values, *peer, source),
            LaneStepKind::Move {
                operator,
                dtype,
                elements,
                targets,
                sources,
            } => (*operator, *dtype, *elements, targets, sources),
        };
        // In two pieces, one after the other or the other way round: the threads of a block are in no
        // order.
        let unit = self.piece_unit(targets.iter().chain(sources));
        let half = elements / 2 / unit * unit;
        let mut pieces = [0..half, half..elements];
        if self.epoch % 2 == 1 {
            pieces.reverse();
        }
        for piece in pieces.into_iter().filter(|piece| !piece.is_empty()) {
            self.piece((operator, dtype), &piece, targets, sources)?;
        }
        Ok(())
    }

    /// Waits for what a peer announces, and fails where it is anything else than `values`.
    fn agree(&self, values: &[u32], peer: Rank, source: &Part) -> Result<()> {
        let Operand { memory, packing } = self.operand(source, &(0..values.len()))?;
        let (bytes, flag) = (4 * values.len(), self.flag(packing));
        let came = self.block.load_packets(&memory, bytes, flag, false)?;
        let theirs: Vec<u32> = came
            .chunks_exact(4)
            .map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]]))
            .collect();
        if theirs == values {
            return Ok(());
        }
        Err(
            Error::new(ErrorKind::Mismatch, (self.input.tell)(values, &theirs))
                .with_rank(self.section.rank)
                .with_peer(peer)
                .with_help("make the same calls in the same order on every rank"),
        )
    }

    /// How many elements a piece of a step is a multiple of, so that it starts with a packet.
    fn piece_unit<'p>(&self, mut parts: impl Iterator<Item = &'p Part>) -> usize {
        let lines = parts.any(|part| {
            let scratch = self.section.scratch_of(part.tensor);
            scratch.is_some_and(|scratch| scratch.packing == Packing::Packets128)
        });
        if lines { 240 } else { 16 }
    }

    /// Does a step for some of its elements.
    fn piece(
        &self,
        (operator, dtype): (Option<ReduceOp>, DType),
        piece: &Range<usize>,
        targets: &[Part],
        sources: &[Part],
    ) -> Result<()> {
        let bytes = piece.len() * dtype.size();
        let mut values = Vec::with_capacity(sources.len());
        for source in sources {
            let Operand { memory, packing } = self.operand(source, piece)?;
            values.push(if packing.is_packets() {
                let lines = packing == Packing::Packets128;
                self.block
                    .load_packets(&memory, bytes, self.flag(packing), lines)?
            } else {
                self.block.load(&memory)?
            });
        }
        let result = match (operator, values.len()) {
            (None, 1) => values.swap_remove(0),
            (Some(operator), _) => combine(operator, dtype, &values),
            (None, _) => return Err(internal("a move has one source")),
        };
        for target in targets {
            let Operand { memory, packing } = self.operand(target, piece)?;
            if packing.is_packets() {
                let lines = packing == Packing::Packets128;
                self.block
                    .store_packets(&memory, &result, self.flag(packing), lines)?;
            } else {
                self.block.store(&memory, &result)?;
            }
        }
        Ok(())
    }

    /// The flag of this launch's packets, which is never what memory holds before the first.
    fn flag(&self, packing: Packing) -> u64 {
        match packing {
            Packing::Packets128 => self.epoch + 1,
            _ => 1 + self.epoch % u64::from(u32::MAX),
        }
    }

    fn operand(&self, part: &Part, piece: &Range<usize>) -> Result<Operand> {
        let tensor = &self.section.tensors[part.tensor];
        let from = tensor.offset + part.offset + piece.start;
        let elements = piece.len();
        let missing = || internal("an operand is not mapped");
        match tensor.memory {
            SectionMemory::Tensor(id) => {
                let size = tensor.dtype.size();
                let own = (part.rank == self.section.rank).then(|| self.input.tensors.get(id));
                let bound = || self.reach.tensors[part.rank].get(&id);
                let slice = own.flatten().or_else(bound).ok_or_else(missing)?;
                Ok(Operand {
                    memory: slice.slice(from * size..(from + elements) * size)?,
                    packing: Packing::Plain,
                })
            }
            SectionMemory::Scratch(id) => {
                let scratch = &self.section.scratch[id];
                let area = self.reach.layout.area(scratch.packing);
                let range = scratch.packed(from, elements).ok_or_else(missing)?;
                let workspace = self.reach.workspaces[part.rank].as_ref();
                let range = area.offset_bytes + range.start..area.offset_bytes + range.end;
                Ok(Operand {
                    memory: workspace.ok_or_else(missing)?.slice(range)?,
                    packing: scratch.packing,
                })
            }
        }
    }
}

/// The difference between two announcements, where nothing more is known of them.
pub(super) fn tell_difference(own: &[u32], theirs: &[u32]) -> String {
    format!("the peer announces {theirs:?}; expected {own:?}, as this rank does")
}

fn internal(what: &'static str) -> Error {
    Error::new(ErrorKind::Internal, what).with_operation("run a lane")
}
