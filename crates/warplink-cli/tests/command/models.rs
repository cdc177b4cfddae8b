//! Which hardware model decides, whatever is where models are kept: ranks always choose alike.

use crate::common::{assert_contains, command, example, launch, run, stderr, stdout, succeeded};
use crate::files::FullDisk;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;

const BENCH: &str =
    "bench collective all-reduce --device host -n 2 --peers none --to 4KiB --samples 1 --json";

fn bench(cache: &Path) -> Output {
    let mut command = command(BENCH);
    command.env("WARPLINK_CACHE_DIR", cache).output().unwrap()
}

fn doctor(cache: &Path) -> String {
    let mut command = command("doctor --device host");
    succeeded(&command.env("WARPLINK_CACHE_DIR", cache).output().unwrap())
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
    assert_contains(&doctor(cache.path()), &["not measured yet"]);
    let mut logged = command(BENCH);
    logged
        .env("WARPLINK_CACHE_DIR", cache.path())
        .env("WARPLINK_LOG", "warplink=debug");
    let output = logged.output().unwrap();
    assert_right(&output, "an empty cache");
    let log = stderr(&output);
    let (_, seconds) = log.split_once("measured the machine").unwrap();
    let (_, seconds) = seconds.split_once("seconds").unwrap();
    let seconds = seconds.trim_start_matches(|sign: char| !sign.is_ascii_digit());
    let end = seconds.find(|sign: char| !sign.is_ascii_digit() && sign != '.');
    let seconds: f64 = seconds[..end.unwrap_or(seconds.len())].parse().unwrap();
    // Samples end after 0.4 s; some more where the machine is busy.
    assert!(seconds < 2.0, "{seconds}: {log}");
    let [file] = &measured(cache.path())[..] else {
        panic!("{:?}", measured(cache.path()));
    };
    let first = fs::read_to_string(file).unwrap();
    assert_contains(
        &doctor(cache.path()),
        &["2 ranks have memory ", " GB/s, and a launch in "],
    );
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
    // The doctor has seen it coming, and leaves nothing where something can be kept.
    let warned = doctor(&file);
    assert_contains(
        &warned,
        &["nothing can be cached in ", "set WARPLINK_CACHE_DIR"],
    );
    let empty = tempfile::tempdir().unwrap();
    assert!(!doctor(empty.path()).contains("nothing can be cached"));
    assert_eq!(fs::read_dir(empty.path()).unwrap().count(), 0);
    assert_right(&bench(Path::new("/dev/full")), "a device");
    if let Some(disk) = FullDisk::new() {
        let output = bench(disk.path());
        assert_right(&output, "a full disk");
        assert_contains(&stderr(&output), &["cannot be cached", "No space left"]);
        assert!(measured(disk.path()).is_empty());
    }
}

/// Each rank finds another model: rank 0's is used on both, for collectives, plans and transfers, and the other one says
/// so where it is asked for more than transfers.
#[test]
fn ranks_with_different_models_choose_alike() {
    let directory = tempfile::tempdir().unwrap();
    let model = directory.path().join("model.json");
    let (cache, model) = (directory.path().display(), model.display());
    succeeded(&run(&format!(
        "tune --device host -n 2 --largest-shape 16 --largest-transfer 4KiB --samples 1 --output {model}"
    )));
    let text = fs::read_to_string(directory.path().join("model.json")).unwrap();
    let mut changed: serde_json::Value = serde_json::from_str(&text).unwrap();
    // Neither packets nor one block, as the model of the other rank has them for the same transfers.
    let kernels = &mut changed["link"]["kernels"];
    kernels["limit"] = (1 << 30).into();
    kernels["packet_limit"] = 0.into();
    kernels["store_blocks"] = serde_json::json!([[1 << 30, 3]]);
    fs::write(
        directory.path().join("model.json"),
        serde_json::to_string(&changed).unwrap(),
    )
    .unwrap();
    let ring = example("ring_pass");
    // The launcher says how many ranks there are.
    let cases = [
        (BENCH.replace(" -n 2", ""), true),
        (
            "bench overlap --device host --shape 32,32,32 --samples 1".to_owned(),
            true,
        ),
        (
            format!("program run {ring} --device host --param n=1024 --samples 1"),
            false,
        ),
        (
            "bench p2p --device host --to 4KiB --samples 1".to_owned(),
            false,
        ),
    ];
    for (words, says) in cases {
        for with in ["0", "1"] {
            let script = format!(
                "export WARPLINK_CACHE_DIR={cache}; \
                 if [ $WARPLINK_RANK = {with} ]; then export WARPLINK_MODEL={model}; fi; exec {} {words}",
                env!("CARGO_BIN_EXE_warplink"),
            );
            let output = launch(2, &script);
            let told = stderr(&output);
            assert!(output.status.success(), "{words}, {with}: {told}");
            if says {
                assert!(
                    told.contains("different hardware models"),
                    "{words}, {with}: {told}"
                );
            }
        }
    }
}
