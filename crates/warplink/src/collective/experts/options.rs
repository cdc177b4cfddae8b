//! Options of a layer of experts, and sizes that follow from them.

use super::launch::{MAX_ELEMENTS, MAX_EXPERTS, MAX_TOP_K};
use crate::collective::fused::Quantization;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::named::{alternatives, named};

named! {
    /// Order of the rows that a rank receives.
    #[derive(Default)]
    pub enum RowLayout: "layout" {
        /// By source rank: for each expert of a token one row, in the order of the tokens.
        #[default]
        BySource = "by_source" (0),
        /// By local expert, contiguous, as a grouped matmul reads them: for each expert of a token one row, an expert's rows by
        /// source rank and in the order of the tokens.
        ByExpert = "by_expert" (1),
        /// By source rank: one row for each token, however many of this rank's experts it has.
        OncePerRank = "once_per_rank" (2),
    }
}

named! {
    /// Treatment of rows from one rank to another beyond `max_rows`.
    #[derive(Default)]
    pub enum Overflow: "overflow" {
        /// They are dropped and counted: those of the last tokens.
        #[default]
        Drop = "drop" (0),
        /// The call fails, and ends the communicator.
        Fail = "fail" (1),
    }
}

/// Options of a layer of experts; equal on every rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertOptions {
    /// Number of experts, a multiple of the ranks. Rank r has those from `r * experts / world` on.
    pub experts: usize,
    /// Experts for each token.
    pub top_k: usize,
    /// Maximum tokens of a rank in one call.
    pub max_tokens: usize,
    /// Maximum rows from one rank to another in a call, which determines the memory. By default the worst case, which every
    /// routing fits: every slot of every token names an expert of one rank, possibly the same; with
    /// [`RowLayout::OncePerRank`] every token goes to one rank.
    pub max_rows: Option<usize>,
    /// Elements of a row.
    pub elements: usize,
    /// Element type of the experts' results, and of tokens unless these arrive quantised: `f32`, `f16` or `bf16`.
    pub dtype: DType,
    /// Order of the received rows.
    pub layout: RowLayout,
    /// Treatment of rows beyond `max_rows`.
    pub overflow: Overflow,
    /// Sends rows as 8-bit floats (e4m3) with `f32` scales: [`Quantization::PerToken`], [`Quantization::PerBlock`] or
    /// [`Quantization::PerBlockPowerOfTwo`].
    pub quantization: Option<Quantization>,
    /// Whether the tokens of [`dispatch`](super::Experts::dispatch) are quantised already.
    pub quantized_tokens: bool,
}

impl Default for ExpertOptions {
    /// Rows of bf16 by source rank, of which those beyond `max_rows` are dropped; all sizes are 0, and have to be given.
    fn default() -> Self {
        Self {
            experts: 0,
            top_k: 0,
            max_tokens: 0,
            max_rows: None,
            elements: 0,
            dtype: DType::BF16,
            layout: RowLayout::BySource,
            overflow: Overflow::Drop,
            quantization: None,
            quantized_tokens: false,
        }
    }
}

impl ExpertOptions {
    /// Quantisations of rows that are dispatched.
    pub const QUANTIZATIONS: [Quantization; 3] = [
        Quantization::PerToken,
        Quantization::PerBlock,
        Quantization::PerBlockPowerOfTwo,
    ];

    /// Size in bytes of a row of an expert's results.
    pub fn row_bytes(&self) -> usize {
        self.elements * self.dtype.size()
    }

    /// Element type of the tokens.
    pub fn token_dtype(&self) -> DType {
        match self.quantization {
            Some(quantization) if self.quantized_tokens => quantization.dtype(),
            _ => self.dtype,
        }
    }

    /// Element type of the dispatched rows.
    pub fn dispatched_dtype(&self) -> DType {
        self.quantization.map_or(self.dtype, Quantization::dtype)
    }

    /// Scales of a dispatched row; 0 if rows are not quantised.
    pub fn scales(&self) -> usize {
        let block = |of: Quantization| of.block().unwrap_or(self.elements).max(1);
        self.quantization
            .map_or(0, |of| self.elements.div_ceil(block(of)))
    }

    /// Maximum rows from one rank to another.
    pub fn rows_per_peer(&self) -> usize {
        self.max_rows.unwrap_or(self.worst_rows())
    }

    /// As many rows as a rank can have for another one.
    fn worst_rows(&self) -> usize {
        let of_token = match self.layout {
            RowLayout::OncePerRank => 1,
            // Not bounded by the experts of a rank: slots may name the same one.
            _ => self.top_k,
        };
        self.max_tokens.saturating_mul(of_token)
    }

    /// Number of [`Dispatched::counts`](super::Dispatched::counts) on one of `world` ranks.
    pub fn counts(&self, world: usize) -> usize {
        match self.layout {
            RowLayout::ByExpert => self.experts / world.max(1),
            _ => world,
        }
    }

    /// Experts that are named for each dispatched row.
    pub fn experts_per_row(&self) -> usize {
        match self.layout {
            RowLayout::OncePerRank => self.top_k,
            _ => 1,
        }
    }

    /// Rows that combine adds up for a token, at most: of each of its experts, or of each of `world` ranks.
    pub fn rows_per_token(&self, world: usize) -> usize {
        match self.layout {
            RowLayout::OncePerRank => world,
            _ => self.top_k,
        }
    }

    /// Rows of a rank among which a position counts: those from one source, or all.
    pub(super) fn span(&self, world: usize) -> usize {
        match self.layout {
            RowLayout::ByExpert => world * self.rows_per_peer(),
            _ => self.rows_per_peer(),
        }
    }

    /// Whether dispatch delivers weights: where a rank has several experts of a row, they add up their results by these.
    pub(super) fn sends_weights(&self) -> bool {
        self.layout == RowLayout::OncePerRank
    }

    pub(super) fn check(&self, world: usize) -> Result<()> {
        let refused = |text: String, help: &'static str| Err(Error::invalid(text).with_help(help));
        if self.experts == 0 || !self.experts.is_multiple_of(world) {
            return refused(
                format!(
                    "{} experts on {world} ranks; expected a multiple of the ranks",
                    self.experts
                ),
                "give each rank as many experts",
            );
        }
        if !DType::MATMUL.contains(&self.dtype) {
            return refused(
                format!(
                    "rows of {}; expected {}",
                    self.dtype,
                    alternatives(&DType::MATMUL)
                ),
                "use one of these types",
            );
        }
        let supported = &Self::QUANTIZATIONS;
        match self.quantization {
            Some(other) if !supported.contains(&other) => {
                return refused(
                    format!(
                        "rows are dispatched with quantization {other}; expected {}",
                        alternatives(supported)
                    ),
                    "use one of these",
                );
            }
            None if self.quantized_tokens => {
                return refused(
                    "tokens arrive quantised, and no quantization is given; expected one"
                        .to_owned(),
                    "name the quantization of the tokens",
                );
            }
            _ => {}
        }
        let sizes = [self.top_k, self.max_tokens, self.elements];
        if sizes.contains(&0) || self.max_rows == Some(0) {
            return refused(
                "a layer of no tokens, slots, rows or elements; expected at least one of each"
                    .to_owned(),
                "give sizes above 0",
            );
        }
        if world == 1 && self.overflow == Overflow::Fail && self.rows_per_peer() < self.worst_rows()
        {
            return refused(
                format!(
                    "rows that do not fit are to fail the call of a single rank, which has no peer to agree with, \
                     and max_rows is {}; expected at least {}",
                    self.rows_per_peer(),
                    self.worst_rows()
                ),
                "drop rows that do not fit, or leave max_rows out",
            );
        }
        // Ranks compare these in words of so many bits.
        for (name, given, most) in [
            ("experts", self.experts, MAX_EXPERTS),
            ("experts of a token", self.top_k, MAX_TOP_K),
            ("elements of a row", self.elements, MAX_ELEMENTS),
        ] {
            if given > most {
                return refused(
                    format!("{given} {name}; expected at most {most}"),
                    "give smaller sizes",
                );
            }
        }
        // Kernels index rows with 32 bits.
        let slots = self
            .max_tokens
            .checked_mul(self.rows_per_token(world).max(self.top_k));
        let rows = slots.and_then(|_| self.rows_per_peer().checked_mul(world));
        let places = rows.and_then(|_| self.span(world).checked_mul(world));
        let bytes = rows.and_then(|rows| rows.checked_mul(self.elements)?.checked_mul(4));
        if bytes.is_none() || slots.max(rows).max(places) >= Some(u32::MAX as usize) {
            return refused(
                format!(
                    "{} tokens for {} experts each are more than can be numbered; expected fewer than 2^32 rows",
                    self.max_tokens, self.top_k
                ),
                "pass fewer tokens at a time",
            );
        }
        Ok(())
    }
}
