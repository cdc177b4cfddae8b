//! The version of the library.

/// The version of this header: major.
pub const VERSION_MAJOR: u32 = 0;

/// The version of this header: minor. Before 1.0 every minor version may change the interface.
pub const VERSION_MINOR: u32 = 1;

/// The version of this header: patch.
pub const VERSION_PATCH: u32 = 0;

/// The version of the loaded library, as 10000 * major + 100 * minor + patch.
#[unsafe(no_mangle)]
pub extern "C" fn warplink_version() -> u32 {
    10000 * VERSION_MAJOR + 100 * VERSION_MINOR + VERSION_PATCH
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_header_has_the_version_of_the_package() {
        let version = format!("{VERSION_MAJOR}.{VERSION_MINOR}.{VERSION_PATCH}");
        assert_eq!(version, env!("CARGO_PKG_VERSION"));
    }
}
