//! Functions of rows: `function norm(x, w) { return x * rsqrt(row_sum(x * x) / width) * w }`.

use super::operand::{Parsed, Parser};
use super::print::{Indented, write_part};
use super::token::{Token, TokenKind};
use crate::named::{comma, listed};
use crate::program::expr::Comparison;
use crate::program::section::{
    Function, Literal, RowBinary, RowExpr, RowParameter, RowReduction, RowUnary,
};
use std::fmt::{self, Display, Formatter};

/// Maximum nesting depth of values.
const MAX_DEPTH: usize = 32;

/// Maximum arguments, and maximum results.
const MAX_COUNT: usize = crate::program::section::function::MAX_ROW_ARGUMENTS;

/// State while a body is parsed.
struct Body {
    names: Vec<String>,
    depth: usize,
}

impl Parser<'_> {
    /// Parses the rest of `function`.
    pub(super) fn function(&mut self) -> Parsed<Function> {
        let name = self.name("the function's name")?;
        let mut body = Body {
            names: Vec::new(),
            depth: 0,
        };
        let mut parameter = |parser: &mut Self| {
            let token = parser.peek();
            let name = parser.name("an argument's name")?;
            parser.enter(&mut body, token, name.clone())?;
            let block = parser.take("by").then(|| parser.block_size());
            let block = block.transpose()?;
            Ok(RowParameter { name, block })
        };
        let parameters = self.in_parentheses(|parser| parser.list(&mut parameter))?;
        self.within(&parameters, "arguments")?;
        self.expect("{")?;
        let mut lets = Vec::new();
        self.skip_ends();
        while self.take("let") {
            let token = self.peek();
            let name = self.name("a name for the value")?;
            self.expect("=")?;
            let value = self.value(&mut body)?;
            self.at_end()?;
            // After the value, which cannot use its own name.
            self.enter(&mut body, token, name.clone())?;
            lets.push((name, value));
            self.skip_ends();
        }
        self.expect_among("return", "'let' or 'return'")?;
        let results = self.list(|parser| parser.value(&mut body))?;
        self.within(&results, "results")?;
        self.at_end()?;
        self.skip_ends();
        self.expect("}")?;
        Ok(Function {
            name,
            parameters,
            lets,
            results,
        })
    }

    fn enter(&self, body: &mut Body, token: Token<'_>, name: String) -> Parsed<()> {
        if name == "width" || body.names.contains(&name) {
            let message = format!("'{name}' already has a meaning here; expected a new name");
            return Err(self.wrong(token, message));
        }
        body.names.push(name);
        Ok(())
    }

    fn within<T>(&self, list: &[T], what: &str) -> Parsed<()> {
        if list.len() <= MAX_COUNT {
            return Ok(());
        }
        let message = format!("{} {what}; expected at most {MAX_COUNT}", list.len());
        Err(self.wrong(self.peek(), message))
    }

    /// Skips what may stand between two statements.
    pub(super) fn skip_ends(&mut self) {
        while self.peek().kind == TokenKind::LineEnd || self.is(";") {
            self.at += 1;
        }
    }

    fn at_end(&self) -> Parsed<()> {
        let over = self.peek().kind == TokenKind::LineEnd || self.is(";") || self.is("}");
        if over {
            return Ok(());
        }
        Err(self.expected("an operator or the end of the line"))
    }

    fn value(&mut self, body: &mut Body) -> Parsed<RowExpr> {
        let signs = [RowBinary::Add, RowBinary::Subtract];
        self.operations(body, &signs, |parser, body| {
            let signs = [RowBinary::Multiply, RowBinary::Divide];
            parser.operations(body, &signs, Self::operand)
        })
    }

    fn operations(
        &mut self,
        body: &mut Body,
        signs: &[RowBinary],
        part: impl Fn(&mut Self, &mut Body) -> Parsed<RowExpr>,
    ) -> Parsed<RowExpr> {
        // A chain of operators of one precedence is a tree that leans to the left, as deep as the chain is long.
        let depth = body.depth;
        let mut left = part(self, body)?;
        while let Some(sign) = signs.iter().find(|sign| self.is(sign.name())) {
            self.deeper(body)?;
            self.at += 1;
            let right = part(self, body)?;
            left = RowExpr::Binary(*sign, Box::new(left), Box::new(right));
        }
        body.depth = depth;
        Ok(left)
    }

    fn deeper(&self, body: &mut Body) -> Parsed<()> {
        body.depth += 1;
        if body.depth <= MAX_DEPTH {
            return Ok(());
        }
        let message =
            format!("the value is nested deeper than {MAX_DEPTH}; name a part of it by 'let'");
        Err(self.wrong(self.peek(), message))
    }

    fn operand(&mut self, body: &mut Body) -> Parsed<RowExpr> {
        self.deeper(body)?;
        let operand = self.operand_within(body);
        body.depth -= 1;
        operand
    }

    fn operand_within(&mut self, body: &mut Body) -> Parsed<RowExpr> {
        let token = self.peek();
        if let Some(number) = self.literal()? {
            return Ok(RowExpr::Number(number));
        }
        self.at += 1;
        if token.kind == TokenKind::Sign {
            match token.text {
                "-" => {
                    let value = Box::new(self.operand(body)?);
                    return Ok(RowExpr::Unary(RowUnary::Negative, value));
                }
                "(" => {
                    let value = self.value(body)?;
                    self.expect(")")?;
                    return Ok(value);
                }
                _ => {}
            }
        }
        if token.kind == TokenKind::Word {
            if self.take("(") {
                if let Some(value) = self.called(token.text, body)? {
                    self.expect(")")?;
                    return Ok(value);
                }
                let words = RowUnary::NAMED.map(RowUnary::name).into_iter();
                let words = words.chain([RowBinary::Min.name(), RowBinary::Max.name()]);
                let words = words.chain(RowReduction::ALL.map(RowReduction::name));
                let message = format!(
                    "unknown function '{}'; expected {}",
                    token.text,
                    listed(words.chain(["select", "round", "block_max", "pairs"]))
                );
                return Err(self.wrong(token, message));
            }
            if body.names.iter().any(|name| name == token.text) {
                return Ok(RowExpr::Name(token.text.to_owned()));
            }
            if token.text == "width" {
                return Ok(RowExpr::Width);
            }
            let message = format!(
                "unknown value '{}'; expected an argument or a name of 'let'",
                token.text
            );
            return Err(self.wrong(token, message));
        }
        self.at -= 1;
        Err(self.expected("a value"))
    }

    /// Parses arguments of a function, after its name and parenthesis; `None` if there is no such function.
    fn called(&mut self, name: &str, body: &mut Body) -> Parsed<Option<RowExpr>> {
        let unary = RowUnary::NAMED.into_iter().find(|it| it.name() == name);
        if let Some(function) = unary {
            let value = Box::new(self.value(body)?);
            return Ok(Some(RowExpr::Unary(function, value)));
        }
        let reduction = RowReduction::ALL.into_iter().find(|it| it.name() == name);
        if let Some(reduction) = reduction {
            let value = Box::new(self.value(body)?);
            return Ok(Some(RowExpr::Row(reduction, value)));
        }
        Ok(Some(match name {
            "min" | "max" => {
                let function = if name == "min" {
                    RowBinary::Min
                } else {
                    RowBinary::Max
                };
                let a = self.value(body)?;
                self.expect(",")?;
                let b = self.value(body)?;
                RowExpr::Binary(function, Box::new(a), Box::new(b))
            }
            "block_max" => {
                let value = Box::new(self.value(body)?);
                self.expect(",")?;
                RowExpr::BlockMax(value, self.block_size()?)
            }
            "pairs" => RowExpr::Pairs(Box::new(self.value(body)?)),
            "round" => {
                let value = self.value(body)?;
                self.expect(",")?;
                RowExpr::Round(Box::new(value), self.element_type()?)
            }
            "select" => {
                let a = self.value(body)?;
                let comparison = Comparison::ALL.into_iter().find(|it| self.is(it.name()));
                let Some(comparison) = comparison else {
                    return Err(self.expected("a comparison"));
                };
                self.at += 1;
                let b = self.value(body)?;
                self.expect(",")?;
                let yes = self.value(body)?;
                self.expect(",")?;
                let no = self.value(body)?;
                RowExpr::Select(comparison, Box::new([a, b, yes, no]))
            }
            _ => return Ok(None),
        }))
    }

    fn block_size(&mut self) -> Parsed<usize> {
        let Ok(size) = self.peek().text.parse() else {
            return Err(self.expected("how many elements a block has"));
        };
        self.at += 1;
        Ok(size)
    }

    /// The current token as a number, if it is one.
    pub(super) fn literal(&mut self) -> Parsed<Option<Literal>> {
        let token = self.peek();
        if !matches!(token.kind, TokenKind::Number(_) | TokenKind::Decimal) {
            return Ok(None);
        }
        let number = token.text.parse().ok().and_then(Literal::new);
        let Some(number) = number else {
            let message = format!("'{}' is not a number of single precision", token.text);
            return Err(self.wrong(token, message));
        };
        self.at += 1;
        Ok(Some(number))
    }
}

impl Display for Indented<'_, Function> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Self(depth, function) = self;
        let parameter = |RowParameter { name, block }: &RowParameter| match block {
            Some(size) => format!("{name} by {size}"),
            None => name.clone(),
        };
        let parameters = comma(function.parameters.iter().map(parameter));
        writeln!(f, "function {}({parameters}) {{", function.name)?;
        for (name, value) in &function.lets {
            Indented(depth + 1, &()).margin(f)?;
            writeln!(f, "let {name} = {value}")?;
        }
        Indented(depth + 1, &()).margin(f)?;
        writeln!(f, "return {}", comma(&function.results))?;
        self.margin(f)?;
        f.write_str("}")
    }
}

impl Display for RowExpr {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(number) => number.fmt(f),
            Self::Name(name) => f.write_str(name),
            Self::Width => f.write_str("width"),
            Self::Unary(RowUnary::Negative, a) => {
                f.write_str("-")?;
                within(f, a, 3)
            }
            Self::Unary(function, a) => write!(f, "{}({a})", function.name()),
            Self::Binary(function @ (RowBinary::Min | RowBinary::Max), a, b) => {
                write!(f, "{}({a}, {b})", function.name())
            }
            Self::Binary(function, a, b) => {
                // The right operand needs parentheses at equal precedence, since operators group to the left.
                let binds = self.binds();
                within(f, a, binds)?;
                write!(f, " {} ", function.name())?;
                within(f, b, binds + 1)
            }
            Self::Select(comparison, all) => {
                let [a, b, yes, no] = &**all;
                write!(f, "select({a} {} {b}, {yes}, {no})", comparison.name())
            }
            Self::Round(a, dtype) => write!(f, "round({a}, {dtype})"),
            Self::Row(reduction, a) => write!(f, "{}({a})", reduction.name()),
            Self::BlockMax(a, size) => write!(f, "block_max({a}, {size})"),
            Self::Pairs(a) => write!(f, "pairs({a})"),
        }
    }
}

impl RowExpr {
    /// Binding strength of its outermost operator.
    const fn binds(&self) -> u32 {
        match self {
            Self::Binary(RowBinary::Add | RowBinary::Subtract, ..) => 1,
            Self::Binary(RowBinary::Multiply | RowBinary::Divide, ..) => 2,
            _ => 3,
        }
    }
}

/// A value, in parentheses if its operator binds less than `least`.
fn within(f: &mut Formatter<'_>, value: &RowExpr, least: u32) -> fmt::Result {
    write_part(value, value.binds() < least, f)
}
