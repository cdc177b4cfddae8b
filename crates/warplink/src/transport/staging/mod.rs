//! Staging: network transfers for device memory that the network cannot access, through chunks of host memory
//! at both ends.
//!
//! Outgoing data is copied to a chunk of the outgoing ring, put to the same chunk in the peer's incoming
//! ring, and copied by the peer's host to its destination. So each chunk carries a *message*, described by a
//! header.
//!
//! # Invariants
//! 1. Messages are received in order, exactly once, and executed in one stream. So a signal becomes visible
//!    after all earlier puts.
//! 2. A chunk is reused once the peer has reported that its copy is complete (credit-based flow control). So
//!    an end is at most one ring ahead, and consumed data is in the peer's memory.
//! 3. Consuming never depends on the peer: a *get* is answered later, and their number is limited. So two
//!    ends with full rings do not deadlock.
//! 4. Everything from the peer is validated. A protocol violation fails the communicator with an error that
//!    names the peer.
//! 5. A dropped end receives messages until the peer's end is dropped too, so that the peer's puts complete.
//! 6. Memory that the network library accesses directly bypasses the rings (`direct`), still ordered with the
//!    messages.
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

/// Limits of a peer's offer and of the configuration.
const CHUNK_BYTES: std::ops::RangeInclusive<u64> = 64..=64 << 20;
const CHUNKS: std::ops::RangeInclusive<u64> = 2..=1024;
const MAX_RING_BYTES: u64 = 256 << 20;

/// Offsets of the words in the control memory.
const ARRIVED: usize = 0;
pub(super) const GONE: usize = 8;
const CONSUMED: usize = 16;
const HEADERS: usize = 64;
const HEADER_BYTES: usize = 64;

/// Staging of network connections whose device memory the network cannot access: through chunks of host
/// memory. Each end has two rings of chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StagingConfig {
    /// Size of a chunk: a multiple of 64, from 64 bytes to 64 MiB.
    pub chunk_bytes: usize,
    /// Chunks of a ring: from 2 to 1024, and at most 256 MiB in total.
    pub chunks: usize,
    /// Stage even if the network can access the memory; equal on every rank. For tests.
    pub always: bool,
    /// Whether data may bypass the chunks when the network library accesses device memory directly. May
    /// differ between ranks: a connection bypasses them if both ends allow it.
    pub access: DeviceAccess,
}

impl Default for StagingConfig {
    /// 8 chunks of 1 MiB, if needed.
    fn default() -> Self {
        Self {
            chunk_bytes: 1 << 20,
            chunks: 8,
            always: false,
            access: DeviceAccess::default(),
        }
    }
}

/// Shape of an end's receiving ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RingShape {
    chunk_bytes: u64,
    chunks: u64,
}

/// An end's memory that its peer writes to.
#[derive(Debug)]
pub(super) struct Incoming {
    pub(super) shape: RingShape,
    pub(super) control: StagingMemory,
    pub(super) ring: StagingMemory,
}

impl RingShape {
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

    /// Fails for an invalid shape, or one that does not match the memory behind the peer's keys.
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

    /// Offset and length of the chunk of message `number`.
    fn chunk(&self, number: u64) -> (usize, usize) {
        let chunk = number % self.chunks;
        (chunk as usize, (chunk * self.chunk_bytes) as usize)
    }

    /// Offset in the control memory of the header of message `number`.
    fn header(&self, number: u64) -> usize {
        HEADERS + HEADER_BYTES * self.chunk(number).0
    }
}

impl Incoming {
    pub(super) fn allocate(device: &Arc<dyn Device>, shape: RingShape) -> Result<Self> {
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
        let shape = |chunk_bytes, chunks| RingShape {
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
            RingShape::new(&config).unwrap_err().kind(),
            ErrorKind::InvalidArgument
        );
    }
}
