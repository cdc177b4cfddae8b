//! Writes results to files.
//!
//! A regular file is replaced atomically, so that nobody reads a partial file and a full disk keeps the
//! previous one. A symbolic link to it is preserved. Devices and pipes are written in place.

use anyhow::{Context, Result};
use rustix::fs::{Access, access};
use rustix::io::Errno;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use tempfile::NamedTempFile;
use warplink::program::Trace;

/// Maximum chain of symbolic links, as in the kernel.
const MAX_LINKS: usize = 40;

/// Target of a path, with symbolic links resolved.
#[derive(Debug)]
enum Target {
    /// A file to be replaced or created: its resolved path.
    File(PathBuf),
    /// A device, a pipe, or a file without path.
    Other,
}

/// Checks that a result can be written to `path`, to fail before the work rather than after. Leaves nothing
/// behind, and does not open pipes, whose reader would see end of file.
pub(crate) fn check_output(path: &Path) -> Result<()> {
    let check = || match target(path)? {
        Target::Other => Ok(access(path, Access::WRITE_OK)?),
        Target::File(file) => {
            if file.exists() {
                // Opened for appending: tests the permission without truncating.
                File::options().append(true).open(&file)?;
            }
            match partial(&file) {
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
            // The directory is not writable, or the file is a mount point.
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
        // The target of a /proc link may have no path.
        Ok(_) => Ok(fs::canonicalize(path).map_or(Target::Other, Target::File)),
        Err(error) if error.kind() == ErrorKind::NotFound => missing(path),
        Err(error) => Err(error),
    }
}

/// The file that `path` would create, following dangling links.
fn missing(path: &Path) -> io::Result<Target> {
    let mut path = path.to_owned();
    for _ in 0..MAX_LINKS {
        match fs::read_link(&path) {
            // A link is relative to its directory.
            Ok(link) => path = path.parent().unwrap_or(Path::new("")).join(link),
            // Not a link: the file that a dangling chain of links names, to be created.
            Err(_) => return Ok(Target::File(path)),
        }
    }
    Err(Errno::LOOP.into())
}

/// Replaces or creates a file.
fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut partial = partial(path)?;
    if let Ok(metadata) = fs::metadata(path) {
        // A rename does not require write permission on the file, so check that first.
        File::options().append(true).open(path)?;
        partial.as_file().set_permissions(metadata.permissions())?;
    }
    partial.write_all(bytes)?;
    // Some file systems report a full disk only on sync.
    partial.as_file().sync_all()?;
    partial.persist(path)?;
    Ok(())
}

/// Overwrites a file in place; truncates it on failure.
fn overwrite(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = File::options().write(true).truncate(true).open(path)?;
    let written = file.write_all(bytes);
    if written.is_err() {
        // An empty file instead of a partial one, which could be mistaken for the result.
        file.set_len(0)?;
    }
    written
}

/// Whether to fall back to writing in place.
fn in_place_instead(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem | ErrorKind::ResourceBusy
    )
}

/// A temporary file in the directory of `path`, to be renamed to it.
fn partial(path: &Path) -> io::Result<NamedTempFile> {
    // Such as `..`, for which a temporary file could be made, but not renamed.
    if path.file_name().is_none() {
        return Err(ErrorKind::InvalidFilename.into());
    }
    let directory = path
        .parent()
        .filter(|parent| !parent.as_os_str().is_empty());
    tempfile::Builder::new()
        .prefix(".warplink-")
        .suffix(".partial")
        // Not `tempfile_in`, whose files are private.
        // In the same directory: a rename across file systems is not possible.
        .make_in(directory.unwrap_or(Path::new(".")), |path| {
            File::create_new(path)
        })
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
