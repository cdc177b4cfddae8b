//! Shared parts of measurements: the vendor's library, sums over all ranks, memory of the neighbours, a second stream.

use crate::report::print_message;
use anyhow::{Context, Result, ensure};
use warplink::collective::{CollectiveOptions, CollectivePath, Collectives};
use warplink::device::{AllocationKind, DeviceSlice, Event, Priority, Stream, Word};
use warplink::memory::{Region, RemoteRegion};
use warplink::p2p::{Batch, Transfer};
use warplink::{Communicator, DType, ErrorKind};

/// Collectives by the vendor's library, and its name.
pub(crate) fn vendor(comm: &Communicator) -> warplink::Result<(Collectives, String)> {
    let name = comm.collective_engine()?.name();
    // Through Warplink's own calls, so that both methods have the same overhead of the host.
    let options = CollectiveOptions::on(CollectivePath::Engine);
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

/// The value of `made`; none, with a message by rank 0, if the library of `name` is missing.
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
        // Ranks that measured different numbers of samples would otherwise be compared sample by sample, out of step.
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

/// The previous and the next rank of a ring.
pub(crate) fn neighbours(rank: usize, world: usize) -> [usize; 2] {
    [(rank + world - 1) % world, (rank + 1) % world]
}

/// Allocates device memory.
pub(crate) fn allocate(comm: &Communicator, bytes: usize) -> warplink::Result<DeviceSlice> {
    comm.device().allocate(bytes, AllocationKind::Plain)
}

/// Device memory with these bytes.
pub(crate) fn place(comm: &Communicator, bytes: &[u8]) -> warplink::Result<DeviceSlice> {
    let slice = allocate(comm, bytes.len())?;
    comm.device().upload(&slice, bytes)?;
    Ok(slice)
}

/// The bytes of device memory.
pub(crate) fn download(comm: &Communicator, slice: &DeviceSlice) -> warplink::Result<Vec<u8>> {
    let mut bytes = vec![0; slice.bytes()];
    comm.device().download(slice, &mut bytes)?;
    Ok(bytes)
}

/// Two buffers and two words of every rank that all others can access.
pub(crate) struct SharedMemory {
    pub(crate) own: Region,
    pub(crate) into: Region,
    pub(crate) words: [Word; 2],
    remote_own: Vec<Option<RemoteRegion>>,
    remote_into: Vec<Option<RemoteRegion>>,
    remote_words: Vec<Option<RemoteRegion>>,
    _words: Region,
}

impl SharedMemory {
    /// Buffers of `bytes` bytes. Collective.
    pub(crate) fn new(comm: &Communicator, bytes: usize) -> Result<Self> {
        let (own, into) = (comm.alloc(bytes)?, comm.alloc(bytes)?);
        // Peers store to these words and streams wait for them, which needs memory that is allocated for signals.
        let words = comm.register(&comm.device().allocate_signals(4096)?)?;
        Ok(Self {
            remote_own: comm.share(&own)?,
            remote_into: comm.share(&into)?,
            remote_words: comm.share(&words)?,
            own,
            into,
            words: word_pair(words.memory())?,
            _words: words,
        })
    }

    /// The buffer `own` of another rank.
    pub(crate) fn remote_own(&self, rank: usize) -> Result<&RemoteRegion> {
        of_rank(&self.remote_own, rank)
    }

    /// The buffer `into` of another rank.
    pub(crate) fn remote_into(&self, rank: usize) -> Result<&RemoteRegion> {
        of_rank(&self.remote_into, rank)
    }

    /// The words of another rank.
    pub(crate) fn remote_words(&self, rank: usize) -> Result<[Word; 2]> {
        word_pair(of_rank(&self.remote_words, rank)?.memory())
    }
}

fn of_rank(all: &[Option<RemoteRegion>], rank: usize) -> Result<&RemoteRegion> {
    let region = all.get(rank).and_then(Option::as_ref);
    region.with_context(|| format!("rank {rank} is not another rank with shared memory"))
}

/// Two words on different cache lines.
fn word_pair(slice: &DeviceSlice) -> Result<[Word; 2]> {
    Ok([slice.word(0)?, slice.word(64)?])
}

/// A message there and back, from the rank that is `first`. It announces its receive together with its send.
pub(crate) fn round_trip<'t>(first: bool, [send, receive]: &'t [Transfer; 2]) -> Batch<'t> {
    if first {
        // The receive is posted early, so that the reply does not have to wait for its announcement.
        return Batch::new().post([send, receive]).wait([receive, send]);
    }
    let received = Batch::new().post([receive]).wait([receive]);
    received.post([send]).wait([send])
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
        // Without timing: such events are cheaper, and these only order streams.
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
