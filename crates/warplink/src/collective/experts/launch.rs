//! Sections and announcements of a layer's programs, and figures that both have.

use super::{ExpertOptions, Overflow, RowLayout};
use crate::collective::choice::Machine;
use crate::collective::fused::Quantization;
use crate::collective::launches::section;
use crate::dtype::DType;
use crate::error::{Rank, Result};
use crate::program::section::SectionInstance;
use crate::program::{Parameters, Program, unroll};

/// Elements of a unit.
pub(super) const UNIT: usize = 8;

/// Tokens of a lane from which on it has twice as many threads, so that more rows are in flight, where rows are copied or added up.
/// Doubled for fewer tokens, dispatch takes up to a quarter longer (measured, docs/performance.md).
pub(super) const MANY: usize = 32;

/// Alignment of scratch rows, in words.
pub(super) const SCRATCH_WORDS: usize = 16;

/// Encoded in place of a collective's kind: a combine, a dispatch, and one that has more rows for a rank than there is memory
/// for.
pub(in crate::collective) const COMBINE: u32 = 0xe;
pub(in crate::collective) const DISPATCH: u32 = 0xd;
pub(in crate::collective) const EXCEEDED: u32 = DISPATCH - 1;

/// Bit offsets in the first announced word, behind the call's kind: the element type, and the number of experts.
const DTYPE: u32 = 4;
const EXPERTS: u32 = 8;

/// Bit offset of options in that word: layout, overflow, quantisation and the type of tokens; and whether sums are weighted.
const FLAGS: u32 = 24;
pub(super) const UNWEIGHTED: u32 = 1 << 31;

/// Bit offset of the experts of a token in the last announced word, behind the elements of a row.
const TOP_K: u32 = 24;

/// The most experts, experts of a token and elements of a row that these words hold.
pub(super) const MAX_EXPERTS: usize = (1 << (FLAGS - EXPERTS)) - 1;
pub(super) const MAX_TOP_K: usize = (1 << (u32::BITS - TOP_K)) - 1;
pub(super) const MAX_ELEMENTS: usize = (1 << TOP_K) - 1;

/// Integers that must be equal on all ranks; otherwise the layers differ. `kind` is that of the call.
pub(super) fn announced(kind: u32, options: &ExpertOptions, max_rows: usize) -> [i64; 4] {
    let words = [
        kind | (options.dtype as u32) << DTYPE
            | (options.experts as u32) << EXPERTS
            | flags(options),
        options.max_tokens as u32,
        max_rows as u32,
        options.elements as u32 | (options.top_k as u32) << TOP_K,
    ];
    // As signed words, which is how the scratch of announcements holds them.
    words.map(|word| i64::from(word as i32))
}

/// Options in the first announced word.
fn flags(options: &ExpertOptions) -> u32 {
    let quantization = options.quantization.map_or(0, |it| it as u32);
    let all = options.layout as u32
        | (options.overflow as u32) << 2
        | quantization << 3
        | u32::from(options.quantized_tokens) << 6;
    all << FLAGS
}

/// Text of options in the first announced word, apart from default ones.
fn described_flags(word: u32) -> String {
    let all = word >> FLAGS;
    let layout = RowLayout::ALL.get((all & 3) as usize);
    let quantization = Quantization::ALL
        .iter()
        .find(|it| **it as u32 == all >> 3 & 7);
    let named = [
        layout
            .filter(|it| **it != RowLayout::default())
            .map(|it| it.name()),
        (all >> 2 & 1 == 1).then(|| Overflow::Fail.name()),
        quantization.map(|it| it.name()),
        (all >> 6 & 1 == 1).then_some("quantized tokens"),
        (word & UNWEIGHTED != 0).then_some("unweighted"),
    ];
    let named = named.into_iter().flatten();
    named.map(|name| format!(", {name}")).collect()
}

/// Description of a dispatch or combine from its announcement.
pub(in crate::collective) fn describe_layer(words: &[u32]) -> String {
    let [what, tokens, rows, row] = [0, 1, 2, 3].map(|at| words.get(at).copied().unwrap_or(0));
    let call = match what & 0xf {
        EXCEEDED => {
            let (rank, to) = (rows >> 16, rows & 0xffff);
            return format!("rank {rank} has {tokens} rows for rank {to}");
        }
        DISPATCH => "dispatch",
        _ => "combine",
    };
    let dtype = DType::ALL.get((what >> DTYPE & 0xf) as usize);
    format!(
        "a {call} of up to {tokens} tokens of {} of {} experts, {rows} rows of a rank, of {} {}{}",
        row >> TOP_K,
        what as usize >> EXPERTS & MAX_EXPERTS,
        row as usize & MAX_ELEMENTS,
        dtype.map_or("?", |dtype| dtype.name()),
        described_flags(what)
    )
}

/// Describes two dispatches, one of which has more rows for a rank than there is memory for. `None` for others.
pub(in crate::collective) fn describe_exceeded(own: &[u32], theirs: &[u32]) -> Option<String> {
    let exceeds = |words: &[u32]| words.first().map(|what| what & 0xf) == Some(EXCEEDED);
    let limit = |words: &[u32]| words.get(2).copied().unwrap_or(0);
    let described = |words, other| {
        format!(
            "{}; expected at most {}",
            describe_layer(words),
            limit(other)
        )
    };
    match (exceeds(own), exceeds(theirs)) {
        (true, true) => Some(format!(
            "{}, and {}",
            describe_layer(own),
            describe_layer(theirs)
        )),
        (true, false) => Some(described(own, theirs)),
        (false, true) => Some(described(theirs, own)),
        (false, false) => None,
    }
}

/// The kernel section of a layer's program on a rank.
pub(super) fn layer_section(
    program: &Program,
    rank: Rank,
    machine: &Machine,
    parameters: &Parameters,
) -> Result<SectionInstance> {
    let program = unroll(program, rank, machine.world, 1, parameters)?;
    Ok(SectionInstance {
        // Callers' memory may be anywhere, so peers find it through the tables of published allocations.
        published: true,
        ..section(&program)?
    })
}
