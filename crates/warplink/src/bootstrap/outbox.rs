//! Sending frames without blocking the sender.

use super::channel::Sealer;
use super::message::MAX_BODY;
use crate::error::{Error, ErrorKind, Result};
use crate::sync::lock;
use crate::threads;
use rustix::net::{SendFlags, send};
use std::collections::VecDeque;
use std::io::Write;
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

/// How many bytes may be queued for a receiver that does not read, before its connection is closed: a few messages of the
/// largest size.
const MAX_QUEUED: usize = 4 * MAX_BODY;

/// The sending half of a connection.
///
/// A frame is written to the socket's buffer directly while that has space, so in the common case no thread has to be
/// woken. The rest is queued for a thread that ends when the queue is empty, so a receiver that stalls delays nobody else.
pub(crate) struct Outbox {
    stream: Arc<TcpStream>,
    queue: Mutex<OutboxQueue>,
}

struct OutboxQueue {
    /// Behind the same lock as the queue, since frames must be encrypted in the order in which they are sent.
    sealer: Sealer,
    frames: VecDeque<Vec<u8>>,
    bytes: usize,
    draining: bool,
    closed: bool,
    drain: Option<JoinHandle<()>>,
}

impl Outbox {
    pub(crate) fn new(stream: Arc<TcpStream>, sealer: Sealer) -> Arc<Self> {
        Arc::new(Self {
            stream,
            queue: Mutex::new(OutboxQueue {
                sealer,
                frames: VecDeque::new(),
                bytes: 0,
                draining: false,
                closed: false,
                drain: None,
            }),
        })
    }

    /// Sends a frame or queues it. An error shuts the connection down, which its reader notices.
    pub(crate) fn push(self: &Arc<Self>, id: u64, body: &[u8]) -> Result<()> {
        let mut queue = lock(&self.queue);
        // A message that is too long is the caller's mistake, and does not affect the connection.
        let bytes = queue.sealer.seal(id, body)?;
        let result = self.place(&mut queue, bytes);
        if result.is_err() {
            self.shut(&mut queue);
        }
        result
    }

    fn place(self: &Arc<Self>, queue: &mut OutboxQueue, mut bytes: Vec<u8>) -> Result<()> {
        if queue.closed {
            return Err(Error::closed("the connection is closed"));
        }
        if !queue.draining {
            // Never past frames that are still queued: the records must arrive in the order in which they were
            // sealed.
            let sent = self.send_now(&bytes)?;
            if sent == bytes.len() {
                return Ok(());
            }
            bytes.drain(..sent);
        }
        queue.bytes += bytes.len();
        if queue.bytes > MAX_QUEUED {
            return Err(Error::new(
                ErrorKind::OutOfMemory,
                "the receiver has stopped reading",
            ));
        }
        queue.frames.push_back(bytes);
        if !queue.draining {
            let outbox = self.clone();
            let drain = move || outbox.drain();
            let drain = threads::spawn("warplink-send", "start a sending thread", drain)?;
            queue.draining = true;
            // An earlier thread needs no join: it set `draining` to false as its last action.
            queue.drain = Some(drain);
        }
        Ok(())
    }

    /// Writes as much as the socket's buffer takes; returns how many bytes that is.
    fn send_now(&self, bytes: &[u8]) -> Result<usize> {
        let mut sent = 0;
        while sent < bytes.len() {
            match send(
                &*self.stream,
                &bytes[sent..],
                // `NOSIGNAL`: a closed connection is an error here, not a SIGPIPE that ends the application.
                SendFlags::DONTWAIT | SendFlags::NOSIGNAL,
            ) {
                Ok(count) => sent += count,
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => break,
                Err(errno) => return Err(Error::io("send a frame", &errno.into())),
            }
        }
        Ok(sent)
    }

    fn drain(&self) {
        loop {
            let bytes = {
                let mut queue = lock(&self.queue);
                match queue.frames.pop_front() {
                    Some(bytes) => {
                        queue.bytes -= bytes.len();
                        bytes
                    }
                    None => {
                        // Under the lock that found the queue empty, so a frame pushed next starts another thread.
                        queue.draining = false;
                        return;
                    }
                }
            };
            let mut stream = &*self.stream;
            if stream.write_all(&bytes).is_err() {
                self.shut(&mut lock(&self.queue));
            }
        }
    }

    fn shut(&self, queue: &mut OutboxQueue) {
        queue.closed = true;
        queue.frames.clear();
        queue.bytes = 0;
        // It fails if it is down already.
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    /// Shuts the connection down. Bytes in the socket's buffer still arrive.
    pub(crate) fn shut_down(&self) {
        self.shut(&mut lock(&self.queue));
    }

    /// Shuts the connection down, which ends the sending thread, and waits for that.
    pub(crate) fn close(&self) {
        let drain = {
            // Joined without the lock, which the thread takes for every frame.
            let mut queue = lock(&self.queue);
            self.shut(&mut queue);
            queue.drain.take()
        };
        if let Some(drain) = drain {
            let _ = drain.join();
        }
    }
}
