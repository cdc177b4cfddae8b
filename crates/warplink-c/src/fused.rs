//! Collectives of rows fused with the operations that follow them in a model.

use crate::collectives::{CollectivesObject, element_type};
use crate::handles::{Collectives, Handle, Stream};
use crate::memory::same_job;
use crate::pointer;
use crate::status::{Failure, Outcome, Status, entry};
use crate::types::{numbered, numbered_or_none};
use std::ffi::c_void;
use std::mem::size_of;
use std::ptr::{null, null_mut};
use warplink::collective::{Epilogue, Fused, FusedMemory};
use warplink::device::DeviceSlice;

/// A collective of rows and the operations fused with it, the same on every rank but for the memory. Start from
/// `warplink_fused_call_default` and change members as needed. Let h be the sum of all inputs and the residual, rounded
/// to the element type; n the result of the norm of h, or h itself; and q n divided by a scale, as F8E4M3 or e2m1. The
/// outputs that are not null are stored, at least one. All memory is device memory, contiguous by rows, and stays
/// allocated until the stream is synchronized. One of `sum`, `residual_out` and `output` may be exactly the input or
/// the residual; otherwise memory that is written overlaps nothing.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct FusedCall {
    /// Bytes of this struct, which identify the version of the header; set by `warplink_fused_call_default`.
    pub size: usize,
    /// A `warplink_fused_kind`.
    pub kind: i32,
    /// The type of everything but `quantized` and `scale`, a `warplink_element_type`: F32, F16 or BF16.
    pub element_type: i32,
    /// A `warplink_norm`.
    pub norm: i32,
    /// A `warplink_quantization`.
    pub quantization: i32,
    /// A `warplink_wire`: docs/fused.md documents the savings and the error of FP8.
    pub wire: i32,
    /// Nonzero to add 1 to the weight.
    pub weight_bias: i32,
    /// Added to the mean of squares, or to the variance; not negative.
    pub eps: f32,
    /// Number of rows over all ranks.
    pub tokens: u64,
    /// Elements of a row.
    pub width: u64,
    /// This rank's rows.
    pub input: *const c_void,
    /// Rows added to the sum; null for none.
    pub residual: *const c_void,
    /// `[width]`; required with a norm and null otherwise.
    pub weight: *const c_void,
    /// `[width]`, added after multiplication by the weight; null for none.
    pub bias: *const c_void,
    /// The sum alone.
    pub sum: *mut c_void,
    /// h.
    pub residual_out: *mut c_void,
    /// n.
    pub output: *mut c_void,
    /// q; required with a quantisation and null otherwise. With `WARPLINK_QUANTIZATION_NVFP4`, bytes of two elements
    /// each, `[rows, width / 2, rounded up]`.
    pub quantized: *mut c_void,
    /// With `WARPLINK_QUANTIZATION_STATIC`, one float that is read. Otherwise written: floats, `[rows]` or `[rows,
    /// width / 128, rounded up]`; with `WARPLINK_QUANTIZATION_MXFP8` bytes, `[rows, width / 32, rounded up]`; with
    /// `WARPLINK_QUANTIZATION_NVFP4` F8E4M3, `[rows, width / 16, rounded up]`.
    pub scale: *mut c_void,
    /// One float that is read, the factor applied to scales; required with `WARPLINK_QUANTIZATION_NVFP4` and null
    /// otherwise.
    pub global_scale: *const f32,
}

impl FusedCall {
    fn call(&self) -> Outcome<Fused> {
        let count = |value: u64| usize::try_from(value).unwrap_or(usize::MAX);
        Ok(Fused {
            kind: numbered(self.kind, "warplink_fused_kind")?,
            tokens: count(self.tokens),
            width: count(self.width),
            dtype: element_type(self.element_type)?,
            epilogue: Epilogue {
                norm: numbered_or_none(self.norm, "warplink_norm")?,
                eps: self.eps,
                weight_bias: self.weight_bias != 0,
                quantization: numbered_or_none(self.quantization, "warplink_quantization")?,
            },
            wire: numbered(self.wire, "warplink_wire")?,
        })
    }

    /// # Safety
    /// The memory must be as the documentation of the struct requires.
    unsafe fn enqueue(
        &self,
        object: &CollectivesObject,
        stream: &warplink::device::Stream,
    ) -> Outcome<()> {
        let call = self.call()?;
        let bytes = call.bytes(object.job.communicator.world())?;
        let memory = |address: u64, bytes: usize, name: &str| -> Outcome<Option<DeviceSlice>> {
            // SAFETY: guaranteed by the caller.
            let named = || unsafe { object.named(address, bytes as u64, name) };
            (address != 0).then(named).transpose()
        };
        pointer::check(self.input.cast::<u8>(), "input")?;
        let input = memory(self.input as u64, bytes.input, "input")?;
        let input = input.ok_or_else(|| Failure::invalid("input is null", "pass the rows"))?;
        let residual = memory(self.residual as u64, bytes.residual, "residual")?;
        let weight = memory(self.weight as u64, bytes.weight, "weight")?;
        let bias = memory(self.bias as u64, bytes.weight, "bias")?;
        // As long as the residual: where ranks own rows, both have this rank's only.
        let sum = memory(self.sum as u64, bytes.residual, "sum")?;
        let residual_out = memory(self.residual_out as u64, bytes.residual, "residual_out")?;
        let output = memory(self.output as u64, bytes.output, "output")?;
        let quantized = memory(self.quantized as u64, bytes.quantized, "quantized")?;
        let scale = memory(self.scale as u64, bytes.scale, "scale")?;
        let global_scale = memory(self.global_scale as u64, size_of::<f32>(), "global_scale")?;
        let memory = FusedMemory {
            residual: residual.as_ref(),
            weight: weight.as_ref(),
            bias: bias.as_ref(),
            sum: sum.as_ref(),
            residual_out: residual_out.as_ref(),
            output: output.as_ref(),
            quantized: quantized.as_ref(),
            scale: scale.as_ref(),
            global_scale: global_scale.as_ref(),
            ..FusedMemory::of(&input)
        };
        Ok(object.collectives.fused(&call, &memory, stream)?)
    }
}

/// An all-reduce with null memory, no norm and no quantisation. Does not block.
#[unsafe(no_mangle)]
pub extern "C" fn warplink_fused_call_default() -> FusedCall {
    FusedCall {
        size: size_of::<FusedCall>(),
        kind: 0,
        element_type: 0,
        norm: 0,
        quantization: 0,
        wire: 0,
        weight_bias: 0,
        eps: 1e-6,
        tokens: 0,
        width: 0,
        input: null(),
        residual: null(),
        weight: null(),
        bias: null(),
        sum: null_mut(),
        residual_out: null_mut(),
        output: null_mut(),
        quantized: null_mut(),
        scale: null_mut(),
        global_scale: null(),
    }
}

/// Enqueues a collective of rows with its fused operations, as one kernel. All ranks get bit-identical results.
/// Requires the direct path: returns WARPLINK_STATUS_UNSUPPORTED on the path of the vendor's library, and for rows that
/// are too long for the workspace. Returns WARPLINK_STATUS_INVALID_ARGUMENT if members are inconsistent with one
/// another or with the memory, or the struct comes from another version's header. If ranks make different calls,
/// `warplink_stream_synchronize` returns WARPLINK_STATUS_MISMATCH. Does not block.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_fused_collective(
    collectives: Collectives,
    call: *const FusedCall,
    stream: Stream,
) -> Status {
    entry("enqueue a fused collective", || {
        let (object, stream) = (collectives.get()?, stream.get()?);
        same_job(&object.job, &stream.job, "stream")?;
        // SAFETY: the size comes first in every version.
        let size = unsafe { pointer::load(call.cast::<usize>(), "call") }?;
        if size != size_of::<FusedCall>() {
            return Err(Failure::invalid(
                format!(
                    "a call of {size} bytes; expected {}",
                    size_of::<FusedCall>()
                ),
                "start from warplink_fused_call_default, and use the header that was installed with the library",
            ));
        }
        // SAFETY: of this version, as checked above.
        let call = unsafe { pointer::load(call, "call") }?;
        // SAFETY: the caller passes device memory, or null where it is not used, and keeps it allocated.
        unsafe { call.enqueue(&object, &stream.stream) }
    })
}
