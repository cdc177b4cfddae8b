//! What a lane of a kernel section does on the host device, in the place of `warplink/steps.cuh`.
//!
//! Bytes are moved in two halves with a delay between, where tests ask for delays, so that who does not
//! wait finds half of them.

use super::extremes::Extremes;
use super::kernel::Block;
use super::{check_kind, memory, packets, words};
use crate::device::{DeviceSlice, ReduceOp, Word};
use crate::dtype::{DType, Element, F8E4M3, F8E5M2};
use crate::error::Result;
use std::ops::{Add, Mul};

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
        words::load(word)
    }

    /// Sets a word after all earlier writes of this block.
    pub(crate) fn set(&self, word: &Word, value: u64) {
        words::set(word, value);
    }

    /// Adds one to a word after all earlier writes of this block; the value before.
    pub(crate) fn increment(&self, word: &Word) -> u64 {
        words::increment(word)
    }
}

/// Combines sources of one length element by element, in order: floats of 8 and 16 bits in single precision,
/// rounded once at the end, the others in their own type. Integers wrap.
pub(crate) fn combine(op: ReduceOp, dtype: DType, sources: &[Vec<u8>]) -> Vec<u8> {
    if let ([source], None) = (sources, op.factor()) {
        // As it is, also what its type would round.
        return source.clone();
    }
    match dtype {
        DType::F16 => fold(op, sources, half::f16::to_f32, half::f16::from_f32),
        DType::BF16 => fold(op, sources, half::bf16::to_f32, half::bf16::from_f32),
        DType::F8E4M3 => fold(op, sources, F8E4M3::to_f32, F8E4M3::from_f32),
        DType::F8E5M2 => fold(op, sources, F8E5M2::to_f32, F8E5M2::from_f32),
        DType::F32 => fold(op, sources, |x: f32| x, |x| x),
        DType::F64 => fold(op, sources, |x: f64| x, |x| x),
        // In 32 bits, as kernels do, which the average shows.
        DType::I8 => fold(op, sources, |x: i8| i32::from(x), |x| x as i8),
        DType::U8 => fold(op, sources, |x: u8| u32::from(x), |x| x as u8),
        DType::I32 => fold(op, sources, |x: i32| x, |x| x),
        DType::U32 => fold(op, sources, |x: u32| x, |x| x),
        DType::I64 => fold(op, sources, |x: i64| x, |x| x),
        DType::U64 => fold(op, sources, |x: u64| x, |x| x),
    }
}

/// What values are combined as.
trait Summand: Copy {
    fn combine(op: ReduceOp, a: Self, b: Self) -> Self;
    /// What becomes of the sum of `count` values for their average.
    fn divided(self, count: usize) -> Self;
    /// A value times a factor, which only floats have.
    fn times(self, factor: f64) -> Self;
}

macro_rules! summands {
    ($($type:ty: $add:ident $multiply:ident;)*) => {$(
        impl Summand for $type {
            fn combine(op: ReduceOp, a: Self, b: Self) -> Self {
                match op {
                    ReduceOp::Sum | ReduceOp::Average | ReduceOp::ScaledSum(_) => a.$add(b),
                    ReduceOp::Product => a.$multiply(b),
                    ReduceOp::Max => a.larger(b),
                    ReduceOp::Min => a.smaller(b),
                }
            }

            fn divided(self, count: usize) -> Self {
                self / count as Self
            }

            fn times(self, factor: f64) -> Self {
                self.$multiply(factor as Self)
            }
        }
    )*};
}

summands! {
    f32: add mul;
    f64: add mul;
    i32: wrapping_add wrapping_mul;
    u32: wrapping_add wrapping_mul;
    i64: wrapping_add wrapping_mul;
    u64: wrapping_add wrapping_mul;
}

fn fold<T: Element, A: Summand>(
    op: ReduceOp,
    sources: &[Vec<u8>],
    widen: fn(T) -> A,
    round: fn(A) -> T,
) -> Vec<u8> {
    let size = size_of::<T>();
    let elements = sources.first().map_or(0, |source| source.len() / size);
    let mut all = Vec::with_capacity(elements * size);
    for index in 0..elements {
        let values = sources.iter().filter_map(|source| {
            let bytes = source.get(index * size..(index + 1) * size)?;
            let value = T::read_from_bytes(bytes).ok().map(widen)?;
            Some(match op.factor() {
                Some(factor) => value.times(factor.value()),
                None => value,
            })
        });
        if let Some(mut value) = values.reduce(|a, b| A::combine(op, a, b)) {
            if op == ReduceOp::Average {
                value = value.divided(sources.len());
            }
            all.extend_from_slice(round(value).as_bytes());
        }
    }
    all
}
