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

/// What users would write: the tests' kernels, the example's and the benchmark's.
#[test]
fn kernels_that_include_the_header_compile_for_every_architecture() {
    let files = [
        ("channels/kernels.cu", include_str!("channels/kernels.cu")),
        ("ping_pong.cu", include_str!("../examples/ping_pong.cu")),
        (
            "halo_exchange.cu",
            include_str!("../examples/halo_exchange.cu"),
        ),
        (
            "bench channel",
            include_str!("../../warplink-cli/src/commands/bench/channel/kernels.cu"),
        ),
    ];
    for (name, text) in files {
        for architecture in ["sm_80", "sm_90", "sm_100"] {
            match cuda::compile(name, text, architecture) {
                Ok(code) => assert!(!code.is_empty()),
                Err(error) if error.kind() == ErrorKind::LibraryMissing => return,
                Err(error) => panic!("{error}"),
            }
        }
    }
}

#[test]
fn what_does_not_compile_is_an_error_with_the_compilers_words() {
    let text = "#include <warplink/device.cuh>\n__device__ int broken() { return missing; }";
    match cuda::compile("broken.cu", text, "sm_90") {
        Ok(_) => panic!("compiled"),
        Err(error) if error.kind() == ErrorKind::LibraryMissing => {}
        Err(error) => {
            let text = error.to_string();
            assert!(
                text.contains("broken.cu") && text.contains("missing"),
                "{text}"
            );
        }
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
