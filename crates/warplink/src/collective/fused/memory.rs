//! Memory of a fused call: which tensors are present, which may alias, and validation of their lengths.

use super::{Fused, FusedKind, Quantization};
use crate::device::DeviceSlice;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::named::alternatives;
use crate::program::section::MAX_TENSOR_BYTES;

/// Memory of a fused call. All tensors are contiguous, row by row; `rows` is the number for the [`FusedKind`]. At
/// least one of `sum`, `residual_out`, `output` and `quantized` is required.
#[derive(Clone, Copy, Debug)]
pub struct FusedMemory<'a> {
    /// This rank's `[rows, width]`.
    pub input: &'a DeviceSlice,
    /// `[rows, width]`, added to the sum; rows that several ranks have must be identical.
    pub residual: Option<&'a DeviceSlice>,
    /// `[width]`, the same on every rank; required with a norm, else not allowed.
    pub weight: Option<&'a DeviceSlice>,
    /// `[width]`, the same on every rank: added after the weight.
    pub bias: Option<&'a DeviceSlice>,
    /// `[rows, width]`: the sum alone.
    pub sum: Option<&'a DeviceSlice>,
    /// `[rows, width]`: the sum and the residual.
    pub residual_out: Option<&'a DeviceSlice>,
    /// `[rows, width]`: the normalised rows.
    pub output: Option<&'a DeviceSlice>,
    /// `[rows, width]` of f8e4m3, required with a quantisation, else not allowed; with [`Quantization::Nvfp4`]
    /// `u8[rows, width / 2, rounded up]`.
    pub quantized: Option<&'a DeviceSlice>,
    /// `f32[1]`, read, with [`Quantization::Static`]; `f32[rows]`, written, with [`Quantization::PerToken`];
    /// `f32[rows, width / 128, rounded up]`, written, by block; `u8[rows, width / 32, rounded up]`, written, with
    /// [`Quantization::Mxfp8`]; `f8e4m3[rows, width / 16, rounded up]`, written, with [`Quantization::Nvfp4`].
    pub scale: Option<&'a DeviceSlice>,
    /// `f32[1]`, read, required with [`Quantization::Nvfp4`], else not allowed.
    pub global_scale: Option<&'a DeviceSlice>,
}

impl<'a> FusedMemory<'a> {
    /// Memory with the input only.
    pub const fn of(input: &'a DeviceSlice) -> Self {
        Self {
            input,
            residual: None,
            weight: None,
            bias: None,
            sum: None,
            residual_out: None,
            output: None,
            quantized: None,
            scale: None,
            global_scale: None,
        }
    }
}

/// Tensors of a fused call, in the order of the program's declarations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Tensor {
    Input,
    Residual,
    Weight,
    Bias,
    GivenScale,
    Sum,
    ResidualOut,
    Output,
    Quantized,
    Scale,
    GlobalScale,
}

impl Tensor {
    pub(super) const ALL: [Self; 11] = [
        Self::Input,
        Self::Residual,
        Self::Weight,
        Self::Bias,
        Self::GivenScale,
        Self::Sum,
        Self::ResidualOut,
        Self::Output,
        Self::Quantized,
        Self::Scale,
        Self::GlobalScale,
    ];

    /// Its name in the program.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Input => "X",
            Self::Residual => "R",
            Self::Weight => "W",
            Self::Bias => "V",
            Self::GivenScale | Self::Scale => "S",
            Self::Sum => "Y",
            Self::ResidualOut => "H",
            Self::Output => "N",
            Self::Quantized => "Q",
            Self::GlobalScale => "G",
        }
    }

    /// Its name in [`FusedMemory`].
    pub(super) const fn field(self) -> &'static str {
        match self {
            Self::Input => "input",
            Self::Residual => "residual",
            Self::Weight => "weight",
            Self::Bias => "bias",
            Self::GivenScale | Self::Scale => "scale",
            Self::Sum => "sum",
            Self::ResidualOut => "residual_out",
            Self::Output => "output",
            Self::Quantized => "quantized",
            Self::GlobalScale => "global_scale",
        }
    }

    /// Whether the call writes it.
    pub(super) const fn is_output(self) -> bool {
        // By the order of declaration: outputs are contiguous in the enum.
        self as u32 >= Self::Sum as u32 && self as u32 <= Self::Scale as u32
    }

    /// Whether it is h, or not derived from h.
    pub(super) const fn is_carried(self) -> bool {
        matches!(self, Self::Sum | Self::ResidualOut)
    }

    /// Whether ranks have to agree on its presence, in addition to the description of the call.
    pub(super) const fn is_agreed(self) -> bool {
        !matches!(self, Self::Input | Self::Weight | Self::GlobalScale)
    }

    /// Whether it contains only the rows that a rank owns.
    pub(super) const fn is_owned(self, kind: FusedKind) -> bool {
        match self {
            Self::Input => matches!(kind, FusedKind::AllGather),
            Self::Residual | Self::Sum | Self::ResidualOut => !matches!(kind, FusedKind::AllReduce),
            _ => matches!(kind, FusedKind::ReduceScatter),
        }
    }

    /// Whether it is a single value.
    pub(super) const fn is_single(self) -> bool {
        matches!(self, Self::GivenScale | Self::GlobalScale)
    }

    /// Whether it has rows, rather than one for all of them.
    const fn has_rows(self) -> bool {
        !matches!(self, Self::Weight | Self::Bias) && !self.is_single()
    }

    pub(super) fn dtype(self, call: &Fused) -> DType {
        let quantization = call.epilogue.quantization;
        match self {
            Self::Quantized => quantization.map_or(DType::F8E4M3, Quantization::dtype),
            Self::GivenScale | Self::GlobalScale => DType::F32,
            Self::Scale => quantization.map_or(DType::F32, Quantization::scale_dtype),
            _ => call.dtype,
        }
    }

    /// Elements of a row.
    fn width(self, call: &Fused) -> usize {
        let quantization = call.epilogue.quantization;
        let block = quantization.and_then(Quantization::block);
        match self {
            Self::GivenScale | Self::GlobalScale => 1,
            // Two values of 4 bits share a byte.
            Self::Quantized if quantization == Some(Quantization::Nvfp4) => call.width.div_ceil(2),
            Self::Scale => block.map_or(1, |block| call.width.div_ceil(block)),
            _ => call.width,
        }
    }
}

/// The parts of a call's memory layout that its program depends on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Form {
    /// Bit set of the tensors present, by number.
    tensors: u16,
    /// Outputs that alias the input and the residual.
    pub(super) in_place: [Option<Tensor>; 2],
}

impl Form {
    pub(super) fn of(tensors: &[Tensor]) -> Self {
        let bits = tensors.iter().map(|tensor| 1 << *tensor as u16);
        Self {
            tensors: bits.fold(0, |all, bit| all | bit),
            in_place: [None; 2],
        }
    }

    pub(super) const fn has(self, tensor: Tensor) -> bool {
        self.tensors & 1 << tensor as u16 != 0
    }

    /// The tensors present, in order.
    pub(super) fn tensors(self) -> impl Iterator<Item = Tensor> + Clone {
        let all = Tensor::ALL.into_iter();
        all.filter(move |tensor| self.has(*tensor))
    }

    /// Bits of the tensors that ranks have to agree on.
    pub(super) fn agreed(self) -> u32 {
        let agreed: Vec<Tensor> = self.tensors().filter(|it| it.is_agreed()).collect();
        Self::of(&agreed).tensors.into()
    }
}

fn refused<T>(text: String, help: &'static str) -> Result<T> {
    Err(Error::invalid(text).with_help(help))
}

impl FusedMemory<'_> {
    /// The memory of a tensor. The scale is the one that the quantisation reads or writes.
    fn get(&self, tensor: Tensor, call: &Fused) -> Option<&DeviceSlice> {
        let given = call.epilogue.quantization == Some(Quantization::Static);
        match tensor {
            Tensor::Input => Some(self.input),
            Tensor::Residual => self.residual,
            Tensor::Weight => self.weight,
            Tensor::Bias => self.bias,
            // One field of the caller is an input or an output, which are different tensors of the program.
            Tensor::GivenScale => self.scale.filter(|_| given),
            Tensor::Sum => self.sum,
            Tensor::ResidualOut => self.residual_out,
            Tensor::Output => self.output,
            Tensor::Quantized => self.quantized,
            Tensor::Scale => self.scale.filter(|_| !given),
            Tensor::GlobalScale => self.global_scale,
        }
    }

    /// Validates the memory for a call of `world` ranks, and returns its layout.
    pub(super) fn check(&self, call: &Fused, world: usize) -> Result<Form> {
        call.check(world)?;
        let quantizes = call.epilogue.quantization.is_some();
        if self.quantized.is_some() != quantizes || self.scale.is_some() != quantizes {
            let text = "a quantisation is given without memory for it and its scale, or these without it; expected all or none";
            return refused(
                text.to_owned(),
                "see FusedMemory::quantized and FusedMemory::scale",
            );
        }
        let global = call.epilogue.quantization == Some(Quantization::Nvfp4);
        if self.global_scale.is_some() != global {
            let text =
                "a global scale is given without nvfp4, or nvfp4 without it; expected both or none";
            return refused(text.to_owned(), "see FusedMemory::global_scale");
        }
        let norms = call.epilogue.norm.is_some();
        if self.weight.is_some() != norms || (self.bias.is_some() && !norms) {
            let text = "a weight or bias is given without a norm, or a norm without a weight; expected the weight exactly with it";
            return refused(text.to_owned(), "see FusedMemory::weight");
        }
        let follows = self.output.is_some() || quantizes;
        if norms && !follows {
            let text = "nothing is stored of the norm; expected output or quantized";
            return refused(text.to_owned(), "leave the norm out, or give memory for it");
        }
        let gathers = matches!(
            call.kind,
            FusedKind::AllGather | FusedKind::AllReduceSharded
        );
        // A gather exists for its results on all ranks; the sum alone is each rank's own part.
        if (gathers && !follows) || !(follows || self.sum.is_some() || self.residual_out.is_some())
        {
            let text = format!("{} has nothing to store", call.kind.name());
            return refused(text, "pass memory for at least one result (FusedMemory)");
        }
        let there = |tensor: &Tensor| self.get(*tensor, call).is_some();
        let there: Vec<Tensor> = Tensor::ALL.into_iter().filter(there).collect();
        for tensor in &there {
            let Some(slice) = self.get(*tensor, call) else {
                continue;
            };
            let size = tensor.dtype(call).size();
            let bytes = call.bytes_of(*tensor, world);
            // Kernels choose vector accesses by address, and assume at least the element's own alignment.
            if slice.bytes() != bytes || !slice.address().is_multiple_of(size as u64) {
                let text = format!(
                    "{} has {} bytes from {:#x} on; expected {bytes} at a multiple of {size}",
                    tensor.field(),
                    slice.bytes(),
                    slice.address()
                );
                return refused(text, "pass slices of fitting lengths");
            }
        }
        let mut form = Form::of(&there);
        self.check_overlaps(call, &mut form)?;
        Ok(form)
    }

    fn check_overlaps(&self, call: &Fused, form: &mut Form) -> Result<()> {
        let all = form.tensors();
        // Inputs may overlap one another, since nothing writes them.
        for target in all.clone().filter(|tensor| tensor.is_output()) {
            for other in all.clone().filter(|other| *other != target) {
                let (Some(a), Some(b)) = (self.get(target, call), self.get(other, call)) else {
                    continue;
                };
                if !a.overlaps(b) {
                    continue;
                }
                let in_place = match other {
                    Tensor::Input => Some(&mut form.in_place[0]),
                    Tensor::Residual => Some(&mut form.in_place[1]),
                    _ => None,
                };
                let same = (a.address(), a.bytes()) == (b.address(), b.bytes());
                let replaces = matches!(target, Tensor::Sum | Tensor::ResidualOut | Tensor::Output);
                match in_place {
                    // Element by element: exactly the same rows are read before they are written. A shifted overlap
                    // would read new values.
                    Some(place) if same && replaces && place.is_none() => *place = Some(target),
                    _ => {
                        let text = format!(
                            "{} overlaps {}; expected memory apart, but for one of sum, residual_out and output that \
                             is exactly the input or the residual",
                            target.field(),
                            other.field()
                        );
                        return refused(text, "pass other memory");
                    }
                }
            }
        }
        Ok(())
    }

    /// The slices of `rows` rows from `from` on, in the order of the program's declarations.
    pub(super) fn slices(
        &self,
        (from, rows): (usize, usize),
        call: &Fused,
        form: Form,
    ) -> Result<Vec<DeviceSlice>> {
        let part = |tensor: Tensor| -> Option<Result<DeviceSlice>> {
            let slice = self.get(tensor, call)?;
            // The whole slice, so that its identity stays that of the caller's.
            if rows == call.tokens || !tensor.has_rows() {
                return Some(Ok(slice.clone()));
            }
            let row = slice.bytes() / call.tokens;
            Some(slice.slice(from * row..(from + rows) * row))
        };
        form.tensors().filter_map(part).collect()
    }
}

/// Lengths of the memory of a fused call, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FusedBytes {
    /// Of the input.
    pub input: usize,
    /// Of the residual, and of each of `sum` and `residual_out`.
    pub residual: usize,
    /// Of each of weight and bias.
    pub weight: usize,
    /// Of the output.
    pub output: usize,
    /// Of the quantised rows; 0 without a quantisation.
    pub quantized: usize,
    /// Of the scale, or scales; 0 without a quantisation.
    pub scale: usize,
}

impl Fused {
    /// Lengths of the memory on each rank of `world`.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) for an inconsistent description.
    pub fn bytes(&self, world: usize) -> Result<FusedBytes> {
        self.check(world)?;
        let of = |tensor: Tensor| self.bytes_of(tensor, world);
        let (quantized, scale) = match self.epilogue.quantization {
            None => (0, 0),
            Some(Quantization::Static) => (of(Tensor::Quantized), of(Tensor::GivenScale)),
            Some(_) => (of(Tensor::Quantized), of(Tensor::Scale)),
        };
        Ok(FusedBytes {
            input: of(Tensor::Input),
            residual: of(Tensor::Residual),
            weight: of(Tensor::Weight),
            output: of(Tensor::Output),
            quantized,
            scale,
        })
    }

    fn bytes_of(&self, tensor: Tensor, world: usize) -> usize {
        let rows = if tensor.has_rows() {
            self.rows(tensor, world)
        } else {
            1
        };
        rows * tensor.width(self) * tensor.dtype(self).size()
    }

    /// Rows of a tensor on a rank.
    fn rows(&self, tensor: Tensor, world: usize) -> usize {
        if tensor.is_owned(self.kind) {
            self.tokens / world
        } else {
            self.tokens
        }
    }

    fn check(&self, world: usize) -> Result<()> {
        if !DType::MATMUL.contains(&self.dtype) {
            let text = format!(
                "rows of {}; expected {}",
                self.dtype,
                alternatives(&DType::MATMUL)
            );
            return refused(text, "convert the rows");
        }
        if self.tokens == 0 || self.width == 0 {
            let text = format!(
                "{} rows of {}; expected at least one of one",
                self.tokens, self.width
            );
            return refused(text, "leave the call out on every rank");
        }
        if self.kind != FusedKind::AllReduce && !self.tokens.is_multiple_of(world) {
            let text = format!(
                "{} rows of {world} ranks, which own as many each; expected a multiple",
                self.tokens
            );
            return refused(text, "add rows that are not used");
        }
        // NaN is in no range. The number is written into the text, which has no infinity.
        if !(0.0..f32::INFINITY).contains(&self.epilogue.eps) {
            let text = format!("eps is {}; expected a number from 0 on", self.epilogue.eps);
            return refused(text, "pass the model's epsilon");
        }
        // By at least 4 bytes, since sums and scales are f32.
        let bytes = self.width.checked_mul(self.dtype.size().max(4));
        let bytes = bytes.and_then(|row| row.checked_mul(self.tokens));
        if bytes.is_none_or(|bytes| bytes > MAX_TENSOR_BYTES) {
            let text = format!(
                "{} rows of {} are too large; expected at most {} elements",
                self.tokens,
                self.width,
                MAX_TENSOR_BYTES / 4
            );
            return refused(text, "make several calls");
        }
        Ok(())
    }
}
