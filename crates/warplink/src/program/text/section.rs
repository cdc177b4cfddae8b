//! Parsing of kernel sections and their scratch.

use super::is_name;
use super::operand::{Parsed, Parser};
use super::token::{Token, TokenKind};
use crate::program::construct::Each;
use crate::program::expr::Expr;
use crate::program::ir::StatementKind;
use crate::program::section::{
    Announcement, Application, Argument, Move, Operator, Packing, Place, Receiver, Scratch,
    Section, Source, Step, StepKind, Verb,
};

impl Parser<'_> {
    /// What follows `scratch`.
    pub(super) fn scratch(&mut self) -> Parsed<Scratch> {
        let first = self.peek();
        let persistent = first.text == "persistent" && self.peek_at(1).text != ":";
        self.at += usize::from(persistent);
        let name = self.name("a name for the scratch")?;
        self.expect(":")?;
        // A type of that name may be a parameter; then its brackets follow.
        let packing = Packing::ALL
            .into_iter()
            .find(|packing| packing.is_packets() && self.is(packing.name()))
            .filter(|_| self.peek_at(1).kind == TokenKind::Word);
        self.at += usize::from(packing.is_some());
        if persistent && packing.is_some() {
            let message = "packets are read in the launch that stores them; expected plain scratch to persist";
            return Err(self.wrong(first, message.to_owned()));
        }
        let dtype = self.element_type()?;
        self.expect("[")?;
        let mut shape = vec![self.integer()?];
        while self.take(",") {
            shape.push(self.integer()?);
        }
        if !self.take("]") {
            return Err(self.expected("',' or ']'"));
        }
        Ok(Scratch {
            name,
            persistent,
            packing: packing.unwrap_or(Packing::Plain),
            dtype,
            shape,
        })
    }

    /// What follows `kernel`.
    pub(super) fn section(&mut self) -> Parsed<Section> {
        let lane = self.name("a name for the lane's number")?;
        self.expect("in")?;
        let start = self.peek();
        let (from, lanes) = self.bounds()?;
        if from != Expr::Number(0) {
            return Err(self.wrong(start, "lanes are counted from 0".into()));
        }
        if self.peek().text != "threads" {
            return Err(self.expected("'threads'"));
        }
        self.at += 1;
        let threads = self.integer()?;
        let body = self.block(Self::lane_step)?;
        Ok(Section {
            lane,
            lanes,
            threads,
            body,
        })
    }

    fn lane_step(&mut self) -> Parsed<Step> {
        let token = self.peek();
        let position = self.position();
        if token.kind == TokenKind::Word && is_name(token.text) {
            let kind = StepKind::Move(self.assigned()?);
            return Ok(Step { position, kind });
        }
        if token.kind != TokenKind::Word {
            return Err(self.expected("a step"));
        }
        self.at += 1;
        let kind = match token.text {
            "let" => match self.binding()? {
                StatementKind::LetTensor { name, value } => StepKind::LetTensor { name, value },
                StatementKind::LetInteger { name, value } => StepKind::LetInteger { name, value },
                _ => return Err(self.expected("an integer or a part of a tensor")),
            },
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
            "for" => StepKind::For(self.repetition(Self::lane_step)?),
            "if" => StepKind::If(self.branch(position, Self::lane_step)?),
            _ => {
                self.at -= 1;
                return Err(self.expected(
                    "a step of a kernel: put, get, signal, wait, barrier, announce, agree, let, for, if or a tensor",
                ));
            }
        };
        Ok(Step { position, kind })
    }

    /// `n, root in C[slot]`, `n, root with X, Y in C[slot]`; then maybe `to p, q`, where it `announces`.
    fn announcement(&mut self, announces: bool) -> Parsed<Announcement> {
        let mut values = vec![self.integer()?];
        while self.take(",") {
            values.push(self.integer()?);
        }
        let mut tensors = Vec::new();
        if self.take("with") {
            tensors.push(self.name("a tensor")?);
            while self.take(",") {
                tensors.push(self.name("a tensor")?);
            }
        }
        if !self.take("in") {
            return Err(self.expected("',' or 'in'"));
        }
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

    /// Whether a function of rows stands behind the `=` of the statement at hand.
    pub(super) fn applies_function(&self) -> bool {
        let ends = |token: &Token<'_>| {
            token.text == "=" || matches!(token.kind, TokenKind::LineEnd | TokenKind::End)
        };
        let at = (0..).find(|ahead| ends(&self.peek_at(*ahead))).unwrap_or(0);
        let function = self.peek_at(at + 1);
        self.peek_at(at).text == "="
            && function.kind == TokenKind::Word
            && is_name(function.text)
            && self.peek_at(at + 2).text == "("
    }

    /// `targets = copy(source)` or `targets = reduce(sources, operator)`, or a function of rows.
    pub(super) fn assigned(&mut self) -> Parsed<Move> {
        let first = self.peek();
        let mut targets = self.each(Self::place)?;
        let mut results = vec![targets.len()];
        while self.take(";") {
            while self.peek().kind == TokenKind::LineEnd {
                self.at += 1;
            }
            let more = self.each(Self::place)?;
            results.push(more.len());
            targets.extend(more);
        }
        if !self.take("=") {
            return Err(self.expected("'=', 'on', '[', ',' or ';'"));
        }
        let function = self.peek();
        if function.kind == TokenKind::Word && is_name(function.text) && self.peek_at(1).text == "("
        {
            return self.applied(targets, results);
        }
        if results.len() > 1 {
            let message = "a function of rows alone has several results".to_owned();
            return Err(self.wrong(first, message));
        }
        if self.take("copy") {
            self.expect("(")?;
            let source = self.source()?;
            self.expect(")")?;
            if targets.len() > 1 || targets[0].over.is_some() {
                let message = "a copy has one target; expected reduce for several".to_owned();
                return Err(self.wrong(first, message));
            }
            return Ok(Move {
                verb: Verb::Copy,
                targets,
                sources: vec![source.into()],
            });
        }
        if !self.take("reduce") {
            return Err(self.expected("copy, reduce or a function of rows"));
        }
        let mut sources = Vec::new();
        let operator = self.reduced(&mut sources)?;
        Ok(Move {
            verb: Verb::Reduce(operator),
            targets,
            sources,
        })
    }

    /// `norm(reduce(X[t] on r for r in 0..world, sum), R[t], W, 1e-6)`.
    fn applied(&mut self, targets: Vec<Each<Place>>, results: Vec<usize>) -> Parsed<Move> {
        let function = self.name("a function")?;
        self.expect("(")?;
        let (mut sources, mut arguments) = (Vec::new(), Vec::new());
        loop {
            if let Some(number) = self.literal()? {
                arguments.push(Argument::Number(number));
            } else if self.take("reduce") {
                let before = sources.len();
                let operator = self.reduced(&mut sources)?;
                arguments.push(Argument::Reduced(sources.len() - before, operator));
            } else {
                sources.push(self.source()?.into());
                arguments.push(Argument::Source);
            }
            if !self.take(",") {
                break;
            }
        }
        self.expect(")")?;
        Ok(Move {
            verb: Verb::Apply(Application {
                function,
                arguments,
                results,
            }),
            targets,
            sources,
        })
    }

    /// What follows `reduce`: sources, which are added to the list, and the operator.
    fn reduced(&mut self, sources: &mut Vec<Each<Source>>) -> Parsed<Operator> {
        self.expect("(")?;
        let before = sources.len();
        loop {
            if let Some(operator) = self.last_operator(sources.len() > before) {
                self.expect(")")?;
                return Ok(operator);
            }
            let source = self.source()?;
            let over = self.over()?;
            sources.push(Each { item: source, over });
            if !self.take(",") {
                return Err(self
                    .expected("',' and, at the end, the operator: sum, product, max, min, average or a parameter"));
            }
        }
    }

    /// The operator, which comes last, before the parenthesis, if there is something `before` it: a word for one, which
    /// may be a tensor's name elsewhere, or a parameter's name.
    pub(super) fn last_operator(&mut self, before: bool) -> Option<Operator> {
        let token = self.peek();
        let last = before && self.peek_at(1).text == ")";
        let operator = match token.text.parse() {
            Ok(operator) => Some(Operator::Fixed(operator)),
            Err(_) => Some(Operator::Parameter(token.text.to_owned()))
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
            Some((condition, self.place()?))
        } else {
            None
        };
        Ok(Source { place, otherwise })
    }

    fn receiver(&mut self) -> Parsed<Receiver> {
        let rank = self.integer()?;
        let lane = self.take("at").then(|| self.integer()).transpose()?;
        Ok(Receiver { rank, lane })
    }

    fn place(&mut self) -> Parsed<Place> {
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
