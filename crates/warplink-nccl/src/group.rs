//! Groups: the operations that a thread submits between `ncclGroupStart` and `ncclGroupEnd`, executed together.
//!
//! First, communicators are created concurrently, since one thread may create several ranks that wait for one another.
//! Then calls are enqueued: for each communicator the collectives in order, and all sends and receives as one exchange.

use crate::abi::Simulation;
use crate::calls::{self, Call};
use crate::communicator::Comm;
use crate::status::{Failure, Outcome};
use std::cell::RefCell;
use std::sync::Arc;
use warplink::Error;

/// A blocking operation on the host, such as waiting for all ranks to join.
pub(crate) struct Task {
    /// Whether the caller waits for it.
    blocking: bool,
    work: Box<dyn FnOnce() -> Outcome + Send>,
    /// Reverts writes to the caller's memory if the work failed; runs on the caller's thread.
    undo: Box<dyn FnOnce()>,
}

#[derive(Default)]
struct CallGroup {
    depth: usize,
    tasks: Vec<Task>,
    calls: Vec<(Arc<Comm>, Call)>,
    failure: Option<Failure>,
}

/// `NCCL_UNDEF_FLOAT`: durations of calls are not estimated.
const UNKNOWN: f32 = -1.0;

thread_local! {
    static GROUP: RefCell<CallGroup> = RefCell::default();
}

impl Task {
    /// `work` for `comm`; `undo` is called if it fails.
    pub(crate) fn new(
        comm: &Arc<Comm>,
        work: impl FnOnce() -> Outcome + Send + 'static,
        undo: impl FnOnce() + 'static,
    ) -> Self {
        Self {
            blocking: comm.blocking,
            work: Box::new(work),
            undo: Box::new(undo),
        }
    }

    /// Has the caller wait, also if the communicator's calls do not block.
    pub(crate) fn waited_for(self) -> Self {
        Self {
            blocking: true,
            ..self
        }
    }
}

/// Runs a task, now or at the end of the group.
pub(crate) fn run(task: Task) -> Outcome {
    let task = GROUP.with_borrow_mut(|group| {
        if group.depth == 0 {
            return Some(task);
        }
        group.tasks.push(task);
        None
    });
    // Outside of the borrow: the work may use the thread's group itself.
    task.map_or(Ok(()), |task| run_all(vec![task]))
}

/// Submits a call, executed now or at the end of the group.
pub(crate) fn submit(comm: Arc<Comm>, call: Call) -> Outcome {
    let now = GROUP.with_borrow_mut(|group| {
        if group.depth == 0 {
            return Some((comm, call));
        }
        group.calls.push((comm, call));
        None
    });
    now.map_or(Ok(()), |now| calls::make(&[now]))
}

/// Records that a function failed within a group, so that the group fails.
pub(crate) fn note(failure: &Failure) {
    GROUP.with_borrow_mut(|group| {
        if group.depth > 0 {
            group.failure.get_or_insert_with(|| failure.clone());
        }
    });
}

/// Runs the operations that `body` submits as a group.
pub(crate) fn within(body: impl FnOnce() -> Outcome) -> Outcome {
    // SAFETY: these two have no pointers.
    unsafe { start() }?;
    if let Err(failure) = body() {
        note(&failure);
    }
    // SAFETY: as above.
    unsafe { end() }
}

/// # Safety No requirements; all functions of the table have the same signature.
pub(crate) unsafe fn start() -> Outcome {
    GROUP.with_borrow_mut(|group| group.depth += 1);
    Ok(())
}

/// # Safety
/// As [`start`].
pub(crate) unsafe fn end() -> Outcome {
    let Some(group) = leave()? else {
        return Ok(());
    };
    if let Some(failure) = group.failure {
        group.tasks.into_iter().for_each(|task| (task.undo)());
        return Err(failure);
    }
    let joined = run_all(group.tasks);
    if let Err(failure) = &joined
        && failure.error.is_some()
    {
        return joined;
    }
    // Communicators that are still being created do not hold up calls of others.
    let mut calls = group.calls;
    let made = calls::make(&calls);
    calls.clear();
    // The thread's next group uses its space.
    GROUP.with_borrow_mut(|group| group.calls = calls);
    made.and(joined)
}

/// # Safety `simulation` must be null or point to an initialized structure.
pub(crate) unsafe fn simulate(simulation: *mut Simulation) -> Outcome {
    let Some(group) = leave()? else {
        return Ok(());
    };
    // A simulation creates nothing: handles that were already stored for its communicators are taken back.
    group.tasks.into_iter().for_each(|task| (task.undo)());
    if let Some(failure) = group.failure {
        return Err(failure);
    }
    if !simulation.is_null() {
        // SAFETY: the caller passes a structure.
        unsafe { simulation.read_unaligned() }.check()?;
        // SAFETY: as above.
        unsafe { (&raw mut (*simulation).estimated_seconds).write_unaligned(UNKNOWN) };
    }
    Ok(())
}

/// Leaves a group; returns its operations if it was the outermost.
fn leave() -> Outcome<Option<CallGroup>> {
    GROUP.with_borrow_mut(|group| match group.depth {
        0 => Err(Failure::usage(
            "there is no group to end",
            "call ncclGroupStart first",
        )),
        // This also resets the depth, so that calls submitted by the operations themselves run immediately.
        1 => Ok(Some(std::mem::take(group))),
        _ => {
            group.depth -= 1;
            Ok(None)
        }
    })
}

/// Runs tasks concurrently. Blocks until the tasks of blocking communicators are complete.
fn run_all(tasks: Vec<Task>) -> Outcome {
    if tasks.is_empty() {
        return Ok(());
    }
    let panicked = || -> Failure { Error::internal("the thread of a rank panicked").into() };
    let (blocking, others): (Vec<_>, Vec<_>) = tasks.into_iter().partition(|task| task.blocking);
    let in_progress = !others.is_empty();
    let mut others = others.into_iter();
    // Their failures are found in the state of the communicator, whose handle the caller keeps to ask for it: so the
    // result is dropped, and nothing is undone.
    while let Some(task) = others.next() {
        let thread = std::thread::Builder::new().name("warplink-join".to_owned());
        if let Err(error) = thread.spawn(task.work) {
            (task.undo)();
            others.chain(blocking).for_each(|task| (task.undo)());
            return Err(Error::io("start the thread that joins", &error).into());
        }
    }
    let mut results = Vec::with_capacity(blocking.len());
    let mut undoing = Vec::with_capacity(blocking.len());
    let mut work = Vec::with_capacity(blocking.len());
    for task in blocking {
        undoing.push(task.undo);
        work.push(task.work);
    }
    if work.len() == 1 {
        // On the caller's thread, without the cost of another.
        results.extend(work.into_iter().map(|work| work()));
    } else {
        std::thread::scope(|scope| {
            let threads: Vec<_> = work.into_iter().map(|work| scope.spawn(work)).collect();
            for thread in threads {
                results.push(thread.join().unwrap_or_else(|_| Err(panicked())));
            }
        });
    }
    let mut first = None;
    for (result, undo) in results.into_iter().zip(undoing) {
        if let Err(failure) = result {
            // Here rather than on the task's thread: the caller's pointers are only valid while the caller is in
            // the group.
            undo();
            first.get_or_insert(failure);
        }
    }
    match first {
        Some(failure) => Err(failure),
        None if in_progress => Err(Failure::IN_PROGRESS),
        None => Ok(()),
    }
}
