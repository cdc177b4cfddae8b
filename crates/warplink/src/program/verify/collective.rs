//! Collectives: which ranks have arrived, and the accesses and happens-before edges of each rank.

use super::memory::Mode as AccessMode;
use super::state::SimulatedRun;
use super::violation::Violations;
use crate::error::Rank;
use crate::program::ir::Collective;
use crate::program::rank_program::{CollectiveOperation, Range};

impl SimulatedRun<'_> {
    pub(super) fn arrive(&mut self, stream: usize, number: usize, root: Option<Rank>) {
        let rank = self.streams[stream].rank;
        let members = &self.links.meetings.all[number];
        let clock = &self.streams[stream].clock;
        let meeting = &mut self.collectives[number];
        meeting.present.resize(members.len(), false);
        if let Some(place) = members.place(rank) {
            meeting.present[place] = true;
        }
        meeting.count += 1;
        if root == Some(rank) {
            meeting.root = Some(clock.clone());
        }
        match &mut meeting.all {
            Some(all) => all.join(clock),
            all => *all = Some(clock.clone()),
        }
        if meeting.count == members.len() {
            // Needed for messages about missing members only; programs may have many collectives of many ranks.
            meeting.present = Vec::new();
            let woken = std::mem::take(&mut meeting.waiting);
            self.wake_all(woken);
        }
    }

    /// Performs the accesses of a collective once all ranks have arrived.
    pub(super) fn finish_collective(
        &mut self,
        stream: usize,
        operation: usize,
        call: &CollectiveOperation,
        violations: &mut Violations,
    ) {
        let CollectiveOperation {
            collective,
            target,
            source,
            ..
        } = call;
        let rank = self.streams[stream].rank;
        // Peers' buffers are not touched: each rank accounts for its own, and the engine moves data between them by
        // itself.
        let mut touch = |run: &mut Self, range: Range, mode: AccessMode| {
            run.touch((stream, operation), (rank, range), mode, violations);
        };
        // Other ranks learn of this rank's arrival only, not of its completion; and it may access its buffers before
        // they arrive.
        self.tick(stream);
        let (reads, writes) = match collective {
            Collective::Broadcast(root) => (*root == rank, true),
            Collective::Reduce(_, root) => (true, *root == rank),
            _ => (true, true),
        };
        let number = self.collective_number(rank, operation);
        let place = number.and_then(|number| self.links.meetings.all[number].place(rank));
        let in_place = place.and_then(|place| in_place(collective, target, source, place));
        if let (Some(in_place), true, true) = (in_place, reads, writes) {
            for (range, mode) in in_place {
                touch(self, range, mode);
            }
        } else {
            if reads {
                touch(self, *source, AccessMode::Read);
            }
            if writes {
                touch(self, *target, AccessMode::Write);
            }
        }
        if let Some(number) = number {
            self.leave(stream, number, collective);
        }
        self.engine_done(rank);
    }

    /// Joins the clocks that a collective passes to a rank.
    fn leave(&mut self, stream: usize, number: usize, collective: &Collective<Rank>) {
        let rank = self.streams[stream].rank;
        let meeting = &mut self.collectives[number];
        let learned = match collective {
            // Only true data dependencies count as order. Engines may return from a broadcast, or a reduction, before
            // other ranks have arrived, so relying on more would accept races.
            Collective::Broadcast(_) => &meeting.root,
            Collective::Reduce(_, root) if *root != rank => &None,
            _ => &meeting.all,
        };
        if let Some(learned) = learned {
            self.streams[stream].clock.join(learned);
        }
        meeting.left += 1;
        if meeting.left == self.links.meetings.all[number].len() {
            // The last member frees the joined clocks, which otherwise count against the limit on clock nodes until
            // the end.
            (meeting.all, meeting.root) = (None, None);
        }
    }
}

/// Accesses of a collective whose target and source form one buffer in the in-place layout that engines document: the
/// source of an all-gather is this rank's slot of the target, the target of a reduce-scatter is this rank's part of
/// the source, and a reduction or broadcast uses the same range for both. An all-to-all cannot run in place. `place`
/// is this rank's index among the members.
fn in_place(
    collective: &Collective<Rank>,
    target: &Range,
    source: &Range,
    place: usize,
) -> Option<Vec<(Range, AccessMode)>> {
    let (whole, own, others) = match collective {
        Collective::AllToAll => return None,
        Collective::AllGather => (target, source, AccessMode::Write),
        Collective::ReduceScatter(_) => (source, target, AccessMode::Read),
        Collective::AllReduce(_) | Collective::Broadcast(_) | Collective::Reduce(..) => {
            let update = vec![(*target, AccessMode::Update)];
            return (target == source).then_some(update);
        }
    };
    let offset = whole
        .offset_bytes
        .checked_add(own.bytes.checked_mul(place)?)?;
    if own.tensor != whole.tensor || own.offset_bytes != offset {
        return None;
    }
    let part = |from: usize, to: usize| Range::of(whole.tensor, from..to);
    let parts = [
        (part(whole.offset_bytes, own.offset_bytes), others),
        (*own, AccessMode::Update),
        (part(own.end(), whole.end()), others),
    ];
    let not_empty = parts.into_iter().filter(|(range, _)| range.bytes > 0);
    Some(not_empty.collect())
}
