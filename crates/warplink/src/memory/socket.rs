//! Unix sockets between processes of one machine and one user, by name.

use crate::device::PeerProcess;
use crate::error::{Error, Result};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

/// Maximum wait for the other side's record. Both sides are dedicated threads on this machine.
pub(super) const MAX_WAIT: Duration = Duration::from_secs(5);

pub(super) fn io(what: &'static str) -> impl Fn(rustix::io::Errno) -> Error {
    move |errno| Error::io(what, &errno.into())
}

pub(super) fn socket() -> Result<OwnedFd> {
    rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )
    .map_err(io("make a Unix socket"))
}

/// An abstract address: it vanishes with its socket, even if the process is killed.
pub(super) fn address(name: &[u8]) -> Result<SocketAddrUnix> {
    SocketAddrUnix::new_abstract_name(name).map_err(io("name a Unix socket"))
}

pub(super) fn limit(socket: impl AsFd) -> Result<()> {
    use rustix::net::sockopt::{Timeout, set_socket_timeout};
    set_socket_timeout(&socket, Timeout::Recv, Some(MAX_WAIT))
        .map_err(io("limit a socket's waits"))?;
    set_socket_timeout(&socket, Timeout::Send, Some(MAX_WAIT)).map_err(io("limit a socket's waits"))
}

/// Whether the process at the other end runs as the same user, according to the kernel.
pub(super) fn is_same_user(connection: &OwnedFd) -> bool {
    match PeerProcess::of(connection) {
        Ok(peer) if peer.is_same_user() => true,
        Ok(peer) => {
            tracing::debug!(?peer, "a process of another user was refused");
            false
        }
        Err(error) => {
            tracing::debug!(%error, "a process of an unknown user was refused");
            false
        }
    }
}
