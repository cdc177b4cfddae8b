//! Measured figures of a machine, cached in a file for later jobs.

use super::figures::Figures;
use super::find;
use crate::error::{Error, Result};
use crate::file;
use crate::sync::lock;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::fs::{self, File};
use std::io::ErrorKind::NotFound;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// Version of the file's format.
const FORMAT: u32 = 1;

/// Size limit of a file, well above that of a valid one.
const MAX_BYTES: usize = 64 << 10;

/// Figures measured by this process, for the case that the file cannot be written.
static MEASURED: Mutex<Option<HashMap<String, Figures>>> = Mutex::new(None);

#[derive(Debug, Serialize, Deserialize)]
struct Calibration {
    format: u32,
    /// Cache key: identifies the machine by every rank's device, its driver, and its links.
    machine: String,
    figures: Figures,
}

/// Cached figures for the key `machine`, if it was measured. An invalid file is ignored with a warning.
pub(crate) fn known(machine: &str) -> Option<Figures> {
    if let Some(figures) = lock(&MEASURED).as_ref().and_then(|all| all.get(machine)) {
        return Some(figures.clone());
    }
    let path = path(machine)?;
    match read(&path, machine) {
        Ok(figures) => figures,
        Err(error) => {
            tracing::warn!(%error, "the cached measurement of this machine is unusable and will be replaced");
            None
        }
    }
}

/// Caches figures for this process and later ones. If the file cannot be written, later processes measure again.
pub(crate) fn keep(machine: &str, figures: &Figures) {
    lock(&MEASURED)
        .get_or_insert_default()
        .insert(machine.to_owned(), figures.clone());
    let Some(path) = path(machine) else { return };
    if let Err(error) = write(&path, machine, figures) {
        tracing::warn!(%error, "the measurement of this machine cannot be cached; the next job will repeat it");
    }
}

/// File for a machine; `None` if there is no cache directory.
fn path(machine: &str) -> Option<PathBuf> {
    let hash = Sha256::digest(machine);
    // The key itself contains characters that file names may not.
    let name: String = hash[..8].iter().map(|byte| format!("{byte:02x}")).collect();
    Some(find::calibrations()?.join(name + ".json"))
}

fn read(path: &Path, machine: &str) -> Result<Option<Figures>> {
    let wrong =
        |message: String| Error::parse(message).with_operation(format!("read {}", path.display()));
    if fs::symlink_metadata(path).is_err_and(|error| error.kind() == NotFound) {
        return Ok(None);
    }
    let text = file::read_regular(path, MAX_BYTES)?;
    let read: Calibration =
        serde_json::from_str(&text).map_err(|error| wrong(error.to_string()))?;
    // The name is a shortened hash, so the whole key is compared.
    if read.format != FORMAT || read.machine != machine {
        return Err(wrong(
            "it has another version or machine than its name".to_owned(),
        ));
    }
    read.figures.check()?;
    Ok(Some(read.figures))
}

/// Writes to a temporary name and renames it, so that no reader sees a partial file.
fn write(path: &Path, machine: &str, figures: &Figures) -> Result<()> {
    let calibration = Calibration {
        format: FORMAT,
        machine: machine.to_owned(),
        figures: figures.clone(),
    };
    let text =
        serde_json::to_string(&calibration).map_err(|error| Error::internal(error.to_string()))?;
    let io = |error: std::io::Error| Error::io(format!("write {}", path.display()), &error);
    if let Some(directory) = path.parent() {
        fs::create_dir_all(directory).map_err(io)?;
    }
    // By process: jobs on one machine may write at the same time.
    let partial = path.with_extension(format!("{}.partial", std::process::id()));
    let written = File::create(&partial).and_then(|mut file| {
        file.write_all(text.as_bytes())?;
        fs::rename(&partial, path)
    });
    written.map_err(|error| {
        // On a full disk, a partial file may remain.
        let _ = fs::remove_file(&partial);
        io(error)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures() -> Figures {
        Figures {
            memory: 1e12,
            put: 3e11,
            stored: 3e11,
            loaded: 3e11,
            products: 5e14,
            launch: 1e-6,
        }
    }

    /// An invalid file is ignored, and its figures are measured again.
    #[test]
    fn what_does_not_fit_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("calibrated/one.json");
        assert!(read(&path, "this").unwrap().is_none());
        write(&path, "this", &figures()).unwrap();
        assert_eq!(read(&path, "this").unwrap(), Some(figures()));
        assert!(read(&path, "another").is_err());
        let whole = fs::read_to_string(&path).unwrap();
        for text in [
            String::new(),
            whole[..whole.len() / 2].to_owned(),
            whole.replace("\"format\":1", "\"format\":2"),
            whole.replace("1e-6", "-1"),
            whole.replace("300000000000.0", "1e30"),
            whole.clone() + &" ".repeat(MAX_BYTES),
        ] {
            fs::write(&path, text).unwrap();
            assert!(read(&path, "this").is_err());
        }
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        assert!(read(&path, "this").is_err());
        assert!(write(&path, "this", &figures()).is_err());
        let left = fs::read_dir(path.parent().unwrap()).unwrap().count();
        assert_eq!(left, 1, "something partial is left");
    }
}
