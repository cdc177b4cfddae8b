//! Host-side polling, with backoff.

use crate::error::Result;
use std::time::{Duration, Instant};

/// Busy-wait first: most waits end here, and a sleep would take longer than they do.
const SPIN: Duration = Duration::from_micros(50);
/// Then yield between polls until this much time has passed since the start.
const YIELD: Duration = Duration::from_micros(300);
/// Then sleep between polls: short enough to keep latency low, long enough to leave the core idle.
const SLEEP: Duration = Duration::from_micros(30);

/// Polls `ready` until it returns true or fails. `go_on` runs between polls and ends the wait by returning an
/// error.
pub(crate) fn poll(
    mut ready: impl FnMut() -> Result<bool>,
    mut go_on: impl FnMut() -> Result<()>,
) -> Result<()> {
    if ready()? {
        return Ok(());
    }
    let start = Instant::now();
    loop {
        go_on()?;
        let waited = start.elapsed();
        if waited < SPIN {
            std::hint::spin_loop();
        } else if waited < YIELD {
            std::thread::yield_now();
        } else {
            std::thread::sleep(SLEEP);
        }
        if ready()? {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::{Error, ErrorKind};

    #[test]
    fn ends_when_ready_on_failure_and_on_request() {
        let mut left = 1000;
        let count = || {
            left -= 1;
            Ok(left == 0)
        };
        assert!(poll(count, || Ok(())).is_ok());
        let failed = poll(|| Err(Error::invalid("broken")), || Ok(())).unwrap_err();
        assert_eq!(failed.kind(), ErrorKind::InvalidArgument);
        let stopped =
            poll(|| Ok(false), || Err(Error::new(ErrorKind::Timeout, "late"))).unwrap_err();
        assert_eq!(stopped.kind(), ErrorKind::Timeout);
    }
}
