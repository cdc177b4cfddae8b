//! Printing of programs.

use crate::program::expr::{Condition, Expr, Operator};
use crate::program::ir::{
    Argument, ArgumentValue, AxisSelection, Backend, Branch, Declaration, Direction, Each,
    ElementType, Loop, Order, Over, Position, Product, Program, Protocol, Role, Selection,
    Sharding, ShareItem, ShareItemKind, Statement, StatementKind, StreamRef, Subprogram, TensorRef,
    Transfer, TransferRef,
};
use crate::program::parameters::{Parameter, ParameterKind};
use crate::program::section::{Step, StepKind};
use std::fmt::{self, Display, Formatter};

/// The first line of the statement or declared transfer that starts at `position` of the program's
/// text, for messages; empty where none does.
pub fn summary(program: &Program, position: Position) -> String {
    fn of(statements: &[Statement], position: Position) -> Option<String> {
        statements.iter().find_map(|statement| {
            let inside = match &statement.kind {
                StatementKind::For(repetition) => of(&repetition.body, position),
                StatementKind::Fork { body, .. } => of(body, position),
                StatementKind::If(branch) => bodies(branch).find_map(|body| of(body, position)),
                StatementKind::Share(items) => of_share(items, position),
                StatementKind::Kernel(section) => of_steps(&section.body, position),
                _ => None,
            };
            inside.or_else(|| same(statement.position, position).then(|| head(statement)))
        })
    }
    fn of_share(items: &[ShareItem], position: Position) -> Option<String> {
        items.iter().find_map(|item| match &item.kind {
            ShareItemKind::For(repetition) => of_share(&repetition.body, position),
            ShareItemKind::If(branch) => bodies(branch).find_map(|body| of_share(body, position)),
            ShareItemKind::Transfer(transfer) => {
                same(item.position, position).then(|| transfer.to_string())
            }
            ShareItemKind::LetInteger { .. } => None,
        })
    }
    fn of_steps(steps: &[Step], position: Position) -> Option<String> {
        steps.iter().find_map(|step| {
            let inside = match &step.kind {
                StepKind::For(repetition) => of_steps(&repetition.body, position),
                StepKind::If(branch) => bodies(branch).find_map(|body| of_steps(body, position)),
                _ => None,
            };
            inside.or_else(|| same(step.position, position).then(|| head(step)))
        })
    }
    fn bodies<S>(branch: &Branch<S>) -> impl Iterator<Item = &[S]> {
        let arms = branch.arms.iter().map(|arm| &arm.body[..]);
        arms.chain([&branch.otherwise[..]])
    }
    fn same(a: Position, b: Position) -> bool {
        (a.line, a.column) == (b.line, b.column)
    }
    fn head<'a, S: 'a>(statement: &'a S) -> String
    where
        Indented<'a, S>: Display,
    {
        let text = Indented(0, statement).to_string();
        text.lines()
            .next()
            .unwrap_or("")
            .trim_end_matches(" {")
            .to_owned()
    }
    let called = program.subprograms.iter().map(|called| &called.body);
    called
        .chain([&program.body])
        .find_map(|body| of(body, position))
        .unwrap_or_default()
}

/// Something that takes whole lines, at a depth of indentation.
pub(super) struct Indented<'a, T>(pub(super) usize, pub(super) &'a T);

impl<T> Indented<'_, T> {
    pub(super) fn margin(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "{:1$}", "", self.0 * 4)
    }
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
    write!(f, "program {name}(")?;
    for (position, parameter) in parameters.iter().enumerate() {
        let lead = if position == 0 { "" } else { ", " };
        write!(f, "{lead}{parameter}")?;
    }
    f.write_str(") {\n")?;
    let mut before: Option<&StatementKind> = None;
    for statement in body {
        // Declarations stand together, and what takes several lines stands apart.
        let declares = |kind: &StatementKind| {
            matches!(
                kind,
                StatementKind::Declare(_) | StatementKind::Scratch(_) | StatementKind::Require(_)
            )
        };
        let tall = |kind: &StatementKind| {
            matches!(
                kind,
                StatementKind::For(_)
                    | StatementKind::If(_)
                    | StatementKind::Share(_)
                    | StatementKind::Fork { .. }
                    | StatementKind::Kernel(_)
                    | StatementKind::Function(_)
            )
        };
        if let Some(before) = before
            && (declares(before) != declares(&statement.kind)
                || tall(before)
                || tall(&statement.kind))
        {
            f.write_str("\n")?;
        }
        before = Some(&statement.kind);
        Indented(1, statement).fmt(f)?;
    }
    f.write_str("}\n")
}

impl Display for Indented<'_, Statement> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        self.margin(f)?;
        match &self.1.kind {
            StatementKind::Require(condition) => write!(f, "require {condition}")?,
            StatementKind::Declare(declaration) => declaration.fmt(f)?,
            StatementKind::Deallocate(name) => write!(f, "deallocate {name}")?,
            StatementKind::LetInteger { name, value } => write!(f, "let {name} = {value}")?,
            StatementKind::LetList { name, elements } => {
                write!(f, "let {name} = [{}]", List(elements))?;
            }
            StatementKind::LetTensor { name, value } => write!(f, "let {name} = {value}")?,
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
                write!(f, "{target} {sign} {op}({})", List(sources))?;
            }
            StatementKind::Collective {
                target,
                source,
                collective,
                among,
            } => {
                let (name, arguments) = (collective.name(), collective.arguments());
                write!(f, "{target} = {name}({source}{arguments})")?;
                if let Some(list) = among {
                    write!(f, " among {list}")?;
                }
            }
            StatementKind::Share(items) => {
                f.write_str("share ")?;
                block(f, self.0, items)?;
            }
            StatementKind::Post(list) => write!(f, "post {}", List(list))?,
            StatementKind::PostMatmul(each) => {
                write!(f, "post {} = {}", each.item.send, each.item.product)?;
                over(f, each.over.as_ref())?;
            }
            StatementKind::Wait(list) => write!(f, "wait {}", List(list))?,
            StatementKind::GetStream(name) => write!(f, "get_stream {name}")?,
            StatementKind::SetStream(stream) => write!(f, "set_stream {stream}")?,
            StatementKind::Synchronize(stream) => write!(f, "synchronize {stream}")?,
            StatementKind::Fork { streams, body } => {
                write!(f, "fork {} ", List(streams))?;
                block(f, self.0, body)?;
            }
            StatementKind::Call { program, arguments } => {
                write!(f, "{program}(")?;
                for (position, argument) in arguments.iter().enumerate() {
                    let lead = if position == 0 { "" } else { ", " };
                    write!(f, "{lead}{argument}")?;
                }
                f.write_str(")")?;
            }
            StatementKind::Scratch(scratch) => scratch.fmt(f)?,
            StatementKind::Function(function) => Indented(self.0, function).fmt(f)?,
            StatementKind::Kernel(section) => {
                section.fmt(f)?;
                block(f, self.0, &section.body)?;
            }
            StatementKind::InOut { tensor, part } => write!(f, "inout {tensor} = {part}")?,
            StatementKind::Expect(expectation) => expectation.fmt(f)?,
            StatementKind::ExpectRows(row) => write!(f, "expect {row}")?,
            StatementKind::For(repetition) => print_loop(f, self.0, repetition)?,
            StatementKind::If(branch) => print_branch(f, self.0, branch)?,
        }
        f.write_str("\n")
    }
}

impl Display for Indented<'_, ShareItem> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        self.margin(f)?;
        match &self.1.kind {
            ShareItemKind::Transfer(transfer) => transfer.fmt(f)?,
            ShareItemKind::LetInteger { name, value } => write!(f, "let {name} = {value}")?,
            ShareItemKind::For(repetition) => print_loop(f, self.0, repetition)?,
            ShareItemKind::If(branch) => print_branch(f, self.0, branch)?,
        }
        f.write_str("\n")
    }
}

fn block<'a, S: 'a>(f: &mut Formatter<'_>, depth: usize, body: &'a [S]) -> fmt::Result
where
    Indented<'a, S>: Display,
{
    f.write_str("{\n")?;
    body.iter()
        .try_for_each(|statement| Indented(depth + 1, statement).fmt(f))?;
    write!(f, "{:1$}}}", "", depth * 4)
}

pub(super) fn print_loop<'a, S: 'a>(
    f: &mut Formatter<'_>,
    depth: usize,
    it: &'a Loop<S>,
) -> fmt::Result
where
    Indented<'a, S>: Display,
{
    write!(f, "for {} in {}..{} ", it.index, it.from, it.to)?;
    block(f, depth, &it.body)
}

pub(super) fn print_branch<'a, S: 'a>(
    f: &mut Formatter<'_>,
    depth: usize,
    it: &'a Branch<S>,
) -> fmt::Result
where
    Indented<'a, S>: Display,
{
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

pub(super) struct List<'a, T>(pub(super) &'a [Each<T>]);

impl<T: Display> Display for List<'_, T> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        for (position, each) in self.0.iter().enumerate() {
            let lead = if position == 0 { "" } else { ", " };
            write!(f, "{lead}{}", each.item)?;
            over(f, each.over.as_ref())?;
        }
        Ok(())
    }
}

fn over(f: &mut Formatter<'_>, over: Option<&Over>) -> fmt::Result {
    match over {
        Some(over) => write!(f, " for {} in {}..{}", over.index, over.from, over.to),
        None => Ok(()),
    }
}

impl Display for Product {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Self { a, b, bias } = self;
        if b.transposed {
            let weights = TensorRef {
                transposed: false,
                ..b.clone()
            };
            write!(f, "linear({a}, {weights}")?;
            if let Some(bias) = bias {
                write!(f, ", {bias}")?;
            }
            return f.write_str(")");
        }
        write!(f, "matmul({a}, {b})")?;
        match bias {
            Some(bias) => write!(f, " + {bias}"),
            None => Ok(()),
        }
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
        over(f, self.family.as_ref())
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

impl Display for Transfer {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let (verb, to) = match self.direction {
            Direction::Send => ("send", "to"),
            Direction::Receive => ("receive", "from"),
        };
        write!(
            f,
            "{} = {verb} {} {to} {}",
            self.name, self.tensor, self.peer
        )?;
        if self.tag != Expr::Number(0) {
            write!(f, " tag {}", self.tag)?;
        }
        write!(f, " via {}", self.backend)
    }
}

impl Display for Backend {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Direct(Protocol::Get) => "get",
            Self::Direct(Protocol::Put) => "put",
            Self::Nccl => "nccl",
        })
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
                Selection::Axes(axes) => {
                    for (position, axis) in axes.iter().enumerate() {
                        f.write_str(if position == 0 { "[" } else { ", " })?;
                        match axis {
                            AxisSelection::All => f.write_str(":")?,
                            AxisSelection::Index(index) => write!(f, "{index}")?,
                            AxisSelection::Range(from, to) => write!(f, "{from}..{to}")?,
                        }
                    }
                    f.write_str("]")?;
                }
                Selection::Part(index, of) => write!(f, "[{index} of {of}]")?,
            }
        }
        f.write_str(if self.transposed { ")" } else { "" })
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

/// How tightly an expression's outermost operator binds.
fn tightness(expression: &Expr) -> u8 {
    match expression {
        Expr::Binary(Operator::Xor, ..) => 1,
        Expr::Binary(Operator::ShiftLeft | Operator::ShiftRight, ..) => 2,
        Expr::Binary(Operator::Add | Operator::Subtract, ..) => 3,
        Expr::Binary(Operator::Multiply | Operator::Divide | Operator::Remainder, ..) => 4,
        Expr::Binary(Operator::Min | Operator::Max | Operator::Part, ..)
        | Expr::Number(_)
        | Expr::Name(_)
        | Expr::Element(..)
        | Expr::Count(_)
        | Expr::Log2(_)
        | Expr::Negative(_) => 5,
    }
}

impl Display for Expr {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let within = |f: &mut Formatter<'_>, part: &Self, parentheses: bool| {
            if parentheses {
                write!(f, "({part})")
            } else {
                part.fmt(f)
            }
        };
        match self {
            Self::Number(value) => value.fmt(f),
            Self::Name(name) => f.write_str(name),
            Self::Element(list, index) => write!(f, "{list}[{index}]"),
            Self::Count(list) => write!(f, "count({list})"),
            Self::Log2(a) => write!(f, "log2({a})"),
            Self::Binary(operator @ (Operator::Min | Operator::Max | Operator::Part), a, b) => {
                write!(f, "{}({a}, {b})", operator.sign())
            }
            Self::Negative(a) => {
                // Without parentheses, a sign before digits is part of the number.
                let digits = matches!(**a, Self::Number(value) if value >= 0);
                f.write_str("-")?;
                within(f, a, digits || tightness(a) < tightness(self))
            }
            Self::Binary(operator, a, b) => {
                let own = tightness(self);
                within(f, a, tightness(a) < own)?;
                write!(f, " {} ", operator.sign())?;
                within(f, b, tightness(b) <= own)
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
        let within = |f: &mut Formatter<'_>, part: &Self, parentheses: bool| {
            if parentheses {
                write!(f, "({part})")
            } else {
                part.fmt(f)
            }
        };
        let own = tightness_of_condition(self);
        match self {
            Self::Compare(comparison, a, b) => write!(f, "{a} {} {b}", comparison.sign()),
            Self::Given(tensor) => write!(f, "given({tensor})"),
            Self::Reachable(tensor) => write!(f, "reachable({tensor})"),
            Self::Not(a) => {
                f.write_str("not ")?;
                within(f, a, tightness_of_condition(a) < own)
            }
            Self::And(a, b) | Self::Or(a, b) => {
                let word = if matches!(self, Self::And(..)) {
                    "and"
                } else {
                    "or"
                };
                within(f, a, tightness_of_condition(a) < own)?;
                write!(f, " {word} ")?;
                within(f, b, tightness_of_condition(b) <= own)
            }
        }
    }
}
