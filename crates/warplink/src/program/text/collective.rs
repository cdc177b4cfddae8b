//! Parsing of collectives.

use super::operand::{Parsed, Parser};
use crate::device::ReduceOp;
use crate::program::expr::Expr;
use crate::program::ir::{Collective, TensorRef};

impl Parser<'_> {
    /// The arguments of the collective `name`; `None` where there is none of that name.
    pub(super) fn collective(
        &mut self,
        name: &str,
    ) -> Parsed<Option<(TensorRef, Collective<Expr>)>> {
        const NAMES: [&str; 6] = [
            "all_gather",
            "all_to_all",
            "all_reduce",
            "reduce_scatter",
            "broadcast",
            "reduce",
        ];
        if !NAMES.contains(&name) {
            return Ok(None);
        }
        self.expect("(")?;
        let source = self.tensor()?;
        let collective = match name {
            "all_gather" => Collective::AllGather,
            "all_to_all" => Collective::AllToAll,
            "all_reduce" => Collective::AllReduce(self.reduction()?),
            "reduce_scatter" => Collective::ReduceScatter(self.reduction()?),
            "broadcast" => {
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
        for (word, op) in [
            ("sum", ReduceOp::Sum),
            ("max", ReduceOp::Max),
            ("min", ReduceOp::Min),
        ] {
            if self.take(word) {
                return Ok(op);
            }
        }
        Err(self.expected("sum, max or min"))
    }

    /// `among row`, if it is there.
    pub(super) fn among(&mut self) -> Parsed<Option<String>> {
        if !self.take("among") {
            return Ok(None);
        }
        self.name("the name of a list of ranks").map(Some)
    }
}
