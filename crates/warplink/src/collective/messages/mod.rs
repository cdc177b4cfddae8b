//! Sends and receives between pairs of ranks, on any memory: groups of them, and what is made of groups.
//!
//! All messages of a group are one launch of `kernels/messages.cu`, which describes the protocol of a message. The
//! ranks of a pair agree on nothing but their messages: ranks that have none launch nothing, and others may differ in
//! how they group them.
//!
//! | module | subject |
//! |---|---|
//! | `group` | groups, and parts with sizes that the host gives |
//! | `on_device` | parts with sizes that only device memory has |
//! | `table` | the messages of a launch, as a kernel takes them |
//! | `lane` | one lane of a message, on a device that takes closures for kernels |
//! | `difference` | what is told of ends that do not fit |

mod difference;
mod group;
mod lane;
mod on_device;
mod table;

pub use group::{Message, Parts};

use crate::device::{
    Device, DeviceSlice, Launch, ModuleSource, Readying, SerialArguments, SerialKernel,
    SerialKernels, Stream,
};
use crate::error::{Error, ErrorKind, Rank, Result};
use crate::p2p::Direction;
use crate::program::execute::{Announced, Published, RankContext, SharedWorkspace};
use crate::program::section::WorkspaceLayout;
use lane::Ends;
pub(super) use on_device::check_apart;
use std::sync::atomic::{AtomicBool, Ordering};
use table::WHOLE_UNIT;
pub(super) use table::{Count, Entry};
use table::{LINE_DATA, SLOT_BYTES, Table};

/// The most messages of a group.
pub const MAX_MESSAGES: usize = table::MAX_MESSAGES;

/// Lanes of all peers in one direction: a launch has up to twice as many blocks. With half as many lanes, 1 MiB takes half
/// as long again (docs/performance.md).
const LANES: usize = 64;

/// Bytes from which on a message gets another lane: a packet of 8 for each thread.
const LANE_BYTES: usize = 4 << 10;

/// The most bytes that a lane moves as packets of 16 bytes, of which half is data: two for each thread.
const PACKED_BYTES: usize = 8 << 10;

/// The most bytes of a longer message that a lane moves as packets of 128 bytes: they cross the link in the time in which
/// sender and receiver hear of each other, and of 4 MiB on two ranks they are all.
const LINED_BYTES: usize = 128 << 10;

const THREADS: u32 = 512;

/// The name of the kernel.
const KERNEL: &str = "messages";

/// What a rank has for messages.
pub(super) struct Lines {
    workspace: SharedWorkspace,
    kernel: SerialKernel,
    shape: Shape,
    signals: DeviceSlice,
    /// What does not change from launch to launch.
    table: Table,
    waiting: DeviceSlice,
    /// The most blocks of a launch that starts before the one before has ended.
    early_blocks: u32,
    /// Whether anything was enqueued: where nothing was, nobody asks the device what became of it.
    used: AtomicBool,
}

/// How lines divide a workspace; the same on every rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    pub(super) rank: Rank,
    pub(super) world: usize,
    /// The most lanes of a message.
    pub(super) lanes: usize,
    /// Bytes of a chunk.
    pub(super) chunk: usize,
    /// The most bytes that a lane moves as packets of 16 bytes.
    pub(super) packed: usize,
    /// The most bytes of a longer message that a lane moves as packets of 128 bytes; none where links split these.
    pub(super) lined: usize,
}

impl Shape {
    /// What fits into `bytes` for chunks, and of which each of `ranks_per_device` ranks finds room on `multiprocessors`
    /// that have it for a block each. `lines` is whether links carry packets of 128 bytes whole.
    fn new(
        rank: Rank,
        world: usize,
        (ranks_per_device, multiprocessors): (usize, usize),
        bytes: usize,
        lines: bool,
    ) -> Self {
        // A lane has a block in each direction.
        let lanes = LANES.min(multiprocessors / 2) / (world * ranks_per_device);
        let lanes = 1 << lanes.max(1).ilog2();
        let chunk = bytes / (2 * lanes * world) / 16 * 16;
        Self {
            rank,
            world,
            lanes,
            chunk,
            packed: PACKED_BYTES.min(chunk),
            lined: if lines { LINED_BYTES.min(chunk) } else { 0 },
        }
    }

    /// Words of a rank's own: what waits in each direction of each peer, and how many messages each lane of these had.
    /// Signals are as many for each rank, of which two for each lane are used.
    fn words(&self) -> usize {
        self.number(true, self.world - 1, self.lanes)
    }

    /// Which word is the number of messages so far of a lane, in one direction of a peer.
    pub(super) fn number(&self, receives: bool, peer: Rank, lane: usize) -> usize {
        let line = usize::from(receives) * self.world + peer;
        2 * self.world + line * self.lanes + lane
    }

    /// Bytes of a workspace: for each lane and peer, two slots for headers in each direction, and for packets, and two
    /// chunks.
    fn workspace_bytes(&self) -> usize {
        self.chunks_from() + 2 * self.chunk * self.lanes * self.world
    }

    /// Bytes of a slot for packets.
    pub(super) fn room(&self) -> usize {
        self.lines_from() + self.lined.div_ceil(LINE_DATA) * 128
    }

    /// Where packets of 128 bytes begin in a slot. Their data may equal the flag of a packet of 16, so that no place is for
    /// both.
    pub(super) fn lines_from(&self) -> usize {
        (2 * self.packed).next_multiple_of(128)
    }

    /// Where packets begin in a workspace, behind headers.
    pub(super) fn packets_from(&self) -> usize {
        4 * SLOT_BYTES * self.lanes * self.world
    }

    /// Where chunks begin, behind packets.
    pub(super) fn chunks_from(&self) -> usize {
        self.packets_from() + 2 * self.room() * self.lanes * self.world
    }

    /// How many lanes a message of at most `bytes` bytes has; the same at both ends.
    fn lanes_of(&self, bytes: usize) -> usize {
        1 << (bytes / LANE_BYTES).clamp(1, self.lanes).ilog2()
    }
}

impl Lines {
    /// Allocates a workspace with `bytes` for chunks and maps those of the peers; receives find and publish memory with
    /// `beside`. A launch takes `multiprocessors` at most, the same on all ranks, or two for each rank where that is more.
    /// Blocks until all ranks do so: all succeed, or none.
    pub(super) fn join(
        context: &RankContext,
        beside: &SharedWorkspace,
        bytes: usize,
        multiprocessors: usize,
    ) -> Result<Self> {
        let sharing = context.ranks_per_device()?;
        let room = (sharing, multiprocessors);
        let device = context.device.properties();
        let mapped = |peer| Ok(context.memory.access(context.group.job_rank(peer)?)?.mapped);
        let mapped: Vec<bool> = (0..context.world()).map(mapped).collect::<Result<_>>()?;
        // Between host ranks there is no link; where a peer is not mapped, the workspace is behind the bus.
        let whole = device.shared || device.linked && !mapped.contains(&false);
        let lines = context.all_gather(&[u8::from(whole)])?;
        let lines = lines.iter().all(|lines| *lines == [1]);
        let shape = Shape::new(context.rank(), context.world(), room, bytes, lines);
        let layout = WorkspaceLayout::plain(shape.workspace_bytes());
        let workspace = beside.join_beside(context, layout, shape.words())?;
        let (waiting, verdicts) = workspace.state()?;
        let ranks = 0..shape.world;
        let mapped = |slice: Option<&DeviceSlice>| slice.cloned().ok_or_else(not_mapped);
        let workspaces: Vec<DeviceSlice> = ranks
            .clone()
            .map(|rank| mapped(workspace.memory(rank)))
            .collect::<Result<_>>()?;
        let signals: Vec<DeviceSlice> = ranks
            .map(|rank| mapped(workspace.signals(rank)))
            .collect::<Result<_>>()?;
        let tables = workspace.tables();
        let notes = [&waiting, &verdicts];
        let table = Table::new(&shape, &workspaces, &signals, notes, tables.address());
        let own = signals[shape.rank].clone();
        let ends = Ends {
            shape,
            workspaces,
            signals,
            waiting: waiting.clone(),
            tables: tables.clone(),
            stored: workspace.direct_word()?,
            fault: context.fault.clone(),
        };
        let source = ModuleSource::new("messages")
            .with_cuda(include_str!("../../../kernels/messages.cu"))
            .with_host_lanes(KERNEL, shape.world, ends);
        // SAFETY: the kernel accesses the workspaces as their shape says, and of a launch the memory of its
        // messages, whose lengths the table has.
        let loaded = unsafe { context.device.load_module(&source) };
        let checked = loaded.and_then(|module| {
            let kernel = module.kernel(KERNEL)?;
            let all = 2 * shape.lanes * shape.world;
            let launch = Launch::new(all as u32, THREADS);
            kernel.check_together(&launch, sharing)?;
            let early = |blocks: &u32| kernel.early(Launch::new(*blocks, THREADS), sharing).early;
            let counts: Vec<u32> = (1..=all as u32).collect();
            let early_blocks = counts.partition_point(early) as u32;
            let kernel = SerialKernels::default().ready(kernel, &launch, Readying::Always)?;
            Ok((kernel, early_blocks))
        });
        let (kernel, early_blocks) = context.agree_on(checked)?;
        Ok(Self {
            workspace,
            kernel,
            shape,
            signals: own,
            table,
            waiting,
            early_blocks,
            used: AtomicBool::new(false),
        })
    }

    /// Enqueues messages, of which those between the same ranks in the same direction happen one after the other
    /// and all others at the same time. Does not block.
    pub(super) fn enqueue(
        &self,
        entries: &[Entry<'_>],
        (stream, is_recorded): (&Stream, bool),
    ) -> Result<()> {
        if entries.is_empty() {
            return Ok(());
        }
        for entry in entries {
            self.check_unit(entry.unit)?;
        }
        let lanes = |bytes| self.shape.lanes_of(bytes);
        let published = |entry: &Entry<'_>| self.published(entry, (stream, is_recorded));
        let (words, blocks) = self.table.with(entries, lanes, published)?;
        let memory: Vec<&DeviceSlice> = entries.iter().flat_map(Entry::memory).collect();
        let arguments = SerialArguments {
            words: &words,
            signals: &self.signals,
            memory: &memory,
        };
        let launch = Launch::new(blocks, THREADS).with_early_start(blocks <= self.early_blocks);
        self.used.store(true, Ordering::Relaxed);
        self.kernel.launch(stream, &launch, &arguments)
    }

    /// Where senders find the memory of a receive that is too long for packets alone, which is published when it is first
    /// met.
    fn published(&self, entry: &Entry<'_>, stream: (&Stream, bool)) -> Option<Published> {
        let lanes = self.shape.lanes_of(entry.bytes);
        let is_direct = entry.direction == Direction::Receive
            && (entry.bytes > lanes * self.shape.packed.max(self.shape.lined)
                || entry.unit != WHOLE_UNIT && entry.bytes > lanes * self.shape.packed);
        is_direct
            .then(|| self.workspace.place(entry.data, stream))
            .flatten()
    }

    /// Fails where a unit is longer than a chunk.
    pub(super) fn check_unit(&self, bytes: usize) -> Result<()> {
        if bytes <= self.shape.chunk {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Unsupported,
            format!(
                "rows of {bytes} bytes; expected at most {} with this workspace",
                self.shape.chunk
            ),
        )
        .with_help("give the workspace more bytes"))
    }

    /// How many lanes have stored what they sent where it belongs. Blocks for as long as reading some bytes of the device
    /// takes.
    pub(super) fn direct_lanes(&self) -> Result<u64> {
        self.workspace.direct_lanes()
    }

    /// The peer of a message that has begun here and not there, and what this rank does. Blocks for as long as
    /// reading some bytes of the device takes.
    pub(super) fn awaited(&self, device: &dyn Device) -> Result<Option<(Rank, Direction)>> {
        if !self.used.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let world = self.shape.world;
        let mut words = vec![0; 8 * 2 * world];
        device.download(&self.waiting.slice(0..words.len())?, &mut words)?;
        let first = words
            .chunks_exact(8)
            .position(|word| word.iter().any(|byte| *byte != 0));
        Ok(first.map(|number| {
            let receives = number >= world;
            let direction = if receives {
                Direction::Receive
            } else {
                Direction::Send
            };
            (number % world, direction)
        }))
    }

    /// The error of ends that do not fit, where a kernel has noted that. Blocks for as long as reading some bytes
    /// of the device takes. Devices that take closures fail the stream instead.
    pub(super) fn disagreement(&self) -> Result<Option<Error>> {
        if !self.used.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let noted = self.workspace.disagreement()?;
        Ok(noted.map(|(peer, announced)| {
            let words = match announced {
                Announced::Other(words) => words,
                // Messages tell of no memory.
                Announced::UnknownMemory => Vec::new(),
            };
            difference::noted(&words).with_peer(peer)
        }))
    }
}

fn not_mapped() -> Error {
    Error::new(
        ErrorKind::Internal,
        "a workspace for messages is not mapped",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_have_words_of_their_own_and_fit_the_multiprocessors() {
        for world in 1..=8 {
            for sharing in 1..=world {
                let shape = Shape::new(0, world, (sharing, usize::MAX), 1 << 20, true);
                let mut words: Vec<usize> = (0..2 * world).collect();
                for (receives, peer) in [false, true]
                    .into_iter()
                    .flat_map(|d| (0..world).map(move |p| (d, p)))
                {
                    words.extend((0..shape.lanes).map(|lane| shape.number(receives, peer, lane)));
                }
                assert!(words.iter().copied().eq(0..shape.words()), "{shape:?}");
                assert!(shape.words() >= 2 * shape.lanes, "{shape:?}");
                for multiprocessors in [16, 78, 114, 132] {
                    let room = (sharing, multiprocessors);
                    let blocks =
                        2 * Shape::new(0, world, room, 1 << 20, true).lanes * world * sharing;
                    let least = 2 * world * sharing;
                    assert!(blocks <= multiprocessors.max(least), "{blocks} of {room:?}");
                }
            }
        }
    }
}
