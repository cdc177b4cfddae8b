//! Resolutions that go on once more values are known.

use super::value::Stop;
use super::{ReadValues, ReadWord, Resolver};
use crate::program::diagnostic::Diagnostic;
use crate::program::section::instance::SectionInstance;
use crate::program::section::lane::LaneStep;

/// Where a resolver learns which announced tensors all ranks reach, and the values of words.
pub(super) enum Answers<'s> {
    Asked {
        reachable: &'s dyn Fn(usize) -> bool,
        values: &'s ReadValues<'s>,
    },
    /// The announced tensors that some rank does not reach. A value that is not given yet is wanted; a step is resolved again
    /// once it is given, so those that the step has read are kept, from number `first` on.
    Given {
        missing: Vec<usize>,
        values: Vec<i64>,
        first: usize,
        wanted: Option<ReadWord>,
    },
}

impl Answers<'_> {
    pub(super) fn reaches(&self, tensor: usize) -> bool {
        match self {
            Self::Asked { reachable, .. } => reachable(tensor),
            Self::Given { missing, .. } => !missing.contains(&tensor),
        }
    }

    pub(super) fn value(&mut self, word: &ReadWord) -> Option<i64> {
        match self {
            Self::Asked { values, .. } => values(word),
            Self::Given {
                values,
                first,
                wanted,
                ..
            } => {
                let value = values.get(word.number - *first).copied();
                // Cleared by each answer, so that a stop for another reason does not repeat an old question.
                *wanted = Some(*word).filter(|_| value.is_none());
                value
            }
        }
    }

    /// After a step, with the number of values that were read so far.
    pub(super) fn used(&mut self, read: usize) {
        if let Self::Given { values, first, .. } = self {
            // Bounded by the reads of one step, however long the lane is.
            values.clear();
            *first = read;
        }
    }
}

/// Steps of a lane in a launch, as far as the values that it reads are known.
pub(crate) struct Resolution<'s>(Resolver<'s>);

impl<'s> Resolution<'s> {
    /// With the announced tensors `missing` unreachable.
    pub(crate) fn new(
        section: &'s SectionInstance,
        launch: (usize, u64),
        missing: &[usize],
    ) -> Self {
        let answers = Answers::Given {
            missing: missing.to_vec(),
            values: Vec::new(),
            first: 0,
            wanted: None,
        };
        Self(Resolver::new(section, launch, answers, u64::MAX))
    }

    pub(crate) fn missing(&self) -> &[usize] {
        match &self.0.answers {
            Answers::Given { missing, .. } => missing,
            Answers::Asked { .. } => &[],
        }
    }

    /// All steps up to the first value that is not known, whose read is the last step. Asks for each value once, and for that one
    /// again in the next call. Earlier steps stay as they are.
    ///
    /// # Errors
    /// As [`SectionInstance::steps_with`].
    pub(crate) fn go_on(&mut self, known: &ReadValues<'_>) -> Result<&[LaneStep], Diagnostic> {
        loop {
            match self.0.go_on() {
                Ok(()) => return Ok(&self.0.steps),
                Err(Stop::Wrong(diagnostic)) => return Err(diagnostic),
                Err(Stop::Unknown) => {}
            }
            let Answers::Given { values, wanted, .. } = &mut self.0.answers else {
                return Ok(&self.0.steps);
            };
            match wanted.as_ref().and_then(known) {
                // Answered one at a time: a value may decide which word is read next.
                Some(value) => values.push(value),
                None => return Ok(&self.0.steps),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::program::section::LaneStepKind;
    use crate::program::{Parameters, Program, unroll};
    use std::cell::Cell;

    /// Loops, conditions and rows that depend on values, and reads in the middle of a step and at the end of a block.
    const TEXT: &str = "program test(n) {
        input X: f32[n, 4]
        input C: i32[n]
        input I: i32[n]
        output Y: f32[n, 4]
        output Z: f32[n, 4]
        output K: i32[n]
        kernel lane in 0..2 threads 32 {
            let rows = C[lane] at most n - 3
            for i in 0..rows {
                let A = Y[i]
                let k = C[2 + i] at most 3
                if k > 1 {
                    for j in 0..k {
                        let m = i + j
                        put X[I[m]] to Z[i]
                    }
                } else if k == 1 {
                    A = reduce(X[I[i]], X[I[i + 1]], X[I[i + 2]], sum)
                } else {
                    let last = C[i] at most n
                }
                K[i] = integer(k)
            }
            let end = count(I[0..n] in 0..rows + 1)
            K[end % n] = integer(end)
        }
    }";

    /// However few values become known at a time, the steps are those that are resolved at one go.
    #[test]
    fn a_resolution_goes_on_where_it_stopped() {
        let program = Program::parse(TEXT).unwrap_or_else(|error| panic!("{error}"));
        let given = Parameters::new().with("n", 9);
        let unrolled = unroll(&program, 0, 1, 1, &given).unwrap();
        let section = unrolled.sections().next().unwrap();
        let value = |word: &ReadWord| {
            // All arms have their turn.
            (word.part.offset as i64 * 5 + 4) % (word.most.min(8) + 1)
        };
        for (lane, few) in [(0, 1), (0, 2), (0, 3), (1, 1), (1, 4)] {
            let all = section.steps_with(lane, 0, &|word| Some(value(word)));
            let all: Vec<String> = all.unwrap().iter().map(|it| format!("{it:?}")).collect();
            let mut resolution = Resolution::new(section, (lane, 0), &[]);
            let mut calls = 0;
            loop {
                let (left, asked) = (Cell::<usize>::new(few), Cell::new(false));
                let known = |word: &ReadWord| {
                    asked.set(left.get() == 0);
                    left.set(left.get().checked_sub(1)?);
                    Some(value(word))
                };
                let steps = resolution.go_on(&known).unwrap();
                let found: Vec<String> = steps.iter().map(|it| format!("{it:?}")).collect();
                assert_eq!(found, all[..found.len()], "{lane}, {few}");
                calls += 1;
                if !asked.get() {
                    assert_eq!(found.len(), all.len());
                    break;
                }
                let read = matches!(steps.last().unwrap().kind, LaneStepKind::Value { .. });
                assert!(read, "{lane}, {few}");
            }
            assert!(calls > 6 / few, "{calls} calls");
        }
    }
}
