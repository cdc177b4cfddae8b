//! Selects a matmul algorithm by timing cuBLASLt's proposals on scratch memory.

use super::CudaCompute;
use super::cublas_lt::Proposal;
use super::gemm::{Gemm, GemmOperands};
use crate::deadline::Deadline;
use crate::device::MatmulSpec;
use crate::device::cuda::driver::poll::poll;
use crate::device::cuda::driver::raw::{RawEvent, RawStream};
use crate::device::cuda::gpu::Gpu;
use crate::device::cuda::memory::PlainMemory;
use crate::dtype::DType;
use crate::error::{Error, Result};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Set to "0" to skip timing and use cuBLASLt's first choice.
const TUNING_VARIABLE: &str = "WARPLINK_MATMUL_TUNING";

/// Time limit for timing the candidates of one matmul.
const TUNING_TIME: Duration = Duration::from_millis(500);

/// Milliseconds to run each candidate.
const SAMPLE: f32 = 3.0;

/// Candidates within this factor of the fastest time are timed again: one sample is not precise enough to
/// rank them.
const CLOSE: f32 = 1.06;

/// Maximum number of candidates that are timed again.
const FINALISTS: usize = 4;

/// Number of additional samples of each.
const ROUNDS: usize = 4;

/// Time limit for one matmul to complete.
const LIMIT: Duration = Duration::from_secs(60);

impl CudaCompute {
    /// Runs the candidates and, if there are several, times them on scratch memory.
    pub(super) fn choose_and_run(&self, spec: &MatmulSpec) -> Result<Gemm> {
        let scratch = Scratch::allocate(&self.gpu, spec, self.workspace)?;
        let (mut gemm, proposals) =
            Gemm::propose(&self.handle, spec, &scratch.operands, self.workspace)?;
        let tune = proposals.len() > 1
            && std::env::var_os(TUNING_VARIABLE).is_none_or(|value| value != "0");
        if tune && let Some(fastest) = self.fastest(&mut gemm, &proposals, &scratch)? {
            gemm.choose(fastest);
        }
        // Loads the kernels of the chosen one even if it was not timed.
        self.run(&gemm, &scratch, 1)?;
        tracing::debug!(?gemm, "prepared a matmul");
        Ok(gemm)
    }

    /// The fastest of `proposals`, or `None` if none of them runs.
    ///
    /// Candidates close to the fastest are sampled again in turns: clock changes between samples exceed their
    /// differences.
    fn fastest(
        &self,
        gemm: &mut Gemm,
        proposals: &[Proposal],
        scratch: &Scratch,
    ) -> Result<Option<Proposal>> {
        let start = Instant::now();
        let mut tried = Vec::new();
        for &proposal in proposals {
            if start.elapsed() > TUNING_TIME {
                break;
            }
            gemm.choose(proposal);
            // The first run loads kernels. Skip proposals that fail to run.
            let Ok(_) = self.run(gemm, scratch, 1) else {
                self.gpu.fault.check()?;
                continue;
            };
            let once = self.run(gemm, scratch, 1)?;
            let times = (SAMPLE / once.max(1e-3)).clamp(2.0, 50.0) as u32;
            let time = self.run(gemm, scratch, times)? / times as f32;
            tried.push((time, times, proposal));
        }
        tried.sort_by(|a, b| a.0.total_cmp(&b.0));
        let Some(&(least, ..)) = tried.first() else {
            return Ok(None);
        };
        tried.retain(|(time, ..)| *time <= least * CLOSE);
        tried.truncate(FINALISTS);
        for _ in 0..ROUNDS {
            // Only complete rounds, so that all have the same number of samples.
            if start.elapsed() > TUNING_TIME {
                break;
            }
            for (time, times, proposal) in &mut tried {
                gemm.choose(*proposal);
                let again = self.run(gemm, scratch, *times)? / *times as f32;
                // The least of all rounds: noise only ever adds time.
                *time = time.min(again);
            }
        }
        let best = tried.iter().min_by(|a, b| a.0.total_cmp(&b.0));
        Ok(best.map(|(_, _, proposal)| *proposal))
    }

    /// Duration of `times` runs in milliseconds.
    fn run(&self, gemm: &Gemm, scratch: &Scratch, times: u32) -> Result<f32> {
        let gpu = &self.gpu;
        let _entered = gpu.context.enter_relaxed()?;
        // SAFETY: event and stream are of the context, which is current.
        unsafe { scratch.start.record(scratch.stream.raw)? };
        for _ in 0..times {
            // SAFETY: the scratch operands are of what the gemm describes, and aligned better than
            // anything; the scratch memory and the stream are used by this call alone.
            unsafe {
                gemm.enqueue(
                    &self.handle,
                    &scratch.operands,
                    scratch.workspace,
                    scratch.stream.raw.cast(),
                )?;
            }
        }
        // SAFETY: as above.
        unsafe { scratch.end.record(scratch.stream.raw)? };
        scratch.wait(gpu)?;
        scratch.end.elapsed_since(&scratch.start)
    }
}

/// Memory, a stream and events for timing matmuls.
pub(super) struct Scratch {
    memory: [PlainMemory; 5],
    pub(super) operands: GemmOperands,
    pub(super) workspace: u64,
    pub(super) workspace_bytes: usize,
    pub(super) stream: RawStream,
    start: RawEvent,
    end: RawEvent,
}

impl Scratch {
    /// Allocates operands for `spec`, with random values: zeros draw less power and so run faster than real
    /// data.
    pub(super) fn allocate(
        gpu: &Arc<Gpu>,
        spec: &MatmulSpec,
        workspace_bytes: usize,
    ) -> Result<Self> {
        let whole = |bytes: Option<usize>| {
            bytes.ok_or_else(|| {
                Error::invalid(format!(
                    "operands of {} x {} x {} overflow the address space",
                    spec.m, spec.n, spec.k
                ))
                .with_help("split the matrices")
            })
        };
        let [a_bytes, b_bytes, c_bytes] = spec.bytes().map(whole);
        let (a_bytes, b_bytes, c_bytes) = (a_bytes?, b_bytes?, c_bytes?);
        let bias_bytes = whole(spec.n.checked_mul(spec.dtype.size()))?;
        let make = |bytes| PlainMemory::allocate(gpu, bytes);
        let memory = [
            make(a_bytes)?,
            make(b_bytes)?,
            make(c_bytes)?,
            make(bias_bytes)?,
            make(workspace_bytes)?,
        ];
        let [a, b, c, bias, workspace] = [0, 1, 2, 3, 4].map(|which: usize| memory[which].address);
        let scratch = Self {
            operands: GemmOperands { a, b, c, bias },
            workspace,
            workspace_bytes,
            stream: RawStream::create(&gpu.context, false)?,
            start: RawEvent::create(&gpu.context, true)?,
            end: RawEvent::create(&gpu.context, true)?,
            memory,
        };
        let tile = random_tile(spec.dtype);
        for (address, bytes) in [(a, a_bytes), (b, b_bytes), (c, c_bytes), (bias, bias_bytes)] {
            scratch.fill(gpu, address, bytes, &tile)?;
        }
        scratch.wait(gpu)?;
        Ok(scratch)
    }

    /// Fills memory with repetitions of `tile`.
    fn fill(&self, gpu: &Gpu, address: u64, bytes: usize, tile: &[u8]) -> Result<()> {
        let mut done = tile.len().min(bytes);
        // SAFETY: the memory was allocated with at least this number of bytes.
        unsafe { gpu.staging.upload(address, &tile[..done])? };
        let _entered = gpu.context.enter()?;
        while done < bytes {
            let part = done.min(bytes - done);
            let driver = gpu.context.driver;
            // SAFETY: both ranges are in the memory, and they do not overlap; the stream is ours.
            let code = unsafe {
                (driver.cuMemcpyDtoDAsync_v2)(address + done as u64, address, part, self.stream.raw)
            };
            driver.check(code, "fill scratch memory")?;
            done += part;
        }
        Ok(())
    }

    pub(super) fn wait(&self, gpu: &Gpu) -> Result<()> {
        let deadline = Deadline::after(LIMIT);
        poll(
            || self.stream.is_idle(),
            || {
                gpu.fault.check()?;
                if deadline.passed() {
                    Err(deadline.expired("the end of a matmul"))
                } else {
                    Ok(())
                }
            },
        )
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // Work that timed out may still use the memory.
        if !self.stream.is_idle().unwrap_or(false) {
            self.memory.iter().for_each(PlainMemory::forbid_reuse);
        }
    }
}

/// Random values between -1 and 1, as bytes.
fn random_tile(dtype: DType) -> Vec<u8> {
    const ELEMENTS: usize = 1 << 18;
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    dtype.encode((0..ELEMENTS).map(|_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f64 / f64::from(1_u32 << 23) - 1.0
    }))
}
