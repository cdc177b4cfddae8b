//! Which model describes a device: one that a user measured, a shipped one, or a guess.

use super::model::HardwareModel;
use crate::device::Device;
use crate::error::{Error, ErrorKind, Result};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

/// Names a file with the model to use, whatever the device.
pub const MODEL_VARIABLE: &str = "WARPLINK_MODEL";

/// Where caches are, when they are not where such things usually are.
const CACHE_VARIABLE: &str = "WARPLINK_CACHE_DIR";

/// The longest file that is read as a model; `warplink tune` writes some 100 KiB.
const MAX_MODEL_BYTES: usize = 16 << 20;

/// The models that come with the library. Those that name no device are guesses for all of their
/// kind.
const SHIPPED: [(&str, &str); 4] = [
    ("h200-8", include_str!("../../../models/h200-8.json")),
    ("h200-2", include_str!("../../../models/h200-2.json")),
    (
        "generic-gpu",
        include_str!("../../../models/generic-gpu.json"),
    ),
    ("host", include_str!("../../../models/host.json")),
];

/// What tells which model describes a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceDescription {
    /// Its kind, as [`DeviceKind`](crate::device::DeviceKind) is printed.
    pub kind: String,
    /// Its model, the same for all devices that are built alike.
    pub model: String,
    /// Its multiprocessors, or threads of processors.
    pub multiprocessors: usize,
}

impl DeviceDescription {
    /// That of `device`.
    pub fn of(device: &dyn Device) -> Self {
        let properties = device.properties();
        Self {
            kind: device.kind().to_string(),
            model: properties.model,
            multiprocessors: properties.multiprocessors,
        }
    }
}

impl HardwareModel {
    /// The model for `world` ranks on such devices: the file that `WARPLINK_MODEL` names; else, of
    /// the models in [`directory`], then of the shipped ones that name the device, the one measured
    /// on the nearest number of ranks; else a guess for any device of its kind.
    ///
    /// Ranks that read different files may come to different choices: give all of them the same.
    ///
    /// # Errors
    /// [`ErrorKind::Io`] or [`ErrorKind::Parse`] for a
    /// named file that cannot be read, and [`ErrorKind::Unsupported`]
    /// where there is no model at all for such a device. A file of the directory that cannot be read
    /// is passed over with a warning.
    pub fn find(device: &DeviceDescription, world: usize) -> Result<Arc<Self>> {
        if let Some(path) = crate::variables::read(MODEL_VARIABLE)?.filter(|path| !path.is_empty())
        {
            let read = Self::read(Path::new(&path)).map(Arc::new);
            let help = format!(
                "let {MODEL_VARIABLE} name a model that `warplink tune` wrote, or unset it"
            );
            return read.map_err(|error| error.with_help(help));
        }
        let measured = directory().map(|path| models_in(&path)).unwrap_or_default();
        let known = nearest(&measured, device, world, true)
            .or_else(|| nearest(all_shipped(), device, world, true));
        if let Some(model) = known {
            return Ok(model);
        }
        if let Some(guess) = nearest(all_shipped(), device, world, false) {
            return Ok(Arc::new(guess.scaled_to(device.multiprocessors)));
        }
        Err(Error::new(
            ErrorKind::Unsupported,
            format!(
                "no hardware model describes devices of kind '{}'",
                device.kind
            ),
        )
        .with_device(device.model.clone())
        .with_help("measure one with `warplink tune`"))
    }

    /// Reads the model in a regular file of 16 MiB at most.
    ///
    /// # Errors
    /// [`ErrorKind::Io`] where it cannot be read,
    /// [`ErrorKind::Parse`] where it is not a model.
    pub fn read(path: &Path) -> Result<Self> {
        let text = crate::file::read_regular(path, MAX_MODEL_BYTES)?;
        Self::from_named(&path.display().to_string(), &text)
    }

    /// A guess for a device with `multiprocessors`, from figures for another number of them.
    fn scaled_to(&self, multiprocessors: usize) -> Self {
        let mut model = self.clone();
        let multiprocessors = multiprocessors.max(1);
        let share = self.device.multiprocessors as f64 / multiprocessors as f64;
        model.device.multiprocessors = multiprocessors;
        model.memory.copy_occupancy = (self.memory.copy_occupancy * share).min(1.0);
        if !self.device.shared {
            model.memory.rate /= share;
            model.memory.sum_rate /= share;
            for grid in &mut model.gemm.grids {
                grid.seconds
                    .iter_mut()
                    .for_each(|seconds| *seconds *= share);
            }
        }
        model
    }

    /// Whether it describes such devices. With `named` it must name them; else it must be a guess.
    fn describes(&self, device: &DeviceDescription, named: bool) -> bool {
        let model = &self.device.model;
        self.device.kind == device.kind
            && model.is_empty() != named
            && device.model.to_lowercase().contains(&model.to_lowercase())
    }
}

/// Where `warplink tune` puts what it measured; none where the environment names no place for it.
pub fn directory() -> Option<PathBuf> {
    let variable = |name| {
        std::env::var_os(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    variable(CACHE_VARIABLE)
        .or_else(|| variable("XDG_CACHE_HOME").map(|path| path.join("warplink")))
        .or_else(|| variable("HOME").map(|path| path.join(".cache/warplink")))
        .filter(|path| path.is_absolute())
        .map(|path| path.join("models"))
}

/// The model that comes with the library under this name.
pub fn shipped(name: &str) -> Option<Arc<HardwareModel>> {
    let position = SHIPPED.iter().position(|(known, _)| *known == name)?;
    all_shipped().get(position).cloned()
}

/// The names of the models that come with the library.
pub fn shipped_names() -> impl Iterator<Item = &'static str> {
    SHIPPED.iter().map(|(name, _)| *name)
}

/// The models that come with the library.
pub fn all_shipped() -> &'static [Arc<HardwareModel>] {
    static MODELS: OnceLock<Vec<Arc<HardwareModel>>> = OnceLock::new();
    MODELS.get_or_init(|| {
        let read = |(name, text): &(&str, &str)| match HardwareModel::from_json(text) {
            Ok(model) => Some(Arc::new(model)),
            Err(error) => {
                tracing::warn!(%error, name, "an included hardware model is passed over");
                None
            }
        };
        SHIPPED.iter().filter_map(read).collect()
    })
}

fn models_in(directory: &Path) -> Vec<Arc<HardwareModel>> {
    let Ok(entries) = std::fs::read_dir(directory) else {
        return Vec::new();
    };
    let mut paths: Vec<PathBuf> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| {
            path.extension()
                .is_some_and(|extension| extension == "json")
        })
        .collect();
    // Every rank takes the same of several that fit as well.
    paths.sort();
    let read = |path: &PathBuf| match HardwareModel::read(path) {
        Ok(model) => Some(Arc::new(model)),
        Err(error) => {
            tracing::warn!(%error, "a hardware model is passed over");
            None
        }
    };
    paths.iter().filter_map(read).collect()
}

/// Of the `models` that describe such devices, the one measured on the nearest number of ranks.
fn nearest(
    models: &[Arc<HardwareModel>],
    device: &DeviceDescription,
    world: usize,
    named: bool,
) -> Option<Arc<HardwareModel>> {
    let distance = |model: &&Arc<HardwareModel>| model.device.ranks.abs_diff(world);
    let fitting = models.iter().filter(|model| model.describes(device, named));
    fitting.min_by_key(distance).cloned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;

    fn device(kind: &str, model: &str) -> DeviceDescription {
        DeviceDescription {
            kind: kind.to_owned(),
            model: model.to_owned(),
            multiprocessors: 100,
        }
    }

    #[test]
    fn shipped_models_are_read() {
        assert_eq!(all_shipped().len(), SHIPPED.len());
    }

    #[test]
    fn a_model_that_names_the_device_goes_before_a_guess() {
        let of = |text: &str, named| nearest(all_shipped(), &device("cuda", text), 4, named);
        let known = "NVIDIA H200";
        assert!(of(known, true).unwrap().name.contains("H200"));
        assert!(of("something new", true).is_none());
        assert!(of("something new", false).is_some());
    }

    #[test]
    fn a_guess_follows_the_number_of_multiprocessors() {
        let guess = shipped("generic-gpu").unwrap();
        let half = guess.scaled_to(guess.device.multiprocessors / 2);
        let seconds = |model: &HardwareModel| model.gemm.seconds(DType::BF16, 4096, 4096, 4096);
        assert!((seconds(&half) / seconds(&guess) - 2.0).abs() < 1e-9);
    }

    #[test]
    fn the_nearest_number_of_ranks_is_taken() {
        let of_ranks = |ranks| {
            let mut model = (*all_shipped()[0]).clone();
            model.device.ranks = ranks;
            Arc::new(model)
        };
        let models = [of_ranks(2), of_ranks(8)];
        let device = device("cuda", "NVIDIA H200");
        for (world, ranks) in [(1, 2), (2, 2), (4, 2), (6, 8), (64, 8)] {
            let model = nearest(&models, &device, world, true).unwrap();
            assert_eq!(model.device.ranks, ranks, "{world}");
        }
    }

    #[test]
    fn what_is_written_is_read_again() {
        let directory = tempfile::tempdir().unwrap();
        for model in all_shipped() {
            let path = directory.path().join("model.json");
            std::fs::write(&path, model.to_json().unwrap()).unwrap();
            assert_eq!(HardwareModel::read(&path).unwrap(), **model);
        }
        std::fs::write(directory.path().join("bad.json"), "{}").unwrap();
        assert_eq!(models_in(directory.path()).len(), 1);
        let endless = HardwareModel::read(Path::new("/dev/zero")).unwrap_err();
        assert_eq!(endless.kind(), ErrorKind::Io);
        let missing = HardwareModel::read(&directory.path().join("none")).unwrap_err();
        assert_eq!(missing.kind(), ErrorKind::Io);
    }
}
