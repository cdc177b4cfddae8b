//! Writing results to files that a user names.
//!
//! A regular file is replaced as a whole, so that nobody reads half of it and a full disk leaves the one before. Where a
//! symbolic link leads to one, it still does afterwards. Devices and pipes are written to.

use anyhow::{Context, Result};
use rustix::fs::{Access, access};
use rustix::io::Errno;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use warplink::program::Trace;

/// The most symbolic links that lead to one file.
const MAX_LINKS: usize = 40;

/// What a path leads to.
#[derive(Debug)]
enum Target {
    /// A file to be replaced or made: its own path.
    File(PathBuf),
    /// A device or a pipe, and a file that has no path any more.
    Other,
}

/// Checks that a result can be written to `path`, so that a wrong one is reported before the work. Leaves nothing
/// behind, and does not open a pipe, whose reader would take that for the end.
pub(crate) fn check_output(path: &Path) -> Result<()> {
    let check = || match target(path)? {
        Target::Other => Ok(access(path, Access::WRITE_OK)?),
        Target::File(file) => {
            if file.exists() {
                File::options().append(true).open(&file)?;
            }
            match Partial::beside(&file) {
                Err(error) if in_place_instead(&error) && file.exists() => Ok(()),
                made => made.map(drop),
            }
        }
    };
    check().with_context(|| format!("open {} for writing", path.display()))
}

/// Writes a result to `path`.
pub(crate) fn write_file(path: &Path, bytes: &[u8]) -> Result<()> {
    let write = || match target(path)? {
        Target::Other => File::options().write(true).open(path)?.write_all(bytes),
        Target::File(file) => match replace(&file, bytes) {
            // In a folder that takes no other file, or mounted by itself.
            Err(error) if in_place_instead(&error) && file.exists() => overwrite(&file, bytes),
            done => done,
        },
    };
    write().with_context(|| format!("write {}", path.display()))
}

/// Writes the trace of a run in the format that Perfetto opens.
pub(crate) fn write_trace(path: &Path, trace: &Trace) -> Result<()> {
    let events: Vec<_> = trace.to_perfetto();
    let text = serde_json::to_vec(&events).context("write the trace as JSON")?;
    write_file(path, &text)
}

fn target(path: &Path) -> io::Result<Target> {
    match fs::metadata(path) {
        Ok(metadata) if metadata.is_dir() => Err(ErrorKind::IsADirectory.into()),
        Ok(metadata) if !metadata.is_file() => Ok(Target::Other),
        // What a link of /proc leads to may have no path.
        Ok(_) => Ok(fs::canonicalize(path).map_or(Target::Other, Target::File)),
        Err(error) if error.kind() == ErrorKind::NotFound => missing(path),
        Err(error) => Err(error),
    }
}

/// The file that `path` stands for, where there is none yet: links may lead to it.
fn missing(path: &Path) -> io::Result<Target> {
    let mut path = path.to_owned();
    for _ in 0..MAX_LINKS {
        match fs::read_link(&path) {
            // A link is relative to its folder.
            Ok(link) => path = path.parent().unwrap_or(Path::new("")).join(link),
            Err(_) => return Ok(Target::File(path)),
        }
    }
    Err(Errno::LOOP.into())
}

/// Replaces a file, or makes one.
fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut partial = Partial::beside(path)?;
    if let Ok(metadata) = fs::metadata(path) {
        // Renaming needs no permission to write to the file, so check that first.
        File::options().append(true).open(path)?;
        partial.file.set_permissions(metadata.permissions())?;
    }
    partial.file.write_all(bytes)?;
    // Some file systems tell only now that they are full.
    partial.file.sync_all()?;
    fs::rename(&partial.path, path)
}

/// Writes over a file; one that would be partial is left empty.
fn overwrite(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = File::options().write(true).truncate(true).open(path)?;
    let written = file.write_all(bytes);
    if written.is_err() {
        file.set_len(0)?;
    }
    written
}

/// Whether a file can be written to though none can be put in its place.
fn in_place_instead(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem | ErrorKind::ResourceBusy
    )
}

/// A file that is to take another's place. Dropping it removes it if it did not.
#[derive(Debug)]
struct Partial {
    file: File,
    path: PathBuf,
}

impl Partial {
    fn beside(path: &Path) -> io::Result<Self> {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        if path.file_name().is_none() {
            return Err(ErrorKind::InvalidFilename.into());
        }
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!(".warplink-{}-{number}.partial", std::process::id());
        let path = path.with_file_name(name);
        let file = File::create_new(&path)?;
        Ok(Self { file, path })
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        // After a rename it is gone.
        let _ = fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

    #[test]
    fn files_are_replaced_and_links_stay() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        fs::write(path("old"), "a longer text than the new one").unwrap();
        fs::set_permissions(path("old"), PermissionsExt::from_mode(0o640)).unwrap();
        symlink("old", path("link")).unwrap();
        symlink(path("link"), path("link to a link")).unwrap();
        symlink("made", path("link to nothing")).unwrap();
        let before = fs::metadata(path("old")).unwrap();
        for (written, read) in [
            ("new", "new"),
            ("link", "old"),
            ("link to a link", "old"),
            ("link to nothing", "made"),
        ] {
            let link = fs::read_link(path(written)).ok();
            check_output(&path(written)).unwrap();
            write_file(&path(written), written.as_bytes()).unwrap();
            assert_eq!(fs::read_to_string(path(read)).unwrap(), written);
            assert_eq!(fs::read_link(path(written)).ok(), link, "{written}");
        }
        let after = fs::metadata(path("old")).unwrap();
        assert_eq!(after.mode(), before.mode());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 6);
    }

    #[test]
    fn devices_pipes_and_folders_stay_what_they_are() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, mode).unwrap();
        symlink("loop", folder.path().join("loop")).unwrap();
        check_output(&pipe).unwrap();
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| fs::read(&pipe).unwrap());
            write_file(&pipe, b"text").unwrap();
            assert_eq!(reader.join().unwrap(), b"text");
        });
        write_file(Path::new("/dev/null"), b"text").unwrap();
        let full = write_file(Path::new("/dev/full"), b"text").unwrap_err();
        assert!(format!("{full:#}").contains("No space left"), "{full:#}");
        for wrong in [
            folder.path().to_owned(),
            folder.path().join("loop"),
            "/".into(),
            "".into(),
        ] {
            assert!(check_output(&wrong).is_err(), "{}", wrong.display());
            assert!(write_file(&wrong, b"text").is_err(), "{}", wrong.display());
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
    }

    #[test]
    fn a_file_without_a_path_is_written_to() {
        let file = tempfile::tempfile().unwrap();
        let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file));
        check_output(Path::new(&path)).unwrap();
        write_file(Path::new(&path), b"text").unwrap();
        assert_eq!(file.metadata().unwrap().len(), 4);
    }
}
