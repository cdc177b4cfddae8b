//! The executor: runs verified programs on a device.
//!
//! ```text
//!   Executor::prepare   verifies for this world, unrolls for this rank
//!   Prepared::bind      allocates, exchanges handles with the peers, makes a plan    (all ranks)
//!   Plan::run           enqueues the plan on the caller's stream, any number of times
//!   Plan::capture       turns the plan into one graph, to be launched instead
//! ```
//!
//! All preparation happens before a run: expressions are resolved, memory is allocated, the handles of all exchanges
//! are exchanged in one batch, and matmuls are tuned. A run only enqueues. Local tensors and streams come from pools
//! of the executor, so that a plan that is bound again finds registered memory that its peers still have mapped.

mod agreement;
mod bind;
mod command;
mod context;
mod kernel;
mod kernel_notes;
mod lane;
mod lane_times;
mod launches;
mod machine;
mod matmuls;
mod memory;
mod pairs;
mod plan;
mod pool;
mod publication;
mod reach;
mod replaced;
mod resolve;
mod row_values;
mod section_kernel;
mod timing;
mod trace;
mod trace_span;
mod workspace;

pub(crate) use agreement::Digest;
pub use bind::Prepared;
pub(crate) use context::{DirectCollectives, EngineSource, RankContext};
pub use kernel::KernelReport;
pub(crate) use kernel_notes::KernelNotes;
pub(crate) use kernel_notes::{calls_differ, unknown_memory};
pub(crate) use lane::TellDifference;
pub use memory::Bindings;
pub(crate) use pairs::{CARRIED_WORDS, MAX_MESSAGES, PairMessage, PairProgram, Pairs};
pub use plan::{CapturedPlan, Plan};
pub(crate) use reach::Announced;
pub use trace::Trace;
pub use trace_span::TraceSpan;
pub(crate) use workspace::{CodeWanted, SharedKernel, SharedWorkspace};

use super::cost::HardwareModel;
use super::ir::Program;
use super::parameters::Parameters;
use super::rank_program::RankProgram;
use super::{refused, unroll, verify};
use crate::device::{Device, Priority, Stream};
use crate::error::{Error, Rank, Result};
use context::ProgramCollectives;
use pool::Pool;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, OnceLock};

/// Options for preparing a program.
#[derive(Clone, Copy, Debug)]
pub struct PrepareOptions {
    /// Number of streams in the pool, the `streams` of program text.
    pub streams: usize,
    /// Whether to verify the program first. Without verification, a faulty program can be run to observe its failure.
    pub verify: bool,
    /// Most multiprocessors that kernels which wait for other ranks may occupy at a time, equal on all ranks; without a
    /// limit by default. Lanes of kernel sections count by the streams that they run on, and a program with more is
    /// refused; transfers, which any stream may have at a time, share the limit, one multiprocessor each at least. Matmuls,
    /// copies and sums do not wait and have no limit. The collective engine, which executes the collectives of a
    /// program with a limit, is not bound by it (NCCL by `NCCL_MAX_CTAS`).
    pub multiprocessors: Option<usize>,
    /// Whether the engine executes collectives in any case, for comparisons; by default the communicator's own do, if ranks
    /// can map one another's memory.
    pub library: bool,
}

impl PrepareOptions {
    /// Whether the communicator's own collectives may execute those of the program.
    fn allows_own_collectives(&self) -> bool {
        // They have one bound for calls of all programs; operations of several would need an order.
        !self.library && self.multiprocessors.is_none()
    }
}

impl Default for PrepareOptions {
    /// Two streams, with verification, without a limit, and with own collectives.
    fn default() -> Self {
        Self {
            streams: 2,
            verify: true,
            multiprocessors: None,
            library: false,
        }
    }
}

/// Runs programs on one rank. Every rank prepares and binds the same programs in the same order. The first program with a
/// collective of all ranks joins [`Collectives`](crate::Collectives) with a workspace for those of all its programs.
///
/// Clones share everything.
#[derive(Clone)]
pub struct Executor {
    context: RankContext,
    pool: Arc<Pool>,
    collectives: Arc<ProgramCollectives>,
    model: Arc<OnceLock<Arc<HardwareModel>>>,
}

impl fmt::Debug for Executor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Executor")
            .field("rank", &self.context.rank())
            .field("pool", &self.pool)
            .finish()
    }
}

impl Executor {
    pub(crate) fn new(context: RankContext) -> Self {
        let pool = Arc::new(Pool::new(&context.device, &context.memory));
        // Weak, since the registry outlives executors and must not keep their pools.
        let kept = Arc::downgrade(&pool);
        context.memory.when_out_of_memory(move || {
            if let Some(pool) = kept.upgrade() {
                pool.release_free();
            }
        });
        Self {
            context,
            pool,
            collectives: Arc::default(),
            model: Arc::default(),
        }
    }

    /// This rank.
    pub fn rank(&self) -> Rank {
        self.context.rank()
    }

    /// Number of ranks.
    pub fn world(&self) -> usize {
        self.context.world()
    }

    /// Device that its programs run on.
    pub fn device(&self) -> &dyn Device {
        &*self.context.device
    }

    /// Hardware model of the machine, equal on all ranks. Collective on the first call: every rank makes it at the
    /// same time, and it blocks until all have. Ranks then agree on the model, and measure a machine that was never
    /// measured, which takes a moment.
    ///
    /// # Errors
    /// The errors of [`HardwareModel::find`] on any rank, reported on all.
    pub fn hardware_model(&self) -> Result<&Arc<HardwareModel>> {
        if let Some(model) = self.model.get() {
            return Ok(model);
        }
        let found = self.context.hardware_model()?;
        Ok(self.model.get_or_init(|| found))
    }

    /// Joins the collectives of programs with these options: the communicator's own, or else the vendor's. Collective on
    /// the first call.
    pub(crate) fn join_collectives(&self, options: &PrepareOptions) -> Result<()> {
        if !options.allows_own_collectives() || self.collectives.join(&self.context)?.is_none() {
            self.context.engines.of_all()?;
        }
        Ok(())
    }

    /// Creates a stream of the device.
    pub(crate) fn create_stream(&self) -> Result<Stream> {
        self.context.device.create_stream(Priority::Normal)
    }

    /// Frees pooled memory that no plan uses.
    pub(crate) fn release_free(&self) {
        self.pool.release_free();
    }

    /// Every rank's bytes, in rank order. Blocks until every rank has called it.
    pub(crate) fn all_gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.context.all_gather(bytes)
    }

    /// Fails on every rank if one of them failed before it had a digest, or if digests differ. Blocks until all have
    /// called it.
    pub(crate) fn agree(&self, digest: Result<&Digest, &Error>) -> Result<()> {
        self.context.agree(digest)
    }

    /// Notifies the other ranks, which bind a program, that this one cannot. Blocks until they bind.
    pub(crate) fn give_up_binding(&self, error: &Error) {
        // The result does not matter: this rank fails with its own error in any case.
        let _ = self.context.agree(Err(error));
    }

    /// Keeps `plans` alive until the work enqueued on `stream` so far is complete.
    pub(crate) fn keep_until_done(&self, plans: Vec<Plan>, stream: &Stream) {
        self.context
            .in_flight
            .hold(std::slice::from_ref(stream), plans);
    }

    /// Verifies `program` for this world and unrolls it for this rank. Involves no other rank.
    ///
    /// # Errors
    /// [`ErrorKind::Verification`](crate::ErrorKind::Verification) with every diagnostic, if the program fails;
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) if the parameters do not match its
    /// declaration, or if its kernel sections have more lanes than the options allow.
    pub fn prepare(
        &self,
        program: &Program,
        parameters: &Parameters,
        options: PrepareOptions,
    ) -> Result<Prepared> {
        let (rank, world) = (self.context.rank(), self.context.world());
        let report = if options.verify {
            let verdict = verify(program, world, options.streams, parameters);
            Some(verdict.map_err(|diagnostics| {
                refused(&program.name, &diagnostics)
                    .with_operation(format!("verify '{}' for {world} ranks", program.name))
                    .with_rank(rank)
            })?)
        } else {
            None
        };
        let of_rank = |rank| unroll(program, rank, world, options.streams, parameters);
        let rank_program = of_rank(rank)?;
        let (uses_engine_of_all, needs_library, suits_transfer_kernels) = match &report {
            Some(report) => (
                report.uses_engine_of_all,
                report.needs_library,
                report.suits_transfer_kernels,
            ),
            None => {
                // Unverified programs may not even unroll on other ranks; those are left out, and fail there.
                let others = (0..world).filter(|other| *other != rank);
                let mut all: Vec<_> = others.filter_map(|other| of_rank(other).ok()).collect();
                all.push(rank_program.clone());
                (
                    all.iter().any(RankProgram::uses_engine_of_all),
                    all.iter().any(RankProgram::needs_library),
                    all.iter().all(RankProgram::suits_transfer_kernels),
                )
            }
        };
        let mut digest = Digest::of(program, parameters, options.streams)?;
        if let Some(most) = options.multiprocessors {
            check_lanes(&rank_program, most).map_err(|error| {
                error
                    .with_operation(format!("prepare '{}'", program.name))
                    .with_rank(rank)
            })?;
            // It selects the path and the collectives, so ranks must not differ in it.
            digest = digest.with("multiprocessors", most);
        }
        if options.library {
            digest = digest.with("library", true);
        }
        let direct = !needs_library && options.allows_own_collectives();
        // The caller's stream can have a transfer as well.
        let per_transfer = |most: usize| most / (options.streams + 1);
        Ok(Prepared {
            context: self.context.clone(),
            pool: self.pool.clone(),
            name: program.name.clone(),
            program: Arc::new(rank_program),
            digest: Arc::new(digest),
            uses_engine_of_all,
            collectives: direct.then(|| self.collectives.clone()),
            suits_transfer_kernels,
            multiprocessors_per_transfer: options.multiprocessors.map(per_transfer),
            eager_only: report.and_then(|report| report.eager_only).map(Arc::new),
        })
    }
}

/// Fails if lanes of kernel sections that can run at a time are more than `most`.
fn check_lanes(program: &RankProgram, most: usize) -> Result<()> {
    let mut by_stream: BTreeMap<usize, (usize, u32)> = BTreeMap::new();
    for operation in &program.operations {
        // Kernels of one stream follow one another, so only its largest counts.
        if let Some(section) = operation.kind.section() {
            let largest = by_stream.entry(operation.stream).or_default();
            *largest = (*largest).max((section.lanes, operation.site.line));
        }
    }
    let all: usize = by_stream.values().map(|(lanes, _)| lanes).sum();
    let Some((lanes, line)) = by_stream.into_values().max().filter(|_| all > most) else {
        return Ok(());
    };
    let others = match all - lanes {
        0 => String::new(),
        others => format!(", and kernels on other streams have {others}"),
    };
    let message = format!(
        "the kernel in line {line} has {lanes} lanes{others}; expected at most {most} multiprocessors"
    );
    let help = "give the program fewer lanes, or allow more multiprocessors";
    Err(Error::invalid(message).with_help(help))
}
