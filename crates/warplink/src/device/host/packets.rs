//! Packets: data that carries its own flag, so that who reads it waits for nothing else.

use super::operation::Context;
use super::words;
use crate::device::{DeviceSlice, Word};
use crate::error::{Error, ErrorKind, Result};
use std::time::Duration;

/// Data bytes and all bytes of a packet of 128 bytes.
pub(super) const LINE: (usize, usize) = (120, 128);

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
    if !lines {
        let words = target.bytes() / 8;
        for packet in 0..words {
            let mut data = [0; 4];
            copy_within(&mut data, bytes, 4 * packet);
            let value = u64::from(flag as u32) << 32 | u64::from(u32::from_le_bytes(data));
            words::set(&target.word(8 * packet)?, value.to_le());
            if packet == words / 2 {
                context.delay();
            }
        }
        return Ok(());
    }
    for (number, line) in words_of_lines(target).enumerate() {
        let [words @ .., flag_word] = &line?;
        for (place, word) in words.iter().enumerate() {
            let mut data = [0; 8];
            copy_within(&mut data, bytes, LINE.0 * number + 8 * place);
            words::set(word, u64::from_ne_bytes(data));
        }
        context.delay();
        words::set(flag_word, flag);
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
    if !lines {
        for (packet, data) in bytes.chunks_mut(4).enumerate() {
            let word = source.word(8 * packet)?;
            let value = || u64::from_le(words::load(&word));
            spin(context, || Ok(value() >> 32 == u64::from(flag as u32)))?;
            let found = (value() as u32).to_le_bytes();
            data.copy_from_slice(&found[..data.len()]);
        }
        return Ok(());
    }
    for (line, data) in words_of_lines(source).zip(bytes.chunks_mut(LINE.0)) {
        let [words @ .., flag_word] = &line?;
        spin(context, || Ok(words::load(flag_word) == flag))?;
        for (word, data) in words.iter().zip(data.chunks_mut(8)) {
            let found = words::load(word).to_ne_bytes();
            data.copy_from_slice(&found[..data.len()]);
        }
    }
    Ok(())
}

/// Looks until `ready`, or until the waits are ended.
pub(super) fn spin(context: &Context, ready: impl Fn() -> Result<bool>) -> Result<()> {
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

/// The bytes from `at` on, as many as there are.
fn copy_within(data: &mut [u8], bytes: &[u8], at: usize) {
    let there = bytes.get(at..).unwrap_or_default();
    let count = there.len().min(data.len());
    data[..count].copy_from_slice(&there[..count]);
}

/// The words of each packet of 128 bytes.
fn words_of_lines(lines: &DeviceSlice) -> impl Iterator<Item = Result<[Word; 16]>> + '_ {
    (0..lines.bytes() / LINE.1).map(move |line| {
        let words: Result<Vec<Word>> = (0..16)
            .map(|word| lines.word(LINE.1 * line + 8 * word))
            .collect();
        let words = words?.try_into();
        words.map_err(|_| Error::new(ErrorKind::Internal, "a line has 16 words"))
    })
}
