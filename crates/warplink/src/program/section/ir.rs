//! The representation of kernel sections, as their text says them.

use super::function::Literal;
use super::visit::{ExprUse, NameUse, Visitor};
use crate::device::ReduceOp;
use crate::named::named;
use crate::program::construct::{Each, ElementType, Node, TensorRef};
use crate::program::expr::{Condition, Expr};

/// `scratch P: packets16 T[2, world, n]`: memory of the workspace, the same on every rank, which peers
/// write. What it holds when a run of the program begins is not to be read, unless it is declared to persist.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scratch {
    /// Its name.
    pub name: String,
    /// `scratch persistent S: f32[n]`: whether what an earlier run wrote may be read.
    pub persistent: bool,
    /// What its memory holds beside the data.
    pub packing: Packing,
    /// Its element type.
    pub dtype: ElementType,
    /// Extents, outermost first.
    pub shape: Vec<Expr>,
}

named! {
    /// How scratch holds data. The name is the word for it in program text.
    pub enum Packing: "packing" {
        /// As it is; program text says nothing then.
        Plain = "",
        /// 4 bytes of data and a flag of 4, stored at once.
        Packets8 = "packets8",
        /// Twice 4 bytes of data and a flag of 4, stored at once.
        Packets16 = "packets16",
        /// 120 bytes of data and a flag of 8, stored by neighbouring threads at once.
        Packets128 = "packets128",
    }
}

impl Packing {
    /// Bytes of data in a packet, and of the packet; both 1 for plain data.
    pub const fn packet(self) -> (usize, usize) {
        match self {
            Self::Plain => (1, 1),
            Self::Packets8 => (4, 8),
            Self::Packets16 => (8, 16),
            Self::Packets128 => (120, 128),
        }
    }

    /// Whether what is read is waited for by its flag.
    pub const fn is_packets(self) -> bool {
        !matches!(self, Self::Plain)
    }
}

/// `kernel lane in 0..lanes threads 512 { … }`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Section {
    /// The name of the lane's number in the body.
    pub lane: String,
    /// How many lanes there are: blocks of the launch.
    pub lanes: Expr,
    /// Threads of each.
    pub threads: Expr,
    /// What each lane does. `epoch` in it is how many launches used the workspace before.
    pub body: Vec<Step>,
}

/// One step.
pub type Step = Node<StepKind>;

/// What a step says that is no name, loop or branch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StepKind {
    /// A put, get, copy or reduction.
    Move(Move),
    /// A function of a row.
    Apply(Application),
    /// `signal q`, `signal q at lane + 1`: tells a lane of each of these ranks what this lane did before.
    Signal(Vec<Each<Receiver>>),
    /// `wait q`: until each of these ranks has signalled this lane once more than was waited for.
    Wait(Vec<Each<Expr>>),
    /// `barrier`: signals to all other ranks, then waits for all of them.
    Barrier,
    /// `announce n, root in C[slot]`: tells all other ranks what this launch is called with;
    /// `announce n, root with X in C[slot]`: and where this rank's tensor `X` lies. `announce n in C[slot] to p, q` tells
    /// these ranks only.
    Announce(Announcement),
    /// `agree n, root in C[slot]`: waits until all other ranks have announced, and fails the launch where one
    /// announced anything else. After `agree n, root with X in C[slot]`, `X on q` is where rank q said that
    /// its tensor lies, if `reachable(X)`.
    Agree(Announcement),
}

impl StepKind {
    /// The word for what a lane does.
    pub const fn word(&self) -> &'static str {
        match self {
            Self::Move(it) => match it.verb {
                Verb::Put => "put",
                Verb::Get => "get",
                Verb::Copy => "copy",
                Verb::Reduce(_) => "reduce",
            },
            Self::Apply(_) => "rows",
            Self::Signal(_) => "signal",
            Self::Wait(_) => "wait",
            Self::Barrier => "barrier",
            Self::Announce(_) => "announce",
            Self::Agree(_) => "agree",
        }
    }

    /// Whether it synchronizes the threads of a lane.
    pub(super) const fn synchronizes(&self) -> bool {
        match self {
            Self::Signal(_) | Self::Wait(_) | Self::Barrier => true,
            // Announcements are packets, which are ordered by their flags.
            Self::Move(_) | Self::Apply(_) | Self::Announce(_) | Self::Agree(_) => false,
        }
    }

    /// Whether it moves data, which threads handle side by side.
    pub(super) const fn moves(&self) -> bool {
        matches!(self, Self::Move(_) | Self::Apply(_))
    }

    /// Shows a visitor everything that the step consists of, in the order in which it is resolved.
    pub(super) fn visit<'s>(&'s self, visitor: &mut impl Visitor<'s>) {
        match self {
            Self::Move(it) => {
                if let Verb::Reduce(operator) = &it.verb {
                    visitor.operator(operator);
                }
                visitor.each(&it.targets, Visitor::target);
                visitor.each(&it.sources, Visitor::source);
            }
            Self::Apply(it) => {
                visitor.name(&it.function, NameUse::Function);
                for targets in &it.results {
                    visitor.each(targets, Visitor::target);
                }
                for argument in &it.arguments {
                    if let Argument::Sources { sources, operator } = argument {
                        operator.iter().for_each(|it| visitor.operator(it));
                        visitor.each(sources, Visitor::source);
                    }
                }
            }
            Self::Signal(receivers) => visitor.each(receivers, Visitor::receiver),
            Self::Wait(ranks) => visitor.each(ranks, |it, rank| it.expression(rank, ExprUse::Rank)),
            Self::Barrier => {}
            Self::Announce(it) | Self::Agree(it) => {
                for value in &it.values {
                    visitor.expression(value, ExprUse::Value);
                }
                for tensor in &it.tensors {
                    visitor.name(tensor, NameUse::Announced);
                }
                if let Some(peers) = &it.peers {
                    visitor.each(peers, |it, rank| it.expression(rank, ExprUse::Rank));
                }
                visitor.name(&it.rows.name, NameUse::Remote);
                visitor.tensor(&it.rows);
            }
        }
    }
}

/// What ranks tell one another of a launch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Announcement {
    /// The integers, of which the lower 32 bits count.
    pub values: Vec<Expr>,
    /// The tensors whose places are told.
    pub tensors: Vec<String>,
    /// Where it goes: `packets16` scratch, `i32[world, words]` after its selections, a row for each rank.
    pub rows: TensorRef,
    /// The ranks that are told; all others where there is no list.
    pub peers: Option<Vec<Each<Expr>>>,
}

impl Announcement {
    /// Words of an announcement: one for each integer, and two for each tensor, behind an even number of integers.
    pub fn words(&self) -> usize {
        Self::words_of(self.values.len(), self.tensors.len())
    }

    /// Words of an announcement of so many integers and tensors.
    pub(super) const fn words_of(integers: usize, tensors: usize) -> usize {
        match tensors {
            0 => integers,
            _ => integers.next_multiple_of(2) + 2 * tensors,
        }
    }
}

/// Whom a signal tells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Receiver {
    /// The rank.
    pub rank: Expr,
    /// Which of its lanes; that of the same number where the text names none.
    pub lane: Option<Expr>,
}

/// A step that moves data: every target gets the sources, combined element by element.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Move {
    /// What it is called.
    pub verb: Verb,
    /// What is written, at least one; exactly one where it does not reduce.
    pub targets: Vec<Each<Place>>,
    /// What is read, at least one, in the order of the operator; exactly one where it does not reduce.
    pub sources: Vec<Each<Source>>,
}

/// The word for a move.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verb {
    /// `put x to P[slot] on q`: from memory of this rank to a peer's.
    Put,
    /// `get X on q to R`: from a peer's memory to this rank's.
    Get,
    /// `Y = copy(P[slot])`.
    Copy,
    /// `Y = reduce(X, P[slot], sum)`.
    Reduce(Operator),
}

/// A function of a row: `H[t]; N[t] = norm(reduce(X[t] on r for r in 0..world, sum), R[t], W, 1e-6)`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Application {
    /// The function's name.
    pub function: String,
    /// What it is given, in order.
    pub arguments: Vec<Argument>,
    /// What is written, for each result; at least one list.
    pub results: Vec<Vec<Each<Place>>>,
}

/// What a function of rows is given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Argument {
    /// `R[t]`, `reduce(X[t], P[slot], sum)`.
    Sources {
        /// What is read; one where there is no operator.
        sources: Vec<Each<Source>>,
        /// How they are combined, in order.
        operator: Option<Operator>,
    },
    /// `1e-6`.
    Number(Literal),
}

/// The operator of a reduction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Operator {
    /// `sum`.
    Fixed(ReduceOp),
    /// The value of a parameter.
    Parameter(String),
}

/// A tensor of this rank, or `tensor on q`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The tensor.
    pub tensor: TensorRef,
    /// The rank whose tensor it is; this rank's where the text names none.
    pub on: Option<Expr>,
}

impl From<TensorRef> for Place {
    fn from(tensor: TensorRef) -> Self {
        Self { tensor, on: None }
    }
}

/// A source: `P[r]`, or `X if r == rank else P[r]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// What is read, where there is no condition or it holds.
    pub place: Place,
    /// The condition, and what is read where it does not hold.
    pub otherwise: Option<(Condition, Place)>,
}

impl From<Place> for Source {
    fn from(place: Place) -> Self {
        Self {
            place,
            otherwise: None,
        }
    }
}
