//! The figures of one shape.

use super::Overlap;
use crate::commands::bench::case::Setup;
use crate::commands::bench::clock::{BenchClock, Submission, Times, Work};
use crate::commands::bench::peers::allocate;
use crate::gemm::{COLLECTIVE, DistributedGemm, Op, Problem};
use crate::report::write_trace;
use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use std::time::Duration;
use warplink::device::{DeviceSlice, MatmulSpec, Stream};
use warplink::overlap::{DEFAULT_STREAMS, Lowering, Options};

/// The same for every shape and rank.
pub(super) struct Shared {
    /// Name of the collective engine.
    pub(super) engine: Option<String>,
    /// Rate of the link in bytes a second.
    pub(super) link: f64,
    pub(super) seed: u64,
}

/// Times of the same work by both submissions.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
pub(super) struct Submitted {
    pub(super) eager: Times,
    pub(super) captured: Times,
}

impl Submitted {
    /// Of works that take turns.
    fn in_turn(clock: &BenchClock<'_>, samples: usize, works: &[Work<'_>]) -> Result<Vec<Self>> {
        let eager = clock.measure_in_turn(samples, Submission::Eager, 1, works)?;
        let captured = clock.measure_in_turn(samples, Submission::Captured, 1, works)?;
        Ok(eager
            .into_iter()
            .zip(captured)
            .map(|(eager, captured)| Self {
                eager: eager.stream,
                captured: captured.stream,
            })
            .collect())
    }

    /// Seconds of the faster one.
    pub(super) fn best(&self) -> f64 {
        self.eager.median.min(self.captured.median)
    }
}

/// The times of a shape.
#[derive(Debug, Serialize)]
pub(super) struct ShapeTimes {
    #[serde(flatten)]
    pub(super) problem: Problem,
    /// Floating-point operations of each rank.
    pub(super) flops: f64,
    /// One GEMM of the whole, without communication, in turn with the lowerings.
    pub(super) compute: Submitted,
    /// The same in as many GEMMs as there are ranks.
    pub(super) compute_chunks: Submitted,
    /// Bytes that a rank receives over the link's rate, in seconds.
    pub(super) link_limit: f64,
    pub(super) lowerings: Vec<OverlapRow>,
    /// The lowering that a plan chooses, and why.
    pub(super) choice: String,
}

/// A lowering's times, and the error of its result.
#[derive(Debug, Serialize)]
pub(super) struct OverlapRow {
    pub(super) lowering: String,
    /// Its open parameters, as the cost model chose them.
    pub(super) parameters: String,
    /// Whether a plan chooses it.
    pub(super) chosen: bool,
    /// Whether the cost model alone would choose it.
    pub(super) modelled: bool,
    /// The cost model's estimate, in seconds.
    pub(super) expected: f64,
    pub(super) times: Submitted,
    /// Of the faster submission.
    pub(super) tflops: f64,
    /// The GEMM's time alone over this one.
    pub(super) of_compute: f64,
    /// This time over that of the link alone; none for a single rank, which receives nothing.
    pub(super) over_link: Option<f64>,
    /// The collective's time over this one.
    pub(super) over_collective: Option<f64>,
    /// Relative, against a GEMM in double precision, on some rows.
    pub(super) error: f64,
    /// Relative, against the first lowering, on more rows.
    pub(super) difference: f64,
    pub(super) right: bool,
}

impl ShapeTimes {
    /// Seconds that no lowering can be below.
    pub(super) fn limit(&self) -> f64 {
        self.compute.best().max(self.link_limit)
    }

    /// The fastest lowering with overlap.
    pub(super) fn fastest(&self) -> Option<&OverlapRow> {
        self.lowerings
            .iter()
            .filter(|row| row.lowering != COLLECTIVE)
            .min_by(|a, b| a.times.best().total_cmp(&b.times.best()))
    }

    /// The collective and one GEMM.
    pub(super) fn collective(&self) -> Option<&OverlapRow> {
        self.lowerings.iter().find(|row| row.lowering == COLLECTIVE)
    }

    /// The lowering that a plan chooses.
    pub(super) fn chosen(&self) -> Option<&OverlapRow> {
        self.lowerings.iter().find(|row| row.chosen)
    }

    /// The fastest time divided by that of the chosen lowering; 1 if the choice was right.
    pub(super) fn of_best(&self) -> Option<f64> {
        self.chosen().and_then(|chosen| self.over_best(chosen))
    }

    /// The fastest time over that of the cost model's choice.
    pub(super) fn model_of_best(&self) -> Option<f64> {
        let modelled = self.lowerings.iter().find(|row| row.modelled);
        modelled.and_then(|modelled| self.over_best(modelled))
    }

    fn over_best(&self, row: &OverlapRow) -> Option<f64> {
        let best = self.lowerings.iter().map(|row| row.times.best());
        best.min_by(f64::total_cmp)
            .map(|best| best / row.times.best())
    }
}

/// Warm-up time: a GPU takes some tens of milliseconds to raise its clocks.
const WARM_UP: Duration = Duration::from_millis(100);

/// Measures `problem`. Every rank calls this at the same time.
pub(super) fn measure(
    clock: &BenchClock<'_>,
    problem: Problem,
    overlap: &Overlap,
    setup: &Setup,
    shared: &Shared,
) -> Result<ShapeTimes> {
    let (comm, world) = (clock.comm, clock.comm.world());
    let gemm = DistributedGemm::new(comm, problem, shared.seed)?;
    let alone = Alone::new(&gemm)?;
    clock.warm_up(WARM_UP, &|stream| alone.whole(stream))?;
    let options = |lowering: Option<Lowering>| Options {
        lowering,
        streams: overlap.streams.map_or(DEFAULT_STREAMS, usize::from),
        multiprocessors: overlap.multiprocessors.map(usize::from),
        ..Options::default()
    };
    // Including the collective if there is an engine, as for every caller.
    let choice = gemm.plan(&options(None))?.choice().clone();
    // With trials, a plan is chosen by measured times, which does not show how good the model is.
    let alone_by_model = Options {
        trials: false,
        ..options(None)
    };
    let modelled = gemm.plan(&alone_by_model)?.choice().name().to_owned();
    let mut first = None;
    let mut plans = Vec::new();
    for lowering in problem.op.select(&overlap.lowerings)? {
        let name = lowering.name().to_owned();
        if shared.engine.is_none() && name == COLLECTIVE {
            continue;
        }
        let options = Options {
            // The baseline of the others.
            library: name == COLLECTIVE,
            ..options(Some(lowering))
        };
        let plan = gemm
            .plan(&options)
            .with_context(|| format!("make a plan for {name}"))?;
        let error = gemm
            .error_of(&clock.stream, &|stream| Ok(plan.run(stream)?))
            .with_context(|| format!("run {name}"))?;
        let difference = difference(clock, &gemm, &mut first)?;
        plans.push((plan, error, difference));
    }
    let mut works: Vec<Work<'_>> = vec![
        Box::new(|stream| alone.whole(stream)),
        Box::new(|stream| alone.chunks(stream)),
    ];
    for (plan, ..) in &plans {
        works.push(Box::new(|stream| Ok(plan.run(stream)?)));
    }
    let times = Submitted::in_turn(clock, setup.samples, &works)?;
    let [compute, compute_chunks, times @ ..] = &times[..] else {
        anyhow::bail!("nothing was timed");
    };
    // After the samples, which runs with timestamps of every operation would disturb.
    if let Some(folder) = &overlap.traces {
        for plan in plans.iter().flat_map(|(plan, ..)| plan.plans()) {
            if let Some(trace) = plan.trace(&clock.stream)? {
                let Problem { m, k, n, .. } = problem;
                let name = format!("{}-{m}-{k}-{n}.json", trace.program);
                write_trace(&folder.join(name), &trace)?;
            }
        }
    }
    let flops = problem.flops(world);
    let link_limit = problem.link_bytes(world) / shared.link;
    // Both results may be off by the tolerance, in opposite directions.
    let most = 2.0 * problem.dtype.matmul_tolerance().unwrap_or_default();
    let mut rows = Vec::new();
    for ((plan, error, difference), times) in plans.iter().zip(times) {
        let own = plan.choice();
        let estimate = own.estimates.first().context("no estimate of a lowering")?;
        let best = times.best();
        rows.push(OverlapRow {
            lowering: own.name().to_owned(),
            parameters: estimate.chosen.to_string(),
            chosen: own.name() == choice.name(),
            modelled: own.name() == modelled,
            expected: estimate.expected.seconds(),
            times: *times,
            tflops: flops / best / 1e12,
            of_compute: compute.best() / best,
            over_link: (link_limit > 0.0).then(|| best / link_limit),
            over_collective: None,
            error: *error,
            difference: *difference,
            right: gemm.is_right(*error) && *difference <= most,
        });
    }
    let mut shape = ShapeTimes {
        problem,
        flops,
        compute: *compute,
        compute_chunks: *compute_chunks,
        link_limit,
        lowerings: rows,
        choice: choice.to_string(),
    };
    if let Some(collective) = shape.collective().map(|row| row.times.best()) {
        for row in &mut shape.lowerings {
            row.over_collective = Some(collective / row.times.best());
        }
    }
    Ok(shape)
}

/// Relative difference of the current result to that of the first lowering, on some rows; the largest of all
/// ranks.
fn difference(
    clock: &BenchClock<'_>,
    gemm: &DistributedGemm<'_>,
    first: &mut Option<Vec<f64>>,
) -> Result<f64> {
    let now = gemm.some_rows()?;
    let own = match first {
        None => {
            *first = Some(now);
            0.0
        }
        Some(first) => {
            let (mut difference, mut norm) = (0.0, 0.0);
            for (now, first) in now.iter().zip(first) {
                difference += (now - *first).powi(2);
                norm += first.powi(2);
            }
            (difference / norm).sqrt()
        }
    };
    // A NaN would not be the largest.
    let own = if own.is_nan() { f64::INFINITY } else { own };
    Ok(clock.slowest(vec![own])?.median)
}

/// The GEMM of a rank without any communication.
struct Alone {
    whole: MatmulSpec,
    chunk: MatmulSpec,
    a: DeviceSlice,
    b: DeviceSlice,
    c: DeviceSlice,
    compute: std::sync::Arc<dyn warplink::device::Compute>,
}

impl Alone {
    fn new(gemm: &DistributedGemm<'_>) -> Result<Self> {
        let comm = gemm.comm;
        let world = comm.world();
        let Problem {
            op, m, k, n, dtype, ..
        } = gemm.problem;
        let (a, c, depth) = match op {
            Op::AllGatherMatmul => {
                // This rank's part repeatedly: the power that a GEMM takes depends on its data.
                let a = allocate(comm, m * k * dtype.size())?;
                let stream = comm.create_stream(warplink::device::Priority::Normal)?;
                let part = gemm.a.bytes();
                for index in 0..world {
                    stream.copy(&a.slice(index * part..(index + 1) * part)?, &gemm.a)?;
                }
                comm.synchronize(&stream)?;
                (a, gemm.c.clone(), k)
            }
            Op::MatmulReduceScatter => {
                let c = allocate(comm, m * n * dtype.size())?;
                (gemm.a.clone(), c, k / world)
            }
        };
        let whole = gemm.problem.spec(m, depth);
        let chunk = gemm.problem.spec(m / world, depth);
        let compute = comm.compute()?;
        // Here, so that no sample includes the choice of an algorithm and the load of its kernel.
        compute.prepare_matmul(&whole)?;
        compute.prepare_matmul(&chunk)?;
        Ok(Self {
            whole,
            chunk,
            a,
            b: gemm.b.clone(),
            c,
            compute,
        })
    }

    fn whole(&self, stream: &Stream) -> Result<()> {
        let Self { a, b, c, .. } = self;
        Ok(self.compute.matmul(stream, &self.whole, a, b, c, None)?)
    }

    fn chunks(&self, stream: &Stream) -> Result<()> {
        let chunks = self.whole.m / self.chunk.m;
        let (rows, results) = (self.a.bytes() / chunks, self.c.bytes() / chunks);
        for index in 0..chunks {
            let a = self.a.slice(index * rows..(index + 1) * rows)?;
            let c = self.c.slice(index * results..(index + 1) * results)?;
            self.compute
                .matmul(stream, &self.chunk, &a, &self.b, &c, None)?;
        }
        Ok(())
    }
}
