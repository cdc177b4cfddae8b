//! Every kernel compiles for every architecture that is served. Needs NVRTC but no GPU.

use warplink::ErrorKind;
use warplink::device::cuda;

#[test]
fn every_kernel_compiles_for_every_architecture() {
    let architectures = ["sm_80", "sm_90", "sm_100"];
    match cuda::compile_all(&architectures) {
        Ok(compiled) => {
            assert!(compiled.len() >= architectures.len());
            for kernel in compiled {
                println!(
                    "{} for {}: {} bytes",
                    kernel.name, kernel.architecture, kernel.bytes
                );
                assert!(kernel.bytes > 0);
            }
        }
        Err(error) if error.kind() == ErrorKind::LibraryMissing => {
            let required = std::env::var("WARPLINK_REQUIRE_NVRTC").is_ok_and(|value| value == "1");
            assert!(!required, "NVRTC is required here: {error}");
            println!("skipped: {error}");
        }
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn an_architecture_that_does_not_exist_is_an_error() {
    match cuda::compile_all(&["sm_1"]) {
        Ok(compiled) => panic!("compiled for sm_1: {compiled:?}"),
        Err(error) => assert!(
            matches!(error.kind(), ErrorKind::Driver | ErrorKind::LibraryMissing),
            "{error}"
        ),
    }
}
