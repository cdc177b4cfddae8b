//! Unrolling: a program for one rank, with every loop, branch and expression resolved.
//!
//! Errors that one rank alone shows are found here: names, bounds, shapes, writes to inputs,
//! uses after a deallocation and waits before any post, both in the order of the host.

mod call;
mod collective;
mod declare;
mod expect;
mod kernel;
mod scope;
mod select;
mod shapes;
mod transfers;
mod view;
mod words;
mod zeros;

pub(super) use collective::ranks_of;
pub(super) use words::{ReadInput, expected_of};

use super::diagnostic::{Diagnostic, DiagnosticKind, RankSite};
use super::expr::Expr;
use super::grid::grids;
use super::ir::{
    Branch, Collective, Direction, Each, Node, NodeKind, Position, Program, Selection, Statement,
    StatementKind, TensorRef,
};
use super::parameters::{Parameter, Parameters};
use super::rank_program::{Operation, OperationKind, RankProgram, Site, StreamKind, TensorId};
use super::text::MAX_BLOCK_DEPTH;
use crate::error::{Rank, Result};
use call::Called;
use rustc_hash::{FxHashMap, FxHashSet};
use scope::{Bound, Named, OpenLoop};
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use view::View;
use words::Words;
use zeros::Zeros;

/// The most steps that a program may take on one rank: statements, iterations and items of lists.
pub const MAX_STEPS: usize = 1 << 20;

/// The most steps on all ranks together.
pub const MAX_ALL_STEPS: usize = 1 << 23;

/// The most operations of all ranks together.
pub const MAX_OPERATIONS: usize = 1 << 21;

/// The most transfers of all ranks together, counted at both ends.
pub const MAX_TRANSFERS: usize = 1 << 20;

/// How many terms of expressions are evaluated for the work of a step.
const WORK_PER_STEP: usize = 8;

/// The most names that are bound at one time.
pub const MAX_NAMES: usize = 4096;

/// Maximum number of names whose values a message shows.
const MAX_NAMES_SHOWN: usize = 32;

/// The most axes of a tensor.
pub const MAX_AXES: usize = 8;

/// The most bytes of a tensor, more than any device has.
pub const MAX_TENSOR_BYTES: usize = 1 << 44;

/// Tags are from minus this to below this, so that they differ in the bits that travel.
pub const TAG_LIMIT: i64 = 1 << 62;

/// The most ranks that a program is unrolled for.
pub const MAX_RANKS: usize = 4096;

/// The most streams in the pool.
pub const MAX_STREAMS: usize = 256;

/// The most different lists of ranks whose collectives a rank takes part in, since each needs resources of
/// the engine.
pub const MAX_PARTS: usize = 64;

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

/// As [`unroll`], but returns a diagnostic on failure.
///
/// # Errors
/// An error in the arguments or the program.
pub fn unroll_or_diagnose(
    program: &Program,
    rank: Rank,
    world: usize,
    streams: usize,
    parameters: &Parameters,
) -> Result<RankProgram, Diagnostic> {
    let mut budget = Budget::default();
    unroll_within(&mut budget, program, rank, (world, streams), parameters)
}

/// Resources that all ranks together may still use.
#[derive(Clone, Debug)]
pub(super) struct Budget {
    steps: usize,
    operations: usize,
    transfers: usize,
    /// Whether a rank was refused for want of it.
    pub(super) exhausted: bool,
}

impl Default for Budget {
    fn default() -> Self {
        Self {
            steps: MAX_ALL_STEPS,
            operations: MAX_OPERATIONS,
            transfers: MAX_TRANSFERS,
            exhausted: false,
        }
    }
}

/// As [`unroll_or_diagnose`], for one of several ranks that share a budget.
pub(super) fn unroll_within(
    budget: &mut Budget,
    program: &Program,
    rank: Rank,
    (world, streams): (usize, usize),
    parameters: &Parameters,
) -> Result<RankProgram, Diagnostic> {
    unroll_knowing(budget, program, rank, (world, streams), parameters, None)
}

/// As [`unroll_within`], with the contents of inputs where they are known.
fn unroll_knowing(
    budget: &mut Budget,
    program: &Program,
    rank: Rank,
    (world, streams): (usize, usize),
    parameters: &Parameters,
    inputs: Option<&ReadInput<'_>>,
) -> Result<RankProgram, Diagnostic> {
    let mut unroller = Unroller {
        made: RankProgram {
            rank,
            world,
            streams: vec![StreamKind::Caller],
            tensors: Vec::new(),
            scratch: Vec::new(),
            transfers: Vec::new(),
            exchanges: Vec::new(),
            operations: Vec::new(),
            in_place: Vec::new(),
            expected: Vec::new(),
            expects_words: false,
            grids: HashMap::new(),
        },
        pool: streams,
        current: 0,
        names: Vec::new(),
        bound: FxHashMap::default(),
        valid_names: FxHashSet::default(),
        loops: Vec::new(),
        transfers: BTreeMap::new(),
        parts: HashSet::new(),
        ordinals: HashMap::new(),
        posts: Vec::new(),
        deallocated: HashMap::new(),
        zeros: Zeros::default(),
        site: Site::default(),
        called: Called::outermost(&program.subprograms),
        given: BTreeSet::new(),
        optional: BTreeMap::new(),
        budget: budget.clone(),
        steps: 0,
        work: Cell::new(0),
        blocks: 0,
        words: Words::of(inputs),
    };
    let outcome = unroller
        .start(program, parameters)
        .and_then(|()| unroller.block(&program.body));
    unroller.finish_zeros();
    // After the zeros, which are accesses as well.
    let outcome = outcome.and_then(|()| unroller.cut());
    budget.exhausted = unroller.budget.exhausted;
    // Also after an error: diagnosing every rank of a large program must not take a budget each.
    budget.steps = budget.steps.saturating_sub(unroller.steps());
    let mut made = unroller.made;
    made.expects_words = unroller.words.are_read.get();
    kernel::mark_inputs(&mut made);
    budget.operations = budget.operations.saturating_sub(made.operations.len());
    budget.transfers = budget.transfers.saturating_sub(made.transfers.len());
    outcome.map(|()| made)
}

struct Unroller<'p> {
    made: RankProgram,
    /// Streams in the pool.
    pool: usize,
    /// The current stream.
    current: usize,
    /// The names that have a meaning, in the order in which they got it.
    names: Vec<&'p str>,
    /// Hashed quickly: unrolling a step looks up every name in it.
    bound: FxHashMap<&'p str, Bound>,
    /// The names that were checked, of loops for instance.
    valid_names: FxHashSet<&'p str>,
    loops: Vec<OpenLoop>,
    transfers: BTreeMap<&'p str, Named>,
    /// The lists of ranks whose collectives this rank takes part in.
    parts: HashSet<Arc<[Rank]>>,
    /// How many transfers each direction, peer and tag has.
    ordinals: HashMap<(Direction, Rank, i64), usize>,
    /// How many times each transfer was posted.
    posts: Vec<usize>,
    /// Where tensors are deallocated.
    deallocated: HashMap<TensorId, Position>,
    /// Parts of zero-initialized tensors that nothing has written.
    zeros: Zeros,
    site: Site,
    /// State of the called or main program.
    called: Called<'p>,
    /// The optional tensors that the caller binds.
    given: BTreeSet<String>,
    /// The optional tensors declared so far, and whether the caller binds them.
    optional: BTreeMap<&'p str, bool>,
    budget: Budget,
    steps: usize,
    /// Terms of expressions that were evaluated.
    work: Cell<usize>,
    /// Blocks that are open.
    blocks: usize,
    words: Words<'p>,
}

impl<'p> Unroller<'p> {
    fn start(&mut self, program: &'p Program, parameters: &Parameters) -> Result<(), Diagnostic> {
        let (rank, world) = (self.made.rank, self.made.world);
        let requirement = |message: String| {
            let place = RankSite::new(rank, &Site::default());
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
        if program.parameters.len() > MAX_NAMES {
            return requirement(format!(
                "'{}' has {} parameters; expected at most {MAX_NAMES}",
                program.name,
                program.parameters.len()
            ));
        }
        let names: HashSet<&str> = program.parameters.iter().map(|p| &*p.name).collect();
        for (name, _) in parameters.iter() {
            if !names.contains(name) {
                let names: Vec<&str> = program.parameters.iter().map(|p| &*p.name).collect();
                return requirement(format!(
                    "unknown parameter '{name}' of '{}'; expected {}",
                    program.name,
                    names.join(", ")
                ));
            }
        }
        for tensor in parameters.tensors() {
            let declares = |statement: &Statement| match &statement.kind {
                NodeKind::Do(StatementKind::Declare(it)) => it.optional && it.name == *tensor,
                _ => false,
            };
            if !program.body.iter().any(declares) {
                let name = &program.name;
                return requirement(format!("unknown optional tensor '{tensor}' of '{name}'"));
            }
        }
        self.given = parameters.tensors().map(str::to_owned).collect();
        let missing: Vec<&Parameter> = parameters.missing(&program.parameters).collect();
        if let [first, others @ ..] = &missing[..] {
            let (name, kind, of) = (&first.name, &first.kind, &program.name);
            let mut names = format!("'{name}' ({kind})");
            for other in others.iter().take(MAX_NAMES_SHOWN) {
                names += &format!(", '{}' ({})", other.name, other.kind);
            }
            return requirement(match others {
                [] => format!("the parameter '{name}' of '{of}' has no value; expected {kind}"),
                _ => format!(
                    "the parameters {names} of '{of}' have no values; expected one for each"
                ),
            });
        }
        for parameter in &program.parameters {
            let name = &parameter.name;
            let bound = match parameters.resolve(parameter) {
                Ok(value) => value.into(),
                Err(error) => {
                    return requirement(format!("'{}': {}", program.name, error.message()));
                }
            };
            self.bind(name, bound)?;
        }
        Ok(())
    }

    fn block(&mut self, body: &'p [Statement]) -> Result<(), Diagnostic> {
        self.nodes(body, &mut Self::statement)
    }

    /// Goes through a block, and does its actions with `act`.
    fn nodes<A>(
        &mut self,
        body: &'p [Node<A>],
        act: &mut dyn FnMut(&mut Self, &'p A) -> Result<(), Diagnostic>,
    ) -> Result<(), Diagnostic> {
        self.nested(|unroller| body.iter().try_for_each(|node| unroller.node(node, act)))
    }

    fn node<A>(
        &mut self,
        node: &'p Node<A>,
        act: &mut dyn FnMut(&mut Self, &'p A) -> Result<(), Diagnostic>,
    ) -> Result<(), Diagnostic> {
        // Every statement counts, so that loops of nothing end at the limit.
        self.step()?;
        self.at(node.position);
        match &node.kind {
            NodeKind::LetInteger { name, value } => {
                let value = self.integer(value)?;
                self.bind(name, Bound::Integer(value))
            }
            NodeKind::LetTensor { name, value } => self.alias(name, value),
            NodeKind::For(it) => {
                // Transfers are keyed by the loops around them; the address identifies a loop in the tree, which does
                // not move.
                let id = std::ptr::from_ref(it).addr();
                self.repeat(id, &it.over, |unroller| unroller.nodes(&it.body, act))
            }
            NodeKind::If(branch) => {
                let body = self.choose(branch)?;
                self.nodes(body, act)
            }
            NodeKind::Do(action) => act(self, action),
        }
    }

    /// `let name = value`, where the value may be an element of a list.
    fn alias(&mut self, name: &'p str, value: &TensorRef) -> Result<(), Diagnostic> {
        if let Some(Bound::List(_)) = self.lookup(&value.name)
            && !value.transposed
            && let [Selection::Index(index)] = &value.selections[..]
        {
            let element = Expr::Element(value.name.clone(), Box::new(index.clone()));
            let element = self.integer(&element)?;
            return self.bind(name, Bound::Integer(element));
        }
        // Two names for one tensor would let a program deallocate it by one and use it by the other.
        if value.selections.is_empty() && !value.transposed {
            let message = format!("'{name}' is all of '{}'; expected a part of it", value.name);
            return Err(self.malformed(message));
        }
        let view = self.view(value)?;
        self.bind(name, Bound::Tensor(view))
    }

    /// Does `inner` as a block: a scope of its own, nested no deeper than text may be.
    fn nested(
        &mut self,
        inner: impl FnOnce(&mut Self) -> Result<(), Diagnostic>,
    ) -> Result<(), Diagnostic> {
        if self.blocks >= MAX_BLOCK_DEPTH {
            let message = format!("blocks are nested too deep; expected at most {MAX_BLOCK_DEPTH}");
            return Err(self.malformed(message));
        }
        self.blocks += 1;
        let (words, indices) = (self.words.bound, Arc::clone(&self.site.indices));
        self.scoped(inner)?;
        (self.words.bound, self.site.indices) = (words, indices);
        self.blocks -= 1;
        Ok(())
    }

    fn statement(&mut self, kind: &'p StatementKind) -> Result<(), Diagnostic> {
        self.check_words(kind)?;
        match kind {
            StatementKind::Require(condition) => {
                if !self.condition(condition)? {
                    return Err(self.unmet(condition));
                }
            }
            StatementKind::Declare(declaration) => self.declare(declaration)?,
            StatementKind::Deallocate(name) => self.deallocate(name)?,
            StatementKind::LetList { name, elements } => {
                let mut values = Vec::new();
                self.each(elements, |unroller, element| {
                    values.push(unroller.integer(element)?);
                    Ok(())
                })?;
                self.bind(name, Bound::List(values.into()))?;
            }
            StatementKind::Copy { target, source } => {
                let kind = self.copy(&self.view(target)?, &self.view(source)?)?;
                self.enqueue(kind);
            }
            StatementKind::Matmul {
                target,
                product,
                accumulate,
            } => {
                let operands = self.operands(product)?;
                let kind = self.matmul(&self.view(target)?, &operands, *accumulate)?;
                self.enqueue(kind);
            }
            StatementKind::Elementwise {
                op,
                target,
                sources,
                accumulate,
            } => {
                let target = self.view(target)?;
                let mut views: Vec<View> = Vec::new();
                if *accumulate {
                    // `+=` reads its target: it becomes the first source, which the accesses then show.
                    views.push(target.clone());
                }
                self.each(sources, |unroller, source| {
                    views.push(unroller.view(source)?);
                    Ok(())
                })?;
                let kind = self.elementwise(*op, &target, &views)?;
                self.enqueue(kind);
            }
            StatementKind::Collective {
                target,
                source,
                collective,
                among,
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
                let members = among.as_deref().map(|list| self.members(list));
                let members = members.transpose()?.flatten();
                let (target, source) = (self.view(target)?, self.view(source)?);
                let kind = self.collective(&target, &source, resolved, members)?;
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
            StatementKind::Fork { streams, body } => self.fork(streams, body)?,
            StatementKind::Call { program, arguments } => self.call(program, arguments)?,
            StatementKind::Scratch(scratch) => self.scratch(scratch)?,
            StatementKind::Function(function) => self.function(function)?,
            StatementKind::Kernel(section) => self.kernel(section)?,
            StatementKind::InOut { tensor, part } => self.in_place(tensor, part)?,
            StatementKind::Value(it) => self.input_value(it)?,
            StatementKind::Expect(it) => self.expecting(|unroller| unroller.expectation(it))?,
            StatementKind::ExpectRows(it) => {
                self.expecting(|unroller| unroller.expected_row(it))?
            }
        }
        Ok(())
    }

    /// The body of the first arm whose condition holds.
    fn choose<A>(&mut self, branch: &'p Branch<A>) -> Result<&'p [Node<A>], Diagnostic> {
        for arm in &branch.arms {
            self.step()?;
            self.at(arm.position);
            if self.condition(&arm.condition)? {
                return Ok(&arm.body);
            }
        }
        Ok(&branch.otherwise)
    }

    fn enqueue(&mut self, kind: OperationKind) {
        let kind = self.with_zeros(kind);
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

    /// Divides each tensor with non-contiguous accesses into pieces, and counts the pieces that each operation accesses.
    fn cut(&mut self) -> Result<(), Diagnostic> {
        self.made.grids = grids(&self.made.tensors, self.made.all_areas());
        if self.made.grids.is_empty() {
            return Ok(());
        }
        let cells = self.made.grids.values().map(|grid| grid.cells());
        // The verifier keeps state for each cell, so that a grid's size counts like steps.
        self.steps = cells.fold(self.steps, usize::saturating_add);
        for index in 0..self.made.operations.len() {
            let operation = &self.made.operations[index];
            let areas = self.made.areas(&operation.kind);
            let cut = areas.filter_map(|area| {
                let grid = self.made.grids.get(&area.span.tensor)?;
                Some(grid.cells_of(&area))
            });
            let steps = cut.fold(self.steps, usize::saturating_add);
            let position = operation.site.position();
            self.at(position);
            self.steps = steps;
            self.step()?;
        }
        Ok(())
    }
}
