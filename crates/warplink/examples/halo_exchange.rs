//! A stencil with a halo exchange inside its kernel: the heat equation on a rod that is cut into pieces,
//! one for each rank. The hosts launch a kernel for thousands of time steps; in between, only kernels talk.
//!
//! ```sh
//! # Four ranks as threads of one process, or one for each GPU:
//! cargo run --release -p warplink --example halo_exchange
//! # Its picture, docs/halo-exchange.svg:
//! WARPLINK_DEVICE=host cargo run --release -p warplink --example halo_exchange -- --picture FILE
//! ```

#[path = "halo/picture.rs"]
pub(crate) mod picture;
mod ranks;

use picture::Moment;
use std::process::ExitCode;
use warplink::channel::ConnectionRequest;
use warplink::device::{Argument, Block, DeviceSlice, Launch, ModuleSource, Priority};
use warplink::memory::Region;
use warplink::{Communicator, Error, Result};

/// Cells of each rank.
const CELLS: usize = 256;

/// Time steps of a launch; even, so that the last one writes the first copy.
const STEPS: u32 = 2000;

/// Launches.
const LAUNCHES: u32 = 4;

/// How fast heat spreads; below one half, or it grows without bound.
const RATE: f64 = 0.25;

fn main() -> ExitCode {
    ranks::run(4, |comm| {
        let moments = rank(comm)?;
        let mut arguments = std::env::args().skip_while(|argument| argument != "--picture");
        if let (0, Some(file)) = (comm.rank(), arguments.nth(1)) {
            std::fs::write(&file, picture::draw(&moments, comm.world()))
                .map_err(|error| Error::invalid(format!("{file} cannot be written: {error}")))?;
        }
        Ok(())
    })
}

/// The temperature of cell `i` of the whole rod at first: a part of it is hot.
fn initial(i: usize) -> f64 {
    if (300..420).contains(&i) { 100.0 } else { 0.0 }
}

/// What every rank does. Gives the whole rod at the start, and after each launch.
pub(crate) fn rank(comm: &Communicator) -> Result<Vec<Moment>> {
    let source = ModuleSource::new("halo_exchange.cu")
        .with_cuda(include_str!("halo_exchange.cu"))
        .with_host_kernel("heat", heat);
    // SAFETY: the kernel accesses the piece, of two copies of its cells and ghosts, and puts within the
    // neighbours', which are as long.
    let kernel = unsafe { comm.device().load_module(&source) }?.kernel("heat")?;

    // Two copies of this rank's piece, each with a ghost cell at either end.
    let (rank, world) = (comm.rank(), comm.world());
    let mut piece = vec![0.0; 2 * (CELLS + 2)];
    for (i, cell) in piece[1..=CELLS].iter_mut().enumerate() {
        *cell = initial(rank * CELLS + i);
    }
    let region = comm.alloc(8 * piece.len())?;
    region.upload(
        &piece
            .iter()
            .flat_map(|cell| cell.to_ne_bytes())
            .collect::<Vec<u8>>(),
    )?;

    // The same region serves both neighbours: each puts into its own ghost.
    let left = rank.checked_sub(1);
    let right = Some(rank + 1).filter(|right| *right < world);
    let neighbours = left.iter().chain(&right);
    let requests: Vec<_> = neighbours
        .map(|peer| ConnectionRequest::new(*peer, 0, &region))
        .collect();
    let connections = comm.connect(&requests)?;
    // Also that all pieces are filled and all kernels loaded before one begins to put.
    comm.barrier()?;

    let stream = comm.create_stream(Priority::Normal)?;
    let mut moments = vec![gather(comm, &region, 0)?];
    for launch in 1..=LAUNCHES {
        if !requests.is_empty() {
            let arguments = [
                connections.channels()?,
                Argument::from(u32::from(left.is_some())),
                Argument::from(u32::from(right.is_some())),
                Argument::from(CELLS as u64),
                Argument::from(STEPS),
                Argument::from(RATE),
                Argument::from(region.memory()),
            ];
            kernel.launch(&stream, &Launch::new(1, 256), &arguments)?;
            comm.synchronize(&stream)?;
            moments.push(gather(comm, &region, launch * STEPS)?);
        }
    }
    check(comm, &moments)?;
    Ok(moments)
}

/// All pieces, after `steps` steps.
fn gather(comm: &Communicator, region: &Region, steps: u32) -> Result<Moment> {
    let piece = region.download()?;
    let pieces = comm.all_gather_bytes(&piece[8..8 * (CELLS + 1)])?;
    let cells = floats(&pieces.concat());
    Ok(Moment { steps, cells })
}

/// Compares the rod at each time with one that was computed in one piece.
fn check(comm: &Communicator, moments: &[Moment]) -> Result<()> {
    let length = CELLS * comm.world() + 2;
    let mut rod: Vec<f64> = vec![0.0; length];
    for (i, cell) in rod[1..length - 1].iter_mut().enumerate() {
        *cell = initial(i);
    }
    let (mut step, mut largest) = (0, 0.0_f64);
    for moment in moments {
        while step < moment.steps {
            let now = rod.clone();
            for i in 1..length - 1 {
                rod[i] = now[i] + RATE * (now[i - 1] - 2.0 * now[i] + now[i + 1]);
            }
            step += 1;
        }
        let errors = moment.cells.iter().zip(&rod[1..]);
        largest = errors.map(|(a, b)| (a - b).abs()).fold(largest, f64::max);
    }
    if largest > 1e-9 {
        return Err(Error::invalid(format!(
            "the rod is wrong by {largest}; expected 1e-9"
        )));
    }
    if comm.rank() == 0 {
        println!(
            "{step} steps on {} ranks: right to {largest:.1e}",
            comm.world()
        );
    }
    Ok(())
}

/// The kernel for the host device; see halo_exchange.cu.
fn heat(block: &Block<'_>) -> Result<()> {
    let neighbours = block.channels(0)?;
    let (has_left, has_right) = (block.u32(1)? != 0, block.u32(2)? != 0);
    let (cells, steps, rate) = (block.u64(3)?, block.u32(4)?, block.f64(5)?);
    let (piece, length) = (block.slice(6)?, cells + 2);
    for step in 0..u64::from(steps) {
        let (now, next) = (step % 2 * length, (step + 1) % 2 * length);
        if has_left {
            neighbours[0].put_with_signal(8 * (now + cells + 1), 8 * (now + 1), 8)?;
        }
        if has_right {
            neighbours[usize::from(has_left)].put_with_signal(8 * now, 8 * (now + cells), 8)?;
        }
        neighbours
            .iter()
            .try_for_each(|neighbour| neighbour.wait())?;
        let old = read(block, piece, now, length)?;
        let new = old
            .windows(3)
            .map(|around| around[1] + rate * (around[0] - 2.0 * around[1] + around[2]));
        let bytes: Vec<u8> = new.flat_map(f64::to_ne_bytes).collect();
        let start = 8 * (next as usize + 1);
        block.write(&piece.slice(start..start + bytes.len())?, &bytes)?;
    }
    Ok(())
}

fn read(block: &Block<'_>, piece: &DeviceSlice, from: u64, count: u64) -> Result<Vec<f64>> {
    let (start, bytes) = (8 * from as usize, 8 * count as usize);
    let mut found = vec![0; bytes];
    block.read(&piece.slice(start..start + bytes)?, &mut found)?;
    Ok(floats(&found))
}

fn floats(bytes: &[u8]) -> Vec<f64> {
    let words = bytes.chunks_exact(8);
    words
        .map(|word| f64::from_ne_bytes(word.try_into().unwrap_or_default()))
        .collect()
}
