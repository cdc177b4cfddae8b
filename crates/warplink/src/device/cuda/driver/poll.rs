//! Waiting on the host for something that only a query tells.

use crate::error::Result;
use std::time::{Duration, Instant};

/// How long to ask again at once: most waits end here, and sleeping would cost more than they take.
const SPIN: Duration = Duration::from_micros(50);
/// How long, from the start, to leave the processor to others between two questions.
const YIELD: Duration = Duration::from_micros(300);
/// How long to sleep between two questions after that.
const SLEEP: Duration = Duration::from_micros(30);

/// Asks `ready` until it says yes or fails. `go_on` is asked in between and ends the wait with its
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
    fn ends_when_ready_when_it_fails_and_when_told_to() {
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
