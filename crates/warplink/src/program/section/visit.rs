//! Traversal of a section's steps: the single definition of their evaluation order and of name scopes.

use super::ir::{DeviceValue, Otherwise, Place, Receiver, ReduceOperator, Source, Step, StepKind};
use crate::program::construct::{
    AxisSelection, Branch, Each, Loop, NodeKind, Over, Selection, TensorRef,
};
use crate::program::expr::{Condition, Expr};
use crate::program::site::Position;

/// Role of an expression.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ExprUse {
    /// Value of a binding or of an announcement.
    Value,
    /// A peer rank.
    Rank,
    /// A lane of a peer rank.
    Lane,
    /// Bound of an index.
    Bound,
    /// Side of a comparison.
    Compared,
    /// Index of a slice or part.
    Index,
    /// Bound of a range or number of parts, which determines the length of a selection.
    Extent,
}

/// Role of a name that is not an integer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NameUse {
    Tensor,
    /// A tensor accessed on another rank.
    Remote,
    /// A tensor whose location is announced.
    Announced,
    /// A tensor tested by `reachable(X)`.
    Reachable,
    /// A tensor tested by `given(X)`.
    Given,
    /// A parameter used as an operator.
    Operator,
    /// A row function.
    Function,
}

/// Visitor of steps. By default, it visits every expression and name once, in resolution order. A visitor that
/// follows one execution overrides [`repeat`](Self::repeat), [`over`](Self::over), [`choose`](Self::choose) and
/// [`source`](Self::source), and selects iterations and arms itself.
pub(crate) trait Visitor<'s>: Sized {
    /// Sets the position of the following steps and conditions.
    fn at(&mut self, _: Position) {}

    /// Runs `inner` in a new scope: names bound in it are unbound afterwards.
    fn scoped(&mut self, inner: impl FnOnce(&mut Self)) {
        inner(self);
    }

    fn expression(&mut self, _: &'s Expr, _: ExprUse) {}

    fn name(&mut self, _: &'s str, _: NameUse) {}

    /// Binds an index, within a scope.
    fn index(&mut self, _: &'s Over) {}

    fn integer(&mut self, _: &'s str, value: &'s Expr) {
        self.expression(value, ExprUse::Value);
    }

    fn alias(&mut self, _: &'s str, value: &'s TensorRef) {
        self.tensor(value);
    }

    /// Binds an integer that is read from memory.
    fn device_value(&mut self, it: &'s DeviceValue) {
        self.place(&it.place);
        for expression in it.expressions() {
            self.expression(expression, ExprUse::Bound);
        }
    }

    fn body(&mut self, steps: &'s [Step]) {
        // A scope per body: names that an arm or an iteration binds end with it.
        self.scoped(|visitor| steps.iter().for_each(|step| visitor.step(step)));
    }

    fn step(&mut self, step: &'s Step) {
        self.node(step);
    }

    /// Visits a step by its kind; not overridden.
    fn node(&mut self, step: &'s Step) {
        self.at(step.position);
        match &step.kind {
            NodeKind::LetInteger { name, value } => self.integer(name, value),
            NodeKind::LetTensor { name, value } => self.alias(name, value),
            NodeKind::For(it) => self.repeat(it),
            NodeKind::If(branch) => self.choose(branch),
            NodeKind::Do(kind) => self.action(step, kind),
        }
    }

    fn action(&mut self, _: &'s Step, kind: &'s StepKind) {
        kind.visit(self);
    }

    fn repeat(&mut self, it: &'s Loop<StepKind>) {
        self.over(&it.over, |visitor| visitor.body(&it.body));
    }

    fn choose(&mut self, branch: &'s Branch<StepKind>) {
        for arm in &branch.arms {
            self.at(arm.position);
            self.condition(&arm.condition);
            self.body(&arm.body);
        }
        // All arms are visited: a traversal does not know which one a lane takes.
        self.body(&branch.otherwise);
    }

    /// Runs `inner` for each value of an index.
    fn over(&mut self, over: &'s Over, mut inner: impl FnMut(&mut Self)) {
        // Before the scope: the bounds cannot use the index.
        self.expression(&over.from, ExprUse::Bound);
        self.expression(&over.to, ExprUse::Bound);
        self.scoped(|visitor| {
            visitor.index(over);
            inner(visitor);
        });
    }

    fn each<T>(&mut self, list: &'s [Each<T>], item: impl Fn(&mut Self, &'s T)) {
        for each in list {
            match &each.over {
                Some(over) => self.over(over, |visitor| item(visitor, &each.item)),
                None => item(self, &each.item),
            }
        }
    }

    fn condition(&mut self, condition: &'s Condition) {
        condition.leaves(&mut |leaf| match leaf {
            Condition::Compare(_, a, b) => {
                self.expression(a, ExprUse::Compared);
                self.expression(b, ExprUse::Compared);
            }
            Condition::Given(tensor) => self.name(tensor, NameUse::Given),
            Condition::Reachable(tensor) => self.name(tensor, NameUse::Reachable),
            Condition::Not(_) | Condition::And(..) | Condition::Or(..) => {}
        });
    }

    fn target(&mut self, place: &'s Place) {
        self.place(place);
    }

    fn source(&mut self, source: &'s Source) {
        self.place(&source.place);
        if let Some((condition, otherwise)) = &source.otherwise {
            self.condition(condition);
            if let Otherwise::Place(place) = otherwise {
                self.place(place);
            }
        }
    }

    fn place(&mut self, place: &'s Place) {
        self.tensor(&place.tensor);
        if let Some(rank) = &place.on {
            self.name(&place.tensor.name, NameUse::Remote);
            self.expression(rank, ExprUse::Rank);
        }
    }

    fn receiver(&mut self, receiver: &'s Receiver) {
        self.expression(&receiver.rank, ExprUse::Rank);
        if let Some(lane) = &receiver.lane {
            self.expression(lane, ExprUse::Lane);
        }
    }

    fn operator(&mut self, operator: &'s ReduceOperator) {
        if let ReduceOperator::Parameter(name) = operator {
            self.name(name, NameUse::Operator);
        }
    }

    fn tensor(&mut self, tensor: &'s TensorRef) {
        self.name(&tensor.name, NameUse::Tensor);
        for selection in &tensor.selections {
            self.selection(selection);
        }
    }

    /// `I[r]` in `X[I[r]]`: a row that a word of memory names.
    fn row(&mut self, words: &'s str, index: &'s Expr) {
        self.name(words, NameUse::Tensor);
        self.expression(index, ExprUse::Index);
    }

    fn selection(&mut self, selection: &'s Selection) {
        match selection {
            Selection::Index(Expr::Element(words, index)) => self.row(words, index),
            Selection::Index(index) => self.expression(index, ExprUse::Index),
            Selection::Range(from, to) => {
                self.expression(from, ExprUse::Extent);
                self.expression(to, ExprUse::Extent);
            }
            Selection::Part(index, parts) => {
                self.expression(index, ExprUse::Index);
                self.expression(parts, ExprUse::Extent);
            }
            Selection::Axes(axes) => {
                for axis in axes {
                    match axis {
                        AxisSelection::All => {}
                        AxisSelection::Index(index) => self.expression(index, ExprUse::Index),
                        AxisSelection::Range(from, to) => {
                            self.expression(from, ExprUse::Extent);
                            self.expression(to, ExprUse::Extent);
                        }
                    }
                }
            }
        }
    }
}
