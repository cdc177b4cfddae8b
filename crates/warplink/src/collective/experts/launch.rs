//! Kernels of a layer's programs, and figures that both have.

use crate::collective::choice::Machine;
use crate::collective::diagnosis::difference;
use crate::collective::launches::section;
use crate::device::Readying;
use crate::error::{Rank, Result};
use crate::program::execute::{
    CodeWanted, SharedKernel, SharedWorkspace, TellDifference, calls_differ,
};
use crate::program::section::SectionInstance;
use crate::program::{Parameters, Program, unroll};
use std::sync::Arc;

/// Maximum threads of a lane, each of which has a unit of every row of a step in registers; and elements of a unit.
pub(super) const MAX_THREADS: usize = 512;
pub(super) const UNIT: usize = 8;

/// Alignment of scratch rows, in words.
pub(super) const SCRATCH_WORDS: usize = 16;

/// Bit offsets in the first announced word, behind the call's kind: the element type, and the experts of a token.
pub(super) const DTYPE: u32 = 4;
pub(super) const TOP_K: u32 = 8;

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
