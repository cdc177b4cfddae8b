//! Communication that measurements need beside their own: the vendor's library, counts over all ranks, and a
//! second stream.

use crate::report::print_message;
use anyhow::{Result, ensure};
use warplink::collective::{CollectiveOptions, CollectivePath, Collectives};
use warplink::device::{Event, Priority, Stream};
use warplink::{Communicator, DType, ErrorKind};

/// Collectives by the vendor's library, and its name.
pub(crate) fn vendor(comm: &Communicator) -> warplink::Result<(Collectives, String)> {
    let name = comm.collective_engine()?.name();
    let options = CollectiveOptions {
        path: Some(CollectivePath::Engine),
        ..CollectiveOptions::default()
    };
    Ok((comm.collectives_with(&options)?, name))
}

/// Whether a library is not installed, or not usable by these ranks. All ranks join a library together, so
/// the answer is the same on each.
pub(crate) fn is_missing(error: &anyhow::Error) -> bool {
    let error = error.downcast_ref::<warplink::Error>();
    error.is_some_and(|error| {
        matches!(
            error.kind(),
            ErrorKind::LibraryMissing | ErrorKind::Unsupported
        )
    })
}

/// The value of `made`; none, with a message by rank 0, where the library of `name` is missing.
pub(crate) fn optional<T, E: Into<anyhow::Error>>(
    comm: &Communicator,
    name: &str,
    made: Result<T, E>,
) -> Result<Option<T>> {
    match made.map_err(Into::into) {
        Ok(made) => Ok(Some(made)),
        Err(error) if is_missing(&error) => {
            if comm.rank() == 0 {
                print_message(&format!("without {name}: {error:#}"));
            }
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// The figures of every rank. Each rank gives the same number.
pub(crate) fn gather(comm: &Communicator, own: &[f64]) -> Result<Vec<Vec<f64>>> {
    let bytes: Vec<u8> = own.iter().flat_map(|value| value.to_le_bytes()).collect();
    let all = comm.all_gather_bytes(&bytes)?;
    let figures = |bytes: &Vec<u8>| -> Result<Vec<f64>> {
        ensure!(
            bytes.len() == 8 * own.len(),
            "a rank sent {} bytes of figures; expected {}",
            bytes.len(),
            8 * own.len()
        );
        Ok(DType::F64.decode(bytes).collect())
    };
    all.iter().map(figures).collect()
}

/// The sum of a count over all ranks; exact up to 2^53.
pub(crate) fn total(comm: &Communicator, own: u64) -> Result<u64> {
    let all = gather(comm, &[own as f64])?;
    Ok(all.concat().iter().sum::<f64>() as u64)
}

/// The rank before and the one after, in a ring.
pub(crate) fn neighbours(rank: usize, world: usize) -> [usize; 2] {
    [(rank + world - 1) % world, (rank + 1) % world]
}

/// A second stream that runs every other transfer: starting one takes a few microseconds in which its
/// stream moves nothing.
pub(crate) struct SecondStream {
    stream: Stream,
    begin: Event,
    end: Event,
}

impl SecondStream {
    pub(crate) fn new(comm: &Communicator) -> Result<Self> {
        let event = || comm.device().create_event(false);
        Ok(Self {
            stream: comm.create_stream(Priority::High)?,
            begin: event()?,
            end: event()?,
        })
    }

    /// Starts the second stream after the work that `first` holds now.
    pub(crate) fn fork(&self, first: &Stream) -> Result<()> {
        first.record(&self.begin)?;
        Ok(self.stream.wait_event(&self.begin)?)
    }

    /// The stream for `turn`.
    pub(crate) fn stream_for<'s>(&'s self, turn: usize, first: &'s Stream) -> &'s Stream {
        if turn.is_multiple_of(2) {
            first
        } else {
            &self.stream
        }
    }

    /// Makes `first` wait for the work of the second stream.
    pub(crate) fn join(&self, first: &Stream) -> Result<()> {
        self.stream.record(&self.end)?;
        Ok(first.wait_event(&self.end)?)
    }
}
