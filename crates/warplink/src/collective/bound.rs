//! Calls that are bound to their memory: what ranks tell one another of it once, calls need not find out.

use super::Collectives;
use super::algorithm::{Algorithm, copies_in_place};
use super::call::Call;
use super::choice::Choice;
use super::enqueue::Uses;
use super::join::{Server, cannot_map};
use super::launches::Overlap;
use crate::device::{DeviceSlice, Stream};
use crate::error::{Error, ErrorKind, Rank, Result};
use crate::p2p::Path;
use crate::program::execute::{Bindings, Executor, Plan, PrepareOptions, RankContext};
use std::fmt;
use std::sync::Arc;

/// A call of a collective that is bound to memory, to be made as often as one likes
/// ([`Collectives::bind`]). Clones are the same. It keeps its memory.
#[derive(Clone)]
pub struct BoundCall(Arc<Bound>);

struct Bound {
    collectives: Collectives,
    call: Call,
    /// None where the vendor's library does it.
    choice: Option<Choice>,
    way: Way,
}

/// How calls are made.
enum Way {
    /// As those on any memory.
    Any {
        uses: Uses,
        output: DeviceSlice,
        input: DeviceSlice,
    },
    /// By the program that uses the copy engine.
    Copies(Box<Plan>),
}

impl fmt::Debug for BoundCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BoundCall")
            .field("call", &self.0.call)
            .field("choice", &self.0.choice)
            .finish_non_exhaustive()
    }
}

impl BoundCall {
    /// What is called. Where nothing is reduced, in bytes.
    pub fn call(&self) -> &Call {
        &self.0.call
    }

    /// How it is done; `None` where the vendor's library does it.
    pub fn choice(&self) -> Option<Choice> {
        self.0.choice
    }

    /// Enqueues the call once. It counts as a call of its [`Collectives`]: all ranks make it in the same order among
    /// the others. It may be captured; a graph does not keep what was bound. Does not block.
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
            Way::Any {
                uses,
                output,
                input,
            } => collectives.enqueue_checked(call, *uses, (output, input), stream),
            Way::Copies(plan) => {
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
    /// Binds a call to memory, for calls that are made again and again on the same: ranks tell one another where it lies
    /// once. So the copy engine can do large all-gathers and all-to-alls ([`Algorithm::CopyEngine`]), which moves more bytes
    /// a second than kernels and leaves the multiprocessors to others. Every other call is made as without binding. Every
    /// rank binds the same call at the same time. Blocks until all have: all succeed, or none. It also compiles the kernel of the
    /// call.
    ///
    /// Where peers cannot map the memory, the call is made as without binding too, unless the options allow the copy engine
    /// alone.
    ///
    /// # Errors
    /// Of the arguments, those of [`enqueue`](Self::enqueue); [`ErrorKind::Unsupported`] where the options ask for an
    /// algorithm that does not do the call;
    /// [`ErrorKind::Mismatch`] where ranks bind different calls, with the peer and both calls;
    /// [`ErrorKind::PeerFailed`] where another rank fails; [`ErrorKind::Timeout`], which names a rank that does not bind.
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
        // Those that do not know of a fault yet would wait for a rank that does.
        let checked = context.fault.check();
        let checked = checked.and_then(|()| self.uses(call, output, input));
        let (call, uses) = context.agree_on(checked)?;
        let overlap = self.overlap_of_all(&call, uses.overlap)?;
        let direct = matches!(inner.server(&call)?, Server::Direct(_));
        // The lanes beside the copy engine are a launch.
        let copies = direct && self.too_long(&call).is_none();
        let copied = match overlap.filter(|_| copies) {
            Some(overlap) => self.by_copies(&call, (output, input), overlap)?,
            None => None,
        };
        let (choice, way) = match copied {
            Some((choice, plan)) => (Some(choice), Way::Copies(Box::new(plan))),
            None => {
                context.agree_on(self.prepare(&call))?;
                let choice = direct.then(|| inner.machine.choose(&call)).transpose()?;
                let way = Way::Any {
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

    /// How input and output lie to each other on all ranks; `None` where that differs. Fails where ranks bind different
    /// calls.
    fn overlap_of_all(&self, call: &Call, own: Overlap) -> Result<Option<Overlap>> {
        let words = call.words(0);
        let mut told: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        told.push(u8::from(own == Overlap::Shared));
        let all = self.0.context.gather_in_step(&told)?;
        for (peer, theirs) in all.iter().enumerate() {
            let (theirs, _) = theirs.as_chunks::<4>();
            let theirs: Vec<u32> = theirs.iter().copied().map(u32::from_le_bytes).collect();
            if theirs != words {
                let text = Call::difference(&words, &theirs);
                return Err(Error::new(ErrorKind::Mismatch, text)
                    .with_peer(peer)
                    .with_help("bind the same calls in the same order on every rank"));
            }
        }
        Ok(all.iter().all(|theirs| *theirs == told).then_some(own))
    }

    /// The call by the copy engine, where that is to do it and can. Blocks until all ranks have asked.
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
        match self.plan(call, &choice, memory, overlap) {
            Ok(plan) => Ok(Some((choice, plan))),
            Err(error) => self.check_unmapped(error).map(|()| None),
        }
    }

    /// Fails where binding for the copy engine failed on a rank for another reason than that memory cannot be mapped, or
    /// where no other way is allowed. Blocks until all ranks, on which it failed too, have asked.
    fn check_unmapped(&self, error: Error) -> Result<()> {
        let inner = &self.0;
        let fault = inner.context.fault.check();
        let other = fault.is_err() || inner.machine.forced.is_some() || !cannot_map(&error);
        let all = inner.context.gather_in_step(&[u8::from(other)])?;
        fault?;
        if all.iter().all(|other| other == &[0]) {
            tracing::info!(%error, "a bound call goes by kernels");
            return Ok(());
        }
        Err(error)
    }

    /// The program that uses the copy engine, bound to memory. Blocks until all ranks have bound theirs.
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
            .unwrap_or_else(|| {
                Err(Error::new(
                    ErrorKind::Internal,
                    "the chosen program does not exist",
                ))
            })
            .and_then(|program| {
                let parameters = self.0.machine.parameters(call, choice);
                // Tests have verified it for every world, as the programs of other calls.
                let options = PrepareOptions {
                    streams: 1,
                    verify: false,
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

    /// Runs programs of bound calls.
    fn executor(&self) -> &Executor {
        self.0.executor.get_or_init(|| {
            Executor::new(RankContext {
                path: Some(Path::CopyEngine),
                ..self.0.context.clone()
            })
        })
    }
}

/// The other ranks' parts of an output, by the names that the program has for them.
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
