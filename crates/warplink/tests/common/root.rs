//! The folder with the files that tests read.

// Each test binary uses a part of this.
#![allow(dead_code, unreachable_pub)]

use std::path::PathBuf;

/// The crate's folder: `WARPLINK_TEST_ROOT` where a test was carried to another machine, else the one it was built in.
pub fn root() -> PathBuf {
    let carried = std::env::var_os("WARPLINK_TEST_ROOT");
    carried.map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from)
}
