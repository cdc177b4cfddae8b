//! All-reduce with what follows it between the layers of a model: residual, RMSNorm, quantisation, in one kernel.
//!
//! `s` is the sum of all ranks' inputs in single precision, in rank order; `h = s + residual`, rounded to the type of the
//! input; `n = h · rsqrt(mean(h²) + eps) · weight`, of the rounded `h`; and what is stored is `n`, or `n` divided by a
//! scale as floats of 8 bits. All ranks get the same bits. The programs are texts ([`program`]) over functions of rows.

mod launch;
mod program;

pub(super) use launch::FusedLaunches;
pub(super) use program::describe;

use super::Collectives;
use super::call::{Call, CollectiveKind};
use crate::device::{DeviceSlice, ReduceOp, Stream};
use crate::dtype::DType;
use crate::error::{Error, ErrorKind, Result};
use crate::program::section::MAX_TENSOR_BYTES;

/// What stands behind the sum of a fused call.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Epilogue {
    /// What is added to the mean of squares; not negative.
    pub eps: f32,
    /// Whether 1 is added to the weight, as some models have it.
    pub weight_bias: bool,
    /// How the normalised rows are quantised; in the input's type where they are not.
    pub quantization: Option<Quantization>,
}

/// How rows become floats of 8 bits (e4m3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Quantization {
    /// Divided by a scale that is given, one `f32`.
    Static,
    /// Divided by a scale of each row, which is an output: its largest magnitude / 448, at least 1e-10.
    PerToken,
}

/// A fused call; the same on every rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fused {
    /// How many rows.
    pub tokens: usize,
    /// Elements of a row.
    pub width: usize,
    /// The type of input, residual and weight: f32, f16 or bf16.
    pub dtype: DType,
    /// What follows the sum.
    pub epilogue: Epilogue,
}

/// The memory of a fused call. All is row by row, contiguous.
#[derive(Clone, Copy, Debug)]
pub struct FusedMemory<'a> {
    /// This rank's `[tokens, width]`.
    pub input: &'a DeviceSlice,
    /// `[tokens, width]`, the same on every rank.
    pub residual: &'a DeviceSlice,
    /// `[width]`, the same on every rank.
    pub weight: &'a DeviceSlice,
    /// `[tokens, width]`: the sum and the residual; it may be the residual's memory.
    pub residual_out: &'a DeviceSlice,
    /// `[tokens, width]`, of f8e4m3 where it is quantised.
    pub output: &'a DeviceSlice,
    /// `f32[1]`, read, with [`Quantization::Static`]; `f32[tokens]`, written, with [`Quantization::PerToken`].
    pub scale: Option<&'a DeviceSlice>,
}

impl Collectives {
    /// The sum of all ranks' inputs with an epilogue, in one kernel: by packets where there are few rows, and for many by
    /// rows, each computed by one rank and stored at all. Enqueues, and does not block but for the first call of its kind.
    /// A graph may record it.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for memory that does not fit the call, or overlaps but for residual and
    /// `residual_out`; [`ErrorKind::Unsupported`] where the direct path does not serve, or a row is too long for the
    /// workspace. Ranks that call something else are found as in [`all_reduce`](Self::all_reduce).
    pub fn fused(&self, call: &Fused, memory: &FusedMemory<'_>, stream: &Stream) -> Result<()> {
        call.check(memory).map_err(named)?;
        let inner = &self.0;
        inner.context.fault.check()?;
        let direct = inner.path.direct().filter(|_| inner.machine.cube.is_none());
        let direct = direct.ok_or_else(|| {
            Error::new(
                ErrorKind::Unsupported,
                "ranks do not all map one another's memory; expected the direct path",
            )
            .with_operation("fused all-reduce")
            .with_help("call all_reduce, and normalise by a kernel of your own")
        })?;
        let counted = Call {
            kind: CollectiveKind::AllReduce,
            op: Some(ReduceOp::Sum),
            dtype: call.dtype,
            count: call.tokens * call.width,
            root: None,
        };
        let enqueued = self.in_turn(&counted, stream, |is_recorded| {
            let on = (&inner.machine, &direct.workspace);
            let on_stream = (stream, is_recorded);
            direct.fused.enqueue(on, call, memory, on_stream)
        });
        enqueued.map_err(named)
    }
}

fn named(error: Error) -> Error {
    error.with_operation("fused all-reduce")
}

impl Fused {
    fn check(&self, memory: &FusedMemory<'_>) -> Result<()> {
        let refused = |text: String, help: &'static str| Err(Error::invalid(text).with_help(help));
        if !matches!(self.dtype, DType::F32 | DType::F16 | DType::BF16) {
            let text = format!("rows of {}; expected f32, f16 or bf16", self.dtype);
            return refused(text, "convert the rows");
        }
        if self.tokens == 0 || self.width == 0 {
            let text = format!(
                "{} rows of {}; expected at least one of one",
                self.tokens, self.width
            );
            return refused(text, "leave the call out on every rank");
        }
        if !(0.0..f32::INFINITY).contains(&self.epilogue.eps) {
            let text = format!("eps is {}; expected a number from 0 on", self.epilogue.eps);
            return refused(text, "pass the model's epsilon");
        }
        let row = self.width.checked_mul(self.dtype.size());
        let all = row.and_then(|row| row.checked_mul(self.tokens));
        let (Some(row), Some(all)) = (row, all.filter(|all| *all <= MAX_TENSOR_BYTES)) else {
            let text = format!(
                "{} rows of {} are too large; expected at most {MAX_TENSOR_BYTES} bytes",
                self.tokens, self.width
            );
            return refused(text, "make several calls");
        };
        let (out, scale) = match self.epilogue.quantization {
            None => (all, None),
            Some(Quantization::Static) => (self.tokens * self.width, Some(4)),
            Some(Quantization::PerToken) => (self.tokens * self.width, Some(4 * self.tokens)),
        };
        if memory.scale.is_some() != scale.is_some() {
            let text = "a scale is given without a quantisation, or left out; expected one exactly with it";
            return refused(text.to_owned(), "see FusedMemory::scale");
        }
        let size = self.dtype.size();
        let output_size = if out == all { size } else { 1 };
        for (name, slice, bytes, size) in [
            ("input", Some(memory.input), all, size),
            ("residual", Some(memory.residual), all, size),
            ("weight", Some(memory.weight), row, size),
            ("residual_out", Some(memory.residual_out), all, size),
            ("output", Some(memory.output), out, output_size),
            ("scale", memory.scale, scale.unwrap_or(0), 4),
        ] {
            let Some(slice) = slice else { continue };
            if slice.bytes() != bytes || !slice.address().is_multiple_of(size as u64) {
                let text = format!(
                    "{name} has {} bytes from {:#x} on; expected {bytes} at a multiple of {size}",
                    slice.bytes(),
                    slice.address()
                );
                return refused(text, "pass slices of fitting lengths");
            }
        }
        memory.check_overlaps(self.epilogue.quantization == Some(Quantization::PerToken))
    }
}

impl FusedMemory<'_> {
    /// Whether the residual is written in place.
    fn is_in_place(&self) -> bool {
        self.residual.address() == self.residual_out.address()
    }

    fn check_overlaps(&self, scale_is_written: bool) -> Result<()> {
        let scale = self.scale.map(|scale| ("scale", scale));
        let written = scale.filter(|_| scale_is_written);
        let written = [("residual_out", self.residual_out), ("output", self.output)]
            .into_iter()
            .chain(written);
        let all = [
            ("input", self.input),
            ("residual", self.residual),
            ("weight", self.weight),
            ("residual_out", self.residual_out),
            ("output", self.output),
        ];
        for (name, target) in written {
            for (other, slice) in all.into_iter().chain(scale) {
                let in_place = (name, other) == ("residual_out", "residual") && self.is_in_place();
                if name != other && !in_place && target.overlaps(slice) {
                    return Err(Error::invalid(format!(
                        "{name} overlaps {other}; expected separate memory, but for the residual in place"
                    ))
                    .with_help("pass other memory"));
                }
            }
        }
        Ok(())
    }

    /// In the order of the program's declarations.
    fn slices(&self, from: usize, rows: usize, call: &Fused) -> Result<Vec<DeviceSlice>> {
        let part = |slice: &DeviceSlice, whole: usize| {
            let row = whole / call.tokens;
            slice.slice(from * row..(from + rows) * row)
        };
        let of_rows = |slice: &DeviceSlice| part(slice, slice.bytes());
        let mut all = vec![
            of_rows(self.input)?,
            of_rows(self.residual)?,
            self.weight.clone(),
            of_rows(self.residual_out)?,
            of_rows(self.output)?,
        ];
        if let Some(scale) = self.scale {
            all.push(match call.epilogue.quantization {
                Some(Quantization::PerToken) => of_rows(scale)?,
                _ => scale.clone(),
            });
        }
        Ok(all)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests;
