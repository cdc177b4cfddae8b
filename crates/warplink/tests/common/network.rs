//! Whether there is a network, for tests of it. The tests of other crates use this file, too.

// Each test binary uses a part of this.
#![allow(dead_code, unreachable_pub)]
#![allow(clippy::panic)]

use std::fmt::Display;
use warplink::ErrorKind;
use warplink::device::network::{self, NetworkOptions};

/// Whether there is one; see [`leave_out`].
pub fn has_network() -> bool {
    match network::open(&NetworkOptions::default()) {
        Ok(_) => true,
        Err(error) if error.kind() == ErrorKind::LibraryMissing => {
            leave_out(error);
            false
        }
        Err(error) => panic!("{error}"),
    }
}

/// Prints that a test is left out, and why; fails where `WARPLINK_REQUIRE_NETWORK=1` says that the network, and network
/// namespaces, are there.
pub fn leave_out(why: impl Display) {
    let required = std::env::var("WARPLINK_REQUIRE_NETWORK").is_ok_and(|value| value == "1");
    assert!(!required, "the network is required here: {why}");
    println!("left out: {why}");
}
