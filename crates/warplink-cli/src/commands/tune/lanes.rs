//! Latencies and rates of lanes of kernel sections.
//!
//! Each figure is the difference of two launches of a small program (`lanes/`), which differ in how often its lanes do
//! something, or in how much they move.

use super::machine::Machine;
use crate::commands::bench::clock::Submission;
use crate::commands::bench::peers::optional;
use anyhow::Result;
use warplink::program::cost::HardwareModel;
use warplink::program::cost::lanes::Lanes;
use warplink::program::{Bindings, Parameters, PrepareOptions, Program};

const SIGNAL: &str = include_str!("lanes/signal.wlp");
const PUT_SIGNAL: &str = include_str!("lanes/put_signal.wlp");
const PACKETS: &str = include_str!("lanes/packets.wlp");
const COPY: &str = include_str!("lanes/copy.wlp");
const PUT: &str = include_str!("lanes/put.wlp");
const GET: &str = include_str!("lanes/get.wlp");

/// Launches of a sample.
const LAUNCHES: usize = 16;

/// Repetitions of a step whose latency is measured, in the shorter and the longer launch.
const TIMES: [usize; 2] = [8, 40];

/// Bytes of what takes no time but its latency.
const SHORT: usize = 64;

/// Bytes of data in a packet.
const PACKET: usize = 8;

/// Threads of a lane, and rounds of packets of each, at first and at last.
const PACKET_THREADS: usize = 256;
const ROUNDS: [usize; 2] = [16, 64];

/// Threads of a lane that are tried.
const THREADS: [usize; 5] = [64, 128, 256, 512, 1024];

/// Fewer threads are as good where they take at most this many times as long.
const AS_GOOD: f64 = 1.05;

/// The most bytes that one lane moves, and all.
const ONE_LANE: usize = 4 << 20;
const ALL_LANES: usize = 64 << 20;

/// The lanes that move data together.
const LANES: usize = 64;

/// The shape of a launch: lanes and threads, bytes, and repetitions.
#[derive(Clone, Copy)]
struct Shape {
    lanes: usize,
    threads: usize,
    bytes: usize,
    times: usize,
}

/// Measures them, unless there is no peer; leaves them as they were where kernels cannot be compiled.
pub(super) fn measure(machine: &Machine<'_>, model: &mut HardwareModel) -> Result<()> {
    if machine.comm.world() == 1 {
        return Ok(());
    }
    if let Some(lanes) = optional(machine.comm, "lanes of kernels", measured(machine))? {
        model.lanes = Some(lanes);
    }
    Ok(())
}

fn measured(machine: &Machine<'_>) -> Result<Lanes> {
    let properties = machine.comm.device().properties();
    let mut block_threads = 1;
    let mut threads = THREADS[0];
    // Seconds for each of the bytes that `lanes` lanes move.
    let each = |text: &str, lanes: usize, threads: usize, most: usize| -> Result<f64> {
        let [less, more] = halves(most.min(machine.largest)).map(|bytes| Shape {
            lanes,
            threads,
            bytes,
            times: 1,
        });
        let (sooner, later) = (machine.launch(text, less)?, machine.launch(text, more)?);
        // Where the shorter launch was disturbed, the longer one alone says what there is to say.
        Ok(if later > sooner {
            (later - sooner) / (more.bytes - less.bytes) as f64
        } else {
            later / more.bytes as f64
        })
    };
    let one = |text: &str, threads: usize| each(text, 1, threads, ONE_LANE);
    // One thread of the host does what those of a lane would.
    if !properties.shared {
        let mut tried = Vec::new();
        for threads in THREADS {
            tried.push((threads, one(COPY, threads)?));
        }
        let least = tried
            .iter()
            .map(|(_, each)| *each)
            .fold(f64::INFINITY, f64::min);
        // Ranks time the same copies, the slowest of which counts, so all find the same.
        let good = tried.iter().find(|(_, each)| *each <= AS_GOOD * least);
        (block_threads, _) = good.copied().unwrap_or((THREADS[0], least));
        threads = block_threads;
    }
    let (copy, put, get) = (one(COPY, threads)?, one(PUT, threads)?, one(GET, threads)?);
    // What a copy does twice, a put and a get do once.
    let remote = |each: f64| 1.0 / (each - copy / 2.0).max(each / 10.0);
    let latency = |text: &str| -> Result<f64> {
        let shape = |times| Shape {
            lanes: 1,
            threads,
            bytes: SHORT,
            times,
        };
        let [few, many] = TIMES;
        let seconds = machine.launch(text, shape(many))? - machine.launch(text, shape(few))?;
        Ok(seconds.max(0.0) / (many - few) as f64)
    };
    let (signal, load) = (latency(SIGNAL)?, latency(COPY)?);
    let lanes = LANES.min((properties.multiprocessors / 2).max(1));
    let all = |text: &str| Ok::<_, anyhow::Error>(1.0 / each(text, lanes, threads, ALL_LANES)?);
    let empty = Shape {
        lanes: 1,
        threads,
        bytes: SHORT,
        times: 0,
    };
    Ok(Lanes {
        launch: machine.launch(COPY, empty)?,
        signal,
        fence: (latency(PUT_SIGNAL)? - signal - load).max(0.0),
        packet: latency(PACKETS)?,
        packet_round: packet_round(machine, properties.shared)?,
        load,
        peer_load: latency(GET)?,
        block_threads,
        block_own: 2.0 / copy,
        block_stored: remote(put),
        block_loaded: remote(get),
        stored: all(PUT)?,
        loaded: all(GET)?,
    })
}

/// Seconds of a round in which each thread puts a packet, or reads one.
fn packet_round(machine: &Machine<'_>, shared: bool) -> Result<f64> {
    let at_once = if shared { 1 } else { PACKET_THREADS };
    let bytes = ROUNDS.map(|rounds| rounds * PACKET_THREADS * PACKET);
    let [few, many] = bytes.map(|bytes| Shape {
        lanes: 1,
        threads: PACKET_THREADS,
        bytes,
        times: 1,
    });
    let seconds = machine.launch(PACKETS, many)? - machine.launch(PACKETS, few)?;
    let rounds = (many.bytes - few.bytes) / PACKET / at_once;
    // A lane puts all of them, then reads as many.
    Ok(seconds.max(0.0) / (2 * rounds) as f64)
}

/// Half of the bytes and all of them, in whole units of a part.
fn halves(bytes: usize) -> [usize; 2] {
    let unit = 16 * LANES;
    let half = (bytes / 2 / unit).max(1) * unit;
    [half, 2 * half]
}

impl Machine<'_> {
    /// Seconds of a launch of a program on all ranks at once, one of many in a graph.
    fn launch(&self, text: &str, shape: Shape) -> Result<f64> {
        let program = Program::parse(text)?;
        let mut parameters = Parameters::new();
        for (name, value) in [
            ("n", shape.bytes),
            ("times", shape.times),
            ("lanes", shape.lanes),
            ("threads", shape.threads),
        ] {
            parameters.insert(name, i64::try_from(value)?);
        }
        let options = PrepareOptions {
            // Times count, not what is written.
            verify: false,
            ..PrepareOptions::default()
        };
        let prepared = self
            .comm
            .executor()
            .prepare(&program, &parameters, options)?;
        let mut bindings = Bindings::new();
        for (name, tensor) in ["X", "Y"].into_iter().zip(&prepared.rank_program().tensors) {
            bindings.insert(name.to_owned(), self.allocate(tensor.bytes)?);
        }
        let plan = prepared.bind(&bindings)?;
        self.each(LAUNCHES, Submission::Captured, &|stream| {
            Ok(plan.run(stream)?)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use warplink::program::verify;

    #[test]
    fn what_is_launched_is_verified() {
        for text in [SIGNAL, PUT_SIGNAL, PACKETS, COPY, PUT, GET] {
            let program = Program::parse(text).unwrap();
            for (world, lanes, times) in [(2, 1, 1), (3, 1, 1), (4, 1, 3), (3, 4, 2)] {
                let mut parameters = Parameters::new();
                for (name, value) in [
                    ("n", 256),
                    ("times", times),
                    ("lanes", lanes),
                    ("threads", 64),
                ] {
                    parameters.insert(name, value);
                }
                if let Err(found) = verify(&program, world, 1, &parameters) {
                    panic!("{}: {}", program.name, found[0]);
                }
            }
        }
    }
}
