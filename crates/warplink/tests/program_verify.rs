//! The verifier on faulty programs.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "common/faulty.rs"]
mod faulty_texts;
mod program_support;

use program_support::evidence::check;
use program_support::sample::Sample;
use std::collections::BTreeMap;
use warplink::program::{Diagnostic, DiagnosticKind, Parameters, Program, verify};

const STREAMS: usize = 2;

fn parameters(list: &[(&str, i64)]) -> Parameters {
    list.iter()
        .map(|&(name, value)| (name.to_owned(), value))
        .collect()
}

mod faulty {
    use super::*;
    use crate::faulty_texts::{header, in_folder};

    /// What is said first of `program`, which may run eagerly.
    fn first(program: &Program, world: usize) -> Option<Diagnostic> {
        match verify(program, world, STREAMS, &parameters(&[("n", 8)])) {
            Ok(report) => report.eager_only,
            Err(diagnostics) => {
                for diagnostic in &diagnostics {
                    println!("{} × {world}: {diagnostic}", program.name);
                    assert!(diagnostic.ranks().iter().all(|rank| *rank < world));
                }
                diagnostics.into_iter().next()
            }
        }
    }

    #[test]
    fn each_is_refused_for_its_violation() {
        let (mut count, mut wrong) = (0, Vec::new());
        for (name, text) in in_folder("faulty-programs") {
            let program = Program::parse(&text).unwrap_or_else(|e| panic!("{name}:\n{e}"));
            assert_eq!(Program::parse(&program.to_string()).unwrap(), program);
            let kind: DiagnosticKind = header(&text, "violation")[0].parse().unwrap();
            let marked = text.lines().position(|line| line.ends_with("# <- here"));
            let marked = marked.unwrap_or_else(|| panic!("{name} marks no line")) + 1;
            for world in header(&text, "world") {
                let Some(first) = first(&program, world.parse().unwrap()) else {
                    wrong.push(format!("{name} passes for {world} ranks"));
                    continue;
                };
                if first.kind != kind || !first.lines().contains(&(marked as u32)) {
                    wrong.push(format!(
                        "{name} × {world}: expected {kind} in line {marked}: {first}"
                    ));
                }
            }
            count += 1;
        }
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
        assert!(count >= 100, "only {count} programs");
    }

    /// The interpreter finds the deadlock, the order that is left open, or the rule that is broken, in
    /// all of them that it can play.
    #[test]
    fn each_is_shown_to_be_wrong() {
        let (mut classes, mut wrong) = (BTreeMap::new(), Vec::new());
        for (name, text) in in_folder("faulty-programs") {
            for world in header(&text, "world") {
                let sample = Sample {
                    text: text.clone(),
                    program: Program::parse(&text).unwrap(),
                    world: world.parse().unwrap(),
                    streams: STREAMS,
                    parameters: parameters(&[("n", 8)]),
                    changes: 1,
                };
                if sample.world > 4 {
                    continue;
                }
                match check(&sample) {
                    Ok(shown) => *classes.entry(shown.class).or_insert(0) += 1,
                    Err(how) => wrong.push(format!("{name} × {world}: {how}")),
                }
            }
        }
        println!("{classes:#?}");
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
        assert!(!classes.contains_key("accepted"), "{classes:?}");
    }
}
