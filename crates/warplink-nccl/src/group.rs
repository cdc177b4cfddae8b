//! Groups: the operations that a thread submits between `ncclGroupStart` and `ncclGroupEnd`, executed together.
//!
//! First, communicators are created and windows registered, concurrently for different communicators, since one thread may
//! have several ranks that wait for one another. Then calls are enqueued: for each communicator the collectives in order, all
//! sends and receives as one exchange, puts and signals, and waits for signals.

use crate::abi::Simulation;
use crate::calls::{self, Call};
use crate::communicator::{Comm, InProgress};
use crate::status::{Failure, Outcome};
use std::cell::RefCell;
use std::sync::Arc;
use std::sync::mpsc::{self, Sender};
use warplink::Error;

/// A blocking operation on the host, such as waiting for all ranks to join.
pub(crate) struct Task {
    /// The communicator over which it exchanges values with other ranks. Its tasks run in the order of the calls, by
    /// which the exchanges of the ranks are matched.
    on: Arc<Comm>,
    /// Whether the caller waits for it.
    blocking: bool,
    work: TaskBody,
    /// Reverts writes to the caller's memory if the work failed; runs on the caller's thread.
    undo: Box<dyn FnOnce()>,
}

type TaskBody = Box<dyn FnOnce() -> Outcome + Send>;

#[derive(Default)]
struct CallGroup {
    depth: usize,
    tasks: Vec<Task>,
    calls: Vec<(Arc<Comm>, Call)>,
    /// Runs after the calls, whether they were made or failed.
    after: Vec<Box<dyn FnOnce() -> Outcome>>,
    failure: Option<Failure>,
}

/// `NCCL_UNDEF_FLOAT`: durations of calls are not estimated.
const UNKNOWN: f32 = -1.0;

thread_local! {
    static GROUP: RefCell<CallGroup> = RefCell::default();
}

impl Task {
    /// `work`, which exchanges values over `on`; `undo` is called if it fails. The caller waits for it if the
    /// communicator's calls block.
    pub(crate) fn new(
        on: &Arc<Comm>,
        work: impl FnOnce() -> Outcome + Send + 'static,
        undo: impl FnOnce() + 'static,
    ) -> Self {
        Self {
            blocking: on.blocking,
            on: on.clone(),
            work: Box::new(work),
            undo: Box::new(undo),
        }
    }

    /// Sets whether the caller waits for it.
    pub(crate) fn blocking(self, blocking: bool) -> Self {
        Self { blocking, ..self }
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

/// Runs `work`, now or after the calls of the group.
pub(crate) fn after_calls(work: impl FnOnce() -> Outcome + 'static) -> Outcome {
    let now = GROUP.with_borrow_mut(|group| {
        if group.depth == 0 {
            return Some(work);
        }
        group.after.push(Box::new(work));
        None
    });
    now.map_or(Ok(()), |work| work())
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
    unsafe { begin() }?;
    if let Err(failure) = body() {
        note(&failure);
    }
    // SAFETY: as above.
    unsafe { end() }
}

/// # Safety
/// No requirements; all functions of the table have the same signature.
pub(crate) unsafe fn begin() -> Outcome {
    GROUP.with_borrow_mut(|group| group.depth += 1);
    Ok(())
}

/// # Safety
/// As [`begin`].
pub(crate) unsafe fn end() -> Outcome {
    let Some(mut group) = leave()? else {
        return Ok(());
    };
    let after = std::mem::take(&mut group.after);
    let ended = run_group(group);
    let after = after.into_iter().map(|work| work());
    let after = after.fold(Ok(()), Outcome::and);
    // A communicator in progress is no failure, which would be one of what followed.
    match ended {
        Err(failure) if failure.error.is_none() => after.and(Err(failure)),
        ended => ended.and(after),
    }
}

fn run_group(group: CallGroup) -> Outcome {
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

/// # Safety
/// `simulation` must be null or point to an initialized structure.
pub(crate) unsafe fn simulate(simulation: *mut Simulation) -> Outcome {
    let Some(group) = leave()? else {
        return Ok(());
    };
    // A simulation creates nothing: handles that were already stored for its communicators are taken back.
    group.tasks.into_iter().for_each(|task| (task.undo)());
    let after = group.after.into_iter().map(|work| work());
    after.fold(Ok(()), Outcome::and)?;
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

/// The tasks of one communicator, with their numbers.
struct Chain {
    on: Arc<Comm>,
    links: Vec<(usize, ChainedTask)>,
}

/// A task of a chain.
enum ChainedTask {
    Waited(TaskBody),
    /// With the mark that its communicator is in progress.
    InBackground(TaskBody, InProgress),
}

/// Runs the tasks of each communicator in order, those of different ones concurrently. Blocks until those that the
/// caller waits for are complete.
fn run_all(tasks: Vec<Task>) -> Outcome {
    let mut undoing = Vec::with_capacity(tasks.len());
    let mut chains: Vec<Chain> = Vec::new();
    // Until they have run: of those that the caller does not wait for, failures are found in the state of the
    // communicator, whose handle the caller keeps to ask for it. So their results are dropped, and nothing is undone.
    let mut results = Vec::with_capacity(tasks.len());
    for (number, task) in tasks.into_iter().enumerate() {
        let panicked = || Error::internal("the thread of a rank panicked");
        results.push(task.blocking.then(|| Err(panicked().into())));
        undoing.push(task.undo);
        let link = if task.blocking {
            ChainedTask::Waited(task.work)
        } else {
            ChainedTask::InBackground(task.work, InProgress::begin(&task.on))
        };
        match chains.iter_mut().find(|one| Arc::ptr_eq(&one.on, &task.on)) {
            Some(chain) => chain.links.push((number, link)),
            None => chains.push(Chain {
                on: task.on,
                links: vec![(number, link)],
            }),
        }
    }
    let waited = results.iter().flatten().count();
    let in_progress = waited < results.len();
    let (sender, done) = mpsc::channel();
    if let ([_], false) = (&*chains, in_progress) {
        // On the caller's thread, without the cost of another.
        chains.into_iter().for_each(|chain| chain.run(&sender));
    } else if let Err(error) = start(chains, &sender) {
        undoing.into_iter().for_each(|undo| undo());
        return Err(Error::io("start the thread of a rank", &error).into());
    }
    drop(sender);
    for (number, result) in done.iter().take(waited) {
        results[number] = Some(result);
    }
    let mut first = None;
    for (result, undo) in results.into_iter().zip(undoing) {
        if let Some(Err(failure)) = result {
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

type Results = Sender<(usize, Outcome)>;

/// Runs each chain on a thread of its own; if one of them cannot be started, none.
fn start(chains: Vec<Chain>, results: &Results) -> std::io::Result<()> {
    let mut gates = Vec::with_capacity(chains.len());
    for chain in chains {
        let (open, gate) = mpsc::channel::<()>();
        let results = results.clone();
        let body = move || {
            // Fails if another thread was not started.
            if gate.recv().is_ok() {
                chain.run(&results);
            }
        };
        let thread = std::thread::Builder::new().name("warplink-join".to_owned());
        thread.spawn(body)?;
        gates.push(open);
    }
    for gate in gates {
        // The thread waits for it.
        let _ = gate.send(());
    }
    Ok(())
}

impl Chain {
    fn run(self, results: &Results) {
        for (number, link) in self.links {
            match link {
                // Received by a caller that waits for it.
                ChainedTask::Waited(work) => drop(results.send((number, work()))),
                ChainedTask::InBackground(work, _in_progress) => drop(work()),
            }
        }
    }
}
