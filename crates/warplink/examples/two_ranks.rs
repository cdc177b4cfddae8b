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
use warplink::{Communicator, Error, Result};

/// Tells transfers between the same two ranks apart. Both ends use the same one.
const TAG: u64 = 0;

fn main() -> ExitCode {
    ranks::run(2, rank)
}

/// What every rank does.
fn rank(comm: &Communicator) -> Result<()> {
    let message: Vec<u8> = (1..=16).collect();

    // A region is device memory that the other ranks may reach. A stream is an ordered queue of
    // work for the device: what is put into it happens later, one after the other.
    let region = comm.alloc(message.len())?;
    let stream = comm.create_stream(Priority::Normal)?;

    match comm.rank() {
        0 => {
            region.upload(&message)?;
            comm.send(&region, 1, TAG, &stream)?;
            // The bytes have moved when the stream is done, and not before.
            comm.synchronize(&stream)?;
        }
        1 => {
            comm.receive(&region, 0, TAG, &stream)?;
            comm.synchronize(&stream)?;

            let mut received = vec![0; message.len()];
            comm.device().download(region.memory(), &mut received)?;
            if received != message {
                return Err(Error::invalid("rank 1 received something else"));
            }
            println!(
                "rank 1 received {received:?} on {}",
                comm.device().describe()
            );
        }
        // With more than two ranks, the others have nothing to do.
        _ => {}
    }
    Ok(())
}
