//! Small steps that operations are made of.

use super::Play;
use std::ops::Range as Rows;
use warplink::device::ReduceOp;
use warplink::program::ir::Collective;
use warplink::program::{Range, TransferId};

/// A part of an operation that is done at once.
#[derive(Clone, Debug)]
pub(super) enum Step {
    /// Waits until a word of this rank is at least a value.
    Await(Word, TransferId, i64),
    /// Sets a word of a rank.
    Set(usize, Word, TransferId, i64),
    /// Copies elements between ranks' tensors: (rank, tensor, first), target first.
    Copy((usize, usize, usize), (usize, usize, usize), usize),
    /// Adds up elements of this rank's tensors.
    Sum((usize, usize), Vec<(usize, usize)>, usize),
    /// Computes rows of a product of this rank's tensors.
    Multiply(Product, Rows<usize>),
    /// Puts a range on its way to a peer's receive, once that is there.
    Mail(TransferId, i64),
    /// Takes what is on its way.
    Take(TransferId, i64),
    /// Leaves this rank's part of a collective.
    Bring(usize, Range),
    /// Takes the result of a collective, once all are there.
    Fetch(usize, Collective<usize>, Range),
    /// The engine is free again.
    Release,
}

/// A product of matrices.
#[derive(Clone, Copy, Debug)]
pub(super) struct Product {
    /// Whose tensor the result is written to.
    pub(super) rank: usize,
    pub(super) c: Range,
    pub(super) a: Range,
    pub(super) b: Range,
    pub(super) columns: usize,
    pub(super) depth: usize,
    pub(super) accumulate: bool,
}

impl Product {
    /// In two halves, so that others may come in between.
    pub(super) fn steps(self, rows: usize) -> Vec<Step> {
        [0..rows / 2, rows / 2..rows]
            .map(|rows| Step::Multiply(self, rows))
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

/// The first element of a range and how many it has.
pub(super) fn elements(range: &Range) -> (usize, usize) {
    (range.offset_bytes / 4, range.bytes / 4)
}

impl Play<'_> {
    /// Takes a step, if it can be taken.
    pub(super) fn step(&mut self, rank: usize, step: &Step) -> bool {
        match step {
            Step::Await(word, id, number) => {
                let value = self.words[rank].get(&(*word, *id)).copied();
                return value.unwrap_or(0) >= *number;
            }
            Step::Set(rank, word, id, number) => {
                self.words[*rank].insert((*word, *id), *number);
            }
            Step::Copy(target, source, count) => {
                for index in 0..*count {
                    let value = self.memory[source.0][source.1][source.2 + index];
                    self.memory[target.0][target.1][target.2 + index] = value;
                }
            }
            Step::Sum(target, sources, count) => {
                for index in 0..*count {
                    let value = |s: &(usize, usize)| self.memory[rank][s.0][s.1 + index];
                    let sum = sources.iter().map(value).sum();
                    self.memory[rank][target.0][target.1 + index] = sum;
                }
            }
            Step::Multiply(product, rows) => {
                let [a, b, c] = [product.a, product.b, product.c]
                    .map(|range| (range.tensor, elements(&range).0));
                for row in rows.clone() {
                    for column in 0..product.columns {
                        let term = |depth: usize| {
                            let left = a.1 + row * product.depth + depth;
                            let right = b.1 + depth * product.columns + column;
                            self.memory[rank][a.0][left] * self.memory[rank][b.0][right]
                        };
                        let mut value: f64 = (0..product.depth).map(term).sum();
                        let target = c.1 + row * product.columns + column;
                        let place = &mut self.memory[product.rank][c.0][target];
                        if product.accumulate {
                            value += *place;
                        }
                        *place = value;
                    }
                }
            }
            Step::Mail(id, number) => {
                let transfer = &self.ranks[rank].transfers[*id];
                let partner = self.partners[rank][*id];
                let arrived = self.words[transfer.peer].get(&(Word::Arrived, partner));
                if arrived.is_none_or(|arrived| arrived < number) {
                    return false;
                }
                let values = self.read(rank, &transfer.range);
                self.mail.insert((transfer.peer, partner, *number), values);
            }
            Step::Take(id, number) => {
                let Some(values) = self.mail.remove(&(rank, *id, *number)) else {
                    return false;
                };
                let range = self.ranks[rank].transfers[*id].range;
                self.write(rank, &range, &values);
            }
            Step::Bring(number, source) => {
                let values = self.read(rank, source);
                let world = self.ranks.len();
                let brought = self.collectives.entry(*number);
                brought.or_insert_with(|| vec![None; world])[rank] = Some(values);
            }
            Step::Fetch(number, collective, target) => {
                let brought: Option<Vec<Vec<f64>>> =
                    self.collectives[number].iter().cloned().collect();
                let Some(brought) = brought else {
                    return false;
                };
                let fold = |op: ReduceOp| {
                    let join = |a: f64, b: f64| match op {
                        ReduceOp::Sum => a + b,
                        ReduceOp::Max if a.is_nan() || b.is_nan() => f64::NAN,
                        ReduceOp::Max => a.max(b),
                        ReduceOp::Min => a.min(b),
                    };
                    let columns = 0..brought[0].len();
                    let column = |i: usize| brought.iter().map(move |v| v[i]).reduce(join);
                    columns.filter_map(column).collect::<Vec<f64>>()
                };
                let values = match collective {
                    Collective::AllReduce(op) => fold(*op),
                    Collective::Broadcast(root) => brought[*root].clone(),
                    other => panic!("{} is not played", other.name()),
                };
                self.write(rank, target, &values);
            }
            Step::Release => self.engine[rank].1 += 1,
        }
        true
    }

    fn read(&self, rank: usize, range: &Range) -> Vec<f64> {
        let (first, count) = elements(range);
        self.memory[rank][range.tensor][first..first + count].to_vec()
    }

    fn write(&mut self, rank: usize, range: &Range, values: &[f64]) {
        let (first, count) = elements(range);
        self.memory[rank][range.tensor][first..first + count].copy_from_slice(values);
    }
}
