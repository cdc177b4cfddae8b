//! Progress of long work, on standard error if that is a terminal.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::borrow::Cow;
use std::io::{self, IsTerminal};

/// A progress bar, cleared on drop.
#[derive(Debug)]
pub(crate) struct Progress(ProgressBar);

impl Progress {
    /// Shows a bar if on a terminal and `shown`.
    pub(crate) fn new(steps: u64, what: impl Into<Cow<'static, str>>, shown: bool) -> Self {
        let target = if shown && io::stderr().is_terminal() {
            ProgressDrawTarget::stderr()
        } else {
            ProgressDrawTarget::hidden()
        };
        let bar = ProgressBar::with_draw_target(Some(steps), target).with_message(what);
        match ProgressStyle::with_template("{msg} {bar:30} {pos}/{len} {eta}") {
            Ok(style) => Self(bar.with_style(style)),
            // An invalid style only affects the looks.
            Err(_) => Self(bar),
        }
    }

    /// Advances by one step; `what` is the next one.
    pub(crate) fn step(&self, what: impl Into<Cow<'static, str>>) {
        self.0.set_message(what);
        self.0.inc(1);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_its_steps() {
        let progress = Progress::new(2, "one", true);
        progress.step("two");
        assert_eq!(
            (progress.0.position(), progress.0.message().as_str()),
            (1, "two")
        );
    }
}
