//! What Python says of collectives in words: options, operators and calls.

use crate::errors::{invalid, raise};
use pyo3::prelude::*;
use std::ffi::c_void;
use warplink::collective::{Call, CollectiveOptions, CollectivePath};
use warplink::device::{ReduceOp, VendorCommunicator};
use warplink::{DType, Rank};

/// The name of a path.
pub(crate) const fn path_name(path: CollectivePath) -> &'static str {
    match path {
        CollectivePath::Direct => "direct",
        CollectivePath::Engine => "engine",
    }
}

/// The operator `op`; of a sum, what values are multiplied by beforehand may be given.
pub(crate) fn operator(op: &str, factor: Option<f64>) -> PyResult<ReduceOp> {
    match (op, factor) {
        (op, None) => op.parse().map_err(raise),
        ("sum", Some(factor)) => Ok(ReduceOp::scaled_sum(factor)),
        (op, Some(_)) => Err(invalid(format!(
            "a factor for the operator '{op}'; expected it for sum only"
        ))),
    }
}

/// The call of the collective named `kind`.
pub(crate) fn call(
    kind: &str,
    count: usize,
    dtype: &str,
    op: Option<&str>,
    root: Option<Rank>,
) -> PyResult<Call> {
    Ok(Call {
        kind: kind.parse().map_err(raise)?,
        op: op.map(|op| operator(op, None)).transpose()?,
        dtype: dtype.parse::<DType>().map_err(raise)?,
        count,
        root,
    })
}

/// The options of `Communicator.collectives`.
pub(crate) fn options(
    path: Option<&str>,
    algorithm: Option<&str>,
    workspace_bytes: Option<usize>,
    communicator: Option<usize>,
) -> PyResult<CollectiveOptions> {
    let path = match path {
        None => None,
        Some("direct") => Some(CollectivePath::Direct),
        Some("engine") => Some(CollectivePath::Engine),
        Some(other) => {
            return Err(invalid(format!(
                "unknown path '{other}'; expected direct or engine"
            )));
        }
    };
    let algorithm = algorithm.map(str::parse).transpose().map_err(raise)?;
    if communicator == Some(0) {
        return Err(invalid(
            "the communicator is 0; expected the address of one of the vendor's library",
        ));
    }
    // SAFETY: that it is one, and stays one for as long as what adopts it, the caller of `Communicator.collectives` sees
    // to; it says so.
    let communicator =
        communicator.map(|address| unsafe { VendorCommunicator::from_raw(address as *mut c_void) });
    let default = CollectiveOptions::default();
    Ok(CollectiveOptions {
        communicator,
        workspace_bytes: workspace_bytes.unwrap_or(default.workspace_bytes),
        algorithm,
        path,
    })
}
