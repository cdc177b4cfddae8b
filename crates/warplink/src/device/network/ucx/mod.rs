//! Network over UCX. One thread makes all UCX calls and also serves peers; other threads send it commands.

mod device_memory;
mod engine;
mod ffi;
mod peer;

use self::engine::{Engine, EngineCommand};
use self::ffi::Ucp;
use self::peer::Operation;
use super::{
    DeviceAccess, Network, NetworkConnection, NetworkOptions, NetworkRegion, OnDone, OnFailure,
    RemoteMemory,
};
use crate::deadline::Deadline;
use crate::debug::debug_text;
use crate::device::{DeviceKind, DeviceSlice};
use crate::error::{Error, ErrorKind, Rank, Result};
use crate::sync::lock;
use crate::threads;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

/// Time limit for commands that do not wait for a peer.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(30);

/// How long dropping the network waits for operations in flight.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// Length of the digest before a key or an address.
const DIGEST: usize = 8;

/// Help for an unresponsive peer.
const UNREACHABLE_HELP: &str =
    "check that the peer runs and that the network between the machines works";

/// Reply channel of a command.
type Reply<T> = SyncSender<Result<T>>;

/// This process's endpoint.
pub(super) struct UcxNetwork {
    link: Arc<Link>,
    name: String,
    address: Vec<u8>,
    access: DeviceAccess,
    /// Whether UCX accesses GPU memory directly.
    reaches_device: bool,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// Command channel to the thread.
struct Link {
    commands: Sender<EngineCommand>,
    /// Eventfd, written after each command, since the thread may be asleep.
    wake: Arc<OwnedFd>,
}

/// A connection to one peer.
struct UcxConnection {
    link: Arc<Link>,
    peer: Rank,
    number: u64,
    reaches_device: bool,
}

/// Runs its command when dropped.
struct Guard {
    link: Arc<Link>,
    command: Mutex<Option<EngineCommand>>,
}

/// Wire format of a key.
#[derive(Serialize, Deserialize)]
struct EndpointKey {
    address: u64,
    bytes: u64,
    packed: Vec<u8>,
}

impl UcxNetwork {
    pub(super) fn open(options: &NetworkOptions) -> Result<Self> {
        let ucp = Ucp::get()?;
        let wake = rustix::event::eventfd(
            0,
            rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK,
        );
        let wake = wake.map_err(|error| Error::io("make an event descriptor", &error.into()))?;
        let wake = Arc::new(wake);
        // UCX runs on one thread, its only user, which spares locks around its worker.
        let (commands, received) = channel();
        let (opened, result) = sync_channel(1);
        let (access, options, woken) = (options.access, options.clone(), wake.clone());
        let run = move || match Engine::open(ucp, &options) {
            Ok((mut engine, address)) => {
                // Cannot fail: the caller waits for it without a limit.
                let _ = opened.send(Ok((address, engine.reaches_device())));
                engine.run(&received, &woken);
            }
            Err(error) => {
                let _ = opened.send(Err(error));
            }
        };
        let thread = threads::spawn("warplink-network", "start the thread of the network", run)?;
        // Without a limit, since loading UCX and its drivers can take long, and the thread always answers or
        // ends.
        let (address, reaches_device) = result.recv().map_err(|_| ended())??;
        Ok(Self {
            link: Arc::new(Link { commands, wake }),
            name: ucp.name(),
            address: seal(&address),
            access,
            reaches_device,
            thread: Mutex::new(Some(thread)),
        })
    }
}

impl UcxNetwork {
    /// Registers memory that UCX can access, if its key satisfies `is_enough`.
    fn register_any(
        &self,
        memory: &DeviceSlice,
        is_enough: fn(&[u8]) -> bool,
    ) -> Result<NetworkRegion> {
        let registered = memory.clone();
        let (number, packed) = self.link.ask(
            Deadline::after(COMMAND_TIMEOUT),
            "register memory",
            move |engine, reply| {
                let _ = reply.send(engine.register(registered));
            },
        )?;
        let registration = Guard::boxed(&self.link, move |engine| engine.unregister(number));
        // Only the packed key shows which transports reach the memory, hence registration first.
        if !is_enough(&packed) {
            let text = "no network card reaches the device's memory";
            return Err(Error::unsupported(text).with_operation("register memory"));
        }
        let key = EndpointKey {
            address: memory.address(),
            bytes: memory.bytes() as u64,
            packed,
        };
        let encoded =
            postcard::to_stdvec(&key).map_err(|error| Error::internal(error.to_string()))?;
        Ok(NetworkRegion {
            key: seal(&encoded),
            _registration: registration,
        })
    }
}

impl Network for UcxNetwork {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn address(&self) -> &[u8] {
        &self.address
    }

    fn reaches(&self, memory: &DeviceSlice) -> bool {
        check_kind(memory, false).is_ok()
    }

    fn register(&self, memory: &DeviceSlice) -> Result<NetworkRegion> {
        check_kind(memory, false).map_err(|error| error.with_operation("register memory"))?;
        self.register_any(memory, |_| true)
    }

    fn register_device_memory(&self, memory: &DeviceSlice) -> Result<NetworkRegion> {
        let is_host = memory.backing().is_host_memory();
        let wanted = match self.access {
            DeviceAccess::Staged => false,
            DeviceAccess::Automatic => !is_host,
            DeviceAccess::Direct => true,
        };
        if !wanted {
            return Err(Error::unsupported(format!(
                "memory is not reached directly: access is '{}'",
                self.access
            ))
            .with_operation("register memory"));
        }
        check_kind(memory, self.reaches_device)
            .map_err(|error| error.with_operation("register memory"))?;
        let is_enough = match self.access {
            DeviceAccess::Automatic => device_memory::is_reached_by_cards,
            _ => |_: &[u8]| true,
        };
        self.register_any(memory, is_enough)
    }

    fn connect(&self, peer: Rank, address: &[u8]) -> Result<Arc<dyn NetworkConnection>> {
        let name = |error: Error| error.with_operation("connect").with_peer(peer);
        let address = unseal(address).map_err(name)?.to_vec();
        // UCX trusts the bytes of an address, so reject damaged ones here.
        let number = self
            .link
            .ask(
                Deadline::after(COMMAND_TIMEOUT),
                "connect",
                move |engine, reply| {
                    let _ = reply.send(engine.connect(peer, &address));
                },
            )
            .map_err(name)?;
        Ok(Arc::new(UcxConnection {
            link: self.link.clone(),
            peer,
            number,
            reaches_device: self.reaches_device,
        }))
    }

    fn close(&self, deadline: Deadline) -> Result<()> {
        let Some(thread) = lock(&self.thread).take() else {
            return Ok(());
        };
        let closed = self
            .link
            .ask(deadline, "close the network", move |engine, reply| {
                engine.close(deadline, reply);
            });
        // The thread ends at the deadline or shortly after.
        if closed.is_ok() && thread.join().is_err() {
            return Err(ended());
        }
        closed
    }
}

impl Drop for UcxNetwork {
    fn drop(&mut self) {
        if let Err(error) = self.close(Deadline::after(CLOSE_TIMEOUT)) {
            tracing::warn!(%error, "the network was not closed in order");
        }
    }
}

impl UcxConnection {
    /// Queues an operation.
    fn enqueue(&self, operation: Operation) -> Result<()> {
        let number = self.number;
        self.link
            .send(Box::new(move |engine| engine.enqueue(number, operation)))
            .map_err(|error| error.with_peer(self.peer))
    }

    fn check(&self, target: &RemoteMemory, offset: usize, bytes: usize) -> Result<()> {
        if target.connection != self.number {
            return Err(Error::invalid(
                "the peer's memory was opened on another connection; expected this one",
            )
            .with_peer(self.peer));
        }
        target
            .check(offset, bytes)
            .map_err(|error| error.with_peer(self.peer))
    }
}

impl NetworkConnection for UcxConnection {
    fn open(&self, key: &[u8]) -> Result<RemoteMemory> {
        let name = |error: Error| {
            error
                .with_operation("open a peer's memory")
                .with_peer(self.peer)
        };
        let decoded = unseal(key).map_err(name)?;
        let key: EndpointKey = postcard::from_bytes(decoded)
            .map_err(|error| name(Error::invalid_handle(error.to_string())))?;
        let bytes = usize::try_from(key.bytes)
            .map_err(|error| name(Error::invalid_handle(error.to_string())))?;
        let number = self.number;
        let opened = self.link.ask(
            Deadline::after(COMMAND_TIMEOUT),
            "open a peer's memory",
            move |engine, reply| {
                let _ = reply.send(engine.open_key(number, key.address, &key.packed));
            },
        );
        let opened = opened.map_err(name)?;
        // As an operation, so that it comes after the transfers that use the key.
        let forget = move |engine: &mut Engine| engine.enqueue(number, Operation::Forget(opened));
        Ok(RemoteMemory {
            number: opened,
            connection: number,
            bytes,
            _opened: Guard::boxed(&self.link, forget),
        })
    }

    fn put(&self, source: &DeviceSlice, target: &RemoteMemory, offset: usize) -> Result<()> {
        check_kind(source, self.reaches_device)
            .map_err(|error| error.with_operation("put").with_peer(self.peer))?;
        self.check(target, offset, source.bytes())?;
        self.enqueue(Operation::Put {
            source: source.clone(),
            key: target.number,
            offset: offset as u64,
        })
    }

    fn get(&self, target: &DeviceSlice, source: &RemoteMemory, offset: usize) -> Result<()> {
        check_kind(target, self.reaches_device)
            .map_err(|error| error.with_operation("get").with_peer(self.peer))?;
        self.check(source, offset, target.bytes())?;
        self.enqueue(Operation::Get {
            target: target.clone(),
            key: source.number,
            offset: offset as u64,
        })
    }

    fn when_done(&self, then: OnDone) -> Result<()> {
        self.enqueue(Operation::Call(then))
    }

    fn when_failed(&self, handler: OnFailure) -> Result<()> {
        let number = self.number;
        self.link
            .send(Box::new(move |engine| engine.when_failed(number, handler)))
            .map_err(|error| error.with_peer(self.peer))
    }

    fn signal(&self, target: &RemoteMemory, offset: usize, value: u64) -> Result<()> {
        self.check(target, offset, size_of::<u64>())?;
        if !offset.is_multiple_of(size_of::<u64>()) {
            return Err(Error::invalid(format!(
                "the word is at {offset}; expected a multiple of 8"
            ))
            .with_operation("signal")
            .with_peer(self.peer));
        }
        self.enqueue(Operation::Signal {
            value,
            key: target.number,
            offset: offset as u64,
        })
    }

    fn flush(&self, deadline: Deadline) -> Result<()> {
        let number = self.number;
        self.link
            .ask(deadline, "flush", move |engine, reply| {
                engine.enqueue(number, Operation::Flush(reply));
            })
            .map_err(|error| match error.kind() {
                ErrorKind::Timeout => deadline
                    .expired("the peer to receive the sent data")
                    .with_operation("flush")
                    .with_help(UNREACHABLE_HELP),
                _ => error,
            })
            .map_err(|error| error.with_peer(self.peer))
    }

    fn close(&self, deadline: Deadline) -> Result<()> {
        let flushed = self.flush(deadline);
        // After a failed flush the peer may be gone, and an orderly close would wait for it.
        let (number, force) = (self.number, flushed.is_err());
        // A forced close waits for no peer.
        let deadline = if force {
            Deadline::after(CLOSE_TIMEOUT)
        } else {
            deadline
        };
        let ended = self
            .link
            .ask(deadline, "close a connection", move |engine, reply| {
                engine.disconnect(number, force, reply);
            });
        flushed.and(ended.map_err(|error| error.with_peer(self.peer)))
    }
}

/// Dropping a connection closes it without a flush.
impl Drop for UcxConnection {
    fn drop(&mut self) {
        let number = self.number;
        let (reply, _) = sync_channel(1);
        // Fails if the network is closed, and with it the connection.
        let _ = self.link.send(Box::new(move |engine| {
            engine.disconnect(number, true, reply)
        }));
    }
}

impl Link {
    fn send(&self, command: EngineCommand) -> Result<()> {
        self.commands.send(command).map_err(|_| ended())?;
        // Fails only if the eventfd's counter is full, so the thread will wake anyway.
        let _ = rustix::io::write(&*self.wake, &1_u64.to_ne_bytes());
        Ok(())
    }

    /// Runs `command` on the thread and waits for the reply.
    fn ask<T: Send + 'static>(
        &self,
        deadline: Deadline,
        operation: &'static str,
        command: impl FnOnce(&mut Engine, Reply<T>) + Send + 'static,
    ) -> Result<T> {
        let (reply, answer) = sync_channel(1);
        let name = |error: Error| error.with_operation(operation);
        self.send(Box::new(move |engine| command(engine, reply)))
            .map_err(name)?;
        match answer.recv_timeout(deadline.remaining()) {
            Ok(answer) => answer.map_err(name),
            Err(RecvTimeoutError::Timeout) => Err(name(deadline.expired("the network"))),
            Err(RecvTimeoutError::Disconnected) => Err(name(ended())),
        }
    }
}

impl Guard {
    fn boxed(link: &Arc<Link>, command: impl FnOnce(&mut Engine) + Send + 'static) -> Box<Self> {
        Box::new(Self {
            link: link.clone(),
            command: Mutex::new(Some(Box::new(command))),
        })
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if let Some(command) = lock(&self.command).take() {
            // Fails if the network is closed, which has undone it.
            let _ = self.link.send(command);
        }
    }
}

impl fmt::Debug for UcxNetwork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

debug_text!(UcxConnection, |it| "UcxConnection(peer {})", it.peer);

/// Fails for memory that the host cannot access, unless it is GPU memory and UCX `reaches_device`.
fn check_kind(memory: &DeviceSlice, reaches_device: bool) -> Result<()> {
    let is_reached_gpu = reaches_device && memory.kind() == DeviceKind::Cuda;
    if memory.backing().is_host_memory() || is_reached_gpu {
        return Ok(());
    }
    Err(Error::unsupported(format!(
        "the network does not reach memory of device {}; expected host memory",
        memory.kind()
    ))
    .with_help("copy the data to staging memory of the device first"))
}

fn ended() -> Error {
    Error::closed("the network is closed").with_help("open the network again")
}

/// `bytes` prefixed with their digest: UCX parses keys and addresses without validating them.
fn seal(bytes: &[u8]) -> Vec<u8> {
    let digest = Sha256::digest(bytes);
    [&digest[..DIGEST], bytes].concat()
}

fn unseal(sealed: &[u8]) -> Result<&[u8]> {
    sealed
        .split_at_checked(DIGEST)
        .filter(|(digest, bytes)| Sha256::digest(bytes)[..DIGEST] == **digest)
        .map(|(_, bytes)| bytes)
        .ok_or_else(|| {
            Error::invalid_handle(
                "the bytes are truncated or altered; expected them as the peer gave them",
            )
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn altered_bytes_are_refused() {
        let sealed = seal(b"address");
        assert_eq!(unseal(&sealed).unwrap(), b"address");
        assert_eq!(unseal(&seal(b"")).unwrap(), b"");
        for index in 0..sealed.len() {
            let mut altered = sealed.clone();
            altered[index] ^= 1;
            assert_eq!(
                unseal(&altered).unwrap_err().kind(),
                ErrorKind::InvalidHandle
            );
            assert!(unseal(&sealed[..index]).is_err());
        }
    }
}
