//! Error output for people (text) and machines (`{"error": …}` in place of the result).

use super::{print_json, print_message};
use serde::Serialize;
use serde_json::Value;
use std::fmt;
use std::io;
use warplink::ErrorKind;

/// Separates a message from its help.
const HELP: &str = "; help: ";

/// Machine-readable error. Unknown fields are omitted.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct JsonError {
    kind: String,
    /// Without the help text.
    message: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    help: Option<String>,
    /// Rank on which it happened.
    #[serde(skip_serializing_if = "Option::is_none")]
    rank: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    peer: Option<usize>,
    /// Code of a driver, a library or the system.
    #[serde(skip_serializing_if = "Option::is_none")]
    code: Option<i64>,
    /// Problems of a program.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    diagnostics: Vec<Value>,
}

/// The object printed in place of a result.
#[derive(Serialize)]
struct Envelope<'a> {
    error: &'a JsonError,
}

/// A program that does not parse or verify.
#[derive(Debug)]
pub(crate) struct RefusedProgram {
    pub(crate) error: warplink::Error,
    /// Machine-readable; the error has them as text.
    pub(crate) diagnostics: Vec<Value>,
}

impl fmt::Display for RefusedProgram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl std::error::Error for RefusedProgram {}

impl JsonError {
    /// Parses an error from `text`, which may end with help.
    pub(crate) fn new(kind: &str, text: &str) -> Self {
        let (message, help) = match text.split_once(HELP) {
            Some((message, help)) => (message, Some(help.trim().to_owned())),
            None => (text, None),
        };
        Self {
            kind: kind.to_owned(),
            message: message.trim().to_owned(),
            help,
            rank: None,
            peer: None,
            code: None,
            diagnostics: Vec::new(),
        }
    }

    /// For invalid arguments.
    pub(crate) fn invalid(text: &str) -> Self {
        Self::new("invalid-argument", text)
    }

    /// Sets the rank.
    pub(crate) fn with_rank(mut self, rank: usize) -> Self {
        self.rank = Some(rank);
        self
    }

    /// For arguments that clap rejects.
    pub(crate) fn of_usage(error: &clap::Error) -> Self {
        use clap::error::ErrorKind;
        if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
            // Its text is the complete help.
            return Self::invalid("arguments are missing; help: see --help");
        }
        let text = error.to_string();
        // clap separates message, tips, usage and hint by empty lines.
        let mut paragraphs = text.split("\n\n").map(|lines| {
            let words: Vec<&str> = lines.split_whitespace().collect();
            words.join(" ")
        });
        let message = paragraphs.next().unwrap_or_default();
        let mut made = Self::invalid(message.strip_prefix("error: ").unwrap_or(&message));
        let tip = paragraphs.find_map(|text| text.strip_prefix("tip: ").map(str::to_owned));
        made.help = made.help.or(tip).or(Some("see --help".to_owned()));
        made
    }

    /// Whether a line is such an object rather than a result.
    pub(crate) fn is_in(line: &[u8]) -> bool {
        // The envelope is the only object with this first key; parsing megabytes of a result would be wasted.
        line.starts_with(br#"{"error":"#)
    }

    /// Prints it in place of the result.
    pub(crate) fn print(&self) {
        if let Err(error) = print_json(&Envelope { error: self }) {
            print_message(&format!("error: {error:#}"));
        }
    }
}

impl From<&anyhow::Error> for JsonError {
    fn from(error: &anyhow::Error) -> Self {
        let refused = error.downcast_ref::<RefusedProgram>();
        let library = refused
            .map(|refused| &refused.error)
            // Found below contexts as well, which commands add to describe the step that failed.
            .or_else(|| error.downcast_ref::<warplink::Error>());
        let system = error.downcast_ref::<io::Error>();
        let kind = match (library, system) {
            (Some(error), _) => error.kind().name().replace('_', "-"),
            (None, Some(_)) => "io".to_owned(),
            // Anything the command itself rejects is an argument.
            (None, None) => "invalid-argument".to_owned(),
        };
        let code = library.and_then(warplink::Error::code);
        let of_system = || system?.raw_os_error().map(i64::from);
        Self {
            rank: library.and_then(warplink::Error::rank),
            peer: library.and_then(warplink::Error::peer),
            code: code.or_else(of_system),
            diagnostics: refused.map_or_else(Vec::new, |refused| refused.diagnostics.clone()),
            ..Self::new(&kind, &format!("{error:#}"))
        }
    }
}

/// Whether a rank's error is only a consequence of another rank's failure.
pub(crate) fn is_consequence(error: &anyhow::Error) -> bool {
    let kind = error
        .downcast_ref::<warplink::Error>()
        .map(warplink::Error::kind);
    matches!(
        kind,
        Some(ErrorKind::PeerLost | ErrorKind::PeerLeft | ErrorKind::PeerFailed)
    )
}

/// Prints an error on standard error, and with `json` also as an object in place of the result.
pub(crate) fn print_error(error: &anyhow::Error, json: bool) {
    print_message(&format!("error: {error:#}"));
    if json {
        JsonError::from(error).print();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Context as _;
    use serde_json::json;

    fn value(error: &anyhow::Error) -> Value {
        serde_json::to_value(JsonError::from(error)).unwrap()
    }

    #[test]
    fn an_error_has_only_the_keys_that_have_values() {
        let error = anyhow::anyhow!("k is 0; expected 1; help: leave it out").context("read");
        assert_eq!(
            value(&error),
            json!({"kind": "invalid-argument", "message": "read: k is 0; expected 1", "help": "leave it out"})
        );
        let lost = warplink::Error::new(ErrorKind::PeerLost, "rank 1 was lost")
            .with_rank(0)
            .with_peer(1)
            .with_code(5)
            .with_help("look at its output");
        let error = anyhow::Error::from(lost).context("join the job");
        assert_eq!(
            value(&error),
            json!({
                "kind": "peer-lost", "message": "join the job: rank 0: rank 1 was lost (peer 1, code 5)",
                "help": "look at its output", "rank": 0, "peer": 1, "code": 5,
            })
        );
        let missing: Result<(), _> = Err(io::Error::from_raw_os_error(2)).context("read x");
        let told = value(&missing.unwrap_err());
        assert_eq!((&told["kind"], &told["code"]), (&json!("io"), &json!(2)));
    }
}
