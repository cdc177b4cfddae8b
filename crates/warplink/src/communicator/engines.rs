//! Collective engines of a communicator: of all its ranks, and of subsets.

use crate::bootstrap::{Bootstrap, Group};
use crate::collective::{CollectiveOptions, Collectives, JoinedCollectives};
use crate::deadline::Deadline;
use crate::device::{CollectiveEngine, Device, Fault};
use crate::error::{Rank, Result};
use crate::program::execute::{DirectCollectives, EngineSource, RankContext};
use crate::sync::lock;
use crate::topology::TopologyClass;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

/// Joins each engine once, on first use.
#[derive(Debug)]
pub(super) struct Engines {
    bootstrap: Arc<Bootstrap>,
    device: Arc<dyn Device>,
    /// Raised when a rank of the communicator is lost, even one outside a subset.
    fault: Arc<Fault>,
    timeout: Duration,
    all: Joined,
    parts: Mutex<HashMap<Vec<Rank>, Arc<Joined>>>,
    topology: Option<TopologyClass>,
    /// Registry of all joined collectives of the communicator.
    collectives: Arc<JoinedCollectives>,
}

/// An engine of the ranks of a group, once joined.
#[derive(Debug)]
struct Joined {
    group: Arc<Group>,
    engine: OnceLock<Arc<dyn CollectiveEngine>>,
}

impl Engines {
    pub(super) fn new(
        bootstrap: &Arc<Bootstrap>,
        device: &Arc<dyn Device>,
        (group, fault): (&Arc<Group>, &Arc<Fault>),
        timeout: Duration,
        (topology, collectives): (Option<TopologyClass>, &Arc<JoinedCollectives>),
    ) -> Self {
        Self {
            bootstrap: bootstrap.clone(),
            device: device.clone(),
            fault: fault.clone(),
            timeout,
            all: Joined::new(group.clone()),
            parts: Mutex::default(),
            topology,
            collectives: collectives.clone(),
        }
    }

    fn part(&self, ranks: &[Rank]) -> Result<Arc<Joined>> {
        let mut parts = lock(&self.parts);
        if let Some(part) = parts.get(ranks) {
            return Ok(part.clone());
        }
        let whole = &self.all.group;
        let members = ranks.iter().map(|&rank| whole.job_rank(rank));
        let members = members.collect::<Result<Vec<_>>>()?;
        let name = whole.name().child("engine", &members, 0);
        let group = self.bootstrap.named_group(&members, name)?;
        let part = Arc::new(Joined::new(Arc::new(group.depending_on(whole))));
        parts.insert(ranks.to_vec(), part.clone());
        Ok(part)
    }

    /// Joins the engine of `joined`. Collective among its ranks. Errors name ranks of the communicator.
    fn join(&self, joined: &Joined) -> Result<Arc<dyn CollectiveEngine>> {
        if let Some(engine) = joined.engine.get() {
            return Ok(engine.clone());
        }
        let (group, whole) = (&joined.group, &self.all.group);
        let deadline = Deadline::after(self.timeout);
        // An attempt: the all-gathers of a failed join must not be matched with those of the next.
        let engine = group.attempt("engine", |attempt| {
            let mut exchange = |bytes: Vec<u8>| {
                let gathered = attempt.all_gather(&bytes, deadline);
                gathered.map_err(|error| whole.in_own_ranks(error))
            };
            let (rank, world) = (group.rank(), group.world());
            let (device, fault) = (&self.device, &self.fault);
            device.collective_engine(rank, world, fault, deadline, &mut exchange)
        })?;
        // Another thread may have joined meanwhile; one engine is kept.
        Ok(joined.engine.get_or_init(|| engine).clone())
    }
}

impl EngineSource for Engines {
    fn direct(&self, context: &RankContext) -> Result<Option<Arc<dyn DirectCollectives>>> {
        let joined = context.attempt("programs", |context| {
            Collectives::join(context, &CollectiveOptions::default(), self.topology)
        })?;
        self.collectives.add(&joined);
        Ok(joined.for_programs())
    }

    fn of_all(&self) -> Result<Arc<dyn CollectiveEngine>> {
        self.join(&self.all)
    }

    fn of_part(&self, ranks: &[Rank]) -> Result<Arc<dyn CollectiveEngine>> {
        self.join(&*self.part(ranks)?)
    }
}

impl Joined {
    fn new(group: Arc<Group>) -> Self {
        Self {
            group,
            engine: OnceLock::new(),
        }
    }
}
