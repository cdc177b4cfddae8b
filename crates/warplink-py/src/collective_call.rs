//! Conversion of operators and calls of collectives from Python.

use crate::array::Array;
use crate::errors::{invalid, raise};
use pyo3::prelude::*;
use warplink::collective::{Call, Choice, CollectiveKind};
use warplink::device::ReduceOp;
use warplink::{DType, Rank};

/// The operator `op`; a sum may have a factor that inputs are multiplied by before.
pub(crate) fn operator(op: &str, factor: Option<f64>) -> PyResult<ReduceOp> {
    // PyTorch's name.
    let op = if op == "avg" { "average" } else { op };
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

/// The call of a collective on a target and a source, of `world` ranks.
pub(crate) fn call_on(
    kind: CollectiveKind,
    [target, source]: [&Array; 2],
    op: Option<(&str, Option<f64>)>,
    root: Option<Rank>,
    world: usize,
) -> PyResult<Call> {
    let op = op.map(|(op, factor)| operator(op, factor)).transpose()?;
    // Without a reduction, bytes are moved: types that the library does not compute with work as well, and one kernel
    // serves all of them.
    let dtype = if op.is_some() {
        let dtype = source.element("the source")?.dtype()?;
        // A target without a type, such as a region, takes any, as does the empty one of a rank that is not the root.
        if let Ok(element) = target.element("the target")
            && element.name != dtype.name()
            && target.slice.bytes() > 0
        {
            return Err(invalid(format!(
                "{kind}: the target has elements of {}; expected {dtype}, as the source has",
                element.name
            )));
        }
        dtype
    } else {
        DType::U8
    };
    // Elements passed by the caller on every rank; lengths that do not divide are rejected by the length check.
    let (input_rows, _) = kind.rows(world);
    let bytes = match kind {
        CollectiveKind::Broadcast | CollectiveKind::Scatter => target.slice.bytes(),
        _ => source.slice.bytes() / input_rows.max(1),
    };
    if !bytes.is_multiple_of(dtype.size()) {
        return Err(invalid(format!(
            "{kind} of {bytes} bytes; expected whole elements of {dtype}"
        )));
    }
    Ok(Call {
        kind,
        op,
        dtype,
        count: bytes / dtype.size(),
        root,
    })
}

/// Converts a choice to Python.
pub(crate) fn choice_to_python(py: Python<'_>, choice: Choice) -> PyResult<Bound<'_, PyAny>> {
    let arguments = (
        choice.algorithm.name(),
        choice.lanes,
        choice.threads,
        choice.chunks,
    );
    py.import("warplink.choice")?
        .getattr("Choice")?
        .call1(arguments)
}
