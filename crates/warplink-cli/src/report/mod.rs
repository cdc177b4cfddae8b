//! Output of results, for people and machines.
//!
//! A result goes to standard output: a table or sentence, or with `--json` one object on one line. Everything
//! else (progress, warnings, other output of ranks) goes to standard error.

pub(crate) mod bytes;
pub(crate) mod error;
mod file;
mod object;
pub(crate) mod progress;
pub(crate) mod table;

use anyhow::{Context, Result};
pub(crate) use error::{JsonError, RefusedProgram, is_consequence, print_error};
pub(crate) use file::{check_output, write_file, write_trace};
pub(crate) use object::Object;
use serde::Serialize;
use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;

/// Whether output to `target` may be coloured: if it is a terminal and `NO_COLOR` is not set.
pub(crate) fn has_colour(target: &impl IsTerminal) -> bool {
    // An empty value counts as unset (no-color.org).
    let wanted = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    wanted && target.is_terminal()
}

/// Prints a human-readable result.
///
/// # Errors
/// If standard output is closed, or its disk is full.
pub(crate) fn print_text(text: &str) -> Result<()> {
    print_bytes(text.as_bytes())
}

/// Prints a machine-readable result, as one line.
///
/// # Errors
/// As [`print_text`].
pub(crate) fn print_json(result: &impl Serialize) -> Result<()> {
    let mut text = serde_json::to_vec(result).context("write the result as JSON")?;
    text.push(b'\n');
    print_bytes(&text)
}

/// Prints a result, machine-readable if `json`.
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

/// Exit code of a command whose results are correct or not.
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
        // An error of writing at the exit of the process would be lost.
        .and_then(|()| out.flush())
        .context("write the result to standard output")
}

/// Prints a line on standard error.
pub(crate) fn print_message(message: &str) {
    // A single write, so that lines of several processes do not interleave. Errors of a closed standard error
    // are ignored.
    let _ = io::stderr()
        .lock()
        .write_all(format!("warplink: {message}\n").as_bytes());
}
/// `1 rank`, `2 ranks`.
pub(crate) fn counted(count: usize, what: &str) -> String {
    let plural = if count == 1 { "" } else { "s" };
    format!("{count} {what}{plural}")
}

/// Formats with three significant digits, or all integer digits.
pub(crate) fn digits(value: f64) -> String {
    let magnitude = value.abs().max(1e-9).log10().floor() as i32;
    // Three significant digits, without an exponent.
    let decimals = (2 - magnitude).clamp(0, 6) as usize;
    format!("{value:.decimals$}")
}
