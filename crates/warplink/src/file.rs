//! Reads files that a user or the environment names, and replaces files of caches.

#[cfg(doc)]
use crate::error::ErrorKind;
use crate::error::{Error, Result};
use rustix::fs::OFlags;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

/// Reads text of at most `limit` bytes from a file, pipe or device. Stops reading beyond the limit.
///
/// # Errors
/// [`ErrorKind::Io`] if it cannot be read or is too long, [`ErrorKind::Parse`] if it is not UTF-8.
pub fn read_text(path: &Path, limit: usize) -> Result<String> {
    read(path, limit, File::open(path))
}

/// As [`read_text`], but only from a regular file: one that several processes may read, and that never
/// blocks.
///
/// # Errors
/// As [`read_text`], and [`ErrorKind::Io`] for anything but a regular file.
pub fn read_regular(path: &Path, limit: usize) -> Result<String> {
    // Opening a pipe without O_NONBLOCK would block until it has a writer.
    let flags = OFlags::NONBLOCK.bits().cast_signed();
    let file = File::options().read(true).custom_flags(flags).open(path);
    read(path, limit, file.and_then(regular))
}

/// Replaces the file at `path` by one with `parts` in a row, and creates its directory. Writes to a temporary name and
/// renames it, so that no reader sees a partial file; threads and processes may write one path at the same time.
///
/// # Errors
/// Those of the system; nothing partial is left.
pub(crate) fn replace(path: &Path, parts: &[&[u8]]) -> io::Result<()> {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    if let Some(directory) = path.parent() {
        fs::create_dir_all(directory)?;
    }
    // Relaxed: only uniqueness within the process matters; the name also has the process id.
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let partial = path.with_extension(format!("{}-{number}.partial", std::process::id()));
    let replaced = File::create(&partial)
        .and_then(|mut file| parts.iter().try_for_each(|part| file.write_all(part)))
        .and_then(|()| fs::rename(&partial, path));
    if replaced.is_err() {
        // Report the first error; the file may not exist.
        let _ = fs::remove_file(&partial);
    }
    replaced
}

fn regular(file: File) -> io::Result<File> {
    if file.metadata()?.is_file() {
        return Ok(file);
    }
    let message = "it is not a regular file; expected one";
    Err(io::Error::new(io::ErrorKind::InvalidInput, message))
}

fn read(path: &Path, limit: usize, file: io::Result<File>) -> Result<String> {
    let failed = |error: io::Error| Error::io(format!("read {}", path.display()), &error);
    let mut bytes = Vec::new();
    let most = limit as u64 + 1;
    file.and_then(|file| file.take(most).read_to_end(&mut bytes))
        .map_err(failed)?;
    if bytes.len() > limit {
        let message = format!("the file is too long; expected at most {limit} bytes");
        return Err(failed(io::Error::new(io::ErrorKind::FileTooLarge, message)));
    }
    String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        let message = format!("byte {at} is not UTF-8; expected text");
        Error::parse(message).with_operation(format!("read {}", path.display()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ErrorKind;

    #[test]
    fn writers_of_one_path_do_not_collide() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("below/file.json");
        let write =
            |text: String| (0..50).try_for_each(|_| replace(&path, &[b"x", text.as_bytes()]));
        std::thread::scope(|scope| {
            let writers = (0..4).map(|thread: u8| scope.spawn(move || write(thread.to_string())));
            for writer in writers.collect::<Vec<_>>() {
                writer.join().unwrap().unwrap();
            }
        });
        assert_eq!(read_regular(&path, 2).unwrap().len(), 2);
        assert!(replace(&path.join("below"), &[b""]).is_err());
        let left = fs::read_dir(path.parent().unwrap()).unwrap().count();
        assert_eq!(left, 1, "something partial is left");
    }

    #[test]
    fn only_short_text_of_regular_files_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, bytes: &[u8]| {
            let path = folder.path().join(name);
            std::fs::write(&path, bytes).unwrap();
            path
        };
        let text = write("text", b"four");
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(&text, &link).unwrap();
        let pipe = folder.path().join("pipe");
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RUSR).unwrap();
        let cases = [
            (text.clone(), Ok("four")),
            (link, Ok("four")),
            (write("empty", b""), Ok("")),
            (write("long", b"fiver"), Err(ErrorKind::Io)),
            (write("binary", b"a\xff"), Err(ErrorKind::Parse)),
            (folder.path().to_owned(), Err(ErrorKind::Io)),
            (pipe, Err(ErrorKind::Io)),
            ("/dev/null".into(), Err(ErrorKind::Io)),
            ("/dev/zero".into(), Err(ErrorKind::Io)),
            (folder.path().join("none"), Err(ErrorKind::Io)),
        ];
        for (path, expected) in cases {
            let read = read_regular(&path, 4);
            let read = read.as_deref().map_err(Error::kind);
            assert_eq!(read, expected, "{}", path.display());
        }
        assert_eq!(read_text(Path::new("/dev/null"), 4).unwrap(), "");
        assert!(read_text(Path::new("/dev/zero"), 4).is_err());
        assert!(read_text(folder.path(), 4).is_err());
    }
}
