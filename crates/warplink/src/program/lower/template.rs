//! Templates of lowered programs.
//!
//! A template is a program's text in which a line that starts with `@` stands for several:
//! `@multiply TARGET SOURCE` for the products of all right operands, with their bias if they have
//! one and `biased` follows, `@accumulate` for the same added to the target, and `@operands`,
//! `@results` for their declarations. `@fork` and `@join` start and join the streams, with one
//! stream of high priority, or `lanes` of them where that follows. `$T` is the element type.

use crate::dtype::DType;

/// `@fork`: streams start after the caller's.
const FORK: &str = "
    get_stream main
    set_stream high(0)
    synchronize main
    for i in 0..streams {
        set_stream pool(i)
        synchronize main
    }
";

/// `@fork lanes`.
const FORK_LANES: &str = "
    get_stream main
    for i in 0..lanes {
        set_stream high(i)
        synchronize main
    }
    for i in 0..streams {
        set_stream pool(i)
        synchronize main
    }
";

/// `@join`: the caller's stream goes on after all others.
const JOIN: &str = "
    set_stream main
    synchronize high(0)
    for i in 0..streams {
        synchronize pool(i)
    }
";

/// `@join lanes`.
const JOIN_LANES: &str = "
    set_stream main
    for i in 0..lanes {
        synchronize high(i)
    }
    for i in 0..streams {
        synchronize pool(i)
    }
";

/// `body` with its streams' start and end written out.
pub(super) fn with_streams(body: &str) -> String {
    body.replace("@fork lanes", FORK_LANES)
        .replace("@join lanes", JOIN_LANES.trim_end())
        .replace("@fork", FORK)
        .replace("@join", JOIN.trim_end())
}

/// What fills a template.
pub(super) struct Fill<'a> {
    pub(super) dtype: DType,
    /// How many right operands there are.
    pub(super) operands: usize,
    pub(super) bias: bool,
    /// The shape of a right operand and of a result, with `n` for the operand's columns.
    pub(super) operand: &'a str,
    pub(super) result: &'a str,
}

/// A name of the operand or result number `index`; plain where there is only one.
pub(super) fn numbered(name: &str, index: usize, count: usize) -> String {
    if count == 1 {
        name.to_owned()
    } else {
        format!("{name}{index}")
    }
}

impl Fill<'_> {
    /// The text that `template` stands for.
    pub(super) fn fill(&self, template: &str) -> String {
        let mut text = String::new();
        for line in template.lines() {
            let body = line.trim_start();
            let margin = &line[..line.len() - body.len()];
            let words: Vec<&str> = body.split(' ').collect();
            match words[..] {
                [
                    word @ ("@multiply" | "@accumulate"),
                    target,
                    source,
                    ref rest @ ..,
                ] => {
                    let sign = if word == "@multiply" { "=" } else { "+=" };
                    let bias = self.bias && rest == ["biased"];
                    self.multiply(&mut text, margin, (target, sign, source), bias);
                }
                ["@operands"] => self.declare(&mut text, margin, true),
                ["@results"] => self.declare(&mut text, margin, false),
                _ => {
                    text += margin;
                    text += &body.replace("$T", self.dtype.name());
                    text.push('\n');
                }
            }
        }
        text
    }

    fn multiply(
        &self,
        text: &mut String,
        margin: &str,
        (target, sign, source): (&str, &str, &str),
        bias: bool,
    ) {
        for index in 0..self.operands {
            let b = numbered("B", index, self.operands);
            // `C[j]` of the second operand is `C1[j]`.
            let (name, rest) = target.split_at(target.find('[').unwrap_or(target.len()));
            let c = numbered(name, index, self.operands);
            *text += &if bias {
                let bias = numbered("bias", index, self.operands);
                format!("{margin}{c}{rest} {sign} linear({source}, {b}, {bias})\n")
            } else {
                format!("{margin}{c}{rest} {sign} matmul({source}, {b})\n")
            };
        }
    }

    fn declare(&self, text: &mut String, margin: &str, operands: bool) {
        for index in 0..self.operands {
            let n = numbered("n", index, self.operands);
            let (role, name, shape) = if operands {
                ("input", "B", self.operand)
            } else {
                ("output", "C", self.result)
            };
            let name = numbered(name, index, self.operands);
            let shape = shape.replace('$', &n);
            let dtype = self.dtype;
            *text += &format!("{margin}{role} {name}: {dtype}[{shape}]\n");
            if operands && self.bias {
                let name = numbered("bias", index, self.operands);
                *text += &format!("{margin}input {name}: {dtype}[{n}]\n");
            }
        }
    }
}
