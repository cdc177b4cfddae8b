//! Faults that affect a stream, and which of its work is invalid once one is raised.

use super::fault::{Concerned, Fault};
use crate::error::{Error, ErrorKind, Result};
use crate::sync::{Mutex, OnceLock, guard};
use std::sync::{Arc, Weak};

#[cfg(all(test, loom))]
mod loom_tests;

/// Faults that affect a stream: those of the words that it waits for, and those inherited from streams that
/// it follows. The stream fails if one is raised before such a wait is known to be complete, and stays
/// failed, so that work after an aborted wait is never treated as done.
///
/// The set also tracks for which communicators the stream does work, to report whose work is invalid when the
/// stream fails.
#[derive(Debug, Default)]
pub(crate) struct FaultSet(Mutex<Concerns>);

#[derive(Debug, Default)]
struct Concerns {
    list: Vec<Concern>,
    /// Sequence number of relevant enqueue calls.
    place: u64,
    /// Sequence numbers before operations that were recorded but may not be in the stream yet.
    before_pending: Vec<u64>,
}

/// Guard while recorded operations are being enqueued. Until it is dropped, they are not treated as complete
/// even if the stream is idle.
#[derive(Debug)]
#[must_use = "dropping it marks the recorded operations as enqueued"]
pub(crate) struct Noted<'a> {
    set: &'a FaultSet,
    /// Its entry in `before_pending`, if anything was recorded.
    before: Option<u64>,
}

#[derive(Debug)]
struct Concern {
    error: Arc<OnceLock<Error>>,
    /// Once it is dropped without having been raised, it never will be.
    fault: Weak<Fault>,
    /// Sequence number of the last wait that it aborts, unless known to be complete.
    waits: Option<u64>,
    /// Sequence number of the last work for its communicator, unless known to be complete.
    work: Option<u64>,
}

impl FaultSet {
    /// Records waits that `faults` abort, for work of their communicators. Drop the guard when the enqueue
    /// call has returned.
    #[inline]
    pub(crate) fn add<'a>(
        self: &Arc<Self>,
        faults: impl IntoIterator<Item = &'a Arc<Fault>>,
    ) -> Noted<'_> {
        let mut noted = Noted {
            set: self,
            before: None,
        };
        for fault in faults {
            self.note(fault, Some(&mut noted));
        }
        noted
    }

    /// Records work for `fault`'s communicator that does not wait.
    pub(crate) fn add_work(self: &Arc<Self>, fault: &Arc<Fault>) {
        self.note(fault, None);
    }

    /// Records work, and optionally a wait that is being enqueued.
    #[inline]
    fn note(self: &Arc<Self>, fault: &Arc<Fault>, wait: Option<&mut Noted<'_>>) {
        let waits = wait.is_some();
        let mut concerns = guard(&self.0);
        if let Some(noted) = wait {
            concerns.begin(noted);
        }
        concerns.place += 1;
        let place = concerns.place;
        let known = concerns
            .list
            .iter_mut()
            .find(|concern| Arc::ptr_eq(&concern.error, &fault.error));
        if let Some(concern) = known {
            concern.work = Some(place);
            if waits {
                concern.waits = Some(place);
            }
            return;
        }
        concerns.list.retain(Concern::matters);
        concerns.list.push(Concern {
            error: fault.error.clone(),
            fault: Arc::downgrade(fault),
            waits: waits.then_some(place),
            work: Some(place),
        });
        self.register(fault);
    }

    /// Registers the stream with a fault. Call it with the lock under which the fault was added: another thread that finds
    /// the fault here, and relies on that, could enqueue its wait before.
    fn register(self: &Arc<Self>, fault: &Fault) {
        let stream: Weak<Self> = Arc::downgrade(self);
        fault.concerns(stream);
    }

    /// Inherits the faults of `other`, which this stream is made to wait for. Drop the guard when the enqueue
    /// call has returned.
    pub(crate) fn follow(self: &Arc<Self>, other: &Self) -> Noted<'_> {
        self.take_over(other, false)
    }

    /// Records that the stream repeats the work `other` was captured from. The guard is as for
    /// [`follow`](Self::follow).
    pub(crate) fn repeat(self: &Arc<Self>, other: &Self) -> Noted<'_> {
        self.take_over(other, true)
    }

    fn take_over(self: &Arc<Self>, other: &Self, with_work: bool) -> Noted<'_> {
        let mut noted = Noted {
            set: self,
            before: None,
        };
        if std::ptr::eq(Arc::as_ptr(self), other) {
            return noted;
        }
        // Never hold both locks: two streams could take them in opposite order.
        let added = guard(&other.0).list.clone();
        if added.is_empty() {
            return noted;
        }
        // Dropped after the lock is released: the last holder of a fault runs arbitrary code.
        let mut new = Vec::new();
        let mut concerns = guard(&self.0);
        concerns.begin(&mut noted);
        concerns.place += 1;
        let place = concerns.place;
        concerns.list.retain(Concern::matters);
        for taken in added {
            let known = concerns
                .list
                .iter_mut()
                .find(|held| Arc::ptr_eq(&held.error, &taken.error));
            let concern = match known {
                Some(known) => known,
                None => {
                    new.extend(taken.fault.upgrade());
                    concerns.list.push(Concern {
                        waits: None,
                        work: None,
                        ..taken.clone()
                    });
                    match concerns.list.last_mut() {
                        Some(last) => last,
                        None => continue,
                    }
                }
            };
            if taken.waits.is_some() {
                concern.waits = Some(place);
            }
            if with_work && taken.work.is_some() {
                concern.work = Some(place);
            }
        }
        new.iter().for_each(|fault| self.register(fault));
        drop(concerns);
        noted
    }

    /// Replaces its faults, an event's, by those of `other`, the stream's that records it.
    pub(crate) fn replace(&self, other: &Self) {
        // No thread that holds an event's lock takes a stream's. Events are recorded by every call, mostly with the same
        // faults.
        let taken = guard(&other.0);
        guard(&self.0).list.clone_from(&taken.list);
    }

    /// Sequence number up to which all recorded operations have been enqueued.
    pub(crate) fn place(&self) -> u64 {
        let concerns = guard(&self.0);
        // The earliest: everything before it is in the stream, whichever threads are still enqueuing.
        let pending = concerns.before_pending.iter().copied().min();
        pending.unwrap_or(concerns.place)
    }

    /// Marks everything up to `place` as complete.
    pub(crate) fn done(&self, place: u64) {
        for concern in &mut guard(&self.0).list {
            concern.work = concern.work.filter(|&work| work > place);
            concern.waits = concern.waits.filter(|&wait| wait > place);
        }
    }

    /// Fails with the error of a raised fault.
    #[inline]
    pub(crate) fn check(&self) -> Result<()> {
        let concerns = guard(&self.0);
        let waiting = concerns.list.iter().filter(|held| held.waits.is_some());
        let raised = waiting.filter_map(|concern| concern.error.get());
        // If a fault has spread to others, report the original cause.
        let raised = raised.min_by_key(|error| error.kind() == ErrorKind::PeerFailed);
        raised.map_or(Ok(()), |error| {
            const HELP: &str =
                "use another stream: this one waited for a signal that will never arrive";
            let help = match error.help() {
                Some(cause) => format!("{cause}; {HELP}"),
                None => HELP.to_owned(),
            };
            Err(error.clone().with_help(help))
        })
    }
}

impl Concerns {
    /// Marks later recorded operations as being enqueued.
    fn begin(&mut self, noted: &mut Noted<'_>) {
        if noted.before.is_none() {
            noted.before = Some(self.place);
            self.before_pending.push(self.place);
        }
    }
}

impl Drop for Noted<'_> {
    #[inline]
    fn drop(&mut self) {
        let Some(before) = self.before else { return };
        let pending = &mut guard(&self.set.0).before_pending;
        if let Some(at) = pending.iter().position(|&other| other == before) {
            pending.swap_remove(at);
        }
    }
}

impl Concerned for FaultSet {
    // Order is irrelevant: work before an aborted wait may be incomplete too.
    fn affected_by(&self, fault: &Fault) -> Vec<Arc<Fault>> {
        let concerns = guard(&self.0);
        let is_own = |concern: &&Concern| Arc::ptr_eq(&concern.error, &fault.error);
        let waits = |concern: &Concern| concern.waits.is_some();
        if !concerns.list.iter().find(is_own).is_some_and(waits) {
            return Vec::new();
        }
        let others = concerns.list.iter().filter(|concern| !is_own(concern));
        let affected = others.filter(|concern| concern.work.is_some());
        affected
            .filter_map(|concern| concern.fault.upgrade())
            .collect()
    }
}

impl Clone for Concern {
    fn clone(&self) -> Self {
        Self {
            error: self.error.clone(),
            fault: self.fault.clone(),
            waits: self.waits,
            work: self.work,
        }
    }

    fn clone_from(&mut self, other: &Self) {
        if Arc::ptr_eq(&self.error, &other.error) {
            // The same fault: no counts of references change.
            (self.waits, self.work) = (other.waits, other.work);
        } else {
            *self = other.clone();
        }
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

    fn faults<const N: usize>() -> [Arc<Fault>; N] {
        [(); N].map(|()| Arc::new(Fault::default()))
    }

    #[test]
    fn set_keeps_raised_faults_and_drops_dead_ones() {
        let (set, follower) = (Arc::<FaultSet>::default(), Arc::<FaultSet>::default());
        let faults = faults::<3>();
        drop(set.add(&faults));
        drop(set.add([&faults[0]]));
        assert_eq!(guard(&set.0).list.len(), 3);
        drop(follower.follow(&set));
        let [raised, gone, _kept] = faults;
        raised.raise(Error::new(ErrorKind::PeerLost, "lost"));
        drop((raised, gone));
        drop(set.add([&Arc::new(Fault::default())]));
        assert_eq!(guard(&set.0).list.len(), 3, "raised, kept and new");
        assert!(set.check().is_err() && follower.check().is_err());
        follower.replace(&FaultSet::default());
        assert!(follower.check().is_ok());
    }

    /// Whether work of `other` is invalid if `fault` is raised.
    fn spoils(fault: &Arc<Fault>, other: &Arc<Fault>) -> bool {
        let affected = fault.affected();
        affected.iter().any(|affected| Arc::ptr_eq(affected, other))
    }

    #[test]
    fn a_stream_fails_where_a_wait_is_not_over_and_spoils_work_that_is_not_done() {
        let [lost, other] = faults();
        let stream = Arc::<FaultSet>::default();
        stream.add_work(&other);
        assert!(!spoils(&lost, &other), "it does not wait");
        drop(stream.add([&lost]));
        assert!(spoils(&lost, &other) && !spoils(&other, &lost));
        stream.done(stream.place());
        assert!(!spoils(&lost, &other));
        drop(stream.add([&lost]));
        assert!(!spoils(&lost, &other), "it is done");
        let before = stream.place();
        stream.add_work(&other);
        stream.done(before);
        assert!(!spoils(&lost, &other), "the wait is over");
        drop(stream.add([&lost]));
        stream.done(before);
        assert!(spoils(&lost, &other), "neither is known to be over");
        stream.done(stream.place());
        lost.raise(Error::new(ErrorKind::PeerLost, "lost"));
        assert!(stream.check().is_ok(), "all waits were over");
        drop(stream.add([&lost]));
        assert!(stream.check().is_err(), "it waits for an aborted signal");
    }

    #[test]
    fn streams_that_follow_and_graphs_that_are_launched_again_are_known() {
        let [lost, other, third] = faults();
        let sets = [(); 3].map(|()| Arc::<FaultSet>::default());
        let [stream, follower, launching] = &sets;
        drop(stream.add([&lost]));
        drop(follower.follow(stream));
        follower.add_work(&other);
        assert!(spoils(&lost, &other));
        // A graph of a wait followed by work.
        let graph = FaultSet::default();
        stream.add_work(&third);
        graph.replace(stream);
        stream.done(stream.place());
        follower.done(follower.place());
        assert!(lost.affected().is_empty());
        drop(launching.add([&lost]));
        drop(launching.repeat(&graph));
        assert!(spoils(&lost, &third) && !spoils(&lost, &other));
    }

    #[test]
    fn work_being_enqueued_is_not_complete() {
        let [lost, second] = faults();
        let [stream, follower] = [(); 2].map(|()| Arc::<FaultSet>::default());
        let enqueuing = stream.add([&lost, &second]);
        drop(stream.add([&second]));
        let following = follower.follow(&stream);
        [&stream, &follower]
            .iter()
            .for_each(|set| set.done(set.place()));
        drop((enqueuing, following));
        let places = [stream.place(), follower.place()];
        lost.raise(Error::new(ErrorKind::PeerLost, "lost"));
        assert!(stream.check().is_err() && follower.check().is_err());
        stream.done(places[0]);
        follower.done(places[1]);
        assert!(stream.check().is_ok() && follower.check().is_ok());
    }
}
