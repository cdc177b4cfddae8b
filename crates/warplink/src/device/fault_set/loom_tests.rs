//! Loom models of a two-step fault concurrent with threads that enqueue work, streams that wait, and streams
//! that follow them.

use super::*;
use crate::error::ErrorKind;
use crate::sync::Ordering;
use loom::sync::Arc as Shared;
use loom::sync::atomic::AtomicU64;
use loom::thread;

/// Work accepted by the stream is either known when the fault spreads, or rejected.
#[test]
fn loom_work_in_a_stream_that_fails_is_refused_or_known() {
    loom::model(|| {
        let [lost, other] = [(); 2].map(|()| Arc::new(Fault::default()));
        let stream = Arc::<FaultSet>::default();
        drop(stream.add([&lost]));
        let (raising, enqueuing) = (lost.clone(), stream.clone());
        let raising = thread::spawn(move || {
            raising.announce(Error::new(ErrorKind::PeerLost, "lost"));
            let affected = raising.affected().len();
            raising.release();
            affected
        });
        // As a post does: record first, then check whether the stream has failed.
        enqueuing.add_work(&other);
        let taken = enqueuing.check().is_ok();
        let affected = raising.join().unwrap();
        assert!(!taken || affected == 1, "work passes unnoticed");
    });
}

/// The same where two threads enqueue the stream's first waits.
#[test]
fn loom_work_in_a_stream_with_two_first_waits_is_refused_or_known() {
    loom::model(|| {
        let [lost, other] = [(); 2].map(|()| Arc::new(Fault::default()));
        let stream = Arc::<FaultSet>::default();
        stream.add_work(&other);
        let raising = {
            let lost = lost.clone();
            thread::spawn(move || {
                lost.announce(Error::new(ErrorKind::PeerLost, "lost"));
                lost.affected().len()
            })
        };
        let waiting = {
            let (lost, stream) = (lost.clone(), stream.clone());
            thread::spawn(move || drop(stream.add([&lost])))
        };
        drop(stream.add([&lost]));
        let taken = stream.check().is_ok();
        let affected = raising.join().unwrap();
        assert!(!taken || affected == 1, "work passes unnoticed");
        waiting.join().unwrap();
    });
}

/// The same for a stream that begins to follow the failing one.
#[test]
fn loom_work_in_a_stream_that_follows_is_refused_or_known() {
    loom::model(|| {
        let [lost, other] = [(); 2].map(|()| Arc::new(Fault::default()));
        let [stream, follower] = [(); 2].map(|()| Arc::<FaultSet>::default());
        drop(stream.add([&lost]));
        let raising = {
            let lost = lost.clone();
            thread::spawn(move || {
                lost.announce(Error::new(ErrorKind::PeerLost, "lost"));
                lost.affected().len()
            })
        };
        drop(follower.follow(&stream));
        follower.add_work(&other);
        let taken = follower.check().is_ok();
        let affected = raising.join().unwrap();
        assert!(!taken || affected == 1, "work passes unnoticed");
    });
}

/// Value that aborts a wait.
const LET_GO: u64 = u64::MAX;

fn lost() -> Error {
    Error::new(ErrorKind::PeerLost, "lost")
}

/// A fault that aborts waits for a word, and the faults of a stream that waits for it.
fn waiting() -> (Arc<Fault>, Arc<FaultSet>, Shared<AtomicU64>) {
    let (fault, set) = (Arc::new(Fault::default()), Arc::<FaultSet>::default());
    let word = Shared::new(AtomicU64::new(0));
    let ended = word.clone();
    // The word lives as long as the stream.
    fault.when_raised(&set, move |_| ended.store(LET_GO, Ordering::Release));
    drop(set.add([&fault]));
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

/// A stream with an aborted wait has failed by then, even if the peer's signal still arrives.
#[test]
fn loom_released_wait_has_failed() {
    loom::model(|| {
        let (fault, set, word) = waiting();
        let raising = thread::spawn(move || fault.raise(lost()));
        let signal = word.clone();
        let peer = thread::spawn(move || {
            // A late signal does not overwrite the abort value.
            let _ = signal.compare_exchange(0, 1, Ordering::Release, Ordering::Relaxed);
        });
        if wait(&word) == LET_GO {
            assert!(set.check().is_err(), "released, and treated as complete");
        }
        raising.join().unwrap();
        peer.join().unwrap();
        assert!(set.check().is_err());
    });
}

/// The same for a stream that follows it by an event.
#[test]
fn loom_follower_of_a_failed_stream_has_failed() {
    loom::model(|| {
        let (fault, set, word) = waiting();
        let follower = Arc::<FaultSet>::default();
        drop(follower.follow(&set));
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

/// A wait that another thread is enqueuing does not count as complete while the stream is idle.
#[test]
fn loom_a_wait_that_is_being_enqueued_is_not_taken_for_done() {
    loom::model(|| {
        let (fault, set) = (Arc::new(Fault::default()), Arc::<FaultSet>::default());
        let queued = Shared::new(AtomicU64::new(0));
        let enqueuing = {
            let (fault, set, queued) = (fault.clone(), set.clone(), queued.clone());
            thread::spawn(move || {
                let noted = set.add([&fault]);
                queued.store(1, Ordering::Release);
                drop(noted);
            })
        };
        let place = set.place();
        if queued.load(Ordering::Acquire) == 0 {
            set.done(place);
        }
        fault.raise(lost());
        if queued.load(Ordering::Acquire) == 1 {
            assert!(set.check().is_err(), "released, and treated as complete");
        }
        enqueuing.join().unwrap();
        assert!(set.check().is_err());
    });
}

/// Hooks run exactly once whenever they are registered, and the first error is kept.
#[test]
fn loom_hooks_run_once_and_the_first_error_stays() {
    loom::model(|| {
        let fault = Arc::new(Fault::default());
        let runs = Shared::new(AtomicU64::new(0));
        let raising =
            [fault.clone(), fault.clone()].map(|fault| thread::spawn(move || fault.raise(lost())));
        let counted = runs.clone();
        let listener = Arc::new(());
        fault.when_raised(&listener, move |_| {
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
