//! Messages by their programs: `message.wlp` for lengths that the host knows, `counted_message.wlp` for those that the
//! sender's device memory has.

use super::difference::difference;
use super::pieces::launches;
use super::{LINED_BYTES, MessageShape, THREADS};
use crate::collective::launches::section;
use crate::device::{DeviceSlice, Stream};
use crate::error::{Error, ErrorKind, Rank, Result};
use crate::p2p::Direction;
use crate::program::execute::{
    Announced, CARRIED_WORDS, MAX_MESSAGES, PairMessage, PairProgram, Pairs, RankContext,
    SharedWorkspace, TellDifference, unknown_memory,
};
use crate::program::section::{
    MAX_TENSOR_BYTES, PairLayout, SectionInstance, WorkspaceLayout, pair_text,
};
use crate::program::{Parameters, Program, unroll};
use std::sync::Arc;

/// Data of scratch for 128-byte packets that is not used, where links split these: one row.
const UNUSED: usize = 240;

/// Minimum capacity of the kernel for groups of few messages: sends to and receives from two neighbors, twice.
const MIN_FEW: usize = 8;

/// Maximum chunks of a lane.
const MAX_CHUNKS: usize = 4096;

/// The programs, and the tensors that are a message's count.
const TEXTS: [(&str, &[&str]); 2] = [
    (include_str!("message.wlp"), &[]),
    (include_str!("counted_message.wlp"), &["C", "K"]),
];
const PLAIN: usize = 0;
const COUNTED: usize = 1;

/// One end of a message.
#[derive(Clone, Copy, Debug)]
pub(super) struct End<'a> {
    pub(super) peer: Rank,
    pub(super) direction: Direction,
    pub(super) data: &'a DeviceSlice,
}

/// One end of a message whose length the sender's memory has.
#[derive(Clone, Copy, Debug)]
pub(super) struct CountedEnd<'a> {
    /// Its data has the most that there may be.
    pub(super) end: End<'a>,
    /// Bytes of a unit.
    pub(super) unit: usize,
    /// Number of units, of 64 bits: read by the sender, written by the receiver.
    pub(super) count: &'a DeviceSlice,
}

/// A rank's state for messages.
pub(in crate::collective) struct Messages {
    pairs: Pairs,
    shape: MessageShape,
}

impl Messages {
    /// Joins with `bytes` of chunks; receives use the publication of the direct path `beside`. A launch uses at most
    /// `multiprocessors`, equal on all ranks, or two for each rank if that is more. Collective: all ranks succeed or
    /// none.
    pub(in crate::collective) fn join(
        context: &RankContext,
        beside: &SharedWorkspace,
        bytes: usize,
        multiprocessors: usize,
    ) -> Result<Self> {
        let shape = MessageShape::of(context, bytes, multiprocessors)?;
        let tell = |direction| -> Arc<TellDifference> {
            Arc::new(move |own: &[u32], theirs: &[u32]| {
                announcement_mismatch(direction, own, theirs)
            })
        };
        // A send and a receive for each rank, which counted messages always have.
        let all_to_all = 2 * context.world();
        let few = all_to_all.max(MIN_FEW);
        let program = |(text, counts): (&str, &'static [&'static str])| {
            Ok(PairProgram {
                sections: [shape.section(text, 0)?, shape.section(text, 1)?],
                max_messages: if counts.is_empty() {
                    vec![few, MAX_MESSAGES]
                } else {
                    vec![all_to_all]
                },
                counts,
                tell: [tell(Direction::Send), tell(Direction::Receive)],
                operations: ["send", "receive"],
            })
        };
        let programs: Result<Vec<_>> = TEXTS.into_iter().map(program).collect();
        let pairs = Pairs::join(context, beside, context.agree_on(programs)?)?;
        Ok(Self { pairs, shape })
    }

    /// Enqueues messages: those of one pair and direction in order, all others concurrently. Does not block.
    pub(super) fn enqueue(&self, ends: &[End<'_>], stream: (&Stream, bool)) -> Result<()> {
        let bytes: Vec<usize> = ends.iter().map(|end| end.data.bytes()).collect();
        for pieces in launches(&bytes, self.shape.most()) {
            let pieces = pieces.map(|(end, range)| {
                let data = ends[end].data.slice(range)?;
                Ok((ends[end], data))
            });
            let pieces: Vec<(End<'_>, DeviceSlice)> = pieces.collect::<Result<_>>()?;
            let messages = pieces.iter().map(|(end, data)| {
                self.message(End { data, ..*end }, (data.bytes(), 1), None, stream)
            });
            let messages: Vec<PairMessage<'_>> = messages.collect();
            self.pairs.enqueue(PLAIN, &messages, stream)?;
        }
        Ok(())
    }

    /// The same for messages whose lengths the senders' memory has.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] for more than a tensor of a program may have.
    pub(super) fn enqueue_counted(
        &self,
        ends: &[CountedEnd<'_>],
        stream: (&Stream, bool),
    ) -> Result<()> {
        let mut longest = ends.iter().map(|it| it.end.data.bytes());
        if let Some(bytes) = longest.find(|bytes| *bytes > MAX_TENSOR_BYTES) {
            let text = format!("parts of {bytes} bytes; expected at most {MAX_TENSOR_BYTES}");
            return Err(Error::new(ErrorKind::Unsupported, text).with_help("make several calls"));
        }
        let messages = ends.iter().map(|it| {
            let limit = it.end.data.bytes() / it.unit;
            self.message(it.end, (limit, it.unit), Some(it.count), stream)
        });
        let messages: Vec<PairMessage<'_>> = messages.collect();
        self.pairs.enqueue(COUNTED, &messages, stream)
    }

    fn message<'a>(
        &self,
        end: End<'a>,
        (units, unit): (usize, usize),
        count: Option<&'a DeviceSlice>,
        stream: (&Stream, bool),
    ) -> PairMessage<'a> {
        let End {
            peer,
            direction,
            data,
        } = end;
        let lanes = self.shape.lanes_of(data.bytes());
        let packets = lanes * self.shape.packed.max(self.shape.lined);
        // Packets alone suffice for short messages, so publishing their memory would gain nothing.
        let is_direct = direction == Direction::Receive && data.bytes() > packets;
        let place = || self.pairs.place(data, stream);
        let mut carried = [0; CARRIED_WORDS];
        let words = [units as u64, unit as u64, u64::from(lanes.ilog2())];
        carried[..words.len()].copy_from_slice(&words);
        PairMessage {
            peer,
            role: role(direction),
            data,
            count,
            published: is_direct.then(place).flatten(),
            lanes,
            carried,
        }
    }

    /// Number of lanes that stored directly. Blocks while it reads some bytes of the device.
    pub(in crate::collective) fn direct_lanes(&self) -> Result<u64> {
        self.pairs.direct_lanes()
    }

    /// Peer of a message that has begun here but not there, and its direction. Blocks while it reads some bytes of the
    /// device.
    pub(in crate::collective) fn awaited(&self) -> Result<Option<(Rank, Direction)>> {
        let awaited = self.pairs.awaited()?;
        Ok(awaited.map(|(role, peer)| (peer, direction(role))))
    }

    /// Error of mismatched ends, if a kernel recorded one. Blocks while it reads some bytes of the device. The host
    /// device fails the stream instead.
    pub(in crate::collective) fn disagreement(&self) -> Result<Option<Error>> {
        let found = self.pairs.disagreement()?;
        Ok(found.map(|found| {
            let error = match &found.announced {
                Announced::Other { own, theirs } => {
                    announcement_mismatch(direction(found.role), own, theirs)
                }
                Announced::UnknownMemory => unknown_memory("a message"),
            };
            error.with_peer(found.peer)
        }))
    }
}

/// Rank of the programs.
const fn role(direction: Direction) -> usize {
    match direction {
        Direction::Send => 0,
        Direction::Receive => 1,
    }
}

const fn direction(role: usize) -> Direction {
    if role == 0 {
        Direction::Send
    } else {
        Direction::Receive
    }
}

/// Error of announcements that differ: bytes, or their limit, in two words, the second above the logarithm of the
/// number of lanes; in a counted message, the bytes of a unit, and a count over the limit in two words.
fn announcement_mismatch(direction: Direction, own: &[u32], theirs: &[u32]) -> Error {
    let word = |words: &[u32], number: usize| u64::from(words.get(number).copied().unwrap_or(0));
    let bytes = |words| word(words, 1) >> 8 << 32 | word(words, 0);
    let count = |words| word(words, 4) << 32 | word(words, 3);
    let units = count(own).max(count(theirs));
    let length = units.saturating_mul(word(own, 2));
    difference(direction, bytes(own), bytes(theirs), Some(length))
}

/// Texts of the kernels of messages, in CUDA C++ for `<warplink/pairs.cuh>`, for two ranks of a GPU with 132
/// multiprocessors.
///
/// # Errors
/// A step that kernels cannot perform.
pub fn kernels() -> Result<Vec<String>> {
    let shape = MessageShape::new(0, 2, (1, 132), 8 << 20, LINED_BYTES);
    let kernel = |(text, counts): (&str, &[&str])| {
        let section = |role| shape.section(text, role).map(Arc::new);
        let sections = [section(0)?, section(1)?];
        let layout = WorkspaceLayout::of(&*sections[0].scratch);
        let layout = PairLayout {
            region: layout.bytes(),
            layout,
            max_messages: MAX_MESSAGES,
        };
        pair_text(&sections, &layout, counts)
    };
    TEXTS.into_iter().map(kernel).collect()
}

impl MessageShape {
    /// Maximum bytes of a message in one launch.
    fn most(&self) -> usize {
        // The host device lists the steps of a lane, so that they have a limit.
        let most = self.lanes.saturating_mul(self.chunk * MAX_CHUNKS);
        most.min(MAX_TENSOR_BYTES)
    }

    /// The kernel of one rank of a program.
    fn section(&self, text: &str, role: usize) -> Result<SectionInstance> {
        let program = Program::parse(text)?;
        let mut parameters = Parameters::new();
        // Lengths are carried by the launch, so the kernel must accept any; the bound only has to be a constant of
        // the text.
        let word = u32::MAX as usize;
        for (name, value) in [
            ("most", MAX_TENSOR_BYTES),
            ("largest", word),
            ("top", word),
            ("packed", self.packed),
            ("lined", self.lined.max(UNUSED)),
            ("lines", usize::from(self.lined > 0)),
            ("chunk", self.chunk),
            ("lanes", self.lanes),
            ("threads", THREADS as usize),
        ] {
            if program.parameters.iter().any(|known| known.name == name) {
                parameters.insert(name, value as i64);
            }
        }
        let mut section = section(&unroll(&program, role, 2, 1, &parameters)?)?;
        section.published = true;
        section.carried = section.tensor("N");
        Ok(section)
    }
}

#[cfg(test)]
#[path = "programs_tests.rs"]
mod tests;
