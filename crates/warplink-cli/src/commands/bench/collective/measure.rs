//! Runs a collective on one size: on fresh data, of which the result is checked, and then for its time.

use super::data::{Inputs, different};
use super::report::{Figures, Row};
use super::what::What;
use super::{Peer, Place};
use crate::commands::bench::timing::{Clock, Submission, Work};
use crate::gemm::common_seed;
use crate::report::print_message;
use anyhow::{Context, Result};
use std::cell::Cell;
use std::sync::Arc;
use warplink::collective::{CollectiveOptions, Collectives};
use warplink::device::{AllocationKind, CollectiveEngine, DeviceSlice, Priority, Stream};
use warplink::{Communicator, ErrorKind};

/// What every size is measured with.
pub(super) struct Rig<'a> {
    clock: Clock<'a>,
    what: What,
    collectives: Collectives,
    peers: Vec<PeerRig>,
    memory: [DeviceSlice; 2],
    seed: Cell<u64>,
}

/// What Warplink is compared with, and its memory.
struct PeerRig {
    peer: Peer,
    engine: Arc<dyn CollectiveEngine>,
    memory: [DeviceSlice; 2],
}

/// Enqueues a call.
type Enqueue<'a> = Box<dyn Fn(&Stream) -> Result<()> + 'a>;

/// What is written into an output before a run, so that an element that is left out shows.
const UNTOUCHED: u8 = 0xA5;

impl<'a> Rig<'a> {
    /// Every rank makes one at the same time.
    pub(super) fn new(
        comm: &'a Communicator,
        what: What,
        largest: usize,
        options: &CollectiveOptions,
        peers: &[Peer],
    ) -> Result<Self> {
        let allocate = |kind| comm.device().allocate(largest, kind);
        let memory = [AllocationKind::Plain; 2].map(allocate);
        let [first, second] = memory;
        let memory = [first?, second?];
        let mut rigs = Vec::new();
        for &peer in peers {
            let rig = match peer {
                Peer::Nccl => comm
                    .collective_engine()
                    .map(|engine| (engine, memory.clone())),
                Peer::NcclSymmetric => registered(comm, largest),
                Peer::None => continue,
            };
            match rig {
                Ok((engine, memory)) => rigs.push(PeerRig {
                    peer,
                    engine,
                    memory,
                }),
                // On every rank or on none: they join and register together.
                Err(error) if is_missing(&error) => {
                    if comm.rank() == 0 {
                        print_message(&format!("without {}: {error:#}", peer.name()));
                    }
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(Self {
            clock: Clock::new(comm, Priority::Normal)?,
            what,
            collectives: comm.collectives_with(options)?,
            peers: rigs,
            memory,
            seed: Cell::new(common_seed(comm, None)?),
        })
    }

    /// What Warplink is compared with, for the report.
    pub(super) fn peers(&self) -> Vec<String> {
        let name = |peer: &PeerRig| match peer.peer {
            Peer::NcclSymmetric => format!("{} with registered memory", peer.engine.name()),
            _ => peer.engine.name(),
        };
        self.peers.iter().map(name).collect()
    }

    /// Checks and times every way.
    pub(super) fn row(
        &self,
        bytes: usize,
        place: Place,
        submission: Submission,
        samples: usize,
        calls: usize,
    ) -> Result<Row> {
        let world = self.clock.comm.world();
        let count = self.what.count(bytes, world);
        let own = self.slices(&self.memory, count, place)?;
        let mut works: Vec<(&str, [DeviceSlice; 2], Enqueue<'_>)> = Vec::new();
        let enqueue = {
            let [input, output] = own.clone();
            move |stream: &Stream| {
                self.what
                    .enqueue(&self.collectives, [&input, &output], stream)
            }
        };
        works.push(("warplink", own, Box::new(enqueue)));
        for peer in &self.peers {
            let slices = self.slices(&peer.memory, count, place)?;
            let [input, output] = &slices;
            let request = self.what.request(self.clock.comm, [input, output])?;
            let enqueue = move |stream: &Stream| Ok(peer.engine.enqueue(stream, &request)?);
            works.push((peer.peer.name(), slices, Box::new(enqueue)));
        }
        let wrong: Vec<u64> = works
            .iter()
            .map(|(_, [input, output], work)| self.wrong(count, [input, output], submission, work))
            .collect::<Result<_>>()?;
        let repeated: Vec<_> = works
            .iter()
            .map(|(_, _, work)| {
                move |stream: &Stream| -> Result<()> { (0..calls).try_for_each(|_| work(stream)) }
            })
            .collect();
        let repeated: Vec<Work<'_>> = repeated.iter().map(|work| work as Work<'_>).collect();
        let times = self.clock.measure_in_turn(samples, submission, &repeated)?;
        let (input, output) = self.what.lengths(count, world);
        let size = input.max(output);
        let figures = works.iter().zip(times).zip(wrong);
        let figures = figures.map(|(((way, ..), times), wrong)| {
            let seconds = times.divided(calls as f64);
            let bandwidth = size as f64 / seconds.median / 1e9;
            Figures {
                way: (*way).to_owned(),
                seconds,
                bandwidth,
                bus_bandwidth: bandwidth * self.what.kind.bus_factor(world),
                wrong,
            }
        });
        let choice = self.collectives.choice(&self.what.call(count))?;
        Ok(Row {
            bytes: size,
            count,
            place,
            submission,
            algorithm: choice.algorithm.to_string(),
            lanes: choice.lanes,
            threads: choice.threads,
            ways: figures.collect(),
        })
    }

    /// Input and output.
    fn slices(
        &self,
        [first, second]: &[DeviceSlice; 2],
        count: usize,
        place: Place,
    ) -> Result<[DeviceSlice; 2]> {
        let comm = self.clock.comm;
        Ok(match place {
            Place::Out => {
                let (input, output) = self.what.lengths(count, comm.world());
                [first.slice(0..input)?, second.slice(0..output)?]
            }
            Place::In => {
                let [input, output] = self.what.in_place(count, comm.rank(), comm.world());
                [first.slice(input)?, first.slice(output)?]
            }
        })
    }

    /// Runs `work` once on data that was not there before; elements of all ranks' outputs that are not right.
    fn wrong(
        &self,
        count: usize,
        [input, output]: [&DeviceSlice; 2],
        submission: Submission,
        work: Work<'_>,
    ) -> Result<u64> {
        let (comm, stream) = (self.clock.comm, &self.clock.stream);
        self.seed.set(self.seed.get().wrapping_add(1));
        let inputs = Inputs {
            what: self.what,
            world: comm.world(),
            seed: self.seed.get(),
        };
        stream.fill(output, UNTOUCHED)?;
        comm.synchronize(stream)?;
        comm.device()
            .upload(input, &inputs.of(comm.rank(), count)?)?;
        match submission {
            Submission::Eager => work(stream)?,
            Submission::Captured => {
                stream.begin_capture()?;
                work(stream).context("while a graph was captured")?;
                stream.end_capture()?.launch(stream)?;
            }
        }
        comm.synchronize(stream)?;
        let wrong = match inputs.expected(comm.rank(), count)? {
            Some(expected) => {
                let mut bytes = vec![0; output.bytes()];
                comm.device().download(output, &mut bytes)?;
                different(self.what.dtype, &bytes, &expected)
            }
            None => 0,
        };
        let all = comm.all_gather_bytes(&(wrong as u64).to_le_bytes())?;
        all.iter().try_fold(0, |sum, rank| {
            let rank = rank.as_slice().try_into().context("read a rank's count")?;
            Ok(sum + u64::from_le_bytes(rank))
        })
    }
}

/// The vendor's library and memory that it was told of.
fn registered(
    comm: &Communicator,
    bytes: usize,
) -> warplink::Result<(Arc<dyn CollectiveEngine>, [DeviceSlice; 2])> {
    let engine = comm.collective_engine()?;
    let allocate = || comm.device().allocate(bytes, AllocationKind::Virtual);
    let memory = [allocate()?, allocate()?];
    memory.iter().try_for_each(|slice| engine.register(slice))?;
    Ok((engine, memory))
}

/// Whether a peer is not to be had here.
fn is_missing(error: &warplink::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::LibraryMissing | ErrorKind::Unsupported
    )
}
