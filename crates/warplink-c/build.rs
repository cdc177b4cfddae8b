//! Names the shared library as it is installed.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // Before 1.0 every minor version may change the interface.
    let version = (
        env!("CARGO_PKG_VERSION_MAJOR"),
        env!("CARGO_PKG_VERSION_MINOR"),
    );
    println!(
        "cargo::rustc-cdylib-link-arg=-Wl,-soname,libwarplink.so.{}.{}",
        version.0, version.1
    );
    // `dlclose` must not unload it: the process's exit calls its handlers.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
