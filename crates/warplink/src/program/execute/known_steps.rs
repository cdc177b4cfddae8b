//! The steps of lanes that were launched before.

use crate::error::Result;
use crate::program::section::{LaneStep, SectionInstance};
use crate::sync::lock;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock};

/// The most steps that are kept for a kernel; lanes that have more are resolved for each launch.
const MAX_STEPS: usize = 1 << 14;

/// What lanes do depends on the launch by little: steps that were resolved once, which takes longer than they do on small
/// data, serve later launches too.
#[derive(Default)]
pub(super) struct KnownSteps {
    announced: OnceLock<Vec<usize>>,
    steps: Mutex<Known>,
}

#[derive(Default)]
struct Known {
    steps: BTreeMap<Key, Arc<[LaneStep]>>,
    count: usize,
}

/// The lane, the epoch as far as it matters, and the announced tensors that some rank does not reach.
type Key = (usize, u64, Vec<usize>);

impl KnownSteps {
    /// The tensors that lanes announce.
    pub(super) fn announced(&self, section: &SectionInstance) -> &[usize] {
        self.announced.get_or_init(|| section.announced())
    }

    /// The steps of a lane of `section`, always the same, where the tensors `missing` are known not to be reachable.
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
        let steps: Arc<[LaneStep]> = section.steps_where(lane, epoch, &reachable)?.into();
        let mut known = lock(&self.steps);
        if known.count + steps.len() <= MAX_STEPS
            && known.steps.insert(key, steps.clone()).is_none()
        {
            known.count += steps.len();
        }
        Ok(steps)
    }
}
