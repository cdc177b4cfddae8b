//! Bound calls: ranks exchange the addresses of a call's memory once instead of in every call.

use super::Collectives;
use super::algorithm::{Algorithm, copies_in_place};
use super::call::{Call, Overlap};
use super::choice::Choice;
use super::diagnosis::difference;
use super::enqueue::Uses;
use super::join::{CallPath, cannot_map};
use crate::debug::debug_fields;
use crate::device::{DeviceSlice, Stream};
#[cfg(doc)]
use crate::error::ErrorKind;
use crate::error::{Error, Rank, Result};
use crate::p2p::Path;
use crate::program::execute::{Bindings, Executor, Plan, PrepareOptions, RankContext};
use std::sync::Arc;

/// A call of a collective bound to fixed memory, which it keeps alive ([`Collectives::bind`]). Clones share
/// the binding.
#[derive(Clone)]
pub struct BoundCall(Arc<Bound>);

struct Bound {
    collectives: Collectives,
    call: Call,
    /// None if the vendor's library executes it.
    choice: Option<Choice>,
    way: Strategy,
}

/// Execution strategy.
enum Strategy {
    /// As a call on any memory.
    Any {
        uses: Uses,
        output: DeviceSlice,
        input: DeviceSlice,
    },
    /// The program that uses the copy engine.
    Copies(Box<Plan>),
}

debug_fields!(BoundCall, |it| call: it.0.call, choice: it.0.choice);

impl BoundCall {
    /// The call; in bytes if it does not reduce.
    pub fn call(&self) -> &Call {
        &self.0.call
    }

    /// How it is executed; `None` for the vendor's library.
    pub fn choice(&self) -> Option<Choice> {
        self.0.choice
    }

    /// Enqueues the call once. It counts as a call of its [`Collectives`]: all ranks make it in the same
    /// order among the others. May be captured; a graph does not keep the binding alive. Does not block.
    ///
    /// # Errors
    /// As [`Collectives::all_reduce`].
    pub fn enqueue(&self, stream: &Stream) -> Result<()> {
        let Bound {
            collectives,
            call,
            way,
            ..
        } = &*self.0;
        match way {
            Strategy::Any {
                uses,
                output,
                input,
            } => collectives.enqueue_checked(call, *uses, (output, input), stream),
            Strategy::Copies(plan) => {
                collectives.0.context.fault.check()?;
                collectives.in_turn(call, stream, |is_recorded| {
                    if is_recorded {
                        plan.run_recorded(stream)
                    } else {
                        plan.run(stream)
                    }
                })
            }
        }
    }
}

impl Collectives {
    /// Binds a call to memory that will be used repeatedly, by exchanging addresses among the ranks once. The
    /// copy engine can then execute large all-gathers and all-to-alls ([`Algorithm::CopyEngine`]), with more
    /// bandwidth than kernels, and without occupying multiprocessors. Other calls execute as without binding.
    /// Collective: every rank binds the same call at the same time, and all succeed or none. Blocks until all
    /// have. Also compiles the call's kernel.
    ///
    /// If peers cannot map the memory, the call executes as without binding too, unless the options allow
    /// only the copy engine.
    ///
    /// # Errors
    /// For invalid arguments as [`enqueue`](Self::enqueue); [`ErrorKind::Unsupported`] if the options require
    /// an algorithm that does not implement the call; [`ErrorKind::Mismatch`] if ranks bind different calls,
    /// with the peer and both calls; [`ErrorKind::PeerFailed`] if another rank fails; [`ErrorKind::Timeout`],
    /// naming a rank that does not bind.
    pub fn bind(
        &self,
        call: &Call,
        output: &DeviceSlice,
        input: &DeviceSlice,
    ) -> Result<BoundCall> {
        let context = &self.0.context;
        let bound = context
            .fault
            .with_outcome(self.bind_with_all(call, output, input));
        bound.map_err(|error| {
            error
                .with_operation(format!("bind {}", call.kind))
                .with_rank(context.rank())
        })
    }

    fn bind_with_all(
        &self,
        call: &Call,
        output: &DeviceSlice,
        input: &DeviceSlice,
    ) -> Result<BoundCall> {
        let inner = &self.0;
        let context = &inner.context;
        // Ranks that have not seen a fault yet would wait for a rank that has.
        let checked = context.fault.check();
        let checked = checked.and_then(|()| self.uses(call, output, input));
        // Also where an argument is wrong on one rank alone: the others would wait for it in the steps below.
        let (call, uses) = context.agree_on(checked)?;
        // Overlap may differ between ranks; then the copy engine's program, which depends on it, is not used.
        let overlap = self.overlap_of_all(&call, uses.overlap)?;
        let direct = matches!(inner.path_for(&call)?, CallPath::Direct(_));
        // The lanes that run concurrently with the copy engine are one launch.
        let copies = direct && self.too_long(&call).is_none();
        let copied = match overlap.filter(|_| copies) {
            Some(overlap) => self.by_copies(&call, (output, input), overlap)?,
            None => None,
        };
        let (choice, way) = match copied {
            Some((choice, plan)) => (Some(choice), Strategy::Copies(Box::new(plan))),
            None => {
                // Compiles the kernel now, so that later calls do not block.
                context.agree_on(self.prepare(&call))?;
                let choice = direct.then(|| inner.machine.choose(&call)).transpose()?;
                let way = Strategy::Any {
                    uses,
                    output: output.clone(),
                    input: input.clone(),
                };
                (choice, way)
            }
        };
        Ok(BoundCall(Arc::new(Bound {
            collectives: self.clone(),
            call,
            choice,
            way,
        })))
    }

    /// Overlap of input and output on all ranks; `None` if it differs. Fails if ranks bind different calls.
    fn overlap_of_all(&self, call: &Call, own: Overlap) -> Result<Option<Overlap>> {
        // Without an algorithm, which is chosen only after the calls are known to be equal.
        let words = call.words(0);
        let statement = (words, own == Overlap::Shared);
        let exchange = self.0.context.exchange();
        let all: Vec<([u32; 4], bool)> = exchange.gather("bind a call", Ok(&statement))?;
        if let Some(peer) = all.iter().position(|(theirs, _)| *theirs != words) {
            return Err(Error::mismatch(difference(&words, &all[peer].0))
                .with_peer(peer)
                .with_help("bind the same calls in the same order on every rank"));
        }
        Ok(all.iter().all(|theirs| *theirs == statement).then_some(own))
    }

    /// Binds the call to the copy engine's program, if that is requested and possible. Blocks until all ranks
    /// have answered.
    fn by_copies(
        &self,
        call: &Call,
        memory: (&DeviceSlice, &DeviceSlice),
        overlap: Overlap,
    ) -> Result<Option<(Choice, Plan)>> {
        let choice = self.0.machine.choose_bound(call, overlap)?;
        if choice.algorithm != Algorithm::CopyEngine {
            return Ok(None);
        }
        // Unmappable memory is not an error: fall back to kernels.
        match self.plan(call, &choice, memory, overlap) {
            Ok(plan) => Ok(Some((choice, plan))),
            Err(error) => self.check_unmapped(error).map(|()| None),
        }
    }

    /// Fails if binding failed on some rank for a reason other than unmappable memory, or no alternative is
    /// allowed. Blocks until all ranks, on which it failed too, have answered.
    fn check_unmapped(&self, error: Error) -> Result<()> {
        let inner = &self.0;
        let fault = inner.context.fault.check();
        let other = fault.is_err() || inner.machine.forced.is_some() || !cannot_map(&error);
        let all = inner.context.all_gather(&[u8::from(other)])?;
        fault?;
        if all.iter().all(|other| other == &[0]) {
            tracing::info!(%error, "a bound call uses kernels, since its memory cannot be mapped");
            return Ok(());
        }
        Err(error)
    }

    /// Binds the copy engine's program to memory. Blocks until all ranks have bound.
    fn plan(
        &self,
        call: &Call,
        choice: &Choice,
        (output, input): (&DeviceSlice, &DeviceSlice),
        overlap: Overlap,
    ) -> Result<Plan> {
        let context = &self.0.context;
        let program = match overlap {
            Overlap::Apart => Algorithm::CopyEngine.program(call.kind),
            Overlap::Shared => copies_in_place(call.kind),
        };
        let prepared = program
            .unwrap_or_else(|| Err(Error::internal("the chosen program does not exist")))
            .and_then(|program| {
                let parameters = self.0.machine.parameters(call, choice);
                // Tests have verified it for every world, like other programs.
                let options = PrepareOptions {
                    // The program uses one pool stream for its lanes beside the copies.
                    streams: 1,
                    verify: false,
                    ..PrepareOptions::default()
                };
                self.executor().prepare(program, &parameters, options)
            });
        let memory = match overlap {
            Overlap::Apart => Ok(Bindings::from([
                ("X".to_owned(), input.clone()),
                ("Y".to_owned(), output.clone()),
            ])),
            Overlap::Shared => parts_of_others(call, (context.rank(), context.world()), output)
                .map(|mut parts| {
                    parts.insert("X".to_owned(), input.clone());
                    parts
                }),
        };
        let ready = prepared.and_then(|prepared| Ok((prepared, memory?)));
        let (prepared, memory) = context.agree_on(ready)?;
        prepared.bind(&memory)
    }

    /// Executor of bound calls' programs.
    fn executor(&self) -> &Executor {
        // Created on first use: most communicators bind nothing.
        self.0.executor.get_or_init(|| {
            Executor::new(RankContext {
                // A path of kernels would take the multiprocessors that such calls are to leave free.
                path: Some(Path::CopyEngine),
                ..self.0.context.clone()
            })
        })
    }
}

/// The other ranks' parts of an output, by their names in the program.
fn parts_of_others(
    call: &Call,
    (rank, world): (Rank, usize),
    output: &DeviceSlice,
) -> Result<Bindings> {
    let bytes = call.bytes();
    let parts = (1..world).map(|before| {
        let of = (rank + world - before) % world;
        let part = output.slice(of * bytes..(of + 1) * bytes)?;
        Ok((format!("Y[{}]", before - 1), part))
    });
    parts.collect()
}
