//! The documents are right: the programs and outputs in docs/language.md, docs/nvfuser.md, docs/ring-all-reduce.md,
//! docs/expert-dispatch.md and docs/collectives.md, and the files and tests that ARCHITECTURE.md names.
//!
//! The line that opens a block says how it is checked: `world=2,4`, values of parameters,
//! `given=` optional tensors, `refused=` the violation of a program that is faulty or runs eagerly only,
//! whose diagnostic is the block of text that follows.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use warplink::DType;
use warplink::program::cost::{find, simulate};
use warplink::program::evaluate::Evaluator;
use warplink::program::ir::Program;
use warplink::program::parameters::ParameterKind;
use warplink::program::{Parameters, unroll, verify};

const PAGES: [&str; 5] = [
    include_str!("../../../docs/language.md"),
    include_str!("../../../docs/nvfuser.md"),
    include_str!("../../../docs/ring-all-reduce.md"),
    include_str!("../../../docs/expert-dispatch.md"),
    include_str!("../../../docs/collectives.md"),
];

const ARCHITECTURE: &str = include_str!("../../../ARCHITECTURE.md");

struct Block<'a> {
    language: &'a str,
    options: BTreeMap<&'a str, &'a str>,
    text: String,
}

fn blocks() -> Vec<Block<'static>> {
    let (mut blocks, mut open): (Vec<Block<'_>>, Option<Block<'_>>) = (Vec::new(), None);
    for line in PAGES.iter().flat_map(|page| page.lines()) {
        match (line.strip_prefix("```"), open.take()) {
            (Some(""), Some(block)) => blocks.push(block),
            (Some(header), None) => {
                let mut words = header.split_whitespace();
                open = Some(Block {
                    language: words.next().expect("a block names its language"),
                    options: words.map(|word| word.split_once('=').unwrap()).collect(),
                    text: String::new(),
                });
            }
            (None, Some(mut block)) => {
                block.text.push_str(line);
                block.text.push('\n');
                open = Some(block);
            }
            (None, None) => {}
            (Some(_), Some(_)) => panic!("a block in a block: {line}"),
        }
    }
    assert!(open.is_none(), "the last block does not end");
    blocks
}

impl Block<'_> {
    fn worlds(&self) -> Vec<usize> {
        let worlds = self.options["world"].split(',');
        worlds.map(|world| world.parse().unwrap()).collect()
    }

    fn parameters(&self, program: &Program) -> Parameters {
        let mut parameters = Parameters::new();
        for parameter in &program.parameters {
            let Some(value) = self.options.get(parameter.name.as_str()) else {
                continue;
            };
            let list = value.split(',').map(|item| item.parse::<i64>());
            parameters = match (&parameter.kind, value.parse::<i64>()) {
                (ParameterKind::List, _) => parameters.with(
                    &parameter.name,
                    list.collect::<Result<Vec<_>, _>>().unwrap(),
                ),
                (_, Ok(number)) => parameters.with(&parameter.name, number),
                (_, Err(_)) => parameters.with(&parameter.name, value.parse::<DType>().unwrap()),
            };
        }
        for tensor in self
            .options
            .get("given")
            .iter()
            .flat_map(|given| given.split(','))
        {
            parameters = parameters.with_tensor(tensor);
        }
        parameters
    }
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn file(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

#[test]
fn every_program_is_what_the_page_says() {
    let blocks = blocks();
    let (mut accepted, mut refused) = (0, 0);
    for (index, block) in blocks.iter().enumerate() {
        if block.language != "wlp" {
            continue;
        }
        let text = &block.text;
        let program = Program::parse(text).unwrap_or_else(|error| panic!("{error}"));
        if let Some(path) = block.options.get("file") {
            assert_eq!(*text, file(path), "{path}");
        }
        let parameters = block.parameters(&program);
        for world in block.worlds() {
            let verified = verify(&program, world, 2, &parameters);
            let Some(violation) = block.options.get("refused") else {
                let report = verified.unwrap_or_else(|diagnostics| {
                    panic!("{} for {world} ranks: {}", program.name, diagnostics[0])
                });
                assert_eq!(report.world, world);
                accepted += 1;
                continue;
            };
            let diagnostic = match verified {
                Ok(report) => report.eager_only.expect(&program.name),
                Err(diagnostics) => diagnostics[0].clone(),
            };
            assert_eq!(diagnostic.kind.name(), *violation);
            assert_eq!(format!("{diagnostic}\n"), blocks[index + 1].text);
            refused += 1;
        }
    }
    assert!(accepted > 10 && refused > 0, "{accepted} and {refused}");
}

/// With the words that the page states, the tutorial's program is right for any counts and indices within their ranges.
#[test]
fn the_dispatch_of_the_tutorial_is_what_it_states() {
    let blocks = blocks();
    let named = |block: &&Block<'_>| block.text.starts_with("program dispatch_rows(");
    let block = blocks.iter().find(named).unwrap();
    let stated =
        |block: &&Block<'_>| block.text.contains("expect Y[r][t]") && block.language == "text";
    let stated = &blocks.iter().find(stated).unwrap().text;
    let kernel = block.text.trim_end().strip_suffix('}').unwrap();
    assert!(block.text.lines().count() <= 25);
    let computed = |text: String| {
        let program = Program::parse(&text).unwrap_or_else(|error| panic!("{error}"));
        let evaluator = Evaluator::new(&program, 3, 1, &block.parameters(&program)).unwrap();
        let rounds = 0..20;
        let run = |round: usize| {
            evaluator.run(|rank, _, tensor| {
                let elements = 0..tensor.bytes / tensor.dtype.size();
                let range = tensor.value_bound.map_or(31, |most| most as usize + 1);
                let value = |at: usize| {
                    ((at * at + 7 * at * rank + 3 * rank + round * (at + 1)) % range) as f64
                };
                tensor.dtype.encode(elements.map(value))
            })
        };
        rounds.map(run).find_map(Result::err)
    };
    let right = computed(format!("{kernel}{stated}}}"));
    assert!(right.is_none(), "{right:?}");
    let wrong = computed(format!("{}{stated}}}", kernel.replace("X[J[t]]", "X[t]")));
    assert!(wrong.is_some_and(|error| error.to_string().contains("expectation:")));
}

/// Figures change when a machine is measured anew; what is said does not.
#[test]
fn every_cost_reads_as_the_page_shows_it() {
    let words = |text: &str| text.replace(|c: char| c.is_ascii_digit(), "");
    let costs: Vec<_> = blocks()
        .into_iter()
        .filter(|block| block.options.contains_key("cost"))
        .collect();
    assert!(!costs.is_empty());
    for block in costs {
        let program = Program::parse(&file(block.options["file"])).unwrap();
        let parameters = block.parameters(&program);
        let world = block.worlds()[0];
        let ranks: Vec<_> = (0..world)
            .map(|rank| unroll(&program, rank, world, 2, &parameters).unwrap())
            .collect();
        let model = find::shipped(block.options["cost"]).unwrap();
        let cost = simulate(&ranks, &model).unwrap().to_string();
        assert_eq!(words(&cost), words(&block.text), "{cost}");
    }
}

#[test]
fn every_command_names_a_program_that_is_there() {
    let blocks = blocks();
    let programs = blocks.iter().filter(|block| block.language == "wlp");
    let on_pages: Vec<String> = programs
        .map(|block| Program::parse(&block.text).unwrap().name)
        .collect();
    let mut named = 0;
    for block in blocks.iter().filter(|block| block.language == "sh") {
        for path in block.text.split_whitespace() {
            let Some(stem) = path.strip_suffix(".wlp") else {
                continue;
            };
            named += 1;
            if path.contains('/') {
                Program::parse(&file(path)).unwrap();
            } else {
                // The reader has saved it from a page.
                assert!(on_pages.iter().any(|name| name == stem), "{path}");
            }
        }
    }
    assert!(named > 4, "{named} programs are named");
}

/// The words in backticks, outside of blocks.
fn quoted(text: &str) -> impl Iterator<Item = &str> {
    let lines = text
        .lines()
        .filter(|line| line.matches('`').count() % 2 == 0);
    lines.flat_map(|line| line.split('`').skip(1).step_by(2))
}

/// The text of every Rust file below `folder`.
fn sources(folder: &Path, text: &mut String) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, text);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            text.push_str(&std::fs::read_to_string(path).unwrap());
        }
    }
}

#[test]
fn every_file_that_the_architecture_names_is_there() {
    let folders = [
        "",
        "crates/warplink",
        "crates/warplink/src",
        "crates/warplink/src/program",
        "crates/warplink-c",
    ]
    .map(|folder| root().join(folder));
    let paths = quoted(ARCHITECTURE).filter(|word| word.contains('/') && !word.contains(' '));
    let missing: Vec<_> = paths
        .filter(|path| !folders.iter().any(|folder| folder.join(path).exists()))
        .filter(|path| !root().join("crates/warplink-cli").join(path).exists())
        .collect();
    assert!(missing.is_empty(), "{missing:?}");
}

#[test]
fn every_test_that_the_architecture_names_is_there() {
    let mut code = String::new();
    sources(&root().join("crates"), &mut code);
    let table = ARCHITECTURE.split("\n## Invariants").nth(1).unwrap();
    let table = table.split("\n## ").next().unwrap();
    let of = |text| {
        let names = quoted(text).filter(|word| word.contains('_') && !word.contains(['/', '.']));
        names.map(|name| name.trim_end_matches('…'))
    };
    let names: Vec<_> = of(table).collect();
    assert!(names.len() > 20, "{names:?}");
    let missing: Vec<_> = names
        .into_iter()
        .filter(|name| !code.contains(&format!("fn {name}")))
        .collect();
    assert!(missing.is_empty(), "{missing:?}");
    // A file or a folder is followed by its tests.
    let mut in_files = 0;
    for part in table.split([';', '|', '\n']) {
        let Some((file, names)) = part.split_once("`: ") else {
            continue;
        };
        let path = file.rsplit('`').next().unwrap();
        let crates = ["warplink", "warplink-cli", "warplink-c"];
        let mut there = crates
            .map(|name| root().join("crates").join(name).join(path))
            .into_iter();
        let there = there
            .find(|it| it.exists())
            .unwrap_or_else(|| panic!("{path}"));
        let mut text = String::new();
        if there.is_dir() {
            sources(&there, &mut text);
        } else {
            text = std::fs::read_to_string(there).unwrap();
        }
        for name in of(names) {
            in_files += 1;
            assert!(text.contains(&format!("fn {name}")), "{name} in {path}");
        }
    }
    assert!(in_files > 20, "{in_files}");
}
