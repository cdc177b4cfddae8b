//! Parsing of calls of other programs.

use super::operand::{Parsed, Parser};
use super::token::TokenKind;
use crate::program::ir::{Argument, ArgumentValue, StatementKind};

impl Parser<'_> {
    /// `ring(n = 8, A = X[0])`.
    pub(super) fn program_call(&mut self) -> Parsed<StatementKind> {
        let program = self.name("a program's name")?;
        self.expect("(")?;
        let mut arguments: Vec<Argument> = Vec::new();
        while !self.is(")") {
            let token = self.peek();
            let name = self.name("the name of a parameter, input or output, or ')'")?;
            if arguments.iter().any(|other| other.name == name) {
                return Err(self.wrong(token, format!("argument '{name}' is given twice")));
            }
            self.expect("=")?;
            let value = self.argument()?;
            arguments.push(Argument { name, value });
            if !self.take(",") && !self.is(")") {
                return Err(self.expected("',' or ')'"));
            }
        }
        self.expect(")")?;
        Ok(StatementKind::Call { program, arguments })
    }

    fn argument(&mut self) -> Parsed<ArgumentValue> {
        let token = self.peek();
        if token.kind == TokenKind::Word
            && let Ok(dtype) = token.text.parse()
        {
            self.at += 1;
            return Ok(ArgumentValue::ElementType(dtype));
        }
        // A name with or without brackets is resolved when its meaning is known.
        let start = self.at;
        if let Ok(reference) = self.tensor()
            && (self.is(",") || self.is(")"))
        {
            return Ok(ArgumentValue::Reference(reference));
        }
        // An expression that starts with a name, such as `n + 1` or `n[0] * 2`: parsed again as a whole.
        self.at = start;
        self.integer().map(ArgumentValue::Integer)
    }
}
