//! Loom models of the mapping cache.

use super::cache::{CacheLimits, Mapping, MappingCache};
use loom::sync::Arc;
use loom::sync::atomic::{AtomicUsize, Ordering};
use loom::thread;

/// Counts concurrent opens and handles, and returns the count when closed.
struct Value {
    generation: u64,
    handles: AtomicUsize,
    back: Arc<AtomicUsize>,
}

impl Mapping for Value {
    fn count_handle(&self) {
        self.handles.fetch_add(1, Ordering::Relaxed);
    }

    fn bytes(&self) -> u64 {
        1
    }
}

impl Drop for Value {
    fn drop(&mut self) {
        self.back
            .fetch_add(self.handles.load(Ordering::Relaxed), Ordering::Relaxed);
    }
}

fn cache() -> Arc<MappingCache<u32, Value>> {
    Arc::new(MappingCache::new(CacheLimits {
        idle_count: 1,
        idle_bytes: 1,
    }))
}

/// Invariants 1, 2 and 5: two threads open while the owner revokes.
#[test]
fn loom_open_and_revoke() {
    // All interleavings of three threads take many minutes; bugs that need more preemptions are rare.
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let cache = cache();
        let opening = Arc::new(AtomicUsize::new(0));
        let back = Arc::new(AtomicUsize::new(0));
        let opener = |generation: u64| {
            let (cache, opening, back) = (cache.clone(), opening.clone(), back.clone());
            move || {
                let opened = cache.open(1, generation, || {
                    assert_eq!(
                        opening.fetch_add(1, Ordering::SeqCst),
                        0,
                        "two opens of one key"
                    );
                    opening.fetch_sub(1, Ordering::SeqCst);
                    Ok(Value {
                        generation,
                        handles: AtomicUsize::new(0),
                        back: back.clone(),
                    })
                });
                assert_eq!(opened.unwrap().generation, generation, "a stale mapping");
            }
        };
        let first = thread::spawn(opener(1));
        let second = thread::spawn(opener(2));
        cache.revoke(1, 1);
        first.join().unwrap();
        second.join().unwrap();
        cache.release_idle();
        assert_eq!(cache.len(), 0);
        assert_eq!(
            back.load(Ordering::SeqCst),
            2,
            "a handle was not given back"
        );
    });
}

/// Invariant 3: a revocation takes effect however it interleaves with opening and use.
#[test]
fn loom_a_revocation_is_never_forgotten() {
    loom::model(|| {
        let cache = cache();
        let back = Arc::new(AtomicUsize::new(0));
        let user = {
            let (cache, back) = (cache.clone(), back.clone());
            thread::spawn(move || {
                let value = || {
                    Ok(Value {
                        generation: 1,
                        handles: AtomicUsize::new(0),
                        back,
                    })
                };
                drop(cache.open(1, 1, value).unwrap());
            })
        };
        cache.revoke(1, 1);
        user.join().unwrap();
        assert_eq!(cache.len(), 0, "a revocation was forgotten");
        assert_eq!(back.load(Ordering::SeqCst), 1);
    });
}
