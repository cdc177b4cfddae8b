//! Stream capture, and resources that a captured graph keeps alive.

use crate::device::cuda::driver::Driver;
use crate::error::{Error, Result};
use cudarc::driver::sys::*;
use std::any::Any;
use std::ffi::{c_int, c_uint, c_void};

/// `CU_USER_OBJECT_NO_DESTRUCTOR_SYNC`: destruction is asynchronous.
const NOBODY_WAITS: c_uint = 1;
/// `CU_GRAPH_USER_OBJECT_MOVE`: the graph takes over the reference.
const MOVED: c_uint = 1;

/// A capture in progress. Its handles are valid until the stream captures something else.
pub(crate) struct Capture {
    /// Unique in the process.
    pub(crate) id: u64,
    pub(super) graph: CUgraph,
    pub(super) dependencies: *const CUgraphNode,
    /// Number of dependencies.
    pub(super) count: usize,
}

impl Capture {
    /// The capture of `stream`, if it is capturing.
    pub(crate) fn of(driver: &Driver, stream: CUstream) -> Result<Option<Self>> {
        let Some(ask) = driver.cuStreamGetCaptureInfo_v2 else {
            return Err(too_old("does not report the capture of a stream"));
        };
        let (mut state, mut id, mut count): (c_int, u64, usize) = (0, 0, 0);
        let (mut graph, mut dependencies) = (std::ptr::null_mut(), std::ptr::null());
        // SAFETY: each is an output parameter for one value; the caller's stream is valid.
        let code = unsafe {
            ask(
                stream,
                &mut state,
                &mut id,
                &mut graph,
                &mut dependencies,
                &mut count,
            )
        };
        driver.check(code, "query a stream's capture")?;
        if state == CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE as c_int {
            return Ok(None);
        }
        if state != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE as c_int {
            return Err(Error::invalid(
                "the capture is invalid: it met a call that cannot be recorded",
            )
            .with_help("end the capture and record again without that call"));
        }
        Ok(Some(Self {
            id,
            graph,
            dependencies,
            count,
        }))
    }

    /// Keeps `item` alive as long as the graph, executables instantiated from it and their launches. It is
    /// dropped on a thread that must not call the driver.
    pub(crate) fn keep(&self, driver: &Driver, item: Box<dyn Any + Send>) -> Result<()> {
        let (Some(create), Some(retain), Some(release)) = (
            driver.cuUserObjectCreate,
            driver.cuGraphRetainUserObject,
            driver.cuUserObjectRelease,
        ) else {
            return Err(too_old("has no graphs that own memory"));
        };
        let item = Box::into_raw(Box::new(item));
        let mut object = std::ptr::null_mut();
        // SAFETY: `object` is an output parameter for one object, which has one reference; `release_item` expects
        // what `item` points to.
        let code = unsafe {
            create(
                &mut object,
                item.cast(),
                Some(release_item),
                1,
                NOBODY_WAITS,
            )
        };
        if let Err(error) = driver.check(code, "have a graph keep memory") {
            // SAFETY: the driver did not take it over.
            drop(unsafe { Box::from_raw(item) });
            return Err(error);
        }
        // SAFETY: graph and object are valid; the one reference is transferred.
        let code = unsafe { retain(self.graph, object, 1, MOVED) };
        driver
            .check(code, "have a graph keep memory")
            .inspect_err(|_| {
                // SAFETY: the reference was not transferred.
                unsafe { release(object, 1) };
            })
    }
}

/// Destructor callback for [`Capture::keep`], called by the driver when the last reference is gone.
unsafe extern "C" fn release_item(item: *mut c_void) {
    // SAFETY: `Capture::keep` made it of such a box, and the driver calls this once.
    drop(unsafe { Box::from_raw(item.cast::<Box<dyn Any + Send>>()) });
}

/// Whether `stream` is capturing.
#[inline]
pub(crate) fn is_capturing(driver: &Driver, stream: CUstream) -> Result<bool> {
    let mut state = 0;
    // SAFETY: `state` points to a writable integer; the caller's stream is valid.
    let code = unsafe { (driver.cuStreamIsCapturing)(stream, &mut state) };
    driver.check(code, "ask whether a stream records")?;
    Ok(state != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE as c_int)
}

fn too_old(lack: &str) -> Error {
    Error::unsupported(format!("the driver {lack}"))
        .with_operation("record into a graph")
        .with_help("install a newer driver, or do not capture")
}
