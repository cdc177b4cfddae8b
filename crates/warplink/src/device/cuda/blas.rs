//! cuBLASLt: its functions, and a matrix product that was planned.

use super::driver::function_table;
use super::library::{self, CUBLAS_LT};
use crate::device::MatmulSpec;
use crate::dtype::DType;
use crate::error::{Error, ErrorKind, Result};
use crate::sync::lock;
use cudarc::cublaslt::sys::{
    cublasComputeType_t, cublasLtHandle_t, cublasLtMatmulAlgo_t, cublasLtMatmulDesc_t,
    cublasLtMatmulDescAttributes_t as DescAttribute, cublasLtMatmulPreference_t,
    cublasLtMatmulPreferenceAttributes_t as PreferenceAttribute, cublasLtMatrixLayout_t,
    cudaDataType_t,
};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt;
use std::sync::{Mutex, OnceLock};

/// Most algorithms that are asked for.
pub(super) const CANDIDATES: usize = 8;

/// Alignment beyond which none is better.
pub(super) const BEST_ALIGNMENT: u32 = 256;

/// `CUBLAS_STATUS_NOT_SUPPORTED`.
const NOT_SUPPORTED: c_int = 15;
/// `CUBLAS_STATUS_ALLOC_FAILED`.
const ALLOCATION_FAILED: c_int = 3;
/// `CUBLASLT_EPILOGUE_BIAS`.
const EPILOGUE_BIAS: u32 = 4;

/// An algorithm that cuBLASLt proposes; its own type with the state as an integer, since a newer
/// library may have states that no enumeration of today knows.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Proposal {
    algorithm: cublasLtMatmulAlgo_t,
    workspace: usize,
    state: c_int,
    waves: f32,
    reserved: [c_int; 4],
}

function_table! {
    /// The library's functions.
    BlasLt {
        cublasLtGetVersion() -> usize;
        cublasLtGetStatusString(c_int) -> *const c_char;
        cublasLtCreate(*mut cublasLtHandle_t) -> c_int;
        cublasLtDestroy(cublasLtHandle_t) -> c_int;
        cublasLtMatmulDescCreate(*mut cublasLtMatmulDesc_t, cublasComputeType_t, cudaDataType_t) -> c_int;
        cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t) -> c_int;
        cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t, DescAttribute, *const c_void, usize) -> c_int;
        cublasLtMatrixLayoutCreate(*mut cublasLtMatrixLayout_t, cudaDataType_t, u64, u64, i64) -> c_int;
        cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t) -> c_int;
        cublasLtMatmulPreferenceCreate(*mut cublasLtMatmulPreference_t) -> c_int;
        cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t) -> c_int;
        cublasLtMatmulPreferenceSetAttribute(
            cublasLtMatmulPreference_t, PreferenceAttribute, *const c_void, usize,
        ) -> c_int;
        cublasLtMatmulAlgoGetHeuristic(
            cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
            cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatmulPreference_t, c_int, *mut Proposal, *mut c_int,
        ) -> c_int;
        cublasLtMatmul(
            cublasLtHandle_t, cublasLtMatmulDesc_t, *const c_void, *const c_void, cublasLtMatrixLayout_t,
            *const c_void, cublasLtMatrixLayout_t, *const c_void, *const c_void, cublasLtMatrixLayout_t, *mut c_void,
            cublasLtMatrixLayout_t, *const cublasLtMatmulAlgo_t, *mut c_void, usize, *mut c_void,
        ) -> c_int;
    }
    optional {}
}

impl BlasLt {
    pub(super) fn get() -> Result<&'static Self> {
        static LIBRARY: OnceLock<BlasLt> = OnceLock::new();
        if let Some(library) = LIBRARY.get() {
            return Ok(library);
        }
        let library = Self::resolve(&library::load(&CUBLAS_LT)?)?;
        Ok(LIBRARY.get_or_init(|| library))
    }

    fn check(&self, code: c_int, operation: &'static str) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        let kind = match code {
            NOT_SUPPORTED => ErrorKind::Unsupported,
            ALLOCATION_FAILED => ErrorKind::OutOfMemory,
            _ => ErrorKind::Driver,
        };
        // SAFETY: for every code the library gives a string of its own that is never freed.
        let text = unsafe { (self.cublasLtGetStatusString)(code) };
        let text = if text.is_null() {
            "an unknown error".to_owned()
        } else {
            // SAFETY: as above, and it ends with a zero.
            unsafe { CStr::from_ptr(text) }
                .to_string_lossy()
                .into_owned()
        };
        Err(Error::new(kind, text).during(operation).code(code.into()))
    }
}

/// A handle of the library's, for one GPU. Threads may share it.
pub(super) struct Handle {
    library: &'static BlasLt,
    raw: cublasLtHandle_t,
}

// SAFETY: the library allows a handle on every thread.
unsafe impl Send for Handle {}
// SAFETY: as above, also at the same time.
unsafe impl Sync for Handle {}

impl Handle {
    /// Makes a handle for the GPU whose context is current.
    pub(super) fn create() -> Result<Self> {
        let library = BlasLt::get()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: `raw` is a place for one handle.
        let code = unsafe { (library.cublasLtCreate)(&mut raw) };
        library.check(code, "start cuBLASLt")?;
        Ok(Self { library, raw })
    }

    /// The library's version, as 10000 × major + 100 × minor + patch.
    pub(super) fn version(&self) -> usize {
        // SAFETY: the function takes nothing and only reads a constant.
        unsafe { (self.library.cublasLtGetVersion)() }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once.
        let code = unsafe { (self.library.cublasLtDestroy)(self.raw) };
        if code != 0 {
            tracing::warn!(code, "a handle of cuBLASLt was not destroyed");
        }
    }
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cuBLASLt {}", self.version())
    }
}

/// Addresses of one product's operands.
#[derive(Clone, Copy)]
pub(super) struct Operands {
    pub(super) a: u64,
    pub(super) b: u64,
    pub(super) c: u64,
    pub(super) bias: u64,
}

impl Operands {
    /// The alignments of A, B and C, as far as they matter.
    pub(super) fn alignments(&self) -> [u32; 3] {
        [self.a, self.b, self.c].map(|address| {
            1 << address
                .trailing_zeros()
                .min(BEST_ALIGNMENT.trailing_zeros())
        })
    }
}

/// A product as cuBLASLt wants it described, and the algorithms that it proposes.
///
/// cuBLASLt has matrices by columns, which by rows are their transposes; so what is asked for is
/// Cᵀ = Bᵀ·Aᵀ: its first operand is our B, an `n × k` matrix by columns, its second our A, `k × m`,
/// its result our C, `n × m`. Its bias runs along the result's rows, which are our columns.
pub(super) struct Plan {
    library: &'static BlasLt,
    spec: MatmulSpec,
    /// Behind a lock, since the bias vector's address is set in it for each product.
    description: Mutex<Description>,
    first: Layout,
    second: Layout,
    result: Layout,
    chosen: Proposal,
}

impl Plan {
    /// Describes `spec` and asks for algorithms with at most `workspace` bytes of scratch memory
    /// and operands aligned as those given.
    pub(super) fn propose(
        handle: &Handle,
        spec: &MatmulSpec,
        operands: &Operands,
        workspace: usize,
    ) -> Result<(Self, Vec<Proposal>)> {
        let library = handle.library;
        let kind = data_type(spec.dtype)?;
        let description = Description::create(library, spec)?;
        if spec.bias {
            description.set(
                DescAttribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER,
                &operands.bias,
            )?;
        }
        let first = Layout::create(library, kind, spec.n, spec.k)?;
        let second = Layout::create(library, kind, spec.k, spec.m)?;
        let result = Layout::create(library, kind, spec.n, spec.m)?;
        let preference = Preference::create(library)?;
        let [a, b, c] = operands.alignments();
        preference.set(
            PreferenceAttribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
            &workspace,
        )?;
        preference.set(
            PreferenceAttribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
            &b,
        )?;
        preference.set(
            PreferenceAttribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
            &a,
        )?;
        preference.set(
            PreferenceAttribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
            &c,
        )?;
        preference.set(
            PreferenceAttribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
            &c,
        )?;
        let nothing = Proposal {
            algorithm: cublasLtMatmulAlgo_t { data: [0; 8] },
            workspace: 0,
            state: NOT_SUPPORTED,
            waves: 0.0,
            reserved: [0; 4],
        };
        let mut proposals = [nothing; CANDIDATES];
        let mut count = 0;
        // SAFETY: everything described above is live; there is room for as many proposals as asked.
        let code = unsafe {
            (library.cublasLtMatmulAlgoGetHeuristic)(
                handle.raw,
                description.raw,
                first.raw,
                second.raw,
                result.raw,
                result.raw,
                preference.raw,
                CANDIDATES as c_int,
                proposals.as_mut_ptr(),
                &mut count,
            )
        };
        library
            .check(code, "choose an algorithm for a matrix product")
            .map_err(|error| error.key(format!("{spec:?}")))?;
        let count = usize::try_from(count).unwrap_or(0).min(CANDIDATES);
        let usable: Vec<_> = proposals[..count]
            .iter()
            .copied()
            .filter(|one| one.state == 0)
            .collect();
        let chosen = *usable.first().ok_or_else(|| {
            Error::new(
                ErrorKind::Unsupported,
                format!("cuBLASLt has no algorithm for {spec:?}"),
            )
        })?;
        let description = Mutex::new(description);
        Ok((
            Self {
                library,
                spec: *spec,
                description,
                first,
                second,
                result,
                chosen,
            },
            usable,
        ))
    }

    /// Uses `proposal` from now on.
    pub(super) fn choose(&mut self, proposal: Proposal) {
        self.chosen = proposal;
    }

    /// Bytes of scratch memory that it needs.
    pub(super) fn workspace(&self) -> usize {
        self.chosen.workspace
    }

    /// Enqueues the product.
    ///
    /// # Safety
    /// The operands must be live device memory of what the description says, aligned as those it
    /// was planned with; `scratch` must have [`workspace`](Self::workspace) bytes that nothing else
    /// uses meanwhile; `stream` must be a stream of the current context, the handle's.
    pub(super) unsafe fn enqueue(
        &self,
        handle: &Handle,
        operands: &Operands,
        scratch: u64,
        stream: *mut c_void,
    ) -> Result<()> {
        let (one, beta) = (1.0_f32, if self.spec.accumulate { 1.0_f32 } else { 0.0 });
        let device = |address: u64| address as usize as *mut c_void;
        let description = lock(&self.description);
        if self.spec.bias {
            description.set(
                DescAttribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER,
                &operands.bias,
            )?;
        }
        // SAFETY: the caller vouches for operands, scratch memory and stream; both factors are read
        // during the call, of the scale type `f32`, and the result may be added in place, since
        // both have one layout.
        let code = unsafe {
            (self.library.cublasLtMatmul)(
                handle.raw,
                description.raw,
                (&raw const one).cast(),
                device(operands.b),
                self.first.raw,
                device(operands.a),
                self.second.raw,
                (&raw const beta).cast(),
                device(operands.c),
                self.result.raw,
                device(operands.c),
                self.result.raw,
                &self.chosen.algorithm,
                device(scratch),
                self.chosen.workspace,
                stream,
            )
        };
        self.library
            .check(code, "enqueue a matrix product")
            .map_err(|error| error.key(format!("{:?}", self.spec)))
    }
}

impl fmt::Debug for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Plan({:?}, {} waves, {} bytes of scratch)",
            self.spec, self.chosen.waves, self.chosen.workspace
        )
    }
}

fn data_type(dtype: DType) -> Result<cudaDataType_t> {
    match dtype {
        DType::F16 => Ok(cudaDataType_t::CUDA_R_16F),
        DType::BF16 => Ok(cudaDataType_t::CUDA_R_16BF),
        DType::F32 => Ok(cudaDataType_t::CUDA_R_32F),
        _ => Err(
            Error::invalid(format!("there is no matrix product of {dtype}"))
                .help("use f16, bf16 or f32"),
        ),
    }
}

/// Declares an object of the library's that is created, given attributes and destroyed.
macro_rules! object {
    ($(#[$meta:meta])* $name:ident, $raw:ty, $destroy:ident) => {
        $(#[$meta])*
        struct $name {
            library: &'static BlasLt,
            raw: $raw,
        }

        // SAFETY: the library ties its descriptions to no thread.
        unsafe impl Send for $name {}
        // SAFETY: shared ones are only read; those that are changed are behind a lock.
        unsafe impl Sync for $name {}

        impl Drop for $name {
            fn drop(&mut self) {
                // SAFETY: created once, destroyed once.
                let code = unsafe { (self.library.$destroy)(self.raw) };
                if code != 0 {
                    tracing::warn!(code, concat!(stringify!($destroy), " failed"));
                }
            }
        }
    };
}

object!(
    /// What is to be computed.
    Description, cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy
);
object!(
    /// How a matrix lies in memory.
    Layout, cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy
);
object!(
    /// What an algorithm may use.
    Preference, cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy
);

impl Description {
    fn create(library: &'static BlasLt, spec: &MatmulSpec) -> Result<Self> {
        let mut raw = std::ptr::null_mut();
        let (compute, scale) = (
            cublasComputeType_t::CUBLAS_COMPUTE_32F,
            cudaDataType_t::CUDA_R_32F,
        );
        // SAFETY: `raw` is a place for one description.
        let code = unsafe { (library.cublasLtMatmulDescCreate)(&mut raw, compute, scale) };
        library.check(code, "describe a matrix product")?;
        let description = Self { library, raw };
        if spec.bias {
            description.set(DescAttribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &EPILOGUE_BIAS)?;
        }
        if let Some(multiprocessors) = spec.multiprocessors {
            let count = c_int::try_from(multiprocessors).map_err(|_| {
                Error::invalid(format!("{multiprocessors} multiprocessors are too many"))
            })?;
            description.set(DescAttribute::CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, &count)?;
        }
        Ok(description)
    }

    fn set<T>(&self, attribute: DescAttribute, value: &T) -> Result<()> {
        // SAFETY: `value` has as many bytes as are said, and the library copies them; it refuses
        // a size that is not the attribute's.
        let code = unsafe {
            (self.library.cublasLtMatmulDescSetAttribute)(
                self.raw,
                attribute,
                std::ptr::from_ref(value).cast(),
                size_of::<T>(),
            )
        };
        self.library.check(code, "describe a matrix product")
    }
}

impl Layout {
    /// A dense matrix by columns.
    fn create(
        library: &'static BlasLt,
        kind: cudaDataType_t,
        rows: usize,
        columns: usize,
    ) -> Result<Self> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: `raw` is a place for one layout.
        let code = unsafe {
            (library.cublasLtMatrixLayoutCreate)(
                &mut raw,
                kind,
                rows as u64,
                columns as u64,
                rows as i64,
            )
        };
        library.check(code, "describe a matrix")?;
        Ok(Self { library, raw })
    }
}

impl Preference {
    fn create(library: &'static BlasLt) -> Result<Self> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: `raw` is a place for one preference.
        let code = unsafe { (library.cublasLtMatmulPreferenceCreate)(&mut raw) };
        library.check(code, "say what an algorithm may use")?;
        Ok(Self { library, raw })
    }

    fn set<T>(&self, attribute: PreferenceAttribute, value: &T) -> Result<()> {
        // SAFETY: as for a description.
        let code = unsafe {
            (self.library.cublasLtMatmulPreferenceSetAttribute)(
                self.raw,
                attribute,
                std::ptr::from_ref(value).cast(),
                size_of::<T>(),
            )
        };
        self.library.check(code, "say what an algorithm may use")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cudarc::cublaslt::sys::cublasLtMatmulHeuristicResult_t as Theirs;
    use std::mem::offset_of;

    #[test]
    fn proposals_have_the_librarys_layout() {
        assert_eq!(size_of::<Proposal>(), size_of::<Theirs>());
        assert_eq!(
            offset_of!(Proposal, workspace),
            offset_of!(Theirs, workspaceSize)
        );
        assert_eq!(offset_of!(Proposal, state), offset_of!(Theirs, state));
        assert_eq!(offset_of!(Proposal, waves), offset_of!(Theirs, wavesCount));
        assert_eq!(offset_of!(Proposal, reserved), offset_of!(Theirs, reserved));
    }

    #[test]
    fn alignments_are_powers_of_two_up_to_the_best() {
        let operands = Operands {
            a: 0x1000,
            b: 0x1002,
            c: 0x1010,
            bias: 0,
        };
        assert_eq!(operands.alignments(), [256, 2, 16]);
    }
}
