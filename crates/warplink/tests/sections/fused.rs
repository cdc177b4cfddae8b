//! All-reduce with a function of rows, against what it means in `f64`, and bit for bit in the order that is promised.

use crate::common::{encode, threads, values, world};
use crate::play::{Check, Launches, play_with};
use half::{bf16, f16};
use warplink::DType;
use warplink::program::{Parameters, Program, TensorInstance};

/// Threads of a lane, and rows, widths and types.
const CASES: [(i64, usize, usize, DType); 9] = [
    (256, 1, 1, DType::BF16),
    (256, 5, 37, DType::BF16),
    (512, 3, 1000, DType::F16),
    (1024, 2, 8193, DType::BF16),
    (256, 2, 12_000, DType::F32),
    (256, 9, 8, DType::F32),
    (512, 4, 7, DType::F16),
    (1024, 1, 4096, DType::BF16),
    (1024, 1, 20_001, DType::BF16),
];

/// Awkward values of each type.
const AWKWARD: [f64; 12] = [
    0.0,
    -0.0,
    f64::INFINITY,
    f64::NEG_INFINITY,
    f64::NAN,
    1e-40,
    -3e-39,
    6e-8,
    65504.0,
    -3e38,
    1.0,
    -1e-3,
];

fn rounded(dtype: DType, value: f32) -> f32 {
    match dtype {
        DType::BF16 => bf16::from_f32(value).to_f32(),
        DType::F16 => f16::from_f32(value).to_f32(),
        _ => value,
    }
}

/// The elements of an input of a rank in a launch; residuals and weights are those of all ranks.
fn numbers(rank: usize, round: usize, name: &str, count: usize) -> Vec<f64> {
    let (rank, salt) = match name {
        "X" => (rank, 0),
        "R" => (0, 50),
        _ => (0, 90),
    };
    let bytes = values(rank, round + salt, 2 * count);
    let at = |element: usize| {
        let (a, b) = (bytes[2 * element], bytes[2 * element + 1]);
        // Every third launch has awkward numbers in some rows.
        if round % 3 == 2 && name != "W" && a < 3 {
            return AWKWARD[usize::from(b) % AWKWARD.len()];
        }
        f64::from(i32::from(a) - 128) / 37.0 + f64::from(b) / 1000.0
    };
    (0..count).map(at).collect()
}

fn elements(rank: usize, round: usize, tensor: &TensorInstance) -> Vec<u8> {
    let count = tensor.bytes / tensor.dtype.size();
    encode(tensor.dtype, &numbers(rank, round, &tensor.name, count))
}

/// A sum along a row in the order that is promised.
fn row_sum(values: &[f32], threads: usize) -> f32 {
    let mut partial = vec![0.0_f32; threads];
    for (unit, elements) in values.chunks(8).enumerate() {
        let sum = &mut partial[unit % threads];
        elements.iter().for_each(|value| *sum += value);
    }
    let tree = |values: &[f32]| {
        let mut all = values.to_vec();
        all.resize(32, 0.0);
        while all.len() > 1 {
            let (low, high) = all.split_at(all.len() / 2);
            all = low.iter().zip(high).map(|(a, b)| a + b).collect();
        }
        all[0]
    };
    let warps: Vec<f32> = partial.chunks(32).map(tree).collect();
    tree(&warps)
}

/// The rows H and N, exactly, and N in `f64`.
struct Row {
    h: Vec<f32>,
    n: Vec<f32>,
    near: Vec<f64>,
}

fn row(
    round: usize,
    (ranks, threads, t, width, dtype): (usize, usize, usize, usize, DType),
    tokens: usize,
) -> Row {
    let read = |rank: usize, name: &str, from: usize, all: usize| -> Vec<f32> {
        let numbers = numbers(rank, round, name, all);
        let row = numbers[from..from + width].iter();
        row.map(|value| rounded(dtype, *value as f32)).collect()
    };
    let (from, all) = (t * width, tokens * width);
    let (residual, weight) = (read(0, "R", from, all), read(0, "W", 0, width));
    let inputs: Vec<Vec<f32>> = (0..ranks).map(|rank| read(rank, "X", from, all)).collect();
    let at = |element: usize| {
        let sum = inputs.iter().map(|input| input[element]);
        let sum = sum.reduce(|a, b| a + b).unwrap();
        rounded(dtype, sum + residual[element])
    };
    let h: Vec<f32> = (0..width).map(at).collect();
    let squares: Vec<f32> = h.iter().map(|h| h * h).collect();
    let scale = 1.0 / (row_sum(&squares, threads) / width as f32 + 1e-6).sqrt();
    let n = h.iter().zip(&weight);
    let n = n.map(|(h, w)| rounded(dtype, h * scale * w)).collect();
    let mean: f64 = h.iter().map(|h| f64::from(*h).powi(2)).sum::<f64>() / width as f64;
    let exact = h.iter().zip(&weight);
    let exact = exact.map(|(h, w)| f64::from(*h) / (mean + 1e-6).sqrt() * f64::from(*w));
    let near = exact.collect();
    Row { h, n, near }
}

fn decoded(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    let chunks = bytes.chunks_exact(dtype.size());
    let value = |chunk: &[u8]| match dtype {
        DType::BF16 => bf16::from_le_bytes([chunk[0], chunk[1]]).to_f32(),
        DType::F16 => f16::from_le_bytes([chunk[0], chunk[1]]).to_f32(),
        _ => f32::from_le_bytes([chunk[0], chunk[1], chunk[2], chunk[3]]),
    };
    chunks.map(value).collect()
}

/// Compares the rows of an output.
fn check(
    name: &str,
    round: usize,
    of: (usize, usize, usize, usize, DType),
    bytes: &[u8],
) -> Result<(), String> {
    let (_, _, tokens, width, dtype) = of;
    let found = decoded(dtype, bytes);
    for t in 0..tokens {
        let meant = row(round, (of.0, of.1, t, width, dtype), tokens);
        // What overflows single precision on the way is no less right.
        let overflows = meant.h.iter().any(|h| h.abs() > 1e18);
        let exact = if name == "H" { &meant.h } else { &meant.n };
        for (element, (exact, found)) in exact.iter().zip(&found[t * width..]).enumerate() {
            let same = exact.to_bits() == found.to_bits() || exact.is_nan() && found.is_nan();
            let near = meant.near[element];
            let bound = near.abs() / 100.0 + 1e-5;
            let is_near =
                name == "H" || !near.is_finite() || (f64::from(*found) - near).abs() <= bound;
            if !same || !(is_near || overflows || dtype == DType::F16) {
                return Err(format!(
                    "row {t}, element {element} is {found}; expected {exact}, about {near}"
                ));
            }
        }
    }
    Ok(())
}

#[test]
fn fused_norms_are_the_same_bits_on_all_ranks() {
    for ranks in [2, 3, 8] {
        threads(world(ranks), |comm| {
            let text = include_str!("../../../../examples/programs/all_reduce_norm.wlp");
            let programs = ["packets16", "packets128"].map(|packing| {
                let text = text.replace("packets16", packing);
                Program::parse(&text).unwrap()
            });
            for (number, (threads, tokens, width, dtype)) in CASES.into_iter().enumerate() {
                // Each case by each packing, in turns of the numbers of ranks.
                let program = &programs[(number + ranks) % programs.len()];
                // Verifying many long rows takes long, and finds nothing more.
                let verify = width < 1000;
                let launches = Launches {
                    eager: 3,
                    captured: 4,
                    verify,
                    ..Launches::default()
                };
                let parameters = Parameters::new()
                    .with("tokens", tokens as i64)
                    .with("n", width as i64)
                    .with("T", dtype)
                    .with("threads", threads);
                let of = (comm.world(), threads as usize, tokens, width, dtype);
                let played = play_with(comm, program, &parameters, &launches, elements, |round| {
                    let checks: Check<'_> =
                        Box::new(move |_, tensor, bytes| check(&tensor.name, round, of, bytes));
                    Ok(checks)
                });
                played.unwrap_or_else(|how| panic!("{tokens} × {width} {dtype}: {how}"));
            }
        });
    }
}
