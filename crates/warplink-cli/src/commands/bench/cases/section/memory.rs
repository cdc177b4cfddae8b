//! Input, output and expected output of one size, and their comparison.

use crate::commands::bench::cases::collective::data::{Inputs, different};
use crate::commands::bench::clock::{BenchClock, Work};
use crate::commands::bench::peers::{allocate, download, total};
use crate::memory;
use anyhow::{Context, Result, ensure};
use warplink::collective::{Call, CollectiveKind};
use warplink::device::{DeviceSlice, ReduceOp};
use warplink::program::Prepared;
use warplink::program::ir::Role;
use warplink::{Communicator, DType};

/// Number of compared runs, each with new inputs.
const COMPARED: u64 = 4;

/// The memory of a rank for one size.
pub(super) struct SectionBuffers {
    pub(super) dtype: DType,
    seed: u64,
    pub(super) input: (String, DeviceSlice),
    pub(super) output: (String, DeviceSlice),
    /// For the collective.
    pub(super) expected: DeviceSlice,
}

impl SectionBuffers {
    pub(super) fn new(comm: &Communicator, prepared: &Prepared, seed: u64) -> Result<Self> {
        let device = comm.device();
        let (input, dtype, bytes) = tensors(prepared, Role::Input)?;
        let (output, _, output_bytes) = tensors(prepared, Role::Output)?;
        let (host, all) = (
            bytes.max(output_bytes) as u128,
            bytes as u128 + 2 * output_bytes as u128,
        );
        // Again, with the lengths of the program's tensors, which are not known from the options.
        memory::check(device.kind(), comm.world(), host, all)?;
        let memory = Self {
            dtype,
            seed,
            input: (input, allocate(comm, bytes)?),
            output: (output, allocate(comm, output_bytes)?),
            expected: allocate(comm, output_bytes)?,
        };
        memory.fill(comm, 0)?;
        Ok(memory)
    }

    /// Writes the input of a run: small integers, whose sums are exact in any order.
    fn fill(&self, comm: &Communicator, run: u64) -> Result<()> {
        let inputs = Inputs {
            call: Call::new(
                CollectiveKind::AllReduce,
                ReduceOp::Sum,
                self.dtype,
                self.input.1.bytes() / self.dtype.size(),
                0,
            ),
            world: comm.world(),
            seed: self.seed.wrapping_add(run),
        };
        inputs.of(comm.rank()).upload(comm, &self.input.1)
    }

    /// Replays graphs of both works with new inputs each time, and counts the elements that differ.
    pub(super) fn compare(&self, clock: &BenchClock<'_>, works: [&Work<'_>; 2]) -> Result<u64> {
        let (comm, stream) = (clock.comm, &clock.stream);
        // One graph for all runs: state that a run leaves in scratch or in signals shows in the results of the next.
        let [section, vendor] = works.map(|work| clock.capture(work));
        let (section, vendor) = (section?, vendor?);
        (1..=COMPARED).try_fold(0, |sum, run| {
            self.fill(comm, run)?;
            section.launch(stream)?;
            vendor.launch(stream)?;
            comm.synchronize(stream)?;
            Ok(sum + self.different(comm)?)
        })
    }

    /// The number of elements of the two outputs that differ, on all ranks together.
    fn different(&self, comm: &Communicator) -> Result<u64> {
        let (here, there) = (
            download(comm, &self.output.1)?,
            download(comm, &self.expected)?,
        );
        let own = different(self.dtype, &here, &there) as u64;
        total(comm, own)
    }
}

/// The only tensor of a role: its name, type and bytes.
pub(super) fn tensors(prepared: &Prepared, role: Role) -> Result<(String, DType, usize)> {
    let tensors = &prepared.rank_program().tensors;
    let found: Vec<_> = tensors
        .iter()
        .filter(|tensor| tensor.role == role)
        .collect();
    let what = match role {
        Role::Input => "input",
        _ => "output",
    };
    ensure!(
        found.len() == 1,
        "the program has {} tensors that are {what}; expected one",
        found.len()
    );
    let found = found.first().context("there is no such tensor")?;
    Ok((found.name.to_string(), found.dtype, found.bytes))
}
