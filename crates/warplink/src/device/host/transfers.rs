//! Host-device versions of the transfer kernels: multi-block copies and packets.

use super::check_kind;
use super::memory;
use super::operation::{Context, HostOperation};
use super::stream::HostStream;
use super::words;
use crate::device::packet_block::{self, BlockWord, BlockWords};
use crate::device::{DeviceSlice, KernelCopy, PACKET, PacketLine, PacketPart, Word};
use crate::error::{Error, Result};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Polls before a waiting thread starts to sleep, and the sleep between polls.
const SPINS: u32 = 200;
const NAP: Duration = Duration::from_micros(20);

impl HostStream {
    /// Runs block after block; each signals completion itself.
    pub(super) fn enqueue_kernel_copy(&self, copy: &KernelCopy<'_>) -> Result<()> {
        let KernelCopy {
            target,
            source,
            blocks,
            arrivals,
            counter: _,
        } = *copy;
        check_kind(target)?;
        check_kind(source)?;
        target.check_source(source)?;
        let (target, source) = (target.clone(), source.clone());
        let arrivals: Vec<Word> = arrivals.into_iter().flatten().cloned().collect();
        self.enqueue(HostOperation::Task(Arc::new(move |context: &Context| {
            // Rounded up, so the last blocks may be left with nothing; they signal all the same, since arrivals are
            // counted.
            let each = target.bytes().div_ceil(blocks.max(1) as usize);
            in_any_order(context, blocks, |block| {
                let start = (block as usize * each).min(target.bytes());
                let end = (start + each).min(target.bytes());
                context.copy(&target.slice(start..end)?, &source.slice(start..end)?)?;
                for word in &arrivals {
                    words::increment_at_peer(word)?;
                }
                Ok(())
            })
        })))
    }

    /// Runs block after block.
    pub(super) fn enqueue_packets(&self, part: &PacketPart<'_>) -> Result<()> {
        part.check()?;
        check_kind(part.data)?;
        let (line, data) = (part.line.clone(), part.data.clone());
        let (receives, completed) = (part.receives, part.completed.cloned());
        let _noted = self.depend_on(line.abort().fault());
        self.enqueue(HostOperation::Task(Arc::new(move |context: &Context| {
            in_any_order(context, line.shape().blocks, |block| {
                let end = LineEnd {
                    line: &line,
                    packets: words::all_of(line.at_receiver(receives))?,
                    data: &data,
                    context,
                    block,
                };
                if receives {
                    end.unpack()?;
                } else {
                    end.push()?;
                }
                if let Some(word) = &completed {
                    words::increment(word);
                }
                Ok(())
            })
        })))
    }
}

/// Runs the blocks of a kernel, in random order if delays are requested.
fn in_any_order(context: &Context, blocks: u32, run: impl Fn(u32) -> Result<()>) -> Result<()> {
    let first = if context.delays.is_some() {
        (context.draw() % u64::from(blocks.max(1))) as u32
    } else {
        0
    };
    for block in 0..blocks {
        context.check()?;
        context.delay();
        run((first + block) % blocks)?;
    }
    Ok(())
}

/// One end of a line of packets, for one block.
struct LineEnd<'a> {
    line: &'a PacketLine,
    /// The receiver's scratch. A [`Word`] for each packet would take most of the time.
    packets: &'a [AtomicU64],
    data: &'a DeviceSlice,
    context: &'a Context,
    block: u32,
}

impl LineEnd<'_> {
    fn push(&self) -> Result<()> {
        packet_block::push(self, self.packets(), |packet| {
            let mut bytes = [0; PACKET[0]];
            let (start, end) = self.range(packet);
            memory::read_from(self.data, start, &mut bytes[..end - start])?;
            Ok(halves(bytes))
        })
    }

    fn unpack(&self) -> Result<()> {
        packet_block::unpack(self, self.packets(), |packet, [low, high]| {
            let bytes = (u64::from(high) << 32 | u64::from(low)).to_le_bytes();
            let (start, end) = self.range(packet);
            memory::write_to(self.data, start, &bytes[..end - start])
        })
    }

    /// Does `access` to a word.
    fn with<T>(&self, word: BlockWord, access: impl FnOnce(&AtomicU64) -> T) -> Result<T> {
        let word = match word {
            BlockWord::Epoch => self.line.epoch(self.block)?,
            BlockWord::Consumed => self.line.consumed(self.block)?,
            BlockWord::ConsumedAtPeer => self.line.consumed_at_peer(self.block)?,
            BlockWord::Packet {
                epoch,
                number,
                half,
            } => {
                let index = self.line.packet(epoch, number) / 8 + half;
                let packet = self.packets.get(index);
                return packet
                    .map(access)
                    .ok_or_else(|| Error::internal("a packet outside of the scratch"));
            }
        };
        Ok(access(words::atomic(&word)))
    }

    /// Indices of a block's packets, thread by thread and round by round.
    fn packets(&self) -> impl Iterator<Item = usize> + use<> {
        let shape = self.line.shape();
        let (blocks, threads) = (shape.blocks as usize, shape.threads as usize);
        let first = self.block as usize * threads;
        (first..shape.packets())
            .step_by(blocks * threads)
            .flat_map(move |turn| turn..(turn + threads).min(shape.packets()))
    }

    /// Byte range of a packet's data.
    fn range(&self, packet: usize) -> (usize, usize) {
        let start = PACKET[0] * packet;
        (start, (start + PACKET[0]).min(self.data.bytes()))
    }
}

impl BlockWords for LineEnd<'_> {
    fn load(&self, word: BlockWord) -> Result<u64> {
        self.with(word, |word| word.load(Ordering::Acquire))
    }

    fn set(&self, word: BlockWord, value: u64) -> Result<()> {
        if word == BlockWord::ConsumedAtPeer {
            // Tests delay this word, so that a sender that does not wait for it overwrites packets that are not
            // read yet.
            self.context.delay();
        }
        self.with(word, |word| word.store(value, Ordering::Release))
    }

    fn pause(&self, looks: u32) -> Result<()> {
        if looks < SPINS {
            std::hint::spin_loop();
            return Ok(());
        }
        self.context.check()?;
        if words::load(self.line.abort()) != 0 {
            return Err(Error::closed("the waits for packets were ended"));
        }
        std::thread::sleep(NAP);
        Ok(())
    }
}

fn halves(bytes: [u8; 8]) -> [u32; 2] {
    let all = u64::from_le_bytes(bytes);
    [all as u32, (all >> 32) as u32]
}
