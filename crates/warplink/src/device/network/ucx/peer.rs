//! Connection to one peer: its queue, and operations in flight.

use super::ffi::{
    Context, Endpoint, EndpointParams, ErrorHandler, Memory, MemoryType, RemoteKey, RequestParams,
    RequestPointer, Status, Ucp, Worker, flag, immediate, status,
};
use super::{OnDone, OnFailure, Reply, UNREACHABLE_HELP};
use crate::device::DeviceSlice;
use crate::error::{Error, ErrorKind, Rank, Result};
use std::collections::{HashMap, VecDeque};
use std::ffi::c_void;
use std::rc::Rc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::{Duration, Instant};

/// Maximum operations in flight, which bounds UCX's memory.
const MAX_OUTSTANDING: usize = 1024;

/// A queued operation. Operations of a connection execute in order.
pub(super) enum Operation {
    /// Write memory.
    Put {
        source: DeviceSlice,
        key: u64,
        offset: u64,
    },
    /// Read memory.
    Get {
        target: DeviceSlice,
        key: u64,
        offset: u64,
    },
    /// Write a word after everything before it.
    Signal { value: u64, key: u64, offset: u64 },
    /// Run a callback after everything before it.
    Call(OnDone),
    /// Reply once everything before it has reached the peer's memory.
    Flush(Reply<()>),
    /// Close a key.
    Forget(u64),
}

/// Registered memory, unregistered when the last use is gone.
pub(super) struct MappedRegion {
    pub(super) ucp: &'static Ucp,
    pub(super) context: Context,
    pub(super) handle: Memory,
    pub(super) memory: DeviceSlice,
}

impl Drop for MappedRegion {
    fn drop(&mut self) {
        // SAFETY: it was mapped with this context, which lives, and is unmapped once; no operation uses it any more.
        let undone = unsafe { (self.ucp.ucp_mem_unmap)(self.context, self.handle) };
        if let Err(error) = self.ucp.check(undone, "unregister memory") {
            tracing::warn!(%error, "memory stays registered with the network");
        }
    }
}

/// Resources that UCX uses until an operation completes.
#[expect(dead_code, reason = "held, not read")]
enum RemoteSource {
    Memory(DeviceSlice, Option<Rc<MappedRegion>>),
    Word(Box<u64>),
}

/// Action after a flush.
enum Then {
    Signal { value: u64, key: u64, offset: u64 },
    Reply(Reply<()>),
    Call(OnDone),
}

/// An opened key of the peer.
struct OpenKey {
    key: RemoteKey,
    address: u64,
}

/// State of a connection.
pub(super) struct Peer {
    ucp: &'static Ucp,
    rank: Rank,
    /// None once closing has begun.
    endpoint: Option<Endpoint>,
    /// Set by UCX's error callback. Boxed, so that its address stays fixed.
    broken: Box<AtomicI32>,
    failed: Option<Error>,
    on_failure: Option<OnFailure>,
    /// Maximum time in flight without progress.
    patience: Duration,
    /// Start of the period without progress.
    stuck: Option<Instant>,
    /// Queued operations, with the registration of their device memory.
    queue: VecDeque<(Operation, Option<Rc<MappedRegion>>)>,
    outstanding: VecDeque<(RequestPointer, Option<RemoteSource>)>,
    flushing: Option<(RequestPointer, Then)>,
    keys: HashMap<u64, OpenKey>,
    closing: Option<RequestPointer>,
    /// Whether no handle is left. A failed connection is kept until then, to report its error.
    released: bool,
    closed: Vec<Reply<()>>,
}

impl Peer {
    /// Connects to the worker at `address`.
    pub(super) fn connect(
        ucp: &'static Ucp,
        worker: Worker,
        rank: Rank,
        address: &[u8],
        patience: Duration,
    ) -> Result<Self> {
        let broken = Box::new(AtomicI32::new(status::OK));
        let params = EndpointParams {
            field_mask: flag::EP_REMOTE_ADDRESS | flag::EP_ERROR_MODE | flag::EP_ERROR_HANDLER,
            address: address.as_ptr().cast(),
            error_mode: flag::ERROR_MODE_PEER,
            error_handler: ErrorHandler {
                callback: on_error,
                argument: std::ptr::from_ref(&*broken).cast_mut().cast(),
            },
            unused: [0; 14],
        };
        let mut endpoint = Endpoint(std::ptr::null_mut());
        // SAFETY: the worker lives, the parameters have UCX's layout, the address is one that UCX made
        // and nothing altered since, and what the handler writes to lives as long as the endpoint.
        let made = unsafe { (ucp.ucp_ep_create)(worker, &params, &mut endpoint) };
        ucp.check(made, "connect")?;
        // From 1.14 on, UCX returns a null endpoint without an error if no network device reaches the peer.
        if endpoint.0.is_null() {
            ucp.check(status::UNREACHABLE, "connect")?;
        }
        Ok(Self {
            ucp,
            rank,
            endpoint: Some(endpoint),
            broken,
            failed: None,
            on_failure: None,
            patience,
            stuck: None,
            queue: VecDeque::new(),
            outstanding: VecDeque::new(),
            flushing: None,
            keys: HashMap::new(),
            closing: None,
            released: false,
            closed: Vec::new(),
        })
    }

    /// Rank of the peer.
    pub(super) fn rank(&self) -> Rank {
        self.rank
    }

    /// Opens a key of the peer's as `number`.
    pub(super) fn open_key(&mut self, number: u64, address: u64, packed: &[u8]) -> Result<()> {
        let endpoint = self.live()?;
        let mut key = RemoteKey(std::ptr::null_mut());
        // SAFETY: the endpoint is live, the key is one that UCX made and nothing altered since, and `key`
        // is an output parameter for one handle.
        let opened =
            unsafe { (self.ucp.ucp_ep_rkey_unpack)(endpoint, packed.as_ptr().cast(), &mut key) };
        self.ucp.check(opened, "open a peer's memory")?;
        self.keys.insert(number, OpenKey { key, address });
        Ok(())
    }

    /// Queues an operation.
    pub(super) fn enqueue(&mut self, operation: Operation, mapped: Option<Rc<MappedRegion>>) {
        self.queue.push_back((operation, mapped));
        self.start_queued();
    }

    /// Calls `handler` when the connection fails, or now if it has.
    pub(super) fn when_failed(&mut self, handler: OnFailure) {
        match &self.failed {
            Some(error) => handler(error),
            None => self.on_failure = Some(handler),
        }
    }

    /// Starts closing the connection, and replies when done. A forced close aborts operations in flight.
    pub(super) fn close(&mut self, force: bool, reply: Option<Reply<()>>) {
        self.closed.extend(reply);
        self.released = true;
        self.end(force);
    }

    fn end(&mut self, force: bool) {
        let Some(endpoint) = self.endpoint.take() else {
            return;
        };
        let params = RequestParams {
            attributes: flag::OPERATION_FLAGS,
            flags: if force { flag::CLOSE_FORCE } else { 0 },
            ..RequestParams::default()
        };
        // SAFETY: the endpoint is live, and is taken out to be closed once.
        let request = unsafe { (self.ucp.ucp_ep_close_nbx)(endpoint, &params) };
        self.closing = match immediate(request) {
            None => Some(request),
            Some(_) => None,
        };
    }

    /// Answers all waiters, and leaks resources that UCX may still use.
    pub(super) fn leave(mut self) {
        self.answer();
        std::mem::forget(self);
    }

    /// Fails all pending operations, and answers those that wait for the close.
    fn answer(&mut self) {
        let closed = Error::closed("the connection is closed");
        let closed = closed.with_peer(self.rank);
        let queued = self
            .queue
            .drain(..)
            .filter_map(|(operation, _)| match operation {
                Operation::Flush(reply) => Some(Then::Reply(reply)),
                Operation::Call(call) => Some(Then::Call(call)),
                _ => None,
            });
        for then in self
            .flushing
            .take()
            .map(|(_, then)| then)
            .into_iter()
            .chain(queued)
        {
            match then {
                // The receiver is gone if the caller's deadline has passed.
                Then::Reply(reply) => drop(reply.send(Err(closed.clone()))),
                Then::Call(call) => call(Err(closed.clone())),
                Then::Signal { .. } => {}
            }
        }
        for reply in self.closed.drain(..) {
            let _ = reply.send(Ok(()));
        }
    }

    /// Whether the connection is closed and all of its resources are released.
    pub(super) fn is_gone(&self) -> bool {
        self.released
            && self.endpoint.is_none()
            && self.closing.is_none()
            && self.outstanding.is_empty()
            && self.flushing.is_none()
    }

    /// Checks operations in flight and starts queued ones; returns whether anything happened.
    pub(super) fn advance(&mut self) -> bool {
        let mut worked = false;
        // Relaxed: `on_error` runs on this same thread, inside UCX's progress call.
        let broken = self.broken.load(Ordering::Relaxed);
        if broken != status::OK && self.failed.is_none() {
            self.fail(broken);
            worked = true;
        }
        while let Some(&(request, _)) = self.outstanding.front() {
            let Some(ended) = self.ended(request) else {
                break;
            };
            self.outstanding.pop_front();
            worked = true;
            if ended < status::OK {
                self.fail(ended);
            }
        }
        if let Some(&(request, _)) = self.flushing.as_ref()
            && let Some(ended) = self.ended(request)
            && let Some((_, then)) = self.flushing.take()
        {
            worked = true;
            self.flushed(ended, then);
        }
        if let Some(request) = self.closing
            && self.ended(request).is_some()
        {
            self.closing = None;
            worked = true;
        }
        worked |= self.start_queued();
        self.watch(worked);
        worked
    }

    /// Fails the connection if operations make no progress for too long.
    fn watch(&mut self, worked: bool) {
        let waits = !self.outstanding.is_empty() || self.flushing.is_some();
        if worked || !waits || self.failed.is_some() {
            self.stuck = None;
        } else if self.stuck.get_or_insert_with(Instant::now).elapsed() > self.patience {
            self.fail(status::TIMED_OUT);
        }
    }

    /// Starts queued operations, up to the limit in flight.
    fn start_queued(&mut self) -> bool {
        let mut worked = false;
        while self.flushing.is_none() && self.outstanding.len() < MAX_OUTSTANDING {
            // UCX uses a key until its operations are done.
            if matches!(self.queue.front(), Some((Operation::Forget(_), _)))
                && !self.outstanding.is_empty()
            {
                break;
            }
            let Some((operation, mapped)) = self.queue.pop_front() else {
                break;
            };
            worked = true;
            self.start(operation, mapped);
        }
        worked
    }

    /// Starts one operation. On a failed connection only flushes report the error.
    fn start(&mut self, operation: Operation, mapped: Option<Rc<MappedRegion>>) {
        let live = self.live();
        match operation {
            Operation::Forget(number) => self.forget(number),
            Operation::Flush(reply) => match live {
                Ok(endpoint) => self.flush(endpoint, Then::Reply(reply)),
                // The receiver is gone if the caller's deadline has passed.
                Err(error) => drop(reply.send(Err(error))),
            },
            Operation::Call(call) => match live {
                Ok(endpoint) => self.flush(endpoint, Then::Call(call)),
                Err(error) => call(Err(error)),
            },
            Operation::Signal { value, key, offset } => {
                if let Ok(endpoint) = live {
                    self.flush(endpoint, Then::Signal { value, key, offset });
                }
            }
            Operation::Put {
                source,
                key,
                offset,
            } => {
                if let Some(params) = self.params(&source, mapped.as_deref()) {
                    let (address, bytes) = (source.address() as usize, source.bytes());
                    let start = std::ptr::with_exposed_provenance(address);
                    let source = RemoteSource::Memory(source, mapped);
                    self.write((start, bytes), key, offset, (&params, source));
                }
            }
            Operation::Get {
                target,
                key,
                offset,
            } => {
                if let Some(params) = self.params(&target, mapped.as_deref()) {
                    self.read(target, key, offset, (&params, mapped));
                }
            }
        }
    }

    /// Parameters for accessing local memory. `None` for device memory that is not registered, which fails
    /// the connection.
    fn params(
        &mut self,
        memory: &DeviceSlice,
        mapped: Option<&MappedRegion>,
    ) -> Option<RequestParams> {
        if mapped.is_none() && MemoryType::of(memory) != MemoryType::HOST {
            let text = format!(
                "{memory:?} is not registered with the network, which reaches it by that alone"
            );
            self.fail_with(
                Error::invalid(text)
                    .with_peer(self.rank)
                    .with_help("register device memory, and keep the registration until operations on it are flushed"),
            );
            return None;
        }
        Some(RequestParams::on(mapped.map(|mapped| mapped.handle)))
    }

    /// Writes to the peer; `source` is held until the operation is done.
    fn write(
        &mut self,
        (start, bytes): (*const c_void, usize),
        key: u64,
        offset: u64,
        (params, source): (&RequestParams, RemoteSource),
    ) {
        // A key is known from its opening until it is closed, which is queued after its uses.
        let (Some(endpoint), Some(open)) = (self.endpoint, self.keys.get(&key)) else {
            return;
        };
        let target = open.address.wrapping_add(offset);
        // SAFETY: the endpoint and the key live, the range was checked against the peer's memory, and
        // the source is memory of this process that is held until the request is done.
        let request =
            unsafe { (self.ucp.ucp_put_nbx)(endpoint, start, bytes, target, open.key, params) };
        self.started(request, source);
    }

    /// Reads from the peer; `target` is held until the operation is done.
    fn read(
        &mut self,
        target: DeviceSlice,
        key: u64,
        offset: u64,
        (params, mapped): (&RequestParams, Option<Rc<MappedRegion>>),
    ) {
        let (Some(endpoint), Some(open)) = (self.endpoint, self.keys.get(&key)) else {
            return;
        };
        let start = std::ptr::with_exposed_provenance_mut(target.address() as usize);
        let (bytes, source) = (target.bytes(), open.address.wrapping_add(offset));
        // SAFETY: as for a write; the target is memory of this process that is held until the request is
        // done.
        let request =
            unsafe { (self.ucp.ucp_get_nbx)(endpoint, start, bytes, source, open.key, params) };
        self.started(request, RemoteSource::Memory(target, mapped));
    }

    /// Records a started request, with the resources that UCX uses until it is done.
    fn started(&mut self, request: RequestPointer, used: RemoteSource) {
        match immediate(request) {
            None => self.outstanding.push_back((request, Some(used))),
            Some(status::OK) => {}
            Some(failed) => self.fail(failed),
        }
    }

    fn flush(&mut self, endpoint: Endpoint, then: Then) {
        let params = RequestParams::default();
        // SAFETY: the endpoint lives.
        let request = unsafe { (self.ucp.ucp_ep_flush_nbx)(endpoint, &params) };
        match immediate(request) {
            None => self.flushing = Some((request, then)),
            Some(ended) => self.flushed(ended, then),
        }
    }

    /// Completes the action after a flush with its status.
    fn flushed(&mut self, ended: Status, then: Then) {
        if ended < status::OK {
            self.fail(ended);
        }
        match (then, &self.failed) {
            (Then::Reply(reply), failed) => {
                let _ = reply.send(failed.clone().map_or(Ok(()), Err));
            }
            (Then::Call(call), failed) => call(failed.clone().map_or(Ok(()), Err)),
            (Then::Signal { value, key, offset }, None) => {
                let word = Box::new(value);
                let start = std::ptr::from_ref(&*word).cast();
                let (params, word) = (RequestParams::default(), RemoteSource::Word(word));
                self.write((start, size_of::<u64>()), key, offset, (&params, word));
            }
            (Then::Signal { .. }, Some(_)) => {}
        }
    }

    /// Marks the connection as broken.
    fn fail(&mut self, why: Status) {
        let text = self.ucp.text(why);
        self.fail_with(
            Error::new(
                ErrorKind::PeerLost,
                format!("the connection over the network broke: {text}"),
            )
            .with_peer(self.rank)
            .with_code(why.into())
            .with_help(UNREACHABLE_HELP),
        );
    }

    /// Fails the connection, if it has not failed yet. A forced close aborts operations in flight.
    fn fail_with(&mut self, error: Error) {
        if self.failed.is_some() {
            return;
        }
        if let Some(handler) = self.on_failure.take() {
            handler(&error);
        }
        self.failed = Some(error);
        self.end(true);
        if let Some((request, then)) = self.flushing.take() {
            self.outstanding.push_back((request, None));
            self.flushed(status::OK, then);
        }
    }

    /// The endpoint, while the connection is usable.
    fn live(&self) -> Result<Endpoint> {
        match (&self.failed, self.endpoint) {
            (Some(error), _) => Err(error.clone()),
            (None, Some(endpoint)) => Ok(endpoint),
            (None, None) => Err(Error::closed("the connection is closed").with_peer(self.rank)),
        }
    }

    /// Status of a completed request, which is freed and must not be used again.
    fn ended(&self, request: RequestPointer) -> Option<Status> {
        // SAFETY: the request is one of UCX's that has not been freed.
        let ended = unsafe { (self.ucp.ucp_request_check_status)(request) };
        if ended == status::IN_PROGRESS {
            return None;
        }
        // SAFETY: as above; it is done, and the caller forgets it.
        unsafe { (self.ucp.ucp_request_free)(request) };
        Some(ended)
    }

    fn forget(&mut self, number: u64) {
        if let Some(open) = self.keys.remove(&number) {
            // SAFETY: the key was opened here, no write uses it any more, and it is taken out to be
            // destroyed once.
            unsafe { (self.ucp.ucp_rkey_destroy)(open.key) };
        }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let keys: Vec<u64> = self.keys.keys().copied().collect();
        for number in keys {
            self.forget(number);
        }
        self.answer();
    }
}

/// UCX error callback, on the network's thread.
unsafe extern "C" fn on_error(argument: *mut c_void, _endpoint: Endpoint, why: Status) {
    // SAFETY: the argument is the number that the peer of this endpoint holds as long as it.
    let broken = unsafe { &*argument.cast::<AtomicI32>() };
    // Relaxed: read on this same thread.
    broken.store(why, Ordering::Relaxed);
}
