//! One-shot latch that turns a lost peer into errors instead of hangs.

use crate::debug::debug_text;
use crate::error::{Error, ErrorKind, Result};
use crate::sync::{AtomicBool, Mutex, OnceLock, Ordering, guard};
use std::any::Any;
use std::sync::{Arc, Weak};

/// Callback run when waits are aborted, if its owner still exists.
struct Hook {
    listener: Weak<dyn Any + Send + Sync>,
    run: Box<dyn FnOnce() + Send>,
}

type Notify = Box<dyn Fn(Error) + Send + Sync>;

/// A stream, as registered with the faults that affect it.
pub(super) trait Concerned: Send + Sync {
    /// Faults of other communicators whose work in this stream may be incomplete if the stream fails by
    /// `fault`.
    fn affected_by(&self, fault: &Fault) -> Vec<Arc<Fault>>;
}

/// Set at most once, by the first thread that detects a lost peer. A device has one for all of its work, and
/// each communicator has one for waits on its signals.
///
/// Raising has two steps. After the first, host calls and streams fail with the first error. The second
/// aborts waits in streams. In between, other ranks can be notified, so that no rank treats the output of a
/// released stream as valid.
#[derive(Default)]
pub struct Fault {
    pub(super) error: Arc<OnceLock<Error>>,
    released: AtomicBool,
    hooks: Mutex<Vec<Hook>>,
    /// Notifies other ranks before waits are aborted.
    notify: OnceLock<Notify>,
    /// Streams that it affects.
    streams: Mutex<Vec<Weak<dyn Concerned>>>,
}

impl Fault {
    /// Raises it with `error`, both steps at once. A second error is dropped, since the first one is the
    /// cause.
    pub fn raise(&self, error: Error) {
        self.announce(error);
        self.release();
    }

    /// Raises it for an error detected on this rank. Peers that wait for this rank are notified before waits
    /// are aborted. If it was announced before, nothing is sent: the announcer notifies them and aborts the
    /// waits. Does not block.
    pub(crate) fn fail(&self, error: Error) {
        let Some(notify) = self.notify.get() else {
            return self.raise(error);
        };
        // Only the first failure is spread: later ones are usually its consequences.
        if self.error.set(error.clone()).is_ok() {
            notify(error);
        }
    }

    /// Registers the callback that [`fail`](Self::fail) uses to notify other ranks, and which then performs
    /// the second step. It must not block. Only the first registration counts.
    pub(crate) fn notify_with(&self, notify: impl Fn(Error) + Send + Sync + 'static) {
        let _ = self.notify.set(Box::new(notify));
    }

    /// First step: host calls and streams fail with `error`. GPU waits continue.
    pub(crate) fn announce(&self, error: Error) {
        // `set` fails if an error is set; only the first one matters.
        let _ = self.error.set(error);
    }

    /// Second step, after the first: waits are aborted.
    pub(crate) fn release(&self) {
        let hooks = {
            let mut hooks = guard(&self.hooks);
            // Under the lock, so that a hook is either found here or run by the thread that adds it. Release pairs with
            // the acquire load in `is_released`: a thread that sees the flag also sees the error.
            self.released.store(true, Ordering::Release);
            std::mem::take(&mut *hooks)
        };
        // Outside the lock: a hook may add others.
        hooks.into_iter().for_each(|hook| (hook.run)());
    }

    /// Faults of other communicators with work in a stream that fails by this one, which may therefore be
    /// incomplete. To be called between the two steps.
    pub(crate) fn affected(self: &Arc<Self>) -> Vec<Arc<Self>> {
        let streams = guard(&self.streams).clone();
        let streams = streams.iter().filter_map(Weak::upgrade);
        let mut affected: Vec<Arc<Self>> = Vec::new();
        for fault in streams.flat_map(|stream| stream.affected_by(self)) {
            if !affected.iter().any(|known| Arc::ptr_eq(known, &fault)) {
                affected.push(fault);
            }
        }
        affected
    }

    /// Registers a stream that it affects.
    pub(super) fn concerns(&self, stream: Weak<dyn Concerned>) {
        let mut streams = guard(&self.streams);
        streams.retain(|stream| stream.strong_count() > 0);
        streams.push(stream);
    }

    /// Whether waits are aborted.
    pub(crate) fn is_released(&self) -> bool {
        // Acquire: pairs with the release store in `release`, after the error was set.
        self.released.load(Ordering::Acquire)
    }

    /// The error, if raised.
    pub fn error(&self) -> Option<&Error> {
        self.error.get()
    }

    /// For a communicator's fault, appends to a timeout error whether the communicator is still usable.
    /// Unchanged if `result` is the error that was raised.
    pub(crate) fn with_outcome<T>(&self, result: Result<T>) -> Result<T> {
        result.map_err(|error| match (error.kind(), self.error()) {
            (ErrorKind::Timeout, None) => error.adding("the communicator can still be used"),
            // The raised error already contains this message.
            (ErrorKind::Timeout, Some(raised)) if raised.message() != error.message() => {
                error.adding("the communicator has ended")
            }
            _ => error,
        })
    }

    /// Fails with the error, if raised.
    pub fn check(&self) -> Result<()> {
        match self.error.get() {
            Some(error) => Err(error.clone()),
            None => Ok(()),
        }
    }

    /// Calls `hook` with `listener` once when waits are aborted, or at once if they already are. Dropped some
    /// time after `listener` is.
    pub(crate) fn when_raised<T: Send + Sync + 'static>(
        &self,
        listener: &Arc<T>,
        hook: impl FnOnce(Weak<T>) + Send + 'static,
    ) {
        let listener = Arc::downgrade(listener);
        let mut hooks = guard(&self.hooks);
        // Under the lock that `release` holds while it sets the flag, so a hook is either taken by it or called
        // here.
        if !self.is_released() {
            hooks.retain(|hook| hook.listener.strong_count() > 0);
            let own = listener.clone();
            hooks.push(Hook {
                listener,
                run: Box::new(move || hook(own)),
            });
            return;
        }
        drop(hooks);
        hook(listener);
    }
}

debug_text!(Fault, |it| "Fault({:?})", it.error.get());

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn waits_end_in_the_second_step_only() {
        let (fault, ended) = (Fault::default(), Arc::new(AtomicBool::new(false)));
        let notified = ended.clone();
        let listener = Arc::new(());
        fault.when_raised(&listener, move |_| notified.store(true, Ordering::Release));
        fault.announce(Error::new(ErrorKind::PeerLost, "first"));
        fault.announce(Error::new(ErrorKind::PeerLost, "second"));
        assert_eq!(fault.check().unwrap_err().message(), "first");
        assert!(!ended.load(Ordering::Acquire) && !fault.is_released());
        fault.release();
        assert!(ended.load(Ordering::Acquire) && fault.is_released());
    }

    #[test]
    fn failure_is_reported_once_and_waits_continue() {
        let (fault, notified) = (Fault::default(), Arc::<Mutex<Vec<String>>>::default());
        let notifying = notified.clone();
        fault.notify_with(move |error| guard(&notifying).push(error.message().to_owned()));
        fault.fail(Error::new(ErrorKind::PeerLost, "first"));
        fault.fail(Error::new(ErrorKind::PeerLost, "second"));
        assert_eq!(*guard(&notified), ["first"]);
        assert_eq!(fault.check().unwrap_err().message(), "first");
        assert!(!fault.is_released());
    }

    #[test]
    fn listener_dropped_before_fault() {
        let (fault, runs) = (Fault::default(), Arc::new(AtomicBool::new(false)));
        fault.when_raised(&runs, |runs| {
            if let Some(runs) = runs.upgrade() {
                runs.store(true, Ordering::Release);
            }
        });
        for _ in 0..100 {
            fault.when_raised(&Arc::new(()), |gone| assert!(gone.upgrade().is_none()));
        }
        assert!(guard(&fault.hooks).len() <= 2, "grows without bound");
        fault.raise(Error::new(ErrorKind::PeerLost, "lost"));
        assert!(runs.load(Ordering::Acquire));
    }

    #[test]
    fn hooks_may_add_hooks() {
        let (fault, runs) = (Arc::new(Fault::default()), Arc::new(AtomicBool::new(false)));
        let same = fault.clone();
        fault.when_raised(&runs, move |runs| {
            let runs = runs.upgrade().unwrap();
            same.when_raised(&runs, |runs| {
                runs.upgrade().unwrap().store(true, Ordering::Release);
            });
        });
        fault.raise(Error::new(ErrorKind::PeerLost, "lost"));
        assert!(runs.load(Ordering::Acquire));
    }
}
