//! What a machine can do: a JSON file of measured rates, latencies and times.
//!
//! `warplink tune` writes such a file. Units are seconds, bytes, and bytes per second, whatever the
//! field; sizes are those of one rank.

use super::collective::Collectives;
use super::curve::Curve;
use super::fields::{
    MAX_COUNT, MAX_RATIO, MAX_SECONDS, RATES, refused, refused_rate, refused_seconds,
};
use super::gemm::{Gemm, Grid};
use super::lanes::{BLOCK_THREADS, Lanes};
use crate::error::{Error, ErrorKind, Result};
use crate::p2p::TransferKernels;
use serde::{Deserialize, Serialize};

/// The version of the file's format.
pub const FORMAT: u32 = 1;

/// A machine as the simulation sees it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct HardwareModel {
    /// The version of the format, [`FORMAT`].
    pub format: u32,
    /// Its name, for people.
    pub name: String,
    /// Which devices it describes.
    pub device: DeviceMatch,
    /// Where the figures come from.
    pub source: Source,
    /// How far estimates may be off: a program that is estimated at up to this multiple of another's
    /// time may be as fast. At least 1; with 1, estimates alone decide.
    pub uncertainty: f64,
    /// Memory of a device, and kernels that are bound by it.
    pub memory: Memory,
    /// Matrix multiplications.
    pub gemm: Gemm,
    /// Transfers between devices.
    pub link: Link,
    /// What passes between operations.
    pub latency: Latency,
    /// Time that the host takes to enqueue.
    pub host: Host,
    /// How much slower work is beside other work, beyond what shared resources explain.
    pub interference: Interference,
    /// The collectives of the engine.
    pub collectives: Collectives,
    /// What lanes of kernel sections can do; where a file does not say, it is guessed from the other figures
    /// ([`HardwareModel::lanes`]).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lanes: Option<Lanes>,
    /// Which algorithms of the library's own collectives were fastest, where that was measured; else estimates decide.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub algorithms: Vec<Algorithms>,
}

/// Which devices a model describes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DeviceMatch {
    /// The kind of device, as [`DeviceKind`](crate::device::DeviceKind) is printed.
    pub kind: String,
    /// The device's model: a part of what the device says about itself. Empty for any.
    pub model: String,
    /// How many ranks were measured together.
    pub ranks: usize,
    /// How the devices are connected, for people.
    pub topology: String,
    /// Multiprocessors of a device; processors of the machine where ranks share them.
    pub multiprocessors: usize,
    /// Whether all ranks share the same multiprocessors and memory, as processes of one machine do.
    pub shared: bool,
}

/// Where a model's figures come from.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Source {
    /// The machine.
    pub machine: String,
    /// When, as year-month-day.
    pub date: String,
    /// By which command.
    pub command: String,
    /// What else to know: what is guessed, and from what.
    pub notes: String,
}

/// Memory of a device.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Memory {
    /// Bytes read and written per second by everything together.
    pub rate: f64,
    /// Bytes read and written per second by a sum.
    pub sum_rate: f64,
    /// Seconds of a kernel that does nothing, one of many in a row on one stream.
    pub kernel: f64,
    /// Seconds of a copy within the memory, by its bytes.
    pub copy: Curve,
    /// The share of the multiprocessors that a copy, within memory or between devices, keeps busy.
    pub copy_occupancy: f64,
    /// The share of the multiprocessors that a sum keeps busy.
    pub sum_occupancy: f64,
}

/// Transfers between two devices.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Link {
    /// Up to this number of bytes, a transfer beside matmuls is done by one kernel of one block, with its waits and
    /// signals.
    pub kernel_limit: u64,
    /// Seconds of a put by a kernel, by bytes, one of many in a row on one stream.
    pub kernel_put: Curve,
    /// Seconds of a get by a kernel.
    pub kernel_get: Curve,
    /// Where multiprocessors are free: which transfers kernels do, and how.
    #[serde(default)]
    pub kernels: TransferKernels,
    /// Seconds of a put by these kernels, one way, signals included.
    #[serde(default)]
    pub kernels_put: Curve,
    /// Seconds of a get by these kernels, one way, signals included.
    #[serde(default)]
    pub kernels_get: Curve,
    /// Seconds of a put by the copy engine, alone on the link.
    pub put: Curve,
    /// Seconds of a get by the copy engine.
    pub get: Curve,
    /// Rate at which every rank puts to one neighbour, all ranks at once.
    pub put_ring: f64,
    /// Rate at which every rank gets from one neighbour, all ranks at once.
    pub get_ring: f64,
    /// Rate at which every rank puts to the others in turn, all ranks at once.
    pub put_rotated: f64,
    /// Rate at which every rank gets from the others in turn, all ranks at once.
    pub get_rotated: f64,
    /// Rate at which a multiplication stores its result into the memory of peers.
    pub stored: f64,
    /// Of a multiplication whose result is stored into the memory of peers, the share of its own
    /// time that is not hidden behind the stores.
    pub stored_exposed: f64,
}

/// Which algorithms of the library's own collectives are fastest.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Algorithms {
    /// The collective, such as `all_reduce`.
    pub collective: String,
    /// How many ranks took part.
    pub world: usize,
    /// Bytes of the elements that were measured, for which alone it holds. Files without it have measured 2 where the
    /// collective reduces, and 1 where it only moves bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub element_bytes: Option<usize>,
    /// Pairs of a number of bytes of a part ([`Call::bytes`](crate::collective::Call::bytes)) and the name of the
    /// algorithm up to there, in order of bytes. What is longer is estimated.
    pub limits: Vec<(u64, String)>,
}

/// What passes between operations.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Latency {
    /// A write of a word, or a wait for one that is already there, in a stream: one end of a signal.
    pub word: f64,
    /// Each further word that is written or waited for by the same operation.
    pub more_words: f64,
    /// A write of a word, or a wait for one, inside a kernel.
    pub kernel_word: f64,
    /// From this number on, operations on words at once are done by a kernel, on the caller's stream.
    pub words_in_kernel: usize,
    /// From a point of one stream to what waits for it on another of the same rank.
    pub event: f64,
    /// From a copy, a word or an event to the start of a kernel behind it on the stream.
    pub launch: f64,
    /// The wait of a kernel for room on the multiprocessors beside a multiplication.
    pub room: f64,
    /// How much longer a transfer by the copy engine takes as a node of a graph.
    pub captured_copy: f64,
    /// How much longer a collective takes alone than as one of many in a row.
    pub collective: f64,
}

/// Seconds that the host takes to enqueue an operation.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Host {
    /// A matrix multiplication.
    pub matmul: f64,
    /// A sum.
    pub sum: f64,
    /// A copy within the memory.
    pub copy: f64,
    /// A transfer that this rank moves, with its waits and signals.
    pub transfer: f64,
    /// A transfer that the peer moves, or a wait.
    pub word: f64,
    /// The record of an event, or a stream's wait for one.
    pub event: f64,
    /// A collective of the engine.
    pub collective: f64,
    /// The launch of a graph.
    pub graph: f64,
}

/// Speed of work beside other work on the same rank, over its speed alone: 1 where it is as fast.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Interference {
    /// A multiplication while a put leaves or arrives.
    pub matmul_beside_put: f64,
    /// A multiplication while a get leaves or arrives.
    pub matmul_beside_get: f64,
    /// A put or get while a multiplication runs at either end.
    pub copy_beside_matmul: f64,
}

impl Default for Interference {
    fn default() -> Self {
        Self {
            matmul_beside_put: 1.0,
            matmul_beside_get: 1.0,
            copy_beside_matmul: 1.0,
        }
    }
}

impl Link {
    /// What transfers are to know of kernels.
    pub fn transfer_kernels(&self) -> TransferKernels {
        TransferKernels {
            one_block_limit: self.kernel_limit,
            ..self.kernels.clone()
        }
    }
}

impl HardwareModel {
    /// What lanes of kernel sections can do. Where it was not measured, half of the smallest transfer by kernels is
    /// taken for their launch and the other half for the way of a packet or a signal; a load for half of that, and a
    /// round of packets for a quarter. A block is taken to store and load at peers as the kernel of one block does
    /// between its two largest sizes, and to share its own memory evenly with those on the other multiprocessors; all
    /// lanes together, to be as fast as the copy engine in a ring.
    pub fn lanes(&self) -> Lanes {
        self.lanes.clone().unwrap_or_else(|| self.guessed_lanes())
    }

    /// A guess of what lanes can do, from the other figures: see [`Self::lanes`].
    fn guessed_lanes(&self) -> Lanes {
        let (link, latency) = (&self.link, &self.latency);
        let smallest = [&link.kernels_put, &link.kernel_put];
        let smallest = smallest.iter().find_map(|curve| curve.0.first());
        let both = smallest.map_or(2.0 * latency.word, |(_, seconds)| *seconds);
        let way = both / 2.0;
        let slope = |points: &[(u64, f64)]| match points {
            [.., (less, sooner), (more, later)] if later > sooner => {
                Some((more - less) as f64 / (later - sooner))
            }
            _ => None,
        };
        let of_block = |curve: &Curve, all: f64| slope(&curve.0).map_or(all, |rate| rate.min(all));
        let shared = self.device.shared;
        Lanes {
            launch: if shared { self.memory.kernel } else { way },
            signal: way,
            fence: way / 2.0,
            packet: way,
            packet_round: if shared { 0.0 } else { way / 4.0 },
            load: if shared { 0.0 } else { way / 2.0 },
            peer_load: if shared { 0.0 } else { way },
            block_threads: BLOCK_THREADS,
            block_own: self.memory.rate / self.device.multiprocessors as f64,
            block_stored: of_block(&link.kernel_put, link.put_ring),
            block_loaded: of_block(&link.kernel_get, link.get_ring),
            stored: link.put_ring,
            loaded: link.get_ring,
        }
    }

    /// The algorithm that was measured to be fastest for a collective of `world` ranks, of which a part has `bytes`
    /// bytes, in elements of `element`; files that do not say what they measured have measured `unsaid`.
    pub(crate) fn algorithm(
        &self,
        collective: &str,
        world: usize,
        (element, unsaid): (usize, usize),
        bytes: usize,
    ) -> Option<&str> {
        let of_call = |one: &&Algorithms| {
            let measured = one.element_bytes.unwrap_or(unsaid);
            (one.collective.as_str(), one.world, measured) == (collective, world, element)
        };
        let limits = &self.algorithms.iter().find(of_call)?.limits;
        let found = limits.iter().find(|(limit, _)| bytes as u64 <= *limit);
        found.map(|(_, name)| name.as_str())
    }

    /// What the time of kernel sections depends on.
    pub(crate) fn of_kernels(&self) -> Self {
        Self {
            lanes: Some(self.lanes()),
            source: Source::default(),
            gemm: Gemm {
                grids: Vec::new(),
                ..self.gemm.clone()
            },
            collectives: Collectives::default(),
            ..self.clone()
        }
    }

    /// Reads a model.
    ///
    /// # Errors
    /// [`ErrorKind::Parse`] for text that is not a model of this format, and for figures that cannot be.
    pub fn from_json(text: &str) -> Result<Self> {
        Self::from_named("the text", text)
    }

    /// The same, where errors call the text by a name.
    pub(super) fn from_named(name: &str, text: &str) -> Result<Self> {
        let model: Self = serde_json::from_str(text).map_err(|error| {
            let message = format!("{name} is not a hardware model: {error}");
            Error::new(ErrorKind::Parse, message).with_help("measure one with `warplink tune`")
        })?;
        let operation = || format!("read the hardware model '{}' from {name}", model.name);
        model
            .check()
            .map_err(|error| error.with_operation(operation()))?;
        Ok(model)
    }

    /// Writes it, to be read by [`from_json`](Self::from_json).
    ///
    /// # Errors
    /// [`ErrorKind::Internal`] where it cannot be written as JSON.
    pub fn to_json(&self) -> Result<String> {
        serde_json::to_string(self)
            .map_err(|error| Error::new(ErrorKind::Internal, error.to_string()))
    }

    /// Fails unless every figure can be.
    fn check(&self) -> Result<()> {
        if self.format != FORMAT {
            return Err(Error::new(
                ErrorKind::Parse,
                format!("format {}; expected {FORMAT}", self.format),
            )
            .with_help("measure the machine again with `warplink tune`"));
        }
        if !(1.0..=MAX_RATIO).contains(&self.uncertainty) {
            let expected = format!("1 to {MAX_RATIO:e}");
            return Err(refused("uncertainty", self.uncertainty, &expected));
        }
        let gemm = &self.gemm;
        gemm.grids.iter().try_for_each(Grid::check)?;
        self.collectives.check()?;
        for (name, share) in [
            ("gemm.tail_filled", gemm.tail_filled),
            ("memory.copy_occupancy", self.memory.copy_occupancy),
            ("memory.sum_occupancy", self.memory.sum_occupancy),
            ("link.stored_exposed", self.link.stored_exposed),
        ] {
            if !(0.0..=1.0).contains(&share) {
                return Err(refused(name, share, "0 to 1"));
            }
        }
        for (name, count) in [
            ("gemm.tile_sharers", gemm.tile_sharers),
            ("device.multiprocessors", self.device.multiprocessors as f64),
            ("device.ranks", self.device.ranks as f64),
        ] {
            if !(1.0..=MAX_COUNT).contains(&count) {
                return Err(refused(name, count, &format!("1 to {MAX_COUNT:e}")));
            }
        }
        for (name, curve) in [
            ("memory.copy", &self.memory.copy),
            ("link.kernel_put", &self.link.kernel_put),
            ("link.kernel_get", &self.link.kernel_get),
            ("link.kernels_put", &self.link.kernels_put),
            ("link.kernels_get", &self.link.kernels_get),
            ("link.put", &self.link.put),
            ("link.get", &self.link.get),
        ] {
            curve.check(name)?;
        }
        self.lanes.iter().try_for_each(Lanes::check)?;
        for measured in &self.algorithms {
            if !measured.limits.windows(2).all(|pair| pair[0].0 < pair[1].0) {
                let text = format!(
                    "the limits of '{}' are not in order; expected rising sizes",
                    measured.collective
                );
                return Err(Error::new(ErrorKind::Parse, text));
            }
        }
        let (link, latency, host) = (&self.link, &self.latency, &self.host);
        let beside = &self.interference;
        for (name, rate) in [
            ("memory.rate", self.memory.rate),
            ("memory.sum_rate", self.memory.sum_rate),
            ("link.put_ring", link.put_ring),
            ("link.get_ring", link.get_ring),
            ("link.put_rotated", link.put_rotated),
            ("link.get_rotated", link.get_rotated),
            ("link.stored", link.stored),
        ] {
            if !RATES.contains(&rate) {
                return Err(refused_rate(name, rate));
            }
        }
        for (name, speed) in [
            ("interference.matmul_beside_put", beside.matmul_beside_put),
            ("interference.matmul_beside_get", beside.matmul_beside_get),
            ("interference.copy_beside_matmul", beside.copy_beside_matmul),
        ] {
            if !(1.0 / MAX_RATIO..=MAX_RATIO).contains(&speed) {
                let expected = format!("{:e} to {MAX_RATIO:e}", 1.0 / MAX_RATIO);
                return Err(refused(name, speed, &expected));
            }
        }
        for (name, seconds) in [
            ("memory.kernel", self.memory.kernel),
            ("latency.word", latency.word),
            ("latency.more_words", latency.more_words),
            ("latency.kernel_word", latency.kernel_word),
            ("latency.event", latency.event),
            ("latency.launch", latency.launch),
            ("latency.room", latency.room),
            ("latency.captured_copy", latency.captured_copy),
            ("latency.collective", latency.collective),
            ("host.matmul", host.matmul),
            ("host.sum", host.sum),
            ("host.copy", host.copy),
            ("host.transfer", host.transfer),
            ("host.word", host.word),
            ("host.event", host.event),
            ("host.collective", host.collective),
            ("host.graph", host.graph),
        ] {
            if !(0.0..=MAX_SECONDS).contains(&seconds) {
                return Err(refused_seconds(name, seconds));
            }
        }
        Ok(())
    }
}
