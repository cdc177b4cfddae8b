//! The Unix socket on which ranks of one machine ask one another for descriptors and tell one
//! another what they let go of.
//!
//! A request is one fixed record on a connection of its own, and so is the answer, with a
//! descriptor where one was asked for. Every request carries the communicator's token.

use crate::error::{Error, ErrorKind, Rank, Result};
use crate::sync::lock;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use std::fmt;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Longest that either side waits for the other's record; both are threads of this machine that
/// do nothing else.
const PATIENCE: Duration = Duration::from_secs(5);

/// What is asked or told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Subject {
    /// Asks the owner for the descriptor of allocation `first`, registered as `second`.
    Descriptor = 1,
    /// The owner asks to unmap its allocation `first`, registered as `second`.
    Revoke = 2,
    /// Tells the owner that registration `first` lost `second` handles.
    Released = 3,
    /// Tells a peer that its signal slots `first` will not be written any more.
    SlotReleased = 4,
}

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Record {
    token: [u8; 16],
    subject: U32,
    from: U32,
    first: U64,
    second: U64,
}

/// A request as the handler sees it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request {
    pub(crate) subject: Subject,
    pub(crate) from: Rank,
    pub(crate) first: u64,
    pub(crate) second: u64,
}

/// Answers requests: a descriptor where one was asked for, else nothing; an error refuses.
pub(crate) type Handler = Box<dyn Fn(Request) -> Result<Option<OwnedFd>> + Send + Sync>;

/// The listening side, ended by [`Service::stop`] or drop.
pub(crate) struct Service {
    name: Vec<u8>,
    stopping: Arc<AtomicBool>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl fmt::Debug for Service {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Service")
            .field("name", &String::from_utf8_lossy(&self.name))
            .finish()
    }
}

fn io(what: &'static str) -> impl Fn(rustix::io::Errno) -> Error {
    move |errno| Error::io(what, &errno.into())
}

fn socket() -> Result<OwnedFd> {
    rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )
    .map_err(io("make a Unix socket"))
}

/// An abstract address: it is gone with its socket, also when the process is killed.
fn address(name: &[u8]) -> Result<SocketAddrUnix> {
    SocketAddrUnix::new_abstract_name(name).map_err(io("name a Unix socket"))
}

fn limit(socket: impl AsFd) -> Result<()> {
    use rustix::net::sockopt::{Timeout, set_socket_timeout};
    set_socket_timeout(&socket, Timeout::Recv, Some(PATIENCE))
        .map_err(io("limit a socket's waits"))?;
    set_socket_timeout(&socket, Timeout::Send, Some(PATIENCE)).map_err(io("limit a socket's waits"))
}

impl Service {
    /// Listens under a random name and answers with `handler`, on a thread of its own.
    pub(crate) fn start(token: [u8; 16], handler: Handler) -> Result<Self> {
        let mut random = [0u8; 12];
        getrandom::fill(&mut random).map_err(|error| {
            Error::new(ErrorKind::Io, error.to_string()).during("draw a socket's name")
        })?;
        let name = format!(
            "warplink-{}",
            random
                .iter()
                .map(|byte| format!("{byte:02x}"))
                .collect::<String>()
        );
        let name = name.into_bytes();
        let listener = socket()?;
        rustix::net::bind(&listener, &address(&name)?).map_err(io("bind a Unix socket"))?;
        rustix::net::listen(&listener, 128).map_err(io("listen on a Unix socket"))?;
        let stopping = Arc::new(AtomicBool::new(false));
        let stop = stopping.clone();
        let thread = std::thread::Builder::new()
            .name("warplink-service".to_owned())
            .spawn(move || serve(&listener, &token, &handler, &stop))
            .map_err(|error| Error::io("start the service thread", &error))?;
        Ok(Self {
            name,
            stopping,
            thread: Mutex::new(Some(thread)),
        })
    }

    /// The name under which peers reach it.
    pub(crate) fn name(&self) -> &[u8] {
        &self.name
    }

    /// Ends the thread. Requests that come later are refused by the system.
    pub(crate) fn stop(&self) {
        let Some(thread) = lock(&self.thread).take() else {
            return;
        };
        self.stopping.store(true, Ordering::Release);
        // The listener sleeps in accept until somebody connects.
        let woken = socket().and_then(|socket| {
            rustix::net::connect(&socket, &address(&self.name)?)
                .map_err(io("connect to the own service"))
        });
        // The last handle may be dropped by the service's own thread, which cannot wait for itself.
        let own = thread.thread().id() == std::thread::current().id();
        match woken {
            Ok(()) if !own => {
                if thread.join().is_err() {
                    tracing::error!("the service thread panicked");
                }
            }
            Ok(()) => {}
            Err(error) => tracing::warn!(%error, "the service thread could not be woken to end"),
        }
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.stop();
    }
}

fn serve(listener: &OwnedFd, token: &[u8; 16], handler: &Handler, stopping: &AtomicBool) {
    while !stopping.load(Ordering::Acquire) {
        let connection = match rustix::net::accept_with(listener, SocketFlags::CLOEXEC) {
            Ok(connection) => connection,
            Err(rustix::io::Errno::INTR | rustix::io::Errno::CONNABORTED) => continue,
            Err(errno) => {
                tracing::warn!(%errno, "accepting a peer's request failed");
                // Out of descriptors, most likely: leave others time to close theirs.
                std::thread::sleep(Duration::from_millis(10));
                continue;
            }
        };
        if stopping.load(Ordering::Acquire) {
            return;
        }
        if let Err(error) = answer(&connection, token, handler) {
            tracing::debug!(%error, "a request was not answered");
        }
    }
}

fn answer(connection: &OwnedFd, token: &[u8; 16], handler: &Handler) -> Result<()> {
    limit(connection)?;
    let mut bytes = [0; size_of::<Record>()];
    let (got, _) = rustix::net::recv(connection, &mut bytes[..], RecvFlags::empty())
        .map_err(io("read a request"))?;
    let request = parse(&bytes[..got], token)?;
    let (status, descriptor) = match handler(request) {
        Ok(descriptor) => (0u32, descriptor),
        Err(error) => {
            tracing::debug!(?request, %error, "a request was refused");
            (1, None)
        }
    };
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors = descriptor.as_ref().map(|descriptor| [descriptor.as_fd()]);
    if let Some(descriptors) = &descriptors {
        control.push(SendAncillaryMessage::ScmRights(descriptors));
    }
    let status = status.to_le_bytes();
    rustix::net::sendmsg(
        connection,
        &[IoSlice::new(&status)],
        &mut control,
        SendFlags::NOSIGNAL,
    )
    .map_err(io("answer a request"))?;
    Ok(())
}

fn parse(bytes: &[u8], token: &[u8; 16]) -> Result<Request> {
    let refuse = |what| Error::new(ErrorKind::Protocol, what).during("read a request");
    let record = Record::read_from_bytes(bytes).map_err(|_| refuse("it has the wrong length"))?;
    // Compared as a whole, so that the time taken does not tell how much of it fits.
    let difference = record
        .token
        .iter()
        .zip(token)
        .fold(0, |all, (a, b)| all | (a ^ b));
    if difference != 0 {
        return Err(refuse("it does not carry the communicator's token"));
    }
    let subject = match record.subject.get() {
        1 => Subject::Descriptor,
        2 => Subject::Revoke,
        3 => Subject::Released,
        4 => Subject::SlotReleased,
        _ => return Err(refuse("its subject is unknown")),
    };
    Ok(Request {
        subject,
        from: record.from.get() as Rank,
        first: record.first.get(),
        second: record.second.get(),
    })
}

/// Sends `request` to the service called `name` and waits for the answer.
///
/// # Errors
/// [`ErrorKind::PeerLost`] where nobody listens, [`ErrorKind::InvalidHandle`] where it is refused.
pub(crate) fn ask(name: &[u8], token: &[u8; 16], request: Request) -> Result<Option<OwnedFd>> {
    let connection = socket()?;
    limit(&connection)?;
    rustix::net::connect(&connection, &address(name)?).map_err(|errno| match errno {
        rustix::io::Errno::CONNREFUSED => {
            Error::new(ErrorKind::PeerLost, "nobody listens on the peer's socket")
                .during("connect to a peer's service")
        }
        other => io("connect to a peer's service")(other),
    })?;
    let record = Record {
        token: *token,
        subject: (request.subject as u32).into(),
        from: (request.from as u32).into(),
        first: request.first.into(),
        second: request.second.into(),
    };
    rustix::net::send(&connection, record.as_bytes(), SendFlags::NOSIGNAL)
        .map_err(io("send a request"))?;
    let mut status = [0; 4];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = rustix::net::recvmsg(
        &connection,
        &mut [IoSliceMut::new(&mut status)],
        &mut control,
        RecvFlags::CMSG_CLOEXEC,
    )
    .map_err(io("read an answer"))?;
    let descriptor = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    });
    if received.bytes != status.len() {
        return Err(Error::new(
            ErrorKind::PeerLost,
            "the peer closed its service before it answered",
        ));
    }
    if u32::from_le_bytes(status) != 0 {
        return Err(Error::new(
            ErrorKind::InvalidHandle,
            "the peer refused: it does not share this region any more",
        )
        .during("ask a peer's service"));
    }
    Ok(descriptor)
}

#[cfg(test)]
mod tests {
    use super::*;

    const REQUEST: Request = Request {
        subject: Subject::Descriptor,
        from: 2,
        first: 7,
        second: 9,
    };

    #[test]
    fn a_descriptor_crosses_and_a_refusal_is_an_error() {
        let handler: Handler = Box::new(|request| match request.first {
            7 => Ok(Some(rustix::fs::memfd_create(
                "test",
                rustix::fs::MemfdFlags::CLOEXEC,
            )?)),
            _ => Err(Error::new(ErrorKind::Closed, "gone")),
        });
        let service = Service::start([5; 16], handler).unwrap();
        assert!(ask(service.name(), &[5; 16], REQUEST).unwrap().is_some());
        let refused = ask(
            service.name(),
            &[5; 16],
            Request {
                first: 8,
                ..REQUEST
            },
        )
        .unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::InvalidHandle);
        service.stop();
        assert_eq!(
            ask(service.name(), &[5; 16], REQUEST).unwrap_err().kind(),
            ErrorKind::PeerLost
        );
    }

    #[test]
    fn without_the_token_nothing_is_answered_and_the_service_goes_on() {
        let service = Service::start([5; 16], Box::new(|_| Ok(None))).unwrap();
        assert!(ask(service.name(), &[6; 16], REQUEST).is_err());
        let stray = socket().unwrap();
        rustix::net::connect(&stray, &address(service.name()).unwrap()).unwrap();
        rustix::net::send(&stray, b"short", SendFlags::NOSIGNAL).unwrap();
        assert!(ask(service.name(), &[5; 16], REQUEST).unwrap().is_none());
    }
}
