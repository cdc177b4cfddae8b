//! Topologies of made-up machines, from files, and that of the machine at hand.
//!
//! The links in `hybrid-cube-mesh.json` are those of a DGX-1 with V100 GPUs.

#![allow(clippy::unwrap_used)]

mod common;

use common::{Ranks, kind, processes, share_gpus, world};
use proptest::prelude::*;
use proptest::sample::select;
use std::collections::{BTreeMap, BTreeSet};
use warplink::collective::{CollectiveOptions, CollectivePath};
use warplink::device::{AllocationKind, Priority, ReduceOp};
use warplink::topology::{CUBE_RANKS, Connection, Obstacle, RankAnswer, Topology, TopologyClass};
use warplink::{Config, DType, DeviceKind, ErrorKind};

const SWITCHED_8: &str = include_str!("meshes/switched-8.json");
const SWITCHED_2: &str = include_str!("meshes/switched-2.json");
const PAIRS_8: &str = include_str!("meshes/pairs-8.json");
const CUBE: &str = include_str!("meshes/hybrid-cube-mesh.json");
const CUBE_PERMUTED: &str = include_str!("meshes/hybrid-cube-mesh-permuted.json");
const CUBE_BROKEN: &str = include_str!("meshes/hybrid-cube-mesh-broken.json");
const MISSING_LINK: &str = include_str!("meshes/missing-link-4.json");
const BUS: &str = include_str!("meshes/bus-4.json");
const TWO_MACHINES: &str = include_str!("meshes/two-machines.json");

fn read(text: &str) -> Topology {
    Topology::from_json(text).unwrap()
}

/// The answers of all ranks, to be changed and read again.
fn answers(text: &str) -> Vec<RankAnswer> {
    let value: serde_json::Value = serde_json::from_str(text).unwrap();
    serde_json::from_value(value["ranks"].clone()).unwrap()
}

fn topology_of(answers: &[RankAnswer]) -> Topology {
    read(&serde_json::json!({ "ranks": answers }).to_string())
}

/// The same machine with its ranks numbered otherwise: `order[rank]` is the number that it had.
fn renumbered(answers: &[RankAnswer], order: &[usize]) -> Vec<RankAnswer> {
    let new = |old: &usize| order.iter().position(|number| number == old).unwrap();
    let renumber = |old: &usize| {
        let mut answer = answers[*old].clone();
        let direct = answer.links.direct.iter();
        answer.links.direct = direct.map(|(peer, &count)| (new(peer), count)).collect();
        answer.links.reaches = answer.links.reaches.iter().map(new).collect();
        answer
    };
    order.iter().map(renumber).collect()
}

#[test]
fn devices_behind_switches_are_fully_connected() {
    for (text, world) in [(SWITCHED_8, 8), (SWITCHED_2, 2)] {
        let found = read(text);
        assert_eq!(found.class(), TopologyClass::FullyConnected);
        assert!(found.is_direct(), "{found}");
        assert_eq!(found.mesh().world(), world);
        assert_eq!(found.mesh().connection(0, 1), Connection::Switches(18));
        assert_eq!(found.cube_positions(), None);
    }
}

#[test]
fn of_pairs_the_links_and_what_the_bus_reaches_are_known() {
    let found = read(PAIRS_8);
    assert_eq!(found.class(), TopologyClass::Unknown);
    let not_linked = Obstacle::NotLinked {
        rank: 0,
        peer: 2,
        pairs: 24,
    };
    assert_eq!(found.obstacles(), [not_linked]);
    let mesh = found.mesh();
    assert_eq!(mesh.connection(6, 7), Connection::Links(12));
    assert_eq!(mesh.connection(4, 7), Connection::Bus);
    assert_eq!(mesh.connection(0, 7), Connection::Nothing);
    assert_eq!(mesh.reached_by(5), [4, 6, 7]);
}

#[test]
fn a_hybrid_cube_mesh_is_found_in_any_order_of_its_ranks() {
    for text in [CUBE, CUBE_PERMUTED] {
        let found = read(text);
        assert_eq!(found.class(), TopologyClass::HybridCubeMesh, "{found}");
        assert!(found.is_direct(), "{found}");
        check_positions(&found);
    }
    let in_order = std::array::from_fn(|position| position);
    assert_eq!(read(CUBE).cube_positions(), Some(in_order));
}

/// Each rank has one position; groups of four are linked, as are the ranks that face each other.
fn check_positions(topology: &Topology) {
    let positions = topology.cube_positions().unwrap();
    assert_eq!(positions.iter().collect::<BTreeSet<_>>().len(), CUBE_RANKS);
    for (a, &rank) in positions.iter().enumerate() {
        for (b, &peer) in positions.iter().enumerate().filter(|(b, _)| *b != a) {
            let expected = a / 4 == b / 4 || a % 4 == b % 4;
            assert_eq!(topology.mesh().is_linked(rank, peer), expected);
        }
    }
}

#[test]
fn a_cube_without_one_link_or_with_one_more_is_of_no_known_class() {
    let broken = read(CUBE_BROKEN);
    assert_eq!(broken.class(), TopologyClass::Unknown);
    let mut more = answers(CUBE);
    more[0].links.direct.insert(7, 1);
    more[7].links.direct.insert(0, 1);
    assert_eq!(topology_of(&more).class(), TopologyClass::Unknown);
}

#[test]
fn four_links_each_do_not_make_a_hybrid_cube_mesh() {
    // A ring in which each is linked to the next two on both sides: four neighbours, as in the cube.
    let mut ring = answers(CUBE);
    for (rank, answer) in ring.iter_mut().enumerate() {
        let peers = [1, 2, 6, 7].map(|step| (rank + step) % CUBE_RANKS);
        answer.links.direct = peers.map(|peer| (peer, 1)).into();
    }
    assert_eq!(topology_of(&ring).class(), TopologyClass::Unknown);
}

#[test]
fn one_missing_link_is_named() {
    let found = read(MISSING_LINK);
    assert_eq!(found.class(), TopologyClass::Unknown);
    let not_linked = Obstacle::NotLinked {
        rank: 1,
        peer: 3,
        pairs: 1,
    };
    assert_eq!(found.obstacles(), [not_linked]);
    // Over the bus, or not: what is reachable is known.
    assert_eq!(found.mesh().connection(1, 3), Connection::Bus);
}

#[test]
fn without_links_the_class_is_unknown_and_the_bus_reaches_all() {
    let found = read(BUS);
    assert_eq!(found.class(), TopologyClass::Unknown);
    assert!(!found.is_direct());
    assert_eq!(found.mesh().reached_by(0), [1, 2, 3]);
}

#[test]
fn switches_do_not_reach_over_machines() {
    let found = read(TWO_MACHINES);
    assert_eq!(found.class(), TopologyClass::Unknown);
    let names = |obstacle: &Obstacle| obstacle.to_string().contains("ranks 2, 3 on node-1");
    assert!(found.obstacles().iter().any(names), "{found}");
    assert_eq!(found.mesh().connection(2, 3), Connection::Switches(18));
}

#[test]
fn what_is_recorded_is_read_again() {
    for text in [SWITCHED_8, PAIRS_8, CUBE_PERMUTED, BUS, TWO_MACHINES] {
        let found = read(text);
        assert_eq!(read(&found.to_json().unwrap()), found);
    }
}

#[test]
fn a_malformed_recording_is_refused() {
    let rank = r#"{ "place": { "machine": "a", "host": "a", "device": "d" }, "links": LINKS }"#;
    for links in [
        r#"{ "direct": { "1": 1 } }"#,
        r#"{ "direct": { "0": 1 } }"#,
        r#"{ "reaches": [9] }"#,
        r#"{ "switch": -1 }"#,
    ] {
        let text = format!("{{ \"ranks\": [{}] }}", rank.replace("LINKS", links));
        let error = Topology::from_json(&text).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Parse, "{links}");
    }
    for text in ["", "{}", r#"{ "ranks": [] }"#] {
        assert_eq!(
            Topology::from_json(text).unwrap_err().kind(),
            ErrorKind::Parse
        );
    }
}

/// Links of any number between any two of up to eight ranks, with and without switches.
fn any_machine() -> impl Strategy<Value = Vec<RankAnswer>> {
    let pairs = CUBE_RANKS * (CUBE_RANKS - 1) / 2;
    let links = prop::collection::vec(0_u32..3, pairs);
    let switches = prop::collection::vec(prop_oneof![Just(0_u32), Just(18)], CUBE_RANKS);
    (1..=CUBE_RANKS, links, switches).prop_map(|(world, links, switches)| {
        let mut answers = answers(CUBE);
        answers.truncate(world);
        for (answer, switch) in answers.iter_mut().zip(switches) {
            answer.links.direct = BTreeMap::new();
            answer.links.reaches = BTreeSet::new();
            answer.links.switch = switch;
        }
        let mut links = links.into_iter();
        for rank in 0..world {
            for peer in 0..rank {
                let count = links.next().unwrap();
                if count > 0 {
                    answers[rank].links.direct.insert(peer, count);
                    answers[peer].links.direct.insert(rank, count);
                }
            }
        }
        answers
    })
}

fn known_machine() -> impl Strategy<Value = Vec<RankAnswer>> {
    let all = [
        SWITCHED_8,
        PAIRS_8,
        CUBE,
        CUBE_BROKEN,
        MISSING_LINK,
        BUS,
        TWO_MACHINES,
    ];
    select(all.to_vec()).prop_map(answers)
}

fn in_any_order(
    machine: impl Strategy<Value = Vec<RankAnswer>>,
) -> impl Strategy<Value = (Vec<RankAnswer>, Vec<usize>)> {
    machine.prop_flat_map(|answers| {
        let order: Vec<usize> = (0..answers.len()).collect();
        (Just(answers), Just(order).prop_shuffle())
    })
}

fn check_order(answers: &[RankAnswer], order: &[usize]) -> Result<(), TestCaseError> {
    let (found, other) = (
        topology_of(answers),
        topology_of(&renumbered(answers, order)),
    );
    prop_assert_eq!(found.class(), other.class());
    prop_assert_eq!(found.is_direct(), other.is_direct());
    for rank in 0..order.len() {
        for peer in 0..order.len() {
            prop_assert_eq!(
                found.mesh().connection(order[rank], order[peer]),
                other.mesh().connection(rank, peer)
            );
        }
    }
    if found.class() == TopologyClass::HybridCubeMesh {
        check_positions(&other);
    }
    Ok(())
}

proptest! {
    #[test]
    fn the_class_of_a_known_machine_does_not_depend_on_the_order_of_ranks(
        (answers, order) in in_any_order(known_machine())
    ) {
        check_order(&answers, &order)?;
    }

    #[test]
    fn the_class_of_any_machine_does_not_depend_on_the_order_of_ranks(
        (answers, order) in in_any_order(any_machine())
    ) {
        check_order(&answers, &order)?;
    }
}

#[test]
fn ranks_of_this_machine_find_the_same_topology() {
    processes(world(4), |comm| {
        let found = comm.topology().unwrap();
        assert_eq!(found.mesh().world(), comm.world());
        let text = found.to_json().unwrap();
        for (rank, other) in comm
            .all_gather_bytes(text.as_bytes())
            .unwrap()
            .iter()
            .enumerate()
        {
            assert_eq!(text.as_bytes(), other, "rank {rank}");
        }
        let places = found.places();
        assert!(
            places
                .iter()
                .all(|place| place.machine == places[0].machine)
        );
        // Once found, it is kept: a rank may ask alone.
        if comm.rank() == 0 {
            assert_eq!(comm.topology().unwrap(), found);
        }
        if kind() == DeviceKind::Host {
            assert_eq!(found.class(), TopologyClass::FullyConnected);
            assert!(found.is_direct(), "{found}");
        } else {
            // Every GPU is another, and none that is there leaves its links untold.
            let addresses: BTreeSet<_> = places.iter().map(|place| place.address).collect();
            assert!(!addresses.contains(&None));
            let told = |rank| found.mesh().counts(rank).unwrap().error.is_none();
            assert!((0..comm.world()).all(told), "{found}");
        }
        // A subgroup has a topology of its own, numbered as its ranks are.
        if comm.rank() < 2 && comm.world() >= 2 {
            let pair = comm.subgroup(&[1, 0]).unwrap();
            let theirs = pair.topology().unwrap();
            assert_eq!(theirs.places()[0], places[1]);
            assert_eq!(
                theirs.mesh().connection(0, 1),
                found.mesh().connection(1, 0)
            );
        }
    });
}

#[test]
fn the_configuration_forces_a_class() {
    // As many ranks as a hybrid cube mesh has, which are more than most machines have GPUs.
    if kind() != DeviceKind::Host {
        return;
    }
    let cube = |config: &mut Config| config.topology = Some(TopologyClass::HybridCubeMesh);
    common::threads_with(CUBE_RANKS, cube, |comm| {
        let found = comm.topology().unwrap();
        assert!(found.is_forced() && found.is_direct(), "{found}");
        let in_order = std::array::from_fn(|position| position);
        assert_eq!(found.cube_positions(), Some(in_order));
    });
}

#[test]
fn the_environment_forces_a_class() {
    let ranks = Ranks {
        env: BTreeMap::from([("WARPLINK_TOPOLOGY".to_owned(), "unknown".to_owned())]),
        ..Ranks::of(world(2))
    };
    ranks.run(|comm| {
        let found = comm.topology().unwrap();
        assert_eq!(found.class(), TopologyClass::Unknown);
        assert_eq!(found.obstacles(), [Obstacle::ForcedUnknown]);
        // The vendor's library has them, unless it refuses. What is forced on collectives holds.
        let expected = if share_gpus() {
            CollectivePath::Direct
        } else {
            CollectivePath::Engine
        };
        let collectives = comm.collectives().unwrap();
        assert_eq!(collectives.path(), expected);
        let device = comm.device();
        let memory = device.allocate(64, AllocationKind::Plain).unwrap();
        device.upload(&memory, &[1; 64]).unwrap();
        let stream = comm.create_stream(Priority::Normal).unwrap();
        collectives
            .all_reduce(&memory, &memory, DType::U8, ReduceOp::Sum, &stream)
            .unwrap();
        comm.synchronize(&stream).unwrap();
        let mut sums = [0; 64];
        device.download(&memory, &mut sums).unwrap();
        assert_eq!(sums, [comm.world() as u8; 64]);
        let options = CollectiveOptions::on(CollectivePath::Direct);
        let collectives = comm.collectives_with(&options).unwrap();
        assert_eq!(collectives.path(), CollectivePath::Direct);
    });
}
