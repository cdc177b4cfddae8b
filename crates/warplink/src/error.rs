//! The library's error type: what happened, to whom, what was expected, what to do.
//!
//! An error prints as one line: `rank 1: join: MESSAGE; EXPECTED (peer 3, key k); help: HELP`. Rank,
//! operation, peer, key, device, code and help appear where they are known.

use crate::named::{UnknownName, named};
use crate::shortage::Shortage;
use std::borrow::Cow;
use std::fmt;

/// Number of a process (or thread) in a communicator: 0 to world size - 1.
pub type Rank = usize;

/// Result type of the library.
pub type Result<T, E = Error> = std::result::Result<T, E>;

named! {
    /// Kind of an [`Error`]. Match on this, not on the message. Its number is that of C's status.
    #[non_exhaustive]
    pub enum ErrorKind: "kind of error" {
        /// Invalid argument: a length, a rank, an alignment, a combination of options.
        InvalidArgument = "invalid_argument" (1),
        /// The object was closed, or its resource was freed.
        Closed = "closed" (3),
        /// A wait exceeded its deadline.
        Timeout = "timeout" (4),
        /// A rank died, aborted or was dropped without being closed, or its connection broke.
        PeerLost = "peer_lost" (5),
        /// A rank left in order while others still depended on it.
        PeerLeft = "peer_left" (6),
        /// The other ranks have given up on this one: it was silent for longer than the heartbeat limit, or its connection was
        /// cut.
        GivenUp = "given_up" (7),
        /// A rank failed before its part of a common operation; the message states its error.
        PeerFailed = "peer_failed" (8),
        /// Two ranks disagree: on world sizes, lengths of a send and its receive, protocols.
        Mismatch = "mismatch" (9),
        /// A handle is truncated, altered, stale or of another version.
        InvalidHandle = "invalid_handle" (10),
        /// A joining process does not have the secret.
        Authentication = "authentication" (11),
        /// Received data violates the protocol.
        Protocol = "protocol" (12),
        /// The address to listen on is in use.
        AddressInUse = "address_in_use" (13),
        /// A driver or vendor library call failed; the error has its code.
        Driver = "driver" (14),
        /// A library loaded at run time is missing, or lacks a symbol.
        LibraryMissing = "library_missing" (15),
        /// The device, the driver or the allocation does not support this.
        Unsupported = "unsupported" (16),
        /// Device or shared memory is exhausted.
        OutOfMemory = "out_of_memory" (17),
        /// Text could not be parsed.
        Parse = "parse" (18),
        /// An operating-system call failed.
        Io = "io" (19),
        /// A bug in the library; please report it.
        Internal = "internal" (20),
        /// A program failed verification.
        Verification = "verification" (21),
    }
}

/// A failure: its kind, the operation, and the peer, key, device and code, if any.
#[derive(Clone, Debug)]
pub struct Error(Box<Inner>);

#[derive(Clone, Debug)]
struct Inner {
    kind: ErrorKind,
    message: Cow<'static, str>,
    operation: Option<Cow<'static, str>>,
    rank: Option<Rank>,
    /// The same ranks in job numbering, if that differs from the communicator's.
    job_rank: Option<Rank>,
    job_peer: Option<Rank>,
    peer: Option<Rank>,
    key: Option<String>,
    device: Option<String>,
    code: Option<i64>,
    help: Option<Cow<'static, str>>,
    is_cancelled: bool,
}

/// Constructors for the kinds that many places raise.
macro_rules! constructors {
    ($($name:ident: $kind:ident,)*) => {
        impl Error {
            $(
                #[doc = concat!("Shorthand for [`ErrorKind::", stringify!($kind), "`].")]
                pub fn $name(message: impl Into<Cow<'static, str>>) -> Self {
                    Self::new(ErrorKind::$kind, message)
                }
            )*
        }
    };
}

constructors! {
    closed: Closed,
    internal: Internal,
    invalid: InvalidArgument,
    invalid_handle: InvalidHandle,
    mismatch: Mismatch,
    parse: Parse,
    protocol: Protocol,
    unsupported: Unsupported,
}

impl Error {
    /// Creates an error of `kind` with `message`.
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
            is_cancelled: false,
        }))
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
            // The system's text for a timeout is "resource temporarily unavailable".
            ErrorKind::Timeout => Cow::Borrowed("the other side did not answer in time"),
            // Without "(os error N)": the error has the code as a field.
            _ => {
                let text = error.to_string();
                let end = text.find(" (os error ").unwrap_or(text.len());
                Cow::Owned(text[..end].to_owned())
            }
        };
        let made = Self::new(kind, message).with_operation(operation);
        match error.raw_os_error() {
            Some(code) => made.with_code(code.into()),
            None => made,
        }
    }

    /// A thread or a process that could not be started.
    pub fn thread(operation: impl Into<Cow<'static, str>>, error: &std::io::Error) -> Self {
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

    /// Sets the failed operation; the outermost caller's wins.
    pub fn with_operation(mut self, operation: impl Into<Cow<'static, str>>) -> Self {
        self.0.operation = Some(operation.into());
        self
    }

    /// Sets the rank on which this happened.
    pub fn with_rank(mut self, rank: Rank) -> Self {
        self.0.rank = Some(rank);
        self
    }

    /// Sets the peer concerned.
    pub fn with_peer(mut self, peer: Rank) -> Self {
        self.0.peer = Some(peer);
        self
    }

    /// Renumbers the ranks to those of a communicator, keeping the job's if they differ. The error's ranks
    /// are the job's, and `numbered` translates them; or, with `jobs`, they are the communicator's already,
    /// and it translates to the job's.
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

    /// Sets the store key, signal or connection concerned.
    pub fn with_key(mut self, key: impl Into<String>) -> Self {
        self.0.key = Some(key.into());
        self
    }

    /// Marks a timeout at which the store has confirmed that it no longer answers the request: no value was taken for it,
    /// and no other rank gets this rank's vote.
    pub(crate) fn cancelled(mut self) -> Self {
        self.0.is_cancelled = true;
        self
    }

    /// Whether it is [`cancelled`](Self::cancelled).
    pub(crate) fn is_cancelled(&self) -> bool {
        self.0.is_cancelled
    }

    /// Sets the device.
    pub fn with_device(mut self, device: impl Into<String>) -> Self {
        self.0.device = Some(device.into());
        self
    }

    /// Adds the code returned by a driver, a library or the system.
    pub fn with_code(mut self, code: i64) -> Self {
        self.0.code = Some(code);
        self
    }

    /// Sets help text, as an imperative.
    pub fn with_help(mut self, help: impl Into<Cow<'static, str>>) -> Self {
        self.0.help = Some(help.into());
        self
    }

    /// Appends details to the message.
    pub(crate) fn adding(mut self, more: &str) -> Self {
        self.0.message = format!("{}; {more}", self.0.message).into();
        self
    }

    /// Kind of failure.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// Whether it reports the failure of another rank, or the end of the work that depended on one.
    pub(crate) fn is_by_peer(&self) -> bool {
        matches!(
            self.kind(),
            ErrorKind::PeerFailed | ErrorKind::PeerLost | ErrorKind::PeerLeft | ErrorKind::Closed
        )
    }

    /// The message, without context.
    pub fn message(&self) -> &str {
        &self.0.message
    }

    /// Suggested remedy, if known.
    pub fn help(&self) -> Option<&str> {
        self.0.help.as_deref()
    }

    /// The peer concerned, in the numbering of the called communicator; `None` also if that does not contain
    /// the peer.
    pub fn peer(&self) -> Option<Rank> {
        self.0.peer
    }

    /// The peer concerned, in job numbering.
    pub fn job_peer(&self) -> Option<Rank> {
        self.0.job_peer.or(self.0.peer)
    }

    /// The rank on which this happened, if known, in the numbering of the called communicator.
    pub fn rank(&self) -> Option<Rank> {
        self.0.rank
    }

    /// The failed operation, if known.
    pub fn operation(&self) -> Option<&str> {
        self.0.operation.as_deref()
    }

    /// The store key, signal or connection concerned, if any.
    pub fn key(&self) -> Option<&str> {
        self.0.key.as_deref()
    }

    /// The code returned by a driver, a library or the system, if any.
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
    fn error_text_has_event_subject_and_remedy() {
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
    fn system_timeout_has_a_readable_text() {
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
