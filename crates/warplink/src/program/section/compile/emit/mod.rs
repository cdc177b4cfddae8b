//! Emits a section as a kernel in CUDA C++. The only folder that knows that language; its interface is [`kernel`].

mod code;
mod divided;
mod expression;
mod kernel;
mod list;
mod loops;
mod meeting;
mod names;
mod pair;
mod passes;
mod rows;
mod value;
mod values;

use super::hazard::{self, Barriers};
use super::scope::Scope;
use crate::device::ReduceOp;
use crate::error::Error;
use crate::named::comma;
use crate::program::construct::{Branch, NodeKind, Selection, TensorRef};
use crate::program::expr::{self, Expr, PART_UNIT};
use crate::program::section::{
    Literal, Move, Otherwise, Packing, Place, ReduceOperator, SectionInstance, Source, Step,
    StepKind, Verb,
};
use crate::program::site::Position;
use code::{Code, bare};
use expression::is_of_epoch;
use names::{element_name, operator_name};
use std::collections::BTreeSet;

pub(super) use kernel::kernel;
pub(super) use pair::pair;

/// Maximum number of places in a step, and of ranks: each needs one bit of a 32-bit word.
const MAX_PLACES: usize = 32;

/// Maximum number of lines emitted for a body, including discarded attempts. Bounds the time to generate a kernel.
const MAX_LINES: usize = 1 << 16;

/// Reason why no text is generated.
#[derive(Debug)]
enum Refusal {
    /// The text depends on the value of a loop index, so the loop has to be written out.
    Varies(Error),
    Final(Error),
}

impl From<Refusal> for Error {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::Varies(error) | Refusal::Final(error) => error,
        }
    }
}

type Result<T> = std::result::Result<T, Refusal>;

/// Alias of a part of a tensor.
#[derive(Clone, Debug)]
struct Alias {
    name: String,
    part: Part,
}

/// A part of a tensor, as an expression of the kernel.
#[derive(Clone, Debug)]
struct Part {
    text: String,
    tensor: usize,
    axes: usize,
    /// Whether it is aligned to 16 bytes if the tensor is.
    aligned: bool,
    /// Whether it is selected by indices only.
    indexed: bool,
}

/// An operand of a step.
#[derive(Debug)]
struct EmittedOperand {
    /// Base address in the rank's memory.
    base: String,
    /// The rank, if it is a constant.
    rank: Option<i64>,
    part: Part,
    packing: Packing,
    /// Condition under which it is used, and the number that replaces it otherwise.
    replaced: Option<(String, Literal)>,
}

/// A word that names a row, read into a constant.
#[derive(Debug)]
struct RowWord {
    name: String,
    value: String,
}

/// Writes the body of a kernel.
struct Emitter<'s> {
    instance: &'s SectionInstance,
    /// For each tensor, whether it and its rows are aligned to 16 bytes on every rank.
    aligned: &'s [bool],
    barriers: Barriers,
    scope: Scope,
    aliases: Vec<Alias>,
    position: Position,
    /// Remaining line budget.
    lines: usize,
    /// Tensors announced by the lanes.
    announced: Vec<usize>,
    /// Whether the lane waits for signals.
    waits: bool,
    signals: bool,
    /// Whether several lanes may increment the same signal word at a peer, because a signal names another lane.
    shares_words: bool,
    /// Whether the kernel records the start time of each step.
    traced: bool,
    /// Loops whose iterations parts of the lane have to themselves.
    divided: BTreeSet<usize>,
    /// Whether the current step is in one of these.
    in_parts: bool,
    /// Whether each thread of a warp has iterations of the loop around a step.
    by_thread: bool,
    /// Whether the lane may have accesses in flight that its next announcement has to follow.
    accesses: bool,
    /// Whether the kernel is of messages between pairs of ranks.
    paired: bool,
    /// Words that name rows of the current step's operands, and the number of those read so far.
    row_words: Vec<RowWord>,
    rows: usize,
    /// Number of steps so far that search for a word; each of them resumes where its last search ended.
    searches: usize,
}

impl<'s> Emitter<'s> {
    /// `divided`: loops whose iterations may be divided among parts of a lane.
    fn new(
        instance: &'s SectionInstance,
        aligned: &'s [bool],
        scope: Scope,
        mut divided: BTreeSet<usize>,
    ) -> Self {
        Self {
            instance,
            aligned,
            barriers: hazard::barriers(instance, aligned, &scope, &mut divided),
            divided,
            in_parts: false,
            scope,
            aliases: Vec::new(),
            announced: instance.announced(),
            position: Position::default(),
            lines: MAX_LINES,
            waits: false,
            signals: false,
            shares_words: meeting::names_lanes(&instance.section.body),
            traced: false,
            by_thread: false,
            accesses: false,
            paired: false,
            row_words: Vec::new(),
            rows: 0,
            searches: 0,
        }
    }

    /// Whether 32-bit integers are enough for all emitted expressions.
    fn is_narrow(&self) -> bool {
        self.scope.is_narrow()
    }

    /// The text of `steps`.
    fn body(&mut self, code: &mut Code, steps: &[Step]) -> Result<()> {
        let (integers, aliases) = (self.scope.len(), self.aliases.len());
        let done = self.steps(code, steps);
        self.scope.truncate(integers);
        self.aliases.truncate(aliases);
        done
    }

    /// Charges lines to the budget before they are written. Bounds the copies made by nested loops.
    fn count(&mut self, lines: usize) -> Result<()> {
        let Some(left) = self.lines.checked_sub(lines) else {
            let text = format!("a kernel of more than {MAX_LINES} lines");
            let help =
                "use fewer steps, and loops whose lists and sources do not depend on their indices";
            return Err(self.refuse(text, help));
        };
        self.lines = left;
        Ok(())
    }

    fn step(&mut self, code: &mut Code, step: &Step) -> Result<()> {
        self.position = step.position;
        self.count(1)?;
        match &step.kind {
            NodeKind::LetInteger { name, value } => {
                let (text, known) = (self.integer(value)?, self.scope.value(value));
                let range = self.scope.range(value);
                // Computed where it is used: the kernel would wait for its epoch here, before it branches and loads data.
                if is_of_epoch(value) {
                    self.scope.bind_within(name, text, known, range);
                    return Ok(());
                }
                let spelled = Scope::spell(name);
                // `constexpr` lets template arguments and unrolled loops depend on it.
                let constant = known.map_or("const", |_| "constexpr");
                code.line(format!("{constant} Index {spelled} = {};", bare(&text)));
                self.scope.bind_within(name, spelled, known, range);
            }
            NodeKind::LetTensor { name, value } => {
                let mut part = self.part(value)?;
                let spelled = Scope::spell(name);
                code.line(format!("const auto {spelled} = {};", part.text));
                part.text = spelled;
                let name = name.clone();
                self.aliases.push(Alias { name, part });
            }
            NodeKind::For(it) => self.repeat(code, it)?,
            NodeKind::If(branch) => self.choose(code, branch)?,
            NodeKind::Do(kind) => self.action(code, step, kind)?,
        }
        Ok(())
    }

    fn action(&mut self, code: &mut Code, step: &Step, kind: &StepKind) -> Result<()> {
        if self.traced {
            let Position { line, column } = step.position;
            let place = u64::from(line) << 32 | u64::from(column);
            code.line(format!("times.step({place:#x}ull);"));
        }
        if self.barriers.contains(&hazard::id(step)) {
            code.line("self.sync();");
        }
        // Integers are compared with their bounds, so their loads are complete before anything else.
        self.accesses |= !matches!(
            kind,
            StepKind::Announce(_) | StepKind::Agree(_) | StepKind::Value(_)
        );
        match kind {
            StepKind::Move(it) => self.movement(code, it)?,
            StepKind::Apply(it) => self.applied(code, it)?,
            StepKind::Value(it) => self.value(code, it)?,
            StepKind::Store(it) => self.store(code, it)?,
            StepKind::Signal(receivers) => {
                code.line(format!("// {}: signal", self.position));
                let words = self.expand(receivers, |emitter, receiver| {
                    let rank = emitter.integer(&receiver.rank)?;
                    let lane = receiver.lane.as_ref().map(|lane| emitter.integer(lane));
                    Ok(emitter.receiver(&rank, lane.transpose()?.as_deref()))
                })?;
                let words = words.into_iter().collect::<Result<Vec<_>>>()?;
                self.signal(code, words)?;
            }
            StepKind::Wait(ranks) => {
                code.line(format!("// {}: wait", self.position));
                let ranks = self.ranks(ranks)?;
                self.wait(code, &ranks)?;
            }
            StepKind::Barrier => {
                code.line(format!("// {}: barrier", self.position));
                let (rank, world) = (self.instance.rank, self.instance.world);
                let peers = (1..world).map(|r| ((rank + r) % world) as i64);
                let peers: Vec<_> = peers.map(|peer| (peer.to_string(), Some(peer))).collect();
                let words = peers.iter().map(|(peer, _)| self.receiver(peer, None));
                self.signal(code, words.collect())?;
                self.wait(code, &peers)?;
            }
            StepKind::Announce(it) => {
                code.line(format!("// {}: announce {it}", self.position));
                self.announce(code, it)?;
            }
            StepKind::Agree(it) => {
                code.line(format!("// {}: agree {it}", self.position));
                self.agree(code, it)?;
            }
        }
        Ok(())
    }

    fn choose(&mut self, code: &mut Code, branch: &Branch<StepKind>) -> Result<()> {
        let mut open = false;
        // Each arm starts from the state before the branch; afterwards either may have run.
        let before = self.accesses;
        let mut after = before;
        for arm in &branch.arms {
            self.accesses = before;
            self.position = arm.position;
            let holds = self.scope.holds(&arm.condition);
            let opening = match holds {
                Some(false) => continue,
                Some(true) => String::new(),
                None => {
                    let condition = self.scope.condition(&arm.condition);
                    let condition = condition.map_err(|name| self.unknown(&name))?;
                    format!("if ({}) ", bare(&condition))
                }
            };
            code.alternative(open, &opening);
            open = true;
            self.body(code, &arm.body)?;
            after |= self.accesses;
            if holds == Some(true) {
                self.accesses = after;
                code.close("}");
                return Ok(());
            }
        }
        if !branch.otherwise.is_empty() {
            self.accesses = before;
            code.alternative(open, "");
            open = true;
            self.body(code, &branch.otherwise)?;
            after |= self.accesses;
        }
        self.accesses = after;
        if open {
            code.close("}");
        }
        Ok(())
    }

    fn movement(&mut self, code: &mut Code, it: &Move) -> Result<()> {
        let targets = self.expand(&it.targets, |emitter, place| emitter.operand(place))?;
        let sources = self.expand(&it.sources, |emitter, source| emitter.source(source))?;
        let (targets, sources) = (targets.into_iter(), sources.into_iter());
        let targets = targets.collect::<Result<Vec<_>>>()?;
        let sources = sources.collect::<Result<Vec<_>>>()?;
        self.check(&targets, &sources)?;
        if targets.is_empty() {
            if sources.iter().any(|source| source.packing.is_packets()) {
                let text = "packets are read, and stored nowhere";
                return Err(
                    self.refuse(text, "name a target, since the lane does not wait for them")
                );
            }
            return Ok(());
        }
        if sources.iter().any(|source| source.replaced.is_some()) {
            let text = "a number in place of a source of a step that is no function of rows";
            return Err(self.refuse(text, "give the number to a function of rows"));
        }
        self.count(targets.len() + sources.len())?;
        let Some(first) = sources.first() else {
            return Err(self.refuse("a reduction of nothing", "name at least one source"));
        };
        let element = element_name(self.instance.tensors[first.part.tensor].dtype);
        // Packets are aligned by construction.
        let aligned = targets.iter().chain(&sources).all(|operand| {
            operand.packing.is_packets()
                || (operand.part.aligned && self.aligned[operand.part.tensor])
        });
        let call = match &it.verb {
            Verb::Reduce(operator) => {
                let operator = self.operator(operator)?;
                format!("reduce<{element}, {}, {aligned}>", operator_name(operator))
            }
            Verb::Put | Verb::Get | Verb::Copy => {
                format!("copy<{element}, {aligned}>")
            }
        };
        code.block(format!("{{  // {}: {it}", self.position), |code| {
            self.declare_rows(code);
            let mut views = Vec::new();
            let named = [("to", &targets), ("from", &sources)];
            for (name, operands) in named {
                for (number, operand) in operands.iter().enumerate() {
                    let view = format!("{name}{number}");
                    code.line(format!("const auto {view} = {};", operand.part.text));
                    views.push(view);
                }
            }
            let (to, from) = views.split_at(targets.len());
            code.line(format!(
                "{call}(self, {}, {}, shortest({}));",
                self.places(&element, &sources, from),
                self.places(&element, &targets, to),
                comma(&views)
            ));
            Ok(())
        })
    }

    fn operator(&self, operator: &ReduceOperator) -> Result<ReduceOp> {
        match operator {
            // The text cannot set a factor, so it is 1.
            ReduceOperator::Fixed(operator) if operator.factor().is_some() => Ok(ReduceOp::Sum),
            ReduceOperator::Fixed(operator) => Ok(*operator),
            ReduceOperator::Parameter(name) => {
                let value = self.instance.operators.get(name).copied();
                value.ok_or_else(|| self.unknown(name))
            }
        }
    }

    /// Rejects operand combinations that the called functions do not support.
    fn check(&self, targets: &[EmittedOperand], sources: &[EmittedOperand]) -> Result<()> {
        if targets.len() > MAX_PLACES || sources.len() > MAX_PLACES {
            let text = format!(
                "a step of {} targets and {} sources; expected at most {MAX_PLACES} of each",
                targets.len(),
                sources.len()
            );
            return Err(self.refuse(text, "split the step"));
        }
        let mut packed = None;
        for operand in targets.iter().chain(sources) {
            let size = self.instance.tensors[operand.part.tensor].dtype.size();
            match operand.packing {
                Packing::Plain => continue,
                Packing::Packets8 if size > 4 => {
                    let text = "packets8 hold 4 bytes of data; an element has 8";
                    return Err(self.refuse(text, "use packets16"));
                }
                Packing::Packets8 | Packing::Packets16 | Packing::Packets128 => {}
            }
            if *packed.get_or_insert(operand.packing) != operand.packing {
                let text = "a step with packets of two sizes; expected one";
                return Err(self.refuse(text, "use one packing for all operands of a step"));
            }
        }
        Ok(())
    }

    /// Expression for the `Places` of operands whose parts are in variables `views`.
    fn places(&self, element: &str, operands: &[EmittedOperand], views: &[String]) -> String {
        let mut mask = 0_u32;
        let mut packet = 16;
        // A step over all ranks stores to, or loads from, the next rank first, so that ranks do not all use the same
        // link at once.
        let next = (self.instance.rank + 1) % self.instance.world;
        let first = operands
            .iter()
            .position(|operand| operand.rank == i64::try_from(next).ok())
            .unwrap_or(0);
        let addresses = operands.iter().zip(views).enumerate();
        let addresses = addresses.map(|(number, (operand, view))| {
            if operand.packing.is_packets() {
                mask |= 1 << number;
                packet = operand.packing.packet().1;
            }
            let function = match operand.packing {
                Packing::Plain => "plain",
                Packing::Packets8 | Packing::Packets16 => "packets",
                Packing::Packets128 => "lines",
            };
            let address = format!("{function}<{element}>({}, {view})", operand.base);
            match &operand.replaced {
                // The functions of rows take address 0 for an absent source.
                Some((condition, _)) => format!("{} ? {address} : 0", bare(condition)),
                None => address,
            }
        });
        let addresses = comma(addresses);
        let count = operands.len();
        let further = match (mask, first) {
            (0, 0) => String::new(),
            (_, 0) => format!(", {mask:#x}, {packet}"),
            _ => format!(", {mask:#x}, {packet}, {first}"),
        };
        format!("Places<{count}{further}>{{{{{addresses}}}}}")
    }

    fn source(&mut self, source: &Source) -> Result<EmittedOperand> {
        let Some((condition, otherwise)) = &source.otherwise else {
            return self.operand(&source.place);
        };
        let other = match otherwise {
            Otherwise::Place(other) => other,
            Otherwise::Number(number) => {
                let words = self.row_words.len();
                let mut operand = self.operand(&source.place)?;
                if self.scope.holds(condition) != Some(true) {
                    let text = self.scope.condition(condition);
                    let text = text.map_err(|name| self.unknown(&name))?;
                    // Where a number replaces the row, there may be no word to name it.
                    for word in &mut self.row_words[words..] {
                        word.value = format!("{} ? {} : 0", bare(&text), word.value);
                    }
                    operand.replaced = Some((text, *number));
                }
                return Ok(operand);
            }
        };
        match self.scope.holds(condition) {
            Some(true) => self.operand(&source.place),
            Some(false) => self.operand(other),
            None => {
                let text = format!(
                    "the data read depends on '{condition}', which is not constant in the kernel"
                );
                let help =
                    "use numbers, rank, world and indices of lists, or an 'if' around the step";
                Err(Refusal::Varies(self.error(text, help)))
            }
        }
    }

    fn operand(&mut self, place: &Place) -> Result<EmittedOperand> {
        let part = self.part(&place.tensor)?;
        let tensor = &self.instance.tensors[part.tensor];
        let (rank, known) = match &place.on {
            None => ("rank".to_owned(), i64::try_from(self.instance.rank).ok()),
            Some(rank) => (self.integer(rank)?, self.scope.value(rank)),
        };
        let scratch = self.instance.scratch_of(part.tensor);
        let heard = place.on.as_ref().and_then(|_| {
            let mut announced = self.announced.iter();
            announced.position(|tensor| *tensor == part.tensor)
        });
        let base = match heard {
            // At the address that the peer announced in this launch, which may differ from the one at binding.
            Some(number) => format!("located[{number}].at[{}]", bare(&rank)),
            None => format!("at.{}[{}]", Scope::spell(&tensor.name), bare(&rank)),
        };
        Ok(EmittedOperand {
            base,
            rank: known,
            packing: scratch.map_or(Packing::Plain, |scratch| scratch.packing),
            part,
            replaced: None,
        })
    }

    fn part(&mut self, reference: &TensorRef) -> Result<Part> {
        let mut part = self.whole(&reference.name)?;
        if reference.transposed {
            let text = format!("{reference} is transposed");
            return Err(self.refuse(text, "select elements in the order of memory"));
        }
        for selection in &reference.selections {
            if part.axes == 0 {
                let text = format!("{reference} has more selections than axes");
                return Err(self.refuse(text, "select fewer"));
            }
            let text = match selection {
                Selection::Index(index) => {
                    let index = match index {
                        Expr::Element(words, at) => self.row(words, at, &part)?,
                        index => self.integer(index)?,
                    };
                    part.axes -= 1;
                    format!("index({})", bare(&index))
                }
                Selection::Range(from, to) => {
                    part.indexed = false;
                    // `aligned` of a tensor covers its rows, so a range of rows keeps it; a range of elements may
                    // start anywhere.
                    part.aligned &= part.axes > 1;
                    let (from, to) = (self.integer(from)?, self.integer(to)?);
                    format!("range({}, {})", bare(&from), bare(&to))
                }
                Selection::Part(index, parts) => {
                    part.indexed = false;
                    // The kernel computes this product and the start of a part, which is smaller than the product
                    // plus the extent.
                    let unit = Box::new(Expr::Number(PART_UNIT));
                    let units =
                        Expr::Binary(expr::Operator::Multiply, unit, Box::new(parts.clone()));
                    self.scope.range(&units);
                    let (index, parts) = (self.integer(index)?, self.integer(parts)?);
                    format!("part({}, {})", bare(&index), bare(&parts))
                }
                Selection::Axes(_) => {
                    let text = format!("{reference} selects on several axes at once");
                    return Err(self.refuse(text, "select on one axis after another"));
                }
            };
            part.text = format!("{}.{text}", part.text);
        }
        Ok(part)
    }

    fn integer(&self, expression: &Expr) -> Result<String> {
        let text = self.scope.integer(expression);
        text.map_err(|name| self.unknown(&name))
    }

    fn refuse(&self, text: impl Into<String>, help: &'static str) -> Refusal {
        Refusal::Final(self.error(text, help))
    }

    fn error(&self, text: impl Into<String>, help: &'static str) -> Error {
        let operation = format!("compile a kernel section, {}", self.position);
        Error::unsupported(text.into())
            .with_operation(operation)
            .with_help(help)
    }
}
