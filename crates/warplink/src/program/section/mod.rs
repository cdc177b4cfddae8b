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
//! | [`lane`] | the steps of one lane in one launch, with everything resolved |

pub mod instance;
pub mod ir;
pub mod lane;
pub mod layout;

pub use instance::{SectionInstance, SectionMemory, SectionTensor};
pub use ir::{Move, Operator, Packing, Place, Scratch, Section, Source, Step, StepKind, Verb};
pub use lane::{LaneStep, LaneStepKind, Part};
pub use layout::{Area, ScratchInstance, WorkspaceLayout};
