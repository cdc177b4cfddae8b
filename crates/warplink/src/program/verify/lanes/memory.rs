//! Race detection for accesses of lanes.

use crate::program::machine::Actor;
use crate::program::verify::clock::{Clock, Snapshot};
use std::collections::BTreeMap;
use std::ops::Range;

/// Lane number that denotes the rank's stream between two launches.
pub(super) const STREAM: u32 = u32::MAX;

/// A recorded access.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stamp {
    pub(super) actor: Actor,
    pub(super) stream: u32,
    pub(super) time: u32,
}

/// Clocks of a lane.
#[derive(Clone, Debug)]
pub(super) struct Knowledge {
    /// Visible memory: ordering through signals and streams.
    pub(super) seen: Clock,
    /// Completed steps: the above, and ordering through packets. A packet does not order other memory, but its sender
    /// had completed its earlier steps, so memory that these read may be overwritten.
    pub(super) over: Clock,
}

/// State of a packet's writer at the write.
#[derive(Clone, Debug)]
struct Sender {
    /// Launch, counted from 1, that the packet's flag encodes.
    flag: u64,
    /// Whether it stored an element here, and not only padding at the end of a packet.
    filled: bool,
    over: Snapshot,
    /// Sender's visible memory, if the packet publishes it as a signal does.
    seen: Option<Snapshot>,
}

/// A range of bytes with one access history.
#[derive(Clone, Debug)]
struct Cell {
    end: usize,
    write: Option<Stamp>,
    /// Reads since the write.
    reads: Vec<Stamp>,
    sender: Option<Sender>,
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
    /// Stores packets over packets with the same launch's flag, which a reader cannot tell apart.
    SameFlag(Actor),
}

/// Kind of the earlier access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Was {
    Read,
    Write,
}

/// How lanes of a launch accessed bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Touch {
    Read,
    Write,
    Update,
}

impl Knowledge {
    /// Counts one more step of `stream`, which owns these clocks.
    pub(super) fn tick(&mut self, stream: usize) -> u32 {
        self.over.tick(stream);
        self.seen.tick(stream)
    }

    /// See [`Clock::flatten`].
    pub(super) fn flatten(&mut self) {
        self.seen.flatten();
        self.over.flatten();
    }

    /// See [`Clock::based`].
    pub(super) fn based(&self, origin: usize, number: usize) -> Self {
        Self {
            seen: self.seen.based(origin, number),
            over: self.over.based(origin, number),
        }
    }

    /// Joins the clocks of another lane or stream.
    pub(super) fn join(&mut self, other: &Self) {
        self.seen.join(&other.seen);
        self.over.join(&other.over);
    }

    fn sees(&self, stamp: &Stamp) -> bool {
        self.seen.get(stamp.stream as usize) >= stamp.time
    }

    fn outlives(&self, stamp: &Stamp) -> bool {
        self.over.get(stamp.stream as usize) >= stamp.time
    }
}

impl AreaHistory {
    pub(super) fn new(bytes: usize, write: Option<Stamp>) -> Self {
        let all = Cell {
            end: bytes,
            write,
            reads: Vec::new(),
            sender: None,
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

    /// Reads stored packets, even if overwritten since; of the last packet, only the bytes before `filled`.
    pub(super) fn read_packets(
        &mut self,
        range: &Range<usize>,
        filled: usize,
        flag: u64,
        stamp: Stamp,
        knows: &mut Knowledge,
        mut tell: impl FnMut(Wrong),
    ) {
        for at in [range.start, filled, range.end] {
            self.split(at);
        }
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
            knows.over.learn(&sender.over);
            if let Some(seen) = &sender.seen {
                knows.seen.learn(seen);
            }
            cell.note(stamp);
        }
    }

    /// Reads bytes written by launches from `since` on.
    pub(super) fn read(
        &mut self,
        range: &Range<usize>,
        since: u32,
        stamp: Stamp,
        knows: &Knowledge,
        mut tell: impl FnMut(Wrong),
    ) {
        let launch = u64::from(stamp.actor.launch) + 1;
        for cell in self.within(range) {
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
            cell.note(stamp);
        }
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

    /// Writes; with `flag`, packets.
    pub(super) fn write(
        &mut self,
        range: &Range<usize>,
        flag: Option<u64>,
        stamp: Stamp,
        knows: &Knowledge,
        mut tell: impl FnMut(Wrong),
    ) {
        for cell in self.within(range) {
            let mut unread = None;
            for read in cell.reads.drain(..) {
                // A read is over once its step has completed, which packets tell too: `over`, not `seen`.
                if read.actor != stamp.actor && !knows.outlives(&read) {
                    unread.get_or_insert(read);
                }
            }
            let read = unread.is_none() && cell.written_and_read;
            if let Some(read) = unread {
                tell(Wrong::Unordered(read.actor, Was::Read));
            }
            if let Some(write) = cell.write {
                // A packet that was read has certainly arrived, so it may be overwritten.
                let landed = flag.is_some() && read && knows.outlives(&write);
                if cell.sender.as_ref().map(|sender| sender.flag) == flag && flag.is_some() {
                    tell(Wrong::SameFlag(write.actor));
                // Overwriting needs `seen`, since a store whose step is over may still be in flight and land after
                // this one.
                } else if write.actor != stamp.actor && !knows.sees(&write) && !landed {
                    tell(Wrong::Unordered(write.actor, Was::Write));
                }
            }
            cell.write = Some(stamp);
            cell.written_and_read = false;
            cell.packets_of.extend(flag);
            cell.sender = flag.map(|flag| Sender {
                flag,
                filled: true,
                over: knows.over.snapshot(stamp.stream as usize),
                seen: None,
            });
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
    /// Records a read.
    fn note(&mut self, stamp: Stamp) {
        self.written_and_read = true;
        match self
            .reads
            .iter_mut()
            // The last read of a lane subsumes its earlier ones: a step ordered after it is ordered after those as well.
            .find(|read| read.stream == stamp.stream)
        {
            Some(read) => *read = stamp,
            None => self.reads.push(stamp),
        }
    }
}
