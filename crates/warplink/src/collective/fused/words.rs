//! Announcements of a fused call, and the report of a differing one.

use super::memory::Tensor;
use super::way::Way;
use super::{Described, FusedKind, Norm, Quantization, Wire};
use crate::dtype::DType;
use crate::named::Named as _;

/// Encoded in place of a collective's kind.
pub(in crate::collective) const FUSED: u32 = 0xf;

/// Bit offsets of the parts of the first word.
const KIND: u32 = 4;
const WAY: u32 = 6;
const DTYPE: u32 = 8;
const NORM: u32 = 12;
const BIAS: u32 = 14;
const QUANTIZATION: u32 = 15;
const MEMORY: u32 = 18;
const WIRE: u32 = 28;
const WAY_UPPER: u32 = 29;

impl Described {
    /// Integers that must be equal on all ranks; otherwise the calls differ.
    pub(super) fn words(&self, way: Way) -> [u32; 4] {
        let Self { call, form } = self;
        let epilogue = &call.epilogue;
        let norm = epilogue.norm.map_or(0, |norm| norm as u32);
        let quantization = epilogue.quantization.map_or(0, |it| it as u32);
        let what = FUSED
            | (call.kind as u32) << KIND
            | (way as u32 & 3) << WAY
            | (way as u32 >> 2) << WAY_UPPER
            | (call.dtype as u32) << DTYPE
            | norm << NORM
            | u32::from(epilogue.weight_bias) << BIAS
            | quantization << QUANTIZATION
            | form.agreed() << MEMORY
            | (call.wire as u32) << WIRE;
        [
            what,
            call.tokens as u32,
            call.width as u32,
            epilogue.eps.to_bits(),
        ]
    }

    /// The same without the number of rows, in one integer, for lanes whose announcements of tensors leave no space
    /// for more.
    pub(super) fn form_word(&self, way: Way) -> u32 {
        let [what, _, width, eps] = self.words(way);
        // A hash may miss a difference, but only where announcements of tensors leave no room for the words
        // themselves.
        let mixed = [what, width, eps].iter().fold(0x811c_9dc5, |hash, word| {
            (hash ^ word).wrapping_mul(0x0100_0193).rotate_left(13)
        });
        // The low bits stay readable, so that a rank with another kind of call is named in the message.
        mixed & !0xf | FUSED
    }
}

/// Description of a fused call from its announcement.
pub(in crate::collective) fn describe_fused(words: &[u32]) -> String {
    let [what, tokens, width, eps] = [0, 1, 2, 3].map(|at| words.get(at).copied().unwrap_or(0));
    if words.len() == 2 {
        // The numbers of forms, to determine whether they differ.
        return format!(
            "a fused collective of {tokens} rows, form {:07x}",
            what >> 4
        );
    }
    let of = |from: u32, bits: u32| (what >> from & ((1 << bits) - 1)) as usize;
    let kind = FusedKind::ALL.get(of(KIND, 2));
    let dtype = DType::ALL.get(of(DTYPE, 4));
    let norm = Norm::numbered(of(NORM, 2) as i32);
    let quantization = Quantization::numbered(of(QUANTIZATION, 3) as i32);
    let mut text = format!(
        "a fused {} of {tokens} rows of {width} {}",
        kind.map_or("?", |kind| kind.name()),
        dtype.map_or("?", |dtype| dtype.name())
    );
    if let Some(norm) = norm {
        text += &format!(", norm {}, eps {:e}", norm.name(), f32::from_bits(eps));
    }
    if let Some(quantization) = quantization {
        text += &format!(", quantization {}", quantization.name());
    }
    if let Some(wire) = Wire::ALL
        .get(of(WIRE, 1))
        .filter(|wire| **wire != Wire::Exact)
    {
        text += &format!(", wire {wire}");
    }
    let tensors = Tensor::ALL.into_iter();
    let tensors = tensors.filter(|tensor| tensor.is_agreed());
    let tensors = tensors.filter(|tensor| what >> MEMORY & 1 << *tensor as u32 != 0);
    let names: Vec<&str> = tensors.map(Tensor::field).collect();
    text + ", with " + &names.join(", ")
}
