//! Accesses of lanes to bytes, and the order between them.

use crate::program::machine::Actor;
use crate::program::verify::clock::{Clock, Snapshot};
use std::collections::BTreeMap;
use std::ops::Range;

/// In the place of a lane: the rank's stream, between two launches.
pub(super) const STREAM: u32 = u32::MAX;

/// An access, as it is remembered.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stamp {
    pub(super) actor: Actor,
    pub(super) stream: u32,
    pub(super) time: u32,
}

/// What a lane knows.
#[derive(Clone, Debug)]
pub(super) struct Knowledge {
    /// What it sees: what signals and the order of streams hand on.
    pub(super) seen: Clock,
    /// What is over: that, and what packets tell. A packet orders no other memory, but who sent it had
    /// ended its earlier steps: what these read may be overwritten.
    pub(super) over: Clock,
}

/// A packet's writer, as it was.
#[derive(Clone, Debug)]
struct Sender {
    /// The launch, counted from 1, which the flag says.
    flag: u64,
    /// Whether it stored an element here, and not only the rest of a packet.
    filled: bool,
    over: Snapshot,
    /// What the sender sees, where it hands that on as a signal does.
    seen: Option<Snapshot>,
}

/// Bytes that the same accesses have touched.
#[derive(Clone, Debug)]
struct Cell {
    end: usize,
    write: Option<Stamp>,
    /// Reads since the write.
    reads: Vec<Stamp>,
    sender: Option<Sender>,
    /// The launches whose packets it held, counted from 1.
    packets_of: Vec<u64>,
    /// Whether anything read what is written.
    written_and_read: bool,
    /// In which launch, counted from 1, lanes read it before they wrote it.
    read_in: u64,
    /// In which launch lanes wrote it.
    written_in: u64,
}

/// The bytes of a tensor, or of an area of a workspace.
#[derive(Clone, Debug)]
pub(super) struct Bytes {
    cells: BTreeMap<usize, Cell>,
}

/// What is wrong with an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wrong {
    /// Nothing orders it with this one.
    Unordered(Actor, Was),
    /// It reads bytes that nothing wrote.
    Unwritten,
    /// It reads bytes that nothing wrote since this step of an earlier run.
    Stale(Actor),
    /// It waits for packets that were overwritten before it read them.
    Overwritten(Actor),
    /// It stores packets where packets of the same launch were stored.
    SameFlag(Actor),
}

/// What an earlier access did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Was {
    Read,
    Write,
}

/// How lanes of a launch touched bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Touch {
    Read,
    Write,
    Update,
}

impl Knowledge {
    /// Counts one more step of `stream`, whose knowledge it is.
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

    /// Adds what another lane or stream knows.
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

impl Bytes {
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

    /// Whether all packets of launch `flag` are there, or were.
    pub(super) fn has_packets(&mut self, range: &Range<usize>, flag: u64) -> bool {
        self.within(range)
            .all(|cell| cell.packets_of.iter().rev().any(|of| *of == flag))
    }

    /// The lanes that stored the packets of launch `flag`.
    pub(super) fn senders(&mut self, range: &Range<usize>, flag: u64) -> impl Iterator<Item = u32> {
        let sent = self.within(range).filter_map(move |cell| {
            let sender = cell.sender.as_ref()?;
            (sender.flag == flag).then_some(cell.write?.actor.lane)
        });
        // What one step stored is many cells of one lane.
        let mut last = None;
        sent.filter(move |lane| last.replace(*lane) != Some(*lane))
    }

    /// Reads packets that are there, or were; of the last one, what lies before `filled`.
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
            if let (true, Some(write)) = (sender.flag != flag, cell.write) {
                tell(Wrong::Overwritten(write.actor));
            } else if *start < filled && !sender.filled {
                tell(Wrong::Unwritten);
            }
            knows.over.learn(&sender.over);
            if let Some(seen) = &sender.seen {
                knows.seen.learn(seen);
            }
            cell.note(stamp);
        }
    }

    /// Reads what launches from `since` on have written.
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
            if cell.written_in != launch {
                cell.read_in = launch;
            }
            cell.note(stamp);
        }
    }

    /// Hands what a lane knows on with the packets that it has stored.
    pub(super) fn hand_on(&mut self, range: &Range<usize>, stream: usize, knows: &Knowledge) {
        for cell in self.within(range) {
            if let Some(sender) = &mut cell.sender {
                sender.seen = Some(knows.seen.snapshot(stream));
            }
        }
    }

    /// Notes that what was stored of `range` is the rest of a packet, and no element.
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
                if read.actor != stamp.actor && !knows.outlives(&read) {
                    unread.get_or_insert(read);
                }
            }
            let read = unread.is_none() && cell.written_and_read;
            if let Some(read) = unread {
                tell(Wrong::Unordered(read.actor, Was::Read));
            }
            if let Some(write) = cell.write {
                // A packet that was read has landed.
                let landed = flag.is_some() && read && knows.outlives(&write);
                if cell.sender.as_ref().map(|sender| sender.flag) == flag && flag.is_some() {
                    tell(Wrong::SameFlag(write.actor));
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
            if stamp.actor.lane != STREAM {
                cell.written_in = u64::from(stamp.actor.launch) + 1;
            }
        }
    }

    /// How lanes of a launch touched the bytes, where they did: neighbours that were touched alike are one.
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
    /// Notes a read.
    fn note(&mut self, stamp: Stamp) {
        self.written_and_read = true;
        match self
            .reads
            .iter_mut()
            .find(|read| read.stream == stamp.stream)
        {
            Some(read) => *read = stamp,
            None => self.reads.push(stamp),
        }
    }
}
