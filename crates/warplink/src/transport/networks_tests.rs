//! What a link does when its connection breaks.

use super::*;
use crate::device::network::{OnDone, OnFailure};
use crate::device::{DeviceConfig, DeviceKind, DeviceSlice};

/// A connection that breaks when the test says so.
#[derive(Default)]
struct Breaking(Mutex<Vec<OnFailure>>);

impl Breaking {
    fn break_it(&self) {
        let error = Error::new(ErrorKind::PeerLost, "broken").with_peer(1);
        for handler in lock(&self.0).drain(..) {
            handler(&error);
        }
    }
}

impl fmt::Debug for Breaking {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Breaking")
    }
}

impl NetworkConnection for Breaking {
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

fn link() -> (NetworkLink, Arc<Breaking>) {
    let device = crate::device::open(&DeviceConfig::new(DeviceKind::Host, 0)).unwrap();
    let networks = Networks::new(&device, NetworkOptions::default(), StagingConfig::default());
    let connection = Arc::<Breaking>::default();
    let link = NetworkLink {
        networks,
        peer: 1,
        connection: connection.clone(),
        words: Arc::new(RemoteMemory::of_nobody(WORDS_BYTES)),
        regions: Mutex::default(),
        exposed: Mutex::new(None),
        staged: None,
        staged_end: OnceLock::new(),
        used: Arc::default(),
    };
    (link, connection)
}

#[test]
fn a_break_is_told_before_waits_end() {
    let (link, connection) = link();
    let fault = Arc::<Fault>::default();
    let told = Arc::new(Mutex::new(None));
    let tells = told.clone();
    fault.tell_with(move |error| *lock(&tells) = error.peer());
    link.fail_when_broken(&fault).unwrap();
    connection.break_it();
    assert_eq!(*lock(&told), Some(1));
    assert!(fault.error().is_some() && !fault.is_released());
}

#[test]
fn a_break_when_peers_leave_or_of_a_link_that_is_gone_is_no_failure() {
    for is_leaving in [true, false] {
        let (link, connection) = link();
        let fault = Arc::<Fault>::default();
        link.fail_when_broken(&fault).unwrap();
        let networks = link.networks.clone();
        if is_leaving {
            networks.leave();
        } else {
            drop(link);
        }
        connection.break_it();
        assert!(fault.error().is_none());
    }
}
