//! A GEMM problem: the operation, the sizes and the element type.

use crate::memory;
use crate::report::Object;
use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::Path;
use warplink::device::MatmulSpec;
use warplink::file;
use warplink::overlap::{AllGatherMatmul, Lowering, MatmulReduceScatter};
use warplink::program::cost::HardwareModel;
use warplink::program::lower::{Choice, Problem as _, choose};
use warplink::program::text::MAX_TEXT_BYTES;
use warplink::{DType, DeviceKind};

/// Name of the lowering without overlap: the collective engine, and one GEMM.
pub(crate) const COLLECTIVE: &str = "collective";

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

    /// The lowering of that name, or in that file.
    pub(crate) fn named(self, name: &str) -> Result<Lowering> {
        let mut selected = self.select(&[name.to_owned()])?.into_iter();
        let lowering = selected.next();
        lowering.with_context(|| format!("'{name}' is not a lowering of {self}"))
    }

    /// Lowerings selected by `names` (all of the library's if empty), including `.wlp` files with programs
    /// for this operation.
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
            let text = file::read_regular(Path::new(name), MAX_TEXT_BYTES)?;
            let stem = Path::new(name).file_stem().unwrap_or_default();
            let lowering = Lowering::parse(&stem.to_string_lossy(), &text)
                .with_context(|| format!("parse {name}"))?;
            // A file is for the operation that its program's name begins with; one list of names serves both
            // operations.
            if lowering.program().name.starts_with(self.prefix()) {
                selected.push(lowering);
            }
        }
        Ok(selected)
    }

    /// Prefix of program names for the operation.
    const fn prefix(self) -> &'static str {
        match self {
            Self::AllGatherMatmul => "all_gather_matmul",
            Self::MatmulReduceScatter => "matmul_reduce_scatter",
        }
    }
}

/// Validates a lowering name or program file on the command line.
pub(crate) fn lowering_name(text: &str) -> Result<String, String> {
    known_lowering(text, &Op::ALL)
}

/// The same, for all-gather + matmul.
pub(crate) fn gather_lowering_name(text: &str) -> Result<String, String> {
    known_lowering(text, &[Op::AllGatherMatmul])
}

fn known_lowering(text: &str, ops: &[Op]) -> Result<String, String> {
    let names = lowering_names(ops).map_err(|error| error.to_string())?;
    if text.ends_with(".wlp") || names.iter().any(|name| name == text) {
        return Ok(text.to_owned());
    }
    Err(format!(
        "unknown lowering; expected a file FILE.wlp or one of {}",
        names.join(", ")
    ))
}

/// Names of the library's lowerings of these operations, without duplicates.
fn lowering_names(ops: &[Op]) -> warplink::Result<Vec<String>> {
    let mut names: Vec<String> = Vec::new();
    for op in ops {
        for lowering in op.lowerings()? {
            if !names.iter().any(|name| name == lowering.name()) {
                names.push(lowering.name().to_owned());
            }
        }
    }
    Ok(names)
}

/// Fails if one of `names` is not a lowering of any of `ops`, or not a program.
pub(crate) fn check_lowerings(names: &[String], ops: &[Op]) -> Result<()> {
    for name in names {
        let selected = ops.iter().map(|op| op.select(std::slice::from_ref(name)));
        if !selected.collect::<Result<Vec<_>>>()?.concat().is_empty() {
            continue;
        }
        let either =
            |text: fn(&Op) -> String| ops.iter().map(text).collect::<Vec<_>>().join(" or ");
        let expected = if name.ends_with(".wlp") {
            let prefixes = either(|op| op.prefix().to_owned());
            format!("a program whose name starts with {prefixes}")
        } else {
            format!("one of {}", lowering_names(ops)?.join(", "))
        };
        let what = either(Op::to_string);
        bail!("'{name}' is not a lowering of {what}; expected {expected}");
    }
    Ok(())
}

/// A GEMM of an `m × k` by a `k × n` matrix over all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub(crate) struct Problem {
    pub(crate) op: Op,
    pub(crate) m: usize,
    pub(crate) k: usize,
    pub(crate) n: usize,
    pub(crate) dtype: DType,
    /// Whether memory holds B transposed.
    #[serde(default)]
    pub(crate) transposed_b: bool,
}

impl Problem {
    pub(super) fn gather(&self) -> AllGatherMatmul {
        AllGatherMatmul {
            m: self.m,
            k: self.k,
            n: vec![self.n],
            dtype: self.dtype,
            transposed_b: self.transposed_b,
            bias: false,
            keep: false,
        }
    }

    pub(super) fn scatter(&self) -> MatmulReduceScatter {
        MatmulReduceScatter {
            m: self.m,
            k: self.k,
            n: self.n,
            dtype: self.dtype,
            transposed_b: self.transposed_b,
            bias: false,
        }
    }

    /// The cost model's choice among the library's lowerings.
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

    /// Adds its keys to a JSON object.
    pub(crate) fn add_to(&self, object: Object) -> Object {
        object
            .key("op", self.op)
            .key("m", self.m)
            .key("k", self.k)
            .key("n", self.n)
            .key("dtype", self.dtype)
            .key("transposed_b", self.transposed_b)
    }

    /// Fails if the ranks cannot divide it evenly.
    pub(crate) fn check(&self, world: usize) -> Result<()> {
        let Self { m, k, n, .. } = *self;
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

    /// Fails if the matrices exceed this machine's memory.
    pub(crate) fn check_memory(&self, kind: DeviceKind, world: usize) -> Result<()> {
        // In 128 bits: a sum over ranks may overflow where each matrix does not.
        let bytes = |rows: usize, columns: usize| {
            rows as u128 * columns as u128 * self.dtype.size() as u128
        };
        let Self { m, k, n, .. } = *self;
        let (a, b, c) = (bytes(m, k), bytes(k, n), bytes(m, n));
        let ranks = world as u128;
        let (host, device) = match self.op {
            // On the host, one matrix at a time. On the device, all operands and room for the gathered A.
            Op::AllGatherMatmul => (b.max(a / ranks), a + b + c),
            Op::MatmulReduceScatter => (a.max(b) / ranks, (a + b) / ranks + c),
        };
        memory::check(kind, world, host, device)
    }

    /// The GEMM of `m` rows of A and `k` columns on one rank.
    pub(crate) fn spec(&self, m: usize, k: usize) -> MatmulSpec {
        let mut spec = MatmulSpec::new(m, self.n, k, self.dtype);
        spec.transposed_b = self.transposed_b;
        spec
    }

    /// Floating-point operations of each rank.
    pub(crate) fn flops(&self, world: usize) -> f64 {
        let all = 2.0 * self.m as f64 * self.k as f64 * self.n as f64;
        match self.op {
            Op::AllGatherMatmul => all,
            // Each rank multiplies its part of the contraction.
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
        // A rank's own part does not pass a link.
        whole * (world - 1) as f64 / world as f64
    }
}
