//! The library's error type: what happened, to whom, what was expected, what to do.
//!
//! An error prints as one line: `rank 1: join: MESSAGE; EXPECTED (peer 3, key k); help: HELP`. Rank,
//! operation, peer, key, device, code and help appear where they are known.

use crate::named::{UnknownName, named};
use crate::shortage::Shortage;
use std::borrow::Cow;
use std::fmt;

/// The number of a process (or thread) in a communicator, from 0 to the world size less one.
pub type Rank = usize;

/// The library's result.
pub type Result<T, E = Error> = std::result::Result<T, E>;

named! {
    /// What kind of failure an [`Error`] is; match on this, not on its text. Its number is that of C's status.
    #[non_exhaustive]
    pub enum ErrorKind: "kind of error" {
        /// An argument is wrong: a null pointer, a length, a rank, an alignment, a combination of options.
        InvalidArgument = "invalid_argument" (1),
        /// The object was closed, its handle given back, or what it refers to freed.
        Closed = "closed" (3),
        /// A wait passed its deadline.
        Timeout = "timeout" (4),
        /// A rank died, aborted or was dropped without being closed, or its connection ended.
        PeerLost = "peer_lost" (5),
        /// A rank left in order while something still depended on it.
        PeerLeft = "peer_left" (6),
        /// The other ranks go on without this one: they did not hear of it for longer than the heartbeat limit, or its
        /// connection was cut.
        GivenUp = "given_up" (7),
        /// A rank failed before its part in what this rank does with it; the message says how.
        PeerFailed = "peer_failed" (8),
        /// Two ranks disagree: world sizes, transports, lengths of a send and its receive, protocols.
        Mismatch = "mismatch" (9),
        /// A handle or a unique id is truncated, altered, of another version or stale.
        InvalidHandle = "invalid_handle" (10),
        /// A process that joins does not hold the secret.
        Authentication = "authentication" (11),
        /// What came over a socket does not follow the protocol.
        Protocol = "protocol" (12),
        /// The address to listen on is taken.
        AddressInUse = "address_in_use" (13),
        /// A call of a driver or a vendor library failed, and the error has its code; or a kernel does not compile.
        Driver = "driver" (14),
        /// A library that is loaded at run time is missing, or lacks a symbol.
        LibraryMissing = "library_missing" (15),
        /// The device, the driver or the allocation cannot do this.
        Unsupported = "unsupported" (16),
        /// Device or shared memory is exhausted.
        OutOfMemory = "out_of_memory" (17),
        /// Text could not be parsed: an address, a name, an environment variable, a program.
        Parse = "parse" (18),
        /// An operating-system call failed.
        Io = "io" (19),
        /// A bug in the library; please report it.
        Internal = "internal" (20),
        /// A program failed verification.
        Verification = "verification" (21),
    }
}

/// A failure: its kind, what was being done, and the peer, key, device and code where there are any.
#[derive(Clone, Debug)]
pub struct Error(Box<Inner>);

#[derive(Clone, Debug)]
struct Inner {
    kind: ErrorKind,
    message: Cow<'static, str>,
    operation: Option<Cow<'static, str>>,
    rank: Option<Rank>,
    /// The same ranks in the job, where a communicator numbers them otherwise.
    job_rank: Option<Rank>,
    job_peer: Option<Rank>,
    peer: Option<Rank>,
    key: Option<String>,
    device: Option<String>,
    code: Option<i64>,
    help: Option<Cow<'static, str>>,
}

impl Error {
    /// An error of `kind` that says `message`.
    pub fn new(kind: ErrorKind, message: impl Into<Cow<'static, str>>) -> Self {
        Self(Box::new(Inner {
            kind,
            message: message.into(),
            operation: None,
            rank: None,
            job_rank: None,
            job_peer: None,
            peer: None,
            key: None,
            device: None,
            code: None,
            help: None,
        }))
    }

    /// Shorthand for [`ErrorKind::InvalidArgument`].
    pub fn invalid(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(ErrorKind::InvalidArgument, message)
    }

    /// A failed operating-system call.
    pub fn io(operation: impl Into<Cow<'static, str>>, error: &std::io::Error) -> Self {
        if let Some(shortage) = Shortage::of(error) {
            return Self::short_of(operation, error, shortage);
        }
        let kind = match error.kind() {
            std::io::ErrorKind::AddrInUse => ErrorKind::AddressInUse,
            std::io::ErrorKind::OutOfMemory => ErrorKind::OutOfMemory,
            std::io::ErrorKind::TimedOut | std::io::ErrorKind::WouldBlock => ErrorKind::Timeout,
            _ => ErrorKind::Io,
        };
        let message = match kind {
            // The system says "resource temporarily unavailable" of a timeout.
            ErrorKind::Timeout => Cow::Borrowed("the other side did not answer in time"),
            _ => Cow::Owned(error.to_string()),
        };
        let made = Self::new(kind, message).with_operation(operation);
        match error.raw_os_error() {
            Some(code) => made.with_code(code.into()),
            None => made,
        }
    }

    /// A thread that could not be started.
    pub(crate) fn thread(operation: &'static str, error: &std::io::Error) -> Self {
        match Shortage::of_threads(error) {
            Some(shortage) => Self::short_of(operation, error, shortage),
            None => Self::io(operation, error),
        }
    }

    fn short_of(
        operation: impl Into<Cow<'static, str>>,
        error: &std::io::Error,
        shortage: Shortage,
    ) -> Self {
        let made = Self::new(ErrorKind::Io, shortage.message)
            .with_operation(operation)
            .with_help(shortage.help);
        match error.raw_os_error() {
            Some(code) => made.with_code(code.into()),
            None => made,
        }
    }

    /// Names the operation that failed; the outermost caller's word stands.
    pub fn with_operation(mut self, operation: impl Into<Cow<'static, str>>) -> Self {
        self.0.operation = Some(operation.into());
        self
    }

    /// Names the rank on which this happened.
    pub fn with_rank(mut self, rank: Rank) -> Self {
        self.0.rank = Some(rank);
        self
    }

    /// Names the peer that this concerns.
    pub fn with_peer(mut self, peer: Rank) -> Self {
        self.0.peer = Some(peer);
        self
    }

    /// Names the ranks as a communicator numbers them and, where the job has them by other numbers,
    /// as the job does. Those that the error names are the job's, and `numbered` gives theirs; or,
    /// with `jobs`, they are the communicator's already, and it gives the job's.
    pub(crate) fn in_group(
        mut self,
        (rank, job_rank): (Rank, Rank),
        jobs: Option<&dyn Fn(Rank) -> Option<Rank>>,
        numbered: &dyn Fn(Rank) -> Option<Rank>,
    ) -> Self {
        if self.0.job_rank.is_some() {
            return self;
        }
        self.0.rank = Some(rank);
        self.0.job_rank = Some(job_rank);
        if let Some(peer) = self.0.peer {
            match jobs {
                Some(jobs) => self.0.job_peer = jobs(peer),
                None => {
                    self.0.job_peer = Some(peer);
                    self.0.peer = numbered(peer);
                }
            }
        }
        self
    }

    /// Names the store key, signal or connection that this concerns.
    pub fn with_key(mut self, key: impl Into<String>) -> Self {
        self.0.key = Some(key.into());
        self
    }

    /// Names the device.
    pub fn with_device(mut self, device: impl Into<String>) -> Self {
        self.0.device = Some(device.into());
        self
    }

    /// Adds the code that a driver, a library or the system returned.
    pub fn with_code(mut self, code: i64) -> Self {
        self.0.code = Some(code);
        self
    }

    /// Says what to do about it, as an imperative.
    pub fn with_help(mut self, help: impl Into<Cow<'static, str>>) -> Self {
        self.0.help = Some(help.into());
        self
    }

    /// Says more of what happened.
    pub(crate) fn adding(mut self, more: &str) -> Self {
        self.0.message = format!("{}; {more}", self.0.message).into();
        self
    }

    /// What kind of failure this is.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// What happened, without the context around it.
    pub fn message(&self) -> &str {
        &self.0.message
    }

    /// What to do about it, if anything is known.
    pub fn help(&self) -> Option<&str> {
        self.0.help.as_deref()
    }

    /// The peer that this concerns, if one, by its rank in the communicator that was called. `None`
    /// also where that does not contain the peer.
    pub fn peer(&self) -> Option<Rank> {
        self.0.peer
    }

    /// The peer that this concerns, if one, by its rank in the job.
    pub fn job_peer(&self) -> Option<Rank> {
        self.0.job_peer.or(self.0.peer)
    }

    /// The rank on which this happened, if it is known, in the communicator that was called.
    pub fn rank(&self) -> Option<Rank> {
        self.0.rank
    }

    /// The operation that failed, if it is known.
    pub fn operation(&self) -> Option<&str> {
        self.0.operation.as_deref()
    }

    /// The store key, signal or connection that this concerns, if one.
    pub fn key(&self) -> Option<&str> {
        self.0.key.as_deref()
    }

    /// The code that a driver, a library or the system returned, if one.
    pub fn code(&self) -> Option<i64> {
        self.0.code
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let inner = &*self.0;
        if let Some(rank) = inner.rank {
            match inner.job_rank {
                Some(job_rank) if job_rank != rank => {
                    write!(f, "rank {rank} (rank {job_rank} of the job): ")?;
                }
                _ => write!(f, "rank {rank}: ")?,
            }
        }
        if let Some(operation) = &inner.operation {
            write!(f, "{operation}: ")?;
        }
        f.write_str(&inner.message)?;
        let mut open = false;
        let mut field = |f: &mut fmt::Formatter<'_>, name: &str, value: &dyn fmt::Display| {
            let lead = if std::mem::replace(&mut open, true) {
                ", "
            } else {
                " ("
            };
            write!(f, "{lead}{name} {value}")
        };
        if let Some(peer) = inner.peer {
            field(f, "peer", &peer)?;
        }
        if let Some(peer) = inner.job_peer.filter(|_| inner.job_peer != inner.peer) {
            field(f, "in the job peer", &peer)?;
        }
        if let Some(key) = &inner.key {
            field(f, "key", key)?;
        }
        if let Some(device) = &inner.device {
            field(f, "device", device)?;
        }
        if let Some(code) = inner.code {
            field(f, "code", &code)?;
        }
        if open {
            f.write_str(")")?;
        }
        match &inner.help {
            Some(help) => write!(f, "; help: {help}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Error {}

impl From<UnknownName> for Error {
    fn from(unknown: UnknownName) -> Self {
        Self::new(ErrorKind::Parse, unknown.message)
    }
}

impl From<rustix::io::Errno> for Error {
    fn from(errno: rustix::io::Errno) -> Self {
        Self::io("system call", &errno.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn says_what_happened_to_whom_and_what_to_do() {
        let error = Error::new(
            ErrorKind::Timeout,
            "timed out after 5s waiting for the peer's region",
        )
        .with_operation("exchange handles")
        .with_rank(1)
        .with_peer(3)
        .with_key("x/3/1/7")
        .with_help("check that rank 3 is running");
        assert_eq!(
            error.to_string(),
            "rank 1: exchange handles: timed out after 5s waiting for the peer's region (peer 3, key x/3/1/7); help: check that rank 3 is running"
        );
        assert_eq!((error.kind(), error.peer()), (ErrorKind::Timeout, Some(3)));
    }

    #[test]
    fn a_timeout_of_the_system_is_told_in_words() {
        let error = Error::io("read a frame", &std::io::ErrorKind::WouldBlock.into());
        assert_eq!(
            (error.kind(), error.to_string().as_str()),
            (
                ErrorKind::Timeout,
                "read a frame: the other side did not answer in time"
            )
        );
    }
}
