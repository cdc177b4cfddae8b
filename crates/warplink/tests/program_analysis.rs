//! Analysis of programs without a device: parsing, unrolling, verification, lowerings and the cost model.

// A test fails by panicking.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "program_analysis/cost.rs"]
mod cost;
#[path = "program_analysis/cost_random.rs"]
mod cost_random;
#[path = "program_analysis/cost_sections.rs"]
mod cost_sections;
#[path = "common/faulty.rs"]
mod faulty_texts;
#[path = "program_analysis/limits.rs"]
mod limits;
#[path = "program_analysis/lowerings.rs"]
mod lowerings;
#[path = "program_analysis/messages.rs"]
mod messages;
#[path = "program_analysis/parameters.rs"]
mod parameters;
#[path = "common/root.rs"]
mod place;
mod program_support;
#[path = "program_analysis/random.rs"]
mod random;
#[path = "program_analysis/random_sections.rs"]
mod random_sections;
mod section_support;
#[path = "common/stopwatch.rs"]
mod stopwatch;
#[path = "program_analysis/syntax.rs"]
mod syntax;
#[path = "program_analysis/text.rs"]
mod text;
#[path = "program_analysis/verify.rs"]
mod verify;

use place::root;
