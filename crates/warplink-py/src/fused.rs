//! Collectives of rows fused with the operations that follow them.

use crate::array::Array;
use crate::collectives::Collectives;
use crate::errors::invalid;
use crate::stream::Stream;
use pyo3::prelude::*;
use warplink::collective::{Epilogue, Fused, FusedKind, FusedMemory, Quantization, Wire};
use warplink::device::DeviceSlice;

/// An optional array argument.
type Maybe<'a, 'py> = Option<&'a Bound<'py, PyAny>>;

impl Collectives {
    /// Implementation of `fused`, for the input, residual, weight, bias and global scale, the sum, `residual_out`, the
    /// output, the quantised output and its scale.
    pub(crate) fn enqueue_fused(
        &self,
        py: Python<'_>,
        stream: &Stream,
        (kind, epilogue, wire): (FusedKind, Epilogue, Wire),
        (sources, targets): ([Maybe<'_, '_>; 5], [Maybe<'_, '_>; 5]),
    ) -> PyResult<()> {
        let inner = self.inner.get()?;
        let live = stream.live()?;
        let reader = self.reader(stream);
        let writer = reader.for_targets();
        let read = |array: Maybe<'_, '_>, name: &str| -> PyResult<Option<Array>> {
            array.map(|array| reader.read(array, name)).transpose()
        };
        let written = |array: Maybe<'_, '_>, name: &str| -> PyResult<Option<Array>> {
            array.map(|array| writer.read(array, name)).transpose()
        };
        let [input, residual, weight, bias, global_scale] = sources;
        let [sum, residual_out, output, quantized, scale] = targets;
        let input = read(input, "the input")?.ok_or_else(|| invalid("there is no input"))?;
        let (residual, weight) = (read(residual, "the residual")?, read(weight, "the weight")?);
        let bias = read(bias, "the bias")?;
        let global_scale = read(global_scale, "the global scale")?;
        let (sum, output) = (written(sum, "sum")?, written(output, "output")?);
        let residual_out = written(residual_out, "residual_out")?;
        let quantized = written(quantized, "quantized")?;
        let scale = match epilogue.quantization {
            // A static scale is an input that was calibrated before; the other kinds compute and return it.
            Some(Quantization::Static) => read(scale, "the scale")?,
            _ => written(scale, "the scale")?,
        };
        let dtype = input.element("the input")?.dtype()?;
        let Some((&width, rows)) = input.shape.split_last() else {
            return Err(invalid("the input has no dimensions; expected rows"));
        };
        // Leading dimensions, such as batch and sequence, are flattened: operations act on rows only.
        let given: usize = rows.iter().product();
        // Tokens are counted over all ranks, and the input of an all-gather is this rank's part of them.
        let tokens = match kind {
            FusedKind::AllGather => given * self.world,
            _ => given,
        };
        let call = Fused {
            kind,
            tokens,
            width,
            dtype,
            epilogue,
            wire,
        };
        fn slice(array: &Option<Array>) -> Option<&DeviceSlice> {
            array.as_ref().map(|array| &array.slice)
        }
        let memory = FusedMemory {
            input: &input.slice,
            residual: slice(&residual),
            weight: slice(&weight),
            bias: slice(&bias),
            sum: slice(&sum),
            residual_out: slice(&residual_out),
            output: slice(&output),
            quantized: slice(&quantized),
            scale: slice(&scale),
            global_scale: slice(&global_scale),
        };
        self.make(py, || inner.fused(&call, &memory, live))
    }
}
