//! Random small programs, for tests that compare the verifier's word with execution.
//!
//! A sample is first written so that it is right: steps that shift a slot around the ranks, add up or
//! multiply slots, store products at other ranks, or call a collective, each on a stream that waits
//! for what made its operands. Then some samples have lines left out, repeated or exchanged, which
//! may or may not break them. The order of sums is fixed, so that results do not depend on timing.

use std::fmt::Write as _;
use warplink::Result;
use warplink::program::{Parameters, Program};

/// A random program and what to run it with.
#[derive(Clone, Debug)]
pub(crate) struct Sample {
    /// Its text.
    pub(crate) text: String,
    /// The program.
    pub(crate) program: Program,
    /// For how many ranks.
    pub(crate) world: usize,
    /// How many streams the pool has.
    pub(crate) streams: usize,
    /// Values of its parameters.
    pub(crate) parameters: Parameters,
    /// How many lines were left out, repeated or exchanged; where none were, it is right.
    pub(crate) changes: usize,
}

/// What samples may use.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Allowed {
    /// Transfers and collectives through the engine.
    pub(crate) engine: bool,
    /// Most lines that are changed.
    pub(crate) changes: usize,
}

impl Default for Allowed {
    fn default() -> Self {
        Self {
            engine: true,
            changes: 2,
        }
    }
}

/// Numbers that look random (splitmix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `limit`, which is small and not zero.
    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit.max(1) as u64) as usize
    }

    fn chance(&mut self, of: usize) -> bool {
        self.below(of) == 0
    }
}

/// The sample of a seed.
///
/// # Errors
/// None that a seed is known to cause; the text is parsed as any other.
pub(crate) fn sample(seed: u64, allowed: Allowed) -> Result<Sample> {
    let mut random = Random(seed);
    let world = 2 + random.below(3);
    let streams = 1 + random.below(3);
    let mut writer = Writer {
        random,
        world,
        streams,
        lines: Vec::new(),
        made_on: vec!["caller".to_owned()],
        pending: Vec::new(),
        names: 0,
    };
    let steps = 1 + writer.random.below(4);
    writer.write(steps, allowed.engine);
    let changes = if writer.random.chance(3) {
        0
    } else {
        writer.change(allowed.changes)
    };
    let slots = writer.made_on.len();
    let mut text = String::from("program sample(n) {\n");
    text += "    input A: f32[n, n]\n    output C: f32[n, n]\n";
    let _ = writeln!(text, "    allocate W: f32[{slots}, n, n]");
    // Stands for what is stored at other ranks.
    text += "    allocate P: f32[n, n]\n";
    let mut depth = 1;
    for line in &writer.lines {
        depth -= usize::from(line.starts_with('}'));
        let _ = writeln!(text, "{:1$}{line}", "", depth * 4);
        depth += usize::from(line.ends_with('{'));
    }
    text += "}\n";
    Ok(Sample {
        program: Program::parse(&text)?,
        text,
        world,
        streams,
        parameters: Parameters::from([("n".to_owned(), 2)]),
        changes,
    })
}

struct Writer {
    random: Random,
    world: usize,
    streams: usize,
    lines: Vec<String>,
    /// For each slot of W, the stream that filled it.
    made_on: Vec<String>,
    /// Sends that are yet to be waited for.
    pending: Vec<String>,
    names: usize,
}

impl Writer {
    fn line(&mut self, line: impl Into<String>) {
        self.lines.push(line.into());
    }

    fn write(&mut self, steps: usize, engine: bool) {
        self.line("W[0] = copy(A)");
        for stream in 0..self.streams {
            self.line(format!("set_stream pool({stream})"));
            self.line("synchronize caller");
        }
        for _ in 0..steps {
            match self.random.below(if engine { 8 } else { 6 }) {
                0 => self.ring(),
                1 => self.pairwise(),
                2 => self.add(),
                3 => self.multiply(),
                4 => self.store(),
                5 => self.shift(engine),
                6 => self.collective(),
                _ => self.shift(engine),
            }
        }
        self.line("set_stream caller");
        for stream in 0..self.streams {
            self.line(format!("synchronize pool({stream})"));
        }
        for send in std::mem::take(&mut self.pending) {
            self.line(format!("wait {send}"));
        }
        let slots: Vec<String> = (0..self.made_on.len()).map(|s| format!("W[{s}]")).collect();
        self.line(format!("C = sum({})", slots.join(", ")));
    }

    /// Makes a random stream the current one, after the streams that filled `slots`.
    fn stream_after(&mut self, slots: &[usize]) -> String {
        let stream = match self.random.below(self.streams + 1) {
            0 => "caller".to_owned(),
            number => format!("pool({})", number - 1),
        };
        self.line(format!("set_stream {stream}"));
        let mut makers: Vec<String> = slots.iter().map(|s| self.made_on[*s].clone()).collect();
        makers.sort_unstable();
        makers.dedup();
        for maker in makers.into_iter().filter(|maker| *maker != stream) {
            self.line(format!("synchronize {maker}"));
        }
        stream
    }

    fn some_slot(&mut self) -> usize {
        let slots = self.made_on.len();
        self.random.below(slots)
    }

    fn name(&mut self) -> usize {
        self.names += 1;
        self.names
    }

    /// Every rank sends a slot to the rank some steps on, or to itself.
    fn shift(&mut self, engine: bool) {
        let (from, to) = (self.some_slot(), self.made_on.len());
        let distance = self.random.below(self.world);
        let via = ["get", "put", "nccl"][self.random.below(if engine { 3 } else { 2 })];
        let name = self.name();
        let (s, r) = (format!("s{name}"), format!("r{name}"));
        self.line("share {");
        self.line(format!(
            "{s} = send W[{from}] to (rank + {distance}) % world tag {name} via {via}"
        ));
        self.line(format!(
            "{r} = receive W[{to}] from (rank - {distance}) % world tag {name} via {via}"
        ));
        self.line("}");
        let mut stream = self.stream_after(&[from]);
        // One group, or what signals first and what waits for it second.
        if via == "nccl" || self.random.chance(2) {
            self.line(format!("post {s}, {r}"));
        } else if via == "get" {
            self.line(format!("post {s}"));
            self.line(format!("post {r}"));
        } else {
            self.line(format!("post {r}"));
            self.line(format!("post {s}"));
        }
        if self.random.chance(2) {
            stream = self.stream_after(&[]);
        }
        self.line(format!("wait {r}"));
        if self.random.chance(2) {
            self.line(format!("wait {s}"));
        } else {
            self.pending.push(s);
        }
        self.made_on.push(stream);
    }

    /// A slot travels all the way round in a loop, adding up.
    fn ring(&mut self) {
        let (from, sum, buffer) = (self.some_slot(), self.made_on.len(), self.made_on.len() + 1);
        let name = self.name();
        let via = ["get", "put"][self.random.below(2)];
        let stream = self.stream_after(&[from]);
        self.line(format!("W[{sum}] = copy(W[{from}])"));
        self.line("for j in 1..world {");
        self.line("share {");
        self.line(format!(
            "s{name} = send W[{sum}] to (rank + 1) % world tag {name} via {via}"
        ));
        self.line(format!(
            "r{name} = receive W[{buffer}] from (rank - 1) % world tag {name} via {via}"
        ));
        self.line("}");
        self.line(format!("post s{name}, r{name}"));
        self.line(format!("wait s{name}, r{name}"));
        self.line(format!("W[{sum}] = sum(W[{sum}], W[{buffer}])"));
        self.line("}");
        self.made_on.extend([stream.clone(), stream]);
    }

    /// Every rank receives a slot of each other, shared at once; a second stream adds them up as
    /// they arrive.
    fn pairwise(&mut self) {
        let (from, sum) = (self.some_slot(), self.made_on.len());
        let name = self.name();
        let via = ["get", "put"][self.random.below(2)];
        let slot = match sum {
            0 => "j".to_owned(),
            before => format!("{before} + j"),
        };
        self.line("share {");
        self.line("for j in 1..world {");
        self.line(format!(
            "s{name} = send W[{from}] to (rank - j) % world tag {name} via {via}"
        ));
        self.line(format!(
            "r{name} = receive W[{slot}] from (rank + j) % world tag {name} via {via}"
        ));
        self.line("}");
        self.line("}");
        let mover = self.stream_after(&[from]);
        let (first_posts, moves) = match via {
            "get" => ('s', 'r'),
            _ => ('r', 's'),
        };
        self.line(format!("post {first_posts}{name}[j] for j in 1..world"));
        let together = self.random.chance(2);
        if together {
            self.line(format!("post {moves}{name}[j] for j in 1..world"));
        }
        let adder = self.stream_after(&[from]);
        self.line(format!("W[{sum}] = copy(W[{from}])"));
        self.line("for j in 1..world {");
        if !together {
            self.line(format!("set_stream {mover}"));
            self.line(format!("post {moves}{name}[j]"));
            self.line(format!("set_stream {adder}"));
        }
        self.line(format!("wait r{name}[j]"));
        self.line(format!("W[{sum}] = sum(W[{sum}], W[{slot}])"));
        self.line("}");
        self.pending.push(format!("s{name}[j] for j in 1..world"));
        self.made_on.push(adder.clone());
        // The adder waited for these, so what comes after it comes after them.
        self.made_on.extend((1..self.world).map(|_| adder.clone()));
    }

    /// A sum of two slots, of others on some ranks.
    fn add(&mut self) {
        let (a, b, to) = (self.some_slot(), self.some_slot(), self.made_on.len());
        let stream = self.stream_after(&[a, b]);
        if self.random.chance(2) {
            let rank = self.random.below(self.world);
            self.line(format!("if rank == {rank} {{"));
            self.line(format!("W[{to}] = sum(W[{a}], W[{b}])"));
            self.line("} else {");
            self.line(format!("W[{to}] = copy(W[{a}])"));
            self.line("}");
        } else {
            self.line(format!("W[{to}] = sum(W[{a}], W[{b}])"));
        }
        self.made_on.push(stream);
    }

    /// A product of two slots, which may be added to a third.
    fn multiply(&mut self) {
        let (a, b, c) = (self.some_slot(), self.some_slot(), self.some_slot());
        let to = self.made_on.len();
        let stream = self.stream_after(&[a, b, c]);
        if self.random.chance(2) {
            self.line(format!("W[{to}] = copy(W[{c}])"));
            self.line(format!("W[{to}] += matmul(W[{a}], W[{b}])"));
        } else {
            self.line(format!("W[{to}] = matmul(W[{a}], W[{b}])"));
        }
        self.made_on.push(stream);
    }

    /// Every rank stores products at all others, or at some of them; their slots are received on a
    /// stream of its own choice.
    fn store(&mut self) {
        let (b, slots) = (self.some_slot(), self.made_on.len());
        let name = self.name();
        let last = 1 + self.random.below(self.world - 1);
        let each = format!("for j in 1..{}", last + 1);
        self.line("share {");
        self.line(format!("{each} {{"));
        self.line(format!(
            "s{name} = send P to (rank + j) % world tag {name} via put"
        ));
        self.line(format!(
            "r{name} = receive W[{} + j] from (rank - j) % world tag {name} via put",
            slots - 1
        ));
        self.line("}");
        self.line("}");
        // Before the products: who stores first would wait for who stores first.
        self.stream_after(&[]);
        self.line(format!("post r{name}[j] {each}"));
        // A left operand for all, or one for each.
        let (a, operands) = match self.random.below(slots + 1) {
            all if all == slots => (format!("j % {slots}"), (0..slots).collect()),
            one => (one.to_string(), vec![one, b]),
        };
        let mut stream = self.stream_after(&operands);
        self.line(format!("post s{name}[j] = matmul(W[{a}], W[{b}]) {each}"));
        if self.random.chance(2) {
            stream = self.stream_after(&[]);
        }
        self.line(format!("wait r{name}[j] {each}"));
        self.pending.push(format!("s{name}[j] {each}"));
        self.made_on.extend((0..last).map(|_| stream.clone()));
    }

    fn collective(&mut self) {
        let (from, to) = (self.some_slot(), self.made_on.len());
        let stream = self.stream_after(&[from]);
        let root = self.random.below(self.world);
        let call = match self.random.below(3) {
            0 => format!("all_reduce(W[{from}], sum)"),
            1 => format!("all_reduce(W[{from}], max)"),
            _ => format!("broadcast(W[{from}] from {root})"),
        };
        self.line(format!("W[{to}] = {call}"));
        self.made_on.push(stream);
    }

    /// Leaves out, repeats or exchanges up to `most` lines; how many it did.
    fn change(&mut self, most: usize) -> usize {
        let single = |line: &str| !line.contains('{') && !line.contains('}');
        let mut done = 0;
        for _ in 0..1 + self.random.below(most.max(1)) {
            let at = self.random.below(self.lines.len());
            let declares = |line: &str| line.contains(" = send ") || line.contains(" = receive ");
            if most == 0 || !single(&self.lines[at]) || declares(&self.lines[at]) {
                continue;
            }
            match self.random.below(5) {
                0 | 1 => {
                    self.lines.remove(at);
                }
                3 if self.lines[at].contains("[j]") && !self.lines[at].contains(" for ") => {
                    let shifted = ["[j - 1]", "[j + 1]"][self.random.below(2)];
                    self.lines[at] = self.lines[at].replace("[j]", shifted);
                }
                2 => {
                    let line = self.lines[at].clone();
                    self.lines.insert(at, line);
                }
                _ => {
                    let next = self.lines.get(at + 1);
                    if !next.is_some_and(|next| single(next) && !declares(next)) {
                        continue;
                    }
                    self.lines.swap(at, at + 1);
                }
            }
            done += 1;
        }
        done
    }
}
