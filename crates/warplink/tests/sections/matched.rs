//! Kernels that look for words in memory: their numbers and positions, and integers that lanes store.

use crate::common::{decode, delayed, encode, threads_with, worlds};
use crate::play::{Launches, play, play_with};
use warplink::DType;
use warplink::program::evaluate::Evaluator;
use warplink::program::section::Matching;
use warplink::program::{DiagnosticKind, Parameters, Program, TensorInstance, verify};

const DISPATCH: &str = include_str!("../../../../examples/programs/dispatch_by_expert.wlp");

/// Tokens of each rank, elements, and experts of a token and of a rank.
const TOKENS: usize = 7;
const WIDTH: usize = 20;
const SLOTS: usize = 2;
const EACH: usize = 2;

/// How tokens choose.
#[derive(Clone, Copy, Debug)]
enum Choices {
    Nobody,
    /// Experts of the last rank.
    Last,
    /// Any number, some of which are no experts.
    Any,
}

impl Choices {
    const ALL: [Self; 3] = [Self::Nobody, Self::Last, Self::Any];

    fn expert(self, world: usize, rank: usize, round: usize, slot: usize) -> i64 {
        let mixed = (rank * 7919 + round * 104_729 + slot * 31 + 17) as u64;
        let any = (mixed.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 44) as usize;
        match self {
            Self::Nobody if slot.is_multiple_of(2) => -1,
            Self::Nobody => (world * EACH) as i64,
            Self::Last => (world * EACH - 1 - any % EACH) as i64,
            Self::Any => (any % (world * EACH + 4)) as i64 - 2,
        }
    }

    /// The slots of a rank whose experts are those of another one.
    fn slots(self, world: usize, from: usize, round: usize, to: usize) -> Vec<usize> {
        let own = (to * EACH) as i64..((to + 1) * EACH) as i64;
        let names = |slot: &usize| own.contains(&self.expert(world, from, round, *slot));
        (0..TOKENS * SLOTS).filter(names).collect()
    }
}

fn element(rank: usize, round: usize, index: usize) -> f64 {
    (1000 * rank + 7 * round + index) as f64
}

fn parameters() -> Parameters {
    Parameters::new()
        .with("tokens", TOKENS as i64)
        .with("n", WIDTH as i64)
        .with("T", DType::F32)
}

#[test]
fn tokens_go_to_their_experts() {
    for ranks in worlds([1, 2, 3, 8]) {
        threads_with(ranks, delayed(40), |comm| {
            let (rank, world) = (comm.rank(), comm.world());
            let program = Program::parse(DISPATCH).unwrap();
            assert_eq!(Program::parse(&program.to_string()).unwrap(), program);
            for choices in Choices::ALL {
                let inputs = move |rank: usize, round: usize, tensor: &TensorInstance| {
                    let value = |index: usize| match &*tensor.name {
                        "E" => choices.expert(world, rank, round, index) as f64,
                        _ => element(rank, round, index),
                    };
                    let elements = 0..tensor.bytes / tensor.dtype.size();
                    encode(tensor.dtype, &elements.map(value).collect::<Vec<_>>())
                };
                let launches = Launches {
                    verify: matches!(choices, Choices::Nobody) && world < 3,
                    ..Launches::default()
                };
                let played = play_with(comm, &program, &parameters(), &launches, inputs, |round| {
                    Ok(Box::new(move |_, tensor, bytes| {
                        check(choices, (rank, world), round, tensor, bytes)
                    }))
                });
                played.unwrap_or_else(|what| panic!("{ranks} ranks, {choices:?}: {what}"));
            }
        });
    }
}

/// Compares an output with what the choices ask for.
fn check(
    choices: Choices,
    (rank, world): (usize, usize),
    round: usize,
    tensor: &TensorInstance,
    bytes: &[u8],
) -> Result<(), String> {
    let values: Vec<f64> = decode(tensor.dtype, bytes);
    let expect = |at: usize, expected: f64| match values[at] {
        value if value == expected => Ok(()),
        value => Err(format!(
            "element {at} of {} is {value}; expected {expected}",
            tensor.name
        )),
    };
    for other in 0..world {
        let came = choices.slots(world, other, round, rank);
        let sent = choices.slots(world, rank, round, other);
        match &*tensor.name {
            "K" => expect(other, came.len() as f64)?,
            "P" => {
                for (place, slot) in sent.iter().enumerate() {
                    expect(*slot, place as f64)?;
                }
            }
            _ => {
                for (place, slot) in came.iter().enumerate() {
                    let row = other * TOKENS * SLOTS + place;
                    let from = slot / SLOTS * WIDTH;
                    for column in 0..WIDTH {
                        let expected = element(other, round, from + column);
                        expect(row * WIDTH + column, expected)?;
                    }
                }
            }
        }
    }
    if *tensor.name == *"P" {
        for slot in 0..TOKENS * SLOTS {
            let expert = choices.expert(world, rank, round, slot);
            if !(0..(world * EACH) as i64).contains(&expert) {
                expect(slot, -1.0)?;
            }
        }
    }
    Ok(())
}

/// Programs with one change: the first thing that is wrong with them.
#[test]
fn changed_programs_are_refused() {
    let cases = [
        // A lane's rows begin where those of the lane before it do.
        (
            "count(E[0..first] in",
            "count(E[0..first / 2] in",
            DiagnosticKind::Race,
        ),
        // The rows of all ranks are those of rank 0.
        (
            "to Y[rank][before + j]",
            "to Y[0][before + j]",
            DiagnosticKind::Race,
        ),
        // Rows are stored before the other's launch has begun.
        (
            "        barrier\n        for r",
            "        for r",
            DiagnosticKind::Race,
        ),
        // One row more than there is.
        (
            "for j in 0..own {",
            "for j in 0..own + 1 {",
            DiagnosticKind::OutOfBounds,
        ),
        // Fewer rows of memory.
        (
            "output Y: T[world, tokens * slots, n]",
            "output Y: T[world, tokens, n]",
            DiagnosticKind::OutOfBounds,
        ),
    ];
    let program = Program::parse(DISPATCH).unwrap();
    let small = Parameters::new().with("tokens", 3).with("n", 8);
    for world in 1..=3 {
        verify(&program, world, 1, &small).unwrap_or_else(|found| panic!("{}", found[0]));
    }
    for (right, wrong, kind) in cases {
        assert!(DISPATCH.contains(right), "{right}");
        let program = Program::parse(&DISPATCH.replacen(right, wrong, 1)).unwrap();
        let found = verify(&program, 2, 1, &small).expect_err(wrong);
        assert_eq!(found[0].kind, kind, "{wrong}: {}", found[0]);
    }
}

#[test]
fn what_is_expected_is_computed() {
    let run = |text: &str| {
        let program = Program::parse(text).unwrap();
        let world = 3;
        let evaluator = Evaluator::new(&program, world, 1, &parameters()).unwrap();
        let inputs = |rank: usize, _: usize, tensor: &TensorInstance| {
            let value = |index: usize| match &*tensor.name {
                "E" => Choices::Any.expert(world, rank, 5, index) as f64,
                _ => element(rank, 5, index),
            };
            let elements = 0..tensor.bytes / tensor.dtype.size();
            encode(tensor.dtype, &elements.map(value).collect::<Vec<_>>())
        };
        evaluator
            .run(inputs)
            .map(drop)
            .map_err(|error| error.to_string())
    };
    run(DISPATCH).unwrap();
    for (right, wrong) in [
        ("put X[t] to", "put X[min(t + 1, tokens - 1)] to"),
        (
            "Y[rank][before + j] on q",
            "Y[rank][before + own - 1 - j] on q",
        ),
        ("= copy(X[s / slots] on r)", "= copy(X[s / slots] on rank)"),
    ] {
        assert!(DISPATCH.contains(right), "{right}");
        assert!(run(&DISPATCH.replacen(right, wrong, 1)).is_err(), "{wrong}");
    }
}

/// Stored integers are read by the rank that they are stored at, of every type and in packets.
#[test]
fn integers_are_stored_and_read() {
    for scratch in [
        "i32",
        "u32",
        "i64",
        "packets8 i32",
        "packets16 u32",
        "packets16 i64",
    ] {
        let wait = if scratch.contains("packets") {
            ""
        } else {
            "barrier"
        };
        let text = format!(
            "program numbers() {{\n input X: f32[9, 20]\n input E: i32[8]\n output Y: f32[9, 20]\n \
             scratch H: {scratch}[2, 1]\n kernel lane in 0..1 threads 32 {{\n \
             let own = count(E in 1..4)\n H[epoch % 2][0] on (rank + 1) % world = integer(own)\n {wait}\n \
             let came = H[epoch % 2][0] at most 8\n for j in 0..came + 1 {{ Y[j] = copy(X[j]) }}\n barrier\n }}\n}}"
        );
        let program = Program::parse(&text).unwrap();
        for ranks in worlds([2, 3]) {
            threads_with(ranks, delayed(20), |comm| {
                let played = play(comm, &program, &Parameters::new(), Launches::default());
                played.unwrap_or_else(|what| panic!("{scratch}, {ranks} ranks: {what}"));
            });
        }
    }
}

#[test]
fn words_are_counted_and_found() {
    let words = [3, -1, 0, 7, 3, 2];
    for (row, inside, from, to, places) in [
        (1, true, 0, 4, &[0, 2, 4, 5][..]),
        (1, false, 0, 4, &[1, 3]),
        (1, true, 3, 3, &[]),
        (1, true, i64::MIN, i64::MAX, &[0, 1, 2, 3, 4, 5]),
        (2, true, 3, 4, &[0, 2]),
        (2, false, 3, 4, &[1]),
        (3, true, 7, 8, &[1]),
    ] {
        let of = |nth| {
            Matching {
                row,
                inside,
                from,
                to,
                nth,
            }
            .of(&words)
        };
        assert_eq!(of(None), places.len() as i64);
        for (number, place) in places.iter().enumerate() {
            assert_eq!(of(Some(number as i64)), *place);
        }
        assert_eq!((of(Some(-1)), of(Some(places.len() as i64))), (-1, -1));
    }
}
