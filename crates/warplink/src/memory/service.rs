//! The Unix socket on which ranks of one machine ask one another for descriptors and tell one
//! another what they let go of.
//!
//! A request is one fixed record on a connection of its own, and so is the answer, with a
//! descriptor where one was asked for. Every request carries the communicator's token.
//!
//! Any process of the machine can connect. So both sides ask the kernel whether the other runs as
//! the same user, and one thread waits for the requests of all connections at a time: one that is
//! silent holds up nobody.

use super::message::{MAX_REQUEST_BYTES, Request, TOKEN_BYTES};
use crate::deadline::Deadline;
use crate::device::Piece;
use crate::error::{Error, ErrorKind, Result};
use crate::sync::lock;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use rustix::net::sockopt::socket_peercred;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use std::collections::VecDeque;
use std::fmt;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Longest that either side waits for the other's record; both are threads of this machine that
/// do nothing else.
const MAX_WAIT: Duration = Duration::from_secs(5);
/// The most connections whose requests have not come; the oldest makes room for another.
const MAX_PENDING: usize = 64;
/// Between two attempts at what the system refuses for lack of something.
const PAUSE: Duration = Duration::from_millis(10);
/// The most connections that are accepted before requests are looked at again.
const MAX_ACCEPTED: usize = 64;

/// Bytes of an answer: whether the request is refused, and the length of the piece.
const ANSWER_BYTES: usize = 12;

/// Answers requests: a piece of memory where one was asked for, else nothing; an error refuses.
pub(super) type Handler = Box<dyn Fn(Request) -> Result<Option<Piece>> + Send + Sync>;

/// The listening side, ended by [`Service::stop`] or drop.
pub(super) struct Service {
    name: Vec<u8>,
    /// Readable once the thread is to end.
    stop: Arc<OwnedFd>,
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

pub(super) fn listen(name: &[u8]) -> Result<OwnedFd> {
    let listener = socket()?;
    rustix::net::bind(&listener, &address(name)?).map_err(io("bind a Unix socket"))?;
    rustix::net::listen(&listener, 128).map_err(io("listen on a Unix socket"))?;
    Ok(listener)
}

fn limit(socket: impl AsFd) -> Result<()> {
    use rustix::net::sockopt::{Timeout, set_socket_timeout};
    set_socket_timeout(&socket, Timeout::Recv, Some(MAX_WAIT))
        .map_err(io("limit a socket's waits"))?;
    set_socket_timeout(&socket, Timeout::Send, Some(MAX_WAIT)).map_err(io("limit a socket's waits"))
}

impl Service {
    /// Listens under a random name and answers with `handler`, on a thread of its own.
    pub(super) fn start(token: [u8; TOKEN_BYTES], handler: Handler) -> Result<Self> {
        let mut random = [0u8; 12];
        getrandom::fill(&mut random).map_err(|error| {
            Error::new(ErrorKind::Io, error.to_string()).with_operation("draw a socket's name")
        })?;
        let name = format!(
            "warplink-{}",
            random
                .iter()
                .map(|byte| format!("{byte:02x}"))
                .collect::<String>()
        );
        let name = name.into_bytes();
        let listener = listen(&name)?;
        rustix::io::ioctl_fionbio(&listener, true).map_err(io("configure a Unix socket"))?;
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let stop = eventfd(0, flags).map_err(io("make an event descriptor"))?;
        let stop = Arc::new(stop);
        let stopped = stop.clone();
        let thread = std::thread::Builder::new()
            .name("warplink-service".to_owned())
            .spawn(move || Server::new(&token, &handler).run(&listener, &stopped))
            .map_err(|error| Error::io("start the service thread", &error))?;
        Ok(Self {
            name,
            stop,
            thread: Mutex::new(Some(thread)),
        })
    }

    /// The name under which peers reach it.
    pub(super) fn name(&self) -> &[u8] {
        &self.name
    }

    /// Ends the thread. Requests that come later are refused by the system.
    pub(super) fn stop(&self) {
        let Some(thread) = lock(&self.thread).take() else {
            return;
        };
        if let Err(errno) = rustix::io::write(&*self.stop, &1u64.to_ne_bytes()) {
            tracing::warn!(%errno, "the service thread could not be told to end");
            return;
        }
        // The last handle may be dropped by the service's own thread, which cannot wait for itself.
        if thread.thread().id() != std::thread::current().id() && thread.join().is_err() {
            tracing::error!("the service thread panicked");
        }
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.stop();
    }
}

/// A connection whose request has not come yet.
struct Pending {
    connection: OwnedFd,
    since: Instant,
}

/// The listening thread's state.
struct Server<'a> {
    token: &'a [u8; TOKEN_BYTES],
    handler: &'a Handler,
    /// The oldest first.
    pending: VecDeque<Pending>,
}

impl<'a> Server<'a> {
    fn new(token: &'a [u8; TOKEN_BYTES], handler: &'a Handler) -> Self {
        Self {
            token,
            handler,
            pending: VecDeque::new(),
        }
    }

    /// Accepts and answers until `stop` is readable.
    fn run(mut self, listener: &OwnedFd, stop: &OwnedFd) {
        loop {
            let mut polled = vec![
                PollFd::new(stop, PollFlags::IN),
                PollFd::new(listener, PollFlags::IN),
            ];
            let connections = self.pending.iter().map(|pending| &pending.connection);
            polled.extend(connections.map(|connection| PollFd::new(connection, PollFlags::IN)));
            let limit = self.pending.front().map(|oldest| {
                let left = MAX_WAIT.saturating_sub(oldest.since.elapsed());
                Timespec {
                    tv_sec: left.as_secs().cast_signed(),
                    tv_nsec: left.subsec_nanos().into(),
                }
            });
            match poll(&mut polled, limit.as_ref()) {
                Ok(_) => {}
                Err(Errno::INTR) => continue,
                Err(errno) => {
                    // The limit of descriptors was lowered, or memory is short: requests lie in the
                    // backlog until it is over.
                    tracing::warn!(%errno, "the memory service cannot wait for requests; trying again");
                    if rustix::io::read(stop, &mut [0; 8]).is_ok() {
                        return;
                    }
                    std::thread::sleep(PAUSE);
                    continue;
                }
            }
            let ready: Vec<bool> = polled.iter().map(|fd| !fd.revents().is_empty()).collect();
            let [stopped, connecting, requests @ ..] = &ready[..] else {
                return;
            };
            if *stopped {
                return;
            }
            self.answer_ready(requests);
            if *connecting {
                self.accept_all(listener);
            }
        }
    }

    /// Answers the connections that are ready, and drops those that waited too long.
    fn answer_ready(&mut self, ready: &[bool]) {
        for (pending, ready) in std::mem::take(&mut self.pending).into_iter().zip(ready) {
            if *ready {
                if let Err(error) = answer(&pending.connection, self.token, self.handler) {
                    tracing::debug!(%error, "a request was not answered");
                }
            } else if pending.since.elapsed() < MAX_WAIT {
                self.pending.push_back(pending);
            }
        }
    }

    fn accept_all(&mut self, listener: &OwnedFd) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        for _ in 0..MAX_ACCEPTED {
            let connection = match rustix::net::accept_with(listener, flags) {
                Ok(connection) => connection,
                Err(Errno::AGAIN) => return,
                Err(Errno::INTR | Errno::CONNABORTED) => continue,
                Err(errno) => {
                    tracing::warn!(
                        %errno,
                        "a peer's request could not be accepted; raise the limit of file \
                         descriptors with ulimit -n if they are used up"
                    );
                    // A connection without a request gives its descriptor back; its peer asks again.
                    self.pending.pop_front();
                    std::thread::sleep(PAUSE);
                    return;
                }
            };
            if !is_same_user(&connection) {
                continue;
            }
            if self.pending.len() >= MAX_PENDING {
                self.pending.pop_front();
            }
            self.pending.push_back(Pending {
                connection,
                since: Instant::now(),
            });
        }
    }
}

/// Whether the process at the other end runs as the same user as this one, says the kernel.
fn is_same_user(connection: &OwnedFd) -> bool {
    match socket_peercred(connection) {
        Ok(peer) if peer.uid == rustix::process::geteuid() => true,
        Ok(peer) => {
            tracing::debug!(?peer.uid, "a process of another user was refused");
            false
        }
        Err(errno) => {
            tracing::debug!(%errno, "a process of an unknown user was refused");
            false
        }
    }
}

pub(super) fn read_request(connection: &OwnedFd, token: &[u8; TOKEN_BYTES]) -> Result<Request> {
    let mut bytes = [0; MAX_REQUEST_BYTES];
    let (got, _) = rustix::net::recv(connection, &mut bytes[..], RecvFlags::empty())
        .map_err(io("read a request"))?;
    Request::decode(&bytes[..got], token)
}

pub(super) fn answer(
    connection: &OwnedFd,
    token: &[u8; TOKEN_BYTES],
    handler: &Handler,
) -> Result<()> {
    let request = read_request(connection, token)?;
    let (status, piece) = match handler(request) {
        Ok(piece) => (0u32, piece),
        Err(error) => {
            tracing::debug!(?request, %error, "a request was refused");
            (1, None)
        }
    };
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors = piece.as_ref().map(|piece| [piece.descriptor.as_fd()]);
    if let Some(descriptors) = &descriptors {
        control.push(SendAncillaryMessage::ScmRights(descriptors));
    }
    let bytes = piece.as_ref().map_or(0, |piece| piece.bytes as u64);
    let mut answer = [0; ANSWER_BYTES];
    answer[..4].copy_from_slice(&status.to_le_bytes());
    answer[4..].copy_from_slice(&bytes.to_le_bytes());
    rustix::net::sendmsg(
        connection,
        &[IoSlice::new(&answer)],
        &mut control,
        SendFlags::NOSIGNAL,
    )
    .map_err(io("answer a request"))?;
    Ok(())
}

/// A request that was sent and not answered yet.
#[derive(Debug)]
pub(super) struct Asked {
    connection: OwnedFd,
}

/// Sends `request`, which may be handled twice, to the service called `name` and waits for the answer.
/// Asks again where the service drops the connection, as it does when it is short of something.
///
/// # Errors
/// [`ErrorKind::PeerLost`] where nobody listens, [`ErrorKind::InvalidHandle`] where it is refused,
/// [`ErrorKind::Timeout`] where it does not answer.
pub(super) fn ask(
    name: &[u8],
    token: &[u8; TOKEN_BYTES],
    request: Request,
) -> Result<Option<Piece>> {
    let deadline = Deadline::after(MAX_WAIT);
    loop {
        let connection = socket()?;
        limit(&connection)?;
        let answer = send(connection, name, token, request).and_then(Asked::finish);
        match answer {
            Err(error) if error.kind() == ErrorKind::Io && !deadline.passed() => {
                tracing::debug!(%error, "a peer's service did not answer; asking again");
                std::thread::sleep(PAUSE);
            }
            answer => return answer,
        }
    }
}

/// Sends `request` to the service called `name`, without waiting for anything.
///
/// # Errors
/// [`ErrorKind::PeerLost`] where nobody listens; where it is another that [may pass](may_pass), the
/// request was not sent, or it is not known whether.
pub(super) fn begin(name: &[u8], token: &[u8; TOKEN_BYTES], request: Request) -> Result<Asked> {
    let connection = socket()?;
    // A full backlog, of a peer that is stopped, must not hold up the caller.
    rustix::io::ioctl_fionbio(&connection, true).map_err(io("configure a Unix socket"))?;
    send(connection, name, token, request)
}

/// Whether an error of `kind` may be over when a request is sent again: something is short, here or at
/// the peer.
pub(super) fn may_pass(kind: ErrorKind) -> bool {
    matches!(
        kind,
        ErrorKind::Io | ErrorKind::Timeout | ErrorKind::OutOfMemory
    )
}

fn send(
    connection: OwnedFd,
    name: &[u8],
    token: &[u8; TOKEN_BYTES],
    request: Request,
) -> Result<Asked> {
    rustix::net::connect(&connection, &address(name)?).map_err(|errno| match errno {
        rustix::io::Errno::CONNREFUSED => Error::new(
            ErrorKind::PeerLost,
            "the peer's memory service does not listen any more",
        )
        .with_operation("connect to a peer's service"),
        other => io("connect to a peer's service")(other),
    })?;
    // The name may be another's by now, who must not learn the token.
    if !is_same_user(&connection) {
        return Err(Error::new(
            ErrorKind::PeerLost,
            "the peer's memory service belongs to another user; expected the same",
        )
        .with_operation("connect to a peer's service"));
    }
    rustix::net::send(&connection, &request.encode(token), SendFlags::NOSIGNAL).map_err(
        |errno| match errno {
            Errno::CONNRESET | Errno::PIPE => closed(),
            other => io("send a request")(other),
        },
    )?;
    Ok(Asked { connection })
}

impl AsFd for Asked {
    /// Readable once the answer is there, or will not come.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.connection.as_fd()
    }
}

impl Asked {
    /// Waits for the answer.
    pub(super) fn finish(self) -> Result<Option<Piece>> {
        read_answer(&self.connection)
    }
}

/// Not proof that the peer is gone: a service drops connections when it is short of something.
fn closed() -> Error {
    Error::new(
        ErrorKind::Io,
        "the peer's memory service closed the connection before it answered",
    )
}

fn read_answer(connection: &OwnedFd) -> Result<Option<Piece>> {
    let mut answer = [0; ANSWER_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = rustix::net::recvmsg(
        connection,
        &mut [IoSliceMut::new(&mut answer)],
        &mut control,
        RecvFlags::CMSG_CLOEXEC,
    )
    .map_err(|errno| match errno {
        Errno::AGAIN => Error::new(
            ErrorKind::Timeout,
            format!("timed out after {MAX_WAIT:?} waiting for the peer's memory service to answer"),
        )
        .with_help("check that the peer's process is not stopped"),
        Errno::CONNRESET => closed(),
        other => io("read an answer")(other),
    })?;
    let descriptor = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    });
    if received.bytes != answer.len() {
        return Err(closed());
    }
    let [s0, s1, s2, s3, bytes @ ..] = answer;
    if u32::from_le_bytes([s0, s1, s2, s3]) != 0 {
        return Err(Error::new(
            ErrorKind::InvalidHandle,
            "the peer refused: it does not share this region any more",
        )
        .with_operation("ask a peer's service")
        .with_help("exchange the region anew"));
    }
    let bytes = usize::try_from(u64::from_le_bytes(bytes)).map_err(|_| {
        Error::new(
            ErrorKind::Protocol,
            "the peer's memory is longer than this process can address",
        )
    })?;
    Ok(descriptor.map(|descriptor| Piece { descriptor, bytes }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::message::Message;

    fn descriptor_of(allocation: u64) -> Request {
        Request {
            from: 2,
            number: 0,
            message: Message::Piece {
                allocation,
                generation: 9,
                index: 0,
            },
        }
    }

    #[test]
    fn a_descriptor_crosses_and_a_refusal_is_an_error() {
        let handler: Handler = Box::new(|request| match request {
            request if request == descriptor_of(7) => Ok(Some(Piece {
                descriptor: rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC)?,
                bytes: 1 << 40,
            })),
            _ => Err(Error::new(ErrorKind::Closed, "gone")),
        });
        let service = Service::start([5; 16], handler).unwrap();
        let piece = ask(service.name(), &[5; 16], descriptor_of(7)).unwrap();
        assert_eq!(piece.unwrap().bytes, 1 << 40);
        let refused = ask(service.name(), &[5; 16], descriptor_of(8)).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::InvalidHandle);
        service.stop();
        assert_eq!(
            ask(service.name(), &[5; 16], descriptor_of(7))
                .unwrap_err()
                .kind(),
            ErrorKind::PeerLost
        );
    }

    #[test]
    fn without_the_token_nothing_is_answered_and_the_service_goes_on() {
        let service = Service::start([5; 16], Box::new(|_| Ok(None))).unwrap();
        let connection = socket().unwrap();
        limit(&connection).unwrap();
        let asked = send(connection, service.name(), &[6; 16], descriptor_of(7)).unwrap();
        // The service listens, so its peer is not gone.
        assert_eq!(asked.finish().unwrap_err().kind(), ErrorKind::Io);
        let stray = socket().unwrap();
        rustix::net::connect(&stray, &address(service.name()).unwrap()).unwrap();
        rustix::net::send(&stray, b"short", SendFlags::NOSIGNAL).unwrap();
        assert!(
            ask(service.name(), &[5; 16], descriptor_of(7))
                .unwrap()
                .is_none()
        );
    }

    #[test]
    fn a_dropped_connection_is_asked_on_again() {
        let name = b"warplink-test-that-drops-one".to_vec();
        let listener = listen(&name).unwrap();
        let serving = std::thread::spawn(move || {
            drop(rustix::net::accept(&listener).unwrap());
            let connection = rustix::net::accept(&listener).unwrap();
            answer(&connection, &[5; 16], &(Box::new(|_| Ok(None)) as Handler)).unwrap();
        });
        assert!(ask(&name, &[5; 16], descriptor_of(7)).unwrap().is_none());
        serving.join().unwrap();
        let error = ask(&name, &[5; 16], descriptor_of(7)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::PeerLost);
    }

    #[test]
    fn silent_connections_hold_up_nobody() {
        let service = Service::start([5; 16], Box::new(|_| Ok(None))).unwrap();
        let silent: Vec<OwnedFd> = (0..3 * MAX_PENDING)
            .map(|_| {
                let socket = socket().unwrap();
                rustix::net::connect(&socket, &address(service.name()).unwrap()).unwrap();
                socket
            })
            .collect();
        for _ in 0..10 {
            let begun = Instant::now();
            ask(service.name(), &[5; 16], descriptor_of(7)).unwrap();
            assert!(begun.elapsed() < Duration::from_secs(1), "held up");
        }
        let begun = Instant::now();
        service.stop();
        assert!(begun.elapsed() < Duration::from_secs(1), "held up");
        drop(silent);
    }
}
