//! Messages: sends and receives between pairs of ranks on any memory, in groups.
//!
//! Each message is a launch of a program of two ranks, `message.wlp`, or `counted_message.wlp` if only the
//! sender's memory has its length. One kernel runs all messages of a group: each has lanes of its own, which interact only
//! with the lanes at its other end. Ranks without messages launch nothing, and ranks may group messages differently.
//!
//! | module | subject |
//! |---|---|
//! | `group` | groups, and parts with sizes known to the host |
//! | `on_device` | parts with sizes in device memory |
//! | `programs` | the programs, and their launches |
//! | `difference` | errors of ends that do not match |

mod difference;
mod group;
mod on_device;
mod pieces;
mod programs;

pub use group::{Message, Parts};
pub(super) use on_device::check_apart;
pub(super) use programs::Messages;
pub use programs::kernels as message_kernels;

use crate::error::{Rank, Result};
use crate::program::execute::RankContext;

/// Maximum messages of a group.
pub const MAX_MESSAGES: usize = crate::program::execute::MAX_MESSAGES;

/// Lanes of all peers in one direction; a launch has up to twice as many blocks. Half as many lanes take 1.5
/// times as long for 1 MiB (docs/performance.md).
const LANES: usize = 64;

/// Bytes for each additional lane of a message: one 8-byte packet word for each thread.
const LANE_BYTES: usize = 4 << 10;

/// Maximum bytes of a lane sent as 16-byte packets, half of which is data: two for each thread.
const PACKED_BYTES: usize = 8 << 10;

/// Maximum bytes of a longer message's lane sent as 128-byte packets: they cross the link while sender and
/// receiver handshake, and cover all of 4 MiB on two ranks.
const LINED_BYTES: usize = 128 << 10;

/// The same where processors move the data: they take several times as long for packets as for a copy, and as long for a
/// handshake as for a copy of this.
const LINED_BYTES_OF_PROCESSORS: usize = 8 << 10;

/// Threads of a block; [`LANE_BYTES`] and [`PACKED_BYTES`] are derived from it.
const THREADS: u32 = 512;

/// Division of a workspace; equal on every rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MessageShape {
    pub(super) rank: Rank,
    pub(super) world: usize,
    /// Maximum lanes of a message.
    pub(super) lanes: usize,
    /// Size of a chunk.
    pub(super) chunk: usize,
    /// Maximum bytes of a lane sent as 16-byte packets.
    pub(super) packed: usize,
    /// Maximum bytes of a longer message's lane sent as 128-byte packets; 0 if the bus splits these.
    pub(super) lined: usize,
}

impl MessageShape {
    /// Shape for `bytes` of chunks, with blocks on at most `multiprocessors`. Collective.
    fn of(context: &RankContext, bytes: usize, multiprocessors: usize) -> Result<Self> {
        let room = (context.ranks_per_device()?, multiprocessors);
        // All ranks must use the same encoding.
        let lined = if !context.carries_lines()? {
            0
        } else if context.device.properties().shared {
            LINED_BYTES_OF_PROCESSORS
        } else {
            LINED_BYTES
        };
        Ok(Self::new(
            context.rank(),
            context.world(),
            room,
            bytes,
            lined,
        ))
    }

    /// Shape for `bytes` of chunks, with blocks for each of `ranks_per_device` ranks on `multiprocessors`
    /// with space for one block each. At most `lined` bytes of a lane go as 128-byte packets.
    fn new(
        rank: Rank,
        world: usize,
        (ranks_per_device, multiprocessors): (usize, usize),
        bytes: usize,
        lined: usize,
    ) -> Self {
        // A lane has a block in each direction.
        // Ranks that share a device share its multiprocessors.
        let lanes = LANES.min(multiprocessors / 2) / (world * ranks_per_device);
        // A power of two, so that parts are equally long and aligned.
        let lanes = 1 << lanes.max(1).ilog2();
        let chunk = bytes / (2 * lanes * world) / 16 * 16;
        Self {
            rank,
            world,
            lanes,
            chunk,
            packed: PACKED_BYTES.min(chunk),
            lined: lined.min(chunk),
        }
    }

    /// Lanes of a message of at most `bytes`; equal at both ends.
    fn lanes_of(&self, bytes: usize) -> usize {
        // Depends only on the limit that both ends know, so both use equally many lanes.
        1 << (bytes / LANE_BYTES).clamp(1, self.lanes).ilog2()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_fit_the_multiprocessors() {
        for world in 1..=8 {
            for sharing in 1..=world {
                for multiprocessors in [16, 78, 114, 132] {
                    let room = (sharing, multiprocessors);
                    let blocks = 2
                        * MessageShape::new(0, world, room, 1 << 20, LINED_BYTES).lanes
                        * world
                        * sharing;
                    let least = 2 * world * sharing;
                    assert!(blocks <= multiprocessors.max(least), "{blocks} of {room:?}");
                }
            }
        }
    }
}
