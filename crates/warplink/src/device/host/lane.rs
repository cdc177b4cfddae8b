//! Steps of a kernel-section lane on the host device, the counterpart of `warplink/steps.cuh`.
//!
//! If tests ask for delays, bytes move in two halves with a delay between, so that a reader that does not
//! wait sees only half.

use super::extremes::Extremes;
use super::kernel::Block;
use super::{check_kind, memory, packets, words};
use crate::device::{DeviceSlice, ReduceOp, Word};
use crate::dtype::{DType, Element, with_element};
use crate::error::{Error, Result};
use std::ops::{Add, Mul};
use zerocopy::IntoBytes;

/// Maximum bytes of each source that are loaded at a time.
const COMBINED_BYTES: usize = 8 << 10;

/// Maximum bytes of each source that are combined at a time: these stay in the L1 cache.
const PIECE_BYTES: usize = 8 << 10;

/// Maximum values that are combined at a time: those of the largest element in a piece.
const MAX_VALUES: usize = PIECE_BYTES / 8;

/// Receives a piece of the result and its offset.
pub(crate) type Write<'a> = dyn FnMut(usize, &[u8]) -> Result<()> + 'a;

impl Block<'_> {
    /// Fails once waits are aborted; sleeps at random if tests ask for it.
    pub(crate) fn pause(&self) -> Result<()> {
        self.context().check()?;
        self.context().delay();
        Ok(())
    }

    /// Copies `source` to `target`; lengths must match.
    pub(crate) fn copy(&self, target: &DeviceSlice, source: &DeviceSlice) -> Result<()> {
        check_kind(target)?;
        check_kind(source)?;
        target.check_source(source)?;
        self.context().copy(target, source)
    }

    /// Maximum bytes to combine at once: an L1-sized piece, or everything if accesses are delayed.
    pub(crate) fn combined_bytes(&self) -> usize {
        // Smaller pieces would multiply the random delays of tests.
        self.context().delays.map_or(COMBINED_BYTES, |_| usize::MAX)
    }

    /// Reads `source` into `bytes`, replacing their content.
    pub(crate) fn load_into(&self, source: &DeviceSlice, bytes: &mut Vec<u8>) -> Result<()> {
        check_kind(source)?;
        bytes.resize(source.bytes(), 0);
        // The second half first, with a delay between: tests then notice readers that rely on ascending
        // order.
        let (first, second) = bytes.split_at_mut(source.bytes() / 2);
        memory::read_bytes(&source.slice(first.len()..source.bytes())?, second)?;
        self.context().delay();
        if first.is_empty() {
            return Ok(());
        }
        memory::read_bytes(&source.slice(0..first.len())?, first)
    }

    /// Writes `bytes` to `target`; lengths must match.
    pub(crate) fn store(&self, target: &DeviceSlice, bytes: &[u8]) -> Result<()> {
        check_kind(target)?;
        // As in `load_into`: the second half first, so that readers without synchronization are found.
        let (first, second) = bytes.split_at(bytes.len() / 2);
        memory::write_bytes(&target.slice(first.len()..target.bytes())?, second)?;
        self.context().delay();
        if first.is_empty() {
            return Ok(());
        }
        memory::write_bytes(&target.slice(0..first.len())?, first)
    }

    /// Waits for packets with `flag` at `source` and reads `bytes` of data from them into `data`; `lines`
    /// selects packets of 128 bytes.
    pub(crate) async fn load_packets(
        &self,
        source: &DeviceSlice,
        (data, bytes): (&mut Vec<u8>, usize),
        flag: u64,
        lines: bool,
    ) -> Result<()> {
        check_kind(source)?;
        data.resize(bytes, 0);
        packets::arrived(self.context(), source, data, flag, lines).await
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

    /// Loads a word (acquire).
    pub(crate) fn value(&self, word: &Word) -> u64 {
        words::load(word)
    }

    /// Stores a word (release).
    pub(crate) fn set(&self, word: &Word, value: u64) {
        words::set(word, value);
    }

    /// Increments a word (release), and returns the previous value.
    pub(crate) fn increment(&self, word: &Word) -> u64 {
        words::increment(word)
    }
}

/// A source of bytes to combine with others of the same length.
pub(crate) trait Values {
    fn length(&self) -> usize;
    /// Reads bytes starting at `from`, which must exist.
    fn read(&self, from: usize, bytes: &mut [u8]) -> Result<()>;
}

impl Values for Vec<u8> {
    fn length(&self) -> usize {
        self.len()
    }

    fn read(&self, from: usize, bytes: &mut [u8]) -> Result<()> {
        let there = self.get(from..from + bytes.len());
        bytes.copy_from_slice(there.ok_or_else(too_short)?);
        Ok(())
    }
}

impl Values for DeviceSlice {
    fn length(&self) -> usize {
        self.bytes()
    }

    fn read(&self, from: usize, bytes: &mut [u8]) -> Result<()> {
        memory::read_from(self, from, bytes)
    }
}

fn too_short() -> Error {
    Error::internal("combined values must have the same length")
}

/// Combines sources of equal length element by element, in order: 8-bit and 16-bit floats in single
/// precision, rounded once at the end, other types in their own. Integers wrap. `write` receives the pieces
/// of the result with their offsets.
pub(crate) fn combine(
    op: ReduceOp,
    dtype: DType,
    sources: &[&dyn Values],
    write: &mut Write<'_>,
) -> Result<()> {
    if let ([source], None) = (sources, op.factor()) {
        // Copy a single source unchanged, including values that a conversion would round.
        let mut piece = [0; PIECE_BYTES];
        for from in (0..source.length()).step_by(PIECE_BYTES) {
            let piece = &mut piece[..PIECE_BYTES.min(source.length() - from)];
            source.read(from, piece)?;
            write(from, piece)?;
        }
        return Ok(());
    }
    with_element!(dtype, T => fold::<T>(op, sources, write))
}

/// Accumulator type.
pub(super) trait Summand: Extremes {
    fn plus(self, other: Self) -> Self;
    fn times(self, other: Self) -> Self;
    /// The average of `count` summed values.
    fn divided(self, count: usize) -> Self;
    /// Converts a number that the type can represent.
    fn of(number: f64) -> Self;
}

macro_rules! summands {
    ($($type:ty: $add:ident $multiply:ident;)*) => {$(
        impl Summand for $type {
            // Inlined, since loops over elements may be in other codegen units.
            #[inline]
            fn plus(self, other: Self) -> Self {
                self.$add(other)
            }

            #[inline]
            fn times(self, other: Self) -> Self {
                self.$multiply(other)
            }

            #[inline]
            fn divided(self, count: usize) -> Self {
                self / count as Self
            }

            #[inline]
            fn of(factor: f64) -> Self {
                factor as Self
            }
        }
    )*};
}

// Integers wrap, as in the kernels.
summands! {
    f32: add mul;
    f64: add mul;
    i32: wrapping_add wrapping_mul;
    u32: wrapping_add wrapping_mul;
    i64: wrapping_add wrapping_mul;
    u64: wrapping_add wrapping_mul;
}

/// Dispatches on the operator once, so that the loop can be vectorized.
fn fold<T: Element<Wide: Summand>>(
    op: ReduceOp,
    sources: &[&dyn Values],
    write: &mut Write<'_>,
) -> Result<()> {
    let count = sources.len();
    match op {
        ReduceOp::Sum => fold_by(sources, write, T::widen, T::narrow, Summand::plus),
        ReduceOp::Product => fold_by(sources, write, T::widen, T::narrow, Summand::times),
        ReduceOp::Max => fold_by(sources, write, T::widen, T::narrow, Extremes::larger),
        ReduceOp::Min => fold_by(sources, write, T::widen, T::narrow, Extremes::smaller),
        ReduceOp::Average => {
            let round = move |sum: T::Wide| T::narrow(sum.divided(count));
            fold_by(sources, write, T::widen, round, Summand::plus)
        }
        ReduceOp::ScaledSum(factor) => {
            let factor = <T::Wide as Summand>::of(factor.value());
            let widen = move |value: T| value.widen().times(factor);
            fold_by(sources, write, widen, T::narrow, Summand::plus)
        }
    }
}

fn fold_by<T: Element, A: Summand>(
    sources: &[&dyn Values],
    write: &mut Write<'_>,
    widen: impl Fn(T) -> A,
    round: impl Fn(A) -> T,
    combine: impl Fn(A, A) -> A,
) -> Result<()> {
    let Some((first, others)) = sources.split_first() else {
        return Ok(());
    };
    // Values and not their bytes: whether conversions of pieces of bytes are inlined, without which this takes ten times
    // as long, depends on which codegen units the compiler puts them in. Few enough for the L1 cache, since each source
    // passes over all of them.
    let mut values = [T::new_zeroed(); MAX_VALUES];
    let mut sums = [A::of(0.0); MAX_VALUES];
    let size = size_of::<T>();
    for from in (0..first.length()).step_by(size * MAX_VALUES) {
        let count = MAX_VALUES.min((first.length() - from) / size);
        let (values, sums) = (&mut values[..count], &mut sums[..count]);
        first.read(from, values.as_mut_bytes())?;
        for (sum, value) in sums.iter_mut().zip(&*values) {
            *sum = widen(*value);
        }
        for other in others {
            other.read(from, values.as_mut_bytes())?;
            for (sum, value) in sums.iter_mut().zip(&*values) {
                *sum = combine(*sum, widen(*value));
            }
        }
        for (value, sum) in values.iter_mut().zip(&*sums) {
            *value = round(*sum);
        }
        write(from, values.as_bytes())?;
    }
    Ok(())
}
