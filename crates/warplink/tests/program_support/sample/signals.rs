//! Random programs of little but posts, waits and streams: two transfers that are posted again and again, in
//! groups or apart, on whichever stream, and waited for on another. Many are wrong, and few for the same reason.

use super::super::interpreter::Random;
use super::Sample;
use std::fmt::Write as _;
use warplink::Result;
use warplink::program::{Parameters, Program};

/// The sample of a seed.
///
/// # Errors
/// The parser's error, where the text is no program.
pub(crate) fn signals(seed: u64) -> Result<Sample> {
    // Apart from those of the other samples.
    let mut random = Random::new(seed ^ 0x5167_4a15);
    let world = 2 + random.below(3);
    let streams = 1 + random.below(3);
    let mut text = String::from(
        "program signals(n) {\n    input A: f32[n, n]\n    output C: f32[n, n]\n    allocate R: f32[2, n, n]\n    share {\n",
    );
    let distance = random.below(world);
    for transfer in 1..=2 {
        let protocol = ["get", "put"][random.below(2)];
        let distance = if random.chance(3) {
            random.below(world)
        } else {
            distance
        };
        let _ = writeln!(
            text,
            "        s{transfer} = send A to (rank + {distance}) % world tag {transfer} via {protocol}\n        \
             r{transfer} = receive R[{}] from (rank - {distance}) % world tag {transfer} via {protocol}",
            transfer - 1
        );
    }
    text += "    }\n";
    let mut lines = Lines {
        text,
        streams,
        random,
    };
    lines.write();
    let text = lines.text;
    Ok(Sample {
        program: Program::parse(&text)?,
        text,
        world,
        streams,
        parameters: Parameters::from([("n".to_owned(), 2)]),
        changes: 1,
    })
}

struct Lines {
    text: String,
    streams: usize,
    random: Random,
}

impl Lines {
    fn write(&mut self) {
        for stream in 1..=self.streams {
            self.set_stream(stream);
            self.line("synchronize caller");
        }
        let ends = ["s1", "r1", "s2", "r2"];
        for _ in 0..2 + self.random.below(2) {
            let mut order = ends;
            if self.random.chance(3) {
                self.random.shuffle(&mut order);
            }
            let size = [4, 4, 2, 1, 3][self.random.below(5)];
            for group in order.chunks(size) {
                self.move_on();
                self.list("post", group);
            }
            for _ in 0..self.random.below(4) {
                self.move_on();
                let mut some = ends;
                self.random.shuffle(&mut some);
                let count = 1 + self.random.below(3);
                self.list("wait", &some[..count]);
            }
            if self.random.chance(3) {
                self.list("wait", &ends);
            }
        }
        self.set_stream(0);
        for stream in 1..=self.streams {
            if !self.random.chance(6) {
                self.synchronize(stream);
            }
        }
        if !self.random.chance(4) {
            self.list("wait", &ends);
        }
        self.line("C = sum(R[0], R[1])");
        self.text += "}\n";
    }

    /// Perhaps to another stream, and behind one.
    fn move_on(&mut self) {
        if self.random.chance(2) {
            let stream = self.random.below(self.streams + 1);
            self.set_stream(stream);
        }
        if self.random.chance(3) {
            let stream = self.random.below(self.streams + 1);
            self.synchronize(stream);
        }
    }

    fn set_stream(&mut self, stream: usize) {
        self.line(&format!("set_stream {}", name(stream)));
    }

    fn synchronize(&mut self, stream: usize) {
        self.line(&format!("synchronize {}", name(stream)));
    }

    fn list(&mut self, what: &str, ends: &[&str]) {
        self.line(&format!("{what} {}", ends.join(", ")));
    }

    fn line(&mut self, line: &str) {
        let _ = writeln!(self.text, "    {line}");
    }
}

fn name(stream: usize) -> String {
    match stream {
        0 => "caller".to_owned(),
        _ => format!("pool({})", stream - 1),
    }
}
