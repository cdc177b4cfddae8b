//! Pool of memory and streams for plans.

use crate::device::{AllocationKind, Device, Graph, Priority, Stream};
use crate::error::Result;
use crate::memory::{MemoryRegistry, Region};
use crate::program::rank_program::StreamKind;
use crate::sync::lock;
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};

/// Limit on free regions: plans of ever new sizes would otherwise accumulate unused ones.
const MAX_FREE_REGIONS: usize = 64;

#[derive(Debug)]
pub(super) struct Pool {
    device: Arc<dyn Device>,
    memory: Arc<MemoryRegistry>,
    // Registered regions, most recently returned last. They keep their registration, and peers their mappings.
    free: Mutex<VecDeque<Region>>,
    streams: Mutex<BTreeMap<StreamKind, Stream>>,
    // Streams for captured graphs.
    recording: Mutex<Vec<Recording>>,
    // Streams for graphs that are launched one after another.
    in_turn: Mutex<BTreeMap<StreamKind, Stream>>,
}

/// Streams used by the capture of a graph.
#[derive(Debug)]
struct Recording {
    /// Identifier of the capture.
    capture: u64,
    streams: BTreeMap<StreamKind, Stream>,
}

impl Recording {
    /// Whether the capture has ended. A stream that cannot report its state is no longer in use.
    fn is_over(&self) -> bool {
        let mut streams = self.streams.values();
        streams.all(|stream| matches!(stream.capture_id(), Ok(None)))
    }
}

impl Pool {
    pub(super) fn new(device: &Arc<dyn Device>, memory: &Arc<MemoryRegistry>) -> Self {
        Self {
            device: device.clone(),
            memory: memory.clone(),
            free: Mutex::default(),
            streams: Mutex::default(),
            recording: Mutex::default(),
            in_turn: Mutex::default(),
        }
    }

    /// Frees the regions that no plan uses.
    pub(super) fn release_free(&self) {
        let free = std::mem::take(&mut *lock(&self.free));
        drop(free);
    }

    /// Whether all peers of this machine can map memory of this rank's device as bound by callers.
    pub(super) fn is_reached_by_peers(&self) -> Result<bool> {
        self.memory.all_map_device_memory()
    }

    /// A region of exactly `bytes`, with the contents of its last use.
    pub(super) fn take(&self, bytes: usize) -> Result<Region> {
        let mut free = lock(&self.free);
        // The one returned last is the most likely to be still mapped by peers.
        let position = free.iter().rposition(|region| region.bytes() == bytes);
        let kept = position.and_then(|position| free.remove(position));
        drop(free);
        match kept {
            Some(region) => Ok(region),
            None => self.memory.allocate(bytes, AllocationKind::Plain),
        }
    }

    /// Returns regions that no stream uses any more, and frees those that have been unused for longest.
    pub(super) fn give_back(&self, regions: impl IntoIterator<Item = Region>) {
        let mut free = lock(&self.free);
        free.extend(regions);
        let surplus = free.len().saturating_sub(MAX_FREE_REGIONS);
        let surplus: Vec<Region> = free.drain(..surplus).collect();
        drop(free);
        // Freed outside the lock, which other plans need.
        drop(surplus);
    }

    /// Stream that all plans use for `kind`; `None` for the caller's.
    pub(super) fn stream(&self, kind: StreamKind) -> Result<Option<Stream>> {
        self.stream_of(&mut lock(&self.streams), kind)
    }

    /// Streams that all plans use for `kinds` in the graph of `capture`. Streams of eager runs would be part of the
    /// capture until it ends, and unusable for other work. Later graphs reuse these streams.
    pub(super) fn recorded_streams(
        &self,
        capture: u64,
        kinds: &[StreamKind],
    ) -> Result<Vec<Option<Stream>>> {
        let mut all = lock(&self.recording);
        let known = all.iter().position(|one| one.capture == capture);
        let place = known.or_else(|| all.iter().position(Recording::is_over));
        let place = place.unwrap_or_else(|| {
            let streams = BTreeMap::new();
            all.push(Recording { capture, streams });
            all.len() - 1
        });
        let recording = &mut all[place];
        recording.capture = capture;
        let streams = kinds
            .iter()
            .map(|kind| self.stream_of(&mut recording.streams, *kind));
        streams.collect()
    }

    /// Captures the operations that `enqueue` enqueues on a caller's stream and on streams for `kinds`. Graphs made
    /// by this share scratch memory, so they must be launched one after another.
    pub(super) fn record_in_turn(
        &self,
        kinds: &[StreamKind],
        enqueue: impl FnOnce(&Stream, &[Option<Stream>]) -> Result<()>,
    ) -> Result<Graph> {
        // Held over the capture: a second one on the same streams would be part of this graph.
        let mut own = lock(&self.in_turn);
        let mut stream_of = |kind, priority| -> Result<Stream> {
            if let Some(stream) = own.get(&kind) {
                return Ok(Stream::clone(stream));
            }
            let stream = self.device.create_stream(priority)?;
            // Graphs that never run at the same time need no library workspace each.
            stream.share_scratch();
            own.insert(kind, stream.clone());
            Ok(stream)
        };
        let caller = stream_of(StreamKind::Caller, Priority::Normal)?;
        let streams = kinds.iter().map(|kind| {
            let priority = priority_of(*kind);
            priority.map(|one| stream_of(*kind, one)).transpose()
        });
        let streams = streams.collect::<Result<Vec<_>>>()?;
        caller.begin_capture()?;
        let recorded = enqueue(&caller, &streams);
        let graph = caller.end_capture();
        recorded.and(graph)
    }

    fn stream_of(
        &self,
        streams: &mut BTreeMap<StreamKind, Stream>,
        kind: StreamKind,
    ) -> Result<Option<Stream>> {
        let Some(priority) = priority_of(kind) else {
            return Ok(None);
        };
        if let Some(stream) = streams.get(&kind) {
            return Ok(Some(stream.clone()));
        }
        let stream = self.device.create_stream(priority)?;
        streams.insert(kind, stream.clone());
        Ok(Some(stream))
    }
}

/// Priority of a stream of the pool; `None` for the caller's.
const fn priority_of(kind: StreamKind) -> Option<Priority> {
    match kind {
        StreamKind::Caller => None,
        StreamKind::Pool(_) => Some(Priority::Normal),
        StreamKind::High(_) => Some(Priority::High),
    }
}
