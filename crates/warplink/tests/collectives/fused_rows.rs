//! The memory of fused calls, and what it is to hold, against `f64`.

use crate::common::{allocate, encode, values};
use crate::fused_nvfp4;
use std::ops::Range;
use warplink::collective::{
    Epilogue, Fused, FusedKind, FusedMemory, Norm, QUANTIZED_BLOCK, Quantization, Wire,
};
use warplink::device::DeviceSlice;
use warplink::{Communicator, DType};

/// Awkward values of a row.
pub(crate) const AWKWARD: [f64; 16] = [
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
    1.4e-45,
    3.4e38,
    -3.4e38,
    6e-8,
    65504.0,
    448.0,
];

/// The global scale of nvfp4.
const GLOBAL_SCALE: f32 = 37.5;

/// A description, and which outputs there are.
#[derive(Clone, Copy)]
pub(crate) struct Wanted {
    pub(crate) norm: Option<Norm>,
    pub(crate) bias: bool,
    pub(crate) quantization: Option<Quantization>,
    pub(crate) residual: bool,
    pub(crate) sum: bool,
    pub(crate) residual_out: bool,
    pub(crate) output: bool,
}

/// RMSNorm of the sum and a residual, both of which are stored.
pub(crate) const USUAL: Wanted = Wanted {
    norm: Some(Norm::Rms),
    bias: false,
    quantization: None,
    residual: true,
    sum: false,
    residual_out: true,
    output: true,
};

pub(crate) fn quantized(quantization: Quantization) -> Wanted {
    Wanted {
        quantization: Some(quantization),
        output: false,
        ..USUAL
    }
}

/// Every norm, quantisation and set of outputs.
pub(crate) fn all_wanted() -> Vec<Wanted> {
    vec![
        USUAL,
        quantized(Quantization::Static),
        quantized(Quantization::PerToken),
        quantized(Quantization::PerBlock),
        quantized(Quantization::Mxfp8),
        quantized(Quantization::Nvfp4),
        Wanted {
            sum: true,
            output: true,
            ..quantized(Quantization::PerBlockPowerOfTwo)
        },
        Wanted {
            norm: Some(Norm::Layer),
            bias: true,
            ..USUAL
        },
        Wanted {
            residual: false,
            residual_out: false,
            ..USUAL
        },
        Wanted {
            norm: None,
            residual: false,
            residual_out: false,
            ..quantized(Quantization::PerBlock)
        },
    ]
}

pub(crate) fn fused(kind: FusedKind, tokens: usize, width: usize, wanted: Wanted) -> Fused {
    Fused {
        kind,
        tokens,
        width,
        dtype: DType::BF16,
        epilogue: Epilogue {
            norm: wanted.norm,
            eps: 1e-5,
            weight_bias: tokens.is_multiple_of(2) && wanted.norm.is_some(),
            quantization: wanted.quantization,
        },
        wire: Wire::Exact,
    }
}

/// Numbers of an input, some rows with awkward ones.
fn numbers(rank: usize, salt: usize, count: usize, awkward: bool, dtype: DType) -> Vec<f32> {
    let bytes = values(rank, salt, 2 * count);
    let at = |element: usize| {
        let (a, b) = (bytes[2 * element], bytes[2 * element + 1]);
        let usual = f64::from(i32::from(a) - 128) / 37.0 + f64::from(b) / 1000.0;
        let value = if awkward && a == 77 {
            AWKWARD[usize::from(b) % AWKWARD.len()]
        } else {
            usual
        };
        value as f32
    };
    let all: Vec<f32> = (0..count).map(at).collect();
    decoded(dtype, &encoded(dtype, &all))
}

fn encoded(dtype: DType, values: &[f32]) -> Vec<u8> {
    let values: Vec<f64> = values.iter().map(|value| f64::from(*value)).collect();
    encode(dtype, &values)
}

fn decoded(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    dtype.decode(bytes).map(|value| value as f32).collect()
}

/// The nearest values of a type.
fn rounded(dtype: DType, values: &[f32]) -> Vec<f32> {
    decoded(dtype, &encoded(dtype, values))
}

/// The memory of a call on a rank, and what it holds.
pub(crate) struct Made {
    pub(crate) call: Fused,
    pub(crate) wanted: Wanted,
    pub(crate) world: usize,
    pub(crate) rank: usize,
    /// Input, residual, weight, bias, sum, `residual_out`, output, what is quantised, scale, global scale.
    pub(crate) slices: Vec<DeviceSlice>,
    pub(crate) in_place: bool,
}

/// The inputs of all ranks, the residual, weight and bias.
struct Given {
    inputs: Vec<Vec<f32>>,
    residual: Vec<f32>,
    weight: Vec<f32>,
    bias: Vec<f32>,
}

impl Made {
    pub(crate) fn new(
        comm: &Communicator,
        (call, wanted): (Fused, Wanted),
        in_place: bool,
    ) -> Self {
        let bytes = call.bytes(comm.world()).unwrap();
        let (quantized, scale) = (bytes.quantized.max(4), bytes.scale.max(4));
        let sizes = [
            bytes.input,
            bytes.residual,
            bytes.weight,
            bytes.weight,
            bytes.residual,
            bytes.residual,
            bytes.output,
            quantized,
            scale,
            4,
        ];
        let mut slices = Vec::from(sizes.map(|bytes| allocate(comm, bytes)));
        // Single values need not be aligned to vectors.
        let single = || allocate(comm, 8).slice(4..8).unwrap();
        slices[9] = single();
        if wanted.quantization == Some(Quantization::Static) {
            slices[8] = single();
        }
        Self {
            call,
            wanted,
            world: comm.world(),
            rank: comm.rank(),
            slices,
            in_place,
        }
    }

    pub(crate) fn memory(&self) -> FusedMemory<'_> {
        let wanted = &self.wanted;
        let at = |number: usize, there: bool| there.then(|| &self.slices[number]);
        let norm = wanted.norm.is_some();
        // The residual is replaced, and the norm is stored over the input where both have all rows.
        let residual_out = if self.in_place && wanted.residual {
            1
        } else {
            5
        };
        let whole = self.call.kind == FusedKind::AllReduce;
        let output = if self.in_place && whole { 0 } else { 6 };
        FusedMemory {
            residual: at(1, wanted.residual),
            weight: at(2, norm),
            bias: at(3, wanted.bias),
            sum: at(4, wanted.sum),
            residual_out: at(residual_out, wanted.residual_out),
            output: at(output, wanted.output),
            quantized: at(7, wanted.quantization.is_some()),
            scale: at(8, wanted.quantization.is_some()),
            global_scale: at(9, wanted.quantization == Some(Quantization::Nvfp4)),
            ..FusedMemory::of(&self.slices[0])
        }
    }

    /// The rows that this rank owns.
    fn own(&self) -> Range<usize> {
        let own = self.call.tokens / self.world;
        self.rank * own..(self.rank + 1) * own
    }

    /// Those of all rows that this rank has, where `owned` says that it has its own.
    fn rows<'v>(&self, values: &'v [f32], owned: bool) -> &'v [f32] {
        let width = self.call.width;
        let own = self.own();
        if owned {
            &values[own.start * width..own.end * width]
        } else {
            values
        }
    }

    fn given(&self, round: usize) -> Given {
        let Fused { tokens, width, .. } = self.call;
        // On their way as fp8, infinities become NaN: fused_wire.rs has those.
        let awkward = round % 3 == 2 && self.call.wire == Wire::Exact;
        let all = tokens * width;
        let of = |rank, salt, count, awkward| numbers(rank, salt, count, awkward, self.call.dtype);
        let inputs = (0..self.world).map(|rank| of(rank, round, all, awkward));
        Given {
            inputs: inputs.collect(),
            residual: of(0, round + 40, all, awkward),
            weight: of(0, round + 80, width, false),
            bias: of(0, round + 120, width, false),
        }
    }

    pub(crate) fn fill(&self, comm: &Communicator, round: usize) {
        let given = self.given(round);
        let upload =
            |slice: &DeviceSlice, bytes: &[u8]| comm.device().upload(slice, bytes).unwrap();
        let kind = self.call.kind;
        let input = self.rows(&given.inputs[self.rank], kind == FusedKind::AllGather);
        let residual = self.rows(&given.residual, kind != FusedKind::AllReduce);
        let encoded = |values: &[f32]| encoded(self.call.dtype, values);
        upload(&self.slices[0], &encoded(input));
        upload(&self.slices[1], &encoded(residual));
        upload(&self.slices[2], &encoded(&given.weight));
        upload(&self.slices[3], &encoded(&given.bias));
        for slice in &self.slices[4..8] {
            upload(slice, &vec![0xff; slice.bytes()]);
        }
        // A static scale is a float; others are written, those of a byte each, too.
        let scale = 0.05_f32.to_le_bytes().into_iter().cycle();
        let scale: Vec<u8> = scale.take(self.slices[8].bytes()).collect();
        upload(&self.slices[8], &scale);
        upload(&self.slices[9], &GLOBAL_SCALE.to_le_bytes());
    }

    /// Results of the call: the sum, `residual_out`, the output, the quantised output, and its scale.
    pub(crate) fn found(&self, comm: &Communicator) -> [Option<Vec<u8>>; 5] {
        let memory = self.memory();
        let written = [
            memory.sum,
            memory.residual_out,
            memory.output,
            memory.quantized,
            memory.scale,
        ];
        written.map(|slice| {
            let mut bytes = vec![0; slice?.bytes()];
            comm.device().download(slice?, &mut bytes).unwrap();
            Some(bytes)
        })
    }

    pub(crate) fn check(&self, round: usize, found: &[Option<Vec<u8>>; 5]) {
        let given = self.given(round);
        let kind = self.call.kind;
        for t in 0..self.call.tokens {
            let own = self.own();
            let mine = own.contains(&t).then(|| t - own.start);
            // Where the row is in memory with its own rows, and with results.
            let local = if kind == FusedKind::AllReduce {
                Some(t)
            } else {
                mine
            };
            let result = if kind == FusedKind::ReduceScatter {
                mine
            } else {
                Some(t)
            };
            self.check_row(&given, t, (local, result), found);
        }
    }

    /// The sum of an element of row `t`.
    fn sum(&self, given: &Given, t: usize, element: usize) -> f32 {
        if self.call.kind == FusedKind::AllGather {
            let owner = t / (self.call.tokens / self.world);
            return given.inputs[owner][element];
        }
        let sum = given.inputs.iter().map(|input| input[element]);
        sum.reduce(|a, b| a + b).unwrap()
    }

    fn check_row(
        &self,
        given: &Given,
        t: usize,
        (local, result): (Option<usize>, Option<usize>),
        [sum, residual_out, output, quantized, scale]: &[Option<Vec<u8>>; 5],
    ) {
        let Fused {
            width,
            epilogue,
            dtype,
            ..
        } = self.call;
        let size = dtype.size();
        let at = |bytes: &[u8], row: usize, column: usize| {
            let from = size * (row * width + column);
            decoded(dtype, &bytes[from..from + size])[0]
        };
        let row = t * width..(t + 1) * width;
        let sums: Vec<f32> = row.clone().map(|at| self.sum(given, t, at)).collect();
        let added = sums.iter().zip(row.clone());
        let added = added.map(|(sum, at)| {
            let residual = self.wanted.residual.then(|| given.residual[at]);
            residual.map_or(*sum, |residual| sum + residual)
        });
        let mut h = rounded(dtype, &added.collect::<Vec<f32>>());
        if let (Wire::Fp8, Some(local), Some(stored)) = (self.call.wire, local, residual_out) {
            // What follows is of the sum that arrived.
            for (column, h) in h.iter_mut().enumerate() {
                let found = at(stored, local, column);
                let of = |input: &Vec<f32>| input[row.start + column].abs();
                let bound =
                    0.14 * given.inputs.iter().map(of).sum::<f32>() + h.abs() / 256.0 + 1e-3;
                assert!((found - *h).abs() <= bound, "row {t}: {found} {h}");
                *h = found;
            }
        } else if let Some(local) = local {
            for (exact, stored) in [(&sums, sum), (&h, residual_out)] {
                let Some(stored) = stored else { continue };
                let stored = &stored[size * local * width..][..size * width];
                for (found, exact) in decoded(dtype, stored).iter().zip(rounded(dtype, exact)) {
                    let same = found.to_bits() == exact.to_bits();
                    assert!(
                        same || found.is_nan() && exact.is_nan(),
                        "row {t}: {found} {exact}"
                    );
                }
            }
        }
        let Some(result) = result else { return };
        let normal = self.normal(given, &h);
        // What follows is of h as it arrived, which nobody stores where it is the owner's.
        let gathers = matches!(
            self.call.kind,
            FusedKind::AllReduceSharded | FusedKind::AllGather
        );
        let on_the_way = if gathers && self.call.wire == Wire::Fp8 {
            0.15
        } else {
            0.0
        };
        // Rounding of what is stored, the least magnitude, and what does not overflow.
        let (relative, least, most) = match dtype {
            DType::BF16 => (1.0 / 200.0, 1e-30, 1e30),
            DType::F16 => (1.0 / 1600.0, 1e-7, 6e4),
            _ => (1e-5, 1e-30, 1e30),
        };
        let overflows = normal
            .iter()
            .any(|value| value.is_nan() || value.abs() > most)
            || (epilogue.norm.is_some() && h.iter().any(|h| h.abs() > 1e18));
        if overflows {
            return;
        }
        let near = |found: f64, meant: f64, bound: f64, column: usize| {
            let at = format!("row {t}, {column}: {found}, expected {meant}");
            assert!((found - meant).abs() <= bound, "{at}");
        };
        // What cancels out is as far off as what it is made of.
        let size = normal
            .iter()
            .fold(0.0, |most: f64, value| most.max(value.abs()));
        if let Some(output) = output {
            for (column, meant) in normal.iter().enumerate() {
                let found = at(output, result, column);
                near(
                    found.into(),
                    *meant,
                    meant.abs() * (relative + on_the_way) + size * (1e-5 + on_the_way) + least,
                    column,
                );
            }
        }
        let (Some(quantized), Some(scale), false) = (quantized, scale, on_the_way > 0.0) else {
            return;
        };
        if epilogue.quantization == Some(Quantization::Nvfp4) {
            let (bytes, blocks) = (width.div_ceil(2), width.div_ceil(16));
            let codes = &quantized[result * bytes..(result + 1) * bytes];
            let scales = &scale[result * blocks..(result + 1) * blocks];
            let off = size * 1e-5 + 1e-30;
            return fused_nvfp4::check_row(&normal, off, GLOBAL_SCALE.into(), codes, scales);
        }
        let block = match epilogue.quantization {
            Some(Quantization::PerBlock | Quantization::PerBlockPowerOfTwo) => QUANTIZED_BLOCK,
            Some(Quantization::Mxfp8) => 32,
            _ => width,
        };
        let blocks = width.div_ceil(block);
        for (number, values) in normal.chunks(block).enumerate() {
            let place = match epilogue.quantization {
                Some(Quantization::Static) => 0,
                _ => result * blocks + number,
            };
            let scale = if epilogue.quantization == Some(Quantization::Mxfp8) {
                2f64.powi(i32::from(scale[place]) - 127)
            } else {
                let bytes = &scale[4 * place..4 * place + 4];
                f64::from(f32::from_le_bytes(bytes.try_into().unwrap()))
            };
            let most = values
                .iter()
                .fold(0.0, |most: f64, value| most.max(value.abs()));
            let least = (most / 448.0).max(1e-10);
            match epilogue.quantization {
                Some(Quantization::Static) => assert_eq!(scale as f32, 0.05),
                Some(Quantization::PerBlockPowerOfTwo | Quantization::Mxfp8) => {
                    let tiny = epilogue.quantization == Some(Quantization::Mxfp8);
                    let least = if tiny {
                        (most / 448.0).max(2f64.powi(-126))
                    } else {
                        least
                    };
                    assert_eq!(scale.log2().fract(), 0.0, "{scale}");
                    assert!(
                        scale > least * 0.999 && scale < least * 2.001,
                        "{scale} {least}"
                    );
                }
                _ => assert!((scale - least).abs() < least * 1e-4, "{scale} {least}"),
            }
            for (at, meant) in values.iter().enumerate() {
                let column = number * block + at;
                let found = warplink::dtype::F8E4M3(quantized[result * width + column]).to_f32();
                let meant = (meant / scale).clamp(-448.0, 448.0);
                near(found.into(), meant, meant.abs() / 15.0 + 2e-3, column);
            }
        }
    }

    /// A row, normalised.
    fn normal(&self, given: &Given, h: &[f32]) -> Vec<f64> {
        let epilogue = &self.call.epilogue;
        let width = h.len() as f64;
        let h = h.iter().map(|h| f64::from(*h));
        let Some(norm) = epilogue.norm else {
            return h.collect();
        };
        let centre = match norm {
            Norm::Layer => h.clone().sum::<f64>() / width,
            _ => 0.0,
        };
        let mean = h.clone().map(|h| (h - centre).powi(2)).sum::<f64>() / width;
        let more = f64::from(u8::from(epilogue.weight_bias));
        let scaled = h.zip(&given.weight).zip(&given.bias);
        let scaled = scaled.map(|((h, weight), bias)| {
            let bias = if self.wanted.bias {
                f64::from(*bias)
            } else {
                0.0
            };
            (h - centre) / (mean + f64::from(epilogue.eps)).sqrt() * (f64::from(*weight) + more)
                + bias
        });
        scaled.collect()
    }
}
