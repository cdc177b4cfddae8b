//! The one-way switch that turns a lost peer into errors instead of hangs.

use crate::error::{Error, ErrorKind, Result};
use crate::sync::{AtomicBool, Mutex, OnceLock, Ordering, guard};
use std::any::Any;
use std::fmt;
use std::sync::{Arc, Weak};

/// What is to happen when waits end, as long as there is the one that it is for.
struct Hook {
    listener: Weak<dyn Any + Send + Sync>,
    run: Box<dyn FnOnce() + Send>,
}

type Tell = Box<dyn Fn(Error) + Send + Sync>;

/// A stream, as the faults know it that concern it.
pub(super) trait Concerned: Send + Sync {
    /// The faults of others whose work is not known to be done, where the stream fails when `fault` is
    /// raised.
    fn spoiled_by(&self, fault: &Fault) -> Vec<Arc<Fault>>;
}

/// Raised at most once, by the first thread that learns that a peer is lost. A device has one that concerns all of
/// its work, and each communicator has one that concerns the signals of its own. Raising it has two
/// steps: from the first on, everything that it concerns fails with the error that was raised first;
/// with the second, the waits in streams end. Between them the other ranks can be told, so that
/// nobody takes what a released stream does for good.
#[derive(Default)]
pub struct Fault {
    pub(super) error: Arc<OnceLock<Error>>,
    released: AtomicBool,
    hooks: Mutex<Vec<Hook>>,
    /// Tells the other ranks before waits end.
    tell: OnceLock<Tell>,
    /// The streams that it concerns.
    streams: Mutex<Vec<Weak<dyn Concerned>>>,
}

impl Fault {
    /// Raises it with `error`, in both steps; a second error is dropped, since the first is the cause.
    pub fn raise(&self, error: Error) {
        self.announce(error);
        self.release();
    }

    /// Raises it because of what was found at this rank, which the ranks that wait for it are told before waits end, where
    /// there are any. Where it was announced before, nothing is told again: the announcer does that and ends waits. Does not
    /// block.
    pub(crate) fn fail(&self, error: Error) {
        let Some(tell) = self.tell.get() else {
            return self.raise(error);
        };
        if self.error.set(error.clone()).is_ok() {
            tell(error);
        }
    }

    /// Has `tell` called by [`fail`](Self::fail): it tells the other ranks, and takes the second step then. It must not
    /// block. Only the first counts.
    pub(crate) fn tell_with(&self, tell: impl Fn(Error) + Send + Sync + 'static) {
        let _ = self.tell.set(Box::new(tell));
    }

    /// The first step: host calls and streams fail with `error`. What waits on a GPU goes on waiting.
    pub(crate) fn announce(&self, error: Error) {
        // A second error cannot be set, and only the first matters.
        let _ = self.error.set(error);
    }

    /// The second step, after the first: waits end.
    pub(crate) fn release(&self) {
        let mut hooks = guard(&self.hooks);
        self.released.store(true, Ordering::Release);
        let hooks = std::mem::take(&mut *hooks);
        hooks.into_iter().for_each(|hook| (hook.run)());
    }

    /// The faults of others whose work lies in a stream that fails by this one, and so counts for
    /// nothing. To be asked between the two steps.
    pub(crate) fn spoiled(self: &Arc<Self>) -> Vec<Arc<Self>> {
        let streams = guard(&self.streams).clone();
        let streams = streams.iter().filter_map(Weak::upgrade);
        let mut spoiled: Vec<Arc<Self>> = Vec::new();
        for fault in streams.flat_map(|stream| stream.spoiled_by(self)) {
            if !spoiled.iter().any(|known| Arc::ptr_eq(known, &fault)) {
                spoiled.push(fault);
            }
        }
        spoiled
    }

    /// Notes a stream that it concerns.
    pub(super) fn concerns(&self, stream: Weak<dyn Concerned>) {
        let mut streams = guard(&self.streams);
        streams.retain(|stream| stream.strong_count() > 0);
        streams.push(stream);
    }

    /// Whether waits are to end.
    pub(crate) fn is_released(&self) -> bool {
        self.released.load(Ordering::Acquire)
    }

    /// The error that was raised, if one was.
    pub fn error(&self) -> Option<&Error> {
        self.error.get()
    }

    /// `result`, whose timeout also says whether the communicator can be used further, where this is a
    /// communicator's: unless it was raised.
    pub(crate) fn with_outcome<T>(&self, result: Result<T>) -> Result<T> {
        result.map_err(|error| match (error.kind(), self.error()) {
            (ErrorKind::Timeout, None) => error.adding("the communicator can still be used"),
            // What was raised says so itself.
            (ErrorKind::Timeout, Some(raised)) if raised.message() != error.message() => {
                error.adding("the communicator has ended")
            }
            _ => error,
        })
    }

    /// Fails with the error that was raised, if one was.
    pub fn check(&self) -> Result<()> {
        match self.error.get() {
            Some(error) => Err(error.clone()),
            None => Ok(()),
        }
    }

    /// Runs `hook` with `listener` once when waits are to end, or at once if they are already. It is
    /// forgotten some time after `listener` is gone.
    pub(crate) fn when_raised<T: Send + Sync + 'static>(
        &self,
        listener: &Arc<T>,
        hook: impl FnOnce(Weak<T>) + Send + 'static,
    ) {
        let listener = Arc::downgrade(listener);
        let mut hooks = guard(&self.hooks);
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

impl fmt::Debug for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Fault").field(&self.error.get()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn waits_end_in_the_second_step_only() {
        let (fault, ended) = (Fault::default(), Arc::new(AtomicBool::new(false)));
        let told = ended.clone();
        let listener = Arc::new(());
        fault.when_raised(&listener, move |_| told.store(true, Ordering::Release));
        fault.announce(Error::new(ErrorKind::PeerLost, "first"));
        fault.announce(Error::new(ErrorKind::PeerLost, "second"));
        assert_eq!(fault.check().unwrap_err().message(), "first");
        assert!(!ended.load(Ordering::Acquire) && !fault.is_released());
        fault.release();
        assert!(ended.load(Ordering::Acquire) && fault.is_released());
    }

    #[test]
    fn a_failure_is_told_once_and_waits_go_on() {
        let (fault, told) = (Fault::default(), Arc::<Mutex<Vec<String>>>::default());
        let tells = told.clone();
        fault.tell_with(move |error| guard(&tells).push(error.message().to_owned()));
        fault.fail(Error::new(ErrorKind::PeerLost, "first"));
        fault.fail(Error::new(ErrorKind::PeerLost, "second"));
        assert_eq!(*guard(&told), ["first"]);
        assert_eq!(fault.check().unwrap_err().message(), "first");
        assert!(!fault.is_released());
    }

    #[test]
    fn what_is_for_somebody_who_is_gone_is_forgotten() {
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
}
