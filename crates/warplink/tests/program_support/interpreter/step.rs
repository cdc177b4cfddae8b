//! Small steps that operations are made of.

use super::memory::Actor;
use super::outcome::Fault;
use super::schedule::{Engine, Submission};
use super::{Contribution, Meeting, Play};
use std::ops::Range as Rows;
use warplink::DType;
use warplink::device::{Factor, MatmulSpec, ReduceOp};
use warplink::program::ir::{Collective, ElementwiseOp};
use warplink::program::{Area, Range, RankProgram, TransferId};

/// A part of an operation that is done at once.
#[derive(Clone, Debug)]
pub(super) enum Step {
    /// Does nothing.
    Nothing,
    /// Waits until a word of this rank is at least a value.
    Await(Word, TransferId, i64),
    /// Sets a word of a rank.
    Set(usize, Word, TransferId, i64),
    /// Copies elements between ranks' tensors: (rank, tensor, first), target first.
    Copy((usize, usize, usize), (usize, usize, usize), usize),
    /// Combines elements of this rank's tensors, target first; of none, zeros.
    Combine(
        ElementwiseOp,
        DType,
        (usize, Vec<usize>),
        Vec<(usize, Vec<usize>)>,
    ),
    /// Computes rows of a product of this rank's tensors.
    Multiply(Product, Rows<usize>),
    /// Puts a range on its way to a peer's receive, once that is there.
    Mail(TransferId, i64),
    /// Takes what is on its way.
    Take(TransferId, i64),
    /// Comes to a collective.
    Arrive(Meeting),
    /// Leaves this rank's part of a collective.
    Bring(Meeting, Range),
    /// Takes the result of a collective, once all are there.
    Fetch(Meeting, Collective<usize>, Range),
    /// Reads a range that is not needed any more: an engine may, until it is done.
    Linger(Range),
    /// Writes garbage where a result will be: an engine may, once it has begun.
    Spoil(Range),
    /// The engine is done with these posts, which all tell so at once, and free again.
    Over(Vec<(TransferId, i64)>),
    /// Ends a tensor's life.
    Deallocate(usize),
}

/// A product of matrices.
#[derive(Clone, Debug)]
pub(super) struct Product {
    /// Whose tensor the result is written to.
    pub(super) rank: usize,
    pub(super) c: Area,
    pub(super) a: Area,
    pub(super) b: Area,
    pub(super) bias: Option<Range>,
    pub(super) spec: MatmulSpec,
}

impl Product {
    /// In two halves, so that others may come in between.
    pub(super) fn steps(self) -> Vec<Step> {
        let rows = self.spec.m;
        [0..rows / 2, rows / 2..rows]
            .map(|rows| Step::Multiply(self.clone(), rows))
            .to_vec()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Word {
    Incoming,
    Completed,
    Arrived,
    /// In a graph, the run in which a transfer's first post came last.
    Placed,
    /// In a graph, the run in which an operation told all that it tells before it moves.
    Told,
}

impl Word {
    pub(super) const COUNT: usize = Self::Told as usize + 1;
}

/// The first element of a range and how many it has.
pub(super) fn elements(program: &RankProgram, range: &Range) -> (usize, usize) {
    let size = program.tensors[range.tensor].dtype.size();
    (range.offset_bytes / size, range.bytes / size)
}

/// The elements of an area, one by one.
pub(crate) fn elements_of(program: &RankProgram, area: &Area) -> Vec<usize> {
    let (first, count) = elements(program, &area.span);
    if area.axes.is_empty() {
        return (first..first + count).collect();
    }
    let mut all = vec![first];
    for axis in &area.axes {
        let along = |from: usize| (0..axis.extent).map(move |index| from + index * axis.stride);
        all = all.into_iter().flat_map(along).collect();
    }
    all
}

impl Step {
    /// Whether it accesses memory.
    pub(super) const fn is_access(&self) -> bool {
        match self {
            Self::Nothing | Self::Await(..) | Self::Set(..) | Self::Arrive(_) | Self::Over(_) => {
                false
            }
            Self::Copy(..)
            | Self::Combine(..)
            | Self::Multiply(..)
            | Self::Mail(..)
            | Self::Take(..)
            | Self::Bring(..)
            | Self::Fetch(..)
            | Self::Linger(_)
            | Self::Spoil(_)
            | Self::Deallocate(_) => true,
        }
    }
}

impl Play<'_> {
    /// Takes a step, if it can be taken.
    pub(super) fn step(&mut self, rank: usize, by: Actor, step: &Step) -> bool {
        let ranks = self.ranks;
        match step {
            Step::Nothing => {}
            Step::Await(word, id, number) => {
                return self.words[rank][*id][*word as usize] >= *number;
            }
            Step::Set(rank, word, id, number) => self.set(*rank, (*word, *id), *number),
            Step::Copy(target, source, count) => {
                for index in 0..*count {
                    let value = self.memory.load(by, (source.0, source.1, source.2 + index));
                    let target = (target.0, target.1, target.2 + index);
                    self.memory.store(by, target, value);
                }
            }
            Step::Combine(op, dtype, target, sources) => {
                for (index, place) in target.1.iter().enumerate() {
                    let values = sources
                        .iter()
                        .map(|s| self.memory.load(by, (rank, s.0, s.1[index])));
                    let value = values.reduce(|a, b| join(*op, a, b)).unwrap_or(0.0);
                    let target = (rank, target.0, *place);
                    self.memory.store(by, target, rounded(*dtype, value));
                }
            }
            Step::Multiply(product, rows) => self.multiply(rank, by, product, rows.clone()),
            Step::Mail(id, number) => {
                let transfer = &ranks[rank].transfers[*id];
                let partner = self.stage.partners[rank][*id];
                let theirs = self.words[transfer.peer].get(partner);
                let arrived = theirs.map_or(0, |words| words[Word::Arrived as usize]);
                if self.schedule.engine == Engine::OneByOne && arrived < *number {
                    return false;
                }
                let values = self.read(by, rank, &transfer.range);
                self.mail.insert((transfer.peer, partner, *number), values);
            }
            Step::Take(id, number) => {
                let Some(values) = self.mail.remove(&(rank, *id, *number)) else {
                    return false;
                };
                let range = ranks[rank].transfers[*id].range;
                self.write(by, rank, &range, &values);
            }
            Step::Arrive(meeting) => self.contribution(rank, meeting).0 = true,
            Step::Bring(meeting, source) => {
                let values = self.read(by, rank, source);
                self.contribution(rank, meeting).1 = Some(values);
            }
            Step::Fetch(meeting, collective, target) => {
                return self.fetch(rank, by, meeting, collective, target);
            }
            Step::Linger(range) => {
                self.read(by, rank, range);
            }
            Step::Spoil(range) => {
                let count = elements(&ranks[rank], range).1;
                self.write(by, rank, range, &vec![f64::NAN; count]);
            }
            Step::Over(posts) => {
                for (id, number) in posts {
                    self.set(rank, (Word::Completed, *id), *number);
                }
                self.engine[rank].1 += 1;
            }
            Step::Deallocate(tensor) => self.memory.deallocate(by, rank, *tensor),
        }
        true
    }

    fn set(&mut self, rank: usize, word: (Word, TransferId), number: i64) {
        let (word, id) = word;
        // Of a transfer without another end, nobody waits.
        let Some(words) = self.words[rank].get_mut(id) else {
            return;
        };
        let before = std::mem::replace(&mut words[word as usize], number);
        if self.schedule.submission == Submission::Eager
            && matches!(word, Word::Incoming | Word::Completed)
            && before >= number
        {
            self.memory.faults.insert(Fault::SignalBackwards { rank });
        }
    }

    fn multiply(&mut self, rank: usize, by: Actor, product: &Product, rows: Rows<usize>) {
        let program = &self.ranks[rank];
        let [a, b] =
            [&product.a, &product.b].map(|area| (area.span.tensor, elements_of(program, area)));
        let bias = product
            .bias
            .map(|range| (range.tensor, elements(program, &range).0));
        let c = elements_of(&self.ranks[product.rank], &product.c);
        for row in rows {
            for column in 0..product.spec.n {
                let mut value = 0.0;
                for depth in 0..product.spec.k {
                    let left = if product.spec.transposed_a {
                        depth * product.spec.m + row
                    } else {
                        row * product.spec.k + depth
                    };
                    let right = if product.spec.transposed_b {
                        column * product.spec.k + depth
                    } else {
                        depth * product.spec.n + column
                    };
                    let (left, right) = ((rank, a.0, a.1[left]), (rank, b.0, b.1[right]));
                    value += self.memory.load(by, left) * self.memory.load(by, right);
                }
                if let Some((tensor, first)) = bias {
                    value += self.memory.load(by, (rank, tensor, first + column));
                }
                let index = c[row * product.spec.n + column];
                let target = (product.rank, product.c.span.tensor, index);
                if product.spec.accumulate {
                    value += self.memory.load(by, target);
                }
                self.memory.store(by, target, value);
            }
        }
    }

    /// Who has come to a collective, and what each brought.
    fn contributions(&mut self, meeting: &Meeting) -> &mut Vec<Contribution> {
        let count = meeting.0.len();
        let entry = self.collectives.entry(meeting.clone());
        entry.or_insert_with(|| vec![(false, None); count])
    }

    fn contribution(&mut self, rank: usize, meeting: &Meeting) -> &mut Contribution {
        &mut self.contributions(meeting)[place(meeting, rank)]
    }

    fn fetch(
        &mut self,
        rank: usize,
        by: Actor,
        meeting: &Meeting,
        collective: &Collective<usize>,
        target: &Range,
    ) -> bool {
        let one_by_one = self.schedule.engine == Engine::OneByOne;
        let contributions = self.contributions(meeting);
        if one_by_one && contributions.iter().any(|(there, _)| !there) {
            return false;
        }
        let from = |source: usize| contributions[source].1.clone();
        let values = match collective {
            Collective::Broadcast(root) => from(place(meeting, *root)),
            Collective::Reduce(_, root) if *root != rank => return true,
            _ => {
                let all: Option<Vec<Vec<f64>>> = (0..contributions.len()).map(from).collect();
                all.map(|all| combine(collective, &all, place(meeting, rank)))
            }
        };
        let Some(values) = values else {
            return false;
        };
        self.write(by, rank, target, &values);
        true
    }

    fn read(&mut self, by: Actor, rank: usize, range: &Range) -> Vec<f64> {
        let (first, count) = elements(&self.ranks[rank], range);
        (first..first + count)
            .map(|index| self.memory.load(by, (rank, range.tensor, index)))
            .collect()
    }

    fn write(&mut self, by: Actor, rank: usize, range: &Range, values: &[f64]) {
        let (first, _) = elements(&self.ranks[rank], range);
        for (index, value) in values.iter().enumerate() {
            self.memory
                .store(by, (rank, range.tensor, first + index), *value);
        }
    }
}

fn join(op: ElementwiseOp, a: f64, b: f64) -> f64 {
    match op {
        ElementwiseOp::Product => a * b,
        ElementwiseOp::Max => a.max(b),
        ElementwiseOp::Min => a.min(b),
        _ => a + b,
    }
}

/// Numbers are as exact as the tests need in `f32` and above.
fn rounded(dtype: DType, value: f64) -> f64 {
    match dtype {
        DType::BF16 => half::bf16::from_f32(value as f32).to_f64(),
        DType::F16 => half::f16::from_f32(value as f32).to_f64(),
        DType::I32 => f64::from(value as i32),
        _ => value,
    }
}

/// The place of a rank among those that meet.
fn place(meeting: &Meeting, rank: usize) -> usize {
    let mut members = meeting.0.iter();
    members.position(|member| *member == rank).unwrap()
}

/// Result of a collective other than a broadcast at the rank with this place.
fn combine(collective: &Collective<usize>, all: &[Vec<f64>], place: usize) -> Vec<f64> {
    let fold = |op: ReduceOp| -> Vec<f64> {
        let column = |index: usize| {
            let factor = op.factor().map_or(1.0, Factor::value);
            let values = all.iter().map(|values| values[index] * factor);
            let joined = values.reduce(|a, b| {
                let one = match op {
                    ReduceOp::Sum | ReduceOp::Average | ReduceOp::ScaledSum(_) => {
                        ElementwiseOp::Sum
                    }
                    ReduceOp::Product => ElementwiseOp::Product,
                    ReduceOp::Max => ElementwiseOp::Max,
                    ReduceOp::Min => ElementwiseOp::Min,
                };
                join(one, a, b)
            });
            match op {
                ReduceOp::Average => joined.map(|sum| sum / all.len() as f64),
                _ => joined,
            }
        };
        (0..all[0].len()).filter_map(column).collect()
    };
    let part = |values: &[f64]| {
        let length = values.len() / all.len();
        values[place * length..(place + 1) * length].to_vec()
    };
    match collective {
        Collective::AllReduce(op) | Collective::Reduce(op, _) => fold(*op),
        Collective::ReduceScatter(op) => part(&fold(*op)),
        Collective::AllGather => all.concat(),
        Collective::AllToAll => all.iter().flat_map(|values| part(values)).collect(),
        Collective::Broadcast(_) => unreachable!("it is taken from the root"),
    }
}
