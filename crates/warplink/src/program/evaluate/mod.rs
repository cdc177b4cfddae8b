//! The meaning of a program: its outputs, computed without a device.
//!
//! The operations of all ranks are executed serially, in an order in which the verifier executed them; a program that
//! passes gives the same result in every order. Values are `f64` with a bound on a device's deviation, because the
//! program specifies neither rounding nor the order of additions.

mod collective;
mod compare;
mod elementwise;
mod expect;
mod kernel;
mod rows;
mod value;

pub use compare::Comparison;

use super::area::Area;
use super::diagnostic::{Diagnostic, refused};
use super::ir::{Direction, Program, Role};
use super::parameters::Parameters;
use super::rank_program::{
    OperationKind, Range, RankProgram, TensorId, TensorInstance, TransferId,
};
use super::section::{MAX_PERIOD, common_multiple};
use super::unroll::unroll;
use super::verify::{Meetings, order};
use crate::device::MatmulSpec;
use crate::dtype::DType;
use crate::error::{Error, Rank, Result};
use collective::Gathering;
use kernel::Workspace;
use std::borrow::Cow;
use std::collections::{HashMap, VecDeque};
use value::{BoundedValue, Made};

/// Cost of an evaluation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Effort {
    /// Elements of all tensors of all ranks.
    pub elements: u128,
    /// Multiplications, additions, and copied elements.
    pub steps: u128,
}

impl Effort {
    /// Limit for an evaluation in a few seconds and less than 200 MB.
    pub const LIMIT: Self = Self {
        elements: 1 << 22,
        steps: 1 << 30,
    };

    /// Whether it is at most `limit`.
    pub const fn is_within(&self, limit: &Self) -> bool {
        self.elements <= limit.elements && self.steps <= limit.steps
    }
}

/// Programs of all ranks, ready for evaluation.
#[derive(Debug)]
pub struct Evaluator {
    /// Name of the program.
    name: String,
    ranks: Vec<RankProgram>,
    /// A valid serial order of the operations.
    order: Vec<(Rank, usize)>,
    /// For each rank and transfer, the peer's transfer.
    partners: Vec<Vec<TransferId>>,
    /// Collectives and kernels with their members.
    meetings: Meetings,
    /// The program, its streams and parameters, where expected values depend on integers in inputs.
    text: Option<(Program, usize, Parameters)>,
}

/// Values of all tensors after a run.
#[derive(Debug)]
pub struct Values {
    tensors: Vec<Vec<Tensor>>,
}

/// Elements of a tensor.
#[derive(Debug)]
struct Tensor {
    dtype: DType,
    values: Vec<BoundedValue>,
}

impl Evaluator {
    /// Unrolls `program` for all ranks and finds an order for its operations.
    ///
    /// # Errors
    /// [`ErrorKind::Verification`](crate::ErrorKind::Verification) if the ranks' programs do not match, or deadlock.
    pub fn new(
        program: &Program,
        world: usize,
        streams: usize,
        parameters: &Parameters,
    ) -> Result<Self> {
        let ranks = (0..world)
            .map(|rank| unroll(program, rank, world, streams, parameters))
            .collect::<Result<Vec<_>>>()?;
        let refuse = |diagnostics: Vec<Diagnostic>| refused(&program.name, &diagnostics);
        let order = order(program, &ranks).map_err(refuse)?;
        let words = ranks.iter().any(|rank| rank.expects_words);
        Ok(Self {
            name: program.name.clone(),
            ranks,
            order: order.operations,
            partners: order.partners,
            meetings: order.meetings,
            // Only then is the text needed again: expectations with integers read from memory are unrolled for each
            // run's inputs.
            text: words.then(|| (program.clone(), streams, parameters.clone())),
        })
    }

    /// The same evaluator with announced tensors of these names treated as unreachable by kernels.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) for a name that no kernel announces.
    pub fn without_reaching(mut self, names: &[String]) -> Result<Self> {
        for program in &mut self.ranks {
            program.withhold(names)?;
        }
        Ok(self)
    }

    /// Program of each rank.
    pub fn ranks(&self) -> &[RankProgram] {
        &self.ranks
    }

    /// Whether a run may read scratch contents left by earlier runs, which an evaluation does not know.
    pub fn keeps(&self) -> bool {
        let mut scratch = self.ranks.iter().flat_map(|program| &program.scratch);
        scratch.any(|scratch| scratch.persistent)
    }

    /// Number of runs after which kernels repeat what they do, which depends on the epoch. A program that has not passed
    /// the verifier may repeat later.
    pub fn period(&self) -> u64 {
        let sections = self.ranks.iter().flat_map(RankProgram::sections);
        sections.fold(1, |period, section| {
            common_multiple(period, section.period).min(MAX_PERIOD)
        })
    }

    /// Cost of the evaluation of one run.
    pub fn effort(&self) -> Effort {
        let tensors = self.ranks.iter().flat_map(|program| &program.tensors);
        let elements = tensors.map(|t| (t.bytes / t.dtype.size()) as u128).sum();
        let operations = self.ranks.iter().flat_map(|program| {
            let operations = program.operations.iter();
            operations.map(move |operation| steps_of(program, &operation.kind))
        });
        Effort {
            elements,
            steps: operations.sum::<u128>() + self.expected_steps(),
        }
    }

    /// Evaluates the first run; `input` returns the bytes of each rank's inputs.
    ///
    /// # Errors
    /// [`ErrorKind::Verification`](crate::ErrorKind::Verification) if an output violates an expectation of the program.
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) if `input` returns another length than the
    /// tensor's.
    pub fn run(
        &self,
        input: impl FnMut(Rank, TensorId, &TensorInstance) -> Vec<u8>,
    ) -> Result<Values> {
        let values = self.values(0, input)?;
        match &self.unmet(&values)[..] {
            [] => Ok(values),
            unmet => Err(refused(&self.name, unmet)),
        }
    }

    /// Evaluates as many runs as kernels distinguish by the epoch, [`period`](Self::period) of them, each like
    /// [`run`](Self::run); returns a diagnostic for each output that violates an expectation in the first run in which any
    /// does.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) if `input` returns another length than the
    /// tensor's.
    pub fn violations(
        &self,
        mut input: impl FnMut(Rank, TensorId, &TensorInstance) -> Vec<u8>,
    ) -> Result<Vec<Diagnostic>> {
        for run in 0..self.period() {
            let unmet = self.unmet(&self.values(run, &mut input)?);
            if !unmet.is_empty() {
                return Ok(unmet);
            }
        }
        Ok(Vec::new())
    }

    /// Values after run `run`, of programs that keep nothing from earlier ones.
    fn values(
        &self,
        run: u64,
        mut input: impl FnMut(Rank, TensorId, &TensorInstance) -> Vec<u8>,
    ) -> Result<Values> {
        let mut tensors = Vec::with_capacity(self.ranks.len());
        for (rank, program) in self.ranks.iter().enumerate() {
            let mut own = Vec::with_capacity(program.tensors.len());
            for (id, instance) in program.tensors.iter().enumerate() {
                let values = if instance.role == Role::Input {
                    let bytes = input(rank, id, instance);
                    if bytes.len() != instance.bytes {
                        return Err(Error::invalid(format!(
                            "'{}' has {} bytes; expected {}",
                            instance.name,
                            bytes.len(),
                            instance.bytes
                        )));
                    }
                    let exact = instance.dtype.decode(&bytes).enumerate();
                    let input = |(index, value): (usize, f64)| BoundedValue {
                        // Distinct for every element of every input; larger tensors are beyond the evaluator's limits
                        // anyway.
                        made: Made::element((rank as u64) << 48 ^ (id as u64) << 36 ^ index as u64),
                        ..BoundedValue::exact(value)
                    };
                    exact.map(input).collect()
                } else {
                    vec![BoundedValue::UNKNOWN; instance.bytes / instance.dtype.size()]
                };
                own.push(Tensor {
                    dtype: instance.dtype,
                    values,
                });
            }
            tensors.push(own);
        }
        let mut run = Evaluation {
            evaluator: self,
            memory: Values { tensors },
            sent: HashMap::new(),
            taken: HashMap::new(),
            gatherings: HashMap::new(),
            workspace: Workspace::new(&self.ranks, run),
        };
        for &(rank, operation) in &self.order {
            run.perform(rank, operation)?;
        }
        Ok(run.memory)
    }
}

impl Values {
    /// Compares a tensor's contents after a run with their expected values.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) for a tensor that does not exist, or another
    /// length.
    pub fn compare(&self, rank: Rank, tensor: TensorId, bytes: &[u8]) -> Result<Comparison> {
        let tensor = self.tensors.get(rank).and_then(|own| own.get(tensor));
        let expected = tensor
            .filter(|tensor| tensor.values.len() * tensor.dtype.size() == bytes.len())
            .ok_or_else(|| Error::invalid("no tensor of this length to compare with"))?;
        let found = expected.dtype.decode(bytes);
        Ok(Comparison::of(expected.values.iter().zip(found)))
    }

    fn read(&self, rank: Rank, range: &Range) -> &[BoundedValue] {
        let tensor = &self.tensors[rank][range.tensor];
        &tensor.values[elements(tensor.dtype, range)]
    }

    /// Values of an area, in the order of its axes.
    fn gather(&self, rank: Rank, area: &Area) -> Cow<'_, [BoundedValue]> {
        if area.is_contiguous() {
            return Cow::Borrowed(self.read(rank, &area.span));
        }
        let tensor = &self.tensors[rank][area.span.tensor];
        let places = places(tensor.dtype, area);
        Cow::Owned(places.map(|place| tensor.values[place]).collect())
    }

    /// Stores the values of an area, rounded to the tensor's type.
    fn scatter(&mut self, rank: Rank, area: &Area, values: &[BoundedValue]) {
        if area.is_contiguous() {
            return self.write(rank, &area.span, values);
        }
        let tensor = &mut self.tensors[rank][area.span.tensor];
        let dtype = tensor.dtype;
        for (place, value) in places(dtype, area).zip(values) {
            tensor.values[place] = value.stored(dtype);
        }
    }

    /// Stores values, rounded to the tensor's type.
    fn write(&mut self, rank: Rank, range: &Range, values: &[BoundedValue]) {
        let tensor = &mut self.tensors[rank][range.tensor];
        let dtype = tensor.dtype;
        let places = &mut tensor.values[elements(dtype, range)];
        for (place, value) in places.iter_mut().zip(values) {
            *place = value.stored(dtype);
        }
    }

    /// Copies values without rounding.
    fn copy(&mut self, (to, target): (Rank, &Range), (from, source): (Rank, &Range)) {
        let values = self.read(from, source).to_vec();
        let tensor = &mut self.tensors[to][target.tensor];
        let places = elements(tensor.dtype, target);
        // Without rounding: a copy moves bits, and both ends have one type.
        tensor.values[places].copy_from_slice(&values);
    }
}

/// A run in progress.
struct Evaluation<'a> {
    evaluator: &'a Evaluator,
    memory: Values,
    /// Data that the engine has sent to a rank's receive and not delivered.
    sent: HashMap<(Rank, TransferId), VecDeque<Vec<BoundedValue>>>,
    /// Number of receives that completed before their sends.
    taken: HashMap<(Rank, TransferId), usize>,
    /// Collectives that not all ranks have completed.
    gatherings: HashMap<usize, Gathering>,
    /// Persistent state of kernels.
    workspace: Workspace<'a>,
}

impl Evaluation<'_> {
    fn perform(&mut self, rank: Rank, operation: usize) -> Result<()> {
        match &self.evaluator.ranks[rank].operations[operation].kind {
            OperationKind::Allocate(_)
            | OperationKind::Deallocate(_)
            | OperationKind::Share(_)
            | OperationKind::Wait(_)
            | OperationKind::Synchronize(_) => {}
            OperationKind::Zero(range) => {
                let dtype = self.evaluator.ranks[rank].tensors[range.tensor].dtype;
                let zeros = vec![BoundedValue::exact(0.0); range.bytes / dtype.size()];
                self.memory.write(rank, range, &zeros);
            }
            OperationKind::Copy { target, source } => {
                self.memory.copy((rank, target), (rank, source));
            }
            OperationKind::Matmul(it) => {
                let operands = (&it.a, &it.b, it.bias.as_ref());
                self.matmul(rank, &it.spec, operands, (rank, &it.c));
            }
            OperationKind::Elementwise(it) => {
                let sources = it.sources.iter();
                let sources = sources.map(|area| self.memory.gather(rank, area));
                let sources: Vec<Cow<'_, [BoundedValue]>> = sources.collect();
                let values = elementwise::combined(it.op, it.dtype, &sources);
                self.memory.scatter(rank, &it.target, &values);
            }
            OperationKind::Post(group) => self.post(rank, group),
            OperationKind::PostMatmul(it) => {
                let b = Area::from(it.b);
                for (&id, a) in it.group.iter().zip(&it.a) {
                    let (peer, partner) = self.partner(rank, id);
                    let target = self.evaluator.ranks[peer].transfers[partner].range;
                    let operands = (&(*a).into(), &b, it.bias.as_ref());
                    self.matmul(rank, &it.spec, operands, (peer, &target.into()));
                }
            }
            OperationKind::Collective(it) => {
                let (ranks, meetings) = (&self.evaluator.ranks, &self.evaluator.meetings);
                let Some(number) = meetings.number(rank, operation) else {
                    return Ok(());
                };
                let meeting = &meetings.all[number];
                let memory = &self.memory;
                // When the first rank completes it, all ranks have arrived, and none can have changed its source yet.
                let gathering = self
                    .gatherings
                    .entry(number)
                    .or_insert_with(|| Gathering::new(ranks, memory, meeting));
                let left = gathering.leave(&it.collective, it.dtype, meeting, rank);
                if gathering.is_over() {
                    self.gatherings.remove(&number);
                }
                if let Some(values) = left {
                    self.memory.write(rank, &it.target, &values);
                }
            }
            OperationKind::Kernel(_) => self.launch(rank)?,
        }
        Ok(())
    }

    fn partner(&self, rank: Rank, id: TransferId) -> (Rank, TransferId) {
        let peer = self.evaluator.ranks[rank].transfers[id].peer;
        (peer, self.evaluator.partners[rank][id])
    }

    fn post(&mut self, rank: Rank, group: &[TransferId]) {
        let ranks = &self.evaluator.ranks;
        for &id in group {
            let transfer = &ranks[rank].transfers[id];
            let (peer, partner) = self.partner(rank, id);
            let theirs = &ranks[peer].transfers[partner];
            if transfer.is_engine() {
                self.exchange(rank, id);
            } else if transfer.initiates() {
                let (own, other) = ((rank, &transfer.range), (peer, &theirs.range));
                match transfer.direction {
                    Direction::Send => self.memory.copy(other, own),
                    Direction::Receive => self.memory.copy(own, other),
                }
            }
        }
    }

    /// Executes one end of a transfer through the engine. A receive may complete before its send does, which has
    /// begun by then.
    fn exchange(&mut self, rank: Rank, id: TransferId) {
        let transfer = &self.evaluator.ranks[rank].transfers[id];
        let (peer, partner) = self.partner(rank, id);
        match transfer.direction {
            Direction::Send => {
                let taken = self.taken.entry((peer, partner)).or_default();
                // The receive came first in this order and has read the source directly, which it may: the verifier
                // excludes a write between the two.
                if *taken > 0 {
                    *taken -= 1;
                } else {
                    let values = self.memory.read(rank, &transfer.range).to_vec();
                    let sent = self.sent.entry((peer, partner)).or_default();
                    sent.push_back(values);
                }
            }
            Direction::Receive => {
                let sent = self.sent.get_mut(&(rank, id));
                let values = sent.and_then(VecDeque::pop_front).unwrap_or_else(|| {
                    *self.taken.entry((rank, id)).or_default() += 1;
                    let theirs = &self.evaluator.ranks[peer].transfers[partner];
                    self.memory.read(peer, &theirs.range).to_vec()
                });
                self.memory.write(rank, &transfer.range, &values);
            }
        }
    }

    /// Multiplies operands of one rank into a tensor of the owner.
    fn matmul(
        &mut self,
        rank: Rank,
        spec: &MatmulSpec,
        (a, b, bias): (&Area, &Area, Option<&Range>),
        (owner, target): (Rank, &Area),
    ) {
        let (rows, columns, depth) = (spec.m, spec.n, spec.k);
        let (a, b) = (
            row_major(self.memory.gather(rank, a), rows, spec.transposed_a),
            row_major(self.memory.gather(rank, b), depth, spec.transposed_b),
        );
        let bias = bias.map(|bias| self.memory.read(rank, bias));
        let before = self.memory.gather(owner, target);
        let dtype = self.memory.tensors[owner][target.span.tensor].dtype;
        let mut products = Vec::with_capacity(before.len());
        // Row by row over B, whose elements are then read in memory order, instead of one strided dot product per
        // element.
        let mut row = vec![value::Product::default(); columns];
        for (number, left) in a.chunks_exact(depth.max(1)).enumerate() {
            row.fill(value::Product::default());
            for (left, right) in left.iter().zip(b.chunks_exact(columns.max(1))) {
                for (product, right) in row.iter_mut().zip(right) {
                    product.add(*left, *right);
                }
            }
            for (column, product) in row.iter().enumerate() {
                let mut value = product.value(depth, dtype);
                if let Some(bias) = bias.and_then(|bias| bias.get(column)) {
                    value = value.plus(*bias);
                }
                if spec.accumulate && bias.is_some() {
                    // cuBLASLt rounds here for some shapes, before it adds what was there.
                    value = value.stored(dtype);
                }
                if spec.accumulate
                    && let Some(before) = before.get(number * columns + column)
                {
                    value = value.plus(*before);
                }
                products.push(value);
            }
        }
        self.memory.scatter(owner, target, &products);
    }
}

/// Row-major matrix of `rows` rows; memory may hold its transpose.
fn row_major(
    values: Cow<'_, [BoundedValue]>,
    rows: usize,
    transposed: bool,
) -> Cow<'_, [BoundedValue]> {
    if !transposed {
        return values;
    }
    let columns = values.len() / rows.max(1);
    let places = (0..rows).flat_map(|row| (0..columns).map(move |column| column * rows + row));
    Cow::Owned(places.map(|place| values[place]).collect())
}

/// Element indices of an area with axes, in axis order.
fn places(dtype: DType, area: &Area) -> impl Iterator<Item = usize> {
    let first = area.span.offset_bytes / dtype.size();
    let axes = area.axes.clone();
    let count: usize = axes.iter().map(|axis| axis.extent).product();
    (0..count).map(move |number| {
        let (mut rest, mut place) = (number, first);
        for axis in axes.iter().rev() {
            place += rest % axis.extent * axis.stride;
            rest /= axis.extent;
        }
        place
    })
}

/// Element indices of a range of a tensor.
fn elements(dtype: DType, range: &Range) -> std::ops::Range<usize> {
    range.offset_bytes / dtype.size()..range.end() / dtype.size()
}

fn steps_of(program: &RankProgram, kind: &OperationKind) -> u128 {
    let count = |range: &Range| {
        let dtype = program.tensors[range.tensor].dtype;
        (range.bytes / dtype.size()) as u128
    };
    let multiplications = |spec: &MatmulSpec| spec.m as u128 * spec.n as u128 * spec.k as u128;
    match kind {
        OperationKind::Zero(target) | OperationKind::Copy { target, .. } => count(target),
        OperationKind::Elementwise(it) => {
            let elements = it.target.bytes(it.dtype) / it.dtype.size();
            (elements * it.sources.len()) as u128
        }
        OperationKind::Matmul(it) => multiplications(&it.spec),
        OperationKind::PostMatmul(it) => it.group.len() as u128 * multiplications(&it.spec),
        OperationKind::Post(group) => {
            let ranges = group.iter().map(|id| &program.transfers[*id].range);
            ranges.map(count).sum()
        }
        OperationKind::Collective(it) => {
            it.count(program.world) as u128 * (count(&it.target) + count(&it.source))
        }
        OperationKind::Kernel(section) => {
            let sizes = section.user_tensors().map(|id| &program.tensors[id]);
            let elements = sizes.map(|tensor| tensor.bytes / tensor.dtype.size());
            program.world as u128 * elements.sum::<usize>() as u128
        }
        OperationKind::Allocate(_)
        | OperationKind::Deallocate(_)
        | OperationKind::Share(_)
        | OperationKind::Wait(_)
        | OperationKind::Synchronize(_) => 0,
    }
}
