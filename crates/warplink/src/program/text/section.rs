//! The text of kernel sections and their scratch: parsing and printing.
//!
//! ```text
//! step      = "let" NAME "=" (integer | tensor) | "for" … | "if" …
//!           | "let" NAME "=" words                     an integer in memory; see `text/value.rs`
//!           | place "=" "integer" "(" integer ")"      stores an integer
//!           | "put" tensor "to" place | "get" place "to" tensor
//!           | place [each] {"," place [each]} "=" ("copy" "(" source ")"
//!             | "reduce" "(" source [each] {"," source [each]} "," (operator | NAME) ")")
//!           | place [each] {("," | ";") place [each]} "=" NAME "(" argument {"," argument} ")"
//!                                                      a function of rows; ";" is between its results
//!           | "signal" receiver [each] {"," receiver [each]}
//!           | "wait" integer [each] {"," integer [each]} | "barrier"
//!           | "announce" integer {"," integer} ["with" NAME {"," NAME}] "in" tensor
//!             ["to" integer [each] {"," integer [each]}]
//!           | "agree" integer {"," integer} ["with" NAME {"," NAME}] "in" tensor
//! source    = place ["if" condition "else" (place | NUMBER)]   a number only as an argument of a function of rows
//! argument  = source | "reduce" "(" … ")" | NUMBER
//! ```

use super::is_name;
use super::operand::{Parsed, Parser};
use super::print::{Action, after};
use super::token::{Token, TokenKind};
use crate::device::ReduceOp;
use crate::named::{comma, listed};
use crate::program::construct::{Each, NodeKind};
use crate::program::expr::Expr;
use crate::program::section::{
    Announcement, Application, FunctionArgument, IntegerStore, Move, Otherwise, Packing, Place,
    Receiver, ReduceOperator, Scratch, Section, Source, StepKind, Verb,
};
use std::fmt::{self, Display, Formatter};

/// Reserved words that begin a step.
pub(super) const STEPS: [&str; 7] = [
    "put", "get", "signal", "wait", "barrier", "announce", "agree",
];

impl Parser<'_> {
    /// Parses the rest of `scratch`.
    pub(super) fn scratch(&mut self) -> Parsed<Vec<Scratch>> {
        let first = self.peek();
        // A colon behind makes it the name of the scratch.
        let persistent = first.text == "persistent" && self.peek_at(1).text != ":";
        self.at += usize::from(persistent);
        let all = self.list(|parser| parser.one_scratch(persistent))?;
        if all.len() > 1 && all.iter().any(|one| one.packing.is_packets()) {
            let message =
                "rows of several scratch tensors alternate; expected plain ones, without packets";
            return Err(self.wrong(first, message.to_owned()));
        }
        Ok(all)
    }

    fn one_scratch(&mut self, persistent: bool) -> Parsed<Scratch> {
        let first = self.peek();
        let name = self.name("a name for the scratch")?;
        self.expect(":")?;
        // A parameter may be named like a type; then its brackets follow.
        let packing = Packing::ALL
            .into_iter()
            .find(|packing| packing.is_packets() && self.is(packing.name()))
            .filter(|_| self.peek_at(1).kind == TokenKind::Word);
        self.at += usize::from(packing.is_some());
        // Flags count launches: a packet of an earlier launch would look as if it had not arrived.
        if persistent && packing.is_some() {
            let message = "packets are read in the launch that stores them; expected plain scratch to persist";
            return Err(self.wrong(first, message.to_owned()));
        }
        let dtype = self.element_type()?;
        self.expect("[")?;
        let shape = self.list(Self::integer)?;
        self.expect_among("]", "',' or ']'")?;
        Ok(Scratch {
            name,
            persistent,
            packing: packing.unwrap_or(Packing::Plain),
            dtype,
            shape,
        })
    }

    /// Parses the rest of `kernel`.
    pub(super) fn section(&mut self) -> Parsed<Section> {
        let lane = self.name("a name for the lane's number")?;
        self.expect("in")?;
        let start = self.peek();
        let (from, lanes) = self.bounds()?;
        if from != Expr::Number(0) {
            return Err(self.wrong(start, "lanes are counted from 0".into()));
        }
        self.expect("threads")?;
        let threads = self.integer()?;
        let body = self.block(Self::lane_step)?;
        Ok(Section {
            lane,
            lanes,
            threads,
            body,
        })
    }

    fn lane_step(&mut self) -> Parsed<NodeKind<StepKind>> {
        let token = self.peek();
        if token.kind == TokenKind::Word && is_name(token.text) {
            return Ok(NodeKind::Do(self.assigned()?));
        }
        if token.kind != TokenKind::Word {
            return Err(self.expected("a step"));
        }
        self.at += 1;
        Ok(NodeKind::Do(match token.text {
            "let" if self.reads_value() => StepKind::Value(self.device_value()?),
            "let" => {
                return match self.binding()? {
                    NodeKind::LetTensor { name, value } => Ok(NodeKind::LetTensor { name, value }),
                    NodeKind::LetInteger { name, value } => {
                        Ok(NodeKind::LetInteger { name, value })
                    }
                    _ => Err(self.expected("an integer or a part of a tensor")),
                };
            }
            "put" => {
                let source = self.selected()?.into();
                self.expect("to")?;
                StepKind::Move(one(Verb::Put, self.place()?, source))
            }
            "get" => {
                let source = self.place()?;
                self.expect("to")?;
                StepKind::Move(one(Verb::Get, self.selected()?.into(), source))
            }
            "signal" => StepKind::Signal(self.each(Self::receiver)?),
            "wait" => StepKind::Wait(self.each(Self::integer)?),
            "barrier" => StepKind::Barrier,
            "announce" => StepKind::Announce(self.announcement(true)?),
            "agree" => StepKind::Agree(self.announcement(false)?),
            _ => {
                self.at -= 1;
                let words = STEPS.into_iter().chain(["let", "for", "if", "a tensor"]);
                return Err(self.expected(&format!("a step of a kernel: {}", listed(words))));
            }
        }))
    }

    /// `n, root in C[slot]`, `n, root with X, Y in C[slot]`; then maybe `to p, q`, where it `announces`.
    fn announcement(&mut self, announces: bool) -> Parsed<Announcement> {
        let values = self.list(Self::integer)?;
        let tensors = if self.take("with") {
            self.list(|parser| parser.name("a tensor"))?
        } else {
            Vec::new()
        };
        self.expect_among("in", "',' or 'in'")?;
        let rows = self.selected()?;
        let lists = announces && self.take("to");
        let peers = lists.then(|| self.each(Self::integer)).transpose()?;
        Ok(Announcement {
            values,
            tensors,
            rows,
            peers,
        })
    }

    /// Whether the current statement has a function of rows after its `=`.
    pub(super) fn applies_function(&self) -> bool {
        let ends = |token: &Token<'_>| {
            token.text == "=" || matches!(token.kind, TokenKind::LineEnd | TokenKind::End)
        };
        // The targets in front of the `=` may be of any length. The last token is `End`, which ends the search.
        let at = (0..).find(|ahead| ends(&self.peek_at(*ahead))).unwrap_or(0);
        let function = self.peek_at(at + 1);
        self.peek_at(at).text == "="
            && function.kind == TokenKind::Word
            && is_name(function.text)
            && self.peek_at(at + 2).text == "("
    }

    /// `targets = copy(source)` or `targets = reduce(sources, operator)`, or a function of rows.
    fn assigned(&mut self) -> Parsed<StepKind> {
        let first = self.peek();
        let mut results = self.results()?;
        let function = self.peek();
        if function.kind == TokenKind::Word && is_name(function.text) && self.peek_at(1).text == "("
        {
            return Ok(StepKind::Apply(self.applied(results)?));
        }
        let (Some(mut targets), true) = (results.pop(), results.is_empty()) else {
            let message = "a function of rows alone has several results".to_owned();
            return Err(self.wrong(first, message));
        };
        if self.take("integer") {
            let value = self.in_parentheses(Self::integer)?;
            return match (targets.pop(), targets.is_empty()) {
                (Some(Each { item, over: None }), true) => Ok(StepKind::Store(IntegerStore {
                    target: item,
                    value,
                })),
                _ => {
                    let message = "an integer is stored in one target; expected a loop for several";
                    Err(self.wrong(first, message.to_owned()))
                }
            };
        }
        if self.take("copy") {
            let source = self.in_parentheses(Self::source)?;
            if targets.len() > 1 || targets[0].over.is_some() {
                let message = "a copy has one target; expected reduce for several".to_owned();
                return Err(self.wrong(first, message));
            }
            return Ok(StepKind::Move(Move {
                verb: Verb::Copy,
                targets,
                sources: vec![source.into()],
            }));
        }
        self.expect_among("reduce", "copy, reduce, integer or a function of rows")?;
        let (sources, operator) = self.reduced(Self::source)?;
        Ok(StepKind::Move(Move {
            verb: Verb::Reduce(operator),
            targets,
            sources,
        }))
    }

    /// `H[t]; N[t] = norm(…)`.
    pub(super) fn application(&mut self) -> Parsed<Application> {
        let results = self.results()?;
        self.applied(results)
    }

    /// `H[t]; N[t] =`.
    fn results(&mut self) -> Parsed<Vec<Vec<Each<Place>>>> {
        let mut results = vec![self.each(Self::place)?];
        while self.take(";") {
            self.skip_line_ends();
            results.push(self.each(Self::place)?);
        }
        self.expect_among("=", "'=', 'on', '[', ',' or ';'")?;
        Ok(results)
    }

    /// `norm(reduce(X[t] on r for r in 0..world, sum), R[t], W, 1e-6)`.
    fn applied(&mut self, results: Vec<Vec<Each<Place>>>) -> Parsed<Application> {
        let function = self.name("a function")?;
        let arguments = self.in_parentheses(|parser| parser.list(Self::function_argument))?;
        Ok(Application {
            function,
            arguments,
            results,
        })
    }

    fn function_argument(&mut self) -> Parsed<FunctionArgument> {
        if let Some(number) = self.literal()? {
            return Ok(FunctionArgument::Number(number));
        }
        let (sources, operator) = if self.take("reduce") {
            let (sources, operator) = self.reduced(Self::source)?;
            (sources, Some(operator))
        } else {
            (vec![self.source()?.into()], None)
        };
        Ok(FunctionArgument::Sources { sources, operator })
    }

    /// Parses the rest of `reduce`: sources and the operator.
    pub(super) fn reduced<T>(
        &mut self,
        source: fn(&mut Self) -> Parsed<T>,
    ) -> Parsed<(Vec<Each<T>>, ReduceOperator)> {
        self.expect("(")?;
        let mut sources = Vec::new();
        loop {
            if let Some(operator) = self.last_operator(!sources.is_empty()) {
                self.expect(")")?;
                return Ok((sources, operator));
            }
            let (item, over) = (source(self)?, self.over()?);
            sources.push(Each { item, over });
            if !self.take(",") {
                let operators = ReduceOp::alternatives();
                let expected = format!("',' and, at the end, the operator: {operators}");
                return Err(self.expected(&expected));
            }
        }
    }

    /// The operator, which comes last, before the parenthesis, if anything precedes it: a word for one, which may be
    /// a tensor's name elsewhere, or a parameter's name.
    fn last_operator(&mut self, before: bool) -> Option<ReduceOperator> {
        let token = self.peek();
        let last = before && self.peek_at(1).text == ")";
        let operator = match token.text.parse() {
            Ok(operator) => Some(ReduceOperator::Fixed(operator)),
            Err(_) => Some(ReduceOperator::Parameter(token.text.to_owned()))
                .filter(|_| token.kind == TokenKind::Word && is_name(token.text)),
        };
        let operator = operator.filter(|_| last);
        self.at += usize::from(operator.is_some());
        operator
    }

    fn source(&mut self) -> Parsed<Source> {
        let place = self.place()?;
        let otherwise = if self.take("if") {
            let condition = self.condition()?;
            self.expect("else")?;
            Some((condition, self.otherwise()?))
        } else {
            None
        };
        Ok(Source { place, otherwise })
    }

    fn otherwise(&mut self) -> Parsed<Otherwise> {
        Ok(match self.literal()? {
            Some(number) => Otherwise::Number(number),
            None => Otherwise::Place(self.place()?),
        })
    }

    fn receiver(&mut self) -> Parsed<Receiver> {
        let rank = self.integer()?;
        let lane = self.take("at").then(|| self.integer()).transpose()?;
        Ok(Receiver { rank, lane })
    }

    pub(super) fn place(&mut self) -> Parsed<Place> {
        let tensor = self.selected()?;
        let on = self.take("on").then(|| self.integer()).transpose()?;
        Ok(Place { tensor, on })
    }
}

fn one(verb: Verb, target: Place, source: Place) -> Move {
    Move {
        verb,
        targets: vec![target.into()],
        sources: vec![Source::from(source).into()],
    }
}

/// Prints a declaration of scratch.
pub(super) fn scratch(f: &mut Formatter<'_>, all: &[Scratch]) -> fmt::Result {
    let persistent = all.iter().any(|one| one.persistent);
    let word = if persistent { "persistent " } else { "" };
    write!(f, "scratch {word}{}", comma(all))
}

impl Display for Scratch {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.name)?;
        if self.packing.is_packets() {
            write!(f, "{} ", self.packing.name())?;
        }
        write!(f, "{}[{}]", self.dtype, comma(&self.shape))
    }
}

impl Display for Section {
    /// The line that starts the body.
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Self {
            lane,
            lanes,
            threads,
            ..
        } = self;
        write!(f, "kernel {lane} in 0..{lanes} threads {threads} ")
    }
}

impl Action for StepKind {
    fn print(&self, f: &mut Formatter<'_>, _: usize) -> fmt::Result {
        match self {
            StepKind::Move(step) => step.fmt(f),
            StepKind::Apply(it) => it.fmt(f),
            StepKind::Value(it) => it.fmt(f),
            StepKind::Store(it) => write!(f, "{} = {}({})", it.target, self.word(), it.value),
            StepKind::Signal(list) => write!(f, "{} {}", self.word(), comma(list)),
            StepKind::Wait(list) => write!(f, "{} {}", self.word(), comma(list)),
            StepKind::Barrier => f.write_str(self.word()),
            StepKind::Announce(it) | StepKind::Agree(it) => write!(f, "{} {it}", self.word()),
        }
    }
}

impl Display for Announcement {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(&comma(&self.values))?;
        if !self.tensors.is_empty() {
            write!(f, " with {}", comma(&self.tensors))?;
        }
        write!(f, " in {}", self.rows)?;
        after(f, " to ", self.peers.as_ref().map(comma))
    }
}

impl Display for Move {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let (targets, sources) = (comma(&self.targets), comma(&self.sources));
        match &self.verb {
            Verb::Put => write!(f, "put {sources} to {targets}"),
            Verb::Get => write!(f, "get {sources} to {targets}"),
            Verb::Copy => write!(f, "{targets} = copy({sources})"),
            Verb::Reduce(operator) => write!(f, "{targets} = reduce({sources}, {operator})"),
        }
    }
}

impl Display for Application {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        for (number, targets) in self.results.iter().enumerate() {
            let lead = if number == 0 { "" } else { "; " };
            write!(f, "{lead}{}", comma(targets))?;
        }
        write!(f, " = {}({})", self.function, comma(&self.arguments))
    }
}

impl Display for FunctionArgument {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sources {
                sources,
                operator: Some(operator),
            } => write!(f, "reduce({}, {operator})", comma(sources)),
            Self::Sources { sources, .. } => f.write_str(&comma(sources)),
            Self::Number(number) => number.fmt(f),
        }
    }
}

impl Display for ReduceOperator {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fixed(operator) => operator.fmt(f),
            Self::Parameter(name) => f.write_str(name),
        }
    }
}

impl Display for Place {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        self.tensor.fmt(f)?;
        after(f, " on ", self.on.as_ref())
    }
}

impl Display for Receiver {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        self.rank.fmt(f)?;
        after(f, " at ", self.lane.as_ref())
    }
}

impl Display for Source {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        self.place.fmt(f)?;
        match &self.otherwise {
            Some((condition, Otherwise::Place(place))) => {
                write!(f, " if {condition} else {place}")
            }
            Some((condition, Otherwise::Number(number))) => {
                write!(f, " if {condition} else {number}")
            }
            None => Ok(()),
        }
    }
}
