//! Changes to the lines of kernels: what people get wrong.

use super::writer::Text;
use crate::program_support::interpreter::Random;

/// Words that stand for one another: first those that mean something everywhere.
const WORDS: [&str; 17] = [
    "rank", "lane", "next", "prev", "0", "1", "world", "lanes", "epoch", "r", "p", "c", "q", "t",
    "m", "i", "j",
];

/// How many words mean something everywhere, and are small.
const COMMON: usize = 6;

/// Changes a sample up to `most` times; how often it did.
pub(super) fn mutate(text: &mut Text, random: &mut Random, most: usize) -> usize {
    let wanted = 1 + random.below(most);
    let mut done = 0;
    for _ in 0..20 * wanted {
        done += usize::from(done < wanted && one(text, random));
    }
    done
}

/// Tries one change; whether it made one.
fn one(text: &mut Text, random: &mut Random) -> bool {
    if random.chance(8) {
        let at = random.below(text.declarations.len());
        let changed = change_declaration(&text.declarations[at], random);
        return replace(&mut text.declarations[at], changed);
    }
    let kernel = random.below(text.kernels.len());
    let lines = &mut text.kernels[kernel];
    let at = random.below(lines.len());
    let line = lines[at].clone();
    let is_plain = |line: &String| !line.contains(['{', '}']);
    if !is_plain(&line) {
        let changed = change_word(&line, random);
        return line.starts_with("for ") && replace(&mut lines[at], changed);
    }
    match random.below(12) {
        0 | 1 if !line.starts_with("let ") => {
            lines.remove(at);
        }
        2 => lines.insert(at, line),
        3 if lines.get(at + 1).is_some_and(is_plain) => lines.swap(at, at + 1),
        4 | 5 => {
            let to = random.below(lines.len());
            lines.remove(at);
            lines.insert(to, line);
        }
        6 => {
            let what = ["rank", "lane", "epoch % 2"][random.below(3)];
            let word = ["==", "!="][random.below(2)];
            let value = random.below(2);
            lines.insert(at + 1, "}".to_owned());
            lines.insert(at, format!("if {what} {word} {value} {{"));
        }
        7 => {
            let added = [
                "barrier",
                "signal next",
                "wait prev",
                "signal prev",
                "wait next",
            ];
            lines.insert(at, added[random.below(added.len())].to_owned());
        }
        8 => {
            let changed = change_kind(&line, random);
            return replace(&mut lines[at], changed);
        }
        _ => {
            let changed = change_word(&line, random);
            return replace(&mut lines[at], changed);
        }
    }
    true
}

fn replace(line: &mut String, with: String) -> bool {
    let changed = *line != with;
    *line = with;
    changed
}

/// Another packing, fewer slots or ranks, or what an earlier run wrote.
fn change_declaration(line: &str, random: &mut Random) -> String {
    if !line.starts_with("scratch") {
        return line.to_owned();
    }
    match random.below(4) {
        0 => {
            let packings = ["packets8 ", "packets16 ", "packets128 ", ""];
            let with = packings[random.below(4)];
            match packings[..3]
                .iter()
                .find(|packing| line.contains(**packing))
            {
                Some(packing) => line.replace(packing, with),
                None => line.replace(": T", &format!(": {with}T")),
            }
        }
        1 => line.replace("[2,", "[1,"),
        2 if line.contains(" persistent ") => line.replace(" persistent ", " "),
        2 => line.replacen("scratch ", "scratch persistent ", 1),
        _ => line.replace("world", "2"),
    }
}

/// A signal for a wait, one rank for all of them, a copy or another source.
fn change_kind(line: &str, random: &mut Random) -> String {
    let pairs = [
        ("barrier", "signal next"),
        ("signal", "wait"),
        ("wait", "signal"),
        (" for r in 1..world", " for r in 2..world"),
        ("[lane of lanes]", ""),
        ("[lane of lanes]", "[0 of lanes]"),
        ("epoch % 2", "0"),
        ("epoch % 2", "epoch % 3"),
        (" on (rank + r) % world", ""),
        (" on next", " on prev"),
        (" at ", " + 0 * "),
        ("signal next", "signal next at 0"),
        ("X[", "W[rank]["),
        ("sum", "max"),
    ];
    let fitting: Vec<_> = pairs
        .iter()
        .filter(|(from, _)| line.contains(from))
        .collect();
    match fitting.len() {
        0 => line.to_owned(),
        count => {
            let (from, to) = fitting[random.below(count)];
            line.replacen(from, to, 1 + random.below(2))
        }
    }
}

/// Another word in the place of one.
fn change_word(line: &str, random: &mut Random) -> String {
    let bytes = line.as_bytes();
    let is_word = |at: usize| bytes[at].is_ascii_alphanumeric() || bytes[at] == b'_';
    let mut words: Vec<(usize, usize)> = Vec::new();
    let mut at = 0;
    while at < line.len() {
        let start = at;
        while at < line.len() && is_word(at) {
            at += 1;
        }
        let word = &line[start..at];
        if WORDS.contains(&word) || word.parse::<u32>().is_ok() {
            words.push((start, at));
        }
        at = at.max(start + 1);
    }
    if words.is_empty() {
        return line.to_owned();
    }
    let (from, to) = words[random.below(words.len())];
    let with = match line[from..to].parse::<u32>() {
        Ok(number) if random.chance(2) => (number + 1).to_string(),
        Ok(number) if random.chance(2) => number.saturating_sub(1).to_string(),
        // Often another word of the line, which is known there.
        _ if random.chance(2) => {
            let (from, to) = words[random.below(words.len())];
            line[from..to].to_owned()
        }
        _ => WORDS[random.below(COMMON)].to_owned(),
    };
    format!("{}{with}{}", &line[..from], &line[to..])
}
