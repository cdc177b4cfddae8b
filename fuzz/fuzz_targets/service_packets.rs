//! Packets as a memory service and those who ask it receive them, and what the service does for them.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| warplink::memory::fuzzing::service_packets(bytes));
