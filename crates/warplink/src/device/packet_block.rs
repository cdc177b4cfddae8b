//! Packet protocol of one block: the order of its accesses to the words of a line.
//!
//! GPU kernels implement the same protocol in `kernels/transfer.cu`. `packets.rs` explains why nothing is
//! overwritten too early; the loom models below check it.

use crate::error::Result;

/// A word of a line, as seen by one block of an end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BlockWord {
    /// Last epoch that the block has completed.
    Epoch,
    /// At the sender: last epoch that the receiver's block has completed; and the same word as the receiver
    /// stores it.
    Consumed,
    ConsumedAtPeer,
    /// Half of a packet in the receiver's scratch: data in the low bits, flag in the high bits.
    Packet {
        epoch: u64,
        number: usize,
        half: usize,
    },
}

/// Access to the words of a line.
pub(crate) trait BlockWords {
    /// Loads a word (acquire).
    fn load(&self, word: BlockWord) -> Result<u64>;

    /// Stores a word (release).
    fn set(&self, word: BlockWord, value: u64) -> Result<()>;

    /// Backoff between polls; fails once waits are aborted.
    fn pause(&self, looks: u32) -> Result<()>;
}

/// Sends one epoch: `packets`, with their data from `data`.
pub(crate) fn push(
    words: &impl BlockWords,
    packets: impl Iterator<Item = usize>,
    data: impl Fn(usize) -> Result<[u32; 2]>,
) -> Result<()> {
    let epoch = words.load(BlockWord::Epoch)? + 1;
    // Wait until the receiver has read epoch e - 2, which used the same half of the scratch.
    spin(words, || Ok(words.load(BlockWord::Consumed)? + 2 >= epoch))?;
    for number in packets {
        for (half, data) in data(number)?.into_iter().enumerate() {
            // Data and flag in one word, which is stored whole, so a receiver that sees the flag has the data
            // without a fence.
            let value = u64::from(epoch as u32) << 32 | u64::from(data);
            let word = BlockWord::Packet {
                epoch,
                number,
                half,
            };
            words.set(word, value.to_le())?;
        }
    }
    words.set(BlockWord::Epoch, epoch)
}

/// Receives one epoch: passes the data of each of `packets` to `place`.
pub(crate) fn unpack(
    words: &impl BlockWords,
    packets: impl Iterator<Item = usize>,
    mut place: impl FnMut(usize, [u32; 2]) -> Result<()>,
) -> Result<()> {
    let epoch = words.load(BlockWord::Epoch)? + 1;
    for number in packets {
        let mut data = [0; 2];
        for (half, data) in data.iter_mut().enumerate() {
            let word = BlockWord::Packet {
                epoch,
                number,
                half,
            };
            let value = || words.load(word).map(u64::from_le);
            spin(words, || Ok(value()? >> 32 == u64::from(epoch as u32)))?;
            *data = value()? as u32;
        }
        place(number, data)?;
    }
    words.set(BlockWord::Epoch, epoch)?;
    // Last: from here on the sender may overwrite this epoch's half.
    words.set(BlockWord::ConsumedAtPeer, epoch)
}

fn spin(words: &impl BlockWords, ready: impl Fn() -> Result<bool>) -> Result<()> {
    let mut looks = 0;
    while !ready()? {
        looks += 1;
        words.pause(looks)?;
    }
    Ok(())
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use crate::error::Error;
    use loom::sync::Arc;
    use loom::sync::atomic::{AtomicBool, AtomicU64, Ordering};
    use loom::thread;

    /// The words of one block of a line with one packet.
    #[derive(Default)]
    struct Line {
        epochs: [AtomicU64; 2],
        consumed: AtomicU64,
        halves: [[AtomicU64; 2]; 2],
        abort: AtomicBool,
    }

    struct End<'a> {
        line: &'a Line,
        receives: bool,
    }

    impl End<'_> {
        fn word(&self, word: BlockWord) -> &AtomicU64 {
            match word {
                BlockWord::Epoch => &self.line.epochs[usize::from(self.receives)],
                BlockWord::Consumed | BlockWord::ConsumedAtPeer => &self.line.consumed,
                BlockWord::Packet { epoch, half, .. } => {
                    &self.line.halves[(epoch % 2) as usize][half]
                }
            }
        }
    }

    impl BlockWords for End<'_> {
        fn load(&self, word: BlockWord) -> Result<u64> {
            Ok(self.word(word).load(Ordering::Acquire))
        }

        fn set(&self, word: BlockWord, value: u64) -> Result<()> {
            self.word(word).store(value, Ordering::Release);
            Ok(())
        }

        fn pause(&self, _: u32) -> Result<()> {
            if self.line.abort.load(Ordering::Acquire) {
                return Err(Error::invalid("the waits are ended"));
            }
            thread::yield_now();
            Ok(())
        }
    }

    /// Data of an epoch; differs between the two words and between epochs.
    fn sent(epoch: u32) -> [u32; 2] {
        [10 * epoch, 10 * epoch + 1]
    }

    fn push_all(line: &Line, epochs: std::ops::RangeInclusive<u32>) {
        let end = End {
            line,
            receives: false,
        };
        for epoch in epochs {
            push(&end, 0..1, |_| Ok(sent(epoch))).unwrap();
        }
    }

    /// Unpacks `epochs` epochs; returns the data received until waits are aborted.
    fn unpack_all(line: &Line, epochs: u32) -> Vec<[u32; 2]> {
        let end = End {
            line,
            receives: true,
        };
        let mut found = Vec::new();
        for _ in 0..epochs {
            let unpacked = unpack(&end, 0..1, |_, data| {
                found.push(data);
                Ok(())
            });
            if unpacked.is_err() {
                break;
            }
        }
        found
    }

    fn bounded(preemptions: usize, model: impl Fn() + Send + Sync + 'static) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(preemptions);
        builder.max_branches = 100_000;
        builder.check(model);
    }

    /// A sender is at most two epochs ahead: each epoch is unpacked once, whole and in order, also when both
    /// halves of the scratch are reused.
    #[test]
    fn loom_a_packet_is_overwritten_when_it_was_unpacked() {
        bounded(3, || {
            let line = Arc::new(Line::default());
            let sender = line.clone();
            let thread = thread::spawn(move || push_all(&sender, 1..=4));
            assert_eq!(unpack_all(&line, 4), [1, 2, 3, 4].map(sent));
            thread.join().unwrap();
        });
    }

    /// The next launch continues where the previous one ended, whichever end was faster.
    #[test]
    fn loom_epochs_go_on_in_the_next_launch() {
        bounded(3, || {
            let line = Arc::new(Line::default());
            for first in [1, 3] {
                let sender = line.clone();
                let thread = thread::spawn(move || push_all(&sender, first..=first + 1));
                assert_eq!(unpack_all(&line, 2), [first, first + 1].map(sent));
                thread.join().unwrap();
            }
            assert_eq!(line.consumed.load(Ordering::Relaxed), 4);
        });
    }

    /// Aborted waits return no data that was not sent.
    #[test]
    fn loom_ended_waits_give_no_packet() {
        bounded(3, || {
            let line = Arc::new(Line::default());
            let (sender, fault) = (line.clone(), line.clone());
            let pushing = thread::spawn(move || push_all(&sender, 1..=1));
            let ending = thread::spawn(move || fault.abort.store(true, Ordering::Release));
            let found = unpack_all(&line, 2);
            assert!(found.is_empty() || found == [sent(1)], "{found:?}");
            pushing.join().unwrap();
            ending.join().unwrap();
        });
    }
}
