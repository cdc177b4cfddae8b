use super::*;
use crate::device::{Device, DeviceConfig, DeviceIdentity, DeviceKind};

fn device() -> Arc<dyn Device> {
    crate::device::open(&DeviceConfig::new(DeviceKind::Host, 0)).unwrap()
}

fn issue(exports: &Exports, numbers: RegionNumbers, peer: Rank) {
    let fill = |allocation: &ExportedAllocation| Handle {
        owner: 0,
        kind: DeviceKind::Host,
        device: DeviceIdentity([0; 16]),
        process: [0; 16],
        allocation: allocation.identity,
        generation: numbers.generation,
        region: allocation.region,
        allocation_bytes: allocation.bytes,
        offset: 0,
        bytes: allocation.bytes,
        ipc: None,
        host: false,
        pieces: 0,
    };
    exports.issue_handle(numbers, peer, fill).unwrap();
}

#[test]
fn streams_that_are_past_an_older_stay_in_the_pool_free_nothing() {
    let device = device();
    let exports = Exports::new(1 << 20);
    let kind = AllocationKind::Plain;
    let slice = device.allocate(4096, kind).unwrap();
    let enter = || {
        let numbers = exports
            .register(&slice, Some(kind), || device.export(&slice))
            .unwrap();
        exports.unregister(numbers).pooled.unwrap().numbers
    };
    let (first, second) = (enter(), enter());
    drop(slice);
    exports.streams_are_past(first);
    assert!(exports.reuse(4096, kind).is_none(), "streams still use it");
    exports.streams_are_past(second);
    assert!(exports.reuse(4096, kind).is_some());
}

#[test]
fn memory_that_a_peer_uses_but_does_not_map_is_not_freed_yet() {
    let device = device();
    let exports = Exports::new(0);
    let kind = AllocationKind::Plain;
    let slice = device.allocate(4096, kind).unwrap();
    let numbers = exports
        .register(&slice, Some(kind), || device.export(&slice))
        .unwrap();
    for peer in [2, 1] {
        issue(&exports, numbers, peer);
    }
    exports.unregister(numbers);
    let left = || exports.wait_freed(numbers, Duration::ZERO);
    let mapping = RegionNumbers {
        region: 0,
        ..numbers
    };
    exports.released(mapping, 1, 1);
    exports.released(mapping, 2, 1);
    assert_eq!(left(), Some(vec![1, 2]));
    assert_eq!(exports.unregistered_at(), Some(vec![1, 2]));
    assert_eq!(exports.unregistered(), []);
    exports.released(numbers, 1, 1);
    assert_eq!(left(), Some(vec![2]));
    exports.released(numbers, 2, 1);
    assert_eq!((left(), exports.unregistered_at()), (None, None));
}
