//! Kernel sections: the examples verified and run against what they mean.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "sections/beside.rs"]
mod beside;
mod common;
#[path = "sections/examples.rs"]
mod examples;
#[path = "sections/expected.rs"]
mod expected;
#[path = "sections/expected_rows.rs"]
mod expected_rows;
#[path = "sections/faulty.rs"]
mod faulty;
#[path = "common/faulty.rs"]
mod faulty_texts;
#[path = "sections/followed.rs"]
mod followed;
#[path = "sections/fused.rs"]
mod fused;
#[path = "sections/matched.rs"]
mod matched;
#[path = "sections/meaning.rs"]
mod meaning;
#[path = "sections/play.rs"]
mod play;
#[path = "sections/reachable.rs"]
mod reachable;
#[path = "sections/sharing.rs"]
mod sharing;
#[path = "sections/trace.rs"]
mod trace;
#[path = "sections/values.rs"]
mod values;
#[path = "sections/verdicts.rs"]
mod verdicts;

use common::root;
