//! A unique id that another process than rank 0's has made, and still holds the port of.

use crate::support::{Process, config, new_id, soon, within};
use std::time::Duration;
use warplink::Rank;
use warplink::bootstrap::{Bootstrap, UniqueId, Wait};

/// Says to a copy of this binary that it is a rank: which one, and which one makes the id.
const RANK: &str = "UNIQUE_ID_TEST_RANK";
const WORLD: usize = 3;

/// Not a test of its own: what a copy of this binary runs as a rank.
#[test]
fn child() {
    let Ok(role) = std::env::var(RANK) else {
        return;
    };
    let (rank, maker) = role.split_once(' ').unwrap();
    let (rank, maker): (Rank, Rank) = (rank.parse().unwrap(), maker.parse().unwrap());
    within(60, move || {
        let mut line = String::new();
        let id = if rank == maker {
            let id = new_id();
            println!("\nid {id}");
            std::io::stdin().read_line(&mut line).unwrap();
            id
        } else {
            std::io::stdin().read_line(&mut line).unwrap();
            line.trim().parse::<UniqueId>().unwrap()
        };
        let member = Bootstrap::join(&config(&id, rank, WORLD)).unwrap();
        member.barrier(soon()).unwrap();
        println!("\njoined");
        line.clear();
        std::io::stdin().read_line(&mut line).unwrap();
        if line.trim() == "without the maker" {
            // It serves the store; another does once it is gone.
            while member.health().check(&[maker]).is_ok() {
                std::thread::sleep(Duration::from_millis(1));
            }
            let other = (0..WORLD)
                .find(|other| ![rank, maker].contains(other))
                .unwrap();
            member.store().set(format!("{rank}"), b"here").unwrap();
            let wait = Wait::on([other], soon());
            assert_eq!(
                member.store().get(&other.to_string(), &wait).unwrap(),
                b"here"
            );
        }
        member.close(soon()).unwrap();
    });
    println!("\nclosed");
}

fn job(maker: Rank, maker_is_lost: bool) {
    within(60, move || {
        let mut all: Vec<_> = (0..WORLD)
            .map(|rank| Process::start("unique_id::child", RANK, format!("{rank} {maker}")))
            .collect();
        let id = all[maker].line("id ");
        for (rank, process) in all.iter_mut().enumerate() {
            // The maker last: the others meet a port that nobody serves yet.
            if rank != maker {
                process.tell(&id);
            }
        }
        std::thread::sleep(Duration::from_millis(200));
        all[maker].tell("");
        for process in &mut all {
            process.line("joined");
        }
        if maker_is_lost {
            all[maker].child.kill().unwrap();
        }
        for (rank, process) in all.iter_mut().enumerate() {
            if maker_is_lost && rank != maker {
                process.tell("without the maker");
            } else if !maker_is_lost {
                process.tell("in order");
            }
        }
        for (rank, process) in all.iter_mut().enumerate() {
            if !(maker_is_lost && rank == maker) {
                process.line("closed");
                assert!(process.child.wait().unwrap().success());
            }
        }
    });
}

#[test]
fn any_rank_may_make_it() {
    for maker in 0..WORLD {
        job(maker, false);
    }
}

#[test]
fn the_rank_that_made_it_may_be_lost() {
    for maker in 0..WORLD {
        job(maker, true);
    }
}
