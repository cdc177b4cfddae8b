//! Programs that are right: steps that shift slots around the ranks, add up or multiply them, store
//! products at other ranks, or call a collective, each on a stream that waits for what made its
//! operands. The order of sums is fixed, so that results do not depend on timing.

use super::super::interpreter::Random;
use super::Allowed;
use std::fmt::Display;

/// Writes the lines of a program.
pub(super) struct Writer<'r> {
    random: &'r mut Random,
    world: usize,
    streams: usize,
    lines: Vec<String>,
    /// For each slot of W, the stream that filled it.
    made_on: Vec<String>,
    /// Sends that are yet to be waited for.
    pending: Vec<String>,
    names: usize,
}

/// Ends of a transfer of a number: `sent` goes to the rank `distance` on, where it is received as `received`.
fn ends(number: usize, via: &str, distance: usize, [sent, received]: [impl Display; 2]) -> String {
    format!(
        "s{number} = send W[{sent}] to (rank + {distance}) % world tag {number} via {via}
         r{number} = receive W[{received}] from (rank - {distance}) % world tag {number} via {via}"
    )
}

impl<'r> Writer<'r> {
    pub(super) fn new(random: &'r mut Random, world: usize, streams: usize) -> Self {
        Self {
            random,
            world,
            streams,
            lines: Vec::new(),
            made_on: vec!["caller".to_owned()],
            pending: Vec::new(),
            names: 0,
        }
    }

    /// The lines of a program of some steps, and how many slots it uses.
    pub(super) fn write(mut self, allowed: Allowed) -> (Vec<String>, usize) {
        let steps = 1 + self.random.below(4);
        self.write_steps(steps, allowed.engine);
        let slots = self.made_on.len();
        (self.lines, slots)
    }

    fn line(&mut self, line: impl Into<String>) {
        self.lines.push(line.into());
    }

    /// Appends the lines of a text, without their indentation.
    fn lines(&mut self, text: impl AsRef<str>) {
        let lines = text.as_ref().lines();
        self.lines
            .extend(lines.map(|line| line.trim_start().to_owned()));
    }

    fn write_steps(&mut self, steps: usize, engine: bool) {
        self.line("W[0] = copy(A)");
        if engine {
            self.line("let back = [world - 1 - r for r in 0..world]");
            self.line("let half = [r for r in rank / 2 * 2..min(rank / 2 * 2 + 2, world)]");
        }
        for stream in 0..self.streams {
            self.lines(format!("set_stream pool({stream})\nsynchronize caller"));
        }
        for _ in 0..steps {
            match self.random.below(if engine { 20 } else { 16 }) {
                0 => self.ring(),
                1 => self.pairwise(),
                2 => self.add(),
                3 => self.multiply(),
                4 => self.store(),
                5 => self.repeat(),
                6 => self.forked(),
                7 => self.scratch(),
                8 => self.combine(),
                9 => self.cast(),
                10 => self.accumulate(),
                11 => self.columns(),
                12 => self.transposed(),
                13 => self.call(),
                14 => self.group(engine),
                16..=18 => self.collective(),
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
        let ends = ends(name, via, distance, [from, to]);
        self.lines(format!("share {{\n{ends}\n}}"));
        let mut stream = self.stream_after(&[from]);
        // One group, or what signals first and what waits for it second.
        if via == "nccl" || self.random.chance(2) {
            self.line(format!("post {s}, {r}"));
        } else if via == "get" {
            self.lines(format!("post {s}\npost {r}"));
        } else {
            self.lines(format!("post {r}\npost {s}"));
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
        let ends = ends(name, via, 1, [sum, buffer]);
        self.lines(format!(
            "W[{sum}] = copy(W[{from}])
             for j in 1..world {{
                 share {{
                     {ends}
                 }}
                 post s{name}, r{name}
                 wait s{name}, r{name}
                 W[{sum}] = sum(W[{sum}], W[{buffer}])
             }}"
        ));
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
        self.lines(format!(
            "share {{
                 for j in 1..world {{
                     s{name} = send W[{from}] to (rank - j) % world tag {name} via {via}
                     r{name} = receive W[{slot}] from (rank + j) % world tag {name} via {via}
                 }}
             }}"
        ));
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
            self.lines(format!(
                "if rank == {rank} {{
                     W[{to}] = sum(W[{a}], W[{b}])
                 }} else {{
                     W[{to}] = copy(W[{a}])
                 }}"
            ));
        } else {
            self.line(format!("W[{to}] = sum(W[{a}], W[{b}])"));
        }
        self.made_on.push(stream);
    }

    /// A product, or the larger or smaller of slots.
    fn combine(&mut self) {
        let to = self.made_on.len();
        let op = ["product", "max", "min"][self.random.below(3)];
        // Products grow.
        let number = if op == "product" {
            2
        } else {
            1 + self.random.below(3)
        };
        let slots: Vec<usize> = (0..number).map(|_| self.some_slot()).collect();
        let stream = self.stream_after(&slots);
        let slots: Vec<String> = slots.iter().map(|slot| format!("W[{slot}]")).collect();
        self.line(format!("W[{to}] = {op}({})", slots.join(", ")));
        self.made_on.push(stream);
    }

    /// A slot as elements of another type, added up there or as it is, and back.
    fn cast(&mut self) {
        let (from, to) = (self.some_slot(), self.made_on.len());
        let name = self.name();
        let dtype = ["bf16", "f64"][self.random.below(2)];
        let stream = self.stream_after(&[from]);
        self.line(format!("allocate H{name}: {dtype}[n, n]"));
        self.line(format!("H{name} = cast(W[{from}])"));
        if self.random.chance(2) {
            self.line(format!("H{name} = max(H{name}, H{name})"));
        }
        self.line(format!("W[{to}] = cast(H{name})"));
        self.made_on.push(stream);
    }

    /// A step that is a program of its own.
    fn call(&mut self) {
        let (a, b, to) = (self.some_slot(), self.some_slot(), self.made_on.len());
        let stream = self.stream_after(&[a, b]);
        if self.random.chance(2) {
            let distance = self.random.below(self.world);
            self.line(format!(
                "passed(n = n, distance = {distance}, X = W[{a}], Y = W[{to}])"
            ));
        } else {
            let times = 1 + self.random.below(2);
            self.line(format!(
                "blended(n = n, times = {times}, X = W[{a}], Y = W[{b}], Z = W[{to}])"
            ));
        }
        self.made_on.push(stream);
    }

    /// Slots that go to two ranks in one group, by one protocol or by two.
    fn group(&mut self, engine: bool) {
        let to = self.made_on.len();
        let from = [self.some_slot(), self.some_slot()];
        let names = [self.name(), self.name()];
        let direct = [
            ["get", "put"],
            ["put", "get"],
            ["put", "put"],
            ["get", "get"],
        ];
        let vias = match self.random.below(if engine { 6 } else { 4 }) {
            kind @ 0..=3 => direct[kind],
            _ => ["nccl", "nccl"],
        };
        self.line("share {");
        for (index, (name, via)) in names.iter().zip(vias).enumerate() {
            let distance = 1 + self.random.below(self.world - 1);
            self.lines(ends(*name, via, distance, [from[index], to + index]));
        }
        self.line("}");
        let stream = self.stream_after(&from);
        let [a, b] = names;
        // The engine matches what goes between two ranks by the order.
        let (first, last) = if vias[0] == "nccl" { (a, b) } else { (b, a) };
        self.line(format!("post s{a}, r{first}, r{last}, s{b}"));
        self.line(format!("wait r{b}, r{a}"));
        self.line(format!("wait s{a}, s{b}"));
        self.made_on.extend([stream.clone(), stream]);
    }

    /// Columns of slots, on one stream or two.
    fn columns(&mut self) {
        let (a, b, to) = (self.some_slot(), self.some_slot(), self.made_on.len());
        let (i, j) = (self.random.below(2), self.random.below(2));
        let stream = self.stream_after(&[a, b]);
        if self.random.chance(2) {
            let other = 1 - i;
            self.lines(format!(
                "fork high(0), high(1) {{
                     set_stream high(0)
                     W[{to}, :, {i}] = copy(W[{a}, :, {j}])
                     set_stream high(1)
                     W[{to}, :, {other}] = max(W[{a}, :, {j}], W[{b}, :, {i}])
                 }}"
            ));
        } else {
            self.lines(format!(
                "W[{to}] = copy(W[{a}])
                 W[{to}, :, {i}] = sum(W[{to}, :, {i}], W[{b}, {j}, :])"
            ));
        }
        self.made_on.push(stream);
    }

    /// Operands that are transposed, or go to parts of a tensor that starts at 0.
    fn transposed(&mut self) {
        let (a, b, to) = (self.some_slot(), self.some_slot(), self.made_on.len());
        let name = self.name();
        let stream = self.stream_after(&[a, b]);
        let kind = self.random.below(3);
        if kind == 0 {
            self.line(format!("W[{to}] = sum(W[{a}], transpose(W[{b}]))"));
        } else if kind == 1 {
            // Blocks side by side: operands and the result of one product.
            self.lines(format!(
                "allocate X{name}: f32[n, 3 * n]
                 X{name}[:, 0..n] = copy(W[{a}])
                 X{name}[:, n..2 * n] = copy(W[{b}])
                 X{name}[:, 2 * n..3 * n] = matmul(X{name}[:, 0..n], transpose(X{name}[:, n..2 * n]))
                 W[{to}] = copy(X{name}[:, 2 * n..3 * n])"
            ));
        } else {
            self.line(format!("allocate Z{name}: f32[n, n] = 0"));
            self.line(format!("Z{name}[:, 1] = copy(W[{a}, 0])"));
            self.line(format!("Z{name}[:, 0..2] += sum(transpose(W[{b}]))"));
            self.line(format!("W[{to}] = copy(Z{name})"));
        }
        self.made_on.push(stream);
    }

    /// Adds to a tensor that starts at 0, in a loop or one by one.
    fn accumulate(&mut self) {
        let (a, b, to) = (self.some_slot(), self.some_slot(), self.made_on.len());
        let name = self.name();
        let stream = self.stream_after(&[a, b]);
        self.line(format!("allocate Z{name}: f32[2, n, n] = 0"));
        if self.random.chance(2) {
            self.line("for j in 0..2 {");
            self.line(format!("Z{name}[j] += matmul(W[{a}], W[{b}])"));
            self.line(format!("Z{name}[0] += sum(W[{b}])"));
            self.line("}");
        } else {
            self.line(format!("Z{name}[1] += sum(W[{a}], W[{b}])"));
        }
        self.line(format!("W[{to}] = sum(Z{name}[0], Z{name}[1])"));
        self.made_on.push(stream);
    }

    /// A product of two slots, which may be added to a third.
    fn multiply(&mut self) {
        let (a, b, c) = (self.some_slot(), self.some_slot(), self.some_slot());
        let to = self.made_on.len();
        let stream = self.stream_after(&[a, b, c]);
        let product = match self.random.below(4) {
            0 => format!("linear(W[{a}], W[{b}])"),
            1 => format!("matmul(transpose(W[{a}]), W[{b}])"),
            _ => format!("matmul(W[{a}], W[{b}])"),
        };
        if self.random.chance(2) {
            self.line(format!("W[{to}] = copy(W[{c}])"));
            self.line(format!("W[{to}] += {product}"));
        } else {
            self.line(format!("W[{to}] = {product}"));
        }
        self.made_on.push(stream);
    }

    /// Every rank stores products at all others, or at some of them; their slots are received on a
    /// stream of its own choice.
    fn store(&mut self) {
        let (b, slots) = (self.some_slot(), self.made_on.len());
        let name = self.name();
        let last = 1 + self.random.below(self.world - 1);
        let (each, before) = (format!("for j in 1..{}", last + 1), slots - 1);
        self.lines(format!(
            "share {{
                 {each} {{
                     s{name} = send P to (rank + j) % world tag {name} via put
                     r{name} = receive W[{before} + j] from (rank - j) % world tag {name} via put
                 }}
             }}"
        ));
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

    /// One transfer that is posted again and again, over one buffer or two by turns.
    fn repeat(&mut self) {
        let (from, sum, buffers) = (
            self.some_slot(),
            self.made_on.len(),
            1 + self.random.below(2),
        );
        let first = sum + 1;
        let name = self.name();
        let via = ["get", "put"][self.random.below(2)];
        let distance = 1 + self.random.below(self.world - 1);
        let times = 2 + self.random.below(3);
        let parts = [sum.to_string(), format!("{first} + b")];
        let ends = ends(name, via, distance, parts);
        self.lines(format!(
            "share {{
                 for b in 0..{buffers} {{
                     {ends}
                 }}
             }}"
        ));
        let stream = self.stream_after(&[from]);
        let each = format!("[j % {buffers}]");
        let posts = if self.random.chance(2) {
            format!("post s{name}{each}, r{name}{each}")
        } else {
            let (tells, moves) = if via == "get" { ('s', 'r') } else { ('r', 's') };
            format!("post {tells}{name}{each}\npost {moves}{name}{each}")
        };
        self.lines(format!(
            "W[{sum}] = copy(W[{from}])
             for j in 0..{times} {{
                 {posts}
                 wait r{name}{each}
                 wait s{name}{each}
                 W[{sum}] = sum(W[{sum}], W[{first} + j % {buffers}])
             }}"
        ));
        self.made_on.extend((0..=buffers).map(|_| stream.clone()));
    }

    /// A copy on streams that are forked for it.
    fn forked(&mut self) {
        let (from, to) = (self.some_slot(), self.made_on.len());
        let stream = self.stream_after(&[from]);
        self.line("fork high(0), high(1) {");
        self.line("set_stream high(0)");
        self.line(format!("W[{to}] = copy(W[{from}])"));
        self.line("set_stream high(1)");
        self.line(format!("W[{}] = copy(W[{from}])", to + 1));
        self.line("}");
        self.made_on.extend([stream.clone(), stream]);
    }

    /// Memory that is there for a sum only.
    fn scratch(&mut self) {
        let (a, b, to) = (self.some_slot(), self.some_slot(), self.made_on.len());
        let name = self.name();
        let stream = self.stream_after(&[a, b]);
        self.line(format!("allocate D{name}: f32[n, n]"));
        self.line(format!("D{name} = sum(W[{a}], W[{b}])"));
        self.line(format!("W[{to}] = copy(D{name})"));
        self.line(format!("deallocate D{name}"));
        self.made_on.push(stream);
    }

    fn collective(&mut self) {
        let (from, to) = (self.some_slot(), self.made_on.len());
        let stream = self.stream_after(&[from]);
        let root = self.random.below(self.world);
        let op = ["sum", "max", "min"][self.random.below(3)];
        let kind = self.random.below(7);
        let among = ["", " among back", " among half"][self.random.below(3)];
        // Other collectives are as long as the world.
        let everyone = among.trim_end_matches(" among half");
        let place = if everyone.is_empty() {
            "rank"
        } else {
            "world - 1 - rank"
        };
        let call = match kind {
            0 => format!("all_reduce(W[{from}], {op}){among}"),
            1 => format!("broadcast(W[{from}] from {root}){everyone}"),
            2 => {
                // What other ranks do not get is what they had.
                self.line(format!("W[{to}] = copy(W[{from}])"));
                format!("reduce(W[{from}], {op} to {root}){everyone}")
            }
            3 => {
                self.line(format!("W[{to}] = copy(W[{from}])"));
                format!("all_reduce(W[{to}], {op}){among}")
            }
            _ => {
                let name = self.name();
                self.line(format!("allocate G{name}: f32[world, n, n]"));
                let slot = self.random.below(self.world);
                match kind {
                    4 => self.line(format!("G{name} = all_gather(W[{from}]){everyone}")),
                    5 => {
                        self.line(format!("G{name}[{place}] = copy(W[{from}])"));
                        self.line(format!("G{name} = all_gather(G{name}[{place}]){everyone}"));
                    }
                    _ => {
                        let other = self.name();
                        self.line(format!("allocate G{other}: f32[world, n, n]"));
                        self.line(format!(
                            "for j in 0..world {{ G{other}[j] = copy(W[{from}]) }}"
                        ));
                        if self.random.chance(2) {
                            self.line(format!("G{name} = all_to_all(G{other}){everyone}"));
                        } else {
                            self.line(format!("G{name} = all_gather(W[{from}])"));
                            self.line(format!(
                                "G{name}[{slot}] = reduce_scatter(G{other}, {op}){everyone}"
                            ));
                        }
                    }
                }
                format!("copy(G{name}[{slot}])")
            }
        };
        self.line(format!("W[{to}] = {call}"));
        self.made_on.push(stream);
    }
}
