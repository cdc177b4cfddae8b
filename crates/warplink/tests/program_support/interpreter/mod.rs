//! A stage on which rank programs are played in any order that their streams allow.
//!
//! It shares nothing with the verifier: memory is numbers, signals are words that are set, hosts
//! and streams take one small step at a time, and a [`Schedule`] says which of them is next. Copies
//! take two steps. The program runs twice in a row; in between, the caller's stream takes the outputs,
//! sets other inputs and spoils the rest.
//!
//! Every cell of memory remembers the order of its writes, and every read the writes before it. Two
//! plays whose [`Outcome::order`] differs are a race, whether or not a value shows it.

mod choice;
mod memory;
mod operation;
mod outcome;
mod schedule;
mod step;

pub(crate) use choice::{Choice, Integer, SOME_VALUES, Way, input_of};
pub(crate) use outcome::{Fault, Outcome, agreed, race};
pub(crate) use schedule::{Engine, Hold, Pick, Random, Schedule, Submission, mix};

use memory::{Actor, Memory};
use std::collections::{BTreeSet, HashMap, VecDeque};
pub(crate) use step::elements_of;
use step::{Step, Word};
use warplink::program::{Backend, OperationKind, RankProgram, TransferId, TransferInstance};

/// How often the program is run.
pub(crate) const RUNS: usize = 2;

/// The programs of all ranks, ready to be played.
pub(crate) struct Interpreter<'a> {
    ranks: &'a [RankProgram],
    partners: Vec<Vec<TransferId>>,
    /// How often a rank posts a transfer in one run.
    posts: Vec<Vec<i64>>,
    /// For each rank and operation, how many collectives among the same ranks come before it, and how many
    /// there are.
    collectives_before: Vec<Vec<(usize, usize)>>,
}

/// One thing that a stream was given.
#[derive(Clone, Copy, Debug)]
enum Job {
    Operation {
        index: usize,
        run: usize,
        /// Its turn at the engine, if it has one.
        turn: Option<usize>,
    },
    Record(usize),
    WaitEvent {
        event: usize,
        index: usize,
        run: usize,
    },
    /// The caller's work at the end of a run.
    Boundary(usize),
}

/// Steps of an operation that come one after another.
struct Chain {
    by: Actor,
    /// The transfer that they are signals of, and nothing else.
    signals: Option<TransferId>,
    steps: VecDeque<Step>,
}

#[derive(Default)]
struct Stream {
    jobs: VecDeque<Job>,
    /// Chains of steps of the job at hand, which go on in any order; none before it begins.
    chains: Option<Vec<Chain>>,
    /// Chains that come after all of these, in any order too.
    after: Vec<Chain>,
}

/// Who takes part in a collective, and its number among these.
type Meeting = (Vec<usize>, usize);

/// Whether a rank has come to a collective, and what it brought.
type Contribution = (bool, Option<Vec<f64>>);

struct Play<'a> {
    stage: &'a Interpreter<'a>,
    ranks: &'a [RankProgram],
    schedule: &'a Schedule,
    random: Random,
    memory: Memory,
    /// The words of each rank, by the number of the transfer or operation; zero at first.
    words: Vec<Vec<[i64; Word::COUNT]>>,
    streams: Vec<Vec<Stream>>,
    /// Run and operation that a host is at.
    hosts: Vec<(usize, usize)>,
    shared: Vec<Vec<bool>>,
    posted: Vec<Vec<i64>>,
    /// The numbers of each operation's posts, by rank, run and operation.
    numbers: HashMap<(usize, usize, usize), Vec<i64>>,
    events: Vec<bool>,
    mail: HashMap<(usize, TransferId, i64), Vec<f64>>,
    collectives: HashMap<Meeting, Vec<Contribution>>,
    /// How many operations the engine was given, and how many are done.
    engine: Vec<(usize, usize)>,
    outputs: Vec<Vec<f64>>,
}

impl<'a> Interpreter<'a> {
    pub(crate) fn new(ranks: &'a [RankProgram]) -> Self {
        let partner = |rank: usize, t: &TransferInstance| {
            let fits = |o: &TransferInstance| {
                o.direction != t.direction && (o.peer, o.tag, o.ordinal) == (rank, t.tag, t.ordinal)
            };
            let theirs = ranks[t.peer].transfers.iter().position(fits);
            theirs.unwrap_or(usize::MAX)
        };
        let count = |program: &RankProgram| {
            let mut posts = vec![0; program.transfers.len()];
            for operation in &program.operations {
                for &id in operation.kind.posted() {
                    posts[id] += 1;
                }
            }
            posts
        };
        let before = |program: &RankProgram| {
            let list = |index: usize| match &program.operations[index].kind {
                OperationKind::Collective(it) => Some(it.members.clone()),
                _ => None,
            };
            let all = 0..program.operations.len();
            let lists: Vec<_> = all.map(list).collect();
            let same = |index: usize, until: usize| {
                let others = lists[..until].iter();
                others.filter(|other| **other == lists[index]).count()
            };
            let counts = (0..lists.len()).map(|index| match lists[index] {
                Some(_) => (same(index, index), same(index, lists.len())),
                None => (0, 0),
            });
            counts.collect()
        };
        Self {
            ranks,
            partners: ranks
                .iter()
                .enumerate()
                .map(|(rank, p)| p.transfers.iter().map(|t| partner(rank, t)).collect())
                .collect(),
            posts: ranks.iter().map(count).collect(),
            collectives_before: ranks.iter().map(before).collect(),
        }
    }

    /// For each transfer of each rank, the peer's; `None` where one has none.
    pub(crate) fn partner(&self, rank: usize, id: TransferId) -> Option<TransferId> {
        Some(self.partners[rank][id]).filter(|partner| *partner != usize::MAX)
    }

    /// How often a rank posts a transfer in a run.
    pub(crate) fn posts(&self, rank: usize, id: TransferId) -> i64 {
        self.posts[rank][id]
    }

    /// Plays the program of all ranks.
    pub(crate) fn play(&self, schedule: &Schedule) -> Outcome {
        let ranks = self.ranks;
        let mut play = Play::new(self, schedule);
        // Hosts and streams.
        let mut agents: Vec<(usize, Option<usize>)> = Vec::new();
        for (rank, program) in ranks.iter().enumerate() {
            agents.push((rank, None));
            agents.extend((0..program.streams.len()).map(|stream| (rank, Some(stream))));
        }
        play.random.shuffle(&mut agents);
        while play.any(&mut agents) {}
        let hosts_done = play.hosts.iter().all(|(run, _)| *run == RUNS);
        let mut streams = play.streams.iter().flatten();
        let stuck = !(hosts_done && streams.all(|stream| stream.jobs.is_empty()));
        Outcome {
            stuck,
            outputs: play.outputs,
            stored: Vec::new(),
            order: play.memory.order(),
            faults: play.memory.faults,
        }
    }
}

impl<'a> Play<'a> {
    fn new(stage: &'a Interpreter<'a>, schedule: &'a Schedule) -> Self {
        let ranks = stage.ranks;
        let mut play = Self {
            stage,
            ranks,
            schedule,
            random: Random::new(schedule.seed),
            memory: Memory::new(ranks),
            words: ranks
                .iter()
                .map(|r| vec![[0; Word::COUNT]; r.transfers.len().max(r.operations.len())])
                .collect(),
            streams: ranks
                .iter()
                .map(|r| r.streams.iter().map(|_| Stream::default()).collect())
                .collect(),
            hosts: vec![(0, 0); ranks.len()],
            shared: ranks
                .iter()
                .map(|r| vec![false; r.exchanges.len()])
                .collect(),
            posted: ranks.iter().map(|r| vec![0; r.transfers.len()]).collect(),
            numbers: HashMap::new(),
            events: Vec::new(),
            mail: HashMap::new(),
            collectives: HashMap::new(),
            engine: vec![(0, 0); ranks.len()],
            outputs: vec![Vec::new(); RUNS * ranks.len()],
        };
        for rank in ranks {
            play.memory.prepare(rank, 0);
        }
        play
    }

    /// Has one agent take a step; what is held only where nobody else can.
    fn any(&mut self, agents: &mut [(usize, Option<usize>)]) -> bool {
        for held_too in [false, true] {
            if held_too && self.schedule.held.is_empty() {
                return false;
            }
            for done in 0..agents.len() {
                if self.schedule.pick == Pick::Uniform {
                    let next = done + self.random.below(agents.len() - done);
                    agents.swap(done, next);
                }
                let moved = match agents[done] {
                    (rank, None) => self.host(rank),
                    (rank, Some(stream)) => self.stream(rank, stream, held_too),
                };
                if moved {
                    // Now and then, another comes first.
                    if self.schedule.pick == Pick::Priorities && self.random.below(16) == 0 {
                        let other = self.random.below(agents.len());
                        agents.swap(0, other);
                    }
                    return true;
                }
            }
        }
        false
    }

    /// A step of a host: one operation is enqueued or, for a share, done.
    fn host(&mut self, rank: usize) -> bool {
        let (run, index) = self.hosts[rank];
        if run == RUNS {
            return false;
        }
        let program = &self.ranks[rank];
        let Some(operation) = program.operations.get(index) else {
            self.streams[rank][0].jobs.push_back(Job::Boundary(run));
            self.hosts[rank] = (run + 1, 0);
            return true;
        };
        let stream = operation.stream;
        match &operation.kind {
            OperationKind::Share(exchange) => {
                if !self.shared[rank][*exchange] {
                    self.shared[rank][*exchange] = true;
                    return true;
                }
                let there = program.exchanges[*exchange].iter().all(|&id| {
                    let peer = program.transfers[id].peer;
                    let theirs = self.ranks[peer]
                        .transfers
                        .get(self.stage.partners[rank][id]);
                    theirs.is_some_and(|t| self.shared[peer][t.exchange])
                });
                if !there {
                    return false;
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
                    .push_back(Job::WaitEvent { event, index, run });
            }
            kind => {
                let mut engine = matches!(kind, OperationKind::Collective(_));
                let (group, posting) = match kind {
                    OperationKind::Wait(group) => (&group[..], false),
                    kind => (kind.posted(), true),
                };
                let mut numbers = Vec::new();
                for &id in group {
                    self.posted[rank][id] += i64::from(posting);
                    numbers.push(self.posted[rank][id]);
                    engine |= posting && program.transfers[id].backend == Backend::Nccl;
                }
                self.numbers.insert((rank, run, index), numbers);
                let turn = engine.then_some(self.engine[rank].0);
                self.engine[rank].0 += usize::from(engine);
                self.streams[rank][stream]
                    .jobs
                    .push_back(Job::Operation { index, run, turn });
            }
        }
        self.hosts[rank].1 += 1;
        true
    }

    /// A step of a stream.
    fn stream(&mut self, rank: usize, stream: usize, held_too: bool) -> bool {
        let Some(&job) = self.streams[rank][stream].jobs.front() else {
            return false;
        };
        let held = |hold: Hold| !held_too && self.schedule.held.contains(&hold);
        match job {
            Job::Record(event) => self.events[event] = true,
            Job::WaitEvent { event, index, .. } => {
                if !self.events[event] || held(Hold::Operation { rank, index }) {
                    return false;
                }
            }
            Job::Boundary(_) if held(Hold::Boundary { rank }) => return false,
            Job::Boundary(run) => self.boundary(rank, run),
            Job::Operation { index, run, turn } => {
                if self.streams[rank][stream].chains.is_none() {
                    let waits = self.schedule.engine == Engine::OneByOne
                        && turn.is_some_and(|turn| turn > self.engine[rank].1);
                    if waits || held(Hold::Operation { rank, index }) {
                        return false;
                    }
                    let (chains, after) = self.begin(rank, run, index);
                    let state = &mut self.streams[rank][stream];
                    (state.chains, state.after) = (Some(chains), after);
                    return true;
                }
                let accesses_held = held(Hold::Accesses { rank, index });
                let mut chains = self.streams[rank][stream].chains.take().unwrap_or_default();
                let mut moved = false;
                for done in 0..chains.len() {
                    let next = done + self.random.below(chains.len() - done);
                    chains.swap(done, next);
                    let chain = &mut chains[done];
                    let Some(step) = chain.steps.front() else {
                        continue;
                    };
                    let signals = |transfer| Hold::Signals {
                        rank,
                        index,
                        transfer,
                    };
                    let signals_held = chain.signals.is_some_and(|id| held(signals(id)));
                    if signals_held || (accesses_held && step.is_access()) {
                        continue;
                    }
                    moved = self.step(rank, chain.by, step);
                    if moved {
                        chain.steps.pop_front();
                        break;
                    }
                }
                chains.retain(|chain| !chain.steps.is_empty());
                let after = &mut self.streams[rank][stream].after;
                if chains.is_empty() {
                    chains = std::mem::take(after);
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

    /// Steps of the caller between runs.
    fn boundary(&mut self, rank: usize, run: usize) {
        let left = self.streams[rank].iter().skip(1).any(|stream| {
            // What only has to say that it is done is done.
            let chains = stream.chains.iter().flatten();
            let mut rest = chains.flat_map(|chain| &chain.steps);
            let is_done = stream.chains.is_some()
                && rest.all(|s| matches!(s, Step::Nothing | Step::Set(..) | Step::Over(_)));
            stream
                .jobs
                .iter()
                .skip(usize::from(is_done))
                .any(|job| match job {
                    Job::Operation { run: of, .. } | Job::WaitEvent { run: of, .. } => *of <= run,
                    Job::Record(_) | Job::Boundary(_) => false,
                })
        });
        if left {
            self.memory.faults.insert(Fault::LeftOver { rank });
        }
        let place = run * self.ranks.len() + rank;
        self.outputs[place] = self.memory.take_outputs(&self.ranks[rank], run);
        self.memory.prepare(&self.ranks[rank], run + 1);
    }
}
