//! Launch boundaries: start and end of lanes, and accesses of the rank's stream to its tensors between launches.

use super::Does;
use super::knowledge::{Knowledge, Stamp};
use super::memory::{AreaHistory, RankMemory, STREAM, Touch};
use super::state::{Finding, LaneRun, NotedAccesses};
use crate::error::Rank;
use crate::program::diagnostic::{Diagnostic, DiagnosticKind};
use crate::program::ir::Role;
use crate::program::machine::{Actor, Machine};
use crate::program::rank_program::Range;
use crate::program::section::{LaneStep, Packing, SectionMemory, WorkspaceLayout};
use crate::program::verify::kernel_accesses::{OnRank, either};
use crate::program::verify::memory::Mode as AccessMode;

impl<'a> LaneRun<'a> {
    /// Initializes the memory of a rank before the first launch.
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
            // All kernels of the program share one memory, whichever of them a launch runs.
            let section = kernel.sections[rank];
            for tensor in section.user_tensors() {
                let bytes = self.ranks[rank].tensors[tensor].bytes;
                let fresh = || AreaHistory::new(bytes, Some(before));
                memory
                    .entry(RankMemory::Tensor(tensor))
                    // The stream writes all tensors before the first launch, so a peer's access is a race unless it
                    // follows the start of the launch.
                    .or_insert_with(fresh);
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
                // Scratch is uninitialized: to read it before a launch has written it is a violation.
                memory.insert(RankMemory::Area(packing), AreaHistory::new(bytes, None));
            }
        }
    }

    /// Starts the lanes of a rank's next launch.
    pub(super) fn launch(
        &mut self,
        rank: Rank,
        machine: &mut Machine<Knowledge>,
    ) -> Result<(), Diagnostic> {
        let number = self.streams[rank].launch;
        if number == self.sequence.len() {
            return Ok(());
        }
        // Before the steps of the next launch are counted, or the limit would hold for two launches at once.
        self.release(rank);
        let lanes = self.section(number, rank).lanes;
        // The stream has joined the clocks of all lanes of earlier launches. A lane's time continues across launches.
        // All lanes start from the same clock, which they share as a base instead of copying what they change in its
        // tree.
        let knows = self.streams[rank].knows.based(rank, number);
        let mut all = Vec::with_capacity(lanes);
        for lane in 0..lanes {
            let steps = self.steps(number, rank, lane)?;
            let index = self.lane_number(rank, lane);
            self.knows[index] = knows.clone();
            self.knows[index].meet();
            self.admit(number, rank, &steps)?;
            all.push(steps);
        }
        machine.start(rank, number, all);
        Ok(())
    }

    /// Counts, checks and records steps that a lane is going to take.
    pub(super) fn admit(
        &mut self,
        number: usize,
        rank: Rank,
        steps: &[LaneStep],
    ) -> Result<(), Diagnostic> {
        self.count(rank, steps)?;
        self.note_waits(number, rank, steps);
        self.check_inputs(number, rank, steps)
    }

    /// Rejects writes to read-only inputs of the caller.
    fn check_inputs(
        &self,
        number: usize,
        rank: Rank,
        steps: &[LaneStep],
    ) -> Result<(), Diagnostic> {
        // Later launches of a kernel make the same accesses, so checking the first suffices.
        if self.accesses[self.sequence[number]][rank].is_some() && !self.words.are_read() {
            return Ok(());
        }
        for step in steps {
            for target in step.kind.targets() {
                // A name may denote one tensor on this rank and another on the rank where it is written.
                let theirs = self.section(number, target.rank);
                let tensor = &theirs.tensors[target.tensor];
                let SectionMemory::Tensor(id) = tensor.memory else {
                    continue;
                };
                let role = self.ranks[target.rank].tensors[id].role;
                if tensor.read_only || role == Role::Input {
                    let message = format!(
                        "the input '{}' is written; expected an output or an allocated tensor",
                        tensor.name
                    );
                    let at = (rank, &step.site);
                    return Err(Diagnostic::at(DiagnosticKind::InputWritten, at, message));
                }
            }
        }
        Ok(())
    }

    /// Ends a launch; between two launches, the stream writes all tensors.
    pub(super) fn end(&mut self, rank: Rank) {
        let number = self.streams[rank].launch;
        for lane in 0..self.section(number, rank).lanes {
            let index = self.lane_number(rank, lane);
            self.knows[index].meet();
            self.streams[rank].knows.join(&self.knows[index]);
        }
        self.note_accesses(number, rank);
        // `based` of the next launch requires a clock without bases, and this merges what the lanes learned once
        // instead of per lane.
        self.streams[rank].knows.flatten();
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
        let tensors = &self.ranks[rank].tensors;
        let proof = knows.kept(Some(&stamp), &[]);
        let mut found = Vec::new();
        for (place, bytes) in &mut self.memory[rank] {
            let RankMemory::Tensor(id) = place else {
                continue;
            };
            // Also tensors that only other kernels use: the caller may write any tensor between launches.
            let memory = (rank, &*tensors[*id].name);
            let all = 0..tensors[*id].bytes;
            bytes.write(&all, None, stamp, (&knows, &[], &proof), |wrong| {
                found.push(Finding {
                    actor: stamp.actor,
                    writes: true,
                    memory,
                    wrong,
                });
            });
        }
        for finding in found {
            self.find(finding);
        }
        self.streams[rank].launch += 1;
    }

    fn note_accesses(&mut self, number: usize, rank: Rank) {
        let mut list = Vec::new();
        for (place, bytes) in &self.memory[rank] {
            let RankMemory::Tensor(tensor) = *place else {
                continue;
            };
            for (range, touch) in bytes.touches(number as u32) {
                let mode = match touch {
                    Touch::Read => AccessMode::Read,
                    Touch::Write => AccessMode::Write,
                    Touch::Update => AccessMode::Update,
                };
                list.push((Range::of(tensor, range), mode));
            }
        }
        let kernel = self.sequence[number];
        let Some(noted) = &self.accesses[kernel][rank] else {
            self.accesses[kernel][rank] = Some(NotedAccesses {
                first: list,
                any: None,
            });
            return;
        };
        let first = &noted.first;
        if *first == list {
            return;
        }
        let before = self.sequence.iter().position(|other| *other == kernel);
        let before = before.unwrap_or(number);
        if self.read_alike(before, number) {
            let more = list.iter().find(|access| !first.contains(access));
            let less = || first.iter().find(|access| !list.contains(access));
            let differs = match more {
                Some((range, _)) => Some((number, *range)),
                None => less().map(|(range, _)| (before, *range)),
            };
            self.unsteady
                .extend(differs.map(|(launch, range)| (rank, launch, range)));
        } else {
            // Accesses that depend on values may differ from launch to launch, so the rest of the program takes them as
            // possible only.
            let any = either(noted.any.as_ref().unwrap_or(first), &list);
            let first = first.clone();
            let any = Some(any);
            self.accesses[kernel][rank] = Some(NotedAccesses { first, any });
        }
    }

    /// Effects of each kernel on each rank.
    pub(super) fn done(self) -> Vec<Does> {
        let of_kernel = |(accesses, waits): (Vec<Option<NotedAccesses>>, Vec<bool>)| {
            let ranks = accesses.into_iter().map(Option::unwrap_or_default);
            let ranks = ranks.map(|noted| noted.any.unwrap_or(noted.first));
            let both = ranks.zip(waits);
            both.map(|(accesses, waits)| OnRank { accesses, waits })
                .collect()
        };
        let kernels = self.accesses.into_iter().zip(self.waits);
        kernels.map(of_kernel).collect()
    }

    /// Records on which ranks a lane of a launch waits, and for which ranks.
    fn note_waits(&mut self, number: usize, rank: Rank, steps: &[LaneStep]) {
        let section = self.section(number, rank);
        let waits = &mut self.waits[self.sequence[number]];
        for step in steps.iter().filter(|step| !step.kind.is_empty()) {
            // Packets make their reader wait, and the reader is not known here: the owner of the memory and the
            // sender both count as waiting.
            let to = step.kind.targets().iter();
            let packets = to.filter(|target| section.packets_of(target).is_some());
            for other in packets.map(|target| target.rank).chain(step.kind.awaits()) {
                waits[other] = true;
                waits[rank] = true;
            }
        }
    }
}
