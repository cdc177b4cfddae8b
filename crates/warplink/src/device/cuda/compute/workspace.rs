//! Scratch memory of matmuls: one piece for each stream, since two matmuls that run at the
//! same time must not share it, and one for each stream that takes part in a capture, which the
//! graph then owns, since it may run at the same time as the stream that it was recorded on.

use crate::device::cuda::driver::context::Context;
use crate::device::cuda::driver::status;
use crate::error::Result;
use crate::sync::lock;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

/// A piece of scratch memory, freed when dropped. Dropping may block until the GPU is idle, and so
/// belongs on the thread that frees.
#[derive(Debug)]
pub(crate) struct Workspace {
    context: Arc<Context>,
    address: u64,
    bytes: usize,
}

impl Workspace {
    fn allocate(context: &Arc<Context>, bytes: usize) -> Result<Self> {
        let _entered = context.enter()?;
        let _relaxed = context.relax_capture();
        let mut address = 0;
        // SAFETY: `address` is an output parameter for one address, and the context is current.
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
        if !status::is_gone(code) {
            tracing::warn!(code, "scratch memory was not freed");
        }
    }
}

/// Which stream, and which capture if it is recording one.
type Key = (u64, Option<u64>);

/// The scratch memory of a device's streams.
#[derive(Debug, Default)]
pub(crate) struct Workspaces {
    /// The last piece of a key is the largest; work enqueued before it was needed uses the others.
    pieces: Mutex<HashMap<Key, Vec<Workspace>>>,
}

impl Workspaces {
    /// The address of a piece of at least `bytes` for `stream`, which is recording `capture` if that
    /// is something.
    pub(crate) fn address(
        &self,
        context: &Arc<Context>,
        stream: u64,
        capture: Option<u64>,
        bytes: usize,
    ) -> Result<u64> {
        let mut all = lock(&self.pieces);
        let pieces = all.entry((stream, capture)).or_default();
        if let Some(piece) = pieces.last()
            && piece.bytes >= bytes
        {
            return Ok(piece.address);
        }
        let piece = Workspace::allocate(context, bytes)?;
        let address = piece.address;
        pieces.push(piece);
        Ok(address)
    }

    /// Takes out the pieces that belong to `capture`.
    pub(crate) fn take(&self, capture: u64) -> Vec<Workspace> {
        lock(&self.pieces)
            .extract_if(|key, _| key.1 == Some(capture))
            .flat_map(|(_, pieces)| pieces)
            .collect()
    }

    /// Takes out all pieces.
    pub(crate) fn take_all(&self) -> Vec<Workspace> {
        lock(&self.pieces)
            .drain()
            .flat_map(|(_, pieces)| pieces)
            .collect()
    }
}
