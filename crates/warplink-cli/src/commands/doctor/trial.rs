//! Trying a device out: ranks as processes that hand one another memory and check what arrives.
//!
//! The doctor starts this command again under `launch`, with a hidden subcommand, so that a trial
//! that crashes or hangs becomes a line of the report. Every rank prints one line of JSON.

use super::{Check, Found};
use crate::report::print_json;
use anyhow::{Context, Result, ensure};
use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};
use std::io::Read;
use std::process::{Command, ExitCode, Stdio};
use std::thread;
use std::time::{Duration, Instant};
use warplink::device::{
    AllocationKind, Collective, CollectiveRequest, DeviceBuffer, MatmulSpec, MemoryOp, Priority,
    ReduceOp,
};
use warplink::memory::Region;
use warplink::p2p::{Batch, Protocol, Transfer, TransferRequest};
use warplink::{Communicator, Config, DType, DeviceKind, Error, ErrorKind};

/// The hidden subcommand that is a rank of a trial.
pub(crate) const TRIAL_COMMAND: &str = "__doctor-trial";

/// The most time that a rank waits for another.
const RANK_TIMEOUT: Duration = Duration::from_secs(15);

/// The most time that a trial may take in all.
const TRIAL_TIMEOUT: Duration = Duration::from_secs(150);

/// Bytes of a transfer: no multiple of a page or of a word, and more than fits one small kernel.
const BYTES: usize = 100_003;

/// What is tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum What {
    /// Memory, words, transfers and a GEMM.
    Device,
    /// The vendor's collectives.
    Collectives,
}

/// The arguments of the hidden subcommand.
#[derive(Debug, Args)]
pub(crate) struct TrialArgs {
    /// What to try
    #[arg(value_enum)]
    what: What,
}

/// How one step ended on one rank.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Step {
    name: String,
    /// What was found, or what went wrong.
    outcome: Result<String, String>,
    /// Whether the step failed for want of a library alone.
    library_missing: bool,
}

/// The line that a rank prints.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct RankReport {
    device: String,
    steps: Vec<Step>,
}

const WORDS: &str = "words in stream order";
const GEMM: &str = "GEMM";

/// Tries the host device with two ranks.
pub(super) fn on_host() -> Vec<Check> {
    tried("host device", DeviceKind::Host, 2, What::Device)
}

/// Tries `ranks` ranks on `count` GPUs.
pub(super) fn on_gpus(ranks: usize, count: usize) -> Vec<Check> {
    const AREA: &str = "GPUs, tried";
    let mut checks = tried(AREA, DeviceKind::Cuda, ranks, What::Device);
    // NCCL takes no two ranks on one GPU.
    if count >= ranks {
        checks.extend(tried(AREA, DeviceKind::Cuda, ranks, What::Collectives));
    }
    checks
}

/// Starts the ranks of a trial, and makes a check of each of its steps.
fn tried(area: &'static str, kind: DeviceKind, ranks: usize, what: What) -> Vec<Check> {
    let reports = match run_ranks(kind, ranks, what) {
        Ok(reports) => reports,
        Err(error) => {
            let name = match what {
                What::Device => "ranks",
                What::Collectives => "collectives",
            };
            let help = match kind {
                DeviceKind::Host => "fix what is missing under machine, above",
                DeviceKind::Cuda => {
                    "in a container, share the host's IPC and PID namespaces \
                     (--ipc=host --pid=host); run with -v for details"
                }
            };
            let check = Check::new(area, name, Found::missing(format!("{error:#}"), help));
            return vec![match what {
                What::Device => check.needed_by(kind),
                What::Collectives => check,
            }];
        }
    };
    summarize(area, kind, what, &reports)
}

fn summarize(
    area: &'static str,
    kind: DeviceKind,
    what: What,
    reports: &[RankReport],
) -> Vec<Check> {
    let Some(first) = reports.first() else {
        return Vec::new();
    };
    let names = first.steps.iter().map(|step| step.name.as_str());
    names
        .map(|name| {
            let all: Vec<(usize, &RankReport, &Step)> = reports
                .iter()
                .enumerate()
                .filter_map(|(rank, report)| {
                    let step = report.steps.iter().find(|step| step.name == name)?;
                    Some((rank, report, step))
                })
                .collect();
            let failure = all
                .iter()
                .find_map(|(rank, report, step)| match &step.outcome {
                    Ok(_) => None,
                    Err(error) => Some((rank, report, step, error)),
                });
            let found = match failure {
                None => {
                    let detail = all
                        .first()
                        .and_then(|(.., step)| step.outcome.as_ref().ok());
                    Found::ok(format!(
                        "{}, {} ranks",
                        detail.map_or("done", String::as_str),
                        reports.len()
                    ))
                }
                Some((_, _, step, error)) if step.library_missing => {
                    Found::missing(error.as_str(), "install the library; see libraries below")
                }
                Some((rank, report, _, error)) => {
                    let help = match kind {
                        DeviceKind::Host => "report this as a bug",
                        DeviceKind::Cuda => {
                            "fix what is missing above; in a container, share the host's IPC and \
                             PID namespaces (--ipc=host --pid=host)"
                        }
                    };
                    Found::missing(format!("rank {rank} on {}: {error}", report.device), help)
                }
            };
            let check = Check::new(area, name, found);
            // A device without GEMM still transfers.
            let optional = name == GEMM
                || what == What::Collectives
                || (kind == DeviceKind::Cuda && name.starts_with(VIRTUAL));
            if optional {
                check
            } else {
                check.needed_by(kind)
            }
        })
        .collect()
}

/// Starts the ranks, and collects what they print.
fn run_ranks(kind: DeviceKind, ranks: usize, what: What) -> Result<Vec<RankReport>> {
    let argument = what.to_possible_value();
    let argument = argument.as_ref().map_or("", |value| value.get_name());
    let (device, count) = (kind.to_string(), ranks.to_string());
    // The link leads to the running binary also after its file was replaced.
    let mut child = Command::new("/proc/self/exe")
        .args(["launch", "--device", &device, "-n", &count])
        // NCCL must not use multicast, whatever the caller has set.
        .args(["--env", "NCCL_NVLS_ENABLE=0", "--grace", "1"])
        .args(["--", "/proc/self/exe", TRIAL_COMMAND, argument])
        .env("WARPLINK_TIMEOUT", RANK_TIMEOUT.as_secs().to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context("start ranks")?;
    // Read beside the waiting, so that a full pipe holds nobody up.
    let out = child.stdout.take().map(read_all);
    let err = child.stderr.take().map(read_all);
    let end = Instant::now() + TRIAL_TIMEOUT;
    let status = loop {
        if let Some(status) = child.try_wait().context("wait for the ranks")? {
            break Some(status);
        }
        if Instant::now() >= end {
            // The launcher's guard ends the ranks.
            let _ = child.kill();
            let _ = child.wait();
            break None;
        }
        thread::sleep(Duration::from_millis(10));
    };
    let text = |reader: Option<thread::JoinHandle<String>>| {
        reader
            .and_then(|reader| reader.join().ok())
            .unwrap_or_default()
    };
    let (out, err) = (text(out), text(err));
    tracing::info!(%err, "output of the ranks");
    let status =
        status.with_context(|| format!("the ranks did not end within {TRIAL_TIMEOUT:?}"))?;
    ensure!(status.success(), "{}", first_complaint(&err));
    parse(&out, ranks)
}

fn read_all(mut pipe: impl Read + Send + 'static) -> thread::JoinHandle<String> {
    thread::spawn(move || {
        let mut text = Vec::new();
        // What came before a pipe broke is still worth showing.
        let _ = pipe.read_to_end(&mut text);
        String::from_utf8_lossy(&text).into_owned()
    })
}

/// The reports in the ranks' prefixed lines, in rank order.
fn parse(out: &str, ranks: usize) -> Result<Vec<RankReport>> {
    (0..ranks)
        .map(|rank| {
            let prefix = format!("[rank {rank}] ");
            let line = out.lines().find_map(|line| line.strip_prefix(&prefix));
            let line = line.with_context(|| format!("rank {rank} printed no report"))?;
            serde_json::from_str(line).with_context(|| format!("read the report of rank {rank}"))
        })
        .collect()
}

/// The line of the ranks' output that names the error.
fn first_complaint(err: &str) -> &str {
    let mut lines = err.lines().filter(|line| !line.trim().is_empty());
    let error = err.lines().find(|line| line.contains("error: "));
    error
        .or_else(|| lines.next_back())
        .unwrap_or("the ranks failed without a message")
}

/// Is one rank of a trial.
pub(crate) fn run_trial(args: &TrialArgs) -> Result<ExitCode> {
    let comm = Communicator::join(&Config::from_env()?).context("join the job")?;
    let steps = match args.what {
        What::Device => try_device(&comm),
        What::Collectives => vec![step("collectives", || try_collectives(&comm))],
    };
    let failed = steps.iter().any(|step| step.outcome.is_err());
    print_json(&RankReport {
        device: comm.device().name(),
        steps,
    })?;
    // After a failure some ranks may be held up; the report is out, and that is what counts.
    match comm.close() {
        Err(error) if !failed => Err(error).context("leave the job"),
        _ => Ok(ExitCode::SUCCESS),
    }
}

fn step(name: &str, body: impl FnOnce() -> Result<String>) -> Step {
    let outcome = body();
    let library_missing = outcome.as_ref().is_err_and(|error| {
        let error = error.downcast_ref::<Error>();
        error.is_some_and(|error| error.kind() == ErrorKind::LibraryMissing)
    });
    Step {
        name: name.to_owned(),
        outcome: outcome.map_err(|error| format!("{error:#}")),
        library_missing,
    }
}

const PLAIN: &str = "plain memory";
const VIRTUAL: &str = "virtual memory";

fn try_device(comm: &Communicator) -> Vec<Step> {
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
    // More than 32 bits, so that a narrower operation shows.
    let value = (1 << 40) + 7;
    waiting.memory_ops(&[MemoryOp::Wait { word: &word, value }])?;
    ensure!(!waiting.is_idle()?, "a stream did not wait for its word");
    writing.memory_ops(&[MemoryOp::Write { word: &word, value }])?;
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

/// Every rank sends to every other. A step that fails on one rank ends on all before anybody waits
/// for what will not come.
fn try_transfers(comm: &Communicator, kind: AllocationKind, protocol: Protocol) -> Result<String> {
    let (rank, world) = (comm.rank(), comm.world());
    let peers: Vec<usize> = (0..world).filter(|peer| *peer != rank).collect();
    let buffer = |fill: &dyn Fn(usize) -> Vec<u8>, peer: usize| -> Result<Region> {
        let memory = comm.device().allocate(BYTES, kind)?;
        comm.device().upload(&memory, &fill(peer))?;
        Ok(comm.register(&memory)?)
    };
    let prepared = peers
        .iter()
        .map(|&peer| {
            Ok((
                buffer(&|peer| pattern(rank, peer), peer)?,
                buffer(&|_| vec![0; BYTES], peer)?,
            ))
        })
        .collect::<Result<Vec<(Region, Region)>>>();
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

/// Passes `own` on if every rank succeeded, and fails if one did not.
fn agree<T>(comm: &Communicator, own: Result<T>) -> Result<T> {
    let all = comm.all_gather_bytes(&[u8::from(own.is_ok())])?;
    let own = own?;
    match all.iter().position(|bytes| bytes != &[1]) {
        None => Ok(own),
        Some(rank) => anyhow::bail!("rank {rank} failed"),
    }
}

/// What `from` sends `to`: bytes that differ for every pair.
fn pattern(from: usize, to: usize) -> Vec<u8> {
    (0..BYTES)
        .map(|index| (index * 31 + index / 251 + from * 17 + to * 101 + 1) as u8)
        .collect()
}

/// A GEMM with the identity matrix.
fn try_gemm(comm: &Communicator) -> Result<String> {
    const SIZE: usize = 64;
    let device = comm.device();
    let values: Vec<f32> = (0..SIZE * SIZE).map(|i| (i % 97) as f32 - 48.0).collect();
    let identity: Vec<f32> = (0..SIZE * SIZE)
        .map(|i| f32::from(u8::from(i / SIZE == i % SIZE)))
        .collect();
    let a = DeviceBuffer::from_values(device, &values)?;
    let b = DeviceBuffer::from_values(device, &identity)?;
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

/// A sum over all ranks.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::doctor::Status;

    fn report(outcomes: &[(&str, Result<&str, &str>, bool)]) -> RankReport {
        RankReport {
            device: "cuda:0".into(),
            steps: outcomes
                .iter()
                .map(|(name, outcome, library_missing)| Step {
                    name: (*name).to_owned(),
                    outcome: outcome.map(str::to_owned).map_err(str::to_owned),
                    library_missing: *library_missing,
                })
                .collect(),
        }
    }

    #[test]
    fn one_rank_that_fails_fails_the_step_and_is_named() {
        let reports = [
            report(&[(WORDS, Ok("fine"), false), (GEMM, Err("gone"), true)]),
            report(&[(WORDS, Err("torn"), false), (GEMM, Err("gone"), true)]),
        ];
        let checks = summarize("area", DeviceKind::Cuda, What::Device, &reports);
        assert_eq!(checks.len(), 2);
        assert!(checks[0].stops(DeviceKind::Cuda));
        assert_eq!(checks[0].detail, "rank 1 on cuda:0: torn");
        assert_eq!(checks[1].status, Status::Missing);
        assert!(!checks[1].stops(DeviceKind::Cuda), "transfers need no GEMM");
    }

    #[test]
    fn reports_are_found_among_other_lines() {
        let line = serde_json::to_string(&report(&[(WORDS, Ok("fine"), false)])).unwrap();
        let out = format!("[rank 1] {line}\nnoise\n[rank 0] {line}\n");
        assert_eq!(parse(&out, 2).unwrap().len(), 2);
        assert!(parse(&out, 3).is_err());
        assert!(parse("[rank 0] {", 1).is_err());
    }

    #[test]
    fn a_failure_is_told_by_its_error() {
        let err = "noise\n[rank 1] warplink: error: no GPU\nwarplink: rank 1 exited with code 1\n";
        assert_eq!(first_complaint(err), "[rank 1] warplink: error: no GPU");
        assert_eq!(first_complaint("only this\n"), "only this");
        assert!(!first_complaint("").is_empty());
    }
}
