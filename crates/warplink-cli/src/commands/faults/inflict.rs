//! Faults that the victim inflicts on itself.

use super::cell::{Fault, RankMessage, now};
use rustix::process::{Resource, Rlimit, Signal, getpid, getrlimit, kill_process, setrlimit};
use signal_hook::consts::SIGXFSZ;
use std::fs::File;
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::thread;
use std::time::Duration;
use warplink::{Error, ErrorKind, Result};

/// Limit on the descriptors of a victim that uses them up.
const DESCRIPTORS: u64 = 512;

/// Time for the others to enter the operation that the victim does not complete.
const LEAD: Duration = Duration::from_millis(200);

/// Maximum time that a thread keeps running after SIGSTOP was sent to its process.
const STOP: Duration = Duration::from_millis(100);

/// Time for another process to cut the victim's connection.
const CUT: Duration = Duration::from_millis(300);

/// Resources that a victim holds while its fault lasts.
#[derive(Debug, Default)]
pub(super) struct Inflicted {
    /// All remaining descriptors.
    files: Vec<File>,
}

impl Inflicted {
    /// Leaves `count` descriptors.
    pub(super) fn spare(&mut self, count: usize) {
        self.files.truncate(self.files.len().saturating_sub(count));
    }
}

/// Inflicts `fault`. Returns if the process survives it, with an error if the victim must return one. `abort`
/// aborts the victim's communicator.
pub(super) fn inflict(fault: Fault, abort: impl FnOnce(&str)) -> Result<Inflicted> {
    // The other ranks reach their waits first: the fault is to interrupt them.
    thread::sleep(LEAD);
    // Before the fault, after which the process may send nothing.
    send(&RankMessage::Fault(now()));
    let mut inflicted = Inflicted::default();
    match fault {
        Fault::Kill => send_self(Signal::KILL),
        // The parent process resumes it.
        Fault::Stop => {
            send_self(Signal::STOP);
            // Another thread may receive the signal, and this one continues for a moment.
            thread::sleep(STOP);
        }
        Fault::Exit => std::process::exit(0),
        #[expect(clippy::panic, reason = "the fault that was asked for")]
        Fault::Panic => panic!("a fault that was asked for"),
        Fault::Error => return Err(Error::invalid("a fault that was asked for")),
        Fault::Abort => abort("a fault that was asked for"),
        // The parent process cuts the connection.
        Fault::Cut => thread::sleep(CUT),
        Fault::DiskFull => fill_disk()?,
        Fault::Descriptors => inflicted.files = use_up_descriptors()?,
    }
    Ok(inflicted)
}

/// Prints a message for the parent process.
pub(super) fn send(message: &RankMessage) {
    if let Ok(mut line) = serde_json::to_vec(message) {
        line.push(b'\n');
        let mut out = std::io::stdout().lock();
        // If it fails, the parent has exited.
        let _ = out.write_all(&line).and_then(|()| out.flush());
    }
}

fn send_self(signal: Signal) {
    let _ = kill_process(getpid(), signal);
}

/// Prevents files from growing, in memory or on a disk.
fn fill_disk() -> Result<()> {
    // With a handler, a write fails instead of killing the process.
    signal_hook::flag::register(SIGXFSZ, Arc::new(AtomicBool::new(false)))
        .map_err(|error| Error::io("handle SIGXFSZ", &error))?;
    let limit = Rlimit {
        current: Some(0),
        ..getrlimit(Resource::Fsize)
    };
    Ok(setrlimit(Resource::Fsize, limit)?)
}

fn use_up_descriptors() -> Result<Vec<File>> {
    let limit = getrlimit(Resource::Nofile);
    let fewer = Rlimit {
        current: Some(limit.current.unwrap_or(DESCRIPTORS).min(DESCRIPTORS)),
        ..limit
    };
    setrlimit(Resource::Nofile, fewer)?;
    let mut files = Vec::new();
    loop {
        match File::open("/dev/null") {
            Ok(file) => files.push(file),
            Err(_) if !files.is_empty() => return Ok(files),
            Err(error) => {
                return Err(Error::new(ErrorKind::Io, error.to_string())
                    .with_operation("use up descriptors"));
            }
        }
    }
}
