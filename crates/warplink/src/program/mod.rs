//! Host programs: what each rank enqueues, described once for all ranks.
//!
//! Every rank runs the same program; integer expressions over `rank`, `world`, `streams`, loop
//! indices and the program's parameters make the ranks differ. A program is built from text
//! ([`Program::parse`]) or by a lowering, verified for a world size, unrolled for one rank, and
//! executed:
//!
//! | module | subject |
//! |---|---|
//! | [`ir`], [`expr`] | the representation |
//! | [`text`] | the grammar, parser and printer |
//! | [`unrolled`], [`mod@unroll`] | a program for one rank: a flat list of operations |
//! | [`lower`] | from matrix products over sharded operands to programs |
//! | [`mod@verify`], [`finding`] | whether the ranks' programs fit together, and what is wrong if not |
//! | [`execute`] | runs a program on a device |

pub mod execute;
pub mod expr;
pub mod finding;
pub mod ir;
pub mod lower;
#[doc(hidden)]
pub mod sample;
pub mod text;
pub mod unroll;
pub mod unrolled;
pub mod verify;

pub use execute::{Bindings, CapturedPlan, Executor, Plan, PrepareOptions, Prepared, Trace};
pub use expr::{Condition, Expr};
pub use finding::{Finding, FindingKind, Place, refused};
pub use ir::{Backend, Direction, Program, Protocol};
pub use unroll::unroll;
pub use unrolled::{
    Operation, OperationKind, Parameters, Range, Site, StreamKind, TensorId, TensorInstance,
    TransferId, TransferInstance, Unrolled,
};
pub use verify::{Report, verify};
