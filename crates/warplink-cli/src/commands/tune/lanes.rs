//! Latencies and rates of lanes in kernel sections.
//!
//! Each figure is the difference between two launches of a small program (`lanes/`) that differ in the
//! repetitions or bytes of a step.

use super::machine::{TunedMachine, first_within};
use crate::commands::bench::clock::Submission;
use crate::commands::bench::peers::{allocate, optional};
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

/// Repetitions of a latency measurement in the shorter and longer launch.
const TIMES: [usize; 2] = [8, 40];

/// Size for which only latency matters.
const SHORT: usize = 64;

/// Data bytes of a packet.
const PACKET: usize = 8;

/// Threads of a lane, and packet rounds of the shorter and longer launch.
const PACKET_THREADS: usize = 256;
const ROUNDS: [usize; 2] = [16, 64];

/// Threads of a lane to try.
const THREADS: [usize; 5] = [64, 128, 256, 512, 1024];

/// Prefer fewer threads if they take at most this factor longer.
const AS_GOOD: f64 = 1.05;

/// Maximum bytes of one lane, and of all.
const ONE_LANE: usize = 4 << 20;
const ALL_LANES: usize = 64 << 20;

/// Number of lanes for aggregate rates.
const LANES: usize = 64;

/// A launch: lanes and threads, bytes, and repetitions.
#[derive(Clone, Copy)]
struct LaneLaunch {
    lanes: usize,
    threads: usize,
    bytes: usize,
    times: usize,
}

/// Measures lanes; unchanged without a peer or a compiler.
pub(super) fn measure(machine: &TunedMachine<'_>, model: &mut HardwareModel) -> Result<()> {
    if machine.comm.world() == 1 {
        return Ok(());
    }
    if let Some(lanes) = optional(machine.comm, "lanes of kernels", measured(machine))? {
        model.lanes = Some(lanes);
    }
    Ok(())
}

fn measured(machine: &TunedMachine<'_>) -> Result<Lanes> {
    let properties = machine.comm.device().properties();
    let mut block_threads = 1;
    let mut threads = THREADS[0];
    // Seconds for each byte that `lanes` lanes move.
    let each = |text: &str, lanes: usize, threads: usize, most: usize| -> Result<f64> {
        let [less, more] = halves(most.min(machine.selection.largest)).map(|bytes| LaneLaunch {
            lanes,
            threads,
            bytes,
            times: 1,
        });
        let (sooner, later) = (machine.launch(text, less)?, machine.launch(text, more)?);
        // If the shorter launch was disturbed, use the longer one alone.
        Ok(if later > sooner {
            (later - sooner) / (more.bytes - less.bytes) as f64
        } else {
            later / more.bytes as f64
        })
    };
    let one = |text: &str, threads: usize| each(text, 1, threads, ONE_LANE);
    // The host device has one thread for each lane.
    if !properties.shared {
        let mut tried = Vec::new();
        for threads in THREADS {
            tried.push((threads, one(COPY, threads)?));
        }
        block_threads = first_within(AS_GOOD, &tried).unwrap_or(THREADS[0]);
        threads = block_threads;
    }
    let (copy, put, get) = (one(COPY, threads)?, one(PUT, threads)?, one(GET, threads)?);
    // A copy accesses memory twice, a put or get once.
    // At least a tenth of the time, since a difference of two noisy times may be near 0 or below.
    let remote = |each: f64| 1.0 / (each - copy / 2.0).max(each / 10.0);
    let latency = |text: &str| -> Result<f64> {
        let shape = |times| LaneLaunch {
            lanes: 1,
            threads,
            bytes: SHORT,
            times,
        };
        let [few, many] = TIMES;
        let seconds = machine.launch(text, shape(many))? - machine.launch(text, shape(few))?;
        // Noise may make the longer launch the faster one.
        Ok(seconds.max(0.0) / (many - few) as f64)
    };
    let (signal, load) = (latency(SIGNAL)?, latency(COPY)?);
    let lanes = LANES.min((properties.multiprocessors / 2).max(1));
    let all = |text: &str| Ok::<_, anyhow::Error>(1.0 / each(text, lanes, threads, ALL_LANES)?);
    let empty = LaneLaunch {
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

/// Seconds of a round in which each thread stores or reads a packet.
fn packet_round(machine: &TunedMachine<'_>, shared: bool) -> Result<f64> {
    let at_once = if shared { 1 } else { PACKET_THREADS };
    let bytes = ROUNDS.map(|rounds| rounds * PACKET_THREADS * PACKET);
    let [few, many] = bytes.map(|bytes| LaneLaunch {
        lanes: 1,
        threads: PACKET_THREADS,
        bytes,
        times: 1,
    });
    let seconds = machine.launch(PACKETS, many)? - machine.launch(PACKETS, few)?;
    let rounds = (many.bytes - few.bytes) / PACKET / at_once;
    // A lane stores all packets, then reads as many.
    Ok(seconds.max(0.0) / (2 * rounds) as f64)
}

/// Half of the bytes and all of them, in whole units of a part.
fn halves(bytes: usize) -> [usize; 2] {
    let unit = 16 * LANES;
    let half = (bytes / 2 / unit).max(1) * unit;
    [half, 2 * half]
}

impl TunedMachine<'_> {
    /// Seconds of a program's launch on all ranks concurrently, one of many in a graph.
    fn launch(&self, text: &str, shape: LaneLaunch) -> Result<f64> {
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
            // Only times matter, not results.
            verify: false,
            ..PrepareOptions::default()
        };
        let prepared = self
            .comm
            .executor()
            .prepare(&program, &parameters, options)?;
        let mut bindings = Bindings::new();
        for (name, tensor) in ["X", "Y"].into_iter().zip(&prepared.rank_program().tensors) {
            bindings.insert(name.to_owned(), allocate(self.comm, tensor.bytes)?);
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
