//! Status codes that every function returns, and the text of the last error of a thread.

use crate::callback::{self, Callback};
use crate::pointer;
use crate::types::Value;
use std::any::Any;
use std::cell::RefCell;
use std::ffi::{CString, c_char};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use warplink::named::Named as _;
use warplink::{Error, ErrorKind};

/// Status of a call: 0, a number specific to this interface, or that of an [`ErrorKind`]. cbindgen:ignore
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Status(i32);

impl Status {
    /// The call succeeded. cbindgen:ignore
    pub const SUCCESS: Self = Self(0);
    /// Calls were made in the wrong order. cbindgen:ignore
    pub const INVALID_USAGE: Self = Self(2);

    /// The number in C.
    pub const fn number(self) -> i32 {
        self.0
    }

    /// Every status, with its name and documentation, ordered by number.
    pub fn all() -> Vec<Value> {
        let kinds = ErrorKind::ALL.iter().map(Value::of);
        let own = [
            Value {
                number: Self::SUCCESS.0,
                name: "success",
                about: "The call succeeded.",
            },
            Value {
                number: Self::INVALID_USAGE.0,
                name: "invalid_usage",
                about: "Calls were made in the wrong order.",
            },
        ];
        let mut all: Vec<Value> = kinds.chain(own).collect();
        all.sort_by_key(|value| value.number);
        all
    }
}

impl From<ErrorKind> for Status {
    fn from(kind: ErrorKind) -> Self {
        Self(kind.number())
    }
}

impl fmt::Debug for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all = Self::all();
        let known = all.iter().find(|value| value.number == self.0);
        f.write_str(known.map_or("unknown", |value| value.name))
    }
}

/// A short description of a status, a static string; never null, even for a number that is no status.
#[unsafe(no_mangle)]
pub extern "C" fn warplink_status_text(status: i32) -> *const c_char {
    let all = Status::all();
    let known = all.iter().find(|value| value.number == status);
    pointer::static_text(known.map_or("unknown status", |value| value.about))
}

/// The last error of the calling thread: what happened, to whom, what was expected, and what to do. Empty if no call
/// has failed; never null. Valid until the next call of the thread that fails.
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

/// Result of the Rust part of an exported function.
pub(crate) type Outcome<T = ()> = Result<T, Failure>;

impl Failure {
    /// Calls in the wrong order.
    pub(crate) fn usage(message: impl Into<String>, help: impl Into<String>) -> Self {
        Self {
            status: Status::INVALID_USAGE,
            error: Error::invalid(message.into()).with_help(help.into()),
        }
    }

    /// An invalid argument.
    pub(crate) fn invalid(message: impl Into<String>, help: impl Into<String>) -> Self {
        Error::invalid(message.into()).with_help(help.into()).into()
    }

    /// Adds the peer that this concerns.
    pub(crate) fn with_peer(mut self, peer: usize) -> Self {
        self.error = self.error.with_peer(peer);
        self
    }

    /// Adds the part of the call that this concerns.
    pub(crate) fn with_key(mut self, key: String) -> Self {
        self.error = self.error.with_key(key);
        self
    }

    fn panicked(payload: &(dyn Any + Send)) -> Self {
        let text = payload.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| payload.downcast_ref::<&str>().copied());
        let message = format!(
            "the library panicked: {}",
            text.unwrap_or("without a message")
        );
        Error::internal(message)
            .with_help("report this, with the log")
            .into()
    }

    /// Converts to the error of a host-device kernel.
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

/// Runs the body of an exported function: errors and panics become a status and the thread's last error. `operation` is
/// a verb phrase, for messages without one. Fails inside user callbacks: a callback that waits for its own stream, or
/// replaces the log handler that it runs in, would deadlock.
pub(crate) fn entry(operation: &'static str, body: impl FnOnce() -> Outcome) -> Status {
    entry_unless(callback::running(), operation, body)
}

/// As [`entry`], for calls made by the bodies of host kernels.
pub(crate) fn block_entry(operation: &'static str, body: impl FnOnce() -> Outcome) -> Status {
    let refusing = callback::running().filter(|running| *running != Callback::Body);
    entry_unless(refusing, operation, body)
}

/// As [`entry`], for calls allowed anywhere because they wait for nothing.
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
    // Unwinding out of an `extern "C"` function aborts the process, which is not for a library to decide.
    // Asserted: tables and declarations, which outlive the call, ignore poisoning and are never left half-updated.
    let ended = catch_unwind(AssertUnwindSafe(body))
        .unwrap_or_else(|payload| Err(Failure::panicked(&*payload)));
    let Err(mut failure) = ended else {
        return Status::SUCCESS;
    };
    // An operation from further inside is more specific.
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
    last.filter(|failure| failure.status.number() == status)
}

/// The error of a call that is not allowed inside a user callback.
fn misplaced(callback: Callback) -> Failure {
    let (expected, help) = match callback {
        Callback::Body => (
            "only warplink_block_... calls",
            "make the call where the kernel is launched",
        ),
        Callback::LogHandler => (
            "no call of the library",
            "make the call after the handler has returned",
        ),
    };
    Failure::usage(
        format!("a call in {}; expected {expected}", callback.name()),
        help,
    )
}

fn keep(failure: Failure) {
    // A zero byte would truncate the C string.
    let text = failure.error.to_string().replace('\0', " ");
    let text = CString::new(text).unwrap_or_default();
    // Thread-local storage is inaccessible during thread destruction; the error is dropped then.
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
    use std::ffi::CStr;

    fn last_error() -> String {
        // SAFETY: the function returns zero-terminated text that is valid until the next failure.
        let text = unsafe { CStr::from_ptr(warplink_last_error()) };
        text.to_str().unwrap().to_owned()
    }

    #[test]
    fn a_panic_becomes_a_status_and_a_text() {
        let status = entry("try", || panic!("what {}", "happened"));
        assert_eq!(status, ErrorKind::Internal.into());
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
        assert_eq!(entry("try", fail), ErrorKind::Timeout.into());
        assert_eq!(entry("try", || Ok(())), Status::SUCCESS);
        assert_eq!(last_error(), "try: late r (peer 3); help: wait");
        assert_eq!(warplink_last_error_peer(), 3);
        let elsewhere = std::thread::spawn(|| (last_error(), warplink_last_error_peer()));
        assert_eq!(elsewhere.join().unwrap(), (String::new(), -1));
    }

    #[test]
    fn the_operation_that_the_library_names_stands() {
        let fail = || Err(Error::invalid("wrong").with_operation("connect").into());
        assert_eq!(entry("try", fail), ErrorKind::InvalidArgument.into());
        assert_eq!(last_error(), "connect: wrong");
    }

    #[test]
    fn every_status_has_a_number_and_a_text_of_its_own() {
        let text = |status: i32| {
            // SAFETY: the function returns static zero-terminated text.
            let text = unsafe { CStr::from_ptr(warplink_status_text(status)) };
            text.to_str().unwrap().to_owned()
        };
        let all = Status::all();
        let texts: HashSet<_> = all.iter().map(|value| value.about).collect();
        assert_eq!(texts.len(), all.len());
        for (number, value) in all.iter().enumerate() {
            assert_eq!(value.number, number as i32);
            assert_eq!(text(value.number), value.about);
        }
        for unknown in [-1, all.len() as i32, i32::MAX, i32::MIN] {
            assert_eq!(text(unknown), "unknown status");
        }
    }
}
