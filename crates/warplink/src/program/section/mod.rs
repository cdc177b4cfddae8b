//! Kernel sections: what a launched kernel does, as one operation of a host program.
//!
//! A section has lanes, each a block of a launch. The steps of a lane happen in order; lanes run side by
//! side, and nothing orders two of them but signals and packets. All lanes of a launch are on the device
//! together, so they may wait for the lanes of other ranks. `docs/language.md` teaches sections.
//!
//! | module | subject |
//! |---|---|
//! | [`ir`] | the text as a tree: steps, loops, expressions |
//! | [`layout`] | where scratch lies in a workspace |
//! | [`instance`] | a section of one rank, with the names around it resolved |
//! | [`function`] | functions of rows |
//! | [`visit`] | going through the steps of the tree |
//! | [`lane`] | the steps of one lane in one launch, with everything resolved |

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
mod view;
mod visit;

pub(crate) use compile::{
    Addresses, KERNEL, MAX_TENSOR_BYTES, TIMES_HEADER, UNPUBLISHED, text as kernel_text, too_large,
    traced_text as traced_kernel_text,
};
pub use function::{
    Function, Literal, RowArgument, RowBinary, RowExpr, RowFunction, RowReduction, RowStep,
    RowUnary,
};
pub(crate) use function::{RowOrder, RowValue};
pub(crate) use instance::OperandMemory;
pub use instance::{SectionInstance, SectionMemory, SectionTensor};
pub use ir::{
    Announcement, Application, Argument, Move, Operator, Packing, Place, Receiver, Scratch,
    Section, Source, Step, StepKind, Verb,
};
pub use lane::{LaneStep, LaneStepKind, Part};
pub use layout::{Area, ScratchId, ScratchInstance, WorkspaceLayout};
pub(crate) use names::FreeNames;
pub(crate) use period::period;
pub(crate) use visit::{ExprUse, Visitor};

/// The most lanes of a section.
pub const MAX_LANES: usize = 1024;

/// The most threads of a lane.
pub const MAX_THREADS: usize = 1024;

/// The most steps of a lane in one launch, with every iteration counted.
pub const MAX_LANE_STEPS: usize = 1 << 16;

/// The most targets of a step, and the most sources: as many as kernels hold.
pub const MAX_OPERANDS: usize = 32;

/// The longest period in which a section may use the epoch.
pub const MAX_PERIOD: u64 = 64;
