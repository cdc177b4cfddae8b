//! Lengths, offsets, indices and ranks as arguments.

use crate::errors::invalid;
use pyo3::exceptions::PyOverflowError;
use pyo3::prelude::*;

/// A non-negative integer, or several of them, as `from_py_with` of an argument: a value out of range raises
/// InvalidArgumentError instead of OverflowError.
pub(crate) fn whole<'py, T>(object: &Bound<'py, PyAny>) -> PyResult<T>
where
    T: for<'a> FromPyObject<'a, 'py>,
{
    let found = object.extract::<T>().map_err(Into::into);
    found.map_err(|error: PyErr| {
        if !error.is_instance_of::<PyOverflowError>(object.py()) {
            return error;
        }
        match object.repr() {
            Ok(shown) => invalid(format!(
                "{shown} is out of range; expected whole numbers of 64 bits that are not negative"
            )),
            Err(failure) => failure,
        }
    })
}
