//! The record of a dispatch for its combine: where the rows of each token are.

use super::{ExpertOptions, Experts, WORD};
use crate::device::{AllocationKind, Device, DeviceSlice};
use crate::error::{Error, Result};
use crate::sync::lock;
use std::fmt;
use std::sync::{Arc, Mutex};

/// Where the rows of a dispatch are, which [`Experts::combine`] takes: the *handle* of other libraries. Its memory is the
/// layer's, and is used again by a later dispatch once this value is dropped. Keep it as long as a graph of that dispatch
/// or of its combine may be launched.
pub struct Routing {
    pub(super) layer: Experts,
    pub(super) places: DeviceSlice,
    pub(super) tokens: usize,
}

/// Memory of routings that no dispatch uses.
pub(super) struct Places {
    device: Arc<dyn Device>,
    bytes: usize,
    spare: Mutex<Vec<DeviceSlice>>,
}

impl Places {
    /// Memory for one routing, which is allocated at once.
    pub(super) fn new(
        device: &Arc<dyn Device>,
        options: &ExpertOptions,
        world: usize,
    ) -> Result<Self> {
        let places = Self {
            device: device.clone(),
            bytes: WORD * options.max_tokens * options.rows_per_token(world),
            spare: Mutex::default(),
        };
        // So that the first dispatch, which may be captured by a graph, allocates nothing.
        let first = places.take()?;
        places.give_back(first);
        Ok(places)
    }

    /// Memory that no other routing has; allocates where all is in use.
    pub(super) fn take(&self) -> Result<DeviceSlice> {
        // In its own statement, so that the lock is not held while memory is allocated.
        let spare = lock(&self.spare).pop();
        match spare {
            Some(memory) => Ok(memory),
            None => self.device.allocate(self.bytes, AllocationKind::Plain),
        }
    }

    fn give_back(&self, memory: DeviceSlice) {
        lock(&self.spare).push(memory);
    }
}

impl Routing {
    /// Number of tokens of the dispatch.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Fails if the rows are another layer's, or of another number of tokens: positions would be wrong.
    pub(super) fn check(&self, layer: &Experts, tokens: usize) -> Result<()> {
        if !Arc::ptr_eq(&self.layer.0, &layer.0) {
            return Err(
                Error::invalid("a routing of another layer; expected one of this layer")
                    .with_help("combine with the layer that has dispatched"),
            );
        }
        if self.tokens != tokens {
            return Err(Error::invalid(format!(
                "a combine of {tokens} tokens; expected {}, as the dispatch had",
                self.tokens
            ))
            .with_help("pass the output for the tokens of the dispatch"));
        }
        Ok(())
    }
}

impl Drop for Routing {
    fn drop(&mut self) {
        // Calls of a layer are serialized, so a later one does not overtake those that use the memory.
        self.layer.0.places.give_back(self.places.clone());
    }
}

impl fmt::Debug for Routing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Routing({} tokens)", self.tokens)
    }
}
