//! Tests of the mapping cache.

use super::cache::{CacheLimits, Mapping, MappingCache};
use crate::error::{Error, ErrorKind, Result};
use std::sync::atomic::{AtomicUsize, Ordering};

struct Value(u64, AtomicUsize);

impl Mapping for Value {
    fn count_handle(&self) {
        self.1.fetch_add(1, Ordering::Relaxed);
    }

    fn bytes(&self) -> u64 {
        10
    }
}

fn value(number: u64) -> Result<Value> {
    Ok(Value(number, AtomicUsize::new(0)))
}

fn cache(idle_count: usize, idle_bytes: u64) -> MappingCache<u64, Value> {
    MappingCache::new(CacheLimits {
        idle_count,
        idle_bytes,
    })
}

#[test]
fn a_hit_does_not_open_and_is_counted() {
    let cache = cache(4, 100);
    let first = cache.open(1, 10, || value(100)).unwrap();
    let again = cache.open(1, 10, || panic!("opened twice")).unwrap();
    assert_eq!((again.0, again.1.load(Ordering::Relaxed)), (100, 2));
    drop((first, again));
    assert_eq!(cache.len(), 1);
}

#[test]
fn another_generation_is_opened_anew() {
    let cache = cache(4, 100);
    let old = cache.open(1, 10, || value(100)).unwrap();
    let new = cache.open(1, 11, || value(101)).unwrap();
    assert_eq!((old.0, new.0), (100, 101));
    // Releasing the old mapping does not release the new one.
    drop(old);
    cache.release_idle();
    assert_eq!(
        cache.open(1, 11, || panic!("closed in use")).unwrap().0,
        101
    );
}

#[test]
fn a_failed_open_leaves_nothing() {
    let cache = cache(4, 100);
    let error = cache
        .open(1, 10, || Err(Error::new(ErrorKind::Driver, "no")))
        .err()
        .unwrap();
    assert_eq!(error.kind(), ErrorKind::Driver);
    assert_eq!(cache.open(1, 10, || value(5)).unwrap().0, 5);
}

#[test]
fn limits_evict_least_recently_used_and_nothing_in_use() {
    for cache in [cache(2, 1000), cache(100, 25)] {
        let kept = cache.open(0, 1, || value(0)).unwrap();
        for key in 1..=4 {
            drop(cache.open(key, 1, || value(key)).unwrap());
        }
        assert_eq!(cache.len(), 3);
        drop(
            cache
                .open(3, 1, || panic!("a young one was evicted"))
                .unwrap(),
        );
        drop(
            cache
                .open(0, 1, || panic!("one in use was evicted"))
                .unwrap(),
        );
        drop(kept);
        cache.release_idle();
        assert_eq!(cache.len(), 0);
    }
}

#[test]
fn revoked_in_use_is_closed_after_last_use() {
    let cache = cache(4, 100);
    let users = [(); 2].map(|()| cache.open(1, 10, || value(0)).unwrap());
    cache.revoke(1, 10);
    let [first, second] = users;
    drop(first);
    assert_eq!(cache.len(), 1, "closed in use");
    drop(second);
    assert_eq!(cache.len(), 0, "kept after it was revoked");
}

#[test]
fn revoked_before_open_is_closed_after_use() {
    let cache = cache(4, 100);
    cache.revoke(1, 10);
    let other = cache.open(1, 11, || value(0)).unwrap();
    drop(other);
    assert_eq!(cache.len(), 1, "another generation was revoked");
    drop(cache.open(1, 10, || value(0)).unwrap());
    assert_eq!(cache.len(), 0, "kept after it was revoked");
    // Revoked while being opened.
    drop(
        cache
            .open(1, 12, || {
                cache.revoke(1, 12);
                value(0)
            })
            .unwrap(),
    );
    assert_eq!(cache.len(), 0, "kept after it was revoked");
}

#[test]
fn idle_mapping_is_closed() {
    let cache = cache(4, 100);
    let kept = cache.open(0, 1, || value(0)).unwrap();
    drop(cache.open(1, 1, || value(1)).unwrap());
    cache.age();
    drop(cache.open(2, 1, || value(2)).unwrap());
    cache.age();
    assert_eq!(cache.len(), 2);
    cache.age();
    assert_eq!(cache.len(), 1);
    drop(kept);
}
