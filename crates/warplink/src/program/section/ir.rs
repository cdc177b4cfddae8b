//! The representation of kernel sections, as their text says them.

use super::function::Literal;
use crate::device::ReduceOp;
use crate::program::construct::{Branch, Each, ElementType, Loop, TensorRef};
use crate::program::expr::{Condition, Expr};
use crate::program::site::Position;

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

/// How scratch holds data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Packing {
    /// As it is.
    Plain,
    /// `packets8`: 4 bytes of data and a flag of 4, stored at once.
    Packets8,
    /// `packets16`: twice 4 bytes of data and a flag of 4, stored at once.
    Packets16,
    /// `packets128`: 120 bytes of data and a flag of 8, stored by neighbouring threads at once.
    Packets128,
}

impl Packing {
    /// Every packing.
    pub const ALL: [Self; 4] = [
        Self::Plain,
        Self::Packets8,
        Self::Packets16,
        Self::Packets128,
    ];

    /// The word for it in program text; empty for plain data.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Plain => "",
            Self::Packets8 => "packets8",
            Self::Packets16 => "packets16",
            Self::Packets128 => "packets128",
        }
    }

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

/// One step and where it stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// Where its first word is.
    pub position: Position,
    /// What it says.
    pub kind: StepKind,
}

impl From<StepKind> for Step {
    fn from(kind: StepKind) -> Self {
        Self {
            position: Position::default(),
            kind,
        }
    }
}

/// What a step says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StepKind {
    /// `let slot = epoch % 2`.
    LetInteger {
        /// The name that is bound.
        name: String,
        /// Its value.
        value: Expr,
    },
    /// `let mine = X[lane of lanes]`.
    LetTensor {
        /// The name that is bound.
        name: String,
        /// What it stands for, with at least one selection.
        value: TensorRef,
    },
    /// A put, get, copy or reduction.
    Move(Move),
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
    /// `for c in 0..chunks { … }`.
    For(Loop<Step>),
    /// `if c > 0 { … } else { … }`.
    If(Branch<Step>),
}

impl StepKind {
    /// The word for what a lane does; none for names, loops and branches.
    pub const fn word(&self) -> Option<&'static str> {
        match self {
            Self::LetInteger { .. } | Self::LetTensor { .. } | Self::For(_) | Self::If(_) => None,
            Self::Move(it) => Some(match it.verb {
                Verb::Put => "put",
                Verb::Get => "get",
                Verb::Copy => "copy",
                Verb::Reduce(_) => "reduce",
                Verb::Apply(_) => "rows",
            }),
            Self::Signal(_) => Some("signal"),
            Self::Wait(_) => Some("wait"),
            Self::Barrier => Some("barrier"),
            Self::Announce(_) => Some("announce"),
            Self::Agree(_) => Some("agree"),
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
    /// `H[t]; N[t] = norm(reduce(X[t] on r for r in 0..world, sum), R[t], W, 1e-6)`.
    Apply(Application),
}

/// A function of a row: what it is given of a move's sources, and which of the targets get what.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Application {
    /// The function's name.
    pub function: String,
    /// What it is given, in order; together all sources.
    pub arguments: Vec<Argument>,
    /// For each result, how many items of the targets' list it goes to; together all of them.
    pub results: Vec<usize>,
}

/// What a function of rows is given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Argument {
    /// `R[t]`: the next source.
    Source,
    /// `reduce(X[t], P[slot], sum)`: so many items of the sources' list.
    Reduced(usize, Operator),
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
