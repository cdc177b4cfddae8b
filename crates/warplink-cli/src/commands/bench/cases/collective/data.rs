//! Inputs and expected outputs: small integers, whose results are exact in the element type. They repeat, and are written and
//! compared in pieces, so that no host needs memory for a whole one.

use super::template::lengths;
use crate::gemm::inputs::mix;
use anyhow::{Result, bail};
use std::ops::Range;
use warplink::collective::{Call, CollectiveKind};
use warplink::device::{DeviceSlice, ReduceOp};
use warplink::dtype::Numbers;
use warplink::{Communicator, DType};

/// Elements after which inputs repeat: a prime, so that parts of different ranks differ.
const PERIOD: usize = 65_521;

/// Largest number of bytes that are written or compared at a time.
pub(super) const PIECE: usize = 16 << 20;

/// Inputs of one run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Inputs {
    pub(crate) call: Call,
    pub(crate) world: usize,
    pub(crate) seed: u64,
}

impl Inputs {
    /// A rank's input.
    pub(crate) fn of(&self, rank: usize) -> Data {
        let [bytes, _] = lengths(&self.call, self.world);
        Data(vec![self.drawn(rank, 0, bytes)])
    }

    /// A rank's output; none if the collective does not write it.
    pub(crate) fn expected(&self, rank: usize) -> Result<Option<Data>> {
        use CollectiveKind as Kind;
        let (part, root) = (self.call.bytes(), self.call.root.unwrap_or(0));
        let of = |rank: usize, of: usize| self.drawn(rank, of, part);
        let reduced = |of: usize| {
            let reduce = |at| self.reduced((0..self.world).map(|rank| self.value(rank, at)));
            Repeated::new(self.call.dtype, reduce, of * self.call.count, part)
        };
        let ranks = 0..self.world;
        let parts: Vec<Repeated> = match self.call.kind {
            Kind::Reduce | Kind::Gather if rank != root => return Ok(None),
            Kind::AllReduce | Kind::Reduce => vec![reduced(0)],
            Kind::ReduceScatter => vec![reduced(rank)],
            Kind::AllGather | Kind::Gather => ranks.map(|peer| of(peer, 0)).collect(),
            Kind::AllToAll => ranks.map(|peer| of(peer, rank)).collect(),
            Kind::Broadcast => vec![of(root, 0)],
            Kind::Scatter => vec![of(root, rank)],
            other => bail!("{other} moves no data"),
        };
        Ok(Some(Data(parts)))
    }

    /// `bytes` bytes of a rank's input, from part `of` on.
    fn drawn(&self, rank: usize, of: usize, bytes: usize) -> Repeated {
        let value = |at| self.value(rank, at);
        Repeated::new(self.call.dtype, value, of * self.call.count, bytes)
    }

    /// An integer such that the result over all ranks is exact in the type.
    fn value(&self, rank: usize, at: usize) -> f64 {
        let drawn = mix(self.seed ^ mix((rank as u64 + 1) << 32 | at as u64));
        let exact = exact(self.call.dtype);
        let world = self.world as u64;
        // At most 100, which suffices to tell parts apart; at least 1, since an input of zeros would hide errors.
        let up_to = |largest: u64| drawn % (largest.clamp(1, 100) + 1);
        let value = match self.call.op {
            Some(ReduceOp::Sum | ReduceOp::ScaledSum(_)) => up_to(exact / world),
            // The product is a power of two, which floats represent exactly.
            Some(ReduceOp::Product) => 1 + drawn % 2,
            // The sum is a multiple of the number of ranks.
            Some(ReduceOp::Average) => world * (drawn % (exact / world / world + 1)),
            Some(ReduceOp::Max | ReduceOp::Min) | None => up_to(exact),
        };
        value as f64
    }

    fn reduced(&self, values: impl Iterator<Item = f64>) -> f64 {
        match self.call.op {
            Some(ReduceOp::Product) => values.product(),
            Some(ReduceOp::Max) => values.fold(f64::MIN, f64::max),
            Some(ReduceOp::Min) => values.fold(f64::MAX, f64::min),
            Some(ReduceOp::Average) => values.sum::<f64>() / self.world as f64,
            Some(ReduceOp::ScaledSum(factor)) => factor.value() * values.sum::<f64>(),
            Some(ReduceOp::Sum) | None => values.sum(),
        }
    }
}

/// The number of elements that differ.
pub(crate) fn different(dtype: DType, here: &[u8], there: &[u8]) -> usize {
    // The usual case, and much faster.
    if here == there {
        return 0;
    }
    let size = dtype.size();
    let pairs = here.chunks(size).zip(there.chunks(size));
    pairs.filter(|(a, b)| a != b).count() + here.len().abs_diff(there.len()) / size
}

/// The largest integer up to which all are values of the type, or one that is large enough.
fn exact(dtype: DType) -> u64 {
    let bits = match dtype.numbers() {
        Numbers::Float { digits, .. } => return 1 << digits.min(20),
        Numbers::Signed => 8 * dtype.size() - 1,
        Numbers::Unsigned => 8 * dtype.size(),
    };
    if bits < 20 { (1 << bits) - 1 } else { 1 << 20 }
}

/// Consecutive parts of a tensor.
pub(crate) struct Data(Vec<Repeated>);

impl Data {
    /// Writes it to memory of the same length.
    pub(crate) fn upload(&self, comm: &Communicator, target: &DeviceSlice) -> Result<()> {
        self.pieces(|start, piece| {
            let target = target.slice(start..start + piece.len())?;
            Ok(comm.device().upload(&target, piece)?)
        })
    }

    /// The number of elements that differ from those in memory of the same length.
    pub(crate) fn different(
        &self,
        comm: &Communicator,
        dtype: DType,
        source: &DeviceSlice,
    ) -> Result<usize> {
        let (mut wrong, mut read) = (0, Vec::new());
        self.pieces(|start, piece| {
            read.resize(piece.len(), 0);
            let source = source.slice(start..start + piece.len())?;
            comm.device().download(&source, &mut read)?;
            wrong += different(dtype, &read, piece);
            Ok(())
        })?;
        Ok(wrong)
    }

    /// Calls `each` for all of its pieces in order, with where each begins.
    fn pieces(&self, mut each: impl FnMut(usize, &[u8]) -> Result<()>) -> Result<()> {
        let mut start = 0;
        for part in &self.0 {
            for from in (0..part.bytes).step_by(PIECE) {
                let piece = part.piece(from..part.bytes.min(from + PIECE));
                each(start, piece)?;
                start += piece.len();
            }
        }
        Ok(())
    }
}

/// Bytes that repeat.
struct Repeated {
    /// A period and the longest piece, so that a piece from anywhere in the period is a part of them.
    sequence: Vec<u8>,
    period: usize,
    bytes: usize,
}

impl Repeated {
    /// `bytes` bytes of a sequence whose element `at` is `value(at % PERIOD)`, from element `start` on.
    fn new(dtype: DType, value: impl Fn(usize) -> f64, start: usize, bytes: usize) -> Self {
        let mut sequence = dtype.encode((0..PERIOD).map(value));
        let period = sequence.len();
        sequence.rotate_left(start % PERIOD * dtype.size());
        while sequence.len() < period + bytes.min(PIECE) {
            sequence.extend_from_within(..period);
        }
        Self {
            sequence,
            period,
            bytes,
        }
    }

    /// A range of at most [`PIECE`] bytes.
    fn piece(&self, range: Range<usize>) -> &[u8] {
        let start = range.start % self.period;
        self.sequence
            .get(start..start + range.len())
            .unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_follow_the_sequence() {
        let value = |at: usize| (at % 251) as f64;
        for (start, elements) in [(0, 10), (65_500, 100), (3, 2 * PIECE + 5), (70_000, PIECE)] {
            let data = Data(vec![Repeated::new(DType::U8, value, start, elements)]);
            let mut at = 0;
            data.pieces(|from, piece| {
                assert_eq!(from, at);
                for (element, &byte) in (start + at..).zip(piece) {
                    assert_eq!(
                        f64::from(byte),
                        value(element % PERIOD),
                        "element {element}"
                    );
                }
                at += piece.len();
                Ok(())
            })
            .unwrap();
            assert_eq!(at, elements);
        }
    }
}
