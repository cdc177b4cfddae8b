//! Changes to a program's lines: what people get wrong.

use super::super::interpreter::Random;
use super::Allowed;

/// Changes `lines` up to as often as is allowed; how often it did.
pub(super) fn mutate(
    lines: &mut Vec<String>,
    random: &mut Random,
    allowed: Allowed,
    (world, streams, slots): (usize, usize, usize),
) -> usize {
    let wanted = 1 + random.below(allowed.changes);
    let mut mutation = Mutation {
        lines,
        random,
        engine: allowed.engine,
        world,
        streams,
        slots,
    };
    let mut done = 0;
    for _ in 0..20 * wanted {
        if done < wanted && mutation.one() {
            done += 1;
        }
    }
    done
}

struct Mutation<'a> {
    lines: &'a mut Vec<String>,
    random: &'a mut Random,
    engine: bool,
    world: usize,
    streams: usize,
    slots: usize,
}

impl Mutation<'_> {
    /// Tries one change; whether it made one.
    fn one(&mut self) -> bool {
        let at = self.random.below(self.lines.len());
        let line = self.lines[at].clone();
        if declares(&line) {
            return self.change_declaration(at, &line);
        }
        if line.starts_with("for ") && line.ends_with('{') {
            return self.change_loop(at, &line);
        }
        if line.contains('{') || line.contains('}') {
            return false;
        }
        match self.random.below(17) {
            0 | 1 => {
                self.lines.remove(at);
            }
            2 => self.lines.insert(at, line),
            3 => {
                let next = self.lines.get(at + 1);
                if !next.is_some_and(|next| is_plain(next)) {
                    return false;
                }
                self.lines.swap(at, at + 1);
            }
            // Moved, or repeated somewhere else.
            kind @ (4..=6) => {
                let to = self.random.below(self.lines.len() + 1);
                if self.is_in_share(to) {
                    return false;
                }
                self.lines.insert(to, line);
                if kind != 6 {
                    self.lines.remove(if to <= at { at + 1 } else { at });
                }
            }
            7 => {
                let rank = self.random.below(self.world);
                let word = ["==", "!="][self.random.below(2)];
                self.lines.insert(at + 1, "}".to_owned());
                self.lines.insert(at, format!("if rank {word} {rank} {{"));
            }
            8 => return self.change_group(at, &line),
            9 | 10 => return self.change_stream(at, &line),
            11 => return self.change_loop_index(at, &line),
            12 => return self.change_collective(at, &line),
            13 => return self.change_operation(at, &line),
            14 => return self.change_axis(at, &line),
            15 if line.contains("(n = n") => return self.change_call(at, &line),
            _ => return self.change_slot(at, &line),
        }
        true
    }

    fn replace(&mut self, at: usize, line: String) -> bool {
        let changed = self.lines[at] != line;
        self.lines[at] = line;
        changed
    }

    /// Whether a line put at `at` would be inside of a share.
    fn is_in_share(&self, at: usize) -> bool {
        let mut open: Vec<bool> = Vec::new();
        for line in &self.lines[..at] {
            if line.starts_with('}') {
                open.pop();
            }
            if line.ends_with('{') {
                open.push(line.starts_with("share"));
            }
        }
        open.contains(&true)
    }

    /// Another tag, protocol, peer, length or slot, on one side or on both.
    fn change_declaration(&mut self, at: usize, line: &str) -> bool {
        let mut lines = vec![at];
        // The other side is the line after a send or before a receive.
        let other = if line.contains(" = send ") {
            at + 1
        } else {
            at.wrapping_sub(1)
        };
        if self.random.chance(2) && self.lines.get(other).is_some_and(|line| declares(line)) {
            lines.push(other);
        }
        let kind = self.random.below(6);
        let tag = self.random.below(4);
        let vias = if self.engine { 3 } else { 2 };
        let via = ["get", "put", "nccl"][self.random.below(vias)];
        let mut changed = false;
        for at in lines {
            let line = self.lines[at].clone();
            changed |= match kind {
                0 => match line.split_once(" tag ").zip(line.split_once(" via ")) {
                    Some(((before, _), (_, after))) => {
                        self.replace(at, format!("{before} tag {tag} via {after}"))
                    }
                    None => false,
                },
                1 | 2 => match line.split_once(" via ") {
                    Some((before, _)) => self.replace(at, format!("{before} via {via}")),
                    None => false,
                },
                3 => {
                    let moved = line.replacen("(rank +", "(rank + 1 +", 1);
                    let moved = moved.replacen("(rank -", "(rank + 1 -", 1);
                    self.replace(at, moved)
                }
                4 => {
                    let part = line.replacen("] from", "][0..1] from", 1);
                    self.replace(at, part.replacen("] to", "][0..1] to", 1))
                }
                _ => self.change_slot(at, &line),
            };
        }
        changed
    }

    fn change_loop(&mut self, at: usize, line: &str) -> bool {
        let changed = match self.random.below(6) {
            4 => line.replacen(" among back", "", 1),
            5 => line.replacen(" among half", " among back", 1),
            0 => line.replacen(" in 1..", " in 0..", 1),
            1 => line.replacen(" in 0..", " in 1..", 1),
            2 => line.replacen("..world {", "..world - 1 {", 1),
            _ => line.replacen(" {", " + 1 {", 1),
        };
        self.replace(at, changed)
    }

    /// Another order of a group, a smaller one, or two in one.
    fn change_group(&mut self, at: usize, line: &str) -> bool {
        let Some((verb, list)) = line.split_once(' ') else {
            return false;
        };
        if !["post", "wait"].contains(&verb) || line.contains('=') {
            return false;
        }
        let members: Vec<&str> = list.split(", ").collect();
        let next = self.lines.get(at + 1).cloned().unwrap_or_default();
        match next.split_once(' ') {
            Some((same, more)) if same == verb && !next.contains('=') && self.random.chance(2) => {
                self.lines[at] = format!("{line}, {more}");
                self.lines.remove(at + 1);
            }
            _ if members.len() < 2 => return false,
            _ => match self.random.below(3) {
                0 => {
                    let kept = members[self.random.below(members.len())];
                    self.lines[at] = format!("{verb} {kept}");
                }
                1 => {
                    let all: Vec<&str> = members.into_iter().rev().collect();
                    self.lines[at] = format!("{verb} {}", all.join(", "));
                }
                _ => {
                    self.lines[at] = format!("{verb} {}", members[0]);
                    let rest = members[1..].join(", ");
                    self.lines.insert(at + 1, format!("{verb} {rest}"));
                }
            },
        }
        true
    }

    fn change_stream(&mut self, at: usize, line: &str) -> bool {
        let Some((verb, _)) = line.split_once(' ') else {
            return false;
        };
        if !["set_stream", "synchronize"].contains(&verb) {
            return false;
        }
        let stream = match self.random.below(self.streams + 2) {
            0 => "caller".to_owned(),
            1 => "high(0)".to_owned(),
            number => format!("pool({})", number - 2),
        };
        self.replace(at, format!("{verb} {stream}"))
    }

    fn change_loop_index(&mut self, at: usize, line: &str) -> bool {
        let shifted = ["[j - 1]", "[j + 1]", "[1]"][self.random.below(3)];
        if line.contains("[j]") {
            return self.replace(at, line.replacen("[j]", shifted, 1));
        }
        let other = ["[(j + 1) %", "[1 - j %"][self.random.below(2)];
        self.replace(at, line.replacen("[j %", other, 1))
    }

    fn change_collective(&mut self, at: usize, line: &str) -> bool {
        let root = self.random.below(self.world);
        let changed = match self.random.below(4) {
            0 => line.replacen(" from 0)", &format!(" from {root})"), 1),
            1 => line.replacen(" to 0)", " to rank)", 1),
            2 => line.replacen("all_reduce(", "reduce(", 1),
            _ => line.replacen("all_gather(", "all_to_all(", 1),
        };
        self.replace(at, changed)
    }

    /// Another operation on the same operands.
    fn change_operation(&mut self, at: usize, line: &str) -> bool {
        let names = ["sum(", "product(", "max(", "min(", "copy(", "cast("];
        let Some(now) = names
            .iter()
            .find(|name| line.contains(&format!("= {name}")))
        else {
            return self.replace(at, line.replacen(" += ", " = ", 1));
        };
        let other = names[self.random.below(names.len())];
        let changed = match self.random.below(3) {
            0 => line.replacen(" += ", " = ", 1),
            1 => line.replacen(" = sum(", " += sum(", 1),
            _ => line.replacen(now, other, 1),
        };
        self.replace(at, changed)
    }

    /// Another distance or number of times of a call.
    fn change_call(&mut self, at: usize, line: &str) -> bool {
        let number = self.random.below(4);
        let changed = match line
            .split_once("distance = ")
            .or(line.split_once("times = "))
        {
            Some((before, rest)) => match rest.split_once(',') {
                Some((_, after)) => {
                    let word = if line.contains("distance") {
                        "distance"
                    } else {
                        "times"
                    };
                    format!("{before}{word} = {number},{after}")
                }
                None => return false,
            },
            None => return false,
        };
        self.replace(at, changed)
    }

    /// Another row, column or part in one place.
    fn change_axis(&mut self, at: usize, line: &str) -> bool {
        if line.contains("X") && self.random.chance(2) {
            let blocks = ["0..n]", "n..2 * n]", "1..n + 1]"];
            let block = blocks[self.random.below(3)];
            let other = blocks[self.random.below(3)];
            return self.replace(at, line.replacen(block, other, 1));
        }
        let parts = [
            ", :, 0]",
            ", :, 1]",
            ", 0, :]",
            ", 1, :]",
            ", :, 0..1]",
            ", :, 0..2]",
        ];
        let places = parts.iter().flat_map(|part| line.match_indices(part));
        let places: Vec<(usize, &str)> = places.collect();
        let Some(&(place, part)) = places.get(self.random.below(places.len().max(1))) else {
            let changed = match self.random.below(2) {
                0 => line.replacen("transpose(W[", "copy(W[", 1),
                _ => line.replacen("[:, ", "[", 1),
            };
            return self.replace(at, changed);
        };
        let other = parts[self.random.below(parts.len())];
        let changed = format!("{}{other}{}", &line[..place], &line[place + part.len()..]);
        self.replace(at, changed)
    }

    /// Another slot of W in one place.
    fn change_slot(&mut self, at: usize, line: &str) -> bool {
        let places: Vec<usize> = line
            .match_indices("W[")
            .map(|(place, _)| place + 2)
            .collect();
        if places.is_empty() {
            return false;
        }
        let start = places[self.random.below(places.len())];
        let digits = line[start..].find(|c: char| !c.is_ascii_digit());
        let Some(length) = digits.filter(|length| *length > 0) else {
            return false;
        };
        let slot = self.random.below(self.slots);
        let changed = format!("{}{slot}{}", &line[..start], &line[start + length..]);
        self.replace(at, changed)
    }
}

fn declares(line: &str) -> bool {
    line.contains(" = send ") || line.contains(" = receive ")
}

/// Whether a line is a statement of its own outside of shares.
fn is_plain(line: &str) -> bool {
    !line.contains('{') && !line.contains('}') && !declares(line)
}
