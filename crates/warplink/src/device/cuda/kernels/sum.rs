//! The kernel that adds arrays.

use super::module::{Function, Module};
use super::nvrtc;
use crate::device::cuda::gpu::Gpu;
use crate::device::cuda::memory::CudaBacking;
use crate::device::cuda::stream::CudaStream;
use crate::device::{DeviceSlice, Stream};
use crate::dtype::DType;
use crate::error::{Error, Result};
use std::ffi::{c_uint, c_void};

/// Most sources; must match the kernel.
const MAX_SOURCES: usize = crate::device::MAX_SUM_SOURCES;

/// Threads of a block; must not pass the kernel's launch bounds.
const BLOCK: u32 = 512;

/// Blocks for each multiprocessor: enough to have its memory busy.
const BLOCKS_PER_MULTIPROCESSOR: u32 = 4;

/// Bytes that one thread reads of a source at once.
const VECTOR: usize = 16;

/// As the kernel has it.
#[repr(C)]
struct Sources {
    at: [u64; MAX_SOURCES],
}

/// The kernels, one for each element type.
#[derive(Debug)]
pub(crate) struct SumKernels {
    functions: [(DType, Function); 5],
    max_blocks: u32,
}

impl SumKernels {
    pub(crate) fn load(gpu: &Gpu) -> Result<Self> {
        let module = Module::load(&gpu.context, &gpu.capabilities, &nvrtc::SUM)?;
        let functions = [
            (DType::F16, module.function(c"warplink_sum_f16")?),
            (DType::BF16, module.function(c"warplink_sum_bf16")?),
            (DType::F32, module.function(c"warplink_sum_f32")?),
            (DType::F64, module.function(c"warplink_sum_f64")?),
            (DType::I32, module.function(c"warplink_sum_i32")?),
        ];
        Ok(Self {
            functions,
            max_blocks: gpu.capabilities.multiprocessors.max(1) * BLOCKS_PER_MULTIPROCESSOR,
        })
    }

    /// Enqueues `target = Σ sources`.
    pub(crate) fn enqueue(
        &self,
        gpu: &Gpu,
        stream: &Stream,
        dtype: DType,
        target: &DeviceSlice,
        sources: &[DeviceSlice],
    ) -> Result<()> {
        let (_, function) = self
            .functions
            .iter()
            .find(|(of, _)| *of == dtype)
            .ok_or_else(|| {
                Error::invalid(format!(
                    "unsupported element type {dtype}; expected a number type"
                ))
                .with_operation("sum")
                .with_help("use i32, f16, bf16, f32 or f64")
            })?;
        let vectors = check(dtype, target, sources)?;
        let stream = CudaStream::of(stream, gpu)?;
        let (_, _entered) = stream.enter()?;
        let count = (target.bytes() / dtype.size()) as u64;
        if count == 0 {
            return Ok(());
        }
        let _enqueuing = stream.enqueue(sources.iter().chain([target]));
        let mut at = Sources {
            at: [0; MAX_SOURCES],
        };
        at.at
            .iter_mut()
            .zip(sources)
            .for_each(|(at, source)| *at = source.address());
        let mut number = sources.len() as c_uint;
        let (mut target_address, mut count, mut vectors) =
            (target.address(), count, c_uint::from(vectors));
        let per_block = BLOCK as usize
            * if vectors == 1 {
                VECTOR / dtype.size()
            } else {
                1
            };
        let blocks = count
            .div_ceil(per_block as u64)
            .clamp(1, self.max_blocks.into()) as u32;
        let mut parameters: [*mut c_void; 5] = [
            (&raw mut at).cast(),
            (&raw mut number).cast(),
            (&raw mut target_address).cast(),
            (&raw mut count).cast(),
            (&raw mut vectors).cast(),
        ];
        // SAFETY: the parameters are the kernel's, in order. All slices are live device memory of
        // `count` elements, aligned to an element and, where `vectors` says so, to a vector.
        unsafe { function.launch(stream.raw_stream(), blocks, BLOCK, &mut parameters) }
    }
}

/// Fails where the kernel could not do it; whether all addresses are aligned to a vector.
fn check(dtype: DType, target: &DeviceSlice, sources: &[DeviceSlice]) -> Result<bool> {
    let wrong = |text: String| Err(Error::invalid(text).with_operation("sum"));
    if sources.is_empty() || sources.len() > MAX_SOURCES {
        return wrong(format!(
            "the sum has {} sources; expected 1 to {MAX_SOURCES}",
            sources.len()
        ));
    }
    if !target.bytes().is_multiple_of(dtype.size()) {
        return wrong(format!(
            "the target has {} bytes; expected a multiple of the {} bytes of {dtype}",
            target.bytes(),
            dtype.size()
        ));
    }
    let mut vectors = true;
    for slice in std::iter::once(target).chain(sources) {
        CudaBacking::of(slice)?;
        if slice.bytes() != target.bytes() {
            return wrong(format!(
                "a source has {} bytes; expected the {} of the target",
                slice.bytes(),
                target.bytes()
            ));
        }
        if !slice.address().is_multiple_of(dtype.size() as u64) {
            return wrong(format!(
                "{slice:?} is not aligned to {} bytes; expected whole elements of {dtype}",
                dtype.size()
            ));
        }
        if slice.overlaps(target) && slice.address() != target.address() {
            return wrong(format!(
                "source {slice:?} overlaps a part of the target {target:?}; expected the same slice or none of it"
            ));
        }
        vectors &= slice.address().is_multiple_of(VECTOR as u64);
    }
    Ok(vectors)
}
