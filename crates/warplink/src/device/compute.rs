//! Matrix products and sums, enqueued on a stream.

use super::{DeviceSlice, Stream};
use crate::dtype::DType;
use crate::error::{Error, Result};
use std::fmt;
use std::sync::Arc;

/// C = A·B, all row-major and contiguous: A is `m × k`, B is `k × n`, C is `m × n`, of one element
/// type, accumulated in `f32`.
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
    /// Whether a vector of `n` is added to each row of C.
    pub bias: bool,
    /// Whether the product is added to what C holds instead of replacing it.
    pub accumulate: bool,
    /// Multiprocessors that the product may use, where communication needs the rest.
    pub multiprocessors: Option<u32>,
}

impl MatmulSpec {
    /// A plain product.
    pub fn new(m: usize, n: usize, k: usize, dtype: DType) -> Self {
        Self {
            m,
            n,
            k,
            dtype,
            bias: false,
            accumulate: false,
            multiprocessors: None,
        }
    }

    /// Fails unless the slices are as long as this says; a bias is there exactly when it says so.
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
        let sides = [
            ("A", a, self.m, self.k),
            ("B", b, self.k, self.n),
            ("C", c, self.m, self.n),
        ];
        let bias_side = bias.map(|bias| ("the bias", bias, 1, self.n));
        for (name, slice, rows, columns) in sides.into_iter().chain(bias_side) {
            if bytes(rows, columns) != Some(slice.bytes()) || rows == 0 || columns == 0 {
                return Err(Error::invalid(format!(
                    "{name} should hold {rows} x {columns} elements of {}, but has {} bytes",
                    self.dtype,
                    slice.bytes()
                ))
                .during("matrix product"));
            }
        }
        if bias.is_some() != self.bias {
            return Err(
                Error::invalid("a bias is given exactly when the product has one")
                    .during("matrix product"),
            );
        }
        Ok(())
    }

    /// Floating-point operations: one multiplication and one addition for each of `m·n·k`.
    pub fn operations(&self) -> f64 {
        2.0 * self.m as f64 * self.n as f64 * self.k as f64
    }
}

/// Matrix products and sums of a device.
pub trait Compute: Send + Sync + fmt::Debug {
    /// Chooses the algorithm and loads what it needs for `spec`, so that no later call does: a
    /// module that is loaded while a kernel spins can deadlock. Blocks.
    fn prepare_matmul(&self, spec: &MatmulSpec) -> Result<()>;

    /// Enqueues a product.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) where a slice's length is
    /// not what `spec` says, `bias` is not there when it should be, or the type has no product.
    fn matmul(
        &self,
        stream: &Stream,
        spec: &MatmulSpec,
        a: &DeviceSlice,
        b: &DeviceSlice,
        c: &DeviceSlice,
        bias: Option<&DeviceSlice>,
    ) -> Result<()>;

    /// Makes products of one right operand ready to be enqueued at once: `c = a · b` for each `(a, c)`
    /// of `products`. A result may lie in a peer's memory. Loads what it needs, as
    /// [`prepare_matmul`](Self::prepare_matmul). Blocks.
    ///
    /// # Errors
    /// As [`matmul`](Self::matmul).
    fn prepare_products(
        self: Arc<Self>,
        spec: &MatmulSpec,
        products: &[(DeviceSlice, DeviceSlice)],
        b: &DeviceSlice,
        bias: Option<&DeviceSlice>,
    ) -> Result<Arc<dyn PreparedLaunch>>;

    /// Makes a [`sum`](Self::sum) ready to be enqueued. Blocks.
    ///
    /// # Errors
    /// As [`sum`](Self::sum).
    fn prepare_sum(
        self: Arc<Self>,
        dtype: DType,
        target: &DeviceSlice,
        sources: &[DeviceSlice],
    ) -> Result<Arc<dyn PreparedLaunch>>;

    /// Enqueues `target = Σ sources`, element by element, in order, accumulated in `f32` (in `f64`
    /// and `i32` for these; bytes have no sum). `target` may be one of the sources. All have the same length.
    fn sum(
        &self,
        stream: &Stream,
        dtype: DType,
        target: &DeviceSlice,
        sources: &[DeviceSlice],
    ) -> Result<()>;
}

/// Work with fixed operands, made ready to be enqueued again and again in less of the host's time than
/// by the calls that name them. It keeps its memory.
pub trait PreparedLaunch: Send + Sync + fmt::Debug {
    /// Enqueues the work. Does not block. Enqueued on several streams at once, it may run one after
    /// the other.
    fn enqueue(&self, stream: &Stream) -> Result<()>;
}

impl MatmulSpec {
    /// Fails unless every product fits.
    pub(crate) fn check_all(
        &self,
        products: &[(DeviceSlice, DeviceSlice)],
        b: &DeviceSlice,
        bias: Option<&DeviceSlice>,
    ) -> Result<()> {
        products
            .iter()
            .try_for_each(|(a, c)| self.check(a, b, c, bias))
    }
}
