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
        // The kernel by hand has been measured there (docs/performance.md), and the programs have not.
        DeviceKind::Cuda => false,
    }
}

/// A rank's state for messages.
pub(in crate::collective) struct Messages {
    programs: Option<Programs>,
    rows: RowMessages,
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
        let programs = by_programs(context.device.kind())
            .then(|| Programs::join(context, beside, bytes, multiprocessors));
        Ok(Self {
            programs: programs.transpose()?,
            rows: RowMessages::join(context, beside, bytes, multiprocessors)?,
        })
    }

    /// Enqueues messages: those of one pair and direction in order, all others concurrently. Does not block.
    pub(super) fn enqueue(&self, ends: &[End<'_>], stream: (&Stream, bool)) -> Result<()> {
        if let Some(programs) = &self.programs {
            return programs.enqueue(ends, stream);
        }
        let entries = ends
            .iter()
            .map(|end| Entry::whole(end.peer, end.direction, end.data));
        self.rows.enqueue(&entries.collect::<Vec<_>>(), stream)
    }

    /// The same for messages whose lengths the senders' memory has.
    pub(super) fn enqueue_counted(
        &self,
        ends: &[CountedEnd<'_>],
        stream: (&Stream, bool),
    ) -> Result<()> {
        if let Some(programs) = &self.programs {
            return programs.enqueue_counted(ends, stream);
        }
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
        self.rows.enqueue(&entries.collect::<Vec<_>>(), stream)
    }

    /// Messages of rows by index.
    pub(in crate::collective) const fn rows(&self) -> &RowMessages {
        &self.rows
    }

    /// Number of lanes that stored directly. Blocks while it reads some bytes of the device.
    pub(in crate::collective) fn direct_lanes(&self) -> Result<u64> {
        let programs = self
            .programs
            .as_ref()
            .map_or(Ok(0), Programs::direct_lanes)?;
        Ok(programs + self.rows.direct_lanes()?)
    }

    /// Peer of a message that has begun here but not there, and its direction. Blocks while it reads some bytes of the
    /// device.
    pub(in crate::collective) fn awaited(
        &self,
        device: &dyn Device,
    ) -> Result<Option<(Rank, Direction)>> {
        let programs = self.programs.as_ref().map_or(Ok(None), Programs::awaited)?;
        programs.map_or_else(|| self.rows.awaited(device), |found| Ok(Some(found)))
    }

    /// Error of mismatched ends, if a kernel recorded one. Blocks while it reads some bytes of the device. The host
    /// device fails the stream instead.
    pub(in crate::collective) fn disagreement(&self) -> Result<Option<Error>> {
        let programs = self
            .programs
            .as_ref()
            .map_or(Ok(None), Programs::disagreement)?;
        programs.map_or_else(|| self.rows.disagreement(), |found| Ok(Some(found)))
    }
}
