//! Which steps of a lane need its threads to be synchronized before them.
//!
//! Threads of a lane handle elements as alignment allows, so another thread may need what a step wrote. A step
//! that touches what an earlier one wrote, or writes what an earlier one touched, needs a barrier of the
//! threads in between, unless a signal or a wait, which is one, comes between them. Packets are ordered by
//! their flags.
//!
//! The section is followed once for all lanes: a loop whose bounds are known is run through, another one not at all
//! or twice. Of an operand, the memory is known, which several tensors of the section may be parts of, and, where they
//! are constants of the kernel, the rank and the first selection.

use super::scope::Scope;
use crate::program::construct::{Branch, Loop, Over, Selection, TensorRef};
use crate::program::expr::Expr;
use crate::program::section::{
    Packing, Place, SectionInstance, SectionMemory, Source, Step, StepKind, Visitor,
};
use std::collections::{BTreeSet, HashMap};

/// The most iterations of a loop that are run through.
const MAX_ITERATIONS: i64 = 64;

/// The most steps that are followed, with every iteration counted, and accesses that are looked at for all of them.
const MAX_STEPS: usize = 1 << 14;
const MAX_LOOKS: usize = 1 << 26;

/// Steps before which the threads of a lane are to be synchronized, by address.
pub(super) type Barriers = BTreeSet<usize>;

/// What identifies a step.
pub(super) fn id(step: &Step) -> usize {
    std::ptr::from_ref(step).addr()
}

/// The steps of `instance` that need a barrier before them: all that move data, where following them takes too long.
pub(super) fn barriers(instance: &SectionInstance, constants: &Scope) -> Barriers {
    let mut barriers = Barriers::new();
    loop {
        let mut walk = Walk {
            instance,
            scope: constants.clone(),
            aliases: HashMap::new(),
            accesses: Vec::new(),
            pending: BTreeSet::new(),
            barriers: barriers.clone(),
            steps: 0,
            looks: 0,
        };
        walk.body(&instance.section.body);
        if walk.is_exhausted() {
            let all = Step::actions(&instance.section.body);
            let moves = all.filter(|(_, kind)| kind.moves());
            barriers.extend(moves.map(|(step, _)| id(step)));
            return barriers;
        }
        if walk.barriers == barriers {
            return barriers;
        }
        barriers = walk.barriers;
    }
}

/// The first selection of an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Selected {
    Index(i64),
    /// A part, and of how many.
    Part(i64, i64),
    Unknown,
}

/// An operand of a step that was followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Access {
    tensor: Accessed,
    rank: Option<i64>,
    selected: Selected,
    writes: bool,
}

/// A tensor that is accessed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Accessed {
    /// A tensor of the section, by its index, and what memory it is a part of.
    One(usize, SectionMemory),
    /// Any tensor of the program, where several may be the same memory.
    Any,
}

impl Accessed {
    fn same_memory(self, other: Self) -> bool {
        match (self, other) {
            (Self::One(_, a), Self::One(_, b)) => a == b,
            (Self::Any, Self::Any) => true,
            // Scratch is apart from the tensors of the program.
            (Self::One(..), Self::Any) | (Self::Any, Self::One(..)) => false,
        }
    }
}

impl Access {
    fn conflicts(&self, other: &Self) -> bool {
        let apart = match (self.rank, other.rank) {
            (Some(a), Some(b)) if a != b => true,
            // What one tensor selects says nothing of another that is a part of the same memory.
            _ if self.tensor != other.tensor => false,
            _ => match (self.selected, other.selected) {
                (Selected::Index(a), Selected::Index(b)) => a != b,
                (Selected::Part(a, of), Selected::Part(b, others)) => of == others && a != b,
                _ => false,
            },
        };
        self.tensor.same_memory(other.tensor) && (self.writes || other.writes) && !apart
    }
}

struct Walk<'s> {
    instance: &'s SectionInstance,
    scope: Scope,
    aliases: HashMap<&'s str, (usize, Selected)>,
    /// Of the step at hand.
    accesses: Vec<Access>,
    /// Since the last barrier.
    pending: BTreeSet<Access>,
    barriers: Barriers,
    steps: usize,
    looks: usize,
}

impl<'s> Visitor<'s> for Walk<'s> {
    fn scoped(&mut self, inner: impl FnOnce(&mut Self)) {
        let visible = self.scope.len();
        inner(self);
        self.scope.truncate(visible);
    }

    fn step(&mut self, step: &'s Step) {
        if !self.is_exhausted() {
            self.steps += 1;
            self.node(step);
        }
    }

    fn integer(&mut self, name: &'s str, value: &'s Expr) {
        let value = self.scope.value(value);
        self.scope.bind(name, "", value);
    }

    fn alias(&mut self, name: &'s str, value: &'s TensorRef) {
        if let Some(operand) = self.operand(value) {
            self.aliases.insert(name, operand);
        }
    }

    fn action(&mut self, step: &'s Step, kind: &'s StepKind) {
        if kind.synchronizes() {
            self.pending.clear();
            return;
        }
        kind.visit(self);
        let accesses = std::mem::take(&mut self.accesses);
        self.looks += self.pending.len() * accesses.len();
        let conflict = self
            .pending
            .iter()
            .any(|before| accesses.iter().any(|access| access.conflicts(before)));
        if conflict {
            self.barriers.insert(id(step));
        }
        if self.barriers.contains(&id(step)) {
            self.pending.clear();
        }
        self.pending.extend(accesses);
    }

    fn repeat(&mut self, it: &'s Loop<StepKind>) {
        let Over { index, from, to } = &it.over;
        let bounds = (self.scope.value(from), self.scope.value(to));
        // What comes after a loop that may have no iterations comes after what is before it, too.
        let mut before = BTreeSet::new();
        let values: Vec<Option<i64>> = match bounds {
            (Some(from), Some(to)) if to.saturating_sub(from) <= MAX_ITERATIONS => {
                (from..to).map(Some).collect()
            }
            (Some(_), Some(_)) => vec![None; 2],
            _ => {
                self.looks += self.pending.len();
                before.clone_from(&self.pending);
                vec![None; 2]
            }
        };
        for value in values {
            if self.is_exhausted() {
                return;
            }
            self.with(index, value, |walk| walk.body(&it.body));
        }
        self.pending.extend(before);
    }

    fn choose(&mut self, branch: &'s Branch<StepKind>) {
        self.looks += self.pending.len() * branch.arms.len();
        let before = self.pending.clone();
        let mut after = BTreeSet::new();
        let mut decided = false;
        for arm in &branch.arms {
            let holds = self.scope.holds(&arm.condition);
            if holds == Some(false) {
                continue;
            }
            self.pending.clone_from(&before);
            self.body(&arm.body);
            after.append(&mut self.pending);
            decided = holds == Some(true);
            if decided {
                break;
            }
        }
        if !decided {
            self.pending.clone_from(&before);
            self.body(&branch.otherwise);
            after.append(&mut self.pending);
        }
        self.pending = after;
    }

    fn over(&mut self, over: &'s Over, mut inner: impl FnMut(&mut Self)) {
        let bounds = (self.scope.value(&over.from), self.scope.value(&over.to));
        let values: Vec<Option<i64>> = match bounds {
            (Some(from), Some(to)) if to.saturating_sub(from) <= MAX_ITERATIONS => {
                (from..to).map(Some).collect()
            }
            _ => vec![None],
        };
        for value in values {
            self.with(&over.index, value, &mut inner);
        }
    }

    fn target(&mut self, place: &'s Place) {
        self.access(place, true);
    }

    fn source(&mut self, source: &'s Source) {
        let Some((condition, other)) = &source.otherwise else {
            return self.access(&source.place, false);
        };
        let holds = self.scope.holds(condition);
        if holds != Some(false) {
            self.access(&source.place, false);
        }
        if holds != Some(true) {
            self.access(other, false);
        }
    }
}

impl<'s> Walk<'s> {
    /// Whether following the steps takes too long: then it ends, and what it has found is not all.
    fn is_exhausted(&self) -> bool {
        self.steps > MAX_STEPS || self.looks > MAX_LOOKS
    }

    /// Does `inner` where an index has a value, or one of unknown ones.
    fn with(&mut self, index: &str, value: Option<i64>, inner: impl FnOnce(&mut Self)) {
        self.scoped(|walk| {
            walk.scope.bind(index, "", value);
            inner(walk);
        });
    }

    /// Notes what a step does with a place, unless that has packets.
    fn access(&mut self, place: &'s Place, writes: bool) {
        let Some((index, mut selected)) = self.operand(&place.tensor) else {
            return;
        };
        let scratch = self.instance.scratch_of(index);
        if scratch.is_some_and(|scratch| scratch.packing != Packing::Plain) {
            return;
        }
        let tensor = if self.instance.shared_tensors && scratch.is_none() {
            // All tensors are one, of which nothing more is known.
            selected = Selected::Unknown;
            Accessed::Any
        } else {
            Accessed::One(index, self.instance.tensors[index].memory)
        };
        let rank = match &place.on {
            Some(rank) => self.scope.value(rank),
            None => i64::try_from(self.instance.rank).ok(),
        };
        self.accesses.push(Access {
            tensor,
            rank,
            selected,
            writes,
        });
    }

    fn operand(&self, reference: &'s TensorRef) -> Option<(usize, Selected)> {
        if let Some(alias) = self.aliases.get(reference.name.as_str()) {
            // What it selects of the alias lies within it.
            return Some(*alias);
        }
        let tensor = self.instance.tensor(&reference.name)?;
        let value = |expression: &Expr| self.scope.value(expression);
        let selected = match reference.selections.first() {
            Some(Selection::Index(index)) => value(index).map(Selected::Index),
            Some(Selection::Part(index, parts)) => value(index)
                .zip(value(parts))
                .map(|(index, parts)| Selected::Part(index, parts)),
            _ => None,
        };
        Some((tensor, selected.unwrap_or(Selected::Unknown)))
    }
}
