//! The log on standard error. `NCCL_DEBUG` sets the level, or `WARPLINK_LOG` in the filter syntax of the `tracing`
//! crates.

use std::sync::Once;
use tracing_subscriber::EnvFilter;

/// The filter for a level of `NCCL_DEBUG`; `None` if nothing is logged.
fn filter(level: &str) -> Option<&'static str> {
    match level.to_ascii_uppercase().as_str() {
        "WARN" => Some("warn"),
        "INFO" => Some("info"),
        "ABORT" | "TRACE" => Some("debug"),
        _ => None,
    }
}

/// Installs the log once, if a variable requests it.
pub(crate) fn start() {
    static STARTED: Once = Once::new();
    STARTED.call_once(|| {
        let named = std::env::var("WARPLINK_LOG").ok();
        let by_level = || {
            let level = std::env::var("NCCL_DEBUG").ok()?;
            filter(&level).map(str::to_owned)
        };
        let Some(text) = named.filter(|text| !text.is_empty()).or_else(by_level) else {
            return;
        };
        let Ok(filter) = EnvFilter::try_new(&text) else {
            // Not logged: there is no log without a filter.
            eprintln!("warplink: WARPLINK_LOG is '{text}', which is not a log filter");
            return;
        };
        let log = tracing_subscriber::fmt()
            .with_env_filter(filter)
            .with_writer(std::io::stderr)
            .without_time();
        // Another library of the process may have installed a subscriber before.
        let _ = log.try_init();
    });
}

/// `ncclResetDebugInit`, which NCCL keeps for older programs.
pub(crate) fn reset() {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_of_nccl_are_levels_of_the_log() {
        for (level, expected) in [
            ("VERSION", None),
            ("WARN", Some("warn")),
            ("info", Some("info")),
            ("TRACE", Some("debug")),
            ("", None),
        ] {
            assert_eq!(filter(level), expected, "{level}");
        }
    }
}
