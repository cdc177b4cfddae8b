//! Starting this command and threads, waiting for child processes, and reading what they leave.

use rustix::process::Pid;
use std::fs::DirEntry;
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// This executable, to start itself. The link works even if its file was replaced.
pub(crate) const THIS_EXECUTABLE: &str = "/proc/self/exe";

/// A command that starts this executable.
pub(crate) fn this_command() -> Command {
    let mut command = Command::new(THIS_EXECUTABLE);
    command.arg0("warplink");
    command
}

/// Process id of a child.
pub(crate) fn pid(child: &Child) -> Option<Pid> {
    i32::try_from(child.id()).ok().and_then(Pid::from_raw)
}

/// Starts a thread.
pub(crate) fn spawn<T: Send + 'static>(
    name: &str,
    body: impl FnOnce() -> T + Send + 'static,
) -> warplink::Result<JoinHandle<T>> {
    thread::Builder::new()
        .name(name.into())
        .spawn(body)
        .map_err(|error| warplink::Error::thread("start a thread", &error))
}

/// Calls `look` until it returns a value, for at most `limit`.
pub(crate) fn poll<T>(limit: Duration, mut look: impl FnMut() -> Option<T>) -> Option<T> {
    let until = Instant::now() + limit;
    loop {
        // Once more after the limit: the last sleep may have passed it.
        let found = look();
        if found.is_some() || Instant::now() >= until {
            return found;
        }
        thread::sleep(POLL_INTERVAL);
    }
}

/// Exit status of `child` if it exits within `limit`.
pub(crate) fn exit_within(child: &mut Child, limit: Duration) -> Option<ExitStatus> {
    poll(limit, || child.try_wait().transpose())?.ok()
}

/// The same; a child that does not is killed.
pub(crate) fn end_within(child: &mut Child, limit: Duration) -> Option<ExitStatus> {
    let status = exit_within(child, limit);
    if status.is_none() {
        let _ = child.kill();
        let _ = child.wait();
    }
    status
}

/// Reads a pipe to its end in a thread, so that its writer never blocks. Keeps what precedes a read error.
pub(crate) fn read_all(
    pipe: Option<impl Read + Send + 'static>,
) -> warplink::Result<JoinHandle<String>> {
    spawn("output", move || {
        let mut text = Vec::new();
        if let Some(mut pipe) = pipe {
            // After an error, what has been read is still of use.
            let _ = pipe.read_to_end(&mut text);
        }
        String::from_utf8_lossy(&text).into_owned()
    })
}

/// Entries of a directory; none if it cannot be read.
pub(crate) fn entries(directory: impl AsRef<Path>) -> impl Iterator<Item = DirEntry> {
    std::fs::read_dir(directory).into_iter().flatten().flatten()
}
