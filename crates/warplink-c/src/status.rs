//! What every function returns, and the text of the last error of a thread.

use crate::callback::{self, Callback};
use std::any::Any;
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};
use warplink::{Error, ErrorKind};

/// What a function returns. `warplink_last_error` says more.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// The call did what it says.
    Success = 0,
    /// An argument is wrong: a null pointer, a rank, a length, a range.
    InvalidArgument = 1,
    /// Calls were made in the wrong order.
    InvalidUsage = 2,
    /// The handle was given back, or its communicator was destroyed.
    Closed = 3,
    /// A wait passed its deadline.
    Timeout = 4,
    /// A rank died, aborted, or left without destroying its communicator.
    PeerLost = 5,
    /// A rank left in order while something still depended on it.
    PeerLeft = 6,
    /// The other ranks go on without this one, which gave no sign of life for too long.
    GivenUp = 7,
    /// A rank failed before its part in this.
    PeerFailed = 8,
    /// Two ranks disagree: on the number of ranks, on a transport.
    Mismatch = 9,
    /// The unique id or a handle is truncated, altered, or of another version.
    InvalidHandle = 10,
    /// A process that joins does not hold the secret.
    Authentication = 11,
    /// What came over a socket does not follow the protocol.
    Protocol = 12,
    /// The address to listen on is taken.
    AddressInUse = 13,
    /// A call of a driver or a vendor's library failed, or a kernel does not compile.
    Driver = 14,
    /// A library that is loaded at run time is missing.
    LibraryMissing = 15,
    /// The device or the allocation cannot do this.
    Unsupported = 16,
    /// Memory is exhausted.
    OutOfMemory = 17,
    /// Text could not be parsed: an address, an environment variable.
    Parse = 18,
    /// An operating-system call failed.
    Io = 19,
    /// A bug in the library; please report it.
    Internal = 20,
}

/// All of them, by number.
const ALL: [Status; 21] = [
    Status::Success,
    Status::InvalidArgument,
    Status::InvalidUsage,
    Status::Closed,
    Status::Timeout,
    Status::PeerLost,
    Status::PeerLeft,
    Status::GivenUp,
    Status::PeerFailed,
    Status::Mismatch,
    Status::InvalidHandle,
    Status::Authentication,
    Status::Protocol,
    Status::AddressInUse,
    Status::Driver,
    Status::LibraryMissing,
    Status::Unsupported,
    Status::OutOfMemory,
    Status::Parse,
    Status::Io,
    Status::Internal,
];

impl Status {
    fn text(self) -> &'static CStr {
        match self {
            Self::Success => c"success",
            Self::InvalidArgument => c"an argument is wrong",
            Self::InvalidUsage => c"calls were made in the wrong order",
            Self::Closed => c"the handle was given back, or its communicator destroyed",
            Self::Timeout => c"a wait passed its deadline",
            Self::PeerLost => c"a rank was lost",
            Self::PeerLeft => c"a rank left while something depended on it",
            Self::GivenUp => c"the other ranks go on without this one",
            Self::PeerFailed => c"a rank failed before its part in this",
            Self::Mismatch => c"two ranks disagree",
            Self::InvalidHandle => c"an id or a handle is malformed",
            Self::Authentication => c"a process does not hold the secret",
            Self::Protocol => c"a message does not follow the protocol",
            Self::AddressInUse => c"the address is taken",
            Self::Driver => c"a driver's or a library's call failed",
            Self::LibraryMissing => c"a library is missing",
            Self::Unsupported => c"the device cannot do this",
            Self::OutOfMemory => c"memory is exhausted",
            Self::Parse => c"text could not be parsed",
            Self::Io => c"a system call failed",
            Self::Internal => c"a bug in the library",
        }
    }
}

impl From<ErrorKind> for Status {
    fn from(kind: ErrorKind) -> Self {
        match kind {
            ErrorKind::InvalidArgument => Self::InvalidArgument,
            ErrorKind::InvalidHandle => Self::InvalidHandle,
            ErrorKind::Mismatch => Self::Mismatch,
            ErrorKind::Timeout => Self::Timeout,
            ErrorKind::PeerLost => Self::PeerLost,
            ErrorKind::PeerLeft => Self::PeerLeft,
            ErrorKind::GivenUp => Self::GivenUp,
            ErrorKind::PeerFailed => Self::PeerFailed,
            ErrorKind::Authentication => Self::Authentication,
            ErrorKind::Protocol => Self::Protocol,
            ErrorKind::AddressInUse => Self::AddressInUse,
            ErrorKind::Closed => Self::Closed,
            ErrorKind::Driver => Self::Driver,
            ErrorKind::LibraryMissing => Self::LibraryMissing,
            ErrorKind::Unsupported => Self::Unsupported,
            ErrorKind::OutOfMemory => Self::OutOfMemory,
            ErrorKind::Parse => Self::Parse,
            ErrorKind::Io => Self::Io,
            // Programs are not part of this interface, so their errors are bugs here.
            _ => Self::Internal,
        }
    }
}

/// A few words on a status, of static lifetime; never null, also for a number that is no status.
#[unsafe(no_mangle)]
pub extern "C" fn warplink_status_text(status: i32) -> *const c_char {
    let known = usize::try_from(status).ok().and_then(|at| ALL.get(at));
    known
        .map_or(c"unknown status", |status| status.text())
        .as_ptr()
}

/// The last error of the calling thread: what happened, to whom, what was expected, and what to do. Empty
/// where no call has failed; never null. Valid until the next call of the thread that fails.
#[unsafe(no_mangle)]
pub extern "C" fn warplink_last_error() -> *const c_char {
    read_last(|last| last.text.as_ptr()).unwrap_or(c"".as_ptr())
}

/// The rank that the last error of the calling thread concerns, or -1 where there is none.
#[unsafe(no_mangle)]
pub extern "C" fn warplink_last_error_peer() -> i32 {
    let peer = read_last(|last| last.failure.error.peer()).flatten();
    peer.and_then(|peer| i32::try_from(peer).ok()).unwrap_or(-1)
}

/// A call that failed.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    status: Status,
    error: Error,
}

/// What the functions are made of gives this.
pub(crate) type Outcome<T = ()> = Result<T, Failure>;

impl Failure {
    /// Calls in the wrong order.
    pub(crate) fn usage(message: impl Into<String>, help: impl Into<String>) -> Self {
        Self {
            status: Status::InvalidUsage,
            error: Error::new(ErrorKind::InvalidArgument, message.into()).with_help(help.into()),
        }
    }

    /// An argument that is wrong.
    pub(crate) fn invalid(message: impl Into<String>, help: impl Into<String>) -> Self {
        Error::invalid(message.into()).with_help(help.into()).into()
    }

    /// Names the peer that this concerns.
    pub(crate) fn with_peer(mut self, peer: usize) -> Self {
        self.error = self.error.with_peer(peer);
        self
    }

    fn panicked(payload: &(dyn Any + Send)) -> Self {
        let text = payload.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| payload.downcast_ref::<&str>().copied());
        let message = format!("the library panicked: {}", text.unwrap_or("without a text"));
        Error::new(ErrorKind::Internal, message)
            .with_help("report this, with the log")
            .into()
    }

    /// As the error of a kernel of the host device.
    pub(crate) fn into_error(self) -> Error {
        self.error
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self {
            status: error.kind().into(),
            error,
        }
    }
}

/// The last failure of a thread.
struct Last {
    failure: Failure,
    text: CString,
}

thread_local! {
    static LAST: RefCell<Option<Last>> = const { RefCell::new(None) };
}

/// Runs the body of an exported function: errors and panics become a status, and the thread's last error.
/// `operation` is a verb, for messages that name none. Fails in functions that the caller gave: one that waits for its own
/// stream, or sets the handler that it is, would wait for ever.
pub(crate) fn entry(operation: &'static str, body: impl FnOnce() -> Outcome) -> Status {
    entry_unless(callback::running(), operation, body)
}

/// As [`entry`], of a call that the bodies of host kernels make.
pub(crate) fn block_entry(operation: &'static str, body: impl FnOnce() -> Outcome) -> Status {
    let refusing = callback::running().filter(|running| *running != Callback::Body);
    entry_unless(refusing, operation, body)
}

/// As [`entry`], of a call that may be made anywhere, since it waits for nothing.
pub(crate) fn free_entry(operation: &'static str, body: impl FnOnce() -> Outcome) -> Status {
    entry_unless(None, operation, body)
}

fn entry_unless(
    refusing: Option<Callback>,
    operation: &'static str,
    body: impl FnOnce() -> Outcome,
) -> Status {
    let body = || match refusing {
        Some(callback) => Err(misplaced(callback)),
        None => body(),
    };
    let ended = catch_unwind(AssertUnwindSafe(body))
        .unwrap_or_else(|payload| Err(Failure::panicked(&*payload)));
    let Err(mut failure) = ended else {
        return Status::Success;
    };
    if failure.error.operation().is_none() {
        failure.error = failure.error.with_operation(operation);
    }
    let status = failure.status;
    keep(failure);
    status
}

/// The last failure of this thread, if it has this status.
pub(crate) fn last_with(status: i32) -> Option<Failure> {
    let last = read_last(|last| last.failure.clone());
    last.filter(|failure| failure.status as i32 == status)
}

/// The error of a call in a function that the caller gave.
fn misplaced(callback: Callback) -> Failure {
    let (expected, help) = match callback {
        Callback::Body => (
            "none but those of blocks",
            "make the call where the kernel is launched",
        ),
        Callback::LogHandler => ("none", "make the call after the handler has returned"),
    };
    Failure::usage(
        format!("a call in {}; expected {expected}", callback.name()),
        help,
    )
}

fn keep(failure: Failure) {
    // A zero byte in the text would end it early.
    let text = failure.error.to_string().replace('\0', " ");
    let text = CString::new(text).unwrap_or_default();
    // While the thread ends there is no place to keep it.
    let _ = LAST.try_with(|last| {
        if let Ok(mut last) = last.try_borrow_mut() {
            *last = Some(Last { failure, text });
        }
    });
}

fn read_last<R>(read: impl FnOnce(&Last) -> R) -> Option<R> {
    let read = |last: &RefCell<Option<Last>>| last.try_borrow().ok()?.as_ref().map(read);
    LAST.try_with(read).ok().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    fn last_error() -> String {
        // SAFETY: the function gives a text that ends with a zero and is valid until the next failure.
        let text = unsafe { CStr::from_ptr(warplink_last_error()) };
        text.to_str().unwrap().to_owned()
    }

    #[test]
    fn a_panic_becomes_a_status_and_a_text() {
        let status = entry("try", || panic!("what {}", "happened"));
        assert_eq!(status, Status::Internal);
        let text = last_error();
        assert!(
            text.starts_with("try: the library panicked: what happened"),
            "{text}"
        );
    }

    #[test]
    fn errors_are_of_their_thread_and_outlive_calls_that_succeed() {
        let fail = || {
            let error = Error::new(ErrorKind::Timeout, "late\0r").with_peer(3);
            Err(error.with_help("wait").into())
        };
        assert_eq!(entry("try", fail), Status::Timeout);
        assert_eq!(entry("try", || Ok(())), Status::Success);
        assert_eq!(last_error(), "try: late r (peer 3); help: wait");
        assert_eq!(warplink_last_error_peer(), 3);
        let elsewhere = std::thread::spawn(|| (last_error(), warplink_last_error_peer()));
        assert_eq!(elsewhere.join().unwrap(), (String::new(), -1));
    }

    #[test]
    fn the_operation_that_the_library_names_stands() {
        let fail = || Err(Error::invalid("wrong").with_operation("connect").into());
        assert_eq!(entry("try", fail), Status::InvalidArgument);
        assert_eq!(last_error(), "connect: wrong");
    }

    #[test]
    fn every_status_has_a_number_and_a_text_of_its_own() {
        let texts: HashSet<_> = ALL.iter().map(|status| status.text()).collect();
        assert_eq!(texts.len(), ALL.len());
        for (number, status) in ALL.iter().enumerate() {
            assert_eq!(*status as usize, number);
            let text = warplink_status_text(number as i32);
            // SAFETY: the function gives a static text that ends with a zero.
            assert_eq!(unsafe { CStr::from_ptr(text) }, status.text());
        }
        for unknown in [-1, ALL.len() as i32, i32::MAX, i32::MIN] {
            // SAFETY: as above.
            let text = unsafe { CStr::from_ptr(warplink_status_text(unknown)) };
            assert_eq!(text, c"unknown status");
        }
    }
}
