//! cuBLASLt: its functions, and RAII wrappers of its descriptors.

use crate::debug::debug_text;
use crate::device::MatmulSpec;
use crate::device::library::function_table;
use crate::device::library::{self, CUBLAS_LT};
use crate::error::{ErrorKind, Result};
use cudarc::cublaslt::sys::{
    cublasComputeType_t, cublasLtHandle_t, cublasLtMatmulAlgo_t, cublasLtMatmulDesc_t,
    cublasLtMatmulDescAttributes_t as DescAttribute, cublasLtMatmulPreference_t,
    cublasLtMatmulPreferenceAttributes_t as PreferenceAttribute, cublasLtMatrixLayout_t,
    cudaDataType_t,
};
use std::ffi::{c_char, c_int, c_void};
use std::sync::OnceLock;

/// `CUBLAS_STATUS_NOT_SUPPORTED`.
pub(crate) const NOT_SUPPORTED: c_int = 15;
/// `CUBLAS_STATUS_ALLOC_FAILED`.
const ALLOCATION_FAILED: c_int = 3;
/// `CUBLASLT_EPILOGUE_BIAS`.
const EPILOGUE_BIAS: u32 = 4;
/// `CUBLAS_OP_T`.
const TRANSPOSED: c_int = 1;

/// An algorithm that cuBLASLt proposes. The state is an integer, since a newer library may have states that
/// no enumeration knows.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Proposal {
    pub(crate) algorithm: cublasLtMatmulAlgo_t,
    pub(crate) workspace: usize,
    pub(crate) state: c_int,
    pub(crate) waves: f32,
    pub(crate) reserved: [c_int; 4],
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
    pub(crate) fn get() -> Result<&'static Self> {
        static LIBRARY: OnceLock<BlasLt> = OnceLock::new();
        library::once(&LIBRARY, &CUBLAS_LT, Self::resolve)
    }

    /// Turns a code into a result.
    pub(crate) fn check(&self, code: c_int, operation: &'static str) -> Result<()> {
        let kind = match code {
            NOT_SUPPORTED => ErrorKind::Unsupported,
            ALLOCATION_FAILED => ErrorKind::OutOfMemory,
            _ => ErrorKind::Driver,
        };
        // SAFETY: for every code the library gives a string of its own that is never freed.
        unsafe { library::check(code, kind, operation, self.cublasLtGetStatusString) }
    }
}

/// cuBLASLt handle for one GPU. Threads may share it.
pub(crate) struct CublasLtHandle {
    pub(crate) library: &'static BlasLt,
    pub(crate) raw: cublasLtHandle_t,
}

// SAFETY: the library allows a handle on every thread.
unsafe impl Send for CublasLtHandle {}
// SAFETY: as above, also at the same time.
unsafe impl Sync for CublasLtHandle {}

impl CublasLtHandle {
    /// Creates a handle for the GPU whose context is current.
    pub(crate) fn create() -> Result<Self> {
        let library = BlasLt::get()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: `raw` is an output parameter for one handle.
        let code = unsafe { (library.cublasLtCreate)(&mut raw) };
        library.check(code, "start cuBLASLt")?;
        Ok(Self { library, raw })
    }

    /// The library's version, as 10000 × major + 100 × minor + patch.
    pub(crate) fn version(&self) -> usize {
        // SAFETY: the function takes nothing and only reads a constant.
        unsafe { (self.library.cublasLtGetVersion)() }
    }
}

impl Drop for CublasLtHandle {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once.
        let code = unsafe { (self.library.cublasLtDestroy)(self.raw) };
        if code != 0 {
            tracing::warn!(code, "a cuBLASLt handle was not destroyed");
        }
    }
}

debug_text!(CublasLtHandle, |it| "cuBLASLt {}", it.version());

/// Declares a wrapper of a library object that is created, given attributes and destroyed.
macro_rules! object {
    ($(#[$meta:meta])* $name:ident, $raw:ty, $destroy:ident) => {
        $(#[$meta])*
        pub(crate) struct $name {
            library: &'static BlasLt,
            pub(crate) raw: $raw,
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
    /// The operation.
    Description, cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy
);
object!(
    /// Layout of a matrix.
    Layout, cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy
);
object!(
    /// Constraints on algorithms.
    Preference, cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy
);

impl Description {
    pub(crate) fn create(library: &'static BlasLt, spec: &MatmulSpec) -> Result<Self> {
        let mut raw = std::ptr::null_mut();
        let (compute, scale) = (
            cublasComputeType_t::CUBLAS_COMPUTE_32F,
            cudaDataType_t::CUDA_R_32F,
        );
        // SAFETY: `raw` is an output parameter for one description.
        let code = unsafe { (library.cublasLtMatmulDescCreate)(&mut raw, compute, scale) };
        library.check(code, "describe a matmul")?;
        let description = Self { library, raw };
        // Column-major: the library's first operand is our B.
        if spec.transposed_b {
            description.set(DescAttribute::CUBLASLT_MATMUL_DESC_TRANSA, &TRANSPOSED)?;
        }
        if spec.transposed_a {
            description.set(DescAttribute::CUBLASLT_MATMUL_DESC_TRANSB, &TRANSPOSED)?;
        }
        if spec.bias {
            description.set(DescAttribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &EPILOGUE_BIAS)?;
        }
        Ok(description)
    }

    pub(crate) fn set<T>(&self, attribute: DescAttribute, value: &T) -> Result<()> {
        // SAFETY: the length passed is that of `value`, which the library copies; it rejects a size that is not the
        // attribute's.
        let code = unsafe {
            (self.library.cublasLtMatmulDescSetAttribute)(
                self.raw,
                attribute,
                std::ptr::from_ref(value).cast(),
                size_of::<T>(),
            )
        };
        self.library.check(code, "describe a matmul")
    }
}

impl Layout {
    /// Column-major matrix with `step` elements between columns.
    pub(crate) fn create(
        library: &'static BlasLt,
        kind: cudaDataType_t,
        rows: usize,
        columns: usize,
        step: usize,
    ) -> Result<Self> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: `raw` is an output parameter for one layout.
        let code = unsafe {
            (library.cublasLtMatrixLayoutCreate)(
                &mut raw,
                kind,
                rows as u64,
                columns as u64,
                step as i64,
            )
        };
        library.check(code, "describe a matrix")?;
        Ok(Self { library, raw })
    }
}

impl Preference {
    pub(crate) fn create(library: &'static BlasLt) -> Result<Self> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: `raw` is an output parameter for one preference.
        let code = unsafe { (library.cublasLtMatmulPreferenceCreate)(&mut raw) };
        library.check(code, "set the constraints of an algorithm")?;
        Ok(Self { library, raw })
    }

    pub(crate) fn set<T>(&self, attribute: PreferenceAttribute, value: &T) -> Result<()> {
        // SAFETY: as for a description.
        let code = unsafe {
            (self.library.cublasLtMatmulPreferenceSetAttribute)(
                self.raw,
                attribute,
                std::ptr::from_ref(value).cast(),
                size_of::<T>(),
            )
        };
        self.library
            .check(code, "set the constraints of an algorithm")
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
    fn the_library_has_every_function_where_it_is_found() {
        if let Ok(loaded) = library::load(&CUBLAS_LT) {
            let library = BlasLt::resolve(&loaded).unwrap();
            // SAFETY: the function takes nothing and only reads a constant.
            assert!(unsafe { (library.cublasLtGetVersion)() } >= 120_000);
            let error = library.check(NOT_SUPPORTED, "try").unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unsupported);
        }
    }
}
