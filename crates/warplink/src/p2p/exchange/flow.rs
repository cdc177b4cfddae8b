//! Selection of a transfer's flow by each end, and the check that both ends select the same.

use super::{EndOffer, RequestedTransfer, TransferExchange};
use crate::device::{DeviceSlice, PacketLine, PacketShape, Word};
use crate::error::{Error, Result};
use crate::memory::{Region, RemoteRegion};
use crate::p2p::path::{Flow, Path};
use crate::p2p::protocol::Protocol;
use crate::p2p::request::{Direction, TransferRequest};
use crate::signal::Slot;
use std::borrow::Cow;

impl TransferExchange {
    /// Selects the flow of this end for `path`. The device must have signals.
    pub(super) fn flow(
        &self,
        request: &TransferRequest,
        protocol: Protocol,
        path: Path,
    ) -> Result<Flow> {
        // An empty buffer needs signals only.
        let is_empty = request.buffer.bytes() == 0;
        if path == Path::CopyEngine || request.buffer.region().is_none() || is_empty {
            return Ok(Flow::Streams);
        }
        if !self.pairs.device.properties().kernel_copies {
            return match path {
                Path::Multiprocessors => Err(Error::unsupported(
                    "the device has no kernels for transfers",
                )
                .with_device(self.pairs.device.name())
                .with_help("install NVRTC, or use the path fastest on every rank")),
                Path::CopyEngine | Path::Fastest | Path::OneBlock => Ok(Flow::Streams),
            };
        }
        let mut kernels = Cow::Borrowed(self.kernels.as_ref().map_err(Error::clone)?);
        if let Some(most) = request.most_blocks {
            kernels = Cow::Owned(kernels.into_owned().at_most(most));
        }
        let flow = Flow::new(path, protocol, request.buffer.bytes(), &kernels);
        let job_peer = self.pairs.group.job_rank(request.peer)?;
        if self.pairs.memory.access(job_peer)?.atomics {
            return Ok(flow);
        }
        Ok(flow.without_atomics(path))
    }

    /// Scratch memory that `flow` needs at this end, in the `slot`.
    pub(super) fn scratch(
        &self,
        request: &TransferRequest,
        flow: Flow,
        slot: &Slot,
    ) -> Result<Option<Region>> {
        let Some(shape) = packet_shape(request, flow) else {
            return Ok(None);
        };
        let bytes = shape.scratch_bytes(request.direction == Direction::Receive);
        let scratch = self
            .pairs
            .slots
            .allocate_scratch(&self.pairs.memory, slot.number, bytes);
        scratch.map(Some)
    }

    /// The packet line of an end under `flow`, if it has one. It keeps the scratch memory of this end and of the peer
    /// alive. `abort` ends waits on it.
    pub(super) fn line(
        &self,
        request: &TransferRequest,
        flow: Flow,
        scratch: (Option<Region>, Option<RemoteRegion>),
        abort: Word,
    ) -> Result<Option<(PacketLine, (Region, RemoteRegion))>> {
        let Some(shape) = packet_shape(request, flow) else {
            return Ok(None);
        };
        let (Some(own), Some(peers)) = scratch else {
            return Err(
                Error::protocol("the peer offers no scratch memory for packets")
                    .with_help("run the same version of Warplink on every rank"),
            );
        };
        let receives = request.direction == Direction::Receive;
        let [here, there] = [own.memory(), peers.memory()].map(DeviceSlice::clone);
        let line = PacketLine::new(shape, receives, here, there, abort)?;
        Ok(Some((line, (own, peers))))
    }
}

/// Division of the data into packets; `None` without packets.
fn packet_shape(request: &TransferRequest, flow: Flow) -> Option<PacketShape> {
    match flow {
        Flow::Packets { blocks, threads } => Some(PacketShape {
            bytes: request.buffer.bytes(),
            blocks,
            threads,
        }),
        Flow::Streams | Flow::Stores { .. } => None,
    }
}

/// The flow that both ends use.
///
/// # Errors
/// [`ErrorKind::Mismatch`] where they do not agree.
pub(super) fn agreed(end: &RequestedTransfer, offer: &EndOffer) -> Result<Flow> {
    if offer.path != end.path {
        let what = format!(
            "this rank uses the path {}, the peer {}",
            end.path, offer.path
        );
        return Err(Error::mismatch(what).with_help("choose the same path on both ranks"));
    }
    // An end whose bytes are stored by other work has neither packets nor blocks to agree on.
    if offer.stored || end.request.buffer.region().is_none() {
        return Ok(Flow::Streams);
    }
    if offer.flow != end.flow {
        let what = format!(
            "this rank moves the bytes by {}, the peer by {}",
            end.flow, offer.flow
        );
        return Err(Error::mismatch(what).with_help(
            "install NVRTC for every rank, or for none, and set the same limit of multiprocessors",
        ));
    }
    Ok(end.flow)
}
