//! Words of shared memory: atomic loads, stores and waits.

use super::mapping::{Mapping, has_atomics};
use super::memory::Allocation;
use crate::device::{Backing, DeviceSlice, Word};
use crate::error::{Error, Result};
use crate::sync::lock;
use rustix::thread::futex;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

/// A word that a stream waits for. It stays mapped, but the wait does not hold its allocation: once no other
/// holder is left, nobody can set the word.
#[derive(Clone, Debug)]
pub(super) struct AwaitedWord {
    address: u64,
    allocation: Weak<dyn Backing>,
    // Keeps the address valid.
    _held: Held,
}

#[derive(Clone, Debug)]
enum Held {
    Mapping { _held: Arc<Mapping> },
    Backing { _held: Arc<dyn Backing> },
}

/// An aligned word that stays mapped as long as the value.
pub(super) trait MappedWord {
    fn address(&self) -> u64;
}

impl MappedWord for Word {
    fn address(&self) -> u64 {
        self.address()
    }
}

impl MappedWord for AwaitedWord {
    fn address(&self) -> u64 {
        self.address
    }
}

impl AwaitedWord {
    pub(super) fn new(word: &Word) -> Self {
        let backing = word.as_slice().backing();
        let held = match backing.as_any().downcast_ref::<Allocation>() {
            Some(Allocation { mapping, .. }) => Held::Mapping {
                _held: mapping.clone(),
            },
            None => Held::Backing {
                _held: backing.clone(),
            },
        };
        Self {
            address: word.address(),
            allocation: Arc::downgrade(backing),
            _held: held,
        }
    }

    /// Whether any holder is left that could set it.
    pub(super) fn can_be_set(&self) -> bool {
        self.allocation.strong_count() > 0
    }
}

/// Stores a word (release) and wakes its waiters.
pub(super) fn store(word: &Word, value: u64) {
    atomic(word).store(value, Ordering::Release);
    wake(word);
}

/// Wakes the waiters of a word.
pub(super) fn wake(word: &Word) {
    if let Err(errno) = futex::wake(low_half(word), futex::Flags::empty(), i32::MAX as u32) {
        tracing::error!(address = word.address(), %errno, "waking waiters failed");
    }
}

/// As [`store`], for words without sleeping waiters.
pub(super) fn set(word: &Word, value: u64) {
    // Release: a reader of the value sees all earlier writes, as with `store`.
    atomic(word).store(value, Ordering::Release);
}

/// Increments a word (release), wakes its waiters and returns the previous value.
pub(super) fn increment(word: &Word) -> u64 {
    let before = count_up(word);
    wake(word);
    before
}

/// As [`increment`], for words without sleeping waiters.
pub(super) fn count_up(word: &Word) -> u64 {
    // AcqRel: releases this thread's writes, and joins the release sequence of other increments.
    atomic(word).fetch_add(1, Ordering::AcqRel)
}

/// As [`increment`], for a word that may be a peer's.
///
/// # Errors
/// [`ErrorKind::Unsupported`] if this device has no atomic operations on it.
pub(super) fn increment_at_peer(word: &Word) -> Result<u64> {
    if has_atomics(word.address()) {
        return Ok(increment(word));
    }
    Err(
        Error::unsupported("the device has no atomic operations on the peer's memory")
            .with_operation("count up a peer's word"),
    )
}

/// Increments a word that only threads of this process modify, after all earlier writes of this thread, by a
/// plain store, which needs no device atomics. For words without sleeping waiters.
pub(super) fn count_up_alone(word: &Word) {
    // Striped locks: concurrent increments of one rank's lanes are rare.
    static TURNS: [Mutex<()>; 64] = [const { Mutex::new(()) }; 64];
    let _turn = lock(&TURNS[(word.address() / 64 % 64) as usize]);
    set(word, load(word) + 1);
}

/// Consumes one count of `awaited` if `word` is ahead of it; returns whether it did.
pub(super) fn take(word: &Word, awaited: &Word) -> bool {
    let mut taken = load(awaited);
    while load(word).wrapping_sub(taken) as i64 > 0 {
        // Acquire on success and failure: the caller reads data that the signal published.
        let (order, failed) = (Ordering::AcqRel, Ordering::Acquire);
        match atomic(awaited).compare_exchange(taken, taken + 1, order, failed) {
            Ok(_) => return true,
            Err(found) => taken = found,
        }
    }
    false
}

/// Loads a word (acquire).
pub(super) fn load(word: &impl MappedWord) -> u64 {
    atomic(word).load(Ordering::Acquire)
}

/// The complete words of a slice, which must begin at a multiple of 8.
pub(super) fn all_of(slice: &DeviceSlice) -> Result<&[AtomicU64]> {
    let first = slice.word(0)?;
    // SAFETY: they are mapped and aligned for as long as the slice is borrowed, and every process accesses them
    // atomically only while anybody waits for them.
    Ok(unsafe {
        std::slice::from_raw_parts(first.address() as *const AtomicU64, slice.bytes() / 8)
    })
}

/// Sleeps until the word differs from `seen`, is written, or `limit` has passed.
pub(super) fn sleep_while(word: &impl MappedWord, seen: u64, limit: Duration) {
    let limit = futex::Timespec {
        tv_sec: limit.as_secs() as i64,
        tv_nsec: i64::from(limit.subsec_nanos()),
    };
    // The kernel compares the low half only; a change of just the high half is noticed after the limit.
    // Whatever the return value, the caller checks the word again.
    let _ = futex::wait(
        low_half(word),
        futex::Flags::empty(),
        seen as u32,
        Some(&limit),
    );
}

pub(super) fn atomic(word: &impl MappedWord) -> &AtomicU64 {
    // SAFETY: a word is 8 mapped bytes, aligned, for as long as it is borrowed here, and every
    // process accesses words atomically only.
    unsafe { AtomicU64::from_ptr(word.address() as *mut u64) }
}

fn low_half(word: &impl MappedWord) -> &AtomicU32 {
    let low = word.address() + if cfg!(target_endian = "big") { 4 } else { 0 };
    // SAFETY: as for `atomic`. Only the kernel reads through this address, as a futex.
    unsafe { AtomicU32::from_ptr(low as *mut u32) }
}
