//! Processes that do not belong to the job, at its store and its memory services, while ranks exchange:
//! every exchange is right, and takes at most twice as long as while they are at another job on the same
//! machine, which they load as much.

// A test fails by panicking.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{Relay, complete, ring_requests, values};
use rustix::net::{AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::{Resource, Rlimit, getrlimit, getuid, setrlimit};
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};
use warplink::bootstrap::{JoinConfig, Rendezvous, UniqueId};
use warplink::device::Priority;
use warplink::{Communicator, Config, DeviceKind};

/// Exchanges with strangers at this job and at another, of which the median counts.
const EXCHANGES: usize = 100;

/// Other processes of the machine run at the same time, so that one measurement proves little.
const ATTEMPTS: usize = 5;

/// Connections that strangers hold open at the store, and at each memory service.
const IDLE: usize = 1000;
const SILENT: usize = 100;

/// Between two things that one kind of stranger does.
const PAUSE: Duration = Duration::from_millis(5);

/// Says to a copy of this binary that it is the strangers, and where.
const STRANGERS: &str = "WARPLINK_TEST_STRANGERS";

/// Room for all connections, on both sides.
fn raise_descriptors() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum.or(Some(1 << 16)),
        ..limit
    };
    setrlimit(Resource::Nofile, raised).unwrap();
}

/// Passes on what rank 1 says to the store, and keeps the first of it.
fn recorder(store: SocketAddr, kept: Arc<Mutex<Vec<u8>>>) -> SocketAddr {
    let relay = Relay::start(store, move |bytes, store| {
        let mut kept = kept.lock().unwrap();
        if kept.len() < 1 << 16 {
            kept.extend_from_slice(bytes);
        }
        drop(kept);
        store.write_all(bytes)
    });
    relay.address
}

/// The names of the abstract sockets on which this process listens.
fn services() -> Vec<String> {
    let mut own = Vec::new();
    for entry in std::fs::read_dir("/proc/self/fd").unwrap().flatten() {
        if let Ok(target) = std::fs::read_link(entry.path()) {
            own.push(target.to_string_lossy().into_owned());
        }
    }
    let table = std::fs::read_to_string("/proc/net/unix").unwrap();
    let mut names: Vec<String> = table
        .lines()
        .filter_map(|line| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let (inode, name) = (fields.get(6)?, fields.get(7)?.strip_prefix('@')?);
            own.contains(&format!("socket:[{inode}]"))
                .then(|| name.to_owned())
        })
        .collect();
    names.sort();
    names.dedup();
    names
}

/// The median time of exchanges between the two ranks, each of which is checked.
fn exchanges(comm: &Communicator, first: usize) -> Duration {
    let peer = 1 - comm.rank();
    let stream = comm.create_stream(Priority::Normal).unwrap();
    let mut times: Vec<Duration> = (first..first + EXCHANGES)
        .map(|round| {
            // Memory of a length of its own is new to the peer.
            let bytes = 4096 * (round + 1);
            let (send, receive) = (comm.alloc(bytes).unwrap(), comm.alloc(bytes).unwrap());
            send.upload(&values(comm.rank(), round, bytes)).unwrap();
            comm.barrier().unwrap();
            let started = Instant::now();
            let requests = ring_requests(comm, &send, &receive, 0);
            let transfers = comm.exchange(&requests).unwrap();
            let took = started.elapsed();
            complete(comm, &transfers, &stream).unwrap();
            assert!(
                receive.download().unwrap() == values(peer, round, bytes),
                "wrong data"
            );
            took
        })
        .collect();
    times.sort();
    times[times.len() / 2]
}

/// Where strangers go: the store of a job, and the memory services of its ranks.
struct Target {
    store: SocketAddr,
    services: Vec<String>,
}

/// The strangers, in a process that is killed when this is dropped.
struct Strangers(Child);

impl Strangers {
    /// Starts them as another user where this process may, and waits until all are at work.
    fn start(folder: &Path, target: &Target, recorded: &[u8]) -> Self {
        let Target { store, services } = target;
        let (program, record) = (folder.join("strangers"), folder.join("record"));
        std::fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
        std::fs::write(&record, recorded).unwrap();
        let mut command = Command::new(&program);
        command
            .args(["strangers", "--exact", "--nocapture"])
            .env(
                STRANGERS,
                format!("{store} {} {}", record.display(), services.join(" ")),
            )
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        if getuid().is_root() {
            command.uid(65534).gid(65534);
        }
        let mut child = command.spawn().unwrap();
        let out = BufReader::new(child.stdout.take().unwrap());
        let strangers = Self(child);
        let ready = out
            .lines()
            .map_while(Result::ok)
            .any(|line| line.contains("at work"));
        assert!(ready, "the strangers ended");
        strangers
    }
}

impl Drop for Strangers {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Does one thing again and again.
fn repeat(mut what: impl FnMut() + Send + 'static) {
    thread::spawn(move || {
        loop {
            what();
            thread::sleep(PAUSE);
        }
    });
}

fn silent(name: &str) -> Option<OwnedFd> {
    let kind = (AddressFamily::UNIX, SocketType::SEQPACKET);
    let socket = rustix::net::socket_with(kind.0, kind.1, SocketFlags::NONBLOCK, None).ok()?;
    let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).ok()?;
    rustix::net::connect(&socket, &address).ok()?;
    Some(socket)
}

/// Not a test of its own: what a copy of this binary runs as the strangers.
#[test]
fn strangers() {
    let Ok(text) = std::env::var(STRANGERS) else {
        return;
    };
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL)).unwrap();
    raise_descriptors();
    let mut words = text.split(' ');
    let store: SocketAddr = words.next().unwrap().parse().unwrap();
    let recorded = std::fs::read(words.next().unwrap()).unwrap();
    let services: Vec<String> = words.map(str::to_owned).collect();
    assert!(!services.is_empty(), "no memory service was found");
    let connect = move || TcpStream::connect_timeout(&store, Duration::from_secs(1)).ok();
    let send = move |bytes: &[u8]| {
        if let Some(mut stream) = connect() {
            let _ = stream.write_all(bytes);
        }
    };

    // Connections that say nothing; those that are closed are replaced.
    let mut idle: Vec<_> = (0..IDLE).filter_map(|_| connect()).collect();
    repeat(move || {
        idle.truncate(IDLE - 10);
        idle.rotate_right(10);
        idle.extend((0..10).filter_map(|_| connect()));
    });
    // Garbage, and lengths of almost 2^32.
    repeat(move || send(&[0xff; 5000]));
    repeat(move || send(&[&u32::MAX.to_le_bytes()[..], &[0; 64]].concat()));
    // What rank 1 said, again and altered.
    let (replayed, mut altered) = (recorded.clone(), recorded.clone());
    repeat(move || send(&replayed));
    let mut place = 0;
    repeat(move || {
        place = (place + 97) % altered.len();
        altered[place] ^= 0x10;
        send(&altered);
    });
    // The same, one byte at a time.
    for _ in 0..10 {
        let (bytes, mut rest, mut stream) = (recorded.clone(), Vec::new(), None);
        repeat(move || {
            let failed = match (&mut stream, rest.pop()) {
                (Some(stream), Some(byte)) => TcpStream::write_all(stream, &[byte]).is_err(),
                _ => true,
            };
            if failed {
                stream = connect();
                rest = bytes.iter().rev().copied().collect();
            }
        });
    }
    // At the memory services: connections that say nothing, and some that say the wrong thing.
    for name in services {
        let mut held: Vec<_> = (0..SILENT).filter_map(|_| silent(&name)).collect();
        repeat(move || {
            held.truncate(SILENT - 2);
            held.rotate_right(2);
            held.extend(silent(&name));
            if let Some(socket) = silent(&name) {
                let _ = rustix::net::send(&socket, &[0xff; 256], SendFlags::NOSIGNAL);
                held.push(socket);
            }
        });
    }
    println!("\nat work");
    thread::sleep(Duration::from_secs(600));
}

#[test]
fn strangers_change_no_exchange_and_hold_up_none() {
    raise_descriptors();
    let ids = [(); 2].map(|()| UniqueId::create([127, 0, 0, 1].into(), 0).unwrap());
    let [store, other_store] = ids.each_ref().map(UniqueId::address);
    let _held = ids.each_ref().map(UniqueId::release);
    let recorded = Arc::new(Mutex::new(Vec::new()));
    let relayed = recorder(store, recorded.clone());
    let folder = std::env::temp_dir().join(format!("warplink-strangers-{}", std::process::id()));
    std::fs::create_dir(&folder).unwrap();
    std::fs::set_permissions(&folder, PermissionsExt::from_mode(0o755)).unwrap();
    let start = |rank: usize, address: SocketAddr| {
        let (recorded, folder) = (recorded.clone(), folder.clone());
        thread::spawn(move || {
            let mut join = JoinConfig::new(Rendezvous::Address(address), rank, 2);
            join.secret = Some("long and random".into());
            let mut config = Config::new(join, DeviceKind::Host);
            config.timeout = Duration::from_secs(60);
            let comm = Communicator::join(&config).unwrap();
            comm.barrier().unwrap();
            let own = services();
            comm.barrier().unwrap();
            // The other job, of ranks in this process too.
            config.join.rendezvous = Rendezvous::Address(other_store);
            let other = Communicator::join(&config).unwrap();
            other.barrier().unwrap();
            let mut others = services();
            others.retain(|name| !own.contains(name));
            let target = |store, services| Target { store, services };
            let (here, elsewhere) = (target(store, own), target(other_store, others));
            let mut ratios = Vec::new();
            for attempt in 0..ATTEMPTS {
                let first = 2 * attempt * EXCHANGES;
                let among = |target: &Target, first: usize| {
                    let strangers = (rank == 0).then(|| {
                        let recorded = recorded.lock().unwrap().clone();
                        Strangers::start(&folder, target, &recorded)
                    });
                    comm.barrier().unwrap();
                    let took = exchanges(&comm, first);
                    drop(strangers);
                    took
                };
                let without = among(&elsewhere, first);
                let with = among(&here, first + EXCHANGES);
                println!("rank {rank}: {with:?} among strangers, {without:?} with them elsewhere");
                let ratio = with.as_secs_f64() / without.as_secs_f64();
                ratios.push(ratio);
                // Both ranks go by what rank 0 measured.
                let measured = comm.all_gather_bytes(&ratio.to_le_bytes()).unwrap();
                let measured = f64::from_le_bytes(measured[0][..].try_into().unwrap());
                if measured <= 2.0 {
                    ratios.clear();
                    break;
                }
            }
            other.close().unwrap();
            comm.close().unwrap();
            ratios
        })
    };
    let ranks = [start(0, store), start(1, relayed)];
    let slow: Vec<_> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
    std::fs::remove_dir_all(&folder).unwrap();
    assert_eq!(
        slow, [[0.0; 0]; 2],
        "exchanges among strangers take too long"
    );
}
