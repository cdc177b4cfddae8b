//! Connections to the store that are cut while the processes at both ends run on.

use crate::support::{Relay, Stopwatch, free_address, join_all, soon, within};
use std::io::Write;
use std::sync::Arc;
use std::thread;
use std::time::Duration;
use warplink::bootstrap::{Bootstrap, JoinConfig, Rendezvous};
use warplink::{ErrorKind, Rank};

const WORLD: usize = 8;

/// How soon everybody concerned must know.
const SOON: Duration = Duration::from_secs(5);

/// Ranks in this process, all but rank 0 behind relays.
fn members() -> (Vec<Arc<Bootstrap>>, Vec<Relay>) {
    let (store, _held) = free_address();
    let relays: Vec<Relay> = (1..WORLD)
        .map(|_| Relay::start(store, |bytes, store| store.write_all(bytes)))
        .collect();
    let addresses = [store]
        .into_iter()
        .chain(relays.iter().map(|relay| relay.address));
    let configs = addresses.enumerate().map(|(rank, address)| {
        let mut config = JoinConfig::new(Rendezvous::Address(address), rank, WORLD);
        config.timeout = Duration::from_secs(20);
        config
    });
    let joined = join_all(configs.collect());
    (joined.into_iter().map(Result::unwrap).collect(), relays)
}

/// Waits until `member` knows of losses.
fn losses(member: &Bootstrap, since: Stopwatch) -> Vec<Rank> {
    while member.health().lost().is_empty() {
        assert!(since.elapsed() < SOON, "rank {} of no loss", member.rank());
        thread::sleep(Duration::from_millis(1));
    }
    member.health().lost()
}

/// All members of a group that are left meet in it, and leave.
fn go_on(members: Vec<Arc<Bootstrap>>, left: &[Rank]) {
    let ending: Vec<_> = members
        .into_iter()
        .map(|member| {
            let left = left.to_vec();
            thread::spawn(move || {
                member.group(&left).unwrap().barrier(soon()).unwrap();
                member.close(soon()).unwrap();
            })
        })
        .collect();
    ending.into_iter().for_each(|end| end.join().unwrap());
}

/// Rank 0, which serves the store, finds its connections closed one after another. It cannot tell that from
/// the deaths of the others; but it is the one that is lost, and all others go on together.
#[test]
fn a_rank_0_that_is_cut_off_takes_nobody_with_it() {
    // The last comes later than the first is told to all where each loss is told at once.
    for gap in [0, 5, 40] {
        within(60, move || {
            let (mut all, relays) = members();
            let since = Stopwatch::start();
            for relay in &relays {
                relay.cut();
                thread::sleep(Duration::from_millis(gap));
            }
            let rank_0 = all.remove(0);
            for member in &all {
                assert_eq!(losses(member, since), [0], "rank {}", member.rank());
            }
            let left: Vec<Rank> = (1..WORLD).collect();
            go_on(all, &left);
            assert!(since.elapsed() < SOON, "{:?}", since.elapsed());
            let error = rank_0.barrier(soon()).unwrap_err();
            assert!(
                matches!(error.kind(), ErrorKind::PeerLost | ErrorKind::GivenUp),
                "{error}"
            );
            assert!(since.elapsed() < SOON, "{:?}", since.elapsed());
        });
    }
}

/// One whose connection alone is cut is lost, and told so by those that still reach the store.
#[test]
fn a_rank_that_is_cut_off_alone_is_given_up() {
    within(60, || {
        let (mut all, relays) = members();
        let since = Stopwatch::start();
        relays.last().unwrap().cut();
        let alone = all.pop().unwrap();
        for member in &all {
            assert_eq!(losses(member, since), [WORLD - 1]);
        }
        let left: Vec<Rank> = (0..WORLD - 1).collect();
        go_on(all, &left);
        let error = alone.barrier(soon()).unwrap_err();
        assert!(
            matches!(error.kind(), ErrorKind::PeerLost | ErrorKind::GivenUp),
            "{error}"
        );
        assert!(since.elapsed() < SOON, "{:?}", since.elapsed());
    });
}
