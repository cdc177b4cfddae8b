//! Stream-ordered writes of words and waits for words, eager and captured.

use super::capture::Capture;
use crate::device::cuda::driver::context::Context;
use crate::device::cuda::driver::raw::RawStream;
use crate::device::cuda::driver::{Driver, Status, status};
use crate::device::{DeviceKind, MemoryOp, Word};
use crate::error::{Error, Result};
use cudarc::driver::sys::*;
use std::ffi::c_uint;
use std::mem::MaybeUninit;
use std::sync::Arc;

/// Operations for each driver call; its limit is 256.
const BATCH: usize = 64;

/// `CU_STREAM_WRITE_VALUE_DEFAULT`: earlier writes of the stream are visible system-wide first.
const WRITE_AFTER_ALL: c_uint = 0;
/// `CU_STREAM_WAIT_VALUE_GEQ`: wait until the signed difference of word and value is not negative.
const WAIT_AT_LEAST: c_uint = 0;
/// `CU_STREAM_SET_CAPTURE_DEPENDENCIES`.
const SET_DEPENDENCIES: c_uint = 1;

/// Enqueues `ops` on `stream`, of the current context.
pub(crate) fn enqueue(driver: &Driver, stream: CUstream, ops: &[MemoryOp<'_>]) -> Result<()> {
    match ops {
        [] => Ok(()),
        [MemoryOp::Write { word, value }] => {
            let address = address(word)?;
            // SAFETY: the word is aligned memory of a live slice; stream and context are valid.
            let code = unsafe {
                (driver.cuStreamWriteValue64_v2)(stream, address, *value, WRITE_AFTER_ALL)
            };
            driver.check(code, "enqueue a write of a word")
        }
        [MemoryOp::Wait { word, value }] => {
            let address = address(word)?;
            // SAFETY: as above.
            let code =
                unsafe { (driver.cuStreamWaitValue64_v2)(stream, address, *value, WAIT_AT_LEAST) };
            driver.check(code, "enqueue a wait for a word")
        }
        _ => in_batches(ops, |batch| {
            // SAFETY: the count passed is that of the batch, whose operations are valid and use words of live slices.
            let code = unsafe {
                (driver.cuStreamBatchMemOp_v2)(stream, batch.len() as c_uint, batch.as_mut_ptr(), 0)
            };
            driver.check(code, "enqueue writes of and waits for words")
        }),
    }
}

/// Adds `ops` to the graph under capture, for drivers that do not capture the calls of [`enqueue`].
pub(crate) fn add_to_capture(
    context: &Context,
    stream: CUstream,
    ops: &[MemoryOp<'_>],
) -> Result<()> {
    let driver = context.driver;
    let (Some(add), Some(update)) = (
        driver.cuGraphAddBatchMemOpNode,
        driver.cuStreamUpdateCaptureDependencies,
    ) else {
        return Err(
            Error::unsupported("the driver cannot record waits for words into a graph")
                .with_help("install a newer driver, or do not capture"),
        );
    };
    in_batches(ops, |batch| {
        let Some(capture) = Capture::of(driver, stream)? else {
            return Err(Error::invalid("the stream does not record a graph"));
        };
        let params = CUDA_BATCH_MEM_OP_NODE_PARAMS {
            ctx: context.raw,
            count: batch.len() as c_uint,
            paramArray: batch.as_mut_ptr(),
            flags: 0,
        };
        let mut node = std::ptr::null_mut();
        // SAFETY: graph and dependencies are those of the capture under way, unchanged since they
        // were asked for; the parameters name as many operations as are there, and are copied.
        let code = unsafe {
            add(
                &mut node,
                capture.graph,
                capture.dependencies,
                capture.count,
                &params,
            )
        };
        driver.check(code, "record writes of and waits for words")?;
        // SAFETY: `node` is the one node just added to this stream's graph.
        let code = unsafe { update(stream, &mut node, 1, SET_DEPENDENCIES) };
        driver.check(code, "record writes of and waits for words")
    })
}

/// Whether the driver captures the calls of [`enqueue`]. Probed on a private stream, since a refused call
/// would invalidate the caller's capture. `address` is a word with a value of at least zero.
pub(crate) fn are_captured(context: &Arc<Context>, address: u64) -> Result<bool> {
    let stream = RawStream::create(context, false)?;
    let _entered = context.enter_relaxed()?;
    let driver = context.driver;
    let relaxed = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    // SAFETY: the stream is ours, and not recording.
    let code = unsafe { (driver.cuStreamBeginCapture_v2)(stream.raw, relaxed) };
    driver.check(code, "begin recording")?;
    let mut batch = [write_params(address, 0), wait_params(address, 0)];
    // SAFETY: what is recorded here never runs; the word is live all the same.
    let codes: [Status; 3] = unsafe {
        [
            (driver.cuStreamWriteValue64_v2)(stream.raw, address, 0, WRITE_AFTER_ALL),
            (driver.cuStreamWaitValue64_v2)(stream.raw, address, 0, WAIT_AT_LEAST),
            (driver.cuStreamBatchMemOp_v2)(stream.raw, 2, batch.as_mut_ptr(), 0),
        ]
    };
    let mut graph = std::ptr::null_mut();
    // SAFETY: `graph` is an output parameter for one graph; recording began on this stream.
    let ended = unsafe { (driver.cuStreamEndCapture)(stream.raw, &mut graph) };
    if !graph.is_null() {
        // SAFETY: the graph is ours, and nothing was made from it.
        let code = unsafe { (driver.cuGraphDestroy)(graph) };
        if code != status::SUCCESS {
            tracing::warn!(code, "a graph was not destroyed");
        }
    }
    let captured = codes == [status::SUCCESS; 3] && ended == status::SUCCESS;
    if !captured {
        tracing::debug!(
            ?codes,
            ended,
            "the driver does not record stream memory operations by itself"
        );
    }
    Ok(captured)
}

fn in_batches(
    ops: &[MemoryOp<'_>],
    mut give: impl FnMut(&mut [CUstreamBatchMemOpParams]) -> Result<()>,
) -> Result<()> {
    let mut storage = [const { MaybeUninit::<CUstreamBatchMemOpParams>::uninit() }; BATCH];
    for chunk in ops.chunks(BATCH) {
        for (place, op) in storage.iter_mut().zip(chunk) {
            place.write(match op {
                MemoryOp::Write { word, value } => write_params(address(word)?, *value),
                // The driver's current API has no write without a barrier.
                MemoryOp::Reset { word } => write_params(address(word)?, 0),
                MemoryOp::Wait { word, value } => wait_params(address(word)?, *value),
            });
        }
        // SAFETY: the first `chunk.len()` places were written above, and there are as many,
        // since a chunk has at most `BATCH` operations.
        let batch =
            unsafe { std::slice::from_raw_parts_mut(storage.as_mut_ptr().cast(), chunk.len()) };
        give(batch)?;
    }
    Ok(())
}

/// GPU address of a word; fails for another device's.
#[inline]
pub(crate) fn address(word: &Word) -> Result<u64> {
    match word.as_slice().kind() {
        DeviceKind::Cuda => Ok(word.address()),
        kind => Err(Error::invalid(format!(
            "the word belongs to device {kind}; expected a GPU's"
        ))
        .with_help("use words of the stream's device")),
    }
}

fn write_params(address: u64, value: u64) -> CUstreamBatchMemOpParams {
    let mut params = CUstreamBatchMemOpParams { pad: [0; 6] };
    params.writeValue = CUstreamBatchMemOpParams_union_CUstreamMemOpWriteValueParams_st {
        operation: CUstreamBatchMemOpType::CU_STREAM_MEM_OP_WRITE_VALUE_64,
        address,
        __bindgen_anon_1:
            CUstreamBatchMemOpParams_union_CUstreamMemOpWriteValueParams_st__bindgen_ty_1 {
                value64: value,
            },
        flags: WRITE_AFTER_ALL,
        alias: 0,
    };
    params
}

fn wait_params(address: u64, value: u64) -> CUstreamBatchMemOpParams {
    let mut params = CUstreamBatchMemOpParams { pad: [0; 6] };
    params.waitValue = CUstreamBatchMemOpParams_union_CUstreamMemOpWaitValueParams_st {
        operation: CUstreamBatchMemOpType::CU_STREAM_MEM_OP_WAIT_VALUE_64,
        address,
        __bindgen_anon_1:
            CUstreamBatchMemOpParams_union_CUstreamMemOpWaitValueParams_st__bindgen_ty_1 {
                value64: value,
            },
        flags: WAIT_AT_LEAST,
        alias: 0,
    };
    params
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;

    #[test]
    fn operations_have_the_drivers_layout() {
        type Wait = CUstreamBatchMemOpParams_union_CUstreamMemOpWaitValueParams_st;
        type Write = CUstreamBatchMemOpParams_union_CUstreamMemOpWriteValueParams_st;
        assert_eq!(size_of::<CUstreamBatchMemOpParams>(), 48);
        for offsets in [
            [
                offset_of!(Wait, address),
                offset_of!(Wait, __bindgen_anon_1),
                offset_of!(Wait, flags),
                offset_of!(Wait, alias),
            ],
            [
                offset_of!(Write, address),
                offset_of!(Write, __bindgen_anon_1),
                offset_of!(Write, flags),
                offset_of!(Write, alias),
            ],
        ] {
            assert_eq!(offsets, [8, 16, 24, 32]);
        }
        // SAFETY: `pad` covers the whole union, which was wholly initialized.
        let (write, wait) = unsafe { (write_params(0x1000, 7).pad, wait_params(0x2000, 9).pad) };
        assert_eq!([write[0] as u32, wait[0] as u32], [5, 4]);
        assert_eq!((write[1], write[2], write[3] as u32), (0x1000, 7, 0));
        assert_eq!((wait[1], wait[2], wait[3] as u32), (0x2000, 9, 0));
    }
}
