//! Transfers by packets: data and its flag in one store, through scratch memory of the receiver.
//!
//! A *packet* is 16 bytes: data, flag, data, flag, of 4 bytes each. The sender's kernel stores packets into
//! the receiver's scratch, and the receiver's kernel looks at each until both flags are those of the epoch,
//! and stores the data where it belongs. So there is neither a fence nor a signal. A transfer is divided among
//! as many blocks at either end, and each block counts its epochs in memory of its own device: a graph that
//! is launched again goes on counting, and eager and captured transfers may follow one another.
//!
//! # Why scratch is not overwritten too early
//! The scratch has two halves; epoch e uses half e mod 2. When a block of the receiver has unpacked epoch e,
//! it writes e into the sender's scratch (*consumed*), and the sender's block of the same number stores epoch
//! e only when it has seen e - 2 there. So what is in the half, epoch e - 2, has been read. A flag of epoch
//! e - 2 is never taken for e: they differ as long as flags, the low 32 bits of the epoch, do, and what was
//! stored in a half two or more epochs ago is what is overwritten there, never what is to be read. Fresh
//! scratch is zero and the first epoch is 1. Nothing here follows from e having been *sent*: a sender that
//! only sends would otherwise run ahead of a receiver by any number of epochs.
//!
//! ```text
//! scratch of either end:    epochs       8 bytes a block, written by this end's blocks
//!                           consumed     8 bytes a block, written by the receiver at the sender
//! of the receiver as well:  half 0, half 1
//! ```

use super::slice::{DeviceSlice, Word};
use crate::error::{Error, ErrorKind, Result};

/// What scratch is aligned to.
const SCRATCH_ALIGNMENT: usize = 256;

/// Most blocks of a transfer; must match the kernels.
pub(crate) const MAX_BLOCKS: u32 = 128;

/// Bytes of data of a packet, and of all of it.
pub(crate) const PACKET: [usize; 2] = [8, 16];

/// Where *consumed* begins in the scratch, and where the packets do.
const CONSUMED: usize = 8 * MAX_BLOCKS as usize;
const HALVES: usize = 2 * CONSUMED;

/// How a transfer by packets is divided; the same at both ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PacketShape {
    pub(crate) bytes: usize,
    pub(crate) blocks: u32,
    pub(crate) threads: u32,
}

impl PacketShape {
    /// Bytes of an end's scratch.
    pub(crate) fn scratch_bytes(&self, receives: bool) -> usize {
        let halves = if receives { 2 * self.half_bytes() } else { 0 };
        (HALVES + halves).next_multiple_of(SCRATCH_ALIGNMENT)
    }

    /// How many packets there are.
    pub(crate) fn packets(&self) -> usize {
        self.bytes.div_ceil(PACKET[0])
    }

    fn half_bytes(&self) -> usize {
        PACKET[1] * self.packets()
    }
}

/// One end of a line that packets go through in one direction.
#[derive(Clone, Debug)]
pub struct PacketLine {
    shape: PacketShape,
    own: DeviceSlice,
    peer: DeviceSlice,
    abort: Word,
}

impl PacketLine {
    /// The end with the scratch `own`, zero at first, and the other's, mapped here. Waits end when `abort` is
    /// not zero any more.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidHandle`] where the peer's scratch is not as long as the shape asks for.
    pub(crate) fn new(
        shape: PacketShape,
        receives: bool,
        own: DeviceSlice,
        peer: DeviceSlice,
        abort: Word,
    ) -> Result<Self> {
        let expected = shape.scratch_bytes(!receives);
        if peer.bytes() != expected {
            return Err(Error::new(
                ErrorKind::InvalidHandle,
                format!(
                    "the peer's scratch has {} bytes; expected {expected}",
                    peer.bytes()
                ),
            )
            .with_help("run the same version of Warplink on every rank"));
        }
        Ok(Self {
            shape,
            own,
            peer,
            abort,
        })
    }

    pub(crate) fn shape(&self) -> PacketShape {
        self.shape
    }

    /// This end's scratch, and the other's.
    pub(crate) fn scratch(&self) -> [&DeviceSlice; 2] {
        [&self.own, &self.peer]
    }

    /// Not zero when waits are to end.
    pub(crate) fn abort(&self) -> &Word {
        &self.abort
    }

    /// The epoch that `block` of this end has finished.
    pub(crate) fn epoch(&self, block: u32) -> Result<Word> {
        self.own.word(8 * block as usize)
    }

    /// At the sender: the epoch that `block` of the receiver has finished.
    pub(crate) fn consumed(&self, block: u32) -> Result<Word> {
        self.own.word(CONSUMED + 8 * block as usize)
    }

    /// At the receiver: the same word, mapped here.
    pub(crate) fn consumed_at_peer(&self, block: u32) -> Result<Word> {
        self.peer.word(CONSUMED + 8 * block as usize)
    }

    /// The two words of packet `number` of `epoch`, in the scratch of the receiver.
    pub(crate) fn packet(&self, receives: bool, epoch: u64, number: usize) -> Result<[Word; 2]> {
        let scratch = if receives { &self.own } else { &self.peer };
        let half = (epoch % 2) as usize * self.shape.half_bytes();
        let start = HALVES + half + PACKET[1] * number;
        Ok([scratch.word(start)?, scratch.word(start + 8)?])
    }
}

/// What one end does of a transfer by packets.
#[derive(Clone, Copy, Debug)]
pub struct PacketPart<'a> {
    /// The line.
    pub line: &'a PacketLine,
    /// What is sent, or where what is received belongs.
    pub data: &'a DeviceSlice,
    /// Whether this end receives.
    pub receives: bool,
    /// A word of this rank's own memory that each block adds one to when it is done.
    pub completed: Option<&'a Word>,
}

impl PacketPart<'_> {
    /// Whether `later`, which was enqueued after this, must not run at the same time. What is sent after
    /// something was received may be the answer to it, also where it lies elsewhere in memory.
    pub(crate) fn excludes(&self, later: &Self) -> bool {
        let answers = self.receives && !later.receives;
        let writes = self.receives || later.receives;
        answers
            || self.line.own.overlaps(&later.line.own)
            || (writes && self.data.overlaps(later.data))
    }

    /// Fails where the data is not as long as the line is for.
    pub(crate) fn check(&self) -> Result<()> {
        let (expected, bytes) = (self.line.shape.bytes, self.data.bytes());
        if bytes == expected {
            return Ok(());
        }
        Err(
            Error::invalid(format!("{bytes} bytes by packets; expected {expected}"))
                .with_help("pass the transfer's own buffer"),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{AllocationKind, DeviceConfig, DeviceKind};

    #[test]
    fn scratch_is_what_the_kernels_expect() {
        let shape = PacketShape {
            bytes: 4097,
            blocks: 4,
            threads: 128,
        };
        assert_eq!((shape.packets(), shape.half_bytes()), (513, 513 * 16));
        assert_eq!(shape.scratch_bytes(false), 2048);
        assert_eq!(
            shape.scratch_bytes(true),
            (2048 + 2 * 513 * 16_usize).next_multiple_of(SCRATCH_ALIGNMENT)
        );
    }

    #[test]
    fn nothing_is_sent_beside_what_was_received_before() {
        let device = crate::device::open(&DeviceConfig::new(DeviceKind::Host, 0)).unwrap();
        let memory = device.allocate(1 << 16, AllocationKind::Plain).unwrap();
        let abort = device.allocate_signals(64).unwrap().word(0).unwrap();
        let shape = PacketShape {
            bytes: 512,
            blocks: 1,
            threads: 64,
        };
        let slice = |start, bytes| memory.slice(start..start + bytes).unwrap();
        let (small, large) = (shape.scratch_bytes(false), shape.scratch_bytes(true));
        let line = |receives: bool, at| {
            let [own, peer] = if receives {
                [large, small]
            } else {
                [small, large]
            };
            let (own, peer) = (slice(at, own), slice(at + own, peer));
            PacketLine::new(shape, receives, own, peer, abort.clone()).unwrap()
        };
        let lines = [line(false, 8192), line(true, 16384), line(true, 32768)];
        let data = [0, 512, 1024].map(|at| slice(at, 512));
        let part = |line: usize, data_at: usize| PacketPart {
            line: &lines[line],
            data: &data[data_at],
            receives: line > 0,
            completed: None,
        };
        let (send, receive, other) = (part(0, 0), part(1, 1), part(2, 2));
        assert!(!send.excludes(&receive) && !receive.excludes(&other));
        // The answer to what was received.
        assert!(receive.excludes(&send));
        // One line's epochs follow one another, and so do accesses to the same memory.
        assert!(receive.excludes(&receive) && send.excludes(&send));
        assert!(send.excludes(&part(1, 0)) && other.excludes(&part(1, 2)));
    }
}
