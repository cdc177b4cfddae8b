//! Messages by the kernel `kernels/messages.cu`, which documents the protocol, where programs do not send them: also of rows
//! by index, whose number device memory has, for experts.
//!
//! Both ends state their lengths and compare them before data is written to its destination, so a mismatch is
//! detected at both. The first bytes of a lane are packets in slots that alternate by message, so the sender
//! waits for nobody; the rest is stored directly into the receiver's memory if that is published, and
//! otherwise goes through chunks of the workspace. A lane's slot follows from its message count, which both
//! ends track, and every signal is consumed within its message.
//!
//! `table` encodes the messages of a launch for the kernel.

mod table;

use super::{MessageShape, THREADS, difference};
use crate::device::{
    Device, DeviceSlice, Launch, ModuleSource, Readying, SerialArguments, SerialKernel,
    SerialKernels, Stream,
};
use crate::error::{Error, ErrorKind, Rank, Result};
use crate::p2p::Direction;
use crate::program::execute::{Announced, Published, RankContext, SharedWorkspace};
use crate::program::section::WorkspaceLayout;
use std::sync::atomic::{AtomicBool, Ordering};
pub(in crate::collective) use table::{Count, Entry};
use table::{LINE_DATA, SLOT_BYTES, Table};

/// Name of the kernel.
const KERNEL: &str = "messages";

/// A rank's state for messages of rows.
pub(in crate::collective) struct RowMessages {
    workspace: SharedWorkspace,
    kernel: SerialKernel,
    shape: MessageShape,
    signals: DeviceSlice,
    /// Words that are the same in every launch.
    table: Table,
    waiting: DeviceSlice,
    /// Maximum blocks of a launch that may start early.
    early_blocks: u32,
    /// Whether anything was ever enqueued; if not, the device need not be queried for errors.
    used: AtomicBool,
}

impl MessageShape {
    /// This rank's words: waiting state for each direction and peer, and message counts of their lanes. Each
    /// rank has equally many signals, two for each lane.
    fn words(&self) -> usize {
        self.number(true, self.world - 1, self.lanes)
    }

    /// Index of the word that counts messages of a lane.
    fn number(&self, receives: bool, peer: Rank, lane: usize) -> usize {
        let line = usize::from(receives) * self.world + peer;
        2 * self.world + line * self.lanes + lane
    }

    /// Size of a workspace: for each lane and peer, header slots and packet slots for both parities and
    /// directions, and two chunks.
    fn workspace_bytes(&self) -> usize {
        self.chunks_from() + 2 * self.chunk * self.lanes * self.world
    }

    /// Size of a packet slot.
    fn room(&self) -> usize {
        self.lines_from() + self.lined.div_ceil(LINE_DATA) * 128
    }

    /// Offset of 128-byte packets in a slot. They never share memory with 16-byte packets, whose flag their
    /// data might equal.
    fn lines_from(&self) -> usize {
        (2 * self.packed).next_multiple_of(128)
    }

    /// Offset of packets in a workspace, after the headers.
    fn packets_from(&self) -> usize {
        4 * SLOT_BYTES * self.lanes * self.world
    }

    /// Offset of chunks, after the packets.
    fn chunks_from(&self) -> usize {
        self.packets_from() + 2 * self.room() * self.lanes * self.world
    }
}

impl RowMessages {
    /// Allocates a workspace with `bytes` for chunks and maps the peers'. Receives use the publication of the direct
    /// path `beside`. A launch uses at most `multiprocessors`, equal on all ranks, or two for each rank if that is
    /// more. Collective: all ranks succeed or none.
    pub(in crate::collective) fn join(
        context: &RankContext,
        beside: &SharedWorkspace,
        bytes: usize,
        multiprocessors: usize,
    ) -> Result<Self> {
        let sharing = context.ranks_per_device()?;
        let shape = MessageShape::of(context, bytes, multiprocessors)?;
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
        let source = ModuleSource::new("messages")
            .with_cuda(include_str!("../../../../kernels/messages.cu"));
        // SAFETY: the kernel accesses the workspaces within their shape, and the memory of a launch's messages within
        // the lengths in the table.
        let loaded = unsafe { context.device.load_module(&source) };
        let checked = loaded.and_then(|module| {
            let kernel = module.kernel(KERNEL)?;
            let all = 2 * shape.lanes * shape.world;
            let launch = Launch::new(all as u32, THREADS);
            // All lanes of a launch may wait for one another's peers, so they must be resident together.
            kernel.check_together(&launch, sharing)?;
            let early = |blocks: &u32| kernel.early(Launch::new(*blocks, THREADS), sharing).early;
            // The largest number of blocks that may start early.
            let counts: Vec<u32> = (1..=all as u32).collect();
            let early_blocks = counts.partition_point(early) as u32;
            // Prepared at joining, where waiting for the device is allowed.
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

    /// Enqueues messages: those of one pair and direction in order, all others concurrently. Does not block.
    pub(in crate::collective) fn enqueue(
        &self,
        entries: &[Entry<'_>],
        (stream, is_recorded): (&Stream, bool),
    ) -> Result<()> {
        if entries.is_empty() {
            return Ok(());
        }
        // Before anything is enqueued, so that no part of the group is sent.
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
        // A larger launch would occupy space that kernels of other streams need.
        let launch = Launch::new(blocks, THREADS).with_early_start(blocks <= self.early_blocks);
        // Relaxed: a hint that only saves queries; the stream orders the data.
        self.used.store(true, Ordering::Relaxed);
        self.kernel.launch(stream, &launch, &arguments)
    }

    /// Published location of the memory of a receive too long for packets, which is published on first use.
    fn published(&self, entry: &Entry<'_>, stream: (&Stream, bool)) -> Option<Published> {
        let lanes = self.shape.lanes_of(entry.bytes);
        // Packets alone suffice for short messages, so publishing their memory would gain nothing.
        let is_direct =
            entry.direction == Direction::Receive && entry.bytes > lanes * self.shape.packed;
        is_direct
            .then(|| self.workspace.place(entry.data, stream))
            .flatten()
    }

    /// Fails if a unit exceeds a chunk.
    pub(in crate::collective) fn check_unit(&self, bytes: usize) -> Result<()> {
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

    /// Number of lanes that stored directly. Blocks while it reads some bytes of the device.
    pub(in crate::collective) fn direct_lanes(&self) -> Result<u64> {
        self.workspace.direct_lanes()
    }

    /// Peer of a message that has begun here but not there, and its direction. Blocks while it reads some
    /// bytes of the device.
    pub(in crate::collective) fn awaited(
        &self,
        device: &dyn Device,
    ) -> Result<Option<(Rank, Direction)>> {
        // Relaxed: a hint that saves the query, as in `enqueue`.
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

    /// Error of mismatched ends, if a kernel recorded one. Blocks while it reads some bytes of the device.
    /// The host device fails the stream instead.
    pub(in crate::collective) fn disagreement(&self) -> Result<Option<Error>> {
        // Relaxed: a hint that saves the query, as in `enqueue`.
        if !self.used.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let noted = self.workspace.disagreement()?;
        Ok(noted.map(|(peer, announced)| {
            let words = match announced {
                Announced::Other(words) => words,
                // Messages announce no memory.
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
    fn lines_have_words_of_their_own() {
        for world in 1..=8 {
            let shape = MessageShape::new(0, world, (1, usize::MAX), 1 << 20, true);
            let mut words: Vec<usize> = (0..2 * world).collect();
            for (receives, peer) in [false, true]
                .into_iter()
                .flat_map(|d| (0..world).map(move |p| (d, p)))
            {
                words.extend((0..shape.lanes).map(|lane| shape.number(receives, peer, lane)));
            }
            assert!(words.iter().copied().eq(0..shape.words()), "{shape:?}");
            assert!(shape.words() >= 2 * shape.lanes, "{shape:?}");
        }
    }
}
