//! Splits calls on more memory than one launch supports. Results are bitwise identical, since inputs are
//! reduced in rank order whatever the length.
//!
//! Calls with one part are split along it. A reduce-scatter becomes a reduction to each rank in turn. Calls
//! that only move parts become one group of messages, which may have any length, and an all-to-all in place several
//! groups, whose messages arrive in staging memory.

use super::call::{Call, CollectiveKind, Overlap, moved_parts};
use super::enqueue::Uses;
use super::join::CallPath;
use super::{Collectives, Message};
use crate::device::{AllocationKind, DeviceSlice, Stream};
use crate::error::{Error, Result};

/// Pieces are multiples of this many elements, so that all are aligned like the whole.
const UNIT: usize = 256;

/// Staging memory of an all-to-all in place, whatever its length.
const STAGED: usize = 64 << 20;

impl Collectives {
    /// Maximum bytes of a launch, if a validated call on the direct path exceeds it.
    pub(super) fn too_long(&self, call: &Call) -> Option<usize> {
        let world = self.0.machine.world;
        let (input, output) = call.kind.rows(world);
        let bytes = call.bytes().saturating_mul(input.max(output));
        // A plain copy launches nothing.
        if world == 1 && call.op.is_none() {
            return None;
        }
        match self.0.path_for(call) {
            Ok(CallPath::Direct(direct)) if bytes > direct.launch_bytes => {
                Some(direct.launch_bytes)
            }
            _ => None,
        }
    }

    /// The longest piece of a long call, on at most `bytes` of memory; `None` if messages execute it.
    pub(super) fn piece(&self, call: &Call, bytes: usize) -> Option<Call> {
        // Whole units keep the pieces aligned like the call, for vector accesses.
        let count = (bytes / call.dtype.size() / UNIT * UNIT).max(1);
        let count = count.min(call.count);
        match call.kind {
            CollectiveKind::AllReduce | CollectiveKind::Broadcast | CollectiveKind::Reduce => {
                Some(Call { count, ..*call })
            }
            // Rows of the input are far apart, while a piece must be contiguous: reduce each row to its own
            // root.
            CollectiveKind::ReduceScatter => Some(Call {
                kind: CollectiveKind::Reduce,
                root: Some(0),
                count,
                ..*call
            }),
            _ => None,
        }
    }

    /// Enqueues a validated call in pieces, each on at most `bytes` of memory. Does not block.
    pub(super) fn enqueue_pieces(
        &self,
        call: &Call,
        uses: Uses,
        (output, input): (&DeviceSlice, &DeviceSlice),
        bytes: usize,
        stream: &Stream,
    ) -> Result<()> {
        let input = if uses.reads { input } else { output };
        let output = if uses.writes { output } else { input };
        let Some(piece) = self.piece(call, bytes) else {
            if uses.overlap == Overlap::Shared && call.kind == CollectiveKind::AllToAll {
                return self.exchange_in_place(call, output, bytes.min(STAGED), stream);
            }
            return self.move_parts(call, uses, (output, input), stream);
        };
        let size = call.dtype.size();
        let (scatters, roots) = match call.kind {
            CollectiveKind::ReduceScatter => (true, self.0.machine.world),
            _ => (false, 1),
        };
        // All ranks take roots and pieces in the same order, as these are collectives of their own.
        for root in 0..roots {
            for from in (0..call.count).step_by(piece.count) {
                let count = piece.count.min(call.count - from);
                let range = |row: usize| {
                    let first = (row * call.count + from) * size;
                    first..first + count * size
                };
                let root = if scatters { Some(root) } else { call.root };
                let piece = Call {
                    count,
                    root,
                    ..piece
                };
                let of_root = range(root.filter(|_| scatters).unwrap_or(0));
                let (output, input) = (output.slice(range(0))?, input.slice(of_root)?);
                // An output that a rank does not write may alias its input.
                self.enqueue(&piece, &output, &input, stream)?;
            }
        }
        Ok(())
    }

    /// Executes a call that only moves parts as a group of messages.
    fn move_parts(
        &self,
        call: &Call,
        uses: Uses,
        (output, input): (&DeviceSlice, &DeviceSlice),
        stream: &Stream,
    ) -> Result<()> {
        let in_place = uses.overlap == Overlap::Shared;
        let (rank, world) = (self.0.context.rank(), self.0.machine.world);
        let [mut sent, mut received] = moved_parts(call, (rank, world), (output, input))?;
        // In place, its own part is already there.
        if in_place {
            sent.retain(|(peer, _)| *peer != rank);
            received.retain(|(peer, _)| *peer != rank);
        }
        let sent = sent.iter().map(|(peer, part)| Message::send(*peer, part));
        let received = received
            .iter()
            .map(|(peer, part)| Message::receive(*peer, part));
        let messages: Vec<Message<'_>> = sent.chain(received).collect();
        self.send_receive(&messages, stream)
            .map_err(|error| error.with_operation(call.kind.name()))
    }

    /// Exchanges the parts of `memory` with those of the other ranks, in pieces that arrive in staging memory of at most
    /// `bytes`, and are copied in place once this rank's have been sent.
    fn exchange_in_place(
        &self,
        call: &Call,
        memory: &DeviceSlice,
        bytes: usize,
        stream: &Stream,
    ) -> Result<()> {
        let device = &self.0.context.device;
        if stream.is_capturing()? {
            // The graph would have to keep the staging memory.
            let text = format!("{call} in place is longer than one launch takes, in a graph");
            return Err(Error::unsupported(text)
                .with_operation(call.kind.name())
                .with_help("pass a separate output, or split the call"));
        }
        let (rank, world) = (self.0.context.rank(), self.0.machine.world);
        let size = call.dtype.size();
        let most = (bytes / size / world / UNIT * UNIT).clamp(1, call.count);
        let staging = device.allocate(world * most * size, AllocationKind::Plain)?;
        for from in (0..call.count).step_by(most) {
            let count = most.min(call.count - from);
            // Each rank starts with another peer, to spread the load over links.
            let peers = (1..world).map(|step| (rank + step) % world);
            let parts = peers.map(|peer| {
                let first = (peer * call.count + from) * size;
                let staged = peer * count * size;
                let part = memory.slice(first..first + count * size)?;
                Ok((peer, part, staging.slice(staged..staged + count * size)?))
            });
            let parts = parts.collect::<Result<Vec<_>>>()?;
            let sent = parts
                .iter()
                .map(|(peer, part, _)| Message::send(*peer, part));
            let received = parts.iter();
            let received = received.map(|(peer, _, staged)| Message::receive(*peer, staged));
            let messages: Vec<Message<'_>> = sent.chain(received).collect();
            self.send_receive(&messages, stream)
                .map_err(|error| error.with_operation(call.kind.name()))?;
            for (_, part, staged) in &parts {
                stream.copy(part, staged)?;
            }
        }
        Ok(())
    }
}
