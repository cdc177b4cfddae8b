//! EndState of an end: queued operations and progress.

use super::message::{StagingMessage, malformed};
use crate::device::network::RemoteMemory;
use crate::device::{At, DeviceSlice, Word};
use crate::error::Result;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};

/// Maximum concurrent gets of an end, which bounds the peer's memory (invariant 3).
pub(super) const MAX_GETS: usize = 64;

/// Progress of an end's direct operations.
#[derive(Default)]
pub(super) struct Direct {
    /// This rank's directly accessible regions.
    pub(super) own: Vec<DeviceSlice>,
    /// The peer's, by number.
    pub(super) peers: BTreeMap<u32, Arc<RemoteMemory>>,
    /// Parts started, parts covered by a completion callback, and parts completed.
    pub(super) begun: u64,
    pub(super) marked: u64,
    pub(super) done: Arc<AtomicU64>,
}

/// A queued operation.
pub(super) enum StagingOperation {
    Put {
        source: DeviceSlice,
        at: At,
    },
    Get {
        target: DeviceSlice,
        at: At,
    },
    Signal(u64),
    /// Set a word of this rank once everything before is complete.
    Answer {
        word: Word,
        value: u64,
    },
    End,
}

#[derive(Default)]
pub(super) struct EndState {
    /// This rank's regions, by number.
    pub(super) regions: Vec<Option<DeviceSlice>>,
    pub(super) queue: VecDeque<StagingOperation>,
    /// Number of messages started, sent, and consumed by the peer.
    pub(super) begun: u64,
    pub(super) sent: u64,
    pub(super) consumed: u64,
    /// Messages started but not sent, from `sent` on.
    pub(super) leaving: VecDeque<StagingMessage>,
    /// Number of messages received and consumed here.
    pub(super) taken: u64,
    pub(super) returned: u64,
    /// Latest signal value of the peer.
    pub(super) signalled: u64,
    /// Outstanding gets of this end, by number.
    pub(super) gets: BTreeMap<u64, Portion>,
    pub(super) next_get: u64,
    /// Outstanding gets of the peer, with their numbers.
    pub(super) requests: VecDeque<(u64, Portion)>,
    pub(super) answers: VecDeque<StagingAnswer>,
    pub(super) direct: Direct,
    /// Whether the peer has ended its requests.
    pub(super) peer_ended: bool,
    /// Set when the peer has been notified that this end has stopped writing.
    pub(super) delivered: Option<Arc<AtomicBool>>,
    pub(super) is_over: bool,
}

/// Remainder of a get's memory, after some bytes.
pub(super) struct Portion {
    pub(super) done: u64,
    pub(super) left: DeviceSlice,
}

/// A word to set once the peer has consumed the messages before `begun`, and gets before `get` and direct
/// parts before `direct` are complete.
pub(super) struct StagingAnswer {
    pub(super) begun: u64,
    pub(super) get: u64,
    pub(super) direct: u64,
    pub(super) word: Word,
    pub(super) value: u64,
}

impl EndState {
    /// Changes with every progress.
    pub(super) fn progress(&self) -> [u64; 9] {
        [
            self.begun,
            self.sent,
            self.consumed,
            self.taken,
            self.returned,
            self.direct.begun(),
            self.direct.done(),
            (self.queue.len() + self.answers.len()) as u64,
            u64::from(self.is_over),
        ]
    }

    /// `bytes` at `at` in this rank's regions, if exposed to the peer.
    pub(super) fn region(&self, at: At, bytes: u64) -> Result<DeviceSlice> {
        let region = self
            .regions
            .get(at.region as usize)
            .and_then(Option::as_ref);
        let range = region.and_then(|region| {
            let end = at.offset.checked_add(bytes)?;
            region.slice(at.offset as usize..end as usize).ok()
        });
        range.ok_or_else(|| {
            malformed(format!(
                "the peer names {bytes} bytes from {} of region {}, which are not there",
                at.offset, at.region
            ))
        })
    }

    /// The next message with its payload: part of a requested get, or of a queued operation.
    pub(super) fn next(
        &mut self,
        chunk_bytes: u64,
    ) -> Result<Option<(StagingMessage, Option<DeviceSlice>)>> {
        // Answer the peer's gets before sending own operations, so that both directions progress.
        if let Some((id, request)) = self.requests.front_mut() {
            let bytes = chunk_bytes.min(request.left.bytes() as u64);
            let (id, offset) = (*id, request.done);
            // One chunk of it at a time, so the peer's gets share the ring with this end's own operations.
            let source = request.take(bytes)?;
            if request.left.bytes() == 0 {
                self.requests.pop_front();
            }
            return Ok(Some((
                StagingMessage::Got { id, offset, bytes },
                Some(source),
            )));
        }
        // A partial put keeps its place at the front of the queue.
        let (message, payload) = match self.queue.front_mut() {
            Some(StagingOperation::Put { source, at }) => {
                let bytes = chunk_bytes.min(source.bytes() as u64);
                let part = source.slice(0..bytes as usize)?;
                let message = StagingMessage::Put { at: *at, bytes };
                if bytes < source.bytes() as u64 {
                    *source = source.slice(bytes as usize..source.bytes())?;
                    at.offset += bytes;
                    return Ok(Some((message, Some(part))));
                }
                (message, Some(part))
            }
            // Beyond the limit a get waits in the queue, and with it everything after it.
            Some(StagingOperation::Get { target, at }) if self.gets.len() < MAX_GETS => {
                let (id, left) = (self.next_get, target.clone());
                let bytes = left.bytes() as u64;
                self.next_get += 1;
                self.gets.insert(id, Portion { done: 0, left });
                (StagingMessage::Get { id, at: *at, bytes }, None)
            }
            Some(StagingOperation::Signal(value)) => {
                (StagingMessage::Signal { value: *value }, None)
            }
            Some(StagingOperation::End) => (StagingMessage::End, None),
            Some(StagingOperation::Get { .. } | StagingOperation::Answer { .. }) | None => {
                return Ok(None);
            }
        };
        self.queue.pop_front();
        Ok(Some((message, payload)))
    }

    /// Records what the answer at the front of the queue waits for.
    pub(super) fn note_answer(&mut self) {
        if let Some(StagingOperation::Answer { word, value }) = self.queue.pop_front() {
            self.answers.push_back(StagingAnswer {
                begun: self.begun,
                get: self.next_get,
                direct: self.direct.begun(),
                word,
                value,
            });
        }
    }
}

impl Portion {
    /// Splits off the next `bytes`.
    pub(super) fn take(&mut self, bytes: u64) -> Result<DeviceSlice> {
        let taken = self.left.slice(0..bytes as usize)?;
        self.left = self.left.slice(bytes as usize..self.left.bytes())?;
        self.done += bytes;
        Ok(taken)
    }
}
