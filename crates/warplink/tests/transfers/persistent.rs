//! Transfers under a kernel that fills the device and waits for them.

use super::common::{threads, world};
use std::time::{Duration, Instant};
use warplink::device::{Argument, Block, Launch, ModuleSource, Priority};
use warplink::p2p::{Batch, Path, Protocol, TransferRequest};
use warplink::{Communicator, Error, ErrorKind, Result};

/// Threads of a block; two of these blocks take all that a multiprocessor has.
const THREADS: u32 = 1024;
const BLOCKS_PER_MULTIPROCESSOR: u32 = 2;

/// Blocks on the host device, each of which keeps a thread.
const HOST_BLOCKS: u32 = 8;

/// Every block waits until the word has the value, for 20 seconds at most, and says whether it did.
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
    Err(Error::new(ErrorKind::Timeout, "the transfer did not come"))
}

/// Both ranks fill their device with blocks that wait for what the peer sends; the default path needs none of
/// it.
fn under_a_kernel(comm: &Communicator, path: Option<Path>) {
    const BYTES: [usize; 2] = [4096, 1 << 20];
    let peer = 1 - comm.rank();
    let device = comm.device();
    let source = ModuleSource::new("wait_for.cu")
        .with_cuda(CUDA)
        .with_host_kernel("wait_for", wait_for);
    // SAFETY: the kernel reads a word, and adds to another.
    let module = unsafe { device.load_module(&source) }.unwrap();
    let kernel = module.kernel("wait_for").unwrap();
    let properties = device.properties();
    let blocks = match comm.device().kind() {
        warplink::DeviceKind::Host => HOST_BLOCKS,
        warplink::DeviceKind::Cuda => BLOCKS_PER_MULTIPROCESSOR * properties.multiprocessors as u32,
    };
    let (compute, transfers) = (
        comm.create_stream(Priority::Normal).unwrap(),
        comm.create_stream(Priority::High).unwrap(),
    );
    let met = comm.alloc(4 * blocks as usize).unwrap();
    for (tag, (bytes, protocol)) in BYTES
        .into_iter()
        .flat_map(|bytes| [(bytes, Protocol::Put), (bytes, Protocol::Get)])
        .enumerate()
    {
        let (send, receive) = (comm.alloc(bytes).unwrap(), comm.alloc(bytes).unwrap());
        let value = 1000 + tag as u32;
        send.upload(&value.to_le_bytes().repeat(bytes / 4)).unwrap();
        receive.upload(&vec![0; bytes]).unwrap();
        met.upload(&vec![0; met.bytes()]).unwrap();
        let requests = [
            TransferRequest::send(&send, peer, tag as u64),
            TransferRequest::receive(&receive, peer, tag as u64),
        ];
        let chosen = |request: TransferRequest| {
            let request = request.with_protocol(protocol);
            match path {
                Some(path) => request.with_path(path),
                None => request,
            }
        };
        let both = comm.exchange(&requests.map(chosen)).unwrap();
        // Its last words, so that all has arrived.
        let word = receive.slice(bytes - 4..bytes).unwrap();
        let arguments = [
            Argument::Slice(word.memory().clone()),
            Argument::U32(value),
            Argument::Slice(met.memory().clone()),
        ];
        kernel
            .launch(&compute, &Launch::new(blocks, THREADS), &arguments)
            .unwrap();
        // Both kernels wait before anything is posted.
        std::thread::sleep(Duration::from_millis(50));
        comm.barrier().unwrap();
        Batch::new()
            .post(&both)
            .wait(&both)
            .enqueue(&transfers)
            .unwrap();
        comm.synchronize(&transfers).unwrap();
        comm.synchronize(&compute).unwrap();
        let met = met.download().unwrap();
        let words = met.chunks_exact(4).map(|word| word.try_into().unwrap());
        let met: u32 = words.map(u32::from_le_bytes).sum();
        assert_eq!(met, blocks, "{protocol}, {bytes} bytes");
        comm.barrier().unwrap();
    }
}

#[test]
fn the_default_path_works_under_a_kernel_that_fills_the_device() {
    threads(world(2), |comm| under_a_kernel(comm, None));
    threads(world(2), |comm| {
        under_a_kernel(comm, Some(Path::CopyEngine));
    });
}
