//! Selects the model of a device: one measured by a user, or one derived from device properties.

use super::figures::Figures;
use super::model::{HardwareModel, Provenance};
use crate::device::{Device, DeviceKind, DeviceProperties};
use crate::error::Result;
use crate::variables::cache_directory;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

/// Environment variable for the path of the model file to use, whatever the device.
pub const MODEL_VARIABLE: &str = "WARPLINK_MODEL";

/// Size limit of a model file; `warplink tune` writes some 100 KiB.
const MAX_MODEL_BYTES: usize = 16 << 20;

/// Models of known machines, to compare estimates with. Used only if requested by name.
const SHIPPED: [(&str, &str); 3] = [
    ("h200-8", include_str!("../../../models/h200-8.json")),
    ("h200-2", include_str!("../../../models/h200-2.json")),
    ("host", include_str!("../../../models/host.json")),
];

/// Properties that select the model of a device.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceDescription {
    /// Kind of the device.
    pub kind: DeviceKind,
    /// Properties that the device reports.
    pub properties: DeviceProperties,
}

impl DeviceDescription {
    /// Description of `device`.
    pub fn of(device: &dyn Device) -> Self {
        Self {
            kind: device.kind(),
            properties: device.properties(),
        }
    }
}

/// Origin of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Origin {
    /// File named by `WARPLINK_MODEL`.
    Named,
    /// Measurement by `warplink tune`.
    Tuned,
    /// Derived from device properties.
    Derived,
}

impl HardwareModel {
    /// The model for `world` ranks on such devices: the file named by `WARPLINK_MODEL`; otherwise, among the models
    /// in [`directory`] of devices with the same name, multiprocessors and link rate, the one measured on the nearest number of ranks; otherwise the one
    /// derived from device properties ([`derived`](Self::derived)).
    ///
    /// Ranks that read different files get different models; if ranks have to make equal choices, they agree on one
    /// ([`Executor::hardware_model`](crate::program::Executor::hardware_model)).
    ///
    /// # Errors
    /// [`ErrorKind::Io`](crate::ErrorKind::Io) or [`ErrorKind::Parse`](crate::ErrorKind::Parse) for a named file that
    /// cannot be read. An unreadable file of the directory is ignored with a warning.
    pub fn find(device: &DeviceDescription, world: usize) -> Result<(Arc<Self>, Origin)> {
        if let Some(path) = crate::variables::read(MODEL_VARIABLE)?.filter(|path| !path.is_empty())
        {
            let read = Self::read(Path::new(&path)).map(Arc::new);
            let help = format!(
                "let {MODEL_VARIABLE} name a model that `warplink tune` wrote, or unset it"
            );
            let read = read.map_err(|error| error.with_help(help))?;
            return Ok((read, Origin::Named));
        }
        let measured = directory().map(|path| models_in(&path)).unwrap_or_default();
        if let Some(model) = nearest(&measured, device, world) {
            return Ok((model, Origin::Tuned));
        }
        let figures = Figures::expected(&device.properties);
        let source = "the device's properties; `warplink tune` measures it";
        let model = Self::of_figures(device, &figures, world, source);
        Ok((Arc::new(model), Origin::Derived))
    }

    /// Model derived from figures; `source` documents their origin.
    pub(crate) fn of_figures(
        device: &DeviceDescription,
        figures: &Figures,
        world: usize,
        source: &str,
    ) -> Self {
        Self {
            source: Provenance {
                notes: source.to_owned(),
                ..Provenance::default()
            },
            ..Self::derived(device.kind, &device.properties, figures, world)
        }
    }

    /// Reads the model in a regular file of 16 MiB at most.
    ///
    /// # Errors
    /// [`ErrorKind::Io`](crate::ErrorKind::Io) if it cannot be read, [`ErrorKind::Parse`](crate::ErrorKind::Parse) if
    /// it is not a model.
    pub fn read(path: &Path) -> Result<Self> {
        let text = crate::file::read_regular(path, MAX_MODEL_BYTES)?;
        Self::from_named(&path.display().to_string(), &text)
    }

    /// Whether it was measured on such devices: of the same name, multiprocessors and link rate, as far as the model has
    /// them.
    fn describes(&self, device: &DeviceDescription) -> bool {
        let (own, properties) = (&self.device, &device.properties);
        // Rates are read from text, and reported in steps that are coarser than this.
        let close = |rate: f64| (rate - properties.link_rate).abs() <= 0.01 * rate;
        self.names(device)
            && own.model.to_lowercase() == properties.model.to_lowercase()
            && own.multiprocessors == properties.multiprocessors
            && (own.link_rate <= 0.0 || close(own.link_rate))
    }

    /// Whether its name is a part of the device's.
    fn names(&self, device: &DeviceDescription) -> bool {
        let name = self.device.model.to_lowercase();
        self.device.kind == device.kind.to_string()
            && !name.is_empty()
            && device.properties.model.to_lowercase().contains(&name)
    }
}

/// Output directory of `warplink tune`; `None` if the environment specifies none.
pub fn directory() -> Option<PathBuf> {
    Some(cache_directory()?.join("models"))
}

/// Directory of cached figures that jobs measured; `None` if the environment specifies none.
pub fn calibrations() -> Option<PathBuf> {
    Some(directory()?.join("calibrated"))
}

/// The shipped model with this name.
pub fn shipped(name: &str) -> Option<Arc<HardwareModel>> {
    let position = SHIPPED.iter().position(|(known, _)| *known == name)?;
    all_shipped().get(position).cloned()
}

/// Names of the shipped models.
pub fn shipped_names() -> impl Iterator<Item = &'static str> {
    SHIPPED.iter().map(|(name, _)| *name)
}

/// All shipped models.
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
    // Sorted, so that every rank chooses the same one of several equally near models.
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

/// Among the `models` that describe such devices, the one measured on the nearest number of ranks. Warns of models of
/// similar devices where there is none.
fn nearest(
    models: &[Arc<HardwareModel>],
    device: &DeviceDescription,
    world: usize,
) -> Option<Arc<HardwareModel>> {
    let distance = |model: &&Arc<HardwareModel>| model.device.ranks.abs_diff(world);
    let fitting = models.iter().filter(|model| model.describes(device));
    let found = fitting.min_by_key(distance).cloned();
    if let (None, Some(similar)) = (&found, models.iter().find(|model| model.names(device))) {
        let (its, own) = (&similar.device, &device.properties);
        tracing::warn!(
            model = %similar.name,
            "the tuned model is of another device and is passed over: {}, {} multiprocessors, link {:.0} MB/s; this one is \
             {}, {}, {:.0}; run `warplink tune`",
            its.model,
            its.multiprocessors,
            its.link_rate / 1e6,
            own.model,
            own.multiprocessors,
            own.link_rate / 1e6,
        );
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    fn device(model: &str) -> DeviceDescription {
        DeviceDescription {
            kind: DeviceKind::Cuda,
            properties: DeviceProperties {
                model: model.to_owned(),
                version: String::new(),
                multiprocessors: 132,
                cluster_blocks: 1,
                clock: 0.0,
                products: [0.0; 2],
                memory_rate: 0.0,
                link_rate: 0.0,
                linked: false,
                shared: false,
                kernel_copies: true,
            },
        }
    }

    #[test]
    fn shipped_models_are_read() {
        assert_eq!(all_shipped().len(), SHIPPED.len());
    }

    #[test]
    fn a_model_is_for_devices_that_are_the_same() {
        let mut model = (*all_shipped()[0]).clone();
        model.device.model = "NVIDIA H100 80GB HBM3".to_owned();
        model.device.link_rate = 450e9;
        let models = [Arc::new(model)];
        let of = |name: &str, multiprocessors, link_rate| {
            let mut device = device(name);
            device.properties.multiprocessors = multiprocessors;
            device.properties.link_rate = link_rate;
            nearest(&models, &device, 4).is_some()
        };
        let name = "NVIDIA H100 80GB HBM3";
        assert!(of(name, 132, 450e9) && of(name, 132, 449e9));
        for (other, multiprocessors, link_rate) in [
            ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 16, 0.0),
            ("NVIDIA H100 80GB HBM3 MIG 7g.80gb", 132, 450e9),
            ("NVIDIA H100 PCIe", 114, 450e9),
            (name, 114, 450e9),
            (name, 132, 63e9),
            ("something new", 132, 450e9),
        ] {
            assert!(!of(other, multiprocessors, link_rate), "{other}");
        }
    }

    #[test]
    fn the_nearest_number_of_ranks_is_taken() {
        let of_ranks = |ranks| {
            let mut model = (*all_shipped()[0]).clone();
            model.device.ranks = ranks;
            model.device.model = "NVIDIA H200".to_owned();
            Arc::new(model)
        };
        let models = [of_ranks(2), of_ranks(8)];
        let device = device("NVIDIA H200");
        for (world, ranks) in [(1, 2), (2, 2), (4, 2), (6, 8), (64, 8)] {
            let model = nearest(&models, &device, world).unwrap();
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
