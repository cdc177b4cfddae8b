//! The network thread, which makes all UCX calls: it executes commands, progresses operations, and sleeps
//! when idle.

use super::super::NetworkOptions;
use super::ffi::{
    Config, Context, ContextParams, INTERFACE, MapParams, Memory, MemoryType, Ucp, Worker,
    WorkerParams, flag, status,
};
use super::peer::{MappedRegion, Operation, Peer};
use super::{OnFailure, Reply, device_memory};
use crate::deadline::Deadline;
use crate::device::{Device, DeviceSlice};
use crate::error::{Error, Rank, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::HashMap;
use std::ffi::{CString, c_int, c_void};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::Duration;

/// Polls without work before the thread sleeps.
const LOOKS: u32 = 200;

/// Maximum sleep in nanoseconds; UCX wakes the thread for its own events.
const SLEEP: i64 = 500_000_000;

/// How long closing waits for UCX to abort operations in flight.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// Interval in which UCX detects a dead peer.
const KEEPALIVE: &str = "1s";

/// A command for the thread.
pub(super) type EngineCommand = Box<dyn FnOnce(&mut Engine) + Send>;

/// UCX state of this process. It never leaves its thread.
pub(super) struct Engine {
    ucp: &'static Ucp,
    context: Context,
    worker: Worker,
    /// Readable when there is something to progress.
    events: c_int,
    peers: HashMap<u64, Peer>,
    memories: HashMap<u64, Rc<MappedRegion>>,
    /// Next number for a peer, region or key.
    next: u64,
    patience: Duration,
    closing: Option<(Deadline, Reply<()>)>,
    /// The device whose memory UCX accesses directly.
    device: Option<Arc<dyn Device>>,
}

impl Engine {
    /// Starts UCX and returns its address.
    pub(super) fn open(ucp: &'static Ucp, options: &NetworkOptions) -> Result<(Self, Vec<u8>)> {
        // Before UCX starts, which queries the thread's current device.
        let device = device_memory::attach(ucp, options);
        let context = start(ucp, options, device.is_some())?;
        let device = device.filter(|_| device_memory::is_reached(ucp, context));
        let params = WorkerParams {
            field_mask: flag::WORKER_THREAD_MODE,
            thread_mode: flag::THREAD_SINGLE,
            unused: [0; 30],
        };
        let mut worker = Worker(std::ptr::null_mut());
        // SAFETY: the context is live, the parameters have UCX's layout, and `worker` is an output
        // parameter for one handle.
        let made = unsafe { (ucp.ucp_worker_create)(context, &params, &mut worker) };
        if let Err(error) = ucp.check(made, "start the network") {
            // SAFETY: the context is live, and nothing was made of it.
            unsafe { (ucp.ucp_cleanup)(context) };
            return Err(error);
        }
        // From here on, dropping it cleans up.
        let mut engine = Self {
            ucp,
            context,
            worker,
            events: -1,
            peers: HashMap::new(),
            memories: HashMap::new(),
            next: 0,
            patience: options.patience,
            closing: None,
            device,
        };
        // SAFETY: the worker lives, and `events` is an output parameter for one descriptor.
        let asked = unsafe { (ucp.ucp_worker_get_efd)(worker, &mut engine.events) };
        ucp.check(asked, "ask for the network's event descriptor")?;
        let address = engine.address()?;
        Ok((engine, address))
    }

    fn address(&self) -> Result<Vec<u8>> {
        let (mut address, mut length) = (std::ptr::null_mut(), 0);
        // SAFETY: the worker lives, and both are output parameters.
        let asked =
            unsafe { (self.ucp.ucp_worker_get_address)(self.worker, &mut address, &mut length) };
        self.ucp.check(asked, "ask for the network's address")?;
        // SAFETY: UCX gave this length with the pointer, and the bytes live until they are released just below.
        let bytes = unsafe { std::slice::from_raw_parts(address.cast::<u8>(), length) }.to_vec();
        // SAFETY: it is the worker's address, given once.
        unsafe { (self.ucp.ucp_worker_release_address)(self.worker, address) };
        Ok(bytes)
    }

    /// Runs until closed, or until all senders of commands are gone.
    pub(super) fn run(&mut self, commands: &Receiver<EngineCommand>, wake: &OwnedFd) {
        let mut idle = 0;
        loop {
            let mut worked = false;
            loop {
                match commands.try_recv() {
                    Ok(command) => {
                        command(self);
                        worked = true;
                    }
                    Err(TryRecvError::Empty) => break,
                    Err(TryRecvError::Disconnected) => return,
                }
            }
            worked |= self.progress();
            if self.is_closed() {
                return;
            }
            idle = if worked { 0 } else { idle + 1 };
            if idle > LOOKS {
                self.sleep(wake);
            } else if idle > 0 {
                std::hint::spin_loop();
            }
        }
    }

    /// Progresses UCX and every peer; returns whether anything happened.
    fn progress(&mut self) -> bool {
        // SAFETY: the worker lives, and this is the only thread that uses it.
        let mut worked = unsafe { (self.ucp.ucp_worker_progress)(self.worker) } > 0;
        for peer in self.peers.values_mut() {
            worked |= peer.advance();
        }
        self.peers.retain(|_, peer| !peer.is_gone());
        worked
    }

    /// Sleeps until an event, for a bounded time.
    fn sleep(&self, wake: &OwnedFd) {
        // SAFETY: as in `progress`.
        let armed = unsafe { (self.ucp.ucp_worker_arm)(self.worker) };
        if armed == status::BUSY {
            return;
        }
        // SAFETY: the descriptor is the worker's, which outlives the poll.
        let events = unsafe { BorrowedFd::borrow_raw(self.events) };
        let mut ready = [
            PollFd::new(wake, PollFlags::IN),
            PollFd::from_borrowed_fd(events, PollFlags::IN),
        ];
        let limit = Timespec {
            tv_sec: 0,
            tv_nsec: SLEEP,
        };
        // After a signal or an error, just poll again.
        let _ = poll(&mut ready, Some(&limit));
        let mut count = [0; 8];
        // Fails with EAGAIN if nobody wrote.
        let _ = rustix::io::read(wake, &mut count);
    }

    /// Whether UCX accesses device memory directly.
    pub(super) fn reaches_device(&self) -> bool {
        self.device.is_some()
    }

    /// Registers memory; returns its number and the key for peers.
    pub(super) fn register(&mut self, memory: DeviceSlice) -> Result<(u64, Vec<u8>)> {
        let memory_type = MemoryType::of(&memory);
        let fields = flag::MAP_ADDRESS | flag::MAP_LENGTH;
        let params = MapParams {
            field_mask: match memory_type {
                MemoryType::HOST => fields,
                _ => fields | flag::MAP_MEMORY_TYPE,
            },
            address: std::ptr::with_exposed_provenance_mut(memory.address() as usize),
            length: memory.bytes(),
            flags: 0,
            protection: 0,
            memory_type: memory_type.0,
            unused: [0; 8],
        };
        let mut handle = Memory(std::ptr::null_mut());
        // SAFETY: the context is live, the parameters have UCX's layout, and the slice is memory of this
        // process that is held until it is unmapped.
        let mapped = unsafe { (self.ucp.ucp_mem_map)(self.context, &params, &mut handle) };
        self.ucp.check(mapped, "register memory")?;
        let number = self.number();
        let mapped = MappedRegion {
            ucp: self.ucp,
            context: self.context,
            handle,
            memory,
        };
        self.memories.insert(number, Rc::new(mapped));
        let packed = self.pack(handle);
        if packed.is_err() {
            self.unregister(number);
        }
        Ok((number, packed?))
    }

    fn pack(&self, memory: Memory) -> Result<Vec<u8>> {
        let (mut buffer, mut length) = (std::ptr::null_mut::<c_void>(), 0);
        // SAFETY: the memory is registered, and both are output parameters.
        let packed =
            unsafe { (self.ucp.ucp_rkey_pack)(self.context, memory, &mut buffer, &mut length) };
        self.ucp.check(packed, "make a key for peers")?;
        // SAFETY: UCX gave this length with the pointer, and the bytes live until they are released just below.
        let bytes = unsafe { std::slice::from_raw_parts(buffer.cast::<u8>(), length) }.to_vec();
        // SAFETY: the buffer is UCX's, given once.
        unsafe { (self.ucp.ucp_rkey_buffer_release)(buffer) };
        Ok(bytes)
    }

    /// Undoes [`register`](Self::register) once operations that use the memory are done.
    pub(super) fn unregister(&mut self, number: u64) {
        self.memories.remove(&number);
    }

    /// The registration that covers an operation's device memory.
    fn mapped(&self, operation: &Operation) -> Option<Rc<MappedRegion>> {
        let (Operation::Put { source: memory, .. } | Operation::Get { target: memory, .. }) =
            operation
        else {
            return None;
        };
        if MemoryType::of(memory) == MemoryType::HOST {
            return None;
        }
        let mut mapped = self.memories.values();
        mapped
            .find(|mapped| mapped.memory.contains(memory))
            .cloned()
    }

    /// Connects to a peer; returns the connection's number.
    pub(super) fn connect(&mut self, rank: Rank, address: &[u8]) -> Result<u64> {
        let peer = Peer::connect(self.ucp, self.worker, rank, address, self.patience)?;
        let number = self.number();
        self.peers.insert(number, peer);
        Ok(number)
    }

    /// Opens a key of the peer's; returns its number.
    pub(super) fn open_key(&mut self, peer: u64, address: u64, packed: &[u8]) -> Result<u64> {
        let number = self.number();
        let peer = self.peers.get_mut(&peer).ok_or_else(super::ended)?;
        peer.open_key(number, address, packed)?;
        Ok(number)
    }

    /// Queues an operation on a connection.
    pub(super) fn enqueue(&mut self, peer: u64, operation: Operation) {
        let mapped = self.mapped(&operation);
        match (self.peers.get_mut(&peer), operation) {
            (Some(peer), operation) => peer.enqueue(operation, mapped),
            (None, Operation::Flush(reply)) => {
                let _ = reply.send(Err(super::ended()));
            }
            (None, Operation::Call(call)) => call(Err(super::ended())),
            (None, _) => {}
        }
    }

    /// Calls `handler` when a connection fails.
    pub(super) fn when_failed(&mut self, peer: u64, handler: OnFailure) {
        match self.peers.get_mut(&peer) {
            Some(peer) => peer.when_failed(handler),
            None => handler(&super::ended()),
        }
    }

    /// Closes a connection, and replies when done.
    pub(super) fn disconnect(&mut self, peer: u64, force: bool, reply: Reply<()>) {
        match self.peers.get_mut(&peer) {
            Some(peer) => peer.close(force, Some(reply)),
            None => {
                let _ = reply.send(Ok(()));
            }
        }
    }

    /// Closes all connections by the deadline, and then ends the thread.
    pub(super) fn close(&mut self, deadline: Deadline, reply: Reply<()>) {
        for peer in self.peers.values_mut() {
            peer.close(false, None);
        }
        self.closing = Some((deadline, reply));
    }

    /// Whether closing is complete or has timed out.
    fn is_closed(&mut self) -> bool {
        let Some((deadline, _)) = &self.closing else {
            return false;
        };
        let done = if self.peers.is_empty() {
            Ok(())
        } else if deadline.passed() {
            let rank = self.peers.values().map(Peer::rank).next();
            let error = deadline.expired("the end of a connection");
            Err(rank.map_or(error.clone(), |rank| error.with_peer(rank)))
        } else {
            return false;
        };
        if let Some((_, reply)) = self.closing.take() {
            let _ = reply.send(done);
        }
        true
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // Force-close remaining connections, which waits for no peer but may take several rounds.
        for peer in self.peers.values_mut() {
            peer.close(true, None);
        }
        let deadline = Deadline::after(CLOSE_TIMEOUT);
        while !self.peers.is_empty() && !deadline.passed() {
            if !self.progress() {
                std::thread::sleep(Duration::from_micros(100));
            }
        }
        if !self.peers.is_empty() {
            // UCX aborts the process if a worker with operations in flight is destroyed, and may still access
            // their memory. So leak it.
            let ranks: Vec<Rank> = self.peers.values().map(Peer::rank).collect();
            tracing::warn!(
                ?ranks,
                "UCX did not abort operations in flight, and is leaked"
            );
            self.peers.drain().for_each(|(_, peer)| peer.leave());
            std::mem::forget(std::mem::take(&mut self.memories));
            return;
        }
        // SAFETY: the worker lives, has no endpoint any more, and its event descriptor is not used any more.
        unsafe { (self.ucp.ucp_worker_destroy)(self.worker) };
        self.memories.clear();
        // SAFETY: the context is live, and its worker and memory are gone.
        unsafe { (self.ucp.ucp_cleanup)(self.context) };
    }
}

/// Creates the UCX context from the options, with support for device memory if requested.
pub(super) fn start(
    ucp: &'static Ucp,
    options: &NetworkOptions,
    for_device: bool,
) -> Result<Context> {
    let mut config = Config(std::ptr::null_mut());
    // SAFETY: null means no prefix and no file, and `config` is an output parameter for one handle.
    let read = unsafe { (ucp.ucp_config_read)(std::ptr::null(), std::ptr::null(), &mut config) };
    ucp.check(read, "read UCX's settings")?;
    let configured = configure(ucp, config, options).and_then(|()| {
        if for_device {
            device_memory::configure(ucp, config)?;
        }
        Ok(())
    });
    let made = configured.and_then(|()| {
        let params = ContextParams {
            field_mask: flag::PARAM_FEATURES,
            features: flag::FEATURE_RMA | flag::FEATURE_WAKEUP,
            unused: [0; 14],
        };
        let mut context = Context(std::ptr::null_mut());
        // SAFETY: the parameters have the layout of the version that is named, the settings live, and
        // `context` is an output parameter for one handle.
        let made = unsafe {
            (ucp.ucp_init_version)(INTERFACE.0, INTERFACE.1, &params, config, &mut context)
        };
        ucp.check(made, "start UCX").map(|()| context)
    });
    // SAFETY: the settings were read above, and UCX has copied what it needs.
    unsafe { (ucp.ucp_config_release)(config) };
    made
}

fn configure(ucp: &Ucp, config: Config, options: &NetworkOptions) -> Result<()> {
    let settings = [
        ("KEEPALIVE_INTERVAL", Some(KEEPALIVE)),
        ("NET_DEVICES", options.devices.as_deref()),
    ];
    for (name, value) in settings {
        if let Some(value) = value {
            set(ucp, config, name, value)?;
        }
    }
    Ok(())
}

/// Changes a UCX setting before it starts.
pub(super) fn set(ucp: &Ucp, config: Config, name: &str, value: &str) -> Result<()> {
    let text = |text: &str| {
        CString::new(text).map_err(|_| Error::invalid(format!("{text:?} contains a zero byte")))
    };
    let (name, value) = (text(name)?, text(value)?);
    // SAFETY: the settings live, and both texts end with a zero.
    let set = unsafe { (ucp.ucp_config_modify)(config, name.as_ptr(), value.as_ptr()) };
    ucp.check(set, "change UCX's settings")
}
