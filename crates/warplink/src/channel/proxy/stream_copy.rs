//! Copies that a stream requests from the proxy and waits for.

use crate::channel::answers::{Answer, Answers};
use crate::device::channel::trigger::Movement;
use crate::device::{At, DeviceSlice, Event, Stream};
use crate::error::Result;
use std::sync::Arc;

/// A copy to or from a peer's memory over a network.
#[derive(Debug)]
pub(crate) struct StreamCopy {
    /// The waiting stream, and the mark that it has to reach first.
    pub(crate) stream: Stream,
    pub(crate) after: Event,
    pub(crate) movement: Movement,
    pub(crate) own: DeviceSlice,
    pub(crate) peers: At,
    pub(crate) answer: Answer,
    pub(crate) answers: Arc<Answers>,
}

impl StreamCopy {
    /// Whether the stream has reached the mark.
    ///
    /// # Errors
    /// The stream's failure; then nobody waits for the copy.
    pub(super) fn is_due(&self) -> Result<bool> {
        is_past(&self.stream, &self.after)
    }
}

/// Whether a stream has reached a mark by executing the work before it.
fn is_past(stream: &Stream, mark: &Event) -> Result<bool> {
    let reached = mark.is_reached()?;
    // Checked after the event: a wait before the mark may end by an abort instead of its signal, and the stream has
    // failed by then.
    stream.check()?;
    Ok(reached)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::device::{Device, DeviceConfig, DeviceKind, EventBackend, Priority};
    use crate::error::{Error, ErrorKind};

    /// A mark that is reached because a fault aborts the wait before it.
    #[derive(Debug)]
    struct LetGo(Arc<dyn Device>);

    impl EventBackend for LetGo {
        fn elapsed_since(&self, _: &Event) -> Result<f32> {
            Ok(0.0)
        }

        fn is_reached(&self) -> Result<bool> {
            let lost = Error::new(ErrorKind::PeerLost, "gone");
            self.0.fault().raise(lost);
            Ok(true)
        }
    }

    #[test]
    fn a_wait_that_is_let_go_during_the_look_is_not_past() {
        let device = crate::device::open(&DeviceConfig::new(DeviceKind::Host, 0)).unwrap();
        let stream = device.create_stream(Priority::Normal).unwrap();
        let mark = Event::new(Arc::new(LetGo(device)));
        assert_eq!(
            is_past(&stream, &mark).unwrap_err().kind(),
            ErrorKind::PeerLost
        );
    }
}
