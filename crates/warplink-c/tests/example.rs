//! The example in C++ and the program of docs/c.md run, and the example's kernel compiles.

#![allow(clippy::unwrap_used)]

#[path = "../../warplink/tests/common/children.rs"]
mod children;
mod installed;

use children::wait_all;
use installed::{Installed, Linkage, repository};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use warplink::ErrorKind;
use warplink::bootstrap::UniqueId;
use warplink::device::cuda;

const LIMIT: Duration = Duration::from_secs(90);

fn source() -> PathBuf {
    repository().join("examples/c/ping_pong.cpp")
}

/// The device under test, and what has the ranks find no launcher's variables.
fn command(program: &Path) -> Command {
    let device = std::env::var("WARPLINK_TEST_DEVICE").unwrap_or_else(|_| "host".into());
    let mut command = Command::new(program);
    for name in ["WARPLINK_RANK", "WARPLINK_WORLD", "WARPLINK_ID"] {
        command.env_remove(name);
    }
    command
        .env("WARPLINK_DEVICE", device)
        .env("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// A program as one rank of a job.
fn start_rank(program: &Path, rank: usize, world: usize, id: &UniqueId) -> Child {
    let mut command = command(program);
    command
        .env("WARPLINK_RANK", rank.to_string())
        .env("WARPLINK_WORLD", world.to_string())
        .env("WARPLINK_ID", id.to_string());
    command.spawn().unwrap()
}

#[test]
fn the_example_runs_with_ranks_as_threads_and_as_processes() {
    let installed = Installed::get();
    let program = installed.compile(&source(), Linkage::Shared);
    let id = UniqueId::create([127, 0, 0, 1].into(), 0).unwrap();
    let _held = id.release();
    // The third rank is of no use to the two others, and does not disturb them.
    let as_rank = |rank| start_rank(&program, rank, 3, &id);
    let mut children = vec![command(&program).spawn().unwrap()];
    children.extend((0..3).map(as_rank));
    let ended = wait_all(children, Instant::now(), LIMIT);
    for end in &ended {
        assert_eq!(end.code, Some(0), "{}", end.output);
    }
    for end in &ended[..2] {
        assert!(
            end.output
                .starts_with("after 1000 rounds the number is 2000"),
            "{}",
            end.output
        );
    }
    for end in &ended[2..] {
        assert_eq!(end.output, "");
    }
}

/// The program of the documentation, as its readers would copy it.
#[test]
fn the_first_program_of_the_documentation_runs_with_three_ranks() {
    let installed = Installed::get();
    let page = std::fs::read_to_string(repository().join("docs/c.md")).unwrap();
    let (_, text) = page.split_once("## A first program").unwrap();
    let (_, text) = text.split_once("```c\n").unwrap();
    let (text, _) = text.split_once("```").unwrap();
    let source = installed.root().join("sum.c");
    std::fs::write(&source, text).unwrap();
    let program = installed.compile(&source, Linkage::Shared);
    let id = UniqueId::create([127, 0, 0, 1].into(), 0).unwrap();
    let _held = id.release();
    let as_rank = |rank| start_rank(&program, rank, 3, &id);
    let ended = wait_all((0..3).map(as_rank).collect(), Instant::now(), LIMIT);
    for (rank, end) in ended.iter().enumerate() {
        assert_eq!(end.code, Some(0), "{}", end.output);
        assert_eq!(end.output, format!("rank {rank} of 3: the sum is 303\n"));
    }
}

#[test]
fn its_kernel_compiles_for_every_architecture() {
    let text = std::fs::read_to_string(source()).unwrap();
    let kernel = text.split("R\"cuda(").nth(1).unwrap();
    let kernel = kernel.split(")cuda\"").next().unwrap();
    for architecture in cuda::ARCHITECTURES {
        match cuda::compile("ping_pong.cpp", kernel, architecture, &[]) {
            Ok(code) => assert!(!code.is_empty()),
            Err(error) if error.kind() == ErrorKind::LibraryMissing => {
                let required =
                    std::env::var("WARPLINK_REQUIRE_NVRTC").is_ok_and(|value| value == "1");
                assert!(!required, "NVRTC is required here: {error}");
                return;
            }
            Err(error) => panic!("{error}"),
        }
    }
}
