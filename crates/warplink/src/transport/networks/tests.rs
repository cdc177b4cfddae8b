//! What a link does when its connection breaks.

use super::*;
use crate::device::AllocationKind;
use crate::device::DeviceSlice;
use crate::device::{DeviceConfig, DeviceKind};
use crate::error::ErrorKind;
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
        peers_memory: None,
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

/// A network that reaches the memory of the host alone, but `device_memory`, if that is its key.
#[derive(Debug)]
struct Reaching {
    device_memory: Option<Vec<u8>>,
}

impl Network for Reaching {
    fn name(&self) -> String {
        "Reaching".to_owned()
    }

    fn address(&self) -> &[u8] {
        &[]
    }

    fn reaches(&self, _: &DeviceSlice) -> bool {
        false
    }

    fn register(&self, memory: &DeviceSlice) -> Result<NetworkRegion> {
        let key = (memory.bytes() as u64).to_le_bytes();
        Ok(NetworkRegion::of_nobody(&key))
    }

    fn register_device_memory(&self, _: &DeviceSlice) -> Result<NetworkRegion> {
        let key = self.device_memory.as_ref();
        let key = key.ok_or_else(|| Error::new(ErrorKind::Driver, "it cannot be mapped"))?;
        Ok(NetworkRegion::of_nobody(key))
    }

    fn connect(&self, _: Rank, _: &[u8]) -> Result<Arc<dyn NetworkConnection>> {
        Ok(Arc::<NoPeer>::default())
    }

    fn close(&self, _: Deadline) -> Result<()> {
        Ok(())
    }
}

/// Data goes past the staging memory where both ends' libraries reach the memory, and else through it.
#[test]
fn the_path_is_what_both_ends_can() {
    const BYTES: u64 = 64;
    let bytes = || BYTES.to_le_bytes().to_vec();
    let altered = || vec![1; 3];
    for (own, peers, is_direct) in [
        (Some(bytes()), bytes(), true),
        // It is not supported, or mapping fails.
        (None, bytes(), false),
        (Some(bytes()), Vec::new(), false),
        (None, Vec::new(), false),
        // Opening fails.
        (Some(bytes()), altered(), false),
    ] {
        let device = crate::device::open(&DeviceConfig::new(DeviceKind::Host, 0)).unwrap();
        let networks = Networks::new(&device, NetworkOptions::default(), StagingConfig::default());
        let network = Arc::new(Reaching { device_memory: own });
        let shape = Shape::new(&StagingConfig::default()).unwrap();
        let staged = Arc::new(Incoming::allocate(&device, shape).unwrap());
        let region = device.allocate(BYTES as usize, AllocationKind::Plain);
        let memory = ExposedMemory {
            words: network.register(staged.control.slice()).unwrap(),
            regions: vec![network.register(staged.ring.slice()).unwrap()],
            reached: Vec::from_iter(reached(&*network, &region.unwrap())),
            gone: staged.control.slice().word(GONE).unwrap(),
            held: Vec::new(),
            staged: Some(staged),
            network,
            recycle: None,
        };
        let exposed = Exposed {
            networks: Arc::downgrade(&networks),
            memory: Some(memory),
        };
        let keys = exposed.keys().map(<[u8]>::to_vec);
        let keys = [&keys[0][..], &keys[1], &keys[2]];
        let link = networks.connect(1, exposed, keys, Some((shape, &peers)));
        let link = link.unwrap();
        let path = if is_direct {
            NetworkPath::Direct
        } else {
            NetworkPath::Staged
        };
        assert!(link.is_staged());
        assert_eq!(link.path(), path, "{peers:?}");
    }
}
