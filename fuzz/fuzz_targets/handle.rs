//! Handles as bytes, behind the keyed hash as well as before it.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| warplink::memory::fuzz_decode(bytes));
