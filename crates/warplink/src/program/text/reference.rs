//! Parsing of references to tensors, transfers and streams.

use super::operand::{Parsed, Parser};
use super::{is_name, is_word};
use crate::program::expr::Expr;
use crate::program::ir::{AxisSelection, Each, Over, Selection, StreamRef, TensorRef, TransferRef};

impl Parser<'_> {
    /// `a..b`.
    pub(super) fn bounds(&mut self) -> Parsed<(Expr, Expr)> {
        let from = self.integer()?;
        self.expect("..")?;
        Ok((from, self.integer()?))
    }

    pub(super) fn tensor(&mut self) -> Parsed<TensorRef> {
        if self.take("transpose") {
            return Ok(TensorRef {
                transposed: true,
                ..self.in_parentheses(Self::selected)?
            });
        }
        self.selected()
    }

    /// A tensor's name and selections.
    pub(super) fn selected(&mut self) -> Parsed<TensorRef> {
        let name = self.name("a tensor's name")?;
        let mut selections = Vec::new();
        while self.take("[") {
            let mut axes = vec![self.axis()?];
            if self.is("of")
                && let Some(AxisSelection::Index(index)) =
                    axes.pop_if(|axis| matches!(axis, AxisSelection::Index(_)))
            {
                self.at += 1;
                selections.push(Selection::Part(index, self.integer()?));
                self.expect("]")?;
                continue;
            }
            while self.take(",") {
                axes.push(self.axis()?);
            }
            let open = matches!(axes.last(), Some(AxisSelection::Index(_)));
            let all = if open {
                "']', ',', '..' or 'of'"
            } else {
                "']' or ','"
            };
            self.expect_among("]", all)?;
            // A single one selects on the leading axis.
            selections.push(match (axes.pop(), axes.is_empty()) {
                (Some(AxisSelection::Index(index)), true) => Selection::Index(index),
                (Some(AxisSelection::Range(from, to)), true) => Selection::Range(from, to),
                (last, _) => {
                    axes.extend(last);
                    Selection::Axes(axes)
                }
            });
        }
        Ok(TensorRef {
            name,
            selections,
            transposed: false,
        })
    }

    /// `:`, `j` or `a..b`.
    fn axis(&mut self) -> Parsed<AxisSelection> {
        if self.take(":") {
            return Ok(AxisSelection::All);
        }
        let first = self.integer()?;
        Ok(if self.take("..") {
            AxisSelection::Range(first, self.integer()?)
        } else {
            AxisSelection::Index(first)
        })
    }

    pub(super) fn transfer(&mut self) -> Parsed<TransferRef> {
        let name = self.name("a transfer's name")?;
        let mut indices = Vec::new();
        while self.take("[") {
            indices.push(self.integer()?);
            self.expect("]")?;
        }
        Ok(TransferRef { name, indices })
    }

    /// A list of items, which may be repeated over an index.
    pub(super) fn each<T>(&mut self, item: fn(&mut Self) -> Parsed<T>) -> Parsed<Vec<Each<T>>> {
        self.list(|parser| {
            let (item, over) = (item(parser)?, parser.over()?);
            Ok(Each { item, over })
        })
    }

    /// Parses an optional `for index in from..to`.
    pub(super) fn over(&mut self) -> Parsed<Option<Over>> {
        self.take("for").then(|| self.index()).transpose()
    }

    /// `index in from..to`.
    pub(super) fn index(&mut self) -> Parsed<Over> {
        let index = self.name("a loop index")?;
        self.expect("in")?;
        let (from, to) = self.bounds()?;
        Ok(Over { index, from, to })
    }

    pub(super) fn stream(&mut self) -> Parsed<StreamRef> {
        if self.take("caller") {
            return Ok(StreamRef::Caller);
        }
        for (word, make) in [
            ("pool", StreamRef::Pool as fn(Expr) -> StreamRef),
            ("high", StreamRef::High),
        ] {
            if self.take(word) {
                return self.in_parentheses(Self::integer).map(make);
            }
        }
        if is_word(self.peek().text) && is_name(self.peek().text) {
            return Ok(StreamRef::Named(self.name("a stream")?));
        }
        Err(self.expected("a stream: 'caller', 'pool(…)', 'high(…)' or a name from 'get_stream'"))
    }
}
