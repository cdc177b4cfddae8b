//! Running accepted programs on the host device, eagerly and as graphs, under random delays. Ranks are
//! threads that stay joined from one program to the next.

use super::elements::{decode, encode};
use super::evidence::Accepted;
use super::interpreter::{Choice, RUNS, SOME_VALUES, input_of};
use super::sample::Sample;
use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;
use warplink::bootstrap::{JoinConfig, Rendezvous, UniqueId};
use warplink::device::{AllocationKind, Delays, DeviceSlice, Priority, Stream};
use warplink::p2p::Path;
use warplink::program::ir::Role;
use warplink::program::{Bindings, Executor, Parameters, PrepareOptions, Program, TensorInstance};
use warplink::{Communicator, Config, Deadline, DeviceKind, Error, ErrorKind, Result};

/// Longest random delay of an operation.
const DELAY: Duration = Duration::from_micros(60);

/// How many programs run before the ranks join anew, with other delays.
const PROGRAMS: u64 = 5000;

/// What outputs are filled with before each run.
const FILL: u8 = 0xff;

/// How far a value may be from the interpreter's, relative to it.
const TOLERANCE: f64 = 1e-5;

/// Runs programs of any number of ranks.
pub(crate) struct Runner {
    seed: u64,
    limit: Duration,
    path: Option<Path>,
    crews: HashMap<usize, Crew>,
}

/// Ranks that have joined one another.
struct Crew {
    orders: Vec<Sender<Option<Arc<Order>>>>,
    results: Receiver<(usize, Ended)>,
    threads: Vec<JoinHandle<()>>,
    left: u64,
}

/// The outputs of a rank's runs, and why they ended early.
pub(crate) struct Ended {
    pub(crate) outputs: Vec<Vec<f64>>,
    pub(crate) error: Option<Error>,
}

/// Work of the ranks.
pub(crate) struct Order {
    pub(crate) program: Program,
    pub(crate) parameters: Parameters,
    /// Streams of the pool.
    pub(crate) streams: usize,
    /// How many runs come first, one by one.
    pub(crate) eager: usize,
    /// How many come after them, as a graph.
    pub(crate) captured: usize,
    /// After how many runs the inputs are the first again.
    pub(crate) inputs: usize,
    /// How integers that kernels read are chosen.
    pub(crate) choice: Choice,
    /// How long it may take, if less than others.
    pub(crate) limit: Option<Duration>,
}

impl Runner {
    /// Programs that take longer than `limit` count as hanging.
    pub(crate) fn new(seed: u64, limit: Duration) -> Self {
        Self {
            seed,
            limit,
            path: None,
            crews: HashMap::new(),
        }
    }

    /// By this path.
    pub(crate) fn by(mut self, path: Path) -> Self {
        self.path = Some(path);
        self
    }

    /// Runs an accepted program.
    ///
    /// # Errors
    /// A hang, a failure, or a difference from the interpreter.
    pub(crate) fn run(
        &mut self,
        sample: &Sample,
        accepted: &Accepted,
    ) -> std::result::Result<(), String> {
        let world = sample.world;
        let order = Order {
            program: sample.program.clone(),
            parameters: sample.parameters.clone(),
            streams: sample.streams,
            eager: RUNS,
            captured: if accepted.as_graph { RUNS } else { 0 },
            inputs: RUNS,
            choice: SOME_VALUES,
            limit: None,
        };
        let outputs = self.perform(world, order)?;
        let mut ranks = outputs.iter().enumerate();
        let wrong = ranks.find_map(|(rank, own)| differs(rank, own, accepted, world));
        wrong.map_or(Ok(()), |what| {
            Err(format!("accepted, but on the device, {what}"))
        })
    }

    /// Has ranks run a program; the outputs of each rank's runs.
    ///
    /// # Errors
    /// A hang or a failure.
    pub(crate) fn perform(
        &mut self,
        world: usize,
        order: Order,
    ) -> std::result::Result<Vec<Vec<Vec<f64>>>, String> {
        let ended = self.ended(world, order)?;
        let mut outputs = Vec::new();
        for (rank, ended) in ended.into_iter().enumerate() {
            if let Some(error) = ended.error {
                return Err(format!("accepted, but on the device, rank {rank}: {error}"));
            }
            outputs.push(ended.outputs);
        }
        Ok(outputs)
    }

    /// Has ranks run a program; how that ends on each.
    ///
    /// # Errors
    /// The ranks cannot be told.
    pub(crate) fn ended(
        &mut self,
        world: usize,
        order: Order,
    ) -> std::result::Result<Vec<Ended>, String> {
        let (seed, limit, path) = (self.seed, self.limit, self.path);
        let crew = self
            .crews
            .entry(world)
            .or_insert_with(|| Crew::join(world, seed, limit, path));
        let order = Arc::new(order);
        for rank in &crew.orders {
            rank.send(Some(order.clone())).map_err(|e| e.to_string())?;
        }
        let mut all = Vec::new();
        for _ in 0..world {
            all.push(crew.results.recv().map_err(|error| error.to_string())?);
        }
        all.sort_by_key(|(rank, _)| *rank);
        let all: Vec<Ended> = all.into_iter().map(|(_, ended)| ended).collect();
        crew.left -= 1;
        if crew.left == 0 || all.iter().any(|ended| ended.error.is_some()) {
            self.seed += 1;
            if let Some(crew) = self.crews.remove(&world) {
                crew.leave();
            }
        }
        Ok(all)
    }
}

impl Drop for Runner {
    fn drop(&mut self) {
        self.crews.drain().for_each(|(_, crew)| crew.leave());
    }
}

impl Crew {
    fn join(world: usize, seed: u64, limit: Duration, path: Option<Path>) -> Self {
        let id = UniqueId::create(IpAddr::V4(Ipv4Addr::LOCALHOST), 0).unwrap();
        let (answer, results) = channel();
        let mut orders = Vec::new();
        let mut threads = Vec::new();
        for rank in 0..world {
            let (order, next) = channel();
            orders.push(order);
            let (id, answer) = (id.clone(), answer.clone());
            threads.push(std::thread::spawn(move || {
                let mut join = JoinConfig::new(Rendezvous::Id(id), rank, world);
                // A rank that gets no processor for a while is not lost.
                join.heartbeat_limit = limit;
                let mut config = Config::new(join, DeviceKind::Host);
                config.path = path;
                config.device.delays = Some(Delays {
                    seed: 64 * seed + rank as u64 + 1,
                    max: DELAY,
                });
                member(&config, &next, &answer, limit);
            }));
        }
        Self {
            orders,
            results,
            threads,
            left: PROGRAMS,
        }
    }

    /// Ends all ranks, also where they hang.
    fn leave(self) {
        for rank in &self.orders {
            let _ = rank.send(None);
        }
        for thread in self.threads {
            let _ = thread.join();
        }
    }
}

/// A rank: runs what it is told until it is told to leave.
fn member(
    config: &Config,
    orders: &Receiver<Option<Arc<Order>>>,
    answer: &Sender<(usize, Ended)>,
    limit: Duration,
) {
    let comm = match Communicator::join(config) {
        Ok(comm) => comm,
        Err(error) => {
            while let Ok(Some(_)) = orders.recv() {
                let error = Error::new(error.kind(), error.to_string());
                let _ = answer.send((config.join.rank, Ended::by(error)));
            }
            return;
        }
    };
    let mut rank = Rank {
        executor: comm.executor(),
        stream: comm.create_stream(Priority::Normal).unwrap(),
        memory: HashMap::new(),
        limit,
        comm: &comm,
    };
    while let Ok(Some(order)) = orders.recv() {
        let ended = rank.run(&order).unwrap_or_else(Ended::by);
        let _ = answer.send((comm.rank(), ended));
    }
    drop(rank);
    // What hangs is let go, so that the threads of its streams end.
    let over = Error::closed("the programs are over");
    comm.device().fault().raise(over);
}

struct Rank<'a> {
    comm: &'a Communicator,
    executor: Executor,
    stream: Stream,
    /// Memory by length and number.
    memory: HashMap<(usize, usize), DeviceSlice>,
    limit: Duration,
}

impl Rank<'_> {
    fn slice(&mut self, bytes: usize, number: usize) -> Result<DeviceSlice> {
        if let Some(slice) = self.memory.get(&(bytes, number)) {
            return Ok(slice.clone());
        }
        let slice = self.comm.device().allocate(bytes, AllocationKind::Plain)?;
        self.memory.insert((bytes, number), slice.clone());
        Ok(slice)
    }

    /// The outputs of all runs, eager ones first; where one fails, what the outputs hold then.
    fn run(&mut self, order: &Order) -> Result<Ended> {
        let options = PrepareOptions {
            streams: order.streams,
            verify: false,
            ..PrepareOptions::default()
        };
        let prepared = self
            .executor
            .prepare(&order.program, &order.parameters, options)?;
        let tensors = &prepared.rank_program().tensors;
        let outer = tensors
            .iter()
            .enumerate()
            .filter(|(_, t)| t.role != Role::Local);
        let outer: Vec<(usize, &TensorInstance)> = outer.collect();
        let runs = order.eager + order.captured;
        let mut bindings = Bindings::new();
        // For each tensor, what is bound, and what is copied before or after each run.
        let mut slices: Vec<(DeviceSlice, Vec<DeviceSlice>)> = Vec::new();
        for &(tensor, instance) in &outer {
            let bytes = instance.bytes;
            let first = slices.len() * (runs + 1);
            let bound = self.slice(bytes, first)?;
            let others = (1..=runs).map(|number| self.slice(bytes, first + number));
            let others = others.collect::<Result<Vec<_>>>()?;
            if instance.role == Role::Input {
                for (run, slice) in others.iter().enumerate() {
                    let elements = 0..bytes / instance.dtype.size();
                    let value = |at| {
                        let of = (run % order.inputs, self.comm.rank());
                        input_of(instance, order.choice, of, tensor, at)
                    };
                    let values: Vec<f64> = elements.map(value).collect();
                    let values = encode(instance.dtype, &values);
                    self.comm.device().upload(slice, &values)?;
                }
            }
            bindings.insert(instance.name.to_string(), bound.clone());
            slices.push((bound, others));
        }
        let run = |number: usize, enqueue: &dyn Fn(&Stream) -> Result<()>| -> Result<()> {
            let roles = outer.iter().map(|(_, instance)| instance.role);
            for (role, (bound, others)) in roles.clone().zip(&slices) {
                match role {
                    Role::Input => self.stream.copy(bound, &others[number])?,
                    _ => self.stream.fill(bound, FILL)?,
                }
            }
            enqueue(&self.stream)?;
            for (role, (bound, others)) in roles.zip(&slices) {
                if role == Role::Output {
                    self.stream.copy(&others[number], bound)?;
                }
            }
            Ok(())
        };
        let plan = prepared.bind(&bindings)?;
        for number in 0..order.eager {
            run(number, &|stream| plan.run(stream))?;
        }
        let limit = order.limit.unwrap_or(self.limit);
        if let Err(error) = self.stream.synchronize(Deadline::after(limit)) {
            // Its streams still use it.
            std::mem::forget(plan);
            let held = outer.iter().zip(&slices);
            let held = held.map(|((_, instance), (bound, _))| (*instance, bound));
            return Ok(Ended {
                outputs: vec![self.outputs(held)?],
                error: Some(error),
            });
        }
        if order.captured > 0 {
            let captured = plan.capture()?;
            for number in order.eager..runs {
                run(number, &|stream| captured.launch(stream))?;
            }
            if let Err(error) = self.stream.synchronize(Deadline::after(self.limit)) {
                std::mem::forget(captured);
                return Err(error);
            }
        }
        let mut all = Vec::new();
        for number in 0..runs {
            let kept = outer.iter().zip(&slices);
            let kept = kept.map(|((_, instance), (_, others))| (*instance, &others[number]));
            all.push(self.outputs(kept)?);
        }
        Ok(Ended {
            outputs: all,
            error: None,
        })
    }

    /// The contents of all outputs; no numbers where they hold what they were filled with.
    fn outputs<'t>(
        &self,
        tensors: impl Iterator<Item = (&'t TensorInstance, &'t DeviceSlice)>,
    ) -> Result<Vec<f64>> {
        let mut outputs = Vec::new();
        for (instance, slice) in tensors.filter(|(instance, _)| instance.role == Role::Output) {
            let mut bytes = vec![0; instance.bytes];
            self.comm.device().download(slice, &mut bytes)?;
            let elements = bytes.chunks(instance.dtype.size());
            let values = elements.zip(decode(instance.dtype, &bytes));
            outputs.extend(values.map(|(bytes, value)| {
                if bytes.iter().all(|byte| *byte == FILL) {
                    f64::NAN
                } else {
                    value
                }
            }));
        }
        Ok(outputs)
    }
}

impl Ended {
    const fn by(error: Error) -> Self {
        Self {
            outputs: Vec::new(),
            error: Some(error),
        }
    }
}

/// Where a rank's outputs are not what the interpreter says.
fn differs(rank: usize, outputs: &[Vec<f64>], accepted: &Accepted, world: usize) -> Option<String> {
    for (number, own) in outputs.iter().enumerate() {
        let expected = &accepted.outputs[number % RUNS * world + rank];
        let near = |a: &f64, b: &f64| (a - b).abs() <= TOLERANCE * a.abs().max(1.0);
        let same = own.len() == expected.len() && own.iter().zip(expected).all(|(a, b)| near(a, b));
        // What is rounded to few bits may be further off.
        let (run, program) = (number % RUNS, &accepted.ranks[rank]);
        if !same && accepted.meaning.differs(program, run, own).is_some() {
            let how = if number < RUNS {
                "eagerly"
            } else {
                "as a graph"
            };
            return Some(format!(
                "rank {rank}, run {run} {how} gives {own:?}; expected {expected:?}"
            ));
        }
    }
    None
}
