//! Interpreter for a lane of a kernel section, on devices that take closures for kernels.

mod located;
mod steps;

pub(super) use located::Announcing;

use super::lane_times::LaneClock;
use super::publication::Tables;
use super::reach::{Reach, announced_words, packet_flag};
use super::row_values::{integer, row_bytes};
use crate::device::{
    Block, BlockSignals, DeviceSlice, Fault, HostLanes, LaneFuture, Values, Word, combine,
};
use crate::error::{Error, ErrorKind, Rank, Result};
use crate::program::section::{
    LaneMove, LaneStep, LaneStepKind, Packing, Part, Resolution, RowStep, SectionInstance,
    SectionMemory, StepCache,
};
use located::Located;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// Location of an operand.
struct Operand {
    memory: DeviceSlice,
    packing: Packing,
}

/// Error of two announcements that differ: this rank's, and a peer's.
pub(crate) type TellDifference = dyn Fn(&[u32], &[u32]) -> Error + Send + Sync;

/// Inputs of a lane.
#[derive(Clone, Copy)]
pub(super) struct LaneInput<'a> {
    pub(super) section: &'a SectionInstance,
    pub(super) reach: &'a Reach,
    /// Local tensors of this launch, by number; the others are in `reach`.
    pub(super) tensors: &'a [DeviceSlice],
    /// Lookup of announced tensors; `None` if all tensors are in `reach`.
    pub(super) published: Option<Announcing<'a>>,
    /// Counts lanes that found all announced tensors reachable.
    pub(super) direct: &'a Word,
    /// Words of the tensor that the launch carries.
    pub(super) carried: &'a [u64],
    /// Index of the first signal of the lanes, on each rank.
    pub(super) first_signals: [usize; 2],
    pub(super) tell: &'a TellDifference,
    /// Where to record the start times of steps, for a trace.
    pub(super) times: Option<&'a LaneClock>,
    pub(super) cache: &'a StepCache,
}

/// Lanes of a section, reused across launches.
pub(super) struct SectionLanes {
    pub(super) section: Arc<SectionInstance>,
    pub(super) reach: Arc<Reach>,
    pub(super) tell: Arc<TellDifference>,
    /// For launches with tensors of their own: the tables of announced tensors, and the index of the first launch
    /// word that gives their locations.
    pub(super) launched: Option<(Arc<Tables>, usize)>,
    /// Raised if ranks make different calls or a value is refused, to abort waits that would never end.
    pub(super) fault: Arc<Fault>,
    pub(super) times: Option<LaneClock>,
    pub(super) cache: StepCache,
}

impl SectionLanes {
    async fn run_lane(&self, block: &Block<'_>) -> Result<()> {
        let (tensors, places) = match &self.launched {
            Some((_, first)) => (block.memory(2)?, block.words(0)?.get(*first..)),
            None => (&[][..], None),
        };
        let tables = self.launched.as_ref().map(|(tables, _)| &**tables);
        let direct = Reach::direct_offset(self.reach.lanes, self.section.world);
        let direct = self.reach.state.word(direct)?;
        let input = LaneInput {
            section: &self.section,
            reach: &self.reach,
            tensors,
            published: tables
                .filter(|_| self.section.published)
                .map(|tables| Announcing {
                    tables,
                    places: places.unwrap_or_default(),
                    ranks: None,
                }),
            direct: &direct,
            carried: &[],
            first_signals: [0, 0],
            tell: &*self.tell,
            times: self.times.as_ref(),
            cache: &self.cache,
        };
        run_lane(block, input).await.map_err(|error| {
            let (ErrorKind::Mismatch | ErrorKind::InvalidArgument) = error.kind() else {
                return error;
            };
            let error = error.with_rank(self.section.rank);
            // Other lanes, on this rank and on peers, may wait for data that will never arrive.
            self.fault.fail(error.clone());
            error
        })
    }
}

impl HostLanes for SectionLanes {
    fn run<'a>(&'a self, block: &'a Block<'a>) -> LaneFuture<'a> {
        Box::pin(self.run_lane(block))
    }
}

/// Runs the lane of `block`, and counts the launch.
async fn run_lane(block: &Block<'_>, input: LaneInput<'_>) -> Result<()> {
    let LaneInput { section, reach, .. } = input;
    let (epoch_word, ended_word) = (reach.state.word(0)?, reach.state.word(8)?);
    let epoch = block.value(&epoch_word);
    run_steps(block, input, (block.index() as usize, epoch)).await?;
    // The last lane to end advances the epoch: all lanes have read it by then.
    if block.increment(&ended_word) + 1 == section.lanes as u64 {
        block.set(&ended_word, 0);
        block.increment(&epoch_word);
    }
    Ok(())
}

/// Performs the steps of a lane in the launch that `epoch` ones precede.
pub(super) async fn run_steps(
    block: &Block<'_>,
    input: LaneInput<'_>,
    (lane, epoch): (usize, u64),
) -> Result<()> {
    let LaneInput { section, reach, .. } = input;
    let announced = input.cache.announced(section).iter().copied();
    let mut run = Lane {
        block,
        input,
        section,
        reach,
        lane,
        epoch,
        located: announced.map(Located::new).collect(),
        values: BTreeMap::new(),
        resolution: None,
        buffers: Buffers::default(),
        unrung: RefCell::default(),
    };
    let mut times = input.times.map(|clock| clock.start(lane, epoch));
    let mut missing: Vec<usize> = section.withheld.to_vec();
    let mut next = 0;
    let (mut first, mut steps) = run.steps(&missing, next)?;
    while let Some(step) = steps.get(next - first) {
        if let Some(times) = &mut times {
            times.step(&step.site);
        }
        // A step is atomic for an abort: one that has begun is completed. Tests delay lanes here, too.
        block.pause()?;
        run.perform(step).await.map_err(|error| {
            error.with_operation(format!("kernel of rank {}, {}", section.rank, step.site))
        })?;
        next += 1;
        // Earlier steps depend neither on reachability nor on a value that was read last, so the lane continues at the
        // same index.
        let is_last = next == first + steps.len();
        let has_read = matches!(step.kind, LaneStepKind::Value { .. }) && is_last;
        if has_read || run.missing().ne(missing.iter().copied()) {
            missing = run.missing().collect();
            (first, steps) = run.steps(&missing, next)?;
        }
    }
    // Peers may wait for packets of the last steps, and nothing else of this lane would wake them.
    run.ring()?;
    if let Some(times) = times {
        let (memory, bytes) = times.finish()?;
        block.write(&memory, &bytes)?;
    }
    Ok(())
}

struct Lane<'a> {
    block: &'a Block<'a>,
    input: LaneInput<'a>,
    section: &'a SectionInstance,
    reach: &'a Reach,
    lane: usize,
    epoch: u64,
    located: Vec<Located>,
    /// Values read from memory that may change, by the number of the read.
    values: BTreeMap<usize, i64>,
    /// The steps so far, unless they were cached.
    resolution: Option<Resolution<'a>>,
    buffers: Buffers,
    unrung: RefCell<Unrung>,
}

/// Packets that were stored without ringing for their ranks' lanes. One ring before this lane waits or works for long wakes a
/// rank once, and not for each piece of a message.
#[derive(Default)]
struct Unrung {
    ranks: Vec<Rank>,
    bytes: usize,
}

/// Bytes of packets after which their ranks are rung for anyway, so that they unpack these while more are stored.
const MAX_UNRUNG: usize = 64 << 10;

/// Buffers for sources and results, reused across steps.
#[derive(Default)]
struct Buffers {
    values: Vec<Vec<u8>>,
    combined: Vec<u8>,
}

impl Lane<'_> {
    async fn perform(&mut self, step: &LaneStep) -> Result<()> {
        let (rank, world) = (self.section.rank, self.section.world);
        let it = match &step.kind {
            LaneStepKind::Signal { peer, lane } => {
                let number = self.first_signal(*peer) + lane * world + rank;
                return self.signals(*peer)?.tell(number);
            }
            LaneStepKind::Wait(peer) => {
                self.ring()?;
                let number = self.first_signal(rank) + self.lane * world + peer;
                return self.signals(rank)?.arrived(number).await;
            }
            LaneStepKind::Announce {
                values,
                tensors,
                target,
            } => return self.announce(values, tensors, target),
            LaneStepKind::Agree {
                values,
                tensors,
                peer,
                source,
            } => return self.agree(values, tensors, *peer, source).await,
            // Read ahead when the steps were resolved; a second read could give another value than the steps assume.
            LaneStepKind::Value { number, .. } if self.values.contains_key(number) => {
                return Ok(());
            }
            LaneStepKind::Value {
                number,
                source,
                matching: Some(matching),
                ..
            } => {
                let value = self.word(source, Some(*matching))?;
                self.values.insert(*number, value);
                return Ok(());
            }
            LaneStepKind::Store { value, target } => {
                let dtype = self.section.tensors[target.tensor].dtype;
                let operand = self.operand(target, &(0..1))?;
                let bytes = value.to_le_bytes();
                return self.store(target, &operand, &bytes[..dtype.size().min(bytes.len())]);
            }
            LaneStepKind::Value { number, source, .. } => {
                let operand = self.operand(source, &(0..1))?;
                let dtype = self.section.tensors[source.tensor].dtype;
                let mut bytes = Vec::new();
                self.load(&operand, (&mut bytes, dtype.size())).await?;
                self.values.insert(*number, integer(dtype, &bytes));
                return Ok(());
            }
            LaneStepKind::Move(it) => it,
        };
        let (targets, sources) = (&it.targets, &it.sources);
        if let Some(rows) = &it.rows {
            self.ring()?;
            return self.rows(rows, it.elements, targets, sources).await;
        }
        // Process the halves in either order, because the threads of a block are unordered: this exposes code that
        // depends on it.
        let unit = self.piece_unit(targets.iter().chain(sources));
        let half = it.elements / 2 / unit * unit;
        let mut pieces = [0..half, half..it.elements];
        if self.epoch % 2 == 1 {
            pieces.reverse();
        }
        let is_plain = |part: &Part| self.section.packets_of(part).is_none();
        if let (None, [source]) = (it.operator, &sources[..])
            // Straight from memory to memory, without a buffer in between.
            && targets.iter().chain(sources).all(is_plain)
        {
            self.ring()?;
            for piece in pieces.into_iter().filter(|piece| !piece.is_empty()) {
                let source = self.operand(source, &piece)?;
                for target in targets {
                    let target = self.operand(target, &piece)?;
                    self.block.copy(&target.memory, &source.memory)?;
                }
            }
            return Ok(());
        }
        // Bounds the buffers: a step may be as long as a tensor.
        let most = (self.block.combined_bytes() / it.dtype.size() / unit).max(1) * unit;
        for piece in pieces {
            let starts = piece.clone().step_by(most);
            for from in starts {
                let piece = from..piece.end.min(from.saturating_add(most));
                self.piece(it, &piece).await?;
            }
        }
        Ok(())
    }

    /// Sends this rank's announcement to a peer.
    fn announce(&mut self, values: &[u32], tensors: &[usize], target: &Part) -> Result<()> {
        let words = target.elements;
        let mut announced = values.to_vec();
        announced.resize(words - 2 * tensors.len(), 0);
        for tensor in tensors {
            let own = self.locate(*tensor)?;
            announced.extend([own as u32, (own >> 32) as u32]);
        }
        let operand = self.operand(target, &(0..words))?;
        let bytes: Vec<u8> = announced.iter().flat_map(|v| v.to_le_bytes()).collect();
        self.store(target, &operand, &bytes)
    }

    /// Waits for a peer's announcement, and fails if it differs from `values`; records the locations of its
    /// `tensors`.
    async fn agree(
        &mut self,
        values: &[u32],
        tensors: &[usize],
        peer: Rank,
        source: &Part,
    ) -> Result<()> {
        let words = source.elements;
        let operand = self.operand(source, &(0..words))?;
        let mut came = Vec::new();
        self.load(&operand, (&mut came, 4 * words)).await?;
        let theirs = announced_words(&came);
        let (theirs, places) = theirs.split_at(words - 2 * tensors.len());
        // The integers are padded to whole packets.
        let theirs = &theirs[..values.len()];
        if theirs == values {
            let places = places.chunks_exact(2);
            for (tensor, told) in tensors.iter().zip(places) {
                let told = u64::from(told[1]) << 32 | u64::from(told[0]);
                self.note(*tensor, peer, told)?;
            }
            // Peers are agreed with in rank order from the next rank on, so with this one, the locations of all are
            // known.
            let last = (self.section.rank + self.section.world - 1) % self.section.world;
            let all = || tensors.iter().all(|tensor| self.is_reachable(*tensor));
            if self.input.published.is_some() && !tensors.is_empty() && peer == last && all() {
                self.block.increment(self.input.direct);
            }
            return Ok(());
        }
        let error = (self.input.tell)(values, theirs);
        Err(error.with_rank(self.section.rank).with_peer(peer))
    }

    /// Alignment of a piece of a step, in elements, so that it starts at a packet.
    fn piece_unit<'p>(&self, mut parts: impl Iterator<Item = &'p Part>) -> usize {
        let lines = parts.any(|part| {
            let scratch = self.section.scratch_of(part.tensor);
            scratch.is_some_and(|scratch| scratch.packing == Packing::Packets128)
        });
        // A line holds 120 bytes of data. 240 elements are whole lines of every type and a multiple of 16.
        if lines { 240 } else { 16 }
    }

    /// Applies a function to a row of `width` elements.
    async fn rows(
        &mut self,
        step: &RowStep,
        width: usize,
        targets: &[Part],
        sources: &[Part],
    ) -> Result<()> {
        if width == 0 {
            return Ok(());
        }
        let dtype = |part: &Part| self.section.tensors[part.tensor].dtype;
        let mut values = Vec::with_capacity(sources.len());
        let mut bytes = Vec::new();
        for source in sources {
            let operand = self.operand(source, &(0..source.elements))?;
            let all = source.elements * dtype(source).size();
            self.load(&operand, (&mut bytes, all)).await?;
            values.push(dtype(source).decode_f32(&bytes));
        }
        let results = step.apply(&values, width);
        for (target, result) in targets.iter().zip(step.by_target(&results)) {
            let operand = self.operand(target, &(0..target.elements))?;
            let bytes = row_bytes(dtype(target), result, target.elements);
            self.store(target, &operand, &bytes)?;
        }
        Ok(())
    }

    /// Executes a step for some of its elements.
    async fn piece(&mut self, it: &LaneMove, piece: &Range<usize>) -> Result<()> {
        let bytes = piece.len() * it.dtype.size();
        let mut buffers = std::mem::take(&mut self.buffers);
        let Buffers { values, combined } = &mut buffers;
        values.resize(it.sources.len(), Vec::new());
        for (source, value) in it.sources.iter().zip(&mut *values) {
            let operand = self.operand(source, piece)?;
            self.load(&operand, (value, bytes)).await?;
        }
        let result = match (it.operator, &values[..]) {
            (None, [value]) => value,
            (Some(operator), values) => {
                combined.resize(bytes, 0);
                let values: Vec<&dyn Values> = values.iter().map(|it| it as &dyn Values).collect();
                combine(operator, it.dtype, &values, &mut |from, piece| {
                    let target = combined.get_mut(from..from + piece.len());
                    let target = target.ok_or_else(|| internal("what is combined is too long"))?;
                    target.copy_from_slice(piece);
                    Ok(())
                })?;
                combined
            }
            (None, _) => return Err(internal("a move has one source")),
        };
        for target in &it.targets {
            self.store(target, &self.operand(target, piece)?, result)?;
        }
        self.buffers = buffers;
        Ok(())
    }

    /// Replaces `data` by the first `bytes` bytes of an operand, once they have arrived.
    async fn load(&self, source: &Operand, (data, bytes): (&mut Vec<u8>, usize)) -> Result<()> {
        let Operand { memory, packing } = source;
        if !packing.is_packets() {
            return self.block.load_into(memory, data);
        }
        self.ring()?;
        let (flag, lines) = (self.flag(*packing), *packing == Packing::Packets128);
        self.block
            .load_packets(memory, (data, bytes), flag, lines)
            .await
    }

    /// Stores `bytes` in an operand, which belongs to `part`; its rank's lanes are woken for packets by the next
    /// [`ring`](Self::ring).
    fn store(&self, part: &Part, target: &Operand, bytes: &[u8]) -> Result<()> {
        let Operand { memory, packing } = target;
        if !packing.is_packets() {
            return self.block.store(memory, bytes);
        }
        let (flag, lines) = (self.flag(*packing), *packing == Packing::Packets128);
        self.block.store_packets(memory, bytes, flag, lines)?;
        let mut unrung = self.unrung.borrow_mut();
        if !unrung.ranks.contains(&part.rank) {
            unrung.ranks.push(part.rank);
        }
        unrung.bytes += bytes.len();
        let many = unrung.bytes >= MAX_UNRUNG;
        // `ring` borrows it as well.
        drop(unrung);
        if many { self.ring() } else { Ok(()) }
    }

    /// Wakes the lanes of ranks that may wait for packets of this lane.
    fn ring(&self) -> Result<()> {
        let Unrung { ranks, .. } = self.unrung.take();
        let mut ranks = ranks.into_iter();
        ranks.try_for_each(|rank| self.signals(rank)?.ring())
    }

    /// Packet flag of this launch, which never equals the initial contents of memory.
    fn flag(&self, packing: Packing) -> u64 {
        match packing {
            Packing::Packets128 => self.epoch + 1,
            _ => packet_flag(self.epoch).into(),
        }
    }

    /// Index of the first signal of the lanes of a rank.
    fn first_signal(&self, rank: Rank) -> usize {
        self.input.first_signals.get(rank).copied().unwrap_or(0)
    }

    /// Signals of a rank.
    fn signals(&self, rank: Rank) -> Result<BlockSignals<'_>> {
        let signals = self.reach.signals[rank].as_ref();
        let signals = signals.ok_or_else(|| internal("the signals of a rank are not mapped"))?;
        Ok(self.block.signals_at(signals))
    }

    fn operand(&self, part: &Part, piece: &Range<usize>) -> Result<Operand> {
        let missing = || internal("an operand is not mapped");
        let piece = part.piece(piece);
        let found = self.section.operand(&piece).ok_or_else(missing)?;
        let memory = match found.memory {
            SectionMemory::Tensor(id) => {
                if let Some(slice) = self.heard(part) {
                    // The announced slice starts with the tensor, so the offset is relative to it.
                    let tensor = &self.section.tensors[part.tensor];
                    let start = tensor.offset * tensor.dtype.size();
                    slice.slice(found.bytes.start - start..found.bytes.end - start)?
                } else {
                    let own = (part.rank == self.section.rank).then(|| self.input.tensors.get(id));
                    let bound = || self.reach.tensors[part.rank].get(&id);
                    let slice = own.flatten().or_else(bound).ok_or_else(missing)?;
                    slice.slice(found.bytes)?
                }
            }
            SectionMemory::Scratch(_) => {
                let start = self.reach.layout.area(found.packing).offset_bytes;
                let workspace = self.reach.workspaces[part.rank].as_ref();
                let workspace = workspace.ok_or_else(missing)?;
                workspace.slice(start + found.bytes.start..start + found.bytes.end)?
            }
        };
        Ok(Operand {
            memory,
            packing: found.packing,
        })
    }
}

pub(super) fn internal(what: &'static str) -> Error {
    Error::internal(what).with_operation("run a lane")
}
