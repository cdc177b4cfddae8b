//! Host programs: their text, and the verifier's results.

use crate::errors::{invalid, raise, raise_with};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::sync::Arc;
use warplink::DType;
use warplink::device::ReduceOp;
use warplink::program::{Parameters, Value, refused, verify};

/// A host program: the operations that every rank enqueues, described once for all ranks (docs/language.md).
///
/// `Program(text)` raises ParseError, with line and column, if the text is not a valid program.
#[pyclass(frozen, module = "warplink")]
#[derive(Debug)]
pub(crate) struct Program(pub(crate) Arc<warplink::program::Program>);

/// Summary of a verified program, for all ranks together.
#[pyclass(frozen, get_all, module = "warplink")]
#[derive(Debug)]
pub(crate) struct Report {
    /// The ranks.
    world: usize,
    /// Enqueued operations.
    operations: usize,
    /// Streams in use, including the callers'.
    streams: usize,
    /// Transfers, each shared by two ranks and counted once.
    transfers: usize,
    /// Exchanges of handles.
    exchanges: usize,
    /// Bytes transferred between ranks.
    nbytes: u128,
    /// Why the program cannot run as a graph, or None.
    eager_only: Option<String>,
    /// Whether any rank uses the collectives of the device.
    uses_collectives: bool,
    /// The summary as text; also `str()` of it.
    text: String,
}

#[pymethods]
impl Program {
    #[new]
    fn new(text: &str) -> PyResult<Self> {
        let program = warplink::program::Program::parse(text).map_err(raise)?;
        Ok(Self(Arc::new(program)))
    }

    /// The program's name.
    #[getter]
    fn name(&self) -> &str {
        &self.0.name
    }

    /// Parameters of the program: `{name: description of its values}`.
    #[getter]
    fn parameters<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let parameters = PyDict::new(py);
        for parameter in &self.0.parameters {
            parameters.set_item(&parameter.name, parameter.kind.to_string())?;
        }
        Ok(parameters)
    }

    /// Verifies the program for `world` ranks with `streams` streams in each rank's pool. `parameters` are integers,
    /// lists of integers, and element types by name; `given` names the optional tensors that will be bound. Does not
    /// communicate. Raises VerificationError, whose `diagnostics` are the findings.
    #[pyo3(signature = (world, parameters=None, *, given=Vec::new(), streams=2))]
    fn verify(
        &self,
        py: Python<'_>,
        world: usize,
        parameters: Option<&Bound<'_, PyDict>>,
        given: Vec<String>,
        streams: usize,
    ) -> PyResult<Report> {
        let parameters = read_parameters(parameters, given)?;
        let verdict = py.detach(|| verify(&self.0, world, streams, &parameters));
        let report = verdict.map_err(|diagnostics| {
            let error = refused(&self.0.name, &diagnostics)
                .with_operation(format!("verify '{}' for {world} ranks", self.0.name));
            raise_with(error, &diagnostics)
        })?;
        Ok(Report {
            text: report.to_string(),
            world: report.world,
            operations: report.operations,
            streams: report.streams,
            transfers: report.transfers,
            exchanges: report.exchanges,
            nbytes: report.bytes,
            eager_only: report.eager_only.map(|diagnostic| diagnostic.to_string()),
            uses_collectives: report.uses_engine,
        })
    }

    fn __str__(&self) -> String {
        self.0.to_string()
    }

    fn __repr__(&self) -> String {
        format!("Program('{}')", self.0.name)
    }
}

#[pymethods]
impl Report {
    fn __str__(&self) -> &str {
        &self.text
    }

    fn __repr__(&self) -> String {
        format!("Report({:?})", self.text)
    }
}

/// Converts parameters from Python.
pub(crate) fn read_parameters(
    values: Option<&Bound<'_, PyDict>>,
    given: Vec<String>,
) -> PyResult<Parameters> {
    let mut parameters = Parameters::new();
    for (name, value) in values.into_iter().flatten() {
        let name: String = name.extract()?;
        let value = if let Ok(number) = value.extract::<i64>() {
            Value::Integer(number)
        } else if let Ok(text) = value.extract::<String>() {
            // Names of operators and element types are disjoint; the verifier rejects a parameter of the wrong kind.
            match text.parse::<ReduceOp>() {
                Ok(operator) => Value::Operator(operator),
                Err(_) => Value::ElementType(text.parse::<DType>().map_err(raise)?),
            }
        } else if let Ok(numbers) = value.extract::<Vec<i64>>() {
            Value::List(numbers)
        } else {
            return Err(invalid(format!(
                "parameter '{name}' is {value}; expected an integer, a list of integers or the name of an element type or operator"
            )));
        };
        parameters.insert(name, value);
    }
    for name in given {
        parameters = parameters.with_tensor(name);
    }
    Ok(parameters)
}
