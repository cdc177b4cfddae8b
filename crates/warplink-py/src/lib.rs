//! The extension module `warplink._warplink` of the Python package `warplink`.
//!
//! It wraps the library's types one by one; conveniences specific to Python are written in Python, in
//! `python/warplink/`. Three rules hold throughout:
//!
//! - Calls that may block run without the interpreter's lock.
//! - No thread of the library takes that lock, except for Python functions that are kernels of the host device
//!   (`block`): Python objects that keep borrowed memory alive are released on a dedicated thread (`owner`).
//! - Every error of the library becomes an exception with its kind, peer and rank (`errors`).

mod array;
mod block;
mod bound_call;
mod call_state;
mod channel;
mod collective_call;
mod collectives;
mod communicator;
mod direct_calls;
mod dlpack;
mod element;
mod engine;
mod enqueue;
mod errors;
mod executor;
mod experts;
mod fused;
mod job;
mod kernel;
mod memory;
mod number;
mod operators;
mod order;
mod overlap;
mod owner;
mod pair;
mod parts;
mod place;
mod program;
mod recent;
mod region;
mod stream;
mod transfer;
mod unreported;
mod wait;
mod watch;
mod xla;

use pyo3::exceptions::PyImportError;
use pyo3::prelude::*;
use std::sync::OnceLock;

/// Warplink's types, as the package `warplink` exports them.
#[pymodule]
mod _warplink {
    #[pymodule_export]
    use super::{
        block::{Block, BlockChannel},
        bound_call::BoundCall,
        call_state::CallState,
        channel::{Connect, Connection, Connections},
        collectives::Collectives,
        communicator::Communicator,
        direct_calls::DirectCalls,
        element::element_types,
        engine::CollectiveEngine,
        executor::{CapturedPlan, Executor, Plan, Prepared},
        experts::{Experts, Routing},
        job::{Job, UniqueId},
        kernel::{Kernel, Module},
        memory::{Memory, View},
        operators::{GatherOperator, ScatterOperator},
        order::Order,
        overlap::{CapturedOverlap, OverlapLauncher, OverlapPlan},
        pair::RecentPair,
        program::{Program, Report},
        recent::{RecentCall, RecentCalls},
        region::{Region, RemoteRegion},
        stream::{Event, Graph, Stream, Turns},
        transfer::{Receive, Send, StreamBarrier, Transfer, post_all, wait_all},
        version,
        watch::Watch,
        xla::XlaGroup,
    };
    use pyo3::prelude::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        super::check_interpreter(module.py())
    }
}

/// Fails in a second interpreter of the process: types and threads of the module belong to the first.
fn check_interpreter(py: Python<'_>) -> PyResult<()> {
    static FIRST: OnceLock<usize> = OnceLock::new();
    // Every interpreter has its own `sys` module, which lives as long as the interpreter, so that its address
    // identifies it.
    let own = py.import("sys")?.as_ptr() as usize;
    if *FIRST.get_or_init(|| own) == own {
        return Ok(());
    }
    Err(PyImportError::new_err(
        "warplink was imported by another interpreter of this process; expected one interpreter; \
         help: use threads of that interpreter, or processes",
    ))
}

/// The version of the library, such as `0.1.0`.
#[pyfunction]
fn version() -> &'static str {
    env!("CARGO_PKG_VERSION")
}
