//! Status codes that every function returns, and error texts.

use crate::abi::Handle;
use crate::communicator;
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};
use warplink::{Error, ErrorKind};

/// `ncclResult_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub(crate) enum Code {
    Success = 0,
    UnhandledCudaError = 1,
    SystemError = 2,
    InternalError = 3,
    InvalidArgument = 4,
    InvalidUsage = 5,
    RemoteError = 6,
    InProgress = 7,
    Timeout = 8,
}

impl Code {
    const ALL: [Self; 9] = [
        Self::Success,
        Self::UnhandledCudaError,
        Self::SystemError,
        Self::InternalError,
        Self::InvalidArgument,
        Self::InvalidUsage,
        Self::RemoteError,
        Self::InProgress,
        Self::Timeout,
    ];

    /// Converts a result code of the real library.
    fn of(number: c_int) -> Self {
        let known = usize::try_from(number).ok();
        let known = known.and_then(|number| Self::ALL.get(number));
        // A newer NCCL may have further codes.
        known.copied().unwrap_or(Self::InternalError)
    }

    fn text(self) -> &'static CStr {
        match self {
            Self::Success => c"no error",
            Self::UnhandledCudaError => c"a CUDA call failed",
            Self::SystemError => c"a system call failed, or a library is missing",
            Self::InternalError => c"an internal error; please report it",
            Self::InvalidArgument => c"an argument is invalid",
            Self::InvalidUsage => c"the call is not allowed here, or ranks make different calls",
            Self::RemoteError => c"another rank ended, failed or was lost",
            Self::InProgress => c"the operation is in progress",
            Self::Timeout => c"a wait passed its deadline",
        }
    }
}

/// A call that did not succeed, or is still in progress.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    pub(crate) code: Code,
    /// `None` if the call is only in progress.
    pub(crate) error: Option<Error>,
}

/// Result of the Rust part of a function.
pub(crate) type Outcome<T = ()> = Result<T, Failure>;

impl Failure {
    /// Not a failure: the operation is still in progress.
    pub(crate) const IN_PROGRESS: Self = Self {
        code: Code::InProgress,
        error: None,
    };

    /// An invalid argument.
    pub(crate) fn argument(message: impl Into<String>, help: impl Into<String>) -> Self {
        Self::new(Code::InvalidArgument, message, help)
    }

    /// A call that is not allowed in the current state.
    pub(crate) fn usage(message: impl Into<String>, help: impl Into<String>) -> Self {
        Self::new(Code::InvalidUsage, message, help)
    }

    fn new(code: Code, message: impl Into<String>, help: impl Into<String>) -> Self {
        let error = Error::invalid(message.into()).with_help(help.into());
        Self {
            code,
            error: Some(error),
        }
    }

    /// Converts a result of the real library to a failure, unless it is success.
    pub(crate) fn check_real(number: c_int, name: &str) -> Outcome {
        match Code::of(number) {
            Code::Success => Ok(()),
            Code::InProgress => Err(Self::IN_PROGRESS),
            code => {
                let text = code.text().to_string_lossy();
                let message = format!("NCCL's {name} failed: {text}");
                let error = Error::new(ErrorKind::Driver, message).with_code(number.into());
                Err(Self {
                    code,
                    error: Some(error),
                })
            }
        }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let code = match error.kind() {
            ErrorKind::InvalidArgument | ErrorKind::InvalidHandle | ErrorKind::Parse => {
                Code::InvalidArgument
            }
            ErrorKind::Mismatch | ErrorKind::Unsupported | ErrorKind::Closed => Code::InvalidUsage,
            ErrorKind::PeerLost
            | ErrorKind::PeerLeft
            | ErrorKind::PeerFailed
            | ErrorKind::GivenUp => Code::RemoteError,
            ErrorKind::Driver | ErrorKind::OutOfMemory => Code::UnhandledCudaError,
            ErrorKind::Timeout
            | ErrorKind::Authentication
            | ErrorKind::Protocol
            | ErrorKind::AddressInUse
            | ErrorKind::LibraryMissing
            | ErrorKind::Io => Code::SystemError,
            _ => Code::InternalError,
        };
        Self {
            code,
            error: Some(error),
        }
    }
}

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// Runs the body of an exported function: errors and panics become a result code and the thread's last error.
pub(crate) fn entry(name: &'static str, body: impl FnOnce() -> Outcome) -> c_int {
    // Asserted: data behind locks is consistent at all times (`communicator::lock`).
    let ended = catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|payload| {
        let text = payload.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| payload.downcast_ref::<&str>().copied());
        let message = format!(
            "the library panicked: {}",
            text.unwrap_or("without a message")
        );
        Err(Error::internal(message).into())
    });
    let Err(failure) = ended else {
        return Code::Success as c_int;
    };
    // In progress is no failure, and must not replace the last error's text.
    if let Some(error) = failure.error {
        tracing::warn!("{name}: {error}");
        keep(&format!("{name}: {error}"));
    }
    failure.code as c_int
}

/// Stores the text that `ncclGetLastError` returns on this thread.
pub(crate) fn keep(text: &str) {
    // A zero byte would truncate the C string.
    let text = CString::new(text.replace('\0', " ")).unwrap_or_default();
    // Thread-local storage is inaccessible during thread destruction; the text is dropped then.
    let _ = LAST.try_with(|last| {
        if let Ok(mut last) = last.try_borrow_mut() {
            *last = text;
        }
    });
}

/// `ncclGetErrorString`.
pub(crate) fn error_string(number: c_int) -> *const c_char {
    let known = usize::try_from(number).ok();
    let known = known.and_then(|number| Code::ALL.get(number));
    known
        .map_or(c"unknown result code", |code| code.text())
        .as_ptr()
}

/// `ncclGetLastError`: the calling thread's last error, or else the failure of the communicator. Valid until the
/// thread's next failure.
pub(crate) fn last_error(comm: Handle) -> *const c_char {
    let has_none = LAST
        .try_with(|last| last.try_borrow().is_ok_and(|last| last.is_empty()))
        .unwrap_or(false);
    if has_none
        && !comm.is_null()
        && let Ok(comm) = communicator::find(comm)
        && let Some(error) = comm.failure()
    {
        keep(&error.to_string());
    }
    LAST.try_with(|last| last.try_borrow().map_or(c"".as_ptr(), |last| last.as_ptr()))
        .unwrap_or(c"".as_ptr())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_has_its_number_and_a_text_of_its_own() {
        for (number, code) in Code::ALL.iter().enumerate() {
            assert_eq!(*code as usize, number);
            assert_eq!(Code::of(number as c_int), *code);
            let same = Code::ALL.iter().filter(|other| other.text() == code.text());
            assert_eq!(same.count(), 1);
        }
        assert_eq!(Code::of(99), Code::InternalError);
        assert_eq!(Code::of(-1), Code::InternalError);
    }

    #[test]
    fn failures_and_panics_become_codes_and_texts() {
        let text = || {
            // SAFETY: zero-terminated text that is valid until the next failure.
            unsafe { CStr::from_ptr(last_error(std::ptr::null_mut())) }
                .to_string_lossy()
                .into_owned()
        };
        assert_eq!(entry("a", || Err(Failure::IN_PROGRESS)), 7);
        assert_eq!(text(), "");
        let lost = || Err(Error::new(ErrorKind::PeerLost, "gone").with_peer(3).into());
        assert_eq!(entry("b", lost), 6);
        assert_eq!(text(), "b: gone (peer 3)");
        assert_eq!(entry("c", || panic!("over")), 3);
        assert_eq!(text(), "c: the library panicked: over");
        assert_eq!(entry("d", || Ok(())), 0);
        assert!(text().starts_with("c: "));
    }
}
