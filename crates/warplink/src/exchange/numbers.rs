//! Sequence numbers of ends: among ends with the same key, the n-th matches the peer's n-th.

use crate::sync::{Mutex, guard};
use std::collections::{BTreeSet, HashMap};
use std::hash::Hash;

/// Numbers ends for each key, from 0.
#[derive(Debug)]
pub(crate) struct EndNumbers<K>(Mutex<HashMap<K, SequenceNumbers>>);

impl<K> Default for EndNumbers<K> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

#[derive(Debug, Default)]
struct SequenceNumbers {
    /// Upper bound of assigned numbers.
    next: u64,
    /// Returned numbers below it.
    free: BTreeSet<u64>,
}

impl<K: Eq + Hash> EndNumbers<K> {
    /// Assigns the smallest free number to a new end with `key`.
    pub(crate) fn next(&self, key: K) -> u64 {
        let mut all = guard(&self.0);
        let numbers = all.entry(key).or_default();
        // The smallest, since a peer that did not fail still waits under that number.
        numbers.free.pop_first().unwrap_or_else(|| {
            numbers.next += 1;
            numbers.next - 1
        })
    }

    /// Returns `number`: no peer has seen the end, so a retry must match the same peer's end. Ends numbered
    /// by other threads meanwhile keep theirs.
    pub(crate) fn reuse(&self, key: K, number: u64) {
        let mut all = guard(&self.0);
        let numbers = all.entry(key).or_default();
        numbers.free.insert(number);
        // Shrink the range again, so that numbers continue without gaps.
        while numbers.next > 0 && numbers.free.remove(&(numbers.next - 1)) {
            numbers.next -= 1;
        }
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    #[test]
    fn numbers_count_up_and_are_used_again() {
        let numbers = EndNumbers::default();
        let next = |count| (0..count).map(|_| numbers.next(0)).collect::<Vec<_>>();
        assert_eq!(next(3), [0, 1, 2]);
        assert_eq!(numbers.next(1), 0);
        // A whole batch, returned in any order.
        for number in [1, 2, 0] {
            numbers.reuse(0, number);
        }
        assert_eq!(next(3), [0, 1, 2]);
        // A number below one that another thread has matched.
        numbers.reuse(0, 1);
        assert_eq!(next(2), [1, 3]);
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::sync::Arc;
    use loom::thread;

    /// A thread whose exchange fails does not reuse another thread's number.
    #[test]
    fn loom_ends_of_an_exchange_are_numbered_apart() {
        loom::model(|| {
            let numbers = Arc::new(EndNumbers::default());
            let other = numbers.clone();
            let failing = thread::spawn(move || {
                let withdrawn = other.next(0);
                other.reuse(0, withdrawn);
                other.next(0)
            });
            let taken = [numbers.next(0), numbers.next(0)];
            let mut all = vec![taken[0], taken[1], failing.join().unwrap()];
            all.sort_unstable();
            assert_eq!(all, [0, 1, 2]);
            for number in all {
                numbers.reuse(0, number);
            }
            assert_eq!(numbers.next(0), 0);
        });
    }
}
