//! Packet transfers: data and flag in one store, through scratch memory of the receiver.
//!
//! A *packet* is 16 bytes: data, flag, data, flag, of 4 bytes each. The sender's kernel stores packets into
//! the receiver's scratch; the receiver's kernel polls each until both flags equal the epoch and stores the
//! data at its destination. So neither fences nor signals are needed. A transfer is divided among equally
//! many blocks at both ends, and each block counts its epochs in its own device's memory: a relaunched graph
//! continues counting, and eager and captured transfers may alternate.
//!
//! # Why scratch is not overwritten too early
//! The scratch has two halves; epoch e uses half e mod 2. When a block of the receiver has unpacked epoch e,
//! it writes e to the sender's scratch (*consumed*), and the sender's block of the same index stores epoch e
//! only after it has seen e - 2 there. So epoch e - 2, the previous content of the half, has been read. A
//! flag of epoch e - 2 is never mistaken for e: the low 32 bits of the epoch, which are the flag, differ.
//! Fresh scratch is zero and the first epoch is 1. It is not enough that e was *sent*: a sender that only
//! sends could then run ahead of the receiver by any number of epochs.
//!
//! ```text
//! scratch of either end:    epochs       8 bytes a block, written by this end's blocks
//!                           consumed     8 bytes a block, written by the receiver at the sender
//! of the receiver as well:  half 0, half 1
//! ```

use super::slice::{DeviceSlice, Word};
use crate::error::{Error, Result};

/// Alignment of scratch memory.
const SCRATCH_ALIGNMENT: usize = 256;

/// Maximum blocks of a transfer; must match the kernels.
pub(crate) const MAX_BLOCKS: u32 = 128;

/// Data bytes and total bytes of a packet.
pub(crate) const PACKET: [usize; 2] = [8, 16];

/// Offsets of *consumed* and of the packets in the scratch.
const CONSUMED: usize = 8 * MAX_BLOCKS as usize;
const HALVES: usize = 2 * CONSUMED;

/// Division of a packet transfer; equal at both ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PacketShape {
    pub(crate) bytes: usize,
    pub(crate) blocks: u32,
    pub(crate) threads: u32,
}

impl PacketShape {
    /// Size of an end's scratch.
    pub(crate) fn scratch_bytes(&self, receives: bool) -> usize {
        let halves = if receives { 2 * self.half_bytes() } else { 0 };
        (HALVES + halves).next_multiple_of(SCRATCH_ALIGNMENT)
    }

    /// Number of packets.
    pub(crate) fn packets(&self) -> usize {
        self.bytes.div_ceil(PACKET[0])
    }

    fn half_bytes(&self) -> usize {
        PACKET[1] * self.packets()
    }
}

/// One end of a unidirectional line of packets.
#[derive(Clone, Debug)]
pub struct PacketLine {
    shape: PacketShape,
    own: DeviceSlice,
    peer: DeviceSlice,
    abort: Word,
}

impl PacketLine {
    /// The end with scratch `own`, initially zero, and the peer's, mapped here. Waits abort when `abort`
    /// becomes nonzero.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidHandle`] if the peer's scratch has the wrong length.
    pub(crate) fn new(
        shape: PacketShape,
        receives: bool,
        own: DeviceSlice,
        peer: DeviceSlice,
        abort: Word,
    ) -> Result<Self> {
        let expected = shape.scratch_bytes(!receives);
        if peer.bytes() != expected {
            return Err(Error::invalid_handle(format!(
                "the peer's scratch has {} bytes; expected {expected}",
                peer.bytes()
            ))
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

    /// Scratch of this end and of the peer.
    pub(crate) fn scratch(&self) -> [&DeviceSlice; 2] {
        [&self.own, &self.peer]
    }

    /// Nonzero when waits must abort.
    pub(crate) fn abort(&self) -> &Word {
        &self.abort
    }

    /// Last epoch that `block` of this end has completed.
    pub(crate) fn epoch(&self, block: u32) -> Result<Word> {
        self.own.word(8 * block as usize)
    }

    /// At the sender: last epoch that `block` of the receiver has completed.
    pub(crate) fn consumed(&self, block: u32) -> Result<Word> {
        self.own.word(CONSUMED + 8 * block as usize)
    }

    /// At the receiver: the same word, mapped here.
    pub(crate) fn consumed_at_peer(&self, block: u32) -> Result<Word> {
        self.peer.word(CONSUMED + 8 * block as usize)
    }

    /// The receiver's scratch: this rank's if it `receives`, else the peer's.
    pub(crate) fn at_receiver(&self, receives: bool) -> &DeviceSlice {
        if receives { &self.own } else { &self.peer }
    }

    /// Offset of packet `number` of `epoch` in the receiver's scratch, in bytes.
    pub(crate) fn packet(&self, epoch: u64, number: usize) -> usize {
        // Two halves, used in turn, let the sender run one epoch ahead of the receiver.
        let half = (epoch % 2) as usize * self.shape.half_bytes();
        HALVES + half + PACKET[1] * number
    }
}

/// One end's part of a packet transfer.
#[derive(Clone, Copy, Debug)]
pub struct PacketPart<'a> {
    /// The line.
    pub line: &'a PacketLine,
    /// Source at the sender, destination at the receiver.
    pub data: &'a DeviceSlice,
    /// Whether this end receives.
    pub receives: bool,
    /// A word in this rank's memory that each block increments when done.
    pub completed: Option<&'a Word>,
}

impl PacketPart<'_> {
    /// Whether `later`, enqueued after this, must not run concurrently. A send after a receive may depend on
    /// the received data even if it reads other memory.
    pub(crate) fn excludes(&self, later: &Self) -> bool {
        let answers = self.receives && !later.receives;
        let writes = self.receives || later.receives;
        answers
            || self.line.own.overlaps(&later.line.own)
            || (writes && self.data.overlaps(later.data))
    }

    /// Fails unless the data has the line's length.
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
    fn scratch_layout_matches_the_kernels() {
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
    fn no_send_overlaps_an_earlier_receive() {
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
        // A reply to the received data.
        assert!(receive.excludes(&send));
        // Epochs of a line are sequential, and so are accesses to the same memory.
        assert!(receive.excludes(&receive) && send.excludes(&send));
        assert!(send.excludes(&part(1, 0)) && other.excludes(&part(1, 2)));
    }
}
