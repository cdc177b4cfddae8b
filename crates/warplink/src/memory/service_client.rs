//! Client of a peer's memory [service](super::service).

use super::message::{Request, TOKEN_BYTES};
use super::service::{ANSWER_BYTES, DONE, SHORT};
use super::socket::{MAX_WAIT, address, io, is_same_user, limit, socket};
use crate::deadline::Deadline;
use crate::device::{PeerProcess, Piece};
use crate::error::{Error, ErrorKind, Result};
use crate::shortage::Shortage;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendFlags};
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

/// Retry interval after resource exhaustion.
const PAUSE: Duration = Duration::from_millis(10);

/// Interval for checking whether the peer is stopped.
const SLICE: Duration = Duration::from_millis(500);

/// Descriptors needed by a response: one for the connection, and one that it passes.
const NEEDED: u64 = 2;

/// A request in flight.
#[derive(Debug)]
pub(super) struct Asked {
    connection: OwnedFd,
}

/// Sends an idempotent `request` to the service called `name` and waits for the answer: up to [`MAX_WAIT`],
/// or up to `patience` if the peer cannot answer because it is stopped or out of descriptors. Retries for
/// `patience` if the service drops the connection, or this process has no descriptor for one.
///
/// # Errors
/// [`ErrorKind::PeerLost`] if nobody listens, [`ErrorKind::InvalidHandle`] if the request is refused,
/// [`ErrorKind::Timeout`] without an answer.
pub(super) fn ask(
    name: &[u8],
    token: &[u8; TOKEN_BYTES],
    request: Request,
    patience: Duration,
) -> Result<Option<Piece>> {
    let deadline = Deadline::after(patience);
    let ask_once = || {
        let connection = socket()?;
        // Before the connect, which the send timeout bounds too: it blocks while the backlog of a stopped peer is
        // full.
        limit(&connection)?;
        let asked = send(connection, name, token, request)?;
        asked.wait(deadline)?;
        asked.finish()
    };
    loop {
        match ask_once() {
            Err(error) if error.kind() == ErrorKind::Io && !deadline.passed() => {
                tracing::debug!(%error, "a peer's service did not answer; asking again");
                std::thread::sleep(PAUSE);
            }
            answer => return answer,
        }
    }
}

/// Sends `request` to the service called `name` without waiting.
///
/// # Errors
/// [`ErrorKind::PeerLost`] if nobody listens; after an error that [may pass](may_pass), the request may or
/// may not have been sent.
pub(super) fn begin(name: &[u8], token: &[u8; TOKEN_BYTES], request: Request) -> Result<Asked> {
    let connection = socket()?;
    // The full backlog of a stopped peer must not block the caller.
    rustix::io::ioctl_fionbio(&connection, true).map_err(io("configure a Unix socket"))?;
    send(connection, name, token, request)
}

/// Whether an error of `kind` may be transient: resource exhaustion, here or at the peer.
pub(super) fn may_pass(kind: ErrorKind) -> bool {
    matches!(
        kind,
        ErrorKind::Io | ErrorKind::Timeout | ErrorKind::OutOfMemory
    )
}

pub(super) fn send(
    connection: OwnedFd,
    name: &[u8],
    token: &[u8; TOKEN_BYTES],
    request: Request,
) -> Result<Asked> {
    rustix::net::connect(&connection, &address(name)?).map_err(|errno| match errno {
        rustix::io::Errno::CONNREFUSED => {
            Error::new(ErrorKind::PeerLost, "the peer's memory service is gone")
                .with_operation("connect to a peer's service")
        }
        other => io("connect to a peer's service")(other),
    })?;
    // Another process may have taken the name; it must not learn the token.
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
    /// Readable once there is an answer or an error.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.connection.as_fd()
    }
}

impl Asked {
    /// Waits for the answer, up to [`MAX_WAIT`]; only up to `patience` if the peer is out of descriptors or
    /// stopped.
    fn wait(&self, patience: Deadline) -> Result<()> {
        let deadline = Deadline::after(MAX_WAIT);
        loop {
            // In slices, since a peer that is stopped or out of descriptors makes nothing readable.
            let slice = match patience.remaining() {
                Duration::ZERO => SLICE,
                remaining => SLICE.min(remaining),
            };
            let slice = slice.min(deadline.remaining());
            let slice = Timespec {
                tv_sec: slice.as_secs().cast_signed(),
                tv_nsec: slice.subsec_nanos().into(),
            };
            match poll(&mut [PollFd::new(self, PollFlags::IN)], Some(&slice)) {
                Ok(0) | Err(Errno::INTR) => {}
                Ok(_) => return Ok(()),
                Err(errno) => return Err(io("wait for an answer")(errno)),
            }
            let late = deadline.passed();
            if !late && !patience.passed() {
                continue;
            }
            // Before the other checks: this cause has a remedy that the error can name.
            if let Some(error) = self.shortage() {
                return Err(error);
            }
            if late || self.is_stopped() {
                return Err(unanswered());
            }
        }
    }

    /// Whether the peer's process is known to be stopped.
    fn is_stopped(&self) -> bool {
        let stat = || {
            let peer = PeerProcess::of(&self.connection).ok()?.id?;
            let stat = std::fs::read_to_string(format!("/proc/{}/stat", peer.as_raw_pid())).ok()?;
            // Fields after the command name, which may contain anything.
            stat.rsplit_once(") ")?.1.chars().next()
        };
        matches!(stat(), Some('T' | 't'))
    }

    /// The error of the peer, or of this process, if it has no descriptors left for an answer.
    fn shortage(&self) -> Option<Error> {
        match self.exhausted() {
            Ok(limit) => limit.map(peer_is_short),
            // The peer cannot even be looked at: descriptors are short here.
            Err(error) => Shortage::of(&error).map(|_| Error::io("ask a peer's service", &error)),
        }
    }

    /// The limit of the peer's descriptors, if an answer is known to take more than it has left.
    fn exhausted(&self) -> std::io::Result<Option<u64>> {
        let Some(peer) = PeerProcess::of(&self.connection)?.id else {
            return Ok(None);
        };
        let open = std::fs::read_dir(format!("/proc/{}/fd", peer.as_raw_pid()))?.count() as u64;
        let limits = std::fs::read_to_string(format!("/proc/{}/limits", peer.as_raw_pid()))?;
        let mut lines = limits.lines();
        let limit = lines.find_map(|line| line.strip_prefix("Max open files"));
        let limit = limit.and_then(|limit| limit.split_whitespace().next()?.parse().ok());
        Ok(limit.filter(|limit| open + NEEDED > *limit))
    }

    /// Waits for the answer.
    pub(super) fn finish(self) -> Result<Option<Piece>> {
        read_answer(&self.connection).map_err(|error| match error.kind() {
            // It drops connections without a request to accept others.
            ErrorKind::Io => self.shortage().unwrap_or(error),
            _ => error,
        })
    }
}

/// Not a proof that the peer is gone: a service drops connections when resources are exhausted.
fn closed() -> Error {
    Error::new(
        ErrorKind::Io,
        "the peer's memory service closed the connection before it answered",
    )
}

fn unanswered() -> Error {
    Error::new(
        ErrorKind::Timeout,
        "the peer's memory service does not answer in time",
    )
    .with_help("check that the peer's process is not stopped")
}

fn peer_is_short(limit: u64) -> Error {
    let shortage = Shortage::of_descriptors(Some(limit));
    Error::new(ErrorKind::Io, format!("the peer: {}", shortage.message))
        .with_operation("ask a peer's service")
        .with_help(shortage.help)
        .with_code(Errno::MFILE.raw_os_error().into())
}

pub(super) fn read_answer(connection: &OwnedFd) -> Result<Option<Piece>> {
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
        Errno::AGAIN => unanswered(),
        Errno::CONNRESET => closed(),
        other => io("read an answer")(other),
    })?;
    if received.flags.contains(ReturnFlags::CTRUNC) {
        // The kernel dropped the descriptor for lack of a slot in this process.
        return Err(io("receive a peer's descriptor")(Errno::MFILE));
    }
    let descriptor = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    });
    if received.bytes != answer.len() {
        return Err(closed());
    }
    let [s0, s1, s2, s3, bytes @ ..] = answer;
    let (status, number) = (
        u32::from_le_bytes([s0, s1, s2, s3]),
        u64::from_le_bytes(bytes),
    );
    if status == SHORT {
        return Err(peer_is_short(number));
    }
    if status != DONE {
        return Err(
            Error::invalid_handle("the peer refused: the region is no longer registered")
                .with_operation("ask a peer's service")
                .with_help("exchange the region again"),
        );
    }
    let bytes = usize::try_from(number).map_err(|_| {
        Error::protocol("the peer's memory is longer than this process can address")
    })?;
    Ok(descriptor.map(|descriptor| Piece { descriptor, bytes }))
}
