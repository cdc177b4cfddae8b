//! Every option that takes a file, with every kind of file: nothing hangs, panics or replaces what is no file, and a
//! result is written whole or not at all.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[allow(dead_code, reason = "shared with the tests of endings")]
mod common;

use common::warplink;
use std::fs::{self, File};
use std::os::unix::fs::{FileTypeExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

/// The longest that a command may take on a busy machine.
const MAX_TIME: Duration = Duration::from_secs(60);

fn example(name: &str) -> String {
    let root = env!("CARGO_MANIFEST_DIR");
    format!("{root}/../../examples/programs/{name}.wlp")
}

/// Runs the command with `FILE` in `args` replaced. Its end is waited for, with a limit.
fn run(args: &[&str], file: &Path) -> Output {
    let file = file.to_str().unwrap();
    let args: Vec<String> = args.iter().map(|arg| arg.replace("FILE", file)).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let mut child = warplink(&args)
        .env("WARPLINK_DEVICE", "host")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let begun = Instant::now();
    // What is printed here is shorter than a pipe.
    while child.try_wait().unwrap().is_none() {
        if begun.elapsed() > MAX_TIME {
            child.kill().unwrap();
            panic!("{args:?} did not end");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    child.wait_with_output().unwrap()
}

/// Fails unless the command failed with an error of one line that names the file or what is wrong.
fn assert_refused(output: &Output, what: &str) {
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(
        matches!(output.status.code(), Some(1 | 2)),
        "{what}: {text}"
    );
    assert!(text.contains("warplink: error: "), "{what}: {text}");
    assert!(!text.contains("panicked"), "{what}: {text}");
}

fn make_pipe(path: &Path) {
    let made = Command::new("mkfifo").arg(path).status().unwrap();
    assert!(made.success());
}

#[test]
fn every_file_that_is_read_is_checked() {
    let folder = tempfile::tempdir().unwrap();
    let make = |name: &str, bytes: &[u8]| {
        let path = folder.path().join(name);
        fs::write(&path, bytes).unwrap();
        path
    };
    let huge = folder.path().join("huge.wlp");
    // It takes no room.
    File::create(&huge).unwrap().set_len(1 << 40).unwrap();
    let link = folder.path().join("link.wlp");
    symlink("/dev/zero", &link).unwrap();
    let pipe = folder.path().join("pipe.wlp");
    make_pipe(&pipe);
    let model = "generic-gpu";
    let program = example("ring_pass");
    // Whether only regular files are read, and a pipe refused at once.
    let options: [(&[&str], bool); 10] = [
        (&["program", "show", "FILE"], false),
        (&["program", "verify", "FILE", "-n", "2"], false),
        (
            &["program", "cost", "FILE", "-n", "2", "--model", model],
            false,
        ),
        (&["program", "run", "FILE", "-n", "2"], true),
        (
            &[
                "program", "cost", &program, "-n", "2", "-p", "n=64", "--model", "FILE",
            ],
            true,
        ),
        (&["topo", "--mesh", "FILE"], false),
        (
            &["bench", "overlap", "--replay", "FILE", "--model", model],
            false,
        ),
        (
            &["bench", "overlap", "--replay", &program, "--model", "FILE"],
            true,
        ),
        (
            &[
                "bench",
                "overlap",
                "-n",
                "2",
                "--shape",
                "64,64,64",
                "--lowerings",
                "FILE",
            ],
            true,
        ),
        (
            &[
                "bench",
                "collective",
                "all-reduce",
                "-n",
                "2",
                "--beside",
                "FILE",
            ],
            true,
        ),
    ];
    let mut files: Vec<PathBuf> = vec![
        make("empty.wlp", b""),
        make("binary.wlp", b"program \xff\xfe"),
        make("zeros.wlp", &[0; 4096]),
        huge,
        link,
        "/dev/null".into(),
        "/dev/full".into(),
        folder.path().to_owned(),
        folder.path().join("none.wlp"),
    ];
    for (args, regular) in options {
        if regular {
            files.push(pipe.clone());
        } else {
            files.retain(|file| *file != pipe);
        }
        for file in &files {
            let output = run(args, file);
            assert_refused(&output, &format!("{args:?} with {}", file.display()));
        }
    }
}

/// Ranks have a standard input of their own, so that they would read another file than the launcher.
#[test]
fn programs_that_ranks_read_again_are_not_read_from_standard_input() {
    for (args, reads) in [
        (
            ["program", "run", "/dev/stdin", "-n", "2", "-p", "n=64"],
            false,
        ),
        (
            ["program", "verify", "/dev/stdin", "-n", "2", "-p", "n=64"],
            true,
        ),
    ] {
        let output = warplink(&args)
            .env("WARPLINK_DEVICE", "host")
            .stdin(File::open(example("ring_pass")).unwrap())
            .output()
            .unwrap();
        if reads {
            assert!(output.status.success(), "{args:?}");
            continue;
        }
        assert_refused(&output, &format!("{args:?}"));
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(
            text.contains("another file in each rank") && text.lines().count() == 1,
            "{text}"
        );
    }
}

#[test]
fn every_result_is_written_whole_or_not_at_all() {
    let full_disk = FullDisk::new();
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let mesh = path("mesh.json");
    let told = run(&["topo", "-n", "2", "--json"], &mesh);
    fs::write(&mesh, &told.stdout).unwrap();
    let (mesh, program) = (mesh.to_str().unwrap(), example("ring_pass"));
    let overlap = [
        "bench",
        "overlap",
        "-n",
        "2",
        "--shape",
        "16,16,16",
        "--samples",
        "1",
    ];
    let overlap = |option| [&overlap[..], &["--lowerings", "collective", option, "FILE"]].concat();
    let collective = [
        "bench",
        "collective",
        "all-reduce",
        "-n",
        "2",
        "--to",
        "1KiB",
    ];
    let options: [Vec<&str>; 6] = [
        vec!["topo", "--mesh", mesh, "--svg", "FILE"],
        vec![
            "program", "run", &program, "-n", "2", "-p", "n=64", "--trace", "FILE",
        ],
        overlap("--output"),
        overlap("--plot"),
        [&collective[..], &["--samples", "1", "--plot", "FILE"]].concat(),
        vec![
            "tune",
            "-n",
            "1",
            "--largest-shape",
            "16",
            "--largest-transfer",
            "4KiB",
            "--samples",
            "1",
            "--dtypes",
            "f32",
            "--output",
            "FILE",
        ],
    ];
    for args in options {
        let what = format!("{args:?}");
        let (file, link, pipe) = (path("file"), path("link"), path("pipe"));
        let _ = fs::remove_file(&file);
        let ran = run(&args, &file);
        assert!(
            ran.status.success(),
            "{what}: {}",
            String::from_utf8_lossy(&ran.stderr)
        );
        assert!(fs::metadata(&file).unwrap().len() > 100, "{what}");

        // Through a link, which stays one.
        fs::write(&file, "before").unwrap();
        symlink("file", &link).unwrap();
        assert!(run(&args, &link).status.success(), "{what}");
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink(), "{what}");
        assert!(fs::metadata(&file).unwrap().len() > 100, "{what}");
        fs::remove_file(&link).unwrap();

        // Into a pipe, whose reader gets all of it.
        make_pipe(&pipe);
        let mut reader = Command::new("cat")
            .arg(&pipe)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let reading = reader.stdout.take().unwrap();
        let reading = std::thread::spawn(move || std::io::read_to_string(reading).unwrap());
        assert!(run(&args, &pipe).status.success(), "{what}");
        assert!(reading.join().unwrap().len() > 100, "{what}");
        reader.wait().unwrap();
        assert!(fs::metadata(&pipe).unwrap().file_type().is_fifo(), "{what}");
        fs::remove_file(&pipe).unwrap();

        // To devices, which stay what they are; and where nothing can be written.
        assert!(
            run(&args, Path::new("/dev/null")).status.success(),
            "{what}"
        );
        for wrong in [
            Path::new("/dev/full"),
            folder.path(),
            Path::new("/no/such/folder/file"),
        ] {
            let which = format!("{what} {}", wrong.display());
            assert_refused(&run(&args, wrong), &which);
        }
        for device in ["/dev/null", "/dev/full"] {
            let kind = fs::metadata(device).unwrap().file_type();
            assert!(kind.is_char_device(), "{what} replaced {device}");
        }

        // Onto a full disk, where what was there stays.
        if let Some(disk) = &full_disk {
            let old = disk.path().join("old");
            for file in [&old, &disk.path().join("new")] {
                assert_refused(&run(&args, file), &format!("{what} on a full disk"));
            }
            assert_eq!(fs::read_to_string(&old).unwrap(), "before", "{what}");
            let left = fs::read_dir(disk.path()).unwrap().count();
            assert_eq!(left, 2, "{what} left something on a full disk");
        }
        // The mesh and the file.
        assert_eq!(
            fs::read_dir(folder.path()).unwrap().count(),
            2,
            "{what} left something"
        );
    }
}

/// A file system with no room left: a file that says so, and one with `before`. Only root can make one.
struct FullDisk(tempfile::TempDir);

impl FullDisk {
    fn new() -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", "size=64k", "tmpfs"])
            .arg(folder.path())
            .stderr(Stdio::null())
            .status();
        if !mounted.is_ok_and(|status| status.success()) {
            println!("no full disk: tmpfs cannot be mounted here");
            return None;
        }
        let disk = Self(folder);
        fs::write(disk.path().join("old"), "before").unwrap();
        // Until it fails.
        let _ = fs::write(disk.path().join("filling"), vec![1; 1 << 20]);
        Some(disk)
    }

    fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for FullDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.path()).status();
    }
}

/// All of them, by the first process and once.
#[test]
fn variables_that_are_not_text_are_refused() {
    use std::os::unix::ffi::OsStrExt;
    for name in [
        "WARPLINK_DEVICE",
        "WARPLINK_LOG",
        "WARPLINK_MODEL",
        "WARPLINK_PROTOCOL",
        "WARPLINK_TIMEOUT",
        "WARPLINK_SECRET",
        "WARPLINK_CACHE_DIR",
        "WARPLINK_NETWORK_DEVICES",
        "CUDA_VISIBLE_DEVICES",
        "UCX_TLS",
    ] {
        let output = warplink(&["demo", "--device", "host", "-n", "2"])
            .env(name, std::ffi::OsStr::from_bytes(b"a\xff"))
            .output()
            .unwrap();
        assert_refused(&output, name);
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(
            text.matches(&format!("{name} is not UTF-8")).count(),
            1,
            "{text}"
        );
    }
}
