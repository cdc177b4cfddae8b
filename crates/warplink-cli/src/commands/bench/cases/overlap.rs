//! `warplink bench overlap`: overlapped GEMMs, compared with the GEMM alone and the vendor's
//! collective before or after it.

mod figures;
mod measure;
mod replay;

use crate::commands::bench::case::{Case, Setup, by_device};
use crate::commands::bench::clock::BenchClock;
use crate::commands::bench::peers::optional;
use crate::commands::bench::plot::Drawing;
use crate::commands::bench::report::{Figures, job, or_empty};
use crate::commands::program::named_model;
use crate::gemm::inputs::Random;
use crate::gemm::{Op, Problem, check_lowerings, common_seed, lowering_name};
use crate::names::OneOf;
use crate::options::{Options, at_least, between};
use crate::report::{Object, counted, print_result};
use anyhow::{Context, Result};
use clap::Args;
use measure::{ShapeTimes, Shared};
use std::path::PathBuf;
use std::process::ExitCode;
use warplink::device::Priority;
use warplink::{Communicator, DType, DeviceKind};

/// Measure GEMMs overlapped with their communication
///
/// For each shape, measures the GEMM alone, whole and in one chunk per rank, and every lowering: the
/// collective engine before or after the GEMM, and the overlapped programs. Two limits are shown: the
/// time to receive the bytes at the link's rate, and the GEMM alone. Times are medians over samples
/// that start with a barrier; the slowest rank counts. Samples of all alternate, because GPU clocks
/// drift. All results are checked. '*' marks the lowering that a plan chooses, and the last lines rate
/// the choices.
///
/// Columns: 'least' and 'most' are the extremes of the faster of eager and captured. 'of GEMM' is the time of the
/// GEMM alone divided by this time, 'over link' this time divided by that of the link alone, 'x collective' the time
/// of the collective and one GEMM divided by this time; 'estimate' is that of the cost model.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    warplink bench overlap\n  \
    warplink bench overlap --shape 8192,8192,3584 --operation all-gather-matmul --plot overlap.svg\n  \
    warplink bench overlap --ddlb --lowerings push,ring-put --output ddlb.json\n  \
    warplink bench overlap --random 100 --output random.json\n  \
    warplink bench overlap --lowerings push,my_own.wlp --shape 4096,4096,4096\n  \
    warplink bench overlap --device host -n 2 --shape 256,256,256")]
pub(crate) struct Overlap {
    /// Shape m,k,n: A is m x k, B is k x n; may be repeated [default: four shapes on cuda, two
    /// small ones on host, rounded up to what the ranks can share]
    #[arg(long = "shape", value_name = "M,K,N", value_parser = shape)]
    shapes: Vec<[usize; 3]>,
    /// All combinations of m, k and n from 512 to 16384, as in the DDLB benchmark
    #[arg(long, conflicts_with = "shapes")]
    ddlb: bool,
    /// Measure N random shapes: sizes from 1 to 16384 (256 on host), and random operations and element
    /// types unless --operation and --dtype are given. The same --seed gives the same shapes
    #[arg(long, value_name = "N", conflicts_with_all = ["shapes", "ddlb"], value_parser = at_least::<u16>(0))]
    random: Option<u16>,
    /// Instead of measuring, repeat the choice for the shapes in FILE (written by --output), and report those
    /// for which it is not among the fastest; needs --model
    #[arg(long, value_name = "FILE.json", requires = "model", conflicts_with_all = ["shapes", "ddlb", "random"])]
    replay: Option<PathBuf>,
    /// With --replay: the hardware model, a file or the name of one that is included
    #[arg(long, value_name = "FILE|NAME", requires = "replay")]
    model: Option<PathBuf>,
    /// Operation to measure; may be repeated [default: both]
    #[arg(long = "operation", value_name = "OPERATION")]
    ops: Vec<Op>,
    /// Element type [default: bf16 on cuda, f32 on host]
    #[arg(long, value_name = "TYPE", value_parser = OneOf(&DType::MATMUL))]
    dtype: Option<DType>,
    /// Store B transposed, N x K, as the weights of a linear layer: [out, in]
    #[arg(long)]
    transposed_b: bool,
    /// Lowerings to measure, separated by commas: collective, in-order, push, ring-put, ring-get,
    /// rings, store, or FILE.wlp [default: all but files]
    #[arg(long, value_name = "A,B", value_delimiter = ',', value_parser = lowering_name)]
    lowerings: Vec<String>,
    /// Streams that GEMMs alternate on [default: 2]
    #[arg(long, value_name = "N", value_parser = between::<u8>(1, 32))]
    streams: Option<u8>,
    /// Maximum multiprocessors of kernels that wait for other ranks; the vendor's library, which then executes
    /// collectives, is not bound by it
    #[arg(long, value_name = "N", value_parser = at_least::<u16>(1))]
    multiprocessors: Option<u16>,
    /// Link rate in GB/s (10^9 bytes), for the link limit [default: from the hardware model]
    #[arg(long, value_name = "GB/S", value_parser = positive)]
    link: Option<f64>,
    /// Seed of the inputs [default: random]
    #[arg(long, value_name = "SEED", value_parser = at_least::<u64>(0))]
    seed: Option<u64>,
    /// Write a Perfetto trace of one run of each lowering to this folder
    #[arg(long, value_name = "FOLDER")]
    traces: Option<PathBuf>,
}

/// The sizes m, k and n of a GEMM.
fn shape(text: &str) -> Result<[usize; 3], String> {
    let sizes = text.split(',').map(|size| size.trim().parse().ok());
    let sizes: Option<Vec<usize>> = sizes.collect();
    let shape = sizes.and_then(|sizes| sizes.try_into().ok());
    shape
        .filter(|shape: &[usize; 3]| !shape.contains(&0))
        .ok_or_else(|| "expected three sizes above 0, as in 8192,8192,3584".to_owned())
}

fn positive(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(rate) if rate.is_finite() && rate > 0.0 => Ok(rate),
        _ => Err("expected a positive number".to_owned()),
    }
}

/// The largest size of a random shape.
const MAX_RANDOM: [f64; 2] = [16384.0, 256.0];

/// The sizes of the DDLB benchmark.
const DDLB: [usize; 6] = [512, 1024, 2048, 4096, 8192, 16384];

impl Case for Overlap {
    const NAME: &'static str = "overlap";
    const SAMPLES: [u16; 2] = [20, 5];

    fn prepare(&mut self, options: &Options) -> Result<Option<ExitCode>> {
        if let (Some(file), Some(model)) = (&self.replay, &self.model) {
            let (object, text) = replay::replay(file, &*named_model(model)?)?;
            print_result(options.json, &object, || text)?;
            return Ok(Some(ExitCode::SUCCESS));
        }
        if let Some(folder) = &self.traces {
            std::fs::create_dir_all(folder)
                .with_context(|| format!("create {}", folder.display()))?;
        }
        Ok(None)
    }

    fn check(&self, setup: &Setup) -> Result<()> {
        check_lowerings(&self.lowerings, &self.ops())?;
        // Random shapes are drawn with a seed that the ranks share later.
        let problems = match self.random {
            Some(_) => Vec::new(),
            None => self.problems(setup.kind, setup.world),
        };
        problems.iter().try_for_each(|problem| {
            problem.check(setup.world)?;
            problem.check_memory(setup.kind, setup.world)
        })
    }

    fn measure(&self, comm: &Communicator, setup: &Setup) -> Result<Figures> {
        let seed = common_seed(comm, self.seed)?;
        let problems = match self.random {
            None => self.problems(setup.kind, comm.world()),
            Some(count) => self.random_problems(count, comm, seed),
        };
        let engine = optional(comm, "the collective", comm.collective_engine())?;
        let link = match self.link {
            Some(link) => link * 1e9,
            None => {
                // The one that plans choose by, the same on all ranks.
                comm.executor().hardware_model()?.link.put.peak()
            }
        };
        let shared = Shared {
            engine: engine.map(|engine| engine.name()),
            link,
            seed,
        };
        let clock = BenchClock::new(comm, Priority::Normal)?;
        let progress = Setup::progress(comm, problems.len(), "overlapped GEMMs");
        let mut shapes = Vec::new();
        for problem in problems {
            let Problem { m, k, n, .. } = problem;
            let shape = measure::measure(&clock, problem, self, setup, &shared);
            shapes.push(shape.with_context(|| format!("measure {} of {m},{k},{n}", problem.op))?);
            // The next shape does not use the peers' mappings of this one.
            comm.release_idle()?;
            progress.step(format!("{m},{k},{n}"));
        }
        let (nccl, samples, link) = (shared.engine, setup.samples, link / 1e9);
        let title = format!(
            "{}{}; {}, {}link {link:.1} GB/s",
            job(comm),
            or_empty(nccl.as_ref(), |nccl| format!(", compared with {nccl}")),
            counted(samples, "sample"),
            or_empty(self.streams, |count| counted(count.into(), "stream") + ", "),
        );
        let mut rows = shapes.iter().flat_map(|shape| &shape.lowerings);
        Ok(Figures {
            title,
            is_right: rows.all(|row| row.right),
            tables: figures::tables(&shapes),
            drawing: Drawing::Bars(shapes.iter().map(ShapeTimes::bars).collect()),
            object: Object::default()
                .key("nccl", nccl)
                .key("streams", self.streams)
                .optional("multiprocessors", self.multiprocessors)
                .key("samples", samples)
                .key("link", link)
                .key("seed", seed)
                .key("shapes", shapes),
        })
    }
}

impl Overlap {
    /// Shapes whose sizes are spread evenly over their logarithms, rounded up to what the ranks can
    /// share.
    fn random_problems(&self, count: u16, comm: &Communicator, seed: u64) -> Vec<Problem> {
        let (world, max) = (comm.world(), by_device(comm.device().kind(), MAX_RANDOM));
        let mut random = Random(seed);
        let mut size = |multiple: usize| {
            let size = max.powf(random.unit()).round() as usize;
            size.next_multiple_of(multiple)
        };
        let ops = self.ops();
        let dtypes = match self.dtype {
            Some(dtype) => vec![dtype],
            None => vec![DType::BF16, DType::F16, DType::F32],
        };
        let problem = |index: usize| {
            let shape = [size(world), size(world), size(1)];
            // In turn and not drawn, so that a few shapes already have all operations and element types.
            let op = ops[index % ops.len()];
            self.problem(op, shape, dtypes[index / ops.len() % dtypes.len()])
        };
        (0..count.into()).map(problem).collect()
    }

    fn problem(&self, op: Op, [m, k, n]: [usize; 3], dtype: DType) -> Problem {
        Problem {
            op,
            m,
            k,
            n,
            dtype,
            transposed_b: self.transposed_b,
        }
    }

    /// The operations to measure, at least one.
    fn ops(&self) -> Vec<Op> {
        if self.ops.is_empty() {
            Op::ALL.to_vec()
        } else {
            self.ops.clone()
        }
    }

    fn problems(&self, kind: DeviceKind, world: usize) -> Vec<Problem> {
        // All ranks have the same part of the rows, or of the columns, of A.
        let round = |size: usize| size.next_multiple_of(world);
        let shape = |[m, k, n]: [usize; 3]| [round(m), round(k), n];
        let shapes: Vec<[usize; 3]> = match (&self.shapes[..], self.ddlb, kind) {
            (given @ [_, ..], ..) => given.to_vec(),
            (_, true, _) => DDLB
                .into_iter()
                .flat_map(|m| DDLB.into_iter().map(move |k| (m, k)))
                .flat_map(|(m, k)| DDLB.into_iter().map(move |n| shape([m, k, n])))
                .collect(),
            (_, _, DeviceKind::Cuda) => [
                [32768, 16384, 8192],
                [32768, 16384, 1024],
                [16384, 8192, 1024],
                [8192, 8192, 3584],
            ]
            .map(shape)
            .to_vec(),
            (_, _, DeviceKind::Host) => [[256, 512, 256], [512, 512, 64]].map(shape).to_vec(),
        };
        let ops = self.ops();
        let dtype = self
            .dtype
            .unwrap_or(by_device(kind, [DType::BF16, DType::F32]));
        ops.iter()
            .flat_map(|&op| {
                let shapes = shapes.iter();
                shapes.map(move |&shape| self.problem(op, shape, dtype))
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_are_read() {
        assert_eq!(shape("1,2,3"), Ok([1, 2, 3]));
        assert_eq!(shape("1, 2, 3"), Ok([1, 2, 3]));
        for text in ["", "1,2", "1,2,3,4", "1,0,3", "a,b,c", "-1,2,3"] {
            assert!(shape(text).is_err(), "{text}");
        }
        assert!(positive("393.6").is_ok());
        assert!(
            ["0", "-1", "nan", "inf", "x"]
                .into_iter()
                .all(|text| positive(text).is_err())
        );
    }
}
