//! Collectives: who has come, and what each rank accesses and learns.

use super::memory::Mode as AccessMode;
use super::state::Run;
use super::violation::Violations;
use crate::error::Rank;
use crate::program::ir::Collective;
use crate::program::rank_program::Range;

impl Run<'_> {
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
            meeting.present = Vec::new();
            let woken = std::mem::take(&mut meeting.waiting);
            self.wake_all(woken);
        }
    }

    /// What a collective accesses once all ranks have come.
    pub(super) fn finish_collective(
        &mut self,
        stream: usize,
        operation: usize,
        collective: &Collective<Rank>,
        (target, source): (&Range, &Range),
        violations: &mut Violations,
    ) {
        let rank = self.streams[stream].rank;
        let mut touch = |run: &mut Self, range: Range, mode: AccessMode| {
            run.touch((stream, operation), (rank, range), mode, violations);
        };
        // Others know that this rank came, not that it is done; and what it reads and writes
        // it may touch before they come.
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

    /// Adds what a rank learns from a collective.
    fn leave(&mut self, stream: usize, number: usize, collective: &Collective<Rank>) {
        let rank = self.streams[stream].rank;
        let meeting = &mut self.collectives[number];
        let learned = match collective {
            Collective::Broadcast(_) => &meeting.root,
            Collective::Reduce(_, root) if *root != rank => &None,
            _ => &meeting.all,
        };
        if let Some(learned) = learned {
            self.streams[stream].clock.join(learned);
        }
        meeting.left += 1;
        if meeting.left == self.links.meetings.all[number].len() {
            (meeting.all, meeting.root) = (None, None);
        }
    }
}

/// What a collective accesses whose target and source are one buffer in the way that engines
/// document: the source of an all-gather is this rank's slot of the target, the target of a
/// reduce-scatter is this rank's part of the source, and those of a reduction or broadcast are one. An
/// all-to-all cannot be in place. `place` is this rank's among those that take part.
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
    let part = |from: usize, to: usize| Range {
        tensor: whole.tensor,
        offset_bytes: from,
        bytes: to - from,
    };
    let parts = [
        (part(whole.offset_bytes, own.offset_bytes), others),
        (*own, AccessMode::Update),
        (part(own.end(), whole.end()), others),
    ];
    let not_empty = parts.into_iter().filter(|(range, _)| range.bytes > 0);
    Some(not_empty.collect())
}
