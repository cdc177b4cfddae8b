//! Host programs: what each rank enqueues, described once for all ranks.
//!
//! Every rank runs the same program; integer expressions over `rank`, `world`, `streams`, loop
//! indices and the program's parameters make the ranks differ. A program is built from text
//! ([`Program::parse`]) or is a lowering of the library's, is verified for a world size, unrolled for
//! one rank, and executed. `docs/language.md` teaches the language.
//!
//! | module | subject |
//! |---|---|
//! | [`ir`], [`expr`] | the representation |
//! | [`parameters`] | the values that a caller gives |
//! | [`text`] | the grammar, parser and printer |
//! | [`rank_program`], [`mod@unroll`] | a program for one rank: a flat list of operations |
//! | [`lower`] | programs for matmuls over sharded operands, and the choice among them |
//! | [`section`] | kernel sections: what a launched kernel does |
//! | `machine` | steps through the lanes of kernel sections, for the verifier and the evaluator |
//! | [`mod@verify`], [`diagnostic`] | whether the ranks' programs fit together, and what is wrong if not |
//! | [`evaluate`] | what a program gives, computed without a device |
//! | [`cost`] | how long a program takes on a model of the hardware |
//! | [`execute`] | runs a program on a device |

mod access;
mod area;
mod construct;
pub mod cost;
pub mod diagnostic;
pub mod evaluate;
pub mod execute;
pub mod expr;
mod grid;
pub mod ir;
pub mod lower;
mod machine;
pub mod parameters;
mod partners;
pub mod rank_program;
pub mod section;
mod site;
mod tensor;
pub mod text;
pub mod times;
pub mod unroll;
pub mod verify;

pub use area::{Area, Axis};
pub use diagnostic::{Diagnostic, DiagnosticKind, Place, refused};
pub use execute::{
    Bindings, CapturedPlan, Executor, KernelReport, Plan, PrepareOptions, Prepared, Trace,
    TraceSpan,
};
pub use expr::{Condition, Expr};
pub use ir::{Backend, Direction, Program, Protocol};
pub use parameters::{Parameters, Value};
pub use rank_program::{
    Call, Expected, ExpectedTerm, Operand, Operation, OperationKind, Range, RankProgram, Site,
    StreamKind, TensorId, TensorInstance, TransferId, TransferInstance,
};
pub use unroll::unroll;
pub use verify::{Report, verify};
