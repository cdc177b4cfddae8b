//! Programs in C99 and C++17, compiled against the installed library and run as two ranks.

#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "../../warplink/tests/common/children.rs"]
mod children;
mod every_call;
mod installed;
#[path = "../../warplink/tests/common/network.rs"]
mod network;

use children::{Ended, wait_all};
use installed::{Installed, Linkage, run};
use network::has_network;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use warplink::bootstrap::UniqueId;

const LIMIT: Duration = Duration::from_secs(90);

/// Compiles a program of `tests/programs`, or any that a whole path names, and runs it as `ranks` processes with rank, size and address.
fn processes(source: &str, linkage: Linkage, ranks: usize) -> Vec<Ended> {
    processes_with(source, linkage, ranks, &[])
}

/// As [`processes`], with more arguments.
fn processes_with(source: &str, linkage: Linkage, ranks: usize, more: &[&str]) -> Vec<Ended> {
    let installed = Installed::get();
    let source = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/programs")
        .join(source);
    let program = installed.compile(&source, linkage);
    let id = UniqueId::create([127, 0, 0, 1].into(), 0).unwrap();
    // Only its port is used, which a process of the program listens on.
    let _held = id.release();
    let started = Instant::now();
    let start = |rank: usize| {
        let mut command = Command::new(&program);
        for name in ["WARPLINK_ID", "WARPLINK_ADDRESS", "WARPLINK_SECRET"] {
            command.env_remove(name);
        }
        command
            .args([
                rank.to_string(),
                ranks.to_string(),
                id.address().to_string(),
            ])
            .args(more)
            .env("CUDA_DEVICE_MAX_CONNECTIONS", "32")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let children = (0..ranks).map(start).collect();
    wait_all(children, started, LIMIT)
}

fn assert_succeeded(ended: &[Ended]) {
    for (rank, end) in ended.iter().enumerate() {
        assert_eq!(end.code, Some(0), "rank {rank}:\n{}", end.output);
    }
}

#[test]
fn a_c_program_goes_through_the_whole_life_of_a_communicator() {
    assert_succeeded(&processes("life_cycle.c", Linkage::Shared, 2));
}

#[test]
fn a_c_program_writes_to_registered_buffers_over_the_network() {
    if !has_network() {
        return;
    }
    let ended = processes_with("life_cycle.c", Linkage::Shared, 2, &["network"]);
    assert_succeeded(&ended);
}

#[test]
fn null_wrong_orders_and_use_after_destroy_are_errors_with_texts() {
    assert_succeeded(&processes("misuse.c", Linkage::Shared, 2));
}

/// In calls that are made from the header.
#[test]
fn null_pointers_and_handles_that_are_not_alive_are_errors_of_every_function() {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
    let header = std::fs::read_to_string(tests.join("include/warplink.h")).unwrap();
    let (calls, made) = every_call::calls(&header);
    assert!(made > 200, "{made} calls");
    let folder = tempfile::tempdir().unwrap();
    for name in ["every_call.c", "check.h"] {
        let source = tests.join("tests/programs").join(name);
        std::fs::copy(source, folder.path().join(name)).unwrap();
    }
    std::fs::write(folder.path().join("calls.inc"), calls).unwrap();
    let program = folder.path().join("every_call.c");
    assert_succeeded(&processes(program.to_str().unwrap(), Linkage::Shared, 2));
}

#[test]
fn kernels_in_c_have_the_channels_of_all_connections_in_an_array() {
    for (linkage, ranks) in [(Linkage::Shared, 3), (Linkage::Static, 2)] {
        assert_succeeded(&processes("channels.c", linkage, ranks));
    }
}

#[test]
fn a_c_program_makes_collectives_and_has_a_communicator_of_the_library_adopted() {
    assert_succeeded(&processes("collectives.c", Linkage::Shared, 3));
}

#[test]
fn c_programs_exchange_messages_and_rows_of_experts() {
    for (linkage, ranks) in [(Linkage::Shared, 2), (Linkage::Static, 4)] {
        assert_succeeded(&processes("messages.c", linkage, ranks));
    }
}

#[test]
fn a_peer_that_is_killed_ends_the_wait_of_a_kernel_and_is_named() {
    let ended = processes("lost_peer.c", Linkage::Static, 2);
    assert_succeeded(&ended[..1]);
    assert_eq!(ended[1].code, None, "{}", ended[1].output);
}

#[test]
fn a_cpp_program_has_two_ranks_as_threads() {
    // Its two ranks would use one GPU, so on GPUs it needs two that the process sees.
    assert_succeeded(&processes("threads.cpp", Linkage::Static, 1));
}

#[test]
fn a_callback_that_throws_ends_the_process_with_a_message() {
    let body = "the body of a host kernel threw an exception, or ended its thread";
    for (callback, ranks, says) in [
        ("handler", 2, "the log handler threw an exception"),
        ("body", 1, body),
        ("thread", 1, body),
    ] {
        for linkage in [Linkage::Shared, Linkage::Static] {
            let ended = processes_with("throws.cpp", linkage, ranks, &[callback]);
            // By a signal, and not by an exit that the program makes itself.
            assert_eq!(ended[0].code, None, "{}", ended[0].output);
            assert!(ended[0].output.contains(says), "{}", ended[0].output);
        }
    }
}

#[test]
fn the_structs_that_kernels_take_have_one_layout() {
    let installed = Installed::get();
    let programs = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs");
    run(Command::new("c++")
        .args(["-std=c++17", "-fsyntax-only", "-I"])
        .arg(installed.root().join("include"))
        .arg(programs.join("layout.cpp")));
}

/// The programs are C++ as well, with the same warnings as C.
#[test]
fn programs_in_c_are_cpp_too() {
    let installed = Installed::get();
    let programs = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs");
    for name in ["channels.c", "collectives.c", "messages.c"] {
        run(Command::new("c++")
            .args(["-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Werror"])
            .args(["-pedantic", "-x", "c++", "-I"])
            .arg(installed.root().join("include"))
            .arg(programs.join(name)));
    }
}

#[test]
fn pkg_config_finds_the_installation() {
    let installed = Installed::get();
    let lib = installed.root().join("lib");
    let file = std::fs::read_to_string(lib.join("pkgconfig/warplink.pc")).unwrap();
    let line = |start: &str| file.lines().any(|line| line.starts_with(start));
    assert!(
        line(&format!("prefix={}", installed.root().display())),
        "{file}"
    );
    assert!(
        line(&format!("Version: {}", env!("CARGO_PKG_VERSION"))),
        "{file}"
    );
    // Not every machine has it.
    let mut command = Command::new("pkg-config");
    command.env("PKG_CONFIG_PATH", lib.join("pkgconfig"));
    if command
        .args(["--cflags", "--libs", "warplink"])
        .output()
        .is_ok()
    {
        let flags = run(&mut command);
        assert!(flags.contains("-lwarplink"), "{flags}");
    }
}

#[test]
fn only_the_functions_of_the_header_are_exported() {
    let installed = Installed::get();
    let library = installed.root().join("lib/libwarplink.so");
    let symbols = run(Command::new("nm")
        .args(["-D", "--defined-only"])
        .arg(library));
    let header = std::fs::read_to_string(installed.root().join("include/warplink.h")).unwrap();
    let mut found = 0;
    for name in symbols.lines().filter_map(|line| line.split(' ').nth(2)) {
        assert!(header.contains(&format!("{name}(")), "{name} is exported");
        found += 1;
    }
    assert!(found > 50, "{found} symbols");
}
