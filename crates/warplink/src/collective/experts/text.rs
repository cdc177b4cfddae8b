//! Program texts with names in braces, which are replaced by lines or words.

use std::fmt::Write as _;

/// The text with each `{name}` replaced. Further lines of a value are indented like the line that names it.
pub(super) fn filled(text: &str, values: &[(&str, String)]) -> String {
    let mut made = String::new();
    for line in text.lines() {
        let margin = " ".repeat(line.len() - line.trim_start().len());
        let alone = line.trim_start();
        let mut line = line.to_owned();
        let mut is_empty = false;
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
