//! Fused calls with every kind of epilogue, for tests of their programs and kernels.

use super::memory::{Form, Tensor};
use super::{Described, Epilogue, Fused, FusedKind, Norm, Quantization, Wire};
use crate::dtype::DType;
use crate::error::Result;
use crate::program::Program;

use Tensor::{
    Bias, GivenScale, GlobalScale, Input, Output, Quantized, Residual, ResidualOut, Scale, Sum,
    Weight,
};

/// Norms, quantisations and memory.
const EPILOGUES: [(Option<Norm>, Option<Quantization>, &[Tensor]); 13] = [
    (
        Some(Norm::Rms),
        None,
        &[Residual, Weight, ResidualOut, Output],
    ),
    (
        Some(Norm::Rms),
        Some(Quantization::Static),
        &[Residual, Weight, GivenScale, ResidualOut, Quantized],
    ),
    (
        Some(Norm::Rms),
        Some(Quantization::PerToken),
        &[Residual, Weight, ResidualOut, Quantized, Scale],
    ),
    (
        Some(Norm::Rms),
        Some(Quantization::PerBlock),
        &[Residual, Weight, ResidualOut, Quantized, Scale],
    ),
    (
        Some(Norm::Rms),
        Some(Quantization::PerBlockPowerOfTwo),
        &[Residual, Weight, Sum, ResidualOut, Output, Quantized, Scale],
    ),
    (
        Some(Norm::Layer),
        None,
        &[Residual, Weight, Bias, ResidualOut, Output],
    ),
    (Some(Norm::Rms), None, &[Weight, Output]),
    (
        Some(Norm::Rms),
        Some(Quantization::Mxfp8),
        &[Weight, Quantized, Scale],
    ),
    (None, Some(Quantization::PerBlock), &[Quantized, Scale]),
    (
        Some(Norm::Rms),
        Some(Quantization::Nvfp4),
        &[Residual, Weight, ResidualOut, Quantized, Scale, GlobalScale],
    ),
    (None, None, &[Residual, Sum, Output]),
    (
        Some(Norm::Layer),
        Some(Quantization::PerToken),
        &[Weight, Quantized, Scale],
    ),
    (
        Some(Norm::Rms),
        Some(Quantization::PerToken),
        &[Residual, Weight, Bias, ResidualOut, Quantized, Scale],
    ),
];

/// Calls of `kinds` with every epilogue. Some are in place.
pub(super) fn calls(
    tokens: usize,
    width: usize,
    kinds: &[FusedKind],
    wire: Wire,
) -> Vec<Described> {
    let mut all = Vec::new();
    for kind in kinds {
        for (number, (norm, quantization, memory)) in EPILOGUES.into_iter().enumerate() {
            let mut form = Form::of(&[&[Input], memory].concat());
            if number == 0 {
                form.in_place[1] = Some(ResidualOut);
                form.in_place[0] = (*kind == FusedKind::AllReduce).then_some(Output);
            }
            all.push(Described {
                call: Fused {
                    kind: *kind,
                    tokens,
                    width,
                    dtype: DType::BF16,
                    epilogue: Epilogue {
                        norm,
                        eps: 1e-5,
                        weight_bias: number % 2 == 1 && norm.is_some(),
                        quantization,
                    },
                    wire,
                },
                form,
            });
        }
    }
    all
}

/// The programs of calls of `world` ranks with every epilogue, with their descriptions.
///
/// # Errors
/// The first error of a program.
#[doc(hidden)]
pub fn fused_programs(world: usize) -> Result<Vec<(String, Program)>> {
    let mut all = Vec::new();
    for wire in Wire::ALL {
        for call in calls(24, 24, &FusedKind::ALL, wire) {
            for way in call.ways() {
                let Fused { kind, epilogue, .. } = call.call;
                let name = format!("fused {kind}, {way:?}, {epilogue:?}");
                // Every other text is that of lanes with one row each.
                let lanes = [1, call.call.tokens][all.len() % 2];
                all.push((name, call.program(way, world, lanes)?));
            }
        }
    }
    Ok(all)
}
