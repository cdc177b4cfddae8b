//! A workspace that kernels of many programs share, and kernels that are launched on different memory each time.
//!
//! A plan has a workspace of its own, and its memory is bound once. Here, ranks exchange handles once, for the
//! workspace alone; kernels access their peers' workspaces, and tensors in allocations that were published
//! ([`publication`](super::publication)). So a kernel is created, and launched on any memory of this rank, without
//! communication with another rank. [`verify_sharing`](crate::program::verify::verify_sharing) verifies programs that
//! are to share a workspace.

use super::context::RankContext;
use super::kernel::{BoundKernels, KernelMemory};
use super::kernel_notes::Note;
use super::lane::{SectionLanes, TellDifference};
use super::publication::{Publication, Published, Tables};
use super::reach::{Announced, DIRECT_BYTES, EPOCH_BYTES, Reach, has_announced, read_words};
use crate::device::{
    Device, DeviceSlice, Fault, Launch, Readying, SerialArguments, SerialKernel, SerialKernels,
    Stream, Word,
};
use crate::error::{Error, Rank, Result};
use crate::program::rank_program::TensorId;
use crate::program::section::StepCache;
use crate::program::section::{
    ScratchInstance, SectionInstance, SectionMemory, UNPUBLISHED, WorkspaceLayout, kernel_text,
};
use crate::sync::lock;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex};

/// Memory, signals and an epoch of a group of ranks, for kernels that are launched in the same order on all ranks.
pub(crate) struct SharedWorkspace {
    device: Arc<dyn Device>,
    kernels: BoundKernels,
    publication: Arc<Publication>,
    /// Serial launch order of its kernels.
    serial: SerialKernels,
    tell: Arc<TellDifference>,
    /// Raised if ranks make different calls, to abort waits that would never end.
    fault: Arc<Fault>,
    rank: Rank,
    world: usize,
}

/// A kernel that is ready to launch on any memory.
pub(crate) struct SharedKernel {
    kernel: SerialKernel,
    launch: Launch,
    /// Words that it is bound to, without the addresses of this rank's tensors.
    words: Vec<u64>,
    /// Words of the last launch.
    launched: Mutex<Vec<u64>>,
    /// Words that hold an address: index of the word, tensor, and byte offset.
    addresses: Vec<(usize, TensorId, u64)>,
    /// Words that locate announced tensors: index of the first word, tensor, and byte offset.
    places: Vec<(usize, TensorId, u64)>,
    publication: Arc<Publication>,
    signals: DeviceSlice,
    code: KernelCode,
}

/// Sections that the code of a kernel can serve.
#[derive(Clone)]
struct KernelCode {
    /// A section that the code was generated for; it serves those of the same program whose sizes and integers are no
    /// further from 0.
    largest: Arc<SectionInstance>,
    aligned: Vec<bool>,
}

/// Request for a kernel.
pub(crate) struct CodeWanted<'a> {
    /// Section whose scratch is in the workspace; its tensors are given at each launch.
    pub(crate) section: Arc<SectionInstance>,
    /// Whether tensors start at multiples of 16 bytes.
    pub(crate) aligned: bool,
    /// Whether launches are prepared in advance.
    pub(crate) readying: Readying,
    /// A kernel of the same program, rank, lanes and threads, whose code may be reusable.
    pub(crate) model: Option<&'a SharedKernel>,
    /// The same section with larger sizes, which the code should serve if its text is the same.
    pub(crate) largest: Option<SectionInstance>,
}

impl SharedWorkspace {
    /// Allocates a workspace and maps those of the peers that kernels access. Collective: every rank calls it at the
    /// same time, with the same layout and number of lanes. Blocks until all have: all succeed, or none does. `tell` makes
    /// the error of an announcement that differs from this rank's.
    pub(crate) fn join(
        context: &RankContext,
        layout: WorkspaceLayout,
        lanes: usize,
        tell: Arc<TellDifference>,
        reaches: impl Fn(Rank) -> bool,
    ) -> Result<Self> {
        let kernels = Self::map(context, layout, lanes, reaches)?;
        let publication = Arc::new(Publication::join(context)?);
        Ok(Self::new(context, kernels, publication, tell))
    }

    /// Another workspace of the same ranks, whose kernels access all of them, and this one's published memory.
    /// Otherwise like [`join`](Self::join).
    pub(crate) fn join_beside(
        &self,
        context: &RankContext,
        layout: WorkspaceLayout,
        lanes: usize,
    ) -> Result<Self> {
        let kernels = Self::map(context, layout, lanes, |_| true)?;
        let (publication, tell) = (self.publication.clone(), self.tell.clone());
        Ok(Self::new(context, kernels, publication, tell))
    }

    fn map(
        context: &RankContext,
        layout: WorkspaceLayout,
        lanes: usize,
        reaches: impl Fn(Rank) -> bool,
    ) -> Result<BoundKernels> {
        let memory = KernelMemory::allocate(context, layout, lanes, Vec::new());
        let memory = context.agree_on(memory)?;
        context.agree_on(memory.exchange(context, BTreeMap::new(), reaches))
    }

    fn new(
        context: &RankContext,
        kernels: BoundKernels,
        publication: Arc<Publication>,
        tell: Arc<TellDifference>,
    ) -> Self {
        Self {
            device: context.device.clone(),
            kernels,
            publication,
            serial: SerialKernels::default(),
            tell,
            fault: context.fault.clone(),
            rank: context.rank(),
            world: context.world(),
        }
    }

    /// Workspace of a rank, as mapped here; `None` for one that kernels do not access.
    pub(crate) fn memory(&self, rank: Rank) -> Option<&DeviceSlice> {
        self.kernels.reach.workspaces.get(rank)?.as_ref()
    }

    /// Signals of a rank, as mapped here: for each lane, one per rank.
    pub(crate) fn signals(&self, rank: Rank) -> Option<&DeviceSlice> {
        self.kernels.reach.signals.get(rank)?.as_ref()
    }

    /// Tables of the memory that this rank and its peers publish.
    pub(crate) fn tables(&self) -> &Arc<Tables> {
        self.publication.tables()
    }

    /// Location of `slice` in this rank's published memory, for a launch on `stream`, which may be recorded by a graph;
    /// `None` for memory that cannot be published. Does not block.
    pub(crate) fn place(
        &self,
        slice: &DeviceSlice,
        (stream, is_recorded): (&Stream, bool),
    ) -> Option<Published> {
        let (number, start) = self.publication.entry(slice, stream, is_recorded);
        (number != UNPUBLISHED).then_some(Published { number, start })
    }

    /// Epoch words, one for each lane, of sections that use the workspace; and the memory in which kernels record
    /// verdicts for [`disagreement`](Self::disagreement).
    pub(crate) fn state(&self) -> Result<(DeviceSlice, DeviceSlice)> {
        let state = &self.kernels.reach.state;
        let words = EPOCH_BYTES * self.kernels.reach.lanes;
        Ok((state.slice(0..words)?, state.slice(words..state.bytes())?))
    }

    /// Words that launches of a section are bound to, without its tensors on this rank.
    fn bind(&self, section: &SectionInstance, aligned: bool) -> BoundWords {
        let mut bound = self.kernels.reach.addresses(section);
        bound.tables = self.publication.tables().address();
        let mut addresses = Vec::new();
        for (number, tensor) in section.tensors.iter().enumerate() {
            let SectionMemory::Tensor(id) = tensor.memory else {
                continue;
            };
            let offset = (tensor.offset * tensor.dtype.size()) as u64;
            addresses.push((number * self.world + self.rank, id, offset));
            // Placeholder: only the alignment of the address is known.
            bound.tensors[number][self.rank] = if aligned { 16 + offset } else { 1 };
        }
        let first_place = bound.first_place(section);
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
        BoundWords {
            places: places.collect(),
            first_place,
            words: bound.words(section).to_vec(),
            aligned: bound.aligned(section),
            addresses,
        }
    }

    /// Kernel of a section from the model's code, if that can serve it; skips code generation.
    pub(crate) fn kernel_like(&self, wanted: &CodeWanted<'_>) -> Option<Result<SharedKernel>> {
        let model = wanted.model.filter(|model| model.kernel.is_code())?;
        let bound = self.bind(&wanted.section, wanted.aligned);
        if !model.code.serves(&wanted.section, &bound.aligned) {
            return None;
        }
        let kernel = self
            .serial
            .again(&model.kernel, &model.launch, wanted.readying);
        Some(kernel.map(|kernel| self.shared(bound, kernel, model.launch, model.code.clone())))
    }

    fn shared(
        &self,
        bound: BoundWords,
        kernel: SerialKernel,
        launch: Launch,
        code: KernelCode,
    ) -> SharedKernel {
        SharedKernel {
            kernel,
            launch,
            launched: Mutex::new(bound.words.clone()),
            words: bound.words,
            addresses: bound.addresses,
            places: bound.places,
            publication: self.publication.clone(),
            signals: self.kernels.signals.region().memory().clone(),
            code,
        }
    }

    /// Kernel of a section, compiled unless a kernel of the same text exists.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] for a section that accesses tensors of other ranks without announcing them; and
    /// compilation errors.
    pub(crate) fn kernel(&self, wanted: &CodeWanted<'_>) -> Result<SharedKernel> {
        let section = wanted.section.clone();
        let bound = self.bind(&section, wanted.aligned);
        let (written, aligned) = (section.clone(), bound.aligned.clone());
        let text = move || kernel_text(&written, &aligned);
        let lanes = SectionLanes {
            section: section.clone(),
            reach: self.kernels.reach.clone(),
            tell: self.tell.clone(),
            launched: Some((self.publication.tables().clone(), bound.first_place)),
            fault: self.fault.clone(),
            times: None,
            cache: StepCache::default(),
        };
        let (kernel, launch) = self.kernels.load(&*self.device, &section, text, lanes)?;
        let kernel = self.serial.ready(kernel, &launch, wanted.readying)?;
        let mut largest = None;
        if let Some(larger) = wanted.largest.as_ref().filter(|_| kernel.is_code()) {
            let aligned = self.bind(larger, wanted.aligned).aligned;
            let same = |text: String| kernel_text(&section, &bound.aligned).map(|own| own == text);
            let text = kernel_text(larger, &aligned);
            // A section that is too large for a kernel has no text.
            if aligned == bound.aligned && text.and_then(same).unwrap_or(false) {
                largest = Some(Arc::new(larger.clone()));
            }
        }
        let code = KernelCode {
            largest: largest.unwrap_or(section),
            aligned: bound.aligned.clone(),
        };
        Ok(self.shared(bound, kernel, launch, code))
    }

    /// Number of lanes of all launches so far that found all announced tensors reachable. Blocks for the time of a
    /// small read from the device.
    pub(crate) fn direct_lanes(&self) -> Result<u64> {
        let reach = &self.kernels.reach;
        let from = Reach::direct_offset(reach.lanes, self.world);
        let count = reach.state.slice(from..from + DIRECT_BYTES)?;
        Ok(read_words(&*self.device, &count)?[0])
    }

    /// Word of [`direct_lanes`](Self::direct_lanes), for closures.
    pub(crate) fn direct_word(&self) -> Result<Word> {
        let reach = &self.kernels.reach;
        let from = Reach::direct_offset(reach.lanes, self.world);
        reach.state.word(from)
    }

    /// Ranks that have not announced themselves in this rank's launch in flight; empty if there is none. `rows` is
    /// the scratch of the announcements. Blocks for the time of a small read from the device.
    pub(crate) fn absent(&self, rows: &ScratchInstance) -> Result<Vec<Rank>> {
        let reach = &self.kernels.reach;
        let epoch = read_words(&*self.device, &reach.state.slice(0..EPOCH_BYTES)?)?[0];
        let slot = (epoch % 2) as usize;
        // Whether rank `of` announced itself at rank `at`.
        let announced = |at: Rank, of: Rank| -> Result<bool> {
            let element = slot * rows.strides[0] + of * rows.strides[1];
            let (Some(memory), Some(range)) = (self.memory(at), rows.packed(element, 1)) else {
                return Ok(false);
            };
            let from = reach.layout.area(rows.packing).offset_bytes;
            let packet = memory.slice(from + range.start..from + range.end)?;
            has_announced(&*self.device, &packet, epoch)
        };
        let mut absent = Vec::new();
        let mut is_in_launch = false;
        // Directly reachable peers first: announcements of the others are forwarded, and so arrive later.
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

    /// The error that a kernel has noted: another rank's announcement that does not match this rank's, for which `tell` makes an
    /// error, or an integer out of range. Blocks for the time of a small read from the device. Devices that take closures
    /// fail the stream instead.
    pub(crate) fn noted(
        &self,
        tell: impl FnOnce(Rank, Announced) -> Error,
    ) -> Result<Option<Error>> {
        let noted = self.kernels.reach.noted(&*self.device)?;
        Ok(noted.map(|note| match note {
            Note::Difference(number, announced) => {
                tell((self.rank + 1 + number) % self.world, announced)
            }
            // The tensors are others in each launch, so the address alone names the word.
            Note::Value(value) => value.error(None).with_rank(self.rank),
        }))
    }
}

/// Words that launches of a section are bound to.
struct BoundWords {
    words: Vec<u64>,
    /// Like those of [`SharedKernel`].
    addresses: Vec<(usize, TensorId, u64)>,
    places: Vec<(usize, TensorId, u64)>,
    first_place: usize,
    aligned: Vec<bool>,
}

impl KernelCode {
    /// Whether it serves a section of the same program, rank, lanes and threads. The text depends only on the signs and
    /// upper bounds of integers, extents and strides, so text for the largest values is valid for all smaller ones.
    fn serves(&self, section: &SectionInstance, aligned: &[bool]) -> bool {
        let of = &*self.largest;
        let within = |most: i64, value: i64| most.min(0) <= value && value <= most.max(0);
        let integers = of.integers.iter().zip(&section.integers);
        let tensors = of.tensors.iter().zip(&section.tensors);
        let sizes = |of: &[usize], section: &[usize]| {
            of.len() == section.len() && of.iter().zip(section).all(|(of, own)| own <= of)
        };
        self.aligned == aligned
            // Everything else that the text depends on is in the cache key by which the model was found.
            && of.period == section.period
            && of.shared_tensors == section.shared_tensors
            && of.published == section.published
            && (of.threads, of.blocks) == (section.threads, section.blocks)
            && (of.integers.len(), of.tensors.len())
                == (section.integers.len(), section.tensors.len())
            && integers
                .into_iter()
                .all(|((name, most), (other, value))| name == other && within(*most, *value))
            && tensors.into_iter().all(|(most, own)| {
                most.name == own.name
                    && most.strides.last() == own.strides.last()
                    && most.has_dense_rows() == own.has_dense_rows()
                    && sizes(&most.shape, &own.shape)
                    && sizes(&most.strides, &own.strides)
            })
    }
}

impl SharedKernel {
    /// Enqueues a launch on `tensors`, indexed by their numbers in the program; peers may access them if `reachable`.
    /// May be recorded by a graph. Does not block.
    pub(crate) fn enqueue(
        &self,
        (stream, is_recorded): (&Stream, bool),
        tensors: &[&DeviceSlice],
        reachable: bool,
    ) -> Result<()> {
        // Held until the launch: it orders the words with it, and saves an allocation per call.
        let mut own = lock(&self.launched);
        // A launch that is not reachable must not keep the last one's locations.
        own.copy_from_slice(&self.words);
        for (word, id, offset) in &self.addresses {
            let tensor = tensors.get(*id).ok_or_else(missing)?;
            own[*word] = tensor.address() + offset;
        }
        let mut found: Option<(&DeviceSlice, (u64, u64))> = None;
        for (word, id, offset) in self.places.iter().filter(|_| reachable) {
            let tensor = *tensors.get(*id).ok_or_else(missing)?;
            let (number, start) = match found {
                // In place.
                Some((same, entry))
                    if same.offset() == tensor.offset()
                        && Arc::ptr_eq(same.backing(), tensor.backing()) =>
                {
                    entry
                }
                _ => self.publication.entry(tensor, stream, is_recorded),
            };
            found = Some((tensor, (number, start)));
            own[*word] = number;
            own[*word + 1] = start + offset;
        }
        let arguments = SerialArguments {
            words: &own,
            signals: &self.signals,
            memory: tensors,
        };
        self.kernel
            .launch((stream, is_recorded), &self.launch, &arguments)
    }
}

impl fmt::Debug for SharedKernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SharedKernel({:?})", self.launch)
    }
}

fn missing() -> Error {
    Error::internal("a launch without one of its tensors").with_operation("launch a kernel")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::program::{Parameters, Program, unroll};

    /// A section of the chunked all-reduce program, as calls create it.
    fn section(count: i64, chunks: i64, published: bool) -> SectionInstance {
        let text = include_str!("../../collective/programs/all_reduce_chunks.wlp");
        let parameters = Parameters::from([
            ("n", count),
            ("chunks", chunks),
            ("room", 1 << 20),
            ("direct", 1),
            ("what", 77),
            ("length", count as i32 as i64),
            ("upper", count >> 32),
            ("factor", 0),
            ("lanes", 5),
            ("threads", 512),
        ])
        .with("T", DType::F32)
        .with("op", crate::device::ReduceOp::Sum);
        let program = unroll(&Program::parse(text).unwrap(), 1, 2, 1, &parameters).unwrap();
        let section = program.sections().next().unwrap();
        SectionInstance {
            sizes_vary: true,
            published,
            ..section.clone()
        }
    }

    fn text(section: &SectionInstance) -> String {
        kernel_text(section, &vec![true; section.tensors.len()]).unwrap()
    }

    #[test]
    fn code_serves_sections_of_its_text_that_are_no_larger() {
        let largest = section((1 << 20) - 1, 2, true);
        let aligned = vec![true; largest.tensors.len()];
        let code = KernelCode {
            largest: Arc::new(largest.clone()),
            aligned: aligned.clone(),
        };
        for (count, chunks) in [(1, 1), (1000, 1), ((1 << 19) + 3, 2), ((1 << 20) - 1, 2)] {
            let smaller = section(count, chunks, true);
            assert!(code.serves(&smaller, &aligned), "{count}");
            assert_eq!(text(&smaller), text(&largest), "{count}");
            assert!(!code.serves(&smaller, &vec![false; aligned.len()]));
            assert!(!code.serves(&section(count, chunks, false), &aligned));
        }
        // More elements need wider integers, and a negative one needs different operators.
        for larger in [
            section(1 << 20, 2, true),
            section(1000, 3, true),
            section(3 << 30, 2, true),
        ] {
            assert!(!code.serves(&larger, &aligned));
        }
        assert_ne!(text(&section(3 << 30, 2, true)), text(&largest));
    }
}
