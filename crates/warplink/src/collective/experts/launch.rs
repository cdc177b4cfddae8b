//! Kernels of a layer's programs, and figures that both have.

use super::{ExpertOptions, Overflow, RowLayout};
use crate::collective::choice::Machine;
use crate::collective::diagnosis::difference;
use crate::collective::fused::Quantization;
use crate::collective::launches::section;
use crate::device::Readying;
use crate::error::{Rank, Result};
use crate::program::execute::{
    CodeWanted, SharedKernel, SharedWorkspace, TellDifference, calls_differ,
};
use crate::program::section::SectionInstance;
use crate::program::{Parameters, Program, unroll};
use std::sync::Arc;

/// Elements of a unit.
pub(super) const UNIT: usize = 8;

/// Tokens of a lane from which on it has twice as many threads, so that more rows are in flight, where rows are copied or added up.
/// Doubled for fewer tokens, dispatch takes up to a quarter longer (measured, docs/performance.md).
pub(super) const MANY: usize = 32;

/// Alignment of scratch rows, in words.
pub(super) const SCRATCH_WORDS: usize = 16;

/// Bit offsets in the first announced word, behind the call's kind: the element type, and the experts of a token.
pub(super) const DTYPE: u32 = 4;
pub(super) const TOP_K: u32 = 8;

/// Bit offset of options in that word: layout, overflow, quantisation and the type of tokens; and whether sums are weighted.
const FLAGS: u32 = 24;
pub(super) const UNWEIGHTED: u32 = 1 << 31;

/// The experts of a token, from the first announced word.
pub(super) const fn top_k(word: u32) -> u32 {
    word >> TOP_K & 0xffff
}

/// Options in the first announced word.
pub(super) fn flags(options: &ExpertOptions) -> u32 {
    let quantization = options.quantization.map_or(0, |it| it as u32);
    let all = options.layout as u32
        | (options.overflow as u32) << 2
        | quantization << 3
        | u32::from(options.quantized_tokens) << 6;
    all << FLAGS
}

/// Text of options in the first announced word, apart from default ones.
pub(super) fn described_flags(word: u32) -> String {
    let all = word >> FLAGS;
    let layout = RowLayout::ALL.get((all & 3) as usize);
    let quantization = Quantization::ALL
        .iter()
        .find(|it| **it as u32 == all >> 3 & 7);
    let named = [
        layout
            .filter(|it| **it != RowLayout::default())
            .map(|it| it.name()),
        (all >> 2 & 1 == 1).then(|| Overflow::Drop.name()),
        quantization.map(|it| it.name()),
        (all >> 6 & 1 == 1).then_some("quantized tokens"),
        (word & UNWEIGHTED != 0).then_some("unweighted"),
    ];
    let named = named.into_iter().flatten();
    named.map(|name| format!(", {name}")).collect()
}

/// A launch of a layer's program on a rank.
pub(super) struct Wanted<'a> {
    pub(super) program: &'a Program,
    pub(super) rank: Rank,
    pub(super) parameters: &'a Parameters,
    /// Whether all memory begins at multiples of 16 bytes.
    pub(super) aligned: bool,
    /// A kernel of the same program whose code this one may share.
    pub(super) model: Option<&'a SharedKernel>,
}

impl Wanted<'_> {
    /// The kernel; blocks while it is compiled, unless the model's code serves it.
    pub(super) fn kernel(
        &self,
        (machine, workspace): (&Machine, &SharedWorkspace),
    ) -> Result<Arc<SharedKernel>> {
        let program = unroll(self.program, self.rank, machine.world, 1, self.parameters)?;
        let wanted = CodeWanted {
            section: Arc::new(SectionInstance {
                // Callers' memory may be anywhere, so peers find it through the tables of published allocations.
                published: true,
                ..section(&program)?
            }),
            aligned: self.aligned,
            readying: Readying::WithCode,
            model: self.model,
            largest: None,
        };
        if let Some(kernel) = workspace.kernel_like(&wanted) {
            return kernel.map(Arc::new);
        }
        let tell: Arc<TellDifference> =
            Arc::new(|own: &[u32], theirs: &[u32]| calls_differ(difference(own, theirs)));
        workspace.kernel(&wanted, tell).map(Arc::new)
    }
}
