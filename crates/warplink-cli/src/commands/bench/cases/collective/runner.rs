//! Runs a collective of one size: once on fresh data for its result, and then for its time.

use super::data::Inputs;
use super::figures::{CollectiveTimes, External, with_methods};
use super::template::{Template, TemplateKind, in_place, lengths};
use super::{CollectivePeer, Placement};
use crate::commands::bench::clock::{BenchClock, Submission, Work, WorkRef};
use crate::commands::bench::peers::{allocate, neighbours, optional, total, vendor};
use crate::commands::bench::report::Row;
use crate::gemm::common_seed;
use crate::names::name_of;
use crate::report::bytes::ByteSize;
use anyhow::{Context, Result};
use std::cell::Cell;
use warplink::Communicator;
use warplink::collective::{BoundCall, Call, CollectiveOptions, CollectivePath, Collectives};
use warplink::device::{AllocationKind, DeviceSlice, Priority};

/// The same for every size.
pub(super) struct CollectiveRunner<'a> {
    clock: BenchClock<'a>,
    template: Template,
    /// Whether Warplink's calls are bound to their memory.
    bound: bool,
    /// Warplink first.
    methods: Vec<CollectiveMethod>,
    /// The names of the libraries that Warplink is compared with.
    pub(super) peers: Vec<String>,
    seed: Cell<u64>,
}

/// A library that does the collective, and the memory of its calls.
struct CollectiveMethod {
    name: String,
    collectives: Collectives,
    memory: [DeviceSlice; 2],
}

/// The bytes of an output before a run, which show elements that are not written.
const UNTOUCHED: u8 = 0xA5;

impl<'a> CollectiveRunner<'a> {
    /// Every rank makes one at the same time.
    pub(super) fn new(
        comm: &'a Communicator,
        template: Template,
        largest: usize,
        (options, bound): (&CollectiveOptions, bool),
        peers: &[CollectivePeer],
    ) -> Result<Self> {
        let memory = [allocate(comm, largest)?, allocate(comm, largest)?];
        let mut runner = Self {
            clock: BenchClock::new(comm, Priority::Normal)?,
            template,
            bound,
            methods: vec![CollectiveMethod {
                name: "warplink".to_owned(),
                collectives: comm.collectives_with(options)?,
                memory: memory.clone(),
            }],
            peers: Vec::new(),
            seed: Cell::new(common_seed(comm, None)?),
        };
        for peer in peers {
            let made = match peer {
                CollectivePeer::Nccl | CollectivePeer::Substitute => {
                    // The same memory as Warplink's, so that its placement cannot explain a difference.
                    vendor(comm).map(|(collectives, name)| (collectives, name, memory.clone()))
                }
                CollectivePeer::NcclSymmetric => registered(comm, largest),
                CollectivePeer::None => continue,
            };
            let peer = name_of(peer);
            if let Some((collectives, name, memory)) = optional(comm, &peer, made)? {
                runner.methods.push(CollectiveMethod {
                    name: peer,
                    collectives,
                    memory,
                });
                runner.peers.push(name);
            }
        }
        Ok(runner)
    }

    /// Checks and times every method, and adds the figures of another program for the same.
    pub(super) fn row(
        &self,
        bytes: usize,
        place: Placement,
        submission: Submission,
        (samples, calls): (usize, usize),
        beside: Option<&External>,
    ) -> Result<Row> {
        let world = self.clock.comm.world();
        let call = &self.template.call(bytes, world);
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
        let methods = self.methods.iter().zip(&slices).enumerate();
        let works = methods.map(|(number, (method, slices))| -> Work<'_> {
            let by = (&method.collectives, self.clock.comm);
            // The first method is Warplink; only its calls can be bound.
            let bound = bound.as_ref().filter(|_| number == 0);
            Box::new(move |stream| {
                let enqueued = match bound {
                    Some(bound) => bound.enqueue(stream),
                    None => self.template.enqueue(by, call, slices, stream),
                };
                Ok(enqueued?)
            })
        });
        let works: Vec<Work<'_>> = works.collect();
        // Before the timing, whose repeated calls in place reduce their own results over and over.
        let wrong: Vec<u64> = works
            .iter()
            .zip(&slices)
            .map(|(work, slices)| self.wrong(call, slices, submission, work))
            .collect::<Result<_>>()?;
        let clock = &self.clock;
        let times = clock.measure_in_turn(samples, submission, calls, &works)?;
        let [input, output] = lengths(call, world);
        let size = input.max(output);
        let methods = self.methods.iter().zip(times).zip(wrong);
        let methods = methods.map(|((method, times), wrong)| {
            let bandwidth = size as f64 / times.stream.median / 1e9;
            CollectiveTimes {
                method: method.name.clone(),
                seconds: times.stream,
                // The launch of a graph enqueues all calls of a sample at once, so its time is not that of a call.
                host: (submission == Submission::Eager).then_some(times.host),
                bandwidth,
                bus_bandwidth: bandwidth * self.template.bus_factor(world),
                wrong,
            }
        });
        let path = match self.template.kind {
            TemplateKind::Collective(_) => warplink.collectives.path_of(call),
            TemplateKind::SendReceive => warplink
                .collectives
                .path_of_messages()
                .context("nothing sends messages between these ranks")?,
        };
        let beside = beside.into_iter();
        let beside = beside.flat_map(|other| other.methods(size, place, submission));
        let methods: Vec<CollectiveTimes> = methods.chain(beside).collect();
        // The engine and messages have no lanes.
        let (algorithm, lanes, threads) = match path {
            CollectivePath::Direct if self.template.kind == TemplateKind::SendReceive => {
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
        let (size, submission) = (ByteSize(size as u64), name_of(&submission));
        let group = match place {
            Placement::Out => submission.clone(),
            Placement::In => format!("in place, {submission}"),
        };
        let row = Row::of(size.to_string())
            .key("bytes", size)
            .number("size", size)
            .key("count", call.count)
            .name("place", name_of(&place))
            .name("submission", submission)
            .name("algorithm", algorithm)
            .count("lanes", lanes as u64)
            .key("threads", threads);
        Ok(with_methods(row, &group, &methods))
    }

    /// Input and output.
    fn slices(
        &self,
        [first, second]: &[DeviceSlice; 2],
        call: &Call,
        place: Placement,
    ) -> Result<[DeviceSlice; 2]> {
        let comm = self.clock.comm;
        Ok(match place {
            Placement::Out => {
                let [input, output] = lengths(call, comm.world());
                [first.slice(0..input)?, second.slice(0..output)?]
            }
            Placement::In => {
                let [input, output] = in_place(call, comm.rank(), comm.world());
                [first.slice(input)?, first.slice(output)?]
            }
        })
    }

    /// Runs `work` once on fresh data, and counts the wrong elements of all ranks' outputs.
    fn wrong(
        &self,
        call: &Call,
        [input, output]: &[DeviceSlice; 2],
        submission: Submission,
        work: WorkRef<'_>,
    ) -> Result<u64> {
        let (comm, stream) = (self.clock.comm, &self.clock.stream);
        // With the data of the method before, a read that comes too early could find right values in scratch.
        self.seed.set(self.seed.get().wrapping_add(1));
        let inputs = Inputs {
            call: *call,
            world: comm.world(),
            seed: self.seed.get(),
        };
        stream.fill(output, UNTOUCHED)?;
        // In place, both are the same memory: the fill has to end before the input is written.
        comm.synchronize(stream)?;
        inputs.of(comm.rank()).upload(comm, input)?;
        self.clock.run(submission, work)?;
        let expected = match self.template.kind {
            TemplateKind::Collective(_) => inputs.expected(comm.rank())?,
            TemplateKind::SendReceive => {
                let [before, _] = neighbours(comm.rank(), comm.world());
                Some(inputs.of(before))
            }
        };
        let wrong = match expected {
            Some(expected) => expected.different(comm, call.dtype, output)?,
            None => 0,
        };
        total(comm, wrong as u64)
    }
}

/// The vendor's library, its name, and memory that is registered with it.
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
