//! Ranks that die: every rank is a process here, and one of them is killed.

use crate::support::{Process, Stopwatch, config, soon, within};
use std::sync::mpsc;
use std::time::Duration;
use warplink::bootstrap::{Bootstrap, UniqueId, Wait};
use warplink::{ErrorKind, Rank, Result};

/// Says to a copy of this binary that it is a rank: which one, of how many, what it does, where.
const ROLE: &str = "BOOTSTRAP_TEST_ROLE";
const WORLD: usize = 3;

/// Acts of a rank once it has joined, reported it, and received permission to continue.
fn act(role: &str, member: &Bootstrap, victim: Rank) -> Result<()> {
    let on_victim = Wait::on([victim], soon());
    match role {
        "barrier" if member.rank() == victim => std::thread::sleep(Duration::from_secs(60)),
        "barrier" => member.barrier(soon())?,
        "in-barrier" if member.rank() == victim => member.barrier(soon())?,
        // It comes once the victim is dead for certain.
        "in-barrier" => {
            while member.health().check(&[victim]).is_ok() {
                std::thread::sleep(Duration::from_millis(1));
            }
            member.barrier(soon())?;
        }
        "get" if member.rank() == victim => std::thread::sleep(Duration::from_secs(60)),
        "get" => drop(member.store().get("never", &on_victim)?),
        "any" if member.rank() == victim => std::thread::sleep(Duration::from_secs(60)),
        "any" => drop(
            member
                .store()
                .multi_take(&["never".into(), "nor this".into()], &Wait::any(soon()))?,
        ),
        other => panic!("no role {other}"),
    }
    Ok(())
}

/// Not a test of its own: what a copy of this binary runs as a rank.
#[test]
fn child() {
    let Ok(role) = std::env::var(ROLE) else {
        return;
    };
    let [role, rank, victim, id] = role.split(' ').collect::<Vec<_>>()[..] else {
        panic!("{role}")
    };
    let (role, id): (_, UniqueId) = (role.to_owned(), id.parse().unwrap());
    let (rank, victim): (Rank, Rank) = (rank.parse().unwrap(), victim.parse().unwrap());
    within(60, move || {
        let member = Bootstrap::join(&config(&id, rank, WORLD)).unwrap();
        let (lost, losses) = mpsc::channel();
        member
            .health()
            .when_lost(move |rank, error| lost.send((rank, error.kind())).unwrap());
        println!("\nready");
        std::io::stdin().read_line(&mut String::new()).unwrap();
        println!("\nacting");
        let error = act(&role, &member, victim).unwrap_err();
        println!("\nended {:?} {:?} {error}", error.kind(), error.peer());
        let told = losses.recv_timeout(Duration::from_secs(20)).unwrap();
        assert_eq!(told, (victim, ErrorKind::PeerLost));
        let late = mpsc::channel();
        member
            .health()
            .when_lost(move |rank, _| late.0.send(rank).unwrap());
        assert_eq!(late.1.recv_timeout(Duration::from_secs(20)), Ok(victim));
        assert!(losses.try_recv().is_err(), "told twice");
        assert_eq!(member.health().lost(), [victim]);
        assert_eq!(
            member.health().check(&[victim]).unwrap_err().kind(),
            ErrorKind::PeerLost
        );
        // The store is served, by another rank if the lost one served it.
        let store = member.store();
        store.set(format!("left/{rank}"), b"here").unwrap();
        let others = (0..WORLD).filter(|other| ![rank, victim].contains(other));
        for other in others {
            let wait = Wait::on([other], soon());
            let value = store.get(&format!("left/{other}"), &wait).unwrap();
            assert_eq!(value, b"here");
        }
        member.close(soon()).unwrap();
    });
    println!("\nclosed");
}

fn kill(role: &'static str, victim: Rank) {
    within(60, move || {
        let id = crate::support::new_id();
        let _held = id.release();
        let mut all: Vec<_> = (0..WORLD)
            .map(|rank| Process::start("loss::child", ROLE, format!("{role} {rank} {victim} {id}")))
            .collect();
        all.iter_mut()
            .for_each(|process| drop(process.line("ready")));
        for process in &mut all {
            process.tell("");
            process.line("acting");
        }
        // Time for the requests to arrive.
        std::thread::sleep(Duration::from_millis(100));
        let begun = Stopwatch::start();
        all[victim].child.kill().unwrap();
        for (rank, process) in all
            .iter_mut()
            .enumerate()
            .filter(|(rank, _)| *rank != victim)
        {
            let line = process.line("ended");
            let expected = format!("PeerLost Some({victim})");
            assert!(line.starts_with(&expected), "rank {rank}: {line}");
            process.line("closed");
            assert!(process.child.wait().unwrap().success());
        }
        assert!(
            begun.elapsed() < Duration::from_secs(5),
            "it took {:?}",
            begun.elapsed()
        );
    });
}

#[test]
fn killed_before_a_barrier() {
    kill("barrier", 1);
    kill("barrier", 0);
}

#[test]
fn killed_in_a_barrier() {
    kill("in-barrier", 2);
    kill("in-barrier", 0);
}

#[test]
fn killed_while_others_get() {
    kill("get", 2);
    kill("get", 0);
}

#[test]
fn killed_while_others_wait_for_anybody() {
    kill("any", 1);
    kill("any", 0);
}
