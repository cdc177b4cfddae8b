//! Tests of the store's state machine, without a network.

use super::*;
use crate::bootstrap::message::{self, GatherId, Purpose, decode};

fn full(world: u32) -> StoreTable {
    let mut table = StoreTable::new(world as usize, 1 << 10);
    for rank in 0..world {
        table.join(rank, None).unwrap();
        table.announce();
    }
    table.take_outgoing();
    table
}

/// Handles a request and returns the replies that follow, events left out.
fn ask(table: &mut StoreTable, rank: u32, id: u64, request: Request) -> Vec<(u32, u64, Reply)> {
    table.handle(rank, id, request);
    replies(table)
}

fn replies(table: &mut StoreTable) -> Vec<(u32, u64, Reply)> {
    let sent = table
        .take_outgoing()
        .into_iter()
        .filter(|frame| frame.id != 0);
    sent.map(|frame| {
        (
            frame.to,
            frame.id,
            decode::<Answer>(&frame.body).unwrap().reply,
        )
    })
    .collect()
}

fn set(key: &str, value: &[u8]) -> Request {
    Request::Set {
        pairs: vec![(key.into(), value.into())],
    }
}

fn wait(keys: &[&str], on_ready: message::OnReady, on: &[u32]) -> Request {
    let keys = keys.iter().map(|&key| key.to_owned()).collect();
    Request::Wait {
        keys,
        on_ready,
        on: on.to_vec(),
    }
}

fn values(values: &[&[u8]]) -> Reply {
    Reply::Values(values.iter().map(|&value| value.into()).collect())
}

fn refused(replies: &[(u32, u64, Reply)], to: u32, id: u64) -> Refusal {
    let reply = replies.iter().find(|reply| (reply.0, reply.1) == (to, id));
    match reply {
        Some((_, _, Reply::Refused(refusal))) => refusal.clone(),
        other => panic!("{other:?} is no refusal"),
    }
}

fn gather(members: &[u32], sequence: u64, purpose: Purpose, value: &[u8]) -> Request {
    let id = GatherId {
        members: members.to_vec(),
        instance: 0,
        sequence,
    };
    Request::Gather {
        id,
        purpose,
        value: value.into(),
    }
}

use message::OnReady::{Nothing, Read, Take};

#[test]
fn one_value_goes_to_the_taker_that_waited_longest() {
    let mut table = full(3);
    assert!(ask(&mut table, 0, 1, wait(&["k"], Take, &[])).is_empty());
    assert!(ask(&mut table, 1, 1, wait(&["k"], Take, &[])).is_empty());
    let sent = ask(&mut table, 2, 1, set("k", b"a"));
    assert_eq!(sent, [(0, 1, values(&[b"a"])), (2, 1, Reply::Done)]);
    let sent = ask(&mut table, 2, 2, set("k", b"b"));
    assert_eq!(sent, [(1, 1, values(&[b"b"])), (2, 2, Reply::Done)]);
    let sent = ask(
        &mut table,
        2,
        3,
        Request::Check {
            keys: vec!["k".into()],
        },
    );
    assert_eq!(sent, [(2, 3, Reply::Flag(false))]);
}

#[test]
fn a_wait_for_several_keys_needs_all_of_them_at_once() {
    let mut table = full(2);
    assert!(ask(&mut table, 0, 1, wait(&["a", "b", "c"], Take, &[])).is_empty());
    ask(&mut table, 1, 1, set("a", b"1"));
    ask(&mut table, 1, 2, set("b", b"2"));
    ask(&mut table, 1, 3, Request::Delete { key: "a".into() });
    assert_eq!(ask(&mut table, 1, 4, set("c", b"3")).len(), 1);
    let sent = ask(&mut table, 1, 5, set("a", b"4"));
    assert_eq!(sent[0], (0, 1, values(&[b"4", b"2", b"3"])));
    assert!(table.values.is_empty());
}

#[test]
fn a_wait_ends_with_those_it_depends_on() {
    let mut table = full(4);
    ask(&mut table, 0, 1, wait(&["k"], Read, &[1]));
    ask(&mut table, 0, 2, wait(&["k"], Nothing, &[2]));
    ask(&mut table, 0, 3, wait(&["k"], Read, &[]));
    table.lose(1, "gone");
    let sent = replies(&mut table);
    let refusal = refused(&sent, 0, 1);
    assert_eq!(
        (refusal.kind, refusal.peer, refusal.key),
        (RefusalKind::PeerLost, Some(1), Some("k".into()))
    );
    assert_eq!(refused(&sent, 0, 3).peer, Some(1));
    assert_eq!(sent.len(), 2);
    let sent = ask(&mut table, 2, 1, Request::Leave);
    assert_eq!(refused(&sent, 0, 2).kind, RefusalKind::PeerLeft);
    // Existing keys can still be read; waits that cannot succeed are refused at once.
    ask(&mut table, 3, 1, set("k", b"v"));
    assert_eq!(
        ask(&mut table, 0, 4, wait(&["k"], Read, &[1])),
        [(0, 4, values(&[b"v"]))]
    );
    assert_eq!(
        refused(&ask(&mut table, 0, 5, wait(&["x"], Read, &[2])), 0, 5).kind,
        RefusalKind::PeerLeft
    );
}

#[test]
fn a_wait_for_anybody_outlasts_all_but_the_last_orderly_leave() {
    let mut table = full(3);
    ask(&mut table, 0, 1, wait(&["k"], Read, &[]));
    assert_eq!(ask(&mut table, 1, 1, Request::Leave).len(), 1);
    let sent = ask(&mut table, 2, 1, Request::Leave);
    assert_eq!(refused(&sent, 0, 1).kind, RefusalKind::PeerLeft);
}

#[test]
fn a_cancelled_wait_is_answered_once_and_takes_nothing() {
    let mut table = full(2);
    ask(&mut table, 0, 1, wait(&["k"], Take, &[]));
    let sent = ask(&mut table, 0, 0, Request::Cancel { id: 1 });
    assert_eq!(refused(&sent, 0, 1).kind, RefusalKind::Cancelled);
    assert!(ask(&mut table, 0, 0, Request::Cancel { id: 1 }).is_empty());
    assert_eq!(ask(&mut table, 1, 1, set("k", b"v")), [(1, 1, Reply::Done)]);
    assert!(table.values.get("k").is_some());
}

#[test]
fn counters_and_comparisons() {
    let mut table = full(1);
    let add = |amount| Request::Add {
        key: "n".into(),
        amount,
    };
    assert_eq!(ask(&mut table, 0, 1, add(5)), [(0, 1, Reply::Number(5))]);
    assert_eq!(ask(&mut table, 0, 2, add(-7)), [(0, 2, Reply::Number(-2))]);
    assert_eq!(
        refused(&ask(&mut table, 0, 3, add(i64::MIN)), 0, 3).kind,
        RefusalKind::Invalid
    );
    ask(&mut table, 0, 4, set("n", b"text"));
    assert_eq!(
        refused(&ask(&mut table, 0, 5, add(1)), 0, 5).kind,
        RefusalKind::Invalid
    );
    let swap = |expected: Option<&[u8]>, new: &[u8]| Request::CompareAndSet {
        key: "s".into(),
        expected: expected.map(Bytes::from),
        new: new.into(),
    };
    assert_eq!(
        ask(&mut table, 0, 6, swap(Some(b"a"), b"b")),
        [(0, 6, Reply::Kept(None))]
    );
    assert_eq!(
        ask(&mut table, 0, 7, swap(None, b"a")),
        [(0, 7, Reply::Done)]
    );
    let kept = Reply::Kept(Some(b"a"[..].into()));
    assert_eq!(ask(&mut table, 0, 8, swap(None, b"b")), [(0, 8, kept)]);
    assert_eq!(
        ask(&mut table, 0, 9, swap(Some(b"a"), b"b")),
        [(0, 9, Reply::Done)]
    );
}

#[test]
fn the_limit_on_memory_holds_and_is_given_back() {
    let mut table = full(1);
    assert_eq!(
        refused(&ask(&mut table, 0, 1, set("k", &[0; 1024])), 0, 1).kind,
        RefusalKind::OutOfMemory
    );
    for id in 2..100 {
        assert_eq!(
            ask(&mut table, 0, id, set("k", &[0; 900])),
            [(0, id, Reply::Done)]
        );
    }
    ask(&mut table, 0, 100, Request::Delete { key: "k".into() });
    // All pairs of a request are set, or none; of those with one key the last counts.
    ask(&mut table, 0, 101, wait(&["a"], Take, &[]));
    for (sizes, fits) in [([500, 500, 500], false), ([500, 0, 300], true)] {
        let pairs = ["a", "b", "a"].into_iter().zip(sizes);
        let pairs = pairs.map(|(key, size)| (key.into(), vec![0; size][..].into()));
        let request = Request::Set {
            pairs: pairs.collect(),
        };
        let replies = ask(&mut table, 0, 102, request);
        assert_eq!(replies.iter().any(|reply| reply.1 == 101), fits);
        if fits {
            assert!(replies.contains(&(0, 102, Reply::Done)));
        } else {
            assert!(table.values.is_empty());
        }
    }
}

#[test]
fn a_gather_answers_all_once_the_last_has_come() {
    let mut table = full(4);
    let call = |sequence, value| gather(&[0, 2, 3], sequence, Purpose::AllGather, value);
    assert!(ask(&mut table, 2, 1, call(0, b"c")).is_empty());
    assert!(ask(&mut table, 2, 2, call(1, b"C")).is_empty());
    assert!(ask(&mut table, 0, 1, call(0, b"a")).is_empty());
    let sent = ask(&mut table, 3, 1, call(0, b"dd"));
    let all = values(&[b"a", b"c", b"dd"]);
    assert_eq!(
        sent,
        [(0, 1, all.clone()), (2, 1, all.clone()), (3, 1, all)]
    );
    assert_eq!(
        refused(&ask(&mut table, 1, 1, call(1, b"?")), 1, 1).kind,
        RefusalKind::Invalid
    );
    // One that gave up still counts.
    ask(&mut table, 2, 0, Request::Cancel { id: 2 });
    ask(&mut table, 0, 2, call(1, b"A"));
    let sent = ask(&mut table, 3, 2, call(1, b"D"));
    assert_eq!(sent.iter().map(|reply| reply.0).collect::<Vec<_>>(), [0, 3]);
}

#[test]
fn the_rank_that_was_lost_first_is_named() {
    let mut table = full(4);
    table.lose(2, "the cause");
    table.lose(0, "left for that");
    let sent = ask(&mut table, 3, 1, wait(&["k"], Read, &[0, 1, 2]));
    assert_eq!(refused(&sent, 3, 1).peer, Some(2));
    let sent = ask(&mut table, 3, 2, wait(&["k"], Read, &[]));
    assert_eq!(refused(&sent, 3, 2).peer, Some(2));
    let barrier = gather(&[0, 1, 2, 3], 0, Purpose::Barrier, &[]);
    assert_eq!(refused(&ask(&mut table, 3, 3, barrier), 3, 3).peer, Some(2));
    let without = gather(&[0, 3], 0, Purpose::Barrier, &[]);
    assert_eq!(refused(&ask(&mut table, 3, 4, without), 3, 4).peer, Some(0));
}

#[test]
fn losses_are_repeated_in_their_order() {
    let mut table = full(4);
    table.lose(2, "the cause");
    table.lose(0, "its effect");
    table.take_outgoing();
    table.announce();
    let sent = table.take_outgoing();
    let to_one = sent.iter().filter(|frame| frame.to == 1);
    let lost = to_one.filter_map(|frame| match decode(&frame.body).unwrap() {
        StoreEvent::Lost { rank, .. } => Some(rank),
        _ => None,
    });
    assert_eq!(lost.collect::<Vec<_>>(), [2, 0]);
}

#[test]
fn a_gather_fails_when_a_member_goes() {
    let mut table = full(4);
    let call = |members: &[u32]| gather(members, 0, Purpose::Barrier, &[]);
    ask(&mut table, 0, 1, call(&[0, 1]));
    ask(&mut table, 0, 2, call(&[0, 2]));
    ask(&mut table, 2, 1, call(&[2, 3]));
    table.lose(1, "gone");
    let sent = replies(&mut table);
    assert_eq!((refused(&sent, 0, 1).peer, sent.len()), (Some(1), 1));
    assert_eq!(
        refused(&ask(&mut table, 0, 3, call(&[0, 1])), 0, 3).kind,
        RefusalKind::PeerLost
    );
    // Rank 2 came before it left: rank 3 can pass, rank 0 cannot.
    let sent = ask(&mut table, 2, 2, Request::Leave);
    assert_eq!(refused(&sent, 0, 2).kind, RefusalKind::PeerLeft);
    assert_eq!(ask(&mut table, 3, 1, call(&[2, 3])), [(3, 1, Reply::Done)]);
}

#[test]
fn a_barrier_does_not_meet_an_all_gather() {
    let mut table = full(2);
    ask(&mut table, 0, 1, gather(&[0, 1], 0, Purpose::Barrier, &[]));
    let sent = ask(
        &mut table,
        1,
        1,
        gather(&[0, 1], 0, Purpose::AllGather, b"v"),
    );
    assert_eq!(refused(&sent, 0, 1).kind, RefusalKind::Mismatch);
    assert_eq!(refused(&sent, 1, 1).kind, RefusalKind::Mismatch);
    assert!(table.gathers.is_empty());
}

#[test]
fn a_gather_that_failed_answers_those_that_come_later() {
    let mut table = full(4);
    let call = |sequence, purpose| gather(&[0, 1, 2, 3], sequence, purpose, &[]);
    ask(&mut table, 0, 1, call(0, Purpose::Barrier));
    let sent = ask(&mut table, 1, 1, call(0, Purpose::AllGather));
    let first = refused(&sent, 0, 1);
    assert_eq!(first.kind, RefusalKind::Mismatch);
    let late = ask(&mut table, 2, 1, call(0, Purpose::Barrier));
    assert_eq!(refused(&late, 2, 1), first);
    // The next gather is not affected.
    for rank in [0, 1, 2] {
        assert!(ask(&mut table, rank, 2, call(1, Purpose::Barrier)).is_empty());
    }
    assert!(!table.gathers.is_empty());
    let late = ask(&mut table, 3, 1, call(0, Purpose::Barrier));
    assert_eq!(refused(&late, 3, 1), first);
    let sent = ask(&mut table, 3, 2, call(1, Purpose::Barrier));
    assert_eq!(sent.len(), 4);
    assert!(table.gathers.is_empty());
    // One that is lost does not come.
    ask(&mut table, 0, 3, call(2, Purpose::Barrier));
    ask(&mut table, 1, 3, call(2, Purpose::AllGather));
    ask(&mut table, 2, 3, call(2, Purpose::Barrier));
    table.lose(3, "gone");
    assert!(table.gathers.is_empty());
}

#[test]
fn a_rank_joins_once() {
    let mut table = StoreTable::new(2, 0);
    assert_eq!(table.join(2, None).unwrap_err().kind, RefusalKind::Invalid);
    table.join(1, None).unwrap();
    assert_eq!(table.missing(), [0]);
    assert_eq!(table.join(1, None).unwrap_err().kind, RefusalKind::Mismatch);
    table.lose(1, "gone");
    assert!(
        table
            .join(1, None)
            .unwrap_err()
            .message
            .contains("was lost")
    );
}

#[test]
fn arbitrary_frames_never_panic() {
    use proptest::prelude::*;
    proptest!(|(bytes: Vec<u8>)| super::super::fuzzing::store_frames(&bytes));
    // Requests that are well formed, in any order, from anybody.
    let request = (
        0u8..10,
        0u32..4,
        0u64..4,
        proptest::collection::vec(0u32..4, 0..4),
    );
    proptest!(|(script in proptest::collection::vec(request, 0..60))| {
        let mut table = full(4);
        let mut id = 0;
        for (what, rank, small, mut ranks) in script {
            id += 1;
            let key = format!("k{small}");
            let keys = [&key[..], "k0"];
            ranks.sort_unstable();
            ranks.dedup();
            table.handle(rank, id, match what {
                0 => set(&key, b"12345678"),
                1 => wait(&keys, Read, &ranks),
                2 => wait(&keys[..1], Take, &ranks),
                3 => Request::Delete { key },
                4 => Request::Add { key, amount: 1 },
                5 => gather(&ranks, small, Purpose::Barrier, &[]),
                6 => Request::Cancel { id: id.saturating_sub(small) },
                7 if small == 0 => Request::Leave,
                8 => gather(&ranks, small, Purpose::AllGather, b"v"),
                _ => Request::Check { keys: vec![key] },
            });
        }
        for rank in 0..4 {
            table.lose(rank, "the end");
        }
        // A rank that is gone leaves nothing behind.
        prop_assert!(table.waiters.is_empty() && table.gathers.is_empty());
    });
}

fn events(table: &mut StoreTable) -> Vec<(u32, message::StoreEvent)> {
    let sent = table.take_outgoing().into_iter();
    let sent = sent.filter(|frame| frame.id == 0);
    sent.map(|frame| (frame.to, decode(&frame.body).unwrap()))
        .collect()
}

#[test]
fn members_are_notified_in_time_of_keys_that_others_took() {
    let mut table = full(3);
    let mut received = Vec::new();
    for round in 0..300 {
        let key = format!("k/{round}");
        table.handle(0, 1, set(&key, b"v"));
        table.handle(1, 1, wait(&[&key], Take, &[]));
        // A member's own changes need no notice.
        table.handle(2, 1, set("own", b"v"));
        received.extend(events(&mut table));
    }
    let forgotten: usize = received
        .iter()
        .map(|(to, event)| match event {
            message::StoreEvent::Forget { keys } => {
                assert_eq!(*to, 0);
                keys.len()
            }
            _ => 0,
        })
        .sum();
    assert_eq!(forgotten, 256);
    let checkpoint =
        |event: &message::StoreEvent| matches!(event, message::StoreEvent::Checkpoint { .. });
    let last: Vec<u32> = received.iter().rev().take(3).map(|(to, _)| *to).collect();
    assert!(
        received
            .iter()
            .rev()
            .take(3)
            .all(|(_, event)| checkpoint(event))
    );
    assert_eq!(last, [2, 1, 0], "after everybody was notified");
}

#[test]
fn a_restored_table_has_the_newest_entry_of_every_key() {
    let mut table = StoreTable::restoring(vec![None; 4], 1 << 10, &[(0, "gone".into())], &[]);
    let entry = |key: &str, version, value: Option<&[u8]>| message::JournalEntry {
        key: key.into(),
        version,
        value: value.map(Into::into),
    };
    let journals = [
        vec![entry("a", 3, Some(b"old")), entry("b", 4, Some(b"b"))],
        vec![entry("a", 7, Some(b"new")), entry("b", 9, None)],
        vec![entry("c", 8, Some(b"c"))],
    ];
    for (rank, entries) in (1..).zip(journals) {
        table.resume(rank, &[], &[]).unwrap();
        // Requests are refused until every journal has arrived.
        table.handle(rank, 5, set("x", b"early"));
        let gathers = Vec::new();
        table.handle(rank, 0, Request::Restore { entries, gathers });
        let early = replies(&mut table);
        assert_eq!(refused(&early, rank, 5).kind, RefusalKind::Protocol);
        table.handle(rank, 0, Request::Restored);
        assert_eq!(table.is_restoring(), rank != 3);
    }
    let ready = |(_, event): &(u32, message::StoreEvent)| {
        matches!(event, message::StoreEvent::Ready { .. })
    };
    assert_eq!(
        events(&mut table)
            .iter()
            .filter(|event| ready(event))
            .count(),
        3
    );
    let sent = ask(&mut table, 1, 6, wait(&["a", "c"], Read, &[]));
    assert_eq!(sent, [(1, 6, values(&[b"new", b"c"]))]);
    let keys = vec!["b".to_owned()];
    let sent = ask(&mut table, 1, 7, Request::Check { keys });
    assert_eq!(sent, [(1, 7, Reply::Flag(false))]);
    // One that comes when the others have gone on was given up.
    let late = table.resume(0, &[], &[]).unwrap_err();
    assert_eq!(late.kind, RefusalKind::GivenUp);
}

#[test]
fn queries_and_answers_reach_their_receivers_only() {
    let mut table = full(3);
    let received = |table: &mut StoreTable| -> Vec<(u32, u64, StoreEvent)> {
        let sent = table.take_outgoing().into_iter();
        sent.map(|frame| (frame.to, frame.id, decode(&frame.body).unwrap()))
            .collect()
    };
    let payload = |length: usize| Bytes::from(&vec![7; length][..]);
    let ask = |to: &[u32], length| Request::Query {
        group: [5; 16],
        number: 9,
        to: to.to_vec(),
        payload: payload(length),
    };
    let say = |to, length| Request::QueryReply {
        number: 9,
        to,
        payload: payload(length),
    };
    table.handle(1, 0, ask(&[0, 2], message::MAX_QUERY));
    let query = || StoreEvent::Query {
        group: [5; 16],
        number: 9,
        by: 1,
        payload: payload(message::MAX_QUERY),
    };
    assert_eq!(received(&mut table), [(0, 0, query()), (2, 0, query())]);
    table.handle(2, 0, say(1, 3));
    let (number, by, payload) = (9, 2, payload(3));
    assert_eq!(
        received(&mut table),
        [(
            1,
            0,
            StoreEvent::QueryReply {
                number,
                by,
                payload
            }
        )]
    );
    // Refused: too long, to a rank that does not exist, or to one repeatedly. Nothing is sent.
    for refused in [
        ask(&[0], message::MAX_QUERY + 1),
        ask(&[0; 4], 1),
        ask(&[0, 3], 1),
        say(0, message::MAX_QUERY + 1),
        say(3, 1),
    ] {
        table.handle(1, 0, refused);
        assert_eq!(received(&mut table), []);
    }
}

#[test]
fn only_members_report_and_learn_the_failure_of_a_group() {
    let fail = |members: &[u32]| Request::Fail {
        group: [7; 16],
        members: members.to_vec(),
        reason: "rank 3 was lost".into(),
        is_attempt: false,
    };
    let mut table = full(4);
    table.handle(0, 1, fail(&[2, 0]));
    let sent = table.take_outgoing();
    let received = sent.iter().filter(|frame| frame.id == 0).map(|frame| {
        let event = decode::<StoreEvent>(&frame.body).unwrap();
        assert!(matches!(event, StoreEvent::Failed { group, rank: 0, .. } if group == [7; 16]));
        frame.to
    });
    assert_eq!(received.collect::<Vec<_>>(), [2, 0]);
    let answered = sent.iter().filter(|frame| frame.id != 0);
    assert_eq!(answered.map(|frame| frame.to).collect::<Vec<_>>(), [0]);
    let refusal = refused(&ask(&mut table, 1, 1, fail(&[0, 2])), 1, 1);
    assert_eq!(refusal.kind, RefusalKind::Protocol);
    let refusal = refused(&ask(&mut table, 1, 2, fail(&[1, 4])), 1, 2);
    assert_eq!(refusal.kind, RefusalKind::Invalid);
}
