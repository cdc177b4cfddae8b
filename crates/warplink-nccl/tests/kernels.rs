//! The kernels that multiply inputs compile for every GPU, where the compiler is installed.

#![allow(clippy::panic)]

use warplink::ErrorKind;
use warplink::device::cuda;

#[test]
fn kernels_compile_for_every_architecture() {
    for architecture in cuda::ARCHITECTURES {
        match cuda::compile(
            "multiply",
            include_str!("../kernels/multiply.cu"),
            architecture,
            &[],
        ) {
            Ok(code) => assert!(!code.is_empty()),
            Err(error) if error.kind() == ErrorKind::LibraryMissing => {
                let required =
                    std::env::var("WARPLINK_REQUIRE_NVRTC").is_ok_and(|value| value == "1");
                assert!(!required, "NVRTC is required here: {error}");
                println!("skipped: {error}");
                return;
            }
            Err(error) => panic!("{architecture}: {error}"),
        }
    }
}
