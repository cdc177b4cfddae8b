//! Watches ranks, their output and the launcher's signals until everything has ended.

use super::exits::Exits;
use super::guard;
use super::outcome::{self, LaunchOutcome, RankExit};
use super::output::{self, Target};
use super::rank::Ranks;
use crate::process::{pid, spawn};
use crate::report;
use anyhow::{Context, Result};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, waitid};
use signal_hook::consts::{SIGCONT, SIGKILL, SIGPIPE};
use signal_hook::iterator::{Handle, Signals};
use std::collections::BTreeSet;
use std::io::{self, Read};
use std::process::Child;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long to wait for remaining output once no rank is left.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);
/// How long the other ranks continue after the first failure, so that ranks that fail together can all print
/// their error: the first to exit is not always the cause.
const SETTLE_TIME: Duration = Duration::from_millis(500);
/// Interval for checking for stopped ranks after they were signalled.
const STOPPED_INTERVAL: Duration = Duration::from_secs(1);

#[derive(Debug)]
enum SupervisorEvent {
    Exited(usize, RankExit),
    Signal(i32),
    /// The launcher's own output cannot be written.
    OutputFailed(io::Error),
}

/// Collects events about ranks from several threads.
pub(super) struct Supervisor {
    events: Receiver<SupervisorEvent>,
    sender: Sender<SupervisorEvent>,
    /// Closed when the last output thread has ended.
    drained: Receiver<()>,
    pumping: Sender<()>,
    /// Captured output of each rank.
    kept: Arc<Mutex<Vec<Vec<u8>>>>,
    signals: Handle,
    exits: Option<Exits>,
    consequence: Option<i32>,
    started: Instant,
}

impl Supervisor {
    /// From here on, signals to the launcher are events and no longer terminate it.
    pub(super) fn new(consequence: Option<i32>) -> Result<Self> {
        let (sender, events) = mpsc::channel();
        let (pumping, drained) = mpsc::channel();
        let mut signals = Signals::new(guard::ending_signals().chain([SIGCONT]))
            .map_err(|error| warplink::Error::io("handle signals", &error))?;
        let handle = signals.handle();
        let to = sender.clone();
        spawn("signals", move || {
            for signal in signals.forever() {
                // The receiver exists until everything has ended.
                let _ = to.send(SupervisorEvent::Signal(signal));
            }
        })?;
        Ok(Self {
            events,
            sender,
            drained,
            pumping,
            kept: Arc::default(),
            signals: handle,
            exits: Exits::new(),
            consequence,
            started: Instant::now(),
        })
    }

    /// Forwards a rank's output line by line.
    pub(super) fn pump(
        &self,
        rank: usize,
        stream: impl Read + Send + 'static,
        target: Target,
    ) -> Result<()> {
        let (events, open) = (self.sender.clone(), self.pumping.clone());
        spawn("output", move || {
            if let Err(error) = output::pump(rank, stream, target) {
                let _ = events.send(SupervisorEvent::OutputFailed(error));
            }
            drop(open);
        })?;
        Ok(())
    }

    /// Captures a rank's output for the [`LaunchOutcome`].
    pub(super) fn keep(&self, rank: usize, mut stream: impl Read + Send + 'static) -> Result<()> {
        let (kept, open) = (Arc::clone(&self.kept), self.pumping.clone());
        let length = lock(&kept).len().max(rank + 1);
        lock(&kept).resize(length, Vec::new());
        spawn("output", move || {
            let mut chunk = vec![0; 1 << 16];
            loop {
                match stream.read(&mut chunk) {
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    // A read error counts as end of file.
                    Ok(0) | Err(_) => break,
                    Ok(length) => lock(&kept)[rank].extend_from_slice(&chunk[..length]),
                }
            }
            drop(open);
        })?;
        Ok(())
    }

    /// Watches for a rank's exit, without reaping it.
    pub(super) fn watch(&self, rank: usize, child: &Child) -> Result<()> {
        let pid = pid(child).context("a rank has no process id")?;
        let (started, consequence) = (Instant::now(), self.consequence);
        let events = self.sender.clone();
        let ended = move || {
            let exit = wait_for(pid, consequence);
            let after = started.elapsed();
            // The receiver exists until everything has ended.
            let _ = events.send(SupervisorEvent::Exited(rank, RankExit { after, ..exit }));
        };
        match &self.exits {
            Some(exits) => exits.watch(pid, Box::new(ended))?,
            None => drop(spawn("exit", ended)?),
        }
        Ok(())
    }

    /// Waits for all ranks, terminates them when one fails, forwards signals to them, and kills their
    /// leftover processes.
    pub(super) fn see_through(self, ranks: Ranks, grace: Duration) -> Result<LaunchOutcome> {
        let mut watch = Watch {
            outcome: LaunchOutcome {
                exits: vec![RankExit::default(); ranks.len()],
                ..LaunchOutcome::default()
            },
            running: ranks.len(),
            failed: Vec::new(),
            ending: false,
            timers: BTreeSet::new(),
            grace,
        };
        // The signal may have arrived before its handler was installed.
        if guard::is_lost() {
            watch.follow_guard(&ranks);
        }
        while watch.running > 0 {
            let next = watch.timers.first().map(|(at, _)| *at);
            match self.next(next) {
                Some(event) => watch.handle(event, &ranks),
                None => {
                    if let Some((_, timer)) = watch.timers.pop_first() {
                        watch.expire(timer, &ranks);
                    }
                }
            }
        }
        watch.decide();
        // Ranks first: dropping them kills leftover processes, which may hold the output open.
        drop(ranks);
        // The channel closes with its last sender, and this one would keep the wait below from ending early.
        drop(self.pumping);
        // Returns when the channel closes, or on timeout.
        let _ = self.drained.recv_timeout(DRAIN_TIMEOUT);
        self.signals.close();
        tracing::info!(
            seconds = self.started.elapsed().as_secs_f64(),
            "all ranks have ended"
        );
        let kept = std::mem::take(&mut *lock(&self.kept));
        Ok(LaunchOutcome {
            kept,
            ..watch.outcome
        })
    }

    /// The next event, or `None` at `deadline`.
    fn next(&self, deadline: Option<Instant>) -> Option<SupervisorEvent> {
        match deadline {
            None => self.events.recv().ok(),
            Some(deadline) => {
                // The channel cannot close while `self.sender` exists, so an error is the deadline.
                let left = deadline.saturating_duration_since(Instant::now());
                self.events.recv_timeout(left).ok()
            }
        }
    }
}

/// State of the watch.
#[derive(Debug)]
struct Watch {
    outcome: LaunchOutcome,
    running: usize,
    /// Ranks that failed before the launcher terminated any, in order.
    failed: Vec<usize>,
    ending: bool,
    /// Pending actions by time.
    timers: BTreeSet<(Instant, Timer)>,
    grace: Duration,
}

/// A pending action.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Timer {
    /// Send SIGTERM to the ranks.
    End,
    /// Send SIGKILL to the ranks.
    Kill,
    /// Send SIGKILL to stopped ranks.
    KillStopped,
}

impl Watch {
    fn after(&mut self, time: Duration, timer: Timer) {
        self.timers.insert((Instant::now() + time, timer));
    }

    fn expire(&mut self, timer: Timer, ranks: &Ranks) {
        match timer {
            Timer::End => {
                self.decide();
                self.end(ranks);
            }
            Timer::Kill => ranks.signal(Signal::KILL),
            Timer::KillStopped => {
                ranks.kill_stopped();
                self.after(STOPPED_INTERVAL, Timer::KillStopped);
            }
        }
    }

    fn handle(&mut self, event: SupervisorEvent, ranks: &Ranks) {
        match event {
            SupervisorEvent::Exited(rank, exit) => self.exited(rank, exit),
            SupervisorEvent::Signal(_) if guard::is_lost() => self.follow_guard(ranks),
            SupervisorEvent::Signal(SIGCONT) => {}
            SupervisorEvent::Signal(number) => {
                // A second signal means that the first did not suffice: kill.
                let again = self.outcome.signalled.is_some();
                let signal = if again {
                    None
                } else {
                    Signal::from_named_raw(number)
                };
                ranks.signal(signal.unwrap_or(Signal::KILL));
                if !again {
                    self.outcome.signalled = Some(number);
                    let name = outcome::name(number);
                    report::print_message(&format!("interrupted by {name}; ending the ranks"));
                    // A stopped rank does not react to the signal, and one that stops itself later would be missed
                    // by a single check.
                    self.after(self.grace, Timer::KillStopped);
                }
            }
            SupervisorEvent::OutputFailed(error) => {
                if self.outcome.otherwise == 0 {
                    self.outcome.otherwise = self.output_failed(&error);
                }
                self.end(ranks);
            }
        }
    }

    /// The guard was killed: kill the ranks.
    fn follow_guard(&mut self, ranks: &Ranks) {
        if self.outcome.signalled.replace(SIGKILL) != Some(SIGKILL) {
            report::print_message("the guard was killed; killing the ranks");
        }
        ranks.signal(Signal::KILL);
    }

    /// Reports why the ranks' output is lost, and returns the exit code.
    fn output_failed(&self, error: &io::Error) -> u8 {
        // Like a pipeline whose reader has exited: there is nobody to report to.
        if error.kind() == io::ErrorKind::BrokenPipe {
            return 128 + SIGPIPE as u8;
        }
        report::print_message(&format!(
            "error: write the output of the ranks: {error}; ending the ranks"
        ));
        1
    }

    fn exited(&mut self, rank: usize, exit: RankExit) {
        self.running -= 1;
        if let Some(place) = self.outcome.exits.get_mut(rank) {
            *place = exit;
        }
        // Ranks that end after the launcher began to end them did not fail on their own.
        if !exit.failed() || self.ending || self.outcome.otherwise != 0 {
            return;
        }
        self.failed.push(rank);
        // A rank that fails because of another may exit before it, so collect failures for a moment.
        if self.failed.len() == 1 {
            self.after(SETTLE_TIME, Timer::End);
        }
    }

    /// Determines and reports the root cause of the failures so far.
    fn decide(&mut self) {
        let failed = std::mem::take(&mut self.failed);
        let Some(rank) = self.outcome.cause(&failed) else {
            return;
        };
        self.outcome.first_failure = Some(rank);
        let exit = self.outcome.exits[rank];
        // Failures caused by the launcher's own signal are not reported.
        let signalled = self.outcome.signalled;
        if !signalled.is_some_and(|signal| exit.is_by(signal)) {
            let rest = if self.running > 0 {
                "; ending the other ranks"
            } else {
                ""
            };
            report::print_message(&format!("rank {rank} {}{rest}", exit.describe()));
        }
    }

    fn end(&mut self, ranks: &Ranks) {
        if !self.ending {
            self.ending = true;
            ranks.signal(Signal::TERM);
            self.after(self.grace, Timer::Kill);
        }
    }
}

/// Blocks until the process has exited, without reaping it. Exit code `consequence` means that another rank
/// failed first.
fn wait_for(pid: Pid, consequence: Option<i32>) -> RankExit {
    loop {
        match waitid(
            WaitId::Pid(pid),
            // Leave the zombie: while it exists, its pid is not reused and can be signalled safely.
            WaitIdOptions::EXITED | WaitIdOptions::NOWAIT,
        ) {
            Ok(Some(status)) => {
                let code = status.exit_status();
                // With this exit code, a rank reports that it failed because of another one.
                let follows = code.is_some() && code == consequence;
                return RankExit {
                    code: if follows { Some(1) } else { code },
                    signal: status.terminating_signal(),
                    follows,
                    after: Duration::ZERO,
                };
            }
            Ok(None) | Err(Errno::INTR) => {}
            Err(_) => return RankExit::default(),
        }
    }
}

/// The data is valid even if another thread panicked while it held the lock.
fn lock<T>(kept: &Mutex<T>) -> MutexGuard<'_, T> {
    kept.lock().unwrap_or_else(PoisonError::into_inner)
}
