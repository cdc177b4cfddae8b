//! Selection of algorithm and launch shape of a call: the only place that decides.

use super::algorithm::{Algorithm, WorkspacePart, copies_in_place};
use super::call::{Call, CollectiveKind, Overlap};
use super::estimate::Estimates;
use crate::error::{Error, Rank, Result};
use crate::p2p::TransferKernels;
use crate::program::expr::PART_UNIT;
use crate::program::{Parameters, RankProgram, unroll};
use crate::topology::CUBE_RANKS;

/// Numbers of lanes that move data. Programs list the same numbers plus the lane that synchronizes with other
/// ranks: powers of two, and numbers that leave space for that lane within a power of two.
const LANES: [usize; 14] = [1, 2, 4, 7, 8, 15, 16, 31, 32, 63, 64, 95, 127, 128];

/// Threads of a lane, as programs list them.
const THREADS: [usize; 4] = [128, 256, 512, 1024];
const MAX_THREADS: usize = THREADS[THREADS.len() - 1];

/// Bytes per lane before another lane is added, for chunks and for direct access: more lanes synchronize
/// more, which costs some microseconds when memory is announced.
const CHUNK_LANE_BYTES: usize = 16 << 10;
const DIRECT_LANE_BYTES: usize = 128 << 10;

/// Bandwidth that a lane adds when many share a link, for stores to peers and loads from them. More lanes
/// take multiprocessors from other work and gain less than 3 %. A single lane is several times as fast
/// (measured with scripts/device-sweep.sh, docs/performance.md).
const LANE_STORES: f64 = 5e9;
const LANE_LOADS: f64 = 9.5e9;

/// From this size on, twice as many lanes gain those 3 %, except for reductions on all ranks, which load.
const LONG: usize = 128 << 20;

/// Usual threads of a lane, and the number of lanes up to which each gets more, where it loads from peers.
const USUAL_THREADS: usize = 512;
const FEW_LANES: usize = 8;
const FEW_LOADING_LANES: usize = 16;

/// Parts of 64 that lanes move while the copy engine starts, and the maximum of such lanes: the fastest
/// values from 16 MiB on (docs/performance.md).
const EARLY_PARTS: i64 = 8;
const EARLY_LANES: usize = 32;

/// Chunk sizes are multiples of this many elements.
const CHUNK_UNIT: usize = 16;

/// Upper bound of a part's padding in bytes.
const PADDING: usize = 4096;

/// Data bytes of a packet.
const PACKET_BYTES: usize = 8;

/// How a call is executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Choice {
    /// The algorithm.
    pub algorithm: Algorithm,
    /// Lanes that move data; one more synchronizes with other ranks.
    pub lanes: usize,
    /// Threads of each lane.
    pub threads: usize,
    /// Number of chunks of a lane; 1 if packets go at once.
    pub chunks: usize,
}

/// Inputs of a choice besides the call. Equal on every rank, which ranks verify at joining by comparing its
/// `Debug` output.
#[derive(Clone, Debug)]
pub(super) struct Machine {
    pub(super) world: usize,
    /// Kernel performance, from the machine's model.
    pub(super) kernels: TransferKernels,
    /// Data capacity of half a workspace in bytes, as packets and as raw data.
    pub(super) packet_bytes: usize,
    pub(super) plain_bytes: usize,
    /// The same as packets of 128 bytes, for fused calls; 0 if links split these.
    pub(super) lined_bytes: usize,
    /// Maximum lanes that move data. If ranks share a device, it must have space for all of them.
    pub(super) most_lanes: usize,
    /// Maximum blocks of a lane, and of a launch that has lanes of several blocks.
    pub(super) cluster_blocks: usize,
    pub(super) most_blocks: usize,
    /// Lanes and threads fixed by options.
    pub(super) forced_lanes: Option<usize>,
    pub(super) forced_threads: Option<usize>,
    /// Algorithm fixed by options.
    pub(super) forced: Option<Algorithm>,
    /// Ranks by position of a hybrid cube mesh, if the links form one. Only [`Algorithm::Cube`] uses no other
    /// links.
    pub(super) cube: Option<[Rank; CUBE_RANKS]>,
    /// Bandwidth of all lanes of a rank in bytes per second, for stores to peers and loads from them.
    pub(super) rates: [f64; 2],
    /// Estimated times of algorithms.
    pub(super) estimates: Estimates,
}

impl Machine {
    /// Maximum data lanes for each of `ranks_per_device` ranks on a device with space for one lane on each
    /// multiprocessor. One more lane synchronizes.
    pub(super) fn most_lanes(multiprocessors: usize, ranks_per_device: usize) -> usize {
        (multiprocessors / ranks_per_device.max(1))
            // The synchronizing lane takes a multiprocessor as well, and all lanes must be resident at once.
            .saturating_sub(1)
            .clamp(1, LANES[LANES.len() - 1])
    }

    /// Selects how to execute `call`.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if the requested algorithm does not implement it.
    pub(super) fn choose(&self, call: &Call) -> Result<Choice> {
        if !self.does(call) {
            return Err(self.not_linked(call));
        }
        // A barrier moves no data: only the lane that synchronizes runs.
        if call.program() == CollectiveKind::Barrier {
            return Ok(Choice {
                algorithm: Algorithm::OneShot,
                lanes: 0,
                threads: THREADS[0],
                chunks: 1,
            });
        }
        let algorithm = match self.forced {
            Some(forced) if self.fits(forced, call) => forced,
            Some(forced) => return Err(self.not_forced(forced, call)),
            None => self.fastest(call),
        };
        Ok(self.shape(algorithm, call))
    }

    /// Selects how to execute a bound call; `overlap` is the combined overlap on all ranks.
    ///
    /// # Errors
    /// As [`choose`](Self::choose).
    pub(super) fn choose_bound(&self, call: &Call, overlap: Overlap) -> Result<Choice> {
        let copied = Algorithm::CopyEngine;
        // An explicit algorithm other than the copy engine also rules out its use by binding.
        if !self.copies(call, overlap) || self.forced.is_some_and(|forced| forced != copied) {
            return self.choose(call);
        }
        let copied = self.shape(copied, call);
        if self.forced.is_some() {
            return Ok(copied);
        }
        let by_kernels = self.choose(call)?;
        let seconds = |choice: &Choice| self.seconds(choice.algorithm, call);
        // Equal estimates prefer kernels, which need no binding.
        Ok(if seconds(&copied)? < seconds(&by_kernels)? {
            copied
        } else {
            by_kernels
        })
    }

    /// Whether the copy engine executes a bound call.
    fn copies(&self, call: &Call, overlap: Overlap) -> bool {
        let program = match overlap {
            Overlap::Apart => Algorithm::CopyEngine.program(call.kind),
            Overlap::Shared => copies_in_place(call.kind),
        };
        // Links of a mesh reach some peers only, and one rank has nobody to copy to.
        program.is_some() && self.cube.is_none() && self.world > 1 && call.count > 0
    }

    /// Program parameters of a choice.
    pub(super) fn parameters(&self, call: &Call, choice: &Choice) -> Parameters {
        if choice.algorithm == Algorithm::CopyEngine {
            return Parameters::new()
                .with("n", call.count as i64)
                .with("T", call.dtype)
                .with("early", EARLY_PARTS)
                .with("lanes", choice.lanes as i64)
                .with("threads", choice.threads as i64);
        }
        // The announcement contains the algorithm, so ranks that choose differently are detected.
        let words = call.words(choice.algorithm as u8);
        let mut parameters = Parameters::new();
        // The program's integers have 32 bits.
        let [what, length, upper, factor] = words.map(|word| i64::from(word as i32));
        for (name, word) in [("what", what), ("length", length), ("upper", upper)] {
            parameters.insert(name, word);
        }
        if call.program() == CollectiveKind::Barrier {
            return parameters;
        }
        let size = call.dtype.size();
        let room = match choice.algorithm.room() {
            WorkspacePart::Packets => self.packet_bytes / size,
            WorkspacePart::Plain | WorkspacePart::Nothing => self.plain_bytes / size,
        };
        parameters.insert("n", call.count as i64);
        parameters.insert("room", room as i64);
        // One more lane synchronizes with the other ranks.
        parameters.insert("lanes", choice.lanes as i64 + 1);
        parameters.insert("threads", choice.threads as i64);
        if choice.algorithm.room() == WorkspacePart::Plain {
            let direct = choice.algorithm == Algorithm::Direct;
            parameters.insert("chunks", choice.chunks as i64);
            parameters.insert("direct", i64::from(direct));
        }
        if let (Algorithm::Cube, Some(positions)) = (choice.algorithm, &self.cube) {
            let (order, places) = packed(positions);
            // Positions and their inverse, three bits each.
            parameters.insert("order", order);
            parameters.insert("places", places);
        }
        if let Some(op) = call.op {
            parameters.insert("op", op);
            parameters.insert("factor", factor);
            parameters.insert("T", call.dtype);
        }
        if let Some(root) = call.root {
            parameters.insert("root", root as i64);
        }
        parameters
    }

    /// Whether the direct path executes a call; in a hybrid cube mesh, only some.
    pub(super) fn does(&self, call: &Call) -> bool {
        // A mesh's only program reduces data, so empty calls need the engine.
        self.cube.is_none() || call.count > 0 && self.fits(Algorithm::Cube, call)
    }

    /// Whether an algorithm can execute a call on any memory.
    fn fits(&self, algorithm: Algorithm, call: &Call) -> bool {
        if algorithm.program(call.kind).is_none() {
            return false;
        }
        // In a mesh, every other algorithm would use missing links; elsewhere, `cube` has no positions.
        if (algorithm == Algorithm::Cube) != self.cube.is_some() {
            return false;
        }
        // Packets must fit completely; chunks handle any length.
        match algorithm.room() {
            WorkspacePart::Packets => {
                let rows = algorithm.rows(call.kind, self.world, 1);
                let parts = algorithm.parts(self.world);
                self.packet_room(call, rows) >= part(call.count, parts)
            }
            WorkspacePart::Plain => true,
            WorkspacePart::Nothing => false,
        }
    }

    /// Packet capacity of a row in elements, if `rows` rows share the space.
    fn packet_room(&self, call: &Call, rows: usize) -> usize {
        self.packet_bytes / call.dtype.size() / rows
    }

    /// Fastest applicable algorithm by the model.
    fn fastest(&self, call: &Call) -> Algorithm {
        // Direct access beats several chunks, whose steps the estimates underrate.
        let quick = |one: Algorithm| one != Algorithm::Chunks || self.shape(one, call).chunks == 1;
        let fitting = Algorithm::CHOICES
            .into_iter()
            .filter(|one| self.fits(*one, call) && quick(*one));
        let fitting: Vec<Algorithm> = fitting.collect();
        self.estimates
            .fastest(self.world, call, &fitting, |algorithm, like| {
                self.seconds(algorithm, like)
            })
    }

    /// Estimated seconds of a call, if its memory is accessible.
    pub(super) fn seconds(&self, algorithm: Algorithm, call: &Call) -> Result<f64> {
        let choice = self.shape(algorithm, call);
        // A representative of shorter calls may itself exceed the workspace.
        let rows = algorithm.rows(call.kind, self.world, 1);
        let machine = Self {
            // Enlarge the packet area for the estimate only.
            packet_bytes: self.packet_bytes.max(2 * rows * (call.bytes() + PADDING)),
            ..self.clone()
        };
        let programs = (0..self.world).map(|rank| machine.rank_program(rank, call, &choice));
        let programs: Vec<RankProgram> = programs.collect::<Result<_>>()?;
        self.estimates.seconds(&programs)
    }

    /// Program of a choice, unrolled for a rank.
    pub(super) fn rank_program(
        &self,
        rank: Rank,
        call: &Call,
        choice: &Choice,
    ) -> Result<RankProgram> {
        let program = choice
            .algorithm
            .program(call.program())
            .ok_or_else(|| Error::internal("the chosen algorithm does not exist"))??;
        let parameters = self.parameters(call, choice);
        unroll(program, rank, self.world, 1, &parameters)
    }

    /// Lanes, threads and chunks of a call for an algorithm.
    pub(super) fn shape(&self, algorithm: Algorithm, call: &Call) -> Choice {
        match algorithm.room() {
            WorkspacePart::Packets => self.packets(algorithm, call),
            WorkspacePart::Plain => self.chunks(algorithm, call),
            WorkspacePart::Nothing => Choice {
                algorithm,
                lanes: self.lanes(EARLY_LANES, EARLY_LANES),
                threads: self.threads(MAX_THREADS),
                chunks: 1,
            },
        }
    }

    fn packets(&self, algorithm: Algorithm, call: &Call) -> Choice {
        let bytes = call.bytes() / algorithm.parts(self.world);
        // Threads before lanes: a packet for each thread of one lane, then more lanes.
        let least = (self.kernels.packet_threads as usize).clamp(THREADS[0], MAX_THREADS);
        let wanted = bytes.div_ceil(least * PACKET_BYTES);
        let lanes = self.lanes(wanted, self.kernels.packet_blocks as usize);
        let threads = bytes.div_ceil(lanes * PACKET_BYTES);
        Choice {
            algorithm,
            lanes,
            threads: self.threads(threads.max(least)),
            chunks: 1,
        }
    }

    pub(super) fn chunks(&self, algorithm: Algorithm, call: &Call) -> Choice {
        let bytes = call.bytes();
        let [stored, loaded] = self.rates;
        let direct = algorithm == Algorithm::Direct;
        // Reductions load from peers, which gives more bandwidth for each lane than stores.
        let most = if direct && call.kind.reduces() {
            loaded / LANE_LOADS
        } else {
            stored / LANE_STORES
        };
        // Long transfers amortize more lanes. The root of a reduce has to take in what it loads and what others store.
        let long = match call.kind {
            CollectiveKind::AllReduce | CollectiveKind::ReduceScatter => 1.0,
            _ if bytes >= LONG => 2.0,
            _ => 1.0,
        };
        let root = match call.kind {
            CollectiveKind::Reduce => 2.0,
            _ => 1.0,
        };
        let most = if direct { long * root * most } else { most };
        let each = if direct {
            DIRECT_LANE_BYTES
        } else {
            CHUNK_LANE_BYTES
        };
        let mut lanes = self.lanes(bytes.div_ceil(each), most as usize);
        let room = |lanes: usize, chunks: usize| {
            let rows = lanes * algorithm.rows(call.kind, self.world, chunks);
            self.plain_bytes / call.dtype.size() / rows / CHUNK_UNIT * CHUNK_UNIT
        };
        // A small workspace lacks space for chunks of many lanes.
        while lanes > 1 && room(lanes, usize::MAX) == 0 {
            lanes = LANES[..]
                .iter()
                .copied()
                .rfind(|fewer| *fewer < lanes)
                .unwrap_or(1);
        }
        // An all-reduce handles one rank's part at a time.
        let parts = match call.kind {
            CollectiveKind::AllReduce => part(call.count, self.world),
            _ => call.count,
        };
        let piece = part(parts, lanes);
        // Elements of a chunk, for a number of chunks.
        let room = |chunks: usize| room(lanes, chunks).max(CHUNK_UNIT);
        let chunks = if piece <= room(1) {
            1
        } else {
            // Several chunks overlap transfer and copy, so never fewer than two.
            piece.div_ceil(room(usize::MAX)).max(2)
        };
        let loads = matches!(
            call.kind,
            CollectiveKind::ReduceScatter | CollectiveKind::Reduce
        );
        let few = if loads { FEW_LOADING_LANES } else { FEW_LANES };
        // Few lanes with much data: more threads keep more accesses in flight.
        let busy = direct && lanes <= few && bytes > few * each;
        Choice {
            algorithm,
            lanes,
            threads: self.threads(if busy { MAX_THREADS } else { USUAL_THREADS }),
            chunks,
        }
    }

    /// At least `wanted` lanes, within `most` and the options.
    pub(super) fn lanes(&self, wanted: usize, most: usize) -> usize {
        let most = most.min(self.most_lanes);
        let (wanted, most) = match self.forced_lanes {
            Some(forced) => (forced, forced.min(self.most_lanes)),
            None => (wanted.min(most), most),
        };
        // Parts of a power of two of lanes begin at cache lines more often, which gains 4 %. If
        // multiprocessors are scarce, using all of them gains more.
        let usual = |lanes: &usize| lanes.is_power_of_two() || *lanes == self.most_lanes;
        let allowed = LANES
            .into_iter()
            .filter(|lanes| *lanes <= most && (self.forced_lanes.is_some() || usual(lanes)));
        let enough = allowed.clone().find(|lanes| *lanes >= wanted);
        enough.or(allowed.max()).unwrap_or(1)
    }

    /// The same, where there is space for no more than `most`, even if options force more.
    pub(super) fn lanes_within(&self, wanted: usize, most: usize) -> usize {
        let lanes = self.lanes(wanted, most);
        if lanes <= most {
            return lanes;
        }
        let open = Self {
            forced_lanes: None,
            ..self.clone()
        };
        open.lanes(most, most)
    }

    /// At least `wanted` threads of a lane, within the options.
    pub(super) fn threads(&self, wanted: usize) -> usize {
        let wanted = self.forced_threads.unwrap_or(wanted);
        let mut all = THREADS.into_iter();
        all.find(|threads| *threads >= wanted)
            .unwrap_or(MAX_THREADS)
    }

    /// Error for a call that the direct path does not support in a hybrid cube mesh.
    fn not_linked(&self, call: &Call) -> Error {
        let rows = Algorithm::Cube.rows(CollectiveKind::AllReduce, self.world, 1);
        Error::unsupported(format!(
                "the direct path does not support {call} in a hybrid cube mesh; expected an all_reduce of 1 to {} bytes",
                self.packet_room(call, rows) / PART_UNIT as usize * PART_UNIT as usize * call.dtype.size()
            ),
        )
        .with_operation(call.kind.name())
        .with_help("leave the path open, or give the workspace more bytes")
    }

    fn not_forced(&self, forced: Algorithm, call: &Call) -> Error {
        Error::unsupported(format!(
                "algorithm {forced} does not support {call} on {} ranks",
                self.world
            ),
        )
        .with_operation(call.kind.name())
        .with_help(match forced {
            Algorithm::CopyEngine => {
                "leave the algorithm open, or bind an all-gather or all-to-all to its memory (Collectives::bind)"
            }
            _ => "leave the algorithm open, or give the workspace more bytes",
        })
    }
}

/// Ranks by position of a hybrid cube mesh, and positions by rank, packed for its program.
fn packed(positions: &[Rank; CUBE_RANKS]) -> (i64, i64) {
    let all = positions.iter().enumerate();
    all.fold((0, 0), |(order, places), (position, rank)| {
        (
            order | (*rank as i64) << (3 * position),
            places | (position as i64) << (3 * rank),
        )
    })
}

/// Elements of a part, as programs divide tensors.
pub(super) fn part(elements: usize, parts: usize) -> usize {
    // Parts start at multiples of the unit on all ranks, for aligned vector accesses.
    let unit = PART_UNIT as usize;
    elements.div_ceil(unit * parts).saturating_mul(unit)
}

#[cfg(test)]
#[path = "choice_tests.rs"]
mod tests;
