//! Encoding of a launch's messages; must match `kernels/messages.cu`.

use super::super::MessageShape;
use crate::collective::MAX_DIRECT_RANKS;
use crate::device::DeviceSlice;
use crate::error::{Error, Rank, Result};
use crate::p2p::Direction;
use crate::program::execute::Published;

/// Maximum messages of a launch.
pub(super) const MAX_MESSAGES: usize = 64;

/// Size of a header's slot, which also holds the encoding of the tail.
pub(super) const SLOT_BYTES: usize = 128;

/// Data bytes of a 128-byte packet.
pub(super) const LINE_DATA: usize = 120;

/// Words before the messages, and words of each message.
const FIXED_WORDS: usize = 2 * MAX_DIRECT_RANKS + 11;
const MESSAGE_WORDS: usize = 7;

/// Index of the word with the number of messages.
const COUNT: usize = FIXED_WORDS - 2;

/// Flags of a message's first word; must match the kernel.
const RECEIVES: u64 = 1 << 8;
const TELLS: u64 = 1 << 9;
const WIDE: u64 = 1 << 10;

/// Bytes of a 64-bit count.
const WIDE_BYTES: usize = 8;

/// Unit of a message that covers its memory completely.
const WHOLE_UNIT: usize = 16;

/// A message of a launch.
#[derive(Clone, Copy, Debug)]
pub(in crate::collective) struct Entry<'a> {
    pub(in crate::collective) peer: Rank,
    pub(in crate::collective) direction: Direction,
    /// Source or destination; for indexed rows, all rows they are selected from.
    pub(in crate::collective) data: &'a DeviceSlice,
    /// Maximum bytes; exact for a message without count.
    pub(in crate::collective) bytes: usize,
    /// Bytes of a unit.
    pub(in crate::collective) unit: usize,
    pub(in crate::collective) count: Count<'a>,
    /// For sends: 32-bit index in `data` of each unit.
    pub(in crate::collective) index: Option<&'a DeviceSlice>,
}

/// Number of units: known to the host, or in device memory of 32 or 64 bits, depending on its length.
#[derive(Clone, Copy, Debug)]
pub(in crate::collective) enum Count<'a> {
    /// All that its bytes hold.
    All,
    /// Read from this memory.
    Given(&'a DeviceSlice),
    /// Stated by the sender, and stored here.
    Stated(&'a DeviceSlice),
}

impl<'a> Entry<'a> {
    /// A message of all of `data`.
    pub(in crate::collective) fn whole(
        peer: Rank,
        direction: Direction,
        data: &'a DeviceSlice,
    ) -> Self {
        Self {
            peer,
            direction,
            data,
            bytes: data.bytes(),
            unit: WHOLE_UNIT,
            count: Count::All,
            index: None,
        }
    }

    /// All local memory that it references, in the order of [`Decoded::memory`].
    pub(super) fn memory(&self) -> impl Iterator<Item = &'a DeviceSlice> {
        let count = match self.count {
            Count::All => None,
            Count::Given(count) | Count::Stated(count) => Some(count),
        };
        [Some(self.data), count, self.index].into_iter().flatten()
    }

    fn line(&self) -> (Rank, bool) {
        (self.peer, self.direction == Direction::Receive)
    }
}

/// Leading words of a launch, without messages.
#[derive(Clone, Debug)]
pub(super) struct Table([u64; FIXED_WORDS]);

impl Table {
    /// `notes` receives waiting state and mismatches; `tables` has the mappings of published allocations.
    pub(super) fn new(
        shape: &MessageShape,
        workspaces: &[DeviceSlice],
        signals: &[DeviceSlice],
        notes: [&DeviceSlice; 2],
        tables: u64,
    ) -> Self {
        let mut words = [0; FIXED_WORDS];
        for (rank, (workspace, signals)) in workspaces.iter().zip(signals).enumerate() {
            words[rank] = workspace.address();
            words[MAX_DIRECT_RANKS + rank] = signals.address();
        }
        let rest = [
            notes[0].address(),
            notes[1].address(),
            shape.rank as u64,
            shape.world as u64,
            shape.lanes as u64,
            shape.chunk as u64,
            shape.room() as u64,
            shape.packed as u64,
            shape.lined as u64,
        ];
        words[2 * MAX_DIRECT_RANKS..COUNT].copy_from_slice(&rest);
        words[COUNT + 1] = tables;
        Self(words)
    }

    /// Words of a launch of `entries`, and its number of blocks. `lanes` maps bytes to lanes, `published`
    /// locates a receive's memory.
    pub(super) fn with(
        &self,
        entries: &[Entry<'_>],
        lanes: impl Fn(usize) -> usize,
        published: impl Fn(&Entry<'_>) -> Option<Published>,
    ) -> Result<(Vec<u64>, u32)> {
        if entries.len() > MAX_MESSAGES {
            return Err(Error::invalid(format!(
                "{} messages in one group; expected at most {MAX_MESSAGES}",
                entries.len()
            ))
            .with_help("make several groups"));
        }
        let mut words = vec![0; FIXED_WORDS + MESSAGE_WORDS * MAX_MESSAGES];
        words[..FIXED_WORDS].copy_from_slice(&self.0);
        words[COUNT] = entries.len() as u64;
        let messages = words[FIXED_WORDS..].chunks_exact_mut(MESSAGE_WORDS);
        let mut blocks = 0;
        for (number, (entry, words)) in entries.iter().zip(messages).enumerate() {
            let of_line = |other: &&Entry<'_>| other.line() == entry.line();
            let earlier = entries[..number].iter().position(|other| of_line(&other));
            let first = match earlier {
                Some(_) => None,
                None => {
                    let all = entries[number..].iter().filter(of_line);
                    let most = all.map(|entry| lanes(entry.bytes)).max().unwrap_or(1);
                    blocks += most as u64;
                    Some(blocks - most as u64)
                }
            };
            words[0] = entry.peer as u64
                | if entry.direction == Direction::Receive {
                    RECEIVES
                } else {
                    0
                }
                | (lanes(entry.bytes) as u64) << 16
                // The first entry of a line is set below.
                | first.unwrap_or(0) << 32;
            words[1] = entry.data.address();
            words[2] = entry.bytes as u64;
            words[3] = entry.unit as u64;
            if let Count::Given(count) | Count::Stated(count) = entry.count {
                if matches!(entry.count, Count::Stated(_)) {
                    words[0] |= TELLS;
                }
                if count.bytes() == WIDE_BYTES {
                    words[0] |= WIDE;
                }
                words[4] = count.address();
            }
            words[5] = entry.index.map_or(0, DeviceSlice::address);
            words[6] = published(entry).map_or(0, Published::word);
        }
        for (number, entry) in entries.iter().enumerate() {
            let of_line = |other: &Entry<'_>| other.line() == entry.line();
            if let Some(first) = entries[..number].iter().position(of_line) {
                let at = |number: usize| FIXED_WORDS + MESSAGE_WORDS * number;
                words[at(number)] |= words[at(first)] >> 32 << 32;
            }
        }
        Ok((words, blocks as u32))
    }
}
