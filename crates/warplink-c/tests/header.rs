//! `include/warplink.h` is what cbindgen makes of the sources.

#![allow(clippy::unwrap_used)]

use std::fmt::Write as _;
use std::path::PathBuf;
use warplink_c::types::Enumeration;

/// In the order of the header.
const SOURCES: [&str; 18] = [
    "version",
    "status",
    "handles",
    "types",
    "job",
    "memory",
    "stream",
    "channel",
    "buffer",
    "kernel",
    "block",
    "block_channel",
    "collectives",
    "bound_call",
    "fused",
    "messages",
    "experts",
    "log",
];

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// The enumerations of the library's values, as cbindgen reads them.
fn declared() -> String {
    let mut text = String::new();
    for enumeration in Enumeration::all() {
        writeln!(text, "/// {}\n#[repr(C)]", enumeration.about).unwrap();
        writeln!(text, "pub enum {} {{", enumeration.name).unwrap();
        for value in enumeration.values {
            // Columns of the comments' lines, less their indentation and slashes.
            for line in wrapped(value.about, 102) {
                writeln!(text, "    /// {line}").unwrap();
            }
            let words = value.name.split(['-', '_']).map(capitalized);
            let name: String = words.collect();
            writeln!(text, "    {name} = {},", value.number).unwrap();
        }
        text.push_str("}\n");
    }
    text
}

fn capitalized(word: &str) -> String {
    let (first, rest) = word.split_at(1);
    first.to_uppercase() + rest
}

fn wrapped(text: &str, columns: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let line = lines.last_mut().unwrap();
        if !line.is_empty() && line.len() + 1 + word.len() > columns {
            lines.push(word.to_owned());
        } else {
            *line = format!("{line} {word}").trim_start().to_owned();
        }
    }
    lines
}

fn generate() -> String {
    let config = cbindgen::Config::from_file(root().join("cbindgen.toml")).unwrap();
    let enumerations = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("enumerations.rs");
    std::fs::write(&enumerations, declared()).unwrap();
    let mut builder = cbindgen::Builder::new().with_config(config);
    builder = builder.with_src(enumerations);
    for source in SOURCES {
        builder = builder.with_src(root().join(format!("src/{source}.rs")));
    }
    let mut header = Vec::new();
    builder.generate().unwrap().write(&mut header);
    String::from_utf8(header).unwrap()
}

#[test]
fn the_header_is_up_to_date() {
    let (path, made) = (root().join("include/warplink.h"), generate());
    if std::env::var_os("WARPLINK_UPDATE_HEADER").is_some() {
        std::fs::write(&path, &made).unwrap();
    }
    let kept = std::fs::read_to_string(&path).unwrap_or_default();
    let differs = kept
        .lines()
        .zip(made.lines())
        .position(|(kept, made)| kept != made);
    assert!(
        kept == made,
        "include/warplink.h is not what the sources say, from line {} on; run \
         WARPLINK_UPDATE_HEADER=1 cargo test -p warplink-c --test header",
        differs.unwrap_or(kept.lines().count().min(made.lines().count())) + 1
    );
}

#[test]
fn every_exported_function_is_in_the_header() {
    let header = std::fs::read_to_string(root().join("include/warplink.h")).unwrap();
    let mut exported = 0;
    for entry in std::fs::read_dir(root().join("src")).unwrap() {
        let text = std::fs::read_to_string(entry.unwrap().path()).unwrap();
        let mut lines = text.lines();
        while let Some(line) = lines.next() {
            if line.trim() != "#[unsafe(no_mangle)]" {
                continue;
            }
            let name = lines.next().unwrap().split("fn ").nth(1).unwrap();
            let name = name.split('(').next().unwrap();
            assert!(
                header.contains(&format!(" {name}(")) || header.contains(&format!("*{name}(")),
                "{name}"
            );
            exported += 1;
        }
    }
    assert!(exported > 50, "{exported} functions");
}

#[test]
fn the_header_names_nothing_without_the_prefix() {
    let header = std::fs::read_to_string(root().join("include/warplink.h")).unwrap();
    let is_name = |line: &&str| {
        let declares = ["typedef ", "#define ", "} "];
        declares.iter().any(|start| line.starts_with(start)) && !line.ends_with('{')
    };
    let names: Vec<&str> = header.lines().filter(is_name).collect();
    assert!(names.len() > 20, "{names:?}");
    for name in names.iter().filter(|name| !name.contains("extern")) {
        assert!(name.to_lowercase().contains("warplink_"), "{name}");
    }
}

/// The functions of mscclpp.h.
const MSCCLPP: [&str; 20] = [
    "mscclppGetUniqueId",
    "mscclppCommInitRank",
    "mscclppCommInitRankFromId",
    "mscclppBootstrapAllGather",
    "mscclppBootstrapBarrier",
    "mscclppCommDestroy",
    "mscclppGetErrorString",
    "mscclppConnect",
    "mscclppConnectionSetup",
    "mscclppGetAllDeviceConnections",
    "mscclppGetDeviceConnection",
    "mscclppProxyLaunch",
    "mscclppProxyStop",
    "mscclppCommRank",
    "mscclppCommSize",
    "mscclppSetBootstrapConnTimeout",
    "mscclppDefaultLogHandler",
    "mscclppSetLogHandler",
    "mscclppRegisterBuffer",
    "mscclppRegisteredBufferWrite",
];

/// The documented replacements of MSCCL++ functions exist.
#[test]
fn what_replaces_mscclpp_is_in_the_header() {
    let header = std::fs::read_to_string(root().join("include/warplink.h")).unwrap();
    let documentation = std::fs::read_to_string(root().join("../../docs/c.md")).unwrap();
    let start = documentation.find("## From MSCCL++").unwrap();
    let rows: Vec<&str> = documentation[start..]
        .lines()
        .filter(|line| line.starts_with("| `mscclpp"))
        .collect();
    for function in MSCCLPP {
        let quoted = format!("`{function}`");
        let of_it = rows.iter().filter(|row| row.contains(&quoted));
        assert_eq!(of_it.count(), 1, "{function}");
    }
    for row in rows {
        let new = row.split('|').nth(2).unwrap();
        let names = new.split('`').skip(1).step_by(2);
        for name in names.filter(|name| !name.contains("::")) {
            let found = [format!("{name}("), format!("{name};"), format!("{name} =")];
            assert!(found.iter().any(|text| header.contains(text)), "{name}");
        }
    }
}

/// Its text says so for each function that gives a status, whichever way.
#[test]
fn every_function_says_whether_it_blocks() {
    let header = std::fs::read_to_string(root().join("include/warplink.h")).unwrap();
    let mut text = String::new();
    let mut functions = 0;
    for line in header.lines() {
        if let Some(comment) = line.strip_prefix("///") {
            text.push_str(comment);
            continue;
        }
        if line.starts_with("warplink_status warplink_") {
            let says = ["block", "wait", "returns when"];
            assert!(
                says.iter().any(|word| text.to_lowercase().contains(word)),
                "{line}: {text}"
            );
            functions += 1;
        }
        text.clear();
    }
    assert!(functions > 70, "{functions} functions");
}

/// Every function that the page on C names.
#[test]
fn the_documentation_names_functions_that_are_in_the_header() {
    let header = std::fs::read_to_string(root().join("include/warplink.h")).unwrap();
    let documentation = std::fs::read_to_string(root().join("../../docs/c.md")).unwrap();
    let is_part = |letter: char| letter.is_ascii_alphanumeric() || letter == '_';
    let words = documentation.split(|letter| !is_part(letter));
    let named = words.filter(|word| {
        word.starts_with("warplink_") && !word.ends_with('_')
            || word.starts_with("WARPLINK_STATUS_")
    });
    let mut count = 0;
    for name in named {
        let mut places = header
            .match_indices(name)
            .map(|(at, _)| &header[at + name.len()..]);
        assert!(places.any(|rest| !rest.starts_with(is_part)), "{name}");
        count += 1;
    }
    assert!(count > 100, "{count} names");
}
