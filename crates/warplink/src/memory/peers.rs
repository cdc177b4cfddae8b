//! What every rank knows about the others: machine, process, device, and where its service listens.

use super::opening::process_identity;
use crate::device::{Device, DeviceIdentity, DeviceKind, machine_identity};
use crate::error::{Error, ErrorKind, Rank, Result};
use serde::{Deserialize, Serialize};

/// What a rank tells every other when it joins.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct PeerInfo {
    process: [u8; 16],
    host: [u8; 16],
    device: [u8; 16],
    cuda: bool,
    service: Vec<u8>,
}

/// Every rank's information, by rank.
#[derive(Debug)]
pub(super) struct Peers {
    own_host: [u8; 16],
    infos: Vec<PeerInfo>,
}

impl PeerInfo {
    pub(super) fn of_this_rank(device: &dyn Device, service: &[u8]) -> Self {
        let DeviceIdentity(identity) = device.identity();
        Self {
            process: process_identity(),
            host: machine_identity(),
            device: identity,
            cuda: device.kind() == DeviceKind::Cuda,
            service: service.to_vec(),
        }
    }
}

impl Peers {
    /// Exchanges `own` for the information of every rank with `all_gather`.
    ///
    /// # Errors
    /// [`ErrorKind::Mismatch`] where ranks use different kinds of devices.
    pub(super) fn gather(
        rank: Rank,
        own: &PeerInfo,
        all_gather: impl FnOnce(Vec<u8>) -> Result<Vec<Vec<u8>>>,
    ) -> Result<Self> {
        let encoded = postcard::to_stdvec(own).map_err(|error| {
            Error::new(ErrorKind::Internal, error.to_string())
                .with_operation("encode peer information")
        })?;
        let mut infos = Vec::new();
        for (peer, bytes) in all_gather(encoded)?.into_iter().enumerate() {
            let info: PeerInfo = postcard::from_bytes(&bytes).map_err(|error| {
                Error::new(ErrorKind::Protocol, error.to_string())
                    .with_operation("read peer information")
                    .with_peer(peer)
            })?;
            if info.cuda != own.cuda {
                return Err(Error::new(
                    ErrorKind::Mismatch,
                    "one rank uses a GPU and another the host device",
                )
                .with_rank(rank)
                .with_peer(peer)
                .with_help("give every rank the same --device"));
            }
            infos.push(info);
        }
        Ok(Self {
            own_host: own.host,
            infos,
        })
    }

    /// The name of the socket on which `peer` answers.
    pub(super) fn service(&self, peer: Rank) -> Result<&[u8]> {
        self.info(peer).map(|info| &*info.service)
    }

    /// Fails unless `peer` runs on this machine.
    pub(super) fn check_same_host(&self, peer: Rank) -> Result<()> {
        if self.info(peer)?.host == self.own_host {
            return Ok(());
        }
        Err(
            Error::new(ErrorKind::Unsupported, "the peer is on another machine").with_help(
                "transfers reach the ranks of one machine; use a collective engine between machines",
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
