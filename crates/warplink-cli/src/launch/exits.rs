//! Process exits, in the order in which the kernel reports them.

use anyhow::Result;
use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

/// Callback for the exit of a process.
type Ended = Box<dyn FnOnce() + Send>;

/// Watches processes with a single thread: separate threads would report exits in scheduling order, and the
/// first rank to fail must be identified.
#[derive(Clone)]
pub(super) struct Exits(Arc<Watched>);

struct Watched {
    epoll: OwnedFd,
    processes: Mutex<BTreeMap<u64, (OwnedFd, Ended)>>,
}

impl Exits {
    /// Starts the thread, which lives as long as this process; `None` on kernels without pidfd.
    pub(super) fn new() -> Option<Self> {
        // A successful `pidfd_open` proves kernel support.
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

    /// Calls `ended` when the process has exited.
    pub(super) fn watch(&self, pid: Pid, ended: Ended) -> Result<()> {
        let failed = |errno: Errno| warplink::Error::io("watch a rank", &errno.into());
        let process = pidfd_open(pid, PidfdFlags::empty()).map_err(failed)?;
        let number = u64::from(pid.as_raw_nonzero().get().cast_unsigned());
        let Watched { epoll, processes } = &*self.0;
        // Locked across both steps, so that an exit is not handled before its entry exists.
        let mut processes = processes.lock().unwrap_or_else(PoisonError::into_inner);
        let data = EventData::new_u64(number);
        // Once only: the descriptor of an exited process stays readable.
        epoll::add(epoll, &process, data, EventFlags::IN | EventFlags::ONESHOT).map_err(failed)?;
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
