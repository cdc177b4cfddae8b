//! The verifier on faulty programs.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use warplink::program::{DiagnosticKind, Parameters, Program, verify};

fn parameters(list: &[(&str, i64)]) -> Parameters {
    list.iter()
        .map(|&(name, value)| (name.to_owned(), value))
        .collect()
}

mod faulty {
    use super::*;

    /// The words after `# key:` in a program's comments.
    fn header<'a>(text: &'a str, key: &str) -> Vec<&'a str> {
        let lead = format!("# {key}:");
        let line = text.lines().find_map(|line| line.strip_prefix(&lead));
        line.unwrap_or_else(|| panic!("no line '{lead}'"))
            .split_whitespace()
            .collect()
    }

    #[test]
    fn each_is_refused_for_its_violation() {
        let folder = format!("{}/tests/faulty-programs", env!("CARGO_MANIFEST_DIR"));
        let (mut count, mut wrong) = (0, Vec::new());
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_stem().unwrap().to_string_lossy().into_owned();
            let text = std::fs::read_to_string(&path).unwrap();
            let program = Program::parse(&text).unwrap_or_else(|e| panic!("{name}:\n{e}"));
            assert_eq!(Program::parse(&program.to_string()).unwrap(), program);
            let kind: DiagnosticKind = header(&text, "violation")[0].parse().unwrap();
            let marked = text.lines().position(|line| line.ends_with("# <- here"));
            let marked = marked.unwrap_or_else(|| panic!("{name} marks no line")) + 1;
            for world in header(&text, "world") {
                let world: usize = world.parse().unwrap();
                let diagnostics = match verify(&program, world, 2, &parameters(&[("n", 8)])) {
                    Ok(_) => {
                        wrong.push(format!("{name} passes for {world} ranks"));
                        continue;
                    }
                    Err(diagnostics) => diagnostics,
                };
                for diagnostic in &diagnostics {
                    println!("{name} × {world}: {diagnostic}");
                    assert!(diagnostic.ranks().iter().all(|rank| *rank < world));
                }
                let first = &diagnostics[0];
                if first.kind != kind || !first.lines().contains(&(marked as u32)) {
                    wrong.push(format!(
                        "{name} × {world}: expected {kind} in line {marked}: {first}"
                    ));
                }
            }
            count += 1;
        }
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
        assert!(count >= 25, "only {count} programs");
    }
}
