//! Tests of whether GPUs work, each in its own process, so that a hang or a crash ends with that process.

use crate::launch::GpuAssignment;
use crate::process::{exit_within, this_command};
use anyhow::{Context, Result, bail, ensure};
use std::io;
use std::path::Path;
use std::process::{Child, ExitCode, Stdio};
use std::time::{Duration, Instant};
use warplink::device::{
    self, AllocationKind, DeviceConfig, KernelCopy, MemoryOp, Priority, StreamOp, Unit,
};
use warplink::{Deadline, DeviceKind};

/// The hidden subcommand that tests the first visible GPU.
pub(crate) const PROBE_COMMAND: &str = "__fault-probe";

/// Time limit of the test of a GPU: it may have to start the multi-process service, and to compile the
/// library's kernels.
const MAX_PROBE: Duration = Duration::from_secs(40);

/// Bytes copied by the library's kernel.
const BYTES: usize = 4096;

/// Time limit of the copy.
const LIMIT: Duration = Duration::from_secs(20);

/// Tests all GPUs, which leaves the library's kernels compiled in `cache`.
///
/// # Errors
/// If one does not work.
pub(super) fn test_all(gpus: &GpuAssignment, cache: &Path) -> Result<()> {
    let probes = gpus.names.iter().map(|name| {
        let child = this_command()
            .arg(PROBE_COMMAND)
            // One GPU for each process: a broken one may make the driver fail for the process as a whole.
            .env("CUDA_VISIBLE_DEVICES", name)
            .env("WARPLINK_CACHE_DIR", cache)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn();
        (name, child)
    });
    let until = Instant::now() + MAX_PROBE;
    let mut problem = Ok(());
    // All are started before one is waited for.
    for (name, child) in probes.collect::<Vec<_>>() {
        let child = child.context("start a process");
        let done = child.and_then(|child| finish(child, until));
        problem = problem.and(done.with_context(|| format!("test GPU {name}")));
    }
    problem
}

fn finish(mut child: Child, until: Instant) -> Result<()> {
    match exit_within(&mut child, until.saturating_duration_since(Instant::now())) {
        Some(status) if status.success() => Ok(()),
        Some(status) => {
            let text = child.stderr.take().map(io::read_to_string);
            let text = text.and_then(Result::ok).unwrap_or_default();
            bail!("{status}: {}", text.trim())
        }
        None => {
            // Not reaped: the driver may block its exit. It is reaped when the command ends.
            let _ = child.kill();
            bail!("it did not answer within {MAX_PROBE:?}")
        }
    }
}

/// In the process of a test: copies in a stream, after a wait for a word, and compares the result.
pub(crate) fn run() -> Result<ExitCode> {
    let device = device::open(&DeviceConfig::new(DeviceKind::Cuda, 0))?;
    let words = device.allocate_signals(128)?;
    let source = device.allocate(BYTES, AllocationKind::Plain)?;
    let target = device.allocate(BYTES, AllocationKind::Plain)?;
    let stream = device.create_stream(Priority::Normal)?;
    let content: Vec<u8> = (0..BYTES).map(|byte| (byte % 251) as u8).collect();
    device.upload(&source, &content)?;
    let word = words.word(0)?;
    stream.memory_ops(&[MemoryOp::write(&word, 1)])?;
    let wait = MemoryOp::wait(&word, 1);
    stream.sequence(&[
        // A wait and a copy in one kernel, as transfers use them; a working copy engine alone does not show that
        // kernels run.
        StreamOp::Memory(wait, Unit::Kernel),
        StreamOp::KernelCopy(KernelCopy {
            target: &target,
            source: &source,
            blocks: 1,
            arrivals: [None; 2],
            counter: &words.word(64)?,
        }),
    ])?;
    stream.synchronize(Deadline::after(LIMIT))?;
    let mut arrived = vec![0; BYTES];
    device.download(&target, &mut arrived)?;
    ensure!(arrived == content, "a copy on the GPU has wrong data");
    Ok(ExitCode::SUCCESS)
}
