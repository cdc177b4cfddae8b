//! Structural rules of the sources that a machine can check.

#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "structure/circles.rs"]
mod circles;
#[path = "structure/source.rs"]
mod source;

use source::{Source, files, is_part_of_name, module, paths, sources};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use warplink::ErrorKind;

/// The most lines of a file; what is longer has more than one subject.
const MAX_LINES: usize = 600;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Whether a file has tests only.
fn is_of_tests(path: &Path) -> bool {
    let name = path.file_stem().unwrap().to_string_lossy();
    ["tests", "loom"].iter().any(|end| name.ends_with(end))
}

/// The modules of the library as ARCHITECTURE.md lists them, from the top down.
fn order() -> Vec<String> {
    let page = std::fs::read_to_string(root().join("../../ARCHITECTURE.md")).unwrap();
    let lines = page
        .lines()
        .skip_while(|line| *line != "crates/warplink/src/");
    let lines = lines.skip(1).take_while(|line| line.starts_with("  "));
    // Those of a deeper level are parts of the one above.
    let lines = lines.filter(|line| !line.starts_with("   "));
    let names = lines.flat_map(|line| {
        let words = line.split_whitespace();
        words.take_while(|word| word.ends_with(".rs") || word.ends_with('/'))
    });
    names
        .map(|name| {
            name.trim_end_matches('/')
                .trim_end_matches(".rs")
                .to_owned()
        })
        .collect()
}

/// The modules of what the crate's root exports, which is named without its module.
fn exported() -> BTreeMap<String, String> {
    let text = std::fs::read_to_string(root().join("src/lib.rs")).unwrap();
    let code = Source::new(&text)
        .code
        .replace("pub use ", "pub use crate::");
    let paths = paths(&code, &[]).into_iter();
    let exports = paths.map(|path| (path[path.len() - 1].clone(), path[0].clone()));
    exports.collect()
}

/// A module uses those below it in the list of ARCHITECTURE.md, and no other.
#[test]
fn modules_use_only_those_below_them() {
    let order = order();
    let place = |name: &str| order.iter().position(|other| other == name);
    assert!(order.len() > 15, "{order:?}");
    let (mut wrong, mut arrows) = (Vec::new(), 0);
    let exported = exported();
    assert!(exported.len() > 10, "{exported:?}");
    let folder = root().join("src");
    for (path, text) in sources(&folder) {
        let name = path.strip_prefix(&folder).unwrap();
        if name == Path::new("lib.rs") || is_of_tests(&path) {
            continue;
        }
        let top = name
            .components()
            .next()
            .unwrap()
            .as_os_str()
            .to_string_lossy();
        let top = top.trim_end_matches(".rs");
        let Some(own) = place(top) else {
            panic!("ARCHITECTURE.md does not list {top}");
        };
        let paths = paths(&Source::new(&text).code, &module(name)).into_iter();
        // A path to the root itself names all of it.
        let firsts: BTreeSet<_> = paths
            .map(|path| path.first().cloned().unwrap_or_default())
            .collect();
        let others = firsts
            .iter()
            .map(|first| exported.get(first).unwrap_or(first));
        let others: BTreeSet<_> = others.filter(|other| *other != top).collect();
        for other in others {
            let Some(used) = place(other) else {
                panic!(
                    "ARCHITECTURE.md does not list {other:?}, which {} names",
                    name.display()
                );
            };
            arrows += 1;
            if used < own {
                wrong.push(format!("{} uses {other}", name.display()));
            }
        }
    }
    assert!(
        wrong.is_empty(),
        "arrows that point up:\n{}",
        wrong.join("\n")
    );
    assert!(arrows > 500, "only {arrows} uses were found");
}

/// The only places that may match on step kinds: the language (text and resolver) and the emitter, besides the steps' own
/// methods. Everything else goes through steps with `section/visit.rs`, so that a new step does not touch it.
const STEP_MATCHES: [&str; 3] = [
    "warplink/src/program/text/section.rs",
    "warplink/src/program/section/resolve/",
    "warplink/src/program/section/compile/emit/",
];

/// Whether code names a kind of step, or gives their enum a name by which it could.
fn names_steps(code: &str) -> bool {
    const ENUM: &str = "StepKind";
    code.match_indices(ENUM).any(|(at, _)| {
        let (before, after) = (code[..at].trim_end(), code[at + ENUM.len()..].trim_start());
        let named = after.strip_prefix("::").map(str::trim_start);
        let tells = named.is_some_and(|kind| {
            kind.starts_with(|c: char| c.is_ascii_uppercase() || c == '{' || c == '*')
        });
        let renames = after.starts_with("as ") || (before.ends_with('=') && after.starts_with(';'));
        !code[..at].ends_with(is_part_of_name) && (tells || renames)
    })
}

#[test]
fn steps_are_told_apart_by_the_language_and_the_emitter_alone() {
    assert!(names_steps("match kind { StepKind::Barrier => {} }"));
    assert!(names_steps("use super::ir::StepKind::{Barrier, Wait};"));
    assert!(names_steps("use super::ir::{Step, StepKind::*};"));
    assert!(names_steps("use super::ir::{Step, StepKind as Kind};"));
    assert!(names_steps("type Kind = StepKind;"));
    assert!(!names_steps("match kind { LaneStepKind::Wait(_) => {} }"));
    assert!(!names_steps(
        "use super::ir::{Step, StepKind}; impl Action for StepKind {}"
    ));
    let crates = root().join("..");
    let (mut wrong, mut found) = (Vec::new(), BTreeSet::new());
    for (path, text) in sources(&crates) {
        let path = path.strip_prefix(&crates).unwrap().display().to_string();
        if path.contains("/src/") && names_steps(&Source::new(&text).code) {
            match STEP_MATCHES.iter().find(|place| path.starts_with(**place)) {
                Some(place) => {
                    found.insert(*place);
                }
                None => wrong.push(path),
            }
        }
    }
    assert!(wrong.is_empty(), "steps are told apart in {wrong:?}");
    assert_eq!(
        found.len(),
        STEP_MATCHES.len(),
        "only {found:?} tell steps apart"
    );
}

/// A second emitter is a folder beside the first only if nothing else in `program/` writes the first one's language.
#[test]
fn only_the_emitter_writes_cuda() {
    const MARKS: [&str; 5] = ["__global__", "__shared__", "constexpr", "blockIdx", ".cuh>"];
    let folder = root().join("src/program");
    let (mut wrong, mut emitting) = (Vec::new(), 0);
    for (path, text) in sources(&folder) {
        let name = path.strip_prefix(&folder).unwrap().display().to_string();
        let literals = Source::new(&text).literals;
        let writes = |literal: &String| MARKS.iter().any(|mark| literal.contains(mark));
        if name.ends_with("tests.rs") || !literals.iter().any(writes) {
            continue;
        }
        if name.starts_with("section/compile/emit/") {
            emitting += 1;
        } else {
            wrong.push(name);
        }
    }
    assert!(wrong.is_empty(), "CUDA C++ is written in {wrong:?}");
    assert!(
        emitting > 1,
        "only {emitting} files of the emitter were found"
    );
}

/// A file has one subject.
#[test]
fn files_are_of_a_length_that_one_reads() {
    let crates = root().join("..");
    let mut long = Vec::new();
    for (path, text) in sources(&crates) {
        let lines = text.lines().count();
        if lines > MAX_LINES {
            long.push(format!("{} has {lines} lines", path.display()));
        }
    }
    assert!(long.is_empty(), "{}", long.join("\n"));
}

/// The names of each enum that `named!` declares in a source.
fn tables(text: &str) -> Vec<Vec<String>> {
    let declarations = text.split("named! {").skip(1);
    let tables = declarations.map(|declaration| {
        let end = declaration.find("\n}").unwrap_or(declaration.len());
        let values = declaration[..end].lines().filter_map(|line| {
            let (value, name) = line.trim().split_once(" = \"")?;
            let is_value = value.chars().all(|c| c.is_ascii_alphanumeric());
            is_value.then(|| name.split('"').next().unwrap().to_owned())
        });
        values
            .filter(|name| name.starts_with(char::is_alphanumeric))
            .collect()
    });
    tables.filter(|names: &Vec<_>| names.len() > 1).collect()
}

/// Whether a text lists the names of an enum: three of them one behind the other, or both of two as alternatives.
fn lists(text: &str, table: &[String]) -> bool {
    match table {
        [a, b] => {
            let text = text.replace(['\'', '`'], "");
            [(a, b), (b, a)].into_iter().any(|(a, b)| {
                let alternatives = ["{a} or {b}", "{a}, or {b}", "{a}, {b} or "];
                let mut alternatives = alternatives
                    .iter()
                    .map(|list| list.replace("{a}", a).replace("{b}", b));
                alternatives.any(|list| {
                    let mut found = text.match_indices(&list);
                    found.any(|(at, _)| {
                        let after = &text[at + list.len()..];
                        !text[..at].ends_with(is_part_of_name)
                            && (list.ends_with(' ') || !after.starts_with(is_part_of_name))
                    })
                })
            })
        }
        _ => longest_list(text, table) >= 3,
    }
}

/// How many names of a table a text has one behind the other, as a list.
fn longest_list(text: &str, table: &[String]) -> usize {
    let is_part_of_name = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    let words = text.split(|c| !is_part_of_name(c));
    let (mut longest, mut length) = (0, 0);
    for word in words.filter(|word| !["", "n", "or", "and"].contains(word)) {
        length = if table.iter().any(|name| name == word) {
            length + 1
        } else {
            0
        };
        longest = longest.max(length);
    }
    longest
}

/// Lists of an enum's values come from its table: a typed list is wrong once a value is added.
#[test]
fn no_text_lists_the_names_of_an_enum() {
    let own = sources(&root().join("src"));
    let tables: Vec<_> = own.iter().flat_map(|(_, text)| tables(text)).collect();
    assert!(tables.len() > 15, "only {} tables were found", tables.len());
    let mut typed = Vec::new();
    for face in ["", "-cli", "-c", "-py", "-nccl"] {
        for (path, text) in sources(&root().join(format!("../warplink{face}/src"))) {
            if is_of_tests(&path) {
                continue;
            }
            let source = Source::new(&text);
            // The command shows documentation as help.
            let shown = if face == "-cli" {
                source.docs
            } else {
                Vec::new()
            };
            for text in source.literals.iter().chain(&shown) {
                let is_list = |table: &Vec<String>| lists(text, table);
                if tables.iter().any(is_list) {
                    typed.push(format!("{}: {text}", path.display()));
                }
            }
        }
    }
    assert!(typed.is_empty(), "{}", typed.join("\n"));
}

#[test]
fn lists_in_texts_are_found() {
    let source = r##"
        // "a, b or c"
        let own = ['"', 'x']; let text = "expected a, b \
            or c"; let raw = r#"a "b" c"#;
    "##;
    let found = Source::new(source).literals;
    assert_eq!(found.len(), 2, "{found:?}");
    let table = ["a", "b", "c", "d"].map(str::to_owned);
    for literal in found {
        assert_eq!(longest_list(&literal, &table), 3, "{literal}");
    }
    assert_eq!(longest_list("a thing of b", &table), 1);
    let two = ["a", "b"].map(str::to_owned);
    for (text, is_list) in [
        ("expected b or a", true),
        ("`a`, or 'b'.", true),
        ("a, b or another", true),
        ("min(a, b)", false),
        ("a or back", false),
        ("a and b", false),
    ] {
        assert_eq!(lists(text, &two), is_list, "{text}");
    }
    let declared = tables(
        "named! {\n    enum A: \"a\" {\n        One = \"one\",\n        Two = \"two\" (4),\n    }\n}\n",
    );
    assert_eq!(declared, [["one", "two"]]);
}

/// The grammar is documentation, which cannot be derived.
#[test]
fn the_grammar_of_programs_has_all_names() {
    let read = |name: &str| std::fs::read_to_string(root().join("src").join(name)).unwrap();
    let text = read("program/text/mod.rs");
    let lines = text.lines().map_while(|line| line.strip_prefix("//!"));
    let grammar = lines.collect::<Vec<_>>().join("\n");
    for (enums, count) in [
        ("program/section/function/mod.rs", 3),
        ("p2p/protocol.rs", 1),
        ("p2p/request.rs", 1),
    ] {
        let tables = tables(&read(enums));
        assert_eq!(tables.len(), count, "{enums}: {tables:?}");
        for name in tables.iter().flatten() {
            let word = format!("\"{name}\"");
            assert!(
                grammar.contains(&word),
                "the grammar has no {word} of {enums}"
            );
        }
    }
}

/// Text in the line of a heading is part of it.
#[test]
fn headings_of_documentation_stand_alone() {
    let mut wrong = Vec::new();
    for (path, text) in sources(&root().join("..")) {
        for line in text.lines() {
            let heading = ["# Errors ", "# Panics ", "# Safety "];
            let doc = line.trim_start().strip_prefix("/// ").unwrap_or_default();
            if heading.iter().any(|heading| doc.starts_with(heading)) {
                wrong.push(format!("{}: {doc}", path.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Programs whose text computes something state what, which `program verify` checks.
#[test]
fn every_shipped_program_states_what_it_computes() {
    let folders = ["src", "../warplink-cli/src", "../../examples"];
    let programs = folders.map(|folder| files(&root().join(folder), "wlp"));
    let programs: Vec<_> = programs.into_iter().flatten().collect();
    assert!(programs.len() > 50, "{}", programs.len());
    for (path, text) in programs {
        let computes = text.lines().any(|line| line.contains("output "));
        // Statements of fused calls are written with their epilogues.
        let states = ["expect ", "{expected}"]
            .iter()
            .any(|word| text.contains(word));
        assert!(states || !computes, "{} has no expect", path.display());
    }
}

/// Python has a class for each kind of error, since type checkers do not see what is made at run time.
#[test]
fn every_kind_of_error_is_an_exception_of_python() {
    let path = root().join("../warplink-py/python/warplink/errors.py");
    let text = std::fs::read_to_string(path).unwrap();
    for kind in ErrorKind::ALL {
        let class = format!("class {kind:?}Error(WarplinkError");
        assert!(text.contains(&class), "errors.py has no {class}");
    }
}
