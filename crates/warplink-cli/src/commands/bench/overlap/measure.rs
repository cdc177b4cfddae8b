//! The figures of one shape.

use crate::commands::bench::timing::{Clock, Submission, Times, Work};
use crate::gemm::{Gemm, Op, Problem};
use crate::report::write_trace;
use anyhow::{Context, Result};
use serde::Serialize;
use std::path::PathBuf;
use std::time::Duration;
use warplink::Communicator;
use warplink::device::{AllocationKind, DeviceSlice, MatmulSpec, Stream};
use warplink::overlap::{Options, Variant};

/// What every shape is measured with.
pub(super) struct Settings {
    pub(super) variants: Vec<Variant>,
    pub(super) samples: usize,
    /// Where they are forced.
    pub(super) streams: Option<usize>,
    /// In bytes a second.
    pub(super) link: f64,
    pub(super) seed: u64,
    /// Where traces go.
    pub(super) traces: Option<PathBuf>,
}

/// Times of one way to submit the same work.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Submitted {
    pub(super) eager: Times,
    pub(super) captured: Times,
}

impl Submitted {
    fn of(clock: &Clock<'_>, samples: usize, work: Work<'_>) -> Result<Self> {
        let [this] = Self::in_turn(clock, samples, [work])?;
        Ok(this)
    }

    /// Of works that take turns.
    fn in_turn<const N: usize>(
        clock: &Clock<'_>,
        samples: usize,
        works: [Work<'_>; N],
    ) -> Result<[Self; N]> {
        let eager = clock.measure_in_turn(samples, Submission::Eager, works)?;
        let captured = clock.measure_in_turn(samples, Submission::Captured, works)?;
        Ok(std::array::from_fn(|index| Self {
            eager: eager[index],
            captured: captured[index],
        }))
    }

    /// Seconds of the faster one.
    pub(super) fn best(&self) -> f64 {
        self.eager.median.min(self.captured.median)
    }
}

/// The times of a shape.
#[derive(Debug, Serialize)]
pub(super) struct Figures {
    #[serde(flatten)]
    pub(super) problem: Problem,
    /// Floating-point operations of each rank.
    pub(super) flops: f64,
    /// One GEMM of the whole, without communication.
    pub(super) compute: Submitted,
    /// The same in one GEMM per rank.
    pub(super) compute_chunks: Submitted,
    /// Bytes that a rank receives over the link's rate, in seconds.
    pub(super) link_limit: f64,
    pub(super) variants: Vec<Row>,
    /// What the model says, and why.
    pub(super) choice: String,
}

/// A variant's times, and how right its result is.
#[derive(Debug, Serialize)]
pub(super) struct Row {
    pub(super) variant: &'static str,
    /// Whether the model would choose it.
    pub(super) chosen: bool,
    pub(super) times: Submitted,
    /// Of the faster submission.
    pub(super) tflops: f64,
    /// The time of the GEMM alone, measured alternately with this one, divided by this one.
    pub(super) of_compute: f64,
    /// That time alone.
    pub(super) compute: Submitted,
    /// This time over that of the link alone.
    pub(super) over_link: f64,
    /// The collective's time over this one.
    pub(super) over_collective: Option<f64>,
    /// Relative, against a GEMM in double precision, on some rows.
    pub(super) error: f64,
    /// Relative, against the first variant, on more rows.
    pub(super) difference: f64,
    pub(super) right: bool,
}

impl Figures {
    /// Seconds that no variant can be below.
    pub(super) fn limit(&self) -> f64 {
        self.compute.best().max(self.link_limit)
    }

    /// The fastest variant with overlap.
    pub(super) fn fastest(&self) -> Option<&Row> {
        self.variants
            .iter()
            .filter(|row| row.variant != Variant::Collective.name())
            .min_by(|a, b| a.times.best().total_cmp(&b.times.best()))
    }

    /// The collective and one GEMM.
    pub(super) fn collective(&self) -> Option<&Row> {
        self.variants
            .iter()
            .find(|row| row.variant == Variant::Collective.name())
    }
}

/// How long a GEMM runs before the first is timed; a GPU takes some tens of milliseconds to raise
/// its clocks.
const WARM_UP: Duration = Duration::from_millis(100);

/// Measures `problem`. Every rank calls this at the same time.
pub(super) fn figures(
    comm: &Communicator,
    clock: &Clock<'_>,
    problem: Problem,
    settings: &Settings,
) -> Result<Figures> {
    let world = comm.world();
    let mut gemm = Gemm::new(comm, problem, settings.seed)?;
    let alone = Alone::new(&gemm)?;
    clock.warm_up(WARM_UP, &|stream| alone.whole(stream))?;
    let compute = Submitted::of(clock, settings.samples, &|stream| alone.whole(stream))?;
    let compute_chunks = Submitted::of(clock, settings.samples, &|stream| alone.chunks(stream))?;
    let flops = problem.flops(world);
    let link_limit = problem.link_bytes(world) / settings.link;
    let mut rows: Vec<Row> = Vec::new();
    let (mut first, mut choice) = (None, String::new());
    for variant in &settings.variants {
        let options = Options {
            streams: settings.streams,
            ..Options::of(*variant)
        };
        let plan = gemm
            .plan(&options)
            .with_context(|| format!("make a plan for {variant}"))?;
        let work = |stream: &Stream| plan.run(stream);
        let error = gemm
            .error_of(&clock.stream, &work)
            .with_context(|| format!("run {variant}"))?;
        let difference = difference(clock, &gemm, &mut first)?;
        let whole = |stream: &Stream| alone.whole(stream);
        let [beside, times] = Submitted::in_turn(clock, settings.samples, [&whole, &work])
            .with_context(|| format!("time {variant}"))?;
        if let Some(folder) = &settings.traces {
            for plan in plan.plans() {
                if let Some(trace) = plan.trace(&clock.stream)? {
                    let Problem { m, k, n, .. } = problem;
                    let name = format!("{}-{m}-{k}-{n}.json", trace.program);
                    write_trace(&folder.join(name), &trace)?;
                }
            }
        }
        let (estimates, best) = (&plan.choice().estimates, times.best());
        let most = 2.0 * problem.dtype.matmul_tolerance().unwrap_or_default();
        rows.push(Row {
            variant: variant.name(),
            chosen: estimates
                .first()
                .is_some_and(|best| best.variant == *variant),
            times,
            tflops: flops / best / 1e12,
            of_compute: beside.best() / best,
            compute: beside,
            over_link: best / link_limit,
            over_collective: None,
            error,
            difference,
            right: gemm.is_right(error) && difference <= most,
        });
        choice = plan.choice().to_string();
    }
    let collective = rows
        .iter()
        .find(|row| row.variant == Variant::Collective.name())
        .map(|row| row.times.best());
    for row in &mut rows {
        row.over_collective = collective.map(|collective| collective / row.times.best());
    }
    Ok(Figures {
        problem,
        flops,
        compute,
        compute_chunks,
        link_limit,
        variants: rows,
        choice,
    })
}

/// The relative difference between what the result holds and what it held for the first variant,
/// on some rows; of the rank where it is largest.
fn difference(clock: &Clock<'_>, gemm: &Gemm<'_>, first: &mut Option<Vec<f64>>) -> Result<f64> {
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
    // The largest is asked for, which a NaN is not.
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
    fn new(gemm: &Gemm<'_>) -> Result<Self> {
        let comm = gemm.comm;
        let (device, world) = (comm.device(), comm.world());
        let Problem { op, m, k, n, dtype } = gemm.problem;
        let (a, c, depth) = match op {
            Op::AllGatherMatmul => {
                // Its own part again and again: the content decides about the power that a GEMM
                // takes, so it may not be just anything.
                let a = device.allocate(m * k * dtype.size(), AllocationKind::Plain)?;
                let stream = comm.create_stream(warplink::device::Priority::Normal)?;
                let part = gemm.a.bytes();
                for index in 0..world {
                    stream.copy(&a.slice(index * part..(index + 1) * part)?, &gemm.a)?;
                }
                comm.synchronize(&stream)?;
                (a, gemm.c.clone(), k)
            }
            Op::MatmulReduceScatter => {
                let c = device.allocate(m * n * dtype.size(), AllocationKind::Plain)?;
                (gemm.a.clone(), c, k / world)
            }
        };
        let whole = MatmulSpec::new(m, n, depth, dtype);
        let chunk = MatmulSpec::new(m / world, n, depth, dtype);
        let compute = comm.compute()?;
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
