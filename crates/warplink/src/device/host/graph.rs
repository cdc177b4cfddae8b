//! Operations recorded once and launched many times.
//!
//! A graph has a branch for every stream that took part. Branches run beside one another, as the
//! streams would have, and are ordered only by the marks recorded in them.

use super::capture::Recording;
use super::mark::EventState;
use super::operation::{Context, Operation};
use super::worker::Worker;
use crate::device::{Delays, Fault};
use crate::error::Result;
use crate::sync::lock;
use std::sync::{Arc, Mutex};

#[derive(Debug)]
struct Branch {
    operations: Arc<[Operation]>,
    worker: Option<Worker>,
}

/// What was recorded, ready to run.
#[derive(Debug)]
pub(super) struct RecordedGraph {
    branches: Vec<Branch>,
    marks: usize,
    launching: Mutex<()>,
}

impl RecordedGraph {
    /// A graph of what the capture `number` recorded, with threads for all branches but the first.
    pub(super) fn new(
        recording: Recording,
        number: u64,
        fault: &Arc<Fault>,
        delays: Option<Delays>,
    ) -> Result<Self> {
        let marks = recording.marks.len();
        let branches = recording.branches.into_iter().enumerate();
        let branches = branches.map(|(branch, operations)| {
            // The first branch runs on the thread that launches.
            let worker = (branch > 0)
                .then(|| Worker::start(number << 16 | branch as u64, fault.clone(), delays))
                .transpose()?;
            Ok(Branch {
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

    /// How many operations a launch does.
    pub(super) fn operations(&self) -> usize {
        self.branches
            .iter()
            .map(|branch| branch.operations.len())
            .sum()
    }

    /// Runs every branch once, on the thread of the stream that launched and on the branches' own.
    pub(super) fn run(&self, context: &Context) -> Result<()> {
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
            let run = Operation::Task(Arc::new(move |own: &Context| {
                run_branch(
                    &own.within_graph(marks.clone(), faults.clone()),
                    &operations,
                )
            }));
            if let Some(worker) = &branch.worker {
                worker.enqueue(run)?;
                worker.enqueue(Operation::Record {
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

/// A branch that fails still makes its marks, so that the others end.
fn run_branch(context: &Context, operations: &[Operation]) -> Result<()> {
    let mut result = Ok(());
    for operation in operations {
        if result.is_ok() || matches!(operation, Operation::RecordInGraph(_)) {
            result = result.and(context.perform(operation));
        }
    }
    result
}
