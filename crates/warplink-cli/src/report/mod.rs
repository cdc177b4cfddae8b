//! Output of results, for people and machines.
//!
//! A result goes to standard output: a table or a sentence, or with `--json` one object on one
//! line. Everything else (progress, warnings, the output of ranks beside a result) goes to standard
//! error.

pub(crate) mod bytes;
pub(crate) mod error;
mod file;
pub(crate) mod progress;
pub(crate) mod table;

use anyhow::{Context, Result};
pub(crate) use error::{JsonError, RefusedProgram, is_consequence, print_error};
pub(crate) use file::{check_output, write_file, write_trace};
use serde::Serialize;
use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;

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

/// Prints a result for machines with `json`, and else for people.
///
/// # Errors
/// As [`print_text`].
pub(crate) fn print_result(
    json: bool,
    result: &impl Serialize,
    text: impl FnOnce() -> String,
) -> Result<()> {
    if json {
        print_json(result)
    } else {
        print_text(&text())
    }
}

/// The exit code of a command whose results are right, or not.
pub(crate) fn exit_code(is_right: bool) -> ExitCode {
    if is_right {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// Prints the bytes of a result.
///
/// # Errors
/// As [`print_text`].
pub(crate) fn print_bytes(text: &[u8]) -> Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text)
        .and_then(|()| out.flush())
        .context("write the result to standard output")
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
