//! Doorbell: lets a thread sleep until any of several events happens. It consists of a counter that every
//! event increments, and the number of sleepers.
//!
//! Ringing makes no system call while nobody sleeps. No wakeup is lost (Dekker's pattern): a sleeper
//! registers and then checks that the counter is unchanged; a ringer increments the counter and then checks
//! for sleepers. With a SeqCst fence between the two steps on both sides, at least one sees the other.

use super::words;
use crate::device::{Argument, DeviceSlice, Word};
use crate::error::{Error, Result};
use crate::sync::fence;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Offset of the lanes' doorbell in the shared header, whose first words GPUs use.
pub(super) const OFFSET: usize = 48;

/// Access to the two words of a doorbell.
pub(super) trait BellWords {
    /// Reads the counter (acquire: sees the writes before it was incremented).
    fn count(&self) -> u64;
    /// Increments the counter.
    fn raise(&self);
    fn sleepers(&self) -> u64;
    fn add_sleeper(&self);
    fn remove_sleeper(&self);
    /// Sleeps until woken or for up to `limit`, if the counter still equals `seen`.
    fn sleep_while(&self, seen: u64, limit: Duration);
    fn wake(&self);
}

/// The doorbell of lanes launched with `arguments`.
pub(super) fn of_lanes(arguments: &[Argument]) -> Result<Doorbell> {
    match arguments.get(1) {
        Some(Argument::Slice(signals)) => Doorbell::at(signals, OFFSET),
        _ => Err(Error::internal("lanes without signals")),
    }
}

/// Rings: wakes threads that sleep or are about to.
pub(super) fn ring(bell: &impl BellWords) {
    bell.raise();
    // Orders the increment before the check for sleepers.
    fence(Ordering::SeqCst);
    if bell.sleepers() > 0 {
        bell.wake();
    }
}

/// Sleeps until it has rung since the counter was `seen`, or until `limit` has passed.
fn sleep(bell: &impl BellWords, seen: u64, limit: Duration) {
    bell.add_sleeper();
    // Orders the registration before the check of the counter, which `sleep_while` makes.
    fence(Ordering::SeqCst);
    bell.sleep_while(seen, limit);
    bell.remove_sleeper();
}

/// Polls before sleeping: about the time that falling asleep and waking up takes.
const LOOKS: u32 = 400;

/// A sleeper checks for a fault at this interval, since a fault does not ring.
const NAP: Duration = Duration::from_millis(10);

/// Number of polls before a rank sleeps: zero if it may occupy the core that its peers need.
pub(super) fn looks(processors: usize, ranks: usize) -> u32 {
    if ranks <= processors { LOOKS } else { 0 }
}

/// Waits until it has rung since the counter was `seen`, or a fault check is due.
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
    /// The doorbell in the 16 bytes at `offset`, initially zero.
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
        // Release publishes the event; acquire keeps the modification order with other ringers.
        words::atomic(&self.count).fetch_add(1, Ordering::AcqRel);
    }

    fn sleepers(&self) -> u64 {
        // Relaxed: ordered by the fence in `ring`.
        words::atomic(&self.sleepers).load(Ordering::Relaxed)
    }

    fn add_sleeper(&self) {
        // Relaxed: ordered by the fence in `sleep`.
        words::atomic(&self.sleepers).fetch_add(1, Ordering::Relaxed);
    }

    fn remove_sleeper(&self) {
        // Relaxed: a late decrement costs one needless wakeup.
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

    /// The two words, and a lock that plays the kernel's wait queue, under which the counter is compared.
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

        /// Without a timeout, so that loom detects a lost wakeup as a deadlock.
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
        // All interleavings of three threads take many minutes; a lost wakeup needs only two switches.
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
