//! Parsing of what stands inside `share { … }`.

use super::operand::{Parsed, Parser};
use crate::program::expr::Expr;
use crate::program::ir::{Backend, Direction, Protocol, ShareItem, ShareItemKind, Transfer};

impl Parser<'_> {
    pub(super) fn share_item(&mut self) -> Parsed<ShareItem> {
        let position = self.position();
        let kind = if self.take("for") {
            ShareItemKind::For(self.repetition(Self::share_item)?)
        } else if self.take("if") {
            ShareItemKind::If(self.branch(position, Self::share_item)?)
        } else if self.take("let") {
            let name = self.name("the name to bind")?;
            self.expect("=")?;
            let value = self.integer()?;
            ShareItemKind::LetInteger { name, value }
        } else {
            ShareItemKind::Transfer(self.declared_transfer()?)
        };
        Ok(ShareItem { position, kind })
    }

    fn declared_transfer(&mut self) -> Parsed<Transfer> {
        let name = self.name("a transfer's name, 'let', 'for' or 'if'")?;
        self.expect("=")?;
        let direction = if self.take("send") {
            Direction::Send
        } else if self.take("receive") {
            Direction::Receive
        } else {
            return Err(self.expected("'send' or 'receive'"));
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
        if !self.take("via") {
            return Err(self.expected("'tag' or 'via'"));
        }
        let token = self.next();
        let backend = match token.text {
            "get" => Backend::Direct(Protocol::Get),
            "put" => Backend::Direct(Protocol::Put),
            "nccl" => Backend::Nccl,
            _ => {
                self.at -= 1;
                return Err(self.expected("get, put or nccl"));
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
