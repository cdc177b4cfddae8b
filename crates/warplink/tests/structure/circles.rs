//! Circles of modules beside one another.

use super::source::{Source, module, paths, sources};
use super::{is_of_tests, root};
use std::collections::{BTreeMap, BTreeSet};

/// The most modules beside one another that may use each other in a circle: more are one subject in several files.
const MOST: usize = 2;

type Module = Vec<String>;

/// For each module, the modules beside it that it uses: those that it or a module below it names. What a module takes
/// from one above it is left out.
fn arrows(files: &[(Module, String)]) -> BTreeMap<Module, BTreeSet<Module>> {
    let modules: BTreeSet<&[String]> = files.iter().map(|(module, _)| &module[..]).collect();
    let mut arrows = BTreeMap::<Module, BTreeSet<Module>>::new();
    for (own, code) in files {
        for path in paths(code, own) {
            let common = own.iter().zip(&path).take_while(|(a, b)| a == b).count();
            let (Some(from), Some(to)) = (own.get(..=common), path.get(..=common)) else {
                continue;
            };
            if modules.contains(to) {
                arrows.entry(from.to_vec()).or_default().insert(to.to_vec());
            }
        }
    }
    arrows
}

/// The circles of more than [`MOST`] modules: modules each of which reaches all others.
fn circles(files: &[(Module, String)]) -> BTreeSet<String> {
    let arrows = arrows(files);
    let reached = |start: &Module| {
        let (mut found, mut open) = (BTreeSet::new(), vec![start]);
        while let Some(next) = open.pop() {
            let new = arrows.get(next).into_iter().flatten();
            open.extend(new.filter(|one| found.insert((*one).clone())));
        }
        found
    };
    let reached: BTreeMap<_, _> = arrows.keys().map(|one| (one, reached(one))).collect();
    let circles = reached.iter().map(|(one, all)| {
        let returns = |other: &&Module| reached.get(other).is_some_and(|all| all.contains(*one));
        all.iter().filter(returns).collect::<Vec<_>>()
    });
    let long = circles.filter(|circle| circle.len() > MOST);
    long.map(|circle| {
        let names = circle
            .iter()
            .filter_map(|module| module.last().map(String::as_str));
        let folder = circle[0][..circle[0].len() - 1].join("/");
        format!("{folder}: {}", names.collect::<Vec<_>>().join(" "))
    })
    .collect()
}

fn library() -> Vec<(Module, String)> {
    let folder = root().join("src");
    let files = sources(&folder).into_iter();
    let files = files.filter(|(path, _)| !is_of_tests(path));
    files
        .map(|(path, text)| {
            let name = path.strip_prefix(&folder).unwrap();
            (module(name), Source::new(&text).code)
        })
        .collect()
}

#[test]
fn no_three_modules_use_each_other_in_a_circle() {
    assert_eq!(circles(&library()), BTreeSet::new());
}

#[test]
fn circles_are_found() {
    let file = |module: &str, code: &str| {
        let module = module.split('/').map(str::to_owned).collect();
        (module, code.to_owned())
    };
    let mut files = vec![
        file("a", "pub use b::B; use crate::other::X;"),
        file("a/b", "use super::{c::C, Own};"),
        file("a/c", "fn f() { super::d::f() }"),
        file("a/d", ""),
        file(
            "a/d/e",
            "use super::super::Own; use crate::a::{b as own, c};",
        ),
        file("other", "use super::a;"),
    ];
    assert_eq!(circles(&files), BTreeSet::from(["a: b c d".to_owned()]));
    // A module above is none beside.
    files[4].1 = "use super::super::Own;".to_owned();
    assert_eq!(circles(&files), BTreeSet::new());
}
