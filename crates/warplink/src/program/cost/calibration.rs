//! Measured figures of a machine, cached in a file for later jobs.

use super::figures::Figures;
use super::find;
use crate::device::{Device, DeviceIdentity, DeviceProperties, PeerAccess};
use crate::error::{Error, Result};
use crate::file;
use crate::sync::lock;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::fs;
use std::io::ErrorKind::NotFound;
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

/// Between the identities of two ranks' devices in a key.
const BETWEEN: &str = "; ";

/// Cache key of a machine: the identity of each rank's device, in rank order.
pub(crate) fn machine<'a>(devices: impl Iterator<Item = &'a str>) -> String {
    devices.collect::<Vec<_>>().join(BETWEEN)
}

/// Identity of a device, including everything that its figures depend on: also its access to the `others`' memory.
pub(crate) fn identity(
    identity: DeviceIdentity,
    properties: &DeviceProperties,
    others: &[PeerAccess],
) -> String {
    // The identity of a host's processors changes with every boot.
    let device = if properties.shared {
        String::new()
    } else {
        format!("{identity:?}")
    };
    let reached = others.iter().map(|access| match access {
        PeerAccess { mapped: false, .. } => '-',
        PeerAccess { atomics: false, .. } => 'm',
        _ => 'a',
    });
    format!(
        "{} {device} {} {} {:.0} {:.0} {}",
        properties.model,
        properties.version,
        properties.multiprocessors,
        properties.link_rate / 1e6,
        properties.clock / 1e6,
        reached.collect::<String>()
    )
}

/// Figures that a job measured.
#[derive(Clone, Debug, PartialEq)]
pub struct CachedFigures {
    /// Number of ranks of the job.
    pub ranks: usize,
    /// The figures of its slowest rank.
    pub figures: Figures,
}

/// The cached measurements of jobs whose rank 0 had `device`, by number of ranks. Reads the files of the cache; unusable
/// ones are left out.
pub fn measurements(device: &dyn Device) -> Vec<CachedFigures> {
    let own = identity(device.identity(), &device.properties(), &[]);
    let files = find::calibrations().and_then(|directory| fs::read_dir(directory).ok());
    let files = files.into_iter().flatten().flatten();
    let read = files.filter_map(|file| {
        let text = file::read_regular(&file.path(), MAX_BYTES).ok()?;
        let read: Calibration = serde_json::from_str(&text).ok()?;
        let known = read.format == FORMAT && read.figures.check().is_ok();
        (known && read.machine.starts_with(&own)).then(|| CachedFigures {
            ranks: read.machine.split(BETWEEN).count(),
            figures: read.figures,
        })
    });
    let mut all: Vec<_> = read.collect();
    all.sort_by_key(|one| one.ranks);
    all
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

fn write(path: &Path, machine: &str, figures: &Figures) -> Result<()> {
    let calibration = Calibration {
        format: FORMAT,
        machine: machine.to_owned(),
        figures: figures.clone(),
    };
    let text =
        serde_json::to_string(&calibration).map_err(|error| Error::internal(error.to_string()))?;
    file::replace(path, &[text.as_bytes()])
        .map_err(|error| Error::io(format!("write {}", path.display()), &error))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn properties() -> DeviceProperties {
        DeviceProperties {
            model: "NVIDIA H100".to_owned(),
            version: "CUDA 13.0, driver 580.95.05".to_owned(),
            multiprocessors: 132,
            cluster_blocks: 8,
            clock: 1.98e9,
            products: [1e15, 5e13],
            memory_rate: 3.3e12,
            link_rate: 450e9,
            linked: true,
            shared: false,
            kernel_copies: true,
        }
    }

    /// Whatever changes the figures of a machine changes the key of its measurement.
    #[test]
    fn another_device_has_another_key() {
        let of = |changed: &dyn Fn(&mut DeviceProperties)| {
            let mut properties = properties();
            changed(&mut properties);
            identity(DeviceIdentity([1; 16]), &properties, &[PeerAccess::FULL; 3])
        };
        let keys = [
            of(&|_| {}),
            of(&|it| it.model = "NVIDIA H100 PCIe".to_owned()),
            of(&|it| it.version = "CUDA 13.0, driver 580.105.08".to_owned()),
            of(&|it| it.multiprocessors = 66),
            of(&|it| it.link_rate = 300e9),
            of(&|it| it.clock = 1.755e9),
            identity(
                DeviceIdentity([2; 16]),
                &properties(),
                &[PeerAccess::FULL; 3],
            ),
            identity(DeviceIdentity([1; 16]), &properties(), &[PeerAccess::FULL]),
            identity(
                DeviceIdentity([1; 16]),
                &properties(),
                &[PeerAccess::NONE; 3],
            ),
            identity(
                DeviceIdentity([1; 16]),
                &properties(),
                &[PeerAccess {
                    mapped: true,
                    atomics: false,
                }; 3],
            ),
        ];
        for (index, key) in keys.iter().enumerate() {
            assert!(!keys[..index].contains(key), "{key}");
        }
        assert_eq!(keys[0], of(&|_| {}));
        // A host's identity is another one after every boot.
        let host = DeviceProperties {
            shared: true,
            ..properties()
        };
        let key = |number| identity(DeviceIdentity([number; 16]), &host, &[]);
        assert_eq!(key(1), key(2));
    }

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
