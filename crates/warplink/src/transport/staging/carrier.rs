//! A staged end as the carrier of a connection.

use super::end::{EndParts, StagedEnd};
use super::service::Service;
use super::state::StagingOperation;
use crate::deadline::Deadline;
use crate::debug::debug_text;
use crate::device::channel::trigger::Movement;
use crate::device::channel::{Side, Windows};
use crate::device::{At, Device, DeviceSlice, Fault, Word};
use crate::error::{Error, Rank, Result};
use crate::transport::{Carrier, NetworkLink};
use std::sync::Arc;
use std::time::Duration;

/// Polling interval while draining.
const LOOK: Duration = Duration::from_micros(100);

/// Carrier for memory that the network cannot access.
pub(crate) struct StagedCarrier {
    end: Arc<StagedEnd>,
    service: Arc<Service>,
    windows: Arc<Windows>,
    /// This rank's flush word.
    completed: Word,
    peer: Rank,
    fault: Arc<Fault>,
}

impl StagedCarrier {
    /// Carrier of a link to `peer`, which may access `own` and whose signals increment `inbound`. Raises
    /// `fault` when the connection fails.
    pub(crate) fn new(
        device: &Arc<dyn Device>,
        (peer, link): (Rank, &Arc<NetworkLink>),
        (own, windows): (&DeviceSlice, &Arc<Windows>),
        [inbound, completed]: [&Word; 2],
        fault: &Arc<Fault>,
    ) -> Result<Self> {
        let (Some(incoming), Some(peer_shape)) = (link.incoming(), link.peer_shape()) else {
            return Err(Error::internal("a link without staging memory"));
        };
        link.fail_when_broken(fault)?;
        let parts = EndParts {
            peer,
            fault: fault.clone(),
            connection: link.connection().clone(),
            control: link.words().clone(),
            peer_ring: link.region(0)?,
            peer_shape,
            incoming: incoming.clone(),
            inbound: inbound.clone(),
        };
        let end = Arc::new(StagedEnd::new(device, parts)?);
        // Before the service gets the end: its first message from the peer may name region 0.
        end.set_region(0, own, link.is_reached());
        if let Some(peers) = link.peers_memory() {
            end.set_peers_region(0, peers.clone());
        }
        let service = link.keep_end(&end).clone();
        service.add(&end)?;
        Ok(Self {
            end,
            service,
            windows: windows.clone(),
            completed: completed.clone(),
            peer,
            fault: fault.clone(),
        })
    }

    fn push(&self, operation: StagingOperation) {
        self.end.push(operation);
        // After the push: the thread looks at the queue once it is awake.
        self.service.wake();
    }
}

impl Carrier for StagedCarrier {
    fn has_room(&self) -> Result<bool> {
        Ok(self.end.has_room())
    }

    fn start(&self, movement: Movement, own: &DeviceSlice, peers: At) -> Result<()> {
        self.windows.check(Side::Peers, peers, own.bytes() as u64)?;
        // An empty message would take a chunk, and a get of 0 bytes is a protocol violation at the peer.
        if own.bytes() == 0 {
            return Ok(());
        }
        self.push(match movement {
            Movement::Put => StagingOperation::Put {
                source: own.clone(),
                at: peers,
            },
            Movement::Get => StagingOperation::Get {
                target: own.clone(),
                at: peers,
            },
        });
        Ok(())
    }

    fn set(&self, inbound: Option<u64>, completed: Option<u64>) -> Result<()> {
        if let Some(value) = inbound {
            self.push(StagingOperation::Signal(value));
        }
        completed.map_or(Ok(()), |value| self.answer(&self.completed, value))
    }

    fn answer(&self, word: &Word, value: u64) -> Result<()> {
        let word = word.clone();
        self.push(StagingOperation::Answer { word, value });
        Ok(())
    }

    fn is_idle(&self) -> Result<bool> {
        self.end.is_idle()
    }

    fn drain(&self, deadline: Deadline) -> Result<()> {
        while !self.end.is_idle()? {
            self.fault.check()?;
            if deadline.passed() {
                return Err(deadline
                    .expired("the peer to receive the sent data")
                    .with_peer(self.peer));
            }
            // Nothing signals completion to the host: it is a counter in memory that the peer writes.
            std::thread::sleep(LOOK);
        }
        Ok(())
    }
}

debug_text!(StagedCarrier, |it| "StagedCarrier({:?})", it.end);
