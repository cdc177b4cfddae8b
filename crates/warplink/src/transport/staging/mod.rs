//! The network for memory that it does not reach: through chunks of staging memory at both ends.
//!
//! What leaves the device's memory is copied to a chunk of an outgoing ring, put to the chunk of the same number
//! in the peer's incoming ring, and copied by the peer's host from there to where it belongs. So every chunk
//! carries a *message*, whose header says what it is.
//!
//! # What holds
//! 1. Messages are taken in their order, each once, and what they ask for is done in one stream. So a signal
//!    becomes visible after all that was put before it.
//! 2. A chunk is written again when the peer has said that it consumed it: that its copy is done. So no end runs
//!    more than a ring ahead, and what was consumed is in the peer's memory.
//! 3. Consuming depends on nothing that the peer does: what a *get* asks for is sent later, and how many are asked
//!    for at a time is limited. So two ends with full rings go on.
//! 4. Everything that comes from the peer is checked. What does not follow the protocol ends the communicator with
//!    an error that names the peer.
//! 5. An end that is gone takes messages until the peer's end is gone too, so that the peer's puts end.
//! 6. What the network's library reaches by itself goes past the rings (`direct`), ordered with the messages all the same.
//!
//! ```text
//! control memory, written by the peer:   arrived, gone, consumed     a word each
//!                                        headers                     64 bytes for each chunk
//! incoming ring, written by the peer:    chunks
//! ```

mod carrier;
mod direct;
mod end;
#[cfg(test)]
#[cfg(not(loom))]
mod end_tests;
mod message;
mod service;
mod state;

pub(crate) use carrier::StagedCarrier;
pub(super) use end::StagedEnd;
pub(super) use service::Service;

use crate::device::network::DeviceAccess;
use crate::device::{Device, StagingMemory};
use crate::error::{Error, Result};
use message::malformed;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Limits of what a peer may offer, and of what is configured.
const CHUNK_BYTES: std::ops::RangeInclusive<u64> = 64..=64 << 20;
const CHUNKS: std::ops::RangeInclusive<u64> = 2..=1024;
const MAX_RING_BYTES: u64 = 256 << 20;

/// Where the words of the control memory lie.
const ARRIVED: usize = 0;
pub(super) const GONE: usize = 8;
const CONSUMED: usize = 16;
const HEADERS: usize = 64;
const HEADER_BYTES: usize = 64;

/// How connections over the network go where it does not reach the device's memory: through staging memory of
/// the host, in chunks. Each end has two rings of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StagingConfig {
    /// Bytes of a chunk: a multiple of 64, from 64 to 64 MiB.
    pub chunk_bytes: usize,
    /// Chunks of a ring: from 2 to 1024, and of 256 MiB at most together.
    pub chunks: usize,
    /// Whether connections go this way also where the network reaches the memory; the same on every rank. For
    /// tests.
    pub always: bool,
    /// What goes past the chunks, since the network's library reaches the device's memory by itself. Ranks may differ in
    /// it: a connection goes past them where both ends allow it.
    pub access: DeviceAccess,
}

impl Default for StagingConfig {
    /// 8 chunks of 1 MiB, where they are needed.
    fn default() -> Self {
        Self {
            chunk_bytes: 1 << 20,
            chunks: 8,
            always: false,
            access: DeviceAccess::default(),
        }
    }
}

/// The rings that an end receives in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Shape {
    chunk_bytes: u64,
    chunks: u64,
}

/// The memory of an end that its peer writes to.
#[derive(Debug)]
pub(super) struct Incoming {
    pub(super) shape: Shape,
    pub(super) control: StagingMemory,
    pub(super) ring: StagingMemory,
}

impl Shape {
    pub(crate) fn new(config: &StagingConfig) -> Result<Self> {
        let shape = Self {
            chunk_bytes: config.chunk_bytes as u64,
            chunks: config.chunks as u64,
        };
        if shape.is_allowed() {
            return Ok(shape);
        }
        Err(Error::invalid(format!(
            "staging memory of {} chunks of {} bytes; expected {} to {} of a multiple of 64 from {} to {}, \
             and {MAX_RING_BYTES} together at most",
            config.chunks,
            config.chunk_bytes,
            CHUNKS.start(),
            CHUNKS.end(),
            CHUNK_BYTES.start(),
            CHUNK_BYTES.end()
        ))
        .with_operation("connect"))
    }

    fn is_allowed(&self) -> bool {
        CHUNK_BYTES.contains(&self.chunk_bytes)
            && self.chunk_bytes.is_multiple_of(64)
            && CHUNKS.contains(&self.chunks)
            && self.chunk_bytes * self.chunks <= MAX_RING_BYTES
    }

    /// Fails for what no peer offers: a shape that is not that of the memory that it gave keys of.
    pub(crate) fn check(&self, control_bytes: usize, ring_bytes: usize) -> Result<()> {
        if self.is_allowed()
            && self.control_bytes() == control_bytes
            && self.ring_bytes() == ring_bytes
        {
            return Ok(());
        }
        Err(malformed(format!(
            "the peer offers {} chunks of {} bytes in staging memory of {control_bytes} and {ring_bytes} bytes",
            self.chunks, self.chunk_bytes
        )))
    }

    fn ring_bytes(&self) -> usize {
        (self.chunk_bytes * self.chunks) as usize
    }

    fn control_bytes(&self) -> usize {
        HEADERS + HEADER_BYTES * self.chunks as usize
    }

    /// The chunk of message `number`, and where it begins.
    fn chunk(&self, number: u64) -> (usize, usize) {
        let chunk = number % self.chunks;
        (chunk as usize, (chunk * self.chunk_bytes) as usize)
    }

    /// Where the header of message `number` begins in the control memory.
    fn header(&self, number: u64) -> usize {
        HEADERS + HEADER_BYTES * self.chunk(number).0
    }
}

impl Incoming {
    pub(super) fn allocate(device: &Arc<dyn Device>, shape: Shape) -> Result<Self> {
        Ok(Self {
            shape,
            control: device.allocate_staging(shape.control_bytes())?,
            ring: device.allocate_staging(shape.ring_bytes())?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn shapes_are_checked() {
        let shape = |chunk_bytes, chunks| Shape {
            chunk_bytes,
            chunks,
        };
        let good = shape(128, 4);
        good.check(320, 512).unwrap();
        assert_eq!((good.chunk(7), good.header(7)), ((3, 384), 256));
        for (shape, control, ring) in [
            (good, 319, 512),
            (good, 320, 511),
            (shape(0, 4), 320, 0),
            (shape(100, 4), 320, 400),
            (shape(64 << 20, 1024), 65600, 64 << 30),
            (shape(128, 1), 128, 128),
            (shape(u64::MAX, u64::MAX), 320, 512),
            (shape(1 << 63, 2), 192, 0),
        ] {
            let error = shape.check(control, ring).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Protocol);
        }
        let config = StagingConfig {
            chunks: 1,
            ..StagingConfig::default()
        };
        assert_eq!(
            Shape::new(&config).unwrap_err().kind(),
            ErrorKind::InvalidArgument
        );
    }
}
