//! The library as it is installed, and programs that are compiled with it.

// Each test binary uses a part of this.
#![allow(dead_code)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use tempfile::TempDir;

/// An installation of the library that was built for this test, by the script that users run.
pub(crate) struct Installed {
    directory: TempDir,
}

/// How a program is linked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Linkage {
    Shared,
    Static,
}

impl Installed {
    /// The installation that tests of this process use at the moment, or a new one. The last one that uses it
    /// removes it.
    pub(crate) fn get() -> Arc<Self> {
        static CURRENT: Mutex<Weak<Installed>> = Mutex::new(Weak::new());
        let mut current = CURRENT.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(installed) = current.upgrade() {
            return installed;
        }
        let directory = tempfile::tempdir().unwrap();
        let test = std::env::current_exe().unwrap();
        // Cargo puts what tests are linked with beside them.
        run(Command::new(repository().join("scripts/install-c.sh"))
            .arg(directory.path())
            .arg(test.parent().unwrap())
            .env_remove("DESTDIR")
            .env_remove("LIBDIR"));
        let installed = Arc::new(Self { directory });
        *current = Arc::downgrade(&installed);
        installed
    }

    pub(crate) fn root(&self) -> &Path {
        self.directory.path()
    }

    /// Compiles a program: C99 or C++17, by what its name ends with, without a warning.
    pub(crate) fn compile(&self, source: &Path, linkage: Linkage) -> PathBuf {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let name = source.file_name().unwrap().to_str().unwrap();
        // Tests beside one another compile the same source, and one must not replace what another runs.
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let program = format!("{}-{number}", name.replace('.', "-"));
        let program = self.root().join(program);
        let (compiler, standard) = match source.extension().and_then(|end| end.to_str()) {
            Some("c") => ("cc", "-std=c99"),
            _ => ("c++", "-std=c++17"),
        };
        let mut command = Command::new(compiler);
        command
            .args([standard, "-O1", "-pthread"])
            .args(["-Wall", "-Wextra", "-Werror", "-pedantic"])
            .arg("-D_POSIX_C_SOURCE=200809L")
            .arg(self.option("-I", "include"))
            .arg(source)
            .arg("-o")
            .arg(&program);
        match linkage {
            Linkage::Shared => command
                .args([self.option("-L", "lib"), "-lwarplink".into()])
                .arg(self.option("-Wl,-rpath,", "lib")),
            Linkage::Static => command
                .arg(self.root().join("lib/libwarplink.a"))
                .args(["-lgcc_s", "-lutil", "-lrt", "-lm", "-ldl"]),
        };
        run(&mut command);
        program
    }

    fn option(&self, option: &str, folder: &str) -> String {
        format!("{option}{}", self.root().join(folder).display())
    }
}

/// The root of the repository.
pub(crate) fn repository() -> PathBuf {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    crates.parent().unwrap().to_owned()
}

/// Runs a command that must succeed, and gives its standard output.
pub(crate) fn run(command: &mut Command) -> String {
    let output = command.output().unwrap();
    assert!(
        output.status.success(),
        "{command:?} failed:\n{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).unwrap()
}
