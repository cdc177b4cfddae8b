//! Encoding of the messages of a launch; must match `kernels/warplink/pairs.cuh`.

use super::super::publication::Published;
use super::PairState;
use crate::device::DeviceSlice;
use crate::error::{Rank, Result};

/// Maximum messages of a launch.
// With 7 words each and the fixed ones 3760 bytes: launch arguments are limited to 4 KiB.
pub(crate) const MAX_MESSAGES: usize = 64;

/// Maximum ranks of a group.
pub(super) const MAX_RANKS: usize = 8;

/// Words that a message carries for the program.
pub(crate) const CARRIED_WORDS: usize = 3;

/// Words before the messages, and words of each message.
pub(super) const FIXED_WORDS: usize = 2 * MAX_RANKS + 6;
const MESSAGE_WORDS: usize = 4 + CARRIED_WORDS;

/// Index of the word with the number of messages.
const COUNT: usize = FIXED_WORDS - 1;

/// A message of a launch, at one of its ends.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PairMessage<'a> {
    pub(crate) peer: Rank,
    /// Which rank of the program this one is.
    pub(crate) role: usize,
    pub(crate) data: &'a DeviceSlice,
    /// Memory of the count, if it is not known to the host.
    pub(crate) count: Option<&'a DeviceSlice>,
    pub(crate) published: Option<Published>,
    /// Lanes that have a part of it.
    pub(crate) lanes: usize,
    /// Words of the tensor that the launch carries.
    pub(crate) carried: [u64; CARRIED_WORDS],
}

/// Memory of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MessageMemory {
    /// Its data, or any for a tensor that is not memory.
    Data,
    /// Its count.
    Count,
}

impl<'a> PairMessage<'a> {
    /// All local memory that it references, in the order of [`Decoded::memory`].
    pub(super) fn memory(&self) -> impl Iterator<Item = &'a DeviceSlice> {
        [Some(self.data), self.count].into_iter().flatten()
    }

    fn line(&self) -> (usize, Rank) {
        (self.role, self.peer)
    }
}

/// Words of a launch of a kernel for at most `max_messages`, and its number of blocks. Messages of one line use the
/// same blocks, one after another.
pub(super) fn encode(
    fixed: &[u64; FIXED_WORDS],
    messages: &[PairMessage<'_>],
    max_messages: usize,
) -> (Vec<u64>, u32) {
    // The kernel's argument is a structure of fixed size.
    let size = FIXED_WORDS + MESSAGE_WORDS * max_messages;
    let mut words = Vec::with_capacity(size);
    words.extend_from_slice(fixed);
    words[COUNT] = messages.len() as u64;
    let mut blocks = 0;
    let mut lines: Vec<((usize, Rank), u64)> = Vec::new();
    for message in messages {
        let known = lines.iter().find(|(line, _)| *line == message.line());
        let place = match known {
            Some((_, place)) => *place,
            None => {
                let of_line = messages.iter().filter(|it| it.line() == message.line());
                // The line gets the lanes of its largest message; smaller ones leave some of them idle.
                let most = of_line.map(|it| it.lanes).max().unwrap_or(1) as u64;
                let place = most << 16 | blocks << 32;
                blocks += most;
                lines.push((message.line(), place));
                place
            }
        };
        words.push(message.peer as u64 | (message.role as u64) << 8 | place);
        words.push(message.published.map_or(0, Published::word));
        words.push(message.data.address());
        words.push(message.count.map_or(0, DeviceSlice::address));
        words.extend(message.carried);
    }
    words.resize(size, 0);
    (words, blocks as u32)
}

/// A message decoded from the words of a launch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in super::super) struct Decoded {
    pub(in super::super) peer: Rank,
    pub(in super::super) role: usize,
    /// First block of its line, and the number of them.
    pub(in super::super) first: usize,
    pub(in super::super) blocks: usize,
    pub(in super::super) published: Option<Published>,
    pub(in super::super) carried: [u64; CARRIED_WORDS],
    /// Indices of data and count in the launch's memory.
    memory: [usize; 2],
}

impl Decoded {
    /// Index of memory among that of the launch.
    pub(in super::super) fn memory(&self, kind: MessageMemory) -> usize {
        self.memory[kind as usize]
    }
}

/// Decodes the messages of a launch.
pub(in super::super) fn decode(words: &[u64]) -> Vec<Decoded> {
    let count = words.get(COUNT).map_or(0, |count| *count as usize);
    let messages = words.get(FIXED_WORDS..).unwrap_or_default();
    let mut next = 0;
    let messages = messages.chunks_exact(MESSAGE_WORDS).take(count);
    messages
        .map(|words| {
            let data = next;
            // A message without a count has no memory for one.
            next += if words[3] == 0 { 1 } else { 2 };
            let mut carried = [0; CARRIED_WORDS];
            carried.copy_from_slice(&words[4..]);
            Decoded {
                peer: (words[0] & 0xff) as usize,
                role: (words[0] >> 8 & 1) as usize,
                first: (words[0] >> 32) as usize,
                blocks: (words[0] >> 16 & 0xffff) as usize,
                published: Published::of_word(words[1]),
                carried,
                memory: [data, next - 1],
            }
        })
        .collect()
}

impl PairState {
    /// Word that counts the messages of a lane.
    pub(in super::super) fn count(
        &self,
        state: &DeviceSlice,
        message: &Decoded,
        lane: usize,
    ) -> Result<crate::device::Word> {
        let line = self.line(message.role, message.peer);
        state.word(8 * (line * self.lanes + lane))
    }
}
