//! Matmuls and element-wise operations, enqueued on a stream.

use super::elementwise::Elementwise;
use super::slice::DeviceSlice;
use super::stream::Stream;
use crate::dtype::DType;
#[cfg(doc)]
use crate::error::ErrorKind;
use crate::error::{Error, Result};
use crate::named::alternatives;
use std::fmt;
use std::sync::Arc;

/// C = A·B, all row-major and, without leading dimensions, contiguous: A is `m × k`, B is `k × n`, C is `m ×
/// n`, all of one element type, accumulated in `f32`. For a transposed operand, memory holds the transpose:
/// `k × m` for A, `n × k` for B.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MatmulSpec {
    /// Rows of A and C.
    pub m: usize,
    /// Columns of B and C.
    pub n: usize,
    /// Columns of A, rows of B.
    pub k: usize,
    /// Type of every element: `f16`, `bf16` or `f32`.
    pub dtype: DType,
    /// Whether memory holds A's transpose.
    pub transposed_a: bool,
    /// Whether memory holds B's transpose, as the weights of a linear layer: `[out, in]`.
    pub transposed_b: bool,
    /// Whether a vector of `n` is added to each row of C.
    pub bias: bool,
    /// Whether A·B is added to what C holds instead of replacing it.
    pub accumulate: bool,
    /// Row strides of A, B and C in elements, if rows are padded.
    pub leading: [Option<usize>; 3],
}

impl MatmulSpec {
    /// A plain matmul.
    pub fn new(m: usize, n: usize, k: usize, dtype: DType) -> Self {
        Self {
            m,
            n,
            k,
            dtype,
            transposed_a: false,
            transposed_b: false,
            bias: false,
            accumulate: false,
            leading: [None; 3],
        }
    }

    /// Rows, row length and row stride in memory, for A, B and C.
    pub(crate) fn in_memory(&self) -> [(usize, usize, usize); 3] {
        let sides = [
            (self.m, self.k, self.transposed_a),
            (self.k, self.n, self.transposed_b),
            (self.m, self.n, false),
        ];
        let mut leading = self.leading.into_iter();
        sides.map(|(rows, columns, transposed)| {
            let (rows, length) = if transposed {
                (columns, rows)
            } else {
                (rows, columns)
            };
            (rows, length, leading.next().flatten().unwrap_or(length))
        })
    }

    /// Bytes from the first to the last element of A, B and C; `None` if a size overflows or rows overlap.
    pub(crate) fn bytes(&self) -> [Option<usize>; 3] {
        self.in_memory().map(|(rows, length, step)| {
            let before = rows.checked_sub(1)?.checked_mul(step)?;
            let elements = before.checked_add(length)?;
            let apart = step >= length;
            // Rows that overlap would make the result depend on the order in which a device computes them.
            elements.checked_mul(self.dtype.size()).filter(|_| apart)
        })
    }

    /// Validates the lengths of the slices, and that a bias is present exactly if the spec has one.
    pub(crate) fn check(
        &self,
        a: &DeviceSlice,
        b: &DeviceSlice,
        c: &DeviceSlice,
        bias: Option<&DeviceSlice>,
    ) -> Result<()> {
        let bytes = |rows: usize, columns: usize| {
            rows.checked_mul(columns)
                .and_then(|elements| elements.checked_mul(self.dtype.size()))
        };
        let [a_bytes, b_bytes, c_bytes] = self.bytes();
        let sides = [
            ("A", a, self.m, self.k, a_bytes),
            ("B", b, self.k, self.n, b_bytes),
            ("C", c, self.m, self.n, c_bytes),
        ];
        let bias_side = bias.map(|bias| ("the bias", bias, 1, self.n, bytes(1, self.n)));
        for (name, slice, rows, columns, bytes) in sides.into_iter().chain(bias_side) {
            if bytes != Some(slice.bytes()) || rows == 0 || columns == 0 {
                return Err(Error::invalid(format!(
                    "{name} has {} bytes; expected {rows} x {columns} elements of {}",
                    slice.bytes(),
                    self.dtype
                ))
                .with_operation("matmul")
                .with_help("pass non-empty slices of the lengths in the spec"));
            }
        }
        if bias.is_some() != self.bias {
            return Err(Error::invalid(
                "the bias does not fit the spec; expected one exactly if `bias` is set",
            )
            .with_operation("matmul")
            .with_help("set `bias` in the spec, or pass none"));
        }
        Ok(())
    }

    /// Fails for an element type that no device multiplies.
    pub(crate) fn check_dtype(&self) -> Result<()> {
        if self.dtype.matmul_tolerance().is_some() {
            return Ok(());
        }
        Err(Error::unsupported(format!(
            "unsupported element type {}; expected {}",
            self.dtype,
            alternatives(&DType::MATMUL)
        ))
        .with_operation("matmul")
        .with_help("use one of these types"))
    }

    /// Floating-point operations: one multiplication and one addition for each of `m·n·k`.
    pub fn operations(&self) -> f64 {
        2.0 * self.m as f64 * self.n as f64 * self.k as f64
    }
}

/// Matmuls and element-wise operations of a device.
pub trait Compute: Send + Sync + fmt::Debug {
    /// Chooses the algorithm and loads its kernels, so that later calls load nothing: loading a module while
    /// a kernel spins can deadlock. Blocks.
    fn prepare_matmul(&self, spec: &MatmulSpec) -> Result<()>;

    /// Enqueues a matmul.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] if a slice's length does not match `spec`, or `bias` is missing or
    /// superfluous; [`ErrorKind::Unsupported`] for an element type without matmul.
    fn matmul(
        &self,
        stream: &Stream,
        spec: &MatmulSpec,
        a: &DeviceSlice,
        b: &DeviceSlice,
        c: &DeviceSlice,
        bias: Option<&DeviceSlice>,
    ) -> Result<()>;

    /// Prepares matmuls with a common right operand to be enqueued together: `c = a · b` for each `(a, c)` of
    /// `matmuls`. A result may be in a peer's memory. Loads kernels, as
    /// [`prepare_matmul`](Self::prepare_matmul). Blocks.
    ///
    /// # Errors
    /// As [`matmul`](Self::matmul).
    fn prepare_matmuls(
        self: Arc<Self>,
        spec: &MatmulSpec,
        matmuls: &[(DeviceSlice, DeviceSlice)],
        b: &DeviceSlice,
        bias: Option<&DeviceSlice>,
    ) -> Result<Arc<dyn PreparedLaunch>>;

    /// Prepares an [`elementwise`](Self::elementwise) operation. Blocks.
    ///
    /// # Errors
    /// As [`elementwise`](Self::elementwise).
    fn prepare_elementwise(
        self: Arc<Self>,
        request: &Elementwise,
    ) -> Result<Arc<dyn PreparedLaunch>>;

    /// Enqueues an element-wise operation.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] if the operands do not match, or a source partially overlaps the
    /// target; [`ErrorKind::Unsupported`] for an element type without arithmetic.
    fn elementwise(&self, stream: &Stream, request: &Elementwise) -> Result<()>;
}

/// Work with fixed operands, prepared so that enqueuing it repeatedly takes less host time. Keeps its memory
/// alive.
pub trait PreparedLaunch: Send + Sync + fmt::Debug {
    /// Enqueues the work. Does not block. If enqueued on several streams, the launches may be serialized.
    fn enqueue(&self, stream: &Stream) -> Result<()>;
}

impl MatmulSpec {
    /// Validates every matmul.
    pub(crate) fn check_all(
        &self,
        matmuls: &[(DeviceSlice, DeviceSlice)],
        b: &DeviceSlice,
        bias: Option<&DeviceSlice>,
    ) -> Result<()> {
        matmuls
            .iter()
            .try_for_each(|(a, c)| self.check(a, b, c, bias))
    }
}
