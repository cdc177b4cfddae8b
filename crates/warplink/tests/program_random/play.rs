//! A stage on which rank programs are played in random orders.
//!
//! It shares nothing with the verifier: memory is numbers, signals are words that are set, hosts
//! and streams take one small step at a time, and which of them is next is drawn. Copies take two
//! steps. The program runs twice in a row; in between, the caller's stream takes the outputs, sets
//! other inputs and spoils the rest.

use std::collections::HashMap;
use warplink::device::ReduceOp;
use warplink::program::ir::{Collective, Role};
use warplink::program::{
    Backend, Direction, OperationKind, Protocol, Range, RankProgram, TransferId,
};

/// How a play ends.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum End {
    /// Nobody can take a step, and not everybody is done.
    Stuck,
    /// The outputs of each run and rank.
    Outputs(Vec<Vec<f64>>),
}

/// One thing that a stream was given.
#[derive(Clone, Debug)]
enum Job {
    Operation {
        index: usize,
        run: usize,
    },
    Record(usize),
    WaitEvent(usize),
    /// The caller's work at the end of a run.
    Boundary(usize),
}

/// A part of a job that is done at once.
#[derive(Clone, Debug)]
enum Step {
    /// Waits until a word of this rank is at least a value.
    Await(Word, TransferId, i64),
    /// Sets a word of a rank.
    Set(usize, Word, TransferId, i64),
    /// Copies elements between ranks' tensors: (rank, tensor, first), target first.
    Copy((usize, usize, usize), (usize, usize, usize), usize),
    /// Adds up elements of this rank's tensors.
    Sum((usize, usize), Vec<(usize, usize)>, usize),
    /// Computes rows of a product of this rank's tensors.
    Multiply(Product, std::ops::Range<usize>),
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
struct Product {
    /// Whose tensor the result is written to.
    rank: usize,
    c: Range,
    a: Range,
    b: Range,
    columns: usize,
    depth: usize,
    accumulate: bool,
}

impl Product {
    /// In two halves, so that others may come in between.
    fn steps(self, rows: usize) -> Vec<Step> {
        [0..rows / 2, rows / 2..rows]
            .map(|rows| Step::Multiply(self, rows))
            .to_vec()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Word {
    Incoming,
    Completed,
    Arrived,
}

#[derive(Default)]
struct Stream {
    jobs: std::collections::VecDeque<Job>,
    /// Chains of steps of the job at hand, which go on in any order; none before it begins.
    chains: Option<Vec<Vec<Step>>>,
}

struct Play<'a> {
    ranks: &'a [RankProgram],
    random: u64,
    memory: Vec<Vec<Vec<f64>>>,
    words: Vec<HashMap<(Word, TransferId), i64>>,
    streams: Vec<Vec<Stream>>,
    /// Run and operation that a host is at.
    hosts: Vec<(usize, usize)>,
    shared: Vec<Vec<usize>>,
    posts: Vec<Vec<i64>>,
    /// The numbers of each operation's posts, by rank, run and operation.
    numbers: HashMap<(usize, usize, usize), Vec<i64>>,
    partners: Vec<Vec<TransferId>>,
    events: Vec<bool>,
    mail: HashMap<(usize, TransferId, i64), Vec<f64>>,
    collectives: HashMap<usize, Vec<Option<Vec<f64>>>>,
    /// Operations of the engine in the order of the host, and how many are done.
    engine: Vec<(Vec<(usize, usize)>, usize)>,
    outputs: Vec<Vec<f64>>,
}

const RUNS: usize = 2;

/// Plays the program of all ranks in an order that `seed` determines.
pub(crate) fn play(ranks: &[RankProgram], seed: u64) -> End {
    let mut play = Play::new(ranks, seed);
    loop {
        // Agents in a random order, until one of them can take a step.
        let mut agents: Vec<(usize, Option<usize>)> = Vec::new();
        for (rank, rank_program) in ranks.iter().enumerate() {
            agents.push((rank, None));
            agents.extend((0..rank_program.streams.len()).map(|stream| (rank, Some(stream))));
        }
        let mut moved = false;
        while !agents.is_empty() && !moved {
            let at = play.below(agents.len());
            moved = match agents.swap_remove(at) {
                (rank, None) => play.host(rank),
                (rank, Some(stream)) => play.stream(rank, stream),
            };
        }
        if !moved {
            break;
        }
    }
    let hosts_done = play.hosts.iter().all(|(run, _)| *run == RUNS);
    let streams_done = play
        .streams
        .iter()
        .flatten()
        .all(|stream| stream.jobs.is_empty());
    if hosts_done && streams_done {
        End::Outputs(play.outputs)
    } else {
        End::Stuck
    }
}

fn elements(range: &Range) -> (usize, usize) {
    (range.offset_bytes / 4, range.bytes / 4)
}

impl<'a> Play<'a> {
    fn new(ranks: &'a [RankProgram], seed: u64) -> Self {
        let partners = ranks.iter().enumerate().map(|(rank, rank_program)| {
            let partner = |t: &warplink::program::TransferInstance| {
                let theirs = &ranks[t.peer].transfers;
                let fits = |o: &warplink::program::TransferInstance| {
                    o.direction != t.direction
                        && (o.peer, o.tag, o.ordinal) == (rank, t.tag, t.ordinal)
                };
                theirs.iter().position(fits).unwrap_or(usize::MAX)
            };
            rank_program.transfers.iter().map(partner).collect()
        });
        let mut play = Self {
            ranks,
            random: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
            memory: ranks
                .iter()
                .map(|r| {
                    r.tensors
                        .iter()
                        .map(|t| vec![f64::NAN; t.bytes / 4])
                        .collect()
                })
                .collect(),
            words: vec![HashMap::new(); ranks.len()],
            streams: ranks
                .iter()
                .map(|r| r.streams.iter().map(|_| Stream::default()).collect())
                .collect(),
            hosts: vec![(0, 0); ranks.len()],
            shared: vec![Vec::new(); ranks.len()],
            posts: ranks.iter().map(|r| vec![0; r.transfers.len()]).collect(),
            numbers: HashMap::new(),
            partners: partners.collect(),
            events: Vec::new(),
            mail: HashMap::new(),
            collectives: HashMap::new(),
            engine: vec![(Vec::new(), 0); ranks.len()],
            outputs: vec![Vec::new(); RUNS * ranks.len()],
        };
        (0..ranks.len()).for_each(|rank| play.prepare(rank, 0));
        play
    }

    fn below(&mut self, limit: usize) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 20) as usize % limit
    }

    /// Sets inputs for a run and spoils all else.
    fn prepare(&mut self, rank: usize, run: usize) {
        for (tensor, instance) in self.ranks[rank].tensors.iter().enumerate() {
            for (index, value) in self.memory[rank][tensor].iter_mut().enumerate() {
                *value = match instance.role {
                    Role::Input => (100 * run + 10 * rank + index + 1) as f64,
                    _ => f64::NAN,
                };
            }
        }
    }

    /// A step of a host: one operation is enqueued or, for a share, done.
    fn host(&mut self, rank: usize) -> bool {
        let (run, index) = self.hosts[rank];
        if run == RUNS {
            return false;
        }
        let rank_program = &self.ranks[rank];
        let Some(operation) = rank_program.operations.get(index) else {
            self.streams[rank][0].jobs.push_back(Job::Boundary(run));
            self.hosts[rank] = (run + 1, 0);
            return true;
        };
        let stream = operation.stream;
        match &operation.kind {
            OperationKind::Share(exchange) => {
                if self.shared[rank].contains(exchange) {
                    let there = rank_program.exchanges[*exchange].iter().all(|&id| {
                        let peer = rank_program.transfers[id].peer;
                        let partner = self.partners[rank][id];
                        let theirs = &self.ranks[peer].transfers;
                        theirs
                            .get(partner)
                            .is_some_and(|t| self.shared[peer].contains(&t.exchange))
                    });
                    if !there {
                        return false;
                    }
                } else {
                    self.shared[rank].push(*exchange);
                    return true;
                }
            }
            OperationKind::Synchronize(other) => {
                let event = self.events.len();
                self.events.push(false);
                self.streams[rank][*other]
                    .jobs
                    .push_back(Job::Record(event));
                self.streams[rank][stream]
                    .jobs
                    .push_back(Job::WaitEvent(event));
            }
            kind => {
                let mut engine = matches!(kind, OperationKind::Collective { .. });
                if let OperationKind::Post(group)
                | OperationKind::PostMatmul { group, .. }
                | OperationKind::Wait(group) = kind
                {
                    let posting = !matches!(kind, OperationKind::Wait(_));
                    let mut numbers = Vec::new();
                    for &id in group {
                        self.posts[rank][id] += i64::from(posting);
                        numbers.push(self.posts[rank][id]);
                        engine |= posting && rank_program.transfers[id].backend == Backend::Nccl;
                    }
                    self.numbers.insert((rank, run, index), numbers);
                }
                if engine {
                    self.engine[rank].0.push((run, index));
                }
                self.streams[rank][stream]
                    .jobs
                    .push_back(Job::Operation { index, run });
            }
        }
        self.hosts[rank].1 += 1;
        true
    }

    /// A step of a stream.
    fn stream(&mut self, rank: usize, stream: usize) -> bool {
        let Some(job) = self.streams[rank][stream].jobs.front().cloned() else {
            return false;
        };
        match job {
            Job::Record(event) => self.events[event] = true,
            Job::WaitEvent(event) if !self.events[event] => return false,
            Job::WaitEvent(_) => {}
            Job::Boundary(run) => {
                for (tensor, instance) in self.ranks[rank].tensors.iter().enumerate() {
                    if instance.role == Role::Output {
                        let values = self.memory[rank][tensor].clone();
                        self.outputs[run * self.ranks.len() + rank].extend(values);
                    }
                }
                self.prepare(rank, run + 1);
            }
            Job::Operation { index, run } => {
                let Some(mut chains) = self.streams[rank][stream].chains.take() else {
                    let turn = self.engine[rank].0.iter().position(|o| *o == (run, index));
                    if turn.is_some_and(|turn| turn > self.engine[rank].1) {
                        return false;
                    }
                    let chains = self.begin(rank, run, index);
                    self.streams[rank][stream].chains = Some(chains);
                    return true;
                };
                let mut order: Vec<usize> = (0..chains.len()).collect();
                let mut moved = false;
                while !order.is_empty() && !moved {
                    let at = self.below(order.len());
                    let chain = order.swap_remove(at);
                    moved = self.step(rank, &chains[chain][0]);
                    if moved {
                        chains[chain].remove(0);
                    }
                }
                chains.retain(|chain| !chain.is_empty());
                if !chains.is_empty() {
                    self.streams[rank][stream].chains = Some(chains);
                    return moved;
                }
            }
        }
        self.streams[rank][stream].jobs.pop_front();
        true
    }

    /// The steps of an operation; what waits for nothing is done at once.
    fn begin(&mut self, rank: usize, run: usize, index: usize) -> Vec<Vec<Step>> {
        let ranks = self.ranks;
        let rank_program = &ranks[rank];
        let numbers = self
            .numbers
            .get(&(rank, run, index))
            .cloned()
            .unwrap_or_default();
        let mut chains: Vec<Vec<Step>> = Vec::new();
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
                            chains.push(vec![mail, done]);
                        }
                        (Backend::Direct(Protocol::Get), Direction::Send)
                        | (Backend::Direct(Protocol::Put), Direction::Receive) => {
                            self.words[peer].insert((Word::Incoming, partner), number);
                        }
                        (Backend::Direct(_), direction) => {
                            let theirs = &ranks[peer].transfers[partner].range;
                            let (own, other) = ((rank, &transfer.range), (peer, theirs));
                            let (target, source) = match direction {
                                Direction::Send => (other, own),
                                Direction::Receive => (own, other),
                            };
                            let mut chain = vec![Step::Await(Word::Incoming, id, number)];
                            chain.extend(halves(target.1, |from, count| {
                                let place = |(rank, range): (usize, &Range)| {
                                    (rank, range.tensor, elements(range).0 + from)
                                };
                                Step::Copy(place(target), place(source), count)
                            }));
                            chain.push(Step::Set(peer, Word::Incoming, partner, number));
                            chain.push(done);
                            chains.push(chain);
                        }
                    }
                }
                if engine {
                    // All parts first: the engine is held until the group is over.
                    let all = chains.concat();
                    chains = vec![all.into_iter().chain([Step::Release]).collect()];
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
                let (mut chain, mut after) = (Vec::new(), Vec::new());
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
                chain.extend(after);
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
                    chains.push(vec![Step::Await(word, id, number)]);
                }
            }
            _ => {}
        }
        if chains.is_empty() {
            chains.push(vec![Step::Copy((rank, 0, 0), (rank, 0, 0), 0)]);
        }
        chains
    }

    /// Takes a step, if it can be taken.
    fn step(&mut self, rank: usize, step: &Step) -> bool {
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

/// A range in two halves, so that others may come in between.
fn halves(range: &Range, step: impl Fn(usize, usize) -> Step) -> Vec<Step> {
    let count = elements(range).1;
    vec![step(0, count / 2), step(count / 2, count - count / 2)]
}
