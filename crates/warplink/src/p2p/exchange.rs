//! Matching the two ends of transfers, in batches, pairwise, without a barrier.
//!
//! Every end is published in the store under a key of its own, which its peer takes: the two
//! ranks, the tag, the direction, and how many with these were exchanged before. So batches need
//! not be cut alike on the two ranks. All ends of a batch are published before any is waited for.
//!
//! Both ranks always publish, whether or not their mappings are cached, and a handle names the
//! generation of its registration: a rank whose cache is filled while its peer's is not neither
//! waits for what does not come nor uses a mapping of what was replaced.
//!
//! A rank that cannot bind a program refuses the ends of it: it publishes why, so that those which
//! exchange with it need not wait for their deadlines.

use super::recording::{Place, Recording};
use super::request::{Direction, Lane, TransferRequest};
use super::transfer::Transfer;
use crate::bootstrap::{Bootstrap, Wait};
use crate::deadline::Deadline;
use crate::device::Device;
use crate::error::{Error, ErrorKind, Rank, Result};
use crate::memory::{MemoryRegistry, Message, Region, RemoteRegion};
use crate::signal::{End, Posts, Protocol, RemoteSlot, Slot, SlotPool};
use crate::sync::lock;
use serde::{Deserialize, Serialize};
use std::collections::{HashMap, HashSet};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, Weak};

/// What one end tells the other.
#[derive(Debug, Serialize, Deserialize)]
struct Side {
    bytes: u64,
    put: bool,
    // The buffer, where the other end moves the bytes.
    buffer: Option<Vec<u8>>,
    // The inbound words of this end's slot, and the slot's number.
    inbound: Vec<u8>,
    slot: u64,
}

/// What is published for an end: the end, or why there is none.
type Answer = std::result::Result<Side, String>;

/// Exchanges the transfers of one rank.
#[derive(Debug)]
pub struct Transfers {
    bootstrap: Arc<Bootstrap>,
    memory: Arc<MemoryRegistry>,
    device: Arc<dyn Device>,
    pool: Arc<SlotPool>,
    table: Arc<SlotTable>,
    protocol: Protocol,
    // How many transfers were exchanged with each peer, tag and direction.
    counts: Mutex<HashMap<Lane, u64>>,
    // The keys of refusals, which nobody takes where the peer refused the same.
    refusals: Mutex<HashMap<Lane, Vec<String>>>,
}

/// An end that was published.
struct Published<'a> {
    request: &'a TransferRequest,
    protocol: Protocol,
    slot: Slot,
    number: u64,
    own_key: String,
    peer_key: String,
    // Whose handles the peer is to get.
    described: Vec<Region>,
}

impl Transfers {
    pub(crate) fn new(
        bootstrap: &Arc<Bootstrap>,
        memory: &Arc<MemoryRegistry>,
        device: &Arc<dyn Device>,
        protocol: Protocol,
    ) -> Self {
        let pool = Arc::new(SlotPool::new(device));
        let table = Arc::new(SlotTable {
            pool: pool.clone(),
            memory: Arc::downgrade(memory),
            half: Mutex::default(),
        });
        let released = Arc::downgrade(&table);
        memory.when_slot_released(move |_, slot| {
            if let Some(table) = released.upgrade() {
                table.half_released(slot);
            }
        });
        Self {
            bootstrap: bootstrap.clone(),
            memory: memory.clone(),
            device: device.clone(),
            pool,
            table,
            protocol,
            counts: Mutex::default(),
            refusals: Mutex::default(),
        }
    }

    /// Matches every request with its peer's, and gives the transfers in the same order. Blocks the
    /// caller until all peers have exchanged the other ends, in batches cut in any way; two ranks
    /// that each wait in one batch for what the other has in a later one wait until `deadline`.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for a peer that is this rank or none;
    /// [`ErrorKind::Mismatch`], on both ranks, where lengths or protocols differ;
    /// [`ErrorKind::Timeout`] or [`ErrorKind::PeerLost`], with the peer and what was waited for;
    /// [`ErrorKind::PeerFailed`] where the peer says that its end will not come. A batch that fails for
    /// want of a peer is withdrawn, and may be exchanged again.
    pub fn exchange(
        &self,
        requests: &[TransferRequest],
        deadline: Deadline,
    ) -> Result<Vec<Transfer>> {
        requests
            .iter()
            .try_for_each(|request| self.check(request))?;
        let published = self.publish(requests)?;
        let keys: Vec<String> = published.iter().map(|end| end.peer_key.clone()).collect();
        let mut peers: Vec<Rank> = requests.iter().map(|request| request.peer).collect();
        peers.sort_unstable();
        peers.dedup();
        let answers = match self
            .bootstrap
            .store()
            .multi_take(&keys, &Wait::on(peers, deadline))
        {
            Ok(answers) => answers,
            Err(error) => {
                self.withdraw(published);
                return Err(error
                    .during("exchange transfers")
                    .on_rank(self.bootstrap.rank()));
            }
        };
        // Every end is settled before the first failure is reported, so that none is left behind.
        let settled: Vec<_> = published
            .into_iter()
            .zip(answers)
            .map(|(end, bytes)| self.settle(end, &bytes))
            .collect();
        settled.into_iter().collect()
    }

    /// Tells the peers of `lanes` that this rank's next end in each will not come, and why. Their
    /// exchanges fail with [`ErrorKind::PeerFailed`]; the end after it is matched as ever.
    pub(crate) fn refuse(&self, lanes: &[Lane], why: &str) {
        let answer: Answer = Err(why.to_owned());
        let numbered: Vec<_> = lanes.iter().map(|&lane| (lane, self.count(lane))).collect();
        let keys = numbered
            .iter()
            .map(|&(lane, number)| (lane, self.key(lane, number, lane.2)));
        let told = postcard::to_stdvec(&answer)
            .map_err(|error| Error::new(ErrorKind::Internal, error.to_string()))
            .and_then(|bytes| {
                let pairs: Vec<_> = keys.clone().map(|(_, key)| (key, bytes.clone())).collect();
                self.bootstrap.store().multi_set(&pairs)
            });
        match told {
            Ok(()) => {
                let mut refusals = lock(&self.refusals);
                for (lane, key) in keys {
                    refusals.entry(lane).or_default().push(key);
                }
            }
            Err(error) => {
                tracing::debug!(%error, "peers could not be told of a failure");
                for (lane, number) in numbered {
                    self.uncount(lane, number);
                }
            }
        }
    }

    /// Deletes the refusals in `lane`: a later end was matched, so the peer has passed them.
    fn clear_refusals(&self, lane: Lane) {
        let keys = lock(&self.refusals).remove(&lane);
        for key in keys.into_iter().flatten() {
            if let Err(error) = self.bootstrap.store().delete(&key) {
                tracing::debug!(%error, key, "a refusal could not be deleted");
            }
        }
    }

    /// Where the end of `direction` of transfer `number` in `lane` is published.
    fn key(&self, (peer, tag, own): Lane, number: u64, direction: Direction) -> String {
        let rank = self.bootstrap.rank();
        let (from, to) = match own {
            Direction::Send => (rank, peer),
            Direction::Receive => (peer, rank),
        };
        format!("p2p/{from}>{to}/tag {tag}/{number}/{direction}")
    }

    fn check(&self, request: &TransferRequest) -> Result<()> {
        let (rank, world) = (self.bootstrap.rank(), self.bootstrap.world());
        let invalid = |what| {
            Err(Error::invalid(what)
                .during("exchange transfers")
                .on_rank(rank)
                .peer(request.peer))
        };
        if request.peer == rank {
            return invalid(format!("a {} to oneself", request.direction));
        }
        if request.peer >= world {
            return invalid(format!("there are {world} ranks, from 0 to {}", world - 1));
        }
        if request.buffer.region().is_none() && request.protocol != Some(Protocol::Put) {
            return invalid("what is stored into the receiver's memory is put".to_owned());
        }
        Ok(())
    }

    /// Publishes every end at once.
    fn publish<'a>(&self, requests: &'a [TransferRequest]) -> Result<Vec<Published<'a>>> {
        let mut published = Vec::with_capacity(requests.len());
        let mut pairs = Vec::with_capacity(requests.len());
        for request in requests {
            match self.prepare(request) {
                Ok((end, side)) => {
                    pairs.push((end.own_key.clone(), side));
                    published.push(end);
                }
                Err(error) => {
                    // Nothing was published yet.
                    self.roll_back(published);
                    return Err(error);
                }
            }
        }
        if let Err(error) = self.bootstrap.store().multi_set(&pairs) {
            self.roll_back(published);
            return Err(error
                .during("publish transfers")
                .on_rank(self.bootstrap.rank()));
        }
        Ok(published)
    }

    fn prepare<'a>(&self, request: &'a TransferRequest) -> Result<(Published<'a>, Vec<u8>)> {
        let protocol = request.protocol.unwrap_or(self.protocol);
        let slot = self.pool.take(&self.memory)?;
        let number = self.count(request.lane());
        let key = |direction| self.key(request.lane(), number, direction);
        let mut end = Published {
            request,
            protocol,
            slot,
            number,
            own_key: key(request.direction),
            peer_key: key(request.direction.reversed()),
            described: Vec::new(),
        };
        match self.side(&mut end) {
            Ok(side) => Ok((end, side)),
            Err(error) => {
                self.roll_back(vec![end]);
                Err(error)
            }
        }
    }

    /// What `end` tells its peer; the handles in it are noted, to be taken back if it never arrives.
    fn side(&self, end: &mut Published<'_>) -> Result<Vec<u8>> {
        let (request, peer) = (end.request, end.request.peer);
        let mut describe = |region: &Region| {
            let handle = self.memory.export_handle(region, peer)?;
            end.described.push(region.clone());
            Ok::<_, Error>(handle.to_vec())
        };
        let buffer = match request.direction.end(end.protocol) {
            End::Announcer => request.buffer.region().map(&mut describe).transpose()?,
            End::Mover => None,
        };
        let inbound = describe(end.slot.inbound())?;
        let answer: Answer = Ok(Side {
            bytes: request.buffer.bytes() as u64,
            put: end.protocol == Protocol::Put,
            buffer,
            inbound,
            slot: end.slot.number,
        });
        postcard::to_stdvec(&answer).map_err(|error| {
            Error::new(ErrorKind::Internal, error.to_string()).during("encode a transfer")
        })
    }

    fn count(&self, lane: Lane) -> u64 {
        let mut counts = lock(&self.counts);
        let count = counts.entry(lane).or_default();
        *count += 1;
        *count - 1
    }

    /// Gives the number of an end back that no peer has seen, so that a later try meets the peer's.
    fn uncount(&self, lane: Lane, number: u64) {
        let mut counts = lock(&self.counts);
        let count = counts.entry(lane).or_default();
        *count = (*count).min(number);
    }

    fn roll_back(&self, published: Vec<Published<'_>>) {
        for end in published {
            self.uncount(end.request.lane(), end.number);
            self.release(&end);
        }
    }

    /// Lets go of what an end holds that its peer has not taken.
    fn release(&self, end: &Published<'_>) {
        for region in &end.described {
            self.memory.cancel_handle(region, end.request.peer);
        }
        self.pool.recycle(end.slot.number);
    }

    /// Whether the peer of an end that is taken back has refused it. Takes the refusal, and nothing
    /// else: an end that the peer published waits for the next try.
    fn refused(&self, end: &Published<'_>) -> bool {
        let store = self.bootstrap.store();
        let wait = Wait::on(
            vec![end.request.peer],
            Deadline::after(std::time::Duration::from_secs(1)),
        );
        let answered = || -> Result<bool> {
            if !store.check(&[&end.peer_key])? {
                return Ok(false);
            }
            let answer = postcard::from_bytes::<Answer>(&store.get(&end.peer_key, &wait)?);
            match answer {
                Ok(Err(_)) => store.delete(&end.peer_key),
                _ => Ok(false),
            }
        };
        answered().unwrap_or_else(|error| {
            tracing::debug!(%error, key = end.peer_key, "a refusal could not be looked for");
            false
        })
    }

    /// Takes back what peers have not taken. An end that was taken belongs to a transfer that the
    /// peer believes in; it is completed and dropped, which tells the peer to forget it.
    fn withdraw(&self, published: Vec<Published<'_>>) {
        let store = self.bootstrap.store();
        for end in published {
            match store.delete(&end.own_key) {
                // A refusal is used up with the end that it answers.
                Ok(true) if self.refused(&end) => self.release(&end),
                Ok(true) => self.roll_back(vec![end]),
                Ok(false) => {
                    // The peer publishes before it takes, so its end is there.
                    let wait = Wait::on(
                        vec![end.request.peer],
                        Deadline::after(std::time::Duration::from_secs(1)),
                    );
                    match store.take(&end.peer_key, &wait) {
                        Ok(bytes) => drop(self.settle(end, &bytes)),
                        Err(error) => {
                            tracing::debug!(%error, key = end.peer_key, "an end could not be withdrawn")
                        }
                    }
                }
                Err(error) => {
                    tracing::debug!(%error, key = end.own_key, "an end could not be withdrawn")
                }
            }
        }
    }

    /// Makes the transfer from what both ends said.
    fn settle(&self, end: Published<'_>, bytes: &[u8]) -> Result<Transfer> {
        let (request, rank) = (end.request, self.bootstrap.rank());
        let context = |error: Error| {
            error
                .during("exchange transfers")
                .on_rank(rank)
                .peer(request.peer)
                .key(end.own_key.clone())
        };
        let answer: Answer = postcard::from_bytes(bytes).map_err(|error| {
            context(Error::new(
                ErrorKind::Protocol,
                format!("the peer's end is malformed: {error}"),
            ))
        })?;
        let side = match answer {
            Ok(side) => {
                self.clear_refusals(request.lane());
                side
            }
            Err(why) => {
                let error = context(
                    Error::new(
                        ErrorKind::PeerFailed,
                        format!("the peer gave up before its end: {why}"),
                    )
                    .help("correct what the peer says, and try again on every rank"),
                );
                if let Err(error) = self.bootstrap.store().delete(&end.own_key) {
                    tracing::debug!(%error, key = end.own_key, "an end could not be taken back");
                }
                self.release(&end);
                return Err(error);
            }
        };
        let slot = end.slot;
        let fail = |what: String, help: &'static str| {
            // The peer finds the same and gives up too, so nobody will write to the slot.
            side.buffer
                .iter()
                .chain([&side.inbound])
                .for_each(|wire| self.memory.decline_handle(request.peer, wire));
            self.pool.recycle(slot.number);
            Err(context(Error::new(ErrorKind::Mismatch, what).help(help)))
        };
        let (own_bytes, put) = (request.buffer.bytes() as u64, end.protocol == Protocol::Put);
        if side.bytes != own_bytes {
            let what = format!(
                "this rank's {} has {own_bytes} bytes, the peer's end {}",
                request.direction, side.bytes
            );
            return fail(what, "give both ends the same length");
        }
        if side.put != put {
            let peers = if side.put {
                Protocol::Put
            } else {
                Protocol::Get
            };
            return fail(
                format!("this rank uses {}, the peer {peers}", end.protocol),
                "choose the same protocol on both ranks",
            );
        }
        let mapped = match self.map(&side, request, end.protocol) {
            Ok(mapped) => mapped,
            Err(error) => {
                // The peer believes in the transfer, and lets go of this end when it drops its own.
                self.table.dropped(request.peer, slot.number, side.slot);
                return Err(context(error));
            }
        };
        let (page, remote_slot, remote) = mapped;
        Ok(Transfer {
            direction: request.direction,
            protocol: end.protocol,
            peer: request.peer,
            tag: request.tag,
            buffer: request.buffer.clone(),
            remote,
            slot,
            remote_slot,
            _remote_page: page,
            peer_slot: side.slot,
            posts: Posts::default(),
            recording: Recording::default(),
            place: Place::new(&self.device),
            posted_on: AtomicU64::new(0),
            table: self.table.clone(),
        })
    }

    /// Maps what the peer described: its words, and its buffer where this end moves the bytes.
    fn map(
        &self,
        side: &Side,
        request: &TransferRequest,
        protocol: Protocol,
    ) -> Result<(RemoteRegion, RemoteSlot, Option<RemoteRegion>)> {
        let peer = request.peer;
        let words = self
            .memory
            .open_handle(peer, &side.inbound)
            .and_then(|page| Ok((RemoteSlot::new(page.memory())?, page)));
        let mover = request.direction.end(protocol) == End::Mover;
        let buffer = match (&side.buffer, mover, &words) {
            (Some(wire), true, Ok(_)) => self.memory.open_handle(peer, wire).map(Some),
            (None, false, _) => Ok(None),
            (Some(wire), ..) => {
                self.memory.decline_handle(peer, wire);
                Err(wrong_kind())
            }
            (None, true, _) => Err(wrong_kind()),
        };
        let (remote_slot, page) = words?;
        let buffer = buffer?;
        let other_length =
            |remote: &RemoteRegion| remote.memory().bytes() != request.buffer.bytes();
        if buffer.as_ref().is_some_and(other_length) {
            return Err(Error::new(
                ErrorKind::InvalidHandle,
                "the peer's handle has another length than it says",
            ));
        }
        Ok((page, remote_slot, buffer))
    }
}

fn wrong_kind() -> Error {
    Error::new(ErrorKind::Protocol, "the peer's end is of the wrong kind")
}

/// Which slots are half given back: a slot is used again when its own transfer is gone and the
/// peer has said that it will not write to it any more.
#[derive(Debug)]
pub(super) struct SlotTable {
    pool: Arc<SlotPool>,
    memory: Weak<MemoryRegistry>,
    half: Mutex<HashSet<u64>>,
}

impl SlotTable {
    /// A transfer was dropped here.
    pub(super) fn dropped(&self, peer: Rank, own: u64, at_peer: u64) {
        if let Some(memory) = self.memory.upgrade() {
            memory.tell(peer, Message::SlotReleased { slot: at_peer });
        }
        self.half_released(own);
    }

    /// One of the two sides let go of a slot of this rank.
    fn half_released(&self, slot: u64) {
        let mut half = lock(&self.half);
        if half.remove(&slot) {
            drop(half);
            self.pool.recycle(slot);
        } else {
            half.insert(slot);
        }
    }
}
