//! From operations to steps.

use super::memory::Actor;
use super::schedule::Submission;
use super::step::{Product, Step, Word, elements, elements_of};
use super::{Chain, Meeting, Play};
use warplink::DType;
use warplink::program::ir::{Collective, ElementwiseOp};
use warplink::program::{
    Area, Backend, CollectiveOperation, Direction, OperationKind, Protocol, Range, RankProgram,
    TransferId,
};

/// Steps of an operation.
#[derive(Default)]
struct Parts {
    /// Done when it begins.
    at_once: Vec<Step>,
    /// Chains that go on in any order.
    chains: Vec<Vec<Step>>,
    /// Signals of transfers, which go on beside these.
    announced: Vec<(TransferId, Vec<Step>)>,
    /// Steps after all of these, in any order: signals of transfers, or of the engine.
    after: Vec<(Option<TransferId>, Vec<Step>)>,
}

impl Play<'_> {
    /// The steps of an operation, as chains that go on in any order, and such chains that come after all of
    /// them; what tells nobody is done at once.
    pub(super) fn begin(
        &mut self,
        rank: usize,
        run: usize,
        index: usize,
    ) -> (Vec<Chain>, Vec<Chain>) {
        let numbers = self.numbers.get(&(rank, run, index));
        let numbers = numbers.cloned().unwrap_or_default();
        let parts = self.parts(rank, run, index, &numbers);
        for step in &parts.at_once {
            self.step(rank, Actor::default(), step);
        }
        let mut chains = parts.chains;
        if chains.is_empty() {
            chains.push(vec![Step::Nothing]);
        }
        let numbered = chains.into_iter().enumerate();
        let chains = numbered.map(|(chain, steps)| Chain {
            by: Actor::new(rank, run, index, chain),
            signals: None,
            steps: steps.into(),
        });
        let telling = |(signals, steps): (Option<TransferId>, Vec<Step>)| Chain {
            by: Actor::default(),
            signals,
            steps: steps.into(),
        };
        let announced = parts.announced.into_iter();
        let announced = announced.map(|(id, steps)| telling((Some(id), steps)));
        let after = parts.after.into_iter().map(telling);
        (chains.chain(announced).collect(), after.collect())
    }

    fn parts(&self, rank: usize, run: usize, index: usize, numbers: &[i64]) -> Parts {
        let program = &self.ranks[rank];
        let mut parts = Parts::default();
        match &program.operations[index].kind {
            OperationKind::Kernel(_) => {
                unreachable!("kernels have tests of their own, in tests/sections")
            }
            OperationKind::Copy { target, source } => {
                parts.chains.push(halves(program, target, |from, count| {
                    let t = elements(program, target).0 + from;
                    let s = elements(program, source).0 + from;
                    Step::Copy((rank, target.tensor, t), (rank, source.tensor, s), count)
                }));
            }
            OperationKind::Zero(target) => {
                let (first, count) = elements(program, target);
                let halves = [first..first + count / 2, first + count / 2..first + count];
                let step = |half: std::ops::Range<usize>| {
                    let target = (target.tensor, half.collect());
                    Step::Combine(ElementwiseOp::Sum, DType::F32, target, Vec::new())
                };
                parts.chains.push(halves.map(step).into());
            }
            OperationKind::Elementwise(it) => {
                let count = elements_of(program, &it.target).len();
                let step = |half: std::ops::Range<usize>| {
                    let of = |area: &Area| {
                        let all = elements_of(program, area);
                        (area.span.tensor, all[half.clone()].to_vec())
                    };
                    let sources = it.sources.iter().map(of).collect();
                    Step::Combine(it.op, it.dtype, of(&it.target), sources)
                };
                let halves = [0..count / 2, count / 2..count];
                parts.chains.push(halves.map(step).into());
            }
            OperationKind::Matmul(it) => {
                let product = Product {
                    rank,
                    c: it.c.clone(),
                    a: it.a.clone(),
                    b: it.b.clone(),
                    bias: it.bias,
                    spec: it.spec,
                };
                parts.chains.push(product.steps());
            }
            OperationKind::PostMatmul(it) => {
                for ((&id, &number), a) in it.group.iter().zip(numbers).zip(&it.a) {
                    let (peer, partner) = self.peer(rank, id);
                    let product = Product {
                        rank: peer,
                        c: self.ranks[peer].transfers[partner].range.into(),
                        a: (*a).into(),
                        b: it.b.into(),
                        bias: it.bias,
                        spec: it.spec,
                    };
                    let (mut chain, told) = self.signals_around(rank, run, (id, number));
                    chain.extend(product.steps());
                    parts.chains.push(chain);
                    let done = Step::Set(rank, Word::Completed, id, number);
                    parts.after.push((Some(id), vec![told, done]));
                }
            }
            OperationKind::Collective(it) => {
                let (before, in_all) = self.stage.collectives_before[rank][index];
                let members = match &it.members {
                    Some(members) => members.to_vec(),
                    None => (0..self.ranks.len()).collect(),
                };
                let meeting = (members, run * in_all + before);
                parts.chains.push(collective_steps(rank, &meeting, it));
            }
            OperationKind::Post(group) => self.post(rank, run, index, (group, numbers), &mut parts),
            OperationKind::Wait(group) => {
                for (&id, &number) in group.iter().zip(numbers) {
                    let word = if moves(program, id) {
                        Word::Completed
                    } else {
                        Word::Incoming
                    };
                    let mut chain = vec![Step::Await(word, id, number)];
                    if self.schedule.submission == Submission::Captured && word == Word::Incoming {
                        chain = vec![
                            Step::Await(Word::Placed, id, run as i64 + 1),
                            Step::Await(word, id, self.number_in_run(rank, run, (id, number))),
                        ];
                    }
                    parts.chains.push(chain);
                }
            }
            OperationKind::Deallocate(tensor) => {
                parts.chains.push(vec![Step::Deallocate(*tensor)]);
            }
            OperationKind::Allocate(_)
            | OperationKind::Share(_)
            | OperationKind::Synchronize(_) => {}
        }
        parts
    }

    fn peer(&self, rank: usize, id: TransferId) -> (usize, TransferId) {
        let peer = self.ranks[rank].transfers[id].peer;
        (peer, self.stage.partners[rank][id])
    }

    /// Which post of its run has the number `number` among all posts of a transfer.
    fn number_in_run(&self, rank: usize, run: usize, (id, number): (TransferId, i64)) -> i64 {
        number - run as i64 * self.stage.posts[rank][id]
    }

    /// Waits before a post that moves data, and signals to the peer after it.
    fn signals_around(
        &self,
        rank: usize,
        run: usize,
        (id, number): (TransferId, i64),
    ) -> (Vec<Step>, Step) {
        let (peer, partner) = self.peer(rank, id);
        let told = |number| Step::Set(peer, Word::Incoming, partner, number);
        if self.schedule.submission != Submission::Captured {
            return (vec![Step::Await(Word::Incoming, id, number)], told(number));
        }
        // In a graph, all posts wait for the same value, which each takes back.
        let awaits = vec![
            Step::Await(Word::Incoming, id, 1),
            Step::Set(rank, Word::Incoming, id, 0),
        ];
        (awaits, told(self.number_in_run(rank, run, (id, number))))
    }

    fn post(
        &self,
        rank: usize,
        run: usize,
        index: usize,
        (group, numbers): (&[TransferId], &[i64]),
        parts: &mut Parts,
    ) {
        let program = &self.ranks[rank];
        let captured = self.schedule.submission == Submission::Captured;
        let (mut again, mut placed) = (Vec::new(), Vec::new());
        let mut engine: Vec<Vec<Step>> = Vec::new();
        let mut over = Vec::new();
        for (&id, &number) in group.iter().zip(numbers) {
            let transfer = &program.transfers[id];
            let (peer, partner) = self.peer(rank, id);
            if transfer.backend == Backend::Nccl {
                parts
                    .at_once
                    .push(Step::Set(rank, Word::Arrived, id, number));
                engine.push(match transfer.direction {
                    Direction::Send => vec![Step::Mail(id, number), Step::Linger(transfer.range)],
                    Direction::Receive => vec![Step::Take(id, number)],
                });
                over.push((id, number));
            } else if moves(program, id) {
                let theirs = &self.ranks[peer].transfers[partner].range;
                let (own, other) = ((rank, &transfer.range), (peer, theirs));
                let (target, source) = match transfer.direction {
                    Direction::Send => (other, own),
                    Direction::Receive => (own, other),
                };
                let (mut chain, told) = self.signals_around(rank, run, (id, number));
                if captured {
                    chain.insert(0, Step::Await(Word::Told, index, run as i64 + 1));
                }
                let place = |(rank, range): (usize, &Range), from: usize| {
                    let first = elements(&self.ranks[rank], range).0;
                    (rank, range.tensor, first + from)
                };
                chain.extend(halves(program, &transfer.range, |from, count| {
                    Step::Copy(place(target, from), place(source, from), count)
                }));
                parts.chains.push(chain);
                let done = Step::Set(rank, Word::Completed, id, number);
                parts.after.push((Some(id), vec![told, done]));
            } else {
                let tells = Step::Set(
                    peer,
                    Word::Incoming,
                    partner,
                    if captured { 1 } else { number },
                );
                match self.number_in_run(rank, run, (id, number)) {
                    _ if !captured => parts.announced.push((id, vec![tells])),
                    1 => {
                        // What the launch before left there.
                        parts.at_once.push(Step::Set(rank, Word::Incoming, id, 0));
                        parts.at_once.push(tells);
                    }
                    number => {
                        again.push(Step::Await(Word::Incoming, id, number - 1));
                        again.push(tells);
                    }
                }
                placed.push(Step::Set(rank, Word::Placed, id, run as i64 + 1));
            }
        }
        if !engine.is_empty() {
            // Its parts go on side by side; it is held until the group is over.
            parts.chains.extend(engine);
            parts.after.push((None, vec![Step::Over(over)]));
        }
        // Last, so that all others have the same number in either submission.
        if captured {
            placed.push(Step::Set(rank, Word::Told, index, run as i64 + 1));
            again.extend(placed);
            parts.chains.push(again);
        }
    }
}

/// Whether an end of a transfer copies, or takes part in an exchange of the engine.
fn moves(program: &RankProgram, id: TransferId) -> bool {
    let transfer = &program.transfers[id];
    !matches!(
        (transfer.backend, transfer.direction),
        (Backend::Direct(Protocol::Get), Direction::Send)
            | (Backend::Direct(Protocol::Put), Direction::Receive)
    )
}

fn collective_steps(rank: usize, meeting: &Meeting, call: &CollectiveOperation) -> Vec<Step> {
    let CollectiveOperation {
        collective,
        target,
        source,
        ..
    } = call;
    let (reads, writes) = match collective {
        Collective::Broadcast(root) => (*root == rank, true),
        Collective::Reduce(_, root) => (true, *root == rank),
        _ => (true, true),
    };
    let in_place = target.tensor == source.tensor
        && target.offset_bytes < source.end()
        && source.offset_bytes < target.end();
    let mut steps = vec![Step::Arrive(meeting.clone())];
    let spoils = Step::Spoil(*target);
    if !reads {
        steps.push(spoils);
    } else {
        // In place, parts of the result may be there before others have come.
        let brings = Step::Bring(meeting.clone(), *source);
        match (writes, in_place) {
            (false, _) => steps.push(brings),
            (true, false) => steps.extend([spoils, brings]),
            (true, true) => steps.extend([brings, spoils]),
        }
    }
    steps.push(Step::Fetch(meeting.clone(), *collective, *target));
    if reads && !(writes && in_place) {
        steps.push(Step::Linger(*source));
    }
    steps.push(Step::Over(Vec::new()));
    steps
}

/// A range in two halves, so that others may come in between.
fn halves(program: &RankProgram, range: &Range, step: impl Fn(usize, usize) -> Step) -> Vec<Step> {
    let count = elements(program, range).1;
    vec![step(0, count / 2), step(count / 2, count - count / 2)]
}
