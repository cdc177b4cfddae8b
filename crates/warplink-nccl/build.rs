//! Names the shared library as NCCL is named, so that `dlopen("libnccl.so.2")` finds it once it is loaded.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libnccl.so.2");
    // `dlclose` must not unload it: the process's exit calls its handlers.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
