//! Scratch memory of matmuls: one buffer for each stream, since concurrent matmuls must not share one, and
//! one for each stream of a capture, owned by the graph, since a graph may run concurrently with the stream
//! that it was recorded on.
//!
//! Our own streams free their buffers when dropped. Borrowed streams may be borrowed again at any time, often
//! for each call, so buffers of a few streams without borrowers are kept. A graph's buffers are freed with
//! the last graph instantiated from the capture, even if another library recorded it.

use super::live::LiveStream;
use super::reaper::Reaper;
use crate::device::cuda::driver::capture::Capture;
use crate::device::cuda::driver::context::Context;
use crate::device::cuda::driver::status;
use crate::error::Result;
use crate::sync::lock;
use std::cmp::Reverse;
use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, Weak};

/// A scratch buffer. Dropping it may block until the GPU is idle, so it belongs on the reaper's thread.
#[derive(Debug)]
pub(crate) struct Workspace {
    context: Arc<Context>,
    address: u64,
    bytes: usize,
}

impl Workspace {
    fn allocate(context: &Arc<Context>, bytes: usize) -> Result<Self> {
        let _entered = context.enter_relaxed()?;
        let mut address = 0;
        // SAFETY: `address` points to a writable address, and the context is current.
        let code = unsafe { (context.driver.cuMemAlloc_v2)(&mut address, bytes) };
        context
            .driver
            .check(code, "allocate scratch memory of matmuls")?;
        Ok(Self {
            context: context.clone(),
            address,
            bytes,
        })
    }
}

impl Drop for Workspace {
    fn drop(&mut self) {
        let _entered = self.context.enter();
        let _relaxed = self.context.relax_capture();
        // SAFETY: allocated once, freed once; the driver waits for work that still uses it.
        let code = unsafe { (self.context.driver.cuMemFree_v2)(self.address) };
        status::warn_unless_gone(code, "scratch memory was not freed");
    }
}

/// A buffer owned by a graph. It can be dropped in callbacks that must not call the driver.
struct OfGraph {
    address: u64,
    bytes: usize,
    piece: Option<Workspace>,
    reaper: Reaper,
}

impl Drop for OfGraph {
    fn drop(&mut self) {
        let piece = self.piece.take();
        self.reaper.run(move |_| drop(piece));
    }
}

/// Number of streams without borrowers that keep their buffers.
const MAX_UNBORROWED: usize = 4;

/// Scratch memory of a device's streams.
#[derive(Default)]
pub(crate) struct Workspaces(Mutex<Buffers>);

#[derive(Default)]
struct Buffers {
    /// By stream key.
    streams: HashMap<u64, Pieces>,
    uses: u64,
    /// Largest buffer of each stream's part of a graph, by the keys of stream and capture.
    graphs: HashMap<(u64, u64), Weak<OfGraph>>,
}

struct Pieces {
    /// The last one is the largest; the others are used by work enqueued earlier.
    all: Vec<Workspace>,
    /// The stream at its last use.
    stream: Weak<LiveStream>,
    /// Global counter value at the last use.
    last_use: u64,
}

impl Workspaces {
    /// Address of a buffer of at least `bytes` for work to be enqueued on `stream` now. `reaper` frees
    /// surplus buffers.
    pub(crate) fn of_stream(
        &self,
        reaper: &Reaper,
        stream: &Arc<LiveStream>,
        bytes: usize,
    ) -> Result<u64> {
        let key = stream.key();
        let mut state = lock(&self.0);
        state.uses += 1;
        let last_use = state.uses;
        if let Some(pieces) = state.streams.get_mut(&key) {
            pieces.last_use = last_use;
            // Another borrow of the same stream, which may outlive the earlier one.
            if !std::ptr::eq(pieces.stream.as_ptr(), Arc::as_ptr(stream)) {
                pieces.stream = Arc::downgrade(stream);
            }
            if let Some(piece) = pieces.all.last()
                && piece.bytes >= bytes
            {
                return Ok(piece.address);
            }
        } else {
            let unborrowed = state.take_unborrowed(MAX_UNBORROWED);
            if !unborrowed.is_empty() {
                reaper.run(move |_| drop(unborrowed));
            }
        }
        let piece = Workspace::allocate(stream.context(), bytes)?;
        let address = piece.address;
        let pieces = state.streams.entry(key).or_insert_with(|| Pieces {
            all: Vec::new(),
            stream: Arc::downgrade(stream),
            last_use,
        });
        pieces.all.push(piece);
        Ok(address)
    }

    /// Address of a buffer of at least `bytes` for work that `stream` records into `capture`. `reaper` frees
    /// it once the graph is gone.
    pub(crate) fn of_graph(
        &self,
        reaper: &Reaper,
        stream: &Arc<LiveStream>,
        capture: &Capture,
        bytes: usize,
    ) -> Result<u64> {
        let key = (stream.key(), capture.id);
        let mut state = lock(&self.0);
        if let Some(piece) = state.graphs.get(&key).and_then(Weak::upgrade)
            && piece.bytes >= bytes
        {
            return Ok(piece.address);
        }
        let piece = Workspace::allocate(stream.context(), bytes)?;
        let piece = Arc::new(OfGraph {
            address: piece.address,
            bytes,
            piece: Some(piece),
            reaper: reaper.clone(),
        });
        // Weak: the graph owns the buffer, and this entry only lets later work of the same capture share it.
        let (address, known) = (piece.address, Arc::downgrade(&piece));
        capture.keep(stream.context().driver, Box::new(piece))?;
        state.graphs.retain(|_, piece| piece.strong_count() > 0);
        state.graphs.insert(key, known);
        Ok(address)
    }

    /// Removes the buffers of the stream with key `stream`.
    pub(crate) fn take_of_stream(&self, stream: u64) -> Vec<Workspace> {
        lock(&self.0).take(|key| key == stream)
    }

    /// Removes the buffers of streams without borrowers.
    pub(crate) fn take_unborrowed(&self) -> Vec<Workspace> {
        lock(&self.0).take_unborrowed(0)
    }

    /// Removes the buffers of all streams.
    pub(crate) fn take_all(&self) -> Vec<Workspace> {
        lock(&self.0).take(|_| true)
    }
}

impl Buffers {
    fn take(&mut self, which: impl Fn(u64) -> bool) -> Vec<Workspace> {
        let taken = self.streams.extract_if(|key, _| which(*key));
        taken.flat_map(|(_, pieces)| pieces.all).collect()
    }

    /// Removes the buffers of streams without borrowers, except the `kept` most recently used.
    fn take_unborrowed(&mut self, kept: usize) -> Vec<Workspace> {
        let streams = self.streams.iter();
        let unborrowed = streams.filter(|(_, pieces)| pieces.stream.strong_count() == 0);
        let unborrowed = unborrowed.map(|(key, pieces)| (pieces.last_use, *key));
        let surplus = surplus(unborrowed.collect(), kept);
        self.take(|key| surplus.contains(&key))
    }
}

/// Keys of all but the `kept` most recently used.
fn surplus(mut by_last_use: Vec<(u64, u64)>, kept: usize) -> Vec<u64> {
    by_last_use.sort_unstable_by_key(|(last_use, _)| Reverse(*last_use));
    let surplus = by_last_use.into_iter().skip(kept);
    surplus.map(|(_, key)| key).collect()
}

impl fmt::Debug for Workspaces {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let streams = lock(&self.0).streams.len();
        f.debug_struct("Workspaces")
            .field("streams", &streams)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oldest_workspaces_exceed_the_limit() {
        let uses = [(3, 30), (9, 90), (5, 50)];
        assert_eq!(surplus(uses.to_vec(), 2), [30]);
        assert!(surplus(uses.to_vec(), 3).is_empty());
        assert_eq!(surplus(uses.to_vec(), 0).len(), 3);
    }
}
