//! A workspace that kernels of many programs share, and kernels that are launched on other memory each time.
//!
//! A plan has a workspace of its own, and its memory is bound once. Here, ranks exchange handles once, for
//! the workspace alone; of their peers, kernels access that, and tensors in allocations that were published
//! ([`publication`](super::publication)). So a kernel is made, and launched on any memory of this rank, without asking
//! any other. [`verify_sharing`](crate::program::verify::verify_sharing)
//! looks at programs that are to share a workspace.

use super::context::RankContext;
use super::kernel::{BoundKernels, KernelMemory};
use super::known_steps::KnownSteps;
use super::lane::{SectionLanes, TellDifference, packet_flag};
use super::publication::Publication;
use super::reach::{
    DIRECT_BYTES, EPOCH_BYTES, Reach, UNKNOWN_MEMORY, VERDICT_BYTES, VERDICT_WORDS_BYTES,
};
use super::section_kernel::SectionKernel;
use crate::device::{
    Device, DeviceSlice, Fault, Launch, Readying, SerialArguments, SerialKernel, SerialKernels,
    Stream,
};
use crate::error::{Error, ErrorKind, Rank, Result};
use crate::program::rank_program::TensorId;
use crate::program::section::{
    ScratchInstance, SectionInstance, SectionMemory, WorkspaceLayout, kernel_text,
};
use crate::sync::lock;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex};

/// Memory, signals and an epoch of a group of ranks, for kernels that are launched in the same order on all.
#[derive(Debug)]
pub(crate) struct SharedWorkspace {
    device: Arc<dyn Device>,
    kernels: BoundKernels,
    publication: Arc<Publication>,
    /// Those of its kernels.
    serial: SerialKernels,
    /// Raised where ranks call different things, to end what waits for them.
    fault: Arc<Fault>,
    rank: Rank,
    world: usize,
}

/// A kernel that is ready to launch on any memory.
pub(crate) struct SharedKernel {
    kernel: SerialKernel,
    launch: Launch,
    /// What it is bound to, but for the addresses of this rank's tensors.
    words: Vec<u64>,
    /// The words of the last launch.
    launched: Mutex<Vec<u64>>,
    /// Which word is the address of which tensor, and from which byte of it.
    addresses: Vec<(usize, TensorId, u64)>,
    /// From which word on is said where which tensor lies that is announced, and from which byte of it.
    places: Vec<(usize, TensorId, u64)>,
    publication: Arc<Publication>,
    signals: DeviceSlice,
}

impl SharedWorkspace {
    /// Allocates a workspace and maps those of the peers that kernels are to reach. Every rank calls it at the same
    /// time, with the same layout and number of lanes. Blocks until all have: all succeed, or none.
    pub(crate) fn join(
        context: &RankContext,
        layout: WorkspaceLayout,
        lanes: usize,
        reaches: impl Fn(Rank) -> bool,
    ) -> Result<Self> {
        let memory = KernelMemory::allocate(context, layout, lanes, Vec::new());
        let memory = context.agree_on(memory)?;
        let kernels = context.agree_on(memory.exchange(context, BTreeMap::new(), reaches))?;
        let publication = context.agree_on(Publication::join(context))?;
        Ok(Self {
            device: context.device.clone(),
            kernels,
            publication: Arc::new(publication),
            serial: SerialKernels::default(),
            fault: context.fault.clone(),
            rank: context.rank(),
            world: context.world(),
        })
    }

    /// The workspace of a rank, as it is mapped here; `None` for one that kernels do not reach.
    pub(crate) fn memory(&self, rank: Rank) -> Option<&DeviceSlice> {
        self.kernels.reach.workspaces.get(rank)?.as_ref()
    }

    /// The signals of a rank, as they are mapped here: for each lane one of each rank.
    pub(crate) fn signals(&self, rank: Rank) -> Option<&DeviceSlice> {
        self.kernels.reach.signals.get(rank)?.as_ref()
    }

    /// A word for each lane, which is an epoch where sections use the workspace, and where kernels note what
    /// [`disagreement`](Self::disagreement) reads.
    pub(crate) fn state(&self) -> Result<(DeviceSlice, DeviceSlice)> {
        let state = &self.kernels.reach.state;
        let words = EPOCH_BYTES * self.kernels.reach.lanes;
        Ok((state.slice(0..words)?, state.slice(words..state.bytes())?))
    }

    /// The kernel of a section, compiled where no other of the same text was before. Its scratch lies in this
    /// workspace; its tensors are given at each launch, and `aligned` promises that they start at multiples of
    /// 16 bytes. `tell` explains what another rank announces. Launches are readied, where `readying` says so.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] for a section that accesses tensors of other ranks without announcing them;
    /// what compiling says.
    pub(crate) fn kernel(
        &self,
        section: Arc<SectionInstance>,
        aligned: bool,
        tell: Arc<TellDifference>,
        readying: Readying,
    ) -> Result<SharedKernel> {
        let mut bound = self.kernels.reach.addresses(&section);
        let tables = self.publication.tables().clone();
        bound.tables = tables.address();
        let mut addresses = Vec::new();
        for (number, tensor) in section.tensors.iter().enumerate() {
            let SectionMemory::Tensor(id) = tensor.memory else {
                continue;
            };
            let offset = (tensor.offset * tensor.dtype.size()) as u64;
            addresses.push((number * self.world + self.rank, id, offset));
            // Stands for an address of which nothing else is known.
            bound.tensors[number][self.rank] = if aligned { 16 + offset } else { 1 };
        }
        let first_place = bound.first_place(&section);
        let announced = if section.published {
            section.announced()
        } else {
            Vec::new()
        };
        let places = announced.iter().enumerate();
        let places = places.filter_map(|(number, tensor)| {
            let own = |(_, id, offset): &(usize, TensorId, u64)| {
                let memory = SectionMemory::Tensor(*id);
                (section.tensors[*tensor].memory == memory).then_some((*id, *offset))
            };
            let (id, offset) = addresses.iter().find_map(own)?;
            Some((first_place + 2 * number, id, offset))
        });
        let places = places.collect();
        let (written, bases) = (section.clone(), bound.clone());
        let text = move || kernel_text(&written, &bases.aligned(&written));
        let lanes = SectionLanes {
            section: section.clone(),
            reach: self.kernels.reach.clone(),
            tell,
            launched: Some((tables, first_place)),
            fault: Some(self.fault.clone()),
            times: None,
            known: KnownSteps::default(),
        };
        let SectionKernel {
            kernel,
            launch,
            signals,
        } = self.kernels.load(&*self.device, &section, text, lanes)?;
        let words = bound.words(&section).to_vec();
        Ok(SharedKernel {
            kernel: self.serial.ready(kernel, &launch, readying)?,
            launch,
            launched: Mutex::new(words.clone()),
            words,
            addresses,
            places,
            publication: self.publication.clone(),
            signals,
        })
    }

    /// How many lanes of launches so far have found all that was announced reachable. Blocks for as long as reading
    /// some bytes of the device takes.
    pub(crate) fn direct_lanes(&self) -> Result<u64> {
        let reach = &self.kernels.reach;
        let from = Reach::direct_offset(reach.lanes, self.world);
        let mut count = [0; DIRECT_BYTES];
        let memory = reach.state.slice(from..from + DIRECT_BYTES)?;
        self.device.download(&memory, &mut count)?;
        Ok(u64::from_le_bytes(count))
    }

    /// The ranks that have not announced themselves in the launch that this rank is in; none where it is in
    /// none. `rows` is where ranks announce. Blocks for as long as reading some bytes of the device takes.
    pub(crate) fn absent(&self, rows: &ScratchInstance) -> Result<Vec<Rank>> {
        let mut epoch = [0; EPOCH_BYTES];
        let reach = &self.kernels.reach;
        self.device
            .download(&reach.state.slice(0..EPOCH_BYTES)?, &mut epoch)?;
        let epoch = u64::from_le_bytes(epoch);
        // Devices flag packets of 16 bytes by the epoch's lower half, which differs after four billion launches.
        let flags = [packet_flag(epoch), (epoch + 1) as u32].map(u32::to_le_bytes);
        let slot = (epoch % 2) as usize;
        // Whether rank `of` announced itself at rank `at`.
        let announced = |at: Rank, of: Rank| -> Result<bool> {
            let element = slot * rows.strides[0] + of * rows.strides[1];
            let (Some(memory), Some(range)) = (self.memory(at), rows.packed(element, 1)) else {
                return Ok(false);
            };
            let from = reach.layout.area(rows.packing).offset_bytes;
            let packet = memory.slice(from + range.start..from + range.end)?;
            let mut bytes = [0; 16];
            self.device.download(&packet, &mut bytes)?;
            Ok(flags.iter().any(|flag| bytes[4..8] == *flag))
        };
        let mut absent = Vec::new();
        let mut is_in_launch = false;
        // What a rank is told by others that it reaches comes after what they have to tell.
        let mut peers: Vec<Rank> = (0..self.world).filter(|peer| *peer != self.rank).collect();
        peers.sort_by_key(|peer| self.memory(*peer).is_none());
        for peer in peers {
            is_in_launch |= announced(peer, self.rank)?;
            if !announced(self.rank, peer)? {
                absent.push(peer);
            }
        }
        Ok(if is_in_launch { absent } else { Vec::new() })
    }

    /// What another rank announced that does not fit to what this one did, where a kernel has noted that. Blocks for as
    /// long as reading some bytes of the device takes. Devices that take closures fail the stream instead.
    pub(crate) fn disagreement(&self) -> Result<Option<(Rank, Announced)>> {
        let reach = &self.kernels.reach;
        let from = EPOCH_BYTES * reach.lanes;
        let mut bytes = vec![0; VERDICT_BYTES * self.world];
        let verdicts = reach.state.slice(from..from + bytes.len())?;
        self.device.download(&verdicts, &mut bytes)?;
        let verdicts = bytes.chunks_exact(VERDICT_BYTES).enumerate();
        for (place, verdict) in verdicts {
            let (words, differ) = verdict.split_at(VERDICT_WORDS_BYTES);
            if differ.iter().all(|byte| *byte == 0) {
                continue;
            }
            let peer = (self.rank + 1 + place) % self.world;
            if differ.contains(&UNKNOWN_MEMORY) {
                return Ok(Some((peer, Announced::UnknownMemory)));
            }
            let words = words.chunks_exact(4);
            let words = words.map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]]));
            return Ok(Some((peer, Announced::Other(words.collect()))));
        }
        Ok(None)
    }
}

/// An announcement of another rank's that does not fit.
#[derive(Debug)]
pub(crate) enum Announced {
    /// Other integers than this rank's.
    Other(Vec<u32>),
    /// Memory that this rank does not reach any more.
    UnknownMemory,
}

impl SharedKernel {
    /// Enqueues a launch on `tensors`, by their numbers in the program; peers may access them if `reachable`. Does not
    /// block.
    pub(crate) fn enqueue(
        &self,
        stream: &Stream,
        tensors: &[&DeviceSlice],
        reachable: bool,
    ) -> Result<()> {
        let mut own = lock(&self.launched);
        own.copy_from_slice(&self.words);
        for (word, id, offset) in &self.addresses {
            let tensor = tensors.get(*id).ok_or_else(missing)?;
            own[*word] = tensor.address() + offset;
        }
        for (word, id, offset) in self.places.iter().filter(|_| reachable) {
            let tensor = tensors.get(*id).ok_or_else(missing)?;
            let (number, start) = self.publication.place(tensor, stream);
            own[*word] = number;
            own[*word + 1] = start + offset;
        }
        let arguments = SerialArguments {
            words: &own,
            signals: &self.signals,
            memory: tensors,
        };
        self.kernel.launch(stream, &self.launch, &arguments)
    }
}

impl fmt::Debug for SharedKernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SharedKernel({:?})", self.launch)
    }
}

fn missing() -> Error {
    Error::new(ErrorKind::Internal, "a launch without one of its tensors")
        .with_operation("launch a kernel")
}
