//! Fused calls to nvfp4, against a reference in `f64` that shares nothing with the library: codes and scales are looked for
//! among all values that there are.

use crate::common::{downloaded, recorded, threads_with, world, worlds};
use crate::data::{by, calling_with};
use crate::fused_rows::{AWKWARD, USUAL, Wanted, fused, quantized};
use crate::scaled::unhurried;
use warplink::collective::{Fused, FusedKind, FusedMemory, Quantization, Wire};
use warplink::device::{AllocationKind, Priority};
use warplink::{Collectives, Communicator, DType};

/// Elements of a block.
const BLOCK: usize = 16;

/// The values of e2m1, by their codes.
const E2M1: [f64; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// The value of a code of e4m3; NaN of the last one.
fn e4m3(code: usize) -> f64 {
    let (exponent, mantissa) = ((code >> 3) as i32, (code & 7) as f64);
    match (exponent, code) {
        (_, 127) => f64::NAN,
        (0, _) => mantissa / 512.0,
        _ => (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7),
    }
}

/// The code of the value next to `magnitude`, the even one of two, and the last one of what is larger than all.
fn nearest(magnitude: f64, values: &[f64]) -> usize {
    let magnitude = magnitude.min(values[values.len() - 1]);
    let mut best = 0;
    for (code, value) in values.iter().enumerate() {
        let (off, least) = ((value - magnitude).abs(), (values[best] - magnitude).abs());
        if off < least || off == least && code % 2 == 0 {
            best = code;
        }
    }
    best
}

fn scales() -> Vec<f64> {
    (0..127).map(e4m3).collect()
}

/// A code with its sign.
fn coded(value: f64) -> u8 {
    if value.is_nan() {
        return 7;
    }
    let sign = if value.is_sign_negative() { 8 } else { 0 };
    sign | nearest(value.abs(), &E2M1) as u8
}

fn code_at(bytes: &[u8], element: usize) -> u8 {
    bytes[element / 2] >> (4 * (element % 2)) & 15
}

/// Whether a row of numbers, each known but for an error of about `off`, may have become these codes and scales.
pub(crate) fn check_row(row: &[f64], off: f64, global: f64, codes: &[u8], found: &[u8]) {
    let all = scales();
    for (number, block) in row.chunks(BLOCK).enumerate() {
        let most = block
            .iter()
            .fold(0.0, |most: f64, value| most.max(value.abs()));
        let ideal = |more: f64| nearest((global * most / 6.0 * more).max(0.0), &all);
        let scale = usize::from(found[number]);
        let about = off * global / 6.0;
        let wide = about > e4m3(scale.min(126)) / 64.0;
        assert!(
            wide || (ideal(1.0 - 1e-4)..=ideal(1.0 + 1e-4)).contains(&scale),
            "block {number}: scale {scale}, expected {}",
            ideal(1.0)
        );
        for (at, value) in block.iter().enumerate() {
            let element = number * BLOCK + at;
            let code = code_at(codes, element);
            let size = E2M1[usize::from(code & 7)];
            let factor = if scale == 0 {
                0.0
            } else {
                global / e4m3(scale)
            };
            let about = (value.abs() * 1e-4 + off) * factor;
            let [low, high] = [-about, about]
                .map(|about| E2M1[nearest((value.abs() * factor + about).max(0.0), &E2M1)]);
            assert!(
                (low..=high).contains(&size),
                "element {element}: code {code} of {value} by {factor}"
            );
            let sign = code & 8 != 0;
            assert!(
                sign == value.is_sign_negative() || value.abs() <= off,
                "element {element}: code {code} of {value}"
            );
        }
    }
}

/// What a row of `f32` becomes, bit for bit: its codes and the scales.
fn exactly(row: &[f32], global: f32) -> [Vec<u8>; 2] {
    let all = scales();
    let mut codes = vec![0; row.len().div_ceil(2)];
    let mut found = Vec::new();
    for (number, block) in row.chunks(BLOCK).enumerate() {
        let sizes = block.iter().map(|value| value.abs().min(f32::MAX));
        let most = sizes.fold(0.0, f32::max);
        let ideal = global * (most / 6.0);
        let is_nan = block.iter().any(|value| value.is_nan());
        let code = if is_nan {
            127
        } else {
            nearest(ideal.into(), &all)
        };
        found.push(code as u8);
        let factor = if is_nan || code == 0 {
            0.0
        } else {
            global / e4m3(code) as f32
        };
        for (at, value) in block.iter().enumerate() {
            let element = number * BLOCK + at;
            codes[element / 2] |= coded((value * factor).into()) << (4 * (element % 2));
        }
    }
    [codes, found]
}

/// What a rank's row consists of.
#[derive(Clone, Copy, Debug)]
enum Numbers {
    /// Middles of neighbouring floats of 4 bits, and numbers next to those.
    Ties,
    /// Magnitudes from the least to the largest.
    Spread,
    Awkward,
    Zeros,
    Subnormal,
}

const NUMBERS: [Numbers; 5] = [
    Numbers::Ties,
    Numbers::Spread,
    Numbers::Awkward,
    Numbers::Zeros,
    Numbers::Subnormal,
];

fn number(of: Numbers, element: usize) -> f32 {
    let sign = if element.is_multiple_of(3) { -1.0 } else { 1.0 };
    let mixed = (element * 2_654_435_761) >> 7;
    let value = match of {
        Numbers::Ties if element.is_multiple_of(BLOCK) => 6.0,
        Numbers::Ties => {
            let middle = [0.25_f32, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0][element % 7];
            [middle.next_down(), middle, middle.next_up()][mixed % 3]
        }
        Numbers::Spread => {
            2f32.powi((element / BLOCK * 23 % 250) as i32 - 125) * (mixed % 97) as f32
        }
        Numbers::Awkward => AWKWARD[mixed % AWKWARD.len()] as f32,
        Numbers::Zeros => 0.0,
        Numbers::Subnormal => f32::from_bits((mixed % (1 << 23)) as u32),
    };
    sign * value
}

/// Rows of one rank, where the others have zeros, so that sums are exact; the last rank's is what all gather.
fn exact_rows(comm: &Communicator, collectives: &Collectives, (call, of): (&Fused, Numbers)) {
    let Fused {
        kind,
        tokens,
        width,
        epilogue,
        ..
    } = *call;
    let (ranks, rank) = (comm.world(), comm.rank());
    let what = format!("{kind} of {tokens} × {width}, {of:?}");
    let bytes = call.bytes(ranks).unwrap();
    assert_eq!(epilogue.quantization, Some(Quantization::Nvfp4));
    let allocate = |bytes| {
        let allocated = comm.device().allocate(bytes, AllocationKind::Plain);
        allocated.unwrap()
    };
    let [input, codes, found] = [bytes.input, bytes.quantized, bytes.scale].map(allocate);
    let given = allocate(4);
    let all: Vec<f32> = (0..tokens * width).map(|at| number(of, at)).collect();
    let own = tokens / ranks * width;
    let mine = rank * own..rank * own + own;
    let sent: Vec<f32> = match kind {
        FusedKind::AllGather => all[mine.clone()].to_vec(),
        _ if rank == 0 => all.clone(),
        // A sum of zeros with different signs is positive.
        _ => all.iter().map(|value| 0.0_f32.copysign(*value)).collect(),
    };
    let sent: Vec<u8> = sent.iter().flat_map(|value| value.to_le_bytes()).collect();
    comm.device().upload(&input, &sent).unwrap();
    let memory = FusedMemory {
        quantized: Some(&codes),
        scale: Some(&found),
        global_scale: Some(&given),
        ..FusedMemory::of(&input)
    };
    let rows = match kind {
        FusedKind::ReduceScatter => &all[mine],
        _ => &all[..],
    };
    let stream = comm.create_stream(Priority::Normal).unwrap();
    let run = |global: f32, launch: &dyn Fn()| {
        comm.device().upload(&given, &global.to_le_bytes()).unwrap();
        for slice in [&codes, &found] {
            let dirt = vec![0x5a; slice.bytes()];
            comm.device().upload(slice, &dirt).unwrap();
        }
        comm.barrier().unwrap();
        launch();
        comm.synchronize(&stream).unwrap();
        let [codes, found] = [&codes, &found].map(|slice| downloaded(comm, slice));
        for (t, row) in rows.chunks(width).enumerate() {
            let [meant_codes, meant_scales] = exactly(row, global);
            let part = |bytes: &[u8], each: usize| bytes[t * each..(t + 1) * each].to_vec();
            let codes = part(&codes, width.div_ceil(2));
            assert_eq!(
                part(&found, width.div_ceil(BLOCK)),
                meant_scales,
                "{what}, {t}, {global}"
            );
            assert_eq!(codes, meant_codes, "{what}, {t}, {global}");
        }
    };
    let enqueue = || collectives.fused(call, &memory, &stream).unwrap();
    run(1.0, &enqueue);
    let graph = recorded(&stream, enqueue);
    for global in [448.0 * 6.0 / 6.3, 3e-30, 1e30] {
        run(global, &|| graph.launch(&stream).unwrap());
    }
}

#[test]
fn codes_and_scales_are_exact() {
    for ranks in worlds([1, 2, 3, 8]) {
        threads_with(ranks, unhurried, |comm| {
            let collectives = by(comm, None, 2 << 20);
            let plain = Wanted {
                norm: None,
                residual: false,
                residual_out: false,
                ..quantized(Quantization::Nvfp4)
            };
            for kind in FusedKind::ALL {
                for (number, width) in [1, 15, 16, 33, 300].into_iter().enumerate() {
                    for (at, of) in NUMBERS.into_iter().enumerate() {
                        // Many ranks keep a small machine busy.
                        if ranks != 2 && at != (number + kind as usize) % NUMBERS.len() {
                            continue;
                        }
                        let call = Fused {
                            dtype: DType::F32,
                            wire: Wire::Exact,
                            ..fused(kind, 2 * ranks, width, plain)
                        };
                        exact_rows(comm, &collectives, (&call, of));
                    }
                }
            }
        });
    }
}

#[test]
fn a_global_scale_is_given_exactly_with_nvfp4() {
    calling_with(world(1), unhurried, |comm, collectives, stream| {
        let memory = comm.device().allocate(1 << 10, AllocationKind::Plain);
        let memory = memory.unwrap();
        let part = |from: usize, bytes: usize| memory.slice(from..from + bytes).unwrap();
        let wanted = Wanted {
            residual: false,
            residual_out: false,
            ..quantized(Quantization::Nvfp4)
        };
        let call = fused(FusedKind::AllReduce, 1, 32, wanted);
        let (input, weight, codes) = (part(0, 64), part(64, 64), part(128, 16));
        let (scale, global) = (part(256, 2), part(512, 4));
        let whole = FusedMemory {
            weight: Some(&weight),
            quantized: Some(&codes),
            scale: Some(&scale),
            global_scale: Some(&global),
            ..FusedMemory::of(&input)
        };
        collectives.fused(&call, &whole, stream).unwrap();
        let without = FusedMemory {
            global_scale: None,
            ..whole
        };
        let usual = fused(
            FusedKind::AllReduce,
            1,
            32,
            Wanted {
                residual: false,
                residual_out: false,
                ..USUAL
            },
        );
        let output = part(128, 64);
        let with = FusedMemory {
            weight: Some(&weight),
            output: Some(&output),
            global_scale: Some(&global),
            ..FusedMemory::of(&input)
        };
        for (call, memory) in [(call, without), (usual, with)] {
            let error = collectives.fused(&call, &memory, stream).unwrap_err();
            assert!(
                error.message().contains("a global scale is given"),
                "{error}"
            );
        }
        comm.synchronize(stream).unwrap();
    });
}
