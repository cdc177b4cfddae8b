//! Peer information: machine, process, device and service address of every rank.

use super::process;
use crate::device::{
    Device, DeviceIdentity, DeviceKind, PciAddress, PeerAccess, machine_identity, network_namespace,
};
use crate::error::{Error, Rank, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Information that a rank sends to all others when joining.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct PeerInfo {
    process: [u8; 16],
    host: [u8; 16],
    /// Network namespace, within which its service's socket is reachable.
    namespace: u64,
    device: [u8; 16],
    cuda: bool,
    // Whether several processes can use the device concurrently.
    shareable: bool,
    /// PCI address of the device, if it has one.
    address: Option<PciAddress>,
    service: Vec<u8>,
}

/// Information about every rank, by rank.
#[derive(Debug)]
pub(super) struct Peers {
    own_place: ([u8; 16], u64),
    infos: Vec<PeerInfo>,
    /// Mutual access between this rank's device and each other rank's on this machine.
    accesses: Vec<PeerAccess>,
}

impl PeerInfo {
    pub(super) fn of_this_rank(device: &dyn Device, service: &[u8]) -> Self {
        let DeviceIdentity(identity) = device.identity();
        Self {
            process: process::identity(),
            host: machine_identity(),
            namespace: network_namespace(),
            device: identity,
            cuda: device.kind() == DeviceKind::Cuda,
            shareable: device.is_shareable(),
            address: device.attachment().ok().and_then(|place| place.address),
            service: service.to_vec(),
        }
    }

    /// Ranks with equal values can map one another's memory.
    fn place(&self) -> ([u8; 16], u64) {
        (self.host, self.namespace)
    }
}

impl Peers {
    /// Exchanges `own` among all ranks with `all_gather`, and then each device's access to the others'
    /// memory.
    ///
    /// # Errors
    /// [`ErrorKind::Mismatch`] if ranks use different kinds of devices; [`ErrorKind::Unsupported`] if two
    /// processes use a device that serves one at a time.
    pub(super) fn gather(
        rank: Rank,
        own: &PeerInfo,
        device: &dyn Device,
        all_gather: impl Fn(Vec<u8>) -> Result<Vec<Vec<u8>>>,
    ) -> Result<Self> {
        let encoded = postcard::to_stdvec(own).map_err(|error| {
            Error::internal(error.to_string()).with_operation("encode peer information")
        })?;
        let mut infos = Vec::new();
        for (peer, bytes) in all_gather(encoded)?.into_iter().enumerate() {
            let info: PeerInfo = postcard::from_bytes(&bytes).map_err(|error| {
                Error::protocol(error.to_string())
                    .with_operation("read peer information")
                    .with_peer(peer)
            })?;
            // The two kinds cannot map each other's memory, so fail here rather than at the first transfer.
            if info.cuda != own.cuda {
                return Err(
                    Error::mismatch("one rank uses a GPU and another the host device")
                        .with_rank(rank)
                        .with_peer(peer)
                        .with_help("give every rank the same --device"),
                );
            }
            infos.push(info);
        }
        check_sharing(&infos).map_err(|error| error.with_rank(rank))?;
        let own_place = own.place();
        let asked = infos.iter().enumerate().map(|(peer, info)| {
            let is_other = peer != rank && info.place() == own_place;
            // If a process does not see the other's device, only an attempt shows whether it can map.
            is_other
                .then(|| device.peer_access(info.address))
                .flatten()
                .unwrap_or(PeerAccess::FULL)
        });
        let asked: Vec<_> = asked.collect();
        // Drivers may differ in the two directions, and collectives write both ways: the lesser access
        // counts.
        let encoded = asked.iter().map(|access| encode(*access)).collect();
        let mut accesses = Vec::with_capacity(asked.len());
        for ((peer, encoded), asked) in all_gather(encoded)?.iter().enumerate().zip(asked) {
            let back = encoded.get(rank).copied().and_then(decode).ok_or_else(|| {
                let what = "the peer's access information is malformed";
                Error::protocol(what)
                    .with_operation("read peer information")
                    .with_peer(peer)
            })?;
            accesses.push(asked.and(back));
        }
        Ok(Self {
            own_place,
            infos,
            accesses,
        })
    }

    /// Mutual access between the devices of this rank and of `peer`, on the same machine.
    pub(super) fn access(&self, peer: Rank) -> Result<PeerAccess> {
        self.info(peer)?;
        Ok(self.accesses.get(peer).copied().unwrap_or(PeerAccess::FULL))
    }

    /// Whether every other rank of this machine can map the memory of this rank's device.
    pub(super) fn all_map_device_memory(&self) -> bool {
        self.accesses.iter().all(|access| access.mapped)
    }

    /// Name of `peer`'s service socket.
    pub(super) fn service(&self, peer: Rank) -> Result<&[u8]> {
        self.info(peer).map(|info| &*info.service)
    }

    /// Whether `peer` is on this machine, so that its memory can be mapped.
    pub(super) fn is_near(&self, peer: Rank) -> Result<bool> {
        Ok(self.info(peer)?.place() == self.own_place)
    }

    /// Whether `peer` is a thread of this process.
    pub(super) fn is_in_process(&self, peer: Rank) -> Result<bool> {
        Ok(self.info(peer)?.process == process::identity())
    }

    /// Maximum number of `ranks` on one device, at least 1; equal on every rank. Devices that provide threads
    /// for each rank do not count.
    pub(super) fn ranks_per_device(&self, ranks: &[Rank]) -> Result<usize> {
        let mut counts = BTreeMap::new();
        for rank in ranks {
            let info = self.info(*rank)?;
            if info.cuda {
                *counts.entry((info.host, info.device)).or_insert(0) += 1;
            }
        }
        Ok(counts.into_values().max().unwrap_or(1))
    }

    /// Fails unless `peer` is on this machine.
    pub(super) fn check_same_host(&self, peer: Rank) -> Result<()> {
        if self.is_near(peer)? {
            return Ok(());
        }
        Err(
            Error::unsupported("the peer is on another machine").with_help(
                "transfers reach the ranks of one machine; use connections or a collective engine between machines",
            ),
        )
    }

    fn info(&self, peer: Rank) -> Result<&PeerInfo> {
        self.infos.get(peer).ok_or_else(|| {
            Error::invalid(format!(
                "unknown rank {peer}; expected less than {}",
                self.infos.len()
            ))
            .with_peer(peer)
        })
    }
}

/// Encodes an access for peer information.
fn encode(access: PeerAccess) -> u8 {
    u8::from(access.mapped) | u8::from(access.atomics) << 1
}

/// Decodes an access; `None` if invalid.
fn decode(byte: u8) -> Option<PeerAccess> {
    (byte < 4).then_some(PeerAccess {
        mapped: byte & 1 != 0,
        atomics: byte & 2 != 0,
    })
}

/// Fails if two processes use one device that does not serve both concurrently: their work is time-sliced, so
/// one would wait for work that cannot run. All ranks come to the same result.
fn check_sharing(infos: &[PeerInfo]) -> Result<()> {
    for (rank, info) in infos.iter().enumerate() {
        let other = infos[..rank].iter().position(|other| {
            (other.host, other.device) == (info.host, info.device)
                && other.process != info.process
                && !(other.shareable && info.shareable)
        });
        if let Some(other) = other {
            return Err(Error::unsupported(format!(
                    "ranks {other} and {rank} are two processes on one GPU, which serves one at a time; \
                     expected a GPU for each"
                ),
            )
            .with_operation("join")
            .with_peer(other)
            .with_help(
                "start the ranks with `warplink launch --ranks-per-gpu`, or give each a GPU of its own",
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ErrorKind;

    fn info(process: u8, device: u8, shareable: bool) -> PeerInfo {
        PeerInfo {
            process: [process; 16],
            host: [0; 16],
            namespace: 0,
            device: [device; 16],
            cuda: true,
            shareable,
            address: None,
            service: Vec::new(),
        }
    }

    #[test]
    fn the_most_ranks_on_one_device_are_counted() {
        let mut elsewhere = info(4, 0, true);
        elsewhere.host = [1; 16];
        let on_host_device = PeerInfo {
            cuda: false,
            ..info(5, 1, true)
        };
        let peers = Peers {
            own_place: info(0, 0, true).place(),
            infos: vec![
                info(0, 0, true),
                info(1, 1, true),
                info(2, 0, true),
                info(3, 0, true),
                elsewhere,
                on_host_device.clone(),
                on_host_device,
            ],
            accesses: Vec::new(),
        };
        let counted = |ranks: &[Rank]| peers.ranks_per_device(ranks).unwrap();
        assert_eq!(counted(&[0, 1, 2, 3, 4]), 3);
        assert_eq!(counted(&[0, 1, 3]), 2);
        assert_eq!(counted(&[0, 1, 4]), 1);
        assert_eq!(counted(&[5, 6]), 1);
        assert_eq!(counted(&[]), 1);
        assert!(peers.ranks_per_device(&[7]).is_err());
    }

    #[test]
    fn two_processes_on_one_device_are_refused_unless_it_serves_both() {
        let check = |infos: &[PeerInfo]| check_sharing(infos);
        check(&[info(0, 0, false), info(1, 1, false)]).unwrap();
        // Threads of one process share everything.
        check(&[info(0, 0, false), info(0, 0, false)]).unwrap();
        check(&[info(0, 0, true), info(1, 0, true)]).unwrap();
        let mut elsewhere = info(1, 0, false);
        elsewhere.host = [1; 16];
        check(&[info(0, 0, false), elsewhere]).unwrap();
        for first in [false, true] {
            let infos = [info(2, 1, true), info(0, 0, first), info(1, 0, false)];
            let error = check(&infos).unwrap_err();
            assert_eq!(
                (error.kind(), error.peer()),
                (ErrorKind::Unsupported, Some(1))
            );
            let text = error.to_string();
            assert!(
                text.contains("ranks 1 and 2") && text.contains("--ranks-per-gpu"),
                "{text}"
            );
        }
    }
}
