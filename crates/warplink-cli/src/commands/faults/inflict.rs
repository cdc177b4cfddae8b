//! Faults that the victim inflicts on itself.

use super::cell::{Fault, Said, now};
use rustix::process::{Resource, Rlimit, Signal, getpid, getrlimit, kill_process, setrlimit};
use signal_hook::consts::SIGXFSZ;
use std::fs::File;
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::thread;
use std::time::Duration;
use warplink::{Error, ErrorKind, Result};

/// The most descriptors of a victim that uses them up.
const DESCRIPTORS: u64 = 512;

/// How long the others take to be inside of what the victim leaves.
const LEAD: Duration = Duration::from_millis(200);

/// How long a thread runs on at most when its process is to stop.
const STOP: Duration = Duration::from_millis(100);

/// How long a victim whose connection is cut by another process waits for that.
const CUT: Duration = Duration::from_millis(300);

/// Resources that a victim holds while its fault lasts.
#[derive(Debug, Default)]
pub(super) struct Inflicted {
    /// All descriptors that there were.
    files: Vec<File>,
}

impl Inflicted {
    /// Leaves `count` descriptors.
    pub(super) fn spare(&mut self, count: usize) {
        self.files.truncate(self.files.len().saturating_sub(count));
    }
}

/// Fails in the way `fault`. Returns where this process lives on: with an error where the victim is to
/// return it. `abort` is how it aborts.
pub(super) fn inflict(fault: Fault, abort: impl FnOnce(&str)) -> Result<Inflicted> {
    thread::sleep(LEAD);
    say(&Said::Fault(now()));
    let mut inflicted = Inflicted::default();
    match fault {
        Fault::Kill => send_self(Signal::KILL),
        // The process that started this one continues it.
        Fault::Stop => {
            send_self(Signal::STOP);
            // Another thread may get the signal, so that this one runs on for a moment.
            thread::sleep(STOP);
        }
        Fault::Exit => std::process::exit(0),
        #[expect(clippy::panic, reason = "the fault that was asked for")]
        Fault::Panic => panic!("a fault that was asked for"),
        Fault::Error => return Err(Error::invalid("a fault that was asked for")),
        Fault::Abort => abort("a fault that was asked for"),
        // The process that started this one cuts it.
        Fault::Cut => thread::sleep(CUT),
        Fault::DiskFull => fill_disk()?,
        Fault::Descriptors => inflicted.files = use_up_descriptors()?,
    }
    Ok(inflicted)
}

/// Prints a line for the process that started this one.
pub(super) fn say(said: &Said) {
    if let Ok(mut line) = serde_json::to_vec(said) {
        line.push(b'\n');
        let mut out = std::io::stdout().lock();
        // Nobody is left to tell where it fails.
        let _ = out.write_all(&line).and_then(|()| out.flush());
    }
}

fn send_self(signal: Signal) {
    let _ = kill_process(getpid(), signal);
}

/// No file grows any more, in memory or on a disk.
fn fill_disk() -> Result<()> {
    // A write then fails, where the signal would end the process.
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
