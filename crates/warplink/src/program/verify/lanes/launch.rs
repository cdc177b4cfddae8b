//! What happens between launches: lanes start and end, and the rank's stream uses its tensors.

use super::Does;
use super::memory::{Actor, Bytes, STREAM, Stamp, Touch};
use super::run::{Place, Run, join};
use crate::error::Rank;
use crate::program::diagnostic::{Diagnostic, DiagnosticKind};
use crate::program::ir::Role;
use crate::program::rank_program::Range;
use crate::program::section::{LaneStepKind, Packing, Part, SectionMemory, WorkspaceLayout};
use crate::program::verify::kernel_accesses::OnRank;
use crate::program::verify::memory::Mode as AccessMode;

impl Run<'_> {
    /// The memory of a rank before the first launch.
    pub(super) fn prepare(&mut self, rank: Rank) {
        let time = self.tick_stream(rank);
        let before = Stamp {
            actor: Actor {
                launch: 0,
                rank: rank as u32,
                lane: STREAM,
                step: 0,
            },
            stream: self.stream_number(rank) as u32,
            time,
        };
        let memory = &mut self.memory[rank];
        for kernel in self.kernels {
            let section = kernel.sections[rank];
            for tensor in section.user_tensors() {
                let bytes = self.ranks[rank].tensors[tensor].bytes;
                let fresh = || Bytes::new(bytes, Some(before));
                memory.entry(Place::Tensor(tensor)).or_insert_with(fresh);
            }
        }
        let scratch = self
            .kernels
            .iter()
            .flat_map(|k| k.sections[rank].scratch.iter());
        let layout = WorkspaceLayout::of(scratch);
        for packing in Packing::ALL {
            let bytes = layout.area(packing).bytes;
            if bytes > 0 {
                memory.insert(Place::Area(packing), Bytes::new(bytes, None));
            }
        }
    }

    /// Starts the lanes of a rank's next launch.
    pub(super) fn launch(&mut self, rank: Rank) -> Result<(), Diagnostic> {
        let number = self.streams[rank].launch;
        if number == self.sequence.len() {
            return Ok(());
        }
        let section = self.section(number, rank);
        self.streams[rank].left = section.lanes;
        self.release(rank);
        for lane in 0..section.lanes {
            let index = rank * self.width + lane;
            let steps = self.steps(number, rank, lane)?;
            self.count(rank, &steps)?;
            let state = &mut self.lanes[index];
            state.steps = steps;
            state.next = 0;
            state.running = true;
            // Times of a lane count on from launch to launch.
            let own = self.streams[rank].knows.clone();
            join(&mut state.knows, &own);
            self.note_waits(number, rank, lane);
            self.wake(index);
        }
        self.check_inputs(number, rank)
    }

    /// Refuses writes to what the caller lends for reading.
    fn check_inputs(&self, number: usize, rank: Rank) -> Result<(), Diagnostic> {
        let section = self.section(number, rank);
        // It does the same in later launches.
        if self.accesses[self.sequence[number]][rank].is_some() {
            return Ok(());
        }
        for lane in 0..section.lanes {
            for step in &self.lanes[rank * self.width + lane].steps {
                let LaneStepKind::Move { targets, .. } = &step.kind else {
                    continue;
                };
                for target in targets {
                    // A name may stand for one tensor on this rank, and for another where it is written.
                    let theirs = self.section(number, target.rank);
                    let tensor = &theirs.tensors[target.tensor];
                    let SectionMemory::Tensor(id) = tensor.memory else {
                        continue;
                    };
                    let role = self.ranks[target.rank].tensors[id].role;
                    if tensor.read_only || role == Role::Input {
                        let place = crate::program::diagnostic::Place {
                            rank,
                            site: step.site.clone(),
                        };
                        let message = format!(
                            "{place}: the input '{}' is written; expected an output or an allocated tensor",
                            tensor.name
                        );
                        return Err(Diagnostic::new(
                            DiagnosticKind::InputWritten,
                            message,
                            vec![place],
                        ));
                    }
                }
            }
        }
        Ok(())
    }

    /// Between two launches, the stream writes all tensors.
    pub(super) fn end(&mut self, rank: Rank) {
        let number = self.streams[rank].launch;
        self.note_accesses(number, rank);
        let time = self.tick_stream(rank);
        let stamp = Stamp {
            actor: Actor {
                launch: number as u32,
                rank: rank as u32,
                lane: STREAM,
                step: 1,
            },
            stream: self.stream_number(rank) as u32,
            time,
        };
        let knows = self.streams[rank].knows.clone();
        let section = self.section(number, rank);
        let mut found = Vec::new();
        for (place, bytes) in &mut self.memory[rank] {
            let Place::Tensor(id) = place else { continue };
            let tensor = section
                .tensors
                .iter()
                .position(|tensor| tensor.memory == SectionMemory::Tensor(*id));
            let part = Part {
                rank,
                tensor: tensor.unwrap_or(0),
                offset: 0,
                elements: 0,
            };
            let all = 0..self.ranks[rank].tensors[*id].bytes;
            bytes.write(&all, None, stamp, &knows, |wrong| found.push((part, wrong)));
        }
        for (part, wrong) in found {
            self.find(stamp.actor, true, part, wrong);
        }
        self.streams[rank].launch += 1;
    }

    fn note_accesses(&mut self, number: usize, rank: Rank) {
        let mut list = Vec::new();
        for (place, bytes) in &self.memory[rank] {
            let Place::Tensor(tensor) = *place else {
                continue;
            };
            for (range, touch) in bytes.touches(number as u32) {
                let mode = match touch {
                    Touch::Read => AccessMode::Read,
                    Touch::Write => AccessMode::Write,
                    Touch::Update => AccessMode::Update,
                };
                let range = Range {
                    tensor,
                    offset_bytes: range.start,
                    bytes: range.len(),
                };
                list.push((range, mode));
            }
        }
        let kernel = self.sequence[number];
        let Some(first) = &self.accesses[kernel][rank] else {
            self.accesses[kernel][rank] = Some(list);
            return;
        };
        if *first != list {
            let before = self.sequence.iter().position(|other| *other == kernel);
            let more = list.iter().find(|access| !first.contains(access));
            let less = || first.iter().find(|access| !list.contains(access));
            let differs = match more {
                Some((range, _)) => Some((number, *range)),
                None => less().map(|(range, _)| (before.unwrap_or(number), *range)),
            };
            self.unsteady
                .extend(differs.map(|(launch, range)| (rank, launch, range)));
        }
    }

    /// What each kernel does on each rank.
    pub(super) fn done(self) -> Vec<Does> {
        let of_kernel = |(accesses, waits): (Vec<Option<_>>, Vec<bool>)| {
            let ranks = accesses.into_iter().map(Option::unwrap_or_default);
            let both = ranks.zip(waits);
            both.map(|(accesses, waits)| OnRank { accesses, waits })
                .collect()
        };
        let kernels = self.accesses.into_iter().zip(self.waits);
        kernels.map(of_kernel).collect()
    }

    /// Notes on which ranks the lanes of a launch wait, and for which.
    fn note_waits(&mut self, number: usize, rank: Rank, lane: usize) {
        let kernel = self.sequence[number];
        for step in &self.lanes[rank * self.width + lane].steps {
            let other = match &step.kind {
                LaneStepKind::Wait(peer) | LaneStepKind::Agree { peer, .. } => *peer,
                LaneStepKind::Announce { target, .. } => target.rank,
                LaneStepKind::Move {
                    targets, elements, ..
                } => {
                    let section = self.section(number, rank);
                    let packets = |part: &&Part| {
                        let scratch = section.scratch_of(part.tensor);
                        scratch.is_some_and(|scratch| scratch.packing.is_packets())
                    };
                    let to = targets.iter().filter(|_| *elements > 0).filter(packets);
                    for target in to {
                        self.waits[kernel][target.rank] = true;
                        self.waits[kernel][rank] = true;
                    }
                    continue;
                }
                LaneStepKind::Signal { .. } => continue,
            };
            self.waits[kernel][other] = true;
            self.waits[kernel][rank] = true;
        }
    }
}
