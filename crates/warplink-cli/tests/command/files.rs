//! Every option that takes a file, with every kind of file: nothing hangs, panics or replaces what is no file, and a
//! result is written whole or not at all.

use crate::common::{example, warplink, within};
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::unix::fs::{FileTypeExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

/// The longest that a command may take on a busy machine.
const MAX_TIME: Duration = Duration::from_secs(60);

/// Runs the command with `FILE` in `args` replaced. Its end is waited for, with a limit.
fn run(args: &[String], file: &Path) -> Output {
    let file = file.to_str().unwrap();
    let args: Vec<String> = args.iter().map(|arg| arg.replace("FILE", file)).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let mut child = warplink(&args)
        .env("WARPLINK_DEVICE", "host")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // What is printed here is shorter than a pipe.
    if !within(MAX_TIME, || child.try_wait().unwrap().is_some()) {
        child.kill().unwrap();
        panic!("{args:?} did not end");
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

/// Commands that read `FILE`, and whether they read regular files only, and refuse a pipe at once.
const READ: [(&str, bool); 13] = [
    ("program show FILE", false),
    ("program verify FILE -n 2", false),
    ("program cost FILE -n 2 --model generic-gpu", false),
    ("program run FILE -n 2", true),
    ("program cost PROGRAM -n 2 -p n=64 --model FILE", true),
    ("topo --mesh FILE", false),
    ("bench section FILE -n 2 --sizes 1KiB", true),
    ("bench overlap --replay FILE --model generic-gpu", false),
    ("bench overlap --replay PROGRAM --model FILE", true),
    ("bench overlap -n 2 --shape 64,64,64 --lowerings FILE", true),
    ("bench program -n 2 --lowerings FILE", true),
    ("bench collective all-reduce -n 2 --beside FILE", true),
    ("demo -n 2 --lowering FILE", true),
];

/// Commands that write a result to `FILE`. `ONE` stands for the fewest samples.
const WRITTEN: [&str; 19] = [
    "topo --mesh MESH --svg FILE",
    "program run PROGRAM -n 2 -p n=64 --trace FILE",
    "tune -n 1 --largest-shape 16 --largest-transfer 4KiB --samples 1 --dtypes f32 --output FILE",
    "bench p2p -n 2 --sizes 4KiB --methods put ONE --output FILE",
    "bench p2p -n 2 --sizes 4KiB --methods put ONE --plot FILE",
    "bench channel -n 2 --sizes 4KiB --rows signals --samples 1 --output FILE",
    "bench channel -n 2 --sizes 4KiB --rows signals --samples 1 --plot FILE",
    "bench collective all-reduce -n 2 --sizes 1KiB --calls 1 --peers none ONE --output FILE",
    "bench collective all-reduce -n 2 --sizes 1KiB --calls 1 --peers none ONE --plot FILE",
    "bench expert-parallel -n 2 --sizes 1 --elements 16 --experts 2 --top-k 1 --calls 1 --peer none ONE --output FILE",
    "bench expert-parallel -n 2 --sizes 1 --elements 16 --experts 2 --top-k 1 --calls 1 --peer none ONE --plot FILE",
    "bench fused -n 2 --sizes 1 --width 16 --calls 1 --peers none ONE --output FILE",
    "bench fused -n 2 --sizes 1 --width 16 --calls 1 --peers none ONE --plot FILE",
    "bench overlap -n 2 --shape 16,16,16 --lowerings collective --samples 1 --output FILE",
    "bench overlap -n 2 --shape 16,16,16 --lowerings collective --samples 1 --plot FILE",
    "bench program -n 2 --lowerings collective --samples 1 --output FILE",
    "bench program -n 2 --lowerings collective --samples 1 --plot FILE",
    "bench section SECTION -n 2 -p T=f32 --sizes 1KiB --runs 1 --against nothing --samples 1 --output FILE",
    "bench section SECTION -n 2 -p T=f32 --sizes 1KiB --runs 1 --against nothing --samples 1 --plot FILE",
];

/// A command that writes several results into the folder `FILE`.
const WRITTEN_TO_A_FOLDER: &str =
    "bench overlap -n 2 --shape 16,16,16 --lowerings collective --samples 1 --traces FILE";

/// A line of words as arguments, some of which stand for others.
fn arguments(line: &str, given: &[(&str, &str)]) -> Vec<String> {
    let mut args = Vec::new();
    for word in line.split_whitespace() {
        match given.iter().find(|(name, _)| *name == word) {
            Some((_, value)) => args.push((*value).to_owned()),
            None if word == "ONE" => {
                args.extend(["--samples", "1", "--submission", "eager"].map(str::to_owned));
            }
            None => args.push(word.to_owned()),
        }
    }
    args
}

/// The options and arguments of all commands that take files, as their help has them: the command's words and the option.
fn options_that_take_files(command: &[&str], found: &mut BTreeSet<String>) {
    let args = [command, &["--help"]].concat();
    let help = crate::common::stdout(&warplink(&args).output().unwrap());
    let mut section = "";
    // What is explained where, over several lines.
    let mut entries: Vec<(String, String)> = Vec::new();
    // Long help separates options by empty lines, which begin no section.
    for line in help.lines().filter(|line| !line.trim().is_empty()) {
        let text = line.trim_start();
        if !line.starts_with(' ') {
            section = line;
        } else if section == "Commands:" {
            match text.split_whitespace().next() {
                // What is indented further goes on from the line before.
                Some(name) if line.len() - text.len() == 2 && name != "help" => {
                    options_that_take_files(&[command, &[name]].concat(), found);
                }
                _ => {}
            }
        } else if section == "Options:" || section == "Arguments:" {
            if text.starts_with(['-', '<', '[']) {
                let mut names = text.split([' ', ',']);
                let long = names.clone().find(|name| name.starts_with("--"));
                let name = long.or_else(|| names.next()).unwrap();
                entries.push((name.to_owned(), String::new()));
            }
            if let Some((_, all)) = entries.last_mut() {
                *all += line;
            }
        }
    }
    let entries = entries.into_iter();
    let takes = entries.filter(|(_, text)| text.contains("FILE") || text.contains("FOLDER"));
    found.extend(takes.map(|(name, _)| format!("{} {name}", command.join(" "))));
}

/// A new option that takes a file is to be in the lists above, too.
#[test]
fn every_option_that_takes_a_file_is_tried() {
    let mut found = BTreeSet::new();
    options_that_take_files(&[], &mut found);
    let lines = READ.iter().map(|(line, _)| *line).chain(WRITTEN);
    let tried: BTreeSet<String> = lines
        .chain([WRITTEN_TO_A_FOLDER])
        .map(|line| {
            let words: Vec<&str> = line.split_whitespace().collect();
            let nested = ["bench", "program"].contains(&words[0]);
            let command = words[..if nested { 2 } else { 1 }].join(" ");
            let at = words.iter().position(|word| *word == "FILE").unwrap();
            match words[at - 1] {
                option if option.starts_with("--") => format!("{command} {option}"),
                _ => format!("{command} <FILE>"),
            }
        })
        .collect();
    assert_eq!(tried, found);
    assert!(found.len() > 25, "{found:?}");
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
    let program = example("ring_pass");
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
    for (line, regular) in READ {
        let args = arguments(line, &[("PROGRAM", &program)]);
        if regular {
            files.push(pipe.clone());
        } else {
            files.retain(|file| *file != pipe);
        }
        for file in &files {
            let output = run(&args, file);
            assert_refused(&output, &format!("{line} with {}", file.display()));
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
            text.contains("each rank would read another file") && text.lines().count() == 1,
            "{text}"
        );
    }
}

#[test]
fn every_result_is_written_whole_or_not_at_all() {
    let folder = tempfile::tempdir().unwrap();
    let mesh = folder.path().join("mesh.json");
    let told = run(&arguments("topo -n 2 --json", &[]), &mesh);
    fs::write(&mesh, &told.stdout).unwrap();
    let (program, section) = (example("ring_pass"), example("all_reduce_one_shot"));
    let given = [
        ("MESH", mesh.to_str().unwrap()),
        ("PROGRAM", &program),
        ("SECTION", &section),
    ];
    let given = &given;
    std::thread::scope(|scope| {
        for lines in WRITTEN.chunks(WRITTEN.len().div_ceil(2)) {
            scope.spawn(move || {
                for line in lines {
                    is_written_whole_or_not_at_all(line, &arguments(line, given));
                }
            });
        }
    });
}

fn is_written_whole_or_not_at_all(what: &str, args: &[String]) {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let (file, link, pipe) = (path("file"), path("link"), path("pipe"));
    let ran = run(args, &file);
    let text = String::from_utf8_lossy(&ran.stderr);
    assert!(ran.status.success(), "{what}: {text}");
    assert!(fs::metadata(&file).unwrap().len() > 100, "{what}");

    // Through a link, which stays one.
    fs::write(&file, "before").unwrap();
    symlink("file", &link).unwrap();
    assert!(run(args, &link).status.success(), "{what}");
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
    assert!(run(args, &pipe).status.success(), "{what}");
    assert!(reading.join().unwrap().len() > 100, "{what}");
    reader.wait().unwrap();
    assert!(fs::metadata(&pipe).unwrap().file_type().is_fifo(), "{what}");
    fs::remove_file(&pipe).unwrap();

    // To devices, which stay what they are; and where nothing can be written.
    assert!(run(args, Path::new("/dev/null")).status.success(), "{what}");
    for wrong in [
        Path::new("/dev/full"),
        folder.path(),
        Path::new("/no/such/folder/file"),
    ] {
        let which = format!("{what} {}", wrong.display());
        assert_refused(&run(args, wrong), &which);
    }
    for device in ["/dev/null", "/dev/full"] {
        let kind = fs::metadata(device).unwrap().file_type();
        assert!(kind.is_char_device(), "{what} replaced {device}");
    }

    // Onto a full disk, where what was there stays.
    if let Some(disk) = FullDisk::new() {
        let old = disk.path().join("old");
        for file in [&old, &disk.path().join("new")] {
            assert_refused(&run(args, file), &format!("{what} on a full disk"));
        }
        assert_eq!(fs::read_to_string(&old).unwrap(), "before", "{what}");
        let left = fs::read_dir(disk.path()).unwrap().count();
        assert_eq!(left, 2, "{what} left something on a full disk");
    }
    let left = fs::read_dir(folder.path()).unwrap().count();
    assert_eq!(left, 1, "{what} left something");
}

#[test]
fn a_folder_of_results_is_a_folder() {
    let args = arguments(WRITTEN_TO_A_FOLDER, &[]);
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let (there, link, file, pipe) = (path("there"), path("link"), path("file"), path("pipe"));
    fs::create_dir(&there).unwrap();
    symlink("there", &link).unwrap();
    for right in [&there, &link, &path("new")] {
        let ran = run(&args, right);
        assert!(
            ran.status.success(),
            "{}",
            String::from_utf8_lossy(&ran.stderr)
        );
        assert_eq!(
            fs::read_dir(right).unwrap().count(),
            2,
            "{}",
            right.display()
        );
    }
    fs::write(&file, "before").unwrap();
    make_pipe(&pipe);
    for wrong in [&file, &pipe, Path::new("/dev/null"), Path::new("/dev/full")] {
        assert_refused(&run(&args, wrong), &wrong.display().to_string());
    }
    assert_eq!(fs::read_to_string(&file).unwrap(), "before");
    if let Some(disk) = FullDisk::new() {
        assert_refused(&run(&args, disk.path()), "a full disk");
        assert_eq!(fs::read_dir(disk.path()).unwrap().count(), 2);
    }
}

/// A file system with no room left: a file that says so, and one with `before`. Only root can make one.
pub(crate) struct FullDisk(tempfile::TempDir);

impl FullDisk {
    pub(crate) fn new() -> Option<Self> {
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

    pub(crate) fn path(&self) -> &Path {
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
