//! `warplink doctor`: checks this machine, and explains how to fix problems.
//!
//! Features are exercised rather than only queried: rank processes share memory and read it back.

mod gpus;
mod machine;
mod steps;
mod trial;

pub(crate) use steps::{TrialArgs, run_trial};
pub(crate) use trial::TRIAL_COMMAND;

use crate::names::name_of;
use crate::options::Options;
use crate::report::progress::Progress;
use crate::report::table::{Align, Table};
use crate::report::{self, Object, counted};
use anyhow::Result;
use clap::{Args, ValueEnum};
use serde::Serialize;
use std::io::{self, Write as _};
use std::path::Path;
use std::process::ExitCode;
use warplink::DeviceKind;
use warplink::device::cuda::{self, Capabilities};
use warplink::device::{self, DeviceConfig};
use warplink::program::cost::calibration::{self, CachedFigures};
use warplink::program::cost::{DeviceDescription, Figures, HardwareModel, Origin, find};

/// Check this machine, and explain how to fix problems
///
/// Starts ranks on the host device and on every GPU, and lets them share memory in every way that
/// Warplink uses. Does not change the machine.
///
/// The exit code is 0 if the device given by --device (or the default device) works, else 1. Missing
/// optional parts, such as a library that only some commands need, are listed but do not count.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    warplink doctor\n  \
    warplink doctor --device host\n  \
    warplink doctor --json > doctor.json")]
pub(crate) struct Doctor {}

/// Result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
enum CheckStatus {
    /// It works.
    Ok,
    /// It works partially or slowly.
    Warning,
    /// Missing or broken.
    Missing,
}

/// A check with its result.
#[derive(Clone, Debug, Serialize)]
struct Prerequisite {
    area: &'static str,
    name: String,
    #[serde(flatten)]
    found: Found,
    /// Device that requires it.
    #[serde(skip)]
    needed_by: Option<DeviceKind>,
}

impl Prerequisite {
    fn new(area: &'static str, name: impl Into<String>, found: Found) -> Self {
        Self {
            area,
            name: name.into(),
            found,
            needed_by: None,
        }
    }

    /// Marks the check as required by `kind`.
    fn needed_by(mut self, kind: DeviceKind) -> Self {
        self.needed_by = Some(kind);
        self
    }

    fn stops(&self, kind: DeviceKind) -> bool {
        self.found.status == CheckStatus::Missing && self.needed_by == Some(kind)
    }
}

/// Finding of a check.
#[derive(Clone, Debug, Serialize)]
struct Found {
    status: CheckStatus,
    detail: String,
    /// Remedy.
    help: Option<String>,
}

impl Found {
    fn new(status: CheckStatus, detail: impl Into<String>, help: Option<String>) -> Self {
        Self {
            status,
            detail: detail.into(),
            help,
        }
    }

    fn ok(detail: impl Into<String>) -> Self {
        Self::new(CheckStatus::Ok, detail, None)
    }

    fn warning(detail: impl Into<String>, help: impl Into<String>) -> Self {
        Self::new(CheckStatus::Warning, detail, Some(help.into()))
    }

    fn missing(detail: impl Into<String>, help: impl Into<String>) -> Self {
        Self::new(CheckStatus::Missing, detail, Some(help.into()))
    }
}

/// Output of `--json`.
#[derive(Debug, Serialize)]
struct DoctorReport {
    version: &'static str,
    device: String,
    works: bool,
    gpus: Vec<Object>,
    checks: Vec<Prerequisite>,
}

impl Doctor {
    pub(crate) fn run(self, options: &Options) -> Result<ExitCode> {
        let progress = Progress::new(4, "this machine", true);
        let mut checks = machine::checks();
        progress.step("host device");
        checks.extend(trial::on_host());
        progress.step("GPUs");
        let wanted = options.device();
        let count = device::count(DeviceKind::Cuda);
        let (gpus, found) = gpus::checks(&count);
        checks.extend(found);
        progress.step("transfers between GPUs");
        if let Ok(count @ 1..) = count {
            checks.push(gpus::environment());
            // At least two ranks, which share the GPU if there is only one: one rank alone transfers nothing.
            checks.extend(trial::on_gpus(options.ranks.unwrap_or(count).max(2), count));
        }
        checks.extend(libraries(&gpus));
        // The mappings show a preloaded library even if LD_PRELOAD has been removed from the environment since.
        let loaded = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
        let interface = interface(&loaded);
        checks.extend([
            Prerequisite::new("libraries", "NCCL's interface", interface),
            Prerequisite::new("choices", "hardware model", model(wanted)),
        ]);
        // Clears the bar before the report, which may go to the same terminal.
        drop(progress);

        let report = DoctorReport {
            version: env!("CARGO_PKG_VERSION"),
            device: wanted.to_string(),
            works: !checks.iter().any(|check| check.stops(wanted)),
            gpus: gpus.iter().map(gpus::object).collect(),
            checks,
        };
        report::print_result(options.json, &report, || report.to_text())?;
        Ok(report::exit_code(report.works))
    }
}

/// The hardware model in use on this machine, and why.
fn model(kind: DeviceKind) -> Found {
    let found = device::open(&DeviceConfig::new(kind, 0)).and_then(|device| {
        let found = HardwareModel::find(&DeviceDescription::of(&*device), 2)?;
        Ok((found, calibration::measurements(&*device)))
    });
    let measure = "measure this machine with `warplink tune`";
    match found {
        Err(error) => Found::warning(error.to_string(), error.help().unwrap_or(measure)),
        Ok(((model, Origin::Named), _)) => Found::ok(format!(
            "'{}', of the file that {} names",
            model.name,
            find::MODEL_VARIABLE
        )),
        Ok(((model, Origin::Tuned), _)) => Found::ok(format!(
            "'{}', measured by `{}` on {}",
            model.name, model.source.command, model.source.date
        )),
        Ok(((_, Origin::Derived), measured)) => match find::calibrations() {
            Some(directory) => match takes_files(&directory) {
                Ok(()) => Found::ok(format!(
                    "from the device's specifications and a short measurement by the first job of several ranks, cached in {}: {}",
                    directory.display(),
                    known(&measured)
                )),
                Err(error) => Found::warning(
                    format!(
                        "nothing can be cached in {}: {error}; each job measures the machine and compiles its kernels anew",
                        directory.display()
                    ),
                    "make it writable, or set WARPLINK_CACHE_DIR to a directory that is",
                ),
            },
            None => Found::warning(
                "from the device's specifications and a short measurement repeated by each job, since there is no cache directory",
                "set HOME or WARPLINK_CACHE_DIR",
            ),
        },
    }
}

/// Whether files can be created in `directory`, or in the nearest one above it that exists. Leaves none behind.
fn takes_files(directory: &Path) -> io::Result<()> {
    let nearest = directory.ancestors().find(|path| path.exists());
    let mut file = tempfile::tempfile_in(nearest.unwrap_or(directory))?;
    // Some bytes, since a full disk may have room for names.
    file.write_all(&[0; 4096])
}

/// The cached figures, by number of ranks.
fn known(measured: &[CachedFigures]) -> String {
    if measured.is_empty() {
        return "not measured yet".to_owned();
    }
    let text = |one: &CachedFigures| {
        let Figures {
            memory,
            put,
            stored,
            loaded,
            launch,
            ..
        } = one.figures;
        format!(
            "{} have memory {:.1}, put {:.1}, stores {:.1} and loads {:.1} GB/s, and a launch in {:.1} us",
            counted(one.ranks, "rank"),
            memory / 1e9,
            put / 1e9,
            stored / 1e9,
            loaded / 1e9,
            launch * 1e6
        )
    };
    measured.iter().map(text).collect::<Vec<_>>().join("; ")
}

/// Vendor libraries. Transfers need only the driver, which the GPU checks cover.
fn libraries(gpus: &[Capabilities]) -> Vec<Prerequisite> {
    let mut checks = Vec::new();
    // The first is the driver, which the GPU checks cover.
    for library in cuda::libraries().into_iter().skip(1) {
        let found = match library.path {
            Some(path) => Found::ok(path.display().to_string()),
            None => {
                let without = match library.name {
                    "NVRTC" => "no kernel can be compiled",
                    "cuBLASLt" => "no GEMM on a GPU, and no demo",
                    "cuBLAS" => "GEMMs for several peers run one by one",
                    "UCX" => "no writes to the memory of other machines",
                    "NVML" => "links between GPUs are not known",
                    _ => "no vendor collectives, and no comparison with them",
                };
                Found::missing(format!("not found; without it, {without}"), library.help)
            }
        };
        let is_there = found.status == CheckStatus::Ok;
        checks.push(Prerequisite::new("libraries", library.name, found));
        if library.name == "NVRTC" && is_there {
            let compiled = gpus::compile(gpus);
            checks.push(Prerequisite::new("libraries", "kernels compile", compiled));
        }
    }
    checks
}

/// Whether programs started with `loaded` libraries get Warplink for NCCL calls.
fn interface(loaded: &str) -> Found {
    let paths = loaded
        .lines()
        .filter_map(|line| line.split_whitespace().nth(5));
    let is_ours = |path: &&str| {
        let name = path.rsplit('/').next().unwrap_or_default();
        name.replace('_', "-").starts_with("libwarplink-nccl.so")
    };
    Found::ok(match paths.into_iter().find(is_ours) {
        Some(path) => format!("programs that use NCCL get Warplink, by {path}"),
        None => "programs that use NCCL get NCCL; LD_PRELOAD=libwarplink-nccl.so puts Warplink in front (docs/nccl.md)".to_owned(),
    })
}

impl DoctorReport {
    fn to_text(&self) -> String {
        let mut text = String::new();
        let mut areas: Vec<&str> = self.checks.iter().map(|check| check.area).collect();
        areas.dedup();
        for area in areas {
            let mut table = Table::new([(area, Align::Left), ("", Align::Left), ("", Align::Left)]);
            for check in self.checks.iter().filter(|check| check.area == area) {
                table.row([
                    &format!("  {}", check.name),
                    &name_of(&check.found.status),
                    &check.found.detail,
                ]);
            }
            text += &table.to_string();
            text.push('\n');
        }
        let todo = self.checks.iter();
        let todo = todo.filter_map(|check| Some((check, check.found.help.as_ref()?)));
        let todo: String = todo
            .map(|(check, help)| format!("  {}, {}: {help}\n", check.area, check.name))
            .collect();
        if !todo.is_empty() {
            text += &format!("how to fix it\n{todo}\n");
        }
        let verdict = if self.works { "works" } else { "does not work" };
        text + &format!("The {} device {verdict}.\n", self.device)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_a_device_needs_stops_it() {
        let missing = Prerequisite::new("area", "name", Found::missing("gone", "install it"));
        assert!(!missing.stops(DeviceKind::Host));
        let needed = missing.needed_by(DeviceKind::Host);
        assert!(needed.stops(DeviceKind::Host));
        assert!(!needed.stops(DeviceKind::Cuda));
        let warning = Prerequisite::new("area", "name", Found::warning("slow", "tune it"));
        assert!(!warning.needed_by(DeviceKind::Host).stops(DeviceKind::Host));
    }

    #[test]
    fn a_library_in_front_of_nccl_is_named() {
        let line = |path: &str| format!("7f00-7f01 r-xp 00000000 fe:00 12  {path}\n");
        for (path, is_ours) in [
            ("/opt/lib/libwarplink-nccl.so", true),
            ("/target/release/libwarplink_nccl.so", true),
            ("/usr/lib/libnccl.so.2", false),
            ("", false),
        ] {
            let found = interface(&(line("/usr/lib/libc.so.6") + &line(path)));
            let says = format!("get Warplink, by {path}");
            assert_eq!(found.detail.contains(&says), is_ours, "{path}");
        }
    }

    #[test]
    fn a_report_says_how_to_fix_things() {
        let report = DoctorReport {
            version: "0",
            device: "host".into(),
            works: true,
            gpus: Vec::new(),
            checks: vec![
                Prerequisite::new("one", "a", Found::ok("fine")),
                Prerequisite::new("two", "b", Found::missing("gone", "install it")),
            ],
        };
        let text = report.to_text();
        for part in [
            "one\n  a  ok  fine\n",
            "two\n  b  missing  gone\n",
            "how to fix it\n  two, b: install it\n",
            "The host device works.\n",
        ] {
            assert!(text.contains(part), "'{text}' does not contain '{part}'");
        }
    }
}
