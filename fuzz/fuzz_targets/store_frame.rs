//! Frames as a store or a member receives them, and the requests in them.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| warplink::bootstrap::fuzzing::store_frames(bytes));
