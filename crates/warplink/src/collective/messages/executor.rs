//! Execution of messages: by programs, or by the kernel for rows where programs have not been measured.

use super::programs::{CountedEnd, End, Programs};
use super::rows::{Count, Entry, RowMessages};
use crate::device::{Device, DeviceKind, Stream};
use crate::error::{Error, Rank, Result};
use crate::p2p::Direction;
use crate::program::execute::{RankContext, SharedWorkspace};

/// Whether messages on this kind of device are launches of programs.
const fn by_programs(kind: DeviceKind) -> bool {
    match kind {
        DeviceKind::Host => true,
        // The kernel by hand has been measured there (docs/performance.md), and the programs have not. Dispatches of
        // experts that are not programs need the kernel, so they have to become programs first (`experts::by_program`).
        DeviceKind::Cuda => false,
    }
}

/// A rank's state for messages.
pub(in crate::collective) enum Messages {
    Programs(Programs),
    Rows(RowMessages),
}

impl Messages {
    /// Joins with `bytes` of chunks; receives use the publication of the direct path `beside`. A launch uses at most
    /// `multiprocessors`, equal on all ranks, or two for each rank if that is more. Collective: all ranks succeed or
    /// none.
    pub(in crate::collective) fn join(
        context: &RankContext,
        beside: &SharedWorkspace,
        bytes: usize,
        multiprocessors: usize,
    ) -> Result<Self> {
        if by_programs(context.device.kind()) {
            return Programs::join(context, beside, bytes, multiprocessors).map(Self::Programs);
        }
        RowMessages::join(context, beside, bytes, multiprocessors).map(Self::Rows)
    }

    /// Enqueues messages: those of one pair and direction in order, all others concurrently. Does not block.
    pub(super) fn enqueue(&self, ends: &[End<'_>], stream: (&Stream, bool)) -> Result<()> {
        let rows = match self {
            Self::Programs(programs) => return programs.enqueue(ends, stream),
            Self::Rows(rows) => rows,
        };
        let entries = ends
            .iter()
            .map(|end| Entry::whole(end.peer, end.direction, end.data));
        rows.enqueue(&entries.collect::<Vec<_>>(), stream)
    }

    /// The same for messages whose lengths the senders' memory has.
    pub(super) fn enqueue_counted(
        &self,
        ends: &[CountedEnd<'_>],
        stream: (&Stream, bool),
    ) -> Result<()> {
        let rows = match self {
            Self::Programs(programs) => return programs.enqueue_counted(ends, stream),
            Self::Rows(rows) => rows,
        };
        let entries = ends.iter().map(|it| {
            let count = match it.end.direction {
                Direction::Send => Count::Given(it.count),
                Direction::Receive => Count::Stated(it.count),
            };
            Entry {
                bytes: it.end.data.bytes(),
                unit: it.unit,
                count,
                ..Entry::whole(it.end.peer, it.end.direction, it.end.data)
            }
        });
        rows.enqueue(&entries.collect::<Vec<_>>(), stream)
    }

    /// Messages of rows by index, where no programs send messages.
    pub(in crate::collective) const fn rows(&self) -> Option<&RowMessages> {
        match self {
            Self::Programs(_) => None,
            Self::Rows(rows) => Some(rows),
        }
    }

    /// Number of lanes that stored directly. Blocks while it reads some bytes of the device.
    pub(in crate::collective) fn direct_lanes(&self) -> Result<u64> {
        match self {
            Self::Programs(programs) => programs.direct_lanes(),
            Self::Rows(rows) => rows.direct_lanes(),
        }
    }

    /// Peer of a message that has begun here but not there, and its direction. Blocks while it reads some bytes of the
    /// device.
    pub(in crate::collective) fn awaited(
        &self,
        device: &dyn Device,
    ) -> Result<Option<(Rank, Direction)>> {
        match self {
            Self::Programs(programs) => programs.awaited(),
            Self::Rows(rows) => rows.awaited(device),
        }
    }

    /// Error of mismatched ends, if a kernel recorded one. Blocks while it reads some bytes of the device. The host
    /// device fails the stream instead.
    pub(in crate::collective) fn disagreement(&self) -> Result<Option<Error>> {
        match self {
            Self::Programs(programs) => programs.disagreement(),
            Self::Rows(rows) => rows.disagreement(),
        }
    }
}
