//! Handles as they come over the wire.
#![no_main]

use warplink::memory::{HANDLE_BYTES, Handle, HandleKey};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let Ok(key) = HandleKey::new(b"fuzz") else {
        return;
    };
    let _ = Handle::decode(bytes, &key);
    // With a hash that fits, what lies behind its check is reached as well.
    let Some(Ok(mut wire)) = bytes
        .get(..HANDLE_BYTES)
        .map(<[u8; HANDLE_BYTES]>::try_from)
    else {
        return;
    };
    key.seal(&mut wire);
    if let Ok(handle) = Handle::decode(&wire, &key) {
        assert!(handle.offset + handle.bytes <= handle.allocation_bytes);
    }
});
