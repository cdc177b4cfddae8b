//! The kernels of fused calls, and how a call is done.

use super::program::Way;
use super::{Epilogue, Fused, FusedMemory, Quantization};
use crate::collective::algorithm::Algorithm;
use crate::collective::choice::{Machine, part};
use crate::collective::estimate::rounded;
use crate::collective::launches::section;
use crate::collective::recent::Recent;
use crate::device::{DeviceSlice, Readying, Stream};
use crate::dtype::DType;
use crate::error::{Error, ErrorKind, Rank, Result};
use crate::program::execute::{CodeWanted, SharedKernel, SharedWorkspace, TellDifference};
use crate::program::section::SectionInstance;
use crate::program::{Parameters, RankProgram, unroll};
use crate::sync::lock;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// The most kernels that are kept.
const MAX_KEPT: usize = 1024;

/// Elements of a row that a thread handles at a time.
const UNIT: usize = 8;

/// Why a row cannot be sent.
const TOO_LONG: &str = "give the workspace more bytes (CollectiveOptions::workspace_bytes)";

/// What tells launches apart that need kernels of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Key {
    tokens: usize,
    width: usize,
    dtype: DType,
    eps: u32,
    weight_bias: bool,
    quantization: Option<Quantization>,
    way: Way,
    aligned: bool,
    in_place: bool,
}

/// How a call is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    pub(super) way: Way,
    pub(super) lanes: usize,
    pub(super) threads: usize,
    /// The most rows of a launch.
    pub(super) rows: usize,
}

/// Makes kernels, and keeps those of the calls that were made last.
pub(in crate::collective) struct FusedLaunches {
    rank: Rank,
    kept: Mutex<Recent<Key, Arc<SharedKernel>>>,
    /// By how many bits the rows have: kernels whose code others use too.
    models: Mutex<Recent<(Key, usize, usize), Arc<SharedKernel>>>,
    ways: Mutex<BTreeMap<(usize, usize, usize, bool), Way>>,
}

impl FusedLaunches {
    pub(in crate::collective) fn new(rank: Rank) -> Self {
        Self {
            rank,
            kept: Mutex::new(Recent::new(MAX_KEPT)),
            models: Mutex::new(Recent::new(MAX_KEPT)),
            ways: Mutex::default(),
        }
    }

    /// Launches the kernels of a call that was checked: one for as many rows as there is room for.
    pub(super) fn enqueue(
        &self,
        (machine, workspace): (&Machine, &SharedWorkspace),
        call: &Fused,
        memory: &FusedMemory<'_>,
        (stream, is_recorded): (&Stream, bool),
    ) -> Result<()> {
        let way = self.way(machine, call)?;
        let shape = call.shape(machine, way)?;
        for from in (0..call.tokens).step_by(shape.rows) {
            let rows = shape.rows.min(call.tokens - from);
            let slices = memory.slices(from, rows, call)?;
            let piece = Fused {
                tokens: rows,
                ..*call
            };
            let tensors: Vec<&DeviceSlice> = slices.iter().collect();
            let mut starts = slices.iter().map(DeviceSlice::address);
            let aligned = starts.all(|start| start.is_multiple_of(16));
            let shape = piece.shape(machine, way)?;
            let of = (&piece, &shape);
            let kernel = self.kernel((machine, workspace), of, (aligned, memory.is_in_place()))?;
            kernel.enqueue((stream, is_recorded), &tensors, true)?;
        }
        Ok(())
    }

    /// The way that is fastest by the model, of those that do the call.
    fn way(&self, machine: &Machine, call: &Fused) -> Result<Way> {
        let ways = call.ways();
        if let Some(forced) = machine.forced {
            let way = match forced {
                Algorithm::OneShot => Some(Way::OneShot),
                Algorithm::Direct => Some(Way::Direct),
                _ => None,
            };
            return way.filter(|way| ways.contains(way)).ok_or_else(|| {
                let text = format!("the algorithm {forced} does not do this");
                Error::new(ErrorKind::Unsupported, text).with_help("leave the algorithm open")
            });
        }
        let [first, _, ..] = ways else {
            return Ok(Way::OneShot);
        };
        // Calls of about as many rows go alike.
        let like = Fused {
            tokens: rounded(call.tokens),
            ..*call
        };
        let quantized = call.epilogue.quantization.is_some();
        let key = (like.tokens, call.width, call.dtype.size(), quantized);
        if let Some(known) = lock(&self.ways).get(&key) {
            return Ok(*known);
        }
        let mut best = (f64::INFINITY, *first);
        for &way in ways {
            if let Ok(seconds) = like.seconds(machine, way)
                && seconds < best.0
            {
                best = (seconds, way);
            }
        }
        lock(&self.ways).insert(key, best.1);
        Ok(best.1)
    }

    fn kernel(
        &self,
        (machine, workspace): (&Machine, &SharedWorkspace),
        (call, shape): (&Fused, &Shape),
        (aligned, in_place): (bool, bool),
    ) -> Result<Arc<SharedKernel>> {
        let Epilogue {
            eps,
            weight_bias,
            quantization,
        } = call.epilogue;
        let key = Key {
            tokens: call.tokens,
            width: call.width,
            dtype: call.dtype,
            eps: eps.to_bits(),
            weight_bias,
            quantization,
            way: shape.way,
            aligned,
            in_place,
        };
        if let Some(kept) = lock(&self.kept).get(&key) {
            return Ok(kept.clone());
        }
        let bits = usize::BITS - call.tokens.leading_zeros();
        let form = Key {
            tokens: bits as usize,
            ..key
        };
        let form = (form, shape.lanes, shape.threads);
        let model = lock(&self.models).get(&form).cloned();
        let section = |tokens: usize| -> Result<SectionInstance> {
            let call = Fused { tokens, ..*call };
            let program = call.rank_program(machine, shape, self.rank)?;
            let mut section = section(&program)?;
            section.shared_tensors = in_place;
            section.published = shape.way == Way::Direct;
            Ok(section)
        };
        let mut wanted = CodeWanted {
            section: Arc::new(section(call.tokens)?),
            aligned,
            readying: Readying::WithCode,
            model: model.as_deref(),
            largest: None,
        };
        let tell: Arc<TellDifference> = Arc::new(Fused::difference);
        let made = match workspace.kernel_like(&wanted) {
            Some(made) => Arc::new(made?),
            None => {
                let most = (1 << bits) - 1;
                wanted.largest = (most > call.tokens).then(|| section(most).ok()).flatten();
                let made = Arc::new(workspace.kernel(&wanted, tell)?);
                drop(lock(&self.models).insert(form, made.clone()));
                made
            }
        };
        // Dropped without the lock.
        let before = lock(&self.kept).insert(key, made.clone());
        drop(before);
        Ok(made)
    }
}

impl Fused {
    /// Lanes, threads and rows of a launch.
    pub(super) fn shape(&self, machine: &Machine, way: Way) -> Result<Shape> {
        let row = part(self.width, 1);
        let too_long = || {
            let text = format!(
                "a row of {} elements has no room in the workspace",
                self.width
            );
            Error::new(ErrorKind::Unsupported, text).with_help(TOO_LONG)
        };
        let world = machine.world;
        let (rows, wanted, most) = match way {
            Way::OneShot => {
                let room = machine.packet_bytes / self.dtype.size();
                let rows = room / ((world - 1).max(1) * row);
                (rows.min(self.tokens), self.tokens, machine.most_lanes)
            }
            Way::Direct => {
                let room = machine.plain_bytes / self.dtype.size() / (world * row);
                let groups = self.tokens.div_ceil(world);
                let most = room.min(machine.most_lanes);
                (if room == 0 { 0 } else { self.tokens }, groups, most)
            }
        };
        if rows == 0 {
            return Err(too_long());
        }
        Ok(Shape {
            way,
            lanes: machine.lanes(wanted.min(rows), most),
            threads: machine.threads(self.width.div_ceil(UNIT)),
            rows,
        })
    }

    /// Seconds by the model, where memory is reached.
    fn seconds(&self, machine: &Machine, way: Way) -> Result<f64> {
        let shape = self.shape(machine, way)?;
        let call = Self {
            tokens: shape.rows,
            ..*self
        };
        let programs = (0..machine.world).map(|rank| call.rank_program(machine, &shape, rank));
        let programs: Vec<RankProgram> = programs.collect::<Result<_>>()?;
        let pieces = self.tokens.div_ceil(shape.rows) as f64;
        Ok(machine.estimates.seconds(&programs)? * pieces)
    }

    pub(super) fn rank_program(
        &self,
        machine: &Machine,
        shape: &Shape,
        rank: Rank,
    ) -> Result<RankProgram> {
        let parameters = self.parameters(machine, shape);
        let program = self.program(shape.way)?;
        unroll(&program, rank, machine.world, 1, &parameters)
    }

    pub(super) fn parameters(&self, machine: &Machine, shape: &Shape) -> Parameters {
        let bytes = match shape.way {
            Way::OneShot => machine.packet_bytes,
            Way::Direct => machine.plain_bytes,
        };
        let words = self.words(shape.way).map(|word| i64::from(word as i32));
        let [what, length, upper, factor] = words;
        let mut parameters = Parameters::new().with("T", self.dtype);
        for (name, value) in [
            ("tokens", self.tokens as i64),
            ("n", self.width as i64),
            ("room", (bytes / self.dtype.size()) as i64),
            ("lanes", shape.lanes as i64 + 1),
            ("threads", shape.threads as i64),
            ("what", what),
            ("length", length),
            ("upper", upper),
            ("factor", factor),
        ] {
            parameters.insert(name, value);
        }
        parameters
    }
}
