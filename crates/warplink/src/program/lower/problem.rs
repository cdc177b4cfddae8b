//! Problems to be lowered, and the parameters that they determine.

use super::{AllGatherMatmulLowering, Lowering, MatmulReduceScatterLowering};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::named::alternatives;
use crate::program::parameters::Parameters;

/// Parameter for whether memory contains B's transpose. A lowering without it accepts only row-major B.
pub(super) const TRANSPOSED_B: &str = "transposed_b";

/// An operation that is lowered.
pub trait Problem {
    /// Parameters for a lowering.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) if the sizes cannot be divided among `world`
    /// ranks, a size is zero, or the element type has no matmul.
    fn parameters(&self, world: usize) -> Result<Parameters>;

    /// Description of the problem for display.
    fn subject(&self) -> String;

    /// The library's lowerings of the operation.
    ///
    /// # Errors
    /// None, as long as the library's own files are programs.
    fn lowerings() -> Result<Vec<Lowering>>;
}

/// `C[i] = A · B[i] + bias[i]`: every rank has a part of A's rows and all of every B, and gets all of every C.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AllGatherMatmul {
    /// Total rows of A on all ranks.
    pub m: usize,
    /// Columns of A.
    pub k: usize,
    /// Columns of each B.
    pub n: Vec<usize>,
    /// Element type.
    pub dtype: DType,
    /// Whether memory contains B's transpose, `[n, k]`, as the weights of a linear layer: `[out, in]`.
    pub transposed_b: bool,
    /// Whether a bias is added to each row.
    pub bias: bool,
    /// Whether the gathered A is an output, `G`.
    pub keep: bool,
}

impl Problem for AllGatherMatmul {
    fn parameters(&self, world: usize) -> Result<Parameters> {
        if self.n.is_empty() {
            return Err(Error::invalid(
                "there is no right operand; expected at least one",
            ));
        }
        check(self.dtype, world, &[("m", self.m)], &[("k", self.k)])?;
        let n: Vec<i64> = self
            .n
            .iter()
            .map(|&n| size("n", n))
            .collect::<Result<_>>()?;
        let mut parameters = Parameters::new()
            .with("m", size("m", self.m)?)
            .with("k", size("k", self.k)?)
            .with("n", n)
            .with("T", self.dtype)
            .with(TRANSPOSED_B, i64::from(self.transposed_b));
        if self.bias {
            parameters = parameters.with_tensor("bias");
        }
        if self.keep {
            parameters = parameters.with_tensor("G");
        }
        Ok(parameters)
    }

    fn subject(&self) -> String {
        let n: Vec<String> = self.n.iter().map(usize::to_string).collect();
        let (m, k, n, dtype) = (self.m, self.k, n.join(" and "), self.dtype);
        let order = order(self.transposed_b);
        format!("all-gather + matmul, m {m}, k {k}, n {n}, {dtype}{order}")
    }

    fn lowerings() -> Result<Vec<Lowering>> {
        let all = AllGatherMatmulLowering::ALL.iter();
        all.map(|one| one.lowering()).collect()
    }
}

/// `C = A · B + bias`: every rank has a part of the contraction and gets a part of C's rows.
///
/// With several ranks, sums are formed from partial products rounded to the element type; around a ring they are
/// rounded at every rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MatmulReduceScatter {
    /// Rows of A; every rank gets its part of the same number of rows of C.
    pub m: usize,
    /// Total columns of A, and rows of B, on all ranks.
    pub k: usize,
    /// Columns of B.
    pub n: usize,
    /// Element type, also of transferred partial sums.
    pub dtype: DType,
    /// Whether memory contains B's transpose, `[n, k]`, as the weights of a linear layer: `[out, in]`.
    pub transposed_b: bool,
    /// Whether a bias is added to each row.
    pub bias: bool,
}

impl Problem for MatmulReduceScatter {
    fn parameters(&self, world: usize) -> Result<Parameters> {
        let shared = [("m", self.m), ("k", self.k)];
        check(self.dtype, world, &shared, &[("n", self.n)])?;
        let parameters = Parameters::new()
            .with("m", size("m", self.m)?)
            .with("k", size("k", self.k)?)
            .with("n", size("n", self.n)?)
            .with("T", self.dtype)
            .with(TRANSPOSED_B, i64::from(self.transposed_b));
        Ok(if self.bias {
            parameters.with_tensor("bias")
        } else {
            parameters
        })
    }

    fn subject(&self) -> String {
        let (m, k, n, dtype) = (self.m, self.k, self.n, self.dtype);
        let order = order(self.transposed_b);
        format!("matmul + reduce-scatter, m {m}, k {k}, n {n}, {dtype}{order}")
    }

    fn lowerings() -> Result<Vec<Lowering>> {
        let all = MatmulReduceScatterLowering::ALL.iter();
        all.map(|one| one.lowering()).collect()
    }
}

const fn order(transposed_b: bool) -> &'static str {
    if transposed_b { ", B transposed" } else { "" }
}

/// Rejects problems that no lowering can solve; `shared` are the sizes that are divided among the ranks.
fn check(
    dtype: DType,
    world: usize,
    shared: &[(&str, usize)],
    others: &[(&str, usize)],
) -> Result<()> {
    if dtype.matmul_tolerance().is_none() {
        return Err(Error::invalid(format!(
            "unsupported element type {dtype} of a matmul; expected {}",
            alternatives(&DType::MATMUL)
        )));
    }
    if let Some((name, _)) = shared.iter().chain(others).find(|(_, size)| *size == 0) {
        return Err(Error::invalid(format!("{name} is 0; expected at least 1")));
    }
    for (name, size) in shared {
        if world == 0 || !size.is_multiple_of(world) {
            let padded = size.next_multiple_of(world.max(1));
            return Err(Error::invalid(format!(
                "{name} is {size}; expected a multiple of the {world} ranks that share it"
            ))
            .with_help(format!("pad it to {padded}")));
        }
    }
    Ok(())
}

fn size(name: &str, size: usize) -> Result<i64> {
    match i64::try_from(size) {
        Ok(0) => Err(Error::invalid(format!("{name} is 0; expected at least 1"))),
        Ok(size) => Ok(size),
        Err(_) => Err(Error::invalid(format!(
            "{name} is {size}; expected less than 2^63"
        ))),
    }
}
