//! Hardware model of a machine: a JSON file of measured rates, latencies and times.
//!
//! `warplink tune` writes such a file. Units are seconds, bytes, and bytes per second, whatever the field; sizes are
//! those of one rank.

use super::collective::Collectives;
use super::curve::Curve;
use super::fields::{MAX_COUNT, MAX_RATIO, check, check_rates, check_seconds};
use super::gemm::{Gemm, Grid};
use super::lanes::{BLOCK_THREADS, Lanes};
#[cfg(doc)]
use crate::error::ErrorKind;
use crate::error::{Error, Result};
use crate::p2p::TransferKernels;
use serde::{Deserialize, Serialize};

/// Version of the file's format.
pub const FORMAT: u32 = 1;

/// A machine as the simulation sees it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct HardwareModel {
    /// Version of the format, [`FORMAT`].
    pub format: u32,
    /// Human-readable name.
    pub name: String,
    /// Devices that it describes.
    pub device: DeviceMatch,
    /// Origin of the figures.
    pub source: Provenance,
    /// Uncertainty of estimates, as a factor: a program estimated at up to this multiple of another's time may be as
    /// fast. At least 1; with 1, estimates alone decide.
    pub uncertainty: f64,
    /// Memory of a device, and memory-bound kernels.
    pub memory: Memory,
    /// Matrix multiplications.
    pub gemm: Gemm,
    /// Transfers between devices.
    pub link: Link,
    /// Latencies between operations.
    pub latency: Latency,
    /// Time that the host takes to enqueue.
    pub host: Host,
    /// Slowdown of concurrent work, beyond that of shared resources.
    pub interference: Interference,
    /// Collectives of the engine.
    pub collectives: Collectives,
    /// Performance of lanes of kernel sections; if a file lacks it, it is estimated from the other figures
    /// ([`HardwareModel::lanes`]).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lanes: Option<Lanes>,
    /// Measured fastest algorithms of the library's own collectives; without measurements, estimates decide.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub algorithms: Vec<Algorithms>,
}

/// Devices that a model describes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DeviceMatch {
    /// Kind of device, as [`DeviceKind`](crate::device::DeviceKind) is printed.
    pub kind: String,
    /// Model name that the device reports, which tells form factors, memory sizes and slices apart; empty if unknown.
    pub model: String,
    /// Number of ranks that were measured together.
    pub ranks: usize,
    /// Connection of the devices, for readers of the file.
    pub topology: String,
    /// Multiprocessors of a device; processors of the machine if ranks share them.
    pub multiprocessors: usize,
    /// Rate of its links to peers in bytes per second and direction, as the device reports it; 0 if unknown.
    #[serde(default)]
    pub link_rate: f64,
    /// Whether all ranks share the same multiprocessors and memory, like processes of one machine.
    pub shared: bool,
}

/// Origin of a model's figures.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Provenance {
    /// Measured machine.
    pub machine: String,
    /// Date, as year-month-day.
    pub date: String,
    /// Command that measured it.
    pub command: String,
    /// Further notes, such as which figures are estimates and their basis.
    pub notes: String,
}

/// Memory of a device.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Memory {
    /// Bytes read and written per second by all work together.
    pub rate: f64,
    /// Bytes read and written per second by a sum.
    pub sum_rate: f64,
    /// Seconds of an empty kernel, one of many in a row on one stream.
    pub kernel: f64,
    /// Seconds of a copy within the memory, by bytes.
    pub copy: Curve,
    /// Share of the multiprocessors that a copy, within memory or between devices, occupies.
    pub copy_occupancy: f64,
    /// Share of the multiprocessors that a sum occupies.
    pub sum_occupancy: f64,
}

/// Transfers between two devices.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Link {
    /// Largest transfer in bytes that one kernel of one block performs, including waits and signals, concurrently
    /// with matmuls.
    pub kernel_limit: u64,
    /// Seconds of a put by a kernel, by bytes, one of many in a row on one stream.
    pub kernel_put: Curve,
    /// Seconds of a get by a kernel.
    pub kernel_get: Curve,
    /// Transfers performed by kernels at both ends if multiprocessors are free, and their parameters.
    #[serde(default)]
    pub kernels: TransferKernels,
    /// Seconds of a put by these kernels, one way, including signals.
    #[serde(default)]
    pub kernels_put: Curve,
    /// Seconds of a get by these kernels, one way, including signals.
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
    /// For a multiplication that stores its result to the memory of peers, the share of its own time that the stores
    /// do not hide.
    pub stored_exposed: f64,
}

/// Fastest algorithms of the library's own collectives.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Algorithms {
    /// The collective, such as `all_reduce`.
    pub collective: String,
    /// Number of ranks that took part.
    pub world: usize,
    /// Size in bytes of the measured elements; the limits apply to that size only. Files without it were measured
    /// with 2 for reducing collectives, and 1 for those that only move bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub element_bytes: Option<usize>,
    /// Pairs of an upper limit on the bytes of a part ([`Call::bytes`](crate::collective::Call::bytes)) and the
    /// fastest algorithm up to it, in order of bytes. Larger sizes are estimated.
    pub limits: Vec<(u64, String)>,
}

/// Latencies between operations, in seconds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Latency {
    /// One end of a signal in a stream: a write of a word, or a wait for one that is already set.
    pub word: f64,
    /// Each further word written or waited for by the same operation.
    pub more_words: f64,
    /// A write of a word, or a wait for one, inside a kernel.
    pub kernel_word: f64,
    /// Smallest number of simultaneous word operations that a kernel performs, on the caller's stream.
    pub words_in_kernel: usize,
    /// From a point of one stream to the work that waits for it on another stream of the rank.
    pub event: f64,
    /// From a copy, a word or an event to the start of the next kernel on the stream.
    pub launch: f64,
    /// Wait of a kernel for a free multiprocessor while a multiplication runs.
    pub room: f64,
    /// Additional time of a transfer by the copy engine as a graph node.
    pub captured_copy: f64,
    /// Additional time of a collective alone, compared with one of many in a row.
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

/// Relative speed of work concurrent with other work on the same rank; 1 for no slowdown.
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
    /// Parameters of transfer kernels.
    pub fn transfer_kernels(&self) -> TransferKernels {
        TransferKernels {
            one_block_limit: self.kernel_limit,
            ..self.kernels.clone()
        }
    }
}

impl HardwareModel {
    /// Performance of lanes of kernel sections. Without measurements, half of the smallest transfer by kernels is
    /// attributed to their launch, and the other half to the latency of a packet or signal; a load takes half of
    /// that, and a round of packets a quarter. A block is assumed to store and load at peers as the one-block kernel
    /// does between its two largest sizes, and to share its own memory evenly with blocks on the other
    /// multiprocessors; all lanes together are assumed to be as fast as the copy engine in a ring.
    pub fn lanes(&self) -> Lanes {
        self.lanes.clone().unwrap_or_else(|| self.guessed_lanes())
    }

    /// Estimate from the other figures: see [`Self::lanes`].
    fn guessed_lanes(&self) -> Lanes {
        let (link, latency) = (&self.link, &self.latency);
        let smallest = [&link.kernels_put, &link.kernel_put];
        let smallest = smallest.iter().find_map(|curve| curve.0.first());
        // The smallest transfer is two ways: a signal that the buffer is free, and the data with its own signal.
        let both = smallest.map_or(2.0 * latency.word, |(_, seconds)| *seconds);
        let way = both / 2.0;
        let slope = |points: &[(u64, f64)]| match points {
            // The slope at the end of the curve is free of latency. Measured times may fall with size, by noise.
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

    /// The measured fastest algorithm for a collective of `world` ranks with parts of `bytes` bytes and elements of
    /// `element` bytes; files that do not specify their element size were measured with `unsaid`.
    pub(crate) fn algorithm(
        &self,
        collective: &str,
        world: usize,
        (element, unsaid): (usize, usize),
        bytes: usize,
    ) -> Option<&str> {
        let of_call = |one: &&Algorithms| {
            let measured = one.element_bytes.unwrap_or(unsaid);
            // Exact matches only: thresholds of another world size or element do not carry over.
            (one.collective.as_str(), one.world, measured) == (collective, world, element)
        };
        let limits = &self.algorithms.iter().find(of_call)?.limits;
        let found = limits.iter().find(|(limit, _)| bytes as u64 <= *limit);
        found.map(|(_, name)| name.as_str())
    }

    /// Reduces the model to the parts that determine the time of kernel sections.
    pub(crate) fn of_kernels(&self) -> Self {
        Self {
            lanes: Some(self.lanes()),
            source: Provenance::default(),
            gemm: Gemm {
                // The largest parts of a model, which kernels do not use.
                grids: Vec::new(),
                ..self.gemm.clone()
            },
            collectives: Collectives::default(),
            ..self.clone()
        }
    }

    /// Parses a model.
    ///
    /// # Errors
    /// [`ErrorKind::Parse`] for text that is not a model of this format, and for figures out of range.
    pub fn from_json(text: &str) -> Result<Self> {
        Self::from_named("the text", text)
    }

    /// Parses a model; errors refer to the text by `name`.
    pub(super) fn from_named(name: &str, text: &str) -> Result<Self> {
        let model: Self = serde_json::from_str(text).map_err(|error| {
            let message = format!("{name} is not a hardware model: {error}");
            Error::parse(message).with_help("measure one with `warplink tune`")
        })?;
        let operation = || format!("read the hardware model '{}' from {name}", model.name);
        model
            .check()
            .map_err(|error| error.with_operation(operation()))?;
        Ok(model)
    }

    /// Serializes it for [`from_json`](Self::from_json).
    ///
    /// # Errors
    /// [`ErrorKind::Internal`] if it cannot be written as JSON.
    pub fn to_json(&self) -> Result<String> {
        serde_json::to_string(self).map_err(|error| Error::internal(error.to_string()))
    }

    /// Fails if a figure is out of range.
    fn check(&self) -> Result<()> {
        if self.format != FORMAT {
            return Err(
                Error::parse(format!("format {}; expected {FORMAT}", self.format))
                    .with_help("measure the machine again with `warplink tune`"),
            );
        }
        let uncertainty = [("uncertainty", self.uncertainty)];
        check(
            &uncertainty,
            1.0..=MAX_RATIO,
            &format!("1 to {MAX_RATIO:e}"),
        )?;
        let gemm = &self.gemm;
        gemm.grids.iter().try_for_each(Grid::check)?;
        self.collectives.check()?;
        let shares = [
            ("gemm.tail_filled", gemm.tail_filled),
            ("memory.copy_occupancy", self.memory.copy_occupancy),
            ("memory.sum_occupancy", self.memory.sum_occupancy),
            ("link.stored_exposed", self.link.stored_exposed),
        ];
        check(&shares, 0.0..=1.0, "0 to 1")?;
        let counts = [
            ("gemm.tile_sharers", gemm.tile_sharers),
            ("device.multiprocessors", self.device.multiprocessors as f64),
            ("device.ranks", self.device.ranks as f64),
        ];
        check(&counts, 1.0..=MAX_COUNT, &format!("1 to {MAX_COUNT:e}"))?;
        let rate = [("device.link_rate", self.device.link_rate)];
        check(&rate, 0.0..=1e18, "0 to 1e18 bytes a second")?;
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
                return Err(Error::parse(text));
            }
        }
        let (link, latency, host) = (&self.link, &self.latency, &self.host);
        let beside = &self.interference;
        check_rates(&[
            ("memory.rate", self.memory.rate),
            ("memory.sum_rate", self.memory.sum_rate),
            ("link.put_ring", link.put_ring),
            ("link.get_ring", link.get_ring),
            ("link.put_rotated", link.put_rotated),
            ("link.get_rotated", link.get_rotated),
            ("link.stored", link.stored),
        ])?;
        let speeds = [
            ("interference.matmul_beside_put", beside.matmul_beside_put),
            ("interference.matmul_beside_get", beside.matmul_beside_get),
            ("interference.copy_beside_matmul", beside.copy_beside_matmul),
        ];
        let least = 1.0 / MAX_RATIO;
        check(
            &speeds,
            least..=MAX_RATIO,
            &format!("{least:e} to {MAX_RATIO:e}"),
        )?;
        check_seconds(&[
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
        ])
    }
}
