//! Distributed GEMMs for the demo and the benchmarks: inputs, plans, and the check of results.

pub(crate) mod inputs;
mod reference;
pub(crate) mod sequential;

use crate::memory;
use anyhow::{Context, Result, bail, ensure};
use inputs::Matrix;
use reference::Reference;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::Path;
use warplink::device::{AllocationKind, DeviceSlice, Stream};
use warplink::overlap::{
    AllGatherMatmul, AllGatherMatmulBuffers, AllGatherMatmulLowering, Lowering,
    MatmulReduceScatter, MatmulReduceScatterBuffers, MatmulReduceScatterLowering, Options,
    OverlapPlan,
};
use warplink::program::Executor;
use warplink::program::cost::HardwareModel;
use warplink::program::lower::{Choice, Problem as _, choose};
use warplink::{Communicator, DType, DeviceKind};

/// Which operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Op {
    /// Gather the rows of A, then multiply
    AllGatherMatmul,
    /// Multiply, then sum the partial results and scatter their rows
    MatmulReduceScatter,
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::AllGatherMatmul => "all-gather + matmul",
            Self::MatmulReduceScatter => "matmul + reduce-scatter",
        })
    }
}

impl Op {
    pub(crate) const ALL: [Self; 2] = [Self::AllGatherMatmul, Self::MatmulReduceScatter];

    /// The library's lowerings.
    pub(crate) fn lowerings(self) -> warplink::Result<Vec<Lowering>> {
        match self {
            Self::AllGatherMatmul => AllGatherMatmul::lowerings(),
            Self::MatmulReduceScatter => MatmulReduceScatter::lowerings(),
        }
    }

    /// The lowering without overlap: the collective engine, and one GEMM.
    pub(crate) fn collective(self) -> warplink::Result<Lowering> {
        match self {
            Self::AllGatherMatmul => AllGatherMatmulLowering::Collective.lowering(),
            Self::MatmulReduceScatter => MatmulReduceScatterLowering::Collective.lowering(),
        }
    }

    /// Those of the library's lowerings that `names` names, or all if there are no names, and the
    /// `.wlp` files among the names whose programs are named after the operation.
    pub(crate) fn select(self, names: &[String]) -> Result<Vec<Lowering>> {
        let own = self.lowerings()?;
        if names.is_empty() {
            return Ok(own);
        }
        let mut selected = Vec::new();
        for name in names {
            if !name.ends_with(".wlp") {
                selected.extend(own.iter().find(|lowering| lowering.name() == name).cloned());
                continue;
            }
            let text = std::fs::read_to_string(name).with_context(|| format!("read {name}"))?;
            let stem = Path::new(name).file_stem().unwrap_or_default();
            let lowering = Lowering::parse(&stem.to_string_lossy(), &text)
                .with_context(|| format!("parse {name}"))?;
            if lowering.program().name.starts_with(self.prefix()) {
                selected.push(lowering);
            }
        }
        Ok(selected)
    }

    /// What the names of programs for the operation start with.
    const fn prefix(self) -> &'static str {
        match self {
            Self::AllGatherMatmul => "all_gather_matmul",
            Self::MatmulReduceScatter => "matmul_reduce_scatter",
        }
    }
}

/// Checks a name on the command line: that of a lowering of either operation, or a program's file.
pub(crate) fn lowering_name(text: &str) -> Result<String, String> {
    let mut names: Vec<String> = Vec::new();
    for op in Op::ALL {
        for lowering in op.lowerings().map_err(|error| error.to_string())? {
            if !names.iter().any(|name| name == lowering.name()) {
                names.push(lowering.name().to_owned());
            }
        }
    }
    if text.ends_with(".wlp") || names.iter().any(|name| name == text) {
        return Ok(text.to_owned());
    }
    Err(format!(
        "unknown lowering; expected a file FILE.wlp or one of {}",
        names.join(", ")
    ))
}

/// A GEMM of an `m × k` by a `k × n` matrix over all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Problem {
    pub(crate) op: Op,
    pub(crate) m: usize,
    pub(crate) k: usize,
    pub(crate) n: usize,
    #[serde(serialize_with = "as_text")]
    pub(crate) dtype: DType,
}

fn as_text<S: serde::Serializer>(value: &DType, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(value.name())
}

/// Reads an element type that GEMM supports.
pub(crate) fn gemm_dtype(text: &str) -> Result<DType, String> {
    match text.parse::<DType>() {
        Ok(dtype) if dtype.matmul_tolerance().is_some() => Ok(dtype),
        _ => Err("expected bf16, f16 or f32".to_owned()),
    }
}

impl Problem {
    fn gather(&self) -> AllGatherMatmul {
        AllGatherMatmul {
            m: self.m,
            k: self.k,
            n: vec![self.n],
            dtype: self.dtype,
            bias: false,
            keep: false,
        }
    }

    fn scatter(&self) -> MatmulReduceScatter {
        MatmulReduceScatter {
            m: self.m,
            k: self.k,
            n: self.n,
            dtype: self.dtype,
            bias: false,
        }
    }

    /// What the cost model chooses among the library's lowerings.
    pub(crate) fn choose(
        &self,
        world: usize,
        streams: usize,
        model: &HardwareModel,
    ) -> warplink::Result<Choice> {
        let lowerings = self.op.lowerings()?;
        match self.op {
            Op::AllGatherMatmul => choose(&self.gather(), &lowerings, world, streams, model),
            Op::MatmulReduceScatter => choose(&self.scatter(), &lowerings, world, streams, model),
        }
    }

    /// Fails if the ranks cannot share it.
    pub(crate) fn check(&self, world: usize) -> Result<()> {
        let Self { m, k, n, .. } = *self;
        ensure!(
            m > 0 && k > 0 && n > 0,
            "m, k and n are {m}, {k} and {n}; expected at least 1"
        );
        ensure!(
            m.is_multiple_of(world),
            "m = {m} is not divisible by {world} ranks; expected a multiple of {world}"
        );
        ensure!(
            self.op == Op::AllGatherMatmul || k.is_multiple_of(world),
            "k = {k} is not divisible by {world} ranks; expected a multiple of {world}"
        );
        let bytes = |rows: usize, columns: usize| {
            rows.checked_mul(columns)
                .and_then(|elements| elements.checked_mul(self.dtype.size()))
        };
        ensure!(
            [bytes(m, k), bytes(k, n), bytes(m, n)]
                .iter()
                .all(Option::is_some),
            "a matrix of {m} x {k} x {n} has more bytes than can be addressed; expected smaller sizes"
        );
        Ok(())
    }

    /// Fails if the matrices do not fit this machine's memory.
    fn check_memory(&self, kind: DeviceKind, world: usize) -> Result<()> {
        let bytes = |rows: usize, columns: usize| {
            rows as u128 * columns as u128 * self.dtype.size() as u128
        };
        let Self { m, k, n, .. } = *self;
        let (a, b, c) = (bytes(m, k), bytes(k, n), bytes(m, n));
        let ranks = world as u128;
        let (host, device) = match self.op {
            Op::AllGatherMatmul => (b.max(a / ranks), a + b + c),
            Op::MatmulReduceScatter => (a.max(b) / ranks, (a + b) / ranks + c),
        };
        memory::check(kind, world, host, device)
    }

    /// Floating-point operations of each rank.
    pub(crate) fn flops(&self, world: usize) -> f64 {
        let all = 2.0 * self.m as f64 * self.k as f64 * self.n as f64;
        match self.op {
            Op::AllGatherMatmul => all,
            Op::MatmulReduceScatter => all / world as f64,
        }
    }

    /// Bytes that each rank receives.
    pub(crate) fn link_bytes(&self, world: usize) -> f64 {
        let columns = match self.op {
            Op::AllGatherMatmul => self.k,
            Op::MatmulReduceScatter => self.n,
        };
        let whole = self.m as f64 * columns as f64 * self.dtype.size() as f64;
        whole * (world - 1) as f64 / world as f64
    }
}

/// A problem with its inputs on this rank's device.
pub(crate) struct Gemm<'a> {
    pub(crate) comm: &'a Communicator,
    pub(crate) problem: Problem,
    pub(crate) a: DeviceSlice,
    pub(crate) b: DeviceSlice,
    pub(crate) c: DeviceSlice,
    pub(crate) executor: Executor,
    reference: Option<Reference>,
    seed: u64,
}

impl<'a> Gemm<'a> {
    /// Draws the inputs; with the same `seed` on every rank.
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
        let device = comm.device();
        let place = |bytes: &[u8]| -> Result<DeviceSlice> {
            let slice = device.allocate(bytes.len(), AllocationKind::Plain)?;
            device.upload(&slice, bytes)?;
            Ok(slice)
        };
        Ok(Self {
            comm,
            problem,
            a: place(&a)?,
            b: place(&b)?,
            c: device.allocate(result * n * dtype.size(), AllocationKind::Plain)?,
            executor: comm.executor(),
            reference: None,
            seed,
        })
    }

    /// A plan for it. Every rank calls this at the same time.
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

    /// Runs `work` once over a poisoned result, and gives the relative error of what it computes,
    /// over all ranks: the norm of the difference to a double-precision GEMM over the latter's,
    /// over all rows of a small problem and some of a large one. Every rank calls this at the same
    /// time.
    pub(crate) fn error_of(
        &mut self,
        stream: &Stream,
        work: &dyn Fn(&Stream) -> Result<()>,
    ) -> Result<f64> {
        // Every byte 0xff is NaN in every type.
        stream.fill(&self.c, 0xff)?;
        self.comm.synchronize(stream)?;
        work(stream)?;
        self.comm.synchronize(stream)?;
        self.error()
    }

    /// The relative error of what the result holds.
    pub(crate) fn error(&mut self) -> Result<f64> {
        let world = self.comm.world();
        if self.reference.is_none() {
            let first = match self.problem.op {
                Op::AllGatherMatmul => 0,
                Op::MatmulReduceScatter => self.comm.rank() * (self.problem.m / world),
            };
            let count = self.c.bytes() / (self.problem.n * self.problem.dtype.size());
            let (a, b) = matrices(&self.problem, self.seed);
            self.reference = Some(Reference::new(
                &a,
                &b,
                first..first + count,
                world,
                self.seed,
            ));
        }
        let Some(reference) = &self.reference else {
            bail!("the reference is missing");
        };
        let row_bytes = self.problem.n * self.problem.dtype.size();
        let mut row = vec![0; row_bytes];
        let (mut difference, mut norm) = (0.0, 0.0);
        for (at, expected) in reference.rows() {
            let part = self.c.slice(at * row_bytes..(at + 1) * row_bytes)?;
            self.comm.device().download(&part, &mut row)?;
            for (got, expected) in inputs::decode(self.problem.dtype, &row).zip(expected) {
                difference += (got - expected).powi(2);
                norm += expected.powi(2);
            }
        }
        let own: Vec<u8> = [difference, norm]
            .iter()
            .flat_map(|sum: &f64| sum.to_le_bytes())
            .collect();
        let (mut difference, mut norm) = (0.0, 0.0);
        for sums in self.comm.all_gather_bytes(&own)? {
            let sum = |at: usize| -> Result<f64> {
                let bytes = sums.get(at..at + 8).context("read a rank's error")?;
                Ok(f64::from_le_bytes(bytes.try_into()?))
            };
            difference += sum(0)?;
            norm += sum(8)?;
        }
        Ok((difference / norm).sqrt())
    }

    /// Some rows of what the result holds, always the same ones.
    pub(crate) fn some_rows(&self) -> Result<Vec<f64>> {
        const MAX_ROWS: usize = 128;
        let row_bytes = self.problem.n * self.problem.dtype.size();
        let rows = self.c.bytes() / row_bytes;
        let mut row = vec![0; row_bytes];
        let mut values = Vec::new();
        for index in 0..rows.min(MAX_ROWS) {
            let at = index * rows / rows.min(MAX_ROWS);
            let part = self.c.slice(at * row_bytes..(at + 1) * row_bytes)?;
            self.comm.device().download(&part, &mut row)?;
            values.extend(inputs::decode(self.problem.dtype, &row));
        }
        Ok(values)
    }

    /// How many rows of this rank's result the error is taken over.
    pub(crate) fn checked_rows(&self) -> usize {
        self.reference
            .as_ref()
            .map_or(0, |reference| reference.rows().count())
    }

    /// Whether `error` is accepted for the problem's element type; NaN is not.
    pub(crate) fn is_right(&self, error: f64) -> bool {
        self.problem
            .dtype
            .matmul_tolerance()
            .is_some_and(|most| error <= most)
    }
}

/// A and B as a whole.
fn matrices(problem: &Problem, seed: u64) -> (Matrix, Matrix) {
    let Problem { m, k, n, dtype, .. } = *problem;
    (
        Matrix::new(seed, 1, m, k, dtype),
        Matrix::new(seed, 2, k, n, dtype),
    )
}

/// The seed that was given, or one from the operating system's randomness; rank 0's, on every rank.
pub(crate) fn common_seed(comm: &Communicator, given: Option<u64>) -> Result<u64> {
    let own = match given {
        Some(seed) => seed,
        None => getrandom::u64().map_err(|error| anyhow::anyhow!("draw a seed: {error}"))?,
    };
    let all = comm.all_gather_bytes(&own.to_le_bytes())?;
    let first = all.first().context("rank 0 sent no seed")?;
    Ok(u64::from_le_bytes(first.as_slice().try_into()?))
}
