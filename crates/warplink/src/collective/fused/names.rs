//! The names that descriptions of fused calls have in text.

use super::{FusedKind, Norm, Quantization};
use crate::error::{Error, ErrorKind, Result};
use std::str::FromStr;

impl FusedKind {
    /// All of them.
    pub const ALL: [Self; 4] = [
        Self::AllReduce,
        Self::AllReduceSharded,
        Self::ReduceScatter,
        Self::AllGather,
    ];

    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all_reduce",
            Self::AllReduceSharded => "all_reduce_sharded",
            Self::ReduceScatter => "reduce_scatter",
            Self::AllGather => "all_gather",
        }
    }
}

impl Norm {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Rms, Self::Layer];

    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Rms => "rms",
            Self::Layer => "layer",
        }
    }
}

impl Quantization {
    /// All of them.
    pub const ALL: [Self; 4] = [
        Self::Static,
        Self::PerToken,
        Self::PerBlock,
        Self::PerBlockPowerOfTwo,
    ];

    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Static => "static",
            Self::PerToken => "per_token",
            Self::PerBlock => "per_block",
            Self::PerBlockPowerOfTwo => "per_block_power_of_two",
        }
    }
}

fn found<T: Copy>(what: &str, text: &str, all: &[T], name: fn(T) -> &'static str) -> Result<T> {
    let found = all.iter().find(|one| name(**one) == text);
    found.copied().ok_or_else(|| {
        let names: Vec<&str> = all.iter().map(|one| name(*one)).collect();
        let text = format!(
            "unknown {what} '{text}'; expected one of {}",
            names.join(", ")
        );
        Error::new(ErrorKind::Parse, text)
    })
}

impl FromStr for FusedKind {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        found("fused collective", text, &Self::ALL, Self::name)
    }
}

impl FromStr for Norm {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        found("norm", text, &Self::ALL, Self::name)
    }
}

impl FromStr for Quantization {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        found("quantization", text, &Self::ALL, Self::name)
    }
}
