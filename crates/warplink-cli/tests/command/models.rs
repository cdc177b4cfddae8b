//! Which hardware model decides, whatever is where models are kept: ranks always choose alike.

use crate::common::{assert_contains, command, launch, run, stderr, stdout, succeeded};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;

const BENCH: &str =
    "bench collective all-reduce --device host -n 2 --peers none --to 4KiB --samples 1 --json";

fn bench(cache: &Path) -> Output {
    let mut command = command(BENCH);
    command.env("WARPLINK_CACHE_DIR", cache).output().unwrap()
}

/// The files of measurements below a cache's directory.
fn measured(cache: &Path) -> Vec<PathBuf> {
    let files = fs::read_dir(cache.join("models/calibrated"));
    let files = files.into_iter().flatten().map(|file| file.unwrap().path());
    files.collect()
}

fn assert_right(output: &Output, case: &str) {
    assert!(output.status.success(), "{case}: {}", stderr(output));
    let report: serde_json::Value = serde_json::from_str(&stdout(output)).unwrap();
    assert_eq!(report["rows"].as_array().unwrap().len(), 4, "{case}");
}

/// A machine is measured once; what does not fit is measured anew, and said.
#[test]
fn a_machine_is_measured_once() {
    let cache = tempfile::tempdir().unwrap();
    assert_right(&bench(cache.path()), "an empty cache");
    let [file] = &measured(cache.path())[..] else {
        panic!("{:?}", measured(cache.path()));
    };
    let first = fs::read_to_string(file).unwrap();
    let again = bench(cache.path());
    assert_right(&again, "a cache");
    assert_eq!(fs::read_to_string(file).unwrap(), first);
    assert!(!stderr(&again).contains("measure"), "{}", stderr(&again));
    for (case, text) in [
        ("truncated", first[..first.len() / 2].to_owned()),
        ("empty", String::new()),
        (
            "of another machine",
            first.replace("\"machine\":\"", "\"machine\":\"x"),
        ),
        (
            "of another version",
            first.replace("\"format\":1", "\"format\":9"),
        ),
        ("absurd", first.replace("\"put\":", "\"put\":1e30,\"was\":")),
    ] {
        fs::write(file, &text).unwrap();
        let output = bench(cache.path());
        assert_right(&output, case);
        assert!(
            stderr(&output).contains("will be replaced"),
            "{case}: {}",
            stderr(&output)
        );
        assert_ne!(fs::read_to_string(file).unwrap(), text, "{case}");
    }
}

/// Where nothing can be kept, jobs work all the same.
#[test]
fn a_cache_that_cannot_be_written_stops_nobody() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("file");
    fs::write(&file, "").unwrap();
    let output = bench(&file);
    assert_right(&output, "a file in the place of the directory");
    assert_contains(&stderr(&output), &["cannot be cached"]);
    assert_right(&bench(Path::new("/dev/full")), "a device");
}

/// Each rank finds another model: rank 0's is used on both, and the other one says so.
#[test]
fn ranks_with_different_models_choose_alike() {
    let directory = tempfile::tempdir().unwrap();
    let model = directory.path().join("model.json");
    let (cache, model) = (directory.path().display(), model.display());
    succeeded(&run(&format!(
        "tune --device host -n 2 --largest-shape 16 --largest-transfer 4KiB --samples 1 --output {model}"
    )));
    // The launcher says how many ranks there are.
    let command = format!(
        "{} {}",
        env!("CARGO_BIN_EXE_warplink"),
        BENCH.replace(" -n 2", "")
    );
    for with in ["0", "1"] {
        let script = format!(
            "export WARPLINK_CACHE_DIR={cache}; \
             if [ $WARPLINK_RANK = {with} ]; then export WARPLINK_MODEL={model}; fi; exec {command}"
        );
        let output = launch(2, &script);
        assert!(output.status.success(), "{with}: {}", stderr(&output));
        let told = stderr(&output);
        assert!(told.contains("different hardware models"), "{with}: {told}");
    }
}
