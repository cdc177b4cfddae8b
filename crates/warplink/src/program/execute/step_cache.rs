//! Cache of resolved lane steps.

use crate::error::Result;
use crate::program::section::{LaneStep, SectionInstance};
use crate::sync::lock;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock};

/// Limit on the steps cached for a kernel, which bounds its memory; lanes with more are resolved for each launch.
const MAX_STEPS: usize = 1 << 14;

/// Cache of resolved steps. The steps of a lane hardly depend on the launch, and resolving them takes longer than
/// executing them on small data, so later launches reuse them.
#[derive(Default)]
pub(super) struct StepCache {
    announced: OnceLock<Vec<usize>>,
    reads_values: OnceLock<bool>,
    steps: Mutex<CachedSteps>,
}

#[derive(Default)]
struct CachedSteps {
    steps: BTreeMap<Key, Arc<[LaneStep]>>,
    count: usize,
}

/// Cache key: lane, epoch modulo its period, and the announced tensors that some rank does not reach.
type Key = (usize, u64, Vec<usize>);

impl StepCache {
    /// Tensors that lanes announce.
    pub(super) fn announced(&self, section: &SectionInstance) -> &[usize] {
        self.announced.get_or_init(|| section.announced())
    }

    /// Whether the steps of lanes depend on values in memory, so that they are resolved in every launch.
    pub(super) fn read_values(&self, section: &SectionInstance) -> bool {
        let reads = || !section.read_as_values().is_empty();
        *self.reads_values.get_or_init(reads)
    }

    /// Steps of a lane of `section`, which must be the same section in every call, with the tensors `missing`
    /// unreachable. No step may depend on values in memory.
    pub(super) fn steps(
        &self,
        section: &SectionInstance,
        lane: usize,
        epoch: u64,
        missing: &[usize],
    ) -> Result<Arc<[LaneStep]>> {
        let key = (lane, epoch % section.period.max(1), missing.to_vec());
        if let Some(steps) = lock(&self.steps).steps.get(&key) {
            return Ok(steps.clone());
        }
        let reachable = |tensor: usize| !missing.contains(&tensor);
        let steps = section.steps_where(lane, epoch, &reachable, &|_| None)?;
        let steps: Arc<[LaneStep]> = steps.into();
        let mut cached = lock(&self.steps);
        if cached.count + steps.len() <= MAX_STEPS
            && cached.steps.insert(key, steps.clone()).is_none()
        {
            cached.count += steps.len();
        }
        Ok(steps)
    }
}
