//! What streams may still use, kept until they are past it.

use super::interface::Device;
use super::stream::{Event, Stream};
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::sync::lock;
use std::any::Any;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Between two looks at what is left, at first and at most.
const POLL_INTERVALS: [Duration; 2] = [Duration::from_millis(1), Duration::from_millis(50)];

/// The one list of work in flight: things that streams may still use, each with marks in these
/// streams behind its last use. What cannot be asked whether it is reached counts as in use.
pub(crate) struct InFlight {
    device: Arc<dyn Device>,
    held: Mutex<Vec<Held>>,
    /// Whether a thread looks at what is left.
    polled: AtomicBool,
}

struct Held {
    marks: Vec<Mark>,
    _item: Box<dyn Any + Send>,
}

/// A place in a stream that is to be passed.
enum Mark {
    Recorded(Event),
    /// The stream could not be marked; it may be when it is tried again.
    Unrecorded(Stream),
}

impl InFlight {
    pub(crate) fn new(device: &Arc<dyn Device>) -> Self {
        Self {
            device: device.clone(),
            held: Mutex::default(),
            polled: AtomicBool::new(false),
        }
    }

    /// Keeps `item` until `streams` have done what they were given so far, and lets go of earlier
    /// items that no stream uses any more. Does not block.
    pub(crate) fn hold(&self, streams: &[&Stream], item: impl Any + Send) {
        let marks = streams.iter().map(|stream| self.mark(stream)).collect();
        self.hold_behind(marks, Box::new(item));
        self.release_finished();
    }

    /// Lets go of what no stream uses any more. Does not block.
    pub(crate) fn release_finished(&self) {
        let mut marked = Vec::new();
        let finished: Vec<Held> = lock(&self.held)
            .extract_if(.., |held| self.is_finished(held, &mut marked))
            .collect();
        // Not under the lock: what items and streams do when they are dropped may lead back here.
        drop(marked);
        drop(finished);
    }

    /// Blocks until everything is let go of, at most until `deadline` or until the device's fault,
    /// after which streams cannot be asked; whether nothing is left.
    pub(crate) fn wait_until_empty(&self, deadline: Deadline) -> bool {
        let [mut interval, max_interval] = POLL_INTERVALS;
        loop {
            self.release_finished();
            let empty = lock(&self.held).is_empty();
            if empty || deadline.passed() || self.device.fault().error().is_some() {
                return empty;
            }
            std::thread::sleep(interval.min(deadline.remaining()));
            interval = max_interval.min(2 * interval);
        }
    }

    /// Has a thread let go of what is left, for an owner that goes away. Does not block.
    pub(crate) fn release_in_background(self: &Arc<Self>) {
        self.release_finished();
        if lock(&self.held).is_empty() || self.polled.swap(true, Ordering::AcqRel) {
            return;
        }
        let own = self.clone();
        let started = std::thread::Builder::new()
            .name("warplink-in-flight".to_owned())
            .spawn(move || {
                let deadline = Deadline::after(Duration::MAX);
                let empty = own.wait_until_empty(deadline);
                own.polled.store(false, Ordering::Release);
                if !empty {
                    tracing::debug!("streams that failed cannot be asked; what they use is kept");
                }
            });
        if let Err(error) = started {
            self.polled.store(false, Ordering::Release);
            tracing::warn!(%error, "what streams still use is kept for good");
        }
    }

    fn hold_behind(&self, marks: Vec<Mark>, item: Box<dyn Any + Send>) {
        lock(&self.held).push(Held { marks, _item: item });
    }

    fn mark(&self, stream: &Stream) -> Mark {
        match self.record(stream) {
            Ok(event) => Mark::Recorded(event),
            Err(error) => {
                tracing::debug!(%error, "a stream cannot be marked yet");
                Mark::Unrecorded(stream.clone())
            }
        }
    }

    fn record(&self, stream: &Stream) -> Result<Event> {
        // The mark would become a part of the graph.
        if stream.is_capturing()? {
            return Err(
                Error::invalid("the stream is recording a graph").help("end the capture first")
            );
        }
        let event = self.device.create_event(false)?;
        stream.record(&event)?;
        Ok(event)
    }

    /// Whether all marks of `held` are reached. Streams that could be marked now go to `marked`.
    fn is_finished(&self, held: &mut Held, marked: &mut Vec<Mark>) -> bool {
        for mark in &mut held.marks {
            if let Mark::Unrecorded(stream) = mark
                && let Ok(event) = self.record(stream)
            {
                marked.push(std::mem::replace(mark, Mark::Recorded(event)));
            }
        }
        held.marks.retain(|mark| match mark {
            Mark::Recorded(event) => !event.is_reached().unwrap_or(false),
            Mark::Unrecorded(_) => true,
        });
        held.marks.is_empty()
    }
}

impl fmt::Debug for InFlight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InFlight")
            .field("items", &lock(&self.held).len())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{AllocationKind, DeviceConfig, DeviceKind, EventBackend, MemoryOp};
    use crate::device::{Priority, open};
    use crate::error::ErrorKind;

    /// An event that can be asked only once it is allowed.
    #[derive(Debug, Default)]
    struct Silent(AtomicBool);

    impl EventBackend for Silent {
        fn elapsed_since(&self, _: &Event) -> Result<f32> {
            Ok(0.0)
        }

        fn is_reached(&self) -> Result<bool> {
            if self.0.load(Ordering::Relaxed) {
                Ok(true)
            } else {
                Err(Error::new(ErrorKind::Driver, "cannot be asked now"))
            }
        }
    }

    fn host() -> Arc<dyn Device> {
        open(&DeviceConfig::new(DeviceKind::Host, 0)).unwrap()
    }

    #[test]
    fn what_cannot_be_asked_is_kept_and_so_is_what_comes_after_it() {
        let in_flight = InFlight::new(&host());
        let (silent, item, other) = (Arc::new(Silent::default()), Arc::new(()), Arc::new(()));
        for item in [&item, &other] {
            let marks = vec![Mark::Recorded(Event::new(silent.clone()))];
            in_flight.hold_behind(marks, Box::new(item.clone()));
        }
        in_flight.release_finished();
        assert_eq!(Arc::strong_count(&item), 2, "dropped while in use");
        assert_eq!(Arc::strong_count(&other), 2, "dropped while in use");
        silent.0.store(true, Ordering::Relaxed);
        in_flight.release_finished();
        assert_eq!(
            (Arc::strong_count(&item), Arc::strong_count(&other)),
            (1, 1)
        );
    }

    #[test]
    fn items_are_kept_until_every_stream_is_past_them() {
        let device = host();
        let in_flight = InFlight::new(&device);
        let signals = device.allocate_signals(64).unwrap();
        let word = signals.word(0).unwrap();
        let streams = [(); 2].map(|()| device.create_stream(Priority::Normal).unwrap());
        let wait = MemoryOp::Wait {
            word: &word,
            value: 1,
        };
        streams[1].memory_ops(&[wait]).unwrap();
        let item = Arc::new(());
        in_flight.hold(&[&streams[0], &streams[1]], item.clone());
        let soon = Deadline::after(Duration::from_millis(20));
        assert!(!in_flight.wait_until_empty(soon));
        assert_eq!(Arc::strong_count(&item), 2);
        device.upload(&signals, &[1; 64]).unwrap();
        assert!(in_flight.wait_until_empty(Deadline::after(Duration::from_secs(10))));
        assert_eq!(Arc::strong_count(&item), 1);
    }

    #[test]
    fn a_stream_that_records_a_graph_is_marked_later_and_not_in_the_graph() {
        let device = host();
        let in_flight = InFlight::new(&device);
        let stream = device.create_stream(Priority::Normal).unwrap();
        let memory = device.allocate(64, AllocationKind::Plain).unwrap();
        stream.begin_capture().unwrap();
        stream.fill(&memory, 1).unwrap();
        let item = Arc::new(());
        in_flight.hold(&[&stream], item.clone());
        let graph = stream.end_capture().unwrap();
        assert_eq!(
            graph.operations(),
            1,
            "the mark was recorded into the graph"
        );
        assert!(in_flight.wait_until_empty(Deadline::after(Duration::from_secs(10))));
        assert_eq!(Arc::strong_count(&item), 1);
    }
}
