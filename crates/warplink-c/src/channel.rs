//! Connections, their channels and the proxy.

use crate::handles::{Comm, Handle, Region, Stream};
use crate::job::JobObject;
use crate::memory::same_job;
use crate::pointer;
use crate::status::{Failure, Outcome, Status, entry};
use crate::types::{At, Channel, Span, numbered};
use std::ffi::c_char;
use std::sync::Arc;
use warplink::channel::{Connection, ConnectionRequest, Transport};
use warplink::device::{ChannelArray, ChannelHandle};

/// Connections that a rank declared, and those already set up, in order of declaration.
#[derive(Default)]
pub(crate) struct Setup {
    declared: Vec<Declared>,
    connections: Vec<Connection>,
    /// Device copies of the channel array, one for each set of connections that a kernel was launched with. Earlier
    /// copies are kept because captured graphs may still refer to them.
    arrays: Vec<Arc<ChannelArray>>,
}

struct Declared {
    peer: usize,
    tag: u64,
    request: ConnectionRequest,
}

impl Setup {
    /// The connection to `peer` with `tag`.
    pub(crate) fn find(&self, peer: i32, tag: u64) -> Outcome<Connection> {
        let Ok(peer) = usize::try_from(peer) else {
            return Err(unknown(peer, tag));
        };
        let mut connections = self.connections.iter();
        if let Some(found) = connections.find(|one| (one.peer(), one.tag()) == (peer, tag)) {
            return Ok(found.clone());
        }
        if self.declares(peer, tag) {
            return Err(Failure::usage(
                format!("the connection to rank {peer} with tag {tag} was declared but not set up"),
                "call warplink_setup first",
            )
            .with_peer(peer));
        }
        Err(unknown(peer as i32, tag).with_peer(peer))
    }

    /// All connections.
    ///
    /// # Errors
    /// `InvalidUsage` before the first setup.
    pub(crate) fn all(&self) -> Outcome<&[Connection]> {
        if self.connections.is_empty() {
            return Err(Failure::usage(
                "no connection was set up; expected at least one",
                "call warplink_connect, then warplink_setup",
            ));
        }
        Ok(&self.connections)
    }

    fn declares(&self, peer: usize, tag: u64) -> bool {
        let mut declared = self.declared.iter();
        declared.any(|one| (one.peer, one.tag) == (peer, tag))
    }

    fn is_connected(&self, peer: usize, tag: u64) -> bool {
        let mut connections = self.connections.iter();
        connections.any(|one| (one.peer(), one.tag()) == (peer, tag))
    }
}

fn unknown(peer: i32, tag: u64) -> Failure {
    Failure::invalid(
        format!("no connection to rank {peer} with tag {tag}; expected one that was connected"),
        "call warplink_connect with that rank and tag first",
    )
}

/// Declares a connection to `peer`, which declares its end with the same tag and transport. `region` is this rank's
/// memory for it; the peer's may have another length. `transport` is a `warplink_transport`. `network_devices` is a
/// comma-separated list of this rank's network devices to use, as UCX names them ("mlx5_0:1", "eth0"); null selects
/// all, and must be null with other transports than the network. Does not communicate and does not block;
/// `warplink_setup` connects the declared connections. Returns WARPLINK_STATUS_INVALID_ARGUMENT if the rank is no peer,
/// the peer and tag were declared before, or the transport is unknown.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_connect(
    comm: Comm,
    peer: i32,
    tag: u64,
    region: Region,
    transport: i32,
    network_devices: *const c_char,
) -> Status {
    entry("connect", || {
        let job = comm.get()?;
        let region = region.get()?;
        same_job(&job, &region.job, "region")?;
        let peer = rank_of_peer(&job, peer)?;
        let transport = match transport {
            0 => None,
            other => {
                let known = numbered(other, "warplink_transport");
                Some(known.map_err(|failure| failure.with_peer(peer))?)
            }
        };
        // SAFETY: the caller passes null or a text.
        let devices = unsafe { pointer::optional_text(network_devices, "network_devices") }?;
        if devices.is_some() && transport != Some(Transport::Network) {
            return Err(Failure::invalid(
                "the transport uses no network devices; expected null",
                "use WARPLINK_TRANSPORT_NETWORK, or pass null for network_devices",
            )
            .with_peer(peer));
        }
        let mut setup = job.setup();
        if setup.declares(peer, tag) || setup.is_connected(peer, tag) {
            return Err(Failure::invalid(
                format!("the connection to rank {peer} with tag {tag} was declared before"),
                "use another tag for each connection to a peer",
            )
            .with_peer(peer));
        }
        let request = ConnectionRequest::new(peer, tag, &region.region);
        let request = match (transport, devices) {
            (None, _) => request,
            // This selects the network as well, the only transport that gets here with devices.
            (Some(_), Some(devices)) => request.with_network_devices(devices),
            (Some(transport), None) => request.with_transport(transport),
        };
        setup.declared.push(Declared { peer, tag, request });
        Ok(())
    })
}

/// Connects all connections declared since the last setup. Blocks until the peers have set up their ends; then kernels
/// of both ranks may use the channels. Starts the proxy if a connection needs it. If it fails, the declarations remain,
/// and it may be called again. It may be called with nothing declared. Returns WARPLINK_STATUS_TIMEOUT if a peer does
/// not set up its end, WARPLINK_STATUS_MISMATCH on both ranks if their transports differ, WARPLINK_STATUS_UNSUPPORTED
/// for a direct connection to another machine, and WARPLINK_STATUS_LIBRARY_MISSING for a network connection without
/// UCX.
#[unsafe(no_mangle)]
pub extern "C" fn warplink_setup(comm: Comm) -> Status {
    entry("set up connections", || {
        let job = comm.get()?;
        let _connecting = job.connecting();
        // Not under the lock of declarations: the setup waits for peers.
        let requests: Vec<ConnectionRequest> = {
            let setup = job.setup();
            setup
                .declared
                .iter()
                .map(|one| one.request.clone())
                .collect()
        };
        if requests.is_empty() {
            return Ok(());
        }
        let connected = job.communicator.connect(&requests)?;
        let mut setup = job.setup();
        // Fewer may be left if another thread has destroyed the communicator during the wait.
        let made = requests.len().min(setup.declared.len());
        // Only those that were connected: another thread may have declared more meanwhile, which come after these.
        setup.declared.drain(..made);
        setup.connections.extend(connected.all().iter().cloned());
        Ok(())
    })
}

/// The channel of the connection to `peer` with `tag`, for a kernel launched by other means than `warplink_launch`. It
/// is valid until the communicator is destroyed. Does not block. Returns WARPLINK_STATUS_INVALID_ARGUMENT if the
/// connection was not declared, and WARPLINK_STATUS_INVALID_USAGE if it was not set up.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_channel_get(
    comm: Comm,
    peer: i32,
    tag: u64,
    channel: *mut Channel,
) -> Status {
    entry("get a channel", || {
        let connection = comm.get()?.setup().find(peer, tag)?;
        let value = connection.memory().descriptor().into();
        // SAFETY: the caller passes null or a pointer valid for a write.
        unsafe { pointer::store(channel, "channel", value) }
    })
}

/// The channels of all connections, in order of declaration. Writes up to `capacity` of them to `channels`, which may
/// be null if `capacity` is 0, and their total number to `count`. Does not block. Returns WARPLINK_STATUS_INVALID_USAGE
/// before the first setup.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warplink_channel_get_all(
    comm: Comm,
    channels: *mut Channel,
    capacity: usize,
    count: *mut usize,
) -> Status {
    entry("get all channels", || {
        let job = comm.get()?;
        pointer::check(count, "count")?;
        if capacity > 0 {
            pointer::check(channels, "channels")?;
        }
        let setup = job.setup();
        let all = setup.all()?;
        for (at, connection) in all.iter().take(capacity).enumerate() {
            let value = connection.memory().descriptor().into();
            // SAFETY: the caller passes an array of `capacity` channels, and `at` is less.
            unsafe { pointer::store(channels.wrapping_add(at), "channels", value) }?;
        }
        // SAFETY: the caller passes null or a pointer valid for a write.
        unsafe { pointer::store(count, "count", all.len()) }
    })
}

/// Call this after launching kernels that use channels on `stream` by other means than `warplink_launch`: it keeps the
/// memory behind the channels alive until the stream has passed the kernels, and makes the proxy poll for triggers
/// immediately. Does not block. Returns WARPLINK_STATUS_INVALID_USAGE before the first setup, and the proxy's error if
/// the proxy has failed.
#[unsafe(no_mangle)]
pub extern "C" fn warplink_launched(comm: Comm, stream: Stream) -> Status {
    entry("note a launch", || {
        let job = comm.get()?;
        let stream = stream.get()?;
        same_job(&job, &stream.job, "stream")?;
        let setup = job.setup();
        // All before any is noted, so that a failed proxy leaves nothing half done.
        setup.all()?.iter().try_for_each(ChannelHandle::check)?;
        for connection in setup.all()? {
            connection.note(&stream.stream);
        }
        Ok(())
    })
}

/// Enqueues a copy of this rank's bytes to the peer's memory, starting at `target`. Does not block. The copy is not
/// ordered with operations of kernels, except by signals of a later kernel on `stream`. Returns
/// WARPLINK_STATUS_INVALID_ARGUMENT if a range passes the end of a region or the connection was not declared, and
/// WARPLINK_STATUS_INVALID_USAGE if it was not set up. Over the network, returns WARPLINK_STATUS_UNSUPPORTED while the
/// stream is capturing a graph, and WARPLINK_STATUS_CLOSED if the proxy was stopped.
#[unsafe(no_mangle)]
pub extern "C" fn warplink_write(
    comm: Comm,
    peer: i32,
    tag: u64,
    target: At,
    source: Span,
    stream: Stream,
) -> Status {
    entry("write to a peer", || {
        let (connection, stream, own) = end_and_memory(comm, peer, tag, source, stream)?;
        Ok(connection.write(&stream, target, own)?)
    })
}

/// Enqueues a copy of the peer's memory, starting at `source`, to this rank's bytes. Does not block; see
/// `warplink_write`.
#[unsafe(no_mangle)]
pub extern "C" fn warplink_read(
    comm: Comm,
    peer: i32,
    tag: u64,
    target: Span,
    source: At,
    stream: Stream,
) -> Status {
    entry("read from a peer", || {
        let (connection, stream, own) = end_and_memory(comm, peer, tag, target, stream)?;
        Ok(connection.read(&stream, own, source)?)
    })
}

/// Restarts proxies stopped by `warplink_proxy_stop`, and makes running ones poll for triggers immediately.
/// `warplink_setup` starts them, so otherwise this is only needed before launching a graph with proxied channels, and
/// for programs ported from MSCCL++. No kernel may use proxied channels during a restart. Blocks while a kernel
/// completes a trigger that it has begun to store, for at most one second per proxy; after that returns
/// WARPLINK_STATUS_TIMEOUT. Returns WARPLINK_STATUS_INVALID_USAGE before the first setup, WARPLINK_STATUS_CLOSED if the
/// stop left requests unprocessed, and the proxy's error if a proxy has failed.
#[unsafe(no_mangle)]
pub extern "C" fn warplink_proxy_launch(comm: Comm) -> Status {
    entry("launch the proxy", || {
        let job = comm.get()?;
        let setup = job.setup();
        let all = setup.all()?;
        job.communicator.launch_proxy()?;
        for connection in all {
            connection.check()?;
            connection.wake_proxy();
        }
        Ok(())
    })
}

/// Stops the proxy: it processes all pending requests of kernels and exits. Blocks until then. Kernels that use proxied
/// channels later get the status `aborted`; direct channels keep working. Does nothing if no proxy runs. Returns
/// WARPLINK_STATUS_INVALID_USAGE before the first setup, and WARPLINK_STATUS_TIMEOUT, with the number of unsent
/// triggers, if the timeout passes first.
#[unsafe(no_mangle)]
pub extern "C" fn warplink_proxy_stop(comm: Comm) -> Status {
    entry("stop the proxy", || {
        let job = comm.get()?;
        job.setup().all()?;
        Ok(job.communicator.stop_proxy(job.communicator.deadline())?)
    })
}

/// The channels of all connections in device memory, for a kernel argument. Valid until the communicator is destroyed,
/// because captured graphs may refer to them.
pub(crate) fn array(job: &JobObject) -> Outcome<Arc<ChannelArray>> {
    let mut setup = job.setup();
    let handles: Vec<Arc<dyn ChannelHandle>> = setup
        .all()?
        .iter()
        .map(|one| Arc::new(one.clone()) as Arc<dyn ChannelHandle>)
        .collect();
    // Connections are only added, so an equal count means that the array is current.
    let last = setup.arrays.last();
    if let Some(array) = last.filter(|array| array.handles().len() == handles.len()) {
        return Ok(array.clone());
    }
    let made = ChannelArray::new(job.communicator.device(), &handles)?;
    // Earlier arrays are kept: kernels that are running may still read them.
    setup.arrays.push(made.clone());
    Ok(made)
}

fn end_and_memory(
    comm: Comm,
    peer: i32,
    tag: u64,
    own: Span,
    stream: Stream,
) -> Outcome<(
    Connection,
    warplink::device::Stream,
    warplink::device::DeviceSlice,
)> {
    let job = comm.get()?;
    let stream = stream.get()?;
    same_job(&job, &stream.job, "stream")?;
    let own = own.memory(&job)?;
    let connection = job.setup().find(peer, tag)?;
    Ok((connection, stream.stream.clone(), own))
}

fn rank_of_peer(job: &JobObject, peer: i32) -> Outcome<usize> {
    let (rank, world) = (job.communicator.rank(), job.communicator.world());
    match usize::try_from(peer) {
        Ok(peer) if peer < world && peer != rank => Ok(peer),
        _ => Err(Failure::invalid(
            format!(
                "rank {peer} is not a peer of rank {rank}; expected another rank below {world}"
            ),
            "connect with another rank of the communicator",
        )),
    }
}
