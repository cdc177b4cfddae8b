//! Ranks that do not call what the others do, where the vendor's library does the calls: it compares nothing, and does not
//! tell for whom it waits.

use crate::common::{
    Ranks, Stopwatch, TimedBarrier, assert_names_peer, assert_says, at_least, processes_of,
    recorded, resume, stop_self, threads, threads_that_end, wait_until_stopped, with_timeout,
    world,
};
use crate::data::library;
use crate::expected::sum_of;
use crate::launches::{download, memory, sum, sums};
use std::time::Duration;
use warplink::collective::BoundCall;
use warplink::device::{DeviceSlice, Priority, ReduceOp, Stream};
use warplink::{Collectives, Communicator, DType, Deadline, Error, ErrorKind};

/// How soon every other rank must have its error.
const SOON: Duration = Duration::from_secs(5);

/// The rank that does something else.
const OTHER: usize = 1;

/// The most elements of a call.
const MOST: usize = 100_000;

/// Call of a rank.
#[derive(Clone, Copy, Debug)]
enum Made {
    Reduce(usize, ReduceOp),
    Broadcast(usize, usize),
    Barrier,
}

const USUAL: Made = Made::Reduce(10, ReduceOp::Sum);

/// A rank with what it makes calls with.
struct Caller<'a> {
    comm: &'a Communicator,
    collectives: Collectives,
    stream: Stream,
    memory: DeviceSlice,
}

impl<'a> Caller<'a> {
    /// None where there is no library for these ranks.
    fn join(comm: &'a Communicator) -> Option<Self> {
        let collectives = library(comm)?;
        let stream = comm.create_stream(Priority::Normal).unwrap();
        let memory = memory(comm, MOST);
        comm.device().upload(&memory, &vec![0; 4 * MOST]).unwrap();
        Some(Self {
            comm,
            collectives,
            stream,
            memory,
        })
    }

    fn call(&self, made: Made) -> Result<(), Error> {
        let of = |count: usize| self.memory.slice(0..4 * count).unwrap();
        let (collectives, stream) = (&self.collectives, &self.stream);
        match made {
            Made::Reduce(count, op) => {
                collectives.all_reduce(&of(count), &of(count), DType::I32, op, stream)
            }
            Made::Broadcast(count, root) => {
                collectives.broadcast(&of(count), &of(count), root, stream)
            }
            Made::Barrier => collectives.barrier(stream),
        }
    }

    /// Binds a sum.
    fn bind(&self, count: usize) -> Result<BoundCall, Error> {
        let memory = self.memory.slice(0..4 * count)?;
        self.collectives.bind(&sum_of(count), &memory, &memory)
    }

    /// Waits for a call that some rank has not made.
    fn wait_in_vain(&self) -> Error {
        let until = Deadline::after(Duration::from_millis(500));
        let ended = self.comm.synchronize_until(&self.stream, until);
        ended.expect_err("not all ranks have made the call")
    }

    fn call_and_wait(&self, made: Made) -> Result<(), Error> {
        self.call(made)?;
        self.comm.synchronize(&self.stream)
    }
}

/// Runs ranks of which one makes another call than the others, once, and all the same ones before and after. All must
/// soon get an error that says what was called, and go on in another communicator.
fn differ(usual: Made, other: Made, says: [&str; 2]) {
    let Some(ranks) = at_least(3) else { return };
    let all = TimedBarrier::new(ranks);
    threads_that_end(ranks, with_timeout(Duration::from_secs(60)), |comm| {
        let caller = Caller::join(&comm);
        if let Some(caller) = &caller {
            caller.call_and_wait(USUAL).unwrap();
            let watch = Stopwatch::start();
            let own = if comm.rank() == OTHER { other } else { usual };
            let mut ended = caller.call_and_wait(own);
            // The library may be done with it.
            while ended.is_ok() && watch.elapsed() < SOON {
                std::thread::sleep(Duration::from_millis(1));
                ended = caller.call_and_wait(USUAL);
            }
            let (error, took) = (ended.unwrap_err(), watch.elapsed());
            println!("rank {}: {error} ({took:?})", comm.rank());
            // A rank may hear of it from one that has found it.
            let kinds = [ErrorKind::Mismatch, ErrorKind::PeerFailed];
            assert!(kinds.contains(&error.kind()), "{error}");
            assert_says(
                &error,
                &["the peer calls", "this rank calls (call 2 of both)"],
            );
            assert_says(&error, &says);
            assert!(took < SOON, "{error} came after {took:?}");
            let again = caller.call_and_wait(USUAL).unwrap_err();
            assert!(kinds.contains(&again.kind()), "{again}");
            let watch = Stopwatch::start();
            let bound = caller.bind(10).unwrap_err();
            assert!(kinds.contains(&bound.kind()), "{bound}");
            assert!(watch.elapsed() < SOON, "{bound}");
        }
        // None goes on while another still waits.
        all.wait();
        if caller.is_none() {
            return comm.close().unwrap();
        }
        let left = comm.survivors().unwrap();
        drop(caller);
        drop(comm);
        let anew = Caller::join(&left).unwrap();
        assert_eq!(left.world(), ranks);
        anew.call_and_wait(USUAL).unwrap();
        drop(anew);
        left.close().unwrap();
    });
}

#[test]
fn another_count_is_told_where_the_library_does_not_find_it() {
    // The library is done with the first, and waits for ever in the second.
    for count in [11, MOST] {
        let sums = |count| Made::Reduce(count, ReduceOp::Sum);
        let says = format!("all_reduce of {count} i32, sum");
        differ(sums(12), sums(count), ["all_reduce of 12 i32, sum", &says]);
    }
}

#[test]
fn another_operator_is_told_where_the_library_does_not_find_it() {
    let by = |op| Made::Reduce(10, op);
    differ(
        by(ReduceOp::Sum),
        by(ReduceOp::Max),
        ["10 i32, sum", "10 i32, max"],
    );
}

#[test]
fn another_collective_is_told_where_the_library_does_not_find_it() {
    let says = ["barrier", "all_reduce of 100000 i32, sum"];
    differ(Made::Reduce(MOST, ReduceOp::Sum), Made::Barrier, says);
}

#[test]
fn another_root_is_told_where_the_library_does_not_find_it() {
    let from = |root| Made::Broadcast(10, root);
    let says = ["40 bytes, root 0", "40 bytes, root 1"];
    differ(from(0), from(1), says);
}

/// Runs ranks of which the first `calls` make a call more; each must get an error that names the first that did not, and
/// `says` this. Then all go on.
fn absent(callers: usize, says: &[&str]) {
    let Some(ranks) = at_least(3) else { return };
    let all = TimedBarrier::new(ranks);
    threads(ranks, |comm| {
        let Some(caller) = Caller::join(comm) else {
            return;
        };
        caller.call_and_wait(Made::Barrier).unwrap();
        let last = Made::Reduce(7, ReduceOp::Sum);
        caller.call_and_wait(last).unwrap();
        if comm.rank() < callers {
            caller.call(USUAL).unwrap();
        }
        all.wait();
        let error = (comm.rank() < callers).then(|| caller.wait_in_vain());
        all.wait();
        if let Some(error) = error {
            println!("rank {}: {error}", comm.rank());
            assert_names_peer(&error, ErrorKind::Timeout, callers);
            assert_says(&error, says);
            assert_says(&error, &["the communicator can still be used"]);
        } else {
            caller.call(USUAL).unwrap();
        }
        comm.synchronize(&caller.stream).unwrap();
        caller.call_and_wait(last).unwrap();
    });
}

#[test]
fn ranks_that_never_call_the_library_are_named_with_their_last_calls() {
    let call = "call 3, all_reduce of 10 i32, sum, is missing on";
    let of = |rank| format!("rank {rank} (whose last is all_reduce of 7 i32, sum)");
    absent(2, &[call, &of(2)]);
    absent(1, &[call, &format!("{}, {}", of(1), of(2))]);
}

/// Ranks ask one another by the job's numbers.
#[test]
fn ranks_are_named_as_their_communicator_numbers_them() {
    let Some(ranks) = at_least(3) else { return };
    let all = TimedBarrier::new(ranks);
    threads(ranks, |everyone| {
        let comm = everyone.subgroup(&[1, 2, 0]).unwrap();
        let Some(caller) = Caller::join(&comm) else {
            return;
        };
        if comm.rank() != OTHER {
            caller.call(USUAL).unwrap();
        }
        all.wait();
        let error = (comm.rank() != OTHER).then(|| caller.wait_in_vain());
        all.wait();
        if let Some(error) = error {
            assert_names_peer(&error, ErrorKind::Timeout, OTHER);
            assert_says(&error, &["is missing on rank 1 (which has made no call)"]);
        } else {
            caller.call(USUAL).unwrap();
        }
        comm.synchronize(&caller.stream).unwrap();
    });
}

/// One that is not taken for lost yet: it answers nothing.
#[test]
fn a_rank_that_is_stopped_is_named() {
    if world(2) < 2 {
        return;
    }
    let ranks = Ranks::of(2).with_env("WARPLINK_HEARTBEAT_LIMIT", "60");
    ranks.run(|comm| {
        let processes = processes_of(comm);
        let Some(caller) = Caller::join(comm) else {
            return;
        };
        caller.call_and_wait(USUAL).unwrap();
        comm.barrier().unwrap();
        if comm.rank() == OTHER {
            stop_self();
            caller.call(USUAL).unwrap();
        } else {
            caller.call(USUAL).unwrap();
            wait_until_stopped(processes[OTHER]);
            let error = caller.wait_in_vain();
            resume(processes[OTHER]);
            println!("{error}");
            assert_names_peer(&error, ErrorKind::Timeout, OTHER);
            assert_says(&error, &["is not done: no answer came from rank 1"]);
        }
        comm.synchronize(&caller.stream).unwrap();
    });
}

/// Each rank records its calls, or does not, as the others do with theirs: what a graph does has no number.
#[test]
fn calls_in_graphs_are_not_taken_for_others() {
    let ranks = world(3);
    threads(ranks, |comm| {
        let Some(caller) = Caller::join(comm) else {
            return;
        };
        let Caller {
            collectives,
            stream,
            ..
        } = &caller;
        let (eager, ..) = sums(comm, collectives, stream, 1, 5);
        comm.synchronize(stream).unwrap();
        assert_eq!(download(comm, &eager), sum(ranks, 1, 5));
        let replayed = memory(comm, 3);
        let reduce = || {
            let sum = ReduceOp::Sum;
            collectives.all_reduce(&replayed, &replayed, DType::I32, sum, stream)
        };
        if comm.rank() == OTHER {
            let graph = recorded(stream, || reduce().unwrap());
            for _ in 0..3 {
                graph.launch(stream).unwrap();
                comm.synchronize(stream).unwrap();
            }
        } else {
            for _ in 0..3 {
                reduce().unwrap();
                comm.synchronize(stream).unwrap();
            }
        }
        // Until all have told of their calls.
        for round in 0..15 {
            let (eager, ..) = sums(comm, collectives, stream, round, 9);
            comm.synchronize(stream).unwrap();
            assert_eq!(download(comm, &eager), sum(ranks, round, 9));
            std::thread::sleep(Duration::from_millis(20));
        }
    });
}
