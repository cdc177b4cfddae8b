//! Fused collectives of rows: the sum with the operations between two layers of a model (residual, norm,
//! quantisation), in one kernel.
//!
//! `s` is the sum of all ranks' inputs in single precision, in rank order; `h = s + residual`, rounded to the type of
//! the input; `n` is the rounded `h`, normalised: by RMSNorm `h · rsqrt(mean(h²) + eps) · weight`, by LayerNorm `(h -
//! mean(h)) · rsqrt(mean((h - mean(h))²) + eps) · weight + bias`; and `q` is `n` divided by a scale, as 8-bit floats.
//! Any of these may be stored. All ranks get bit-identical results. The programs are texts ([`program`]) over
//! functions of rows.

mod launch;
mod memory;
mod program;
mod quantized;
mod samples;
mod scales;
mod way;
mod words;

pub(super) use launch::FusedLaunches;
pub use memory::{FusedBytes, FusedMemory};
#[doc(hidden)]
pub use samples::fused_programs;
pub(super) use words::{FUSED, describe_fused};

use super::Collectives;
use super::call::{Call, CollectiveKind};
use crate::device::{ReduceOp, Stream};
use crate::dtype::DType;
#[cfg(doc)]
use crate::error::ErrorKind;
use crate::error::{Error, Result};
use crate::named::named;
use memory::Form;

/// Elements per scale with [`Quantization::PerBlock`].
pub const QUANTIZED_BLOCK: usize = 128;

named! {
    /// Distribution of the rows of a fused call over ranks. If rows are owned, their number is a multiple of the
    /// ranks, and each rank owns the same number of consecutive rows, in rank order.
    #[derive(Default)]
    pub enum FusedKind: "fused collective" {
        /// Every tensor has all rows on every rank.
        #[default]
        AllReduce = "all_reduce",
        /// The same, but the residual, the sum and `residual_out` have only the rows that the rank owns.
        AllReduceSharded = "all_reduce_sharded",
        /// The input has all rows, everything else only the rows that the rank owns.
        ReduceScatter = "reduce_scatter",
        /// Only the residual is added, inputs are not summed: the input, the residual, the sum and `residual_out`
        /// have only the rows that the rank owns, the others all rows.
        AllGather = "all_gather",
    }
}

named! {
    /// Normalisation of rows.
    pub enum Norm: "norm" {
        /// By the root of the mean of squares.
        Rms = "rms" (1),
        /// By mean and variance.
        Layer = "layer" (2),
    }
}

named! {
    /// Quantisation of rows to floats of 8 bits (e4m3) or 4 bits. Scales computed in f32 are at least 1e-10.
    pub enum Quantization: "quantization" {
        /// Divided by a given scale, one `f32`.
        Static = "static" (1),
        /// Divided by a scale per row, which is an output: the row's largest magnitude / 448.
        PerToken = "per_token" (2),
        /// The same for each block of 128 elements; the last block of a row may be shorter.
        PerBlock = "per_block" (3),
        /// The same for blocks, with the scale rounded up to a power of two.
        PerBlockPowerOfTwo = "per_block_power_of_two" (4),
        /// Mxfp8: divided by a scale for each 32 elements: their largest magnitude / 448, rounded up to a power of
        /// two, which is stored as a byte, the power's exponent plus 127 (e8m0). At least 2⁻¹²⁶.
        Mxfp8 = "mxfp8" (5),
        /// Nvfp4: 4-bit floats (e2m1), two in a byte, the first in its low bits. Each 16 elements have a scale, as
        /// e4m3, row by row: their largest magnitude / 6, times a given global scale, one `f32`, positive and from
        /// 1e-30 to 1e30, usually 448 · 6 / the largest magnitude of all. So an element is about its float · its
        /// scale / the global one. Infinities and values out of range become 6; a block with a NaN has NaN for its
        /// scale.
        Nvfp4 = "nvfp4" (6),
    }
}

impl Quantization {
    /// Elements per scale; `None` if a row or a call has one scale.
    pub const fn block(self) -> Option<usize> {
        match self {
            Self::Static | Self::PerToken => None,
            Self::PerBlock | Self::PerBlockPowerOfTwo => Some(QUANTIZED_BLOCK),
            Self::Mxfp8 => Some(32),
            Self::Nvfp4 => Some(16),
        }
    }

    /// Type of the quantised elements; a byte holds two 4-bit floats.
    pub const fn dtype(self) -> DType {
        match self {
            Self::Nvfp4 => DType::U8,
            _ => DType::F8E4M3,
        }
    }

    /// Type of the scales.
    pub const fn scale_dtype(self) -> DType {
        match self {
            Self::Mxfp8 => DType::U8,
            Self::Nvfp4 => DType::F8E4M3,
            _ => DType::F32,
        }
    }
}

named! {
    /// Wire format of rows between ranks. All ranks get bit-identical results either way.
    #[derive(Default)]
    pub enum Wire: "wire format" {
        /// No rounding beyond that of the call itself.
        #[default]
        Exact = "exact",
        /// 8-bit floats (e4m3), and a scale for each block of 128 elements: half the bytes of 16-bit floats, for an
        /// error stated in docs/fused.md.
        Fp8 = "fp8",
    }
}

/// Operations after the sum of a fused call. [`FusedMemory`] determines which results are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Epilogue {
    /// Normalisation of rows; without one, the normalised result is `h` itself.
    pub norm: Option<Norm>,
    /// Added to the mean of squares; not negative.
    pub eps: f32,
    /// Whether 1 is added to the weight, as some models require.
    pub weight_bias: bool,
    /// Quantisation of the normalised rows, if any.
    pub quantization: Option<Quantization>,
}

/// A fused call; the same on every rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fused {
    /// Distribution of the rows over ranks.
    pub kind: FusedKind,
    /// Total number of rows of all ranks.
    pub tokens: usize,
    /// Elements of a row.
    pub width: usize,
    /// Type of all tensors except the quantised rows and their scales: f32, f16 or bf16.
    pub dtype: DType,
    /// Operations after the sum.
    pub epilogue: Epilogue,
    /// Wire format of rows. With [`Wire::Fp8`], a value v of a block whose largest finite magnitude is a arrives as
    /// v', with
    /// v' - v| ≤ |v| / 16 + a / 450,000 + 2⁻¹³⁵. Inputs travel once, to the ranks that own rows, which add up the received values
    /// in f32; in all kinds but `ReduceScatter`, sums (`h` if a rank owns the residual) travel a second time, to all.
    /// So a sum of inputs whose magnitudes add up to m, in a block where these are at most b, has an error of at most
    /// m / 16 + b / 450,000 if it travels once, and 0.13 m + 6e-6 b if twice, in addition to f32 rounding. Zeros keep
    /// their signs; an infinity or NaN arrives as NaN, and does not affect the accuracy of its block.
    pub wire: Wire,
}

impl Collectives {
    /// The sum of all ranks' inputs with an epilogue, in one kernel: by packets for few rows; for many, each row is
    /// computed by one rank and stored at all. Enqueues, and blocks only for the first call of its kind. May be
    /// captured.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for memory that does not fit the call, or overlaps, unless one of `sum`,
    /// `residual_out` and `output` is exactly the input or the residual; [`ErrorKind::Unsupported`] if the direct
    /// path is not available, or a row is too long for the workspace. Ranks that make a different call are detected
    /// as in [`all_reduce`](Self::all_reduce).
    pub fn fused(&self, call: &Fused, memory: &FusedMemory<'_>, stream: &Stream) -> Result<()> {
        let inner = &self.0;
        let form = memory.check(call, inner.machine.world).map_err(named_so)?;
        inner.context.fault.check()?;
        // In a cube mesh, some ranks cannot reach one another, and no program of rows keeps to its links.
        let direct = inner.path.direct().filter(|_| inner.machine.cube.is_none());
        let direct = direct.ok_or_else(|| {
            Error::unsupported(
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
        let parts = if kind.reduces() {
            1
        } else {
            inner.machine.world
        };
        let count = call.tokens * call.width / parts;
        // Only for messages about calls that do not complete, which name the last call.
        let counted = Call::new(kind, ReduceOp::Sum, call.dtype, count, 0);
        let enqueued = self.in_turn(&counted, stream, |is_recorded| {
            let on = (&inner.machine, &direct.workspace);
            let on_stream = (stream, is_recorded);
            let described = Described { call: *call, form };
            direct.fused.enqueue(on, &described, memory, on_stream)
        });
        enqueued.map_err(named_so)
    }
}

/// Name of these calls in errors.
const NAME: &str = "fused collective";

fn named_so(error: Error) -> Error {
    error.with_operation(NAME)
}

/// A call, and its memory layout.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Described {
    call: Fused,
    form: Form,
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests;
