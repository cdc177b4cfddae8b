//! All-reduce with residual, RMSNorm and quantisation, against `f64`, and bit for bit on all ranks.

use crate::common::{assert_says, encode, threads_that_end, threads_with, values, world};
use crate::scaled::unhurried;
use half::bf16;
use warplink::collective::{
    Algorithm, CollectiveOptions, Epilogue, Fused, FusedMemory, Quantization,
};
use warplink::device::{AllocationKind, DeviceSlice, Priority};
use warplink::{Collectives, Communicator, DType, ErrorKind};

/// What is awkward in a row.
const AWKWARD: [f64; 10] = [
    0.0,
    -0.0,
    f64::INFINITY,
    f64::NEG_INFINITY,
    f64::NAN,
    1e-40,
    -3e-39,
    3e38,
    1.0,
    -1e-3,
];

fn fused(tokens: usize, width: usize, quantization: Option<Quantization>) -> Fused {
    Fused {
        tokens,
        width,
        dtype: DType::BF16,
        epilogue: Epilogue {
            eps: 1e-5,
            weight_bias: tokens.is_multiple_of(2),
            quantization,
        },
    }
}

/// Numbers of an input, some rows with awkward ones.
fn numbers(rank: usize, salt: usize, count: usize, awkward: bool) -> Vec<f32> {
    let bytes = values(rank, salt, 2 * count);
    let at = |element: usize| {
        let (a, b) = (bytes[2 * element], bytes[2 * element + 1]);
        let usual = f64::from(i32::from(a) - 128) / 37.0 + f64::from(b) / 1000.0;
        let value = if awkward && a == 77 {
            AWKWARD[usize::from(b) % AWKWARD.len()]
        } else {
            usual
        };
        bf16::from_f64(value).to_f32()
    };
    (0..count).map(at).collect()
}

fn encoded(values: &[f32]) -> Vec<u8> {
    let values: Vec<f64> = values.iter().map(|value| f64::from(*value)).collect();
    encode(DType::BF16, &values)
}

/// The memory of a call on a rank, and what it holds.
struct Made {
    call: Fused,
    slices: Vec<DeviceSlice>,
    in_place: bool,
}

impl Made {
    fn new(comm: &Communicator, call: Fused, in_place: bool) -> Self {
        let all = 2 * call.tokens * call.width;
        let (output, scale) = match call.epilogue.quantization {
            None => (all, 4),
            Some(Quantization::PerToken) => (all / 2, 4 * call.tokens),
            _ => (all / 2, 4),
        };
        let sizes = [all, all, 2 * call.width, all, output, scale];
        let allocate = |bytes: usize| {
            comm.device()
                .allocate(bytes, AllocationKind::Plain)
                .unwrap()
        };
        Self {
            call,
            slices: sizes.map(allocate).into(),
            in_place,
        }
    }

    fn memory(&self) -> FusedMemory<'_> {
        let [input, residual, weight, out, output, scale] = &self.slices[..] else {
            unreachable!("six slices");
        };
        FusedMemory {
            input,
            residual,
            weight,
            residual_out: if self.in_place { residual } else { out },
            output,
            scale: self.call.epilogue.quantization.map(|_| scale),
        }
    }

    /// The inputs of all ranks, the residual and the weight of a round.
    fn values(&self, ranks: usize, round: usize) -> (Vec<Vec<f32>>, Vec<f32>, Vec<f32>) {
        let Fused { tokens, width, .. } = self.call;
        let awkward = round % 3 == 2;
        let all = tokens * width;
        let inputs = (0..ranks).map(|rank| numbers(rank, round, all, awkward));
        let residual = numbers(0, round + 40, all, awkward);
        (
            inputs.collect(),
            residual,
            numbers(0, round + 80, width, false),
        )
    }

    fn fill(&self, comm: &Communicator, round: usize) {
        let (inputs, residual, weight) = self.values(comm.world(), round);
        let upload =
            |slice: &DeviceSlice, bytes: &[u8]| comm.device().upload(slice, bytes).unwrap();
        upload(&self.slices[0], &encoded(&inputs[comm.rank()]));
        upload(&self.slices[1], &encoded(&residual));
        upload(&self.slices[2], &encoded(&weight));
        for slice in &self.slices[3..5] {
            upload(slice, &vec![0xff; slice.bytes()]);
        }
        let scale = vec![0.05_f32.to_le_bytes(); self.slices[5].bytes() / 4];
        upload(&self.slices[5], &scale.concat());
    }

    /// What the call has left, which all ranks have alike.
    fn found(&self, comm: &Communicator) -> Vec<Vec<u8>> {
        let memory = self.memory();
        let written = [Some(memory.residual_out), Some(memory.output), memory.scale];
        let download = |slice: &DeviceSlice| {
            let mut bytes = vec![0; slice.bytes()];
            comm.device().download(slice, &mut bytes).unwrap();
            bytes
        };
        written.into_iter().flatten().map(download).collect()
    }

    fn check(&self, comm: &Communicator, round: usize, found: &[Vec<u8>]) {
        let Fused { tokens, width, .. } = self.call;
        let (inputs, residual, weight) = self.values(comm.world(), round);
        let bias = f64::from(u8::from(self.call.epilogue.weight_bias));
        let of_bf16 = |bytes: &[u8]| f64::from(bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32());
        for t in 0..tokens {
            let row = t * width..(t + 1) * width;
            let h: Vec<f32> = row
                .clone()
                .map(|element| {
                    let sum = inputs.iter().map(|input| input[element]);
                    let sum = sum.reduce(|a, b| a + b).unwrap() + residual[element];
                    bf16::from_f32(sum).to_f32()
                })
                .collect();
            let mean: f64 = h.iter().map(|h| f64::from(*h).powi(2)).sum::<f64>() / width as f64;
            let normal = |column: usize| {
                let weight = f64::from(weight[column]) + bias;
                f64::from(h[column]) / (mean + f64::from(self.call.epilogue.eps)).sqrt() * weight
            };
            let overflows = !mean.is_finite() || mean > 1e38;
            let most = (0..width)
                .map(|column| normal(column).abs())
                .fold(0.0, f64::max);
            let scale = match self.call.epilogue.quantization {
                None => 1.0,
                Some(Quantization::PerToken) => {
                    let bytes = &found[2][4 * t..4 * t + 4];
                    let scale = f64::from(f32::from_le_bytes(bytes.try_into().unwrap()));
                    let near = (most / 448.0).max(1e-10);
                    assert!(
                        overflows || (scale - near).abs() < near * 1e-5,
                        "{scale} {near}"
                    );
                    scale
                }
                _ => 0.05,
            };
            for (column, h) in h.iter().enumerate() {
                let place = row.start + column;
                let stored = of_bf16(&found[0][2 * place..]) as f32;
                assert!(stored.to_bits() == h.to_bits() || stored.is_nan() && h.is_nan());
                if overflows {
                    continue;
                }
                let near = normal(column) / scale;
                let (value, bound) = match self.call.epilogue.quantization {
                    None => (of_bf16(&found[1][2 * place..]), near.abs() / 200.0 + 1e-30),
                    Some(_) => {
                        let value = warplink::dtype::F8E4M3(found[1][place]).to_f32();
                        (f64::from(value), near.abs() / 15.0 + 1e-3)
                    }
                };
                let near = if self.call.epilogue.quantization.is_some() {
                    near.clamp(-448.0, 448.0)
                } else {
                    near
                };
                assert!(
                    (value - near).abs() <= bound,
                    "row {t}, {column}: {value}, expected {near}"
                );
            }
        }
    }
}

fn by(comm: &Communicator, algorithm: Option<Algorithm>) -> Collectives {
    let options = CollectiveOptions {
        workspace_bytes: 2 << 20,
        algorithm,
        ..CollectiveOptions::default()
    };
    comm.collectives_with(&options).unwrap()
}

/// Eager and in a graph whose inputs differ each time; with rows that fit at once and in pieces.
#[test]
fn fused_calls_are_right_and_the_same_on_all_ranks() {
    let quantizations = [
        None,
        Some(Quantization::Static),
        Some(Quantization::PerToken),
    ];
    for ranks in [1, 2, 3, 8].map(world) {
        threads_with(ranks, unhurried, |comm| {
            let stream = comm.create_stream(Priority::Normal).unwrap();
            let algorithms = [None, Some(Algorithm::OneShot), Some(Algorithm::Direct)];
            let all = algorithms.map(|algorithm| (algorithm, by(comm, algorithm)));
            let shapes = [(5, 37), (2, 4100), (70, 257)];
            // Many ranks keep a small machine busy.
            let shapes = &shapes[..if (2..=3).contains(&ranks) { 3 } else { 1 }];
            for (number, (tokens, width)) in shapes.iter().copied().enumerate() {
                for (of, quantization) in quantizations.into_iter().enumerate() {
                    let call = fused(tokens, width, quantization);
                    for (which, (algorithm, collectives)) in all.iter().enumerate() {
                        let direct = *algorithm == Some(Algorithm::Direct);
                        if direct && quantization == Some(Quantization::PerToken) {
                            continue;
                        }
                        let made = Made::new(comm, call, (number + of + which).is_multiple_of(2));
                        let run = |round: usize, launch: &dyn Fn()| {
                            made.fill(comm, round);
                            comm.barrier().unwrap();
                            launch();
                            comm.synchronize(&stream).unwrap();
                            let found = made.found(comm);
                            made.check(comm, round, &found);
                            let everybody = comm.all_gather_bytes(&found.concat()).unwrap();
                            assert!(everybody.iter().all(|other| *other == everybody[0]));
                        };
                        let enqueue = || collectives.fused(&call, &made.memory(), &stream).unwrap();
                        (0..2).for_each(|round| run(round, &enqueue));
                        stream.begin_capture().unwrap();
                        enqueue();
                        let graph = stream.end_capture().unwrap();
                        (2..5).for_each(|round| run(round, &|| graph.launch(&stream).unwrap()));
                    }
                }
            }
        });
    }
}

#[test]
fn fused_calls_that_do_not_fit_are_refused() {
    threads_with(world(2), unhurried, |comm| {
        let stream = comm.create_stream(Priority::Normal).unwrap();
        let collectives = by(comm, None);
        let call = fused(3, 40, None);
        let made = Made::new(comm, call, false);
        let memory = made.memory();
        let half = memory.output.slice(0..100).unwrap();
        let refused = [
            (
                Fused { tokens: 0, ..call },
                memory,
                "expected at least one of one",
            ),
            (
                Fused {
                    dtype: DType::F64,
                    ..call
                },
                memory,
                "expected f32, f16 or bf16",
            ),
            (
                Fused { width: 41, ..call },
                memory,
                "expected 246 at a multiple of 2",
            ),
            (
                call,
                FusedMemory {
                    output: memory.residual,
                    ..memory
                },
                "output overlaps residual",
            ),
            (
                call,
                FusedMemory {
                    output: &half,
                    ..memory
                },
                "output has 100 bytes",
            ),
            (
                call,
                FusedMemory {
                    scale: Some(&half),
                    ..memory
                },
                "a scale is given without a quantisation",
            ),
            (
                fused(3, 40, Some(Quantization::Static)),
                memory,
                "a scale is given without",
            ),
        ];
        for (call, memory, text) in refused {
            let error = collectives.fused(&call, &memory, &stream).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
            assert_says(&error, &["fused all-reduce", text]);
        }
        let wide = fused(1, 1 << 20, None);
        let made = Made::new(comm, wide, false);
        let error = collectives
            .fused(&wide, &made.memory(), &stream)
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    });
}

/// Ranks that call different things find that out in the call.
#[test]
fn fused_calls_that_differ_are_named() {
    threads_that_end(world(2), unhurried, |comm| {
        let stream = comm.create_stream(Priority::Normal).unwrap();
        let collectives = by(&comm, None);
        let call = fused(3 + comm.rank() % 2, 40, None);
        let made = Made::new(&comm, call, false);
        made.fill(&comm, 0);
        let enqueued = collectives.fused(&call, &made.memory(), &stream);
        let done = enqueued.and_then(|()| comm.synchronize(&stream));
        if comm.world() > 1 {
            let error = done.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Mismatch, "{error}");
            assert_says(&error, &["rows of 40 bf16"]);
        }
    });
}
