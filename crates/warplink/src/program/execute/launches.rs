//! Recurring runs on the caller's memory: one launch of a graph for each set of addresses.
//!
//! An application's allocator reuses addresses, so a plan sees few sets of them. The second run on a set captures a
//! graph, and later ones launch it. A run without a graph enqueues the same work as a launch would ([`next_launch`]),
//! so each rank decides by itself, and capturing or evicting a graph delays no other rank.

use super::command::{Command, CommandKind};
use super::memory::Bindings;
use super::plan::Plan;
use crate::device::{Backing, Graph, InUse, Stream};
use crate::error::Result;
use crate::p2p::next_launch;
use crate::sync::lock;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

/// Maximum number of graphs of a plan, and of remembered sets of addresses without a graph.
// An application's allocator alternates between few sets of addresses; each graph holds memory of host and device.
const MAX_GRAPHS: usize = 64;

/// Addresses of a run's memory, in the order of the tensors' names.
type Addresses = Box<[u64]>;

/// Graphs of a plan.
#[derive(Debug)]
pub(super) struct Launches(Mutex<State>);

/// A captured run.
#[derive(Debug)]
struct CapturedRun {
    graph: InUse<Graph>,
    /// Memory of direct collectives, which peers may access: as the allocation that it was, not by its address.
    published: Vec<Arc<dyn Backing>>,
}

#[derive(Debug, Default)]
struct State {
    /// In LRU order: the most recently launched one is last.
    graphs: Vec<(Addresses, CapturedRun)>,
    /// Sets of addresses that had one run, the most recent one last.
    seen: VecDeque<Addresses>,
    /// Whether runs cannot be captured.
    unrecorded: bool,
}

impl Launches {
    /// Graphs of a plan of `commands`.
    pub(super) fn new(commands: &[Command]) -> Self {
        // An engine may exchange addresses during a capture, with ranks that capture the same.
        let unrecorded = commands
            .iter()
            .any(|command| matches!(command.kind, CommandKind::Collective(..)));
        Self(Mutex::new(State {
            unrecorded,
            ..State::default()
        }))
    }
}

impl State {
    /// Removes and returns the graph of `addresses`, if there is one for memory that was freed since.
    fn take_stale(&mut self, addresses: &[u64]) -> Option<CapturedRun> {
        let is_stale = |(known, run): &(Addresses, CapturedRun)| {
            **known == *addresses && !run.published.iter().all(|backing| backing.is_there())
        };
        let place = self.graphs.iter().rposition(is_stale)?;
        Some(self.graphs.remove(place).1)
    }

    /// The graph of `addresses`, if there is one.
    fn find(&mut self, addresses: &[u64]) -> Option<&InUse<Graph>> {
        let place = self
            .graphs
            .iter()
            .rposition(|(known, _)| **known == *addresses)?;
        if place + 1 < self.graphs.len() {
            let found = self.graphs.remove(place);
            self.graphs.push(found);
        }
        self.graphs.last().map(|(_, run)| &run.graph)
    }

    /// Records a run on `addresses` without a graph. Returns whether a graph is worthwhile, since it was not the
    /// first run.
    fn recurs(&mut self, addresses: &[u64]) -> bool {
        if let Some(place) = self.seen.iter().position(|known| **known == *addresses) {
            // It gets a graph now; if that is evicted, two runs without one are needed again.
            self.seen.remove(place);
            return !self.unrecorded;
        }
        if self.seen.len() == MAX_GRAPHS {
            self.seen.pop_front();
        }
        self.seen.push_back(addresses.into());
        false
    }

    /// Inserts `run`; returns the one that it replaces, the least recently launched one.
    fn keep(&mut self, addresses: &[u64], run: CapturedRun) -> Option<CapturedRun> {
        let evicted = (self.graphs.len() == MAX_GRAPHS).then(|| self.graphs.remove(0).1);
        self.graphs.push((addresses.into(), run));
        evicted
    }
}

impl Plan {
    /// Like [`run_on`](Self::run_on), for recurring runs: they take little host time on `addresses` that were passed
    /// twice before. `addresses` are those of the memory that `memory` returns, which is called only if needed, in
    /// the order of the tensors' names, which are the same in every call.
    ///
    /// Launches of one executor's plans must follow one another, and runs of those with collectives, since they share
    /// scratch memory. If one rank calls this, the others must not call `run` or `run_on` instead.
    ///
    /// # Errors
    /// The errors of [`run_on`](Self::run_on), and of `memory`.
    pub fn launch_on(
        &self,
        stream: &Stream,
        addresses: &[u64],
        memory: impl FnOnce() -> Result<Bindings>,
    ) -> Result<()> {
        // A graph cannot be launched into a capture; the operations become part of the caller's graph instead.
        if self.parts.eager_only.is_some() || stream.is_capturing()? {
            return self.run_on(stream, &memory()?);
        }
        // Dropped after the lock is released, like evicted graphs.
        let _stale: Option<CapturedRun>;
        let mut state = lock(&self.parts.launches.0);
        // Its launches would announce a stale number, and lose direct access.
        _stale = state.take_stale(addresses);
        if let Some(graph) = state.find(addresses) {
            return self.launch_in_order(graph, stream);
        }
        let memory = memory()?;
        if state.recurs(addresses) {
            match self.record(&memory) {
                Ok(run) => {
                    let launched = self.launch_in_order(&run.graph, stream);
                    let evicted = state.keep(addresses, run);
                    // Destroying a graph takes long, and other threads launch plans meanwhile.
                    drop(state);
                    drop(evicted);
                    return launched;
                }
                Err(error) => {
                    // A fault is reported by the run itself.
                    tracing::info!(%error, plan = self.name(), "runs are enqueued without a graph");
                    // Whatever cannot be captured once will fail again, and each attempt costs more than a run.
                    state.unrecorded = true;
                }
            }
        }
        self.enqueue_on((stream, &self.parts.streams), Some(next_launch()), &memory)
    }

    /// Launches a graph; the caller orders it among other work.
    fn launch_in_order(&self, graph: &InUse<Graph>, stream: &Stream) -> Result<()> {
        graph.note(stream);
        self.parts.note(stream);
        graph.launch(stream)
    }

    fn record(&self, memory: &Bindings) -> Result<CapturedRun> {
        let parts = &self.parts;
        let kinds = &parts.program.streams;
        let graph = parts.memory.pool.record_in_turn(kinds, |caller, streams| {
            self.enqueue_on((caller, streams), Some(next_launch()), memory)
        })?;
        Ok(CapturedRun {
            graph: InUse::new(graph, &parts.context.in_flight),
            published: self.published(memory)?,
        })
    }

    /// Memory that direct collectives of a run on `memory` access.
    fn published(&self, memory: &Bindings) -> Result<Vec<Arc<dyn Backing>>> {
        let replaced = self.replaced(memory)?;
        let mut published: Vec<Arc<dyn Backing>> = Vec::new();
        for command in &self.parts.commands {
            let CommandKind::Direct(_, request) = &command.kind else {
                continue;
            };
            for slice in replaced.of_request(request)?.slices() {
                let backing = slice.backing();
                // Allocators lend several tensors of one allocation.
                if published
                    .iter()
                    .any(|one| one.identity() == backing.identity())
                {
                    continue;
                }
                published.push(backing.without_owner().unwrap_or_else(|| backing.clone()));
            }
        }
        Ok(published)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{DeviceConfig, DeviceKind, InFlight, Priority, open};
    use std::any::Any;
    use std::sync::atomic::{AtomicBool, Ordering};

    /// Memory that is freed at some time.
    #[derive(Debug)]
    struct Lent(AtomicBool);

    impl Backing for Lent {
        fn base(&self) -> u64 {
            4096
        }
        fn bytes(&self) -> usize {
            1
        }
        fn identity(&self) -> u64 {
            1
        }
        fn kind(&self) -> DeviceKind {
            DeviceKind::Host
        }
        fn is_there(&self) -> bool {
            self.0.load(Ordering::Relaxed)
        }
        fn as_any(&self) -> &dyn Any {
            self
        }
    }

    #[test]
    fn a_graph_does_not_outlive_the_memory_that_its_collectives_access() {
        let device = open(&DeviceConfig::new(DeviceKind::Host, 0)).unwrap();
        let in_flight = Arc::new(InFlight::new(&device));
        let stream = device.create_stream(Priority::Normal).unwrap();
        let lent = Arc::new(Lent(AtomicBool::new(true)));
        let mut state = State::default();
        for (address, published) in [(1, vec![lent.clone() as Arc<dyn Backing>]), (2, vec![])] {
            stream.begin_capture().unwrap();
            let graph = InUse::new(stream.end_capture().unwrap(), &in_flight);
            assert!(
                state
                    .keep(&[address], CapturedRun { graph, published })
                    .is_none()
            );
        }
        assert!(state.take_stale(&[1]).is_none() && state.find(&[1]).is_some());
        lent.0.store(false, Ordering::Relaxed);
        assert!(state.take_stale(&[2]).is_none() && state.find(&[2]).is_some());
        assert!(state.take_stale(&[1]).is_some() && state.find(&[1]).is_none());
    }

    #[test]
    fn the_second_run_on_a_set_of_addresses_is_worth_a_graph() {
        let mut state = State::default();
        assert!(!state.recurs(&[1, 2]) && !state.recurs(&[1, 3]));
        assert!(state.recurs(&[1, 2]));
        // An evicted entry has to recur again.
        assert!(!state.recurs(&[1, 2]));
        for other in 0..MAX_GRAPHS as u64 {
            assert!(!state.recurs(&[other]));
        }
        assert!(!state.recurs(&[1, 3]));
        state.unrecorded = true;
        assert!(!state.recurs(&[1, 3]));
    }
}
