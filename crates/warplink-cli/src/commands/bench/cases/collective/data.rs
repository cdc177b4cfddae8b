//! Inputs and expected outputs: small integers, whose results are exact in the element type.

use super::template::lengths;
use crate::gemm::inputs::mix;
use anyhow::{Result, bail};
use warplink::DType;
use warplink::collective::{Call, CollectiveKind};
use warplink::device::ReduceOp;
use warplink::dtype::{Element, F8E4M3, F8E5M2};

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
    pub(crate) fn of(&self, rank: usize) -> Result<Vec<u8>> {
        let [bytes, _] = lengths(&self.call, self.world);
        self.drawn(rank, 0, bytes)
    }

    /// A rank's output; none where the collective does not write it.
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
        let parts: Result<Vec<Vec<u8>>> = match self.call.kind {
            Kind::Reduce | Kind::Gather if rank != root => return Ok(None),
            Kind::AllReduce | Kind::Reduce => Ok(vec![reduced(0)?]),
            Kind::ReduceScatter => Ok(vec![reduced(rank)?]),
            Kind::AllGather | Kind::Gather => ranks.map(|peer| of(peer, 0)).collect(),
            Kind::AllToAll => ranks.map(|peer| of(peer, rank)).collect(),
            Kind::Broadcast => Ok(vec![of(root, 0)?]),
            Kind::Scatter => Ok(vec![of(root, rank)?]),
            other => bail!("{other} moves no data"),
        };
        Ok(Some(parts?.concat()))
    }

    /// `bytes` bytes of a rank's input, from part `of` on.
    fn drawn(&self, rank: usize, of: usize, bytes: usize) -> Result<Vec<u8>> {
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

/// The largest integer up to which all are values of the type.
fn exact(dtype: DType) -> u64 {
    match dtype {
        DType::BF16 => 256,
        DType::F16 => 2048,
        DType::U8 => 255,
        DType::I8 => 127,
        DType::F8E4M3 => 16,
        DType::F8E5M2 => 8,
        _ => 1 << 20,
    }
}

/// `bytes` bytes of a sequence that repeats `period`, from element `start` on.
fn repeated(dtype: DType, period: &[f64], start: usize, bytes: usize) -> Result<Vec<u8>> {
    let period = match dtype {
        DType::F16 => encoded::<half::f16>(period),
        DType::BF16 => encoded::<half::bf16>(period),
        DType::F32 => encoded::<f32>(period),
        DType::F64 => encoded::<f64>(period),
        DType::I32 => encoded::<i32>(period),
        DType::U8 => encoded::<u8>(period),
        DType::I8 => encoded::<i8>(period),
        DType::U32 => encoded::<u32>(period),
        DType::I64 => encoded::<i64>(period),
        DType::U64 => encoded::<u64>(period),
        DType::F8E4M3 => encoded::<F8E4M3>(period),
        DType::F8E5M2 => encoded::<F8E5M2>(period),
        other => bail!("{other} is not measured; help: use another --dtype"),
    };
    let size = dtype.size();
    let start = start % (period.len() / size) * size;
    let mut whole = Vec::with_capacity(bytes + period.len());
    whole.extend_from_slice(period.get(start..).unwrap_or_default());
    while whole.len() < bytes {
        whole.extend_from_slice(&period);
    }
    whole.truncate(bytes);
    Ok(whole)
}

fn encoded<T: Element>(values: &[f64]) -> Vec<u8> {
    let encoded: Vec<T> = values.iter().map(|value| T::from_f64(*value)).collect();
    zerocopy::IntoBytes::as_bytes(encoded.as_slice()).to_vec()
}
