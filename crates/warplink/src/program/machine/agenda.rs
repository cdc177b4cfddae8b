//! The schedule: ready lanes, and lanes that wait for packets.

use crate::error::Rank;
use crate::program::section::{OperandMemory, Packing};
use std::ops::Range;

/// Ready lanes, each listed once, and lanes that wait for packets.
pub(super) struct Agenda {
    /// Scheduled lanes; the last is next.
    work: Vec<usize>,
    scheduled: Vec<bool>,
    /// For each rank, lanes that wait for packets in its memory, with the packets.
    waiting: Vec<Vec<(usize, Packing, Range<usize>)>>,
}

impl Agenda {
    pub(super) fn new(world: usize, lanes: usize) -> Self {
        Self {
            work: Vec::new(),
            scheduled: vec![false; lanes],
            waiting: vec![Vec::new(); world],
        }
    }

    /// Schedules a lane.
    pub(super) fn wake(&mut self, lane: usize) {
        if !std::mem::replace(&mut self.scheduled[lane], true) {
            self.work.push(lane);
        }
    }

    /// Takes the next lane.
    pub(super) fn next(&mut self) -> Option<usize> {
        let lane = self.work.pop()?;
        self.scheduled[lane] = false;
        Some(lane)
    }

    /// Registers a lane to be scheduled when any of these packets of a rank is stored.
    pub(super) fn wait_for_packets(&mut self, lane: usize, rank: Rank, packets: &OperandMemory) {
        let wanted = packets.bytes.clone();
        self.waiting[rank].push((lane, packets.packing, wanted));
    }

    /// Schedules the lanes that wait for any of these packets of a rank.
    pub(super) fn wake_readers(&mut self, rank: Rank, stored: &OperandMemory) {
        let mut woken = Vec::new();
        self.waiting[rank].retain(|(lane, packing, wanted)| {
            // Any overlap wakes the reader, even if some packets are still missing: it tests all of them again, and
            // goes back to waiting if need be.
            let touched = *packing == stored.packing
                && wanted.start < stored.bytes.end
                && stored.bytes.start < wanted.end;
            if touched {
                woken.push(*lane);
            }
            !touched
        });
        woken.into_iter().for_each(|lane| self.wake(lane));
    }
}
