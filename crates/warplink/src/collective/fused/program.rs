//! The programs of fused calls: a shipped text for each algorithm, with the description of the epilogue put in.

use super::{Epilogue, Fused, Quantization};
use crate::error::{Error, ErrorKind, Result};
use crate::program::Program;

const ONE_SHOT: &str = include_str!("one_shot.wlp");
const DIRECT: &str = include_str!("direct.wlp");

/// How a fused call is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Way {
    /// Every rank gets all rows as packets, and computes all of them.
    OneShot,
    /// A rank reads its rows of all, and stores the results at all.
    Direct,
}

impl Fused {
    /// The text of the program of this call.
    pub(super) fn text(&self, way: Way) -> String {
        let text = match way {
            Way::OneShot => ONE_SHOT,
            Way::Direct => DIRECT,
        };
        let Epilogue {
            eps,
            weight_bias,
            quantization,
        } = self.epilogue;
        let mut text = text.replace("1e-6", &format!("{eps:e}"));
        if weight_bias {
            text = text.replace(" + eps) * w", " + eps) * (w + 1)");
        }
        let quantized = |text: &str, scale: &str| {
            let output = "output N: T[tokens, n]";
            text.replace(output, &format!("output N: f8e4m3[tokens, n]\n    {scale}"))
        };
        match quantization {
            None => text,
            Some(Quantization::Static) => quantized(&text, "input S: f32[1]")
                .replace("(x, r, w, eps)", "(x, r, w, eps, s)")
                .replace("return h, normal", "return h, normal / s")
                .replace(&format!("W, {eps:e})"), &format!("W, {eps:e}, S[0])")),
            Some(Quantization::PerToken) => quantized(&text, "output S: f32[tokens]")
                .replace(
                    "return h, normal",
                    "let scale = max(row_max(abs(normal)) / 448, 1e-10)\n        return h, normal / scale, scale",
                )
                .replace("N[t] =", "N[t]; S[t] ="),
        }
    }

    pub(super) fn program(&self, way: Way) -> Result<Program> {
        Program::parse(&self.text(way)).map_err(|error| {
            Error::new(ErrorKind::Internal, error.message().to_owned())
                .with_operation("write the program of a fused call")
        })
    }

    /// The ways that there are programs for.
    pub(super) fn ways(&self) -> &'static [Way] {
        match self.epilogue.quantization {
            // A lane announces three tensors at most.
            Some(Quantization::PerToken) => &[Way::OneShot],
            _ => &[Way::OneShot, Way::Direct],
        }
    }

    /// What ranks announce of it: integers that are the same on all, or the calls differ.
    pub(super) fn words(&self, way: Way) -> [u32; 4] {
        let kind = match self.epilogue.quantization {
            None => 0,
            Some(Quantization::Static) => 1,
            Some(Quantization::PerToken) => 2,
        };
        let bias = u32::from(self.epilogue.weight_bias);
        let what = FUSED | (self.dtype as u32) << 8 | (kind | bias << 4) << 16 | (way as u32) << 24;
        [
            what,
            self.tokens as u32,
            self.width as u32,
            self.epilogue.eps.to_bits(),
        ]
    }

    /// How an announcement that differs is described.
    pub(super) fn difference(own: &[u32], theirs: &[u32]) -> String {
        format!(
            "the peer calls {}; expected {}, as this rank calls",
            describe(theirs),
            describe(own)
        )
    }
}

/// In the place of a collective's kind.
const FUSED: u32 = 0xf;

/// What a rank calls, from what it announces: a fused call or any other.
pub(in crate::collective) fn describe(words: &[u32]) -> String {
    let [what, tokens, width, eps] = [0, 1, 2, 3].map(|at| words.get(at).copied().unwrap_or(0));
    if what & 0xf != FUSED {
        return crate::collective::Call::describe(words);
    }
    let quantization = ["", ", static scale", ", scales by token"];
    let quantization = quantization.get((what >> 16 & 0xf) as usize).unwrap_or(&"");
    let dtypes = crate::dtype::DType::ALL;
    let dtype = dtypes.get((what >> 8 & 0xff) as usize);
    let dtype = dtype.map_or("?", |dtype| dtype.name());
    format!(
        "a fused all-reduce of {tokens} rows of {width} {dtype}, eps {:e}{quantization}",
        f32::from_bits(eps)
    )
}
