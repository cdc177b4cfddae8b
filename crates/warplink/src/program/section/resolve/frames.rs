//! The blocks of steps that are being resolved, as a stack of its own: so a resolution stops at a value that is not known yet, and
//! goes on later where it stopped.

use super::Resolver;
use super::value::{Resolved, Stop};
use crate::program::construct::{Branch, Loop};
use crate::program::section::ir::{Step, StepKind};
use crate::program::section::iterations::Iterations;
use crate::program::site::{Indices, with_index};
use std::sync::Arc;

/// State to restore at the end of a block: numbers of integers and aliases bound before it, and the indices of the
/// enclosing loops.
pub(super) struct Scope {
    integers: usize,
    aliases: usize,
    indices: Indices,
}

/// A block that is being resolved.
pub(super) enum Frame<'s> {
    /// Steps that are left.
    Body { steps: &'s [Step], scope: Scope },
    Loop {
        it: &'s Loop<StepKind>,
        index: Arc<str>,
        iterations: Iterations,
        scope: Scope,
        /// Weight of the loop.
        weight: f64,
    },
    /// An arm whose condition holds, and the number of tensors known to be reachable without it.
    Arm(usize),
}

/// State before a step.
pub(super) struct StepStart {
    scope: Scope,
    steps: usize,
    read: usize,
    taken: usize,
}

impl<'s> Resolver<'s> {
    /// Resolves what is left, up to the first value that is not known. May be called again then.
    pub(super) fn go_on(&mut self) -> Resolved<()> {
        // The step that stopped may have pushed some of its parts and bound names; it is resolved again as a whole,
        // with the answers that were given so far.
        if let Some(start) = self.unfinished.take() {
            self.steps.truncate(start.steps);
            self.weights.truncate(start.steps);
            (self.read, self.taken) = (start.read, start.taken);
            self.leave(start.scope);
        }
        while let Some(frame) = self.frames.last_mut() {
            match frame {
                Frame::Body { steps, .. } => {
                    let all = *steps;
                    let Some((step, left)) = all.split_first() else {
                        self.end();
                        continue;
                    };
                    // Advanced before the step is resolved: a loop or branch pushes a frame, which ends before the
                    // rest of this one.
                    *steps = left;
                    self.resolve(step, all)?;
                }
                Frame::Loop { iterations, .. } => match iterations.next() {
                    Some((value, weight)) => self.iterate(value, weight)?,
                    None => self.end(),
                },
                Frame::Arm(_) => self.end(),
            }
        }
        Ok(())
    }

    /// The first of `steps`, which are left again if it cannot be resolved yet.
    fn resolve(&mut self, step: &'s Step, all: &'s [Step]) -> Resolved<()> {
        let start = StepStart {
            scope: self.scope(),
            steps: self.steps.len(),
            read: self.read,
            taken: self.taken,
        };
        let done = self.one(step);
        match (&done, self.frames.last_mut()) {
            // A stop happens within a step without a body only, so that the last frame is still the one of the step.
            (Err(Stop::Unknown), Some(Frame::Body { steps, .. })) => {
                *steps = all;
                self.unfinished = Some(start);
            }
            // The step is complete and will not be repeated: its answers are no longer needed.
            _ => self.answers.used(self.read),
        }
        done
    }

    pub(super) fn enter(&mut self, steps: &'s [Step]) {
        let scope = self.scope();
        self.frames.push(Frame::Body { steps, scope });
    }

    pub(super) fn scope(&self) -> Scope {
        Scope {
            integers: self.integers.len(),
            aliases: self.aliases.len(),
            indices: Arc::clone(&self.site.indices),
        }
    }

    pub(super) fn leave(&mut self, scope: Scope) {
        self.integers.truncate(scope.integers);
        self.aliases.truncate(scope.aliases);
        self.site.indices = scope.indices;
    }

    /// Ends the innermost block.
    fn end(&mut self) {
        match self.frames.pop() {
            Some(Frame::Body { scope, .. }) => self.leave(scope),
            Some(Frame::Loop { scope, weight, .. }) => {
                self.leave(scope);
                self.weight = weight;
            }
            Some(Frame::Arm(known)) => self.reached.truncate(known),
            None => {}
        }
    }

    pub(super) fn repeat(&mut self, it: &'s Loop<StepKind>) -> Resolved<()> {
        let (from, to) = (self.integer(&it.over.from)?, self.integer(&it.over.to)?);
        self.frames.push(Frame::Loop {
            it,
            index: Arc::from(it.over.index.as_str()),
            iterations: Iterations::new(from, to, self.most, self.period(it)),
            scope: self.scope(),
            weight: self.weight,
        });
        Ok(())
    }

    /// An iteration of the innermost block, a loop.
    fn iterate(&mut self, value: i64, share: f64) -> Resolved<()> {
        let Some(Frame::Loop {
            it,
            index,
            scope,
            weight,
            ..
        }) = self.frames.last()
        else {
            return Ok(());
        };
        let (it, weight) = (*it, *weight);
        let indices = with_index(&scope.indices, Arc::clone(index), value);
        // Names of the previous iteration end here, since the loop's frame stays on the stack between iterations.
        self.integers.truncate(scope.integers);
        self.aliases.truncate(scope.aliases);
        // An empty body counts as well, or a long loop of nothing would never reach the limit.
        self.step()?;
        self.weight = weight * share;
        self.site.indices = indices;
        self.bind(&it.over.index)?;
        self.integers.push((&it.over.index, value));
        self.enter(&it.body);
        Ok(())
    }

    pub(super) fn choose(&mut self, branch: &'s Branch<StepKind>) -> Resolved<()> {
        for arm in &branch.arms {
            self.at(arm.position);
            // Noted even if the arm is not taken: the evaluation alone needs the answer.
            self.note_asked(&arm.condition, arm.position);
            if self.condition(&arm.condition)? {
                self.frames.push(Frame::Arm(self.reached.len()));
                self.note_reached(&arm.condition);
                self.enter(&arm.body);
                return Ok(());
            }
        }
        self.enter(&branch.otherwise);
        Ok(())
    }
}
