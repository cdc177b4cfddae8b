//! Loom models of the FIFO, epochs and the abort word.

use super::fifo::{Fifo, FifoReader, HostFifoMemory};
use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU64, Ordering};
use loom::{sync, thread};
use std::sync::Arc;
use std::time::Duration;

/// A value that must only be accessed in a defined order.
#[derive(Default)]
struct Data(UnsafeCell<u64>);

// SAFETY: loom checks every access, and fails the test where two are not ordered.
unsafe impl Sync for Data {}

impl Data {
    fn write(&self, value: u64) {
        // SAFETY: as above.
        self.0.with_mut(|data| unsafe { *data = value });
    }

    fn read(&self) -> u64 {
        // SAFETY: as above.
        self.0.with(|data| unsafe { *data })
    }
}

fn fifo(slots: usize) -> (Arc<Fifo>, FifoReader) {
    Fifo::new(slots, |slots| Ok(Box::new(HostFifoMemory::new(slots)))).unwrap()
}

fn pause() -> crate::error::Result<()> {
    thread::yield_now();
    Ok(())
}

fn pop(reader: &mut FifoReader) -> (u64, [u64; 2]) {
    loop {
        if let Some(popped) = reader.pop() {
            return popped;
        }
        thread::yield_now();
    }
}

/// Runs a model with few preemptions: with three threads all interleavings take many minutes, and bugs that
/// need more preemptions are rare.
fn bounded(preemptions: usize, model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    // Two polling threads take many steps before the third one runs.
    builder.max_branches = 100_000;
    builder.check(model);
}

/// Checks that each trigger arrives whole, once, in its producer's order, and that the producer's earlier
/// writes are visible. The ring wraps and producers wait for space. One producer for each entry of `counts`.
fn producers(counts: &'static [u64], slots: usize) {
    bounded(2, move || {
        let (fifo, mut reader) = fifo(slots);
        let all: u64 = counts.iter().sum();
        let data: Arc<Vec<Data>> = Arc::new((0..all).map(|_| Data::default()).collect());
        // Trigger numbers continue from one producer to the next.
        let firsts: Vec<u64> = (0..counts.len())
            .map(|one| counts[..one].iter().sum())
            .collect();
        let threads: Vec<_> = firsts
            .iter()
            .zip(counts)
            .map(|(&first, &count)| {
                let (fifo, data) = (fifo.clone(), data.clone());
                thread::spawn(move || {
                    for number in first..first + count {
                        data[number as usize].write(number + 1);
                        fifo.push([number, !number >> 1], pause).unwrap();
                    }
                })
            })
            .collect();
        let mut due = firsts.clone();
        for expected in 0..all {
            let (position, [number, second]) = pop(&mut reader);
            assert_eq!(position, expected);
            assert_eq!(second, !number >> 1, "halves of two triggers");
            let producer = firsts.iter().rposition(|first| *first <= number).unwrap();
            assert_eq!(
                due[producer], number,
                "a trigger was lost, repeated or overtaken"
            );
            due[producer] += 1;
            assert_eq!(data[number as usize].read(), number + 1);
        }
        threads
            .into_iter()
            .for_each(|thread| thread.join().unwrap());
        assert!(reader.is_empty() && reader.unread().unwrap() == 0);
    });
}

#[test]
fn loom_one_producer_goes_around_the_ring() {
    producers(&[5], 2);
}

#[test]
fn loom_two_producers_share_one_slot() {
    producers(&[1, 1], 1);
}

#[test]
fn loom_two_producers_share_two_slots() {
    producers(&[2, 1], 2);
}

/// Stops the FIFO concurrently with a producer, with and without space for all triggers: each successful push
/// was served or is counted as unread right after the stop, and a waiting producer is released.
fn stop_with_a_concurrent_producer(slots: usize) {
    bounded(3, move || {
        let (fifo, mut reader) = fifo(slots);
        let producer = fifo.clone();
        let thread = thread::spawn(move || {
            let sent = (0..3).take_while(|number| producer.push([*number, 0], pause).is_ok());
            sent.count() as u64
        });
        let served = u64::from(reader.pop().is_some());
        fifo.stop().unwrap();
        let unread = reader.unread().unwrap();
        let sent = thread.join().unwrap();
        // One more may be counted, whose producer got an error.
        let accounted = served + unread;
        assert!(
            accounted == sent || accounted == sent + 1,
            "{served} served and {unread} unread of {sent}"
        );
        assert!(fifo.push([9, 0], pause).is_err());
    });
}

#[test]
fn loom_a_stop_lets_waiting_producers_go() {
    stop_with_a_concurrent_producer(1);
}

#[test]
fn loom_triggers_concurrent_with_a_stop_are_counted() {
    stop_with_a_concurrent_producer(4);
}

/// A reader that sleeps whenever the ring is empty is woken for each trigger; a missed wakeup would hang the
/// model.
#[test]
fn loom_a_reader_that_listens_misses_no_trigger() {
    bounded(3, || {
        let (fifo, mut reader) = fifo(2);
        let producer = thread::spawn(move || {
            for number in 0..2 {
                fifo.push([number, 0], pause).unwrap();
            }
        });
        for number in 0..2 {
            let halves = loop {
                match reader.pop() {
                    Some((_, halves)) => break halves,
                    None => assert!(reader.listen(Duration::ZERO)),
                }
            };
            assert_eq!(halves[0], number);
        }
        producer.join().unwrap();
    });
}

/// A producer that gives up on a full ring does not block another one that waits.
#[test]
fn loom_a_producer_that_gives_up_blocks_nobody() {
    bounded(3, || {
        let (fifo, mut reader) = fifo(1);
        let (hasty, patient) = (fifo.clone(), fifo);
        let gives_up = || Err(crate::error::Error::invalid("no room"));
        let hasty = thread::spawn(move || hasty.push([7, 0], gives_up).is_ok());
        let patient = thread::spawn(move || {
            for number in 0..2 {
                patient.push([number, 0], pause).unwrap();
            }
        });
        let (mut due, mut sent) = (0, false);
        while due < 2 {
            match pop(&mut reader).1[0] {
                7 => sent = true,
                number => {
                    assert_eq!(number, due);
                    due += 1;
                }
            }
        }
        patient.join().unwrap();
        if hasty.join().unwrap() && !sent {
            assert_eq!(pop(&mut reader).1[0], 7);
        }
        assert!(reader.is_empty() && reader.unread().unwrap() == 0);
    });
}

/// Counts from here on mean that waits were aborted; as in the kernels.
const ENDED: u64 = 1 << 61;

/// Value written to all words by an abort; as the device does.
const POISON: u64 = 1 << 62;

/// The words of a channel as `warplink::Channel` uses them: the peer increments `inbound`, waits take tickets
/// from `awaited`, and an abort overwrites all words.
#[derive(Default)]
struct SlotWords {
    inbound: AtomicU64,
    awaited: AtomicU64,
    abort: AtomicU64,
}

impl SlotWords {
    fn signal(&self) {
        self.inbound.fetch_add(1, Ordering::Release);
    }

    /// Waits for a signal; false if waits were aborted.
    fn wait(&self) -> bool {
        let ticket = self.awaited.fetch_add(1, Ordering::Relaxed) + 1;
        loop {
            let seen = self.inbound.load(Ordering::Acquire);
            if seen >= ENDED {
                return false;
            }
            if seen.wrapping_sub(ticket) as i64 >= 0 {
                return true;
            }
            if self.abort.load(Ordering::Relaxed) != 0 {
                return false;
            }
            thread::yield_now();
        }
    }

    /// Takes a signal if one is available; `None` if waits were aborted. As `detail::take`.
    fn poll(&self) -> Option<bool> {
        let mut taken = self.awaited.load(Ordering::Relaxed);
        loop {
            let seen = self.inbound.load(Ordering::Acquire);
            if seen >= ENDED || taken >= ENDED {
                return None;
            }
            if seen.wrapping_sub(taken) as i64 <= 0 {
                return Some(false);
            }
            let (next, relaxed) = (taken + 1, Ordering::Relaxed);
            match self.awaited.compare_exchange(taken, next, relaxed, relaxed) {
                Ok(_) => return Some(true),
                Err(found) => taken = found,
            }
        }
    }

    fn poison(&self) {
        for word in [&self.inbound, &self.awaited, &self.abort] {
            word.store(POISON, Ordering::Release);
        }
    }
}

/// Two waits and two signals: each wait consumes one, and sees the writes that preceded it.
#[test]
fn loom_each_wait_uses_up_one_signal() {
    bounded(3, || {
        let words = sync::Arc::new(SlotWords::default());
        let data = sync::Arc::new([Data::default(), Data::default()]);
        let (sender, sent) = (words.clone(), data.clone());
        let peer = thread::spawn(move || {
            for (number, data) in sent.iter().enumerate() {
                data.write(number as u64 + 1);
                sender.signal();
            }
        });
        for (number, data) in data.iter().enumerate() {
            assert!(words.wait());
            assert_eq!(data.read(), number as u64 + 1);
        }
        peer.join().unwrap();
        assert_eq!(words.inbound.load(Ordering::Relaxed), 2);
    });
}

/// Waits are aborted while the peer signals: a wait that succeeds has the signal and its data, and every wait
/// ends.
#[test]
fn loom_ended_waits_pass_for_no_signal() {
    bounded(3, || {
        let words = sync::Arc::new(SlotWords::default());
        let data = sync::Arc::new(Data::default());
        let (sender, sent, faulted) = (words.clone(), data.clone(), words.clone());
        let peer = thread::spawn(move || {
            sent.write(7);
            sender.signal();
        });
        let fault = thread::spawn(move || faulted.poison());
        if words.wait() {
            assert_eq!(data.read(), 7);
        }
        // The second signal never comes.
        assert!(!words.wait());
        peer.join().unwrap();
        fault.join().unwrap();
    });
}

/// Two threads wait for two signals: each consumes one, and both see the writes that preceded it.
#[test]
fn loom_two_waits_at_once_use_up_a_signal_each() {
    bounded(3, || {
        let words = sync::Arc::new(SlotWords::default());
        let data = sync::Arc::new(Data::default());
        let (other, seen) = (words.clone(), data.clone());
        let waiter = thread::spawn(move || {
            assert!(other.wait());
            assert_eq!(seen.read(), 7);
        });
        data.write(7);
        words.signal();
        words.signal();
        assert!(words.wait());
        waiter.join().unwrap();
        assert_eq!(words.awaited.load(Ordering::Relaxed), 2);
        assert_eq!(words.poll(), Some(false));
    });
}

/// A poll concurrent with a wait consumes no signal twice.
#[test]
fn loom_concurrent_poll_and_wait_consume_no_count_twice() {
    bounded(2, || {
        let words = sync::Arc::new(SlotWords::default());
        let data = sync::Arc::new(Data::default());
        let (poller, sender) = (words.clone(), words.clone());
        let (seen, sent) = (data.clone(), data.clone());
        let polls = thread::spawn(move || {
            let found = poller.poll() == Some(true);
            if found {
                assert_eq!(seen.read(), 7);
            }
            found
        });
        let peer = thread::spawn(move || {
            sent.write(7);
            sender.signal();
        });
        let found = polls.join().unwrap();
        peer.join().unwrap();
        assert_eq!(words.poll(), Some(!found));
        assert_eq!(words.poll(), Some(false));
        words.signal();
        assert!(words.wait());
    });
}
