//! Outboxes of the host collectives: creation, discovery and mapping by peers.

use super::memory;
use crate::device::{AllocationKind, DeviceSlice, Piece};
use crate::error::{Error, ErrorKind, Rank, Result};
use rustix::fs::{Mode, OFlags};
use std::ops::Range;
use std::os::fd::AsRawFd;

/// Bytes of the first header, otherwise unused, that identify the outbox's owner.
pub(super) const MARK: Range<usize> = 16..40;

/// Length of an outbox's address message.
const PLACE: usize = 24;

/// This rank's outbox, and its address.
pub(super) struct OwnOutbox {
    pub(super) slice: DeviceSlice,
    // Kept open so that peers can open them.
    pieces: Vec<Piece>,
    token: [u8; 16],
}

impl OwnOutbox {
    /// Creates an outbox of `bytes`, zeroed except for its mark.
    pub(super) fn new(rank: Rank, bytes: usize) -> Result<Self> {
        let slice = memory::allocate(bytes, AllocationKind::Plain)?;
        let (pieces, _) = memory::pieces(&slice)?;
        let mut token = [0; 16];
        getrandom::fill(&mut token).map_err(|error| {
            Error::new(
                ErrorKind::Io,
                format!("the system gave no random bytes: {error}"),
            )
        })?;
        // Before the address is sent to anybody: a peer verifies the mark as soon as it has opened the file.
        memory::write_bytes(&slice.slice(MARK)?, &mark(&token, rank))?;
        Ok(Self {
            slice,
            pieces,
            token,
        })
    }

    /// Address message for peers: random token, process id and descriptor number.
    pub(super) fn place(&self) -> Vec<u8> {
        let descriptor = self.pieces.first();
        let descriptor = descriptor.map_or(-1, |piece| piece.descriptor.as_raw_fd());
        let process = std::process::id().to_le_bytes();
        [&self.token[..], &process, &descriptor.to_le_bytes()].concat()
    }
}

/// Identification stored in an outbox.
fn mark(token: &[u8; 16], rank: Rank) -> [u8; MARK.end - MARK.start] {
    let mut mark = [0; MARK.end - MARK.start];
    mark[..16].copy_from_slice(token);
    mark[16..].copy_from_slice(&(rank as u64).to_le_bytes());
    mark
}

/// Opens the outboxes of all ranks at the addresses `places`.
pub(super) fn open_all(
    rank: Rank,
    world: usize,
    own: &OwnOutbox,
    places: &[Vec<u8>],
) -> Result<Vec<DeviceSlice>> {
    if places.len() != world {
        return Err(Error::mismatch(format!(
            "{} ranks answered; expected {world}",
            places.len()
        )));
    }
    let outboxes = places.iter().enumerate().map(|(peer, place)| {
        if peer == rank {
            return Ok(own.slice.clone());
        }
        open(peer, own.slice.bytes(), place).map_err(|error| error.with_peer(peer))
    });
    outboxes.collect()
}

/// Opens the outbox of `peer`. If the processes are in different PID namespaces, its numbers may denote any
/// file here, so the token is verified.
fn open(peer: Rank, bytes: usize, place: &[u8]) -> Result<DeviceSlice> {
    let refused = |what: &'static str| {
        Error::invalid_handle(what)
            .with_operation("open a peer's outbox")
            .with_help("let the ranks of a machine share a namespace of processes")
    };
    let (PLACE, Some(token), Some(process), Some(descriptor)) = (
        place.len(),
        place.first_chunk::<16>(),
        place.get(16..).and_then(<[u8]>::first_chunk::<4>),
        place.last_chunk::<4>(),
    ) else {
        return Err(refused("the rank has no outbox"));
    };
    let (process, descriptor) = (
        u32::from_le_bytes(*process),
        i32::from_le_bytes(*descriptor),
    );
    let path = format!("/proc/{process}/fd/{descriptor}");
    // O_NONBLOCK avoids blocking on a pipe, O_NOCTTY acquiring a terminal.
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let descriptor = rustix::fs::open(&path, flags, Mode::empty())
        .map_err(|errno| Error::io(format!("open {path}"), &errno.into()))?;
    let outbox = memory::map(vec![Piece { descriptor, bytes }], bytes, None)?;
    let mut found = [0; MARK.end - MARK.start];
    memory::read_bytes(&outbox.slice(MARK)?, &mut found)?;
    if found != mark(token, peer) {
        return Err(refused(
            "the descriptor that the rank named is another one here",
        ));
    }
    Ok(outbox)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Pretend;
    use crate::device::host::HostDevice;
    use crate::device::host::collective::HostCollectives;
    use crate::device::host::exchange::outbox_bytes;
    use std::sync::Arc;

    /// Produces a peer's address message from this rank's.
    type AddressOf = Box<dyn Fn(&[u8]) -> Vec<u8>>;

    /// Joins as rank 0 of 2 with a peer that sends the address `place`, which may depend on this rank's, and
    /// then `failure`. Returns the result and what the peer received.
    fn join_with(
        place: impl Fn(&[u8]) -> Vec<u8>,
        failure: &str,
    ) -> (Result<HostCollectives>, Vec<u8>) {
        let mut received = Vec::new();
        let device = HostDevice::new(None, Pretend::Nothing);
        let joined = HostCollectives::join(&device, (0, 2), &Arc::default(), &mut |own| {
            let peers = match received.len() {
                0 => place(&own),
                _ => failure.as_bytes().to_vec(),
            };
            received.push(own.clone());
            Ok(vec![own, peers])
        });
        assert_eq!(received.len(), 2, "the peer waits for it");
        (joined, received.remove(1))
    }

    #[test]
    fn foreign_descriptor_is_rejected_and_the_peer_notified() {
        let (reader, _writer) = std::io::pipe().unwrap();
        let at = |descriptor: i32| {
            move |own: &[u8]| [&own[..20], &descriptor.to_le_bytes()[..]].concat()
        };
        let places: [AddressOf; 5] = [
            Box::new(|own| own.to_vec()),
            // A wrong token, with numbers that denote this rank's own outbox.
            Box::new(|own| [&[own[0] ^ 1], &own[1..]].concat()),
            Box::new(at(reader.as_raw_fd())),
            Box::new(at(-1)),
            Box::new(|own| own[..PLACE - 1].to_vec()),
        ];
        for place in places {
            let (joined, received) = join_with(place, "");
            let error = joined.unwrap_err();
            assert_eq!(error.peer(), Some(1), "{error}");
            assert!(!received.is_empty(), "the peer goes on");
        }
    }

    #[test]
    fn where_one_rank_cannot_join_none_does() {
        let peers = OwnOutbox::new(1, outbox_bytes(2)).unwrap();
        let (joined, received) = join_with(|_| peers.place(), "");
        assert!(joined.is_ok() && received.is_empty());
        let (joined, _) = join_with(|_| peers.place(), "out of memory");
        let error = joined.unwrap_err();
        let found = (error.kind(), error.peer());
        assert_eq!(found, (ErrorKind::PeerFailed, Some(1)));
        assert!(error.message().contains("out of memory"), "{error}");
    }
}
