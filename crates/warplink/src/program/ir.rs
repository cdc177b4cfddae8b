//! Representation of host programs.
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
use super::section::ir::{Application, DeviceValue, Place, ReduceOperator, Scratch, Section};
pub use super::site::Position;
pub use crate::device::{Collective, ElementwiseOp};
use crate::dtype::DType;
pub use crate::p2p::{Direction, Protocol};

/// A host program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    /// Its name.
    pub name: String,
    /// Parameters that the caller sets, such as `m`, `k`, `n`.
    pub parameters: Vec<Parameter>,
    /// Programs defined earlier in the text, in order. The main program may call any of them, and each may call those
    /// defined before it, which rules out recursion.
    pub subprograms: Vec<Subprogram>,
    /// Statements that every rank runs.
    pub body: Vec<Statement>,
}

impl Program {
    /// Whether any `expect` states the value of an output.
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

/// A program that later programs of the same text may call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Subprogram {
    /// Its name.
    pub name: String,
    /// Parameters that a call sets.
    pub parameters: Vec<Parameter>,
    /// Statements of the program. Its inputs and outputs are tensors of the caller or parts of them.
    pub body: Vec<Statement>,
}

/// One statement.
pub type Statement = Node<StatementKind>;

/// Statements other than name bindings, loops and branches.
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
        /// Destination.
        target: TensorRef,
        /// Source.
        source: TensorRef,
    },
    /// `C = matmul(A, B)`, `C += matmul(A, B) + bias`, `C = linear(X, W, bias)`.
    Matmul {
        /// Destination, `m × n`.
        target: TensorRef,
        /// Product to compute.
        product: Product,
        /// Whether the product is added to the target (`+=`).
        accumulate: bool,
    },
    /// `C = sum(X, Y)`, `C += sum(P[s] for s in 0..world)`, `D = cast(C)`; the target may be one of the
    /// sources.
    Elementwise {
        /// Operation; copies have their own statement.
        op: ElementwiseOp,
        /// Destination.
        target: TensorRef,
        /// Operands, in order.
        sources: Vec<Each<TensorRef>>,
        /// Whether a sum is added to the target (`+=`).
        accumulate: bool,
    },
    /// `G = all_gather(A)`, `G = all_gather(A) among row` and the other collectives, run by a collective engine.
    Collective {
        /// Destination.
        target: TensorRef,
        /// Source.
        source: TensorRef,
        /// Kind of collective.
        collective: Collective<Expr>,
        /// List of participating ranks, in the order of their parts; `None` for all ranks.
        among: Option<String>,
    },
    /// `share { … }`: exchanges the handles of a batch of transfers with their peers. Blocks this rank's host until
    /// each peer has shared the matching transfer.
    Share(Vec<ShareItem>),
    /// `post s, r`: enqueues a group of transfers.
    Post(Vec<Each<TransferRef>>),
    /// `post s[j] = matmul(A[j], B) for j in 1..world`: enqueues a group of put sends whose bytes are products, each
    /// stored straight into its receiver's memory. The tensors named by the sends are neither read nor written.
    PostMatmul(Each<PostedMatmul>),
    /// `wait s`: blocks the current stream until all posts so far of the transfers are complete.
    Wait(Vec<Each<TransferRef>>),
    /// `get_stream main`: binds a name to the current stream.
    GetStream(String),
    /// `set_stream pool(j % streams)`: changes the current stream.
    SetStream(StreamRef),
    /// `fork high(0), pool(i) for i in 0..streams { … }`: the listed streams wait for the work enqueued so far on the
    /// current stream; after the block, the current stream waits for all of them.
    Fork {
        /// The forked streams; the current one is not among them.
        streams: Vec<Each<StreamRef>>,
        /// Statements between fork and join.
        body: Vec<Statement>,
    },
    /// `synchronize pool(j)`: makes the current stream wait for the work enqueued so far on another stream.
    Synchronize(StreamRef),
    /// `ring(n = 8, A = X[0], B = Y)`: runs another program of the text inline.
    Call {
        /// The program.
        program: String,
        /// Arguments: parameter values, inputs and outputs.
        arguments: Vec<Argument>,
    },
    /// `scratch P: packets16 T[2, world, n]`; `scratch B: u8[2, n], S: f32[2, m]`, whose rows alternate.
    Scratch(Vec<Scratch>),
    /// `function norm(x) { … }`: defines a row function for later kernels.
    Function(Function),
    /// `kernel lane in 0..lanes threads 512 { … }`: launches a kernel on the current stream.
    Kernel(Section),
    /// `inout X = Y[rank]`: allows the caller to pass the same memory for a tensor and a part of another.
    InOut {
        /// Name of the tensor that occupies the whole part.
        tensor: String,
        /// The part.
        part: TensorRef,
    },
    /// `let m = C[rank] on r at most rows`: binds an integer in an input for expected values.
    Value(DeviceValue),
    /// `expect Y = sum(X on r for r in 0..world)`: value of an output at the end of a run.
    Expect(Expectation),
    /// `expect N[t] = norm(reduce(X[t] on r for r in 0..world, sum), W)`: the same, through a row function.
    ExpectRows(Application),
}

/// Expected value of an output, as a function of inputs of all ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expectation {
    /// The output, or a part of it.
    pub target: TensorRef,
    /// Operator that combines the terms in order; `None` with a single term.
    pub operator: Option<ReduceOperator>,
    /// Terms; exactly one without an operator.
    pub terms: Vec<Each<Term>>,
    /// Bias vector added to each row; an omitted optional tensor adds nothing.
    pub plus: Option<Place>,
}

/// Term of an expectation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Term {
    /// `X on r`: an input of a rank.
    Place(Place),
    /// `matmul(A on r, B)`: a product of inputs.
    Product(Place, Place),
}

/// Argument of a program call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Argument {
    /// Name of a parameter, input or output of the called program.
    pub name: String,
    /// Value or tensor passed for it.
    pub value: ArgumentValue,
}

/// The value of an argument.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ArgumentValue {
    /// `n / 2`: any integer other than a name or a list element.
    Integer(Expr),
    /// `bf16`.
    ElementType(DType),
    /// `X[0]`: a tensor or a part of it, or any other name.
    Reference(TensorRef),
}

/// A send whose bytes are a product, stored directly at the receiver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PostedMatmul {
    /// The send.
    pub send: TransferRef,
    /// Product to compute; all products of a group share the right operand and bias.
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
    /// Vector of `n` added to each row, or the target: `C = matmul(A, B) + C`.
    pub bias: Option<TensorRef>,
}

/// A statement inside `share { … }`; all iterations of its loops belong to the same exchange.
pub type ShareItem = Node<Transfer>;

/// Role of a tensor for the program's caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// The caller's memory, read only.
    Input,
    /// The caller's memory, written in full.
    Output,
    /// Memory allocated by the program.
    Local,
}

/// A tensor with one instance per rank, or a family of tensors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Declaration {
    /// Role for the caller.
    pub role: Role,
    /// `optional`: the caller may omit it. An omitted input adds nothing as a bias and must not be read otherwise; an
    /// omitted output is allocated by the program.
    pub optional: bool,
    /// Its name.
    pub name: String,
    /// `B[i]: … for i in 0..count(n)`: a family with one member per index value, named `B[0]`, `B[1]` and so on. Its
    /// shape may use the index.
    pub family: Option<Over>,
    /// Its element type.
    pub dtype: ElementType,
    /// Extents of this rank's instance, outermost first.
    pub shape: Vec<Expr>,
    /// Memory order of the elements, which are contiguous.
    pub order: Order,
    /// `= 0`: whether it starts at 0 in every run. The first accumulation is stored instead of added, so this costs
    /// nothing unless an element is read before it is written.
    pub zero: bool,
    /// How the instance relates to the tensor as a whole.
    pub sharding: Sharding,
}

/// Memory order of a tensor's elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Order {
    /// The last axis varies fastest.
    RowMajor,
    /// `column_major`: the axis before the last varies fastest, so that memory holds the transpose.
    ColumnMajor,
    /// `column_major if transposed_b == 1`: column-major if the condition holds, row-major otherwise.
    ColumnMajorIf(Condition),
}

/// How a rank's instance relates to the tensor as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Sharding {
    /// Every rank has the whole tensor.
    Whole,
    /// Each rank has its part along this axis: `f16[m / world over ranks, k]`. The declared shape is the shape of the
    /// part.
    Ranks(usize),
    /// The outermost axis counts the iterations of the stream loop: `f16[world over loop, m, k]`.
    Loop,
}

/// Implementation of a transfer.
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
    /// Direction.
    pub direction: Direction,
    /// Memory to send from or receive into.
    pub tensor: TensorRef,
    /// The other rank.
    pub peer: Expr,
    /// Distinguishes transfers between the same two ranks; 0 if the text names none.
    pub tag: Expr,
    /// Implementation that performs it.
    pub backend: Backend,
}

/// Reference to a declared transfer: `s`, `s[j - 1]`.
///
/// A declaration inside loops makes one transfer per iteration. The indices select values of the innermost of those
/// loops. Loops without an index must enclose the reference too, and mean their current iteration.
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
    /// Name bound by `get_stream`.
    Named(String),
}
