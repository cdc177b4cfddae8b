//! Programs in C and Python that call the interface by its names, as ranks of the host device.

#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "../../warplink/tests/common/children.rs"]
mod children;

use children::{Ended, wait_all};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(90);

/// The functions that releases of NCCL export.
const FUNCTIONS: &str = include_str!("functions.txt");

/// Their names without the prefix, in order.
fn functions() -> BTreeSet<&'static str> {
    let lines = FUNCTIONS.lines().filter(|line| !line.starts_with('#'));
    lines
        .flat_map(|line| line.split_whitespace().skip(1))
        .collect()
}

/// The library, which cargo builds beside the tests.
fn library() -> PathBuf {
    let own = std::env::current_exe().unwrap();
    let deps = own.parent().unwrap();
    let found = [deps, deps.parent().unwrap()].map(|folder| folder.join("libwarplink_nccl.so"));
    let found = found.into_iter().find(|path| path.exists());
    // Cargo builds it for these tests.
    found.unwrap()
}

/// Compiles a file of `tests/programs`.
fn compile(source: &str, path: &Path, options: &[&str]) {
    let source = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/programs")
        .join(source);
    let compiled = Command::new("cc")
        .args(["-std=c99", "-Wall", "-Wextra", "-Werror", "-O1"])
        .args(options)
        .arg("-o")
        .args([path, &source])
        .arg("-ldl")
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&compiled.stderr);
    assert!(compiled.status.success(), "{errors}");
}

/// The program, compiled once.
fn program() -> &'static Path {
    static PROGRAM: OnceLock<(tempfile::TempDir, PathBuf)> = OnceLock::new();
    let (_, path) = PROGRAM.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("interface");
        compile("interface.c", &path, &[]);
        (folder, path)
    });
    path
}

/// Has a program run on the host device, without what the environment says of others.
fn host_device(command: &mut Command) {
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("WARPLINK_") {
            command.env_remove(name);
        }
    }
    command
        .env("WARPLINK_DEVICE", "host")
        .env("WARPLINK_NCCL_ADDRESS", "127.0.0.1")
        .env("WARPLINK_TIMEOUT", "30")
        .env("WARPLINK_NCCL_REPORT", "1")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
}

/// Runs the program as `processes` processes of `ranks` ranks.
fn run(what: &str, processes: usize, ranks: usize) -> Vec<Ended> {
    let folder = tempfile::tempdir().unwrap();
    let started = Instant::now();
    let start = |rank: usize| {
        let mut command = Command::new(program());
        host_device(&mut command);
        command
            .arg(library())
            .args([what, &rank.to_string(), &ranks.to_string()])
            .arg(folder.path().join("id"))
            .spawn()
            .unwrap()
    };
    wait_all((0..processes).map(start).collect(), started, LIMIT)
}

fn assert_done(ended: &[Ended]) {
    for (rank, end) in ended.iter().enumerate() {
        assert_eq!(end.code, Some(0), "rank {rank}:\n{}", end.output);
        assert!(end.output.contains("done"), "rank {rank}:\n{}", end.output);
    }
}

#[test]
fn every_call_is_right_on_ranks_that_are_processes() {
    for ranks in [1, 2, 3] {
        let ended = run("life", ranks, ranks);
        assert_done(&ended);
        // The report says who did what.
        for end in &ended {
            for call in ["AllReduce", "Send", "Gather"] {
                let words = |line: &str| line.split_whitespace().take(2).eq(["warplink", call]);
                assert!(end.output.lines().any(words), "{}", end.output);
            }
        }
    }
}

#[test]
fn ranks_that_do_not_block_are_in_progress() {
    assert_done(&run("progress", 2, 2));
}

#[test]
fn ranks_that_are_ended_while_they_join_leave_no_thread() {
    assert_done(&run("ended", 1, 2));
}

#[test]
fn one_thread_has_several_ranks() {
    assert_done(&run("thread", 1, 3));
}

#[test]
fn every_function_is_exported_with_its_twin() {
    let listed = Command::new("nm")
        .args(["-D", "--defined-only", "-P"])
        .arg(library())
        .output()
        .unwrap();
    let listed = String::from_utf8(listed.stdout).unwrap();
    let exported: BTreeSet<&str> = listed
        .lines()
        .filter_map(|line| line.split(' ').next())
        .filter(|name| name.starts_with("nccl") || name.starts_with("pnccl"))
        .collect();
    let twins = warplink_nccl::NAMES.iter().map(|name| format!("p{name}"));
    let names = warplink_nccl::NAMES.iter().map(|name| (*name).to_owned());
    let declared: BTreeSet<String> = names.chain(twins).collect();
    assert!(
        exported
            .iter()
            .copied()
            .eq(declared.iter().map(|name| &**name))
    );
    let names = functions().into_iter().map(|name| format!("nccl{name}"));
    assert!(
        names.eq(exported
            .iter()
            .copied()
            .filter(|name| name.starts_with("nccl")))
    );
}

/// A Python program on the library.
fn python(program: &str) -> Command {
    let program = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/programs")
        .join(program);
    let mut command = Command::new("python3");
    host_device(&mut command);
    command.arg("-B").arg(&program).arg(library());
    command
}

/// Runs a Python program on the library, with each of the arguments at the same time.
fn run_python(program: &str, arguments: &[&str]) -> Vec<Ended> {
    let started = Instant::now();
    let start = |argument: &&str| python(program).arg(argument).spawn().unwrap();
    wait_all(arguments.iter().map(start).collect(), started, LIMIT)
}

/// Variables that cannot be followed are named, with what was expected.
#[test]
fn wrong_variables_are_named() {
    let nccl = ("WARPLINK_NCCL_ROUTE", "nccl");
    let own = library().display().to_string();
    let library = |path| ("WARPLINK_NCCL_LIBRARY", path);
    let cases: [(&[(&str, &str)], &str); 7] = [
        (
            &[("WARPLINK_NCCL_ROUTE", "both")],
            "is 'both'; expected warplink or nccl",
        ),
        (
            &[("WARPLINK_NCCL_ADDRESS", "here")],
            "is 'here'; expected an IP address",
        ),
        (
            &[("WARPLINK_TIMEOUT", "soon")],
            "is 'soon'; expected a whole number",
        ),
        (
            &[nccl, library("libnccl.so.2")],
            "WARPLINK_NCCL_LIBRARY is libnccl.so.2: expected an absolute path",
        ),
        (
            &[nccl, library("/nowhere/libnccl.so.2")],
            "WARPLINK_NCCL_LIBRARY is /nowhere/libnccl.so.2: ",
        ),
        (&[nccl, library(&own)], "it is this library"),
        (&[library("/nowhere/libnccl.so.2")], "created"),
    ];
    let started = Instant::now();
    let start = |(variables, _): &(&[(&str, &str)], &str)| {
        let mut command = python("refused.py");
        command.envs(variables.iter().copied());
        command.spawn().unwrap()
    };
    let ended = wait_all(cases.iter().map(start).collect(), started, LIMIT);
    for ((variables, text), end) in cases.iter().zip(ended) {
        assert!(end.output.contains(text), "{variables:?}: {}", end.output);
    }
}

/// Bindings of Python call all functions, with ranks that are threads.
#[test]
fn every_function_can_be_called_from_python() {
    let names: Vec<&str> = functions().into_iter().collect();
    assert_done(&run_python("interface.py", &[&names.join(" ")]));
}

/// A killed rank, with others that give up or go on without it, an abort, different calls, forks, exits without destruction,
/// a call that is never made by the others, groups of several streams, and calls of several communicators in opposite
/// orders.
#[test]
fn faults_end_as_users_of_nccl_expect() {
    let cases = [
        "killed",
        "shrunk",
        "aborted",
        "different",
        "forked",
        "left",
        "closed",
        "uneven",
        "exits",
        "grouped",
        "orders",
    ];
    for (case, end) in cases.iter().zip(run_python("faults.py", &cases)) {
        assert_eq!(end.code, Some(0), "{}", end.output);
        let right = format!("{case}: right");
        assert!(end.output.starts_with(&right), "{}", end.output);
    }
}

/// Calls that NCCL executes reach a stand-in for it in order, and as they were made.
#[test]
fn calls_of_nccl_reach_it() {
    let folder = tempfile::tempdir().unwrap();
    let real = folder.path().join("libnccl.so.2");
    compile("real.c", &real, &["-shared", "-fPIC", "-pthread"]);
    let started = Instant::now();
    let start = |route: &str| {
        let mut command = python("real.py");
        command
            .arg(route)
            .env("WARPLINK_NCCL_ROUTE", route)
            .env("WARPLINK_NCCL_LIBRARY", &real);
        command.spawn().unwrap()
    };
    let ended = wait_all(["nccl", "warplink"].map(start).into(), started, LIMIT);
    assert_done(&ended);
}

/// The library where `scripts/install-nccl.sh` has put it, below `prefix`.
fn install(prefix: &Path) -> PathBuf {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/install-nccl.sh");
    let ended = Command::new(script)
        .args([prefix, library().parent().unwrap()])
        .env_remove("DESTDIR")
        .env_remove("LIBDIR")
        .output()
        .unwrap();
    assert!(ended.status.success(), "{ended:?}");
    prefix.join("lib/libwarplink-nccl.so")
}

/// A program that opens NCCL by its name gets this library, where that is loaded, beside NCCL itself: whose version it gives,
/// and which calls its own functions, also if the program has loaded it before.
#[test]
fn a_library_in_front_of_nccl_finds_it() {
    let folder = tempfile::tempdir().unwrap();
    let opener = folder.path().join("opener");
    compile("preloaded.c", &opener, &[]);
    let installed = install(&folder.path().join("prefix"));
    let other = folder.path().join("libnccl.so.2");
    let mut options = vec!["-shared", "-fPIC", "-Wl,-soname,libnccl.so.2"];
    compile("other.c", &other, &options);
    // Its addresses of functions are read-only once it is loaded.
    let fixed = folder.path().join("fixed");
    options.extend(["-Wl,-z,relro", "-Wl,-z,now"]);
    compile("other.c", &fixed, &options);
    let open = |search: Option<&Path>, named: Option<&Path>, ours: bool, before: Option<&Path>| {
        let mut command = Command::new(&opener);
        command.args(before);
        for name in [
            "LD_PRELOAD",
            "LD_LIBRARY_PATH",
            "WARPLINK_NCCL_LIBRARY",
            "WARPLINK_LIBRARY_PATH",
        ] {
            command.env_remove(name);
        }
        if let Some(search) = search {
            command.env("LD_LIBRARY_PATH", search);
        }
        if let Some(named) = named {
            command.env("WARPLINK_NCCL_LIBRARY", named);
        }
        if ours {
            command.env("LD_PRELOAD", &installed);
        }
        let ended = command.output().unwrap();
        let output = String::from_utf8(ended.stdout).unwrap();
        assert!(ended.status.success(), "{output}");
        let (file, version) = output.trim().split_once(' ').unwrap();
        (PathBuf::from(file), version.parse::<u32>().unwrap())
    };
    assert_eq!(
        open(Some(folder.path()), None, false, None),
        (other.clone(), 22_999)
    );
    let ours = (installed.clone(), 22_999);
    assert_eq!(open(Some(folder.path()), None, true, None), ours);
    for other in [&other, &fixed] {
        for before in [None, Some(&**other)] {
            assert_eq!(open(None, Some(other), true, before), ours, "{before:?}");
        }
    }
}
