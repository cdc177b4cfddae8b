//! Fused calls whose rows travel as fp8: within the documented error of `f64`, and bit for bit the same on all ranks.

use crate::common::{
    allocate, downloaded, encode, recorded, runs_case, threads_with, values, worlds,
};
use crate::data::by;
use crate::expected::assert_alike;
use crate::fused::play;
use crate::fused_rows::{AWKWARD, Made, USUAL, Wanted, fused, quantized};
use crate::scaled::unhurried;
use warplink::collective::{Fused, FusedKind, FusedMemory, QUANTIZED_BLOCK, Quantization, Wire};
use warplink::device::Priority;
use warplink::{Collectives, Communicator, DType};

const PLAIN: Wanted = Wanted {
    norm: None,
    ..USUAL
};

/// Values of a rank's row.
#[derive(Clone, Copy, Debug)]
enum Numbers {
    Usual,
    /// Magnitudes that differ by block, and within blocks.
    Spread,
    Awkward,
    NegativeZeros,
}

const NUMBERS: [Numbers; 4] = [
    Numbers::Usual,
    Numbers::Spread,
    Numbers::Awkward,
    Numbers::NegativeZeros,
];

/// Elements of `dtype` in memory, and their values.
fn numbers(of: Numbers, rank: usize, count: usize, dtype: DType) -> (Vec<u8>, Vec<f64>) {
    let random = values(rank, of as usize, 2 * count);
    let at = |element: usize| {
        let (a, b) = (random[2 * element], random[2 * element + 1]);
        let usual = (f64::from(a) - 128.0) / 37.0 + f64::from(b) / 1000.0;
        match of {
            Numbers::Usual => usual,
            Numbers::Spread => {
                let block = element / QUANTIZED_BLOCK;
                usual
                    * 2f64.powi((block * 7 + rank) as i32 % 24 - 12)
                    * 2f64.powi(-i32::from(b) / 16)
            }
            // Some blocks are all awkward, others have one such element, or none.
            Numbers::Awkward if a == 77 || element % 1024 < 128 => {
                AWKWARD[usize::from(b) % AWKWARD.len()]
            }
            Numbers::Awkward => usual,
            Numbers::NegativeZeros => -0.0,
        }
    };
    let all: Vec<f64> = (0..count).map(at).collect();
    let bytes = encode(dtype, &all);
    let all = dtype.decode(&bytes).collect();
    (bytes, all)
}

/// Half the distance to the next value of `dtype`, and its largest one.
fn rounding(dtype: DType, value: f64) -> (f64, f64) {
    let (relative, least, most) = match dtype {
        DType::F16 => (2f64.powi(-11), 2f64.powi(-25), 65504.0),
        DType::BF16 => (2f64.powi(-9), 2f64.powi(-134), 3.3895e38),
        _ => (2f64.powi(-24), 2f64.powi(-150), 3.4028e38),
    };
    (value.abs() * relative + least, most)
}

/// Bounds that the documentation of `Fused::wire` promises for a sum of these inputs.
struct Sums {
    exact: Vec<f64>,
    /// The magnitudes of inputs, added up, and the largest ones of their blocks.
    magnitudes: Vec<f64>,
    largest: Vec<f64>,
}

impl Sums {
    fn of(inputs: &[&[f64]], width: usize) -> Self {
        let count = inputs[0].len();
        let sum = |value: &dyn Fn(&[f64], usize) -> f64| -> Vec<f64> {
            let at = |element| inputs.iter().map(|input| value(input, element)).sum();
            (0..count).map(at).collect()
        };
        Self {
            exact: sum(&|input, element| input[element]),
            magnitudes: sum(&|input, element| input[element].abs()),
            largest: sum(&|input, element| {
                let row = element / width * width;
                let from = row + (element - row) / QUANTIZED_BLOCK * QUANTIZED_BLOCK;
                let block = &input[from..(from + QUANTIZED_BLOCK).min(row + width)];
                let finite = block.iter().filter(|value| value.is_finite());
                finite.fold(0.0, |most, value| most.max(value.abs()))
            }),
        }
    }

    fn check(&self, found: &[f64], twice: bool, (ranks, dtype): (usize, DType), what: &str) {
        for (element, found) in found.iter().enumerate() {
            let exact = self.exact[element];
            let (m, b) = (self.magnitudes[element], self.largest[element]);
            let bound = if twice {
                0.13 * m + 6e-6 * b
            } else {
                m / 16.0 + b / 450_000.0
            };
            let (half, most) = rounding(dtype, exact.abs() + bound);
            let bound = bound + half + (ranks + 2) as f64 * (m * 2f64.powi(-24) + 2f64.powi(-135));
            let right = if !m.is_finite() {
                found.is_nan()
            } else if !found.is_finite() {
                exact.abs() + bound >= most || m >= 3.4e38
            } else {
                (found - exact).abs() <= bound
            };
            assert!(
                right,
                "{what}: element {element} is {found:e}; expected {exact:e} within {bound:e}"
            );
            if m == 0.0 && exact.is_sign_negative() {
                assert!(
                    found.is_sign_negative(),
                    "{what}: element {element} is {found}"
                );
            }
        }
    }
}

fn small(comm: &Communicator) -> Collectives {
    by(comm, None, (64 << 10) * comm.world().max(4))
}

/// Sums of inputs, in all kinds, twice eagerly and twice in a graph.
fn sums(comm: &Communicator, collectives: &Collectives, call: &Fused, numbers_of: Numbers) {
    let Fused {
        kind,
        tokens,
        width,
        dtype,
        ..
    } = *call;
    let (ranks, rank) = (comm.world(), comm.rank());
    let what = format!("{kind} of {tokens} × {width} {dtype}, {numbers_of:?}");
    let given: Vec<_> = (0..ranks)
        .map(|rank| numbers(numbers_of, rank, tokens * width, dtype))
        .collect();
    let bytes = call.bytes(ranks).unwrap();
    let own = if kind == FusedKind::AllReduce {
        0
    } else {
        tokens / ranks * width
    };
    let mine = rank * own..rank * own + own;
    let gathers = kind == FusedKind::AllGather;
    let allocate = |bytes| allocate(comm, bytes);
    let [input, sum, output] = [bytes.input, bytes.residual, bytes.output].map(allocate);
    let sent = if gathers {
        &given[rank].0[mine.start * dtype.size()..mine.end * dtype.size()]
    } else {
        &given[rank].0[..]
    };
    comm.device().upload(&input, sent).unwrap();
    let memory = FusedMemory {
        sum: Some(&sum),
        output: Some(&output),
        ..FusedMemory::of(&input)
    };
    let stream = comm.create_stream(Priority::Normal).unwrap();
    let run = |launch: &dyn Fn()| {
        for slice in [&sum, &output] {
            comm.device()
                .upload(slice, &vec![0x55; slice.bytes()])
                .unwrap();
        }
        comm.barrier().unwrap();
        launch();
        comm.synchronize(&stream).unwrap();
        let found = [&sum, &output].map(|slice| downloaded(comm, slice));
        let common = match kind {
            FusedKind::AllReduce => found.concat(),
            FusedKind::ReduceScatter => Vec::new(),
            _ => found[1].clone(),
        };
        assert_alike(comm, &common, &what);
        let [sum, output] = found.map(|bytes| dtype.decode(&bytes).collect::<Vec<f64>>());
        let inputs: Vec<&[f64]> = given.iter().map(|(_, values)| &values[..]).collect();
        let of = (ranks, dtype);
        if gathers {
            assert!(
                sum.iter()
                    .zip(&inputs[rank][mine.clone()])
                    .all(|(a, b)| a.to_bits() == b.to_bits() || b.is_nan())
            );
            for (owner, values) in inputs.iter().enumerate() {
                let range = owner * own..owner * own + own;
                Sums::of(&[&values[range.clone()]], width).check(&output[range], false, of, &what);
            }
            return;
        }
        let part = |range: std::ops::Range<usize>| -> Vec<&[f64]> {
            inputs.iter().map(|input| &input[range.clone()]).collect()
        };
        let whole = Sums::of(&inputs, width);
        match kind {
            FusedKind::AllReduce => {
                [&sum, &output].map(|found| whole.check(found, true, of, &what))
            }
            FusedKind::AllReduceSharded => {
                // h, which travels, is rounded to the type first.
                Sums::of(&part(mine.clone()), width).check(&sum, false, of, &what);
                [(), whole.check(&output, true, of, &what)]
            }
            _ => {
                let own = Sums::of(&part(mine.clone()), width);
                [&sum, &output].map(|found| own.check(found, false, of, &what))
            }
        };
    };
    let enqueue = || collectives.fused(call, &memory, &stream).unwrap();
    (0..2).for_each(|_| run(&enqueue));
    let graph = recorded(&stream, enqueue);
    (0..2).for_each(|_| run(&|| graph.launch(&stream).unwrap()));
}

#[test]
fn quantized_sums_are_within_their_bound_and_the_same_on_all_ranks() {
    for ranks in worlds([1, 2, 3, 8]) {
        threads_with(ranks, unhurried, |comm| {
            let collectives = small(comm);
            for kind in FusedKind::ALL {
                let tokens = |tokens: usize| match kind {
                    FusedKind::AllReduce => tokens,
                    _ => tokens.div_ceil(ranks) * ranks,
                };
                let shapes = [(1, 1), (5, 137), (2, 1100), (40, 259)];
                for (number, (rows, width)) in shapes.into_iter().enumerate() {
                    for (of, numbers_of) in NUMBERS.into_iter().enumerate() {
                        // Many ranks keep a small machine busy.
                        let few = ranks != 2 && (number > 1 || ranks == 8);
                        if few && of != 1 + kind as usize % 2 {
                            continue;
                        }
                        let place = (kind as usize * shapes.len() + number) * NUMBERS.len() + of;
                        if !runs_case(place, 5) {
                            continue;
                        }
                        let dtype = DType::MATMUL[(of + number) % 3];
                        let call = Fused {
                            dtype,
                            wire: Wire::Fp8,
                            ..fused(kind, tokens(rows), width, PLAIN)
                        };
                        sums(comm, &collectives, &call, numbers_of);
                    }
                }
            }
        });
    }
}

/// Of what arrives, the norm and its quantisation are as accurate as without.
#[test]
fn epilogues_follow_quantized_sums() {
    for ranks in worlds([1, 2, 3]) {
        threads_with(ranks, unhurried, |comm| {
            let collectives = small(comm);
            for wanted in [USUAL, quantized(Quantization::PerBlock)] {
                let call = Fused {
                    wire: Wire::Fp8,
                    ..fused(FusedKind::AllReduce, 7, 300, wanted)
                };
                for in_place in [false, true] {
                    let made = Made::new(comm, (call, wanted), in_place);
                    play(comm, &collectives, &made, 1);
                }
            }
        });
    }
}
