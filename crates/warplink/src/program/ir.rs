//! The representation of host programs.
//!
//! A [`Program`] is a list of statements. Names of tensors, integers and streams are visible from
//! their statement to the end of the block around it and may not be bound twice; a transfer is
//! visible from its declaration to the end of the program, under its name and the indices of the
//! loops around the declaration.

pub use super::construct::{
    Arm, AxisSelection, Branch, Each, ElementType, Loop, Node, NodeKind, Over, Selection, TensorRef,
};
use super::expr::{Condition, Expr};
use super::parameters::Parameter;
use super::section::function::Function;
use super::section::ir::{Application, Operator, Place, Scratch, Section};
pub use super::site::Position;
pub use crate::device::{Collective, ElementwiseOp};
use crate::dtype::DType;
pub use crate::p2p::{Direction, Protocol};

/// A host program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    /// Its name.
    pub name: String,
    /// What a caller gives values to, such as `m`, `k`, `n`.
    pub parameters: Vec<Parameter>,
    /// The programs that stand before it in the text, in order. It may call any of them, and each may call
    /// those before itself; so none calls itself.
    pub subprograms: Vec<Subprogram>,
    /// What each rank does.
    pub body: Vec<Statement>,
}

impl Program {
    /// Whether it says of any output what it expects.
    pub fn expects(&self) -> bool {
        fn any(body: &[Statement]) -> bool {
            Node::actions(body).any(|(_, action)| match action {
                StatementKind::Expect(_) | StatementKind::ExpectRows(_) => true,
                StatementKind::Fork { body, .. } => any(body),
                _ => false,
            })
        }
        any(&self.body)
    }
}

/// A program that others of the same text may call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Subprogram {
    /// Its name.
    pub name: String,
    /// What a call gives values to.
    pub parameters: Vec<Parameter>,
    /// What a call does. Inputs and outputs are tensors of the caller's, or parts of them.
    pub body: Vec<Statement>,
}

/// One statement.
pub type Statement = Node<StatementKind>;

/// What a statement says that is no name, loop or branch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StatementKind {
    /// `require m % world == 0`: refuses parameters that the program cannot run with.
    Require(Condition),
    /// `input A: f16[m, k]`, `output …`, `allocate …`.
    Declare(Declaration),
    /// `deallocate G`, in the order of the current stream; no access may follow it.
    Deallocate(String),
    /// `let row = [4 * (rank / 4) + c for c in 0..4]`: a list of integers.
    LetList {
        /// The name that is bound.
        name: String,
        /// Its elements.
        elements: Vec<Each<Expr>>,
    },
    /// `G[rank] = copy(A)`.
    Copy {
        /// What is written.
        target: TensorRef,
        /// What is read.
        source: TensorRef,
    },
    /// `C = matmul(A, B)`, `C += matmul(A, B) + bias`, `C = linear(X, W, bias)`.
    Matmul {
        /// What is written, `m × n`.
        target: TensorRef,
        /// What is computed.
        product: Product,
        /// Whether the product is added to the target (`+=`).
        accumulate: bool,
    },
    /// `C = sum(X, Y)`, `C += sum(P[s] for s in 0..world)`, `D = cast(C)`; the target may be one of the
    /// sources.
    Elementwise {
        /// What is computed; copies are statements of their own.
        op: ElementwiseOp,
        /// What is written.
        target: TensorRef,
        /// What it is computed of, in order.
        sources: Vec<Each<TensorRef>>,
        /// Whether a sum is added to the target (`+=`).
        accumulate: bool,
    },
    /// `G = all_gather(A)`, `G = all_gather(A) among row` and the other collectives, run by an engine.
    Collective {
        /// What is written.
        target: TensorRef,
        /// What is read.
        source: TensorRef,
        /// Which one.
        collective: Collective<Expr>,
        /// The list of the ranks that take part, in the order of their parts; all ranks if there is none.
        among: Option<String>,
    },
    /// `share { … }`: exchanges the handles of a batch of transfers with their peers, and holds
    /// this rank's host until each peer has shared the matching transfer.
    Share(Vec<ShareItem>),
    /// `post s, r`: enqueues a group of transfers.
    Post(Vec<Each<TransferRef>>),
    /// `post s[j] = matmul(A[j], B) for j in 1..world`: enqueues a group of sends by put whose bytes
    /// are products, each stored straight into its receiver's memory. What the sends name as theirs
    /// is neither read nor written.
    PostMatmul(Each<PostedMatmul>),
    /// `wait s`: holds the current stream until all posts so far of the transfers are complete.
    Wait(Vec<Each<TransferRef>>),
    /// `get_stream main`: names the current stream.
    GetStream(String),
    /// `set_stream pool(j % streams)`: makes a stream the current one.
    SetStream(StreamRef),
    /// `fork high(0), pool(i) for i in 0..streams { … }`: the streams named start after what the
    /// current stream was given so far, and after the block the current stream goes on when they are
    /// all done.
    Fork {
        /// The streams; none is the current one.
        streams: Vec<Each<StreamRef>>,
        /// What is done between.
        body: Vec<Statement>,
    },
    /// `synchronize pool(j)`: holds the current stream until what another was given so far is done.
    Synchronize(StreamRef),
    /// `ring(n = 8, A = X[0], B = Y)`: does here what another program of the text does.
    Call {
        /// The program.
        program: String,
        /// What it is given: values of its parameters, and its inputs and outputs.
        arguments: Vec<Argument>,
    },
    /// `scratch P: packets16 T[2, world, n]`.
    Scratch(Scratch),
    /// `function norm(x) { … }`: a function of rows, for kernels that follow.
    Function(Function),
    /// `kernel lane in 0..lanes threads 512 { … }`: launches a kernel on the current stream.
    Kernel(Section),
    /// `inout X = Y[rank]`: that the caller may have a tensor be a part of another.
    InOut {
        /// The name of the tensor that is all of the part.
        tensor: String,
        /// The part.
        part: TensorRef,
    },
    /// `expect Y = sum(X on r for r in 0..world)`: what an output is at the end of a run.
    Expect(Expectation),
    /// `expect N[t] = norm(reduce(X[t] on r for r in 0..world, sum), W)`: the same, by a function of rows.
    ExpectRows(Application),
}

/// What an output is to be, as a function of inputs of all ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expectation {
    /// The output, or a part of it.
    pub target: TensorRef,
    /// How more than one term is combined, in order.
    pub operator: Option<Operator>,
    /// What it is made of; one where there is no operator.
    pub terms: Vec<Each<Term>>,
    /// A vector that is added to each row; one that the caller leaves out adds nothing.
    pub plus: Option<Place>,
}

/// What an output is made of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Term {
    /// `X on r`: an input of a rank.
    Place(Place),
    /// `matmul(A on r, B)`: a product of inputs.
    Product(Place, Place),
}

/// What a call gives to a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Argument {
    /// A parameter, input or output of the program that is called.
    pub name: String,
    /// What it stands for.
    pub value: ArgumentValue,
}

/// The value of an argument.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ArgumentValue {
    /// `n / 2`: any integer that is neither a name nor an element of a list.
    Integer(Expr),
    /// `bf16`.
    ElementType(DType),
    /// `X[0]`: a tensor or a part of it, or whatever else has the name.
    Reference(TensorRef),
}

/// A send and the product that is stored where it is received.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PostedMatmul {
    /// The send.
    pub send: TransferRef,
    /// What is computed; with the same right operand and bias for all of a group.
    pub product: Product,
}

/// A product of matrices: `matmul(A, B)`, `matmul(A, B) + bias`. `linear(X, W, bias)` is
/// `matmul(X, transpose(W)) + bias`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Product {
    /// Left operand, `m × k`.
    pub a: TensorRef,
    /// Right operand, `k × n`.
    pub b: TensorRef,
    /// A vector of `n` that is added to each row, or the target: `C = matmul(A, B) + C`.
    pub bias: Option<TensorRef>,
}

/// A statement inside `share { … }`; the iterations of its loops all go into the same exchange.
pub type ShareItem = Node<Transfer>;

/// What a tensor is to the program's caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// Memory of the caller that the program only reads.
    Input,
    /// Memory of the caller that the program writes in full.
    Output,
    /// Memory that the program allocates.
    Local,
}

/// A tensor, of which every rank has its own instance, or a family of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Declaration {
    /// What it is to the caller.
    pub role: Role,
    /// `optional`: the caller may leave it out. An input that is left out adds nothing as a bias and
    /// is otherwise not to be read; an output that is left out is memory of the program's own.
    pub optional: bool,
    /// Its name.
    pub name: String,
    /// `B[i]: … for i in 0..count(n)`: a family with a member for each value of the index, named
    /// `B[0]`, `B[1]`, … and so on. Its shape may use the index.
    pub family: Option<Over>,
    /// Its element type.
    pub dtype: ElementType,
    /// Extents of this rank's instance, outermost first.
    pub shape: Vec<Expr>,
    /// In which order its memory holds the elements, which are contiguous.
    pub order: Order,
    /// `= 0`: whether it starts at 0 in every run. What is accumulated first is stored, so this is for
    /// free where nothing is read before it is written.
    pub zero: bool,
    /// How the instance relates to the tensor as a whole.
    pub sharding: Sharding,
}

/// In which order memory holds the elements of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Order {
    /// The last axis varies fastest.
    RowMajor,
    /// `column_major`: the axis before the last varies fastest, so that memory holds the transpose.
    ColumnMajor,
    /// `column_major if transposed_b == 1`: so where the condition holds, and else row-major.
    ColumnMajorIf(Condition),
}

/// How a rank's instance relates to the tensor as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Sharding {
    /// Every rank has all of it.
    Whole,
    /// Each rank has its part along this axis: `f16[m / world over ranks, k]`. The declared shape is
    /// that of the part.
    Ranks(usize),
    /// The outermost axis counts the iterations of the stream loop: `f16[world over loop, m, k]`.
    Loop,
}

/// What carries a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Backend {
    /// Warplink itself: a copy through a mapping of the peer's memory.
    Direct(Protocol),
    /// The collective engine's send and receive.
    Nccl,
}

/// Declaration of a transfer: `s = send G[j] to next tag j via get`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// Its name.
    pub name: String,
    /// Which way it goes.
    pub direction: Direction,
    /// What is sent, or where it is received.
    pub tensor: TensorRef,
    /// The other rank.
    pub peer: Expr,
    /// Tells transfers between the same two ranks apart; 0 where the text names none.
    pub tag: Expr,
    /// What carries it.
    pub backend: Backend,
}

/// A transfer that was declared: `s`, `s[j - 1]`.
///
/// A declaration inside loops makes one transfer for each iteration. The indices name the values
/// of the innermost of those loops; the loops that they leave out must be open here as well, and
/// stand for their current iteration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TransferRef {
    /// The transfer's name.
    pub name: String,
    /// Loop indices of its declaration.
    pub indices: Vec<Expr>,
}

/// A stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StreamRef {
    /// `caller`: the stream on which the program was started.
    Caller,
    /// `pool(e)`: one of the `streams` streams of the pool.
    Pool(Expr),
    /// `high(e)`: a stream of high priority, for communication.
    High(Expr),
    /// A name that `get_stream` bound.
    Named(String),
}
