//! Agreement on a hardware model: all ranks of a communicator use the same one, so that they make the same choices.
//!
//! Ranks exchange the models they found, and use rank 0's. If that is derived from device properties alone, the ranks
//! measure the figures that choices depend on most together, once per machine: rank 0 saves the figures for later
//! jobs (`cost/calibration.rs`). The measurement has a time limit, by rank 0's clock.

use super::RankContext;
use crate::device::{
    AllocationKind, DeviceSlice, Event, KernelCopy, MatmulSpec, PeerAccess, Priority, Stream,
    StreamOp,
};
use crate::dtype::DType;
use crate::error::Result;
use crate::memory::{Region, RemoteRegion};
use crate::program::cost::{DeviceDescription, Figures, HardwareModel, Origin, calibration};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes of a measured copy, with a device per rank and with shared processors. The time of a copy of one `PART`-th
/// is subtracted, which cancels the startup time.
const BYTES: usize = 32 << 20;
const SHARED_BYTES: usize = 1 << 20;
const PART: usize = 4;

/// Repetitions of each measurement; the best counts, because disturbances only slow it down.
const SAMPLES: usize = 4;

/// Time for samples. When it has passed, each figure left has one sample after its warm-up, of the smaller copy.
const LIMIT: Duration = Duration::from_millis(400);

/// Launches per graph, and bytes copied by each.
const LAUNCHES: usize = 16;
const SHORT: usize = 64;

/// Blocks of a kernel that copies to a peer.
const BLOCKS: u32 = 64;

/// Extent of the matrices multiplied if ranks share processors. On other devices matmul time follows the clock rate,
/// and loading a matmul library takes longer than all other measurements.
const EXTENT: usize = 192;

impl RankContext {
    /// The hardware model that all ranks use. Blocks until every rank has called it, and on a machine that was never
    /// measured, until the measurement is done.
    ///
    /// # Errors
    /// Those of [`HardwareModel::find`] on any rank, on all.
    pub(crate) fn hardware_model(&self) -> Result<Arc<HardwareModel>> {
        self.attempt("hardware model", |context| context.agreed_model())
    }

    fn agreed_model(&self) -> Result<Arc<HardwareModel>> {
        let description = DeviceDescription::of(&*self.device);
        let found = HardwareModel::find(&description, self.world());
        let (own, origin) = self.agree_on(found)?;
        let text = own.to_json()?;
        let described = RankModel {
            origin,
            model: Sha256::digest(&text).into(),
            device: calibration::identity(
                self.device.identity(),
                &description.properties,
                &self.accesses()?,
            ),
        };
        let all = self.gather(&described)?;
        let first = &all[0];
        let mut model = own;
        if all.iter().any(|other| other.model != first.model) {
            // The exchange is collective, so all ranks take part although only rank 0's text is used.
            let texts = self.gather(&text)?;
            if described.model != first.model {
                tracing::warn!(
                    own = %model.name,
                    "ranks have different hardware models; rank 0's is used on all"
                );
                model = Arc::new(HardwareModel::from_json(&texts[0])?);
            }
        }
        // Decided by rank 0's origin on all ranks: the measurement is collective. Models that someone named or tuned
        // are never overridden.
        if first.origin != Origin::Derived || !self.can_measure(&all)? {
            return Ok(model);
        }
        let machine = calibration::machine(all.iter().map(|described| &*described.device));
        // Rank 0's file counts: others may have another home directory, or none.
        let cached = (self.rank() == 0)
            .then(|| calibration::known(&machine))
            .flatten();
        let mut cached = self.gather(&cached)?;
        let figures = match cached.swap_remove(0) {
            Some(figures) => {
                figures.check()?;
                figures
            }
            None => {
                let Some(measured) = self.measured(&description)? else {
                    return Ok(model);
                };
                if self.rank() == 0 && measured.is_complete {
                    calibration::keep(&machine, &measured.figures);
                }
                measured.figures
            }
        };
        let source = "the device's properties and a short measurement; `warplink tune` refines it";
        let world = self.world();
        let model = HardwareModel::of_figures(&description, &figures, world, source);
        tracing::debug!(model = %model.name, ?figures, "the machine's model");
        Ok(Arc::new(model))
    }

    /// Whether measured figures are meaningful: all ranks are on this machine, with equal devices of their own. Equal
    /// on all ranks.
    fn can_measure(&self, all: &[RankModel]) -> Result<bool> {
        let near = (0..self.world()).map(|rank| self.memory.is_near(self.group.job_rank(rank)?));
        let near = near
            .collect::<Result<Vec<bool>>>()?
            .into_iter()
            .all(|near| near);
        let alike = all.iter().all(|described| described.model == all[0].model);
        Ok(near && alike && self.world() > 1 && self.ranks_per_device()? == 1)
    }

    /// Access of this rank's device to the memory of every other rank's, in rank order.
    fn accesses(&self) -> Result<Vec<PeerAccess>> {
        let others = (0..self.world()).filter(|rank| *rank != self.rank());
        others
            .map(|rank| self.memory.access(self.group.job_rank(rank)?))
            .collect()
    }

    /// Measured figures of the slowest rank; `None` if a rank cannot allocate memory for the measurement.
    fn measured(&self, description: &DeviceDescription) -> Result<Option<Measured>> {
        let began = Instant::now();
        let shared = description.properties.shared;
        let bytes = if shared { SHARED_BYTES } else { BYTES };
        let allocate = || self.memory.allocate(bytes, AllocationKind::Plain);
        let regions = allocate().and_then(|own| Ok([own, allocate()?]));
        let has_memory = self.all_have(regions.is_ok())?;
        let (Ok(regions), true) = (regions, has_memory) else {
            tracing::warn!(
                "a rank has no memory for a measurement; the model is estimated from the devices' properties"
            );
            return Ok(None);
        };
        let own = Measurement::new(self, regions, began)?.measured(description)?;
        let all = self.gather(&own)?;
        let measured = Measured::of_all(&all)?;
        tracing::debug!(
            seconds = began.elapsed().as_secs_f64(),
            is_complete = measured.is_complete,
            "measured the machine"
        );
        Ok(Some(measured))
    }
}

/// Figures of a measurement.
#[derive(Clone, Serialize, Deserialize)]
struct Measured {
    figures: Figures,
    /// Whether all of them were measured. Expected ones take the place of others, for this communicator alone.
    is_complete: bool,
}

impl Measured {
    /// Figures of the slowest rank, which determines the time of a joint operation.
    fn of_all(all: &[Self]) -> Result<Self> {
        all.iter().try_for_each(|one| one.figures.check())?;
        let figures = || all.iter().map(|one| &one.figures);
        let least = |of: fn(&Figures) -> f64| figures().map(of).fold(f64::INFINITY, f64::min);
        let figures = Figures {
            memory: least(|one| one.memory),
            put: least(|one| one.put),
            stored: least(|one| one.stored),
            loaded: least(|one| one.loaded),
            products: least(|one| one.products),
            launch: figures().map(|one| one.launch).fold(0.0, f64::max),
        };
        figures.check()?;
        let is_complete = all.iter().all(|one| one.is_complete);
        Ok(Self {
            figures,
            is_complete,
        })
    }
}

/// Description of a rank.
#[derive(Serialize, Deserialize)]
struct RankModel {
    origin: Origin,
    /// Hash of its model.
    model: [u8; 32],
    /// Identity of its device.
    device: String,
}

/// State of a measurement.
struct Measurement<'a> {
    context: &'a RankContext,
    own: Region,
    into: Region,
    /// Memory of the neighbour, if every rank maps its neighbour's.
    neighbour: Option<RemoteRegion>,
    stream: Stream,
    begin: Event,
    end: Event,
    counter: DeviceSlice,
    began: Instant,
}

impl<'a> Measurement<'a> {
    fn new(context: &'a RankContext, [own, into]: [Region; 2], began: Instant) -> Result<Self> {
        let device = &context.device;
        let neighbour = neighbours(context, &into)?;
        let stream = device.create_stream(Priority::Normal)?;
        // Fill with non-zero data: some devices copy zeros faster.
        stream.fill(own.memory(), 0x3c)?;
        stream.fill(into.memory(), 0xc3)?;
        Ok(Self {
            context,
            own,
            into,
            neighbour,
            begin: device.create_event(true)?,
            end: device.create_event(true)?,
            counter: device.allocate_signals(SHORT)?,
            stream,
            began,
        })
    }

    fn measured(&self, description: &DeviceDescription) -> Result<Measured> {
        Ok(Measured {
            figures: self.figures(description)?,
            is_complete: self.neighbour.is_some(),
        })
    }

    fn figures(&self, description: &DeviceDescription) -> Result<Figures> {
        let expected = Figures::expected(&description.properties);
        let (own, into) = (self.own.memory(), self.into.memory());
        // A copy within the device reads and writes each byte, and the figure counts both.
        let memory = 2.0 * self.rate(into, own, &|to, from| self.stream.copy(to, from))?;
        let launch = self.launch()?;
        let products = if description.properties.shared {
            self.products()?
        } else {
            expected.products
        };
        let Some(neighbour) = &self.neighbour else {
            return Ok(Figures {
                memory,
                launch,
                products,
                ..expected
            });
        };
        let theirs = neighbour.memory();
        let put = self.rate(theirs, own, &|to, from| self.stream.copy(to, from))?;
        let (stored, loaded) = if description.properties.shared {
            // Kernels of the host device copy by the same processors.
            (put, put)
        } else {
            let copy = |to: &DeviceSlice, from: &DeviceSlice| self.kernel_copy(to, from, BLOCKS);
            (
                self.rate(theirs, own, &copy)?,
                self.rate(own, theirs, &copy)?,
            )
        };
        Ok(Figures {
            memory,
            put,
            stored,
            loaded,
            products,
            launch,
        })
    }

    /// Bytes per second of a copy.
    fn rate(
        &self,
        target: &DeviceSlice,
        source: &DeviceSlice,
        copy: &dyn Fn(&DeviceSlice, &DeviceSlice) -> Result<()>,
    ) -> Result<f64> {
        let bytes = source.bytes();
        let part = (
            target.slice(0..bytes / PART)?,
            source.slice(0..bytes / PART)?,
        );
        let some = self.best(&|| copy(&part.0, &part.1))?;
        if !self.continues(false)? {
            return Ok((bytes / PART) as f64 / some);
        }
        let all = self.best(&|| copy(target, source))?;
        // If the copy of the part was disturbed, the difference is unreliable; use the whole copy alone.
        Ok(if all > 2.0 * some {
            (bytes - bytes / PART) as f64 / (all - some)
        } else {
            bytes as f64 / all
        })
    }

    /// Seconds of a minimal launch.
    fn launch(&self) -> Result<f64> {
        let own = self.own.memory().slice(0..SHORT)?;
        let into = self.into.memory().slice(0..SHORT)?;
        self.stream.begin_capture()?;
        // In a graph, so that the host's time to enqueue is not measured.
        let recorded = (0..LAUNCHES).try_for_each(|_| self.kernel_copy(&into, &own, 1));
        let graph = self.stream.end_capture();
        recorded?;
        let graph = graph?;
        let all = self.best(&|| graph.launch(&self.stream))?;
        Ok(all / LAUNCHES as f64)
    }

    /// Operations per second of a matrix multiplication.
    fn products(&self) -> Result<f64> {
        let spec = MatmulSpec::new(EXTENT, EXTENT, EXTENT, DType::F32);
        let bytes = EXTENT * EXTENT * DType::F32.size();
        let part = |memory: &DeviceSlice, number: usize| {
            memory.slice(number * bytes..(number + 1) * bytes)
        };
        let (a, b) = (part(self.own.memory(), 0)?, part(self.own.memory(), 1)?);
        let c = part(self.into.memory(), 0)?;
        let compute = self.context.device.compute()?;
        compute.prepare_matmul(&spec)?;
        let seconds = self.best(&|| compute.matmul(&self.stream, &spec, &a, &b, &c, None))?;
        Ok(2.0 * (EXTENT as f64).powi(3) / seconds)
    }

    fn kernel_copy(&self, target: &DeviceSlice, source: &DeviceSlice, blocks: u32) -> Result<()> {
        self.stream.sequence(&[StreamOp::KernelCopy(KernelCopy {
            target,
            source,
            blocks,
            arrivals: [None; 2],
            counter: &self.counter.word(0)?,
        })])
    }

    /// Shortest time of `work` while all ranks run it. The extra first run is a warm-up that loads modules.
    fn best(&self, work: &dyn Fn() -> Result<()>) -> Result<f64> {
        let mut best = f64::INFINITY;
        for sample in 0..=SAMPLES {
            // Ranks measure together, so that figures include contention for links and host memory: the exchange is
            // their barrier too.
            if !self.continues(sample < 2)? {
                break;
            }
            self.stream.record(&self.begin)?;
            work()?;
            self.stream.record(&self.end)?;
            self.stream.synchronize(self.context.deadline())?;
            let seconds = f64::from(self.end.elapsed_since(&self.begin)?) / 1e3;
            if sample > 0 {
                best = best.min(seconds);
            }
        }
        // Clocks have a finite resolution, so avoid a time of 0.
        Ok(best.max(1e-9))
    }

    /// Whether the ranks take another sample: while rank 0 has time, or if it is `needed`. Blocks until every rank has
    /// called it.
    fn continues(&self, needed: bool) -> Result<bool> {
        let own = needed || self.began.elapsed() < LIMIT;
        Ok(self.context.gather(&own)?[0])
    }
}

/// Memory of the next rank, if every rank maps its next rank's.
fn neighbours(context: &RankContext, into: &Region) -> Result<Option<RemoteRegion>> {
    let next = (context.rank() + 1) % context.world();
    let shared = context
        .exchange()
        .share(&context.memory, &[into], |rank| rank == next);
    let opened = shared.map(|mut regions| regions[next].pop());
    let opened = opened.unwrap_or_else(|error| {
        tracing::warn!(
            %error,
            "a peer's memory cannot be mapped; the link's rates are estimated from the devices' properties"
        );
        None
    });
    // All or none: the copies of all ranks are timed at the same time.
    let all = context.all_have(opened.is_some())?;
    Ok(opened.filter(|_| all))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The slowest rank counts, and a figure that one rank has not measured makes the whole a guess.
    #[test]
    fn all_ranks_decide_together() {
        let one = |put, launch, is_complete| Measured {
            figures: Figures {
                memory: 1e12,
                put,
                stored: put,
                loaded: put,
                products: 5e14,
                launch,
            },
            is_complete,
        };
        let all = Measured::of_all(&[one(3e11, 2e-6, true), one(2e11, 1e-6, true)]).unwrap();
        assert!(all.is_complete);
        assert_eq!((all.figures.put, all.figures.launch), (2e11, 2e-6));
        let all = Measured::of_all(&[one(3e11, 2e-6, true), one(2e11, 1e-6, false)]).unwrap();
        assert!(!all.is_complete);
        assert!(Measured::of_all(&[one(3e11, 2e-6, true), one(0.0, 1e-6, true)]).is_err());
    }
}
