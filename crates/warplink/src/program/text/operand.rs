//! Parsing of integers and conditions.

use super::token::{Token, TokenKind, error_at};
use super::{ParseError, is_name};
use crate::program::expr::{Comparison, Condition, Expr, MAX_DEPTH, Operator};

/// The result of a parsing function.
pub(super) type Parsed<T> = Result<T, ParseError>;

/// Position in the tokens of a text.
pub(super) struct Parser<'a> {
    pub(super) text: &'a str,
    pub(super) tokens: Vec<Token<'a>>,
    pub(super) at: usize,
    /// Number of open blocks.
    pub(super) blocks: usize,
    /// The last statement that was begun: its line, and its first character in the text and the line.
    pub(super) started: (u32, usize, u32),
    /// Number of open parentheses and prefixes in the current expression.
    nesting: usize,
}

/// An expression whose kind the context has not determined yet.
enum UntypedExpr {
    Integer(Expr),
    Truth(Condition),
}

/// How a word between two conditions joins them.
type Junction = fn(Box<Condition>, Box<Condition>) -> Condition;

impl<'a> Parser<'a> {
    pub(super) fn new(text: &'a str, tokens: Vec<Token<'a>>) -> Self {
        Self {
            text,
            tokens,
            at: 0,
            blocks: 0,
            started: (0, 0, 0),
            nesting: 0,
        }
    }

    /// The current token; after the last one, always the end.
    pub(super) fn peek(&self) -> Token<'a> {
        self.peek_at(0)
    }

    pub(super) fn peek_at(&self, ahead: usize) -> Token<'a> {
        let last = Token {
            kind: TokenKind::End,
            text: "",
            at: self.text.len(),
            line: 0,
        };
        self.tokens
            .get(self.at + ahead)
            // Beyond the end there is always another `End`, so that no caller checks a length.
            .or(self.tokens.last())
            .copied()
            .unwrap_or(last)
    }

    pub(super) fn next(&mut self) -> Token<'a> {
        let token = self.peek();
        self.at += 1;
        token
    }

    /// Whether the current token is the word or sign `text`.
    pub(super) fn is(&self, text: &str) -> bool {
        let token = self.peek();
        matches!(token.kind, TokenKind::Word | TokenKind::Sign) && token.text == text
    }

    /// Consumes the word or sign `text` if it is the current token.
    pub(super) fn take(&mut self, text: &str) -> bool {
        let there = self.is(text);
        self.at += usize::from(there);
        there
    }

    pub(super) fn expect(&mut self, text: &str) -> Parsed<()> {
        if self.take(text) {
            Ok(())
        } else {
            Err(self.expected(&format!("'{text}'")))
        }
    }

    /// Like [`expect`](Self::expect), where the text might also go on in the ways that `all` names.
    pub(super) fn expect_among(&mut self, text: &str, all: &str) -> Parsed<()> {
        if self.take(text) {
            Ok(())
        } else {
            Err(self.expected(all))
        }
    }

    /// `(…)` with `inner` in it.
    pub(super) fn in_parentheses<T>(
        &mut self,
        inner: impl FnOnce(&mut Self) -> Parsed<T>,
    ) -> Parsed<T> {
        self.expect("(")?;
        let value = inner(self)?;
        self.expect(")")?;
        Ok(value)
    }

    /// One item or several, with commas between them.
    pub(super) fn list<T>(
        &mut self,
        mut item: impl FnMut(&mut Self) -> Parsed<T>,
    ) -> Parsed<Vec<T>> {
        let mut list = vec![item(self)?];
        while self.take(",") {
            list.push(item(self)?);
        }
        Ok(list)
    }

    /// Error for the current token, where `what` is expected.
    pub(super) fn expected(&self, what: &str) -> ParseError {
        let token = self.peek();
        let found = match token.kind {
            TokenKind::LineEnd => "the end of the line".to_owned(),
            TokenKind::End => "the end of the text".to_owned(),
            _ => format!("'{}'", token.text),
        };
        self.wrong(token, format!("expected {what}, found {found}"))
    }

    pub(super) fn wrong(&self, token: Token<'_>, message: String) -> ParseError {
        error_at(self.text, token.at, message)
    }

    /// A name that may be bound; `what` is its meaning, for errors.
    pub(super) fn name(&mut self, what: &str) -> Parsed<String> {
        let token = self.peek();
        match token.kind {
            TokenKind::Word if is_name(token.text) => {
                self.at += 1;
                Ok(token.text.to_owned())
            }
            TokenKind::Word => Err(self.wrong(
                token,
                format!(
                    "expected {what}, found '{}', which is a reserved word",
                    token.text
                ),
            )),
            _ => Err(self.expected(what)),
        }
    }

    pub(super) fn integer(&mut self) -> Parsed<Expr> {
        let start = self.peek();
        let value = self.any_of()?;
        self.number_of(start, value)
    }

    pub(super) fn condition(&mut self) -> Parsed<Condition> {
        let start = self.peek();
        match self.any_of()? {
            UntypedExpr::Truth(condition) => Ok(condition),
            UntypedExpr::Integer(_) => Err(self.wrong(
                start,
                "expected a condition such as 'rank == 0', found an integer".into(),
            )),
        }
    }

    /// Counts a nesting level around `inner`; the limit prevents a stack overflow.
    fn nested<T>(&mut self, inner: impl FnOnce(&mut Self) -> Parsed<T>) -> Parsed<T> {
        // Bounds the recursion here and in everything that walks the tree later: text may come from outside the
        // process.
        if self.nesting >= MAX_DEPTH {
            return Err(self.wrong(
                self.peek(),
                format!("the expression is nested deeper than {MAX_DEPTH}"),
            ));
        }
        self.nesting += 1;
        let result = inner(self);
        self.nesting -= 1;
        result
    }

    /// An expression of any kind.
    fn any_of(&mut self) -> Parsed<UntypedExpr> {
        self.junction(&[("or", Condition::Or), ("and", Condition::And)])
    }

    /// Conditions between these words, those that bind least first.
    fn junction(&mut self, levels: &[(&str, Junction)]) -> Parsed<UntypedExpr> {
        let Some(((word, join), tighter)) = levels.split_first() else {
            return self.negation();
        };
        let start = self.peek();
        let mut left = self.junction(tighter)?;
        while self.take(word) {
            let next = self.peek();
            let right = self.junction(tighter)?;
            let condition = join(
                Box::new(self.truth(start, left)?),
                Box::new(self.truth(next, right)?),
            );
            // Chains do not recurse in the parser, but their trees are as deep as they are long.
            self.within_depth(start, condition.depth())?;
            left = UntypedExpr::Truth(condition);
        }
        Ok(left)
    }

    fn negation(&mut self) -> Parsed<UntypedExpr> {
        if !self.take("not") {
            return self.comparison();
        }
        let start = self.peek();
        let inner = self.nested(Self::negation)?;
        let condition = Condition::Not(Box::new(self.truth(start, inner)?));
        self.within_depth(start, condition.depth())?;
        Ok(UntypedExpr::Truth(condition))
    }

    fn comparison(&mut self) -> Parsed<UntypedExpr> {
        let start = self.peek();
        let left = self.chain(&Operator::LEVELS)?;
        let comparison = Comparison::ALL.into_iter().find(|it| self.is(it.name()));
        let Some(comparison) = comparison else {
            return Ok(left);
        };
        self.at += 1;
        let next = self.peek();
        let right = self.chain(&Operator::LEVELS)?;
        Ok(UntypedExpr::Truth(Condition::Compare(
            comparison,
            self.number_of(start, left)?,
            self.number_of(next, right)?,
        )))
    }

    /// Integers between the signs of these levels.
    fn chain(&mut self, levels: &[&[Operator]]) -> Parsed<UntypedExpr> {
        let Some((operators, tighter)) = levels.split_first() else {
            return self.factor();
        };
        let start = self.peek();
        let mut left = self.chain(tighter)?;
        while let Some(operator) = operators.iter().find(|operator| self.is(operator.sign())) {
            self.at += 1;
            let next = self.peek();
            let right = self.chain(tighter)?;
            let expression = Expr::Binary(
                *operator,
                Box::new(self.number_of(start, left)?),
                Box::new(self.number_of(next, right)?),
            );
            self.within_depth(start, expression.depth())?;
            left = UntypedExpr::Integer(expression);
        }
        Ok(left)
    }

    fn factor(&mut self) -> Parsed<UntypedExpr> {
        let token = self.next();
        match (token.kind, token.text) {
            (TokenKind::Number(value), _) => match i64::try_from(value) {
                Ok(value) => Ok(UntypedExpr::Integer(Expr::Number(value))),
                Err(_) => Err(self.wrong(token, format!("'{}' overflows 64 bits", token.text))),
            },
            (TokenKind::Sign, "-") => {
                if let TokenKind::Number(value) = self.peek().kind {
                    let number = self.next();
                    // The sign is part of the number: the smallest i64 has no positive counterpart.
                    let value = 0_i64.checked_sub_unsigned(value).ok_or_else(|| {
                        self.wrong(number, format!("'-{}' overflows 64 bits", number.text))
                    })?;
                    return Ok(UntypedExpr::Integer(Expr::Number(value)));
                }
                let next = self.peek();
                let inner = self.nested(Self::factor)?;
                let expression = Expr::Negative(Box::new(self.number_of(next, inner)?));
                self.within_depth(token, expression.depth())?;
                Ok(UntypedExpr::Integer(expression))
            }
            (TokenKind::Sign, "(") => {
                let inner = self.nested(Self::any_of)?;
                self.expect(")")?;
                Ok(inner)
            }
            (
                TokenKind::Word,
                "min" | "max" | "part" | "log2" | "count" | "given" | "reachable",
            ) if self.is("(") => {
                self.in_parentheses(|parser| parser.nested(|parser| parser.call(token)))
            }
            (TokenKind::Word, "rank" | "world" | "streams" | "epoch") => {
                Ok(UntypedExpr::Integer(Expr::Name(token.text.to_owned())))
            }
            (TokenKind::Word, name) if is_name(name) => {
                if !self.take("[") {
                    return Ok(UntypedExpr::Integer(Expr::Name(name.to_owned())));
                }
                let index = self.nested(Self::integer)?;
                self.expect("]")?;
                let element = Expr::Element(name.to_owned(), Box::new(index));
                self.within_depth(token, element.depth())?;
                Ok(UntypedExpr::Integer(element))
            }
            _ => {
                self.at -= 1;
                Err(self.expected("an integer expression"))
            }
        }
    }

    /// Parses the arguments of the function `name`.
    fn call(&mut self, name: Token<'a>) -> Parsed<UntypedExpr> {
        let expression = match name.text {
            "count" => Expr::Count(self.name("a list's name")?),
            "given" => {
                let tensor = self.name("an optional tensor's name")?;
                return Ok(UntypedExpr::Truth(Condition::Given(tensor)));
            }
            "reachable" => {
                let tensor = self.name("an announced tensor's name")?;
                return Ok(UntypedExpr::Truth(Condition::Reachable(tensor)));
            }
            "log2" => Expr::Log2(Box::new(self.integer()?)),
            function => {
                let operator = match function {
                    "min" => Operator::Min,
                    "max" => Operator::Max,
                    _ => Operator::Part,
                };
                let first = self.integer()?;
                self.expect(",")?;
                Expr::Binary(operator, Box::new(first), Box::new(self.integer()?))
            }
        };
        self.within_depth(name, expression.depth())?;
        Ok(UntypedExpr::Integer(expression))
    }

    fn number_of(&self, start: Token<'_>, value: UntypedExpr) -> Parsed<Expr> {
        match value {
            UntypedExpr::Integer(expression) => Ok(expression),
            UntypedExpr::Truth(_) => {
                Err(self.wrong(start, "expected an integer, found a condition".into()))
            }
        }
    }

    fn truth(&self, start: Token<'_>, value: UntypedExpr) -> Parsed<Condition> {
        match value {
            UntypedExpr::Truth(condition) => Ok(condition),
            UntypedExpr::Integer(_) => {
                Err(self.wrong(start, "expected a condition, found an integer".into()))
            }
        }
    }

    fn within_depth(&self, start: Token<'_>, depth: usize) -> Parsed<()> {
        if depth <= MAX_DEPTH {
            return Ok(());
        }
        Err(self.wrong(
            start,
            format!("the expression is nested deeper than {MAX_DEPTH}"),
        ))
    }
}
