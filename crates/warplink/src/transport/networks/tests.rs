//! Failure handling of links, and selection of the data path.

use super::exposed::reached;
use super::*;
use crate::device::network::NetworkRegion;
use crate::device::{AllocationKind, DeviceConfig, DeviceKind, DeviceSlice, Fault};
use crate::error::ErrorKind;
use crate::transport::no_peer::NoPeer;

/// Bytes of a region.
const BYTES: u64 = 64;

/// A link between regions that the libraries can access if they have a key; `own` is this end's.
fn link(own: Option<Vec<u8>>, peers: &[u8]) -> (Arc<Networks>, NetworkLink, Arc<NoPeer>) {
    let device = crate::device::open(&DeviceConfig::new(DeviceKind::Host, 0)).unwrap();
    let networks = Networks::new(&device, NetworkOptions::default(), StagingConfig::default());
    let network = Arc::new(Reaching {
        device_memory: own,
        connection: Arc::default(),
    });
    let connection = network.connection.clone();
    let shape = RingShape::new(&StagingConfig::default()).unwrap();
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
    let exposed = Exposed::new(&networks, memory);
    let mut offered = exposed.offer(BYTES).unwrap();
    offered.staging = Some(StagingOffer {
        shape,
        region_bytes: BYTES,
        region: peers.to_vec(),
    });
    let link = networks.connect(1, exposed, &offered).unwrap();
    (networks, link, connection)
}

#[test]
fn break_is_reported_before_waits_end() {
    let (_networks, link, connection) = link(None, &[]);
    let fault = Arc::<Fault>::default();
    let notified = Arc::new(Mutex::new(None));
    let notifying = notified.clone();
    fault.notify_with(move |error| *lock(&notifying) = error.peer());
    link.fail_when_broken(&fault).unwrap();
    connection.break_it();
    assert_eq!(*lock(&notified), Some(1));
    assert!(fault.error().is_some() && !fault.is_released());
}

#[test]
fn a_break_when_peers_leave_or_of_a_link_that_is_gone_is_no_failure() {
    for is_leaving in [true, false] {
        let (networks, link, connection) = link(None, &[]);
        let fault = Arc::<Fault>::default();
        link.fail_when_broken(&fault).unwrap();
        if is_leaving {
            networks.leave();
        } else {
            drop(link);
        }
        connection.break_it();
        assert!(fault.error().is_none());
    }
}

/// A network that accesses only host memory, unless `device_memory` is its key.
#[derive(Debug)]
struct Reaching {
    device_memory: Option<Vec<u8>>,
    connection: Arc<NoPeer>,
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
        Ok(self.connection.clone())
    }

    fn close(&self, _: Deadline) -> Result<()> {
        Ok(())
    }
}

/// Data bypasses staging if both ends' libraries access the memory, else it is staged.
#[test]
fn path_is_supported_by_both_ends() {
    let bytes = || BYTES.to_le_bytes().to_vec();
    let altered = || vec![1; 3];
    for (own, peers, is_direct) in [
        (Some(bytes()), bytes(), true),
        // Unsupported, or mapping fails.
        (None, bytes(), false),
        (Some(bytes()), Vec::new(), false),
        (None, Vec::new(), false),
        // Opening fails.
        (Some(bytes()), altered(), false),
        // A key for less than the region.
        (Some(bytes()), (BYTES - 8).to_le_bytes().to_vec(), false),
    ] {
        let (_networks, link, _) = link(own, &peers);
        let path = if is_direct {
            NetworkPath::Direct
        } else {
            NetworkPath::Staged
        };
        assert!(link.is_staged());
        assert_eq!(link.path(), path, "{peers:?}");
    }
}
