//! Lists of a step, with repetitions expanded.

use super::{Emitter, MAX_PLACES, Refusal, Result};
use crate::program::construct::{Each, Over};
use crate::program::expr::Expr;

impl Emitter<'_> {
    pub(super) fn ranks(&mut self, list: &[Each<Expr>]) -> Result<Vec<(String, Option<i64>)>> {
        let ranks = self.expand(list, |emitter, rank| {
            Ok((emitter.integer(rank)?, emitter.scope.value(rank)))
        })?;
        ranks.into_iter().collect()
    }

    /// Constant bounds of an index, end exclusive, if both are known.
    pub(super) fn bounds(&self, over: &Over) -> Option<(i64, i64)> {
        self.scope.value(&over.from).zip(self.scope.value(&over.to))
    }

    /// Applies `with` to each item of a list, with repetitions expanded.
    pub(super) fn expand<T, R>(
        &mut self,
        list: &[Each<T>],
        mut with: impl FnMut(&mut Self, &T) -> Result<R>,
    ) -> Result<Vec<Result<R>>> {
        let mut all = Vec::new();
        for each in list {
            let Some(over) = &each.over else {
                // An item's error is kept, not returned: that of the bounds of a later item, which ask for the loop
                // to be written out, comes first.
                all.push(with(self, &each.item));
                continue;
            };
            let Some((from, to)) = self.bounds(over) else {
                let text = format!(
                    "a list over '{}' from {} to {}, which are no constants of the kernel",
                    over.index, over.from, over.to
                );
                let help = "use numbers, rank and world, or a loop of steps";
                return Err(Refusal::Varies(self.error(text, help)));
            };
            if to.saturating_sub(from) > MAX_PLACES as i64 {
                let text = format!("a list of {} items", to.saturating_sub(from));
                return Err(self.refuse(text, "use a loop of steps"));
            }
            for value in from..to {
                let visible = self.scope.len();
                self.scope.bind(&over.index, value.to_string(), Some(value));
                all.push(with(self, &each.item));
                self.scope.truncate(visible);
            }
        }
        Ok(all)
    }
}
