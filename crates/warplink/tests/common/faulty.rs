//! The texts of faulty programs, each in a file whose comments say what is wrong with it.

use crate::root;
use warplink::program::{Diagnostic, DiagnosticKind, Program};

/// The names and texts of the programs in `folder`, which lies beside the tests, by name.
pub(crate) fn in_folder(folder: &str) -> Vec<(String, String)> {
    let folder = root().join("tests").join(folder);
    let files = std::fs::read_dir(folder).unwrap().map(|file| {
        let path = file.unwrap().path();
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        (name, std::fs::read_to_string(&path).unwrap())
    });
    let mut texts: Vec<_> = files.collect();
    texts.sort();
    texts
}

/// The words after `# key:` in a program's comments.
pub(crate) fn header<'a>(text: &'a str, key: &str) -> Vec<&'a str> {
    let lead = format!("# {key}:");
    let line = text.lines().find_map(|line| line.strip_prefix(&lead));
    line.unwrap_or_else(|| panic!("no line '{lead}'"))
        .split_whitespace()
        .collect()
}

/// Checks that every program in `folder`, of which there are at least `least`, is refused for its violation and in its
/// marked line. `first` gives the first diagnostic of a program for a number of ranks.
pub(crate) fn check_refusals(
    folder: &str,
    least: usize,
    first: impl Fn(&Program, usize) -> Option<Diagnostic>,
) {
    let (texts, mut wrong) = (in_folder(folder), Vec::new());
    for (name, text) in &texts {
        let program = Program::parse(text).unwrap_or_else(|e| panic!("{name}:\n{e}"));
        assert_eq!(Program::parse(&program.to_string()).unwrap(), program);
        let kind: DiagnosticKind = header(text, "violation")[0].parse().unwrap();
        let marked = text.lines().position(|line| line.ends_with("# <- here"));
        let marked = marked.unwrap_or_else(|| panic!("{name} marks no line")) + 1;
        for world in header(text, "world") {
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
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(texts.len() >= least, "only {} programs", texts.len());
}
