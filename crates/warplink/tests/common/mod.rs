//! Ranks for tests: processes that run the same test again, or threads of this one.
//!
//! The device is the host, or the one that `WARPLINK_TEST_DEVICE` names, so that the same cases run
//! on GPUs.

// Each test binary uses a part of this.
#![allow(dead_code, unreachable_pub, unused_imports)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod children;
mod elements;
pub mod hosts;
mod network;
mod processes;
mod relay;
mod room;
mod root;
mod shorthands;
mod stopwatch;
mod timed_barrier;
mod waiting_kernel;

pub use children::{Ended, wait_all};
pub use elements::{decode, encode};
pub use network::{has_network, leave_out};
pub use processes::{kill, processes_of, resume, stop_self, wait_until_stopped};
pub use relay::Relay;
pub use room::{
    at_least, device_of_thread, runs_case, several, share_gpus, waiting_streams, world, worlds,
};
use room::{gpus, ranks_per_gpu};
pub use root::root;
pub use shorthands::{
    allocate, assert_error, assert_names_peer, assert_says, await_word, complete, downloaded,
    from_first, recorded, ring_requests, transfer_from_first, transfer_once, without_descriptors,
    write_word,
};
use std::collections::BTreeMap;
use std::fmt::Display;
use std::net::{IpAddr, Ipv4Addr};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
pub use stopwatch::{Stopwatch, time_on_processor};
pub use timed_barrier::TimedBarrier;
pub use waiting_kernel::WaitingKernel;
use warplink::bootstrap::{JoinConfig, Rendezvous, UniqueId};
use warplink::device::{
    self, AllocationKind, Delays, Device, DeviceConfig, DeviceSlice, MemoryOp, Priority, Stream,
    Word,
};
use warplink::memory::Region;
use warplink::p2p::Protocol;
use warplink::{Communicator, Config, DeviceKind, Error, ErrorKind, Rank};

/// Longest that the ranks of one test may run, unless it says otherwise.
pub const LIMIT: Duration = Duration::from_secs(120);

/// The number that a variable says how much of something there is to be, if it is set.
pub fn number_from_env(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(
        text.parse()
            .unwrap_or_else(|_| panic!("{name} is '{text}'; expected a number")),
    )
}

/// [`LIMIT`], or as many seconds as `WARPLINK_TEST_LIMIT` says.
fn limit() -> Duration {
    number_from_env("WARPLINK_TEST_LIMIT").map_or(LIMIT, Duration::from_secs)
}

/// Prefix of lines of [`tell`].
const COUNTED: &str = "counted: ";

/// Printed by a rank that is a process, after joining.
const JOINED: &str = "this rank has joined";

/// Printed by a rank that reaches the end of [`Ranks::run_losing`].
const SURVIVED: &str = "this rank has survived";

/// Prints how much was done, also from a rank that is a process of its own; `scripts/device-tests.sh` shows it.
pub fn tell(text: impl Display) {
    println!("{COUNTED}{text}");
}

/// The device under test.
pub fn kind() -> DeviceKind {
    let Ok(name) = std::env::var("WARPLINK_TEST_DEVICE") else {
        return DeviceKind::Host;
    };
    let kind = name.parse().unwrap();
    if kind == DeviceKind::Cuda {
        // NVLink multicast cannot be used on every machine that tests run on, and a process cannot set this for itself.
        let multicast = std::env::var("NCCL_NVLS_ENABLE");
        assert_eq!(
            multicast.as_deref(),
            Ok("0"),
            "tests on GPUs need what .cargo/config.toml or scripts/device-environment.sh sets"
        );
    }
    kind
}

/// The device under test, alone.
pub fn open_device() -> Arc<dyn Device> {
    device::open(&DeviceConfig::new(kind(), 0)).unwrap()
}

/// How the ranks of a test run.
#[derive(Clone, Debug, Default)]
pub struct Ranks {
    /// How many.
    pub world: usize,
    /// Longest random delay of the host device's operations.
    pub delay: Option<Duration>,
    /// Each process sees one GPU alone.
    pub own_gpu_only: bool,
    /// Further variables of the processes.
    pub env: BTreeMap<String, String>,
    /// A change to each rank's configuration.
    pub config: Option<fn(&mut Config)>,
    /// Longest that they may run, instead of [`LIMIT`] or `WARPLINK_TEST_LIMIT`.
    pub limit: Option<Duration>,
    /// The processes get the arguments of this one, which is no test.
    pub own_arguments: bool,
}

const RANK: &str = "WARPLINK_TEST_RANK";

/// Where the ranks of a test leave files for each other.
const MEETING: &str = "WARPLINK_TEST_MEETING";

/// Which of a test's groups of ranks a process belongs to: a test may run several, one after another.
const GROUP: &str = "WARPLINK_TEST_GROUP";

/// Counts the groups of ranks of the test that calls this; every process of a test counts the same.
fn next_group() -> usize {
    static GROUPS: Mutex<BTreeMap<String, usize>> = Mutex::new(BTreeMap::new());
    let mut groups = GROUPS.lock().unwrap_or_else(PoisonError::into_inner);
    let next = groups.entry(name_of_test()).or_default();
    *next += 1;
    *next - 1
}

fn name_of_test() -> String {
    let thread = std::thread::current();
    thread
        .name()
        .expect("tests run in named threads")
        .to_owned()
}

/// Whether this process is a rank that a test started.
pub fn is_rank() -> bool {
    std::env::var_os(RANK).is_some()
}

/// Runs `body` as each of `world` processes, and fails if one does.
pub fn processes(world: usize, body: impl Fn(&Communicator)) {
    Ranks::of(world).run(body);
}

impl Ranks {
    pub fn of(world: usize) -> Self {
        Self {
            world,
            ..Self::default()
        }
    }

    /// `count` ranks, or `None` where the devices have room for fewer only.
    pub fn all(count: usize) -> Option<Self> {
        (world(count) >= count).then(|| Self::of(count))
    }

    /// Sets a variable of the processes.
    pub fn with_env(mut self, name: &str, value: &str) -> Self {
        self.env.insert(name.to_owned(), value.to_owned());
        self
    }

    /// Runs `body` as each process. A signal must kill the `victims` in it; every other rank must reach its end, or
    /// [`exit_as_survivor`].
    pub fn run_losing(self, victims: &[usize], body: impl FnOnce(Communicator)) {
        let ended = self.start(|comm| {
            body(comm);
            println!("{SURVIVED}");
        });
        let Some(ended) = ended else { return };
        let as_expected = |(rank, end): (usize, &Ended)| {
            let survives = !victims.contains(&rank);
            (end.code, end.output.contains(SURVIVED)) == (survives.then_some(0), survives)
        };
        if !ended.iter().enumerate().all(as_expected) {
            // One rank may fail because of another.
            let outputs = ended.iter().enumerate();
            let outputs: Vec<_> = outputs
                .map(|(rank, end)| format!("rank {rank}, {:?}:\n{}", end.code, end.output))
                .collect();
            panic!("victims {victims:?}\n{}", outputs.join("\n"));
        }
    }

    /// Runs `body` as each process, and fails if one does.
    pub fn run(self, body: impl Fn(&Communicator)) {
        let ended = self.start(|comm| {
            body(&comm);
            comm.close().unwrap();
        });
        assert_all_ended_well(ended.as_deref());
    }

    /// In the test's process, starts the ranks and tells how they ended; in a rank, runs `body` and
    /// gives `None`.
    pub fn start(self, body: impl FnOnce(Communicator)) -> Option<Vec<Ended>> {
        self.start_with(|_| {}, body)
    }

    fn start_with(
        self,
        change: impl Fn(&mut Config),
        body: impl FnOnce(Communicator),
    ) -> Option<Vec<Ended>> {
        let group = next_group();
        if !is_rank() {
            return Some(self.start_processes(group));
        }
        if std::env::var(GROUP).unwrap() == group.to_string() {
            body(self.join_as_rank(&change));
            if std::env::var_os("WARPLINK_TEST_SHORT").is_some() {
                wait_for_threads();
            }
        }
        None
    }

    /// Joins the others, in a process of [`start_processes`](Self::start_processes).
    fn join_as_rank(&self, change: &dyn Fn(&mut Config)) -> Communicator {
        let parent = rustix::process::getppid();
        rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))
            .unwrap();
        assert_eq!(
            rustix::process::getppid(),
            parent,
            "the test ended before its rank began"
        );
        let mut config = config_of_rank();
        if let Some(own) = self.config {
            own(&mut config);
        }
        change(&mut config);
        let comm = Communicator::join(&config).unwrap();
        println!("{JOINED}");
        comm
    }

    /// Starts each rank as a process that runs this test again, and waits until all have ended.
    fn start_processes(self, group: usize) -> Vec<Ended> {
        let name = name_of_test();
        let id = UniqueId::create(IpAddr::V4(Ipv4Addr::LOCALHOST), 0).unwrap();
        // The listener that found the port is this process's; rank 0 is another.
        let _held = id.release();
        let meeting = tempfile::tempdir().unwrap();
        let started = Instant::now();
        let children = (0..self.world).map(|rank| {
            let mut command = Command::new(std::env::current_exe().unwrap());
            if self.own_arguments {
                command.args(std::env::args_os().skip(1));
            } else {
                command
                    .args([&name, "--exact", "--include-ignored"])
                    .args(["--nocapture", "--test-threads=1"]);
            }
            command
                .env(RANK, rank.to_string())
                .env(GROUP, group.to_string())
                .env(MEETING, meeting.path())
                .env("WARPLINK_RANK", rank.to_string())
                .env("WARPLINK_LOCAL_RANK", rank.to_string())
                .env("WARPLINK_WORLD", self.world.to_string())
                .env("WARPLINK_ID", id.to_string())
                .env("WARPLINK_DEVICE", kind().to_string())
                .env("WARPLINK_TIMEOUT", "60")
                .env("CUDA_DEVICE_MAX_CONNECTIONS", "32")
                .envs(&self.env)
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped());
            if let Some(delay) = self.delay {
                command.env("WARPLINK_HOST_DELAY_US", delay.as_micros().to_string());
            }
            if self.own_gpu_only {
                command.env("CUDA_VISIBLE_DEVICES", rank.to_string());
            }
            let shared = ranks_per_gpu();
            if kind() == DeviceKind::Cuda && shared > 1 {
                command
                    .env("CUDA_VISIBLE_DEVICES", (rank % gpus()).to_string())
                    .env("WARPLINK_LOCAL_RANK", "0")
                    // More connections of all ranks of a GPU together find no memory.
                    .env(
                        "CUDA_DEVICE_MAX_CONNECTIONS",
                        (64 / shared).clamp(1, 32).to_string(),
                    );
            }
            command.spawn().unwrap()
        });
        let children: Vec<Child> = children.collect();
        wait_all(children, started, self.limit.unwrap_or_else(limit))
    }
}

/// Fails where a rank of [`Ranks::start`] did, else prints what they [`tell`].
///
/// Shows the output of all ranks that failed: one may fail because of another.
pub fn assert_all_ended_well(ended: Option<&[Ended]>) {
    let all = || ended.into_iter().flatten().enumerate();
    let failed = all().filter(|(_, end)| end.code != Some(0));
    let failed: Vec<String> = failed
        .map(|(rank, end)| format!("rank {rank} failed, {:?}:\n{}", end.code, end.output))
        .collect();
    assert!(failed.is_empty(), "{}", failed.join("\n"));
    for (rank, end) in all() {
        // A process that takes itself for none of the ranks ends well, too.
        assert!(
            end.output.contains(JOINED),
            "rank {rank} did not join:\n{}",
            end.output
        );
        // The name of the test may be in front of it.
        let told = end
            .output
            .lines()
            .filter_map(|line| line.split_once(COUNTED));
        told.for_each(|(_, text)| tell(text));
    }
}

/// Limits of ranks in [`pretending`].
pub const LIMITS: [&str; 2] = ["no-atomics", "no-peer-access"];

/// Runs `body` as each of `world` processes whose devices lack atomic operations on the others' memory, and whose devices
/// do not reach it at all; whether they do.
pub fn pretending(world: usize, body: impl Fn(&Communicator, bool)) {
    for limit in LIMITS {
        Ranks::of(world)
            .with_env("WARPLINK_PRETEND", limit)
            .run(|comm| body(comm, limit == "no-atomics"));
    }
}

/// As [`Communicator::barrier`], but when it returns, all ranks have had the answer, so that the one whose
/// store gives it may be lost. All ranks are processes that a test started.
pub fn barrier_that_all_have_passed(comm: &Communicator) {
    static CALLS: AtomicUsize = AtomicUsize::new(0);
    let call = CALLS.fetch_add(1, Ordering::Relaxed);
    comm.barrier().unwrap();
    meet(comm.rank(), 0..comm.world(), &format!("call {call}"));
}

/// Ends this process as a survivor of [`Ranks::run_losing`], without closing its communicator.
pub fn exit_as_survivor() -> ! {
    println!("{SURVIVED}");
    std::process::exit(0)
}

/// As [`exit_as_survivor`], once every rank but the victim is here: a process that ends closes its connections, and a
/// rank that has not yet noticed the victim's loss may take this one for the lost rank.
pub fn exit_with_survivors(comm: &Communicator, victim: usize) -> ! {
    let survivors = (0..comm.world()).filter(|&rank| rank != victim);
    meet(comm.rank(), survivors, "survived");
    exit_as_survivor()
}

/// Waits, by files and not through the library, until all of `ranks` are here.
fn meet(own: usize, ranks: impl Iterator<Item = usize>, occasion: &str) {
    let meeting = std::env::var_os(MEETING).unwrap();
    let name = |rank: usize| format!("{occasion} {rank}");
    hosts::leave(meeting.as_ref(), &name(own), &[]);
    for rank in ranks {
        hosts::take(meeting.as_ref(), &name(rank));
    }
}

/// Kills this process in a moment, when the others are inside of what it will not leave.
pub fn kill_self() -> ! {
    std::thread::sleep(Duration::from_millis(100));
    rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL)
        .unwrap();
    unreachable!("a process outlived SIGKILL")
}

/// Runs three ranks as processes, of which `victim` dies in [`lose`]; the others must come to the end of `body`.
pub fn with_victim(victim: usize, body: impl Fn(&Communicator)) {
    Ranks::of(world(3)).run_losing(&[victim], |comm| {
        body(&comm);
        exit_as_survivor()
    });
}

/// Kills `victim` while the other ranks are in `call`, which must fail by that soon.
pub fn lose(comm: &Communicator, victim: usize, call: impl FnOnce() -> Result<(), Error>) {
    comm.barrier().unwrap();
    if comm.rank() == victim {
        kill_self();
    }
    let started = Stopwatch::start();
    let error = call().unwrap_err();
    let took = started.elapsed();
    assert_names_peer(&error, ErrorKind::PeerLost, victim);
    assert!(took < Duration::from_secs(5), "{error} came after {took:?}");
}

/// Waits until the library's threads have ended. One of them gives the GPU's context back; compute-sanitizer, which
/// looks at contexts when a process exits, does not stand that at the same time.
fn wait_for_threads() {
    let is_ours = |task: std::io::Result<std::fs::DirEntry>| {
        let name = task.and_then(|task| std::fs::read_to_string(task.path().join("comm")));
        name.is_ok_and(|name| name.starts_with("warplink-"))
    };
    let until = Instant::now() + LIMIT / 4;
    while Instant::now() < until {
        let mut tasks = std::fs::read_dir("/proc/self/task").unwrap();
        if !tasks.any(is_ours) {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Rounds in a ring of `comm`, each checked; `before` is called with the round's number first.
pub fn ring(
    comm: &Communicator,
    protocol: Protocol,
    rounds: usize,
    before: impl Fn(usize),
) -> Result<(), Error> {
    const BYTES: usize = 64 << 10;
    let (rank, world) = (comm.rank(), comm.world());
    let left = (rank + world - 1) % world;
    let (send, receive) = (comm.alloc(BYTES)?, comm.alloc(BYTES)?);
    let stream = comm.create_stream(Priority::Normal)?;
    let requests = ring_requests(comm, &send, &receive, 0);
    let transfers = comm.exchange(&requests.map(|end| end.with_protocol(protocol)))?;
    for round in 0..rounds {
        before(round);
        send.upload(&values(comm.job_ranks()[rank], round, BYTES))?;
        complete(comm, &transfers, &stream)?;
        let sent = values(comm.job_ranks()[left], round, BYTES);
        assert!(receive.download()? == sent, "wrong data in round {round}");
    }
    Ok(())
}

fn config_of_rank() -> Config {
    Config::from_env().unwrap()
}

/// Whether ranks that could be threads are processes: where they share a GPU, since the driver lets a thread that frees
/// memory wait for all kernels of its process there, also for those that wait for that thread's rank; and on the host
/// device if `WARPLINK_TEST_PROCESSES` says so.
fn are_processes(world: usize) -> bool {
    match kind() {
        DeviceKind::Host => std::env::var_os("WARPLINK_TEST_PROCESSES").is_some(),
        DeviceKind::Cuda => world > gpus(),
    }
}

/// Runs `body` as each of `world` threads of this process, or as processes.
pub fn threads(world: usize, body: impl Fn(&Communicator) + Send + Sync) {
    threads_with(world, unchanged, body);
}

/// As [`threads`], with a change to each rank's configuration.
pub fn threads_with(
    world: usize,
    change: impl Fn(&mut Config) + Send + Sync,
    body: impl Fn(&Communicator) + Send + Sync,
) {
    threads_that_end(world, change, |comm| {
        body(&comm);
        comm.close().unwrap();
    });
}

/// As [`threads_with`], but `body` ends its communicator itself, in order or not.
pub fn threads_that_end(
    world: usize,
    change: impl Fn(&mut Config) + Send + Sync,
    body: impl Fn(Communicator) + Send + Sync,
) {
    if is_rank() || are_processes(world) {
        let ranks = Ranks::of(world);
        assert_all_ended_well(ranks.start_with(change, body).as_deref());
        return;
    }
    next_group();
    start_threads(world, &change, &body);
}

/// Runs `body` as each of `world` threads. Not generic, or it would be compiled for each caller.
fn start_threads(
    world: usize,
    change: &(dyn Fn(&mut Config) + Sync),
    body: &(dyn Fn(Communicator) + Sync),
) {
    let id = UniqueId::create(IpAddr::V4(Ipv4Addr::LOCALHOST), 0).unwrap();
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..world)
            .map(|rank| {
                let mut config = config_of_thread(&id, rank, world);
                change(&mut config);
                scope.spawn(move || body(Communicator::join(&config).unwrap()))
            })
            .collect();
        for rank in ranks {
            rank.join().unwrap();
        }
    });
}

/// How a rank joins that is a thread. Several such ranks may have the same GPU.
pub fn config_of_thread(id: &UniqueId, rank: usize, world: usize) -> Config {
    let join = JoinConfig::new(Rendezvous::Id(id.clone()), rank, world);
    let mut config = Config::new(join, kind());
    if kind() == DeviceKind::Cuda {
        config.device.ordinal = device_of_thread(rank);
    }
    config.timeout = Duration::from_secs(60);
    // As ranks that are processes have it from their environment.
    if let Ok(pretend) = std::env::var("WARPLINK_PRETEND") {
        config.device.pretend = pretend.parse().unwrap();
    }
    config
}

/// Random delays for [`threads_with`].
pub fn delays(config: &mut Config, max: Duration) {
    config.device.delays = Some(Delays {
        seed: config.join.rank as u64 + 1,
        max,
    });
}

/// No change, for [`threads_that_end`].
pub fn unchanged(_: &mut Config) {}

/// A change for [`threads_with`]: another timeout.
pub fn with_timeout(timeout: Duration) -> impl Fn(&mut Config) + Send + Sync {
    move |config| config.timeout = timeout
}

/// A change for [`threads_with`]: random delays of at most so many microseconds where the device has them.
pub fn delayed(micros: u64) -> impl Fn(&mut Config) + Send + Sync {
    move |config| {
        if kind() == DeviceKind::Host {
            delays(config, Duration::from_micros(micros));
        }
    }
}

/// `count` pseudo-random values that depend on every argument.
pub fn values(rank: usize, round: usize, count: usize) -> Vec<u8> {
    let mut x = (rank as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
        ^ (round as u64 + 1).wrapping_mul(0xd1b5_4a32_d192_ed03);
    let mut values = Vec::with_capacity(count + 8);
    while values.len() < count {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        values.extend_from_slice(&x.to_le_bytes());
    }
    values.truncate(count);
    values
}
