//! Established connections, and their channels for kernels.

use super::answers::Answers;
use super::proxy::{Proxy, StreamCopy};
use super::request::Transport;
use super::tables::AddressTable;
use crate::debug::debug_fields;
use crate::device::channel::Side;
use crate::device::channel::trigger::Movement;
use crate::device::{
    Argument, At, ChannelArray, ChannelHandle, ChannelMemory, Device, DeviceSlice, InFlight, InUse,
    MemoryOp, Stream, Word,
};
use crate::error::{Error, Rank, Result};
use crate::memory::{Region, RemoteRegion};
use crate::signal::SlotPair;
use crate::sync::lock;
use crate::transport::{NetworkLink, NetworkPath};
use std::sync::{Arc, Mutex};

/// One rank's end of a connection: a peer and a tag. It keeps its regions registered, and the peer's mapped. Clones
/// share the same end.
///
/// It may be dropped at any time: resources of kernels are kept until the streams that they were launched into have
/// passed them. A graph that captured such a kernel does not keep them, and must not be launched any more.
#[derive(Clone)]
pub struct Connection {
    device: Arc<dyn Device>,
    end: Arc<InUse<ConnectionEnd>>,
}

/// An end of a connection. No stream may use it any more when it is dropped; resources of the proxy are kept until
/// the proxy has completed the kernels' requests.
#[derive(Debug)]
pub(super) struct ConnectionEnd {
    pub(super) peer: Rank,
    /// The peer's rank in the job.
    pub(super) job_peer: Rank,
    pub(super) tag: u64,
    /// Sequence number among the connections with this peer and tag.
    pub(super) number: u64,
    pub(super) transport: Transport,
    pub(super) memory: Arc<ChannelMemory>,
    pub(super) held: Arc<HeldEnd>,
    pub(super) proxy: Option<Arc<Proxy>>,
}

/// Resources of an end of a connection. When they are dropped, its words may be reused by other connections as soon
/// as the other end is dropped too.
#[derive(Debug)]
pub(super) struct HeldEnd {
    /// Regions of both sides, in the order of their numbers; the peer's if it is mapped.
    pub(super) regions: Mutex<Vec<(Region, Option<RemoteRegion>)>>,
    pub(super) reach: PeerReach,
    pub(super) table: AddressTable,
    /// For streams whose copies the proxy performs.
    pub(super) answers: Arc<Answers>,
}

/// How this rank reaches the other end.
#[derive(Debug)]
pub(super) enum PeerReach {
    /// Through memory mapped here.
    Mapped(Box<SlotPair>),
    /// Over the network; the words are held with the link.
    Network(Arc<NetworkLink>),
}

impl Connection {
    pub(super) fn new(
        device: &Arc<dyn Device>,
        end: ConnectionEnd,
        in_flight: &Arc<InFlight>,
    ) -> Self {
        Self {
            device: device.clone(),
            end: Arc::new(InUse::new(end, in_flight)),
        }
    }

    pub(super) fn end(&self) -> &ConnectionEnd {
        &self.end
    }

    /// The other rank, in the connection's communicator.
    pub fn peer(&self) -> Rank {
        self.end.peer
    }

    /// The tag of the connection.
    pub fn tag(&self) -> u64 {
        self.end.tag
    }

    /// The transport that moves its bytes.
    pub fn transport(&self) -> Transport {
        self.end.transport
    }

    /// The path of device memory over the network; `None` for other transports.
    pub fn network_path(&self) -> Option<NetworkPath> {
        match &self.end.held.reach {
            PeerReach::Mapped(_) => None,
            PeerReach::Network(link) => Some(link.path()),
        }
    }

    /// This rank's region `number`; 0 is the region of the connection request.
    pub fn region(&self, number: u32) -> Option<Region> {
        let regions = lock(&self.end.held.regions);
        regions.get(number as usize).map(|(own, _)| own.clone())
    }

    /// Length of the peer's region `number`, in bytes.
    pub fn peer_bytes(&self, number: u32) -> Option<usize> {
        let windows = &self.end.memory.parts().windows;
        let bytes = windows.bytes(Side::Peers, number)?;
        usize::try_from(bytes).ok()
    }

    /// Its channel, as an argument of a kernel.
    pub fn channel(&self) -> Argument {
        Argument::Channel(Arc::new(self.clone()))
    }

    /// Makes the proxy, if the channel has one, poll for triggers at once. A launch of a kernel
    /// ([`Kernel::launch`](crate::device::Kernel::launch)) does so itself; launches of graphs or by other means do
    /// not.
    pub fn wake_proxy(&self) {
        if let Some(proxy) = &self.end.proxy {
            proxy.wake();
        }
    }

    /// The word that the peer's signals increment, for waits in a stream
    /// ([`MemoryOp::Wait`](crate::device::MemoryOp::Wait)), which do not consume a signal.
    pub fn inbound(&self) -> &Word {
        &self.end.memory.parts().inbound
    }

    /// Enqueues a copy of `source` to offset `target` of the peer's memory on `stream`. It is not ordered with
    /// accesses of kernels, but signals of a kernel that follows on `stream` are ordered after it. Over the network,
    /// the proxy copies when `stream` reaches this point, and `stream` waits until the bytes are in the peer's
    /// memory.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) if it exceeds the peer's region, or there is
    /// no such region. Over the network, [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) while `stream` is
    /// capturing a graph, and [`ErrorKind::Closed`](crate::ErrorKind::Closed) if the proxy was stopped.
    pub fn write(
        &self,
        stream: &Stream,
        target: impl Into<At>,
        source: impl AsRef<DeviceSlice>,
    ) -> Result<()> {
        self.copy(stream, Movement::Put, source.as_ref(), target.into())
            .map_err(|error| error.with_operation("write to the peer's memory"))
    }

    /// Enqueues a copy of the peer's memory, from offset `source`, to `target` on `stream`; see
    /// [`write`](Self::write).
    ///
    /// # Errors
    /// As for [`write`](Self::write).
    pub fn read(
        &self,
        stream: &Stream,
        target: impl AsRef<DeviceSlice>,
        source: impl Into<At>,
    ) -> Result<()> {
        self.copy(stream, Movement::Get, target.as_ref(), source.into())
            .map_err(|error| error.with_operation("read the peer's memory"))
    }

    fn copy(&self, stream: &Stream, movement: Movement, own: &DeviceSlice, at: At) -> Result<()> {
        let (end, memory) = (&self.end, &self.end.memory);
        if let Some(fault) = memory.fault() {
            // A connection whose communicator has failed enqueues nothing: the peer may no longer serve the copy.
            fault.check()?;
        }
        let copied = match end.held.reach {
            PeerReach::Mapped(_) => {
                let windows = &memory.parts().windows;
                let peers = windows.range(Side::Peers, at, own.bytes() as u64);
                peers.and_then(|peers| match movement {
                    Movement::Put => stream.copy(&peers, own),
                    Movement::Get => stream.copy(own, &peers),
                })
            }
            PeerReach::Network(_) => self.copy_by_proxy(stream, movement, own, at),
        };
        copied.map_err(|error| error.with_peer(end.peer).with_key(end.key()))?;
        // After the copy is enqueued, so that dropping the connection waits for the stream to pass it.
        end.note(stream);
        Ok(())
    }

    /// Makes the proxy copy when `stream` reaches this point, and `stream` wait for the copy.
    fn copy_by_proxy(
        &self,
        stream: &Stream,
        movement: Movement,
        own: &DeviceSlice,
        peers: At,
    ) -> Result<()> {
        let parts = self.end.memory.parts();
        parts
            .windows
            .check(Side::Peers, peers, own.bytes() as u64)?;
        if own.kind() != self.end.memory.kind() {
            return Err(Error::invalid(format!(
                "memory of device {}; expected that of {}",
                own.kind(),
                self.end.memory.kind()
            ))
            .with_help("use memory of the communicator's device"));
        }
        // The proxy would copy once, at capture, and a replayed wait would be satisfied by that copy.
        if stream.is_capturing()? {
            return Err(
                Error::unsupported("a graph does not contain copies over the network")
                    .with_help("copy outside of the graph, or put and get in a kernel"),
            );
        }
        let (Some(proxy), Some(end)) = (&self.end.proxy, &parts.proxy) else {
            return Err(Error::internal(
                "a connection over the network has no proxy",
            ));
        };
        if own.bytes() == 0 {
            return Ok(());
        }
        // An event of its own: copies of one stream are pending at several points of it at the same time.
        let after = self.device.create_event(false)?;
        stream.record(&after)?;
        let answers = &self.end.held.answers;
        let answer = answers.take()?;
        let copy = StreamCopy {
            stream: stream.clone(),
            after,
            movement,
            own: own.clone(),
            peers,
            answer: answer.clone(),
            answers: answers.clone(),
        };
        if let Err(error) = proxy.copy(end.connection, copy) {
            // No write for it was enqueued and no stream waits for it, so the word is free at once.
            answers.give_back(answer);
            return Err(error);
        }
        let (word, value) = (&answer.word, answer.value);
        // Only after the proxy has accepted the copy: a wait without a copy would block the stream until it is
        // aborted.
        stream.memory_ops(&[MemoryOp::wait(word, value)])
    }
}

impl ChannelHandle for Connection {
    fn memory(&self) -> &Arc<ChannelMemory> {
        &self.end.memory
    }

    fn note(&self, stream: &Stream) {
        // The wake-up comes last and is a hint only: the proxy polls the ring anyway, though rarely after a long
        // idle time.
        self.end.note(stream);
        self.wake_proxy();
    }

    fn check(&self) -> Result<()> {
        self.end
            .proxy
            .as_ref()
            .map_or(Ok(()), |proxy| proxy.check())
    }
}

impl From<&Connection> for Argument {
    fn from(connection: &Connection) -> Self {
        connection.channel()
    }
}

debug_fields!(Connection, |it|
    peer: it.end.peer,
    tag: it.end.tag,
    transport: it.end.transport,
    network_path: it.network_path()
);

impl ConnectionEnd {
    /// Its name in messages.
    pub(super) fn key(&self) -> String {
        format!("connection with tag {}", self.tag)
    }
}

impl Drop for ConnectionEnd {
    fn drop(&mut self) {
        let connection = self.memory.parts().proxy.as_ref();
        if let (Some(proxy), Some(end)) = (&self.proxy, connection) {
            // `held` goes along: triggers still in the ring may name the connection's regions and words.
            proxy.retire(end.connection, Box::new(self.held.clone()));
        }
    }
}

/// Connections established by one call, in the order of the requests.
#[derive(Clone, Debug)]
pub struct Connections {
    device: Arc<dyn Device>,
    all: Vec<Connection>,
}

impl Connections {
    pub(super) fn new(device: &Arc<dyn Device>, all: Vec<Connection>) -> Self {
        Self {
            device: device.clone(),
            all,
        }
    }

    /// The connection to `peer` with `tag`.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) if there is none.
    pub fn find(&self, peer: Rank, tag: u64) -> Result<&Connection> {
        let found = self
            .all
            .iter()
            .find(|connection| (connection.peer(), connection.tag()) == (peer, tag));
        found.ok_or_else(|| {
            Error::invalid(format!("no connection to rank {peer} with tag {tag}"))
                .with_operation("find a connection")
                .with_peer(peer)
                .with_help("connect to that rank with that tag first")
        })
    }

    /// All of them.
    pub fn all(&self) -> &[Connection] {
        &self.all
    }

    /// Their channels, for a kernel with a parameter `const warplink::Channel *`, in the order of the requests.
    /// Blocks until they are in device memory.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) if there are none.
    pub fn channels(&self) -> Result<Argument> {
        let channels: Vec<Arc<dyn ChannelHandle>> = self
            .all
            .iter()
            .map(|connection| Arc::new(connection.clone()) as Arc<dyn ChannelHandle>)
            .collect();
        ChannelArray::new(&self.device, &channels).map(Argument::Channels)
    }
}
