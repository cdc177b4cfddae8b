//! Messages that all ranks know of, and the ends that a rank has of them.

use crate::common::{allocate, downloaded};
use crate::expected::Random;
use warplink::collective::Message;
use warplink::device::{DeviceSlice, Stream};
use warplink::{Collectives, Communicator, Error};

/// Bytes around what is received, and what they are.
const GUARD: usize = 48;
const GUARD_BYTE: u8 = 0x5a;

/// A message, as all ranks know it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Planned {
    pub(crate) from: usize,
    pub(crate) to: usize,
    pub(crate) bytes: usize,
    pub(crate) seed: u64,
}

impl Planned {
    fn content(&self) -> Vec<u8> {
        let mut random = Random::new(self.seed);
        (0..self.bytes).map(|_| random.next() as u8).collect()
    }
}

/// One end of a message, with its memory.
pub(crate) struct Held {
    planned: Planned,
    pub(crate) sends: bool,
    whole: DeviceSlice,
    start: usize,
}

impl Held {
    pub(crate) fn new(comm: &Communicator, planned: Planned, sends: bool) -> Self {
        // Any start, also where the other end has another.
        let start = GUARD + (planned.seed as usize + usize::from(sends)) % 19;
        let bytes = start + planned.bytes + GUARD;
        let whole = allocate(comm, bytes);
        let held = Self {
            planned,
            sends,
            whole,
            start,
        };
        held.reset(comm);
        held
    }

    /// Fresh content where it is sent, and nothing of it where it is received.
    pub(crate) fn reset(&self, comm: &Communicator) {
        let mut bytes = vec![GUARD_BYTE; self.whole.bytes()];
        if self.sends {
            bytes[self.start..self.start + self.planned.bytes]
                .copy_from_slice(&self.planned.content());
        }
        comm.device().upload(&self.whole, &bytes).unwrap();
    }

    fn memory(&self) -> DeviceSlice {
        let end = self.start + self.planned.bytes;
        self.whole.slice(self.start..end).unwrap()
    }

    pub(crate) fn check(&self, comm: &Communicator) {
        let bytes = downloaded(comm, &self.whole);
        let content = self.planned.content();
        let (before, rest) = bytes.split_at(self.start);
        let (got, after) = rest.split_at(content.len());
        assert!(got == content, "{:?} came otherwise", self.planned);
        let guards = before.iter().chain(after);
        assert!(
            guards.into_iter().all(|byte| *byte == GUARD_BYTE),
            "{:?}: bytes around it were touched",
            self.planned
        );
    }
}

/// The ends of a rank, in an order of its own in which those of a pair are in theirs.
pub(crate) fn held(comm: &Communicator, plan: &[Planned], seed: u64) -> Vec<Held> {
    let rank = comm.rank();
    let mut random = Random::new(seed + 77 * rank as u64);
    let mut lists: Vec<Vec<Held>> = Vec::new();
    for peer in 0..comm.world() {
        for sends in [true, false] {
            let (from, to) = if sends { (rank, peer) } else { (peer, rank) };
            let of_pair = plan
                .iter()
                .filter(|planned| (planned.from, planned.to) == (from, to));
            let mut list: Vec<Held> = of_pair
                .map(|planned| Held::new(comm, *planned, sends))
                .collect();
            list.reverse();
            lists.push(list);
        }
    }
    let mut all = Vec::new();
    loop {
        lists.retain(|list| !list.is_empty());
        if lists.is_empty() {
            return all;
        }
        let which = random.below(lists.len());
        all.extend(lists[which].pop());
    }
}

pub(crate) fn enqueue(
    collectives: &Collectives,
    held: &[Held],
    stream: &Stream,
) -> Result<(), Error> {
    let memory: Vec<DeviceSlice> = held.iter().map(Held::memory).collect();
    let messages: Vec<Message<'_>> = held
        .iter()
        .zip(&memory)
        .map(|(held, memory)| {
            if held.sends {
                Message::send(held.planned.to, memory)
            } else {
                Message::receive(held.planned.from, memory)
            }
        })
        .collect();
    collectives.send_receive(&messages, stream)
}

/// Enqueues groups one after another, waits for them, and checks what came.
pub(crate) fn exchange(
    comm: &Communicator,
    collectives: &Collectives,
    groups: &[Vec<Held>],
    stream: &Stream,
) {
    for group in groups {
        enqueue(collectives, group, stream).unwrap();
    }
    comm.synchronize(stream).unwrap();
    groups.iter().flatten().for_each(|held| held.check(comm));
}

/// Messages between ranks at random, some of them to the same rank or to the sender, some empty.
pub(crate) fn plan(random: &mut Random, ranks: usize, most: usize) -> Vec<Planned> {
    let count = 1 + random.below(3 * ranks);
    (0..count)
        .map(|_| Planned {
            from: random.below(ranks),
            to: random.below(ranks),
            bytes: [0, 1, 4 * (1 + random.below(50)), random.below(most)][random.below(4)],
            seed: random.next(),
        })
        .collect()
}
