//! Unique ids as bytes and as text, and Slurm's lists of nodes.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| warplink::bootstrap::fuzzing::unique_id(bytes));
