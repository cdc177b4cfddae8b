//! Lines of functions that quantise normalised rows.

use super::quantized::{LARGEST, LEAST_SCALE};
use super::{QUANTIZED_BLOCK, Quantization};

/// Quantisation of a row within a function.
#[derive(Default)]
pub(in crate::collective) struct Scaled {
    /// Lines that compute the scale.
    pub(in crate::collective) lines: Vec<String>,
    /// Results: the quantised row, and its scale.
    pub(in crate::collective) stored: [String; 2],
}

impl Quantization {
    /// The lines and results for `row`, whose largest magnitude is `largest`; a given scale is named `s`.
    pub(in crate::collective) fn scaled(self, row: &str, largest: &str) -> Scaled {
        let block = |size: usize| format!("block_max(abs({row}), {size})");
        let scale = match self {
            Self::Static => None,
            Self::PerToken => Some(format!("max({largest} / 448, 1e-10)")),
            Self::PerBlock => Some(format!("max({} / 448, 1e-10)", block(QUANTIZED_BLOCK))),
            Self::PerBlockPowerOfTwo => Some(format!(
                "power_of_two(max({} / 448, 1e-10))",
                block(QUANTIZED_BLOCK)
            )),
            Self::Mxfp8 => Some(format!(
                "power_of_two(max({} / 448, {LEAST_SCALE}))",
                block(32)
            )),
            Self::Nvfp4 => return nvfp4(row),
        };
        let divisor = if scale.is_some() { "scale" } else { "s" };
        let stored = match self {
            Self::Mxfp8 => "exponent(scale)",
            _ => "scale",
        };
        Scaled {
            lines: scale
                .map(|scale| format!("let scale = {scale}"))
                .into_iter()
                .collect(),
            stored: [format!("{row} / {divisor}"), stored.to_owned()],
        }
    }
}

/// The largest element of a block becomes about 6 times its scale, which is stored `s` times as large. A scale that
/// rounds to 0 counts as a block of zeros.
fn nvfp4(row: &str) -> Scaled {
    // Infinities count as the largest number; a NaN gives the block a NaN scale, since e2m1 has no NaN.
    let size = format!("select({row} == {row}, min(abs({row}), {LARGEST}), 1 / 0)");
    Scaled {
        lines: vec![
            format!("let most = block_max({size}, 16)"),
            format!(
                "let scale = select(most <= {LARGEST}, round(s * (most / 6), f8e4m3), most - most)"
            ),
            "let factor = select(scale > 0, s / scale, 0)".to_owned(),
        ],
        stored: [format!("pairs(e2m1({row} * factor))"), "scale".to_owned()],
    }
}
