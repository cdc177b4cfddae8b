//! What a lane of a kernel section does on the host device, in the place of `warplink/steps.cuh`.
//!
//! Bytes are moved in two halves with a delay between, where tests ask for delays, so that who does not
//! wait finds half of them.

use super::kernel::Block;
use super::{check_kind, memory, packets};
use crate::device::{DeviceSlice, ReduceOp, Word};
use crate::dtype::{DType, Element};
use crate::error::Result;

impl Block<'_> {
    /// Fails where the waits are ended; sleeps for a while, where tests ask for it.
    pub(crate) fn pause(&self) -> Result<()> {
        self.context().check()?;
        self.context().delay();
        Ok(())
    }

    /// The bytes of `source`.
    pub(crate) fn load(&self, source: &DeviceSlice) -> Result<Vec<u8>> {
        check_kind(source)?;
        let mut bytes = vec![0; source.bytes()];
        let half = bytes.len() / 2;
        let (first, second) = bytes.split_at_mut(half);
        memory::read_bytes(&source.slice(half..source.bytes())?, second)?;
        self.context().delay();
        if half > 0 {
            memory::read_bytes(&source.slice(0..half)?, first)?;
        }
        Ok(bytes)
    }

    /// Writes `bytes` to `target`, of the same length.
    pub(crate) fn store(&self, target: &DeviceSlice, bytes: &[u8]) -> Result<()> {
        check_kind(target)?;
        let (first, second) = bytes.split_at(bytes.len() / 2);
        memory::write_bytes(&target.slice(first.len()..target.bytes())?, second)?;
        self.context().delay();
        if first.is_empty() {
            return Ok(());
        }
        memory::write_bytes(&target.slice(0..first.len())?, first)
    }

    /// As many `bytes` of data as packets at `source` hold, once all have `flag`; with `lines`, packets of
    /// 128 bytes.
    pub(crate) fn load_packets(
        &self,
        source: &DeviceSlice,
        bytes: usize,
        flag: u64,
        lines: bool,
    ) -> Result<Vec<u8>> {
        check_kind(source)?;
        let mut data = vec![0; bytes];
        packets::load(self.context(), source, &mut data, flag, lines)?;
        Ok(data)
    }

    /// Stores `bytes` as packets with `flag` at `target`.
    pub(crate) fn store_packets(
        &self,
        target: &DeviceSlice,
        bytes: &[u8],
        flag: u64,
        lines: bool,
    ) -> Result<()> {
        check_kind(target)?;
        packets::store(self.context(), target, bytes, flag, lines)
    }

    /// The value of a word; what was written before it was set is visible after.
    pub(crate) fn value(&self, word: &Word) -> u64 {
        memory::load(word)
    }

    /// Sets a word after all earlier writes of this block.
    pub(crate) fn set(&self, word: &Word, value: u64) {
        memory::set(word, value);
    }

    /// Adds one to a word after all earlier writes of this block; the value before.
    pub(crate) fn increment(&self, word: &Word) -> u64 {
        memory::increment(word)
    }
}

/// Combines sources of one length element by element, in order: floats of 16 bits in single precision,
/// rounded once at the end, the others in their own type. Integers wrap.
pub(crate) fn combine(op: ReduceOp, dtype: DType, sources: &[Vec<u8>]) -> Vec<u8> {
    let single = [|a: f32, b: f32| a + b, f32::max, f32::min][op as usize];
    let double = [|a: f64, b: f64| a + b, f64::max, f64::min][op as usize];
    let integer = [i32::wrapping_add, i32::max, i32::min][op as usize];
    let byte = [u8::wrapping_add, u8::max, u8::min][op as usize];
    match dtype {
        DType::F16 => fold(sources, half::f16::to_f32, single, half::f16::from_f32),
        DType::BF16 => fold(sources, half::bf16::to_f32, single, half::bf16::from_f32),
        DType::F32 => fold(sources, |x: f32| x, single, |x| x),
        DType::F64 => fold(sources, |x: f64| x, double, |x| x),
        DType::I32 => fold(sources, |x: i32| x, integer, |x| x),
        DType::U8 => fold(sources, |x: u8| x, byte, |x| x),
    }
}

fn fold<T: Element, A>(
    sources: &[Vec<u8>],
    widen: fn(T) -> A,
    add: fn(A, A) -> A,
    round: fn(A) -> T,
) -> Vec<u8> {
    let size = size_of::<T>();
    let elements = sources.first().map_or(0, |source| source.len() / size);
    let mut all = Vec::with_capacity(elements * size);
    for index in 0..elements {
        let values = sources.iter().filter_map(|source| {
            let bytes = source.get(index * size..(index + 1) * size)?;
            T::read_from_bytes(bytes).ok().map(widen)
        });
        if let Some(value) = values.reduce(add) {
            all.extend_from_slice(round(value).as_bytes());
        }
    }
    all
}
