//! Programs of two ranks, which any two ranks of a group run: many at a time, in one launch.
//!
//! A *line* is one of the program's two ranks with one peer as the other. A *message* is one launch of the program in
//! a line; both ends count them, so that a launch may have any messages of any lines, and ranks may divide the same
//! messages differently between launches. Lanes of a line interact only with those of its other end. Each pair of ranks
//! has a region of its own in the workspaces and signals of both: the lines of its two directions share it, so a program
//! must not use the same scratch of both ranks.
//!
//! The launch carries all that differs between messages: the memory of the data, and some words that the program
//! reads as integers.

mod kernels;
mod lanes;
mod table;

pub(crate) use table::{CARRIED_WORDS, MAX_MESSAGES, MessageMemory, PairMessage};

use super::context::RankContext;
use super::lane::TellDifference;
use super::publication::Published;
use super::reach::{Announced, EPOCH_BYTES, Reach, VERDICT_BYTES, has_announced, read_words};
use super::workspace::SharedWorkspace;
use crate::device::{Device, DeviceSlice, Launch, ModuleSource, SerialArguments, Stream};
use crate::error::{Error, Rank, Result};
use crate::program::section::StepCache;
use crate::program::section::{
    KERNEL, PairLayout, SectionInstance, SectionMemory, WorkspaceLayout, pair_text,
};
use kernels::{LoadedKernel, PairKernels};
use lanes::PairLanes;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use table::{FIXED_WORDS, MAX_RANKS, encode};

/// Scratch of the announcements by which both ends of a message tell that they have begun: by slot, lane and rank.
const ANNOUNCEMENTS: &str = "S";

/// Alignment of regions in a workspace.
// Regions of different peers share no cache line, and every packing is aligned in each.
const REGION_ALIGNMENT: usize = 256;

/// A program for pairs of ranks.
pub(crate) struct PairProgram {
    /// The kernel of each of its two ranks.
    pub(crate) sections: [SectionInstance; 2],
    /// Maximum messages of a launch of each of its kernels, in ascending order.
    pub(crate) max_messages: Vec<usize>,
    /// Tensors that are the count of a message; the others are its data.
    pub(crate) counts: &'static [&'static str],
    /// Error of mismatched announcements, for each of its ranks.
    pub(crate) tell: [Arc<TellDifference>; 2],
    /// Description of its ranks' operation, for errors.
    pub(crate) operations: [&'static str; 2],
}

/// Division of a rank's counts and signals among lines.
#[derive(Clone, Copy, Debug)]
pub(super) struct PairState {
    world: usize,
    /// Lanes of the program.
    pub(super) lanes: usize,
}

impl PairState {
    /// Index of a line.
    pub(super) const fn line(self, role: usize, peer: Rank) -> usize {
        role * self.world + peer
    }

    /// Index of the first signal for a peer.
    pub(super) const fn first_signal(self, peer: Rank) -> usize {
        2 * self.lanes * peer
    }

    /// Offset of the verdict on a line's announcements; they follow the counts.
    const fn verdict(self, line: usize) -> usize {
        EPOCH_BYTES * 2 * self.world * self.lanes + VERDICT_BYTES * line
    }

    /// Words of all counts and verdicts.
    const fn words(self) -> usize {
        self.verdict(2 * self.world).div_ceil(EPOCH_BYTES)
    }
}

/// A mismatched announcement of a line, which a kernel has recorded.
#[derive(Debug)]
pub(crate) struct PairDifference {
    pub(crate) peer: Rank,
    pub(crate) role: usize,
    pub(crate) announced: Announced,
}

/// Programs of pairs that share a workspace: messages of each may follow those of others.
pub(crate) struct Pairs {
    device: Arc<dyn Device>,
    workspace: SharedWorkspace,
    kernels: Vec<PairKernels>,
    signals: DeviceSlice,
    counts: DeviceSlice,
    state: PairState,
    threads: u32,
    /// Words that are the same in every launch.
    fixed: [u64; FIXED_WORDS],
    /// For each line, the announcements of this rank and of the peer.
    announced: Vec<[Announcements; 2]>,
    /// Whether anything was ever enqueued; if not, the device need not be queried.
    used: AtomicBool,
}

impl Pairs {
    /// Allocates a workspace and maps those of the peers; data is published beside that of `beside`. The
    /// programs have the same lanes and threads. Collective: every rank calls it with the same programs.
    /// Blocks until all have: all succeed, or none does.
    pub(crate) fn join(
        context: &RankContext,
        beside: &SharedWorkspace,
        programs: Vec<PairProgram>,
    ) -> Result<Self> {
        let (rank, world) = (context.rank(), context.world());
        let first = programs.first().map(|program| &program.sections[0]);
        let first = first.ok_or_else(|| Error::internal("no program of pairs"))?;
        let (threads, state) = (
            first.threads as u32,
            PairState {
                world,
                lanes: first.lanes,
            },
        );
        let scratch = programs.iter().map(|program| &program.sections[0].scratch);
        let layout = WorkspaceLayout::of(scratch.flat_map(|scratch| scratch.iter()));
        let region = layout.bytes().next_multiple_of(REGION_ALIGNMENT);
        let workspace = beside.join_beside(
            context,
            WorkspaceLayout::plain(region * world),
            state.words(),
        )?;
        let mapped = |slice: Option<&DeviceSlice>| slice.cloned().ok_or_else(not_mapped);
        let (counts, rest) = workspace.state()?;
        let own_signals = mapped(workspace.signals(rank))?;
        let own = mapped(workspace.memory(rank))?;
        let (mut reaches, mut announced) = (Vec::new(), Vec::new());
        for role in 0..2 {
            for peer in 0..world {
                let theirs = mapped(workspace.memory(peer))?;
                let mut regions = [
                    own.slice(region * peer..region * (peer + 1))?,
                    theirs.slice(region * rank..region * (rank + 1))?,
                ];
                let mut signals = [own_signals.clone(), mapped(workspace.signals(peer))?];
                // The program names memory by its own two ranks, whichever of the group's they are.
                if role == 1 {
                    regions.reverse();
                    signals.reverse();
                }
                announced.push(announcements(first, &layout, (role, &regions))?);
                reaches.push(Reach {
                    layout: layout.clone(),
                    workspaces: regions.map(Some).into(),
                    signals: signals.map(Some).into(),
                    state: counts.clone(),
                    lanes: state.lanes,
                    ranks_per_device: 1,
                    tensors: vec![Default::default(); 2],
                });
            }
        }
        let mut fixed = [0; FIXED_WORDS];
        for peer in 0..world {
            fixed[peer] = mapped(workspace.memory(peer))?.address();
            fixed[MAX_RANKS + peer] = mapped(workspace.signals(peer))?.address();
        }
        let count = rest.address() + (VERDICT_BYTES * world) as u64;
        let tables = workspace.tables().clone();
        let last = [
            counts.address(),
            count,
            tables.address(),
            rank as u64,
            world as u64,
        ];
        fixed[2 * MAX_RANKS..FIXED_WORDS - 1].copy_from_slice(&last);
        let reaches: Arc<[Reach]> = reaches.into();
        let direct = workspace.direct_word()?;
        let sharing = context.ranks_per_device()?;
        let largest = Launch::new((2 * state.lanes * world) as u32, threads);
        let load = |program: PairProgram| {
            let sections = program.sections.map(Arc::new);
            let lanes = PairLanes {
                rank,
                sections: sections.clone(),
                caches: <[StepCache; 2]>::default(),
                memory: memory(&sections[0], program.counts),
                state,
                reaches: reaches.clone(),
                direct: direct.clone(),
                tables: tables.clone(),
                tell: program.tell,
                operations: program.operations,
                fault: context.fault.clone(),
            };
            let host = ModuleSource::new("messages").with_host_lanes(KERNEL, world, lanes);
            let source = |max_messages| {
                let (sections, counts) = (sections.clone(), program.counts);
                let layout = PairLayout {
                    layout: layout.clone(),
                    region,
                    max_messages,
                };
                let text = move || pair_text(&sections, &layout, counts);
                host.clone().with_written_cuda(text)
            };
            let limits = (&largest, sharing);
            PairKernels::load(&*context.device, &program.max_messages, source, limits)
        };
        let kernels = programs.into_iter().map(load).collect::<Result<Vec<_>>>();
        Ok(Self {
            device: context.device.clone(),
            // A rank whose compilation failed must not leave the others with a workspace that waits for it.
            kernels: context.agree_on(kernels)?,
            workspace,
            signals: own_signals,
            counts,
            state,
            threads,
            fixed,
            announced,
            used: AtomicBool::new(false),
        })
    }

    /// Location of `slice` among this rank's published memory, for a message of a launch on `stream`, which may be
    /// recorded by a graph; `None` for memory that cannot be published. Does not block.
    pub(crate) fn place(&self, slice: &DeviceSlice, stream: (&Stream, bool)) -> Option<Published> {
        self.workspace.place(slice, stream)
    }

    /// Enqueues messages of a program, by its number: those of one line in order, all others concurrently. Does not
    /// block.
    pub(crate) fn enqueue(
        &self,
        program: usize,
        messages: &[PairMessage<'_>],
        stream: (&Stream, bool),
    ) -> Result<()> {
        let LoadedKernel {
            kernel,
            max_messages,
            early_blocks,
        } = self.kernels[program].of(messages.len())?;
        let (words, blocks) = encode(&self.fixed, messages, *max_messages);
        let memory: Vec<&DeviceSlice> = messages.iter().flat_map(PairMessage::memory).collect();
        let arguments = SerialArguments {
            words: &words,
            signals: &self.signals,
            memory: &memory,
        };
        // A larger launch would occupy space that kernels of other streams need.
        let launch = Launch::new(blocks, self.threads);
        let launch = launch.with_early_start(blocks <= *early_blocks);
        // Relaxed: a hint that only saves queries; the stream orders the data.
        self.used.store(true, Ordering::Relaxed);
        kernel.launch(stream, &launch, &arguments)
    }

    /// Number of lanes that found the data of both ends reachable. Blocks while it reads some bytes of the device.
    pub(crate) fn direct_lanes(&self) -> Result<u64> {
        self.workspace.direct_lanes()
    }

    /// A line whose next message has begun here but not at the peer, as its role and peer. Blocks while it reads some
    /// bytes of the device.
    pub(crate) fn awaited(&self) -> Result<Option<(usize, Rank)>> {
        // Relaxed: a hint that saves the query, as in `enqueue`.
        if !self.used.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let device = &*self.device;
        for role in 0..2 {
            for peer in 0..self.state.world {
                let line = self.state.line(role, peer);
                let from = EPOCH_BYTES * line * self.state.lanes;
                let count = self.counts.slice(from..from + EPOCH_BYTES)?;
                let epoch = read_words(device, &count)?[0];
                let has_begun = |announced: &Announcements| {
                    has_announced(device, &announced[(epoch % 2) as usize], epoch)
                };
                let [own, theirs] = &self.announced[line];
                if has_begun(own)? && !has_begun(theirs)? {
                    return Ok(Some((role, peer)));
                }
            }
        }
        Ok(None)
    }

    /// Mismatched announcements, if a kernel has recorded any. Blocks while it reads some bytes of the device. Devices
    /// that take closures fail the stream instead.
    pub(crate) fn disagreement(&self) -> Result<Option<PairDifference>> {
        // Relaxed: a hint that saves the query, as in `enqueue`.
        if !self.used.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let verdicts = self.state.verdict(0)..self.state.verdict(2 * self.state.world);
        let first = Announced::first(&*self.device, &self.counts.slice(verdicts)?)?;
        Ok(first.map(|(line, announced)| PairDifference {
            peer: line % self.state.world,
            role: line / self.state.world,
            announced,
        }))
    }
}

/// Memory of a message that each tensor of a program is.
fn memory(section: &SectionInstance, counts: &[&str]) -> Vec<MessageMemory> {
    let mut memory = Vec::new();
    for tensor in &section.tensors {
        if let SectionMemory::Tensor(id) = tensor.memory {
            if memory.len() <= id {
                memory.resize(id + 1, MessageMemory::Data);
            }
            if counts.contains(&&*tensor.name) {
                memory[id] = MessageMemory::Count;
            }
        }
    }
    memory
}

/// Packets by which lane 0 announces a message.
type Announcements = [DeviceSlice; 2];

/// Announcements in both slots by the program's rank `role`, and by the other one; `regions` are the memory of both.
fn announcements(
    section: &SectionInstance,
    layout: &WorkspaceLayout,
    (role, regions): (usize, &[DeviceSlice; 2]),
) -> Result<[Announcements; 2]> {
    let mut scratch = section.scratch.iter();
    let rows = scratch.find(|scratch| &*scratch.name == ANNOUNCEMENTS);
    let rows = rows
        .filter(|rows| rows.strides.len() == 4)
        .ok_or_else(|| Error::internal("a program of pairs announces nothing"))?;
    let area = layout.area(rows.packing).offset_bytes;
    let packet = |of: usize, slot: usize| {
        let packet = rows.packed(slot * rows.strides[0] + of * rows.strides[2], 1);
        let packet = packet.unwrap_or_default();
        regions[1 - of].slice(area + packet.start..area + packet.end)
    };
    let of = |of: usize| -> Result<Announcements> { Ok([packet(of, 0)?, packet(of, 1)?]) };
    Ok([of(role)?, of(1 - role)?])
}

fn not_mapped() -> Error {
    Error::internal("a workspace for messages is not mapped")
}
