//! Unix socket on which ranks of one machine request descriptors and send notices.
//!
//! Each request is one record on its own connection, and so is the answer, with a descriptor if one was
//! requested. Every request carries the job's token.
//!
//! Any process of the machine can connect, so both sides verify through the kernel that the other runs as the
//! same user. One thread waits for requests on all connections concurrently: a silent connection blocks
//! nobody.

use super::message::{MAX_REQUEST_BYTES, Request, TOKEN_BYTES};
use super::socket::{MAX_WAIT, address, io, is_same_user, socket};
use crate::debug::debug_fields;
use crate::device::Piece;
use crate::error::{Error, ErrorKind, Result};
use crate::shortage::Throttle;
use crate::sync::lock;
use crate::threads;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags};
use rustix::process::{Resource, getrlimit};
use std::collections::VecDeque;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Maximum connections without a request; the oldest is dropped for a new one.
const MAX_PENDING: usize = 64;
/// Retry interval after resource exhaustion.
const PAUSE: Duration = Duration::from_millis(10);
/// Maximum connections accepted before requests are served again, so that a flood of connections cannot
/// starve them.
const MAX_ACCEPTED: usize = 64;

/// Length of an answer: status, and the length of the piece or, for [`SHORT`], the descriptor limit.
pub(super) const ANSWER_BYTES: usize = 12;
/// Status of a request.
pub(super) const DONE: u32 = 0;
pub(super) const REFUSED: u32 = 1;
/// The process has no file descriptor for the answer.
pub(super) const SHORT: u32 = 2;

static CANNOT_WAIT: Throttle = Throttle::new();
static CANNOT_ACCEPT: Throttle = Throttle::new();

/// Handles a request: returns the piece if one was requested; an error is a refusal.
pub(super) type Handler = Box<dyn Fn(Request) -> Result<Option<Piece>> + Send + Sync>;

/// The listening side, stopped by [`Service::stop`] or drop.
pub(super) struct Service {
    name: Vec<u8>,
    /// Eventfd, readable when the thread should end.
    stop: Arc<OwnedFd>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

debug_fields!(Service, |it| name: String::from_utf8_lossy(&it.name));

pub(super) fn listen(name: &[u8]) -> Result<OwnedFd> {
    let listener = socket()?;
    rustix::net::bind(&listener, &address(name)?).map_err(io("bind a Unix socket"))?;
    rustix::net::listen(&listener, 128).map_err(io("listen on a Unix socket"))?;
    Ok(listener)
}

impl Service {
    /// Listens under a random name and answers with `handler`, on its own thread.
    pub(super) fn start(token: [u8; TOKEN_BYTES], handler: Handler) -> Result<Self> {
        let mut random = [0; 16];
        getrandom::fill(&mut random).map_err(|error| {
            Error::new(ErrorKind::Io, error.to_string()).with_operation("draw a socket's name")
        })?;
        let name = format!("warplink-{:032x}", u128::from_be_bytes(random)).into_bytes();
        let listener = listen(&name)?;
        // A peer may close its connection between poll and accept, which would block the thread.
        rustix::io::ioctl_fionbio(&listener, true).map_err(io("configure a Unix socket"))?;
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let stop = eventfd(0, flags).map_err(io("make an event descriptor"))?;
        let stop = Arc::new(stop);
        let stopped = stop.clone();
        let serve = move || Server::new(&token, &handler).run(&listener, &stopped);
        let thread = threads::spawn("warplink-service", "start the service thread", serve)?;
        Ok(Self {
            name,
            stop,
            thread: Mutex::new(Some(thread)),
        })
    }

    /// Name by which peers connect.
    pub(super) fn name(&self) -> &[u8] {
        &self.name
    }

    /// Ends the thread. Later connections are refused by the system.
    pub(super) fn stop(&self) {
        let Some(thread) = lock(&self.thread).take() else {
            return;
        };
        if let Err(errno) = rustix::io::write(&*self.stop, &1u64.to_ne_bytes()) {
            tracing::warn!(%errno, "the service thread could not be stopped");
            return;
        }
        threads::join(thread, "service");
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.stop();
    }
}

/// A connection without a request so far.
struct Pending {
    connection: OwnedFd,
    since: Instant,
}

/// State of the listening thread.
struct Server<'a> {
    token: &'a [u8; TOKEN_BYTES],
    handler: &'a Handler,
    /// Oldest first.
    pending: VecDeque<Pending>,
    /// Closed to free a descriptor for a connection when none is left.
    reserve: Option<OwnedFd>,
}

/// A placeholder descriptor.
fn reserve() -> Option<OwnedFd> {
    eventfd(0, EventfdFlags::CLOEXEC).ok()
}

impl<'a> Server<'a> {
    fn new(token: &'a [u8; TOKEN_BYTES], handler: &'a Handler) -> Self {
        Self {
            token,
            handler,
            pending: VecDeque::new(),
            reserve: reserve(),
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
                    // The descriptor limit was lowered, or memory is short: requests wait in the backlog.
                    if let Some(omitted) = CANNOT_WAIT.due() {
                        tracing::warn!(%errno, omitted, "the memory service cannot wait for requests; trying again");
                    }
                    // Poll cannot report it here; the read succeeds only once `stop` was signalled, since the
                    // descriptor does not block.
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
            // Answer before accepting: a full queue drops its oldest connection, which may have a request by
            // now.
            self.answer_ready(requests);
            // A descriptor may have been freed since the reserve was used up.
            if self.reserve.is_none() {
                self.reserve = reserve();
            }
            if *connecting {
                self.accept_all(listener);
            }
        }
    }

    /// Answers ready connections, and drops those that timed out.
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
                // The reserve suffices for a connection and all answers without a piece.
                Err(Errno::MFILE | Errno::NFILE) if self.reserve.take().is_some() => continue,
                Err(errno) => {
                    if let Some(omitted) = CANNOT_ACCEPT.due() {
                        let error = Error::io("accept a peer's request", &errno.into());
                        tracing::warn!(%error, omitted, "a peer's request could not be accepted; trying again");
                    }
                    // Drop a connection without a request to free its descriptor; its peer retries.
                    self.pending.pop_front();
                    std::thread::sleep(PAUSE);
                    return;
                }
            };
            // The token protects the memory; this keeps other users from occupying the few pending
            // connections.
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

pub(super) fn read_request(connection: &OwnedFd, token: &[u8; TOKEN_BYTES]) -> Result<Request> {
    let mut bytes = [0; MAX_REQUEST_BYTES];
    // One record of a SOCK_SEQPACKET socket: a request arrives whole or not at all, and longer ones are cut off and
    // refused.
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
    let limit = || getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    let (status, piece, number) = match handler(request) {
        Ok(None) => (DONE, None, 0),
        Ok(Some(piece)) => {
            let bytes = piece.bytes as u64;
            (DONE, Some(piece), bytes)
        }
        // The only failure that is worth a retry: descriptors are freed again, other refusals are final.
        Err(error) if error.code() == Some(Errno::MFILE.raw_os_error().into()) => {
            tracing::debug!(?request, %error, "a request could not be answered");
            (SHORT, None, limit())
        }
        Err(error) => {
            tracing::debug!(?request, %error, "a request was refused");
            (REFUSED, None, 0)
        }
    };
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors = piece.as_ref().map(|piece| [piece.descriptor.as_fd()]);
    if let Some(descriptors) = &descriptors {
        control.push(SendAncillaryMessage::ScmRights(descriptors));
    }
    let mut answer = [0; ANSWER_BYTES];
    answer[..4].copy_from_slice(&status.to_le_bytes());
    answer[4..].copy_from_slice(&number.to_le_bytes());
    rustix::net::sendmsg(
        connection,
        &[IoSlice::new(&answer)],
        &mut control,
        SendFlags::NOSIGNAL,
    )
    .map_err(io("answer a request"))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::service_client::{ask, send};
    use super::super::socket::limit;
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
            _ => Err(Error::closed("gone")),
        });
        let service = Service::start([5; 16], handler).unwrap();
        let piece = ask(service.name(), &[5; 16], descriptor_of(7), MAX_WAIT).unwrap();
        assert_eq!(piece.unwrap().bytes, 1 << 40);
        let refused = ask(service.name(), &[5; 16], descriptor_of(8), MAX_WAIT).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::InvalidHandle);
        service.stop();
        assert_eq!(
            ask(service.name(), &[5; 16], descriptor_of(7), MAX_WAIT)
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
        // Not `PeerLost`: the service still listens.
        assert_eq!(asked.finish().unwrap_err().kind(), ErrorKind::Io);
        let stray = socket().unwrap();
        rustix::net::connect(&stray, &address(service.name()).unwrap()).unwrap();
        rustix::net::send(&stray, b"short", SendFlags::NOSIGNAL).unwrap();
        assert!(
            ask(service.name(), &[5; 16], descriptor_of(7), MAX_WAIT)
                .unwrap()
                .is_none()
        );
    }

    /// Patience applies to peers that cannot answer, not to slow ones.
    #[test]
    fn a_slow_peer_is_not_given_up() {
        let handler: Handler = Box::new(|_| {
            std::thread::sleep(Duration::from_millis(700));
            Ok(None)
        });
        let service = Service::start([5; 16], handler).unwrap();
        for patience in [Duration::ZERO, Duration::from_millis(50)] {
            let answer = ask(service.name(), &[5; 16], descriptor_of(7), patience);
            assert!(answer.unwrap().is_none(), "{patience:?}");
        }
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
        assert!(
            ask(&name, &[5; 16], descriptor_of(7), MAX_WAIT)
                .unwrap()
                .is_none()
        );
        serving.join().unwrap();
        let error = ask(&name, &[5; 16], descriptor_of(7), MAX_WAIT).unwrap_err();
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
            ask(service.name(), &[5; 16], descriptor_of(7), MAX_WAIT).unwrap();
            assert!(begun.elapsed() < MAX_WAIT / 2, "held up");
        }
        let begun = Instant::now();
        service.stop();
        assert!(begun.elapsed() < MAX_WAIT / 2, "held up");
        drop(silent);
    }
}
