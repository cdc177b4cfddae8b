//! Whether a GPU can be used, as a process: what hangs or crashes there ends with it.

use anyhow::{Result, ensure};
use std::process::ExitCode;
use std::time::Duration;
use warplink::device::{
    self, AllocationKind, DeviceConfig, KernelCopy, MemoryOp, Priority, StreamOp, Unit,
};
use warplink::{Deadline, DeviceKind};

/// The hidden subcommand that tries the first GPU that it sees.
pub(crate) const PROBE_COMMAND: &str = "__fault-probe";

/// Bytes that are copied, by the library's kernel.
const BYTES: usize = 4096;

/// The longest that the copy takes.
const LIMIT: Duration = Duration::from_secs(20);

/// Copies by a stream, with a wait and a signal, and checks what arrives.
pub(crate) fn run() -> Result<ExitCode> {
    let device = device::open(&DeviceConfig::new(DeviceKind::Cuda, 0))?;
    let words = device.allocate_signals(128)?;
    let source = device.allocate(BYTES, AllocationKind::Plain)?;
    let target = device.allocate(BYTES, AllocationKind::Plain)?;
    let stream = device.create_stream(Priority::Normal)?;
    let content: Vec<u8> = (0..BYTES).map(|byte| (byte % 251) as u8).collect();
    device.upload(&source, &content)?;
    let word = words.word(0)?;
    stream.memory_ops(&[MemoryOp::Write {
        word: &word,
        value: 1,
    }])?;
    let wait = MemoryOp::Wait {
        word: &word,
        value: 1,
    };
    stream.sequence(&[
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
    ensure!(arrived == content, "a copy on the GPU gave other bytes");
    Ok(ExitCode::SUCCESS)
}
