//! A thread that waits for several things at once sleeps on a doorbell: a count, which each thread raises that has brought
//! something, and the number of sleepers.
//!
//! Who brings something makes no system call while nobody sleeps. That loses no wake-up: a sleeper counts itself and
//! then looks whether the count is what it has seen, and who rings raises the count and then looks for sleepers. With a
//! fence between the two steps of either, one of them sees the other.

use super::words;
use crate::device::{DeviceSlice, Word};
use crate::error::Result;
use crate::sync::fence;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Access to the two words of a doorbell.
pub(super) trait BellWords {
    /// The count; what was brought before it was raised is seen.
    fn count(&self) -> u64;
    /// Raises the count by one.
    fn raise(&self);
    fn sleepers(&self) -> u64;
    fn add_sleeper(&self);
    fn remove_sleeper(&self);
    /// Sleeps for at most `limit`, if the count is `seen`, until somebody wakes the sleepers.
    fn sleep_while(&self, seen: u64, limit: Duration);
    fn wake(&self);
}

/// Tells those that sleep, or are about to, that something has come.
pub(super) fn ring(bell: &impl BellWords) {
    bell.raise();
    fence(Ordering::SeqCst);
    if bell.sleepers() > 0 {
        bell.wake();
    }
}

/// Sleeps until it has rung since the count was `seen`, or until `limit` has passed.
fn sleep(bell: &impl BellWords, seen: u64, limit: Duration) {
    bell.add_sleeper();
    fence(Ordering::SeqCst);
    bell.sleep_while(seen, limit);
    bell.remove_sleeper();
}

/// Looks at a doorbell before a thread sleeps: for about as long as it takes to fall asleep and to be woken.
const LOOKS: u32 = 400;

/// The fault is looked for this often by a sleeper that nobody wakes.
const NAP: Duration = Duration::from_millis(10);

/// How often a rank looks before it sleeps: not at all where it may hold the processor that its peers need.
pub(super) fn looks(processors: usize, ranks: usize) -> u32 {
    if ranks <= processors { LOOKS } else { 0 }
}

/// Until it has rung since the count was `seen`, or the fault is to be looked for.
pub(super) fn rest(bell: &impl BellWords, seen: u64, looks: u32) {
    for _ in 0..looks {
        if bell.count() != seen {
            return;
        }
        std::hint::spin_loop();
    }
    sleep(bell, seen, NAP);
}

/// A doorbell in memory that processes may share.
#[derive(Clone, Debug)]
pub(super) struct Doorbell {
    count: Word,
    sleepers: Word,
}

impl Doorbell {
    /// The one in the 16 bytes at `offset`, which are zero at first.
    pub(super) fn at(memory: &DeviceSlice, offset: usize) -> Result<Self> {
        Ok(Self {
            count: memory.word(offset)?,
            sleepers: memory.word(offset + 8)?,
        })
    }
}

impl BellWords for Doorbell {
    fn count(&self) -> u64 {
        words::load(&self.count)
    }

    fn raise(&self) {
        words::atomic(&self.count).fetch_add(1, Ordering::AcqRel);
    }

    fn sleepers(&self) -> u64 {
        words::atomic(&self.sleepers).load(Ordering::Relaxed)
    }

    fn add_sleeper(&self) {
        words::atomic(&self.sleepers).fetch_add(1, Ordering::Relaxed);
    }

    fn remove_sleeper(&self) {
        words::atomic(&self.sleepers).fetch_sub(1, Ordering::Relaxed);
    }

    fn sleep_while(&self, seen: u64, limit: Duration) {
        words::sleep_while(&self.count, seen, limit);
    }

    fn wake(&self) {
        words::wake(&self.count);
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::sync::atomic::AtomicU64;
    use loom::sync::{Arc, Condvar, Mutex};
    use loom::thread;

    /// The words, and in the place of the kernel's queue of sleepers a lock under which it compares.
    #[derive(Default)]
    struct Model {
        count: AtomicU64,
        sleepers: AtomicU64,
        queue: Mutex<()>,
        woken: Condvar,
        brought: [AtomicU64; 2],
    }

    impl BellWords for Model {
        fn count(&self) -> u64 {
            self.count.load(Ordering::Acquire)
        }

        fn raise(&self) {
            self.count.fetch_add(1, Ordering::AcqRel);
        }

        fn sleepers(&self) -> u64 {
            self.sleepers.load(Ordering::Relaxed)
        }

        fn add_sleeper(&self) {
            self.sleepers.fetch_add(1, Ordering::Relaxed);
        }

        fn remove_sleeper(&self) {
            self.sleepers.fetch_sub(1, Ordering::Relaxed);
        }

        /// Without a limit, so that loom finds a sleeper that nobody wakes.
        fn sleep_while(&self, seen: u64, _: Duration) {
            let queue = self.queue.lock().unwrap();
            if self.count() == seen {
                drop(self.woken.wait(queue).unwrap());
            }
        }

        fn wake(&self) {
            let _queue = self.queue.lock().unwrap();
            self.woken.notify_all();
        }
    }

    #[test]
    fn loom_who_sleeps_for_several_things_is_woken_for_each() {
        let mut model = loom::model::Builder::new();
        // Three threads in all their interleavings take many minutes; one missed wake-up needs two switches.
        model.preemption_bound = Some(3);
        model.check(|| {
            let bell = Arc::new(Model::default());
            let bringers = [0, 1].map(|number| {
                let bell = bell.clone();
                thread::spawn(move || {
                    bell.brought[number].store(1, Ordering::Release);
                    ring(&*bell);
                })
            });
            loop {
                let seen = bell.count();
                let came = |one: &AtomicU64| one.load(Ordering::Acquire) == 1;
                if bell.brought.iter().all(came) {
                    break;
                }
                sleep(&*bell, seen, Duration::MAX);
            }
            bringers.map(|bringer| bringer.join().unwrap());
        });
    }
}
