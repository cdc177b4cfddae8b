//! Parser and printer of the body of `share { … }`.

use super::operand::{Parsed, Parser};
use super::print::Action;
use crate::named::{alternatives, listed};
use crate::program::expr::Expr;
use crate::program::ir::{Backend, Direction, NodeKind, Protocol, Transfer};
use std::fmt::{self, Display, Formatter};

impl Parser<'_> {
    pub(super) fn share_item(&mut self) -> Parsed<NodeKind<Transfer>> {
        if !self.take("let") {
            return Ok(NodeKind::Do(self.declared_transfer()?));
        }
        let name = self.name("the name to bind")?;
        self.expect("=")?;
        let value = self.integer()?;
        Ok(NodeKind::LetInteger { name, value })
    }

    fn declared_transfer(&mut self) -> Parsed<Transfer> {
        let name = self.name("a transfer's name, 'let', 'for' or 'if'")?;
        self.expect("=")?;
        let mut directions = Direction::ALL.into_iter();
        let Some(direction) = directions.find(|one| self.take(one.name())) else {
            return Err(self.expected(&alternatives(&Direction::ALL)));
        };
        let tensor = self.tensor()?;
        self.expect(match direction {
            Direction::Send => "to",
            Direction::Receive => "from",
        })?;
        let peer = self.integer()?;
        let tag = if self.take("tag") {
            self.integer()?
        } else {
            Expr::Number(0)
        };
        self.expect_among("via", "'tag' or 'via'")?;
        let token = self.next();
        let backend = match token.text.parse() {
            Ok(protocol) => Backend::Direct(protocol),
            Err(_) if token.text == "nccl" => Backend::Nccl,
            Err(_) => {
                self.at -= 1;
                let protocols = Protocol::ALL.map(Protocol::name).into_iter();
                return Err(self.expected(&listed(protocols.chain(["nccl"]))));
            }
        };
        Ok(Transfer {
            name,
            direction,
            tensor,
            peer,
            tag,
            backend,
        })
    }
}

impl Action for Transfer {
    fn print(&self, f: &mut Formatter<'_>, _: usize) -> fmt::Result {
        self.fmt(f)
    }
}

impl Display for Transfer {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let (verb, to) = match self.direction {
            Direction::Send => ("send", "to"),
            Direction::Receive => ("receive", "from"),
        };
        write!(
            f,
            "{} = {verb} {} {to} {}",
            self.name, self.tensor, self.peer
        )?;
        if self.tag != Expr::Number(0) {
            write!(f, " tag {}", self.tag)?;
        }
        write!(f, " via {}", self.backend)
    }
}

impl Display for Backend {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Direct(protocol) => protocol.name(),
            Self::Nccl => "nccl",
        })
    }
}
