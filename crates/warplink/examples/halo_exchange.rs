//! A stencil with a halo exchange inside its kernel: the heat equation on a plate that is cut into pieces, one for
//! each rank, in rows and columns. The hosts launch a kernel for hundreds of time steps; in between, only kernels talk.
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

use picture::{Moment, Plate};
use std::process::ExitCode;
use warplink::channel::ConnectionRequest;
use warplink::device::{Argument, Block, DeviceSlice, Launch, ModuleSource, Priority};
use warplink::memory::Region;
use warplink::{Communicator, Error, Result};

/// Rows and columns of each rank's cells.
const SIDE: usize = 64;

/// Time steps of a launch; even, so that the last one writes the first copy.
const STEPS: u32 = 200;

/// Launches.
const LAUNCHES: u32 = 3;

/// How fast heat spreads; below a quarter, or it grows without bound.
const RATE: f64 = 0.2;

fn main() -> ExitCode {
    ranks::run(4, |comm| {
        let moments = rank(comm)?;
        let mut arguments = std::env::args().skip_while(|argument| argument != "--picture");
        if let (0, Some(file)) = (comm.rank(), arguments.nth(1)) {
            std::fs::write(&file, picture::draw(&plate(comm.world()), &moments))
                .map_err(|error| Error::invalid(format!("{file} cannot be written: {error}")))?;
        }
        Ok(())
    })
}

/// The plate of so many ranks: as close to a square as there are pieces for.
pub(crate) fn plate(world: usize) -> Plate {
    let rows = (1..=world).rfind(|rows| world.is_multiple_of(*rows) && rows * rows <= world);
    let rows = rows.unwrap_or(1);
    Plate {
        rows,
        columns: world / rows,
        side: SIDE,
    }
}

/// The temperature of a cell of the whole plate at first: a disc in it is hot.
fn initial(row: usize, column: usize) -> f64 {
    let (down, right) = (row as f64 - 50.5, column as f64 - 60.5);
    if down * down + right * right < 30.0 * 30.0 {
        100.0
    } else {
        0.0
    }
}

/// Body of every rank. Returns the whole plate at the start, and after each launch.
pub(crate) fn rank(comm: &Communicator) -> Result<Vec<Moment>> {
    let source = ModuleSource::new("halo_exchange.cu")
        .with_cuda(include_str!("halo_exchange.cu"))
        .with_host_kernel("heat", heat);
    // SAFETY: the kernel accesses the piece, of two copies of its cells and what is around them, and puts within the
    // neighbours', which are as long.
    let kernel = unsafe { comm.device().load_module(&source) }?.kernel("heat")?;

    // This rank's place in the plate, and its piece of it; see halo_exchange.cu.
    let plate = plate(comm.world());
    let (row, column) = (comm.rank() / plate.columns, comm.rank() % plate.columns);
    let mut piece = vec![0.0; 2 * (SIDE + 6) * SIDE];
    for (at, cell) in piece[SIDE..][..SIDE * SIDE].iter_mut().enumerate() {
        *cell = initial(row * SIDE + at / SIDE, column * SIDE + at % SIDE);
    }
    let region = comm.alloc(8 * piece.len())?;
    region.upload(&bytes(&piece))?;

    // The same region serves all neighbours: each puts into its own ghosts.
    let rank = comm.rank();
    let neighbours = [
        (row > 0).then(|| rank - plate.columns),
        (row + 1 < plate.rows).then(|| rank + plate.columns),
        (column > 0).then(|| rank - 1),
        (column + 1 < plate.columns).then(|| rank + 1),
    ];
    let sides = (0..4).filter(|side| neighbours[*side].is_some());
    let sides: u32 = sides.map(|side| 1 << side).sum();
    let requests: Vec<_> = neighbours
        .iter()
        .flatten()
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
                Argument::from(sides),
                Argument::from(SIDE as u64),
                Argument::from(STEPS),
                Argument::from(RATE),
                Argument::from(region.memory()),
            ];
            kernel.launch(&stream, &Launch::new(1, 512), &arguments)?;
            comm.synchronize(&stream)?;
            moments.push(gather(comm, &region, launch * STEPS)?);
        }
    }
    check(comm, &moments)?;
    Ok(moments)
}

/// The cells of all pieces, after `steps` steps, row by row of the plate.
fn gather(comm: &Communicator, region: &Region, steps: u32) -> Result<Moment> {
    let own = region.slice(8 * SIDE..8 * (SIDE + SIDE * SIDE))?;
    let pieces = comm.all_gather_bytes(&own.download()?)?;
    let pieces: Vec<Vec<f64>> = pieces.iter().map(|piece| numbers(piece)).collect();
    let plate = plate(comm.world());
    let mut cells = Vec::new();
    for row in 0..plate.rows * SIDE {
        for piece in &pieces[row / SIDE * plate.columns..][..plate.columns] {
            cells.extend_from_slice(&piece[row % SIDE * SIDE..][..SIDE]);
        }
    }
    Ok(Moment { steps, cells })
}

/// Compares the plate at each time with one that was computed in one piece.
fn check(comm: &Communicator, moments: &[Moment]) -> Result<()> {
    let plate = plate(comm.world());
    let (height, width) = (plate.rows * SIDE, plate.columns * SIDE);
    let cells = (0..height * width).map(|at| initial(at / width, at % width));
    let mut cells: Vec<f64> = cells.collect();
    let (mut step, mut largest) = (0, 0.0_f64);
    for moment in moments {
        while step < moment.steps {
            let old = cells.clone();
            for (at, cell) in cells.iter_mut().enumerate() {
                // What is around the plate stays cold.
                let (row, column) = (at / width, at % width);
                let there = |is_there: bool, at: usize| if is_there { old[at] } else { 0.0 };
                let around = there(row > 0, at.wrapping_sub(width))
                    + there(row + 1 < height, at + width)
                    + there(column > 0, at.wrapping_sub(1))
                    + there(column + 1 < width, at + 1);
                *cell += RATE * (around - 4.0 * old[at]);
            }
            step += 1;
        }
        let errors = moment.cells.iter().zip(&cells);
        largest = errors.map(|(a, b)| (a - b).abs()).fold(largest, f64::max);
    }
    if largest > 1e-9 {
        return Err(Error::invalid(format!(
            "the plate is wrong by {largest}; expected 1e-9"
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
    let (neighbours, sides) = (block.channels(0)?, block.u32(1)?);
    let (n, steps, rate) = (
        block.u64(2)? as usize,
        block.u32(3)? as usize,
        block.f64(4)?,
    );
    let piece = block.slice(5)?;
    let columns = (n + 2) * n;
    let length = columns + 4 * n;
    let sources = [n, n * n, columns + 2 * n, columns + 3 * n];
    let targets = [(n + 1) * n, 0, columns + n, columns];
    for step in 0..steps {
        let (now, next) = (step % 2 * length, (step + 1) % 2 * length);
        let own = read(block, piece, now, length)?;
        let rows = own[n..columns - n].chunks_exact(n);
        let packed: Vec<f64> = rows
            .clone()
            .map(|row| row[0])
            .chain(rows.map(|row| row[n - 1]))
            .collect();
        write(block, piece, now + columns + 2 * n, &packed)?;
        let present = (0..4).filter(|side| sides >> side & 1 == 1);
        for (side, neighbour) in present.zip(&neighbours) {
            let [target, source] = [targets[side], sources[side]].map(|at| 8 * (now + at) as u64);
            neighbour.put_with_signal(target, source, 8 * n as u64)?;
        }
        neighbours
            .iter()
            .try_for_each(|neighbour| neighbour.wait())?;
        let old = read(block, piece, now, length)?;
        let new = (0..n * n).map(|cell| {
            let (row, column, at) = (cell / n, cell % n, cell + n);
            let west = if column > 0 { at - 1 } else { columns + row };
            let east = if column < n - 1 {
                at + 1
            } else {
                columns + n + row
            };
            let around = old[at - n] + old[at + n] + old[west] + old[east];
            old[at] + rate * (around - 4.0 * old[at])
        });
        write(block, piece, next + n, &new.collect::<Vec<_>>())?;
    }
    Ok(())
}

/// So many numbers of memory, from the number `from` on.
fn read(block: &Block<'_>, memory: &DeviceSlice, from: usize, count: usize) -> Result<Vec<f64>> {
    let mut found = vec![0; 8 * count];
    block.read(&memory.slice(8 * from..8 * (from + count))?, &mut found)?;
    Ok(numbers(&found))
}

fn write(block: &Block<'_>, memory: &DeviceSlice, from: usize, numbers: &[f64]) -> Result<()> {
    let target = memory.slice(8 * from..8 * (from + numbers.len()))?;
    block.write(&target, &bytes(numbers))
}

fn bytes(numbers: &[f64]) -> Vec<u8> {
    numbers
        .iter()
        .flat_map(|number| number.to_ne_bytes())
        .collect()
}

fn numbers(bytes: &[u8]) -> Vec<f64> {
    let words = bytes.chunks_exact(8);
    words
        .map(|word| f64::from_ne_bytes(word.try_into().unwrap_or_default()))
        .collect()
}
