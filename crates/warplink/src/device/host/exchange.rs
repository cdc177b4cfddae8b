//! Moves bytes between host ranks through outboxes in shared memory.
//!
//! Each rank has an outbox with a ring of chunks for each peer, a count of chunks posted and a count of
//! chunks that the peer has consumed. Sends and receives progress together, chunk by chunk, in whatever order
//! peers allow. A waiting rank sleeps on its own doorbell, which peers ring after posting or consuming a
//! chunk.

use super::doorbell::{self, BellWords, Doorbell};
use super::operation::Context;
use super::{elementwise, memory, words};
use crate::deadline::Deadline;
use crate::device::{DeviceSlice, RankCall, Reduction, Word};
use crate::error::{Error, Rank, Result};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

/// Size and number of chunks for a peer: two, so that one is filled while the other is drained.
const CHUNK: usize = 64 << 10;
const CHUNKS: u64 = 2;

/// The two counters are on separate cache lines, to avoid false sharing. Bytes between those of the first
/// peer identify the outbox's owner.
pub(super) const HEADER: usize = 128;
/// Offset of the counter of consumed chunks, in a cache line of its own.
const TAKEN: usize = 64;

/// Bytes of an outbox for one peer.
const BOX: usize = HEADER + CHUNKS as usize * CHUNK;

/// Maximum length of a call's header.
const MAX_CALL_HEADER: usize = CHUNK / 2;

/// Size of an outbox; the rank's doorbell follows the chunks.
pub(super) const fn outbox_bytes(world: usize) -> usize {
    BOX * world + 64
}

/// The outboxes of all ranks.
#[derive(Debug)]
pub(super) struct Exchange {
    pub(super) rank: Rank,
    outboxes: Vec<DeviceSlice>,
    bells: Vec<Doorbell>,
    /// Number of polls before a rank sleeps.
    looks: u32,
    aborted: AtomicBool,
}

/// A send or receive in progress.
struct Move {
    peer: Rank,
    chunks: DeviceSlice,
    posted: Word,
    taken: Word,
    sends: bool,
    /// Header before the data: the one to send, or the one expected.
    header: Vec<u8>,
    data: Option<DeviceSlice>,
    position: usize,
    end: usize,
    /// Whether chunks may be moved: those of a receive only once its header is known to be the expected one, which may arrive at
    /// any moment.
    matched: bool,
}

/// An unexpected header and its sender.
type UnexpectedHeader = Option<(Rank, Vec<u8>)>;

impl Exchange {
    pub(super) fn new(rank: Rank, outboxes: Vec<DeviceSlice>, processors: usize) -> Result<Self> {
        let place = BOX * outboxes.len();
        let bells = outboxes.iter().map(|outbox| Doorbell::at(outbox, place));
        Ok(Self {
            rank,
            bells: bells.collect::<Result<_>>()?,
            looks: doorbell::looks(processors, outboxes.len()),
            outboxes,
            aborted: AtomicBool::new(false),
        })
    }

    pub(super) fn world(&self) -> usize {
        self.outboxes.len()
    }

    pub(super) fn abort(&self) {
        // Pairs with the acquire load in `advance`'s loop.
        self.aborted.store(true, Ordering::Release);
    }

    /// Filters out this rank's own entry.
    pub(super) fn of_others(&self, all: &[DeviceSlice]) -> Vec<(Rank, DeviceSlice)> {
        let others = all.iter().cloned().enumerate();
        others.filter(|(peer, _)| *peer != self.rank).collect()
    }

    /// The call that sends `parts[p]` to rank p and reduces what arrives.
    pub(super) fn reduced(&self, parts: &[DeviceSlice], reduction: Reduction) -> RankCall {
        let receives = vec![reduction.target.clone(); self.world()];
        RankCall {
            headers: Vec::new(),
            sends: self.of_others(parts),
            receives: self.of_others(&receives),
            reduction: Some(reduction),
        }
    }

    /// Executes sends and receives concurrently.
    pub(super) fn advance(
        &self,
        context: &Context,
        sends: &[(Rank, DeviceSlice)],
        receives: &[(Rank, DeviceSlice)],
    ) -> Result<()> {
        let call = RankCall {
            sends: sends.to_vec(),
            receives: receives.to_vec(),
            ..RankCall::default()
        };
        self.call(context, &call, None).map(drop)
    }

    /// Executes a call whose headers must match; returns the first unexpected header.
    pub(super) fn call(
        &self,
        context: &Context,
        call: &RankCall,
        deadline: Option<Deadline>,
    ) -> Result<UnexpectedHeader> {
        let mut sends = self.moves(call, true)?;
        let mut receives = self.moves(call, false)?;
        // In rank order, which determines the order of the reduction.
        if let Some(reduction) = &call.reduction {
            receives.sort_by_key(|side| side.peer);
            let bytes = reduction.target.bytes();
            let data = receives.iter().filter_map(|side| side.data.as_ref());
            let mut all = data.chain([&reduction.own]);
            if all.any(|one| one.bytes() != bytes) {
                return Err(Error::invalid("a reduction of parts of different lengths"));
            }
            if receives.is_empty() {
                let Reduction { op, dtype, own, .. } = reduction;
                let own = std::slice::from_ref(own);
                elementwise::reduce(*op, *dtype, &reduction.target, own)?;
            }
        }
        loop {
            // Read before polling, so that an event during the poll prevents sleeping.
            let seen = self.bells[self.rank].count();
            let mut moved = false;
            for side in first_of_each(&mut sends) {
                moved |= self.step(context, side)?;
            }
            // Before data is consumed: a mismatch must leave the receive buffers untouched.
            for number in 0..receives.len() {
                if let Some(other) = self.unexpected_header(&mut receives, number)? {
                    return Ok(Some(other));
                }
            }
            match &call.reduction {
                Some(reduction) if !receives.is_empty() => {
                    // Only overwrite data that has been sent.
                    let sent = sends.iter().map(|side| side.position).min();
                    moved |= self.combine(context, reduction, &mut receives, sent)?;
                }
                Some(_) => {}
                None => {
                    for side in first_of_each(&mut receives) {
                        moved |= self.step(context, side)?;
                    }
                }
            }
            sends.retain(Move::goes_on);
            receives.retain(Move::goes_on);
            if sends.is_empty() && receives.is_empty() {
                return Ok(None);
            }
            if moved {
                continue;
            }
            // Only when no progress is possible, since it takes locks.
            context.check()?;
            if self.aborted.load(Ordering::Acquire) {
                return Err(aborted());
            }
            if let Some(deadline) = deadline.filter(Deadline::passed) {
                return Err(deadline.expired("data from other ranks"));
            }
            doorbell::rest(&self.bells[self.rank], seen, self.looks);
        }
    }

    /// The sends or the receives of a call.
    fn moves(&self, call: &RankCall, sends: bool) -> Result<Vec<Move>> {
        let data = if sends { &call.sends } else { &call.receives };
        let mut moves = Vec::new();
        for head in &call.headers {
            let header = if sends { &head.sent } else { &head.expected };
            moves.push(self.side(head.peer, sends, header.clone(), None)?);
        }
        // Data of a peer with a header follows that header in the same chunks.
        for (peer, data) in data {
            let mut with_head = moves.iter_mut().take(call.headers.len());
            match with_head.find(|side: &&mut Move| side.peer == *peer && side.data.is_none()) {
                Some(side) => {
                    side.end += data.bytes();
                    side.data = Some(data.clone());
                }
                None => moves.push(self.side(*peer, sends, Vec::new(), Some(data))?),
            }
        }
        moves.retain(Move::goes_on);
        Ok(moves)
    }

    fn side(
        &self,
        peer: Rank,
        sends: bool,
        header: Vec<u8>,
        data: Option<&DeviceSlice>,
    ) -> Result<Move> {
        let (from, to) = if sends {
            (self.rank, peer)
        } else {
            (peer, self.rank)
        };
        let outbox = self.outboxes.get(from).filter(|_| to < self.world());
        let outbox = outbox.ok_or_else(|| {
            Error::invalid(format!("rank {peer} is out of range")).with_peer(peer)
        })?;
        // A multiple of every element size, so that chunks hold whole elements.
        if header.len() > MAX_CALL_HEADER || !header.len().is_multiple_of(16) {
            return Err(Error::invalid(format!(
                "a call header of {} bytes; expected a multiple of 16, at most {MAX_CALL_HEADER}",
                header.len()
            )));
        }
        let start = to * BOX;
        let header_is_empty = header.is_empty();
        Ok(Move {
            peer,
            chunks: outbox.slice(start + HEADER..start + BOX)?,
            posted: outbox.word(start)?,
            taken: outbox.word(start + TAKEN)?,
            sends,
            end: header.len() + data.map_or(0, DeviceSlice::bytes),
            header,
            data: data.cloned(),
            position: 0,
            matched: sends || header_is_empty,
        })
    }

    /// Moves one chunk if the peer is ready for it.
    fn step(&self, context: &Context, side: &mut Move) -> Result<bool> {
        let Some(chunk) = side.next()? else {
            return Ok(false);
        };
        context.delay();
        let data = side.data_of(&chunk)?;
        if side.sends {
            if side.position == 0 && !side.header.is_empty() {
                memory::write_bytes(&side.chunks(&chunk, 0..side.header.len())?, &side.header)?;
            }
            if let Some((own, there)) = data {
                memory::copy(&there, &own);
            }
        } else if let Some((own, there)) = data {
            memory::copy(&own, &there);
        }
        self.done(side, &chunk)?;
        Ok(true)
    }

    /// Advances the counter and rings the peer's doorbell.
    fn done(&self, side: &mut Move, chunk: &Chunk) -> Result<()> {
        let word = if side.sends {
            &side.posted
        } else {
            &side.taken
        };
        // Release store: the peer sees the chunk's content before the count.
        words::set(word, chunk.number + 1);
        side.position = chunk.range.end;
        // After the counter, which the peer reads again when it wakes.
        doorbell::ring(&self.bells[side.peer]);
        Ok(())
    }

    /// The peer's header, if its first chunk has arrived and it differs from the expected one.
    fn unexpected_header(&self, receives: &mut [Move], number: usize) -> Result<UnexpectedHeader> {
        let side = &mut receives[number];
        if side.matched {
            return Ok(None);
        }
        let Some(chunk) = side.arrived()? else {
            return Ok(None);
        };
        let mut header = vec![0; side.header.len()];
        memory::read_bytes(&side.chunks(&chunk, 0..header.len())?, &mut header)?;
        side.matched = header == side.header;
        Ok((!side.matched).then_some((side.peer, header)))
    }

    /// Combines one chunk of all peers with this rank's, once all have arrived and the target has been sent.
    fn combine(
        &self,
        context: &Context,
        reduction: &Reduction,
        sides: &mut [Move],
        sent: Option<usize>,
    ) -> Result<bool> {
        let chunks = sides
            .iter()
            .map(Move::next)
            .collect::<Result<Option<Vec<_>>>>()?;
        let Some(chunks) = chunks else {
            return Ok(false);
        };
        let Some(first) = chunks.first() else {
            return Ok(false);
        };
        // The target may alias data that is still to be sent.
        if sent.is_some_and(|sent| sent < first.range.end) {
            return Ok(false);
        }
        context.delay();
        let head = sides.first().map_or(0, |side| side.header.len());
        let start = first.range.start.max(head);
        if start < first.range.end {
            let inside = start - first.range.start..first.range.end - first.range.start;
            let here = start - head..first.range.end - head;
            let there = sides.iter().zip(&chunks);
            let there = there.map(|(side, chunk)| side.chunks(chunk, inside.clone()));
            let mut sources = there.collect::<Result<Vec<_>>>()?;
            // In rank order, so that all ranks compute identical bits.
            let before = sides.iter().filter(|side| side.peer < self.rank).count();
            sources.insert(before, reduction.own.slice(here.clone())?);
            let target = reduction.target.slice(here)?;
            elementwise::reduce(reduction.op, reduction.dtype, &target, &sources)?;
        }
        for (side, chunk) in sides.iter_mut().zip(&chunks) {
            self.done(side, chunk)?;
        }
        Ok(true)
    }
}

/// Next chunk of a move: its sequence number and byte range.
struct Chunk {
    number: u64,
    range: Range<usize>,
}

impl Move {
    fn goes_on(&self) -> bool {
        self.position < self.end
    }

    /// Next chunk, if it may be moved and the peer has made it available.
    fn next(&self) -> Result<Option<Chunk>> {
        if self.matched {
            self.arrived()
        } else {
            Ok(None)
        }
    }

    /// Next chunk, if the peer has made it available.
    fn arrived(&self) -> Result<Option<Chunk>> {
        // Acquire loads: the chunk's content is visible once its count is.
        let (posted, taken) = (words::load(&self.posted), words::load(&self.taken));
        let (number, ready) = if self.sends {
            (posted, posted.wrapping_sub(taken) < CHUNKS)
        } else {
            (taken, posted != taken)
        };
        let range = self.position..(self.position + CHUNK).min(self.end);
        Ok(ready.then_some(Chunk { number, range }))
    }

    /// Bytes `range` of a chunk.
    fn chunks(&self, chunk: &Chunk, range: Range<usize>) -> Result<DeviceSlice> {
        let start = (chunk.number % CHUNKS) as usize * CHUNK;
        self.chunks.slice(start + range.start..start + range.end)
    }

    /// Data of a chunk: this rank's memory, and the chunk's.
    fn data_of(&self, chunk: &Chunk) -> Result<Option<(DeviceSlice, DeviceSlice)>> {
        let head = self.header.len();
        let (from, to) = (chunk.range.start.max(head), chunk.range.end);
        let Some(data) = self.data.as_ref().filter(|_| from < to) else {
            return Ok(None);
        };
        let there = from - chunk.range.start..to - chunk.range.start;
        let own = data.slice(from - head..to - head)?;
        Ok(Some((own, self.chunks(chunk, there)?)))
    }
}

/// First move of each peer: moves of one pair and direction share the chunks, so they run one after another.
fn first_of_each(moves: &mut [Move]) -> impl Iterator<Item = &mut Move> {
    let mut busy: Vec<Rank> = Vec::new();
    moves.iter_mut().filter(move |side| {
        let first = !busy.contains(&side.peer);
        if first {
            busy.push(side.peer);
        }
        first
    })
}

pub(super) fn aborted() -> Error {
    Error::closed("the collectives were aborted")
        .with_help("join again with the ranks that are left")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ErrorKind;
    use crate::device::{AllocationKind, CallHeader, FaultSet, ReduceOp};
    use crate::dtype::DType;
    use std::sync::Arc;
    use std::time::Duration;

    fn context() -> Context {
        Context::new(Arc::default(), Arc::<FaultSet>::default(), None, 1)
    }

    fn exchanges(world: usize) -> Vec<Exchange> {
        let outboxes = (0..world)
            .map(|_| memory::allocate(outbox_bytes(world), AllocationKind::Plain).unwrap());
        let outboxes: Vec<DeviceSlice> = outboxes.collect();
        let of_rank = |rank| Exchange::new(rank, outboxes.clone(), 2).unwrap();
        (0..world).map(of_rank).collect()
    }

    /// One thread for each rank, with its exchange and rank.
    fn ranks(world: usize, body: impl Fn(&Exchange) + Sync) {
        std::thread::scope(|scope| {
            for exchange in exchanges(world) {
                let body = &body;
                scope.spawn(move || body(&exchange));
            }
        });
    }

    fn memory_of(values: &[i32]) -> DeviceSlice {
        let bytes: Vec<u8> = values
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect();
        let slice = memory::allocate(bytes.len(), AllocationKind::Plain).unwrap();
        memory::write_bytes(&slice, &bytes).unwrap();
        slice
    }

    fn values(slice: &DeviceSlice) -> Vec<i32> {
        let mut bytes = vec![0; slice.bytes()];
        memory::read_bytes(slice, &mut bytes).unwrap();
        let values = bytes.as_chunks::<4>().0.iter();
        values.map(|bytes| i32::from_le_bytes(*bytes)).collect()
    }

    fn headers(exchange: &Exchange, sent: u8) -> Vec<CallHeader> {
        let others = (0..exchange.world()).filter(|peer| *peer != exchange.rank);
        let all = others.map(|peer| CallHeader {
            peer,
            sent: vec![sent; 112],
            expected: vec![1; 112],
        });
        all.collect()
    }

    #[test]
    fn any_length_is_reduced_in_place() {
        for (world, count) in [(2, 1), (2, 100_001), (3, 16_356), (3, 16_357), (4, 40_000)] {
            ranks(world, |exchange| {
                let own: Vec<i32> = (0..count)
                    .map(|at| at * (exchange.rank as i32 + 1))
                    .collect();
                let memory = memory_of(&own);
                let mut call = exchange.reduced(
                    &vec![memory.clone(); world],
                    Reduction {
                        op: ReduceOp::Sum,
                        dtype: DType::I32,
                        own: memory.clone(),
                        target: memory.clone(),
                    },
                );
                call.headers = headers(exchange, 1);
                let limit = Deadline::after(Duration::from_secs(20));
                assert_eq!(exchange.call(&context(), &call, Some(limit)).unwrap(), None);
                let factor = (1..=world as i32).sum::<i32>();
                let expected: Vec<i32> = (0..count).map(|at| at * factor).collect();
                assert_eq!(values(&memory), expected, "rank {}", exchange.rank);
            });
        }
    }

    /// A chunk that arrives after its header was looked for is not taken.
    #[test]
    fn no_data_is_taken_before_its_header_is_known() {
        let both = exchanges(2);
        let memory = memory_of(&[-1; 10]);
        let call = |rank: usize| RankCall {
            headers: headers(&both[rank], 2),
            sends: vec![(1 - rank, memory_of(&[5; 10]))],
            receives: vec![(1 - rank, memory.clone())],
            reduction: None,
        };
        let mut receives = both[0].moves(&call(0), false).unwrap();
        assert_eq!(both[0].unexpected_header(&mut receives, 0).unwrap(), None);
        let mut sends = both[1].moves(&call(1), true).unwrap();
        assert!(both[1].step(&context(), &mut sends[0]).unwrap());
        assert!(!both[0].step(&context(), &mut receives[0]).unwrap());
        let other = both[0].unexpected_header(&mut receives, 0).unwrap();
        assert_eq!(other, Some((1, vec![2; 112])));
        assert_eq!(values(&memory), [-1; 10]);
    }

    #[test]
    fn differing_header_names_the_peer_and_writes_nothing() {
        ranks(2, |exchange| {
            let peer = 1 - exchange.rank;
            let memory = memory_of(&[-1; 1000]);
            let call = RankCall {
                headers: headers(exchange, if exchange.rank == 0 { 1 } else { 2 }),
                sends: vec![(peer, memory_of(&[5; 1000]))],
                receives: vec![(peer, memory.clone())],
                reduction: None,
            };
            let limit = Deadline::after(Duration::from_secs(20));
            let other = exchange.call(&context(), &call, Some(limit)).unwrap();
            let (expected, written) = if exchange.rank == 0 {
                (Some((1, vec![2; 112])), -1)
            } else {
                (None, 5)
            };
            assert_eq!((other, values(&memory)[999]), (expected, written));
        });
    }

    #[test]
    fn a_call_that_a_peer_does_not_make_ends_at_its_deadline() {
        ranks(2, |exchange| {
            if exchange.rank == 0 {
                let call = RankCall {
                    headers: headers(exchange, 1),
                    ..RankCall::default()
                };
                let limit = Deadline::after(Duration::from_millis(50));
                let late = exchange.call(&context(), &call, Some(limit)).unwrap_err();
                assert_eq!(late.kind(), ErrorKind::Timeout);
            }
        });
    }
}
