//! Hazard analysis: finds the steps before which the threads of a lane must synchronize.
//!
//! Threads divide elements according to length and alignment, so one thread may need data that another wrote in an earlier step.
//! A step that reads or writes data written by an earlier step, or overwrites data read by it, needs a barrier in
//! between, unless a signal or a wait comes between them, since both are barriers. Packets are ordered by their
//! flags.
//!
//! The section is analyzed once for all lanes: a loop with known bounds is iterated; any other loop is analyzed for
//! zero iterations and for two. For an operand, the analysis tracks its memory, which several tensors of the section
//! may share, and, if they are kernel constants, the rank and the first selection.

use super::scope::Scope;
use crate::program::construct::{Branch, Loop, Over, Selection, TensorRef};
use crate::program::expr::Expr;
use crate::program::section::ir::{OfOneWord, Storing};
use crate::program::section::{
    DeviceValue, Otherwise, Packing, Place, SectionInstance, SectionMemory, Source, Step, StepKind,
    Visitor,
};
use std::collections::{BTreeSet, HashMap};

/// Maximum number of iterations followed for one loop.
// Loops over ranks, slots or parts of a few lanes; with longer ones, indices are taken as unknown, which is
// conservative.
const MAX_ITERATIONS: i64 = 64;

/// Maximum number of steps followed, counting every iteration, and of accesses compared. Bounds the analysis time.
const MAX_STEPS: usize = 1 << 14;
const MAX_LOOKS: usize = 1 << 26;

/// Identities of the steps and loops that need a thread barrier before them.
pub(super) type Barriers = BTreeSet<usize>;

/// Identity of a step: its address.
pub(super) fn id(step: &Step) -> usize {
    std::ptr::from_ref(step).addr()
}

/// Identity of a loop: its address.
pub(super) fn id_of_loop(it: &Loop<StepKind>) -> usize {
    std::ptr::from_ref(it).addr()
}

/// Steps of `instance`, and loops of `divided`, that need a barrier before them. If the analysis takes too long: all steps that
/// move data, and no loop is divided. `aligned`: for each tensor, whether it and its rows are aligned to 16 bytes on every rank.
/// `divided`: loops whose iterations parts of a lane's threads have to themselves; no barrier may be within them.
pub(super) fn barriers(
    instance: &SectionInstance,
    aligned: &[bool],
    constants: &Scope,
    divided: &mut BTreeSet<usize>,
) -> Barriers {
    let mut barriers = Barriers::new();
    loop {
        let mut walk = HazardWalk {
            instance,
            aligned,
            scope: constants.clone(),
            aliases: HashMap::new(),
            accesses: Vec::new(),
            storer: None,
            alike: true,
            divided: None,
            in_parts: divided,
            of_parts: None,
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
            divided.clear();
            return barriers;
        }
        if walk.barriers == barriers {
            return barriers;
        }
        barriers = walk.barriers;
    }
}

/// Whether threads may divide the iterations of a loop: each stores integers at its index, and reads single words that no rank
/// stores. The loop begins with a number: if it began elsewhere the next time, another thread would store the same integer.
pub(super) fn divides_integers(instance: &SectionInstance, it: &Loop<StepKind>) -> bool {
    let mut stores = false;
    let divides = Step::actions(&it.body).all(|(_, kind)| match kind.of_one_word(&it.over.index) {
        Some(OfOneWord::Stored) => {
            stores = true;
            true
        }
        Some(OfOneWord::Read(place)) => {
            is_never_stored(instance, place) && is_of_all_axes(instance, place)
        }
        None => false,
    });
    divides && stores && matches!(it.over.from, Expr::Number(_))
}

/// Whether a place is this rank's, and no rank stores there during the launch.
pub(super) fn is_never_stored(instance: &SectionInstance, place: &Place) -> bool {
    let tensor = instance.tensor(&place.tensor.name);
    place.on.is_none() && tensor.is_some_and(|tensor| instance.tensors[tensor].constant)
}

/// Whether it is one word, for every thread that asks.
pub(super) fn is_one_word(instance: &SectionInstance, place: &Place) -> bool {
    place.is_one_word() && is_of_all_axes(instance, place)
}

/// Whether a place has a selection on each axis of its tensor.
fn is_of_all_axes(instance: &SectionInstance, place: &Place) -> bool {
    let tensor = instance.tensor(&place.tensor.name);
    tensor.is_some_and(|it| instance.tensors[it].shape.len() == place.tensor.selections.len())
}

/// First selection of an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Selected {
    Index(i64),
    /// Part index and number of parts.
    Part(i64, i64),
    Unknown,
}

/// An operand access of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct StepAccess {
    tensor: Accessed,
    rank: Option<i64>,
    selected: Selected,
    writes: bool,
    /// For a write, who stores an element in each execution, if that is known.
    stored: Option<Storer>,
}

/// The thread that stores an element, the same one in accesses that compare equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Storer {
    /// The lane's last thread stores all integers.
    Last,
    /// The thread that has the element in a step, by the number of its access.
    OfStep(usize, usize),
    /// The thread that has the iteration of a loop.
    OfLoop(usize),
}

/// Accessed memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Accessed {
    /// A tensor of the section, by index, and the memory that contains it.
    One(usize, SectionMemory),
    /// Any tensor of the program, if several may share memory.
    Any,
}

impl Accessed {
    fn same_memory(self, other: Self) -> bool {
        match (self, other) {
            (Self::One(_, a), Self::One(_, b)) => a == b,
            (Self::Any, Self::Any) => true,
            // Scratch never overlaps tensors of the program.
            (Self::One(..), Self::Any) | (Self::Any, Self::One(..)) => false,
        }
    }
}

impl StepAccess {
    fn conflicts(&self, other: &Self) -> bool {
        let apart = match (self.rank, other.rank) {
            (Some(a), Some(b)) if a != b => true,
            // Selections of two different tensors in the same memory cannot be compared.
            _ if self.tensor != other.tensor => false,
            // The same thread stores an element both times.
            _ if self.tensor != Accessed::Any
                && self.stored.is_some()
                && self.stored == other.stored =>
            {
                true
            }
            _ => match (self.selected, other.selected) {
                (Selected::Index(a), Selected::Index(b)) => a != b,
                (Selected::Part(a, of), Selected::Part(b, others)) => of == others && a != b,
                _ => false,
            },
        };
        self.tensor.same_memory(other.tensor) && (self.writes || other.writes) && !apart
    }
}

struct HazardWalk<'s> {
    instance: &'s SectionInstance,
    aligned: &'s [bool],
    scope: Scope,
    aliases: HashMap<&'s str, (usize, Selected)>,
    /// Accesses of the current step.
    accesses: Vec<StepAccess>,
    /// Who stores the elements of the first access of the current step, if that is known.
    storer: Option<Storer>,
    /// Whether all operands of the current step so far are whole rows of plain memory that are aligned, so that threads divide them in the same
    /// way in each execution.
    alike: bool,
    /// The address of a loop around the current step whose iterations threads divide.
    divided: Option<usize>,
    /// Loops whose iterations parts of the threads have, and the accesses of the current one.
    in_parts: &'s BTreeSet<usize>,
    of_parts: Option<Vec<StepAccess>>,
    /// Accesses since the last barrier.
    pending: BTreeSet<StepAccess>,
    barriers: Barriers,
    steps: usize,
    looks: usize,
}

impl<'s> Visitor<'s> for HazardWalk<'s> {
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

    fn device_value(&mut self, it: &'s DeviceValue) {
        self.access(&it.place, false);
        self.scope.bind(&it.name, "", None);
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
        self.storer = match kind.storing() {
            Storing::Integer => Some(self.divided.map_or(Storer::Last, Storer::OfLoop)),
            Storing::Rows | Storing::Elements => Some(Storer::OfStep(id(step), 0)),
        };
        self.alike = true;
        kind.visit(self);
        let mut accesses = std::mem::take(&mut self.accesses);
        if matches!(kind.storing(), Storing::Elements) && !self.alike {
            accesses.iter_mut().for_each(|access| access.stored = None);
        }
        match &mut self.of_parts {
            // Iterations are independent, and a part's threads store the same elements in each step of one.
            Some(all) => all.extend(accesses.into_iter().map(|access| StepAccess {
                stored: None,
                ..access
            })),
            None => self.follow(id(step), accesses),
        }
    }

    fn repeat(&mut self, it: &'s Loop<StepKind>) {
        if self.of_parts.is_none() && self.in_parts.contains(&id_of_loop(it)) {
            self.of_parts = Some(Vec::new());
            self.with(&it.over.index, None, |walk| walk.body(&it.body));
            let accesses = self.of_parts.take().unwrap_or_default();
            return self.follow(id_of_loop(it), accesses);
        }
        // The loop may have no iterations, so the code after it also follows the code before it.
        let mut before = BTreeSet::new();
        if self.bounds(&it.over).is_none() {
            // Copies of the set take time as well, so they count against the limit.
            self.looks += self.pending.len();
            before.clone_from(&self.pending);
        }
        // Two rounds, since accesses of one round are followed by those of the next; with unknown indices, further ones
        // add nothing.
        let values = self.values(&it.over, 2);
        let outer = self.divided;
        if outer.is_none() && divides_integers(self.instance, it) {
            self.divided = Some(id_of_loop(it));
        }
        for value in values {
            if self.is_exhausted() {
                return;
            }
            self.with(&it.over.index, value, |walk| walk.body(&it.body));
        }
        self.divided = outer;
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
        for value in self.values(over, 1) {
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
        if let (Otherwise::Place(other), None | Some(false)) = (other, holds) {
            self.access(other, false);
        }
    }
}

impl<'s> HazardWalk<'s> {
    /// The bounds of an index, if both are known.
    fn bounds(&self, over: &Over) -> Option<(i64, i64)> {
        self.scope.value(&over.from).zip(self.scope.value(&over.to))
    }

    /// Values of an index; `rounds` unknown ones if its bounds are unknown or too far apart.
    fn values(&self, over: &Over, rounds: usize) -> Vec<Option<i64>> {
        match self.bounds(over) {
            Some((from, to)) if to.saturating_sub(from) <= MAX_ITERATIONS => {
                (from..to).map(Some).collect()
            }
            _ => vec![None; rounds],
        }
    }

    /// Whether the step budget is exhausted; the result is then incomplete.
    fn is_exhausted(&self) -> bool {
        self.steps > MAX_STEPS || self.looks > MAX_LOOKS
    }

    /// Adds the accesses of a step or a divided loop, with a barrier before it if they need one.
    fn follow(&mut self, id: usize, accesses: Vec<StepAccess>) {
        self.looks += self.pending.len() * accesses.len();
        let conflict = self
            .pending
            .iter()
            .any(|before| accesses.iter().any(|access| access.conflicts(before)));
        if conflict {
            self.barriers.insert(id);
        }
        if self.barriers.contains(&id) {
            self.pending.clear();
        }
        self.pending.extend(accesses);
    }

    /// Runs `inner` with an index bound to a value, or unknown.
    fn with(&mut self, index: &str, value: Option<i64>, inner: impl FnOnce(&mut Self)) {
        self.scoped(|walk| {
            walk.scope.bind(index, "", value);
            inner(walk);
        });
    }

    /// Records an access to a place, and the reads of words that name its rows.
    fn access(&mut self, place: &'s Place, writes: bool) {
        self.rows(&place.tensor);
        if let Some(operand) = self.operand(&place.tensor) {
            let mut selections = place.tensor.selections.iter();
            // Of a range or a part, threads divide elements from its own start, so its elements may be other threads'
            // in the next step.
            let whole = selections.all(|it| matches!(it, Selection::Index(_)))
                && !self.aliases.contains_key(place.tensor.name.as_str());
            // Steps that read packets are divided by these.
            let scratch = self.instance.scratch_of(operand.0);
            let plain = scratch.is_none_or(|scratch| scratch.packing == Packing::Plain);
            self.alike &= whole && plain && self.aligned[operand.0];
            let number = self.accesses.len();
            let stored = self.storer.filter(|_| writes && whole);
            let stored = stored.map(|storer| match storer {
                Storer::OfStep(step, _) => Storer::OfStep(step, number),
                Storer::Last | Storer::OfLoop(_) => storer,
            });
            self.note(operand, place.on.as_ref(), (writes, stored));
        }
    }

    /// Records the reads of the words that name rows in a selection.
    fn rows(&mut self, reference: &'s TensorRef) {
        for selection in &reference.selections {
            let Selection::Index(Expr::Element(words, index)) = selection else {
                continue;
            };
            if let Some((tensor, mut selected)) = self.named(words) {
                if selected == Selected::Unknown && !self.aliases.contains_key(words.as_str()) {
                    let index = self.scope.value(index);
                    selected = index.map_or(Selected::Unknown, Selected::Index);
                }
                self.note((tensor, selected), None, (false, None));
            }
        }
    }

    /// Records an access to an operand on a rank, unless it holds packets, which their flags order.
    fn note(
        &mut self,
        (index, mut selected): (usize, Selected),
        on: Option<&Expr>,
        (writes, stored): (bool, Option<Storer>),
    ) {
        let scratch = self.instance.scratch_of(index);
        if scratch.is_some_and(|scratch| scratch.packing != Packing::Plain) {
            return;
        }
        let tensor = if self.instance.shared_tensors && scratch.is_none() {
            // Treat all tensors as one, with an unknown selection.
            selected = Selected::Unknown;
            Accessed::Any
        } else {
            Accessed::One(index, self.instance.tensors[index].memory)
        };
        let rank = match on {
            Some(rank) => self.scope.value(rank),
            None => i64::try_from(self.instance.rank).ok(),
        };
        self.accesses.push(StepAccess {
            tensor,
            rank,
            selected,
            writes,
            stored,
        });
    }

    /// A tensor, or what an alias selects of one.
    fn named(&self, name: &str) -> Option<(usize, Selected)> {
        let alias = self.aliases.get(name).copied();
        alias.or_else(|| Some((self.instance.tensor(name)?, Selected::Unknown)))
    }

    fn operand(&self, reference: &'s TensorRef) -> Option<(usize, Selected)> {
        let (tensor, selected) = self.named(&reference.name)?;
        if self.aliases.contains_key(reference.name.as_str()) {
            // A selection of an alias is inside the alias.
            return Some((tensor, selected));
        }
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
