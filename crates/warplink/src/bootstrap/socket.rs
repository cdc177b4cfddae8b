//! The store's sockets: listening, connecting, options, reads with a deadline.

use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result};
use crate::sync::lock;
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};
use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::{LazyLock, Mutex};
use std::time::Duration;

/// Ports that this process reserved for unique ids, until the store is served there.
static RESERVED: LazyLock<Mutex<HashMap<SocketAddr, Reserved>>> = LazyLock::new(Mutex::default);

struct Reserved {
    /// Process that reserved it. Of its forks, which have copies, only rank 0 serves there: another would answer in its
    /// place.
    process: u32,
    listener: TcpListener,
    /// Bound to the same port without listening, so the system assigns the port to nobody else.
    holder: OwnedFd,
}

/// Below the longest limit that the system accepts.
const MAX_USER_TIMEOUT: Duration = Duration::from_secs(1_000_000);

/// The backlog of a listener, which lets a whole job connect at once.
const BACKLOG: i32 = 4096;

/// Reserves a free port on `ip` for [`take_reserved`] or [`release_reserved`].
pub(crate) fn reserve(ip: IpAddr) -> Result<SocketAddr> {
    reserve_any_port(ip).map_err(|error| {
        let kind = Error::io("listen", &error).kind();
        Error::new(kind, format!("cannot listen on {ip}: {error}"))
            .with_operation("create a unique id")
    })
}

fn reserve_any_port(ip: IpAddr) -> io::Result<SocketAddr> {
    // The holder is bound first: bound after the listener is closed, it might find that the system has assigned the port to
    // a connection.
    let holder = bind_any_port(ip)?;
    let address = SocketAddr::try_from(rustix::net::getsockname(&holder)?)?;
    let listener = TcpListener::bind(address)?;
    rustix::net::listen(&listener, BACKLOG)?;
    let reserved = Reserved {
        process: std::process::id(),
        listener,
        holder,
    };
    lock(&RESERVED).insert(address, reserved);
    Ok(address)
}

/// A socket that is bound to a free port and does not listen: others can listen there, but the system assigns the port to
/// nobody.
fn bind_any_port(ip: IpAddr) -> io::Result<OwnedFd> {
    let family = match ip {
        IpAddr::V4(_) => AddressFamily::INET,
        IpAddr::V6(_) => AddressFamily::INET6,
    };
    let socket = rustix::net::socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    // The standard library sets it on listeners too; only then both can be bound.
    sockopt::set_socket_reuseaddr(&socket, true)?;
    rustix::net::bind(&socket, &SocketAddr::new(ip, 0))?;
    Ok(socket)
}

/// The listener of [`reserve`] for `address`, if this process has reserved it, or one that it is a fork of.
pub(crate) fn take_reserved(address: SocketAddr) -> Option<TcpListener> {
    lock(&RESERVED)
        .remove(&address)
        .map(|reserved| reserved.listener)
}

/// Stops listening at `address`, if this process has reserved it, so that others can listen there. The system assigns the
/// port to nobody while the result exists.
pub(crate) fn release_reserved(address: SocketAddr) -> Option<OwnedFd> {
    let Reserved {
        listener, holder, ..
    } = lock(&RESERVED).remove(&address)?;
    // Closing is not enough: a child process that another thread is starting has a copy until it executes its program.
    let _ = rustix::net::shutdown(&listener, rustix::net::Shutdown::Both);
    Some(holder)
}

/// Whether this process has reserved `address` for the rank that serves the store. Closes the copy of a fork.
pub(crate) fn is_reserved(address: SocketAddr) -> bool {
    let mut reserved = lock(&RESERVED);
    let own = std::process::id();
    reserved.retain(|at, reserved| *at != address || reserved.process == own);
    reserved.contains_key(&address)
}

/// Listens on any port of `ip`.
pub(crate) fn listen_on_any_port(ip: IpAddr) -> Result<TcpListener> {
    let failed = |error: io::Error| {
        let kind = Error::io("listen", &error).kind();
        Error::new(kind, format!("cannot listen on {ip}: {error}"))
    };
    let listener = TcpListener::bind((ip, 0)).map_err(failed)?;
    rustix::net::listen(&listener, BACKLOG).map_err(|errno| failed(errno.into()))?;
    Ok(listener)
}

/// Listens at `address`, or on every interface when it is not an address of this machine: behind network address translation
/// the others may know rank 0 by an address that it does not have itself.
pub(crate) fn listen(address: SocketAddr) -> Result<TcpListener> {
    if let Some(listener) = take_reserved(address) {
        return Ok(listener);
    }
    let bound = TcpListener::bind(address).or_else(|error| match error.kind() {
        io::ErrorKind::AddrNotAvailable => {
            tracing::warn!(%address, "not an address of this machine; listening on every interface");
            TcpListener::bind((unspecified(address.ip()), address.port()))
        }
        _ => Err(error),
    });
    let failed = |error: io::Error| {
        // In the message, since callers replace the operation.
        let made = Error::io("listen", &error);
        let kind = made.kind();
        let made = Error::new(
            kind,
            format!("cannot serve the store at {address}: {error}"),
        );
        match kind {
            ErrorKind::AddressInUse => {
                made.with_help("end the process that listens there, or give the job another port")
            }
            _ => made,
        }
    };
    let listener = bound.map_err(failed)?;
    rustix::net::listen(&listener, BACKLOG).map_err(|errno| failed(errno.into()))?;
    Ok(listener)
}

fn unspecified(ip: IpAddr) -> IpAddr {
    match ip {
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    }
}

/// The address at which a process on the same machine reaches a listener bound to `address`.
pub(crate) fn local_target(address: SocketAddr) -> SocketAddr {
    match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => (Ipv4Addr::LOCALHOST, address.port()).into(),
        IpAddr::V6(ip) if ip.is_unspecified() => (Ipv6Addr::LOCALHOST, address.port()).into(),
        _ => address,
    }
}

/// One attempt to connect, which takes at most `limit`.
pub(crate) fn connect(address: SocketAddr, limit: Duration) -> io::Result<TcpStream> {
    // The standard library refuses a limit of zero.
    let stream = TcpStream::connect_timeout(&address, limit.max(Duration::from_millis(1)))?;
    // If nobody listens yet, the system may assign this socket the very port it connects to, and it connects to itself.
    // Dropping it frees the port for rank 0.
    if stream.local_addr()? == stream.peer_addr()? {
        return Err(io::ErrorKind::ConnectionRefused.into());
    }
    Ok(stream)
}

/// Sets the options of a connection: small frames are sent without delay, and a machine that vanished is detected within about
/// four heartbeats, or within `limit` if that is longer, since a process that is stopped for less must not lose its
/// connection because it reads nothing. The end of a process needs no option: its system closes the connection.
pub(crate) fn set_options(
    stream: &TcpStream,
    heartbeat: Duration,
    limit: Duration,
) -> io::Result<()> {
    // The system counts these intervals in whole seconds.
    let heartbeat = heartbeat.clamp(Duration::from_secs(1), Duration::from_secs(3600));
    let limit = limit.min(MAX_USER_TIMEOUT).max(heartbeat * 4);
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, heartbeat)?;
    sockopt::set_tcp_keepintvl(stream, heartbeat)?;
    // One idle interval and three probes: the four heartbeats promised above.
    sockopt::set_tcp_keepcnt(stream, 3)?;
    // Keepalive does not apply while data is unacknowledged; this bounds that case, which would last about 15
    // minutes otherwise.
    sockopt::set_tcp_user_timeout(stream, limit.as_millis() as u32)?;
    Ok(())
}

/// A stream whose reads and writes share one deadline, so that a peer that sends byte by byte cannot extend it.
pub(crate) struct DeadlineStream<'a> {
    stream: &'a TcpStream,
    deadline: Deadline,
}

impl<'a> DeadlineStream<'a> {
    pub(crate) fn new(stream: &'a TcpStream, deadline: Deadline) -> Self {
        Self { stream, deadline }
    }

    /// Removes the time limits for the next user of the stream.
    pub(crate) fn finish(self) -> io::Result<()> {
        self.stream.set_read_timeout(None)?;
        self.stream.set_write_timeout(None)
    }

    fn remaining(&self) -> io::Result<Option<Duration>> {
        match self.deadline.remaining() {
            Duration::ZERO => Err(io::ErrorKind::TimedOut.into()),
            left => Ok(Some(left)),
        }
    }
}

impl Read for DeadlineStream<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        // Set before each call: a timeout of the socket bounds one call, not their sum.
        self.stream.set_read_timeout(self.remaining()?)?;
        let mut stream = self.stream;
        stream.read(buffer)
    }
}

impl Write for DeadlineStream<'_> {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(self.remaining()?)?;
        let mut stream = self.stream;
        stream.write(buffer)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_released_port_is_free_only_for_those_that_ask_for_it() {
        let address = reserve(Ipv4Addr::LOCALHOST.into()).unwrap();
        // A child process that another thread has just started would have such a copy.
        let copy = lock(&RESERVED)[&address].listener.try_clone().unwrap();
        let holder = release_reserved(address).unwrap();
        assert_eq!(
            connect(address, Duration::from_secs(1)).unwrap_err().kind(),
            io::ErrorKind::ConnectionRefused
        );
        let listener = listen(address).unwrap();
        connect(address, Duration::from_secs(1)).unwrap();
        drop((listener, copy, holder));
        assert!(take_reserved(address).is_none() && !is_reserved(address));
    }

    #[test]
    fn a_reservation_of_the_parent_is_for_rank_0() {
        for is_rank_0 in [true, false] {
            let address = reserve(Ipv4Addr::LOCALHOST.into()).unwrap();
            // As a fork finds it.
            lock(&RESERVED).get_mut(&address).unwrap().process += 1;
            let own = is_rank_0 || is_reserved(address);
            let listener = own.then(|| listen(address).unwrap());
            assert_eq!(listener.is_some(), is_rank_0);
            assert!(take_reserved(address).is_none(), "a copy stays open");
        }
    }
}
