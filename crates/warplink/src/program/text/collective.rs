//! Parsing of collectives.

use super::operand::{Parsed, Parser};
use crate::device::{CollectiveKind, ReduceOp};
use crate::named::alternatives;
use crate::program::expr::Expr;
use crate::program::ir::{Collective, TensorRef};

/// Reductions of host programs' collectives.
const REDUCTIONS: [ReduceOp; 3] = [ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min];

impl Parser<'_> {
    /// Parses the arguments of the collective `name`; `None` if there is no such collective.
    pub(super) fn collective(
        &mut self,
        name: &str,
    ) -> Parsed<Option<(TensorRef, Collective<Expr>)>> {
        let kind = match name.parse() {
            Ok(CollectiveKind::Gather | CollectiveKind::Scatter | CollectiveKind::Barrier)
            // These kinds have no statement in the language; the caller reports the word together with what it
            // expects.
            | Err(_) => return Ok(None),
            Ok(kind) => kind,
        };
        self.expect("(")?;
        let source = self.tensor()?;
        let collective = match kind {
            CollectiveKind::AllGather => Collective::AllGather,
            CollectiveKind::AllToAll => Collective::AllToAll,
            CollectiveKind::AllReduce => Collective::AllReduce(self.reduction()?),
            CollectiveKind::ReduceScatter => Collective::ReduceScatter(self.reduction()?),
            CollectiveKind::Broadcast => {
                self.expect("from")?;
                Collective::Broadcast(self.integer()?)
            }
            _ => {
                let op = self.reduction()?;
                self.expect("to")?;
                Collective::Reduce(op, self.integer()?)
            }
        };
        self.expect(")")?;
        Ok(Some((source, collective)))
    }

    fn reduction(&mut self) -> Parsed<ReduceOp> {
        self.expect(",")?;
        let found = REDUCTIONS.into_iter().find(|op| self.take(op.name()));
        found.ok_or_else(|| self.expected(&alternatives(&REDUCTIONS)))
    }

    /// Parses an optional `among row`.
    pub(super) fn among(&mut self) -> Parsed<Option<String>> {
        if !self.take("among") {
            return Ok(None);
        }
        self.name("the name of a list of ranks").map(Some)
    }
}
