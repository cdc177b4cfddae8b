//! Unrolling: a program for one rank, with every loop, branch and expression resolved.
//!
//! What can be seen wrong on one rank alone is found here: names, bounds, shapes, writes to inputs,
//! uses after a deallocation and waits before any post, both in the order of the host.

mod scope;
mod shapes;
mod transfers;

use super::diagnostic::{Diagnostic, DiagnosticKind, Place};
use super::ir::{
    Branch, Collective, Declaration, Direction, Each, Program, Role, Sharding, Statement,
    StatementKind, TensorRef,
};
use super::rank_program::{
    Operation, OperationKind, Parameters, RankProgram, Site, StreamKind, TensorId, TensorInstance,
};
use super::text::DEEPEST_BLOCK;
use crate::error::{Rank, Result};
use scope::{Bound, Named, OpenLoop, View};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// The most steps that a program may take on one rank: statements, iterations and items of lists.
pub const MAX_STEPS: usize = 1 << 20;

/// The most names that are bound at one time.
pub const MAX_NAMES: usize = 4096;

/// The most axes of a tensor.
pub const MAX_AXES: usize = 8;

/// The most ranks that a program is unrolled for.
pub const MAX_RANKS: usize = 4096;

/// The most streams in the pool.
pub const MAX_STREAMS: usize = 256;

/// How many streams of high priority there are.
pub const MAX_HIGH_STREAMS: usize = 16;

/// The program as `rank` of `world` runs it, with `streams` streams in the pool.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) where the arguments are not
/// what the program requires, [`ErrorKind::Verification`](crate::ErrorKind::Verification) where the
/// program is wrong on this rank alone. That the ranks fit together is for
/// [`verify`](super::verify::verify) to say.
pub fn unroll(
    program: &Program,
    rank: Rank,
    world: usize,
    streams: usize,
    parameters: &Parameters,
) -> Result<RankProgram> {
    Ok(unroll_or_diagnose(
        program, rank, world, streams, parameters,
    )?)
}

/// As [`unroll`], with what is wrong as a diagnostic.
///
/// # Errors
/// What is wrong with the arguments or the program.
pub fn unroll_or_diagnose(
    program: &Program,
    rank: Rank,
    world: usize,
    streams: usize,
    parameters: &Parameters,
) -> Result<RankProgram, Diagnostic> {
    let mut unroller = Unroller {
        made: RankProgram {
            rank,
            world,
            streams: vec![StreamKind::Caller],
            tensors: Vec::new(),
            transfers: Vec::new(),
            exchanges: Vec::new(),
            operations: Vec::new(),
        },
        pool: streams,
        current: 0,
        names: Vec::new(),
        loops: Vec::new(),
        transfers: BTreeMap::new(),
        ordinals: HashMap::new(),
        posts: Vec::new(),
        deallocated: HashMap::new(),
        site: Site::default(),
        steps: 0,
        blocks: 0,
    };
    unroller.start(program, parameters)?;
    unroller.block(&program.body)?;
    Ok(unroller.made)
}

struct Unroller<'p> {
    made: RankProgram,
    /// Streams in the pool.
    pool: usize,
    /// The current stream.
    current: usize,
    names: Vec<(&'p str, Bound)>,
    loops: Vec<OpenLoop>,
    transfers: BTreeMap<&'p str, Named>,
    /// How many transfers each direction, peer and tag has.
    ordinals: HashMap<(Direction, Rank, i64), usize>,
    /// How many times each transfer was posted.
    posts: Vec<usize>,
    /// The lines of deallocations.
    deallocated: HashMap<TensorId, u32>,
    site: Site,
    steps: usize,
    /// Blocks that are open.
    blocks: usize,
}

impl<'p> Unroller<'p> {
    fn start(&mut self, program: &'p Program, parameters: &Parameters) -> Result<(), Diagnostic> {
        let (rank, world) = (self.made.rank, self.made.world);
        let requirement = |message: String| {
            let place = Place {
                rank,
                site: Site::default(),
            };
            Err(Diagnostic::new(
                DiagnosticKind::Requirement,
                message,
                vec![place],
            ))
        };
        if rank >= world || world > MAX_RANKS {
            return requirement(format!(
                "rank {rank} of {world} ranks; expected 1 to {MAX_RANKS} ranks, numbered from 0"
            ));
        }
        if self.pool == 0 || self.pool > MAX_STREAMS {
            return requirement(format!(
                "a pool of {} streams; expected 1 to {MAX_STREAMS}",
                self.pool
            ));
        }
        for name in parameters.keys() {
            if !program.parameters.contains(name) {
                return requirement(format!(
                    "unknown parameter '{name}' of '{}'; expected {}",
                    program.name,
                    program.parameters.join(", ")
                ));
            }
        }
        for name in &program.parameters {
            let Some(value) = parameters.get(name) else {
                return requirement(format!(
                    "the parameter '{name}' of '{}' has no value",
                    program.name
                ));
            };
            self.bind(name, Bound::Integer(*value))?;
        }
        Ok(())
    }

    fn block(&mut self, body: &'p [Statement]) -> Result<(), Diagnostic> {
        self.nested(|unroller| body.iter().try_for_each(|next| unroller.statement(next)))
    }

    /// Does `inner` as a block: a scope of its own, nested no deeper than text may be.
    fn nested(
        &mut self,
        inner: impl FnOnce(&mut Self) -> Result<(), Diagnostic>,
    ) -> Result<(), Diagnostic> {
        if self.blocks >= DEEPEST_BLOCK {
            let message = format!("blocks are nested too deep; expected at most {DEEPEST_BLOCK}");
            return Err(self.diagnostic(DiagnosticKind::Malformed, message));
        }
        self.blocks += 1;
        self.scoped(inner)?;
        self.blocks -= 1;
        Ok(())
    }

    fn statement(&mut self, statement: &'p Statement) -> Result<(), Diagnostic> {
        self.step()?;
        self.at_line(statement.line.0);
        match &statement.kind {
            StatementKind::Require(condition) => {
                if !self.condition(condition)? {
                    let mut message = format!("expected {condition}");
                    for (name, bound) in &self.names {
                        if let Bound::Integer(value) = bound {
                            message += &format!(", {name} = {value}");
                        }
                    }
                    message += &format!(", world = {}", self.made.world);
                    return Err(self.diagnostic(DiagnosticKind::Requirement, message));
                }
            }
            StatementKind::Declare(declaration) => self.declare(declaration)?,
            StatementKind::Deallocate(name) => self.deallocate(name)?,
            StatementKind::LetInteger { name, value } => {
                let value = self.integer(value)?;
                self.bind(name, Bound::Integer(value))?;
            }
            StatementKind::LetTensor { name, value } => {
                if value.selections.is_empty() {
                    let message =
                        format!("'{name}' is all of '{}'; expected a part of it", value.name);
                    return Err(self.diagnostic(DiagnosticKind::Malformed, message));
                }
                let view = self.view(value)?;
                self.bind(name, Bound::Tensor(view))?;
            }
            StatementKind::Copy { target, source } => {
                let kind = self.copy(&self.view(target)?, &self.view(source)?)?;
                self.enqueue(kind);
            }
            StatementKind::Matmul {
                target,
                a,
                b,
                bias,
                accumulate,
            } => {
                let bias = bias.as_ref().map(|bias| self.view(bias)).transpose()?;
                let views = (&self.view(target)?, &self.view(a)?, &self.view(b)?);
                let kind = self.matmul(views, bias.as_ref(), *accumulate)?;
                self.enqueue(kind);
            }
            StatementKind::Sum { target, sources } => {
                let target = self.view(target)?;
                let mut views: Vec<View> = Vec::new();
                self.each(sources, |unroller, source| {
                    views.push(unroller.view(source)?);
                    Ok(())
                })?;
                let kind = self.sum(&target, &views)?;
                self.enqueue(kind);
            }
            StatementKind::Collective {
                target,
                source,
                collective,
            } => {
                let root = |root| self.number_below(root, self.made.world, "root");
                let resolved = match collective {
                    Collective::AllGather => Collective::AllGather,
                    Collective::AllReduce(op) => Collective::AllReduce(*op),
                    Collective::ReduceScatter(op) => Collective::ReduceScatter(*op),
                    Collective::Broadcast(from) => Collective::Broadcast(root(from)?),
                    Collective::Reduce(op, to) => Collective::Reduce(*op, root(to)?),
                    Collective::AllToAll => Collective::AllToAll,
                };
                let kind = self.collective(&self.view(target)?, &self.view(source)?, resolved)?;
                self.enqueue(kind);
            }
            StatementKind::Share(items) => self.share(items)?,
            StatementKind::Post(list) => self.post(list)?,
            StatementKind::PostMatmul(each) => self.post_matmul(each)?,
            StatementKind::Wait(list) => self.wait(list)?,
            StatementKind::GetStream(name) => {
                let current = self.current;
                self.bind(name, Bound::Stream(current))?;
            }
            StatementKind::SetStream(stream) => self.current = self.stream(stream)?,
            StatementKind::Synchronize(stream) => {
                let other = self.stream(stream)?;
                // A stream is in order with itself.
                if other != self.current {
                    self.enqueue(OperationKind::Synchronize(other));
                }
            }
            StatementKind::For(it) => {
                let id = std::ptr::from_ref(it).addr();
                self.repeat((id, &it.index), (&it.from, &it.to), |unroller| {
                    unroller.block(&it.body)
                })?;
            }
            StatementKind::If(branch) => {
                let body = self.choose(branch)?;
                self.block(body)?;
            }
        }
        Ok(())
    }

    fn choose<S>(&self, branch: &'p Branch<S>) -> Result<&'p [S], Diagnostic> {
        Ok(if self.condition(&branch.condition)? {
            &branch.then
        } else {
            &branch.otherwise
        })
    }

    fn enqueue(&mut self, kind: OperationKind) {
        let site = self.here();
        self.made.operations.push(Operation {
            kind,
            stream: self.current,
            site,
        });
    }

    /// Calls `with` for each item of a list, repeated as the list says.
    fn each<T>(
        &mut self,
        list: &'p [Each<T>],
        mut with: impl FnMut(&mut Self, &'p T) -> Result<(), Diagnostic>,
    ) -> Result<(), Diagnostic> {
        for each in list {
            let Some(over) = &each.over else {
                self.step()?;
                with(self, &each.item)?;
                continue;
            };
            let (from, to) = (self.integer(&over.from)?, self.integer(&over.to)?);
            for value in from..to {
                self.step()?;
                self.scoped(|unroller| {
                    unroller.bind(&over.index, Bound::Integer(value))?;
                    with(unroller, &each.item)
                })?;
            }
        }
        Ok(())
    }

    fn declare(&mut self, declaration: &'p Declaration) -> Result<(), Diagnostic> {
        let name = &declaration.name;
        if declaration.role != Role::Local && self.blocks > 1 {
            let message = format!("'{name}' is an input or output inside a loop or branch");
            return Err(self.diagnostic(
                DiagnosticKind::Malformed,
                message + "; expected it outside, since it is the same on every rank",
            ));
        }
        let axes = declaration.shape.len();
        let sharded = match declaration.sharding {
            Sharding::Whole => axes > 0,
            Sharding::Loop => axes > 1,
            Sharding::Ranks(axis) => axis < axes,
        };
        if !sharded || axes > MAX_AXES {
            let message = format!(
                "'{name}' has {axes} axes; expected 1 to {MAX_AXES}, with the axis that it is \
                 sharded over among them, and another beside a loop's"
            );
            return Err(self.diagnostic(DiagnosticKind::Mismatch, message));
        }
        let mut shape = Vec::with_capacity(axes);
        // Offsets within it must fit an isize, as of any allocation.
        let (mut bytes, most) = (declaration.dtype.size(), isize::MAX.unsigned_abs());
        for expression in &declaration.shape {
            let value = self.integer(expression)?;
            let extent = usize::try_from(value).ok().filter(|extent| *extent > 0);
            let Some(extent) = extent else {
                let message =
                    format!("extent {expression} of '{name}' is {value}; expected at least 1");
                return Err(self.diagnostic(DiagnosticKind::OutOfBounds, message));
            };
            bytes = match bytes.checked_mul(extent) {
                Some(bytes) if bytes <= most => bytes,
                _ => {
                    let message = format!("'{name}' is too large; expected at most {most} bytes");
                    return Err(self.diagnostic(DiagnosticKind::OutOfBounds, message));
                }
            };
            shape.push(extent);
        }
        let tensor = self.made.tensors.len();
        let site = self.here();
        self.made.tensors.push(TensorInstance {
            name: Arc::from(name.as_str()),
            dtype: declaration.dtype,
            shape: shape.clone(),
            sharding: declaration.sharding,
            bytes,
            role: declaration.role,
            site,
        });
        let view = View {
            tensor,
            dtype: declaration.dtype,
            offset: 0,
            shape,
        };
        self.bind(name, Bound::Tensor(view))?;
        if declaration.role == Role::Local {
            self.enqueue(OperationKind::Allocate(tensor));
        }
        Ok(())
    }

    fn deallocate(&mut self, name: &str) -> Result<(), Diagnostic> {
        let whole = TensorRef {
            name: name.to_owned(),
            selections: Vec::new(),
        };
        let view = self.view(&whole)?;
        let tensor = &self.made.tensors[view.tensor];
        if tensor.role != Role::Local || *tensor.name != *name {
            let message = format!(
                "'{name}' is not allocated by the program; expected the name of an 'allocate'"
            );
            return Err(self.diagnostic(DiagnosticKind::Malformed, message));
        }
        self.deallocated.insert(view.tensor, self.site.line);
        self.enqueue(OperationKind::Deallocate(view.tensor));
        Ok(())
    }
}
