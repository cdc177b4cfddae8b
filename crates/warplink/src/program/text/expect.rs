//! Statements of an output's expected value: `expect Y = reduce(X on r for r in 0..world, sum)`.

use super::operand::{Parsed, Parser};
use super::print::after;
use super::token::TokenKind;
use crate::device::ReduceOp;
use crate::named::{comma, listed};
use crate::program::ir::{Expectation, Term};
use crate::program::section::{Place, ReduceOperator};
use std::fmt::{self, Display, Formatter};

impl Parser<'_> {
    /// Parses the rest of `expect`.
    pub(super) fn expectation(&mut self) -> Parsed<Expectation> {
        let target = self.tensor()?;
        self.expect("=")?;
        let token = self.peek();
        let operator = token.text.parse().ok().map(ReduceOperator::Fixed);
        let (operator, terms) = match token.text {
            "copy" => {
                self.at += 1;
                let term = Term::Place(self.in_parentheses(Self::input)?);
                (None, vec![term.into()])
            }
            "matmul" | "linear" => (None, vec![self.term()?.into()]),
            "reduce" => {
                self.at += 1;
                let (terms, operator) = self.reduced(Self::term)?;
                (Some(operator), terms)
            }
            _ if operator.is_some() && self.peek_at(1).text == "(" => {
                self.at += 1;
                let terms = self.in_parentheses(|parser| parser.each(Self::term))?;
                (operator, terms)
            }
            _ => {
                let operators = ReduceOp::ALL.map(ReduceOp::name).into_iter();
                let words = operators.chain(["copy", "reduce", "matmul", "linear"]);
                return Err(self.expected(&listed(words)));
            }
        };
        let plus = self.take("+").then(|| self.input()).transpose()?;
        Ok(Expectation {
            target,
            operator,
            terms,
            plus,
        })
    }

    /// A tensor of a rank.
    fn input(&mut self) -> Parsed<Place> {
        let tensor = self.tensor()?;
        let on = self.take("on").then(|| self.integer()).transpose()?;
        Ok(Place { tensor, on })
    }

    /// The same, or a product of two.
    fn term(&mut self) -> Parsed<Term> {
        let token = self.peek();
        if token.kind != TokenKind::Word || !matches!(token.text, "matmul" | "linear") {
            return Ok(Term::Place(self.input()?));
        }
        self.at += 1;
        self.in_parentheses(|parser| {
            let a = parser.input()?;
            parser.expect(",")?;
            let mut b = parser.input()?;
            // The weights of a linear layer are `[out, in]`.
            b.tensor.transposed ^= token.text == "linear";
            Ok(Term::Product(a, b))
        })
    }
}

impl Display for Expectation {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "expect {} = ", self.target)?;
        match (&self.operator, &self.terms[..]) {
            (Some(operator), terms) => write!(f, "reduce({}, {operator})", comma(terms))?,
            (None, [each]) if matches!(each.item, Term::Place(_)) => {
                write!(f, "copy({})", each.item)?
            }
            (None, terms) => f.write_str(&comma(terms))?,
        }
        after(f, " + ", self.plus.as_ref())
    }
}

impl Display for Term {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Place(place) => place.fmt(f),
            Self::Product(a, b) => write!(f, "matmul({a}, {b})"),
        }
    }
}
