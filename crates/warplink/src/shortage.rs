//! Resource exhaustion: which resource, its limit, and the remedy. Also rate-limited warnings.

use crate::sync::lock;
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use std::io;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Minimum interval between warnings, so that a persistent condition does not flood the log.
const INTERVAL: Duration = Duration::from_secs(10);

/// An exhausted resource.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Shortage {
    pub(crate) message: String,
    pub(crate) help: &'static str,
}

impl Shortage {
    /// The exhausted resource that made a system call fail; `None` for other errors.
    pub(crate) fn of(error: &io::Error) -> Option<Self> {
        match Errno::from_io_error(error)? {
            Errno::MFILE => Some(Self::of_descriptors(getrlimit(Resource::Nofile).current)),
            Errno::NFILE => Some(Self {
                message: format!(
                    "too many open files: the file descriptors of this machine are used up; its limit is {}",
                    system_limit("/proc/sys/fs/file-max")
                ),
                help: "close other programs, or have the administrator raise the sysctl fs.file-max",
            }),
            _ => None,
        }
    }

    /// Exhausted descriptors of a process with this limit.
    pub(crate) fn of_descriptors(limit: Option<u64>) -> Self {
        Self {
            message: format!(
                "too many open files: the file descriptors of the process are used up; its limit is {}",
                limit.map_or_else(|| "unknown".to_owned(), |limit| limit.to_string())
            ),
            help: "raise the limit before the ranks start, for example with `ulimit -n 4096`",
        }
    }

    /// The exhausted resource that prevented the start of a thread or process.
    pub(crate) fn of_threads(error: &io::Error) -> Option<Self> {
        if Errno::from_io_error(error)? != Errno::AGAIN {
            return Self::of(error);
        }
        let limit = getrlimit(Resource::Nproc).current;
        let limit = limit.map_or_else(|| "none".to_owned(), |limit| limit.to_string());
        let machine = system_limit("/proc/sys/kernel/threads-max");
        Some(Self {
            message: format!(
                "no more threads and processes can be started; the user's limit is {limit}, the machine's is {machine}, and the \
                 process's control group may have a lower one"
            ),
            help: "raise the limit with `ulimit -u` or that of the container (pids.max), or start fewer ranks",
        })
    }
}

fn system_limit(path: &str) -> String {
    let text = std::fs::read_to_string(path);
    text.map_or_else(|_| "unknown".to_owned(), |text| text.trim().to_owned())
}

/// Rate limit of a warning.
#[derive(Debug)]
pub(crate) struct Throttle(Mutex<(Option<Instant>, u64)>);

impl Throttle {
    pub(crate) const fn new() -> Self {
        Self(Mutex::new((None, 0)))
    }

    /// Whether the warning is due; returns the number of warnings suppressed since the last.
    pub(crate) fn due(&self) -> Option<u64> {
        let (last, omitted) = &mut *lock(&self.0);
        if last.is_some_and(|at| at.elapsed() < INTERVAL) {
            *omitted += 1;
            return None;
        }
        *last = Some(Instant::now());
        Some(std::mem::take(omitted))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::{Error, ErrorKind};

    #[test]
    fn a_shortage_names_its_limit_and_its_remedy() {
        let limit = getrlimit(Resource::Nofile).current.unwrap();
        let of_errno = |errno: Errno| io::Error::from(errno);
        let cases = [
            (
                Error::io("open", &of_errno(Errno::MFILE)),
                &["open files", &limit.to_string(), "ulimit -n"],
            ),
            (
                Error::io("open", &of_errno(Errno::NFILE)),
                &["open files", "machine", "fs.file-max"],
            ),
            (
                Error::thread("start a thread", &of_errno(Errno::AGAIN)),
                &["threads", "limit", "ulimit -u"],
            ),
            (
                Error::thread("start a thread", &of_errno(Errno::MFILE)),
                &["open files", "limit", "ulimit -n"],
            ),
        ];
        for (error, words) in cases {
            assert_eq!(error.kind(), ErrorKind::Io, "{error}");
            for word in words {
                assert!(error.to_string().contains(word), "{error}: {word}");
            }
        }
        // For a socket, EAGAIN means that its timeout expired.
        let late = Error::io("read", &of_errno(Errno::AGAIN));
        assert_eq!(late.kind(), ErrorKind::Timeout);
    }

    #[test]
    fn a_warning_is_given_once_in_a_while() {
        let throttle = Throttle::new();
        let given = (0..1000).filter_map(|_| throttle.due()).count();
        assert_eq!(given, 1);
    }
}
