//! Lane figures of a hardware model, for the step-by-step simulation of kernel launches.

use super::fields::{check, check_rates, check_seconds};
use crate::error::Result;
use serde::{Deserialize, Serialize};

/// Default for the threads at which a block reaches its full copy rate.
pub(super) const BLOCK_THREADS: usize = 512;

/// Performance of lanes: blocks of a launch, or threads of the host if ranks share processors.
///
/// Rates of a block are those of a single block; rates of all lanes are what they reach together while all ranks do
/// the same. If ranks share processors, a lane counts as one thread, whatever its section specifies.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Lanes {
    /// Seconds of a launch with empty lanes, one of many in a graph.
    pub launch: f64,
    /// Seconds from a signal of a lane to the end of a peer's wait for it.
    pub signal: f64,
    /// Additional seconds of a signal if the lane has stored at peers before it: the fence waits for these stores to
    /// arrive.
    pub fence: f64,
    /// Seconds from the start of a lane's store of one packet until the peer has read it.
    pub packet: f64,
    /// Seconds of a round, in which each thread stores or reads one of many packets; a step takes at least one round.
    pub packet_round: f64,
    /// Latency in seconds of a load from the lane's own memory.
    pub load: f64,
    /// Latency in seconds of a load from a peer's memory.
    pub peer_load: f64,
    /// Threads at which a block reaches its full copy rate for plain data; with fewer, the rate is proportional.
    pub block_threads: usize,
    /// Bytes per second that a block loads from its own memory, or stores to it.
    pub block_own: f64,
    /// Bytes per second that a block stores at peers.
    pub block_stored: f64,
    /// Bytes per second that a block loads from peers.
    pub block_loaded: f64,
    /// Bytes per second that all lanes of a rank store at peers.
    pub stored: f64,
    /// Bytes per second that all lanes of a rank load from peers.
    pub loaded: f64,
}

impl Lanes {
    pub(super) fn check(&self) -> Result<()> {
        let threads = [("lanes.block_threads", self.block_threads as f64)];
        check(&threads, 1.0..=f64::INFINITY, "1 or more")?;
        check_rates(&[
            ("lanes.block_own", self.block_own),
            ("lanes.block_stored", self.block_stored),
            ("lanes.block_loaded", self.block_loaded),
            ("lanes.stored", self.stored),
            ("lanes.loaded", self.loaded),
        ])?;
        check_seconds(&[
            ("lanes.launch", self.launch),
            ("lanes.signal", self.signal),
            ("lanes.fence", self.fence),
            ("lanes.packet", self.packet),
            ("lanes.packet_round", self.packet_round),
            ("lanes.load", self.load),
            ("lanes.peer_load", self.peer_load),
        ])
    }
}
