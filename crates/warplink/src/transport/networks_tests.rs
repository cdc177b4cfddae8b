//! What a link does when its connection breaks.

use super::*;
use crate::device::{DeviceConfig, DeviceKind};
use crate::transport::no_peer::NoPeer;

fn link() -> (NetworkLink, Arc<NoPeer>) {
    let device = crate::device::open(&DeviceConfig::new(DeviceKind::Host, 0)).unwrap();
    let networks = Networks::new(&device, NetworkOptions::default(), StagingConfig::default());
    let connection = Arc::<NoPeer>::default();
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
