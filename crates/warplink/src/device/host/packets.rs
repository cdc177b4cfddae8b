//! Packets: data with an inline flag, so that readers need no other synchronization.

use super::operation::Context;
use super::words;
use crate::device::DeviceSlice;
use crate::error::{Error, Result};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use zerocopy::IntoBytes;

/// Data bytes and total bytes of a 128-byte packet.
pub(super) const LINE: (usize, usize) = (120, 128);

/// Data words of a packet; the flag follows.
const LINE_WORDS: usize = LINE.0 / 8;

/// Maximum sleep between polls.
const NAP: Duration = Duration::from_micros(50);

/// Polls before a waiting thread starts to sleep.
const SPINS: u32 = 200;

/// Stores `bytes` as packets at `target`, which must be large enough: packets of 128 bytes if `lines`, else
/// of 8 or 16 bytes, which have the same layout. The last packet is zero-padded.
pub(super) fn store(
    context: &Context,
    target: &DeviceSlice,
    bytes: &[u8],
    flag: u64,
    lines: bool,
) -> Result<()> {
    context.delay();
    let words = words::all_of(target)?;
    if !lines {
        let flag = u64::from(flag as u32) << 32;
        // With a delay in between, so that a reader that trusts the first packet's flag for all of them gets stale
        // data.
        let (first, second) = words.split_at(words.len() / 2);
        let (early, late) = bytes.split_at(bytes.len().min(4 * first.len()));
        for (words, bytes) in [(first, early), (second, late)] {
            for (word, data) in words.iter().zip(filled(bytes)) {
                let value = flag | u64::from(u32::from_le_bytes(data));
                // Data and flag are in one word. Release orders it after the thread's earlier writes, as on a
                // GPU.
                word.store(value.to_le(), Ordering::Release);
            }
            context.delay();
        }
        return Ok(());
    }
    let data = bytes.chunks(LINE.0).chain(std::iter::repeat(&[][..]));
    for (line, data) in words.chunks_exact(LINE_WORDS + 1).zip(data) {
        let (flag_word, words) = last_of(line)?;
        // A line's data in one copy: conversions of single words take twice as long.
        let mut values = [0_u64; LINE_WORDS];
        values.as_mut_bytes()[..data.len()].copy_from_slice(data);
        for (word, value) in words.iter().zip(values) {
            // Release, as for the smaller packets; the flag alone would publish the line.
            word.store(value, Ordering::Release);
        }
        context.delay();
        // Release: readers that see the flag see the data words of the line.
        flag_word.store(flag, Ordering::Release);
    }
    Ok(())
}

/// Waits for packets with `flag` at `source` and reads them.
pub(super) fn load(
    context: &Context,
    source: &DeviceSlice,
    bytes: &mut [u8],
    flag: u64,
    lines: bool,
) -> Result<()> {
    let mut arrivals = Arrivals::new(source, bytes, flag, lines)?;
    spin(context, || arrivals.take())
}

/// As [`load`], for a lane; yields to others meanwhile.
pub(super) async fn arrived(
    context: &Context,
    source: &DeviceSlice,
    bytes: &mut [u8],
    flag: u64,
    lines: bool,
) -> Result<()> {
    let mut arrivals = Arrivals::new(source, bytes, flag, lines)?;
    while !arrivals.take()? {
        context.turn().await?;
    }
    Ok(())
}

/// Packets being received.
struct Arrivals<'a> {
    words: &'a [AtomicU64],
    bytes: &'a mut [u8],
    flag: u64,
    lines: bool,
    /// Number of packets received.
    taken: usize,
}

impl<'a> Arrivals<'a> {
    fn new(source: &'a DeviceSlice, bytes: &'a mut [u8], flag: u64, lines: bool) -> Result<Self> {
        let words = words::all_of(source)?;
        let data = if lines {
            words.len() / (LINE_WORDS + 1) * LINE.0
        } else {
            4 * words.len()
        };
        if bytes.len() > data {
            let what = "packets that hold less than is read of them";
            return Err(Error::internal(what));
        }
        Ok(Self {
            words,
            bytes,
            flag,
            lines,
            taken: 0,
        })
    }

    /// Reads available packets; returns whether all have arrived.
    fn take(&mut self) -> Result<bool> {
        if !self.lines {
            let words = self.words.iter().zip(self.bytes.chunks_mut(4));
            for (word, data) in words.skip(self.taken) {
                // Acquire: a reader of the data also sees what the writer did before.
                let value = u64::from_le(word.load(Ordering::Acquire));
                if value >> 32 != u64::from(self.flag as u32) {
                    return Ok(false);
                }
                data.copy_from_slice(&(value as u32).to_le_bytes()[..data.len()]);
                self.taken += 1;
            }
            return Ok(true);
        }
        let lines = self.words.chunks_exact(LINE_WORDS + 1);
        let lines = lines.zip(self.bytes.chunks_mut(LINE.0));
        for (line, data) in lines.skip(self.taken) {
            let (flag_word, words) = last_of(line)?;
            // Acquire pairs with the release store of the flag: the data words below are complete.
            if flag_word.load(Ordering::Acquire) != self.flag {
                return Ok(false);
            }
            let mut values = [0_u64; LINE_WORDS];
            for (word, value) in words.iter().zip(&mut values) {
                // Acquire, as for the smaller packets: a reader of the data also sees what the writer did before.
                *value = word.load(Ordering::Acquire);
            }
            data.copy_from_slice(&values.as_bytes()[..data.len()]);
            self.taken += 1;
        }
        Ok(true)
    }
}

/// Polls `ready` until it returns true or waits are aborted.
pub(super) fn spin(context: &Context, mut ready: impl FnMut() -> Result<bool>) -> Result<()> {
    let mut looks = 0;
    while !ready()? {
        looks += 1;
        pause(context, looks)?;
    }
    Ok(())
}

/// Backoff between polls.
pub(super) fn pause(context: &Context, looks: u32) -> Result<()> {
    if looks < SPINS {
        std::hint::spin_loop();
        return Ok(());
    }
    context.check()?;
    std::thread::sleep(NAP);
    Ok(())
}

/// Splits `bytes` into the data of words; the last one is zero-padded and followed by zeros.
fn filled(bytes: &[u8]) -> impl Iterator<Item = [u8; 4]> + '_ {
    let (whole, rest) = bytes.as_chunks();
    let mut last = [0; 4];
    last[..rest.len()].copy_from_slice(rest);
    let zeros = std::iter::repeat([0; 4]);
    whole.iter().copied().chain([last]).chain(zeros)
}

/// Splits a line into its last word (the flag) and the data words.
fn last_of(line: &[AtomicU64]) -> Result<(&AtomicU64, &[AtomicU64])> {
    let split = line.split_last();
    split.ok_or_else(|| Error::internal("a line has words"))
}

#[cfg(test)]
mod tests {
    use super::super::memory;
    use super::*;
    use crate::device::{AllocationKind, FaultSet};
    use std::sync::Arc;

    #[test]
    fn packets_are_read_completely_or_not_at_all() {
        let context = Context::new(Arc::default(), Arc::<FaultSet>::default(), None, 1);
        for (lines, data, packed) in [(false, 4, 8), (true, LINE.0, LINE.1)] {
            for bytes in [1_usize, 3, 4, 7, 8, 119, 120, 121, 247, 960] {
                // 16-byte packets are padded in pairs.
                let packets = bytes.div_ceil(data).next_multiple_of(2);
                let memory = memory::allocate(packets * packed, AllocationKind::Plain).unwrap();
                let sent: Vec<u8> = (0..bytes).map(|at| at as u8 ^ 0x5a).collect();
                let mut found = vec![0; bytes];
                let read = |found: &mut Vec<u8>, flag| {
                    Arrivals::new(&memory, found, flag, lines)
                        .unwrap()
                        .take()
                        .unwrap()
                };
                assert!(!read(&mut found, 7), "{bytes} bytes before they were sent");
                store(&context, &memory, &sent, 7, lines).unwrap();
                assert!(read(&mut found, 7), "{bytes} bytes");
                assert_eq!(found, sent);
                assert!(!read(&mut found, 8), "{bytes} bytes of another launch");
                let too_many = &mut vec![0; data * packets + 1];
                assert!(Arrivals::new(&memory, too_many, 7, lines).is_err());
            }
        }
    }
}
