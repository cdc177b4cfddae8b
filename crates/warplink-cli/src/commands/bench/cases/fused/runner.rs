//! Runs a fused call of one size: once for its result, and then for its time and that of two steps.

use super::FusedPeer;
use crate::commands::bench::clock::{BenchClock, Submission, Times, Work};
use crate::commands::bench::peers::{allocate, download, optional, place, total, vendor};
use crate::commands::bench::report::{Row, micros};
use crate::names::name_of;
use crate::report::Object;
use anyhow::Result;
use warplink::collective::{CollectiveOptions, Fused, FusedMemory, Quantization, Wire};
use warplink::device::{DeviceSlice, Priority, ReduceOp};
use warplink::{Collectives, Communicator, DType};

/// The scale of static quantisation.
const SCALE: f32 = 0.0625;

/// The global scale of nvfp4.
const GLOBAL_SCALE: f32 = 128.0;

/// The values of floats of 4 bits, by their codes without the sign.
const E2M1: [f64; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// The same for every number of tokens.
pub(super) struct FusedRunner<'a> {
    clock: BenchClock<'a>,
    /// With the maximum number of tokens.
    call: Fused,
    own: Collectives,
    /// Collectives of this rank alone, for the second step as a separate kernel.
    alone: Collectives,
    others: Vec<(String, Collectives)>,
    /// Names of the implementations for comparison.
    pub(super) peers: Vec<String>,
    memory: FusedBuffers,
}

struct FusedBuffers {
    input: DeviceSlice,
    residual: DeviceSlice,
    weight: DeviceSlice,
    sum: DeviceSlice,
    residual_out: DeviceSlice,
    output: DeviceSlice,
    scale: DeviceSlice,
    global_scale: DeviceSlice,
}

/// Element `at` of a row: small integers, whose sums are exact. Seed 0 is common to all ranks.
fn number(seed: usize, at: usize) -> f64 {
    let mixed = (at + 1).wrapping_mul(2_654_435_761).rotate_left(7) ^ seed.wrapping_mul(40_503);
    (mixed % 17) as f64 - 8.0
}

/// The floats of 4 bits in bytes.
fn fours(bytes: &[u8]) -> impl Iterator<Item = f64> + '_ {
    // The first of two elements is in the low half of a byte.
    let codes = bytes.iter().flat_map(|byte| [byte & 15, byte >> 4]);
    codes.map(|code| {
        let size = E2M1[usize::from(code & 7)];
        if code < 8 { size } else { -size }
    })
}

impl<'a> FusedRunner<'a> {
    /// Every rank makes one at the same time.
    pub(super) fn new(
        comm: &'a Communicator,
        call: Fused,
        options: &CollectiveOptions,
        peers: &[FusedPeer],
    ) -> Result<Self> {
        let bytes = call.bytes(comm.world())?;
        let allocate = |bytes| allocate(comm, bytes);
        let place = |bytes: &[u8]| place(comm, bytes);
        let count = bytes.input / call.dtype.size();
        let values = |seed: usize, count: usize| {
            let values = (0..count).map(|at| number(seed, at));
            place(&call.dtype.encode(values))
        };
        // Devices do not allocate empty memory, and without a quantisation there are no scales.
        let scales = bytes.scale.max(4).div_ceil(4);
        let memory = FusedBuffers {
            // With the seeds from which `wrong` computes the expected results.
            input: values(comm.rank() + 1, count)?,
            residual: values(0, count)?,
            weight: values(99, call.width)?,
            sum: allocate(bytes.input)?,
            residual_out: allocate(bytes.residual)?,
            output: allocate(bytes.output.max(bytes.quantized))?,
            scale: place(&SCALE.to_le_bytes().repeat(scales))?,
            global_scale: place(&GLOBAL_SCALE.to_le_bytes())?,
        };
        let own = comm.collectives_with(options)?;
        let (mut others, mut names) = (Vec::new(), Vec::new());
        for peer in peers {
            let method = name_of(peer);
            match peer {
                FusedPeer::None => {}
                FusedPeer::Pair => {
                    names.push("Warplink's all-reduce + kernel".to_owned());
                    // Options are those of the fused kernel.
                    others.push((method, comm.collectives()?));
                }
                FusedPeer::Nccl => {
                    if let Some((library, name)) = optional(comm, &method, vendor(comm))? {
                        names.push(format!("{name} + kernel"));
                        others.push((method, library));
                    }
                }
            }
        }
        let alone = comm.subgroup(&[comm.rank()])?.collectives()?;
        Ok(Self {
            clock: BenchClock::new(comm, Priority::Normal)?,
            call,
            own,
            alone,
            others,
            peers: names,
            memory,
        })
    }

    /// Checks and times every method.
    pub(super) fn row(
        &self,
        tokens: usize,
        submission: Submission,
        samples: usize,
        calls: usize,
    ) -> Result<Row> {
        let call = Fused {
            tokens,
            ..self.call
        };
        let bytes = call.bytes(self.clock.comm.world())?;
        let of_rows = |slice: &DeviceSlice, bytes: usize| slice.slice(0..bytes);
        let memory = &self.memory;
        let (input, residual) = (
            of_rows(&memory.input, bytes.input)?,
            of_rows(&memory.residual, bytes.residual)?,
        );
        let residual_out = of_rows(&memory.residual_out, bytes.residual)?;
        let quantizes = call.epilogue.quantization.is_some();
        let length = if quantizes {
            bytes.quantized
        } else {
            bytes.output
        };
        let output = of_rows(&memory.output, length)?;
        let (sum, scale) = (
            of_rows(&memory.sum, bytes.input)?,
            of_rows(&memory.scale, bytes.scale)?,
        );
        let fused = FusedMemory {
            residual: Some(&residual),
            weight: Some(&memory.weight),
            residual_out: Some(&residual_out),
            output: (!quantizes).then_some(&output),
            quantized: quantizes.then_some(&output),
            scale: quantizes.then_some(&scale),
            global_scale: (call.epilogue.quantization == Some(Quantization::Nvfp4))
                .then_some(&memory.global_scale),
            ..FusedMemory::of(&input)
        };
        let behind = FusedMemory {
            input: &sum,
            ..fused
        };
        let exact = Fused {
            wire: Wire::Exact,
            ..call
        };
        let mut works: Vec<Work<'_>> = vec![Box::new(|stream| {
            Ok(self.own.fused(&call, &fused, stream)?)
        })];
        for (_, collectives) in &self.others {
            works.push(Box::new(|stream| {
                collectives.all_reduce(&sum, &input, call.dtype, ReduceOp::Sum, stream)?;
                Ok(self.alone.fused(&exact, &behind, stream)?)
            }));
        }
        let clock = &self.clock;
        // Before the others, which write the same outputs.
        clock.run(submission, &works[0])?;
        let wrong = self.wrong(&call, [&residual_out, &output, &scale])?;
        let times = clock.measure_in_turn(samples, submission, calls, &works)?;
        let names = std::iter::once("warplink");
        let names = names.chain(self.others.iter().map(|(name, _)| name.as_str()));
        let methods: Vec<(&str, Times)> = names.zip(times.iter().map(|it| it.stream)).collect();
        let objects = methods.iter().map(|(method, times)| {
            Object::default()
                .key("method", method)
                .key("median", times.median)
                .key("least", times.least)
                .key("most", times.most)
        });
        let submission = name_of(&submission);
        let mut row = Row::of(tokens.to_string())
            .count("tokens", tokens as u64)
            .name("submission", &submission)
            .objects("methods", objects);
        for (number, (method, times)) in methods.iter().enumerate() {
            let heading = match number {
                0 => "us".to_owned(),
                _ => format!("{method} us"),
            };
            row = row.number(heading, micros(times.median)).point(
                format!("{submission}: us"),
                *method,
                times.median * 1e6,
                true,
            );
            if number == 0 {
                row = row.wrong(wrong);
            }
        }
        let times: Vec<f64> = methods.iter().map(|(_, times)| times.median).collect();
        Ok(row.speedup(&times))
    }

    /// Counts the wrong elements of all ranks' outputs.
    fn wrong(&self, call: &Fused, [residual_out, output, scale]: [&DeviceSlice; 3]) -> Result<u64> {
        let comm = self.clock.comm;
        let read = |slice| download(comm, slice);
        let (added, output, scale) = (read(residual_out)?, read(output)?, read(scale)?);
        let added: Vec<f64> = call.dtype.decode(&added).collect();
        let scale: Vec<f64> = match call.epilogue.quantization {
            Some(Quantization::Mxfp8) => {
                // A scale of MXFP8 is a biased exponent without a significand.
                let powers = scale.iter().map(|code| 2f64.powi(i32::from(*code) - 127));
                powers.collect()
            }
            Some(Quantization::Nvfp4) => {
                let scales = DType::F8E4M3.decode(&scale);
                scales
                    .map(|scale| scale / f64::from(GLOBAL_SCALE))
                    .collect()
            }
            _ => DType::F32.decode(&scale).collect(),
        };
        let output: Vec<f64> = match call.epilogue.quantization {
            None => call.dtype.decode(&output).collect(),
            Some(Quantization::Nvfp4) => {
                let rows = output.chunks(call.width.div_ceil(2));
                rows.flat_map(|row| fours(row).take(call.width)).collect()
            }
            Some(_) => DType::F8E4M3.decode(&output).collect(),
        };
        let ranks = 0..comm.world();
        let inputs = |at: usize| ranks.clone().map(move |rank| number(rank + 1, at));
        let sum = |at: usize| number(0, at) + inputs(at).sum::<f64>();
        let mut wrong = 0;
        for token in 0..call.tokens {
            let row = token * call.width..(token + 1) * call.width;
            let exact: Vec<f64> = row.clone().map(sum).collect();
            // The second step uses the sum as it was transferred.
            let h = match call.wire {
                Wire::Exact => &exact[..],
                Wire::Fp8 => added.get(row.clone()).unwrap_or(&exact),
            };
            let mean = h.iter().map(|h| h * h).sum::<f64>() / call.width as f64;
            let root = 1.0 / (mean + f64::from(call.epilogue.eps)).sqrt();
            for (column, (h, exact)) in h.iter().zip(&exact).enumerate() {
                let at = row.start + column;
                let is_right = match call.wire {
                    Wire::Exact => added.get(at) == Some(exact),
                    Wire::Fp8 => {
                        // Each rank's value is rounded, and the errors remain where the values cancel.
                        let magnitude: f64 = inputs(at).map(f64::abs).sum();
                        (h - exact).abs() <= magnitude * 0.14 + exact.abs() / 100.0
                    }
                };
                let meant = h * root * number(99, column);
                let (found, bound) = match call.epilogue.quantization {
                    // bf16 rounds by up to 1/256 of the value; this allows for two roundings.
                    None => (output.get(at).copied(), meant.abs() / 120.0 + 1e-6),
                    Some(kind) => {
                        let scale = match kind {
                            Quantization::Static => scale.first(),
                            Quantization::PerToken => scale.get(token),
                            blocks => {
                                let block = blocks.block().unwrap_or(call.width);
                                scale.get(token * call.width.div_ceil(block) + column / block)
                            }
                        };
                        let scale = scale.copied().unwrap_or(f64::NAN);
                        let found = output.get(at).map(|found| found * scale);
                        let bound = match kind {
                            // Half a step of e2m1 is 0.25 near 0, and up to 1/4 of the value from 4 on.
                            Quantization::Nvfp4 => meant.abs() / 3.9 + scale * 0.26,
                            // Half a step of e4m3 is up to 1/16 of the value, and 2^-10 of the scale near 0.
                            _ => meant.abs() / 15.0 + scale / 256.0,
                        };
                        (found, bound)
                    }
                };
                let is_near = found.is_some_and(|found| (found - meant).abs() <= bound);
                wrong += u64::from(!is_near || !is_right);
            }
        }
        total(comm, wrong)
    }
}
