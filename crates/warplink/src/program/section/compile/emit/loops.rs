//! Loops: which ones the compiler copies, and which one warp runs.

use super::code::{Code, bare};
use super::rows::MAX_KEPT;
use super::{Emitter, Refusal, Result};
use crate::program::construct::Loop;
use crate::program::section::compile::hazard;
use crate::program::section::compile::range::Range;
use crate::program::section::compile::scope::Scope;
use crate::program::section::function::{RowNode, UNIT};
use crate::program::section::{Step, StepKind, WordValue};

/// Maximum number of iterations of a loop with known bounds that the compiler is asked to unroll.
const UNROLLED: i64 = 8;

/// Maximum weight of all copies of a loop's body that the compiler is asked to make: heavier ones take seconds to compile.
const MAX_UNROLLED_WEIGHT: i64 = 32;

/// Maximum number of parts of a lane that reduce along rows: each has a named barrier, besides barrier 0, which is that of all threads.
const NAMED_BARRIERS: usize = 15;

/// Maximum number of times that a loop's body is written out.
const MAX_COPIES: i64 = 64;

impl Emitter<'_> {
    pub(super) fn repeat(&mut self, code: &mut Code, it: &Loop<StepKind>) -> Result<()> {
        let over = &it.over;
        let (from, to) = (self.integer(&over.from)?, self.integer(&over.to)?);
        let bounds = self.bounds(over);
        let index = Scope::spell(&over.index);
        let mut text = Code::default();
        // Further rounds follow the first one.
        self.accesses = true;
        let in_parts = self.divided.contains(&hazard::id_of_loop(it));
        let (parts, reduces) = if in_parts {
            self.most_parts(&it.body)
        } else {
            (1, false)
        };
        // Also before a loop without iterations: what follows relies on it.
        if self.barriers.contains(&hazard::id_of_loop(it)) {
            code.line("self.sync();");
        }
        let unroll = match bounds {
            Some((from, to)) if from >= to => return Ok(()),
            Some((from, to))
                if to.saturating_sub(from) <= UNROLLED
                    && (to - from).saturating_mul(weight(&it.body)) <= MAX_UNROLLED_WEIGHT
                    && !in_parts =>
            {
                "#pragma unroll"
            }
            // The compiler may otherwise unroll such a loop on its own, which takes registers and time to compile.
            _ => "#pragma unroll 1",
        };
        if in_parts {
            text.open("{");
            text.line("Lane &whole = self;");
            text.line(format!("const Parts parts((i64){to} - {from}, {parts});"));
            text.line("Lane self = parts.of(whole);");
            if reduces {
                // Reductions of parts and of the whole lane use the same shared memory.
                text.line("u32 row_turn = 0;");
                text.line("whole.sync();");
            }
        }
        text.line(unroll);
        let visible = self.scope.len();
        let range = Range::index(self.scope.range(&over.from), self.scope.range(&over.to));
        self.scope
            .bind_within(&over.index, index.clone(), None, range);
        let outer = self.by_thread;
        let one_warp = !outer && self.is_for_one_warp(&it.body);
        let divided = one_warp && hazard::divides_integers(self.instance, it);
        self.by_thread |= divided;
        let last_warp = |first: &str| format!("self.in_last_warp() ? {first} : {}", bare(&to));
        let first = match (one_warp, divided) {
            _ if in_parts => format!("{from} + (Index)parts.number"),
            (false, _) => bare(&from).to_owned(),
            (true, false) => last_warp(bare(&from)),
            (true, true) => last_warp(&format!("{} + threadIdx.x % 32", bare(&from))),
        };
        let step = match divided {
            _ if in_parts => " += (Index)parts.count",
            // One iteration for each thread of the warp.
            true => " += 32",
            false => "++",
        };
        let outer_parts = self.in_parts;
        self.in_parts |= in_parts;
        let looped = text.block(
            format!(
                "for (Index {index} = {first}; {index} < {}; {index}{step}) {{",
                bare(&to)
            ),
            |text| self.body(text, &it.body),
        );
        self.in_parts = outer_parts;
        if in_parts {
            // A part that found a value out of range, or whose wait was aborted, ends the whole lane.
            text.line("whole.ended |= self.ended;");
            if reduces {
                text.line("whole.sync();");
            }
            text.close("}");
        }
        self.by_thread = outer;
        self.scope.truncate(visible);
        match (looped, bounds) {
            (Ok(()), _) => code.append(&text),
            // The text of the body depends on the index, so the attempt above is dropped and each iteration gets its
            // own copy.
            (Err(Refusal::Varies(_)), Some((from, to)))
                if to.saturating_sub(from) <= MAX_COPIES =>
            {
                for value in from..to {
                    self.scope.bind(&over.index, index.clone(), Some(value));
                    let copied = code.block("{", |code| {
                        code.line(format!("constexpr Index {index} = {value};"));
                        self.body(code, &it.body)
                    });
                    self.scope.truncate(visible);
                    copied?;
                }
            }
            (Err(refusal), _) => return Err(refusal),
        }
        Ok(())
    }

    /// Maximum number of parts of the lane's warps for the loop around `body`, and whether it reduces along rows: then parts are so few
    /// that their threads keep their units in registers, and that each part has a barrier.
    fn most_parts(&self, body: &[Step]) -> (usize, bool) {
        let warps = self.instance.threads / 32;
        let (mut reduces, mut widest) = (false, 1);
        for (_, kind) in Step::actions(body) {
            let StepKind::Apply(it) = kind else { continue };
            let function = self.instance.functions.get(&it.function);
            let nodes = function.map_or(&[][..], |function| &function.nodes);
            if !nodes.iter().any(|node| matches!(node, RowNode::Row(..))) {
                continue;
            }
            reduces = true;
            let sources = it.sources().map(|source| &source.item.place);
            let targets = it.results.iter().flatten().map(|target| &target.item);
            for place in sources.chain(targets) {
                let tensor = self.instance.tensor(&place.tensor.name);
                let width = tensor.and_then(|it| self.instance.tensors[it].shape.last());
                widest = widest.max(width.copied().unwrap_or(1));
            }
        }
        let own = widest.div_ceil(32 * UNIT * MAX_KEPT);
        if reduces {
            // A part of `own` warps keeps a row of the widest tensor in registers; narrower ones would read it again
            // in each pass.
            ((warps / own).clamp(1, NAMED_BARRIERS), true)
        } else {
            (warps, false)
        }
    }
}

/// Cost of compiling a copy of a body, in plain steps.
fn weight(body: &[Step]) -> i64 {
    let of = |kind: &StepKind| match kind {
        StepKind::Value(it) if !matches!(it.gives, WordValue::Word(_)) => 8,
        StepKind::Apply(_) => 4,
        _ => 1,
    };
    Step::actions(body).map(|(_, kind)| of(kind)).sum()
}
