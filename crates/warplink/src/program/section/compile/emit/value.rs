//! Integers that a lane reads from memory.

use super::code::{Code, bare};
use super::names::element_name;
use super::{EmittedOperand, Emitter, Part, Result};
use crate::dtype::DType;
use crate::program::construct::Selection;
use crate::program::expr::Expr;
use crate::program::section::compile::scope::Scope;
use crate::program::section::{DeviceValue, Packing};

impl Emitter<'_> {
    /// `let n = C[rank] at most rows`.
    pub(super) fn value(&mut self, code: &mut Code, it: &DeviceValue) -> Result<()> {
        let word = self.operand(&it.place)?;
        let value = match (&it.place.tensor.selections[..], self.instance.carried) {
            // The launch has checked it.
            ([Selection::Index(index)], Some(carried)) if carried == word.part.tensor => {
                let name = Scope::spell(&self.instance.tensors[carried].name);
                format!("(Index)at.{name}[{}]", bare(&self.integer(index)?))
            }
            _ => {
                let most = self.integer(&it.most)?;
                self.read(&word, &most)?
            }
        };
        code.line(format!("// {}: {it}", self.position));
        self.row_lines.drain(..).for_each(|line| code.line(line));
        code.line(format!("const Index {} = {value};", Scope::spell(&it.name)));
        self.bind_value(it);
        Ok(())
    }

    pub(super) fn bind_value(&mut self, it: &DeviceValue) {
        let range = self.scope.range(&it.most).down_to_zero();
        let name = Scope::spell(&it.name);
        self.scope.bind_within(&it.name, name, None, range);
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
        self.row_lines.push(format!("const Index {row} = {value};"));
        Ok(row)
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

    /// The call that reads a word.
    fn read(&self, word: &EmittedOperand, most: &str) -> Result<String> {
        let dtype = self.instance.tensors[word.part.tensor].dtype;
        let integer = self.integer_name(word);
        let (data, _) = word.packing.packet();
        let (function, address) = match word.packing {
            Packing::Plain => (format!("value<{integer}>"), "plain"),
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
