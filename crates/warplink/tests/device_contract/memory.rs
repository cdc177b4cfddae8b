//! Freeing while streams wait, and using freed memory again.

use super::common::{Stopwatch, await_word, open_device, write_word};
use super::{bytes_of, soon, streams};
use std::time::Duration;
use warplink::device::{AllocationKind, DeviceSlice};

/// A driver may hold a call that frees until the device is idle, and everything else with it.
#[test]
fn what_is_freed_while_a_stream_waits_holds_nobody_up() {
    let device = open_device();
    let [waiting, other] = streams(&device);
    let words = device.allocate_signals(64).unwrap();
    let word = words.word(0).unwrap();
    let allocate = || device.allocate(1 << 20, AllocationKind::Plain).unwrap();
    let (a, b) = (allocate(), allocate());
    for round in 1..=5 {
        let freed = [(); 4].map(|()| allocate());
        await_word(&waiting, &word, round);
        drop(freed);
        // Were it freed by another thread, that would be at it now.
        std::thread::sleep(Duration::from_millis(20));
        for _ in 0..100 {
            other.copy(&a, &b).unwrap();
        }
        other.synchronize(soon()).unwrap();
        assert!(!waiting.is_idle().unwrap());
        write_word(&other, &word, round);
        waiting.synchronize(soon()).unwrap();
    }
}

/// No moment without work is needed: one stream waits all the time.
#[test]
fn memory_is_freed_and_allocated_while_a_stream_waits() {
    const BYTES: usize = 64 << 20;
    let device = open_device();
    let [waiting, other] = streams(&device);
    let words = device.allocate_signals(64).unwrap();
    let word = words.word(0).unwrap();
    await_word(&waiting, &word, 1);
    let allocate = || device.allocate(BYTES, AllocationKind::Plain).unwrap();
    drop((allocate(), allocate()));
    let before = device.available_memory().unwrap();
    for round in 0..200u8 {
        let (a, b) = (allocate(), allocate());
        let [from, to] = [&a, &b].map(|slice| slice.slice(0..4096).unwrap());
        other.fill(&from, round).unwrap();
        other.copy(&to, &from).unwrap();
        other.synchronize(soon()).unwrap();
        assert_eq!(bytes_of(&*device, &to), [round; 4096]);
        let begun = Stopwatch::start();
        drop((a, b, from, to));
        assert!(begun.elapsed() < Duration::from_secs(1), "freeing waits");
    }
    if let (Some(before), Some(now)) = (before, device.available_memory().unwrap()) {
        let slack = 4 * BYTES as u64;
        assert!(now + slack >= before, "{before} bytes were free, now {now}");
    }
    assert!(!waiting.is_idle().unwrap());
    write_word(&other, &word, 1);
    waiting.synchronize(soon()).unwrap();
    device.trim(soon()).unwrap();
}

#[test]
fn memory_that_a_stream_still_uses_is_not_used_again() {
    const BYTES: usize = 4096;
    let device = open_device();
    let [waiting, other] = streams(&device);
    let words = device.allocate_signals(64).unwrap();
    let word = words.word(0).unwrap();
    let allocate = || device.allocate(BYTES, AllocationKind::Plain).unwrap();
    let (target, source) = (allocate(), allocate());
    device.upload(&source, &[7; BYTES]).unwrap();
    await_word(&waiting, &word, 1);
    waiting.copy(&target, &source).unwrap();
    drop(source);
    // Were the memory used again, the copy would find this.
    let others: Vec<DeviceSlice> = (0..4).map(|_| allocate()).collect();
    for slice in &others {
        device.upload(slice, &[9; BYTES]).unwrap();
    }
    write_word(&other, &word, 1);
    waiting.synchronize(soon()).unwrap();
    assert_eq!(bytes_of(&*device, &target), [7; BYTES]);
}
