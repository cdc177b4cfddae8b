//! Joining: who is admitted, who is refused, and what they are told.

use crate::support::{
    Stopwatch, close_all, config, free_address, join_all, members, new_id, rank_0, soon, within,
};
use rustix::net::{AddressFamily, SocketType};
use std::net::{IpAddr, Ipv4Addr, TcpListener};
use std::thread;
use std::time::Duration;
use warplink::bootstrap::{Bootstrap, JoinConfig, Rendezvous, UniqueId};
use warplink::{Error, ErrorKind, Result};

fn error<T>(result: Result<T>) -> Error {
    match result {
        Ok(_) => panic!("it was admitted"),
        Err(error) => error,
    }
}

#[test]
fn by_plain_address_with_and_without_a_secret() {
    within(30, || {
        for secret in [None, Some("shared".to_owned())] {
            let (address, _held) = free_address();
            let configs = (0..3).map(|rank| {
                let mut config = JoinConfig::new(Rendezvous::Address(address), rank, 3);
                config.secret = secret.clone();
                config
            });
            let all: Vec<_> = join_all(configs.collect())
                .into_iter()
                .map(Result::unwrap)
                .collect();
            close_all(all);
        }
    });
}

/// The worlds of ranks, the last of which comes when the others have joined, and what all errors say.
#[test]
fn worlds_that_differ_are_named_on_all() {
    let cases: [(&[usize], [&str; 2]); 3] = [
        (
            &[3, 2],
            ["rank 1 was started for a world of 2", "rank 0 for one of 3"],
        ),
        (
            &[2, 3],
            ["rank 1 was started for a world of 3", "rank 0 for one of 2"],
        ),
        (
            &[4, 4, 3],
            ["rank 2 was started for a world of 3", "rank 0 for one of 4"],
        ),
    ];
    for (worlds, parts) in cases {
        within(30, move || {
            let id = new_id();
            let ranks = worlds.iter().enumerate().map(|(rank, &world)| {
                let config = config(&id, rank, world);
                if rank + 1 == worlds.len() {
                    thread::sleep(Duration::from_millis(300));
                }
                thread::spawn(move || {
                    let begun = Stopwatch::start();
                    let refused = error(Bootstrap::join(&config));
                    assert!(begun.elapsed() < Duration::from_secs(5), "{refused}");
                    refused
                })
            });
            let last = worlds.len() - 1;
            for (rank, refused) in ranks.collect::<Vec<_>>().into_iter().enumerate() {
                let refused = refused.join().unwrap();
                let peer = if rank == last { 0 } else { last };
                let expected = (ErrorKind::Mismatch, Some(peer));
                assert_eq!((refused.kind(), refused.peer()), expected, "{refused}");
                let text = refused.to_string();
                assert!(parts.iter().all(|part| text.contains(part)), "{text}");
            }
        });
    }
}

#[test]
fn a_rank_given_twice_is_refused() {
    within(30, || {
        let id = new_id();
        let all: Vec<_> = join_all((0..2).map(|rank| config(&id, rank, 2)).collect())
            .into_iter()
            .map(Result::unwrap)
            .collect();
        let refused = error(Bootstrap::join(&config(&id, 1, 2)));
        assert_eq!(
            (refused.kind(), refused.peer()),
            (ErrorKind::Mismatch, Some(1)),
            "{refused}"
        );
        assert!(
            refused.to_string().contains("has already joined"),
            "{refused}"
        );
        all[0].store().set("k", b"v").unwrap();
        assert!(all[1].health().lost().is_empty());
        close_all(all);
        let refused = error(Bootstrap::join(&config(&new_id(), 2, 2)));
        assert_eq!(refused.kind(), ErrorKind::InvalidArgument);
    });
}

#[test]
fn a_wrong_secret_is_refused() {
    within(30, || {
        let id = new_id();
        let zero = rank_0(&id);
        let address = Rendezvous::Address(id.address());
        let mut wrong = JoinConfig::new(address.clone(), 1, 2);
        assert_eq!(
            error(Bootstrap::join(&wrong)).kind(),
            ErrorKind::Authentication
        );
        wrong.secret = Some("a guess".into());
        let refused = error(Bootstrap::join(&wrong));
        assert_eq!(refused.kind(), ErrorKind::Authentication);
        assert!(refused.to_string().contains("WARPLINK_SECRET"), "{refused}");
        let one = Bootstrap::join(&config(&id, 1, 2)).unwrap();
        close_all(vec![zero.join().unwrap().unwrap(), one]);
    });
}

#[test]
fn a_port_in_use_is_an_error_that_says_what_to_do() {
    within(30, || {
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = taken.local_addr().unwrap();
        let refused = error(Bootstrap::join(&JoinConfig::new(
            Rendezvous::Address(address),
            0,
            1,
        )));
        assert_eq!(refused.kind(), ErrorKind::AddressInUse);
        let text = refused.to_string();
        assert!(
            text.contains(&address.to_string()) && text.contains("another port"),
            "{text}"
        );
    });
}

#[test]
fn rank_0_waits_for_a_port_that_a_connection_has_for_a_moment() {
    within(30, || {
        let port = {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            listener.local_addr().unwrap().port()
        };
        let id = UniqueId::create(IpAddr::V4(Ipv4Addr::LOCALHOST), port).unwrap();
        // Bound without leave to share the port, as a connection's socket is.
        let (family, kind) = (AddressFamily::INET, SocketType::STREAM);
        let held = rustix::net::socket(family, kind, None).unwrap();
        rustix::net::bind(&held, &id.address()).unwrap();
        let zero = rank_0(&id);
        thread::sleep(Duration::from_millis(300));
        drop(held);
        let one = Bootstrap::join(&config(&id, 1, 2)).unwrap();
        close_all(vec![zero.join().unwrap().unwrap(), one]);
    });
}

#[test]
fn a_peer_that_never_comes_is_named_on_all() {
    within(30, || {
        let id = new_id();
        let configs = [0, 1, 3].map(|rank| {
            let mut config = config(&id, rank, 5);
            config.timeout = Duration::from_secs(3);
            config
        });
        let begun = Stopwatch::start();
        for result in join_all(configs.to_vec()) {
            let missing = error(result);
            assert_eq!(missing.kind(), ErrorKind::Timeout, "{missing}");
            assert!(missing.to_string().contains("rank 2, 4"), "{missing}");
        }
        assert!(begun.elapsed() < Duration::from_secs(8));

        let (nobody, _held) = free_address();
        let mut alone = JoinConfig::new(Rendezvous::Address(nobody), 1, 2);
        alone.timeout = Duration::from_millis(200);
        let missing = error(Bootstrap::join(&alone));
        assert_eq!(
            (missing.kind(), missing.peer()),
            (ErrorKind::Timeout, Some(0))
        );
        assert!(
            missing
                .to_string()
                .contains(&alone.rendezvous.address().to_string()),
            "{missing}"
        );
    });
}

#[test]
fn rank_0_may_come_last() {
    within(30, || {
        let (address, _held) = free_address();
        let id = UniqueId::create(address.ip(), address.port()).unwrap();
        let one = {
            let config = config(&id, 1, 2);
            thread::spawn(move || Bootstrap::join(&config))
        };
        thread::sleep(Duration::from_millis(300));
        let zero = Bootstrap::join(&config(&id, 0, 2)).unwrap();
        close_all(vec![zero, one.join().unwrap().unwrap()]);
    });
}

#[test]
fn an_id_can_hand_its_port_to_another_process() {
    within(30, || {
        let id = new_id();
        assert_eq!(
            TcpListener::bind(id.address()).unwrap_err().kind(),
            std::io::ErrorKind::AddrInUse
        );
        let held = id.release();
        let given = || TcpListener::bind("127.0.0.1:0").unwrap();
        // More often than there are ports.
        let mut others = (0..60_000).map(|_| given().local_addr().unwrap());
        assert!(
            others.all(|other| other != id.address()),
            "given to another"
        );
        TcpListener::bind(id.address()).unwrap();
        drop(held);
        TcpListener::bind(id.address()).unwrap();
    });
}

#[test]
fn many_join_at_once() {
    within(60, || {
        let all = members(32);
        let barriers: Vec<_> = all
            .iter()
            .cloned()
            .map(|member| thread::spawn(move || member.barrier(soon()).unwrap()))
            .collect();
        barriers
            .into_iter()
            .for_each(|barrier| barrier.join().unwrap());
        close_all(all);
    });
}
