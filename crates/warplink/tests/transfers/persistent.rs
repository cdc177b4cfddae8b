//! Transfers under a kernel that fills the device and waits for them.

use super::common::{WaitingKernel, ring_requests, threads, world};
use std::time::Duration;
use warplink::Communicator;
use warplink::device::Priority;
use warplink::p2p::{Batch, Path, Protocol, TransferRequest};

/// Threads of a block; two of these blocks take all that a multiprocessor has.
const THREADS: u32 = 1024;
const BLOCKS_PER_MULTIPROCESSOR: u32 = 2;

/// Both ranks fill their device with blocks that wait for what the peer sends; the default path needs none of
/// it.
fn under_a_kernel(comm: &Communicator, path: Option<Path>) {
    const BYTES: [usize; 2] = [4096, 1 << 20];
    let device = comm.device();
    let blocks = BLOCKS_PER_MULTIPROCESSOR * device.properties().multiprocessors as u32;
    let waiting = WaitingKernel::new(device, blocks, THREADS, 0);
    let (compute, transfers) = (
        comm.create_stream(Priority::Normal).unwrap(),
        comm.create_stream(Priority::High).unwrap(),
    );
    for (tag, (bytes, protocol)) in BYTES
        .into_iter()
        .flat_map(|bytes| [(bytes, Protocol::Put), (bytes, Protocol::Get)])
        .enumerate()
    {
        let (send, receive) = (comm.alloc(bytes).unwrap(), comm.alloc(bytes).unwrap());
        let value = 1000 + tag as u32;
        send.upload(&value.to_le_bytes().repeat(bytes / 4)).unwrap();
        receive.upload(&vec![0; bytes]).unwrap();
        let requests = ring_requests(comm, &send, &receive, tag as u64);
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
        waiting.start(&compute, word.memory(), value);
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
        waiting.assert_ended(&format!("{protocol}, {bytes} bytes"));
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
