//! Transfer paths: the requested path, and the flow selected from it.

use super::protocol::Protocol;
use crate::device::{MAX_PACKET_BLOCKS, PACKET};
use crate::error::Result;
use crate::named::named;
use serde::{Deserialize, Serialize};
use std::fmt;

named! {
    /// Engine that moves the bytes of a transfer; the same on both ranks.
    #[derive(Default)]
    pub enum Path: "path", help "use copy-engine where kernels of your own wait for transfers, else fastest" {
        /// The copy engine, and stream memory operations on words. Runs no kernel at either end, so a transfer
        /// completes even if a kernel that waits for it occupies the whole device.
        #[default]
        CopyEngine = "copy-engine",
        /// Kernels at both ends for any length: packets where the hardware model prefers them, else several blocks
        /// that copy. Small transfers are several times as fast as with the copy engine. Each kernel waits for its
        /// peer, and needs multiprocessors that no other kernel occupies until the transfer is done. The first wait
        /// for a receive may unpack it: waits on other streams follow that one and everything else it waits for, and
        /// a receive may be posted at most twice before a wait.
        Multiprocessors = "multiprocessors",
        /// Kernels up to the length at which the hardware model prefers the copy engine, then the copy engine. For
        /// programs whose own kernels end without this transfer.
        Fastest = "fastest",
        /// A kernel of one block up to the length for which the hardware model finds that faster, else the copy
        /// engine: for transfers concurrent with matmuls, which leave few multiprocessors free.
        OneBlock = "one-block",
    }
}

/// Performance of transfers by kernels, from the hardware model.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TransferKernels {
    /// Maximum bytes for which a kernel of one block is faster than the copy engine.
    #[serde(skip)]
    pub one_block_limit: u64,
    /// Maximum bytes for which kernels are faster than the copy engine.
    pub limit: u64,
    /// Maximum bytes for which packets are faster than stores followed by a signal.
    pub packet_limit: u64,
    /// Maximum blocks that move packets, and minimum threads of each; larger transfers get more threads per block.
    pub packet_blocks: u32,
    /// See `packet_blocks`.
    pub packet_threads: u32,
    /// Number of blocks that store without packets: pairs of a maximum number of bytes and the blocks up to it, in
    /// ascending order. Longer transfers use the blocks of the last pair.
    pub store_blocks: Vec<(u64, u32)>,
}

impl TransferKernels {
    /// The same for each of `ranks` ranks that share a device. Together they occupy no more multiprocessors than one
    /// alone would, because the ranks that they wait for need some as well.
    #[must_use]
    pub(crate) fn shared_by(self, ranks: usize) -> Self {
        let ranks = u32::try_from(ranks).unwrap_or(u32::MAX).max(1);
        self.with_blocks(|blocks| blocks / ranks)
    }

    /// The same with at most `most` blocks, at least one.
    #[must_use]
    pub(super) fn at_most(self, most: u32) -> Self {
        self.with_blocks(|blocks| blocks.min(most))
    }

    /// The same with each count of blocks mapped by `blocks`, at least one.
    fn with_blocks(mut self, blocks: impl Fn(u32) -> u32) -> Self {
        self.packet_blocks = blocks(self.packet_blocks).max(1);
        for (_, stored) in &mut self.store_blocks {
            *stored = blocks(*stored).max(1);
        }
        self
    }

    /// How many blocks put `bytes`.
    pub(crate) fn blocks(&self, bytes: usize) -> u32 {
        match Flow::by_kernels(Protocol::Put, bytes, self) {
            Flow::Stores { blocks } | Flow::Packets { blocks, .. } => blocks,
            Flow::Streams => 0,
        }
    }
}

/// Flow of a transfer; the same at both ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Flow {
    /// Operations on words in the streams, before and after a copy by the copy engine or by other work that stores
    /// the bytes.
    Streams,
    /// The initiator's kernel copies. With several blocks, each adds one to the completion words.
    Stores { blocks: u32 },
    /// The sender's kernel stores packets, which the receiver's kernel unpacks.
    Packets { blocks: u32, threads: u32 },
}

/// Most threads of a block.
const MAX_THREADS: u32 = 1024;

impl Flow {
    /// Selects the flow of `bytes` for `path`.
    pub(super) fn new(
        path: Path,
        protocol: Protocol,
        bytes: usize,
        kernels: &TransferKernels,
    ) -> Self {
        let length = bytes as u64;
        match path {
            Path::CopyEngine => Self::Streams,
            Path::OneBlock if length <= kernels.one_block_limit => Self::Stores { blocks: 1 },
            Path::OneBlock => Self::Streams,
            Path::Fastest if length > kernels.limit => Self::Streams,
            Path::Fastest | Path::Multiprocessors => Self::by_kernels(protocol, bytes, kernels),
        }
    }

    fn by_kernels(protocol: Protocol, bytes: usize, kernels: &TransferKernels) -> Self {
        let length = bytes as u64;
        if protocol == Protocol::Put && length <= kernels.packet_limit {
            let packets = u32::try_from(bytes.div_ceil(PACKET[0]));
            let packets = packets.unwrap_or(u32::MAX).max(1);
            let least = kernels.packet_threads.clamp(32, MAX_THREADS);
            let most = kernels.packet_blocks.clamp(1, MAX_PACKET_BLOCKS);
            let blocks = packets.div_ceil(least).min(most);
            // Whole warps; a partial one would occupy as many registers and issue slots.
            let threads = packets.div_ceil(blocks).next_multiple_of(32);
            return Self::Packets {
                blocks,
                threads: threads.clamp(least, MAX_THREADS),
            };
        }
        let fitting = kernels
            .store_blocks
            .iter()
            .find(|(most, _)| length <= *most);
        let blocks = fitting.or(kernels.store_blocks.last());
        Self::Stores {
            blocks: blocks.map_or(1, |(_, blocks)| (*blocks).max(1)),
        }
    }

    /// The same for a peer whose words this device cannot add to atomically, as several blocks would have to.
    pub(super) fn without_atomics(self, path: Path) -> Self {
        match self {
            // The path promises kernels, so one block, which signals by a plain store, rather than the copy engine.
            Self::Stores { blocks: 2.. } if path == Path::Multiprocessors => {
                Self::Stores { blocks: 1 }
            }
            Self::Stores { blocks: 2.. } => Self::Streams,
            flow => flow,
        }
    }

    /// Increment of the completion words by each copy.
    pub(super) fn arrivals(self) -> u64 {
        match self {
            Self::Streams => 1,
            Self::Stores { blocks } | Self::Packets { blocks, .. } => u64::from(blocks),
        }
    }
}

impl fmt::Display for Flow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Streams => f.write_str("the copy engine"),
            Self::Stores { blocks: 1 } => f.write_str("a kernel of one block"),
            Self::Stores { blocks } => write!(f, "a kernel of {blocks} blocks"),
            Self::Packets { blocks, threads } => {
                write!(f, "packets, {blocks} blocks of {threads} threads")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kernels() -> TransferKernels {
        TransferKernels {
            one_block_limit: 64 << 10,
            limit: 4 << 20,
            packet_limit: 256 << 10,
            packet_blocks: 64,
            packet_threads: 128,
            store_blocks: vec![(4 << 10, 1), (1 << 20, 32), (4 << 20, 64)],
        }
    }

    #[test]
    fn packets_have_many_small_blocks_before_large_ones() {
        let flow = |bytes| Flow::new(Path::Fastest, Protocol::Put, bytes, &kernels());
        let packets = |blocks, threads| Flow::Packets { blocks, threads };
        assert_eq!(flow(1), packets(1, 128));
        assert_eq!(flow(4 << 10), packets(4, 128));
        assert_eq!(flow(64 << 10), packets(64, 128));
        assert_eq!(flow(256 << 10), packets(64, 512));
        assert_eq!(flow((256 << 10) + 1), Flow::Stores { blocks: 32 });
        assert_eq!(flow(4 << 20), Flow::Stores { blocks: 64 });
        assert_eq!(flow((4 << 20) + 1), Flow::Streams);
    }

    #[test]
    fn without_atomics_one_writer_sets_each_word() {
        let flow = |path, bytes| Flow::new(path, Protocol::Put, bytes, &kernels());
        for path in [Path::Fastest, Path::Multiprocessors, Path::OneBlock] {
            for bytes in [1, 4 << 10, 256 << 10, 1 << 20, 4 << 20, 64 << 20] {
                let flow = flow(path, bytes);
                let without = flow.without_atomics(path);
                match flow {
                    Flow::Stores { blocks: 2.. } => assert!(matches!(
                        (path, without),
                        (Path::Multiprocessors, Flow::Stores { blocks: 1 })
                            | (Path::Fastest, Flow::Streams)
                    )),
                    _ => assert_eq!(without, flow),
                }
            }
        }
    }

    #[test]
    fn a_limit_of_blocks_holds_for_every_length() {
        for most in [1, 3, 64, 1000] {
            for bytes in [1, 4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 64 << 20] {
                let blocks = |kernels: TransferKernels| {
                    Flow::new(Path::Multiprocessors, Protocol::Put, bytes, &kernels).arrivals()
                };
                let free = blocks(kernels());
                let limited = blocks(kernels().at_most(most));
                assert!(
                    (1..=free.min(most.into())).contains(&limited),
                    "{most}, {bytes}"
                );
            }
        }
    }

    #[test]
    fn ranks_that_share_a_device_share_its_blocks() {
        let blocks = |ranks, bytes| kernels().shared_by(ranks).blocks(bytes);
        assert_eq!(blocks(1, 4 << 20), 64);
        assert_eq!(blocks(4, 4 << 20), 16);
        assert_eq!(blocks(4, 1 << 20), 8);
        assert_eq!(blocks(4, 64 << 10), 16);
        // A remainder of less than a block gets one block.
        assert_eq!(blocks(100, 4 << 20), 1);
        assert_eq!(blocks(0, 4 << 20), 64);
    }

    #[test]
    fn requested_path_is_used() {
        let flow = |path, protocol, bytes| Flow::new(path, protocol, bytes, &kernels());
        for bytes in [1, 4096, 64 << 20] {
            assert_eq!(flow(Path::CopyEngine, Protocol::Put, bytes), Flow::Streams);
            assert_ne!(
                flow(Path::Multiprocessors, Protocol::Put, bytes),
                Flow::Streams
            );
        }
        let one = Flow::Stores { blocks: 1 };
        assert_eq!(flow(Path::OneBlock, Protocol::Get, 64 << 10), one);
        assert_eq!(flow(Path::OneBlock, Protocol::Put, 65 << 10), Flow::Streams);
        // Get has no sender's kernel that could push packets.
        assert_eq!(flow(Path::Fastest, Protocol::Get, 4096), one);
        // A model without data still yields a working path.
        let none = TransferKernels::default();
        assert_eq!(
            Flow::new(Path::Fastest, Protocol::Put, 8, &none),
            Flow::Streams
        );
        assert_eq!(
            Flow::new(Path::Multiprocessors, Protocol::Put, 8, &none),
            one
        );
    }

    #[test]
    fn paths_are_read_as_they_are_printed() {
        for path in Path::ALL {
            assert_eq!(path.to_string().parse::<Path>().unwrap(), path);
        }
        let error = "sm".parse::<Path>().unwrap_err();
        assert!(error.to_string().contains("copy-engine, multiprocessors"));
    }
}
