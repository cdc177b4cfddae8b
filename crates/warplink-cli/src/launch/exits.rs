//! The ends of processes, in the order in which the kernel saw them.

use anyhow::{Context, Result};
use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

/// What is done when a process has ended.
type Ended = Box<dyn FnOnce() + Send>;

/// The processes that are watched. One thread waits for all of them: a thread each would report them in the order in
/// which these get to run, and the first rank that fails is the one to name.
#[derive(Clone)]
pub(super) struct Exits(Arc<Watched>);

struct Watched {
    epoll: OwnedFd,
    processes: Mutex<BTreeMap<u64, (OwnedFd, Ended)>>,
}

impl std::fmt::Debug for Exits {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Exits").finish_non_exhaustive()
    }
}

impl Exits {
    /// Starts the thread, which lives as long as this process; none where the kernel is too old for it.
    pub(super) fn new() -> Option<Self> {
        // A process that can be opened shows that the kernel can do it.
        pidfd_open(rustix::process::getpid(), PidfdFlags::empty()).ok()?;
        let exits = Self(Arc::new(Watched {
            epoll: epoll::create(CreateFlags::CLOEXEC).ok()?,
            processes: Mutex::default(),
        }));
        let watched = exits.0.clone();
        let waiting = thread::Builder::new().name("exits".into());
        waiting.spawn(move || watched.wait()).ok()?;
        Some(exits)
    }

    /// Calls `ended` once the process has ended.
    pub(super) fn watch(&self, pid: Pid, ended: Ended) -> Result<()> {
        let process = pidfd_open(pid, PidfdFlags::empty()).context("watch a rank")?;
        let number = u64::from(pid.as_raw_nonzero().get().cast_unsigned());
        let Watched { epoll, processes } = &*self.0;
        let mut processes = processes.lock().unwrap_or_else(PoisonError::into_inner);
        let data = EventData::new_u64(number);
        epoll::add(epoll, &process, data, EventFlags::IN | EventFlags::ONESHOT)
            .context("watch a rank")?;
        processes.insert(number, (process, ended));
        Ok(())
    }
}

impl Watched {
    fn wait(&self) {
        let mut events = Vec::with_capacity(64);
        loop {
            match epoll::wait(&self.epoll, spare_capacity(&mut events), None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(_) => return,
            }
            for event in events.drain(..) {
                let mut processes = self
                    .processes
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner);
                if let Some((_, ended)) = processes.remove(&event.data.u64()) {
                    ended();
                }
            }
        }
    }
}
