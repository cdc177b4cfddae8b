//! Runs a collective on one size: on fresh data, of which the result is checked, and then for its time.

use super::data::{Inputs, different};
use super::report::{Figures, Row};
use super::what::{Kind, What, in_place, lengths, neighbours};
use super::{Peer, Place};
use crate::commands::bench::timing::{Clock, Submission, Work};
use crate::gemm::common_seed;
use crate::report::print_message;
use anyhow::{Context, Result};
use std::cell::Cell;
use warplink::collective::{BoundCall, Call, CollectiveOptions, CollectivePath, Collectives};
use warplink::device::{AllocationKind, DeviceSlice, Priority, Stream};
use warplink::{Communicator, ErrorKind};

/// What every size is measured with.
pub(super) struct Rig<'a> {
    clock: Clock<'a>,
    what: What,
    /// Whether Warplink's calls are bound to their memory.
    bound: bool,
    /// Warplink first.
    methods: Vec<Method>,
    /// What Warplink is compared with, for the report.
    pub(super) peers: Vec<String>,
    seed: Cell<u64>,
}

/// Who does the collective, and on which memory.
struct Method {
    name: &'static str,
    collectives: Collectives,
    memory: [DeviceSlice; 2],
}

/// What is written into an output before a run, so that an element that is left out shows.
const UNTOUCHED: u8 = 0xA5;

impl<'a> Rig<'a> {
    /// Every rank makes one at the same time.
    pub(super) fn new(
        comm: &'a Communicator,
        what: What,
        largest: usize,
        (options, bound): (&CollectiveOptions, bool),
        peers: &[Peer],
    ) -> Result<Self> {
        let allocate = |kind| comm.device().allocate(largest, kind);
        let plain = || allocate(AllocationKind::Plain);
        let memory = [plain()?, plain()?];
        let mut rig = Self {
            clock: Clock::new(comm, Priority::Normal)?,
            what,
            bound,
            methods: vec![Method {
                name: "warplink",
                collectives: comm.collectives_with(options)?,
                memory: memory.clone(),
            }],
            peers: Vec::new(),
            seed: Cell::new(common_seed(comm, None)?),
        };
        for &peer in peers {
            let method = match peer {
                Peer::Nccl | Peer::Substitute => {
                    vendor(comm).map(|(collectives, name)| (collectives, name, memory.clone()))
                }
                Peer::NcclSymmetric => registered(comm, largest),
                Peer::None => continue,
            };
            match method {
                Ok((collectives, name, memory)) => {
                    rig.methods.push(Method {
                        name: peer.name(),
                        collectives,
                        memory,
                    });
                    rig.peers.push(name);
                }
                // On every rank or on none: they join and register together.
                Err(error) if is_missing(&error) => {
                    if comm.rank() == 0 {
                        print_message(&format!("without {}: {error:#}", peer.name()));
                    }
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(rig)
    }

    /// Checks and times every method.
    pub(super) fn row(
        &self,
        bytes: usize,
        place: Place,
        submission: Submission,
        samples: usize,
        calls: usize,
    ) -> Result<Row> {
        let world = self.clock.comm.world();
        let call = &self.what.call(bytes, world);
        let slices: Vec<[DeviceSlice; 2]> = self
            .methods
            .iter()
            .map(|method| self.slices(&method.memory, call, place))
            .collect::<Result<_>>()?;
        let warplink = self.methods.first().context("nothing is measured")?;
        let bound = match slices.first().filter(|_| self.bound) {
            Some([input, output]) => Some(warplink.collectives.bind(call, output, input)?),
            None => None,
        };
        let bound = &bound;
        // Enqueues the call that many times.
        let work = |calls: usize| {
            let methods = self.methods.iter().zip(&slices).enumerate();
            methods.map(move |(number, (method, slices))| {
                let by = (&method.collectives, self.clock.comm);
                let bound = bound.as_ref().filter(|_| number == 0);
                move |stream: &Stream| -> Result<()> {
                    let once = |_| match bound {
                        Some(bound) => bound.enqueue(stream),
                        None => self.what.enqueue(by, call, slices, stream),
                    };
                    Ok((0..calls).try_for_each(once)?)
                }
            })
        };
        let wrong: Vec<u64> = work(1)
            .zip(&slices)
            .map(|(work, slices)| self.wrong(call, slices, submission, &work))
            .collect::<Result<_>>()?;
        let works: Vec<_> = work(calls).collect();
        let works: Vec<Work<'_>> = works.iter().map(|work| work as Work<'_>).collect();
        let times = self.clock.measure_in_turn(samples, submission, &works)?;
        let [input, output] = lengths(call, world);
        let size = input.max(output);
        let figures = self.methods.iter().zip(times).zip(wrong);
        let figures = figures.map(|((method, times), wrong)| {
            let seconds = times.stream.divided(calls as f64);
            let host = times.host.divided(calls as f64);
            let bandwidth = size as f64 / seconds.median / 1e9;
            Figures {
                method: method.name.to_owned(),
                seconds,
                host: (submission == Submission::Eager).then_some(host),
                bandwidth,
                bus_bandwidth: bandwidth * self.what.bus_factor(world),
                wrong,
            }
        });
        let path = match self.what.kind {
            Kind::Collective(_) => warplink.collectives.path_of(call),
            Kind::SendReceive => warplink
                .collectives
                .path_of_messages()
                .context("nothing sends messages between these ranks")?,
        };
        let (algorithm, lanes, threads) = match path {
            CollectivePath::Direct if self.what.kind == Kind::SendReceive => {
                ("messages".to_owned(), 0, 0)
            }
            CollectivePath::Direct => {
                let choice = match bound.as_ref().and_then(BoundCall::choice) {
                    Some(choice) => choice,
                    None => warplink.collectives.choice(call)?,
                };
                let algorithm = choice.algorithm.to_string();
                (algorithm, choice.lanes, choice.threads)
            }
            CollectivePath::Engine => ("engine".to_owned(), 0, 0),
        };
        Ok(Row {
            bytes: size,
            count: call.count,
            place,
            submission,
            algorithm,
            lanes,
            threads,
            methods: figures.collect(),
        })
    }

    /// Input and output.
    fn slices(
        &self,
        [first, second]: &[DeviceSlice; 2],
        call: &Call,
        place: Place,
    ) -> Result<[DeviceSlice; 2]> {
        let comm = self.clock.comm;
        Ok(match place {
            Place::Out => {
                let [input, output] = lengths(call, comm.world());
                [first.slice(0..input)?, second.slice(0..output)?]
            }
            Place::In => {
                let [input, output] = in_place(call, comm.rank(), comm.world());
                [first.slice(input)?, first.slice(output)?]
            }
        })
    }

    /// Runs `work` once on data that was not there before; elements of all ranks' outputs that are not right.
    fn wrong(
        &self,
        call: &Call,
        [input, output]: &[DeviceSlice; 2],
        submission: Submission,
        work: Work<'_>,
    ) -> Result<u64> {
        let (comm, stream) = (self.clock.comm, &self.clock.stream);
        self.seed.set(self.seed.get().wrapping_add(1));
        let inputs = Inputs {
            call: *call,
            world: comm.world(),
            seed: self.seed.get(),
        };
        stream.fill(output, UNTOUCHED)?;
        comm.synchronize(stream)?;
        comm.device().upload(input, &inputs.of(comm.rank())?)?;
        match submission {
            Submission::Eager => work(stream)?,
            Submission::Captured => {
                stream.begin_capture()?;
                work(stream).context("while a graph was captured")?;
                stream.end_capture()?.launch(stream)?;
            }
        }
        comm.synchronize(stream)?;
        let expected = match self.what.kind {
            Kind::Collective(_) => inputs.expected(comm.rank())?,
            Kind::SendReceive => {
                let [before, _] = neighbours(comm.rank(), comm.world());
                Some(inputs.of(before)?)
            }
        };
        let wrong = match expected {
            Some(expected) => {
                let mut bytes = vec![0; output.bytes()];
                comm.device().download(output, &mut bytes)?;
                different(call.dtype, &bytes, &expected)
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

/// The vendor's library, and its name.
fn vendor(comm: &Communicator) -> warplink::Result<(Collectives, String)> {
    let name = comm.collective_engine()?.name();
    let options = CollectiveOptions {
        path: Some(CollectivePath::Engine),
        ..CollectiveOptions::default()
    };
    Ok((comm.collectives_with(&options)?, name))
}

/// The vendor's library, its name, and memory that it was told of.
fn registered(
    comm: &Communicator,
    bytes: usize,
) -> warplink::Result<(Collectives, String, [DeviceSlice; 2])> {
    let allocate = || comm.device().allocate(bytes, AllocationKind::Virtual);
    let memory = [allocate()?, allocate()?];
    let engine = comm.collective_engine()?;
    memory.iter().try_for_each(|slice| engine.register(slice))?;
    let (collectives, name) = vendor(comm)?;
    Ok((
        collectives,
        format!("{name} with registered memory"),
        memory,
    ))
}

/// Whether a peer is not to be had here.
fn is_missing(error: &warplink::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::LibraryMissing | ErrorKind::Unsupported
    )
}
