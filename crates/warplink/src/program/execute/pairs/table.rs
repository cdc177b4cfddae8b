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

/// Indices of the words with this rank, the number of ranks, and the number of messages.
const OWN_RANK: usize = FIXED_WORDS - 3;
const WORLD: usize = FIXED_WORDS - 2;
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

    fn line(&self) -> Line {
        (self.role, self.peer)
    }
}

/// A line: this rank's role, and the peer.
type Line = (usize, Rank);

/// Blocks of a line in a launch: `first`, and every `stride`-th after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct LineBlocks {
    first: u64,
    count: u64,
    stride: u64,
}

impl LineBlocks {
    /// The bits of a message's first word for these.
    fn word(self) -> u64 {
        (self.stride - 1) << 9 | self.count << 16 | self.first << 32
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
    let lanes = messages
        .iter()
        .map(|message| (message.line(), message.lanes as u64));
    let (lines, blocks) = divide(lanes, fixed[OWN_RANK], fixed[WORLD]);
    for message in messages {
        let line = lines.iter().find(|(line, _)| *line == message.line());
        let place = line.map_or(0, |(_, blocks)| blocks.word());
        words.push(message.peer as u64 | (message.role as u64) << 8 | place);
        words.push(message.published.map_or(0, Published::word));
        words.push(message.data.address());
        words.push(message.count.map_or(0, DeviceSlice::address));
        words.extend(message.carried);
    }
    words.resize(size, 0);
    (words, blocks as u32)
}

/// The lines of the messages of `rank` with their blocks, and the number of blocks. `messages` are their lines and
/// numbers of lanes.
///
/// A device starts the blocks of a launch in order, and may have space for only a few of them while other kernels run. A
/// lane waits for the one at the other end, so all ranks start lanes in the same order: by the distance from the
/// program's first rank to its second, then by lane, then by the first rank. Of all lanes that are not done, the first
/// in this order has a block at both ends.
fn divide(
    messages: impl Iterator<Item = (Line, u64)>,
    rank: u64,
    world: u64,
) -> (Vec<(Line, LineBlocks)>, u64) {
    let order = |(role, peer): Line| {
        let mut ends = [rank, peer as u64];
        ends.rotate_left(role);
        let [first, second] = ends;
        ((world + second - first) % world, first, role)
    };
    // The line gets the lanes of its largest message; smaller ones leave some of them idle.
    let mut lines: Vec<(Line, u64)> = Vec::new();
    for (line, lanes) in messages {
        match lines.iter_mut().find(|(known, _)| *known == line) {
            Some((_, most)) => *most = lanes.max(*most),
            None => lines.push((line, lanes)),
        }
    }
    lines.sort_unstable_by_key(|(line, _)| order(*line));
    let mut blocks = 0;
    let mut divided = Vec::with_capacity(lines.len());
    for alike in lines.chunk_by(|(one, _), (other, _)| order(*one).0 == order(*other).0) {
        // Their lanes alternate; blocks without a lane end at once.
        let count = alike.iter().map(|(_, lanes)| *lanes).max().unwrap_or(0);
        let stride = alike.len() as u64;
        let firsts = blocks..;
        divided.extend(alike.iter().zip(firsts).map(|((line, _), first)| {
            let of_line = LineBlocks {
                first,
                count,
                stride,
            };
            (*line, of_line)
        }));
        blocks += stride * count;
    }
    (divided, blocks)
}

/// A message decoded from the words of a launch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Decoded {
    pub(super) peer: Rank,
    pub(super) role: usize,
    /// Blocks of its line.
    pub(super) blocks: usize,
    first: usize,
    stride: usize,
    pub(super) published: Option<Published>,
    pub(super) carried: [u64; CARRIED_WORDS],
    /// Indices of data and count in the launch's memory.
    memory: [usize; 2],
}

impl Decoded {
    /// The lane of the message that `block` of the launch runs, if it runs one.
    pub(super) fn lane(&self, block: usize) -> Option<usize> {
        let offset = block.checked_sub(self.first)?;
        let lane = offset / self.stride;
        (offset.is_multiple_of(self.stride) && lane < self.blocks).then_some(lane)
    }

    /// Index of memory among that of the launch.
    pub(super) fn memory(&self, kind: MessageMemory) -> usize {
        self.memory[kind as usize]
    }
}

/// Decodes the messages of a launch.
pub(super) fn decode(words: &[u64]) -> Vec<Decoded> {
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
                blocks: (words[0] >> 16 & 0xffff) as usize,
                first: (words[0] >> 32) as usize,
                stride: (words[0] >> 9 & 1) as usize + 1,
                published: Published::of_word(words[1]),
                carried,
                memory: [data, next - 1],
            }
        })
        .collect()
}

impl PairState {
    /// Word that counts the messages of a lane.
    pub(super) fn count(
        &self,
        state: &DeviceSlice,
        message: &Decoded,
        lane: usize,
    ) -> Result<crate::device::Word> {
        let line = self.line(message.role, message.peer);
        state.word(8 * (line * self.lanes + lane))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::{BTreeMap, BTreeSet};

    /// A lane of a message, from the first to the second rank of the program.
    type PairLane = (Rank, Rank, u64);

    /// The lane of each block of a launch of `rank`, if it has one, by the lines' blocks.
    fn blocks(
        messages: &[(Rank, Rank, u64)],
        rank: Rank,
        world: usize,
    ) -> Vec<Option<(usize, PairLane)>> {
        let of_rank = messages.iter().flat_map(|&(first, second, lanes)| {
            let ends = [(0, first, second), (1, second, first)];
            let own = ends.into_iter().filter(move |(_, own, _)| *own == rank);
            own.map(move |(role, _, peer)| ((role, peer), lanes))
        });
        let (lines, count) = divide(of_rank, rank as u64, world as u64);
        let mut blocks = vec![None; count as usize];
        for ((role, peer), line) in lines {
            let (first, second) = if role == 0 {
                (rank, peer)
            } else {
                (peer, rank)
            };
            for lane in 0..line.count {
                let block = &mut blocks[(line.first + lane * line.stride) as usize];
                assert!(block.replace((role, (first, second, lane))).is_none());
            }
        }
        blocks
    }

    /// Whether all launches end where each rank has space for `space` blocks, which start in order. A block ends when the
    /// one at its other end has started.
    fn all_end(messages: &[(Rank, Rank, u64)], world: usize, space: usize) -> bool {
        let lanes: BTreeMap<(Rank, Rank), u64> = messages
            .iter()
            .map(|&(first, second, lanes)| ((first, second), lanes))
            .collect();
        let is_idle = |(first, second, lane): PairLane| lane >= lanes[&(first, second)];
        let mut waiting: Vec<_> = (0..world)
            .map(|rank| blocks(messages, rank, world))
            .collect();
        loop {
            let started: BTreeSet<(usize, PairLane)> = waiting
                .iter()
                .flat_map(|blocks| blocks.iter().flatten().take(space).copied())
                .collect();
            let before: usize = waiting.iter().map(Vec::len).sum();
            for blocks in &mut waiting {
                let mut place = 0;
                blocks.retain(|block| {
                    place += 1;
                    let Some((role, lane)) = *block else {
                        return false;
                    };
                    place > space || !is_idle(lane) && !started.contains(&(1 - role, lane))
                });
            }
            let after: usize = waiting.iter().map(Vec::len).sum();
            if after == 0 || after == before {
                return after == 0;
            }
        }
    }

    /// Messages between some ranks, of a power of two of lanes each.
    fn any_messages() -> impl Strategy<Value = (usize, Vec<(Rank, Rank, u64)>)> {
        (2..=MAX_RANKS).prop_flat_map(|world| {
            let pairs = prop::collection::btree_map((0..world, 0..world), 0..6u32, 1..20);
            let messages = pairs.prop_map(|pairs| {
                let lanes = pairs
                    .into_iter()
                    .map(|((first, second), lanes)| (first, second, 1 << lanes));
                lanes.collect()
            });
            (Just(world), messages)
        })
    }

    proptest! {
        /// A rank needs space for both ends of a message to itself.
        #[test]
        fn messages_end_on_few_multiprocessors((world, messages) in any_messages(), space in 2..100usize) {
            prop_assert!(all_end(&messages, world, space));
        }
    }

    #[test]
    fn lanes_of_both_directions_start_together() {
        // An all-to-all of two ranks, own parts included: lanes alternate between directions.
        let messages = [(0, 1, 4), (1, 0, 4), (0, 0, 1), (1, 1, 1)];
        for rank in 0..2 {
            let roles: Vec<usize> = blocks(&messages, rank, 2)
                .into_iter()
                .flatten()
                .map(|(role, _)| role)
                .collect();
            let alternating = [0, 1].map(|first| (rank + first) % 2).repeat(4);
            assert_eq!(roles, [&[0, 1], alternating.as_slice()].concat());
        }
    }
}
