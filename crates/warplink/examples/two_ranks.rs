//! The smallest transfer: rank 0 sends a few numbers to rank 1.
//!
//! ```sh
//! # Two ranks as threads of one process:
//! cargo run --release -p warplink --example two_ranks
//! # Two ranks as processes:
//! cargo build --release -p warplink --example two_ranks
//! cargo run --release -- launch -n 2 -- target/release/examples/two_ranks
//! ```

mod ranks;

use std::process::ExitCode;
use warplink::device::Priority;
use warplink::{Communicator, Result};

fn main() -> ExitCode {
    ranks::run(2, rank)
}

/// Body of every rank.
fn rank(comm: &Communicator) -> Result<()> {
    // A region is device memory that the other ranks may reach. A stream is an ordered queue of
    // work for the device: what is put into it happens later, one operation after the other.
    let region = comm.alloc(16)?;
    let stream = comm.create_stream(Priority::Normal)?;
    let message: Vec<u8> = (1..=16).collect();
    // The tag tells transfers between the same two ranks apart. Both ends use the same one.
    let tag = 0;

    match comm.rank() {
        0 => {
            region.upload(&message)?;
            comm.send(&region, 1, tag, &stream)?;
        }
        1 => comm.receive(&region, 0, tag, &stream)?,
        // With more than two ranks, the others have nothing to do.
        _ => {}
    }
    // The bytes have moved when the stream is done, and not before.
    comm.synchronize(&stream)?;
    if comm.rank() == 1 {
        assert_eq!(region.download()?, message);
        println!("rank 1 received {message:?}");
    }
    Ok(())
}
