//! Waiting for streams, and the causes of waits that fail.

use super::Communicator;
use crate::deadline::Deadline;
use crate::device::Stream;
use crate::error::{Error, ErrorKind, Result};
use std::time::Duration;

/// How often notes of kernels are looked for while a stream is busy.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

impl Communicator {
    /// Blocks until `stream` is done; meanwhile exchanges call statements with other ranks, and looks for notes of kernels:
    /// one that has ended may have a later one wait for peers that wait for the first.
    pub(super) fn wait_for(&self, stream: &Stream, deadline: Deadline) -> Result<()> {
        loop {
            let due = self.joined_collectives.send_statements();
            let step = due.map_or(LOOK_INTERVAL, |due| due.min(LOOK_INTERVAL));
            if step >= deadline.remaining() {
                return stream.synchronize(deadline);
            }
            let until = Deadline::after(step);
            match stream.synchronize(until) {
                Err(error) if error.kind() == ErrorKind::Timeout && until.passed() => {}
                ended => return ended,
            }
            self.check_kernels()?;
        }
    }

    /// Fails if a kernel of this rank has found an error, or another rank a call that differs.
    fn check_kernels(&self) -> Result<()> {
        self.joined_collectives.check_agreement()?;
        self.kernel_notes.check(&**self.device(), &self.fault)
    }

    /// Replaces a timeout or secondary failure by its cause, as far as this rank can determine it.
    pub(super) fn explained(&self, error: Error) -> Error {
        // What this rank detected itself is more specific than reports of others.
        if let Err(found) = self.check_kernels() {
            return found;
        }
        if error.kind() != ErrorKind::Timeout {
            return self.joined_collectives.explain_failure().unwrap_or(error);
        }
        let explained = self.transfers.explain_timeout(&error);
        let explained = explained.or_else(|| self.joined_collectives.explain_timeout());
        explained.unwrap_or(error)
    }
}
