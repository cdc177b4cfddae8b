//! Representation of kernel sections, as a tree of their text.

use super::function::Literal;
use super::visit::{ExprUse, NameUse, Visitor};
use crate::device::ReduceOp;
use crate::named::named;
use crate::program::construct::{Each, ElementType, Node, Selection, TensorRef};
use crate::program::expr::{Condition, Expr, Operator};

/// `scratch P: packets16 T[2, world, n]`: workspace memory with the same layout on every rank, written by peers. Its
/// contents at the start of a run must not be read unless it is declared persistent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scratch {
    /// Its name.
    pub name: String,
    /// `scratch persistent S: f32[n]`: whether data of an earlier run may be read.
    pub persistent: bool,
    /// Packing of data and flags.
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
    /// Data bytes per packet, and packet size; both 1 for plain data.
    pub const fn packet(self) -> (usize, usize) {
        match self {
            Self::Plain => (1, 1),
            Self::Packets8 => (4, 8),
            Self::Packets16 => (8, 16),
            Self::Packets128 => (120, 128),
        }
    }

    /// Whether a read waits for the packet's flag.
    pub const fn is_packets(self) -> bool {
        !matches!(self, Self::Plain)
    }
}

/// `kernel lane in 0..lanes threads 512 { … }`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Section {
    /// Name of the lane index in the body.
    pub lane: String,
    /// Number of lanes; each is one block of the launch.
    pub lanes: Expr,
    /// Threads per lane.
    pub threads: Expr,
    /// Steps of each lane. In them, `epoch` is the number of earlier launches that used the workspace.
    pub body: Vec<Step>,
}

/// One step.
pub type Step = Node<StepKind>;

/// Steps other than name bindings, loops and branches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StepKind {
    /// A put, get, copy or reduction.
    Move(Move),
    /// A function of a row.
    Apply(Application),
    /// `let n = C[rank] at most rows`: reads an integer from memory, which the following steps use.
    Value(DeviceValue),
    /// `K[p] on q = integer(n + 1)`: stores an integer.
    Store(IntegerStore),
    /// `signal q`, `signal q at lane + 1`: signals a lane of each listed rank that this lane's earlier steps are
    /// complete.
    Signal(Vec<Each<Receiver>>),
    /// `wait q`: blocks until each listed rank has signalled this lane once more than was waited for.
    Wait(Vec<Each<Expr>>),
    /// `barrier`: signals to all other ranks, then waits for all of them.
    Barrier,
    /// `announce n, root in C[slot]`: sends the arguments of this launch to all other ranks. `announce n, root with X
    /// in C[slot]` also sends the location of this rank's tensor `X`. `announce n in C[slot] to p, q` sends to these
    /// ranks only.
    Announce(Announcement),
    /// `agree n, root in C[slot]`: waits for the announcements of all other ranks, and fails the launch if one
    /// differs. After `agree n, root with X in C[slot]`, `X on q` is the tensor that rank q announced, if
    /// `reachable(X)`.
    Agree(Announcement),
}

impl StepKind {
    /// Keyword of the step.
    pub const fn word(&self) -> &'static str {
        match self {
            Self::Move(it) => match it.verb {
                Verb::Put => "put",
                Verb::Get => "get",
                Verb::Copy => "copy",
                Verb::Reduce(_) => "reduce",
            },
            Self::Apply(_) => "rows",
            Self::Value(_) => "value",
            Self::Store(_) => "integer",
            Self::Signal(_) => "signal",
            Self::Wait(_) => "wait",
            Self::Barrier => "barrier",
            Self::Announce(_) => "announce",
            Self::Agree(_) => "agree",
        }
    }

    /// Whether it compares announcements of peers with this rank's.
    pub(super) const fn compares_announcements(&self) -> bool {
        matches!(self, Self::Agree(_))
    }

    /// Whether it synchronizes the threads of a lane.
    pub(super) const fn synchronizes(&self) -> bool {
        match self {
            Self::Signal(_) | Self::Wait(_) | Self::Barrier => true,
            // Announcements are packets, which their flags order.
            Self::Move(_) | Self::Apply(_) | Self::Value(_) | Self::Store(_) => false,
            Self::Announce(_) | Self::Agree(_) => false,
        }
    }

    /// Whether it reads or writes data, which the threads share.
    pub(super) const fn moves(&self) -> bool {
        matches!(
            self,
            Self::Move(_) | Self::Apply(_) | Self::Value(_) | Self::Store(_)
        )
    }

    /// The move, if it is one: it may leave words as they are.
    pub(super) const fn as_move(&self) -> Option<&Move> {
        match self {
            Self::Move(it) => Some(it),
            _ => None,
        }
    }

    /// Values that ranks compare.
    pub(super) fn compared(&self) -> &[Expr] {
        match self {
            Self::Announce(it) | Self::Agree(it) => &it.values,
            _ => &[],
        }
    }

    /// How threads divide what it stores.
    pub(super) const fn storing(&self) -> Storing {
        match self {
            Self::Store(_) => Storing::Integer,
            Self::Apply(_) => Storing::Rows,
            _ => Storing::Elements,
        }
    }

    /// Its effect, if it stores an integer at the index of a loop, or reads one word: threads may divide iterations of such
    /// steps among themselves.
    pub(super) fn of_one_word(&self, index: &str) -> Option<OfOneWord<'_>> {
        let last = |place: &Place| place.tensor.selections.last().cloned();
        match self {
            Self::Store(it) => {
                let at = Selection::Index(Expr::Name(index.to_owned()));
                (last(&it.target) == Some(at)).then_some(OfOneWord::Stored)
            }
            Self::Value(it) => {
                let one = match &it.gives {
                    WordValue::Word(_) => true,
                    WordValue::Count(range) => !range.rows && it.place.is_one_word(),
                    WordValue::Position(..) => false,
                };
                one.then_some(OfOneWord::Read(&it.place))
            }
            _ => None,
        }
    }

    /// Passes every part of the step to a visitor, in the order in which it is resolved.
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
                    if let FunctionArgument::Sources { sources, operator } = argument {
                        operator.iter().for_each(|it| visitor.operator(it));
                        visitor.each(sources, Visitor::source);
                    }
                }
            }
            Self::Value(it) => visitor.device_value(it),
            Self::Store(it) => {
                visitor.expression(&it.value, ExprUse::Value);
                visitor.target(&it.target);
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

/// An integer that is read from memory at run time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceValue {
    /// The name that is bound.
    pub name: String,
    /// The words that are read.
    pub place: Place,
    /// The integer that they give.
    pub gives: WordValue,
}

/// The integer that words of memory give.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WordValue {
    /// `C[rank] at most rows`: a single word, from 0 to this value. Any other value is an error of the launch.
    Word(Expr),
    /// `count(E[a..b] in lo..hi)`: the number of words in a range, or of rows with one.
    Count(WordRange),
    /// `position(j of E[a..b] in lo..hi)`: the position of the j-th of these, counted from 0, among all words or rows.
    Position(Expr, WordRange),
}

/// `in from..to`, `not in from..to`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WordRange {
    /// Whether rows are looked for, along the first axis, instead of words: a row is in the range if any of its words is.
    pub rows: bool,
    /// Whether words of the range are meant, or all others.
    pub inside: bool,
    /// Least value of the range.
    pub from: Expr,
    /// Its end, exclusive.
    pub to: Expr,
}

impl DeviceValue {
    /// The words that it looks for, if it looks for any.
    pub(super) const fn range(&self) -> Option<&WordRange> {
        match &self.gives {
            WordValue::Word(_) => None,
            WordValue::Count(range) | WordValue::Position(_, range) => Some(range),
        }
    }

    /// The expressions that it depends on, apart from those of its place.
    pub(crate) fn expressions(&self) -> impl Iterator<Item = &Expr> {
        let first = match &self.gives {
            WordValue::Word(first) | WordValue::Position(first, _) => Some(first),
            WordValue::Count(_) => None,
        };
        let range = self.range().into_iter().flat_map(|it| [&it.from, &it.to]);
        first.into_iter().chain(range)
    }
}

/// An integer that is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IntegerStore {
    /// Destination: one element.
    pub target: Place,
    /// The integer.
    pub value: Expr,
}

/// Launch arguments that ranks compare.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Announcement {
    /// The integers; only the lower 32 bits are compared.
    pub values: Vec<Expr>,
    /// Tensors whose locations are sent.
    pub tensors: Vec<String>,
    /// Destination: `packets16` scratch, `i32[world, words]` after its selections, one row per rank.
    pub rows: TensorRef,
    /// Receiving ranks; `None` for all others.
    pub peers: Option<Vec<Each<Expr>>>,
}

impl Announcement {
    /// Number of words: one for each integer, padded to an even number, and two for each tensor.
    pub fn words(&self) -> usize {
        Self::words_of(self.values.len(), self.tensors.len())
    }

    /// Number of words for this many integers and tensors.
    pub(super) const fn words_of(integers: usize, tensors: usize) -> usize {
        match tensors {
            0 => integers,
            _ => integers.next_multiple_of(2) + 2 * tensors,
        }
    }
}

/// Receiver of a signal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Receiver {
    /// The rank.
    pub rank: Expr,
    /// The receiving lane; without one, the lane of the same number.
    pub lane: Option<Expr>,
}

/// How the threads of a lane divide what a step stores.
#[derive(Clone, Copy, Debug)]
pub(super) enum Storing {
    /// One of them stores an integer.
    Integer,
    /// Rows, in the same way in each execution.
    Rows,
    /// By how places are aligned, and how long they are.
    Elements,
}

/// Effect of a step on one word.
#[derive(Clone, Copy, Debug)]
pub(super) enum OfOneWord<'s> {
    Stored,
    Read(&'s Place),
}

/// A step that moves data: every target receives the elementwise combination of the sources.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Move {
    /// Kind of move.
    pub verb: Verb,
    /// Destinations, at least one; exactly one unless it reduces.
    pub targets: Vec<Each<Place>>,
    /// Sources, at least one, in the order of the operator; exactly one unless it reduces.
    pub sources: Vec<Each<Source>>,
}

/// Kind of a move.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verb {
    /// `put x to P[slot] on q`: from this rank's memory to a peer's.
    Put,
    /// `get X on q to R`: from a peer's memory to this rank's.
    Get,
    /// `Y = copy(P[slot])`.
    Copy,
    /// `Y = reduce(X, P[slot], sum)`.
    Reduce(ReduceOperator),
}

/// Application of a row function: `H[t]; N[t] = norm(reduce(X[t] on r for r in 0..world, sum), R[t], W, 1e-6)`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Application {
    /// The function's name.
    pub function: String,
    /// Arguments, in order.
    pub arguments: Vec<FunctionArgument>,
    /// Destinations for each result; at least one list.
    pub results: Vec<Vec<Each<Place>>>,
}

impl Application {
    /// The sources of all arguments.
    pub fn sources(&self) -> impl Iterator<Item = &Each<Source>> {
        let lists = self.arguments.iter().map(|it| match it {
            FunctionArgument::Sources { sources, .. } => &sources[..],
            FunctionArgument::Number(_) => &[],
        });
        lists.flatten()
    }
}

/// Argument of a row function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FunctionArgument {
    /// `R[t]`, `reduce(X[t], P[slot], sum)`.
    Sources {
        /// Sources; exactly one without an operator.
        sources: Vec<Each<Source>>,
        /// Operator that combines them in order.
        operator: Option<ReduceOperator>,
    },
    /// `1e-6`.
    Number(Literal),
}

/// The operator of a reduction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReduceOperator {
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
    /// Rank that owns the tensor; this rank by default.
    pub on: Option<Expr>,
}

impl Place {
    /// Whether its last selection is of one word, `[k..k + 1]`.
    pub(super) fn is_one_word(&self) -> bool {
        match self.tensor.selections.last() {
            Some(Selection::Range(from, Expr::Binary(Operator::Add, start, one))) => {
                **start == *from && **one == Expr::Number(1)
            }
            _ => false,
        }
    }
}

impl From<TensorRef> for Place {
    fn from(tensor: TensorRef) -> Self {
        Self { tensor, on: None }
    }
}

/// A source: `P[r]`, or `X if r == rank else P[r]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// Source without a condition, or if the condition holds.
    pub place: Place,
    /// Condition, and replacement if it does not hold.
    pub otherwise: Option<(Condition, Otherwise)>,
}

impl Source {
    /// The places from which it may be read.
    pub(super) fn places(&self) -> impl Iterator<Item = &Place> {
        let otherwise = self.otherwise.iter().filter_map(|(_, it)| match it {
            Otherwise::Place(place) => Some(place),
            Otherwise::Number(_) => None,
        });
        std::iter::once(&self.place).chain(otherwise)
    }
}

/// Replacement of a source whose condition does not hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Otherwise {
    /// Another source.
    Place(Place),
    /// A number, as the argument of a row function.
    Number(Literal),
}

impl From<Place> for Source {
    fn from(place: Place) -> Self {
        Self {
            place,
            otherwise: None,
        }
    }
}
