//! The one-way switch that turns a lost peer into errors instead of hangs.

use crate::error::{Error, Result};
use crate::sync::{AtomicBool, Mutex, OnceLock, Ordering, guard};
use std::fmt;
use std::sync::{Arc, Weak};

type Hook = Box<dyn FnOnce() + Send>;

/// Raised at most once, by the first thread that learns that a peer is lost. A device has one that concerns all of
/// its work, and each communicator has one that concerns the signals of its own. Raising it has two
/// steps: from the first on, everything that it concerns fails with the error that was raised first;
/// with the second, the waits in streams end. Between them the other ranks can be told, so that
/// nobody takes what a released stream does for good.
#[derive(Default)]
pub struct Fault {
    error: Arc<OnceLock<Error>>,
    released: AtomicBool,
    hooks: Mutex<Vec<Hook>>,
}

impl Fault {
    /// Raises it with `error`, in both steps; a second error is dropped, since the first is the cause.
    pub fn raise(&self, error: Error) {
        self.announce(error);
        self.release();
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
        hooks.into_iter().for_each(|hook| hook());
    }

    /// Whether waits are to end.
    pub(crate) fn is_released(&self) -> bool {
        self.released.load(Ordering::Acquire)
    }

    /// The error that was raised, if one was.
    pub fn error(&self) -> Option<&Error> {
        self.error.get()
    }

    /// Fails with the error that was raised, if one was.
    pub fn check(&self) -> Result<()> {
        match self.error.get() {
            Some(error) => Err(error.clone()),
            None => Ok(()),
        }
    }

    /// Runs `hook` once when waits are to end, or at once if they are already.
    pub(crate) fn when_raised(&self, hook: impl FnOnce() + Send + 'static) {
        let mut hooks = guard(&self.hooks);
        if !self.is_released() {
            hooks.push(Box::new(hook));
            return;
        }
        drop(hooks);
        hook();
    }
}

impl fmt::Debug for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Fault").field(&self.error.get()).finish()
    }
}

/// The faults that concern a stream: those of the words that it waits for, and those that concern
/// what it follows. It fails when one is raised, and stays failed: what it did after a wait that was
/// let go must not pass for done.
#[derive(Debug, Default)]
pub(crate) struct FaultSet(Mutex<Vec<Concern>>);

#[derive(Clone, Debug)]
struct Concern {
    error: Arc<OnceLock<Error>>,
    /// When it is gone and was not raised, it never will be.
    fault: Weak<Fault>,
}

impl FaultSet {
    pub(crate) fn add(&self, fault: &Arc<Fault>) {
        let mut concerns = guard(&self.0);
        if concerns
            .iter()
            .any(|held| Arc::ptr_eq(&held.error, &fault.error))
        {
            return;
        }
        concerns.retain(Concern::matters);
        concerns.push(Concern {
            error: fault.error.clone(),
            fault: Arc::downgrade(fault),
        });
    }

    /// Adds every fault of `other`.
    pub(crate) fn add_all(&self, other: &Self) {
        if std::ptr::eq(self, other) {
            return;
        }
        // Not under both locks, which two streams may take in either order.
        let added = guard(&other.0).clone();
        if added.is_empty() {
            return;
        }
        let mut concerns = guard(&self.0);
        concerns.retain(Concern::matters);
        for concern in added {
            if !concerns
                .iter()
                .any(|held| Arc::ptr_eq(&held.error, &concern.error))
            {
                concerns.push(concern);
            }
        }
    }

    /// Forgets what it has, and takes the faults of `other`.
    pub(crate) fn replace(&self, other: &Self) {
        let taken = guard(&other.0).clone();
        *guard(&self.0) = taken;
    }

    /// Fails with the error of a fault that was raised, if one was.
    pub(crate) fn check(&self) -> Result<()> {
        let concerns = guard(&self.0);
        let raised = concerns.iter().find_map(|concern| concern.error.get());
        raised.map_or(Ok(()), |error| {
            Err(error
                .clone()
                .with_help("use another stream: this one waited for what will not come"))
        })
    }
}

impl Concern {
    fn matters(&self) -> bool {
        self.error.get().is_some() || self.fault.strong_count() > 0
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
        fault.when_raised(move || told.store(true, Ordering::Release));
        fault.announce(Error::new(ErrorKind::PeerLost, "first"));
        fault.announce(Error::new(ErrorKind::PeerLost, "second"));
        assert_eq!(fault.check().unwrap_err().message(), "first");
        assert!(!ended.load(Ordering::Acquire) && !fault.is_released());
        fault.release();
        assert!(ended.load(Ordering::Acquire) && fault.is_released());
    }

    #[test]
    fn a_set_keeps_what_was_raised_and_forgets_what_cannot_be() {
        let (set, follower) = (FaultSet::default(), FaultSet::default());
        let faults = [(); 3].map(|()| Arc::new(Fault::default()));
        faults.iter().for_each(|fault| set.add(fault));
        set.add(&faults[0]);
        assert_eq!(guard(&set.0).len(), 3);
        follower.add_all(&set);
        let [raised, gone, _kept] = faults;
        raised.raise(Error::new(ErrorKind::PeerLost, "lost"));
        drop((raised, gone));
        set.add(&Arc::new(Fault::default()));
        assert_eq!(guard(&set.0).len(), 3, "raised, kept and new");
        assert!(set.check().is_err() && follower.check().is_err());
        follower.replace(&FaultSet::default());
        assert!(follower.check().is_ok());
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    //! A loss, told in two steps, beside streams that wait and streams that follow them.

    use super::*;
    use crate::error::ErrorKind;
    use loom::sync::Arc as Shared;
    use loom::sync::atomic::AtomicU64;
    use loom::thread;

    /// What ends a wait without a signal.
    const LET_GO: u64 = u64::MAX;

    fn lost() -> Error {
        Error::new(ErrorKind::PeerLost, "lost")
    }

    /// A fault that ends the waits for a word, and the faults of a stream that waits for it.
    fn waiting() -> (Arc<Fault>, Arc<FaultSet>, Shared<AtomicU64>) {
        let (fault, set) = (Arc::new(Fault::default()), Arc::new(FaultSet::default()));
        let word = Shared::new(AtomicU64::new(0));
        let ended = word.clone();
        fault.when_raised(move || ended.store(LET_GO, Ordering::Release));
        set.add(&fault);
        (fault, set, word)
    }

    fn wait(word: &AtomicU64) -> u64 {
        loop {
            match word.load(Ordering::Acquire) {
                0 => thread::yield_now(),
                seen => return seen,
            }
        }
    }

    /// A stream whose wait was let go of has failed by then, whether or not the peer's signal comes.
    #[test]
    fn loom_what_was_let_go_of_has_failed() {
        loom::model(|| {
            let (fault, set, word) = waiting();
            let raising = thread::spawn(move || fault.raise(lost()));
            let signal = word.clone();
            let peer = thread::spawn(move || {
                // A signal that comes late does not undo the end of the waits.
                let _ = signal.compare_exchange(0, 1, Ordering::Release, Ordering::Relaxed);
            });
            if wait(&word) == LET_GO {
                assert!(set.check().is_err(), "let go of, and taken for good");
            }
            raising.join().unwrap();
            peer.join().unwrap();
            assert!(set.check().is_err());
        });
    }

    /// So has a stream that follows it by an event.
    #[test]
    fn loom_what_follows_has_failed_too() {
        loom::model(|| {
            let (fault, set, word) = waiting();
            let follower = FaultSet::default();
            follower.add_all(&set);
            let raising = thread::spawn(move || fault.raise(lost()));
            let event = Shared::new(AtomicU64::new(0));
            let reached = event.clone();
            let stream = thread::spawn(move || reached.store(wait(&word), Ordering::Release));
            if wait(&event) == LET_GO {
                assert!(follower.check().is_err(), "followed, and taken for good");
            }
            raising.join().unwrap();
            stream.join().unwrap();
        });
    }

    /// What is to happen when waits end happens once, whenever it is asked for; and the first error stays.
    #[test]
    fn loom_hooks_run_once_and_the_first_error_stays() {
        loom::model(|| {
            let fault = Arc::new(Fault::default());
            let runs = Shared::new(AtomicU64::new(0));
            let raising = [fault.clone(), fault.clone()]
                .map(|fault| thread::spawn(move || fault.raise(lost())));
            let counted = runs.clone();
            fault.when_raised(move || {
                counted.fetch_add(1, Ordering::Relaxed);
            });
            let seen = fault
                .error()
                .map(|error| std::ptr::from_ref(error) as usize);
            raising
                .into_iter()
                .for_each(|thread| thread.join().unwrap());
            assert_eq!(runs.load(Ordering::Relaxed), 1);
            let last = fault
                .error()
                .map(|error| std::ptr::from_ref(error) as usize);
            assert!(last.is_some() && (seen.is_none() || seen == last));
        });
    }
}
