//! Graphs: operations recorded once and launched many times.
//!
//! A graph has a branch for each stream that took part in the capture. Branches run concurrently, ordered
//! only by recorded events.

use super::capture::HostRecording;
use super::mark::EventState;
use super::operation::{Context, HostOperation};
use super::worker::Worker;
use crate::device::{Delays, Fault};
use crate::error::Result;
use crate::sync::lock;
use std::sync::{Arc, Mutex};

#[derive(Debug)]
struct GraphBranch {
    operations: Arc<[HostOperation]>,
    worker: Option<Worker>,
}

/// An executable graph.
#[derive(Debug)]
pub(super) struct RecordedGraph {
    branches: Vec<GraphBranch>,
    marks: usize,
    launching: Mutex<()>,
}

impl RecordedGraph {
    /// Builds the graph of capture `number`, with a thread for each branch but the first.
    pub(super) fn new(
        recording: HostRecording,
        number: u64,
        fault: &Arc<Fault>,
        delays: Option<Delays>,
    ) -> Result<Self> {
        let marks = recording.marks.len();
        let branches = recording.branches.into_iter().enumerate();
        let branches = branches.map(|(branch, operations)| {
            // The first branch runs on the launching thread.
            let worker = (branch > 0)
                .then(|| Worker::start(number << 16 | branch as u64, fault.clone(), delays))
                .transpose()?;
            Ok(GraphBranch {
                operations: operations.into(),
                worker,
            })
        });
        Ok(Self {
            branches: branches.collect::<Result<_>>()?,
            marks,
            launching: Mutex::new(()),
        })
    }

    /// Number of operations of a launch.
    pub(super) fn operations(&self) -> usize {
        self.branches
            .iter()
            .map(|branch| branch.operations.len())
            .sum()
    }

    /// Runs every branch once, on the launching stream's thread and the branches' threads.
    pub(super) fn run(&self, context: &Context) -> Result<()> {
        // Branch threads are shared by all launches, and launches of one graph are ordered on a GPU too.
        let _one_at_a_time = lock(&self.launching);
        let marks: Arc<[EventState]> = (0..self.marks).map(|_| EventState::default()).collect();
        let ends: Vec<_> = self
            .branches
            .iter()
            .skip(1)
            .map(|_| Arc::new(EventState::default()))
            .collect();
        for (branch, end) in self.branches.iter().skip(1).zip(&ends) {
            let (operations, marks) = (branch.operations.clone(), marks.clone());
            let faults = context.faults.clone();
            let run = HostOperation::Task(Arc::new(move |own: &Context| {
                run_branch(
                    &own.within_graph(marks.clone(), faults.clone()),
                    &operations,
                )
            }));
            if let Some(worker) = &branch.worker {
                worker.enqueue(run)?;
                worker.enqueue(HostOperation::Record {
                    event: end.clone(),
                    mark: 1,
                })?;
            }
        }
        let mut result = match self.branches.first() {
            Some(first) => run_branch(
                &context.within_graph(marks, context.faults.clone()),
                &first.operations,
            ),
            None => Ok(()),
        };
        for (branch, end) in self.branches.iter().skip(1).zip(&ends) {
            result = result.and(end.wait(1, &context.fault));
            if let Some(worker) = &branch.worker {
                result = result.and(worker.check());
            }
        }
        result
    }
}

/// A failed branch still records its events, so that other branches end.
fn run_branch(context: &Context, operations: &[HostOperation]) -> Result<()> {
    let mut result = Ok(());
    for operation in operations {
        if result.is_ok() || matches!(operation, HostOperation::RecordInGraph(_)) {
            result = result.and(context.perform(operation));
        }
    }
    result
}
