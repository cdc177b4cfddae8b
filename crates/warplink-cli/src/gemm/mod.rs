//! Distributed GEMMs for the demo and the benchmarks: inputs, plans, and the check of results.

pub(crate) mod inputs;
mod problem;
mod reference;

use crate::commands::bench::clock::WorkRef;
use crate::commands::bench::peers::{allocate, download, gather, place};
use anyhow::{Context, Result};
use inputs::Matrix;
pub(crate) use problem::{
    COLLECTIVE, Op, Problem, check_lowerings, gather_lowering_name, lowering_name,
};
use reference::Reference;
use std::cell::OnceCell;
use warplink::Communicator;
use warplink::device::{DeviceSlice, Stream};
use warplink::overlap::{AllGatherMatmulBuffers, MatmulReduceScatterBuffers, Options, OverlapPlan};
use warplink::program::Executor;

/// A problem with its inputs on this rank's device.
pub(crate) struct DistributedGemm<'a> {
    pub(crate) comm: &'a Communicator,
    pub(crate) problem: Problem,
    pub(crate) a: DeviceSlice,
    pub(crate) b: DeviceSlice,
    pub(crate) c: DeviceSlice,
    pub(crate) executor: Executor,
    reference: OnceCell<Reference>,
    seed: u64,
}

impl<'a> DistributedGemm<'a> {
    /// Generates the inputs; `seed` must be equal on every rank.
    pub(crate) fn new(comm: &'a Communicator, problem: Problem, seed: u64) -> Result<Self> {
        let (rank, world) = (comm.rank(), comm.world());
        problem.check(world)?;
        problem.check_memory(comm.device().kind(), world)?;
        let Problem { m, k, n, dtype, .. } = problem;
        let (a, b) = matrices(&problem, seed);
        let (rows, depth) = (m / world, k / world);
        let (a, b, result) = match problem.op {
            Op::AllGatherMatmul => (
                a.bytes(rank * rows..(rank + 1) * rows, 0..k, world),
                b.bytes(0..k, 0..n, world),
                m,
            ),
            Op::MatmulReduceScatter => (
                a.bytes(0..m, rank * depth..(rank + 1) * depth, world),
                b.bytes(rank * depth..(rank + 1) * depth, 0..n, world),
                rows,
            ),
        };
        // Transposed after it is drawn, so that the reference is the same for both layouts.
        let b = if problem.transposed_b {
            inputs::transposed(&b, n, dtype)
        } else {
            b
        };
        Ok(Self {
            comm,
            problem,
            a: place(comm, &a)?,
            b: place(comm, &b)?,
            c: allocate(comm, result * n * dtype.size())?,
            executor: comm.executor(),
            reference: OnceCell::new(),
            seed,
        })
    }

    /// Creates a plan. Collective.
    pub(crate) fn plan(&self, options: &Options) -> warplink::Result<OverlapPlan> {
        let (a, b, c) = (self.a.clone(), self.b.clone(), self.c.clone());
        match self.problem.op {
            Op::AllGatherMatmul => {
                let buffers = AllGatherMatmulBuffers {
                    a,
                    b: vec![b],
                    bias: Vec::new(),
                    c: vec![c],
                    gathered: None,
                };
                self.problem
                    .gather()
                    .plan(&self.executor, options, &buffers)
            }
            Op::MatmulReduceScatter => {
                let buffers = MatmulReduceScatterBuffers {
                    a,
                    b,
                    bias: None,
                    c,
                };
                self.problem
                    .scatter()
                    .plan(&self.executor, options, &buffers)
            }
        }
    }

    /// Runs `work` once over a poisoned result, and returns the relative error over all ranks: norm of the
    /// difference to a double-precision GEMM, relative to the latter's norm, over all rows of a small problem
    /// and some of a large one. Collective.
    pub(crate) fn error_of(&self, stream: &Stream, work: WorkRef<'_>) -> Result<f64> {
        // All bytes 0xff are NaN in every element type.
        stream.fill(&self.c, 0xff)?;
        self.comm.synchronize(stream)?;
        work(stream)?;
        self.comm.synchronize(stream)?;
        self.error()
    }

    /// Relative error of the current result.
    pub(crate) fn error(&self) -> Result<f64> {
        let world = self.comm.world();
        // On first use: it takes seconds for large matrices, and benchmarks of the host's time need none.
        let reference = self.reference.get_or_init(|| {
            let first = match self.problem.op {
                Op::AllGatherMatmul => 0,
                Op::MatmulReduceScatter => self.comm.rank() * (self.problem.m / world),
            };
            let part = first..first + self.c.bytes() / self.row_bytes();
            let (a, b) = matrices(&self.problem, self.seed);
            Reference::new(&a, &b, part, world, self.seed)
        });
        let (mut difference, mut norm) = (0.0, 0.0);
        for (at, expected) in reference.rows() {
            for (got, expected) in self.row(at)?.into_iter().zip(expected) {
                difference += (got - expected).powi(2);
                norm += expected.powi(2);
            }
        }
        // One error for the whole result: every rank then reaches the same verdict.
        let all = gather(self.comm, &[difference, norm])?;
        let sum = |at| all.iter().filter_map(|rank| rank.get(at)).sum::<f64>();
        let (difference, norm) = (sum(0), sum(1));
        // Relative to the norm of the result and not by element: elements near 0 have large relative errors.
        Ok((difference / norm).sqrt())
    }

    /// Some rows of the current result, always the same ones.
    pub(crate) fn some_rows(&self) -> Result<Vec<f64>> {
        const MAX_ROWS: usize = 128;
        let rows = self.c.bytes() / self.row_bytes();
        let count = rows.min(MAX_ROWS);
        let rows = (0..count).map(|index| self.row(index * rows / count));
        Ok(rows.collect::<Result<Vec<_>>>()?.concat())
    }

    fn row_bytes(&self) -> usize {
        self.problem.n * self.problem.dtype.size()
    }

    /// A row of the current result.
    fn row(&self, at: usize) -> Result<Vec<f64>> {
        let bytes = self.row_bytes();
        let row = download(self.comm, &self.c.slice(at * bytes..(at + 1) * bytes)?)?;
        Ok(self.problem.dtype.decode(&row).collect())
    }

    /// Number of checked rows of this rank's result.
    pub(crate) fn checked_rows(&self) -> usize {
        let reference = self.reference.get();
        reference.map_or(0, |reference| reference.rows().count())
    }

    /// Whether `error` is acceptable for the problem's element type; false for NaN.
    pub(crate) fn is_right(&self, error: f64) -> bool {
        self.problem
            .dtype
            .matmul_tolerance()
            .is_some_and(|most| error <= most)
    }
}

/// Complete A and B.
fn matrices(problem: &Problem, seed: u64) -> (Matrix, Matrix) {
    let Problem { m, k, n, dtype, .. } = *problem;
    (
        Matrix::new(seed, 1, m, k, dtype),
        Matrix::new(seed, 2, k, n, dtype),
    )
}

/// The given seed, or a random one; rank 0's on every rank.
pub(crate) fn common_seed(comm: &Communicator, given: Option<u64>) -> Result<u64> {
    let own = match given {
        Some(seed) => seed,
        None => getrandom::u64().map_err(|error| anyhow::anyhow!("draw a seed: {error}"))?,
    };
    let all = comm.all_gather_bytes(&own.to_le_bytes())?;
    // Rank 0's, since matrices must be alike on all ranks.
    let first = all.first().context("rank 0 sent no seed")?;
    Ok(u64::from_le_bytes(first.as_slice().try_into()?))
}
