//! Structural rules of the sources that a machine can check.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use warplink::ErrorKind;

/// The most lines of a file; what is longer has more than one subject.
const MAX_LINES: usize = 600;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// All sources below a folder, with their text.
fn sources(folder: &Path) -> Vec<(PathBuf, String)> {
    files(folder, "rs")
}

/// All files below a folder with this extension, with their text.
fn files(folder: &Path, extension: &str) -> Vec<(PathBuf, String)> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(files(&path, extension));
        } else if path.extension().is_some_and(|found| found == extension) {
            let text = std::fs::read_to_string(&path).unwrap();
            found.push((path, text));
        }
    }
    found
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

/// The code of a file without its comments, and without tests at its end.
fn code(text: &str) -> String {
    let text = text.split("#[cfg(test)]").next().unwrap_or_default();
    let lines = text
        .lines()
        .map(|line| line.split("//").next().unwrap_or_default());
    lines.collect::<Vec<_>>().join("\n")
}

/// The modules that code names by their path from the crate's root.
fn named(code: &str) -> BTreeSet<String> {
    let is_part_of_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let after = code.split("crate::").skip(1);
    after
        .map(|rest| rest.chars().take_while(|c| is_part_of_name(*c)).collect())
        .collect()
}

/// A module uses those below it in the list of ARCHITECTURE.md, and no other.
#[test]
fn modules_use_only_those_below_them() {
    let order = order();
    let place = |name: &str| order.iter().position(|other| other == name);
    assert!(order.len() > 15, "{order:?}");
    let (mut wrong, mut arrows) = (Vec::new(), 0);
    let folder = root().join("src");
    for (path, text) in sources(&folder) {
        let name = path.strip_prefix(&folder).unwrap();
        let file = path.file_stem().unwrap().to_string_lossy();
        if file == "lib" || file.ends_with("tests") {
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
        // What the root exports is named without its module.
        let is_module = |name: &String| {
            folder.join(name).is_dir() || folder.join(format!("{name}.rs")).is_file()
        };
        let others = named(&code(&text)).into_iter().filter(is_module);
        for other in others.filter(|other| other != top) {
            let Some(used) = place(&other) else {
                panic!("ARCHITECTURE.md does not list {other}");
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

/// Where steps of kernel sections are told apart: the language (text and resolver) and the emitter, besides the steps'
/// own methods. Everything else goes through steps with `section/visit.rs`, so that a new step does not touch it.
const STEPS: [&str; 3] = [
    "warplink/src/program/text/section.rs",
    "warplink/src/program/section/resolve/",
    "warplink/src/program/section/compile/emit/",
];

/// Whether code names a kind of step.
fn names_steps(code: &str) -> bool {
    let is_part_of_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    code.match_indices("StepKind::").any(|(at, found)| {
        let (before, after) = (&code[..at], &code[at + found.len()..]);
        !before.ends_with(is_part_of_name) && after.starts_with(|c: char| c.is_ascii_uppercase())
    })
}

#[test]
fn steps_are_told_apart_by_the_language_and_the_emitter_alone() {
    assert!(names_steps("match kind { StepKind::Barrier => {} }"));
    assert!(!names_steps("match kind { LaneStepKind::Wait(_) => {} }"));
    let crates = root().join("..");
    let (mut wrong, mut found) = (Vec::new(), BTreeSet::new());
    for (path, text) in sources(&crates) {
        let path = path.strip_prefix(&crates).unwrap().display().to_string();
        if path.contains("/src/") && !path.contains("/target/") && names_steps(&code(&text)) {
            match STEPS.iter().find(|place| path.starts_with(**place)) {
                Some(place) => {
                    found.insert(*place);
                }
                None => wrong.push(path),
            }
        }
    }
    assert!(wrong.is_empty(), "steps are told apart in {wrong:?}");
    assert_eq!(found.len(), STEPS.len(), "only {found:?} tell steps apart");
}

/// A second emitter is a folder beside the first only if nothing else in `program/` writes the first one's language.
#[test]
fn only_the_emitter_writes_cuda() {
    const MARKS: [&str; 5] = ["__global__", "__shared__", "constexpr", "blockIdx", ".cuh>"];
    let folder = root().join("src/program");
    let (mut wrong, mut emitting) = (Vec::new(), 0);
    for (path, text) in sources(&folder) {
        let name = path.strip_prefix(&folder).unwrap().display().to_string();
        let literals = literals(&text);
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
        if lines > MAX_LINES && !path.components().any(|part| part.as_os_str() == "target") {
            long.push(format!("{} has {lines} lines", path.display()));
        }
    }
    assert!(long.is_empty(), "{}", long.join("\n"));
}

/// The string literals of a source, without its comments and the tests at its end.
fn literals(text: &str) -> Vec<String> {
    let text = text.split("#[cfg(test)]").next().unwrap_or_default();
    let mut found = Vec::new();
    let mut rest = text;
    while let Some(at) = rest.find(['"', '/', '\'']) {
        let (before, from) = rest.split_at(at);
        let skipped = if from.starts_with("//") {
            from.find('\n').unwrap_or(from.len())
        } else if from.starts_with("'\"'") || from.starts_with("'\\") {
            3
        } else if let Some(inner) = from.strip_prefix('"') {
            let hashes = before.len() - before.trim_end_matches('#').len();
            let is_raw = before[..before.len() - hashes].ends_with('r');
            let end = if is_raw {
                inner.find(&format!("\"{}", "#".repeat(hashes)))
            } else {
                let mut escaped = false;
                inner.find(|c| {
                    let ends = c == '"' && !escaped;
                    escaped = c == '\\' && !escaped;
                    ends
                })
            };
            let end = end.unwrap_or(inner.len());
            found.push(inner[..end].to_owned());
            end + 2
        } else {
            1
        };
        rest = from.get(skipped..).unwrap_or_default();
    }
    found
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
    let mut lists = Vec::new();
    for face in ["", "-cli", "-c", "-py", "-nccl"] {
        for (path, text) in sources(&root().join(format!("../warplink{face}/src"))) {
            if path.to_string_lossy().ends_with("tests.rs") {
                continue;
            }
            for literal in literals(&text) {
                let is_list = |table: &Vec<String>| longest_list(&literal, table) >= 3;
                if tables.iter().any(is_list) {
                    lists.push(format!("{}: {literal}", path.display()));
                }
            }
        }
    }
    assert!(lists.is_empty(), "{}", lists.join("\n"));
}

#[test]
fn lists_in_texts_are_found() {
    let source = r##"
        // "a, b or c"
        let own = ['"', 'x']; let text = "expected a, b \
            or c"; let raw = r#"a "b" c"#;
    "##;
    let found = literals(source);
    assert_eq!(found.len(), 2, "{found:?}");
    let table = ["a", "b", "c", "d"].map(str::to_owned);
    for literal in found {
        assert_eq!(longest_list(&literal, &table), 3, "{literal}");
    }
    assert_eq!(longest_list("a thing of b", &table), 1);
    let declared = tables(
        "named! {\n    enum A: \"a\" {\n        One = \"one\",\n        Two = \"two\" (4),\n    }\n}\n",
    );
    assert_eq!(declared, [["one", "two"]]);
}

/// Python has a class for each kind of error, since type checkers do not see what is made at run time.
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

#[test]
fn every_kind_of_error_is_an_exception_of_python() {
    let path = root().join("../warplink-py/python/warplink/errors.py");
    let text = std::fs::read_to_string(path).unwrap();
    for kind in ErrorKind::ALL {
        let class = format!("class {kind:?}Error(WarplinkError");
        assert!(text.contains(&class), "errors.py has no {class}");
    }
}
