//! What lanes of kernel sections can do: the part of a hardware model by which a launch is simulated step by step.

use super::fields::{MAX_SECONDS, RATES, refused, refused_rate, refused_seconds};
use crate::error::Result;
use serde::{Deserialize, Serialize};

/// Threads with which a block moves data as fast as with more, where a model does not say.
pub(super) const BLOCK_THREADS: usize = 512;

/// What lanes can do: blocks of a launch, or threads of the host where ranks share processors.
///
/// Rates of a block are those of one block alone, and those of all lanes what they reach together while all ranks do
/// the same. Where ranks share processors, a lane counts as one thread, whatever its section says.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Lanes {
    /// Seconds of a launch whose lanes do nothing, one of many in a graph.
    pub launch: f64,
    /// Seconds from a signal of a lane to the end of a peer's wait for it.
    pub signal: f64,
    /// Seconds that a signal takes longer where the lane has stored at peers before it: what was stored has to arrive
    /// first.
    pub fence: f64,
    /// Seconds from when a lane starts to put one packet to when the peer has read it.
    pub packet: f64,
    /// Seconds of a round, in which each thread puts, or reads, one packet of many; of a step, at least one.
    pub packet_round: f64,
    /// Seconds until what a lane loads from its own memory is there.
    pub load: f64,
    /// Seconds until what a lane loads from a peer's memory is there.
    pub peer_load: f64,
    /// Threads with which a block moves plain data as fast as with more; with fewer it is slower in proportion.
    pub block_threads: usize,
    /// Bytes per second that a block loads from its own memory, or stores there.
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
        if self.block_threads == 0 {
            return Err(refused("lanes.block_threads", 0.0, "1 or more"));
        }
        for (name, rate) in [
            ("lanes.block_own", self.block_own),
            ("lanes.block_stored", self.block_stored),
            ("lanes.block_loaded", self.block_loaded),
            ("lanes.stored", self.stored),
            ("lanes.loaded", self.loaded),
        ] {
            if !RATES.contains(&rate) {
                return Err(refused_rate(name, rate));
            }
        }
        for (name, seconds) in [
            ("lanes.launch", self.launch),
            ("lanes.signal", self.signal),
            ("lanes.fence", self.fence),
            ("lanes.packet", self.packet),
            ("lanes.packet_round", self.packet_round),
            ("lanes.load", self.load),
            ("lanes.peer_load", self.peer_load),
        ] {
            if !(0.0..=MAX_SECONDS).contains(&seconds) {
                return Err(refused_seconds(name, seconds));
            }
        }
        Ok(())
    }
}
