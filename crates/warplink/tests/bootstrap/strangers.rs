//! Connections of processes that do not belong to the job.

use crate::support::{
    Relay, Stopwatch, close_all, config, free_address, new_id, rank_0, soon, within,
};
use rustix::process::{Resource, Rlimit, setrlimit};
use std::io::{BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use warplink::Deadline;
use warplink::bootstrap::{Bootstrap, JoinConfig, Rendezvous};

/// A hello, and a handshake message of somebody who does not hold the secret.
fn hello(version: u32) -> Vec<u8> {
    let mut body = b"WPLK".to_vec();
    body.extend(version.to_le_bytes());
    body.extend(1u64.to_le_bytes());
    body.extend(2u64.to_le_bytes());
    body.extend([9; 48]);
    record(&body)
}

fn record(body: &[u8]) -> Vec<u8> {
    [&(body.len() as u16).to_le_bytes()[..], body].concat()
}

/// Sends bytes as a stranger, and returns what came back until the store closed the connection.
fn intrude(address: SocketAddr, bytes: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(address).unwrap();
    // The store may close the connection before it has read everything.
    let _ = stream.write_all(bytes);
    let _ = stream.shutdown(std::net::Shutdown::Write);
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    answer
}

#[test]
fn strangers_cannot_disturb_the_members() {
    within(60, || {
        let id = new_id();
        let zero = rank_0(&id);
        let one = Bootstrap::join(&config(&id, 1, 2)).unwrap();
        let all = vec![zero.join().unwrap().unwrap(), one];
        let address = id.address();

        // The store refuses another version of the protocol, and names its own.
        let other = u32::MAX;
        let answer = intrude(address, &hello(other));
        let text = String::from_utf8_lossy(&answer);
        assert!(text.contains(&format!("version {other};")), "{text}");
        let own = text.split("the store uses version ").nth(1).unwrap();
        let own = own.split(' ').next().unwrap().parse().unwrap();

        // A handshake that is cut off after every byte.
        let whole = [hello(own), record(&[0; 32])].concat();
        for length in 0..=whole.len() {
            intrude(address, &whole[..length]);
        }
        // A stranger that does not know the secret is told so, and nothing else of what it sends is read.
        let mut request = whole.clone();
        request.extend(record(&[0; 100]));
        assert!(!intrude(address, &request).is_empty());
        // Garbage, the longest record, another protocol.
        intrude(address, &[0xff; 5000]);
        intrude(address, b"GET / HTTP/1.1\r\n\r\n");
        for length in [100, usize::from(u16::MAX)] {
            assert!(intrude(address, &record(&vec![0; length])).is_empty());
        }

        all[0].store().set("k", b"v").unwrap();
        all[1].barrier(Deadline::after(Duration::ZERO)).unwrap_err();
        all[0].barrier(soon()).unwrap();
        assert!(all.iter().all(|member| member.health().lost().is_empty()));
        close_all(all);
    });
}

#[test]
fn an_idle_connection_is_dropped_and_holds_up_nobody() {
    within(30, || {
        let id = new_id();
        let zero = rank_0(&id);
        let idle: Vec<_> = (0..50)
            .map(|_| TcpStream::connect(id.address()).unwrap())
            .collect();
        let begun = Stopwatch::start();
        let one = Bootstrap::join(&config(&id, 1, 2)).unwrap();
        assert!(begun.elapsed() < Duration::from_secs(2));
        for mut stream in idle {
            stream
                .set_read_timeout(Some(Duration::from_secs(10)))
                .unwrap();
            // Closed or reset by the store; a time-out of the read would be another error.
            match stream.read(&mut [0; 1]) {
                Ok(count) => assert_eq!(count, 0),
                Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset),
            }
        }
        close_all(vec![zero.join().unwrap().unwrap(), one]);
    });
}

/// Says to a copy of this binary that it is rank 0, and where.
const RANK_0: &str = "BOOTSTRAP_TEST_RANK_0";
/// How many descriptors that rank 0 may have.
const DESCRIPTORS: u64 = 256;
/// How many of them it needs for itself.
const NEEDED: usize = 128;
const ROUNDS: usize = 100;

/// Not a test of its own: what a copy of this binary runs as rank 0.
#[test]
fn child() {
    let Ok(id) = std::env::var(RANK_0) else {
        return;
    };
    within(60, move || {
        let limit = Rlimit {
            current: Some(DESCRIPTORS),
            maximum: Some(DESCRIPTORS),
        };
        setrlimit(Resource::Nofile, limit).unwrap();
        let member = Bootstrap::join(&config(&id.parse().unwrap(), 0, 2)).unwrap();
        for _ in 0..ROUNDS {
            let files: Vec<_> = (0..NEEDED)
                .map(|_| std::fs::File::open("/dev/null").unwrap())
                .collect();
            member.barrier(soon()).unwrap();
            drop(files);
        }
        member.close(soon()).unwrap();
    });
    println!("\nclosed");
}

#[test]
fn a_thousand_idle_connections_take_nothing_that_members_need() {
    within(120, || {
        let id = new_id();
        let _held = id.release();
        let mut rank_0 = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "strangers::child", "--nocapture"])
            .env(RANK_0, id.to_string())
            .stdout(Stdio::piped())
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let until = Instant::now() + Duration::from_secs(30);
        let mut idle = Vec::new();
        while idle.len() < 1000 {
            match TcpStream::connect(id.address()) {
                Ok(stream) => idle.push(stream),
                Err(error) => {
                    assert!(Instant::now() < until, "{error}");
                    thread::sleep(Duration::from_millis(5));
                }
            }
        }
        let begun = Stopwatch::start();
        let member = Bootstrap::join(&config(&id, 1, 2)).unwrap();
        assert!(
            begun.elapsed() < Duration::from_secs(10),
            "joining took {:?}",
            begun.elapsed()
        );
        for round in 0..ROUNDS {
            idle.extend((0..10).filter_map(|_| TcpStream::connect(id.address()).ok()));
            let begun = Stopwatch::start();
            member.barrier(soon()).unwrap();
            let took = begun.elapsed();
            assert!(took < Duration::from_secs(1), "round {round} took {took:?}");
        }
        member.close(soon()).unwrap();
        let mut output = String::new();
        BufReader::new(rank_0.stdout.take().unwrap())
            .read_to_string(&mut output)
            .unwrap();
        assert!(rank_0.wait().unwrap().success(), "{output}");
        assert!(output.contains("closed"), "{output}");
        drop(idle);
    });
}

/// Actions of the relay on the next bytes that the member sends.
const PASS: u8 = 0;
const ALTER: u8 = 1;
const REPLAY: u8 = 2;

/// Passes bytes on between a member and the store, and tampers with them once told to.
fn relay(store: SocketAddr, tamper: Arc<AtomicU8>) -> SocketAddr {
    let relay = Relay::start(store, move |bytes, store| {
        match tamper.swap(PASS, Ordering::SeqCst) {
            // A byte of the ciphertext.
            ALTER => bytes[12] ^= 1,
            REPLAY => store.write_all(bytes)?,
            _ => {}
        }
        store.write_all(bytes)
    });
    relay.address
}

#[test]
fn altered_and_replayed_frames_are_refused_after_joining_too() {
    for how in [ALTER, REPLAY] {
        within(30, move || {
            let (store, _held) = free_address();
            let tamper = Arc::new(AtomicU8::new(PASS));
            let relayed = relay(store, tamper.clone());
            let joined = crate::support::join_all(
                [store, relayed]
                    .into_iter()
                    .enumerate()
                    .map(|(rank, address)| {
                        let mut config = JoinConfig::new(Rendezvous::Address(address), rank, 2);
                        config.secret = Some("long and random".into());
                        config
                    })
                    .collect(),
            );
            let [zero, one] = &joined[..] else {
                unreachable!()
            };
            let (zero, one) = (zero.as_ref().unwrap(), one.as_ref().unwrap());
            assert_eq!(one.store().add("count", 1).unwrap(), 1);
            tamper.store(how, Ordering::SeqCst);
            let _ = one.store().add("count", 1);
            // The relay's second copy follows the answer to the first.
            let until = Instant::now() + Duration::from_secs(20);
            while zero.health().lost().is_empty() {
                assert!(Instant::now() < until, "the tampering went unnoticed");
                thread::sleep(Duration::from_millis(1));
            }
            let error = zero.health().check(&[1]).unwrap_err();
            assert!(error.to_string().contains("altered or replayed"), "{error}");
            let count = if how == ALTER { 1 } else { 2 };
            assert_eq!(zero.store().add("count", 0).unwrap(), count);
        });
    }
}
