//! Collectives of rows with what follows them between the layers of a model: residual, norm, quantisation, in one kernel.
//!
//! `s` is the sum of all ranks' inputs in single precision, in rank order; `h = s + residual`, rounded to the type of the
//! input; `n` is `h` normalised, of the rounded `h`: by RMSNorm `h · rsqrt(mean(h²) + eps) · weight`, by LayerNorm
//! `(h - mean(h)) · rsqrt(mean((h - mean(h))²) + eps) · weight + bias`; and `q` is `n` divided by a scale, as floats of 8
//! bits. Any of these may be stored. All ranks get the same bits. The programs are texts ([`program`]) over functions of rows.

mod launch;
mod memory;
mod program;
mod quantized;
mod samples;
mod scales;
mod words;

pub(super) use launch::FusedLaunches;
pub use memory::{FusedBytes, FusedMemory};
#[doc(hidden)]
pub use samples::fused_programs;
pub(super) use words::describe;

use super::Collectives;
use super::call::{Call, CollectiveKind};
use crate::device::{ReduceOp, Stream};
use crate::dtype::DType;
use crate::error::{Error, ErrorKind, Result};
use crate::named::named;
use memory::Form;

/// Elements that have a scale of their own with [`Quantization::PerBlock`].
pub const QUANTIZED_BLOCK: usize = 128;

named! {
    /// Distribution of the rows of a fused call over ranks. Where rows are owned, they are a multiple of the ranks, and
    /// each rank has as many, in rank order.
    #[derive(Default)]
    pub enum FusedKind: "fused collective" {
        /// Every rank has all rows of everything.
        #[default]
        AllReduce = "all_reduce",
        /// The same, but the residual, the sum and `residual_out` are of the rows that a rank owns.
        AllReduceSharded = "all_reduce_sharded",
        /// The input is of all rows, all else of those that a rank owns.
        ReduceScatter = "reduce_scatter",
        /// Nothing is added up but the residual: the input, the residual, the sum and `residual_out` are of the rows that a
        /// rank owns, and the others of all rows.
        AllGather = "all_gather",
    }
}

named! {
    /// How rows are normalised.
    pub enum Norm: "norm" {
        /// By the root of the mean of squares.
        Rms = "rms" (1),
        /// By mean and variance.
        Layer = "layer" (2),
    }
}

named! {
    /// How rows become floats of 8 bits (e4m3), or of 4. Scales that are computed in f32 are at least 1e-10.
    pub enum Quantization: "quantization" {
        /// Divided by a scale that is given, one `f32`.
        Static = "static" (1),
        /// Divided by a scale of each row, which is an output: its largest magnitude / 448.
        PerToken = "per_token" (2),
        /// The same of each block of 128 elements, of which the last one of a row may be shorter.
        PerBlock = "per_block" (3),
        /// The same of blocks, with the next power of two from that scale on.
        PerBlockPowerOfTwo = "per_block_power_of_two" (4),
        /// Mxfp8: divided by a scale of each 32 elements, the next power of two from their largest magnitude / 448 on,
        /// which is stored as a byte, the power's exponent plus 127 (e8m0). At least 2⁻¹²⁶.
        Mxfp8 = "mxfp8" (5),
        /// Nvfp4: floats of 4 bits (e2m1), two in a byte, the first in its low bits. Each 16 elements have a scale, as e4m3,
        /// row by row: their largest magnitude / 6, times a global scale that is given, one `f32`, positive and from 1e-30 to
        /// 1e30, usually 448 · 6 / the largest magnitude of all. So an element is about its float · its scale / the global one.
        /// Infinities and what is too large become 6; a block with a NaN has NaN for its scale.
        Nvfp4 = "nvfp4" (6),
    }
}

impl Quantization {
    /// Elements that have a scale of their own; none where a row or a call has one.
    pub const fn block(self) -> Option<usize> {
        match self {
            Self::Static | Self::PerToken => None,
            Self::PerBlock | Self::PerBlockPowerOfTwo => Some(QUANTIZED_BLOCK),
            Self::Mxfp8 => Some(32),
            Self::Nvfp4 => Some(16),
        }
    }

    /// The type of what is quantised; a byte holds two floats of 4 bits.
    pub const fn dtype(self) -> DType {
        match self {
            Self::Nvfp4 => DType::U8,
            _ => DType::F8E4M3,
        }
    }

    /// The type of its scales.
    pub const fn scale_dtype(self) -> DType {
        match self {
            Self::Mxfp8 => DType::U8,
            Self::Nvfp4 => DType::F8E4M3,
            _ => DType::F32,
        }
    }
}

named! {
    /// How rows travel between ranks. All ranks get the same bits either way.
    #[derive(Default)]
    pub enum Wire: "wire format" {
        /// Without rounding more than the call itself.
        #[default]
        Exact = "exact",
        /// As floats of 8 bits (e4m3), and a scale for each block of 128 elements: half the bytes of 16-bit floats, for an
        /// error that docs/fused.md states.
        Fp8 = "fp8",
    }
}

/// Operations after the sum of a fused call. Which results are stored follows from [`FusedMemory`].
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Epilogue {
    /// How rows are normalised; what is stored of the norm is `h` itself where they are not.
    pub norm: Option<Norm>,
    /// Added to the mean of squares; not negative.
    pub eps: f32,
    /// Whether 1 is added to the weight, as some models have it.
    pub weight_bias: bool,
    /// How the normalised rows are quantised, if they are.
    pub quantization: Option<Quantization>,
}

/// A fused call; the same on every rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fused {
    /// Distribution of the rows over ranks.
    pub kind: FusedKind,
    /// How many rows, those of all ranks.
    pub tokens: usize,
    /// Elements of a row.
    pub width: usize,
    /// The type of everything but what is quantised and its scales: f32, f16 or bf16.
    pub dtype: DType,
    /// Operations after the sum.
    pub epilogue: Epilogue,
    /// How rows travel. With [`Wire::Fp8`], a value v of a block whose largest finite magnitude is a arrives as v', with
    /// |v' - v| ≤ |v| / 16 + a / 450,000 + 2⁻¹³⁵. Inputs travel once to the ranks that own rows, which add up what arrives
    /// in f32; in kinds but `ReduceScatter`, sums (`h` where a rank owns the residual) travel once more to all. So a sum of
    /// inputs whose magnitudes add up to m, in a block where these are at most b, has an error of at most m / 16 + b / 450,000
    /// where it travels once, and 0.13 m + 6e-6 b where twice, beside f32 rounding. Zeros keep their signs; an infinity or NaN
    /// arrives as NaN, and its block is as accurate as without it.
    pub wire: Wire,
}

impl Collectives {
    /// The sum of all ranks' inputs with an epilogue, in one kernel: by packets where there are few rows, and for many by
    /// rows, each computed by one rank and stored at all. Enqueues, and does not block but for the first call of its kind.
    /// A graph may record it.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for memory that does not fit the call, or overlaps but for one of `sum`,
    /// `residual_out` and `output` that is exactly the input or the residual; [`ErrorKind::Unsupported`] where the direct
    /// path does not serve, or a row is too long for the workspace. Ranks that call something else are found as in
    /// [`all_reduce`](Self::all_reduce).
    pub fn fused(&self, call: &Fused, memory: &FusedMemory<'_>, stream: &Stream) -> Result<()> {
        let inner = &self.0;
        let form = memory.check(call, inner.machine.world).map_err(named_so)?;
        inner.context.fault.check()?;
        let direct = inner.path.direct().filter(|_| inner.machine.cube.is_none());
        let direct = direct.ok_or_else(|| {
            Error::new(
                ErrorKind::Unsupported,
                "ranks do not all map one another's memory; expected the direct path",
            )
            .with_operation(NAME)
            .with_help("call the collective, and normalise by a kernel of your own")
        })?;
        let kind = match call.kind {
            FusedKind::AllReduce | FusedKind::AllReduceSharded => CollectiveKind::AllReduce,
            FusedKind::ReduceScatter => CollectiveKind::ReduceScatter,
            FusedKind::AllGather => CollectiveKind::AllGather,
        };
        let counted = Call {
            kind,
            op: kind.reduces().then_some(ReduceOp::Sum),
            dtype: call.dtype,
            count: call.tokens * call.width
                / if kind.reduces() {
                    1
                } else {
                    inner.machine.world
                },
            root: None,
        };
        let enqueued = self.in_turn(&counted, stream, |is_recorded| {
            let on = (&inner.machine, &direct.workspace);
            let on_stream = (stream, is_recorded);
            let described = Described { call: *call, form };
            direct.fused.enqueue(on, &described, memory, on_stream)
        });
        enqueued.map_err(named_so)
    }
}

/// How errors name these calls.
const NAME: &str = "fused collective";

fn named_so(error: Error) -> Error {
    error.with_operation(NAME)
}

/// A call, and which memory it has.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Described {
    call: Fused,
    form: Form,
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests;
