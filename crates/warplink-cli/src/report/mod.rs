//! How results reach people and machines.
//!
//! A result goes to standard output: a table or a sentence, or with `--json` one object on one
//! line. Everything else (progress, warnings, the output of ranks beside a result) goes to standard
//! error.

pub(crate) mod bytes;
pub(crate) mod progress;
pub(crate) mod table;

use anyhow::{Context, Result};
use serde::Serialize;
use std::io::{self, IsTerminal, Write};
use std::path::Path;
use warplink::program::Trace;

/// Whether what goes to `target` may have colours: where it is a terminal, unless `NO_COLOR` is set.
pub(crate) fn has_colour(target: &impl IsTerminal) -> bool {
    let wanted = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    wanted && target.is_terminal()
}

/// Prints a result for machines.
pub(crate) fn print_json(result: &impl Serialize) -> Result<()> {
    let mut text = serde_json::to_vec(result).context("write the result as JSON")?;
    text.push(b'\n');
    let mut out = io::stdout().lock();
    out.write_all(&text)
        .and_then(|()| out.flush())
        .context("print the result")
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
