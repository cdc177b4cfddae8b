//! Race detection for accesses of lanes.

use super::knowledge::{Knowledge, Proof, Proofs, Stamp};
use crate::program::machine::Actor;
use crate::program::section::{OperandMemory, Packing, SectionMemory};
use crate::program::verify::clock::Snapshot;
use std::collections::BTreeMap;
use std::ops::Range;

/// Lane number that denotes the rank's stream between two launches.
pub(super) const STREAM: u32 = u32::MAX;

/// State of a packet's writer at the write.
#[derive(Clone, Debug)]
struct Sender {
    /// Launch, counted from 1, that the packet's flag encodes.
    flag: u64,
    /// Whether it stored an element here, and not only padding at the end of a packet.
    filled: bool,
    proof: Proof,
    /// All that the step stored.
    stored: Range<usize>,
    /// Sender's visible memory, if the packet publishes it as a signal does.
    seen: Option<Snapshot>,
}

/// Proof by plain memory, for later steps of the lane that wrote it.
#[derive(Clone, Debug)]
struct Kept {
    proof: Proof,
    /// All that the step wrote.
    stored: Range<usize>,
}

/// Maximum reads of a lane between which its threads have not met that are kept apart, to bound the time.
const MAX_APART: usize = 4;

/// A read of some bytes.
#[derive(Clone, Copy, Debug)]
struct Read {
    by: Stamp,
    /// Whether it stands for earlier reads of the lane, too.
    and_earlier: bool,
}

/// A range of bytes with one access history.
#[derive(Clone, Debug)]
struct Cell {
    end: usize,
    write: Option<Stamp>,
    /// Reads since the write.
    reads: Vec<Read>,
    sender: Option<Sender>,
    kept: Option<Kept>,
    /// Launches whose packets it held, counted from 1.
    packets_of: Vec<u64>,
    /// Whether anything read the last write.
    written_and_read: bool,
    /// Launch, counted from 1, in which lanes read it before writing it.
    read_in: u64,
    /// Launch in which lanes wrote it.
    written_in: u64,
}

/// Access history of a tensor, or of an area of a workspace.
#[derive(Clone, Debug)]
pub(super) struct AreaHistory {
    cells: BTreeMap<usize, Cell>,
}

/// Violation caused by an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wrong {
    /// Unordered with this access.
    Unordered(Actor, Was),
    /// Read of uninitialized bytes.
    Unwritten,
    /// Read of bytes last written by this step of an earlier run.
    Stale(Actor),
    /// Waits for packets that were overwritten before it read them.
    Overwritten(Actor),
    /// Accesses a tensor that its rank has not announced, among those that kernels announce.
    Unannounced,
    /// Stores packets over packets with the same launch's flag, which a reader cannot tell apart.
    SameFlag(Actor),
}

/// Kind of the earlier access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Was {
    Read,
    Write,
}

/// Memory of a rank: a tensor, or an area of its workspace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum RankMemory {
    Tensor(usize),
    Area(Packing),
}

impl RankMemory {
    pub(super) fn of(operand: &OperandMemory) -> Self {
        match operand.memory {
            SectionMemory::Tensor(id) => Self::Tensor(id),
            SectionMemory::Scratch(_) => Self::Area(operand.packing),
        }
    }
}

/// How lanes of a launch accessed bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Touch {
    Read,
    Write,
    Update,
}

impl AreaHistory {
    pub(super) fn new(bytes: usize, write: Option<Stamp>) -> Self {
        let all = Cell {
            end: bytes,
            write,
            reads: Vec::new(),
            sender: None,
            kept: None,
            packets_of: Vec::new(),
            written_and_read: false,
            read_in: 0,
            written_in: 0,
        };
        Self {
            cells: BTreeMap::from([(0, all)]),
        }
    }

    fn split(&mut self, at: usize) {
        let Some((&start, cell)) = self.cells.range_mut(..=at).next_back() else {
            return;
        };
        if start < at && at < cell.end {
            let right = cell.clone();
            cell.end = at;
            self.cells.insert(at, right);
        }
    }

    fn within(&mut self, range: &Range<usize>) -> impl Iterator<Item = &mut Cell> {
        self.split(range.start);
        self.split(range.end);
        self.cells.range_mut(range.clone()).map(|(_, cell)| cell)
    }

    /// Whether all packets of launch `flag` have been stored, even if overwritten since.
    pub(super) fn has_packets(&mut self, range: &Range<usize>, flag: u64) -> bool {
        self.within(range)
            // In reverse, as the launch in question is among the last. Overwritten packets count as present: whether
            // the reader saw them first is a race that `read_packets` reports, not a deadlock.
            .all(|cell| cell.packets_of.iter().rev().any(|of| *of == flag))
    }

    /// Lanes that stored the packets of launch `flag`.
    pub(super) fn senders(&mut self, range: &Range<usize>, flag: u64) -> impl Iterator<Item = u32> {
        let sent = self.within(range).filter_map(move |cell| {
            let sender = cell.sender.as_ref()?;
            (sender.flag == flag).then_some(cell.write?.actor.lane)
        });
        // One step's store covers many cells; report its lane once.
        let mut last = None;
        sent.filter(move |lane| last.replace(*lane) != Some(*lane))
    }

    /// Reads stored packets, even if overwritten since; of the last packet, only the bytes before `filled`. With `acquires`, all
    /// threads see what the senders published. Returns the proof that all packets have, if they do: whichever one a thread
    /// waits for, it has this one.
    pub(super) fn read_packets(
        &mut self,
        range: &Range<usize>,
        filled: usize,
        (flag, acquires): (u64, bool),
        stamp: Stamp,
        knows: &mut Knowledge,
        mut tell: impl FnMut(Wrong),
    ) -> Option<Proof> {
        for at in [range.start, filled, range.end] {
            self.split(at);
        }
        let mut proofs = Proofs::default();
        for (start, cell) in self.cells.range_mut(range.clone()) {
            let Some(sender) = &cell.sender else { continue };
            // The flag is the launch, so packets of another launch prove that those of this one have been
            // overwritten.
            if let (true, Some(write)) = (sender.flag != flag, cell.write) {
                tell(Wrong::Overwritten(write.actor));
            } else if *start < filled && !sender.filled {
                tell(Wrong::Unwritten);
            }
            // Not `seen`: a packet is one store without a fence, so the sender's earlier stores may not be visible
            // yet.
            let proof = sender.proof.within(range, &sender.stored);
            proofs.add(Some(proof.clone()));
            knows.prove(proof);
            if let (true, Some(seen)) = (acquires, &sender.seen) {
                knows.seen.learn(seen);
            }
            cell.note(stamp, knows);
        }
        proofs.together(knows)
    }

    /// Reads bytes written by launches from `since` on. The proof that each thread had which wrote them in this lane, if all had the
    /// same.
    pub(super) fn read(
        &mut self,
        range: &Range<usize>,
        since: u32,
        stamp: Stamp,
        knows: &Knowledge,
        mut tell: impl FnMut(Wrong),
    ) -> Option<Proof> {
        let launch = u64::from(stamp.actor.launch) + 1;
        let mut proofs = Proofs::default();
        for cell in self.within(range) {
            let own = |write: &Stamp| {
                (write.stream, write.actor.launch) == (stamp.stream, stamp.actor.launch)
            };
            let kept = cell.kept.as_ref();
            let kept = kept.filter(|_| cell.write.as_ref().is_some_and(own));
            let proof = kept.map(|kept| kept.proof.within(range, &kept.stored));
            proofs.add(proof);
            match cell.write {
                None => tell(Wrong::Unwritten),
                Some(write) if !knows.sees(&write) => {
                    tell(Wrong::Unordered(write.actor, Was::Write));
                }
                Some(write) if write.actor.launch < since => tell(Wrong::Stale(write.actor)),
                Some(_) => {}
            }
            // A launch that writes bytes before it reads them does not read what was there before.
            if cell.written_in != launch {
                cell.read_in = launch;
            }
            cell.note(stamp, knows);
        }
        proofs.together(knows)
    }

    /// Attaches a lane's visible memory to the packets that it has stored.
    pub(super) fn hand_on(&mut self, range: &Range<usize>, stream: usize, knows: &Knowledge) {
        for cell in self.within(range) {
            if let Some(sender) = &mut cell.sender {
                sender.seen = Some(knows.seen.snapshot(stream));
            }
        }
    }

    /// Marks the store to `range` as padding of a packet, without an element.
    pub(super) fn leave_empty(&mut self, range: &Range<usize>) {
        for cell in self.within(range) {
            if let Some(sender) = &mut cell.sender {
                sender.filled = false;
            }
        }
    }

    /// Writes; with `flag`, packets. Each thread of the step holds `held`; `proof` is that by what it stores.
    pub(super) fn write(
        &mut self,
        range: &Range<usize>,
        flag: Option<u64>,
        stamp: Stamp,
        (knows, held, proof): (&Knowledge, &[Proof], &Proof),
        mut tell: impl FnMut(Wrong),
    ) {
        for cell in self.within(range) {
            let mut unread = None;
            for read in cell.reads.drain(..) {
                // A read is over once its step has completed, which packets tell too: not `sees`.
                let over = if read.and_earlier {
                    knows.outlives_all(&read.by, held)
                } else {
                    knows.outlives(&read.by, held)
                };
                if read.by.actor != stamp.actor && !over {
                    unread.get_or_insert(read.by);
                }
            }
            let read = unread.is_none() && cell.written_and_read;
            let same = cell.sender.as_ref().map(|sender| sender.flag) == flag && flag.is_some();
            if let (true, Some(write)) = (same, cell.write) {
                tell(Wrong::SameFlag(write.actor));
            }
            if let Some(read) = unread {
                tell(Wrong::Unordered(read.actor, Was::Read));
            }
            if let (false, Some(write)) = (same, cell.write) {
                // A packet that was read has certainly arrived, so it may be overwritten.
                let landed = flag.is_some() && read && knows.outlives(&write, held);
                // Otherwise, overwriting needs `sees`, since a store whose step is over may still be in flight and land
                // after this one.
                if write.actor != stamp.actor && !knows.sees(&write) && !landed {
                    tell(Wrong::Unordered(write.actor, Was::Write));
                }
            }
            cell.write = Some(stamp);
            cell.written_and_read = false;
            cell.packets_of.extend(flag);
            (cell.sender, cell.kept) = match flag {
                Some(flag) => {
                    let sender = Sender {
                        flag,
                        filled: true,
                        proof: proof.clone(),
                        stored: range.clone(),
                        seen: None,
                    };
                    (Some(sender), None)
                }
                None => {
                    let kept = Kept {
                        proof: proof.clone(),
                        stored: range.clone(),
                    };
                    (None, Some(kept))
                }
            };
            // The stream's write between launches stands for the caller's work, which is no access of the kernel.
            if stamp.actor.lane != STREAM {
                cell.written_in = u64::from(stamp.actor.launch) + 1;
            }
        }
    }

    /// Accesses of a launch's lanes; adjacent ranges with equal accesses are merged.
    pub(super) fn touches(&self, launch: u32) -> Vec<(Range<usize>, Touch)> {
        let launch = u64::from(launch) + 1;
        let mut list: Vec<(Range<usize>, Touch)> = Vec::new();
        for (&start, cell) in &self.cells {
            let touch = match (cell.read_in == launch, cell.written_in == launch) {
                (true, true) => Touch::Update,
                (true, false) => Touch::Read,
                (false, true) => Touch::Write,
                (false, false) => continue,
            };
            match list.last_mut() {
                Some((range, last)) if range.end == start && *last == touch => range.end = cell.end,
                _ => list.push((start..cell.end, touch)),
            }
        }
        list
    }
}

impl Cell {
    /// Records a read of the lane that knows `knows`.
    fn note(&mut self, stamp: Stamp, knows: &Knowledge) {
        self.written_and_read = true;
        let is_own = |read: &Read| read.by.stream == stamp.stream;
        if self
            .reads
            .iter()
            .any(|read| is_own(read) && read.by.time == stamp.time)
        {
            return;
        }
        // Those before its threads last met were over when this step began. Of later ones, some threads may be behind.
        self.reads
            .retain(|read| !is_own(read) || !knows.met_since(&read.by));
        let apart = self.reads.iter().filter(|read| is_own(read)).count();
        let last = self.reads.iter_mut().rfind(|read| is_own(read));
        match last.filter(|_| apart >= MAX_APART) {
            Some(last) => {
                *last = Read {
                    by: stamp,
                    and_earlier: true,
                }
            }
            None => self.reads.push(Read {
                by: stamp,
                and_earlier: false,
            }),
        }
    }
}
