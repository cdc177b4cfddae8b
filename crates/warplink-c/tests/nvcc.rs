//! nvcc compiles what includes `warplink/device.cuh`, without a warning. Needs nvcc and a compiler for hosts, but no GPU.

#![allow(clippy::unwrap_used)]

mod installed;

use installed::{Installed, repository, run};
use std::path::PathBuf;
use std::process::Command;

/// The one that `NVCC` names, else that in the PATH or where CUDA's toolkit is installed. Fails where there is none and
/// `WARPLINK_REQUIRE_NVCC=1` says that it is there.
fn nvcc() -> Option<PathBuf> {
    let named = std::env::var_os("NVCC").map(PathBuf::from);
    let usual = ["nvcc", "/usr/local/cuda/bin/nvcc"].map(PathBuf::from);
    let mut candidates = named.into_iter().chain(usual);
    let found = candidates.find(|nvcc| {
        let version = Command::new(nvcc).arg("--version").output();
        version.is_ok_and(|output| output.status.success())
    });
    if found.is_none() {
        let required = std::env::var("WARPLINK_REQUIRE_NVCC").is_ok_and(|value| value == "1");
        assert!(!required, "nvcc is required here");
        println!("left out: there is no nvcc");
    }
    found
}

/// Every call with every group, and a program with a kernel: as an object for two architectures, and as a cubin.
#[test]
fn nvcc_compiles_every_call_without_a_warning() {
    let Some(nvcc) = nvcc() else { return };
    let installed = Installed::get();
    let sources = [
        repository().join("crates/warplink/kernels/channel.cu"),
        repository().join("crates/warplink-c/tests/programs/nvcc.cu"),
    ];
    let architectures =
        [75, 90].map(|number| format!("-gencode=arch=compute_{number},code=sm_{number}"));
    for source in sources {
        let compile = |options: &[String], output: &str| {
            let output = installed.root().join(output);
            run(Command::new(&nvcc)
                .args(["-std=c++17", "-Werror", "all-warnings"])
                .args(["-Xcompiler", "-Wall,-Wextra,-Werror", "--threads", "2"])
                .args(options)
                .arg("-I")
                .arg(installed.root().join("include"))
                .arg(&source)
                .arg("-o")
                .arg(&output));
            assert!(output.metadata().unwrap().len() > 0);
        };
        compile(&[&architectures[..], &["-c".to_owned()]].concat(), "nvcc.o");
        compile(&["-arch=sm_90", "-cubin"].map(str::to_owned), "nvcc.cubin");
    }
}
