//! The library's log, for a handler of the caller's.

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

/// Which messages are of interest, in the syntax of the `tracing` crates.
const FILTER_VARIABLE: &str = "WARPLINK_LOG";

/// How urgent a message is.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogLevel {
    /// Something failed.
    Error = 1,
    /// Something is not as it should be.
    Warn = 2,
    /// Normal progress.
    Info = 3,
    /// In detail.
    Debug = 4,
    /// In all detail.
    Trace = 5,
}

/// Gets each message of the log: a `warplink_log_level`, one line without an end of line, valid during the call,
/// and the pointer that the handler was set with. It is called on any thread, by several at the same time. It
/// may call `warplink_default_log_handler`, other calls of Warplink are refused with WARPLINK_STATUS_INVALID_USAGE, and must
/// return: one that throws ends the process. In C++, declare it `noexcept`.
pub type LogHandler =
    Option<unsafe extern "C-unwind" fn(level: i32, message: *const c_char, user: *mut c_void)>;

/// The installed handler.
#[derive(Clone, Copy)]
struct Handler {
    function: unsafe extern "C-unwind" fn(level: i32, message: *const c_char, user: *mut c_void),
    user: *mut c_void,
}

// SAFETY: the library only passes the pointer on; the caller promises that the handler may use it on any thread.
unsafe impl Send for Handler {}
// SAFETY: as above.
unsafe impl Sync for Handler {}

/// The caller's handler; the default one where there is none.
static HANDLER: RwLock<Option<Handler>> = RwLock::new(None);

/// Whether the log of this process is this library's.
static STARTED: OnceLock<bool> = OnceLock::new();

/// Sets what gets the messages of the log, and the pointer that is passed to it. Null brings back the default handler.
/// Blocks while the previous handler runs on any thread: when this returns, it does so no more. WARPLINK_LOG sets the
/// level: "error", "warn" (the default), "info", "debug", "trace", or a filter of the `tracing` crates. It is
/// WARPLINK_STATUS_INVALID_USAGE where another library of the process has started a log by `tracing` before.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_set_log_handler(
    handler: LogHandler,
    user: *mut c_void,
) -> Status {
    entry("set the log handler", || {
        let new = handler.map(|function| Handler { function, user });
        *HANDLER.write().unwrap_or_else(PoisonError::into_inner) = new;
        if start() {
            return Ok(());
        }
        Err(Failure::usage(
            "the log of this process goes elsewhere; expected none that was started before",
            "set the handler before another library of the process starts a log by tracing",
        ))
    })
}

/// The handler that writes to standard error, where no other is set. `user` is ignored. A message that is null is
/// dropped.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_default_log_handler(
    level: i32,
    message: *const c_char,
    user: *mut c_void,
) {
    let _ = user;
    // It has no result; the error is the thread's last one.
    let _status = free_entry("log", || {
        // SAFETY: the caller passes a text.
        let message = unsafe { pointer::text(message, "message") }?;
        print(level, message);
        Ok(())
    });
}

/// Starts the log, once; whether it is this library's.
pub(crate) fn start() -> bool {
    *STARTED.get_or_init(|| {
        let filter =
            EnvFilter::try_from_env(FILTER_VARIABLE).unwrap_or_else(|_| EnvFilter::new("warn"));
        let subscriber = Registry::default().with(filter).with(ToHandler);
        tracing::subscriber::set_global_default(subscriber).is_ok()
    })
}

/// Passes messages on.
struct ToHandler;

impl<S: Subscriber> Layer<S> for ToHandler {
    fn on_event(&self, event: &Event<'_>, _context: Context<'_, S>) {
        let mut line = Line(format!("{}: ", event.metadata().target()));
        event.record(&mut line);
        // Nobody is left to be told of a failure.
        let _ = deliver(level_of(*event.metadata().level()), line.0);
    }
}

fn deliver(level: LogLevel, line: String) -> Outcome {
    let handler = HANDLER.read().unwrap_or_else(PoisonError::into_inner);
    let Some(handler) = *handler else {
        print(level as i32, &line);
        return Ok(());
    };
    let text = CString::new(line.replace(['\0', '\n'], " ")).unwrap_or_default();
    callback::call(Callback::LogHandler, || {
        // SAFETY: the caller gave the function for this, and is told when it is not called any more: the lock is
        // held until here.
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

/// The message of an event, then its fields.
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
