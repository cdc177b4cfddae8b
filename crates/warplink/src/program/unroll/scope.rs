//! Names and what they stand for while a program is unrolled.

use super::view::View;
use super::{
    MAX_ALL_STEPS, MAX_NAMES, MAX_NAMES_SHOWN, MAX_OPERATIONS, MAX_STEPS, MAX_TRANSFERS, Unroller,
    WORK_PER_STEP,
};
use crate::device::ReduceOp;
use crate::dtype::DType;
use crate::program::diagnostic::{Diagnostic, DiagnosticKind, RankSite};
use crate::program::expr::{Condition, Expr, below, shortened};
use crate::program::ir::{Each, Over, Position, Statement, StreamRef, TransferRef};
use crate::program::parameters::Value;
use crate::program::rank_program::{OperationKind, Site, StreamKind, TransferId};
use crate::program::section::{RowFunction, ScratchId};
use crate::program::site::with_index;
use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

/// Meaning of a name.
#[derive(Clone, Debug)]
pub(super) enum Bound {
    Integer(i64),
    List(Rc<[i64]>),
    ElementType(DType),
    Operator(ReduceOp),
    Tensor(View),
    Scratch(ScratchId),
    /// A function of rows.
    Function(Arc<RowFunction>),
    /// A family of tensors, by index.
    Family(Rc<[View]>),
    /// An optional input that the caller leaves out.
    Absent,
    Stream(usize),
}

impl From<Value> for Bound {
    fn from(value: Value) -> Self {
        match value {
            Value::Integer(value) => Self::Integer(value),
            Value::List(values) => Self::List(values.into()),
            Value::ElementType(dtype) => Self::ElementType(dtype),
            Value::Operator(operator) => Self::Operator(operator),
        }
    }
}

/// A loop that is open.
#[derive(Clone, Debug)]
pub(super) struct OpenLoop {
    /// Which loop of the text; the address of its node.
    pub(super) id: usize,
    pub(super) value: i64,
}

/// The transfers of one name.
pub(super) struct Named {
    pub(super) name: Arc<str>,
    /// The loops around each of the name's declarations.
    pub(super) paths: Vec<Vec<usize>>,
    pub(super) instances: Instances,
}

/// The transfers of one name by the values of the loops around them.
#[derive(Default)]
pub(super) struct Instances {
    /// The one outside of loops, which needs no search.
    single: Option<TransferId>,
    in_loops: HashMap<Vec<i64>, TransferId>,
}

impl Instances {
    pub(super) fn get(&self, values: &[i64]) -> Option<TransferId> {
        if values.is_empty() {
            return self.single;
        }
        self.in_loops.get(values).copied()
    }

    /// Enters a transfer, and gives the one that was there.
    pub(super) fn insert(&mut self, values: Vec<i64>, id: TransferId) -> Option<TransferId> {
        if values.is_empty() {
            return self.single.replace(id);
        }
        self.in_loops.insert(values, id)
    }
}

impl<'p> Unroller<'p> {
    pub(super) fn diagnostic(
        &self,
        kind: DiagnosticKind,
        message: impl Into<String>,
    ) -> Diagnostic {
        let place = RankSite::new(self.made.rank, &self.site);
        Diagnostic::new(kind, format!("{place}: {}", message.into()), vec![place])
    }

    pub(super) fn malformed(&self, message: impl Into<String>) -> Diagnostic {
        self.diagnostic(DiagnosticKind::Malformed, message)
    }

    /// Counts work, so that no text can keep the caller busy for ever.
    pub(super) fn step(&mut self) -> Result<(), Diagnostic> {
        self.steps += 1;
        let steps = self.steps();
        if steps > MAX_STEPS {
            self.budget.exhausted = true;
            return Err(self.too_large(MAX_STEPS, "steps on one rank"));
        }
        // The ranks' programs are in memory together, which the budgets bound.
        for (used, left, limit, what) in [
            (steps, self.budget.steps, MAX_ALL_STEPS, "steps"),
            (
                self.made.operations.len(),
                self.budget.operations,
                MAX_OPERATIONS,
                "operations",
            ),
            (
                self.made.transfers.len(),
                self.budget.transfers,
                MAX_TRANSFERS,
                "transfers, counted at both ends",
            ),
        ] {
            if used > left {
                self.budget.exhausted = true;
                return Err(self.too_large(limit, &format!("{what} on all ranks together")));
            }
        }
        Ok(())
    }

    /// The steps that were taken.
    pub(super) fn steps(&self) -> usize {
        self.steps + self.work.get() / WORK_PER_STEP
    }

    fn too_large(&self, limit: usize, what: &str) -> Diagnostic {
        self.malformed(format!(
            "the program is too large; expected at most {limit} {what}"
        ))
    }

    pub(super) fn lookup(&self, name: &str) -> Option<&Bound> {
        self.bound.get(name)
    }

    pub(super) fn bind(&mut self, name: &'p str, value: Bound) -> Result<(), Diagnostic> {
        if !self.valid_names.contains(name) {
            if !crate::program::text::is_name(name) {
                return Err(self.malformed(format!(
                    "'{name}' cannot be a name; expected a word that is not reserved"
                )));
            }
            // Loops bind the same names again and again, and checking for reserved words is a search.
            self.valid_names.insert(name);
        }
        if self.bound.contains_key(name) {
            return Err(self.malformed(format!(
                "'{name}' already has a meaning here; expected a new name"
            )));
        }
        if self.names.len() >= MAX_NAMES {
            let message = format!("too many names at one time; expected at most {MAX_NAMES}");
            return Err(self.malformed(message));
        }
        self.names.push(name);
        self.bound.insert(name, value);
        Ok(())
    }

    /// Does `inner` in a block of its own: what it binds is unbound after it.
    pub(super) fn scoped<T>(
        &mut self,
        inner: impl FnOnce(&mut Self) -> Result<T, Diagnostic>,
    ) -> Result<T, Diagnostic> {
        let before = self.names.len();
        // After an error nothing is restored: it ends the unrolling.
        let result = inner(self)?;
        for name in self.names.drain(before..) {
            self.bound.remove(name);
        }
        Ok(result)
    }

    pub(super) fn integer_named(&self, name: &str) -> Option<i64> {
        match name {
            "rank" => i64::try_from(self.made.rank).ok(),
            "world" => i64::try_from(self.made.world).ok(),
            "streams" => i64::try_from(self.pool).ok(),
            _ => match self.lookup(name) {
                Some(Bound::Integer(value)) => Some(*value),
                Some(_) => None,
                None => self.composite_named(name),
            },
        }
    }

    /// A composite name that is used as an integer: `n[2]`, `count(n)`, `given(bias)`.
    fn composite_named(&self, text: &str) -> Option<i64> {
        if let Some(tensor) = text
            .strip_prefix("given(")
            .and_then(|t| t.strip_suffix(')'))
        {
            return self.optional.get(tensor).map(|given| i64::from(*given));
        }
        if let Some(list) = text
            .strip_prefix("count(")
            .and_then(|t| t.strip_suffix(')'))
        {
            return match self.lookup(list) {
                Some(Bound::List(values)) => i64::try_from(values.len()).ok(),
                _ => None,
            };
        }
        let (list, index) = text.strip_suffix(']')?.split_once('[')?;
        match self.lookup(list) {
            Some(Bound::List(values)) => values.get(index.parse::<usize>().ok()?).copied(),
            _ => None,
        }
    }

    pub(super) fn integer(&self, expression: &Expr) -> Result<i64, Diagnostic> {
        // Long expressions in loops take time without making steps.
        self.work.set(self.work.get() + expression.terms());
        expression
            .evaluate(&|name| self.integer_named(name))
            .map_err(|error| {
                let expression = shortened(expression.to_string());
                self.malformed(format!("{expression}: {error}"))
            })
    }

    pub(super) fn condition(&self, condition: &Condition) -> Result<bool, Diagnostic> {
        self.work.set(self.work.get() + condition.terms());
        condition
            .evaluate(&|name| self.integer_named(name))
            .map_err(|error| {
                let condition = shortened(condition.to_string());
                self.malformed(format!("{condition}: {error}"))
            })
    }

    /// Diagnostic for a required `condition` that does not hold, with the values of the names in it.
    pub(super) fn unmet(&self, condition: &Condition) -> Diagnostic {
        let values: RefCell<Vec<String>> = RefCell::default();
        // It could be evaluated before.
        let _ = condition.evaluate(&|name| {
            let value = self.integer_named(name)?;
            let mut values = values.borrow_mut();
            let shown = format!("{name} = {value}");
            if values.len() < MAX_NAMES_SHOWN && !values.contains(&shown) {
                values.push(shown);
            }
            Some(value)
        });
        let mut message = format!("expected {}", shortened(condition.to_string()));
        let values = values.into_inner();
        if !values.is_empty() {
            message += &format!("; here {}", values.join(", "));
        }
        self.diagnostic(DiagnosticKind::Requirement, message)
    }

    /// A number in `0..limit`; `what` names it.
    pub(super) fn number_below(
        &self,
        expression: &Expr,
        limit: usize,
        what: &str,
    ) -> Result<usize, Diagnostic> {
        let value = self.integer(expression)?;
        let number = below(what, expression, value, limit);
        number.map_err(|message| self.diagnostic(DiagnosticKind::OutOfBounds, message))
    }

    /// The transfer that `reference` names; `kind` is what naming none breaks.
    pub(super) fn transfer(
        &self,
        reference: &TransferRef,
        kind: DiagnosticKind,
    ) -> Result<TransferId, Diagnostic> {
        let name = &reference.name;
        let Some(named) = self.transfers.get(name.as_str()) else {
            return Err(self.diagnostic(
                kind,
                format!("unknown transfer '{name}'; expected one that is shared before"),
            ));
        };
        let indices = reference
            .indices
            .iter()
            .map(|index| self.integer(index))
            .collect::<Result<Vec<i64>, Diagnostic>>()?;
        let (mut fits, mut tried) = (false, None);
        // A name may be declared in several branches, with different loops around them.
        for path in &named.paths {
            let Some(outer) = path.len().checked_sub(indices.len()) else {
                continue;
            };
            let open = self
                .loops
                .get(..outer)
                .filter(|open| open.iter().zip(path).all(|(open, id)| open.id == *id));
            let Some(open) = open else { continue };
            fits = true;
            // Indices of loops that enclose both the declaration and this reference are implied; the rest is written.
            let mut key: Vec<i64> = open.iter().map(|open| open.value).collect();
            key.extend(&indices);
            if let Some(id) = named.instances.get(&key) {
                return Ok(id);
            }
            tried = Some(key);
        }
        let depth = named.paths.iter().map(Vec::len).max().unwrap_or(0);
        let message = match tried {
            Some(key) => {
                let key: String = key.iter().map(|value| format!("[{value}]")).collect();
                format!("{reference} refers to {name}{key}, which is not shared before")
            }
            None if fits || indices.len() > depth => format!(
                "{reference} has {} indices, but '{name}' is declared inside {depth} loops",
                indices.len()
            ),
            None => format!(
                "{reference} does not say which iteration: '{name}' is declared inside {depth} \
                 loops that are not all open here"
            ),
        };
        Err(self.diagnostic(kind, message))
    }

    /// The index of `kind` among the streams in use.
    pub(super) fn stream_index(&mut self, kind: StreamKind) -> usize {
        let streams = &mut self.made.streams;
        streams
            .iter()
            .position(|stream| *stream == kind)
            .unwrap_or_else(|| {
                streams.push(kind);
                streams.len() - 1
            })
    }

    pub(super) fn stream(&mut self, reference: &StreamRef) -> Result<usize, Diagnostic> {
        let kind = match reference {
            StreamRef::Caller => StreamKind::Caller,
            StreamRef::Pool(number) => {
                StreamKind::Pool(self.number_below(number, self.pool, "stream")?)
            }
            StreamRef::High(number) => {
                StreamKind::High(self.number_below(number, super::MAX_HIGH_STREAMS, "stream")?)
            }
            StreamRef::Named(name) => match self.lookup(name) {
                Some(Bound::Stream(index)) => return Ok(*index),
                _ => {
                    return Err(self.malformed(format!("unknown stream '{name}'")));
                }
            },
        };
        Ok(self.stream_index(kind))
    }

    /// The streams start after the current one; after the body, the current one goes on after them.
    pub(super) fn fork(
        &mut self,
        streams: &'p [Each<StreamRef>],
        body: &'p [Statement],
    ) -> Result<(), Diagnostic> {
        let origin = self.current;
        let mut forked: Vec<usize> = Vec::new();
        self.each(streams, |unroller, stream| {
            let index = unroller.stream(stream)?;
            // A stream cannot wait for itself to start, and would be joined twice.
            if index == origin || forked.contains(&index) {
                let message = format!("{stream} is forked twice, or is the current stream");
                return Err(unroller.malformed(message));
            }
            forked.push(index);
            Ok(())
        })?;
        for &stream in &forked {
            self.current = stream;
            // Each forked stream starts after the work so far of the origin, and joins it at the end.
            self.enqueue(OperationKind::Synchronize(origin));
        }
        self.current = origin;
        let position = self.site.position();
        self.block(body)?;
        self.at(position);
        // The body may have changed it.
        self.current = origin;
        for &stream in &forked {
            self.enqueue(OperationKind::Synchronize(stream));
        }
        Ok(())
    }

    /// Runs `body` for each value of an index; the loop is part of the site and of transfers'
    /// identities.
    pub(super) fn repeat(
        &mut self,
        id: usize,
        over: &'p Over,
        mut body: impl FnMut(&mut Self) -> Result<(), Diagnostic>,
    ) -> Result<(), Diagnostic> {
        let (from, to) = (self.integer(&over.from)?, self.integer(&over.to)?);
        let outer = Arc::clone(&self.site.indices);
        let index: Arc<str> = Arc::from(over.index.as_str());
        // Without the integers that expected values depend on, the first and last iterations check the text.
        let left_out = if self.words.are_assumed() {
            let second = from.saturating_add(1).min(to);
            second..to.saturating_sub(1).max(second)
        } else {
            to..to
        };
        for value in (from..left_out.start).chain(left_out.end..to) {
            self.step()?;
            self.site.indices = with_index(&outer, Arc::clone(&index), value);
            self.loops.push(OpenLoop { id, value });
            self.scoped(|unroller| {
                unroller.bind(&over.index, Bound::Integer(value))?;
                body(unroller)
            })?;
            self.loops.pop();
        }
        self.site.indices = outer;
        Ok(())
    }

    /// Makes `position` the place that diagnostics and operations name.
    pub(super) fn at(&mut self, position: Position) {
        self.site.line = position.line;
        self.site.column = position.column;
    }

    pub(super) fn here(&self) -> Site {
        self.site.clone()
    }
}
