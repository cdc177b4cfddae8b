//! Matmuls (the `gemm` crate) and element-wise operations on the host.

use super::elementwise;
use super::memory;
use super::operation::HostOperation;
use super::stream;
use crate::device::{Compute, DeviceSlice, Elementwise, MatmulSpec, PreparedLaunch, Stream};
use crate::dtype::{DType, Element};
use crate::error::Result;
use std::sync::Arc;
use zerocopy::IntoBytes;

#[derive(Debug)]
pub(super) struct HostCompute;

impl Compute for HostCompute {
    fn prepare_matmul(&self, spec: &MatmulSpec) -> Result<()> {
        spec.check_dtype()
    }

    fn matmul(
        &self,
        stream: &Stream,
        spec: &MatmulSpec,
        a: &DeviceSlice,
        b: &DeviceSlice,
        c: &DeviceSlice,
        bias: Option<&DeviceSlice>,
    ) -> Result<()> {
        spec.check(a, b, c, bias)?;
        spec.check_dtype()?;
        let (spec, a, b, c, bias) = (*spec, a.clone(), b.clone(), c.clone(), bias.cloned());
        stream::from_dyn(stream)?.enqueue(HostOperation::Task(Arc::new(move |_| {
            match spec.dtype {
                DType::F16 => matmul::<half::f16>(&spec, &a, &b, &c, bias.as_ref()),
                DType::BF16 => matmul::<half::bf16>(&spec, &a, &b, &c, bias.as_ref()),
                _ => matmul::<f32>(&spec, &a, &b, &c, bias.as_ref()),
            }
        })))
    }

    fn prepare_matmuls(
        self: Arc<Self>,
        spec: &MatmulSpec,
        matmuls: &[(DeviceSlice, DeviceSlice)],
        b: &DeviceSlice,
        bias: Option<&DeviceSlice>,
    ) -> Result<Arc<dyn PreparedLaunch>> {
        spec.check_all(matmuls, b, bias)?;
        spec.check_dtype()?;
        Ok(Arc::new(Matmuls {
            spec: *spec,
            matmuls: matmuls.to_vec(),
            b: b.clone(),
            bias: bias.cloned(),
        }))
    }

    fn prepare_elementwise(
        self: Arc<Self>,
        request: &Elementwise,
    ) -> Result<Arc<dyn PreparedLaunch>> {
        request.check()?;
        Ok(Arc::new(Prepared(request.clone())))
    }

    fn elementwise(&self, stream: &Stream, request: &Elementwise) -> Result<()> {
        request.check()?;
        let request = request.clone();
        stream::from_dyn(stream)?.enqueue(HostOperation::Task(Arc::new(move |_| {
            elementwise::run(&request)
        })))
    }
}

/// A sequence of matmuls.
#[derive(Debug)]
struct Matmuls {
    spec: MatmulSpec,
    matmuls: Vec<(DeviceSlice, DeviceSlice)>,
    b: DeviceSlice,
    bias: Option<DeviceSlice>,
}

impl PreparedLaunch for Matmuls {
    fn enqueue(&self, stream: &Stream) -> Result<()> {
        self.matmuls.iter().try_for_each(|(a, c)| {
            HostCompute.matmul(stream, &self.spec, a, &self.b, c, self.bias.as_ref())
        })
    }
}

/// A prepared element-wise operation.
#[derive(Debug)]
struct Prepared(Elementwise);

impl PreparedLaunch for Prepared {
    fn enqueue(&self, stream: &Stream) -> Result<()> {
        HostCompute.elementwise(stream, &self.0)
    }
}

/// Elements of a matrix of `rows` rows with `length` elements and stride `step`; padding is not read.
fn read_f32<T: Element>(
    slice: &DeviceSlice,
    (rows, length, step): (usize, usize, usize),
) -> Result<Vec<f32>> {
    let mut values = vec![T::from_f64(0.0); rows * length];
    for (row, values) in values.chunks_exact_mut(length).enumerate() {
        memory::read_bytes(
            &row_of::<T>(slice, row, length, step)?,
            values.as_mut_bytes(),
        )?;
    }
    let wide = values.into_iter().map(|value| value.to_f64() as f32);
    Ok(wide.collect())
}

fn row_of<T: Element>(
    slice: &DeviceSlice,
    row: usize,
    length: usize,
    step: usize,
) -> Result<DeviceSlice> {
    let from = row * step * size_of::<T>();
    slice.slice(from..from + length * size_of::<T>())
}

/// Matmuls of all types run in `f32`: half types are widened and the result is rounded once.
fn matmul<T: Element>(
    spec: &MatmulSpec,
    a: &DeviceSlice,
    b: &DeviceSlice,
    c: &DeviceSlice,
    bias: Option<&DeviceSlice>,
) -> Result<()> {
    let (m, n, k) = (spec.m, spec.n, spec.k);
    let [of_a, of_b, of_c] = spec.in_memory();
    let (a, b) = (read_f32::<T>(a, of_a)?, read_f32::<T>(b, of_b)?);
    let mut out = if spec.accumulate {
        read_f32::<T>(c, of_c)?
    } else {
        vec![0.0; m * n]
    };
    if let Some(bias) = bias {
        let bias = read_f32::<T>(bias, (1, n, n))?;
        out.chunks_exact_mut(n).for_each(|row| {
            row.iter_mut()
                .zip(&bias)
                .for_each(|(value, bias)| *value += bias)
        });
    }
    // Column and row strides.
    let strides = |transposed: bool, rows: usize, columns: usize| {
        if transposed {
            (rows as isize, 1)
        } else {
            (1, columns as isize)
        }
    };
    let left = strides(spec.transposed_a, m, k);
    let right = strides(spec.transposed_b, k, n);
    // SAFETY: the three vectors hold m·n, m·k and k·n values, and the strides are those of
    // contiguous matrices by rows or columns, so every access is inside; `out` overlaps neither
    // operand.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            out.as_mut_ptr(),
            1,
            n as isize,
            true,
            a.as_ptr(),
            left.0,
            left.1,
            b.as_ptr(),
            right.0,
            right.1,
            1.0,
            1.0,
            false,
            false,
            false,
            // Streams of several ranks run at the same time; threads of their own would only compete for the
            // processors.
            gemm::Parallelism::None,
        );
    }
    let rounded: Vec<T> = out
        .into_iter()
        .map(|value| T::from_f64(f64::from(value)))
        .collect();
    for (row, values) in rounded.chunks_exact(n).enumerate() {
        memory::write_bytes(&row_of::<T>(c, row, n, of_c.2)?, values.as_bytes())?;
    }
    Ok(())
}
