//! Fused operations as PyTorch calls them.

use crate::recent::RecentCalls;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

/// `fused_all_gather_matmul`: a recurring call of `calls` runs natively, any other by `python`.
#[pyclass(frozen, module = "warplink")]
#[derive(Debug)]
pub(crate) struct GatherOperator {
    calls: Py<RecentCalls>,
    python: Py<PyAny>,
}

/// `fused_matmul_reduce_scatter`, likewise.
#[pyclass(frozen, module = "warplink")]
#[derive(Debug)]
pub(crate) struct ScatterOperator {
    calls: Py<RecentCalls>,
    python: Py<PyAny>,
}

#[pymethods]
#[allow(non_snake_case, reason = "PyTorch passes arguments by these names")]
impl GatherOperator {
    #[new]
    fn new(calls: Py<RecentCalls>, python: Py<PyAny>) -> Self {
        Self { calls, python }
    }

    #[pyo3(signature = (A, Bs, gather_dim, group_name, *, return_A=true))]
    fn __call__(
        &self,
        py: Python<'_>,
        A: &Bound<'_, PyAny>,
        Bs: &Bound<'_, PyList>,
        gather_dim: i64,
        group_name: &str,
        return_A: bool,
    ) -> PyResult<Py<PyAny>> {
        let operation = if return_A {
            "gather and keep"
        } else {
            "gather"
        };
        let calls = self.calls.get();
        if let Some(results) = calls.call(py, operation, gather_dim, group_name, A, Bs)? {
            return Ok(results);
        }
        // The general path: also the first call, which keeps its plan in `calls`, and calls that are special in any
        // way.
        let named = PyDict::new(py);
        named.set_item(intern!(py, "return_A"), return_A)?;
        self.python
            .call(py, (A, Bs, gather_dim, group_name), Some(&named))
    }
}

#[pymethods]
#[allow(non_snake_case, reason = "PyTorch passes arguments by these names")]
impl ScatterOperator {
    #[new]
    fn new(calls: Py<RecentCalls>, python: Py<PyAny>) -> Self {
        Self { calls, python }
    }

    fn __call__(
        &self,
        py: Python<'_>,
        A: &Bound<'_, PyAny>,
        B: &Bound<'_, PyAny>,
        reduce_op: &str,
        scatter_dim: i64,
        group_name: &str,
    ) -> PyResult<Py<PyAny>> {
        let operation = match reduce_op {
            "sum" => Some("scatter sum"),
            "avg" => Some("scatter avg"),
            _ => None,
        };
        // Other operators, and values that PyTorch rejects, are left to Python, which raises the exception.
        if let Some(operation) = operation {
            let right = PyList::new(py, [B])?;
            let calls = self.calls.get();
            if let Some(result) = calls.call(py, operation, scatter_dim, group_name, A, &right)? {
                return Ok(result);
            }
        }
        let arguments = (A, B, reduce_op, scatter_dim, group_name);
        self.python.call1(py, arguments)
    }
}
