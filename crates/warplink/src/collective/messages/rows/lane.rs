//! One lane of a message on the host device, the counterpart of `kernels/messages.cu`.

use super::super::Shape;
use super::super::difference::{ANY_UNITS, difference};
use super::table::{CHUNKS, Decoded, HEADER_BYTES, LEAST_CHUNK, LINE_DATA, SLOT_BYTES, decode};
use crate::device::{Block, DeviceSlice, Fault, HostLanes, LaneFuture, Word};
use crate::error::{Error, ErrorKind, Rank, Result};
use crate::p2p::Direction;
use crate::program::execute::Tables;
use std::ops::Range;
use std::sync::Arc;

/// Memory that the lanes of a rank access.
pub(super) struct Ends {
    pub(super) shape: Shape,
    pub(super) workspaces: Vec<DeviceSlice>,
    pub(super) signals: Vec<DeviceSlice>,
    pub(super) waiting: DeviceSlice,
    pub(super) tables: Arc<Tables>,
    /// Number of lanes that stored sent data directly at its destination.
    pub(super) stored: Word,
    /// Raised on a mismatch of ends, to abort the waits of this rank's other lanes.
    pub(super) fault: Arc<Fault>,
}

/// Header that an end states about a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Header {
    bytes: u64,
    unit: u64,
    units: u64,
    /// From a receiver, where its memory is published; from a sender, the encoding of the first bytes.
    how: u64,
}

/// Encoding of the first bytes of a message.
const AS_NOTHING: u64 = 0;
const AS_PACKETS: u64 = 1;
const AS_LINES: u64 = 2;

/// Encoding of the rest.
const AS_CHUNKS: u32 = 1;
const STORED: u32 = 2;

/// One lane of a message, at one end.
struct End<'a> {
    block: &'a Block<'a>,
    ends: &'a Ends,
    message: Decoded,
    memory: &'a [DeviceSlice],
    lane: usize,
    /// Sequence number of this message on the lane.
    epoch: u64,
}

impl HostLanes for Ends {
    fn run<'a>(&'a self, block: &'a Block<'a>) -> LaneFuture<'a> {
        Box::pin(self.messages(block))
    }
}

impl Ends {
    /// Executes the messages that the block has a lane of.
    async fn messages(&self, block: &Block<'_>) -> Result<()> {
        let memory = block.memory(2)?;
        for message in decode(block.words(0)?) {
            let index = block.index() as usize;
            let blocks = message.first..message.first + message.lanes;
            if !blocks.contains(&index) {
                continue;
            }
            let lane = index - message.first;
            let receives = message.direction == Direction::Receive;
            let number = self.shape.number(receives, message.peer, lane);
            // Only this lane writes its count, so no atomic increment is needed.
            let count = self.waiting.word(8 * number)?;
            let end = End {
                block,
                ends: self,
                message,
                memory,
                lane,
                epoch: block.value(&count) + 1,
            };
            let done = match message.direction {
                Direction::Send => end.send().await,
                Direction::Receive => end.receive().await,
            };
            // A mismatch is final: abort this rank's other lanes, which would wait for the peer's.
            done.inspect_err(|error| {
                if error.kind() == ErrorKind::Mismatch {
                    self.fault.fail(error.clone());
                }
            })?;
            // Counted once the message is complete; the next one uses the slots of the other parity.
            block.set(&count, end.epoch);
        }
        Ok(())
    }
}

impl End<'_> {
    async fn send(&self) -> Result<()> {
        let (shape, peer) = (&self.ends.shape, self.message.peer);
        let units = match self.message.memory.1 {
            Some(_) => self.count()?,
            None => self.all_units(),
        };
        let whole = units <= self.all_units();
        // A count above the limit is stated to the peer, so that both ends fail.
        let how = if whole {
            self.first_of(units)?
        } else {
            AS_NOTHING
        };
        let (range, step) = if whole { self.share(units) } else { (0..0, 0) };
        let own = self.header(units, how);
        let slot = self.slot(peer, self.data(shape.rank))?;
        let words = [own.bytes, own.unit, own.units, own.how];
        // Headers cross: each end states its own before it waits for the peer's.
        self.state(&slot, &words)?;
        let first = self.first_bytes(how, range.len());
        let mut from = range.start + first;
        // The first bytes follow without waiting: their slots are free, since the receiver stated its
        // previous header, which this end has received, after it had completed the message before that.
        self.put(range.start..from, how)?;
        let theirs = self.stated(self.room(peer)).await?;
        let fits = own.bytes == theirs.bytes
            && own.unit == theirs.unit
            && (theirs.units == ANY_UNITS || theirs.units == units);
        // The receiver comes to the same conclusion.
        if !fits || !whole {
            let units = if fits { units } else { theirs.units };
            return Err(self.refusal(theirs.bytes, units));
        }
        if from >= range.end {
            return Ok(());
        }
        let tail = |how: u32| {
            let tail = slot.slice(2 * HEADER_BYTES..2 * HEADER_BYTES + 16)?;
            self.state(&tail, &[how.into()])
        };
        // The receiver has announced its memory, and it is mapped here: store the rest directly.
        if let Some(target) = self.ends.tables.reached(peer, theirs.how) {
            let rest = from..range.end;
            self.gather(rest.clone(), &target.slice(rest)?)?;
            // Counted for diagnostics and tests.
            self.block.increment(&self.ends.stored);
            return tail(STORED);
        }
        let mut number = 0;
        while from < range.end {
            self.block.pause()?;
            let bytes = step.min(range.end - from);
            // The workspace has two chunks, so from the third on wait for credit.
            if number >= 2 {
                self.wait(self.room(peer)).await?;
            }
            let chunk = self.chunk(peer, shape.rank, number)?.slice(0..bytes)?;
            self.gather(from..from + bytes, &chunk)?;
            // The tail doubles as the signal for the first chunk.
            if number == 0 {
                tail(AS_CHUNKS)?;
            } else {
                self.signal(self.data(shape.rank))?;
            }
            from += bytes;
            number += 1;
        }
        Ok(())
    }

    async fn receive(&self) -> Result<()> {
        let (shape, peer) = (&self.ends.shape, self.message.peer);
        let expected = match self.message.memory.1 {
            // The receiver learns the count from the sender.
            _ if self.message.tells => ANY_UNITS,
            Some(_) => self.count()?,
            None => self.all_units(),
        };
        let target = self.memory(self.message.memory.0)?;
        let tables = &self.ends.tables;
        let published = self.message.published;
        let how = published.map_or(0, |at| tables.announced(shape.rank, at, target.address()));
        let own = self.header(expected, how);
        let words = [own.bytes, own.unit, own.units, own.how];
        self.state(&self.slot(peer, self.room(shape.rank))?, &words)?;
        let theirs = self.stated(self.data(peer)).await?;
        let fits = own.bytes == theirs.bytes
            && own.unit == theirs.unit
            && (expected == ANY_UNITS || theirs.units == expected);
        if !fits || theirs.units > self.all_units() {
            return Err(self.refusal(theirs.bytes, theirs.units));
        }
        // One lane suffices to store the count.
        if let (true, 0, Some(count)) = (self.message.tells, self.lane, self.message.memory.1) {
            self.tell(count, theirs.units)?;
        }
        let (range, step) = self.share(theirs.units);
        let mut from = range.start + self.first_bytes(theirs.how, range.len());
        self.take(&target.slice(range.start..from)?, theirs.how)
            .await?;
        // Everything was in packets, or the sender stores directly and signals by the tail.
        if from >= range.end || self.tail(self.data(peer)).await? == STORED {
            return Ok(());
        }
        let mut number = 0;
        while from < range.end {
            self.block.pause()?;
            let bytes = step.min(range.end - from);
            // The tail was the signal for the first chunk.
            if number > 0 {
                self.wait(self.data(peer)).await?;
            }
            let chunk = self.chunk(shape.rank, peer, number)?.slice(0..bytes)?;
            self.block
                .copy(&target.slice(from..from + bytes)?, &chunk)?;
            from += bytes;
            // Whether another chunk will reuse this slot.
            if range.end.saturating_sub(from) > step {
                self.signal(self.room(shape.rank))?;
            }
            number += 1;
        }
        Ok(())
    }

    /// Index of a lane's signal or box for `from`: data at receivers, credit at senders.
    fn data(&self, from: Rank) -> usize {
        self.lane * self.ends.shape.world + from
    }

    fn room(&self, from: Rank) -> usize {
        (self.ends.shape.lanes + self.lane) * self.ends.shape.world + from
    }

    /// Increments a signal of the peer.
    fn signal(&self, number: usize) -> Result<()> {
        let signals = &self.ends.signals[self.message.peer];
        self.block.signals_at(signals).tell(number)
    }

    async fn wait(&self, number: usize) -> Result<()> {
        let signals = &self.ends.signals[self.ends.shape.rank];
        self.block.signals_at(signals).arrived(number).await
    }

    fn header(&self, units: u64, how: u64) -> Header {
        Header {
            bytes: self.message.bytes as u64,
            unit: self.message.unit as u64,
            units,
            how,
        }
    }

    /// Writes words to a slot of the peer, after all earlier writes of this lane.
    fn state(&self, slot: &DeviceSlice, words: &[u64]) -> Result<()> {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.store(slot, &bytes, false)
    }

    /// Waits for the peer's header in one of this rank's boxes, and records that it is waiting.
    async fn stated(&self, number: usize) -> Result<Header> {
        let world = self.ends.shape.world;
        let receives = self.message.direction == Direction::Receive;
        let place = if receives { world } else { 0 } + self.message.peer;
        let word = self.ends.waiting.word(8 * place)?;
        // For diagnosis of timeouts; one lane is enough to tell which peer is awaited.
        if self.lane == 0 {
            self.block.set(&word, 1);
        }
        let mut bytes = Vec::new();
        let slot = self.slot(self.ends.shape.rank, number)?;
        self.load(&slot, (&mut bytes, HEADER_BYTES), false).await?;
        if self.lane == 0 {
            self.block.set(&word, 0);
        }
        let mut words = bytes.chunks_exact(8).map(|word| {
            let mut value = [0; 8];
            value.copy_from_slice(word);
            u64::from_le_bytes(value)
        });
        let mut next = || words.next().unwrap_or(0);
        Ok(Header {
            bytes: next(),
            unit: next(),
            units: next(),
            how: next(),
        })
    }

    /// Waits for the encoding of the rest, which the peer writes to one of this rank's boxes.
    async fn tail(&self, number: usize) -> Result<u32> {
        let slot = self.slot(self.ends.shape.rank, number)?;
        let tail = slot.slice(2 * HEADER_BYTES..2 * HEADER_BYTES + 16)?;
        let mut bytes = Vec::new();
        self.load(&tail, (&mut bytes, 4), false).await?;
        Ok(u32::from_le_bytes(bytes.try_into().unwrap_or_default()))
    }

    /// Encoding of the first bytes when `units` units are sent.
    fn first_of(&self, units: u64) -> Result<u64> {
        let (shape, unit) = (&self.ends.shape, self.message.unit);
        let in_order = self.message.memory.2.is_none();
        let each = self.each(units as usize);
        let address = self.memory(self.message.memory.0)?.address();
        // If there are many rows, locating each takes longer than waiting for the receiver.
        let few = in_order || each <= shape.lined;
        Ok(if !in_order && !unit.is_multiple_of(8) {
            // Each 8 bytes of a packet belong to one row.
            AS_NOTHING
        } else if each <= shape.packed {
            AS_PACKETS
        } else if few && address.is_multiple_of(8) && shape.lined >= unit {
            AS_LINES
        } else {
            AS_NOTHING
        })
    }

    /// Number of leading bytes, of `bytes`, with this encoding.
    fn first_bytes(&self, how: u64, bytes: usize) -> usize {
        let (lined, unit) = (self.ends.shape.lined, self.message.unit);
        match how {
            AS_PACKETS => bytes,
            AS_LINES => bytes.min(lined / unit * unit),
            _ => 0,
        }
    }

    /// Stores bytes `range` of the sent data as packets.
    fn put(&self, range: Range<usize>, how: u64) -> Result<()> {
        if range.is_empty() {
            return Ok(());
        }
        let number = self.data(self.ends.shape.rank);
        let packets = self.packets(self.message.peer, number, how)?;
        let mut bytes = Vec::with_capacity(range.len());
        for piece in self.pieces(range)? {
            bytes.extend_from_slice(&self.block.load(&piece)?);
        }
        self.store(&packets, &bytes, how == AS_LINES)
    }

    /// Waits for packets and stores their data to `target`.
    async fn take(&self, target: &DeviceSlice, how: u64) -> Result<()> {
        if target.bytes() == 0 {
            return Ok(());
        }
        let number = self.data(self.message.peer);
        let packets = self.packets(self.ends.shape.rank, number, how)?;
        let mut bytes = Vec::new();
        self.load(&packets, (&mut bytes, target.bytes()), how == AS_LINES)
            .await?;
        self.block.store(target, &bytes)
    }

    fn store(&self, packets: &DeviceSlice, bytes: &[u8], lines: bool) -> Result<()> {
        let room = if lines {
            128 * bytes.len().div_ceil(LINE_DATA)
        } else {
            2 * bytes.len().next_multiple_of(8)
        };
        let room = packets.slice(0..room)?;
        self.block.store_packets(&room, bytes, self.flag(), lines)?;
        // Wakes the receiving lanes, which may be asleep.
        let signals = &self.ends.signals[self.message.peer];
        self.block.signals_at(signals).ring()
    }

    async fn load(
        &self,
        packets: &DeviceSlice,
        into: (&mut Vec<u8>, usize),
        lines: bool,
    ) -> Result<()> {
        self.block
            .load_packets(packets, into, self.flag(), lines)
            .await
    }

    /// Flag of this message's packets, which never equals initial memory.
    fn flag(&self) -> u64 {
        // Never 0, which is the content of fresh memory.
        1 + self.epoch % u64::from(u32::MAX)
    }

    /// This message's header slot in a box.
    fn slot(&self, owner: Rank, number: usize) -> Result<DeviceSlice> {
        let from = (2 * number + self.parity()) * SLOT_BYTES;
        self.ends.workspaces[owner].slice(from..from + SLOT_BYTES)
    }

    /// This message's packet slot in a box.
    fn packets(&self, owner: Rank, number: usize, how: u64) -> Result<DeviceSlice> {
        let shape = &self.ends.shape;
        let slot = shape.packets_from() + (2 * number + self.parity()) * shape.room();
        let range = if how == AS_LINES {
            slot + shape.lines_from()..slot + shape.room()
        } else {
            slot..slot + shape.lines_from()
        };
        self.ends.workspaces[owner].slice(range)
    }

    fn parity(&self) -> usize {
        (self.epoch % 2) as usize
    }

    fn chunk(&self, owner: Rank, from: Rank, number: usize) -> Result<DeviceSlice> {
        let shape = &self.ends.shape;
        let start = shape.chunks_from() + (2 * self.data(from) + number % 2) * shape.chunk;
        self.ends.workspaces[owner].slice(start..start + shape.chunk)
    }

    fn all_units(&self) -> u64 {
        self.message.bytes.div_ceil(self.message.unit) as u64
    }

    /// The count in device memory; the marker for unknown counts is invalid.
    fn count(&self) -> Result<u64> {
        let count = self.memory(self.message.memory.1.unwrap_or(0))?;
        if !self.message.wide {
            return self.number(count, 0).map(|count| count as u64);
        }
        let mut bytes = [0; 8];
        self.block.read(&count.slice(0..8)?, &mut bytes)?;
        // The marker itself is not a valid count.
        Ok(u64::from_le_bytes(bytes).min(ANY_UNITS - 1))
    }

    /// Stores the count to device memory.
    fn tell(&self, count: usize, units: u64) -> Result<()> {
        let bytes = units.to_le_bytes();
        let bytes = &bytes[..if self.message.wide { 8 } else { 4 }];
        let memory = self.memory(count)?.slice(0..bytes.len())?;
        self.block.write(&memory, bytes)
    }

    fn number(&self, memory: &DeviceSlice, number: usize) -> Result<usize> {
        let mut bytes = [0; 4];
        let slice = memory.slice(4 * number..4 * number + 4)?;
        self.block.read(&slice, &mut bytes)?;
        Ok(u32::from_le_bytes(bytes) as usize)
    }

    fn memory(&self, number: usize) -> Result<&DeviceSlice> {
        self.memory.get(number).ok_or_else(|| {
            Error::new(ErrorKind::Internal, "a launch without memory of a message")
                .with_operation("run a lane")
        })
    }

    /// Maximum bytes a lane moves of `units` units.
    fn each(&self, units: usize) -> usize {
        let unit = self.message.unit;
        let each = units.div_ceil(self.message.lanes) * unit;
        // Small units are grouped to fill the widest accesses.
        if unit < 16 && unit.is_power_of_two() {
            each.next_multiple_of(16)
        } else {
            each
        }
    }

    /// Byte range that this lane moves of `units` units, and its chunk size.
    fn share(&self, units: u64) -> (Range<usize>, usize) {
        let (units, unit) = (units as usize, self.message.unit);
        let each = self.each(units);
        let all = match self.message.memory.1 {
            Some(_) => units * unit,
            // The last unit may be partial.
            None => self.message.bytes.min(units * unit),
        };
        let from = all.min(self.lane * each);
        // Several chunks, so that one is copied out while the next arrives.
        let piece = (each / CHUNKS)
            .max(LEAST_CHUNK)
            .next_multiple_of(16)
            .max(unit);
        let step = piece.min(self.ends.shape.chunk) / unit * unit;
        (from..all.min(from + each), step)
    }

    /// Copies bytes `range` of the sent data to `target`.
    fn gather(&self, range: Range<usize>, target: &DeviceSlice) -> Result<()> {
        let mut at = 0;
        for piece in self.pieces(range)? {
            let end = at + piece.bytes();
            self.block.copy(&target.slice(at..end)?, &piece)?;
            at = end;
        }
        Ok(())
    }

    /// Memory of bytes `range` of the sent data; indexed rows are separate pieces.
    fn pieces(&self, range: Range<usize>) -> Result<Vec<DeviceSlice>> {
        let data = self.memory(self.message.memory.0)?;
        let Some(index) = self.message.memory.2 else {
            return Ok(vec![data.slice(range)?]);
        };
        let (index, unit) = (self.memory(index)?, self.message.unit);
        let rows = range.start / unit..range.end / unit;
        rows.map(|row| {
            let number = self.number(index, row)?;
            data.slice(number * unit..(number + 1) * unit)
        })
        .collect()
    }

    fn refusal(&self, theirs: u64, units: u64) -> Error {
        let Decoded {
            direction,
            bytes,
            unit,
            peer,
            ..
        } = self.message;
        // Counts in device memory are untrusted.
        let length =
            (units != ANY_UNITS).then(|| units.saturating_mul(unit as u64).min(ANY_UNITS - 1));
        difference(direction, bytes as u64, theirs, length)
            .with_rank(self.ends.shape.rank)
            .with_peer(peer)
    }
}
