//! Waiting for child processes, and reading what they leave.

use std::fs::DirEntry;
use std::io::{self, Read};
use std::path::Path;
use std::process::{Child, ExitStatus};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

const POLL_INTERVAL: Duration = Duration::from_millis(10);

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

/// Reads a pipe to its end in a thread, so that its writer never blocks. Keeps what precedes a read error.
pub(crate) fn read_all(pipe: Option<impl Read + Send + 'static>) -> io::Result<JoinHandle<String>> {
    let read = move || {
        let mut text = Vec::new();
        if let Some(mut pipe) = pipe {
            // After an error, what has been read is still of use.
            let _ = pipe.read_to_end(&mut text);
        }
        String::from_utf8_lossy(&text).into_owned()
    };
    thread::Builder::new().name("output".into()).spawn(read)
}

/// Entries of a directory; none if it cannot be read.
pub(crate) fn entries(directory: impl AsRef<Path>) -> impl Iterator<Item = DirEntry> {
    std::fs::read_dir(directory).into_iter().flatten().flatten()
}
