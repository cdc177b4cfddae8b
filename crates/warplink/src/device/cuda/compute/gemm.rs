//! A matmul described for cuBLASLt, with its chosen algorithm.

use super::cublas_lt::{
    BlasLt, CublasLtHandle, Description, Layout, NOT_SUPPORTED, Preference, Proposal,
};
use crate::debug::debug_text;
use crate::device::MatmulSpec;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::named::alternatives;
use crate::sync::lock;
use cudarc::cublaslt::sys::{
    cublasLtMatmulAlgo_t, cublasLtMatmulDescAttributes_t as DescAttribute,
    cublasLtMatmulPreferenceAttributes_t as PreferenceAttribute, cudaDataType_t,
};
use std::ffi::{c_int, c_void};
use std::sync::Mutex;

/// Maximum number of algorithms to request.
pub(crate) const CANDIDATES: usize = 8;

/// Alignment beyond which no algorithm is faster.
pub(crate) const BEST_ALIGNMENT: u32 = 256;

/// Addresses of one matmul's operands.
#[derive(Clone, Copy)]
pub(crate) struct GemmOperands {
    pub(crate) a: u64,
    pub(crate) b: u64,
    pub(crate) c: u64,
    pub(crate) bias: u64,
}

impl GemmOperands {
    /// Alignments of A, B and C, capped at [`BEST_ALIGNMENT`].
    pub(crate) fn alignments(&self) -> [u32; 3] {
        [self.a, self.b, self.c].map(|address| {
            1 << address
                .trailing_zeros()
                .min(BEST_ALIGNMENT.trailing_zeros())
        })
    }
}

/// A matmul described for cuBLASLt, and the algorithms that it proposes.
///
/// cuBLASLt is column-major, so it sees the transposes of our row-major matrices and is asked for Cᵀ = Bᵀ·Aᵀ:
/// its first operand is our B (`n × k`), its second our A (`k × m`), its result our C (`n × m`). Its bias
/// runs along the rows of the result, which are our columns. For a transposed operand of ours, it gets the
/// matrix in memory and transposes it.
pub(crate) struct Gemm {
    library: &'static BlasLt,
    spec: MatmulSpec,
    /// Locked, since the bias address is set in it for each matmul.
    description: Mutex<Description>,
    first: Layout,
    second: Layout,
    result: Layout,
    chosen: Proposal,
}

impl Gemm {
    /// Describes `spec` and requests algorithms with at most `workspace` bytes of scratch memory, for
    /// operands of the given alignment.
    pub(crate) fn propose(
        handle: &CublasLtHandle,
        spec: &MatmulSpec,
        operands: &GemmOperands,
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
        // Our rows in memory are its columns.
        let [second, first, result] = spec
            .in_memory()
            .map(|(rows, length, step)| Layout::create(library, kind, length, rows, step));
        let (first, second, result) = (first?, second?, result?);
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
        // SAFETY: everything described above is live; the array has space for the requested number of proposals.
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
            .check(code, "choose an algorithm for a matmul")
            .map_err(|error| error.with_key(format!("{spec:?}")))?;
        let count = usize::try_from(count).unwrap_or(0).min(CANDIDATES);
        let usable: Vec<_> = proposals[..count]
            .iter()
            .copied()
            .filter(|one| one.state == 0)
            .collect();
        let chosen = *usable.first().ok_or_else(|| {
            Error::unsupported(format!("cuBLASLt has no algorithm for {spec:?}"))
                .with_help("use other sizes or another element type")
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
    pub(crate) fn choose(&mut self, proposal: Proposal) {
        self.chosen = proposal;
    }

    /// Required scratch memory in bytes.
    pub(crate) fn workspace(&self) -> usize {
        self.chosen.workspace
    }

    /// Enqueues the matmul.
    ///
    /// # Safety
    /// The operands must be live device memory that matches the description, with at least the alignment that it was
    /// prepared with; `scratch` must have [`workspace`](Self::workspace) bytes that nothing else uses meanwhile;
    /// `stream` must be a stream of the current context, the handle's.
    pub(crate) unsafe fn enqueue(
        &self,
        handle: &CublasLtHandle,
        operands: &GemmOperands,
        scratch: u64,
        stream: *mut c_void,
    ) -> Result<()> {
        let (one, beta) = (1.0_f32, if self.spec.accumulate { 1.0_f32 } else { 0.0 });
        let device = |address: u64| address as usize as *mut c_void;
        // Held over the call: the bias is part of the shared description rather than an argument.
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
            .check(code, "enqueue a matmul")
            .map_err(|error| error.with_key(format!("{:?}", self.spec)))
    }
}

debug_text!(
    Gemm,
    |it| "Gemm({:?}, {} waves, {} bytes of scratch)",
    it.spec,
    it.chosen.waves,
    it.chosen.workspace
);

/// The type's number in NVIDIA's libraries.
pub(super) fn data_type(dtype: DType) -> Result<cudaDataType_t> {
    match dtype {
        DType::F16 => Ok(cudaDataType_t::CUDA_R_16F),
        DType::BF16 => Ok(cudaDataType_t::CUDA_R_16BF),
        DType::F32 => Ok(cudaDataType_t::CUDA_R_32F),
        _ => Err(Error::invalid(format!(
            "unsupported element type {dtype}; expected {}",
            alternatives(&DType::MATMUL)
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alignments_are_powers_of_two_up_to_the_best() {
        let operands = GemmOperands {
            a: 0x1000,
            b: 0x1002,
            c: 0x1010,
            bias: 0,
        };
        assert_eq!(operands.alignments(), [256, 2, 16]);
    }
}
