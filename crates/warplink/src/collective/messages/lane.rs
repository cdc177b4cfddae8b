//! One lane of a message, on a device that takes closures for kernels: what `kernels/messages.cu` does.

use super::Shape;
use super::difference::{ANY_UNITS, difference};
use super::table::{CHUNKS, Decoded, HEADER_BYTES, LEAST_CHUNK, decode};
use crate::device::{Block, DeviceSlice, Fault, HostLanes, LaneFuture};
use crate::error::{Error, ErrorKind, Rank, Result};
use crate::p2p::Direction;
use std::ops::Range;
use std::sync::Arc;

/// What the lanes of a rank reach.
pub(super) struct Ends {
    pub(super) shape: Shape,
    pub(super) workspaces: Vec<DeviceSlice>,
    pub(super) signals: Vec<DeviceSlice>,
    pub(super) waiting: DeviceSlice,
    /// Raised where ends do not fit, to end the waits of this rank's other lanes.
    pub(super) fault: Arc<Fault>,
}

/// What an end states of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Header {
    bytes: u64,
    unit: u64,
    units: u64,
}

/// One lane of a message, at one end.
struct End<'a> {
    block: &'a Block<'a>,
    ends: &'a Ends,
    message: Decoded,
    memory: &'a [DeviceSlice],
    lane: usize,
}

impl HostLanes for Ends {
    fn run<'a>(&'a self, block: &'a Block<'a>) -> LaneFuture<'a> {
        Box::pin(self.messages(block))
    }
}

impl Ends {
    /// Does the messages of which the block has a lane.
    async fn messages(&self, block: &Block<'_>) -> Result<()> {
        let memory = block.memory(2)?;
        for message in decode(block.words(0)?) {
            let index = block.index() as usize;
            let blocks = message.first..message.first + message.lanes;
            if !blocks.contains(&index) {
                continue;
            }
            let end = End {
                block,
                ends: self,
                message,
                memory,
                lane: index - message.first,
            };
            let done = match message.direction {
                Direction::Send => end.send().await,
                Direction::Receive => end.receive().await,
            };
            done.inspect_err(|error| {
                if error.kind() == ErrorKind::Mismatch {
                    self.fault.fail(error.clone());
                }
            })?;
        }
        Ok(())
    }
}

impl End<'_> {
    async fn send(&self) -> Result<()> {
        let (shape, peer) = (&self.ends.shape, self.message.peer);
        self.awaits(self.room(peer)).await?;
        let theirs = self.stated(self.room(peer))?;
        let units = match self.message.memory.1 {
            Some(_) => self.count()?,
            None => self.all_units(),
        };
        let own = self.header(units);
        self.state(peer, self.data(shape.rank), own)?;
        let fits = own.bytes == theirs.bytes
            && own.unit == theirs.unit
            && (theirs.units == ANY_UNITS || theirs.units == units);
        if !fits || units > self.all_units() {
            // The receiver finds the same.
            self.signal(self.data(shape.rank))?;
            let units = if fits { units } else { theirs.units };
            return Err(self.refusal(theirs.bytes, units));
        }
        let (range, step) = self.share(units);
        let (mut from, mut number) = (range.start, 0);
        // The first signal comes also where there is nothing to send.
        loop {
            self.block.pause()?;
            let bytes = step.min(range.end - from);
            if number >= 2 {
                self.wait(self.room(peer)).await?;
            }
            let chunk = self.chunk(peer, shape.rank, number)?.slice(0..bytes)?;
            self.gather(from..from + bytes, &chunk)?;
            self.signal(self.data(shape.rank))?;
            from += bytes;
            number += 1;
            if from >= range.end {
                return Ok(());
            }
        }
    }

    async fn receive(&self) -> Result<()> {
        let (shape, peer) = (&self.ends.shape, self.message.peer);
        let expected = match self.message.memory.1 {
            _ if self.message.tells => ANY_UNITS,
            Some(_) => self.count()?,
            None => self.all_units(),
        };
        let own = self.header(expected);
        self.state(peer, self.room(shape.rank), own)?;
        self.signal(self.room(shape.rank))?;
        self.awaits(self.data(peer)).await?;
        let theirs = self.stated(self.data(peer))?;
        let fits = own.bytes == theirs.bytes
            && own.unit == theirs.unit
            && (expected == ANY_UNITS || theirs.units == expected);
        if !fits || theirs.units > self.all_units() {
            return Err(self.refusal(theirs.bytes, theirs.units));
        }
        if let (true, 0, Some(count)) = (self.message.tells, self.lane, self.message.memory.1) {
            self.tell(count, theirs.units)?;
        }
        let (range, step) = self.share(theirs.units);
        let (mut from, mut number) = (range.start, 0);
        while from < range.end {
            self.block.pause()?;
            let bytes = step.min(range.end - from);
            if number > 0 {
                self.wait(self.data(peer)).await?;
            }
            let chunk = self.chunk(shape.rank, peer, number)?.slice(0..bytes)?;
            let target = self.memory(self.message.memory.0)?;
            self.block
                .copy(&target.slice(from..from + bytes)?, &chunk)?;
            from += bytes;
            // Whether a chunk is to come where this one was.
            if range.end.saturating_sub(from) > step {
                self.signal(self.room(shape.rank))?;
            }
            number += 1;
        }
        Ok(())
    }

    /// The number of a lane's signal, or header, from `from`: of data at receivers, of room at senders.
    fn data(&self, from: Rank) -> usize {
        self.lane * self.ends.shape.world + from
    }

    fn room(&self, from: Rank) -> usize {
        (self.ends.shape.lanes + self.lane) * self.ends.shape.world + from
    }

    /// Counts up a signal of the peer's.
    fn signal(&self, number: usize) -> Result<()> {
        let signals = &self.ends.signals[self.message.peer];
        self.block.signals_at(signals).tell(number)
    }

    async fn wait(&self, number: usize) -> Result<()> {
        let signals = &self.ends.signals[self.ends.shape.rank];
        self.block.signals_at(signals).arrived(number).await
    }

    /// Waits for the peer to begin, and tells that it does.
    async fn awaits(&self, number: usize) -> Result<()> {
        let world = self.ends.shape.world;
        let receives = self.message.direction == Direction::Receive;
        let place = if receives { world } else { 0 } + self.message.peer;
        let word = self.ends.waiting.word(8 * place)?;
        if self.lane == 0 {
            self.block.set(&word, 1);
        }
        self.wait(number).await?;
        if self.lane == 0 {
            self.block.set(&word, 0);
        }
        Ok(())
    }

    fn header(&self, units: u64) -> Header {
        Header {
            bytes: self.message.bytes as u64,
            unit: self.message.unit as u64,
            units,
        }
    }

    fn state(&self, owner: Rank, number: usize, header: Header) -> Result<()> {
        let words = [header.bytes, header.unit, header.units];
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let at = HEADER_BYTES * number;
        let target = self.ends.workspaces[owner].slice(at..at + bytes.len())?;
        self.block.store(&target, &bytes)
    }

    fn stated(&self, number: usize) -> Result<Header> {
        let at = HEADER_BYTES * number;
        let own = &self.ends.workspaces[self.ends.shape.rank];
        let bytes = self.block.load(&own.slice(at..at + 24)?)?;
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
        })
    }

    fn chunk(&self, owner: Rank, from: Rank, number: usize) -> Result<DeviceSlice> {
        let shape = &self.ends.shape;
        let start = shape.headers_bytes() + (2 * self.data(from) + number % 2) * shape.chunk;
        self.ends.workspaces[owner].slice(start..start + shape.chunk)
    }

    fn all_units(&self) -> u64 {
        self.message.bytes.div_ceil(self.message.unit) as u64
    }

    /// The count in device memory. What stands for an unknown one is none.
    fn count(&self) -> Result<u64> {
        let count = self.memory(self.message.memory.1.unwrap_or(0))?;
        if !self.message.wide {
            return self.number(count, 0).map(|count| count as u64);
        }
        let mut bytes = [0; 8];
        self.block.read(&count.slice(0..8)?, &mut bytes)?;
        Ok(u64::from_le_bytes(bytes).min(ANY_UNITS - 1))
    }

    /// Stores the count in device memory.
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

    /// Which bytes this lane moves of `units` units, and the bytes of its chunks.
    fn share(&self, units: u64) -> (Range<usize>, usize) {
        let (units, unit) = (units as usize, self.message.unit);
        let mut each = units.div_ceil(self.message.lanes) * unit;
        // Of small units a lane has as many as the widest accesses need.
        if unit < 16 && unit.is_power_of_two() {
            each = each.next_multiple_of(16);
        }
        let all = match self.message.memory.1 {
            Some(_) => units * unit,
            // The last unit may be short.
            None => self.message.bytes.min(units * unit),
        };
        let from = all.min(self.lane * each);
        // Several chunks, so that one is copied out while the next one comes.
        let piece = (each / CHUNKS)
            .max(LEAST_CHUNK)
            .next_multiple_of(16)
            .max(unit);
        let step = piece.min(self.ends.shape.chunk) / unit * unit;
        (from..all.min(from + each), step)
    }

    /// Copies the bytes `range` of what is sent to `chunk`.
    fn gather(&self, range: Range<usize>, chunk: &DeviceSlice) -> Result<()> {
        let data = self.memory(self.message.memory.0)?;
        let Some(index) = self.message.memory.2 else {
            return self.block.copy(chunk, &data.slice(range)?);
        };
        let (index, unit) = (self.memory(index)?, self.message.unit);
        for (place, from) in range.clone().step_by(unit).enumerate() {
            let number = self.number(index, range.start / unit + place)?;
            let row = data.slice(number * unit..(number + 1) * unit)?;
            let at = from - range.start;
            self.block.copy(&chunk.slice(at..at + unit)?, &row)?;
        }
        Ok(())
    }

    fn refusal(&self, theirs: u64, units: u64) -> Error {
        let Decoded {
            direction,
            bytes,
            unit,
            peer,
            ..
        } = self.message;
        // A count may be any number.
        let length =
            (units != ANY_UNITS).then(|| units.saturating_mul(unit as u64).min(ANY_UNITS - 1));
        difference(direction, bytes as u64, theirs, length)
            .with_rank(self.ends.shape.rank)
            .with_peer(peer)
    }
}
