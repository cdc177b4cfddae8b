//! Compilation in the background, into the cache on disk.
//!
//! NVRTC uses no GPU and compiles several texts at once. Loading code is left to the call that needs it, since it may wait
//! until running kernels are done.

use super::nvrtc;
use crate::device::module::CudaCode;
use crate::device::{ModuleSource, ModuleSources};
use crate::error::Result;
use crate::sync::lock;
use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

/// Processors for each thread, since the other ranks of a machine compile at the same time.
const PROCESSORS: usize = 8;
const MAX_THREADS: usize = 4;

static QUEUE: Mutex<Queue> = Mutex::new(Queue {
    waiting: VecDeque::new(),
    threads: 0,
});

struct Queue {
    waiting: VecDeque<Request>,
    threads: usize,
}

struct Request {
    target: Arc<Target>,
    sources: ModuleSources,
}

struct Target {
    /// Of the cache.
    directory: PathBuf,
    architecture: String,
}

/// Compiles `sources` for `architecture` into the cache in `directory`. Does not block.
pub(crate) fn compile(directory: PathBuf, architecture: String, sources: ModuleSources) {
    let target = Arc::new(Target {
        directory,
        architecture,
    });
    let mut queue = lock(&QUEUE);
    queue.waiting.push_back(Request { target, sources });
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    while queue.threads < (processors / PROCESSORS).clamp(1, MAX_THREADS) {
        let thread = std::thread::Builder::new().name("warplink-compile".to_owned());
        if let Err(error) = thread.spawn(work) {
            tracing::debug!(%error, "kernels are compiled when they are needed");
            break;
        }
        queue.threads += 1;
    }
}

/// Compiles what is waiting, until nothing is.
fn work() {
    while let Some((target, source)) = next() {
        match target.store(&source) {
            Ok(true) => {}
            Ok(false) => {
                let directory = target.directory.display();
                tracing::debug!(%directory, "kernels are not compiled in advance, since they cannot be stored");
                lock(&QUEUE).waiting.clear();
            }
            // The call that needs the kernel fails with the same error.
            Err(error) => tracing::debug!(%error, "a kernel is not compiled in advance"),
        }
    }
}

/// The next source. `None` ends the thread.
fn next() -> Option<(Arc<Target>, ModuleSource)> {
    let mut queue = lock(&QUEUE);
    while let Some(request) = queue.waiting.front_mut() {
        if let Some(source) = request.sources.next() {
            return Some((request.target.clone(), source));
        }
        queue.waiting.pop_front();
    }
    queue.threads -= 1;
    None
}

impl Target {
    /// Compiles a source unless the cache has it. Returns whether the cache has it now.
    fn store(&self, source: &ModuleSource) -> Result<bool> {
        let text = match source.code() {
            Some(CudaCode::Written(write)) => write()?,
            Some(CudaCode::Text(text)) => text.clone(),
            Some(CudaCode::Image(_)) | None => return Ok(true),
        };
        let (name, options) = (source.name(), source.options());
        nvrtc::store(&self.directory, name, &text, options, &self.architecture)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::device::library::{self, NVRTC};
    use std::process::Command;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::{Duration, Instant};

    const ARCHITECTURE: &str = "sm_90";
    const LIMIT: Duration = Duration::from_secs(60);

    /// The cache of a process that the test starts, and after how many milliseconds it exits.
    const CACHE: &str = "WARPLINK_TEST_AHEAD";
    const EXITS_AFTER: &str = "WARPLINK_TEST_AHEAD_EXIT";

    fn has_compiler() -> bool {
        let found = library::load(&NVRTC);
        if let Err(error) = &found {
            println!("skipped: {error}");
        }
        found.is_ok()
    }

    fn text(number: usize) -> String {
        format!(
            "#include <warplink/sections.cuh>\nextern \"C\" __global__ void section(int *at) {{ *at = {number}; }}"
        )
    }

    fn sources(numbers: std::ops::Range<usize>) -> ModuleSources {
        let source =
            |number| ModuleSource::new("ahead").with_written_cuda(move || Ok(text(number)));
        Box::new(numbers.map(source))
    }

    fn wait_until_idle() {
        let until = Instant::now() + LIMIT;
        while lock(&QUEUE).threads > 0 {
            assert!(Instant::now() < until, "kernels are still being compiled");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn entries(directory: &std::path::Path) -> usize {
        std::fs::read_dir(directory).map_or(0, Iterator::count)
    }

    #[test]
    fn code_is_in_the_cache_before_it_is_needed() {
        if !has_compiler() {
            return;
        }
        let root = tempfile::tempdir().unwrap();
        let architecture = || ARCHITECTURE.to_owned();
        compile(root.path().to_owned(), architecture(), sources(0..3));
        compile(root.path().to_owned(), architecture(), sources(2..5));
        wait_until_idle();
        assert_eq!(entries(root.path()), 5);
        assert!(nvrtc::store(root.path(), "ahead", &text(4), &[], ARCHITECTURE).unwrap());
        assert_eq!(entries(root.path()), 5);

        // What cannot be stored is not compiled in vain.
        let file = root.path().join("file");
        std::fs::write(&file, "").unwrap();
        let (taken, count) = (Arc::new(AtomicUsize::new(0)), 20);
        let counted = taken.clone();
        let many = sources(0..count).inspect(move |_| {
            counted.fetch_add(1, Ordering::Relaxed);
        });
        compile(file, architecture(), Box::new(many));
        wait_until_idle();
        assert!(taken.load(Ordering::Relaxed) <= MAX_THREADS);
    }

    #[test]
    fn a_process_exits_while_kernels_are_compiled() {
        if let Some(directory) = std::env::var_os(CACHE) {
            compile(directory.into(), ARCHITECTURE.to_owned(), sources(0..1000));
            let after = std::env::var(EXITS_AFTER).unwrap().parse().unwrap();
            std::thread::sleep(Duration::from_millis(after));
            std::process::exit(0);
        }
        if !has_compiler() {
            return;
        }
        let root = tempfile::tempdir().unwrap();
        let name = std::thread::current().name().unwrap().to_owned();
        for after in [20, 100, 300, 1000] {
            let started = Instant::now();
            let test = std::env::current_exe().unwrap();
            let mut process = Command::new(test);
            process
                .args(["--exact", &name])
                .env(CACHE, root.path())
                .env(EXITS_AFTER, after.to_string());
            assert!(process.status().unwrap().success());
            assert!(started.elapsed() < LIMIT);
        }
        // No partial entry is left.
        let files = std::fs::read_dir(root.path()).unwrap();
        let mut names = files.map(|file| file.unwrap().path());
        assert!(names.all(|name| name.extension().is_some_and(|kind| kind == "cubin")));
    }
}
