//! Several matmuls in one launch, through cuBLAS: unlike cuBLASLt it takes result addresses from a list, so
//! each result may be in another peer's memory.

use super::gemm::data_type;
use super::tuning::Scratch;
use crate::debug::debug_text;
use crate::device::cuda::gpu::Gpu;
use crate::device::cuda::memory::PlainMemory;
use crate::device::cuda::stream::CudaStream;
use crate::device::library::function_table;
use crate::device::library::{self, CUBLAS};
use crate::device::{DeviceSlice, MatmulSpec, Stream};
use crate::error::{ErrorKind, Result};
use crate::sync::lock;
use std::ffi::{c_char, c_int, c_void};
use std::fmt;
use std::sync::{Arc, Mutex, OnceLock};

/// `CUBLAS_OP_N`.
const NOT_TRANSPOSED: c_int = 0;
/// `CUBLAS_OP_T`.
const TRANSPOSED: c_int = 1;
/// `CUBLAS_COMPUTE_32F`.
const COMPUTE_F32: c_int = 68;
/// `CUBLAS_GEMM_DEFAULT`.
const DEFAULT_ALGORITHM: c_int = -1;

/// Workspace size that NVIDIA recommends for the newest GPUs.
const WORKSPACE: usize = 32 << 20;

/// Required alignment of rows and addresses: the library chooses a kernel without seeing the addresses, and
/// assumes the best alignment.
const ALIGNMENT: u64 = 16;

function_table! {
    /// The library's functions.
    Blas {
        cublasGetStatusString(c_int) -> *const c_char;
        cublasCreate_v2(*mut *mut c_void) -> c_int;
        cublasDestroy_v2(*mut c_void) -> c_int;
        cublasSetStream_v2(*mut c_void, *mut c_void) -> c_int;
        cublasSetWorkspace_v2(*mut c_void, *mut c_void, usize) -> c_int;
        cublasGemmBatchedEx(
            *mut c_void, c_int, c_int, c_int, c_int, c_int, *const c_void, *const c_void, c_int, c_int, *const c_void,
            c_int, c_int, *const c_void, *const c_void, c_int, c_int, c_int, c_int, c_int,
        ) -> c_int;
    }
    optional {}
}

impl Blas {
    fn get() -> Result<&'static Self> {
        static LIBRARY: OnceLock<Blas> = OnceLock::new();
        library::once(&LIBRARY, &CUBLAS, Self::resolve)
    }

    fn check(&self, code: c_int, operation: &'static str) -> Result<()> {
        let text = self.cublasGetStatusString;
        // SAFETY: for every code the library gives a string of its own that is never freed.
        unsafe { library::check(code, ErrorKind::Driver, operation, text) }
    }
}

/// cuBLAS handle for one GPU. Its stream is set for each call.
pub(super) struct BatchedGemms {
    library: &'static Blas,
    gpu: Arc<Gpu>,
    handle: Mutex<CublasHandle>,
}

struct CublasHandle(*mut c_void);

// SAFETY: the library allows a handle on every thread, one at a time.
unsafe impl Send for CublasHandle {}

/// Whether the library can run all of `matmuls` in one batch.
pub(super) fn takes(
    spec: &MatmulSpec,
    matmuls: &[(DeviceSlice, DeviceSlice)],
    b: &DeviceSlice,
) -> bool {
    let size = spec.dtype.size() as u64;
    // Row lengths in memory of C, B and A.
    let right = if spec.transposed_b { spec.k } else { spec.n };
    let left = if spec.transposed_a { spec.m } else { spec.k };
    let rows = [spec.n, right, left].map(|length| length as u64 * size);
    let addresses = matmuls
        .iter()
        .flat_map(|(a, c)| [a, c])
        .chain([b])
        .map(DeviceSlice::address);
    matmuls.len() > 1
        && !spec.bias
        && !spec.accumulate
        && spec.leading == [None; 3]
        && data_type(spec.dtype).is_ok()
        && rows
            .into_iter()
            .chain(addresses)
            .all(|value| value.is_multiple_of(ALIGNMENT))
}

impl BatchedGemms {
    /// Loads the library and creates a handle for the GPU.
    pub(super) fn create(gpu: &Arc<Gpu>) -> Result<Self> {
        let library = Blas::get()?;
        let _entered = gpu.context.enter_relaxed()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: `raw` is an output parameter for one handle, and the GPU's context is current.
        let code = unsafe { (library.cublasCreate_v2)(&mut raw) };
        library.check(code, "start cuBLAS")?;
        Ok(Self {
            library,
            gpu: gpu.clone(),
            handle: Mutex::new(CublasHandle(raw)),
        })
    }

    /// Uploads the operand lists, and runs the batch once on scratch memory to load the kernel.
    pub(super) fn prepare(
        self: &Arc<Self>,
        spec: &MatmulSpec,
        matmuls: &[(DeviceSlice, DeviceSlice)],
        b: &DeviceSlice,
        scratch: &Scratch,
    ) -> Result<BatchedGemm> {
        let list = |addresses: &dyn Fn(usize) -> [u64; 3]| -> Result<Lists> {
            Lists::make(&self.gpu, matmuls.len(), addresses)
        };
        // On scratch operands: the first run loads the library's kernels, and must not write to the caller's
        // memory.
        let tried = list(&|_| [scratch.operands.a, scratch.operands.b, scratch.operands.c])?;
        let workspace_bytes = scratch.workspace_bytes.min(WORKSPACE);
        let workspace = (scratch.workspace, workspace_bytes);
        {
            let _entered = self.gpu.context.enter_relaxed()?;
            // SAFETY: the lists name the scratch operands, which match `spec`; all matmuls write the same values to
            // one result, which nobody reads.
            unsafe { self.enqueue(spec, &tried, workspace, scratch.stream.raw.cast())? };
        }
        scratch.wait(&self.gpu)?;
        let lists = list(&|index| {
            let (a, c) = &matmuls[index];
            [a.address(), b.address(), c.address()]
        })?;
        Ok(BatchedGemm {
            batched: self.clone(),
            spec: *spec,
            lists,
            workspace_bytes,
            matmuls: matmuls.to_vec(),
            b: b.clone(),
        })
    }

    /// Enqueues the listed matmuls.
    ///
    /// # Safety
    /// The lists must name live device memory that matches `spec`, aligned to [`ALIGNMENT`]; nothing else may use the
    /// memory of `workspace` meanwhile; `stream` must be a stream of the context, which must be current.
    unsafe fn enqueue(
        &self,
        spec: &MatmulSpec,
        lists: &Lists,
        workspace: (u64, usize),
        stream: *mut c_void,
    ) -> Result<()> {
        let (one, zero) = (1.0_f32, 0.0_f32);
        let device = |address: u64| address as usize as *mut c_void;
        let kind = data_type(spec.dtype)? as c_int;
        // Cannot truncate: checked when the matmul was validated.
        let [m, n, k] = [spec.m as c_int, spec.n as c_int, spec.k as c_int];
        let [a, b, c] = lists.addresses();
        let operation = |transposed: bool| {
            if transposed {
                TRANSPOSED
            } else {
                NOT_TRANSPOSED
            }
        };
        let right = if spec.transposed_b { k } else { n };
        let left = if spec.transposed_a { m } else { k };
        let handle = lock(&self.handle);
        // SAFETY: the handle is live and used by this thread alone; the caller vouches for the rest.
        // The library sees matrices by columns, for which ours are their transposes: it is asked
        // for Cᵀ = Bᵀ·Aᵀ, where it transposes what memory holds transposed.
        unsafe {
            let code = (self.library.cublasSetStream_v2)(handle.0, stream);
            self.library.check(code, "set the stream of matmuls")?;
            // Must follow the stream: setting that resets the workspace.
            let code =
                (self.library.cublasSetWorkspace_v2)(handle.0, device(workspace.0), workspace.1);
            self.library
                .check(code, "set the scratch memory of matmuls")?;
            let code = (self.library.cublasGemmBatchedEx)(
                handle.0,
                operation(spec.transposed_b),
                operation(spec.transposed_a),
                n,
                m,
                k,
                (&raw const one).cast(),
                device(b),
                kind,
                right,
                device(a),
                kind,
                left,
                (&raw const zero).cast(),
                device(c),
                kind,
                n,
                lists.count as c_int,
                COMPUTE_F32,
                DEFAULT_ALGORITHM,
            );
            self.library
                .check(code, "enqueue matmuls")
                .map_err(|error| error.with_key(format!("{spec:?}")))
        }
    }
}

impl Drop for BatchedGemms {
    fn drop(&mut self) {
        let handle = lock(&self.handle).0 as usize;
        let library = self.library;
        // Destroying the handle frees memory, which may block.
        self.gpu.reaper.run(move |_| {
            // SAFETY: created once, destroyed once, with the context current.
            let code = unsafe { (library.cublasDestroy_v2)(handle as *mut c_void) };
            if code != 0 {
                tracing::warn!(code, "a cuBLAS handle was not destroyed");
            }
        });
    }
}

impl fmt::Debug for BatchedGemms {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("cuBLAS")
    }
}

/// Device arrays of operand addresses: all left operands, all right, all results.
struct Lists {
    memory: PlainMemory,
    count: usize,
}

impl Lists {
    fn make(gpu: &Arc<Gpu>, count: usize, addresses: &dyn Fn(usize) -> [u64; 3]) -> Result<Self> {
        let mut bytes = vec![0_u8; 3 * count * size_of::<u64>()];
        for index in 0..count {
            for (list, address) in addresses(index).into_iter().enumerate() {
                let at = (list * count + index) * size_of::<u64>();
                bytes[at..at + size_of::<u64>()].copy_from_slice(&address.to_ne_bytes());
            }
        }
        let memory = PlainMemory::allocate(gpu, bytes.len())?;
        // SAFETY: the memory was allocated with as many bytes.
        unsafe { gpu.staging.upload(memory.address, &bytes)? };
        Ok(Self { memory, count })
    }

    fn addresses(&self) -> [u64; 3] {
        let each = (self.count * size_of::<u64>()) as u64;
        [0, 1, 2].map(|list| self.memory.address + list * each)
    }
}

/// A prepared batch of matmuls.
pub(super) struct BatchedGemm {
    batched: Arc<BatchedGemms>,
    spec: MatmulSpec,
    lists: Lists,
    workspace_bytes: usize,
    // Keeps the operands alive.
    matmuls: Vec<(DeviceSlice, DeviceSlice)>,
    b: DeviceSlice,
}

impl BatchedGemm {
    /// Enqueues the batch; the matmuls may run in any order.
    pub(super) fn enqueue(&self, stream: &Stream) -> Result<()> {
        let gpu = &self.batched.gpu;
        let stream = CudaStream::of(stream, gpu)?;
        let (_, _entered) = stream.enter()?;
        let slices = self.matmuls.iter().flat_map(|(a, c)| [a, c]);
        let _enqueuing = stream.enqueue(slices.chain([&self.b]));
        let _relaxed = gpu.context.relax_capture();
        let (reaper, live, bytes) = (&gpu.reaper, stream.live(), self.workspace_bytes);
        let scratch = match stream.capture()? {
            Some(capture) => gpu.workspaces.of_graph(reaper, live, &capture, bytes)?,
            None => gpu.workspaces.of_stream(reaper, live, bytes)?,
        };
        let workspace = (scratch, self.workspace_bytes);
        // SAFETY: the slices are kept alive, and were checked against `spec`, alignment included; the scratch memory
        // belongs to this stream or to the graph that it captures.
        unsafe {
            self.batched.enqueue(
                &self.spec,
                &self.lists,
                workspace,
                stream.raw_stream().cast(),
            )
        }
    }
}

debug_text!(
    BatchedGemm,
    |it| "BatchedGemm({} of {:?})",
    it.lists.count,
    it.spec
);
