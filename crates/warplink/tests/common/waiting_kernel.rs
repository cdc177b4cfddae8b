//! A user's kernel whose blocks wait for a word, and keep their multiprocessors meanwhile.

use std::sync::Arc;
use std::time::{Duration, Instant};
use warplink::device::{
    AllocationKind, Argument, Block, Device, DeviceSlice, Kernel, Launch, ModuleSource, Stream,
};
use warplink::{DeviceKind, Error, ErrorKind, Result};

/// Every block waits until the word has the value, for 20 seconds at most, and counts itself if it did.
const CUDA: &str = r#"
extern "C" __global__ void __launch_bounds__(1024) wait_for(volatile unsigned *word, unsigned value, unsigned *met) {
    if (threadIdx.x != 0) return;
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
    do {
        if (*word == value) {
            atomicAdd(met, 1u);
            return;
        }
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (now - begin < 20000000000ull);
}
"#;

/// Blocks on the host device, each of which keeps a thread.
const HOST_BLOCKS: u32 = 8;

fn wait_for(block: &Block<'_>) -> Result<()> {
    let begin = Instant::now();
    let (word, value, met) = (block.slice(0)?, block.u32(1)?, block.slice(2)?);
    let mut seen = [0; 4];
    while begin.elapsed() < Duration::from_secs(20) {
        block.read(&word.slice(0..4)?, &mut seen)?;
        if u32::from_le_bytes(seen) == value {
            let own = 4 * block.index() as usize;
            return block.write(&met.slice(own..own + 4)?, &1_u32.to_le_bytes());
        }
        std::thread::sleep(Duration::from_micros(100));
    }
    Err(Error::new(ErrorKind::Timeout, "the word was not set"))
}

pub struct WaitingKernel {
    device: Arc<dyn Device>,
    kernel: Kernel,
    blocks: u32,
    launch: Launch,
    /// A word for each block, or for all of them.
    met: DeviceSlice,
}

impl WaitingKernel {
    /// On a GPU it has `blocks` blocks of `threads` threads, each of which takes that much dynamic shared memory.
    pub fn new(device: &Arc<dyn Device>, blocks: u32, threads: u32, shared_bytes: u32) -> Self {
        let source = ModuleSource::new("wait_for.cu")
            .with_cuda(CUDA)
            .with_host_kernel("wait_for", wait_for);
        // SAFETY: the kernel reads a word, and adds to another.
        let module = unsafe { device.load_module(&source) }.unwrap();
        let (blocks, shared_bytes) = match device.kind() {
            DeviceKind::Host => (HOST_BLOCKS, 0),
            DeviceKind::Cuda => (blocks, shared_bytes),
        };
        Self {
            device: device.clone(),
            kernel: module.kernel("wait_for").unwrap(),
            blocks,
            launch: Launch::new(blocks, threads).with_shared_bytes(shared_bytes),
            met: device
                .allocate(4 * blocks as usize, AllocationKind::Plain)
                .unwrap(),
        }
    }

    /// Launches it; its blocks end when `word` has the value.
    pub fn start(&self, stream: &Stream, word: &DeviceSlice, value: u32) {
        let zeros = vec![0; self.met.bytes()];
        self.device.upload(&self.met, &zeros).unwrap();
        let arguments = [
            Argument::Slice(word.clone()),
            Argument::U32(value),
            Argument::Slice(self.met.clone()),
        ];
        self.kernel
            .launch(stream, &self.launch, &arguments)
            .unwrap();
    }

    /// Fails unless every block has seen the value. The stream must be synchronized.
    pub fn assert_ended(&self, what: &str) {
        let mut met = vec![0; self.met.bytes()];
        self.device.download(&self.met, &mut met).unwrap();
        let words = met.chunks_exact(4).map(|word| word.try_into().unwrap());
        let met: u32 = words.map(u32::from_le_bytes).sum();
        assert_eq!(met, self.blocks, "{what}");
    }
}
