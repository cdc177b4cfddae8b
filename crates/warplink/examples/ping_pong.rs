//! A kernel of one's own that talks to a peer: two ranks send a number back and forth without their hosts.
//!
//! ```sh
//! # Two ranks as threads of one process:
//! cargo run --release -p warplink --example ping_pong
//! # Two ranks as processes:
//! cargo build --release -p warplink --example ping_pong
//! cargo run --release -- launch -n 2 -- target/release/examples/ping_pong
//! ```

mod ranks;

use std::process::ExitCode;
use warplink::channel::ConnectionRequest;
use warplink::device::{Block, Launch, ModuleSource, Priority};
use warplink::{Communicator, Result};

/// Rounds of ping and pong.
const ROUNDS: u32 = 1000;

fn main() -> ExitCode {
    ranks::run(2, rank)
}

/// The kernel for the host device, which runs it where there is no GPU. It makes the same calls as the
/// one in ping_pong.cu.
fn ping_pong(block: &Block<'_>) -> Result<()> {
    let (channel, rank, rounds) = (block.channel(0)?, block.u32(1)?, block.u32(2)?);
    let (sent, received) = (channel.here(0, 8)?, channel.here(8, 8)?);
    for _ in 0..rounds {
        if rank == 0 {
            channel.put_with_signal(8, 0, 8)?;
        }
        channel.wait()?;
        let mut number = [0; 8];
        block.read(&received, &mut number)?;
        let next = u64::from_ne_bytes(number) + 1;
        block.write(&sent, &next.to_ne_bytes())?;
        if rank == 1 {
            channel.put_with_signal(8, 0, 8)?;
        }
    }
    Ok(())
}

/// Body of every rank.
pub(crate) fn rank(comm: &Communicator) -> Result<()> {
    // Compiled by NVRTC for the GPU at hand. It is loaded before any kernel runs that waits for a peer:
    // loading might wait for that kernel.
    let source = ModuleSource::new("ping_pong.cu")
        .with_cuda(include_str!("ping_pong.cu"))
        .with_host_kernel("ping_pong", ping_pong);
    // SAFETY: the kernel accesses 16 bytes of the channel's region, and nothing else.
    let module = unsafe { comm.device().load_module(&source) }?;
    let kernel = module.kernel("ping_pong")?;

    if comm.rank() < 2 {
        // Both ranks name the other, the same tag, and memory of their own.
        let region = comm.alloc(16)?;
        region.upload(&[0; 16])?;
        let (peer, tag) = (1 - comm.rank(), 0);
        let connections = comm.connect(&[ConnectionRequest::new(peer, tag, &region)])?;
        let channel = connections.find(peer, tag)?.channel();

        let stream = comm.create_stream(Priority::Normal)?;
        let arguments = [channel, (comm.rank() as u32).into(), ROUNDS.into()];
        kernel.launch(&stream, &Launch::new(1, 1), &arguments)?;
        comm.synchronize(&stream)?;

        let number = u64::from_ne_bytes(region.download()?[..8].try_into().unwrap_or_default());
        if comm.rank() == 0 {
            assert_eq!(number, 2 * u64::from(ROUNDS));
            println!("after {ROUNDS} rounds the number is {number}");
        }
    }
    Ok(())
}
