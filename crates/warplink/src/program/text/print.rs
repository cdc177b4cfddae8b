//! Printing of programs.

use crate::named::comma;
use crate::program::expr::{Condition, Expr, Operator};
use crate::program::ir::{
    Argument, ArgumentValue, AxisSelection, Branch, Declaration, Each, ElementType, Node, NodeKind,
    Order, Over, Position, Product, Program, Role, Selection, Sharding, Statement, StatementKind,
    StreamRef, Subprogram, TensorRef, TransferRef,
};
use crate::program::parameters::{Parameter, ParameterKind};
use std::fmt::{self, Display, Formatter};

/// The first line of the statement or declared transfer that starts at `position` of the program's text, for
/// messages; empty if there is none.
pub fn summary(program: &Program, position: Position) -> String {
    fn of<A: Action>(
        body: &[Node<A>],
        position: Position,
        within: fn(&A, Position) -> Option<String>,
    ) -> Option<String> {
        body.iter().find_map(|node| {
            let inside = match &node.kind {
                NodeKind::Do(action) => within(action, position),
                _ => node.blocks().find_map(|block| of(block, position, within)),
            };
            // By fields: `==` on positions is true for any two.
            let is = (node.position.line, node.position.column) == (position.line, position.column);
            inside.or_else(|| is.then(|| head(node)))
        })
    }
    fn within(action: &StatementKind, position: Position) -> Option<String> {
        match action {
            StatementKind::Fork { body, .. } => of(body, position, within),
            StatementKind::Share(items) => of(items, position, |_, _| None),
            StatementKind::Kernel(section) => of(&section.body, position, |_, _| None),
            _ => None,
        }
    }
    fn head<A: Action>(node: &Node<A>) -> String {
        let text = Indented(0, node).to_string();
        let first = text.lines().next().unwrap_or("");
        first.trim_end_matches(" {").to_owned()
    }
    let called = program.subprograms.iter().map(|called| &called.body);
    called
        .chain([&program.body])
        .find_map(|body| of(body, position, within))
        .unwrap_or_default()
}

/// An item printed on whole lines, at a given indentation.
pub(super) struct Indented<'a, T>(pub(super) usize, pub(super) &'a T);

impl<T> Indented<'_, T> {
    pub(super) fn margin(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "{:1$}", "", self.0 * 4)
    }
}

/// Text of an action: a node other than a name, a loop or a branch.
pub(super) trait Action {
    /// Prints it at indentation `depth`, without the margin and end of its first line.
    fn print(&self, f: &mut Formatter<'_>, depth: usize) -> fmt::Result;
}

impl Display for Program {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        for subprogram in &self.subprograms {
            let Subprogram {
                name,
                parameters,
                body,
            } = subprogram;
            print_program(f, name, parameters, body)?;
            f.write_str("\n")?;
        }
        print_program(f, &self.name, &self.parameters, &self.body)
    }
}

fn print_program(
    f: &mut Formatter<'_>,
    name: &str,
    parameters: &[Parameter],
    body: &[Statement],
) -> fmt::Result {
    writeln!(f, "program {name}({}) {{", comma(parameters))?;
    // Declarations are grouped, and multi-line statements are separated by blank lines.
    let shape = |statement: &Statement| match &statement.kind {
        NodeKind::For(_) | NodeKind::If(_) => (false, true),
        NodeKind::LetInteger { .. } | NodeKind::LetTensor { .. } => (false, false),
        NodeKind::Do(kind) => match kind {
            StatementKind::Declare(_) | StatementKind::Scratch(_) | StatementKind::Require(_) => {
                (true, false)
            }
            StatementKind::Share(_)
            | StatementKind::Fork { .. }
            | StatementKind::Kernel(_)
            | StatementKind::Function(_) => (false, true),
            _ => (false, false),
        },
    };
    for (number, statement) in body.iter().enumerate() {
        let (declares, tall) = shape(statement);
        let before = number.checked_sub(1).map(|before| shape(&body[before]));
        if before.is_some_and(|before| before.0 != declares || before.1 || tall) {
            f.write_str("\n")?;
        }
        Indented(1, statement).fmt(f)?;
    }
    f.write_str("}\n")
}

impl<A: Action> Display for Indented<'_, Node<A>> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Self(depth, node) = *self;
        self.margin(f)?;
        match &node.kind {
            NodeKind::LetInteger { name, value } => write!(f, "let {name} = {value}")?,
            NodeKind::LetTensor { name, value } => write!(f, "let {name} = {value}")?,
            NodeKind::For(it) => {
                write!(f, "{} ", it.over)?;
                block(f, depth, &it.body)?;
            }
            NodeKind::If(branch) => print_branch(f, depth, branch)?,
            NodeKind::Do(action) => action.print(f, depth)?,
        }
        f.write_str("\n")
    }
}

impl Action for StatementKind {
    fn print(&self, f: &mut Formatter<'_>, depth: usize) -> fmt::Result {
        match self {
            StatementKind::Require(condition) => write!(f, "require {condition}")?,
            StatementKind::Declare(declaration) => declaration.fmt(f)?,
            StatementKind::Deallocate(name) => write!(f, "deallocate {name}")?,
            StatementKind::LetList { name, elements } => {
                write!(f, "let {name} = [{}]", comma(elements))?;
            }
            StatementKind::Copy { target, source } => write!(f, "{target} = copy({source})")?,
            StatementKind::Matmul {
                target,
                product,
                accumulate,
            } => {
                let sign = if *accumulate { "+=" } else { "=" };
                write!(f, "{target} {sign} {product}")?;
            }
            StatementKind::Elementwise {
                op,
                target,
                sources,
                accumulate,
            } => {
                let sign = if *accumulate { "+=" } else { "=" };
                write!(f, "{target} {sign} {op}({})", comma(sources))?;
            }
            StatementKind::Collective {
                target,
                source,
                collective,
                among,
            } => {
                let (name, arguments) = (collective.name(), collective.arguments());
                write!(f, "{target} = {name}({source}{arguments})")?;
                after(f, " among ", among.as_ref())?;
            }
            StatementKind::Share(items) => {
                f.write_str("share ")?;
                block(f, depth, items)?;
            }
            StatementKind::Post(list) => write!(f, "post {}", comma(list))?,
            StatementKind::PostMatmul(each) => {
                write!(f, "post {} = {}", each.item.send, each.item.product)?;
                after(f, " ", each.over.as_ref())?;
            }
            StatementKind::Wait(list) => write!(f, "wait {}", comma(list))?,
            StatementKind::GetStream(name) => write!(f, "get_stream {name}")?,
            StatementKind::SetStream(stream) => write!(f, "set_stream {stream}")?,
            StatementKind::Synchronize(stream) => write!(f, "synchronize {stream}")?,
            StatementKind::Fork { streams, body } => {
                write!(f, "fork {} ", comma(streams))?;
                block(f, depth, body)?;
            }
            StatementKind::Call { program, arguments } => {
                write!(f, "{program}({})", comma(arguments))?;
            }
            StatementKind::Scratch(all) => super::section::scratch(f, all)?,
            StatementKind::Function(function) => Indented(depth, function).fmt(f)?,
            StatementKind::Kernel(section) => {
                section.fmt(f)?;
                block(f, depth, &section.body)?;
            }
            StatementKind::InOut { tensor, part } => write!(f, "inout {tensor} = {part}")?,
            StatementKind::Value(it) => it.fmt(f)?,
            StatementKind::Expect(expectation) => expectation.fmt(f)?,
            StatementKind::ExpectRows(row) => write!(f, "expect {row}")?,
        }
        Ok(())
    }
}

fn block<A: Action>(f: &mut Formatter<'_>, depth: usize, body: &[Node<A>]) -> fmt::Result {
    f.write_str("{\n")?;
    body.iter()
        .try_for_each(|node| Indented(depth + 1, node).fmt(f))?;
    write!(f, "{:1$}}}", "", depth * 4)
}

fn print_branch<A: Action>(f: &mut Formatter<'_>, depth: usize, it: &Branch<A>) -> fmt::Result {
    for (position, arm) in it.arms.iter().enumerate() {
        f.write_str(if position == 0 { "if " } else { " else if " })?;
        write!(f, "{} ", arm.condition)?;
        block(f, depth, &arm.body)?;
    }
    if it.otherwise.is_empty() {
        return Ok(());
    }
    f.write_str(" else ")?;
    block(f, depth, &it.otherwise)
}

impl Display for Argument {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Self { name, value } = self;
        match value {
            ArgumentValue::Integer(value) => write!(f, "{name} = {value}"),
            ArgumentValue::ElementType(dtype) => write!(f, "{name} = {dtype}"),
            ArgumentValue::Reference(reference) => write!(f, "{name} = {reference}"),
        }
    }
}

/// An item, and its repetition.
impl<T: Display> Display for Each<T> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        self.item.fmt(f)?;
        after(f, " ", self.over.as_ref())
    }
}

impl Display for Over {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Self { index, from, to } = self;
        write!(f, "for {index} in {from}..{to}")
    }
}

/// Writes an optional item, preceded by `lead`.
pub(super) fn after(f: &mut Formatter<'_>, lead: &str, item: Option<impl Display>) -> fmt::Result {
    match item {
        Some(item) => write!(f, "{lead}{item}"),
        None => Ok(()),
    }
}

impl Display for Product {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Self { a, b, bias } = self;
        if b.transposed {
            // A product with a transposed right side is printed as `linear`, in which the transpose is implied.
            let weights = TensorRef {
                transposed: false,
                ..b.clone()
            };
            write!(f, "linear({a}, {weights}")?;
            after(f, ", ", bias.as_ref())?;
            return f.write_str(")");
        }
        write!(f, "matmul({a}, {b})")?;
        after(f, " + ", bias.as_ref())
    }
}

impl Display for Declaration {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let role = match self.role {
            Role::Input => "input",
            Role::Output => "output",
            Role::Local => "allocate",
        };
        if self.optional {
            f.write_str("optional ")?;
        }
        write!(f, "{role} {}", self.name)?;
        if let Some(over) = &self.family {
            write!(f, "[{}]", over.index)?;
        }
        write!(f, ": {}[", self.dtype)?;
        for (axis, extent) in self.shape.iter().enumerate() {
            let lead = if axis == 0 { "" } else { ", " };
            write!(f, "{lead}{extent}")?;
            match self.sharding {
                Sharding::Ranks(sharded) if sharded == axis => f.write_str(" over ranks")?,
                Sharding::Loop if axis == 0 => f.write_str(" over loop")?,
                _ => {}
            }
        }
        f.write_str("]")?;
        match &self.order {
            Order::RowMajor => {}
            Order::ColumnMajor => f.write_str(" column_major")?,
            Order::ColumnMajorIf(condition) => write!(f, " column_major if {condition}")?,
        }
        f.write_str(if self.zero { " = 0" } else { "" })?;
        after(f, " ", self.family.as_ref())
    }
}

impl Display for ElementType {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fixed(dtype) => dtype.fmt(f),
            Self::Parameter(name) => f.write_str(name),
        }
    }
}

impl Display for Parameter {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)?;
        match &self.kind {
            ParameterKind::Integer => Ok(()),
            ParameterKind::List => f.write_str("[]"),
            ParameterKind::OneOf(alternatives) => {
                for (position, value) in alternatives.iter().enumerate() {
                    let lead = if position == 0 { " = " } else { " | " };
                    write!(f, "{lead}{value}")?;
                }
                Ok(())
            }
        }
    }
}

impl Display for TensorRef {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        if self.transposed {
            f.write_str("transpose(")?;
        }
        f.write_str(&self.name)?;
        for selection in &self.selections {
            match selection {
                Selection::Index(index) => write!(f, "[{index}]")?,
                Selection::Range(from, to) => write!(f, "[{from}..{to}]")?,
                Selection::Axes(axes) => write!(f, "[{}]", comma(axes))?,
                Selection::Part(index, of) => write!(f, "[{index} of {of}]")?,
            }
        }
        f.write_str(if self.transposed { ")" } else { "" })
    }
}

impl Display for AxisSelection {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::All => f.write_str(":"),
            Self::Index(index) => index.fmt(f),
            Self::Range(from, to) => write!(f, "{from}..{to}"),
        }
    }
}

impl Display for TransferRef {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)?;
        self.indices
            .iter()
            .try_for_each(|index| write!(f, "[{index}]"))
    }
}

impl Display for StreamRef {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Caller => f.write_str("caller"),
            Self::Pool(number) => write!(f, "pool({number})"),
            Self::High(number) => write!(f, "high({number})"),
            Self::Named(name) => f.write_str(name),
        }
    }
}

/// Binding strength of an expression's outermost operator.
fn tightness(expression: &Expr) -> usize {
    let level = match expression {
        Expr::Binary(operator, ..) => operator.level(),
        _ => None,
    };
    level.unwrap_or(Operator::LEVELS.len())
}

/// Writes a part of an expression or condition, in parentheses where it binds less tightly than what it is part of.
pub(super) fn write_part(
    part: &impl Display,
    parentheses: bool,
    f: &mut Formatter<'_>,
) -> fmt::Result {
    if parentheses {
        write!(f, "({part})")
    } else {
        part.fmt(f)
    }
}

impl Display for Expr {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(value) => value.fmt(f),
            Self::Name(name) => f.write_str(name),
            Self::Element(list, index) => write!(f, "{list}[{index}]"),
            Self::Count(list) => write!(f, "count({list})"),
            Self::Log2(a) => write!(f, "log2({a})"),
            Self::Binary(operator, a, b) if operator.level().is_none() => {
                write!(f, "{}({a}, {b})", operator.sign())
            }
            Self::Negative(a) => {
                // Without parentheses, a sign before digits is part of the number.
                let digits = matches!(**a, Self::Number(value) if value >= 0);
                f.write_str("-")?;
                // A negative operand prints its own sign, and `--1` parses as two.
                write_part(a, digits || tightness(a) < tightness(self), f)
            }
            Self::Binary(operator, a, b) => {
                let own = tightness(self);
                write_part(a, tightness(a) < own, f)?;
                write!(f, " {} ", operator.sign())?;
                write_part(b, tightness(b) <= own, f)
            }
        }
    }
}

fn tightness_of_condition(condition: &Condition) -> u8 {
    match condition {
        Condition::Or(..) => 1,
        Condition::And(..) => 2,
        Condition::Not(_) => 3,
        Condition::Compare(..) | Condition::Given(_) | Condition::Reachable(_) => 4,
    }
}

impl Display for Condition {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let own = tightness_of_condition(self);
        match self {
            Self::Compare(comparison, a, b) => write!(f, "{a} {} {b}", comparison.name()),
            Self::Given(tensor) => write!(f, "given({tensor})"),
            Self::Reachable(tensor) => write!(f, "reachable({tensor})"),
            Self::Not(a) => {
                f.write_str("not ")?;
                write_part(a, tightness_of_condition(a) < own, f)
            }
            Self::And(a, b) | Self::Or(a, b) => {
                let word = if matches!(self, Self::And(..)) {
                    "and"
                } else {
                    "or"
                };
                write_part(a, tightness_of_condition(a) < own, f)?;
                write!(f, " {word} ")?;
                write_part(b, tightness_of_condition(b) <= own, f)
            }
        }
    }
}
