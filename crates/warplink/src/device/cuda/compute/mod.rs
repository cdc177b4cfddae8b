//! Matmuls and element-wise operations of a GPU.

pub(super) mod cublas;
pub(super) mod cublas_lt;
mod elementwise;
pub(super) mod gemm;
pub(super) mod recorded;
pub(super) mod tuning;

use self::cublas::BatchedGemms;
use self::cublas_lt::CublasLtHandle;
use self::elementwise::ElementwiseKernels;
use self::gemm::{BEST_ALIGNMENT, Gemm, GemmOperands};
use self::recorded::Recorder;
use self::tuning::Scratch;
use crate::device::cuda::gpu::Gpu;
use crate::device::cuda::memory::CudaBacking;
use crate::device::cuda::stream::CudaStream;
use crate::device::{Compute, DeviceSlice, Elementwise, MatmulSpec, PreparedLaunch, Stream};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::sync::lock;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};

/// Maximum scratch memory of a graph of one matmul. A program has dozens of such graphs, each of which holds
/// its own.
const MAX_SCRATCH: usize = 4 << 20;

/// Cache key: spec and operand alignments.
type GemmKey = (MatmulSpec, [u32; 3]);

/// Matmuls and element-wise operations of a GPU.
#[derive(Debug)]
pub(super) struct CudaCompute {
    gpu: Arc<Gpu>,
    handle: CublasLtHandle,
    elementwise: ElementwiseKernels,
    gemms: RwLock<HashMap<GemmKey, Arc<Gemm>>>,
    /// Serializes preparations, so that they do not disturb each other's timing.
    preparing: Mutex<()>,
    workspace: usize,
    /// Created with the first batch.
    batched: OnceLock<Option<Arc<BatchedGemms>>>,
    recorder: Recorder,
}

impl CudaCompute {
    pub(super) fn create(gpu: &Arc<Gpu>) -> Result<Self> {
        let _entered = gpu.context.enter_relaxed()?;
        let handle = CublasLtHandle::create()?;
        let elementwise = ElementwiseKernels::load(gpu)?;
        // Twice NVIDIA's recommended minimum, which allows more algorithms.
        let workspace = if gpu.capabilities.compute_capability.0 >= 9 {
            64 << 20
        } else {
            16 << 20
        };
        Ok(Self {
            gpu: gpu.clone(),
            handle,
            elementwise,
            gemms: RwLock::default(),
            preparing: Mutex::default(),
            workspace,
            batched: OnceLock::new(),
            recorder: Recorder::create(gpu)?,
        })
    }

    /// Batched matmuls, if cuBLAS is available.
    fn batched(&self) -> Option<&Arc<BatchedGemms>> {
        let made = self
            .batched
            .get_or_init(|| match BatchedGemms::create(&self.gpu) {
                Ok(batched) => Some(Arc::new(batched)),
                Err(error) => {
                    tracing::info!(%error, "matmuls of a batch are enqueued one by one");
                    None
                }
            });
        made.as_ref()
    }

    fn prepared(&self, key: &GemmKey) -> Option<Arc<Gemm>> {
        self.gemms
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .get(key)
            .cloned()
    }

    fn keep(&self, key: GemmKey, gemm: Gemm) -> Arc<Gemm> {
        let mut gemms = self.gemms.write().unwrap_or_else(PoisonError::into_inner);
        // Two threads may prepare the same key; the first one wins.
        gemms.entry(key).or_insert_with(|| Arc::new(gemm)).clone()
    }
}

impl Compute for CudaCompute {
    fn prepare_matmul(&self, spec: &MatmulSpec) -> Result<()> {
        self.gpu.fault.check()?;
        check_spec(spec)?;
        let key = (*spec, [BEST_ALIGNMENT; 3]);
        let _alone = lock(&self.preparing);
        if self.prepared(&key).is_some() {
            return Ok(());
        }
        let gemm = self
            .choose_and_run(spec)
            .map_err(|error| error.with_operation("prepare a matmul"))?;
        self.keep(key, gemm);
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
        spec.check(a, b, c, bias)?;
        let named = [("A", a), ("B", b), ("C", c)].into_iter();
        for (name, slice) in named.chain(bias.map(|bias| ("the bias", bias))) {
            CudaBacking::of(slice)?;
            check_alignment(name, slice, spec.dtype)?;
        }
        let stream = CudaStream::of(stream, &self.gpu)?;
        let (_, _entered) = stream.enter()?;
        let _enqueuing = stream.enqueue([a, b, c].into_iter().chain(bias));
        let operands = GemmOperands {
            a: a.address(),
            b: b.address(),
            c: c.address(),
            bias: bias.map(DeviceSlice::address).unwrap_or_default(),
        };
        let _relaxed = self.gpu.context.relax_capture();
        let key = (*spec, operands.alignments());
        let gemm = match self.prepared(&key) {
            Some(gemm) => gemm,
            None => self.keep(
                key,
                Gemm::propose(&self.handle, spec, &operands, self.workspace)?.0,
            ),
        };
        let scratch = match gemm.workspace() {
            0 => 0,
            least => {
                let (reaper, live) = (&self.gpu.reaper, stream.live());
                let workspaces = &self.gpu.workspaces;
                // A stream's scratch serves all later matmuls, a graph's only those recorded in it.
                match stream.capture_apart()? {
                    Some(capture) => workspaces.of_graph(reaper, live, &capture, least)?,
                    None => workspaces.of_stream(reaper, live, self.workspace)?,
                }
            }
        };
        // SAFETY: the operands are live device memory, were checked against `spec`, and are aligned as the gemm
        // requires; the scratch memory belongs to this stream or to the graph that it captures.
        unsafe { gemm.enqueue(&self.handle, &operands, scratch, stream.raw_stream().cast()) }
    }

    fn prepare_matmuls(
        self: Arc<Self>,
        spec: &MatmulSpec,
        matmuls: &[(DeviceSlice, DeviceSlice)],
        b: &DeviceSlice,
        bias: Option<&DeviceSlice>,
    ) -> Result<Arc<dyn PreparedLaunch>> {
        self.gpu.fault.check()?;
        check_spec(spec)?;
        spec.check_all(matmuls, b, bias)?;
        let slices = matmuls.iter().flat_map(|(a, c)| [a, c]);
        for slice in slices.chain([b]).chain(bias) {
            CudaBacking::of(slice)?;
        }
        if cublas::takes(spec, matmuls, b)
            && let Some(batched) = self.batched()
        {
            let scratch = Scratch::allocate(&self.gpu, spec, self.workspace)?;
            let alone = lock(&self.preparing);
            match batched.prepare(spec, matmuls, b, &scratch) {
                Ok(batch) => return self.recorder.record(move |stream| batch.enqueue(stream)),
                // Do not fail on one rank only: its ready peers would wait for it.
                Err(error) => {
                    self.gpu.fault.check()?;
                    tracing::info!(%error, "matmuls of a batch are enqueued one by one");
                }
            }
            drop(alone);
        }
        self.prepare_matmul(spec)?;
        let scratch = self
            .prepared(&(*spec, [BEST_ALIGNMENT; 3]))
            .map_or(0, |gemm| gemm.workspace());
        let (compute, spec, b, bias) = (self.clone(), *spec, b.clone(), bias.cloned());
        let matmuls = matmuls.to_vec();
        let work = move |stream: &Stream| {
            matmuls
                .iter()
                .try_for_each(|(a, c)| compute.matmul(stream, &spec, a, &b, c, bias.as_ref()))
        };
        if scratch > MAX_SCRATCH {
            return Ok(Recorder::unrecorded(work));
        }
        self.recorder.record(work)
    }

    fn prepare_elementwise(
        self: Arc<Self>,
        request: &Elementwise,
    ) -> Result<Arc<dyn PreparedLaunch>> {
        let (compute, request) = (self.clone(), request.clone());
        self.recorder
            .record(move |stream| compute.elementwise(stream, &request))
    }

    fn elementwise(&self, stream: &Stream, request: &Elementwise) -> Result<()> {
        self.elementwise.enqueue(&self.gpu, stream, request)
    }
}

/// Fails for an element type or a size that the library does not support.
fn check_spec(spec: &MatmulSpec) -> Result<()> {
    spec.check_dtype()?;
    let max = i32::MAX as usize;
    if [spec.m, spec.n, spec.k]
        .into_iter()
        .chain(spec.leading.into_iter().flatten())
        .any(|length| length == 0 || length > max)
    {
        return Err(Error::invalid(format!(
            "m, n and k are {}, {} and {}; expected each from 1 to {max}",
            spec.m, spec.n, spec.k
        ))
        .with_operation("matmul")
        .with_help("split the matrices, and leave out empty ones"));
    }
    Ok(())
}

fn check_alignment(name: &str, slice: &DeviceSlice, dtype: DType) -> Result<()> {
    if slice.address().is_multiple_of(dtype.size() as u64) {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "{name} is at {:#x}; expected an address aligned to the {} bytes of {dtype}",
        slice.address(),
        dtype.size()
    ))
    .with_operation("matmul")
    .with_help("slice at whole elements"))
}
