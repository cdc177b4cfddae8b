//! Resolves integers that lanes read from memory.

use super::{MoveOperand, Resolver};
use crate::dtype::DType;
use crate::named::alternatives;
use crate::program::construct::{Selection, TensorRef};
use crate::program::diagnostic::{Diagnostic, DiagnosticKind};
use crate::program::expr::Expr;
use crate::program::section::SectionInstance;
use crate::program::section::ir::{
    DeviceValue, IntegerStore, Step, StepKind, WordRange, WordValue,
};
use crate::program::section::lane::{LaneStepKind, Matching, Part};
use crate::program::section::thresholds::Thresholds;
use crate::program::section::view::View;
use crate::program::site::with_index;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;

/// Element types of words that lanes read.
pub(crate) const VALUE_TYPES: [DType; 3] = [DType::I32, DType::I64, DType::U32];

/// A word of memory that a lane reads as an integer, or words of which it looks for some.
#[derive(Clone, Copy, Debug)]
pub struct ReadWord {
    /// Number of earlier reads of the lane in the launch.
    pub number: usize,
    /// Index of the read among the lane's steps.
    pub step: usize,
    /// The word, or several if they are matched.
    pub part: Part,
    /// The words that are looked for; `None` for the value of the single word.
    pub matching: Option<Matching>,
    /// The largest value that the lane expects.
    pub most: i64,
}

/// Values of words that lanes read; `None` for one that is not known yet.
pub type ReadValues<'a> = dyn Fn(&ReadWord) -> Option<i64> + 'a;

/// Divisors of the greatest values of words, in the order in which they are tried: values that each fit may not fit
/// together, as a word may have a lower bound where it comes from than where it is read.
const SHARES: [i64; 4] = [1, 2, 4, i64::MAX];

/// Resolves steps with values that are as large as they may be together.
pub(super) fn with_large_values<T>(
    resolve: impl Fn(&ReadValues<'_>) -> Result<T, Diagnostic>,
) -> Result<T, Diagnostic> {
    // Large values stand for the most work. Where large ones exceed a bound, such as a sum of counts, smaller shares
    // fit.
    let with = |share: i64| resolve(&|word| Some(word.most / share));
    let smaller = || SHARES[1..].iter().find_map(|share| with(*share).ok());
    // The first error is returned: the one of a value that the program itself allows.
    with(SHARES[0]).or_else(|wrong| smaller().ok_or(wrong))
}

/// Limit on the values with which it is tried which ranges lanes look for.
const MAX_TRIED: usize = 12;

/// Why a lane is not resolved further.
pub(super) enum Stop {
    Wrong(Diagnostic),
    /// The steps depend on a value that is not known yet.
    Unknown,
}

impl From<Diagnostic> for Stop {
    fn from(diagnostic: Diagnostic) -> Self {
        Self::Wrong(diagnostic)
    }
}

pub(super) type Resolved<T> = Result<T, Stop>;

impl<'s> Resolver<'s> {
    /// A tensor, or what an alias stands for.
    pub(super) fn whole(&self, name: &str) -> Resolved<View> {
        let alias = self.aliases.iter().rev().find(|(alias, _)| *alias == name);
        match (alias, self.instance.tensor(name)) {
            (Some((_, view)), _) => Ok(view.clone()),
            (None, Some(index)) => Ok(View::of(index, &self.instance.tensors[index])),
            (None, None) => {
                let message = format!("unknown tensor '{name}'");
                Err(self.malformed(message))
            }
        }
    }

    /// A part that no word of memory selects.
    pub(super) fn fixed_view(&mut self, reference: &'s TensorRef) -> Resolved<View> {
        let by_word =
            |selection: &Selection| matches!(selection, Selection::Index(Expr::Element(..)));
        if reference.selections.iter().any(by_word) {
            let message = format!(
                "{reference} has a row that memory names, which only moves and functions of rows have; expected \
                 'let i = ... at most ...' before it"
            );
            return Err(self.malformed(message));
        }
        self.view(reference)
    }

    /// `let n = C[rank] at most rows`, `let n = count(E[a..b] in lo..hi)`.
    pub(super) fn value(&mut self, it: &'s DeviceValue) -> Resolved<()> {
        let value = match &it.gives {
            WordValue::Word(most) => {
                let limit = self.integer(most)?;
                if limit < 0 {
                    let message = format!("{most} is {limit}; expected at least 0");
                    return Err(self.wrong(DiagnosticKind::OutOfBounds, message));
                }
                let word = self.operand(&it.place)?;
                self.read(&it.place, word.part, word.single, limit)?
            }
            WordValue::Count(range) => self.matched(it, range, None)?,
            WordValue::Position(number, range) => {
                let number = self.integer(number)?;
                self.matched(it, range, Some(number))?
            }
        };
        self.bind(&it.name)?;
        // Bound after the read, so that the word's own place cannot use the name.
        self.integers.push((&it.name, value));
        // Diagnostics name the values that led there, as they name loop indices.
        self.site.indices = with_index(&self.site.indices, it.name.as_str(), value);
        Ok(())
    }

    /// `I[r]` in `X[I[r]]`: the row of `X` that a word of this rank names.
    pub(super) fn row(&mut self, list: &str, at: &'s Expr, rows: &View) -> Resolved<i64> {
        let at = self.integer(at)?;
        let place = format!("{list}[{at}]");
        let mut word = self.whole(list)?;
        let outcome = word.index(at);
        outcome.map_err(|wrong| {
            let message = format!("{place} is no word; expected {wrong}");
            self.wrong(DiagnosticKind::OutOfBounds, message)
        })?;
        let part = Part {
            rank: self.instance.rank,
            tensor: word.tensor,
            offset: word.offset,
            elements: 1,
        };
        self.check_whole_packets(&place, &part)?;
        // The bound is that of the tensor's rows, which kernels check as well, since memory may hold any number.
        let Some(most) = rows.rows().checked_sub(1) else {
            let message = format!("{place} selects a row of nothing; expected at least one row");
            return Err(self.wrong(DiagnosticKind::OutOfBounds, message));
        };
        // Kept for `check_words`: targets of the same step must not overwrite it.
        self.words.push(part);
        self.read(&place, part, word.is_single(), most as i64)
    }

    /// Whether two parts share memory, which tensors of several names may have.
    pub(super) fn overlap(&self, one: &Part, other: &Part) -> bool {
        let at = |part: &Part| {
            let tensor = &self.instance.tensors[part.tensor];
            ((part.rank, tensor.memory), tensor.offset + part.offset)
        };
        let ((one_memory, one_start), (other_memory, other_start)) = (at(one), at(other));
        one_memory == other_memory
            && one_start < other_start + other.elements
            && other_start < one_start + one.elements
    }

    /// Rejects a step that writes words by which its rows are named: some threads may not have read them yet.
    pub(super) fn check_words(&self, targets: &[MoveOperand]) -> Resolved<()> {
        for target in targets {
            if self
                .words
                .iter()
                .any(|word| self.overlap(word, &target.part))
            {
                let message = "the step writes a word that names one of its rows, in no order among its threads";
                return Err(self.wrong(DiagnosticKind::Race, message));
            }
        }
        Ok(())
    }

    fn read(&mut self, place: &dyn Display, part: Part, single: bool, most: i64) -> Resolved<i64> {
        let dtype = self.instance.tensors[part.tensor].dtype;
        if !single || !VALUE_TYPES.contains(&dtype) {
            let message = format!(
                "{place} is {} of {dtype}; expected one integer of {}",
                if single {
                    "an element"
                } else {
                    "several elements"
                },
                alternatives(&VALUE_TYPES)
            );
            return Err(self.wrong(DiagnosticKind::Mismatch, message));
        }
        let value = self.known(part, None, most)?;
        if (0..=most).contains(&value) {
            return Ok(value);
        }
        let message = format!("{place} is {value}; expected 0 to {most}");
        Err(self.wrong(DiagnosticKind::OutOfBounds, message))
    }

    /// The value of a read, once it is known.
    fn known(&mut self, part: Part, matching: Option<Matching>, most: i64) -> Resolved<i64> {
        self.step()?;
        let (number, step) = (self.read, self.steps.len());
        self.read += 1;
        self.push(LaneStepKind::Value {
            number,
            source: part,
            matching,
            most,
        });
        let value = self.answers.value(&ReadWord {
            number,
            step,
            part,
            matching,
            most,
        });
        value.ok_or(Stop::Unknown)
    }

    /// The number of words in a range, or the position of one of them.
    fn matched(
        &mut self,
        it: &'s DeviceValue,
        range: &'s WordRange,
        nth: Option<i64>,
    ) -> Resolved<i64> {
        let (from, to) = (self.integer(&range.from)?, self.integer(&range.to)?);
        let words = self.operand(&it.place)?;
        let row = if range.rows {
            let row = self.view(&it.place.tensor)?.row();
            let message = || format!("{} has no rows of words; expected two axes", it.place);
            row.ok_or_else(|| self.wrong(DiagnosticKind::Mismatch, message()))?
        } else {
            1
        };
        let matching = Matching {
            row,
            inside: range.inside,
            from,
            to,
            nth,
        };
        if !VALUE_TYPES.contains(&words.dtype) || self.packets(&words.part) {
            let message = format!(
                "words of {} are counted in {}; expected plain memory of {}",
                words.dtype,
                it.place,
                alternatives(&VALUE_TYPES)
            );
            return Err(self.wrong(DiagnosticKind::Mismatch, message));
        }
        let elements = words.part.elements;
        let value = match (elements, nth) {
            // Nothing is read from an empty part; kernels have no such load either.
            (0, None) => 0,
            (0, Some(_)) => -1,
            _ => self.known(words.part, Some(matching), matching.most(elements))?,
        };
        if value >= 0 {
            return Ok(value);
        }
        let message = format!(
            "word {} of {} {range} is not there; expected a number below how many there are",
            nth.unwrap_or_default(),
            it.place
        );
        Err(self.wrong(DiagnosticKind::OutOfBounds, message))
    }

    /// `K[p] on q = integer(n + 1)`.
    pub(super) fn store(&mut self, it: &'s IntegerStore) -> Resolved<()> {
        let value = self.integer(&it.value)?;
        let target = self.operand(&it.target)?;
        let (dtype, place) = (target.dtype, &it.target);
        if !target.single || !VALUE_TYPES.contains(&dtype) {
            let message = format!(
                "an integer is stored in {place}, of {dtype}; expected one element of {}",
                alternatives(&VALUE_TYPES)
            );
            return Err(self.wrong(DiagnosticKind::Mismatch, message));
        }
        let fits = match dtype {
            DType::I32 => i32::try_from(value).is_ok(),
            DType::U32 => u32::try_from(value).is_ok(),
            _ => true,
        };
        if !fits {
            let message = format!("{value} is stored in {place}; expected what {dtype} can hold");
            return Err(self.wrong(DiagnosticKind::OutOfBounds, message));
        }
        self.check_words(std::slice::from_ref(&target))?;
        self.push(LaneStepKind::Store {
            value,
            target: target.part,
        });
        Ok(())
    }
}

impl SectionInstance {
    /// Tensors whose words its lanes read as integers in the first launches of a period, each with the least of the
    /// greatest values that they expect; of words that they only look for, the ends of all ranges are among them.
    pub(crate) fn value_bounds(&self) -> BTreeMap<usize, i64> {
        let (mut bounds, mut ends) = (BTreeMap::new(), BTreeMap::new());
        self.each_read(&[], |word| match word.matching {
            // A search compares words with its range, so that words up to its end make a difference.
            Some(Matching { to, .. }) => {
                let end = ends.entry(word.part.tensor).or_insert(to);
                *end = to.max(*end);
            }
            None => {
                let bound = bounds.entry(word.part.tensor).or_insert(word.most);
                *bound = word.most.min(*bound);
            }
        });
        for (tensor, end) in ends {
            bounds.entry(tensor).or_insert(end.max(0));
        }
        bounds
    }

    /// Tensors of whose words its lanes look for some, and the values at the edges of the ranges: of those to which they come with
    /// the first of `thresholds`, and of all that its text states.
    pub(crate) fn matched(&self, thresholds: &Thresholds) -> (BTreeSet<usize>, BTreeSet<i64>) {
        let (mut tensors, mut edges) = (BTreeSet::new(), BTreeSet::new());
        let mut steps = Step::actions(&self.section.body);
        let looks = |(_, kind): (_, &StepKind)| match kind {
            StepKind::Value(it) => !matches!(it.gives, WordValue::Word(_)),
            _ => false,
        };
        if !steps.any(looks) {
            return (tensors, edges);
        }
        // On both sides of each end: the smallest set of words that distinguishes the outcomes of the comparison.
        let ends = thresholds.ends.iter();
        edges.extend(ends.flat_map(|end| [end.saturating_sub(1), *end]));
        let values: Vec<i64> = thresholds.fixed.iter().copied().take(MAX_TRIED).collect();
        self.each_read(&values, |word| {
            if let Some(Matching { from, to, .. }) = word.matching {
                tensors.insert(word.part.tensor);
                edges.extend([from.saturating_sub(1), from, to.saturating_sub(1), to]);
            }
        });
        (tensors, edges)
    }

    /// Passes the words that lanes read in the first launches of a period if they find 0 everywhere, or values that are as
    /// large as they may be together, or one of `values` everywhere. Where the text is wrong, which is left to the verifier, those read before it.
    fn each_read(&self, values: &[i64], mut with: impl FnMut(&ReadWord)) {
        if self.read_as_values().is_empty() {
            return;
        }
        let launches = (0..self.lanes).flat_map(|lane| {
            let epochs = 0..self.period.max(1);
            epochs.map(move |epoch| (lane, epoch))
        });
        for (lane, epoch) in launches {
            let mut read = |value: &dyn Fn(i64) -> i64| {
                let words = RefCell::new(Vec::new());
                let resolved = self.steps_with(lane, epoch, &|word| {
                    words.borrow_mut().push(*word);
                    Some(value(word.most))
                });
                words.into_inner().iter().for_each(&mut with);
                resolved.is_ok()
            };
            // Zeros take other branches than large values do; both are read once.
            let [large @ .., zero] = SHARES;
            // Stops at the first share that resolves: smaller ones read the same words.
            large.into_iter().any(|share| read(&|most| most / share));
            read(&|most| most / zero);
            for value in values {
                read(&|most| most.min(*value));
            }
        }
    }
}
