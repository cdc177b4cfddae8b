//! Fake network connection for tests.

use crate::deadline::Deadline;
use crate::debug::debug_fields;
use crate::device::DeviceSlice;
use crate::device::network::{NetworkConnection, OnDone, OnFailure, RemoteMemory};
use crate::error::{Error, ErrorKind, Result};
use crate::sync::lock;
use std::sync::Mutex;

/// A connection whose peer the test plays: nothing is sent, and it breaks on request.
#[derive(Default)]
pub(super) struct NoPeer {
    handlers: Mutex<Vec<OnFailure>>,
    calls: Mutex<Vec<CarrierCall>>,
    /// Completion callbacks, while the test delays them.
    held: Mutex<Option<Vec<OnDone>>>,
}

/// A recorded request: local address and length, and offset and length in the peer's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CarrierCall {
    Put(u64, usize, (usize, usize)),
    Get(u64, usize, (usize, usize)),
    Signal(usize, u64),
}

impl NoPeer {
    pub(super) fn break_it(&self) {
        let error = Error::new(ErrorKind::PeerLost, "broken").with_peer(1);
        for handler in lock(&self.handlers).drain(..) {
            handler(&error);
        }
    }

    /// Delays completions until [`resume`](Self::resume).
    pub(super) fn hold(&self) {
        *lock(&self.held) = Some(Vec::new());
    }

    pub(super) fn resume(&self) {
        for then in lock(&self.held).take().into_iter().flatten() {
            then(Ok(()));
        }
    }

    /// Requests since the last call.
    pub(super) fn calls(&self) -> Vec<CarrierCall> {
        std::mem::take(&mut lock(&self.calls))
    }

    fn note(&self, call: CarrierCall) -> Result<()> {
        lock(&self.calls).push(call);
        Ok(())
    }
}

debug_fields!(NoPeer);

impl NetworkConnection for NoPeer {
    /// Keys encode a length.
    fn open(&self, key: &[u8]) -> Result<RemoteMemory> {
        let bytes = key.try_into().map(u64::from_le_bytes);
        let bytes = bytes.map_err(|_| Error::invalid("nobody is there"))?;
        Ok(RemoteMemory::of_nobody(bytes as usize))
    }

    fn put(&self, source: &DeviceSlice, target: &RemoteMemory, offset: usize) -> Result<()> {
        let remote = (target.bytes(), offset);
        self.note(CarrierCall::Put(source.address(), source.bytes(), remote))
    }

    fn get(&self, target: &DeviceSlice, source: &RemoteMemory, offset: usize) -> Result<()> {
        let remote = (source.bytes(), offset);
        self.note(CarrierCall::Get(target.address(), target.bytes(), remote))
    }

    fn when_done(&self, then: OnDone) -> Result<()> {
        match &mut *lock(&self.held) {
            Some(held) => held.push(then),
            None => then(Ok(())),
        }
        Ok(())
    }

    fn when_failed(&self, handler: OnFailure) -> Result<()> {
        lock(&self.handlers).push(handler);
        Ok(())
    }

    fn signal(&self, target: &RemoteMemory, _: usize, value: u64) -> Result<()> {
        self.note(CarrierCall::Signal(target.bytes(), value))
    }

    fn flush(&self, _: Deadline) -> Result<()> {
        Ok(())
    }

    fn close(&self, _: Deadline) -> Result<()> {
        Ok(())
    }
}
