//! A connection without a peer, for tests.

use crate::deadline::Deadline;
use crate::device::DeviceSlice;
use crate::device::network::{NetworkConnection, OnDone, OnFailure, RemoteMemory};
use crate::error::{Error, ErrorKind, Result};
use crate::sync::lock;
use std::fmt;
use std::sync::Mutex;

/// A connection to a peer that the test plays: nothing is sent, and it breaks when the test says so.
#[derive(Default)]
pub(super) struct NoPeer(Mutex<Vec<OnFailure>>);

impl NoPeer {
    pub(super) fn break_it(&self) {
        let error = Error::new(ErrorKind::PeerLost, "broken").with_peer(1);
        for handler in lock(&self.0).drain(..) {
            handler(&error);
        }
    }
}

impl fmt::Debug for NoPeer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("NoPeer")
    }
}

impl NetworkConnection for NoPeer {
    fn open(&self, _: &[u8]) -> Result<RemoteMemory> {
        Err(Error::invalid("nobody is there"))
    }

    fn put(&self, _: &DeviceSlice, _: &RemoteMemory, _: usize) -> Result<()> {
        Ok(())
    }

    fn get(&self, _: &DeviceSlice, _: &RemoteMemory, _: usize) -> Result<()> {
        Ok(())
    }

    fn when_done(&self, then: OnDone) -> Result<()> {
        then(Ok(()));
        Ok(())
    }

    fn when_failed(&self, handler: OnFailure) -> Result<()> {
        lock(&self.0).push(handler);
        Ok(())
    }

    fn signal(&self, _: &RemoteMemory, _: usize, _: u64) -> Result<()> {
        Ok(())
    }

    fn flush(&self, _: Deadline) -> Result<()> {
        Ok(())
    }

    fn close(&self, _: Deadline) -> Result<()> {
        Ok(())
    }
}
