//! Kernels of a plan: their workspace and signals, the peer memory they access, and their launches.
//!
//! Each plan has one workspace, one block of signals and one epoch for all of its kernels. When ranks bind, they
//! exchange handles of these, and of the tensors that lanes access at their peers; all of it is zeroed before any
//! kernel runs.

use super::context::RankContext;
use super::kernel_notes::tell_difference;
use super::lane::SectionLanes;
use super::lane_times::LaneTimes;
use super::memory::PlanMemory;
use super::reach::Reach;
use crate::device::{
    AllocationKind, Argument, Device, DeviceSlice, Fault, Kernel, KernelResources, Launch,
    Priority, Stream,
};
use crate::error::{Error, Rank, Result};
use crate::memory::{Region, RemoteRegion};
use crate::program::rank_program::{RankProgram, TensorId};
use crate::program::section::StepCache;
use crate::program::section::{SectionInstance, WorkspaceLayout, kernel_text, traced_kernel_text};
use crate::signal::Signals;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Memory of this rank for the kernels of a program.
pub(super) struct KernelMemory {
    layout: WorkspaceLayout,
    /// `None` if no kernel has scratch.
    workspace: Option<Region>,
    signals: Signals,
    state: DeviceSlice,
    fault: Arc<Fault>,
    /// Largest number of lanes of a kernel.
    lanes: usize,
    ranks_per_device: usize,
    /// Tensors that peers access.
    shared: Vec<(TensorId, Region)>,
}

/// Bound kernels of a plan.
#[derive(Debug)]
pub(super) struct BoundKernels {
    pub(super) reach: Arc<Reach>,
    _own: Vec<Region>,
    pub(super) signals: Signals,
    /// The communicator's.
    fault: Arc<Fault>,
    _peers: Vec<RemoteRegion>,
}

/// A kernel of a plan, and the resources of its launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct KernelReport {
    /// Line of the section in the program.
    pub line: u32,
    /// Number of lanes, which are the blocks of a launch.
    pub lanes: usize,
    /// Threads per lane.
    pub threads: usize,
    /// Device resources that it uses, if the device reports them.
    pub resources: Option<KernelResources>,
}

/// A kernel that records the start times of its steps, with the memory it records to.
#[derive(Debug)]
pub(super) struct TracedKernel {
    pub(super) launch: KernelLaunch,
    pub(super) times: LaneTimes,
}

/// A kernel that is ready to launch.
#[derive(Debug)]
pub(super) struct KernelLaunch {
    kernel: Kernel,
    launch: Launch,
    arguments: Vec<Argument>,
}

impl KernelLaunch {
    /// Report of the kernel, whose section is at `line`.
    pub(super) fn report(&self, line: u32) -> Result<KernelReport> {
        Ok(KernelReport {
            line,
            lanes: self.launch.blocks as usize,
            threads: self.launch.threads as usize,
            resources: self.kernel.resources(&self.launch)?,
        })
    }

    pub(super) fn enqueue(&self, stream: &Stream) -> Result<()> {
        self.kernel.launch(stream, &self.launch, &self.arguments)
    }
}

impl KernelMemory {
    /// Allocates memory for the kernels of a program; `None` if it has no kernels.
    pub(super) fn prepare(
        context: &RankContext,
        program: &RankProgram,
        memory: &PlanMemory,
    ) -> Result<Option<Self>> {
        // Signals are shared by all kernels, which run one after another: the largest needs the most.
        let Some(lanes) = program.sections().map(|section| section.lanes).max() else {
            return Ok(None);
        };
        let mut shared = Vec::new();
        for id in program.shared_tensors() {
            let region = memory.region(id, &context.memory)?;
            let region = region.ok_or_else(|| {
                let message = "a tensor without memory is shared";
                Error::internal(message).with_operation("bind a program with kernels")
            })?;
            shared.push((id, region));
        }
        let layout = WorkspaceLayout::of(&program.scratch);
        Self::allocate(context, layout, lanes, shared).map(Some)
    }

    /// Allocates a workspace, signals and an epoch for kernels of at most `lanes` lanes that access the tensors
    /// `shared` of all ranks.
    pub(super) fn allocate(
        context: &RankContext,
        layout: WorkspaceLayout,
        lanes: usize,
        shared: Vec<(TensorId, Region)>,
    ) -> Result<Self> {
        let workspace = match layout.bytes() {
            0 => None,
            bytes => Some(context.memory.allocate(bytes, AllocationKind::Plain)?),
        };
        let signals = Signals::allocate(&context.memory, &context.fault, lanes * context.world())?;
        // Devices that take closures use two words: the epoch, and the count of ended lanes.
        let lanes = lanes.max(2);
        let bytes = Reach::state_bytes(lanes, context.world());
        let state = context.device.allocate(bytes, AllocationKind::Plain)?;
        // A private stream suffices: nothing uses this memory yet, and all ranks synchronize before a plan runs.
        let stream = context.device.create_stream(Priority::Normal)?;
        if let Some(workspace) = &workspace {
            // No flag of an earlier user of this memory may look like one of the first launches.
            stream.fill(workspace.memory(), 0)?;
        }
        stream.fill(&state, 0)?;
        // Before handles are exchanged: a peer's first packet must not be zeroed.
        stream.synchronize(context.deadline())?;
        Ok(Self {
            layout,
            workspace,
            signals,
            state,
            fault: context.fault.clone(),
            lanes,
            ranks_per_device: context.ranks_per_device()?,
            shared,
        })
    }

    /// Regions that peers map, in the same order on every rank.
    fn regions(&self) -> Vec<&Region> {
        let first = self.workspace.iter().chain([self.signals.region()]);
        first
            .chain(self.shared.iter().map(|(_, region)| region))
            .collect()
    }

    /// Exchanges handles with all peers. Blocks until all ranks do so.
    pub(super) fn exchange(
        self,
        context: &RankContext,
        own: BTreeMap<TensorId, DeviceSlice>,
        reaches: impl Fn(Rank) -> bool,
    ) -> Result<BoundKernels> {
        let peers = context
            .exchange()
            .share(&context.memory, &self.regions(), reaches)?;
        Ok(self.bound(context, own, peers))
    }

    fn bound(
        self,
        context: &RankContext,
        own: BTreeMap<TensorId, DeviceSlice>,
        peers: Vec<Vec<RemoteRegion>>,
    ) -> BoundKernels {
        let rank = context.rank();
        let mut reach = Reach {
            layout: self.layout.clone(),
            workspaces: Vec::new(),
            signals: Vec::new(),
            state: self.state.clone(),
            lanes: self.lanes,
            ranks_per_device: self.ranks_per_device,
            tensors: Vec::new(),
        };
        for (peer, regions) in peers.iter().enumerate() {
            if peer == rank {
                let workspace = self.workspace.as_ref().map(Region::memory);
                reach.workspaces.push(workspace.cloned());
                let signals = self.signals.region().memory();
                reach.signals.push(Some(signals.clone()));
                reach.tensors.push(own.clone());
                continue;
            }
            // In the order of `regions`: the workspace, if there is any, the signals, and the shared tensors. Peers
            // that this rank does not reach have none.
            let mut mapped = regions.iter().map(|region| region.memory().clone());
            let workspace = self.workspace.as_ref().and_then(|_| mapped.next());
            reach.workspaces.push(workspace);
            reach.signals.push(mapped.next());
            let shared = self.shared.iter().map(|(id, _)| *id);
            reach.tensors.push(shared.zip(mapped).collect());
        }
        let own = self.workspace.iter().cloned();
        BoundKernels {
            reach: Arc::new(reach),
            _own: own
                .chain(self.shared.into_iter().map(|(_, region)| region))
                .collect(),
            signals: self.signals,
            fault: self.fault,
            _peers: peers.into_iter().flatten().collect(),
        }
    }
}

impl BoundKernels {
    /// Compiles and loads a section, and prepares its launch.
    pub(super) fn launch(
        &self,
        device: &dyn Device,
        section: &Arc<SectionInstance>,
    ) -> Result<KernelLaunch> {
        self.launch_timed(device, section, None)
    }

    /// The same section as another kernel that also records the start times of its steps.
    pub(super) fn traced(
        &self,
        device: &dyn Device,
        section: &Arc<SectionInstance>,
    ) -> Result<TracedKernel> {
        let times = LaneTimes::allocate(device, section)?;
        let launch = self.launch_timed(device, section, Some(&times))?;
        Ok(TracedKernel { launch, times })
    }

    fn launch_timed(
        &self,
        device: &dyn Device,
        section: &Arc<SectionInstance>,
        times: Option<&LaneTimes>,
    ) -> Result<KernelLaunch> {
        let addresses = Arc::new(self.reach.addresses(section));
        let traced = times.is_some();
        let lanes = SectionLanes {
            section: section.clone(),
            reach: self.reach.clone(),
            tell: Arc::new(tell_difference),
            launched: None,
            fault: self.fault.clone(),
            times: times.map(LaneTimes::clock),
            cache: StepCache::default(),
        };
        let (written, bound) = (section.clone(), addresses.clone());
        // Generated only if no kernel is loaded for it, on devices that take code at all.
        let text = move || {
            let aligned = bound.aligned(&written);
            if traced {
                traced_kernel_text(&written, &aligned)
            } else {
                kernel_text(&written, &aligned)
            }
        };
        let (kernel, launch) = self.load(device, section, text, lanes)?;
        let words = addresses.words(section);
        let words = Argument::Words(match times {
            // Last in the kernel's `Binding`, where the emitter appends them for a traced kernel.
            Some(times) => words.iter().copied().chain(times.words()).collect(),
            None => words,
        });
        let signals = self.signals.region().memory();
        Ok(KernelLaunch {
            kernel,
            launch,
            arguments: vec![words, Argument::Slice(signals.clone())],
        })
    }
}
