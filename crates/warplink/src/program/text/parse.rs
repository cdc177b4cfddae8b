//! Parsing of statements and whole programs.

use super::operand::{Parsed, Parser};
use super::token::{TokenKind, mark_bytes, tokens};
use super::{MAX_BLOCK_DEPTH, MAX_PARAMETERS, is_name};
use crate::device::ReduceOp;
use crate::dtype::DType;
use crate::named::{Named, listed};
use crate::program::ir::{
    Arm, Branch, Declaration, Each, ElementType, ElementwiseOp, Loop, Node, NodeKind, Order,
    Position, PostedMatmul, Product, Program, Role, Sharding, StatementKind, Subprogram,
};
use crate::program::parameters::{Parameter, ParameterKind, Value};
use std::mem::discriminant;

/// Parses a text: a program, preceded by those that it may call.
pub(super) fn program(text: &str) -> Parsed<Program> {
    let mut parser = Parser::new(text, tokens(text)?);
    let mut subprograms: Vec<Subprogram> = Vec::new();
    parser.skip_line_ends();
    loop {
        // The name, which is the token after `program`.
        let token = parser.peek_at(1);
        let last = parser.one_program()?;
        if subprograms.iter().any(|other| other.name == last.name) {
            let message = format!("another program has the name '{}'", last.name);
            return Err(parser.wrong(token, message));
        }
        parser.skip_line_ends();
        if parser.peek().kind == TokenKind::End {
            return Ok(Program {
                name: last.name,
                parameters: last.parameters,
                subprograms,
                body: last.body,
            });
        }
        if !parser.is("program") {
            return Err(parser.expected("the end of the text or another 'program'"));
        }
        subprograms.push(last);
    }
}

impl Parser<'_> {
    /// `program name(…) { … }`.
    fn one_program(&mut self) -> Parsed<Subprogram> {
        self.expect("program")?;
        let name = self.name("the program's name")?;
        self.expect("(")?;
        let mut parameters: Vec<Parameter> = Vec::new();
        while !self.is(")") {
            let token = self.peek();
            let parameter = self.parameter()?;
            let name = &parameter.name;
            if parameters.iter().any(|other| other.name == *name) {
                return Err(self.wrong(token, format!("parameter '{name}' is named twice")));
            }
            if parameters.len() == MAX_PARAMETERS {
                let message = format!("too many parameters; expected at most {MAX_PARAMETERS}");
                return Err(self.wrong(token, message));
            }
            parameters.push(parameter);
            if !self.take(",") && !self.is(")") {
                return Err(self.expected("',' or ')'"));
            }
        }
        self.expect(")")?;
        let body = self.block(Self::statement)?;
        Ok(Subprogram {
            name,
            parameters,
            body,
        })
    }

    /// `m`, `n[]` or `parts = 1 | 2`.
    fn parameter(&mut self) -> Parsed<Parameter> {
        let name = self.name("a parameter's name or ')'")?;
        let kind = if self.take("[") {
            self.expect("]")?;
            ParameterKind::List
        } else if self.take("=") {
            ParameterKind::OneOf(self.alternatives()?)
        } else {
            ParameterKind::Integer
        };
        Ok(Parameter { name, kind })
    }

    /// `1 | 2 | 4` or `bf16 | f16`; `types` means all element types, and `operators` all operators.
    fn alternatives(&mut self) -> Parsed<Vec<Value>> {
        let mut list: Vec<Value> = Vec::new();
        if self.take("types") {
            list.extend(DType::ALL.map(Value::ElementType));
        } else if self.take("operators") {
            list.extend(
                <ReduceOp as Named>::ALL
                    .iter()
                    .copied()
                    .map(Value::Operator),
            );
        }
        if !list.is_empty() {
            return Ok(list);
        }
        loop {
            let token = self.next();
            let value = match token.kind {
                TokenKind::Number(number) => i64::try_from(number).ok().map(Value::Integer),
                TokenKind::Word => {
                    let dtype = token.text.parse().ok().map(Value::ElementType);
                    dtype.or_else(|| token.text.parse().ok().map(Value::Operator))
                }
                _ => None,
            };
            let alike = |value: &Value| {
                list.iter()
                    // All of one kind, so that the value's type does not depend on the caller's choice.
                    .all(|first| discriminant(first) == discriminant(value) && first != value)
            };
            let Some(value) = value.filter(alike) else {
                self.at -= 1;
                return Err(self.expected(
                    "another number below 2^63, or another element type or operator where the first is one",
                ));
            };
            list.push(value);
            if !self.take("|") {
                return Ok(list);
            }
        }
    }

    pub(super) fn skip_line_ends(&mut self) {
        while self.peek().kind == TokenKind::LineEnd {
            self.at += 1;
        }
    }

    /// `{ … }`, each statement on its own line or ended by `;`. Statements other than loops and branches are parsed
    /// by `other`.
    pub(super) fn block<A>(
        &mut self,
        other: fn(&mut Self) -> Parsed<NodeKind<A>>,
    ) -> Parsed<Vec<Node<A>>> {
        let start = self.peek();
        self.expect("{")?;
        if self.blocks >= MAX_BLOCK_DEPTH {
            return Err(self.wrong(
                start,
                format!("blocks are nested deeper than {MAX_BLOCK_DEPTH}"),
            ));
        }
        self.blocks += 1;
        let mut list = Vec::new();
        loop {
            self.skip_ends();
            if self.take("}") {
                self.blocks -= 1;
                return Ok(list);
            }
            if self.peek().kind == TokenKind::End {
                let line = start.line;
                return Err(self.expected(&format!("'}}' for the '{{' that line {line} opens")));
            }
            list.push(self.node(other)?);
            if !self.is_statement_end() {
                return Err(self.expected("the end of the statement"));
            }
        }
    }

    /// Start of the current statement. For the first one on its line, the line identifies it.
    pub(super) fn position(&mut self) -> Position {
        let token = self.peek();
        // A parser that counted from the start of the line each time would take quadratic time for one long line.
        let (line, at, column) = self.started;
        let shares = line == token.line;
        let (from, before) = if shares {
            (at, column)
        } else {
            let start = self.text[..token.at].rfind('\n').map_or(0, |at| at + 1);
            (start.max(mark_bytes(self.text)), 1)
        };
        // Counted from the previous statement: a line may have many.
        let column = before + self.text[from..token.at].chars().count() as u32;
        self.started = (token.line, token.at, column);
        Position {
            line: token.line,
            // 0 where the line alone identifies the statement, which keeps most messages short.
            column: if shares { column } else { 0 },
        }
    }

    fn node<A>(&mut self, other: fn(&mut Self) -> Parsed<NodeKind<A>>) -> Parsed<Node<A>> {
        let position = self.position();
        let kind = if self.take("for") {
            NodeKind::For(self.repetition(other)?)
        } else if self.take("if") {
            NodeKind::If(self.branch(position, other)?)
        } else {
            other(self)?
        };
        Ok(Node { position, kind })
    }

    fn statement(&mut self) -> Parsed<NodeKind<StatementKind>> {
        let first = self.peek();
        if first.kind == TokenKind::Word && is_name(first.text) {
            // Two consecutive words are not an assignment.
            let two = self.peek_at(1).kind == TokenKind::Word;
            self.at += usize::from(two && matches!(first.text, "expect" | "inout" | "function"));
            let kind = match first.text {
                "expect" if two && self.applies_function() => {
                    StatementKind::ExpectRows(self.application()?)
                }
                "expect" if two => StatementKind::Expect(self.expectation()?),
                "inout" if two => {
                    let tensor = self.name("a tensor's name")?;
                    self.expect("=")?;
                    let part = self.tensor()?;
                    StatementKind::InOut { tensor, part }
                }
                "function" if two => StatementKind::Function(self.function()?),
                _ if self.peek_at(1).text == "(" => self.program_call()?,
                _ => self.assignment()?,
            };
            return Ok(NodeKind::Do(kind));
        }
        if first.kind != TokenKind::Word {
            return Err(self.expected("a statement"));
        }
        self.at += 1;
        Ok(NodeKind::Do(match first.text {
            "let" if self.reads_value() => StatementKind::Value(self.device_value()?),
            "let" => return self.binding(),
            "require" => StatementKind::Require(self.condition()?),
            "optional" if self.take("input") => self.declaration(Role::Input, true)?,
            "optional" if self.take("output") => self.declaration(Role::Output, true)?,
            "optional" => return Err(self.expected("'input' or 'output'")),
            "input" => self.declaration(Role::Input, false)?,
            "output" => self.declaration(Role::Output, false)?,
            "allocate" => self.declaration(Role::Local, false)?,
            "scratch" => StatementKind::Scratch(self.scratch()?),
            "kernel" => StatementKind::Kernel(self.section()?),
            "deallocate" => StatementKind::Deallocate(self.name("a tensor's name")?),
            "share" => StatementKind::Share(self.block(Self::share_item)?),
            "post" => self.posting()?,
            "wait" => StatementKind::Wait(self.each(Self::transfer)?),
            "get_stream" => StatementKind::GetStream(self.name("a name for the stream")?),
            "set_stream" => StatementKind::SetStream(self.stream()?),
            "synchronize" => StatementKind::Synchronize(self.stream()?),
            "fork" => StatementKind::Fork {
                streams: self.each(Self::stream)?,
                body: self.block(Self::statement)?,
            },
            _ => {
                self.at -= 1;
                return Err(self.expected("a statement"));
            }
        }))
    }

    /// Parses the rest of `let`.
    pub(super) fn binding(&mut self) -> Parsed<NodeKind<StatementKind>> {
        let name = self.name("the name to bind")?;
        self.expect("=")?;
        if self.take("[") {
            let elements = self.each(Self::integer)?;
            self.expect_among("]", "',' or ']'")?;
            return Ok(NodeKind::Do(StatementKind::LetList { name, elements }));
        }
        // A word with brackets is a tensor or the element of a list; only a tensor ends the statement where the
        // brackets end, and `n[0]` alone is resolved when the name is known.
        if self.is("transpose") {
            let value = self.tensor()?;
            return Ok(NodeKind::LetTensor { name, value });
        }
        if self.peek().kind == TokenKind::Word && self.peek_at(1).text == "[" {
            let start = self.at;
            if let Ok(value) = self.tensor()
                && self.is_statement_end()
            {
                return Ok(NodeKind::LetTensor { name, value });
            }
            self.at = start;
        }
        let value = self.integer()?;
        Ok(NodeKind::LetInteger { name, value })
    }

    fn is_statement_end(&self) -> bool {
        matches!(self.peek().kind, TokenKind::LineEnd | TokenKind::End)
            || self.is(";")
            || self.is("}")
    }

    pub(super) fn element_type(&mut self) -> Parsed<ElementType> {
        let token = self.peek();
        let dtype = match token.text.parse::<DType>() {
            Ok(dtype) => ElementType::Fixed(dtype),
            Err(_) if token.kind == TokenKind::Word && is_name(token.text) => {
                ElementType::Parameter(token.text.to_owned())
            }
            Err(_) => {
                let types = DType::ALL.map(DType::name).into_iter();
                let types = listed(types.chain(["a parameter that is one"]));
                return Err(self.expected(&format!("an element type: {types}")));
            }
        };
        self.at += 1;
        Ok(dtype)
    }

    fn declaration(&mut self, role: Role, optional: bool) -> Parsed<StatementKind> {
        let name = self.name("a tensor's name")?;
        let mut index = None;
        if self.take("[") {
            index = Some((self.peek(), self.name("the index of a family of tensors")?));
            self.expect("]")?;
        }
        self.expect(":")?;
        let dtype = self.element_type()?;
        self.expect("[")?;
        let (mut shape, mut sharding) = (Vec::new(), Sharding::Whole);
        loop {
            shape.push(self.integer()?);
            let over = self.peek();
            if self.take("over") {
                let kind = if self.take("loop") {
                    Sharding::Loop
                } else if self.take("ranks") {
                    Sharding::Ranks(shape.len() - 1)
                } else {
                    return Err(self.expected("'ranks' or 'loop'"));
                };
                if sharding != Sharding::Whole {
                    return Err(self.wrong(over, "a tensor is sharded along one axis only".into()));
                }
                if kind == Sharding::Loop && shape.len() > 1 {
                    return Err(self.wrong(over, "the loop's axis is the first one".into()));
                }
                sharding = kind;
            }
            if !self.take(",") {
                break;
            }
        }
        self.expect_among("]", "',' or ']'")?;
        let order = match (self.take("column_major"), self.is("if")) {
            (false, _) => Order::RowMajor,
            (true, false) => Order::ColumnMajor,
            (true, true) => {
                self.at += 1;
                Order::ColumnMajorIf(self.condition()?)
            }
        };
        let equals = self.peek();
        let zero = self.take("=");
        if zero && role == Role::Input {
            return Err(self.wrong(equals, "an input has the caller's values".into()));
        }
        // Other values would need a fill by element, where 0 is a fill by byte for every type.
        if zero && self.next().kind != TokenKind::Number(0) {
            self.at -= 1;
            return Err(self.expected("0, which a tensor may start at"));
        }
        let next = self.peek();
        let family = self.over()?;
        match (&index, &family) {
            (None, None) => {}
            (Some((_, index)), Some(over)) if *index == over.index => {}
            (Some((token, index)), None) => {
                return Err(self.wrong(*token, format!("'for {index} in' does not follow")));
            }
            _ => {
                let message = "the index in brackets after the name is not this one".to_owned();
                return Err(self.wrong(next, message));
            }
        }
        Ok(StatementKind::Declare(Declaration {
            role,
            optional,
            name,
            family,
            dtype,
            shape,
            order,
            zero,
            sharding,
        }))
    }

    /// `target = …` or `target += …`.
    fn assignment(&mut self) -> Parsed<StatementKind> {
        let target = self.tensor()?;
        let accumulate = self.take("+=");
        if !accumulate && !self.take("=") {
            return Err(self.expected("'=', '+=' or '['"));
        }
        let token = self.peek();
        self.at += 1;
        if token.kind == TokenKind::Word
            && (!accumulate || matches!(token.text, "matmul" | "linear" | "sum"))
        {
            if token.text == "copy" {
                let source = self.in_parentheses(Self::tensor)?;
                return Ok(StatementKind::Copy { target, source });
            }
            if matches!(token.text, "matmul" | "linear") {
                let product = self.matrix_product(token.text)?;
                return Ok(StatementKind::Matmul {
                    target,
                    product,
                    accumulate,
                });
            }
            if let Ok(op) = token.text.parse::<ElementwiseOp>() {
                let sources = if op.is_unary() {
                    vec![self.in_parentheses(Self::tensor)?.into()]
                } else {
                    self.in_parentheses(|parser| parser.each(Self::tensor))?
                };
                return Ok(StatementKind::Elementwise {
                    op,
                    target,
                    sources,
                    accumulate,
                });
            }
            if let Some((source, collective)) = self.collective(token.text)? {
                return Ok(StatementKind::Collective {
                    target,
                    source,
                    collective,
                    among: self.among()?,
                });
            }
        }
        self.at -= 1;
        if accumulate {
            return Err(self.expected("matmul, linear or sum"));
        }
        let operations = ElementwiseOp::ALL.map(ElementwiseOp::name).into_iter();
        let words = operations.chain(["matmul", "linear", "a collective"]);
        Err(self.expected(&listed(words)))
    }

    /// Parses the rest of `post`: a list of transfers, or sends of products.
    fn posting(&mut self) -> Parsed<StatementKind> {
        let list = self.each(Self::transfer)?;
        let send = match &list[..] {
            [Each { item, over: None }] if self.take("=") => item.clone(),
            _ => return Ok(StatementKind::Post(list)),
        };
        let token = self.peek();
        if !matches!(token.text, "matmul" | "linear") {
            return Err(self.expected("matmul or linear"));
        }
        self.at += 1;
        let product = self.matrix_product(token.text)?;
        Ok(StatementKind::PostMatmul(Each {
            item: PostedMatmul { send, product },
            over: self.over()?,
        }))
    }

    /// Parses the rest of `matmul` or `linear`, according to `word`.
    fn matrix_product(&mut self, word: &str) -> Parsed<Product> {
        let linear = word == "linear";
        self.expect("(")?;
        let a = self.tensor()?;
        self.expect(",")?;
        let mut b = self.tensor()?;
        // The weights of a linear layer are `[out, in]`.
        b.transposed ^= linear;
        let mut bias = None;
        if linear && self.take(",") {
            bias = Some(self.tensor()?);
        }
        let goes_on = linear && bias.is_none();
        self.expect_among(")", if goes_on { "',' or ')'" } else { "')'" })?;
        if !linear && self.take("+") {
            bias = Some(self.tensor()?);
        }
        Ok(Product { a, b, bias })
    }

    /// Parses the rest of `for`.
    fn repetition<A>(&mut self, other: fn(&mut Self) -> Parsed<NodeKind<A>>) -> Parsed<Loop<A>> {
        let over = self.index()?;
        let body = self.block(other)?;
        Ok(Loop { over, body })
    }

    /// Parses the rest of `if`, which is at `position`.
    fn branch<A>(
        &mut self,
        position: Position,
        other: fn(&mut Self) -> Parsed<NodeKind<A>>,
    ) -> Parsed<Branch<A>> {
        let (mut arms, mut position) = (Vec::new(), position);
        loop {
            arms.push(Arm {
                position,
                condition: self.condition()?,
                body: self.block(other)?,
            });
            // `else` may be on the line after the brace.
            let mut ahead = 0;
            // Only skipped if `else` follows: otherwise the line ends end the statement.
            while self.peek_at(ahead).kind == TokenKind::LineEnd {
                ahead += 1;
            }
            if self.peek_at(ahead).text != "else" {
                return Ok(Branch {
                    arms,
                    otherwise: Vec::new(),
                });
            }
            self.at += ahead + 1;
            // The arm of an `else if` has a position of its own, for errors in its condition.
            position = self.position();
            if !self.take("if") {
                let otherwise = self.block(other)?;
                return Ok(Branch { arms, otherwise });
            }
        }
    }
}
