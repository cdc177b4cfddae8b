//! Integers that a lane reads from memory.

use super::code::{Code, bare};
use super::names::element_name;
use super::{EmittedOperand, Emitter, Part, Refusal, Result, RowWord};
use crate::dtype::DType;
use crate::program::construct::{Selection, TensorRef};
use crate::program::expr::Expr;
use crate::program::section::compile::hazard;
use crate::program::section::compile::range::Range;
use crate::program::section::compile::scope::Scope;
use crate::program::section::{
    DeviceValue, IntegerStore, Packing, Step, StepKind, WordRange, WordValue,
};

impl Emitter<'_> {
    /// `let n = C[rank] at most rows`, `let n = count(E[a..b] in lo..hi)`.
    pub(super) fn value(&mut self, code: &mut Code, it: &DeviceValue) -> Result<()> {
        let word = self.operand(&it.place)?;
        let selections = &it.place.tensor.selections[..];
        let value = match (&it.gives, selections, self.instance.carried) {
            // The launch has checked it.
            (WordValue::Word(_), [Selection::Index(index)], Some(carried))
                if carried == word.part.tensor =>
            {
                let name = Scope::spell(&self.instance.tensors[carried].name);
                format!("(Index)at.{name}[{}]", bare(&self.integer(index)?))
            }
            (WordValue::Word(most), ..) => {
                let most = self.integer(most)?;
                self.read(&word, &most)?
            }
            (WordValue::Count(range), ..) => {
                // `count` is a call of the whole lane, but here each thread of one warp has an iteration of its own.
                let function = if self.by_thread {
                    "held("
                } else {
                    "count(self, "
                };
                format!("{function}{})", self.matched(&word, range)?)
            }
            (WordValue::Position(number, range), ..) => {
                let (number, words) = (self.integer(number)?, self.matched(&word, range)?);
                let part = &word.part.text;
                let most = if range.rows {
                    format!("{part}.length - 1")
                } else {
                    format!("{part}.elements() - 1")
                };
                let (number, bound) = (bare(&number).to_owned(), self.bound(&most));
                let search = format!("search{}", self.searches);
                // Each search continues where its last call stopped, so that a loop over rising positions is not
                // quadratic.
                self.searches += 1;
                format!("position(self, {search}, {words}, {number}, {bound})")
            }
        };
        code.line(format!("// {}: {it}", self.position));
        self.declare_rows(code);
        code.line(format!("const Index {} = {value};", Scope::spell(&it.name)));
        self.bind_value(it);
        Ok(())
    }

    pub(super) fn bind_value(&mut self, it: &DeviceValue) {
        let range = match &it.gives {
            WordValue::Word(most) => self.scope.range(most).down_to_zero(),
            // By the whole tensor: a part's length may be unknown here, and a bound that is too large is only slower.
            WordValue::Count(_) | WordValue::Position(..) => {
                let whole = self.whole(&it.place.tensor.name);
                let shape = whole.map(|part| &self.instance.tensors[part.tensor].shape);
                let elements = shape.map_or(0, |shape| shape.iter().product::<usize>());
                Range::of(0, elements as i128)
            }
        };
        let name = Scope::spell(&it.name);
        self.scope.bind_within(&it.name, name, None, range);
    }

    /// The words among which some are looked for, and their range, as arguments.
    fn matched(&mut self, words: &EmittedOperand, range: &WordRange) -> Result<String> {
        let name = &self.instance.tensors[words.part.tensor].name;
        if words.packing.is_packets() {
            let text = format!("packets of '{name}' are counted");
            return Err(self.refuse(text, "copy them to plain memory"));
        }
        let ends = [&range.from, &range.to].map(|end| self.wide_integer(end));
        let [from, to] = ends;
        let part = &words.part.text;
        // In words or in rows of words, by which the device function steps.
        let (count, row) = match (range.rows, words.part.axes) {
            (false, _) => (format!("{part}.elements()"), "1".to_owned()),
            (true, 2..) => (
                format!("(u64){part}.length"),
                // The divisor is at least 1: an empty part has no rows, and the quotient is not used.
                format!("{part}.elements() / greatest({part}.length, 1)"),
            ),
            (true, _) => {
                let text = format!("rows of '{name}' are counted, which has none");
                return Err(self.refuse(text, "leave two axes"));
            }
        };
        Ok(format!(
            "Words<{}>{{{}, {count}, {row}, {}, {}, {}}}",
            self.loaded_word(words),
            self.address("plain", words),
            from?,
            to?,
            range.inside
        ))
    }

    /// An integer that may need more bits than others; constants do not widen the kernel's integers.
    fn wide_integer(&self, expression: &Expr) -> Result<String> {
        match self.scope.value(expression) {
            Some(value) => Ok(format!("{value}ll")),
            None => Ok(bare(&self.integer(expression)?).to_owned()),
        }
    }

    /// `K[p] on q = integer(n + 1)`.
    pub(super) fn store(&mut self, code: &mut Code, it: &IntegerStore) -> Result<()> {
        let value = self.integer(&it.value)?;
        let target = self.operand(&it.target)?;
        let (data, _) = target.packing.packet();
        let size = self.instance.tensors[target.part.tensor].dtype.size();
        let integer = self.integer_name(&target);
        let (function, address) = match target.packing {
            Packing::Plain => (format!("store_integer<{integer}>"), "plain"),
            Packing::Packets8 | Packing::Packets16 if size <= data => (
                format!("store_packet_integer<{integer}, {data}>"),
                "packets",
            ),
            Packing::Packets8 | Packing::Packets16 | Packing::Packets128 => {
                let text = format!("an integer in {}", target.packing.name());
                return Err(self.refuse(text, "use packets16, of which a thread stores one alone"));
            }
        };
        code.line(format!(
            "// {}: {} = integer({})",
            self.position, it.target, it.value
        ));
        code.block("{", |code| {
            self.declare_rows(code);
            let address = self.address(address, &target);
            // Otherwise the lane's last thread alone stores, although all threads make the call.
            let every = if self.by_thread { ", true" } else { "" };
            code.line(format!(
                "{function}(self, {address}, {}{every});",
                bare(&value)
            ));
            Ok(())
        })
    }

    /// `words[at]` as the row of a part: a constant that is read before the step.
    pub(super) fn row(&mut self, words: &str, at: &Expr, rows: &Part) -> Result<String> {
        let index = self.integer(at)?;
        let mut part = self.whole(words)?;
        if part.axes != 1 {
            let text = format!("{words}[{at}] is not one integer");
            return Err(self.refuse(text, "use one integer for each row"));
        }
        part.text = format!("{}.index({})", part.text, bare(&index));
        part.axes = 0;
        let scratch = self.instance.scratch_of(part.tensor);
        let name = Scope::spell(&self.instance.tensors[part.tensor].name);
        let word = EmittedOperand {
            base: format!("at.{name}[rank]"),
            rank: i64::try_from(self.instance.rank).ok(),
            packing: scratch.map_or(Packing::Plain, |scratch| scratch.packing),
            part,
            replaced: None,
        };
        let value = self.read(&word, &format!("{}.length - 1", rows.text))?;
        let row = format!("row{}", self.rows);
        self.rows += 1;
        let name = row.clone();
        self.row_words.push(RowWord { name, value });
        Ok(row)
    }

    /// Declares the rows of the current step, before it: their words must be read and checked before any thread stores by
    /// them.
    pub(super) fn declare_rows(&mut self, code: &mut Code) {
        for RowWord { name, value } in self.row_words.drain(..) {
            code.line(format!("const Index {name} = {value};"));
        }
    }

    /// A tensor, or what an alias stands for.
    pub(super) fn whole(&self, name: &str) -> Result<Part> {
        let alias = self.aliases.iter().rev().find(|alias| alias.name == name);
        match (alias, self.instance.tensor(name)) {
            (Some(alias), _) => Ok(alias.part.clone()),
            (None, Some(tensor)) => Ok(Part {
                text: Scope::spell(name),
                tensor,
                axes: self.instance.tensors[tensor].shape.len(),
                aligned: true,
                indexed: true,
            }),
            (None, None) => Err(self.unknown(name)),
        }
    }

    pub(super) fn unknown(&self, name: &str) -> Refusal {
        self.refuse(
            format!("'{name}' is not known in the kernel"),
            "bind it with 'let' outside of the kernel",
        )
    }

    /// The call that reads a word.
    fn read(&self, word: &EmittedOperand, most: &str) -> Result<String> {
        let dtype = self.instance.tensors[word.part.tensor].dtype;
        let integer = self.integer_name(word);
        let (data, _) = word.packing.packet();
        let (function, address) = match word.packing {
            Packing::Plain => (format!("value<{}>", self.loaded_word(word)), "plain"),
            Packing::Packets8 | Packing::Packets16 if dtype.size() <= data => {
                (format!("packet_value<{integer}, {data}>"), "packets")
            }
            Packing::Packets8 | Packing::Packets16 | Packing::Packets128 => {
                let text = format!("an integer of {dtype} in {}", word.packing.name());
                return Err(self.refuse(text, "use packets16, which one thread can read alone"));
            }
        };
        let address = self.address(address, word);
        Ok(format!("{function}(self, {address}, {})", self.bound(most)))
    }

    /// C++ type of a word.
    pub(super) fn integer_name(&self, word: &EmittedOperand) -> &'static str {
        match self.instance.tensors[word.part.tensor].dtype {
            DType::U32 => "u32",
            DType::I64 => "i64",
            _ => "int",
        }
    }

    /// Declares where the kernel's searches are.
    pub(super) fn declare_searches(&self, code: &mut Code) {
        (0..self.searches).for_each(|number| code.line(format!("Search search{number};")));
    }

    /// Whether one warp may do what a body says for all: it only stores integers, which depend on a few words at a time that no
    /// rank stores. Other warps go on meanwhile, which takes a fraction of the instructions.
    pub(super) fn is_for_one_warp(&self, body: &[Step]) -> bool {
        let mut stores = false;
        let fits = Step::actions(body).all(|(step, kind)| {
            let done = match kind {
                StepKind::Store(it) => {
                    stores = true;
                    self.is_named_by_constants(&it.target.tensor)
                }
                StepKind::Value(it) => {
                    let few = match &it.gives {
                        WordValue::Word(_) | WordValue::Position(..) => true,
                        WordValue::Count(range) => {
                            !range.rows && hazard::is_one_word(self.instance, &it.place)
                        }
                    };
                    few && hazard::is_never_stored(self.instance, &it.place)
                }
                _ => false,
            };
            done && !self.barriers.contains(&hazard::id(step))
        });
        fits && stores && !self.traced && !self.paired
    }

    /// Whether no rank stores words that name rows of `target` during the launch. All threads of a lane meet to read those
    /// of a packet.
    fn is_named_by_constants(&self, target: &TensorRef) -> bool {
        target.selections.iter().all(|selection| match selection {
            Selection::Index(Expr::Element(words, _)) => {
                let tensor = self.instance.tensor(words);
                tensor.is_some_and(|tensor| self.instance.tensors[tensor].constant)
            }
            _ => true,
        })
    }

    /// Template arguments of a load of a word: its type, and whether no rank stores it during the launch. A message may
    /// store words that a later one of the same launch reads.
    pub(super) fn loaded_word(&self, word: &EmittedOperand) -> String {
        // Constant words use the read-only cache, which is not coherent with stores of the same launch.
        let constant = self.instance.tensors[word.part.tensor].constant && !self.paired;
        format!("{}, {constant}", self.integer_name(word))
    }

    pub(super) fn address(&self, function: &str, word: &EmittedOperand) -> String {
        let element = element_name(self.instance.tensors[word.part.tensor].dtype);
        format!("{function}<{element}>({}, {})", word.base, word.part.text)
    }

    /// The maximum of a word, and where to record one that is out of range.
    pub(super) fn bound(&self, most: &str) -> String {
        let place = u64::from(self.position.line) << 32 | u64::from(self.position.column);
        let note = format!("{} + detail::value_note_offset", self.direct());
        format!("{}, {place:#x}ull, {note}", bare(most))
    }
}
