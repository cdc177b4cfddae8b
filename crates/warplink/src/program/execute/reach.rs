//! Memory that the kernels of a plan access, and the addresses that a launch is bound to.

use crate::device::{Device, DeviceSlice};
use crate::error::{Rank, Result};
use crate::program::rank_program::TensorId;
use crate::program::section::{
    Addresses, SectionInstance, SectionMemory, SectionTensor, WorkspaceLayout,
};
use std::collections::BTreeMap;

/// Bytes of an epoch.
pub(super) const EPOCH_BYTES: usize = 8;

/// Bytes of a verdict on a peer's announcement: its words, a byte for each packet, and this rank's words in packets that
/// differ. Must match `agree` in the kernels.
pub(super) const VERDICT_BYTES: usize = 2 * VERDICT_WORDS_BYTES + 8;

/// Packet byte in a verdict that reports memory unknown to this rank. Must match `agree` too.
const UNKNOWN_MEMORY: u8 = 2;

/// Bytes of an announcement in a verdict. Must match `agree` too.
const VERDICT_WORDS_BYTES: usize = 64;

/// Bytes of the count of lanes that found all announced tensors reachable; it follows the verdicts.
pub(super) const DIRECT_BYTES: usize = 8;

/// Bytes of the note of a value that is out of range; it follows that count. Must match `checked` in the kernels.
pub(super) const VALUE_NOTE_BYTES: usize = 48;

/// A mismatched announcement of another rank.
#[derive(Debug)]
pub(crate) enum Announced {
    /// Integers that differ.
    Other {
        /// This rank's.
        own: Vec<u32>,
        /// The other rank's.
        theirs: Vec<u32>,
    },
    /// Memory that this rank no longer maps.
    UnknownMemory,
}

impl Announced {
    /// The first difference that kernels have recorded in `verdicts`, with its number. Blocks for the time of a small
    /// read from the device.
    pub(super) fn first(
        device: &dyn Device,
        verdicts: &DeviceSlice,
    ) -> Result<Option<(usize, Self)>> {
        let mut bytes = vec![0; verdicts.bytes()];
        device.download(verdicts, &mut bytes)?;
        Ok(Self::first_of(&bytes))
    }

    /// The first difference in the bytes of verdicts, with its number.
    pub(super) fn first_of(verdicts: &[u8]) -> Option<(usize, Self)> {
        let mut verdicts = verdicts.chunks_exact(VERDICT_BYTES).enumerate();
        verdicts.find_map(|(number, verdict)| Some((number, Self::read(verdict)?)))
    }

    /// Reads a verdict. `None` if kernels have recorded no difference there.
    fn read(verdict: &[u8]) -> Option<Self> {
        let (theirs, rest) = verdict.split_at(VERDICT_WORDS_BYTES);
        let (differ, own) = rest.split_at(rest.len() - VERDICT_WORDS_BYTES);
        // The kernel stores the words first and these bytes last, so a verdict that is being written reads as none.
        if differ.iter().all(|byte| *byte == 0) {
            return None;
        }
        if differ.contains(&UNKNOWN_MEMORY) {
            return Some(Self::UnknownMemory);
        }
        let (mut own, theirs) = (announced_words(own), announced_words(theirs));
        // Only packets that differ are recorded of this rank's.
        let packets = own.chunks_exact_mut(2).zip(theirs.chunks_exact(2));
        for ((own, theirs), differs) in packets.zip(differ) {
            if *differs == 0 {
                own.copy_from_slice(theirs);
            }
        }
        Some(Self::Other { own, theirs })
    }
}

/// Words of an announcement.
pub(super) fn announced_words(bytes: &[u8]) -> Vec<u32> {
    let words = bytes.chunks_exact(4);
    words
        .map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]]))
        .collect()
}

/// Words of `memory`. Blocks for the time of a small read from the device.
pub(super) fn read_words(device: &dyn Device, memory: &DeviceSlice) -> Result<Vec<u64>> {
    let mut bytes = vec![0; memory.bytes()];
    device.download(memory, &mut bytes)?;
    let (words, _) = bytes.as_chunks();
    Ok(words.iter().copied().map(u64::from_le_bytes).collect())
}

/// Flag of packets of 8 and 16 bytes in the launch that follows `epoch` launches. Never 0, the initial contents of
/// memory.
pub(super) fn packet_flag(epoch: u64) -> u32 {
    1 + (epoch % u64::from(u32::MAX)) as u32
}

/// Whether the launch of `epoch` has stored the packet of an announcement. Blocks for the time of a small read from the
/// device.
pub(super) fn has_announced(device: &dyn Device, packet: &DeviceSlice, epoch: u64) -> Result<bool> {
    // Devices flag 16-byte packets with the lower half of the epoch, which differs from `packet_flag` after four
    // billion launches.
    let flags = [packet_flag(epoch), (epoch + 1) as u32].map(u32::to_le_bytes);
    let mut bytes = [0; 16];
    device.download(packet, &mut bytes)?;
    Ok(flags.iter().any(|flag| bytes[4..8] == *flag))
}

/// Memory of all ranks that kernels access, as mapped here.
#[derive(Debug)]
pub(super) struct Reach {
    pub(super) layout: WorkspaceLayout,
    /// `None` for ranks that kernels must not access; likewise for the signals.
    pub(super) workspaces: Vec<Option<DeviceSlice>>,
    pub(super) signals: Vec<Option<DeviceSlice>>,
    /// On devices that take closures, the epoch and the number of ended lanes of the launch in flight; on others, an
    /// epoch for each lane.
    pub(super) state: DeviceSlice,
    /// Largest number of lanes of the kernels that share the epoch.
    pub(super) lanes: usize,
    /// Largest number of ranks with lanes on one device.
    pub(super) ranks_per_device: usize,
    pub(super) tensors: Vec<BTreeMap<TensorId, DeviceSlice>>,
}

impl Reach {
    /// Bytes of the state for `lanes` lanes and `world` ranks.
    pub(super) const fn state_bytes(lanes: usize, world: usize) -> usize {
        Self::value_note_offset(lanes, world) + VALUE_NOTE_BYTES
    }

    /// Offset of the note of a value that a lane has read and that is out of range.
    pub(super) const fn value_note_offset(lanes: usize, world: usize) -> usize {
        Self::direct_offset(lanes, world) + DIRECT_BYTES
    }

    /// Offset of the count of lanes that found all announced tensors reachable.
    pub(super) const fn direct_offset(lanes: usize, world: usize) -> usize {
        EPOCH_BYTES * lanes + VERDICT_BYTES * world
    }

    /// Addresses that a launch of a section is bound to.
    pub(super) fn addresses(&self, section: &SectionInstance) -> Addresses {
        let tensors = section.tensors.iter().map(|tensor| {
            let ranks = 0..section.world;
            ranks
                .map(|rank| self.address(section, tensor, rank))
                .collect()
        });
        Addresses {
            tensors: tensors.collect(),
            signals: self.signals.iter().map(address).collect(),
            epochs: self.state.address(),
            lanes: self.lanes as u64,
            // A plan's tensors were exchanged at binding, so its kernels look nothing up.
            tables: 0,
        }
    }

    /// Start address of a tensor on a rank; 0 if this rank does not reach it.
    fn address(&self, section: &SectionInstance, tensor: &SectionTensor, rank: Rank) -> u64 {
        match tensor.memory {
            SectionMemory::Tensor(id) => {
                let slice = self.tensors[rank].get(&id);
                let offset = (tensor.offset * tensor.dtype.size()) as u64;
                slice.map_or(0, |slice| slice.address() + offset)
            }
            SectionMemory::Scratch(id) => {
                let scratch = &section.scratch[id];
                let area = self.layout.area(scratch.packing);
                let offset = (area.offset_bytes + scratch.offset_bytes) as u64;
                let workspace = self.workspaces[rank].as_ref();
                workspace.map_or(0, |slice| slice.address() + offset)
            }
        }
    }
}

/// Start address of a rank's memory; 0 if this rank does not reach it.
fn address(memory: &Option<DeviceSlice>) -> u64 {
    memory.as_ref().map_or(0, DeviceSlice::address)
}
