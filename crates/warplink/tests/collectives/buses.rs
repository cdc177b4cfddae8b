//! Collectives of devices without atomic operations on each other's memory, and without access to it.

use crate::common::{pretending, world};
use crate::expected::{Case, Random};
use crate::fused::play;
use crate::fused_rows::{Made, USUAL, fused};
use crate::layer::{Choices, Layer, inputs};
use crate::planned::{exchange, held, plan};
use crate::{on_device, parts};
use warplink::collective::{
    CollectiveOptions, CollectivePath, ExpertOptions, FusedKind, Quantization,
};
use warplink::device::Priority;
use warplink::{Collectives, Communicator};

/// Collectives by the direct path with a workspace through which long data goes many times.
fn direct(comm: &Communicator) -> Collectives {
    let options = CollectiveOptions {
        path: Some(CollectivePath::Direct),
        workspace_bytes: 512 << 10,
        ..CollectiveOptions::default()
    };
    comm.collectives_with(&options).unwrap()
}

/// Calls on memory of all kinds, long ones among them, so that data goes through the workspace and from memory to memory.
fn calls(comm: &Communicator, path: Option<CollectivePath>) {
    let options = CollectiveOptions {
        path,
        ..CollectiveOptions::default()
    };
    let collectives = comm.collectives_with(&options).unwrap();
    if let Some(path) = path {
        assert_eq!(collectives.path(), path);
    }
    let stream = comm.create_stream(Priority::Normal).unwrap();
    let mut random = Random::new(29);
    for round in 0..24 {
        let longest = if round % 4 == 0 { 60_000 } else { 3_000 };
        let case = Case::random(&mut random, comm.world(), longest);
        let made = case.run(comm, &collectives, &stream);
        made.run_again(comm, &collectives, &stream);
    }
}

#[test]
fn the_direct_path_is_right_on_any_bus() {
    for ranks in [2, 4] {
        pretending(world(ranks), |comm, _| {
            calls(comm, Some(CollectivePath::Direct));
        });
    }
}

#[test]
fn the_path_that_is_chosen_is_right_on_any_bus() {
    pretending(world(2), |comm, _| calls(comm, None));
}

#[test]
fn messages_and_parts_are_right_on_any_bus() {
    pretending(world(3), |comm, _| {
        let collectives = direct(comm);
        let stream = comm.create_stream(Priority::Normal).unwrap();
        let mut random = Random::new(43);
        for most in [50, 3_000, 200_000] {
            let plan = plan(&mut random, comm.world(), most);
            let group = held(comm, &plan, random.next());
            exchange(comm, &collectives, &[group], &stream);
        }
        parts::rounds(comm, &collectives, 3);
        on_device::rounds(comm, &collectives, 17);
    });
}

#[test]
fn experts_are_right_on_any_bus() {
    pretending(world(3), |comm, _| {
        let ranks = comm.world();
        let collectives = direct(comm);
        let stream = comm.create_stream(Priority::Normal).unwrap();
        for quantization in [None, Some(Quantization::PerBlock)] {
            let options = ExpertOptions {
                experts: 2 * ranks,
                top_k: 2,
                max_tokens: 11,
                max_rows: None,
                elements: 140,
                quantization,
                ..ExpertOptions::default()
            };
            let layer = Layer::new(comm, collectives.experts(&options).unwrap(), options);
            for (turn, choices) in [Choices::Random, Choices::AllToOne(0)]
                .into_iter()
                .enumerate()
            {
                layer.round(&inputs(&options, choices, ranks, turn), &stream);
            }
        }
    });
}

#[test]
fn fused_calls_are_right_on_any_bus() {
    pretending(world(2), |comm, _| {
        let collectives = direct(comm);
        for kind in FusedKind::ALL {
            // Rows that fit at once, and rows in pieces.
            for (rows, width) in [(2, 137), (40, 4100)] {
                let call = fused(kind, rows * comm.world(), width, USUAL);
                play(
                    comm,
                    &collectives,
                    &Made::new(comm, (call, USUAL), false),
                    1,
                );
            }
        }
    });
}
