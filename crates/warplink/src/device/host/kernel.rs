//! Kernels of the host device: a closure that runs for each block.

use super::channel::BlockChannel;
use super::lanes::{self, Share};
use super::operation::{Context, HostOperation};
use super::{check_kind, memory, stream};
use crate::debug::debug_text;
use crate::device::module::{HostKernel, KernelBackend, ModuleBackend, unknown_kernel};
use crate::device::{Argument, DeviceKind, DeviceSlice, Launch, ModuleSource, Stream};
#[cfg(doc)]
use crate::error::ErrorKind;
use crate::error::{Error, Result};
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};

/// Maximum number of blocks of a launch: each has a thread.
const MAX_BLOCKS: u32 = 256;

/// One block of a launch, as passed to a kernel closure.
#[derive(Debug)]
pub struct Block<'a> {
    index: u32,
    launch: Launch,
    arguments: &'a [Argument],
    context: Context,
}

impl<'a> Block<'a> {
    pub(super) fn new(
        index: u32,
        launch: Launch,
        arguments: &'a [Argument],
        context: Context,
    ) -> Self {
        Self {
            index,
            launch,
            arguments,
            context,
        }
    }
}

impl Block<'_> {
    /// Index in the grid.
    pub fn index(&self) -> u32 {
        self.index
    }

    /// Number of blocks of the launch.
    pub fn blocks(&self) -> u32 {
        self.launch.blocks
    }

    /// Number of threads that a block would have on a GPU.
    pub fn threads(&self) -> u32 {
        self.launch.threads
    }

    /// Unsigned integer argument `number`.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] if the launch has no such argument; likewise for the other types.
    pub fn u64(&self, number: usize) -> Result<u64> {
        match self.argument(number)? {
            Argument::U64(value) => Ok(*value),
            Argument::U32(value) => Ok(u64::from(*value)),
            other => Err(mismatch(number, other, "an unsigned integer")),
        }
    }

    /// Signed integer argument `number`.
    pub fn i64(&self, number: usize) -> Result<i64> {
        match self.argument(number)? {
            Argument::I64(value) => Ok(*value),
            Argument::I32(value) => Ok(i64::from(*value)),
            other => Err(mismatch(number, other, "a signed integer")),
        }
    }

    /// 32-bit unsigned integer argument `number`.
    pub fn u32(&self, number: usize) -> Result<u32> {
        match self.argument(number)? {
            Argument::U32(value) => Ok(*value),
            other => Err(mismatch(number, other, "u32")),
        }
    }

    /// `f32` argument `number`.
    pub fn f32(&self, number: usize) -> Result<f32> {
        match self.argument(number)? {
            Argument::F32(value) => Ok(*value),
            other => Err(mismatch(number, other, "f32")),
        }
    }

    /// `f64` argument `number`.
    pub fn f64(&self, number: usize) -> Result<f64> {
        match self.argument(number)? {
            Argument::F64(value) => Ok(*value),
            other => Err(mismatch(number, other, "f64")),
        }
    }

    /// Memory argument `number`.
    pub fn slice(&self, number: usize) -> Result<&DeviceSlice> {
        match self.argument(number)? {
            Argument::Slice(slice) => Ok(slice),
            other => Err(mismatch(number, other, "a slice")),
        }
    }

    /// Channel argument `number`.
    pub fn channel(&self, number: usize) -> Result<BlockChannel<'_>> {
        match self.argument(number)? {
            Argument::Channel(channel) => Ok(BlockChannel::new(channel.memory(), &self.context)),
            other => Err(mismatch(number, other, "a channel")),
        }
    }

    /// Channel array argument `number`.
    pub fn channels(&self, number: usize) -> Result<Vec<BlockChannel<'_>>> {
        match self.argument(number)? {
            Argument::Channels(channels) => {
                let channels = channels.handles().iter();
                Ok(channels
                    .map(|channel| BlockChannel::new(channel.memory(), &self.context))
                    .collect())
            }
            other => Err(mismatch(number, other, "channels")),
        }
    }

    /// Barrier with the peers of `channels`, which must call it too: signals each channel and waits for each.
    pub fn barrier(&self, channels: &[BlockChannel<'_>]) -> Result<()> {
        // All signals before the first wait, or two peers would wait for each other's second.
        channels.iter().try_for_each(BlockChannel::signal)?;
        channels.iter().try_for_each(BlockChannel::wait)
    }

    /// Array-of-words argument `number`.
    pub fn words(&self, number: usize) -> Result<&[u64]> {
        match self.argument(number)? {
            Argument::Words(words) => Ok(words),
            other => Err(mismatch(number, other, "words")),
        }
    }

    /// Array-of-slices argument `number`.
    pub(crate) fn memory(&self, number: usize) -> Result<&[DeviceSlice]> {
        match self.argument(number)? {
            Argument::Memory(slices) => Ok(slices),
            other => Err(mismatch(number, other, "memory")),
        }
    }

    /// Copies `bytes` to `target`; lengths must match.
    pub fn write(&self, target: &DeviceSlice, bytes: &[u8]) -> Result<()> {
        check_kind(target)?;
        memory::write_bytes(target, bytes)
    }

    /// Copies `source` to `bytes`; lengths must match.
    pub fn read(&self, source: &DeviceSlice, bytes: &mut [u8]) -> Result<()> {
        check_kind(source)?;
        memory::read_bytes(source, bytes)
    }

    /// Context of the block's thread.
    pub(super) fn context(&self) -> &Context {
        &self.context
    }

    fn argument(&self, number: usize) -> Result<&Argument> {
        self.arguments.get(number).ok_or_else(|| {
            Error::invalid(format!(
                "the kernel asks for argument {number}; the launch has {}",
                self.arguments.len()
            ))
            .with_operation("run a kernel")
            .with_help("launch it with all of its arguments")
        })
    }
}

fn mismatch(number: usize, argument: &Argument, expected: &str) -> Error {
    Error::invalid(format!(
        "argument {number} is {}; expected {expected}",
        argument.type_name()
    ))
    .with_operation("run a kernel")
    .with_help("launch the kernel with the arguments that it asks for")
}

/// Closures of a module.
#[derive(Clone)]
pub(super) struct HostModule {
    name: String,
    kernels: BTreeMap<String, HostKernel>,
    /// Hardware threads of the machine.
    processors: usize,
}

impl HostModule {
    pub(super) fn load(source: &ModuleSource, processors: usize) -> Result<Self> {
        if source.host_kernels().is_empty() {
            let help = "give the module its kernels for the host device, by ModuleSource::with_host_kernel, `host` in Python or `host_kernels` in C";
            return Err(
                Error::unsupported("the module has no kernels for the host device")
                    .with_operation("load a module")
                    .with_key(source.name())
                    .with_help(help),
            );
        }
        Ok(Self {
            name: source.name().to_owned(),
            kernels: source.host_kernels().clone(),
            processors,
        })
    }
}

impl ModuleBackend for HostModule {
    fn kernel(&self, name: &str) -> Result<Arc<dyn KernelBackend>> {
        let body = self.kernels.get(name).cloned();
        let body = body.ok_or_else(|| unknown_kernel(&self.name, name, self.kernels.keys()))?;
        Ok(Arc::new(HostKernelBackend {
            name: name.to_owned(),
            body,
            processors: self.processors,
        }))
    }
}

debug_text!(
    HostModule,
    |it| "HostModule({}: {:?})",
    it.name,
    it.kernels.keys()
);

struct HostKernelBackend {
    name: String,
    body: HostKernel,
    processors: usize,
}

impl HostKernelBackend {
    fn invalid(&self, text: String, help: &'static str) -> Error {
        Error::invalid(text)
            .with_operation("launch a kernel")
            .with_key(&*self.name)
            .with_help(help)
    }
}

impl KernelBackend for HostKernelBackend {
    fn check_together(&self, launch: &Launch, _ranks: usize) -> Result<()> {
        if launch.blocks <= MAX_BLOCKS {
            return Ok(());
        }
        let text = format!(
            "{} blocks; expected at most {MAX_BLOCKS} on the host device",
            launch.blocks
        );
        Err(self.invalid(text, "launch fewer blocks"))
    }

    fn launch(&self, stream: &Stream, launch: &Launch, arguments: &[Argument]) -> Result<()> {
        let stream = stream::from_dyn(stream)?;
        self.check_together(launch, 1)?;
        // Memory of a GPU cannot be read by a thread of the host.
        let other = |argument: &&Argument| !argument.is_of(DeviceKind::Host);
        if let Some(argument) = arguments.iter().find(other) {
            let text = format!("{argument:?} is not of the host device");
            return Err(self.invalid(text, "use memory of the stream's device"));
        }
        // Held until the task is enqueued, so that no fault is missed between the two.
        let _noted = stream.depend_on(arguments.iter().flat_map(Argument::faults));
        // The task owns its arguments, which keeps their memory alive until it has run.
        let (body, launch, arguments) = (self.body.clone(), *launch, arguments.to_vec());
        let (name, processors) = (self.name.clone(), self.processors);
        stream.enqueue(HostOperation::Task(Arc::new(move |context: &Context| {
            let ended = match &body {
                HostKernel::Blocks(body) => together(launch.blocks as usize, |index| {
                    let context = context.for_block();
                    let block = Block::new(index as u32, launch, &arguments, context);
                    move || body(&block)
                }),
                HostKernel::Lanes { ranks, body } => {
                    let share = Share::of(processors, *ranks);
                    lanes::run(&**body, share, launch, &arguments, context)
                }
            };
            ended.map_err(|error| error.with_key(&*name))
        })))
    }
}

debug_text!(HostKernelBackend, |it| "Kernel({})", it.name);

/// Runs a closure from `work` for each thread, concurrently, and returns the error of the first one that
/// failed.
pub(super) fn together<W: FnOnce() -> Result<()> + Send>(
    threads: usize,
    work: impl Fn(usize) -> W,
) -> Result<()> {
    // A panic becomes the error of the launch; the process and the other blocks' cleanup continue.
    let run = |work: W| catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| Err(panicked()));
    // The calling thread runs the first block, which spares a thread for small launches.
    let first = work(0);
    if threads <= 1 {
        return run(first);
    }
    // Blocks wait for one another, so none begins before all have a thread.
    let all_started = OnceLock::new();
    let started = &all_started;
    std::thread::scope(|scope| {
        let mut others = Vec::new();
        for index in 1..threads {
            let work = work(index);
            let thread = std::thread::Builder::new()
                .name(format!("warplink-block-{index}"))
                .spawn_scoped(
                    scope,
                    move || {
                        if *started.wait() { run(work) } else { Ok(()) }
                    },
                );
            match thread {
                Ok(thread) => others.push(thread),
                Err(error) => {
                    let _ = started.set(false);
                    return Err(Error::thread("start a block's thread", &error));
                }
            }
        }
        let _ = started.set(true);
        let first = run(first);
        let others = others.into_iter().map(|thread| thread.join());
        let results: Vec<Result<()>> = others
            .map(|ended| ended.unwrap_or_else(|_| Err(panicked())))
            .collect();
        first.and(results.into_iter().collect())
    })
}

fn panicked() -> Error {
    Error::internal("a kernel of the host device panicked")
        .with_operation("run a kernel")
        .with_help("return an error from the closure instead")
}
