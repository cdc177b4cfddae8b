//! Matrix products and sums of a GPU.

pub(super) mod algorithm;
pub(super) mod cublas;
pub(super) mod cublas_lt;
pub(super) mod recorded;
pub(super) mod workspace;

use self::algorithm::{BEST_ALIGNMENT, Operands, Plan};
use self::cublas::Batches;
use self::cublas_lt::{Handle, Proposal};
use self::recorded::Recorder;
use crate::deadline::Deadline;
use crate::device::cuda::driver::poll::poll;
use crate::device::cuda::driver::raw::{RawEvent, RawStream};
use crate::device::cuda::gpu::Gpu;
use crate::device::cuda::kernels::sum::SumKernels;
use crate::device::cuda::memory::{CudaBacking, PlainMemory};
use crate::device::cuda::stream::CudaStream;
use crate::device::{Compute, DeviceSlice, MatmulSpec, PreparedLaunch, Stream, StreamBackend};
use crate::dtype::DType;
use crate::error::{Error, ErrorKind, Result};
use crate::sync::lock;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};
use std::time::{Duration, Instant};

/// Turns the timing of candidates off when it is "0"; cuBLASLt's first choice is used then.
const TUNING_VARIABLE: &str = "WARPLINK_MATMUL_TUNING";

/// Floating-point operations below which the first choice is as good as any.
const WORTH_TUNING: f64 = 1e9;

/// Longest time for timing the candidates of one product.
const TUNING_TIME: Duration = Duration::from_millis(500);

/// Time to run each candidate for.
const SAMPLE: f32 = 3.0;

/// Up to this multiple of the fastest candidate's time, another may be as fast.
const CLOSE: f32 = 1.06;

/// How many candidates run again.
const FINALISTS: usize = 4;

/// How often each of them does.
const ROUNDS: usize = 4;

/// Longest time for one product.
const LIMIT: Duration = Duration::from_secs(60);

/// Scratch memory that a graph of one product may hold; a program has dozens of them.
const MOST_SCRATCH: usize = 4 << 20;

/// Which product, and how its operands are aligned.
type Key = (MatmulSpec, [u32; 3]);

/// Products and sums of a GPU.
#[derive(Debug)]
pub(super) struct CudaCompute {
    gpu: Arc<Gpu>,
    handle: Handle,
    sums: SumKernels,
    plans: RwLock<HashMap<Key, Arc<Plan>>>,
    /// One preparation at a time, so that they do not disturb each other's timing.
    preparing: Mutex<()>,
    workspace: usize,
    /// Made for the first batch.
    batches: OnceLock<Option<Arc<Batches>>>,
    recorder: Recorder,
}

impl CudaCompute {
    pub(super) fn create(gpu: &Arc<Gpu>) -> Result<Self> {
        let _entered = gpu.context.enter()?;
        let _relaxed = gpu.context.relax_capture();
        let handle = Handle::create()?;
        let sums = SumKernels::load(gpu)?;
        // What NVIDIA recommends as a minimum, doubled: more leaves more algorithms to choose from.
        let workspace = if gpu.capabilities.compute_capability.0 >= 9 {
            64 << 20
        } else {
            16 << 20
        };
        Ok(Self {
            gpu: gpu.clone(),
            handle,
            sums,
            plans: RwLock::default(),
            preparing: Mutex::default(),
            workspace,
            batches: OnceLock::new(),
            recorder: Recorder::create(gpu)?,
        })
    }

    /// What enqueues several products at once, where the library for it is there.
    fn batches(&self) -> Option<&Arc<Batches>> {
        let made = self
            .batches
            .get_or_init(|| match Batches::create(&self.gpu) {
                Ok(batches) => Some(Arc::new(batches)),
                Err(error) => {
                    tracing::info!(%error, "products of a batch are enqueued one by one");
                    None
                }
            });
        made.as_ref()
    }

    fn planned(&self, key: &Key) -> Option<Arc<Plan>> {
        self.plans
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .get(key)
            .cloned()
    }

    fn keep(&self, key: Key, plan: Plan) -> Arc<Plan> {
        let mut plans = self.plans.write().unwrap_or_else(PoisonError::into_inner);
        // Two threads may plan the same; the first plan stands.
        plans.entry(key).or_insert_with(|| Arc::new(plan)).clone()
    }

    /// Runs and, where it is worth it, times the candidates on scratch memory.
    fn plan_and_run(&self, spec: &MatmulSpec) -> Result<Plan> {
        let scratch = Scratch::allocate(&self.gpu, spec, self.workspace)?;
        let (mut plan, proposals) =
            Plan::propose(&self.handle, spec, &scratch.operands, self.workspace)?;
        let tune = spec.operations() >= WORTH_TUNING
            && proposals.len() > 1
            && std::env::var_os(TUNING_VARIABLE).is_none_or(|value| value != "0");
        if tune && let Some(fastest) = self.fastest(&mut plan, &proposals, &scratch)? {
            plan.choose(fastest);
        }
        // Also loads the kernels of the chosen one, whether or not it was timed.
        self.run(&plan, &scratch, 1)?;
        tracing::debug!(?plan, "prepared a matrix product");
        Ok(plan)
    }

    /// The fastest of `proposals`, or none if none of them runs.
    ///
    /// Those that one sample finds close to the fastest run again in turns: within one sample a GPU's
    /// clocks may change by more than they differ.
    fn fastest(
        &self,
        plan: &mut Plan,
        proposals: &[Proposal],
        scratch: &Scratch,
    ) -> Result<Option<Proposal>> {
        let start = Instant::now();
        let mut tried = Vec::new();
        for &proposal in proposals {
            if start.elapsed() > TUNING_TIME {
                break;
            }
            plan.choose(proposal);
            // The first run loads kernels. A proposal that does not run after all is passed over.
            let Ok(_) = self.run(plan, scratch, 1) else {
                self.gpu.fault.check()?;
                continue;
            };
            let once = self.run(plan, scratch, 1)?;
            let times = (SAMPLE / once.max(1e-3)).clamp(2.0, 50.0) as u32;
            let time = self.run(plan, scratch, times)? / times as f32;
            tried.push((time, times, proposal));
        }
        tried.sort_by(|a, b| a.0.total_cmp(&b.0));
        let Some(&(least, ..)) = tried.first() else {
            return Ok(None);
        };
        tried.retain(|(time, ..)| *time <= least * CLOSE);
        tried.truncate(FINALISTS);
        for _ in 0..ROUNDS {
            // Whole rounds, so that all have as many chances.
            if start.elapsed() > TUNING_TIME {
                break;
            }
            for (time, times, proposal) in &mut tried {
                plan.choose(*proposal);
                let again = self.run(plan, scratch, *times)? / *times as f32;
                *time = time.min(again);
            }
        }
        let best = tried.iter().min_by(|a, b| a.0.total_cmp(&b.0));
        Ok(best.map(|(_, _, proposal)| *proposal))
    }

    /// Milliseconds for so many runs.
    fn run(&self, plan: &Plan, scratch: &Scratch, times: u32) -> Result<f32> {
        let gpu = &self.gpu;
        let _entered = gpu.context.enter()?;
        let _relaxed = gpu.context.relax_capture();
        // SAFETY: event and stream are of the context, which is current.
        unsafe { scratch.start.record(scratch.stream.raw)? };
        for _ in 0..times {
            // SAFETY: the scratch operands are of what the plan describes, and aligned better than
            // anything; the scratch memory and the stream are used by this call alone.
            unsafe {
                plan.enqueue(
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

impl Compute for CudaCompute {
    fn prepare_matmul(&self, spec: &MatmulSpec) -> Result<()> {
        self.gpu.fault.check()?;
        check_spec(spec)?;
        let key = (*spec, [BEST_ALIGNMENT; 3]);
        let _alone = lock(&self.preparing);
        if self.planned(&key).is_some() {
            return Ok(());
        }
        let plan = self
            .plan_and_run(spec)
            .map_err(|error| error.during("prepare a matrix product"))?;
        self.keep(key, plan);
        Ok(())
    }

    fn matmul(
        &self,
        stream: &Stream,
        spec: &MatmulSpec,
        a: &DeviceSlice,
        b: &DeviceSlice,
        c: &DeviceSlice,
        bias: Option<&DeviceSlice>,
    ) -> Result<()> {
        check_spec(spec)?;
        check_operand(spec, "A", a, spec.m, spec.k)?;
        check_operand(spec, "B", b, spec.k, spec.n)?;
        check_operand(spec, "C", c, spec.m, spec.n)?;
        match bias {
            Some(bias) if spec.bias => check_operand(spec, "the bias", bias, 1, spec.n)?,
            None if !spec.bias => {}
            _ => {
                return Err(Error::invalid(
                    "a bias is given where none is planned, or the other way round",
                )
                .during("matmul"));
            }
        }
        let stream = CudaStream::of(stream, &self.gpu)?;
        let (_, _entered) = stream.enter()?;
        let operands = Operands {
            a: a.address(),
            b: b.address(),
            c: c.address(),
            bias: bias.map(DeviceSlice::address).unwrap_or_default(),
        };
        let _relaxed = self.gpu.context.relax_capture();
        let key = (*spec, operands.alignments());
        let plan = match self.planned(&key) {
            Some(plan) => plan,
            None => self.keep(
                key,
                Plan::propose(&self.handle, spec, &operands, self.workspace)?.0,
            ),
        };
        let scratch = match plan.workspace() {
            0 => 0,
            least => {
                let capture = stream.capture_id()?;
                // A stream's piece serves all products to come, a graph's only those in it.
                let bytes = capture.map_or(self.workspace, |_| least);
                let (context, raw) = (&self.gpu.context, stream.handle() as usize);
                self.gpu.workspaces.address(context, raw, capture, bytes)?
            }
        };
        // SAFETY: the operands are live device memory of what `spec` says, as was checked, and
        // aligned as the plan's; the scratch memory belongs to this stream or capture.
        unsafe { plan.enqueue(&self.handle, &operands, scratch, stream.handle().cast()) }
    }

    fn prepare_products(
        self: Arc<Self>,
        spec: &MatmulSpec,
        products: &[(DeviceSlice, DeviceSlice)],
        b: &DeviceSlice,
        bias: Option<&DeviceSlice>,
    ) -> Result<Arc<dyn PreparedLaunch>> {
        self.gpu.fault.check()?;
        check_spec(spec)?;
        spec.check_all(products, b, bias)?;
        let slices = products.iter().flat_map(|(a, c)| [a, c]);
        for slice in slices.chain([b]).chain(bias) {
            CudaBacking::of(slice)?;
        }
        if cublas::takes(spec, products, b)
            && let Some(batches) = self.batches()
        {
            let scratch = Scratch::allocate(&self.gpu, spec, self.workspace)?;
            let alone = lock(&self.preparing);
            match batches.prepare(spec, products, b, &scratch) {
                Ok(batch) => return self.recorder.record(move |stream| batch.enqueue(stream)),
                // A peer that has made its plan would wait for this rank's.
                Err(error) => {
                    self.gpu.fault.check()?;
                    tracing::info!(%error, "products of a batch are enqueued one by one");
                }
            }
            drop(alone);
        }
        self.prepare_matmul(spec)?;
        let scratch = self
            .planned(&(*spec, [BEST_ALIGNMENT; 3]))
            .map_or(0, |plan| plan.workspace());
        let (compute, spec, b, bias) = (self.clone(), *spec, b.clone(), bias.cloned());
        let products = products.to_vec();
        let work = move |stream: &Stream| {
            products
                .iter()
                .try_for_each(|(a, c)| compute.matmul(stream, &spec, a, &b, c, bias.as_ref()))
        };
        if scratch > MOST_SCRATCH {
            return Ok(Recorder::unrecorded(work));
        }
        self.recorder.record(work)
    }

    fn prepare_sum(
        self: Arc<Self>,
        dtype: DType,
        target: &DeviceSlice,
        sources: &[DeviceSlice],
    ) -> Result<Arc<dyn PreparedLaunch>> {
        let (target, sources) = (target.clone(), sources.to_vec());
        let compute = self.clone();
        self.recorder
            .record(move |stream| compute.sum(stream, dtype, &target, &sources))
    }

    fn sum(
        &self,
        stream: &Stream,
        dtype: DType,
        target: &DeviceSlice,
        sources: &[DeviceSlice],
    ) -> Result<()> {
        self.sums.enqueue(&self.gpu, stream, dtype, target, sources)
    }
}

fn check_spec(spec: &MatmulSpec) -> Result<()> {
    if spec.dtype.matmul_tolerance().is_none() {
        return Err(
            Error::invalid(format!("there is no matrix product of {}", spec.dtype))
                .help("use f16, bf16 or f32"),
        );
    }
    let most = i32::MAX as usize;
    if [spec.m, spec.n, spec.k]
        .into_iter()
        .any(|length| length == 0 || length > most)
    {
        return Err(Error::invalid(format!(
            "a product of {} × {} × {}",
            spec.m, spec.n, spec.k
        )));
    }
    Ok(())
}

fn check_operand(
    spec: &MatmulSpec,
    name: &str,
    slice: &DeviceSlice,
    rows: usize,
    columns: usize,
) -> Result<()> {
    CudaBacking::of(slice)?;
    let wrong = |text: String| Err(Error::invalid(text).during("matmul"));
    let size = spec.dtype.size();
    let bytes = rows
        .checked_mul(columns)
        .and_then(|elements| elements.checked_mul(size));
    if bytes != Some(slice.bytes()) {
        return wrong(format!(
            "{name} has {} bytes, not {rows} × {columns} × {size}",
            slice.bytes()
        ));
    }
    if !slice.address().is_multiple_of(size as u64) {
        return wrong(format!(
            "{name} is not aligned to an element of {}",
            spec.dtype
        ));
    }
    Ok(())
}

/// Memory, a stream and events to try products with.
pub(super) struct Scratch {
    _memory: [PlainMemory; 5],
    pub(super) operands: Operands,
    pub(super) workspace: u64,
    pub(super) workspace_bytes: usize,
    pub(super) stream: RawStream,
    start: RawEvent,
    end: RawEvent,
}

impl Scratch {
    /// Allocates operands for `spec`, with random values: products of zeros take less power, and so
    /// less time, than others.
    fn allocate(gpu: &Arc<Gpu>, spec: &MatmulSpec, workspace_bytes: usize) -> Result<Self> {
        let bytes = |rows: usize, columns: usize| {
            let elements = rows
                .checked_mul(columns)
                .and_then(|elements| elements.checked_mul(spec.dtype.size()));
            elements.ok_or_else(|| {
                Error::invalid(format!("a product of {} × {} × {}", spec.m, spec.n, spec.k))
            })
        };
        let (a_bytes, b_bytes, c_bytes) = (
            bytes(spec.m, spec.k)?,
            bytes(spec.k, spec.n)?,
            bytes(spec.m, spec.n)?,
        );
        let bias_bytes = bytes(1, spec.n)?;
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
            operands: Operands { a, b, c, bias },
            workspace,
            workspace_bytes,
            stream: RawStream::create(&gpu.context, false)?,
            start: RawEvent::create(&gpu.context, true)?,
            end: RawEvent::create(&gpu.context, true)?,
            _memory: memory,
        };
        let tile = random_tile(spec.dtype)?;
        for (address, bytes) in [(a, a_bytes), (b, b_bytes), (c, c_bytes), (bias, bias_bytes)] {
            scratch.fill(gpu, address, bytes, &tile)?;
        }
        scratch.wait(gpu)?;
        Ok(scratch)
    }

    /// Fills memory with repetitions of `tile`.
    fn fill(&self, gpu: &Gpu, address: u64, bytes: usize, tile: &[u8]) -> Result<()> {
        let mut done = tile.len().min(bytes);
        // SAFETY: the memory was allocated with at least so many bytes.
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
                    Err(deadline.expired("the end of a matrix product"))
                } else {
                    Ok(())
                }
            },
        )
    }
}

/// Random values between -1 and 1, as bytes.
fn random_tile(dtype: DType) -> Result<Vec<u8>> {
    const ELEMENTS: usize = 1 << 18;
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut value = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1_u32 << 23) as f32 - 1.0
    };
    let mut bytes = Vec::with_capacity(ELEMENTS * dtype.size());
    for _ in 0..ELEMENTS {
        match dtype {
            DType::F16 => bytes.extend(half::f16::from_f32(value()).to_ne_bytes()),
            DType::BF16 => bytes.extend(half::bf16::from_f32(value()).to_ne_bytes()),
            DType::F32 => bytes.extend(value().to_ne_bytes()),
            _ => {
                return Err(Error::new(
                    ErrorKind::Internal,
                    format!("no random values of {dtype}"),
                ));
            }
        }
    }
    Ok(bytes)
}
