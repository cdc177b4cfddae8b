//! Kernels whose lanes read counts and rows from memory: what they give, and what ends a launch.

use crate::common::{
    Stopwatch, TimedBarrier, assert_says, decode, delayed, encode, several, threads,
    threads_that_end, threads_with, with_timeout, worlds,
};
use crate::play::{Launches, play_with};
use std::time::Duration;
use warplink::device::{AllocationKind, Priority};
use warplink::program::ir::Role;
use warplink::program::{Bindings, Parameters, PrepareOptions, Program, TensorInstance};
use warplink::{Communicator, DType, Error, ErrorKind};

const ALL_TO_ALL_V: &str = include_str!("../../../../examples/programs/all_to_all_v.wlp");
const DISPATCH: &str = include_str!("../../../../examples/programs/dispatch.wlp");

/// Rows, or tokens, of each rank, and elements of each.
const ROWS: usize = 9;
const WIDTH: usize = 20;

/// How many rows go from rank to rank.
#[derive(Clone, Copy, Debug)]
enum Counts {
    None,
    All,
    ToOne,
    Any,
}

impl Counts {
    const ALL: [Self; 4] = [Self::None, Self::All, Self::ToOne, Self::Any];

    fn between(self, from: usize, to: usize, round: usize) -> usize {
        match self {
            Self::None => 0,
            Self::All => ROWS,
            Self::ToOne => ROWS * usize::from(to == 1),
            Self::Any => number(from, round, to) % (ROWS + 1),
        }
    }
}

/// A number that differs for each rank, round and index.
fn number(rank: usize, round: usize, index: usize) -> usize {
    let mixed = (rank * 7919 + round * 104_729 + index * 31 + 17) as u64;
    (mixed.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 44) as usize
}

fn element(rank: usize, round: usize, index: usize) -> f64 {
    (number(rank, round, index) % 65_536) as f64
}

fn token(rank: usize, round: usize, index: usize) -> usize {
    number(rank, round + 1000, index) % ROWS
}

fn inputs(
    counts: Counts,
    world: usize,
) -> impl Fn(usize, usize, &TensorInstance) -> Vec<u8> + Clone {
    move |rank, round, tensor| {
        let elements = 0..tensor.bytes / tensor.dtype.size();
        let values: Vec<f64> = elements
            .map(|index| match &*tensor.name {
                "C" => counts.between(rank, index % world, round) as f64,
                "I" => token(rank, round, index) as f64,
                _ => element(rank, round, index),
            })
            .collect();
        encode(tensor.dtype, &values)
    }
}

/// Whether an element was left as it was.
fn is_untouched(bytes: &[u8]) -> bool {
    bytes.iter().all(|byte| *byte == 0xff)
}

#[test]
fn rows_go_where_counts_and_indices_in_memory_say() {
    for ranks in worlds([2, 3, 8]) {
        threads_with(ranks, delayed(40), |comm| {
            for (text, rows) in [(ALL_TO_ALL_V, "rows"), (DISPATCH, "tokens")] {
                for counts in Counts::ALL {
                    let parameters = Parameters::new()
                        .with(rows, ROWS as i64)
                        .with("n", WIDTH as i64)
                        .with("T", DType::F32);
                    let played = rows_arrive(comm, text, &parameters, counts);
                    played.unwrap_or_else(|what| panic!("{ranks} ranks, {counts:?}: {what}"));
                }
            }
        });
    }
}

fn rows_arrive(
    comm: &Communicator,
    text: &str,
    parameters: &Parameters,
    counts: Counts,
) -> Result<(), String> {
    let (rank, world) = (comm.rank(), comm.world());
    let program = Program::parse(text).unwrap();
    assert_eq!(Program::parse(&program.to_string()).unwrap(), program);
    let launches = Launches {
        // Once for each size is enough; a graph replays other counts.
        verify: matches!(counts, Counts::None) && world < 8,
        ..Launches::default()
    };
    let inputs = inputs(counts, world);
    play_with(comm, &program, parameters, &launches, inputs, |round| {
        Ok(Box::new(move |_, tensor, bytes| {
            let size = tensor.dtype.size();
            let values: Vec<f64> = decode(tensor.dtype, bytes);
            for (at, value) in values.iter().enumerate() {
                let (from, row, column) = match &*tensor.name {
                    "Y" => (at / WIDTH / ROWS, at / WIDTH % ROWS, at % WIDTH),
                    "N" => (at / ROWS, at % ROWS, 0),
                    _ => (at, 0, 0),
                };
                let count = counts.between(from, rank, round);
                let named = token(from, round, rank * ROWS + row);
                let expected = match &*tensor.name {
                    "K" => count as f64,
                    "N" => named as f64,
                    _ if row >= count => {
                        if is_untouched(&bytes[at * size..(at + 1) * size]) {
                            continue;
                        }
                        return Err(format!("row {row} of rank {from} is written"));
                    }
                    _ if text == DISPATCH => element(from, round, named * WIDTH + column),
                    _ => element(from, round, (rank * ROWS + row) * WIDTH + column),
                };
                if *value != expected {
                    return Err(format!("element {at} is {value}; expected {expected}"));
                }
            }
            Ok(())
        }))
    })
}

/// A launch ends where it reads a value that is out of range, though another lane waits for the one that does; it names the
/// word, and writes no row.
#[test]
fn a_value_out_of_range_ends_the_launch_and_names_its_word() {
    let texts = [
        (
            "count",
            "let m = C[1] at most 5\n for j in 0..m { Y[j] = copy(X[j]) }",
            "C[1] is",
            5,
        ),
        (
            "row",
            "for j in 0..3 { Y[j] = copy(X[C[j]]) }",
            "C[0] is",
            8,
        ),
        (
            "row of a target",
            "for j in 0..3 { Y[C[j]] = copy(X[j]) }",
            "C[0] is",
            8,
        ),
        (
            "count in scratch",
            "put C[1] to H[0] on rank\n let m = H[0] at most 5\n for j in 0..m { Y[j] = copy(X[j]) }",
            "H[0] is",
            5,
        ),
    ];
    for (name, body, word, most) in texts {
        let text = format!(
            "program wrong() {{\n input X: f32[9, 20]\n input C: i32[3]\n output Y: f32[9, 20]\n \
             scratch H: packets16 i32[1]\n kernel lane in 0..2 threads 32 {{\n if lane == 0 {{\n{body}\n \
             signal rank at 1\n }} else {{\n wait rank\n }}\n barrier\n }}\n}}"
        );
        let program = Program::parse(&text).unwrap();
        for wrong in [most + 1, 1000, -1, i32::MIN, i32::MAX] {
            threads(1, |comm| {
                let (ended, written) = launch(comm, &program, wrong);
                let said = ended.expect_err("the launch ends").to_string();
                let expected = format!("{word} {wrong}; expected 0 to {most}");
                assert!(
                    said.contains(&expected) && said.contains("line "),
                    "{name}: {said}"
                );
                assert!(!written, "{name}, {wrong}: rows were written");
            });
        }
        threads(1, |comm| {
            let (ended, written) = launch(comm, &program, most);
            assert!(ended.is_ok() && written, "{name}: {ended:?}");
        });
    }
}

/// Ranks that wait for one whose word is out of range, or is not theirs, soon learn what is wrong, and on which rank.
#[test]
fn a_wrong_word_of_one_rank_ends_the_launch_on_all() {
    let refused = "let m = C[1] at most 5\n for j in 0..m { Y[j] = copy(X[j]) }\n barrier";
    let announced = "let m = C[1] at most 9\n if lane == 0 {\n announce m in A[epoch % 2]\n \
                     agree m in A[epoch % 2]\n for j in 0..m { Y[j] = copy(X[j]) }\n }";
    for (body, kind, says) in [
        (
            refused,
            ErrorKind::InvalidArgument,
            "C[1] is 7; expected 0 to 5",
        ),
        (announced, ErrorKind::Mismatch, "the peer announces"),
    ] {
        let text = format!(
            "program wrong() {{\n input X: f32[9, 20]\n input C: i32[3]\n output Y: f32[9, 20]\n \
             scratch A: packets16 i32[2, world, 1]\n kernel lane in 0..2 threads 32 {{\n{body}\n}}\n}}"
        );
        let program = Program::parse(&text).unwrap();
        let Some(ranks) = several(3) else { return };
        let all = TimedBarrier::new(ranks);
        threads_that_end(ranks, with_timeout(Duration::from_secs(60)), |comm| {
            let own = if comm.rank() == 1 { 7 } else { 3 };
            let (right, _) = launch(&comm, &program, 3);
            right.unwrap();
            let started = Stopwatch::start();
            let error = launch(&comm, &program, own).0.unwrap_err();
            let took = started.elapsed();
            all.wait();
            comm.abort("the test is over");
            assert!(took < Duration::from_secs(5), "{error}, after {took:?}");
            assert_says(&error, &[says]);
            // Either rank of a difference may find it first.
            if comm.rank() == 1 && kind == ErrorKind::InvalidArgument {
                assert_eq!(error.kind(), kind, "{error}");
                assert_eq!(error.rank(), Some(1), "{error}");
            } else {
                let kinds = [kind, ErrorKind::PeerFailed];
                assert!(kinds.contains(&error.kind()), "{error}");
                assert!(error.peer().is_some(), "{error}");
            }
        });
    }
}

/// Launches a program with a word of this value; whether that ends, and whether anything was written.
fn launch(comm: &Communicator, program: &Program, word: i32) -> (Result<(), Error>, bool) {
    let device = comm.device();
    // Not all rows of the output are written.
    let options = PrepareOptions {
        verify: false,
        ..PrepareOptions::default()
    };
    let prepared = comm
        .executor()
        .prepare(program, &Parameters::new(), options)
        .unwrap();
    let mut bindings = Bindings::new();
    for tensor in &prepared.rank_program().tensors {
        let slice = device
            .allocate(tensor.bytes, AllocationKind::Plain)
            .unwrap();
        let bytes = match (&*tensor.name, tensor.role) {
            ("C", _) => [word; 3].map(i32::to_le_bytes).concat(),
            (_, Role::Input) => vec![0; tensor.bytes],
            _ => vec![0xff; tensor.bytes],
        };
        device.upload(&slice, &bytes).unwrap();
        bindings.insert(tensor.name.to_string(), slice);
    }
    let output = bindings["Y"].clone();
    let stream = comm.create_stream(Priority::Normal).unwrap();
    let plan = prepared.bind(&bindings).unwrap();
    let ended = plan.run(&stream).and_then(|()| comm.synchronize(&stream));
    let mut bytes = vec![0; output.bytes()];
    device.download(&output, &mut bytes).unwrap();
    (ended, !is_untouched(&bytes))
}

/// Lanes own rows by what they read, too: then no two write the same one.
#[test]
fn lanes_that_own_what_they_read_may_write_it() {
    let verdict = |owns: &str| {
        let text = format!(
            "program scattered(n) {{\n input X: f32[6, n]\n input I: i32[6]\n output Y: f32[4, n]\n \
             kernel lane in 0..2 threads 32 {{\n for r in 0..6 {{\n let i = I[r] at most 3\n \
             if {owns} {{ Y[i] = copy(X[r]) }}\n }}\n }}\n}}"
        );
        let program = Program::parse(&text).unwrap();
        let parameters = Parameters::new().with("n", 40);
        warplink::program::verify(&program, 2, 1, &parameters)
    };
    verdict("i % 2 == lane").unwrap();
    verdict("i / 2 == lane").unwrap();
    verdict("r % 2 == lane").unwrap_err();
    verdict("i % 3 == lane or i == 3").unwrap_err();
}
