//! Faulty kernels: each is refused for what is wrong with it, and seen to fail where it runs unverified.

use crate::faulty_texts::{check_refusals, header, in_folder};
use crate::play::{Launches, play};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use warplink::bootstrap::{JoinConfig, Rendezvous, UniqueId};
use warplink::device::Delays;
use warplink::program::{DiagnosticKind, Parameters, Program, verify};
use warplink::{Communicator, Config, DeviceKind};

/// Elements of each rank's input: a part of every lane, and a tail.
const LENGTH: i64 = 135;

/// Launches in a row in which a fault has to show.
const LAUNCHES: usize = 40;

/// How often that is tried, with other delays.
const TRIES: u64 = 100;

fn parameters() -> Parameters {
    Parameters::new().with("n", LENGTH)
}

#[test]
fn each_is_refused_for_its_violation() {
    check_refusals("faulty-sections", 25, |program, world| {
        let diagnostics = verify(program, world, 2, &parameters()).err()?;
        for diagnostic in &diagnostics {
            println!("{} × {world}: {diagnostic}", program.name);
        }
        diagnostics.into_iter().next()
    });
}

/// Faults that were public are among them, as their comments say.
#[test]
fn public_faults_are_among_them() {
    let texts = in_folder("faulty-sections");
    let lines = texts.iter().flat_map(|(_, text)| text.lines());
    let comments: Vec<&str> = lines.filter(|line| line.starts_with('#')).collect();
    for fault in [
        "mscclpp 807",
        "rccl 1654",
        "pytorch 192581",
        "vLLM 0.33",
        "vllm 2760",
        "flashinfer 3053",
        "nccl 1417",
    ] {
        let named = comments.iter().any(|comment| comment.contains(fault));
        assert!(named, "no program shows {fault}");
    }
}

/// The announced tensors that a text says are out of reach, where it does.
fn unreachable(text: &str) -> Vec<String> {
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("# unreachable:"));
    let names = line.into_iter().flat_map(str::split_whitespace);
    names.map(str::to_owned).collect()
}

/// Runs a program unverified on ranks of the host device, under delays; how it fails on one of them, if it
/// does.
fn failure(text: &str, world: usize, seed: u64) -> Option<String> {
    let program = &Program::parse(text).unwrap();
    let id = UniqueId::create(IpAddr::V4(Ipv4Addr::LOCALHOST), 0).unwrap();
    let failed = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..world)
            .map(|rank| {
                let (id, failed) = (id.clone(), &failed);
                scope.spawn(move || {
                    let join = JoinConfig::new(Rendezvous::Id(id), rank, world);
                    let mut config = Config::new(join, DeviceKind::Host);
                    config.timeout = Duration::from_secs(2);
                    // Every other time one rank is slow and the others get as far ahead as they may.
                    let is_slow = seed.is_multiple_of(2) || seed / 2 % world as u64 == rank as u64;
                    config.device.delays = is_slow.then(|| Delays {
                        seed: 64 * seed + rank as u64 + 1,
                        max: Duration::from_micros(40 << (seed % 4)),
                    });
                    let comm = match Communicator::join(&config) {
                        Ok(comm) => comm,
                        // Another rank has joined, and failed, before this one was done.
                        Err(error) => return Some(error.to_string()),
                    };
                    let launches = Launches {
                        eager: LAUNCHES,
                        captured: 0,
                        verify: false,
                        unreachable: unreachable(text),
                    };
                    let played = play(&comm, program, &parameters(), launches);
                    // A rank that is done keeps its memory until the others are.
                    if played.is_err() {
                        failed.store(true, Ordering::SeqCst);
                        comm.abort("a kernel failed");
                        return played.err();
                    }
                    let barrier = comm.barrier();
                    barrier.err().map(|error| error.to_string())
                })
            })
            .collect();
        let ends: Vec<Option<String>> =
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
        let first = ends.into_iter().flatten().next();
        first.filter(|_| failed.load(Ordering::SeqCst))
    })
}

#[test]
fn each_is_seen_to_fail() {
    let mut wrong = Vec::new();
    for (name, text) in in_folder("faulty-sections") {
        let worlds = header(&text, "world");
        let world: usize = worlds.last().unwrap().parse().unwrap();
        match (0..TRIES).find_map(|seed| failure(&text, world, seed)) {
            Some(how) => println!("{name}: {}", how.lines().next().unwrap_or("")),
            None => wrong.push(name),
        }
    }
    assert!(wrong.is_empty(), "never failed: {}", wrong.join(", "));
}

/// Where one lane finds the tensors reachable and another does not, both have to keep to their parts.
#[test]
fn lanes_that_go_directly_beside_others_keep_to_their_parts() {
    let text = |cut: &str| {
        format!(
            "program one_lane_directly(n) {{
                input X: f32[n]
                output Y: f32[n]
                scratch C: packets16 i32[2, 3, world, 6]

                kernel lane in 0..3 threads 32 {{
                    announce n with X, Y in C[epoch % 2][lane]
                    agree n with X, Y in C[epoch % 2][lane]
                    if reachable(X) and reachable(Y) {{
                        Y{cut} on (rank + r) % world for r in 0..world = reduce(X{cut} on 0, sum)
                        barrier
                    }} else {{
                        Y[lane of 3] = copy(X[lane of 3])
                    }}
                }}
            }}"
        )
    };
    let verified = |cut| {
        let program = Program::parse(&text(cut)).unwrap();
        verify(&program, 2, 1, &parameters())
    };
    assert!(verified("[lane of 3][rank of world]").is_ok());
    let diagnostics = verified("[rank of world][lane of 3]").unwrap_err();
    assert_eq!(
        diagnostics[0].kind,
        DiagnosticKind::Race,
        "{}",
        diagnostics[0]
    );
}

/// On a ring, each rank passes on what its neighbour announced, and has to pass on just that.
#[test]
fn what_is_passed_on_is_the_announcement_of_the_rank_that_it_stands_for() {
    let verified = |place: &str| {
        let text = format!(
            "program passed_on(n) {{
                require world == 3
                input X: f32[n]
                output Y: f32[n]
                scratch C: packets16 i32[2, world, 1]

                kernel lane in 0..1 threads 32 {{
                    let slot = epoch % 2
                    let before = (rank - 1) % world
                    let after = (rank + 1) % world
                    announce n in C[slot] to after
                    put C[slot][before] to {place}
                    agree n in C[slot]
                    Y = copy(X)
                    barrier
                }}
            }}"
        );
        verify(&Program::parse(&text).unwrap(), 3, 1, &parameters())
    };
    verified("C[slot][before] on after").unwrap();
    // Each has two rows then, both of one rank.
    let found = verified("C[slot][after]").unwrap_err();
    assert_eq!(found[0].kind, DiagnosticKind::Mismatch, "{}", found[0]);
}
