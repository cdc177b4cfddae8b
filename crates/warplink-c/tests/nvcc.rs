//! nvcc compiles what includes `warplink/device.cuh`, without a warning, and what it makes is taken as machine code. Needs nvcc
//! and a compiler for hosts, but no GPU.

#![allow(clippy::unwrap_used)]

mod installed;

use installed::{Installed, repository, run};
use std::ffi::{CStr, c_void};
use std::mem::{MaybeUninit, zeroed};
use std::path::PathBuf;
use std::process::Command;
use std::ptr::null;
use warplink::ErrorKind;
use warplink_c::handles::{Comm, Module};
use warplink_c::job::*;
use warplink_c::kernel::*;
use warplink_c::status::*;

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
        "crates/warplink/kernels/channel.cu",
        "crates/warplink-c/tests/programs/nvcc.cu",
        "crates/warplink-c/tests/programs/images.cu",
        "crates/warplink-c/tests/programs/exchange.cu",
    ];
    let sources = sources.map(|source| repository().join(source));
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

/// A rank of its own on the host device.
fn join() -> Comm {
    let mut options = warplink_options_default();
    options.device = c"host".as_ptr();
    let (mut id, mut comm) = (MaybeUninit::uninit(), MaybeUninit::uninit());
    // SAFETY: places for what is written, which is read only where it was.
    unsafe {
        let status = warplink_unique_id_create(null(), 0, id.as_mut_ptr());
        assert_eq!(status, Status::SUCCESS);
        let status = warplink_init_from_id(comm.as_mut_ptr(), 1, id.as_ptr(), 0, &options);
        assert_eq!(status, Status::SUCCESS);
        comm.assume_init()
    }
}

unsafe extern "C-unwind" fn nothing(_user: *mut c_void) -> i32 {
    0
}

/// Loads an image, and a body for the host device, which takes that.
fn load(comm: Comm, image: &[u8]) -> Result<(), (Status, String)> {
    let kernel = HostKernel {
        name: c"exchange".as_ptr(),
        body: Some(nothing),
        user: std::ptr::null_mut(),
    };
    // SAFETY: zero is none for all of its members.
    let mut source: ModuleSource = unsafe { zeroed() };
    (source.image, source.image_bytes) = (image.as_ptr().cast(), image.len());
    (source.host_kernels, source.host_kernel_count) = (&kernel, 1);
    let mut module = MaybeUninit::<Module>::uninit();
    // SAFETY: a whole source, and a place for a module, which is read only where it was written.
    match unsafe { warplink_module_load(comm, &source, module.as_mut_ptr()) } {
        Status::SUCCESS => {
            // SAFETY: as above.
            let status = warplink_module_free(unsafe { module.assume_init() });
            assert_eq!(status, Status::SUCCESS);
            Ok(())
        }
        status => {
            // SAFETY: the text ends with a zero and is valid until the thread's next failure.
            let text = unsafe { CStr::from_ptr(warplink_last_error()) };
            Err((status, text.to_str().unwrap().to_owned()))
        }
    }
}

#[test]
fn what_nvcc_makes_is_taken_as_an_image_and_a_part_of_it_is_refused() {
    let Some(nvcc) = nvcc() else { return };
    let installed = Installed::get();
    let comm = join();
    for (option, architecture) in [
        ("-cubin", "sm_75"),
        ("-cubin", "sm_90"),
        ("-fatbin", "sm_90"),
        ("-ptx", "compute_75"),
    ] {
        let output = installed.root().join("exchange.image");
        run(Command::new(&nvcc)
            .args(["-std=c++17", option, "-arch", architecture, "-I"])
            .arg(installed.root().join("include"))
            .arg(repository().join("crates/warplink-c/tests/programs/exchange.cu"))
            .arg("-o")
            .arg(&output));
        let image = std::fs::read(&output).unwrap();
        assert_eq!(load(comm, &image), Ok(()), "{option} {architecture}");
        if option == "-ptx" {
            continue;
        }
        for bytes in [1, 40, image.len() / 2, image.len() - 1] {
            let (status, text) = load(comm, &image[..bytes]).unwrap_err();
            assert_eq!(status, Status::from(ErrorKind::InvalidArgument), "{text}");
            assert!(text.contains("expected a whole cubin"), "{text}");
        }
    }
    assert_eq!(warplink_destroy(comm), Status::SUCCESS);
}
