//! How results reach people and machines.
//!
//! A result goes to standard output: a table or a sentence, or with `--json` one object on one
//! line. Everything else (progress, warnings, the output of ranks beside a result) goes to standard
//! error.

pub(crate) mod bytes;
pub(crate) mod error;
pub(crate) mod progress;
pub(crate) mod table;

use anyhow::{Context, Result};
pub(crate) use error::{JsonError, RefusedProgram, print_error};
use serde::Serialize;
use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::path::Path;
use warplink::program::Trace;

/// Whether what goes to `target` may have colours: where it is a terminal, unless `NO_COLOR` is set.
pub(crate) fn has_colour(target: &impl IsTerminal) -> bool {
    let wanted = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    wanted && target.is_terminal()
}

/// Prints a result for people.
///
/// # Errors
/// Standard output is closed, or its disk is full.
pub(crate) fn print_text(text: &str) -> Result<()> {
    print_bytes(text.as_bytes())
}

/// Prints a result for machines, as one line.
///
/// # Errors
/// As [`print_text`].
pub(crate) fn print_json(result: &impl Serialize) -> Result<()> {
    let mut text = serde_json::to_vec(result).context("write the result as JSON")?;
    text.push(b'\n');
    print_bytes(&text)
}

/// Prints a result that was written out before.
///
/// # Errors
/// As [`print_text`].
pub(crate) fn print_bytes(text: &[u8]) -> Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text)
        .and_then(|()| out.flush())
        .context("write the result to standard output")
}

/// Checks that a file can be written, so that a wrong path is reported before the work. Leaves no
/// empty file behind.
pub(crate) fn check_output(path: &Path) -> Result<()> {
    let there = path.exists();
    File::options()
        .create(true)
        .append(true)
        .open(path)
        .and_then(|_| {
            if there {
                return Ok(());
            }
            match std::fs::remove_file(path) {
                // Another rank has checked the same file, and removed it.
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
                other => other,
            }
        })
        .with_context(|| format!("open {} for writing", path.display()))
}

/// Writes the trace of a run in the format that Perfetto opens.
pub(crate) fn write_trace(path: &Path, trace: &Trace) -> Result<()> {
    let events: Vec<_> = trace.to_perfetto();
    let text = serde_json::to_vec(&events).context("write the trace as JSON")?;
    std::fs::write(path, text).with_context(|| format!("write {}", path.display()))
}

/// Prints a line on standard error.
pub(crate) fn print_message(message: &str) {
    // One write, so that lines of several processes do not mix. Nothing is to be done when standard
    // error is closed.
    let _ = io::stderr()
        .lock()
        .write_all(format!("warplink: {message}\n").as_bytes());
}
/// `1 rank`, `2 ranks`.
pub(crate) fn counted(count: usize, what: &str) -> String {
    let plural = if count == 1 { "" } else { "s" };
    format!("{count} {what}{plural}")
}

/// A number with three significant digits, or all those before the point.
pub(crate) fn digits(value: f64) -> String {
    let magnitude = value.abs().max(1e-9).log10().floor() as i32;
    let decimals = (2 - magnitude).clamp(0, 6) as usize;
    format!("{value:.decimals$}")
}
