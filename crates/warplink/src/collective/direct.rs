//! Direct path: our own kernels over a shared workspace.

use super::MAX_LAUNCH_BYTES;
use super::algorithm::Algorithm;
use super::call::{Call, CollectiveKind, Overlap};
use super::choice::{Choice, Machine};
use super::diagnosis::difference;
use super::fused::FusedLaunches;
use super::launches::{CallKey, Form, KernelCache, is_aligned, section};
use crate::device::{DeviceSlice, Readying, ReduceOp, Stream};
use crate::dtype::DType;
use crate::error::{Error, Rank, Result};
use crate::program::execute::{RankContext, SharedKernel, SharedWorkspace, calls_differ};
use crate::program::section::{Packing, ScratchInstance, SectionInstance, WorkspaceLayout};
use crate::topology;
use std::sync::Arc;

/// Maximum blocks of a kernel that shares the workspace: one for each multiprocessor of any device so far. Most kernels
/// have a block for each lane, at most 128 for data and one to synchronize.
pub(super) const MAX_BLOCKS: usize = 160;

/// Minimum bytes of a launch, so that each rank has some elements.
const MIN_LAUNCH_BYTES: usize = 4096;

/// Maximum cached calls, and maximum kernels whose code others share.
const MAX_KEPT: usize = 4096;
const MAX_MODELS: usize = 512;

/// State of a rank.
pub(super) struct Direct {
    rank: Rank,
    pub(super) workspace: SharedWorkspace,
    launches: KernelCache<CallKey, Form>,
    pub(super) fused: FusedLaunches,
    /// Maximum bytes of a tensor in one launch.
    pub(super) launch_bytes: usize,
    /// Announcements, in the packet area.
    pub(super) announcements: ScratchInstance,
}

impl Direct {
    /// Allocates a workspace and maps the peers'. Collective: all ranks succeed or none. Blocks until all
    /// have called it. Fails where no kernels can be compiled for a rank's device.
    pub(super) fn join(
        context: &RankContext,
        machine: &Machine,
        launch_bytes: usize,
    ) -> Result<Self> {
        let rank = context.rank();
        // Here rather than at the first call, of which some ranks may have none.
        context.agree_on(context.device.check_compiler())?;
        // One program of each workspace part declares all scratch that the others use.
        let mut scratch = Vec::new();
        let algorithms: &[Algorithm] = if machine.cube.is_some() {
            &[Algorithm::Cube]
        } else {
            &[Algorithm::OneShot, Algorithm::Chunks]
        };
        for &algorithm in algorithms {
            // Scratch is declared with the full workspace, whatever the length, so the shortest call shows its
            // layout.
            let call = Call::new(CollectiveKind::AllReduce, ReduceOp::Sum, DType::U8, 1, 0);
            let forced = Machine {
                // Forced: the model's choice for such a short call would not show the scratch of both areas.
                forced: Some(algorithm),
                ..machine.clone()
            };
            let choice = forced.choose(&call)?;
            let program = machine.rank_program(rank, &call, &choice)?;
            scratch.extend(program.scratch);
        }
        let rows = scratch.iter().find(|scratch| &*scratch.name == "C");
        let announcements = rows
            .cloned()
            .ok_or_else(|| Error::internal("the programs have nowhere to announce"))?;
        let mut layout = WorkspaceLayout::of(&scratch);
        // Both halves by epoch.
        layout.reserve(Packing::Packets128, 2 * machine.lined_bytes);
        let tell = Arc::new(|own: &[u32], theirs: &[u32]| calls_differ(difference(own, theirs)));
        // In a hybrid cube mesh, other ranks cannot be mapped, and the program does not access them.
        let reaches = |peer| {
            let positions = machine.cube.as_ref();
            positions.is_none_or(|positions| topology::is_cube_link(positions, rank, peer))
        };
        Ok(Self {
            rank,
            workspace: SharedWorkspace::join(context, layout, MAX_BLOCKS, tell, reaches)?,
            launches: KernelCache::new(MAX_KEPT, MAX_MODELS),
            fused: FusedLaunches::new(rank),
            launch_bytes: launch_bytes.clamp(MIN_LAUNCH_BYTES, MAX_LAUNCH_BYTES),
            announcements,
        })
    }

    /// Compiles and loads the kernel of a call, if needed.
    pub(super) fn prepare(&self, machine: &Machine, shape: &CallKey) -> Result<()> {
        // Calls on unaligned memory are rare; reserve prepared graphs for the others.
        let readying = if shape.aligned {
            Readying::Always
        } else {
            Readying::Never
        };
        self.kernel(machine, shape, readying).map(drop)
    }

    /// Launches the kernel of a call.
    pub(super) fn enqueue(
        &self,
        machine: &Machine,
        call: &Call,
        (tensors, overlap): (&[&DeviceSlice], Overlap),
        (stream, is_recorded): (&Stream, bool),
    ) -> Result<()> {
        let shape = CallKey {
            call: *call,
            aligned: tensors.iter().all(|tensor| is_aligned(tensor)),
            overlap,
        };
        // Launches are prepared only along with code, which this call would wait for anyway.
        let kernel = self.kernel(machine, &shape, Readying::WithCode)?;
        // In place, peers' stores would overwrite data that is still to be sent.
        let reachable = overlap == Overlap::Apart || call.kind != CollectiveKind::AllToAll;
        kernel.enqueue((stream, is_recorded), tensors, reachable)
    }

    /// The kernel of a call, created on a miss.
    fn kernel(
        &self,
        machine: &Machine,
        shape: &CallKey,
        readying: Readying,
    ) -> Result<Arc<SharedKernel>> {
        if let Some(kept) = self.launches.get(shape) {
            return Ok(kept);
        }
        let choice = machine.choose(&shape.call)?;
        let section = |count: usize| -> Result<SectionInstance> {
            let call = Call {
                count,
                ..shape.call
            };
            // More chunks for longer data.
            let chunks = if count == shape.call.count {
                choice.chunks
            } else {
                machine.shape(choice.algorithm, &call).chunks
            };
            let choice = Choice { chunks, ..choice };
            let program = machine.rank_program(self.rank, &call, &choice)?;
            let mut section = section(&program)?;
            // In place, a step may overwrite what another one reads, so the emitter treats all tensors as one.
            section.shared_tensors = shape.overlap == Overlap::Shared;
            section.published = choice.algorithm == Algorithm::Direct;
            Ok(section)
        };
        // The longest count of the form.
        let longest = usize::MAX.checked_shr(shape.call.count.leading_zeros());
        let counts = (shape.call.count, longest);
        let keys = (*shape, Form::of(shape, &choice));
        let wanted = (shape.aligned, readying);
        self.launches
            .create(&self.workspace, keys, wanted, counts, section)
    }
}
