//! Program texts with names in braces, which are replaced by lines or words.

use crate::error::{Error, Result};
use crate::program::Program;
use std::fmt::Write as _;

/// The text with each `{name}` replaced, outside of comments. Values may contain names that follow in the list. Further
/// lines of a value are indented like the line that names it.
pub(super) fn filled(text: &str, values: &[(&str, String)]) -> String {
    let mut made = String::new();
    for line in text.lines() {
        let margin = " ".repeat(line.len() - line.trim_start().len());
        let alone = line.trim_start();
        let mut line = line.to_owned();
        let mut is_empty = false;
        // Comments of a text name the braces themselves.
        let values = if alone.starts_with('#') { &[] } else { values };
        for (name, value) in values {
            let name = format!("{{{name}}}");
            // A line that only names an empty value is left out.
            is_empty |= value.is_empty() && alone == name;
            line = line.replace(&name, &value.replace('\n', &format!("\n{margin}")));
        }
        if !is_empty {
            let _ = writeln!(made, "{line}");
        }
    }
    made
}

/// Parses a text made by [`filled`]; `operation` names that in errors.
pub(super) fn parsed(text: &str, operation: &'static str) -> Result<Program> {
    // The text is generated: a parse error is a bug here and not in the caller's arguments.
    Program::parse(text)
        .map_err(|error| Error::internal(error.message().to_owned()).with_operation(operation))
}
