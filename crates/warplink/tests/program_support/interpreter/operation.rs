//! From operations to steps.

use super::step::{Product, Step, Word, elements};
use super::{Play, Submission};
use warplink::program::{Backend, Direction, OperationKind, Protocol, Range};

impl Play<'_> {
    /// How often a rank posts a transfer in one run.
    fn posts_per_run(&self, rank: usize, id: usize) -> i64 {
        let operations = self.ranks[rank].operations.iter();
        let posts = operations.flat_map(|operation| operation.kind.posted());
        posts.filter(|posted| **posted == id).count() as i64
    }

    /// The steps of an operation, as chains that go on in any order and what comes after all of them;
    /// what waits for nothing is done at once.
    pub(super) fn begin(
        &mut self,
        rank: usize,
        run: usize,
        index: usize,
    ) -> (Vec<Vec<Step>>, Vec<Step>) {
        let ranks = self.ranks;
        let rank_program = &ranks[rank];
        let numbers = self
            .numbers
            .get(&(rank, run, index))
            .cloned()
            .unwrap_or_default();
        let mut chains: Vec<Vec<Step>> = Vec::new();
        let mut after: Vec<Step> = Vec::new();
        match &rank_program.operations[index].kind {
            OperationKind::Copy { target, source } => {
                chains.push(halves(target, |from, count| {
                    let ((t, _), (s, _)) = (elements(target), elements(source));
                    let target = (rank, target.tensor, t + from);
                    Step::Copy(target, (rank, source.tensor, s + from), count)
                }));
            }
            OperationKind::Sum {
                target, sources, ..
            } => {
                chains.push(halves(target, |from, count| {
                    let place = |range: &Range| (range.tensor, elements(range).0 + from);
                    Step::Sum(place(target), sources.iter().map(place).collect(), count)
                }));
            }
            OperationKind::Collective {
                collective,
                target,
                source,
                ..
            } => {
                let own = rank_program.operations[..index].iter();
                let all = rank_program.operations.iter();
                let is = |o: &&warplink::program::Operation| {
                    matches!(o.kind, OperationKind::Collective { .. })
                };
                let number = run * all.filter(is).count() + own.filter(is).count();
                chains.push(vec![
                    Step::Bring(number, *source),
                    Step::Fetch(number, *collective, *target),
                    Step::Release,
                ]);
            }
            OperationKind::Post(group) => {
                let mut engine = false;
                let captured = self.submission == Submission::Captured;
                let (mut again, mut told) = (Vec::new(), Vec::new());
                for (&id, &number) in group.iter().zip(&numbers) {
                    let transfer = &rank_program.transfers[id];
                    let (peer, partner) = (transfer.peer, self.partners[rank][id]);
                    let done = Step::Set(rank, Word::Completed, id, number);
                    match (transfer.backend, transfer.direction) {
                        (Backend::Nccl, direction) => {
                            engine = true;
                            self.words[rank].insert((Word::Arrived, id), number);
                            let mail = match direction {
                                Direction::Send => Step::Mail(id, number),
                                Direction::Receive => Step::Take(id, number),
                            };
                            chains.push(vec![mail]);
                            after.push(done);
                        }
                        (Backend::Direct(Protocol::Get), Direction::Send)
                        | (Backend::Direct(Protocol::Put), Direction::Receive) => {
                            let tell = Step::Set(peer, Word::Incoming, partner, number);
                            let placed = Step::Set(rank, Word::Placed, id, run as i64 + 1);
                            if captured && number > run as i64 * self.posts_per_run(rank, id) + 1 {
                                again.push(Step::Await(Word::Incoming, id, number - 1));
                                again.push(tell);
                            } else {
                                self.step(rank, &tell);
                            }
                            told.push(placed);
                        }
                        (Backend::Direct(_), direction) => {
                            let theirs = &ranks[peer].transfers[partner].range;
                            let (own, other) = ((rank, &transfer.range), (peer, theirs));
                            let (target, source) = match direction {
                                Direction::Send => (other, own),
                                Direction::Receive => (own, other),
                            };
                            let mut chain = vec![Step::Await(Word::Incoming, id, number)];
                            if captured {
                                let run = run as i64 + 1;
                                chain.insert(0, Step::Await(Word::Told, index, run));
                            }
                            chain.extend(halves(target.1, |from, count| {
                                let place = |(rank, range): (usize, &Range)| {
                                    (rank, range.tensor, elements(range).0 + from)
                                };
                                Step::Copy(place(target), place(source), count)
                            }));
                            chains.push(chain);
                            after.push(Step::Set(peer, Word::Incoming, partner, number));
                            after.push(done);
                        }
                    }
                }
                if captured {
                    told.push(Step::Set(rank, Word::Told, index, run as i64 + 1));
                    again.extend(told);
                    chains.push(again);
                }
                if engine {
                    // All parts first: the engine is held until the group is over.
                    chains = vec![chains.concat()];
                    after.push(Step::Release);
                }
            }
            OperationKind::Matmul {
                a,
                b,
                c,
                bias: None,
                m,
                n,
                k,
                accumulate,
                ..
            } => {
                let product = Product {
                    rank,
                    c: *c,
                    a: *a,
                    b: *b,
                    columns: *n,
                    depth: *k,
                    accumulate: *accumulate,
                };
                chains.push(product.steps(*m));
            }
            OperationKind::PostMatmul {
                group,
                a,
                b,
                bias: None,
                m,
                n,
                k,
                ..
            } => {
                // One kernel: it waits for all receivers, and tells them when all is stored.
                let mut chain = Vec::new();
                let mut products = Vec::new();
                for ((&id, &number), a) in group.iter().zip(&numbers).zip(a) {
                    let (peer, partner) =
                        (rank_program.transfers[id].peer, self.partners[rank][id]);
                    chain.push(Step::Await(Word::Incoming, id, number));
                    let product = Product {
                        rank: peer,
                        c: ranks[peer].transfers[partner].range,
                        a: *a,
                        b: *b,
                        columns: *n,
                        depth: *k,
                        accumulate: false,
                    };
                    products.extend(product.steps(*m));
                    after.push(Step::Set(peer, Word::Incoming, partner, number));
                    after.push(Step::Set(rank, Word::Completed, id, number));
                }
                chain.extend(products);
                chains.push(chain);
            }
            OperationKind::Matmul { .. } | OperationKind::PostMatmul { .. } => {
                panic!("a bias is not played")
            }
            OperationKind::Wait(group) => {
                for (&id, &number) in group.iter().zip(&numbers) {
                    let transfer = &rank_program.transfers[id];
                    let word = match (transfer.backend, transfer.direction) {
                        (Backend::Direct(Protocol::Get), Direction::Send)
                        | (Backend::Direct(Protocol::Put), Direction::Receive) => Word::Incoming,
                        _ => Word::Completed,
                    };
                    let mut chain = vec![Step::Await(word, id, number)];
                    if self.submission == Submission::Captured && word == Word::Incoming {
                        chain.insert(0, Step::Await(Word::Placed, id, run as i64 + 1));
                    }
                    chains.push(chain);
                }
            }
            _ => {}
        }
        if chains.is_empty() {
            chains.push(vec![Step::Copy((rank, 0, 0), (rank, 0, 0), 0)]);
        }
        (chains, after)
    }
}

/// A range in two halves, so that others may come in between.
fn halves(range: &Range, step: impl Fn(usize, usize) -> Step) -> Vec<Step> {
    let count = elements(range).1;
    vec![step(0, count / 2), step(count / 2, count - count / 2)]
}
