//! Inputs and expected outputs: small integers, whose results are exact in the element type.

use super::template::lengths;
use crate::gemm::inputs::mix;
use anyhow::{Result, bail};
use warplink::DType;
use warplink::collective::{Call, CollectiveKind};
use warplink::device::ReduceOp;
use warplink::dtype::Numbers;

/// Elements after which inputs repeat: a prime, so that parts of different ranks differ.
const PERIOD: usize = 65_521;

/// Inputs of one run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Inputs {
    pub(crate) call: Call,
    pub(crate) world: usize,
    pub(crate) seed: u64,
}

impl Inputs {
    /// A rank's input.
    pub(crate) fn of(&self, rank: usize) -> Vec<u8> {
        let [bytes, _] = lengths(&self.call, self.world);
        self.drawn(rank, 0, bytes)
    }

    /// A rank's output; none if the collective does not write it.
    pub(crate) fn expected(&self, rank: usize) -> Result<Option<Vec<u8>>> {
        use CollectiveKind as Kind;
        let (part, root) = (self.call.bytes(), self.call.root.unwrap_or(0));
        let of = |rank: usize, of: usize| self.drawn(rank, of, part);
        let reduced = |of: usize| {
            let reduce = |at| self.reduced((0..self.world).map(|rank| self.value(rank, at)));
            let period: Vec<f64> = (0..PERIOD).map(reduce).collect();
            repeated(self.call.dtype, &period, of * self.call.count, part)
        };
        let ranks = 0..self.world;
        let parts: Vec<Vec<u8>> = match self.call.kind {
            Kind::Reduce | Kind::Gather if rank != root => return Ok(None),
            Kind::AllReduce | Kind::Reduce => vec![reduced(0)],
            Kind::ReduceScatter => vec![reduced(rank)],
            Kind::AllGather | Kind::Gather => ranks.map(|peer| of(peer, 0)).collect(),
            Kind::AllToAll => ranks.map(|peer| of(peer, rank)).collect(),
            Kind::Broadcast => vec![of(root, 0)],
            Kind::Scatter => vec![of(root, rank)],
            other => bail!("{other} moves no data"),
        };
        Ok(Some(parts.concat()))
    }

    /// `bytes` bytes of a rank's input, from part `of` on.
    fn drawn(&self, rank: usize, of: usize, bytes: usize) -> Vec<u8> {
        let period: Vec<f64> = (0..PERIOD).map(|at| self.value(rank, at)).collect();
        repeated(self.call.dtype, &period, of * self.call.count, bytes)
    }

    /// An integer such that the result over all ranks is exact in the type.
    fn value(&self, rank: usize, at: usize) -> f64 {
        let drawn = mix(self.seed ^ mix((rank as u64 + 1) << 32 | at as u64));
        let exact = exact(self.call.dtype);
        let world = self.world as u64;
        let up_to = |largest: u64| drawn % (largest.clamp(1, 100) + 1);
        let value = match self.call.op {
            Some(ReduceOp::Sum | ReduceOp::ScaledSum(_)) => up_to(exact / world),
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

/// `bytes` bytes of a sequence that repeats `period`, from element `start` on.
fn repeated(dtype: DType, period: &[f64], start: usize, bytes: usize) -> Vec<u8> {
    let period = dtype.encode(period.iter().copied());
    let size = dtype.size();
    let start = start % (period.len() / size) * size;
    let mut whole = Vec::with_capacity(bytes + period.len());
    whole.extend_from_slice(period.get(start..).unwrap_or_default());
    while whole.len() < bytes {
        whole.extend_from_slice(&period);
    }
    whole.truncate(bytes);
    whole
}
