//! Packets: data that carries its own flag, so that who reads it waits for nothing else.

use super::operation::Context;
use super::words;
use crate::device::DeviceSlice;
use crate::error::{Error, ErrorKind, Result};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Data bytes and all bytes of a packet of 128 bytes.
pub(super) const LINE: (usize, usize) = (120, 128);

/// Words of data in it; its flag follows.
const LINE_WORDS: usize = LINE.0 / 8;

/// Longest pause of a thread that looks for something again and again.
const NAP: Duration = Duration::from_micros(50);

/// Looks before a thread that waits begins to pause.
const SPINS: u32 = 200;

/// Stores `bytes` as packets at `target`, which has room for them: with `lines`, of 128 bytes, else of 8
/// or 16, which are the same. What the last packet has room for is filled up with zeros.
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
        let (first, second) = words.split_at(words.len() / 2);
        let (early, late) = bytes.split_at(bytes.len().min(4 * first.len()));
        for (words, bytes) in [(first, early), (second, late)] {
            for (word, data) in words.iter().zip(filled::<4>(bytes)) {
                let value = flag | u64::from(u32::from_le_bytes(data));
                word.store(value.to_le(), Ordering::Release);
            }
            context.delay();
        }
        return Ok(());
    }
    let mut data = filled::<8>(bytes);
    for line in words.chunks_exact(LINE_WORDS + 1) {
        let (flag_word, words) = last_of(line)?;
        for (word, data) in words.iter().zip(&mut data) {
            word.store(u64::from_ne_bytes(data), Ordering::Release);
        }
        context.delay();
        flag_word.store(flag, Ordering::Release);
    }
    Ok(())
}

/// Reads what was stored at `source` with `flag`, once it is there.
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

/// As [`load`], for a lane, which lets the others go on meanwhile.
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

/// Packets that are waited for.
struct Arrivals<'a> {
    words: &'a [AtomicU64],
    bytes: &'a mut [u8],
    flag: u64,
    lines: bool,
    /// How many packets have come.
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
            return Err(Error::new(ErrorKind::Internal, what));
        }
        Ok(Self {
            words,
            bytes,
            flag,
            lines,
            taken: 0,
        })
    }

    /// Takes what has come; whether that was the rest.
    fn take(&mut self) -> Result<bool> {
        if !self.lines {
            let words = self.words.iter().zip(self.bytes.chunks_mut(4));
            for (word, data) in words.skip(self.taken) {
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
            if flag_word.load(Ordering::Acquire) != self.flag {
                return Ok(false);
            }
            for (word, data) in words.iter().zip(data.chunks_mut(8)) {
                let found = word.load(Ordering::Acquire).to_ne_bytes();
                data.copy_from_slice(&found[..data.len()]);
            }
            self.taken += 1;
        }
        Ok(true)
    }
}

/// Looks until `ready`, or until the waits are ended.
pub(super) fn spin(context: &Context, mut ready: impl FnMut() -> Result<bool>) -> Result<()> {
    let mut looks = 0;
    while !ready()? {
        looks += 1;
        pause(context, looks)?;
    }
    Ok(())
}

/// Between two looks.
pub(super) fn pause(context: &Context, looks: u32) -> Result<()> {
    if looks < SPINS {
        std::hint::spin_loop();
        return Ok(());
    }
    context.check()?;
    std::thread::sleep(NAP);
    Ok(())
}

/// `bytes` in pieces of a length, of which the last is filled up with zeros and followed by zeros.
fn filled<const LENGTH: usize>(bytes: &[u8]) -> impl Iterator<Item = [u8; LENGTH]> + '_ {
    let (whole, rest) = bytes.as_chunks::<LENGTH>();
    let mut last = [0; LENGTH];
    last[..rest.len()].copy_from_slice(rest);
    let zeros = std::iter::repeat([0; LENGTH]);
    whole.iter().copied().chain([last]).chain(zeros)
}

/// The last word of a packet of 128 bytes, and those before.
fn last_of(line: &[AtomicU64]) -> Result<(&AtomicU64, &[AtomicU64])> {
    let split = line.split_last();
    split.ok_or_else(|| Error::new(ErrorKind::Internal, "a line has words"))
}

#[cfg(test)]
mod tests {
    use super::super::memory;
    use super::*;
    use crate::device::{AllocationKind, FaultSet};
    use std::sync::Arc;

    #[test]
    fn what_is_stored_as_packets_is_read_whole_or_not_at_all() {
        let context = Context::new(Arc::default(), Arc::<FaultSet>::default(), None, 1);
        for (lines, data, packed) in [(false, 4, 8), (true, LINE.0, LINE.1)] {
            for bytes in [1_usize, 3, 4, 7, 8, 119, 120, 121, 247, 960] {
                // Packets of 16 bytes are filled up.
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
