//! Emits steps that apply row functions: one pass over the row per level of reductions, and a final pass that stores.
//!
//! Every pass visits all units of a row that the thread owns. Values needed by later passes stay in registers for the
//! thread's first units and are recomputed for the others (`Row::each` in `warplink/rows.cuh`).

use super::code::{Code, bare};
use super::names::{element_name, operator_name, row_operator, stored_name};
use super::passes::{Given, Passes, float};
use super::{EmittedOperand, Emitter, Result};
use crate::device::ReduceOp;
use crate::dtype::DType;
use crate::named::comma;
use crate::program::section::function::{RowNode, UNIT};
use crate::program::section::{Application, FunctionArgument, Packing};

/// Maximum number of elements that the threads of a lane keep in registers together: longer rows are read again in
/// each pass.
const KEPT_ELEMENTS: usize = 1 << 14;

/// Maximum number of units that a thread keeps in registers.
pub(super) const MAX_KEPT: usize = 4;

/// Registers of a block for units that are loaded before the first pass: with four times as many, sums of eight rows took no less
/// time (docs/performance.md).
const WORDS_AHEAD: usize = 1 << 13;

/// Extent of a result stored in a target.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Extent {
    Single,
    /// One value for each block of this many elements.
    Block(usize),
    /// A byte for each two elements.
    Pairs,
    Row,
}

/// Targets with the same result, type and extent, stored together.
struct Group {
    result: usize,
    dtype: DType,
    extent: Extent,
    operands: Vec<EmittedOperand>,
}

impl Emitter<'_> {
    /// A step that applies a function to a row.
    pub(super) fn applied(&mut self, code: &mut Code, application: &Application) -> Result<()> {
        let name = &application.function;
        let function = self.instance.functions.get(name).cloned();
        let function = function.ok_or_else(|| self.unknown(name))?;
        let (mut given, mut sources) = (Vec::new(), Vec::new());
        for (argument, block) in application.arguments.iter().zip(&function.arguments) {
            let FunctionArgument::Sources {
                sources: list,
                operator,
            } = argument
            else {
                given.push(Given::Number);
                sources.push(Vec::new());
                continue;
            };
            let operator = operator.as_ref().map(|it| self.operator(it)).transpose()?;
            let operator = operator.unwrap_or(ReduceOp::Sum);
            let operands = self.expand(list, |emitter, source| emitter.source(source))?;
            let operands = operands
                .into_iter()
                .collect::<Result<Vec<EmittedOperand>>>()?;
            let first = operands.first();
            let first =
                first.ok_or_else(|| self.refuse("a reduction of nothing", "name a source"))?;
            let dtype = self.instance.tensors[first.part.tensor].dtype;
            let replaced = operands
                .iter()
                .find_map(|operand| operand.replaced.as_ref());
            let replaced = replaced.map(|(_, number)| *number);
            given.push(match (first.part.axes, &operands[..]) {
                _ if block.is_some() && replaced.is_none() => Given::Block(dtype),
                (0, all) if replaced.is_none() || all.len() == 1 => {
                    Given::Single(dtype, operator, replaced)
                }
                (_, [one]) if !one.packing.is_packets() && block.is_none() => {
                    Given::Plain(dtype, replaced)
                }
                _ if replaced.is_some() => {
                    let text = "a number in place of packets or of values of blocks";
                    return Err(self.refuse(text, "replace single values, or rows of plain memory"));
                }
                _ => Given::Row(dtype, operator),
            });
            sources.push(operands);
        }
        let passes = Passes::new(&function, &given);
        let blocks = &passes.blocks;
        let in_blocks = passes.live.iter().zip(&function.nodes);
        let mut in_blocks = in_blocks.filter(|(live, _)| **live);
        if in_blocks.any(|(_, node)| matches!(node, RowNode::BlockMax(..)))
            && !self.instance.threads.is_multiple_of(32)
        {
            let text = "block_max in a lane that has no whole warps";
            return Err(self.refuse(text, "use a multiple of 32 threads"));
        }
        let mut targets = Vec::new();
        for (list, result) in application.results.iter().zip(&function.results) {
            let operands = self.expand(list, |emitter, place| emitter.operand(place))?;
            let mut groups: Vec<Group> = Vec::new();
            for operand in operands {
                let operand = operand?;
                let dtype = self.instance.tensors[operand.part.tensor].dtype;
                let extent = match (operand.part.axes, blocks[*result]) {
                    (0, _) => Extent::Single,
                    _ if matches!(function.nodes[*result], RowNode::Pairs(_)) => Extent::Pairs,
                    (_, Some(size)) => Extent::Block(size),
                    (_, None) => Extent::Row,
                };
                let mut all = groups.iter_mut();
                match all.find(|it| (it.dtype, it.extent) == (dtype, extent)) {
                    Some(group) => group.operands.push(operand),
                    None => groups.push(Group {
                        result: *result,
                        dtype,
                        extent,
                        operands: vec![operand],
                    }),
                }
            }
            targets.extend(groups);
        }
        self.count(sources.len() + targets.len() + 4 * function.nodes.len())?;
        for operands in sources
            .iter()
            .chain(targets.iter().map(|group| &group.operands))
        {
            self.check(operands, &[])?;
        }
        let mut stored = targets.iter().flat_map(|group| &group.operands);
        if stored.any(|operand| operand.packing == Packing::Packets128) {
            let text =
                "packets128 as a target of a function of rows, which threads do not store alone";
            return Err(self.refuse(text, "use packets16 or packets8, or a put"));
        }
        let all = targets.iter().flat_map(|group| &group.operands);
        let whole = all
            .chain(sources.iter().flatten())
            .any(|operand| self.has_whole_units(operand));
        code.block(format!("{{  // {}: {application}", self.position), |code| {
            self.declare_rows(code);
            let mut rows = Vec::new();
            let mut place = |code: &mut Code,
                             name: String,
                             operands: &[EmittedOperand],
                             dtype: DType,
                             is_row: bool| {
                let mut views = Vec::new();
                for (number, operand) in operands.iter().enumerate() {
                    let view = format!("{name}_{number}");
                    code.line(format!("const auto {view} = {};", operand.part.text));
                    if is_row && operand.part.axes > 0 {
                        rows.push(view.clone());
                    }
                    views.push(view);
                }
                let places = self.places(&element_name(dtype), operands, &views);
                code.line(format!("const auto {name} = {places};"));
            };
            for (number, group) in targets.iter().enumerate() {
                let name = format!("to{number}_{}", group.result);
                let is_row = group.extent == Extent::Row;
                place(code, name, &group.operands, group.dtype, is_row);
            }
            for (number, operands) in sources.iter().enumerate() {
                let (Given::Single(dtype, ..)
                | Given::Row(dtype, _)
                | Given::Plain(dtype, _)
                | Given::Block(dtype)) = given[number]
                else {
                    continue;
                };
                let is_row = !matches!(given[number], Given::Block(_));
                place(code, format!("from{number}"), operands, dtype, is_row);
            }
            let stored = targets.iter().filter(|group| group.extent == Extent::Row);
            let stored = stored.flat_map(|group| &group.operands);
            let read = sources.iter().zip(&given);
            let read = read.filter(|(_, it)| matches!(it, Given::Row(..) | Given::Plain(..)));
            let mut all = stored.chain(read.flat_map(|(operands, _)| operands));
            let units = all.find_map(|operand| self.units(operand).filter(|_| whole));
            let kept = units.filter(|units| *units <= self.most_kept() && !self.in_parts);
            let row = match (whole, kept) {
                (true, Some(_)) => "Row<true, true>",
                (true, None) => "Row<true>",
                (false, _) => "Row",
            };
            code.line(format!(
                "{row} row(self, row_turn, shortest({}));",
                comma(&rows)
            ));
            let aligned: Vec<bool> = sources
                .iter()
                .map(|operands| whole && self.are_aligned(operands))
                .collect();
            self.passes(
                code,
                &passes,
                application,
                (&targets, &aligned, whole),
                kept,
            )
        })
    }

    /// Whether an operand is a row whose length is a multiple of a unit: rows of 2-byte elements without gaps that are
    /// all aligned to 16 bytes.
    fn has_whole_units(&self, operand: &EmittedOperand) -> bool {
        let tensor = &self.instance.tensors[operand.part.tensor];
        operand.part.axes == 1
            && self.is_aligned(operand)
            && operand.part.indexed
            && tensor.dtype.size() == 2
            && tensor.has_dense_rows()
    }

    /// Units of a thread in a row of whole units.
    fn units(&self, row: &EmittedOperand) -> Option<usize> {
        let width = self.instance.tensors[row.part.tensor].shape.last()?;
        let units = width.div_ceil(UNIT * self.instance.threads.max(1)).max(1);
        self.has_whole_units(row).then_some(units)
    }

    /// Maximum number of units that a thread keeps in registers.
    fn most_kept(&self) -> usize {
        let units = KEPT_ELEMENTS / UNIT / self.instance.threads.max(1);
        if self.in_parts {
            MAX_KEPT
        } else {
            units.clamp(1, MAX_KEPT)
        }
    }

    /// Whether all operands in plain memory are aligned to 16 bytes.
    fn are_aligned(&self, operands: &[EmittedOperand]) -> bool {
        let mut operands = operands.iter();
        operands.all(|operand| operand.packing.is_packets() || self.is_aligned(operand))
    }

    fn is_aligned(&self, operand: &EmittedOperand) -> bool {
        operand.part.aligned && self.aligned[operand.part.tensor]
    }

    fn passes(
        &self,
        code: &mut Code,
        passes: &Passes<'_>,
        application: &Application,
        (targets, aligned, whole): (&[Group], &[bool], bool),
        all_kept: Option<usize>,
    ) -> Result<()> {
        let units = all_kept.unwrap_or(self.most_kept());
        let mut passes = passes.clone();
        passes.ahead = self.loads_ahead(&passes, units);
        let passes = &passes;
        let function = passes.function;
        if self.instance.blocks > 1 && passes.last() > 0 {
            // Before the lane waits for packets, as a reduction along the row would do it after that.
            code.line("self.gather();");
        }
        // Values that are uniform for the row after this many levels of reductions.
        let uniform = |code: &mut Code, level: usize| {
            for (number, node) in function.nodes.iter().enumerate() {
                if !passes.live[number] || !passes.uniform[number] || passes.levels[number] != level
                {
                    continue;
                }
                let value = match node {
                    RowNode::Row(..) => continue,
                    RowNode::Argument(argument) => {
                        match (&application.arguments[*argument], &passes.given[*argument]) {
                            (FunctionArgument::Number(number), _) => float(number.value()),
                            (_, Given::Single(dtype, operator, replaced)) => {
                                let value = format!(
                                    "single_reduced<{}, {}>(from{argument})",
                                    element_name(*dtype),
                                    operator_name(*operator)
                                );
                                match replaced {
                                    Some(number) => format!(
                                        "from{argument}.at[0] == 0 ? {} : {value}",
                                        float(number.value())
                                    ),
                                    None => value,
                                }
                            }
                            _ => continue,
                        }
                    }
                    _ => passes.expression(number, 0),
                };
                code.line(format!("const float n{number} = {};", bare(&value)));
            }
        };
        let nodes = 0..function.nodes.len();
        let kept: Vec<usize> = nodes.filter(|node| passes.is_kept(*node)).collect();
        // Without a reduction along the row, units go through all passes a few at a time, and none is loaded again.
        let few_at_a_time = all_kept.is_none()
            && (0..passes.last()).all(|pass| passes.reductions(pass).next().is_none())
            && targets.iter().any(|group| group.extent != Extent::Single);
        if few_at_a_time {
            uniform(code, 0);
            code.open("do {");
        }
        code.open("struct Kept {");
        for node in &kept {
            code.line(match passes.plain(*node) {
                Some((_, dtype, _)) => format!("detail::RowUnit<{}> n{node};", element_name(dtype)),
                None if passes.is_block(*node) => format!("float n{node};"),
                None => format!("float n{node}[row_unit];"),
            });
        }
        code.close(&format!("}} kept[{units}];"));
        let mut again = Vec::new();
        if passes.ahead {
            code.open("const auto loads = [&](u32 unit, u32 count, Kept &kept) {");
            Self::loads(code, passes, aligned);
            code.close("};");
            code.line("row.each_kept(kept, loads);");
            again.push("loads(unit, count, kept)".to_owned());
        }
        if !few_at_a_time {
            uniform(code, 0);
        }
        let each = |again: &[String]| {
            if few_at_a_time {
                "row.each_kept(kept, ".to_owned()
            } else {
                format!("row.each(kept, {}, ", anew(again))
            }
        };
        for pass in 0..passes.last() {
            let sums: Vec<_> = passes.reductions(pass).collect();
            let names: Vec<String> = sums.iter().map(|(node, ..)| format!("n{node}")).collect();
            for (node, reduction, _) in &sums {
                code.line(format!(
                    "float n{node} = {}::none();",
                    row_operator(*reduction)
                ));
            }
            let taken: Vec<String> = names
                .iter()
                .map(|name| format!(", float &{name}"))
                .collect();
            code.open(format!(
                "const auto pass{pass} = [&](u32 unit, u32 count, Kept &kept{}) {{",
                taken.concat()
            ));
            self.elements(code, passes, pass, (targets, aligned, whole));
            code.close("};");
            let given: Vec<String> = names.iter().map(|name| format!(", {name}")).collect();
            code.line(format!(
                "{}[&](u32 unit, u32 count, Kept &kept) {{ pass{pass}(unit, count, kept{}); }});",
                each(&again),
                given.concat()
            ));
            if !sums.is_empty() {
                let operators: Vec<_> = sums.iter().map(|(_, it, _)| row_operator(*it)).collect();
                code.line(format!(
                    "row.across<{}>({});",
                    comma(&operators),
                    comma(&names)
                ));
            }
            again.push(format!(
                "pass{pass}(unit, count, kept{})",
                ", none".repeat(names.len())
            ));
            uniform(code, pass + 1);
        }
        if targets.iter().any(|group| group.extent != Extent::Single) {
            code.open(format!(
                "{}[&](u32 unit, u32 count, Kept &kept) {{",
                each(&again)
            ));
            self.elements(code, passes, passes.last(), (targets, aligned, whole));
            code.close("});");
        }
        if few_at_a_time {
            code.close(&format!("}} while (row.next<{units}>());"));
        }
        for (number, group) in targets.iter().enumerate() {
            if group.extent == Extent::Single {
                let (element, result) = (stored_name(group.dtype), group.result);
                code.line(format!(
                    "row.store_single<{element}>(to{number}_{result}, n{result});"
                ));
            }
        }
        Ok(())
    }

    /// The loaded unit that a target gets unchanged, if it has the type of the argument that is its result.
    fn stored_as_loaded(passes: &Passes<'_>, group: &Group) -> Option<String> {
        let (_, dtype, replaced) = passes.plain(group.result)?;
        let unchanged = dtype == group.dtype && replaced.is_none() && group.extent == Extent::Row;
        unchanged.then(|| passes.loaded(group.result))
    }

    /// Loads a unit of each row of plain memory.
    fn loads(code: &mut Code, passes: &Passes<'_>, aligned: &[bool]) {
        for node in passes.loads() {
            let Some((argument, dtype, replaced)) = passes.plain(node) else {
                continue;
            };
            let element = element_name(dtype);
            let (function, number) = match replaced {
                Some(number) => ("load_or", format!("{}, ", float(number.value()))),
                None => ("load", String::new()),
            };
            let known = if aligned[argument] { ", true" } else { "" };
            let declared = if passes.is_kept(node) {
                ""
            } else {
                "const auto "
            };
            code.line(format!(
                "{declared}{} = row.{function}<{element}{known}>({number}from{argument}.at[0], unit, count);",
                passes.loaded(node)
            ));
        }
    }

    /// Whether the kept units of rows of plain memory are loaded together, which takes registers.
    fn loads_ahead(&self, passes: &Passes<'_>, units: usize) -> bool {
        let loads = passes.loads().filter_map(|node| passes.plain(node));
        let words: usize = loads.map(|(_, dtype, _)| UNIT * dtype.size() / 4).sum();
        let threads = self.instance.threads / self.instance.blocks.max(1);
        // In a part of a lane, few other units of the block are in flight.
        let most = if self.in_parts { 2 } else { 1 } * WORDS_AHEAD;
        units > 1 && words > 0 && words * units * threads <= most
    }

    /// A pass over the elements of a unit.
    fn elements(
        &self,
        code: &mut Code,
        passes: &Passes<'_>,
        pass: usize,
        (targets, aligned, whole): (&[Group], &[bool], bool),
    ) {
        let function = passes.function;
        let known = |aligned: bool| if aligned { ", true" } else { "" };
        if pass == 0 && !passes.ahead {
            Self::loads(code, passes, aligned);
        }
        for node in &passes.nodes[pass] {
            let RowNode::Argument(argument) = function.nodes[*node] else {
                continue;
            };
            if let Given::Row(dtype, operator) = passes.given[argument] {
                code.line(format!("float n{node}[row_unit];"));
                code.line(format!(
                    "row.reduce<{}, {}{}>(from{argument}, unit, count, n{node});",
                    element_name(dtype),
                    operator_name(operator),
                    known(aligned[argument])
                ));
            }
        }
        for node in &passes.nodes[pass] {
            if let RowNode::OfBlock(argument, size) = function.nodes[*node]
                && let Given::Block(dtype) = passes.given[argument]
            {
                let (element, units) = (element_name(dtype), size / UNIT);
                code.line(format!(
                    "const float n{node} = row.of_block<{element}, {units}>(from{argument}.at[0], unit);"
                ));
            }
        }
        for node in passes.nodes[pass].iter().chain(&passes.taken[pass]) {
            if passes.plain(*node).is_some() {
                code.line(format!("float n{node}[row_unit];"));
                code.line(format!("{}.values(n{node});", passes.loaded(*node)));
            }
        }
        let last = pass == passes.last();
        let own = |group: &Group| Self::stored_as_loaded(passes, group);
        for (number, group) in targets.iter().enumerate().filter(|_| last) {
            if let Some(loaded) = own(group) {
                let aligned = known(whole && self.are_aligned(&group.operands));
                let (element, result) = (stored_name(group.dtype), group.result);
                code.line(format!("row.store_unit<{element}{aligned}>(to{number}_{result}, unit, count, {loaded});"));
            }
        }
        let stored = || {
            let all = targets.iter().enumerate();
            all.filter(move |(_, group)| {
                last && group.extent != Extent::Single && own(group).is_none()
            })
        };
        for (number, group) in stored() {
            code.line(match group.extent {
                Extent::Block(_) => format!("float stored{number} = 0;"),
                _ => format!("float stored{number}[row_unit];"),
            });
            if passes.divided(group.result).is_some() {
                code.line(format!("float by{number};"));
            }
        }
        let blocks: Vec<_> = passes.of_blocks(pass).collect();
        for (node, ..) in &blocks {
            code.line(format!("float block{node} = RowMax::none();"));
        }
        code.line("#pragma unroll");
        code.open("for (u32 e = 0; e < row_unit; e++) {");
        for node in &passes.nodes[pass] {
            let value = passes.value(*node, pass);
            if !matches!(
                function.nodes[*node],
                RowNode::Argument(_) | RowNode::OfBlock(..)
            ) && passes.divided(*node).is_none()
            {
                code.line(format!(
                    "const float {value} = {};",
                    passes.expression(*node, pass)
                ));
            }
            if passes.is_kept(*node) && passes.plain(*node).is_none() {
                code.line(format!("kept.n{node}[e] = {value};"));
            }
        }
        if pass < passes.last() {
            for (node, reduction, of) in passes.reductions(pass) {
                code.line(format!(
                    // Values beyond the row's end are not part of it.
                    "if (e < count) n{node} = {}::combine(n{node}, {});",
                    row_operator(reduction),
                    passes.value(of, pass)
                ));
            }
        }
        for (node, _, of) in &blocks {
            let value = passes.value(*of, pass);
            code.line(format!(
                "if (e < count) block{node} = RowMax::combine(block{node}, {value});"
            ));
        }
        for (number, group) in stored() {
            let divided = passes.divided(group.result);
            let value = passes.value(divided.map_or(group.result, |(of, _)| of), pass);
            if let Some((_, by)) = divided {
                code.line(format!("by{number} = {};", passes.value(by, pass)));
            }
            code.line(match group.extent {
                Extent::Block(_) => format!("if (e == 0) stored{number} = {value};"),
                _ => format!("stored{number}[e] = {value};"),
            });
        }
        code.close("}");
        for (node, size, _) in &blocks {
            let units = size / UNIT;
            code.line(format!(
                "kept.n{node} = row.across_block<RowMax, {units}>(unit, block{node});"
            ));
        }
        for (number, group) in stored() {
            if passes.divided(group.result).is_some() {
                // By one value for the whole unit: one reciprocal, exactly corrected, instead of eight divisions.
                code.line(format!("row_divide(stored{number}, by{number});"));
            }
            let (element, result) = (stored_name(group.dtype), group.result);
            code.line(match group.extent {
                Extent::Block(size) => {
                    let units = size / UNIT;
                    format!("row.store_block<{element}, {units}>(to{number}_{result}, unit, stored{number});")
                }
                Extent::Pairs => {
                    format!("row.store_pairs(to{number}_{result}, unit, count, stored{number});")
                }
                _ => {
                    let aligned = known(whole && self.are_aligned(&group.operands));
                    format!("row.store<{element}{aligned}>(to{number}_{result}, unit, count, stored{number});")
                }
            });
        }
    }
}

/// Code that recomputes the kept values of a unit: the previous passes.
fn anew(passes: &[String]) -> String {
    if passes.is_empty() {
        return "[](u32, u32, Kept &) {}".to_owned();
    }
    let none = if passes.iter().any(|pass| pass.contains("none")) {
        "float none = 0; "
    } else {
        ""
    };
    format!(
        "[&](u32 unit, u32 count, Kept &kept) {{ {none}{}; }}",
        passes.join("; ")
    )
}
