//! Errors of the library as Python exceptions.
//!
//! The classes are defined in Python (`warplink/errors.py`), so that they can derive from built-in exceptions as well;
//! this module finds the class for a kind and sets the attributes.

use crate::unreported;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use warplink::Error;
use warplink::program::Diagnostic;

/// The exception for `error`.
pub(crate) fn raise(error: Error) -> PyErr {
    raise_with(error, &[])
}

/// The exception for `error`, with the verifier's diagnostics.
pub(crate) fn raise_with(error: Error, diagnostics: &[Diagnostic]) -> PyErr {
    // Noted before the exception exists: failing to create it raises another one, which also tells the application.
    unreported::note(&error);
    // Callers need not be attached: most are inside `map_err` after `detach`, where attaching again is cheap.
    Python::attach(|py| match build(py, &error, diagnostics) {
        Ok(exception) => PyErr::from_value(exception),
        Err(failure) => failure,
    })
}

fn build<'py>(
    py: Python<'py>,
    error: &Error,
    diagnostics: &[Diagnostic],
) -> PyResult<Bound<'py, PyAny>> {
    let fields = PyDict::new(py);
    fields.set_item("peer", error.peer())?;
    fields.set_item("job_peer", error.job_peer())?;
    fields.set_item("rank", error.rank())?;
    fields.set_item("operation", error.operation())?;
    fields.set_item("key", error.key())?;
    fields.set_item("code", error.code())?;
    fields.set_item("help", error.help())?;
    let found = diagnostics.iter().map(|diagnostic| {
        (
            diagnostic.kind.to_string(),
            diagnostic.message.clone(),
            diagnostic.lines(),
            diagnostic.ranks(),
        )
    });
    fields.set_item("diagnostics", found.collect::<Vec<_>>())?;
    py.import("warplink.errors")?.call_method(
        "from_kind",
        (error.kind().name(), error.to_string()),
        Some(&fields),
    )
}

/// Result of `call`, which may block, without the interpreter's lock.
pub(crate) fn detached<T: Send>(
    py: Python<'_>,
    call: impl FnOnce() -> warplink::Result<T> + Send,
) -> PyResult<T> {
    py.detach(call).map_err(raise)
}

/// An exception for an invalid argument.
pub(crate) fn invalid(message: impl Into<String>) -> PyErr {
    raise(Error::invalid(message.into()))
}

/// An exception for a closed object.
pub(crate) fn closed(what: &'static str) -> PyErr {
    raise(Error::closed(format!("the {what} was closed")))
}

/// An exception for a plan that was replaced by its captured graph.
pub(crate) fn captured() -> PyErr {
    let error = Error::closed("the plan was captured");
    raise(error.with_help("launch the captured plan"))
}
