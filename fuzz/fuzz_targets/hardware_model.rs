//! Hardware models: what is accepted is written and accepted again, and every estimate by it ends.
#![no_main]

use std::sync::LazyLock;
use warplink::program::cost::{HardwareModel, simulate};
use warplink::program::parameters::ParameterKind;
use warplink::program::{Parameters, Program, RankProgram, Value, unroll};

/// A few programs of two ranks, with transfers, kernels, products and collectives of the engine.
static PROGRAMS: LazyLock<Vec<Vec<RankProgram>>> = LazyLock::new(|| {
    let texts = [
        include_str!("../../examples/programs/all_reduce_one_shot.wlp"),
        include_str!("../../examples/programs/all_reduce_ring.wlp"),
        include_str!("../../crates/warplink/src/program/lower/all_gather_matmul/collective.wlp"),
        include_str!("../../crates/warplink/src/program/lower/all_gather_matmul/push.wlp"),
    ];
    let unrolled = |text: &str| {
        let program = Program::parse(text).expect("a program");
        let given = program.parameters.iter().filter_map(|parameter| {
            let value = match parameter.kind {
                ParameterKind::Integer => Value::Integer(64),
                ParameterKind::List => Value::List(vec![64]),
                ParameterKind::OneOf(_) => return None,
            };
            Some((parameter.name.clone(), value))
        });
        let parameters: Parameters = given.collect();
        let rank = |rank| unroll(&program, rank, 2, 2, &parameters).expect("it is unrolled");
        (0..2).map(rank).collect()
    };
    texts.into_iter().map(unrolled).collect()
});

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return;
    };
    let Ok(model) = HardwareModel::from_json(text) else {
        return;
    };
    let written = model.to_json().expect("a model is written");
    // Not compared: JSON is read to the nearest figure but one.
    HardwareModel::from_json(&written).expect("and read");
    for ranks in PROGRAMS.iter() {
        let cost = simulate(ranks, &model).expect("the simulation ends");
        assert!(
            cost.seconds.is_finite() && cost.seconds >= 0.0,
            "{}",
            cost.seconds
        );
    }
});
