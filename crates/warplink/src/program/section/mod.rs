//! Kernel sections: a kernel launch as one operation of a host program.
//!
//! A section has lanes; each is one block of the launch. The steps of a lane run in order. Lanes run concurrently and
//! are ordered only by signals and packets. All lanes of a launch are resident at once, so they may wait for lanes of
//! other ranks without deadlock. `docs/language.md` teaches sections.
//!
//! | module | subject |
//! |---|---|
//! | [`ir`] | the text as a tree: steps, loops, expressions |
//! | [`layout`] | layout of scratch in a workspace |
//! | [`instance`] | a section of one rank, with outer names resolved |
//! | [`function`] | row functions |
//! | `visit` | traversal of the tree |
//! | [`lane`] | fully resolved steps of one lane in one launch |

mod compile;
pub mod function;
pub mod instance;
pub mod ir;
mod iterations;
pub mod lane;
pub mod layout;
mod names;
mod period;
mod reached;
mod remainders;
mod resolve;
mod step_cache;
mod thresholds;
mod view;
mod visit;

pub(crate) use compile::{
    Addresses, KERNEL, MAX_TENSOR_BYTES, PairLayout, TIMES_HEADER, UNPUBLISHED, pair_text,
    text as kernel_text, too_large, traced_text as traced_kernel_text,
};
pub use function::{
    Function, Literal, RowArgument, RowBinary, RowExpr, RowFunction, RowParameter, RowReduction,
    RowStep, RowUnary,
};
pub(crate) use function::{RowOrder, RowValue};
pub(crate) use instance::OperandMemory;
pub use instance::{SectionInstance, SectionMemory, SectionTensor, TensorId};
pub use ir::{
    Announcement, Application, DeviceValue, FunctionArgument, IntegerStore, Move, Otherwise,
    Packing, Place, Receiver, ReduceOperator, Scratch, Section, Source, Step, StepKind, Verb,
    WordRange, WordValue,
};
pub use lane::{LaneMove, LaneStep, LaneStepKind, Matching, Part};
pub(crate) use layout::ROW_ELEMENTS_OF_LINES;
pub use layout::{Area, ScratchId, ScratchInstance, WorkspaceLayout};
pub(crate) use names::FreeNames;
pub(crate) use period::period;
pub(crate) use remainders::common_multiple;
pub use resolve::{ReadValues, ReadWord};
pub(crate) use resolve::{Resolution, VALUE_TYPES};
pub(in crate::program) use step_cache::StepCache;
pub(crate) use thresholds::Thresholds;
pub(crate) use visit::{ExprUse, Visitor};

/// Maximum number of lanes of a section.
pub const MAX_LANES: usize = 1024;

/// Maximum number of threads of a lane: CUDA's limit for a block.
pub const MAX_THREADS: usize = 1024;

/// Maximum number of steps of a lane in one launch, counting every iteration. Bounds the verification time.
pub const MAX_LANE_STEPS: usize = 1 << 16;

/// Maximum number of targets of a step, and of sources: the operand capacity of the kernels.
pub const MAX_OPERANDS: usize = 32;

/// Longest period in which a section may use the epoch. The verifier simulates a whole period.
pub const MAX_PERIOD: u64 = 64;
