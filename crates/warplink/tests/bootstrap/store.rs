//! The store and the collectives of bytes, among ranks that are threads.

use crate::support::{Stopwatch, close_all, job, members, soon, within};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;
use warplink::bootstrap::Wait;
use warplink::{Deadline, ErrorKind};

fn brief() -> Deadline {
    Deadline::after(Duration::from_millis(50))
}

#[test]
fn every_operation() {
    within(30, || {
        let all = members(2);
        let (store, other) = (all[0].store(), all[1].store());
        let now = Wait::any(Deadline::after(Duration::ZERO));

        store.set("a", b"1").unwrap();
        assert_eq!(other.get("a", &now).unwrap(), b"1");
        store.set("a", b"2").unwrap();
        assert_eq!(other.take("a", &now).unwrap(), b"2");
        assert!(!other.check(&["a"]).unwrap());
        assert_eq!(other.get("a", &now).unwrap_err().kind(), ErrorKind::Timeout);

        assert_eq!(store.add("n", 3).unwrap(), 3);
        assert_eq!(other.add("n", -5).unwrap(), -2);
        assert_eq!(store.get("n", &now).unwrap(), (-2i64).to_le_bytes());
        assert_eq!(
            other.add("n", i64::MIN).unwrap_err().kind(),
            ErrorKind::InvalidArgument
        );

        assert_eq!(
            store.compare_and_set("c", Some(b"x"), b"y").unwrap(),
            Err(None)
        );
        assert_eq!(store.compare_and_set("c", None, b"x").unwrap(), Ok(()));
        assert_eq!(
            other.compare_and_set("c", None, b"y").unwrap(),
            Err(Some(b"x".to_vec()))
        );
        assert_eq!(
            other.compare_and_set("c", Some(b"x"), b"y").unwrap(),
            Ok(())
        );

        assert!(store.delete("c").unwrap());
        assert!(!other.delete("c").unwrap());

        let keys: Vec<String> = (0..100).map(|i| format!("m/{i}")).collect();
        let values: Vec<Vec<u8>> = (0..100u8).map(|i| vec![i; i.into()]).collect();
        store
            .multi_set(&keys.iter().cloned().zip(values.clone()).collect::<Vec<_>>())
            .unwrap();
        assert!(other.check(&keys).unwrap());
        other.wait(&keys, &now).unwrap();
        assert_eq!(other.multi_get(&keys, &now).unwrap(), values);
        assert_eq!(other.multi_take(&keys, &now).unwrap(), values);
        assert!(!store.check(&keys[..1]).unwrap());
        assert!(store.multi_get(&[], &now).unwrap().is_empty());

        let large = vec![7; 20 << 20];
        store.set("large", &large).unwrap();
        assert_eq!(other.take("large", &Wait::any(soon())).unwrap(), large);
        close_all(all);
    });
}

#[test]
fn what_exceeds_the_limits_is_refused_and_harms_nothing() {
    within(30, || {
        let all = members(2);
        let store = all[1].store();
        let any = Wait::any(soon());
        for error in [
            store.set("", b"").unwrap_err(),
            store.set("k".repeat(2000), b"").unwrap_err(),
            store.set("k", vec![0; 65 << 20]).unwrap_err(),
            store.check(&vec!["k"; 70_000]).unwrap_err(),
            store
                .multi_take(&["k".into(), "k".into()], &any)
                .unwrap_err(),
            store.get("k", &Wait::on([2], soon())).unwrap_err(),
            all[1].group(&[0, 2]).unwrap_err(),
            all[1].group(&[1, 1]).unwrap_err(),
            all[1].group(&[0]).unwrap_err(),
        ] {
            assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
        }
        store.set("k", b"v").unwrap();
        assert_eq!(all[0].store().get("k", &any).unwrap(), b"v");
        close_all(all);
    });
}

#[test]
fn a_wait_ends_when_the_key_is_set_and_holds_up_nobody() {
    within(30, || {
        let all = members(2);
        let (store, started) = (all[1].store().clone(), mpsc::channel());
        let waiting: Vec<_> = (0..8)
            .map(|i| {
                let (store, started) = (store.clone(), started.0.clone());
                thread::spawn(move || {
                    started.send(()).unwrap();
                    store
                        .take(&format!("late/{i}"), &Wait::on([0], soon()))
                        .unwrap()
                })
            })
            .collect();
        (0..8).for_each(|_| started.1.recv().unwrap());
        thread::sleep(Duration::from_millis(20));
        store.set("other", b"x").unwrap();
        for i in 0..8u8 {
            all[0].store().set(format!("late/{i}"), [i]).unwrap();
        }
        for (i, wait) in (0..8u8).zip(waiting) {
            assert_eq!(wait.join().unwrap(), [i]);
        }
        close_all(all);
    });
}

#[test]
fn a_wait_ends_at_its_deadline_and_names_operation_and_key() {
    within(30, || {
        let all = members(2);
        let begun = Stopwatch::start();
        let error = all[1]
            .store()
            .take("never", &Wait::on([0], brief()))
            .unwrap_err();
        assert!(begun.elapsed() < Duration::from_secs(1));
        assert_eq!(error.kind(), ErrorKind::Timeout);
        let text = error.to_string();
        assert!(
            text.contains("take") && text.contains("never") && text.contains("50ms"),
            "{text}"
        );
        // The wait that gave up takes nothing any more.
        all[0].store().set("never", b"v").unwrap();
        assert_eq!(
            all[0].store().get("never", &Wait::any(soon())).unwrap(),
            b"v"
        );

        let error = all[1].barrier(brief()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout);
        // It came, though it did not stay; so the barrier is open to the other.
        all[0].barrier(soon()).unwrap();
        close_all(all);
    });
}

#[test]
fn a_rank_that_leaves_in_order_is_not_lost() {
    within(30, || {
        let mut all = members(3);
        let waiting = {
            let store = all[0].store().clone();
            thread::spawn(move || store.get("k", &Wait::on([2], soon())).unwrap_err())
        };
        let any = {
            let store = all[0].store().clone();
            thread::spawn(move || store.get("k2", &Wait::any(soon())))
        };
        let barrier = {
            let group = all[1].group(&[1, 2]).unwrap();
            thread::spawn(move || group.barrier(soon()).unwrap_err())
        };
        all[2].store().set("there", b"v").unwrap();
        thread::sleep(Duration::from_millis(50));
        let last = all.pop().unwrap();
        last.close(soon()).unwrap();
        last.close(soon()).unwrap();
        for error in [waiting.join().unwrap(), barrier.join().unwrap()] {
            assert_eq!(
                (error.kind(), error.peer()),
                (ErrorKind::PeerLeft, Some(2)),
                "{error}"
            );
        }
        // What it set stays; the others can still set what somebody waits for.
        assert_eq!(
            all[0].store().get("there", &Wait::on([2], soon())).unwrap(),
            b"v"
        );
        all[1].store().set("k2", b"v").unwrap();
        assert_eq!(any.join().unwrap().unwrap(), b"v");
        all[0].barrier(brief()).unwrap_err();
        let health = all[0].health();
        assert_eq!((health.lost(), health.left()), (vec![], vec![2]));
        assert_eq!(
            health.check(&[1, 2]).unwrap_err().kind(),
            ErrorKind::PeerLeft
        );
        health.check(&[1]).unwrap();
        let error = last.store().set("k", b"").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Closed);
        close_all(all);
    });
}

#[test]
fn rank_0_serves_until_the_others_have_left() {
    within(30, || {
        let all = members(2);
        let zero = all[0].clone();
        let closing = thread::spawn(move || zero.close(soon()));
        while all[1].health().left().is_empty() {
            thread::sleep(Duration::from_millis(1));
        }
        all[1].store().set("k", b"v").unwrap();
        assert!(!closing.is_finished());
        all[1].close(soon()).unwrap();
        closing.join().unwrap().unwrap();

        let all = members(2);
        let error = all[0].close(brief()).unwrap_err();
        assert_eq!(
            (error.kind(), error.peer()),
            (ErrorKind::Timeout, Some(1)),
            "{error}"
        );
        let error = all[1].barrier(soon()).unwrap_err();
        assert_eq!(
            (error.kind(), error.peer()),
            (ErrorKind::PeerLeft, Some(0)),
            "{error}"
        );
        all[1].close(soon()).unwrap();
    });
}

#[test]
fn an_abort_ends_a_close_that_waits_for_the_others() {
    within(30, || {
        let all = members(2);
        let zero = all[0].clone();
        let closing = thread::spawn(move || zero.close(soon()));
        while all[1].health().left().is_empty() {
            thread::sleep(Duration::from_millis(1));
        }
        let watch = Stopwatch::start();
        assert!(all[0].is_closed());
        all[0].abort("for the test");
        let error = closing.join().unwrap().unwrap_err();
        assert!(watch.elapsed() < Duration::from_secs(3), "{error}");
        assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
        // It had left before.
        let error = all[1].barrier(soon()).unwrap_err();
        assert_eq!((error.kind(), error.peer()), (ErrorKind::PeerLeft, Some(0)));
        all[1].close(soon()).unwrap();
    });
}

#[test]
fn gathers_over_subsets_at_the_same_time() {
    within(60, || {
        job(6, |member| {
            let rank = member.rank();
            let halves = [[0, 1, 2], [5, 4, 3]];
            let half = Arc::new(member.group(&halves[rank / 3]).unwrap());
            let parity: Vec<_> = (0..6).filter(|other| other % 2 == rank % 2).collect();
            let parity = member.group(&parity).unwrap();
            // Threads of one rank, each with a group of its own.
            let threads: Vec<_> = (0..2u8)
                .map(|_| member.group(&(0..6).collect::<Vec<_>>()).unwrap())
                .enumerate()
                .map(|(which, group)| {
                    thread::spawn(move || {
                        for round in 0..50u8 {
                            let all = group
                                .all_gather(&[rank as u8, which as u8, round], soon())
                                .unwrap();
                            for (from, got) in all.iter().enumerate() {
                                assert_eq!(got[..], [from as u8, which as u8, round]);
                            }
                        }
                    })
                })
                .collect();
            for round in 0..50u8 {
                let got = half.all_gather(&vec![round; rank], soon()).unwrap();
                let expected: Vec<_> = half
                    .members()
                    .iter()
                    .map(|&from| vec![round; from])
                    .collect();
                assert_eq!(got, expected);
                parity.barrier(soon()).unwrap();
                assert_eq!(
                    member.all_gather(&[round], soon()).unwrap(),
                    vec![vec![round]; 6]
                );
            }
            threads
                .into_iter()
                .for_each(|thread| thread.join().unwrap());
        });
    });
}

#[test]
fn a_barrier_holds_everybody_until_the_last() {
    within(30, || {
        job(4, |member| {
            for round in 0..50 {
                let count = member.store().add(&format!("came/{round}"), 1).unwrap();
                assert!(count <= 4);
                member.barrier(soon()).unwrap();
                assert_eq!(member.store().add(&format!("came/{round}"), 0).unwrap(), 4);
            }
        });
    });
}

#[test]
fn mismatched_collectives_are_an_error_on_all() {
    within(30, || {
        let kinds = job(2, |member| match member.rank() {
            0 => member.barrier(soon()).unwrap_err().kind(),
            _ => member.all_gather(b"v", soon()).unwrap_err().kind(),
        });
        assert_eq!(kinds, [ErrorKind::Mismatch; 2]);
    });
}

#[test]
fn a_job_has_a_key_of_its_own() {
    within(30, || {
        let keys = || job(2, |member| *member.secret().as_bytes());
        let (first, second) = (keys(), keys());
        assert_eq!(first[0], first[1]);
        assert_ne!(first[0], second[0]);
    });
}
