//! Steps of a rank in a trial: memory, words, transfers, a GEMM, collectives.

use crate::report::print_json;
use anyhow::{Context, Result, ensure};
use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};
use std::process::ExitCode;
use warplink::device::{
    AllocationKind, Collective, CollectiveRequest, DeviceBuffer, MatmulSpec, MemoryOp, Priority,
    ReduceOp,
};
use warplink::memory::Region;
use warplink::p2p::{Batch, Protocol, Transfer, TransferRequest};
use warplink::{Communicator, Config, DType, Error, ErrorKind};

/// Transfer size: not a multiple of a page or word, and more than one small kernel copies.
const BYTES: usize = 100_003;

pub(super) const WORDS: &str = "words in stream order";
pub(super) const GEMM: &str = "GEMM";

/// Kind of trial.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum TrialKind {
    /// Memory, words, transfers and a GEMM.
    Device,
    /// The vendor's collectives.
    Collectives,
}

/// The arguments of the hidden subcommand.
#[derive(Debug, Args)]
pub(crate) struct TrialArgs {
    /// Trial to run
    #[arg(value_enum)]
    pub(super) what: TrialKind,
}

/// Result of one step on one rank.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct CheckStep {
    pub(super) name: String,
    /// Details, or the error.
    pub(super) outcome: Result<String, String>,
    /// Whether the step failed only for lack of a library.
    pub(super) library_missing: bool,
}

/// Output line of a rank.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct RankReport {
    pub(super) device: String,
    pub(super) steps: Vec<CheckStep>,
}

/// Runs as one rank of a trial.
pub(crate) fn run_trial(args: &TrialArgs) -> Result<ExitCode> {
    let comm = Communicator::join(&Config::from_env()?).context("join the job")?;
    let steps = match args.what {
        TrialKind::Device => try_device(&comm),
        TrialKind::Collectives => vec![step("collectives", || try_collectives(&comm))],
    };
    let failed = steps.iter().any(|step| step.outcome.is_err());
    print_json(&RankReport {
        device: comm.device().name(),
        steps,
    })?;
    // Ranks may be stuck after a failure; the report has been printed, which is all that matters.
    match comm.close() {
        Err(error) if !failed => Err(error).context("leave the job"),
        _ => Ok(ExitCode::SUCCESS),
    }
}

fn step(name: &str, body: impl FnOnce() -> Result<String>) -> CheckStep {
    let outcome = body();
    let library_missing = outcome.as_ref().is_err_and(|error| {
        let error = error.downcast_ref::<Error>();
        error.is_some_and(|error| error.kind() == ErrorKind::LibraryMissing)
    });
    CheckStep {
        name: name.to_owned(),
        outcome: outcome.map_err(|error| format!("{error:#}")),
        library_missing,
    }
}

const PLAIN: &str = "plain memory";
pub(super) const VIRTUAL: &str = "virtual memory";

fn try_device(comm: &Communicator) -> Vec<CheckStep> {
    let mut steps = vec![step(WORDS, || try_words(comm))];
    for (memory, kind) in [
        (PLAIN, AllocationKind::Plain),
        (VIRTUAL, AllocationKind::Virtual),
    ] {
        for protocol in [Protocol::Get, Protocol::Put] {
            let name = format!("{memory}, {protocol}");
            steps.push(step(&name, || try_transfers(comm, kind, protocol)));
        }
    }
    steps.push(step(GEMM, || try_gemm(comm)));
    steps
}

/// One stream waits for a word that another writes.
fn try_words(comm: &Communicator) -> Result<String> {
    let device = comm.device();
    let page = device.allocate_signals(4096)?;
    let word = page.word(8)?;
    let (waiting, writing) = (
        comm.create_stream(Priority::Normal)?,
        comm.create_stream(Priority::Normal)?,
    );
    // More than 32 bits, so that a 32-bit operation is detected.
    let value = (1 << 40) + 7;
    waiting.memory_ops(&[MemoryOp::wait(&word, value)])?;
    // Before the write: a device that ignores waits would pass otherwise.
    ensure!(!waiting.is_idle()?, "a stream did not wait for its word");
    writing.memory_ops(&[MemoryOp::write(&word, value)])?;
    comm.synchronize(&waiting)?;
    comm.synchronize(&writing)?;
    let mut bytes = [0; 8];
    device.download(word.as_slice(), &mut bytes)?;
    ensure!(
        u64::from_le_bytes(bytes) == value,
        "a word has the wrong value"
    );
    Ok("written and waited for".to_owned())
}

/// Every rank sends to every other. A failure on one rank ends the step on all of them before any rank waits
/// in vain.
fn try_transfers(comm: &Communicator, kind: AllocationKind, protocol: Protocol) -> Result<String> {
    let (rank, world) = (comm.rank(), comm.world());
    let peers: Vec<usize> = (0..world).filter(|peer| *peer != rank).collect();
    let buffer = |bytes: &[u8]| -> Result<Region> {
        let memory = comm.device().allocate(BYTES, kind)?;
        comm.device().upload(&memory, bytes)?;
        Ok(comm.register(&memory)?)
    };
    let pair = |&peer| Ok((buffer(&pattern(rank, peer))?, buffer(&[0; BYTES])?));
    let prepared = peers.iter().map(pair).collect::<Result<Vec<_>>>();
    // Agreed after every step that may fail on one rank alone: the others would wait for it until their timeout.
    let prepared = agree(comm, prepared)?;
    let mut requests = Vec::new();
    for (&peer, (send, receive)) in peers.iter().zip(&prepared) {
        requests.push(TransferRequest::send(send, peer, 0).with_protocol(protocol));
        requests.push(TransferRequest::receive(receive, peer, 0).with_protocol(protocol));
    }
    let transfers = agree(comm, comm.exchange(&requests).map_err(Into::into))?;
    let checked = carry_out(comm, &transfers).and_then(|()| {
        peers
            .iter()
            .zip(&prepared)
            .try_for_each(|(&peer, (_, to))| {
                let bytes = to.download()?;
                let expected = pattern(peer, rank);
                let wrong = bytes.iter().zip(&expected).filter(|(a, b)| a != b).count();
                ensure!(
                    wrong == 0,
                    "{wrong} of {BYTES} bytes from rank {peer} are wrong"
                );
                Ok(())
            })
    });
    agree(comm, checked)?;
    Ok("sent between every pair and compared".to_owned())
}

fn carry_out(comm: &Communicator, transfers: &[Transfer]) -> Result<()> {
    let stream = comm.create_stream(Priority::High)?;
    let batch = Batch::new().post(transfers).wait(transfers);
    batch.enqueue(&stream)?;
    Ok(comm.synchronize(&stream)?)
}

/// Returns `own` if every rank succeeded, and fails otherwise.
fn agree<T>(comm: &Communicator, own: Result<T>) -> Result<T> {
    let all = comm.all_gather_bytes(&[u8::from(own.is_ok())])?;
    let own = own?;
    match all.iter().position(|bytes| bytes != &[1]) {
        None => Ok(own),
        Some(rank) => anyhow::bail!("rank {rank} failed"),
    }
}

/// Data sent from `from` to `to`; differs for every pair.
fn pattern(from: usize, to: usize) -> Vec<u8> {
    // Not periodic in 256 bytes, so that shifted data is detected.
    (0..BYTES)
        .map(|index| (index * 31 + index / 251 + from * 17 + to * 101 + 1) as u8)
        .collect()
}

/// Multiplies by the identity matrix.
fn try_gemm(comm: &Communicator) -> Result<String> {
    const SIZE: usize = 64;
    let device = comm.device();
    // Small integers, which even TF32 represents: the comparison can be exact.
    let values: Vec<f32> = (0..SIZE * SIZE).map(|i| (i % 97) as f32 - 48.0).collect();
    let identity: Vec<f32> = (0..SIZE * SIZE)
        .map(|i| f32::from(u8::from(i / SIZE == i % SIZE)))
        .collect();
    let a = DeviceBuffer::from_values(device, &values)?;
    let b = DeviceBuffer::from_values(device, &identity)?;
    // NaN, so that elements that were not written are detected.
    let c = DeviceBuffer::from_values(device, &vec![f32::NAN; SIZE * SIZE])?;
    let compute = comm.compute()?;
    let spec = MatmulSpec::new(SIZE, SIZE, SIZE, DType::F32);
    compute.prepare_matmul(&spec)?;
    let stream = comm.create_stream(Priority::Normal)?;
    compute.matmul(&stream, &spec, a.memory(), b.memory(), c.memory(), None)?;
    comm.synchronize(&stream)?;
    ensure!(c.download()? == values, "the GEMM result is wrong");
    Ok("multiplied by the identity and compared".to_owned())
}

/// Sums over all ranks.
fn try_collectives(comm: &Communicator) -> Result<String> {
    let engine = comm.collective_engine()?;
    let device = comm.device();
    let own = DeviceBuffer::from_values(device, &[comm.rank() as f32 + 1.0; 16])?;
    let sum = DeviceBuffer::from_values(device, &[0f32; 16])?;
    let stream = comm.create_stream(Priority::Normal)?;
    let request = CollectiveRequest::Collective {
        collective: Collective::AllReduce(ReduceOp::Sum),
        dtype: DType::F32,
        target: sum.memory().clone(),
        source: own.memory().clone(),
    };
    engine.enqueue(&stream, &request)?;
    comm.synchronize(&stream)?;
    let expected = (comm.world() * (comm.world() + 1) / 2) as f32;
    ensure!(sum.download()? == [expected; 16], "the sum is wrong");
    Ok(format!("{}, a sum over all ranks", engine.name()))
}
