//! Knowledge of lanes about one another's steps.
//!
//! A packet orders one thread of the lane that sends it with the threads that wait for it, not whole lanes: other threads of
//! the sender may still be in earlier steps, and other threads of the receiver may have waited for other packets. So a
//! packet's proof counts for all threads of a lane only once these have met.

use crate::program::machine::Actor;
use crate::program::verify::clock::{Clock, Clocks, PerStream, Recent};
use std::ops::Range;
use std::rc::Rc;

/// A step of a lane: the lane's stream, and its time.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stamp {
    pub(super) actor: Actor,
    pub(super) stream: u32,
    pub(super) time: u32,
}

/// Steps that are complete.
#[derive(Clone, Debug)]
struct Complete {
    /// With all that happened before them.
    all: Clock,
    /// Steps that are complete although earlier ones of the same lane may not be.
    single: Clock<Recent>,
}

impl Complete {
    fn has(&self, stamp: &Stamp) -> bool {
        let stream = stamp.stream as usize;
        self.has_all(stamp) || self.single.get(stream).contains(stamp.time)
    }

    /// Whether the step and all that its lane did before are complete.
    fn has_all(&self, stamp: &Stamp) -> bool {
        self.all.get(stamp.stream as usize) >= stamp.time
    }

    fn join(&mut self, other: &Self) {
        self.all.join(&other.all);
        self.single.join(&other.single);
    }

    fn add(&mut self, step: &Stamp) {
        let stream = step.stream as usize;
        let known = self.single.get(stream);
        self.single.set(stream, known.joined(Recent::of(step.time)));
    }
}

/// Clocks of a lane.
#[derive(Clone, Debug)]
pub(super) struct Knowledge {
    /// Visible memory: ordering through signals and streams.
    pub(super) seen: Clock,
    /// Steps that all threads of the lane know to be complete: the above, and those that packets prove. A packet does not
    /// order other memory, but memory that complete steps read may be overwritten.
    over: Complete,
    /// The same when the lane's threads last met.
    met: Rc<Complete>,
    /// Proofs by packets since then, each for the threads that waited for it.
    proofs: Vec<Proof>,
}

/// Steps that are complete for a thread that has waited for a packet, or that read some plain memory.
#[derive(Clone, Debug)]
pub(super) struct Proof {
    each: Option<Rc<Complete>>,
    /// Further ones for a thread that has waited for, or read, all that the step stored.
    whole: Option<Whole>,
}

#[derive(Clone, Debug)]
struct Whole {
    further: Option<Rc<Complete>>,
    /// Also complete. Not in `further`, since most steps have nothing else.
    step: Option<Stamp>,
}

impl Proof {
    /// That of what the step `stamp` stores, each thread of which has `each` and `held`; `stamp` is `None` if a thread may
    /// store before it has read all that the step reads.
    fn behind(
        stamp: Option<&Stamp>,
        mut each: Option<Rc<Complete>>,
        held: &[Self],
        nothing: &Complete,
    ) -> Self {
        let mut further = None;
        for proof in held {
            add(&mut each, proof.each.as_ref());
            if let Some(whole) = &proof.whole {
                whole.add_to(&mut further, nothing);
            }
        }
        let step = stamp.copied();
        let whole = Some(Whole { further, step });
        Self { each, whole }
    }

    /// The same for threads that have waited for packets of `range`, or read it, where `stored` went there.
    pub(super) fn within(&self, range: &Range<usize>, stored: &Range<usize>) -> Self {
        let is_whole = range.start <= stored.start && stored.end <= range.end;
        Self {
            each: self.each.clone(),
            whole: self.whole.clone().filter(|_| is_whole),
        }
    }

    /// Whether it proves no more than `other` does. Only where that is certain at once.
    fn is_within(&self, other: &Self) -> bool {
        let whole = match (&self.whole, &other.whole) {
            (None, _) => true,
            (Some(own), Some(other)) => own.is(other),
            (Some(_), None) => false,
        };
        whole && is(self.each.as_ref(), other.each.as_ref())
    }
}

impl Whole {
    fn is(&self, other: &Self) -> bool {
        let step = |whole: &Self| whole.step.map(|step| (step.stream, step.time));
        step(self) == step(other) && is(self.further.as_ref(), other.further.as_ref())
    }

    fn add_to(&self, known: &mut Option<Rc<Complete>>, nothing: &Complete) {
        add(known, self.further.as_ref());
        if let Some(step) = &self.step {
            let known = known.get_or_insert_with(|| Rc::new(nothing.clone()));
            Rc::make_mut(known).add(step);
        }
    }
}

/// Whether both are one.
fn is(one: Option<&Rc<Complete>>, other: Option<&Rc<Complete>>) -> bool {
    one.map(Rc::as_ptr) == other.map(Rc::as_ptr)
}

/// Joins `other` into `known`, which it becomes where nothing was known.
fn add(known: &mut Option<Rc<Complete>>, other: Option<&Rc<Complete>>) {
    match (&mut *known, other) {
        (_, None) => {}
        (None, Some(other)) => *known = Some(other.clone()),
        (Some(own), Some(other)) if Rc::ptr_eq(own, other) => {}
        (Some(own), Some(other)) => Rc::make_mut(own).join(other),
    }
}

/// The proofs of some packets, or of parts of plain memory.
#[derive(Debug, Default)]
pub(super) struct Proofs {
    all: Vec<Proof>,
    /// Whether some part has none.
    partial: bool,
}

impl Proofs {
    pub(super) fn add(&mut self, proof: Option<Proof>) {
        match proof {
            // Packets of one step mostly come one after another.
            Some(proof) if self.all.last().is_some_and(|last| proof.is_within(last)) => {}
            Some(proof) => self.all.push(proof),
            None => self.partial = true,
        }
    }

    /// What each thread has that has waited for some of it, or read it. Where proofs differ, it may have any one of them, and
    /// only a thread that has waited for all of it has all.
    pub(super) fn together(mut self, knows: &Knowledge) -> Option<Proof> {
        if self.all.len() <= 1 && !self.partial {
            return self.all.pop();
        }
        let mut further = None;
        for proof in &self.all {
            add(&mut further, proof.each.as_ref());
            if let Some(whole) = &proof.whole {
                whole.add_to(&mut further, &knows.nothing());
            }
        }
        let whole = Some(Whole {
            further: Some(further?),
            step: None,
        });
        Some(Proof { each: None, whole })
    }
}

impl Knowledge {
    pub(super) fn new(clocks: &Clocks) -> Self {
        let nothing = Complete {
            all: clocks.clock(),
            single: clocks.clock(),
        };
        Self {
            seen: clocks.clock(),
            met: Rc::new(nothing.clone()),
            over: nothing,
            proofs: Vec::new(),
        }
    }

    fn nothing(&self) -> Complete {
        Complete {
            all: self.over.all.empty(),
            single: self.over.single.empty(),
        }
    }

    /// The lane's threads meet: each learns what the others have waited for.
    pub(super) fn meet(&mut self) {
        for proof in self.proofs.drain(..) {
            let whole = proof.whole.as_ref();
            let further = whole.and_then(|whole| whole.further.as_ref());
            for known in proof.each.iter().chain(further) {
                self.over.join(known);
            }
            if let Some(step) = whole.and_then(|whole| whole.step) {
                self.over.add(&step);
            }
        }
        self.met = Rc::new(self.over.clone());
    }

    /// Some thread has a proof.
    pub(super) fn prove(&mut self, proof: Proof) {
        if !self.proofs.last().is_some_and(|last| proof.is_within(last)) {
            self.proofs.push(proof);
        }
    }

    /// Proof by packets that the step `stamp` sends, each thread of which holds `held`.
    pub(super) fn sent(&self, stamp: Option<&Stamp>, held: &[Proof]) -> Proof {
        Proof::behind(stamp, Some(self.met.clone()), held, &self.nothing())
    }

    /// The same by plain memory that the step writes, for later steps of the same lane: a thread that reads an element has
    /// written it, or has met the one that did.
    pub(super) fn kept(&self, stamp: Option<&Stamp>, held: &[Proof]) -> Proof {
        Proof::behind(stamp, None, held, &self.nothing())
    }

    /// Counts one more step of `stream`, which owns these clocks.
    pub(super) fn tick(&mut self, stream: usize) -> u32 {
        self.over.all.tick(stream);
        self.seen.tick(stream)
    }

    /// See [`Clock::flatten`].
    pub(super) fn flatten(&mut self) {
        self.seen.flatten();
        self.over.all.flatten();
        self.over.single.flatten();
    }

    /// Clocks of a lane that starts here; see [`Clock::based`]. Its threads [`meet`](Self::meet) first.
    pub(super) fn based(&self, origin: usize, number: usize) -> Self {
        Self {
            seen: self.seen.based(origin, number),
            over: Complete {
                all: self.over.all.based(origin, number),
                single: self.over.single.based(origin, number),
            },
            met: self.met.clone(),
            proofs: Vec::new(),
        }
    }

    /// Joins the clocks of another lane or stream, whose threads have just met.
    pub(super) fn join(&mut self, other: &Self) {
        self.seen.join(&other.seen);
        self.over.join(&other.over);
    }

    pub(super) fn sees(&self, stamp: &Stamp) -> bool {
        self.seen.get(stamp.stream as usize) >= stamp.time
    }

    /// Whether a step is complete for all threads, or for each by a packet that it has waited for in the current step: `held`.
    pub(super) fn outlives(&self, stamp: &Stamp, held: &[Proof]) -> bool {
        self.complete(held).any(|known| known.has(stamp))
    }

    /// The same of the step with all that its lane did before.
    pub(super) fn outlives_all(&self, stamp: &Stamp, held: &[Proof]) -> bool {
        self.complete(held).any(|known| known.has_all(stamp))
    }

    fn complete<'a>(&'a self, held: &'a [Proof]) -> impl Iterator<Item = &'a Complete> {
        let each = held.iter().filter_map(|proof| proof.each.as_deref());
        std::iter::once(&self.over).chain(each)
    }

    /// Whether the lane's threads have met since the step `stamp` of theirs.
    pub(super) fn met_since(&self, stamp: &Stamp) -> bool {
        self.met.has_all(stamp)
    }
}
