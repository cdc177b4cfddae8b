//! The library's log and the user's log handler.

use crate::callback::{self, Callback};
use crate::pointer;
use crate::status::{Failure, Outcome, Status, entry, free_entry};
use std::ffi::{CString, c_char, c_void};
use std::fmt::{self, Write as _};
use std::io::Write as _;
use std::sync::{OnceLock, PoisonError, RwLock};
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::{EnvFilter, Registry};

/// Log filter, in the syntax of the `tracing` crates.
const FILTER_VARIABLE: &str = "WARPLINK_LOG";

/// Severity of a message.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogLevel {
    /// Something failed.
    Error = 1,
    /// Something unexpected that the library can handle.
    Warn = 2,
    /// Normal progress.
    Info = 3,
    /// Details.
    Debug = 4,
    /// All details.
    Trace = 5,
}

/// Receives each log message: a `warplink_log_level`, one line without a line terminator, valid during the call, and
/// the pointer passed to `warplink_set_log_handler`. It may be called on any thread and concurrently. It may call
/// `warplink_default_log_handler`; other calls of Warplink fail with WARPLINK_STATUS_INVALID_USAGE. It must return: one
/// that throws terminates the process. In C++, declare it `noexcept`.
pub type LogHandler =
    Option<unsafe extern "C-unwind" fn(level: i32, message: *const c_char, user: *mut c_void)>;

/// The installed handler.
#[derive(Clone, Copy)]
struct Handler {
    function: unsafe extern "C-unwind" fn(level: i32, message: *const c_char, user: *mut c_void),
    user: *mut c_void,
}

// SAFETY: the library only passes the pointer on; the caller guarantees that the handler may use it on any thread.
unsafe impl Send for Handler {}
// SAFETY: as above.
unsafe impl Sync for Handler {}

/// The user's handler; `None` selects the default handler.
static HANDLER: RwLock<Option<Handler>> = RwLock::new(None);

/// Whether this library installed the process's `tracing` subscriber.
static STARTED: OnceLock<bool> = OnceLock::new();

/// Sets the handler of log messages and the pointer passed to it. Null restores the default handler. Blocks while the
/// previous handler runs on any thread: it is never called after this returns. WARPLINK_LOG sets the level: "error",
/// "warn" (the default), "info", "debug", "trace", or a filter of the `tracing` crates. Returns
/// WARPLINK_STATUS_INVALID_USAGE if another library of the process has installed a `tracing` subscriber before.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_set_log_handler(
    handler: LogHandler,
    user: *mut c_void,
) -> Status {
    entry("set the log handler", || {
        let new = handler.map(|function| Handler { function, user });
        // The write lock waits for handlers in progress: after this call, the caller may free what the old one
        // used.
        *HANDLER.write().unwrap_or_else(PoisonError::into_inner) = new;
        if start() {
            return Ok(());
        }
        Err(Failure::usage(
            "another library of this process has installed a tracing subscriber; expected none",
            "set the handler before another library of the process installs its tracing subscriber",
        ))
    })
}

/// The default handler, which writes to standard error. `user` is ignored. A null message is dropped.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_default_log_handler(
    level: i32,
    message: *const c_char,
    user: *mut c_void,
) {
    let _ = user;
    // The function returns nothing; the error is available as the thread's last error.
    let _status = free_entry("log", || {
        // SAFETY: the caller passes a text.
        let message = unsafe { pointer::text(message, "message") }?;
        print(level, message);
        Ok(())
    });
}

/// Installs the subscriber, once; returns whether the process's subscriber is this library's.
pub(crate) fn start() -> bool {
    *STARTED.get_or_init(|| {
        let filter =
            // An invalid filter counts as none: a log that is misconfigured should not keep a program from joining.
            EnvFilter::try_from_env(FILTER_VARIABLE).unwrap_or_else(|_| EnvFilter::new("warn"));
        let subscriber = Registry::default().with(filter).with(ToHandler);
        tracing::subscriber::set_global_default(subscriber).is_ok()
    })
}

/// Forwards events to the handler.
struct ToHandler;

impl<S: Subscriber> Layer<S> for ToHandler {
    fn on_event(&self, event: &Event<'_>, _context: Context<'_, S>) {
        let mut line = Line(format!("{}: ", event.metadata().target()));
        event.record(&mut line);
        // There is no one to report the failure to.
        let _ = deliver(level_of(*event.metadata().level()), line.0);
    }
}

fn deliver(level: LogLevel, line: String) -> Outcome {
    let handler = HANDLER.read().unwrap_or_else(PoisonError::into_inner);
    let Some(handler) = *handler else {
        print(level as i32, &line);
        return Ok(());
    };
    // Handlers get one line per call, and a zero byte would end the text early.
    let text = CString::new(line.replace(['\0', '\n'], " ")).unwrap_or_default();
    callback::call(Callback::LogHandler, || {
        // SAFETY: the caller passed the function for this call, and replacing it waits for the write lock: the read
        // lock is held until here.
        unsafe { (handler.function)(level as i32, text.as_ptr(), handler.user) };
    });
    Ok(())
}

fn level_of(level: Level) -> LogLevel {
    match level {
        Level::ERROR => LogLevel::Error,
        Level::WARN => LogLevel::Warn,
        Level::INFO => LogLevel::Info,
        Level::DEBUG => LogLevel::Debug,
        Level::TRACE => LogLevel::Trace,
    }
}

fn print(level: i32, line: &str) {
    let name = match level {
        1 => "error",
        2 => "warning",
        3 => "info",
        4 => "debug",
        _ => "trace",
    };
    // Standard error may be closed.
    let _ = writeln!(std::io::stderr(), "warplink: {name}: {line}");
}

/// The message of an event, followed by its fields.
struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        // Writing to a string does not fail.
        let _ = match field.name() {
            "message" => write!(self.0, "{value:?}"),
            name => write!(self.0, " {name}={value:?}"),
        };
    }
}
