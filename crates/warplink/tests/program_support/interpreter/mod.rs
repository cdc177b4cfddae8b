//! A stage on which rank programs are played in random orders.
//!
//! It shares nothing with the verifier: memory is numbers, signals are words that are set, hosts
//! and streams take one small step at a time, and which of them is next is drawn. Copies take two
//! steps. The program runs twice in a row; in between, the caller's stream takes the outputs, sets
//! other inputs and spoils the rest.

mod operation;
mod step;

use std::collections::HashMap;
use step::{Step, Word};
use warplink::program::ir::Role;
use warplink::program::{Backend, OperationKind, RankProgram, TransferId};

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

#[derive(Default)]
struct Stream {
    jobs: std::collections::VecDeque<Job>,
    /// Chains of steps of the job at hand, which go on in any order; none before it begins.
    chains: Option<Vec<Vec<Step>>>,
    /// Steps that come after all of these.
    after: Vec<Step>,
}

struct Play<'a> {
    ranks: &'a [RankProgram],
    submission: Submission,
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

/// How the ranks run their programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Submission {
    /// Operation by operation; posts count.
    Eager,
    /// As a graph, launched for each run. What only signals waits, when it is posted again in a graph,
    /// until it is done the time before, and other streams' waits come behind its first post.
    Captured,
}

/// Plays the program of all ranks in an order that `seed` determines.
pub(crate) fn play(ranks: &[RankProgram], submission: Submission, seed: u64) -> End {
    let mut play = Play::new(ranks, submission, seed);
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

impl<'a> Play<'a> {
    fn new(ranks: &'a [RankProgram], submission: Submission, seed: u64) -> Self {
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
            submission,
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
                    let (chains, after) = self.begin(rank, run, index);
                    let state = &mut self.streams[rank][stream];
                    (state.chains, state.after) = (Some(chains), after);
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
                if chains.is_empty() && !self.streams[rank][stream].after.is_empty() {
                    chains.push(std::mem::take(&mut self.streams[rank][stream].after));
                }
                if !chains.is_empty() {
                    self.streams[rank][stream].chains = Some(chains);
                    return moved;
                }
            }
        }
        self.streams[rank][stream].jobs.pop_front();
        true
    }
}
